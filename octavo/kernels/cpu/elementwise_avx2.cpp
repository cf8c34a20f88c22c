// Elementwise operations for AVX2.
#if defined(__x86_64__)
#define OCTAVO_AVX2
#define OCTAVO_VARIANT avx2
#include "elementwise_body.h"

namespace octavo {
extern const ElementwiseVariant elementwise_avx2 = avx2::elementwise;
}
#endif
