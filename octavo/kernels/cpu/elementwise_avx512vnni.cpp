// Elementwise operations for AVX-512.
#if defined(__x86_64__)
#define OCTAVO_AVX512
#define OCTAVO_VARIANT avx512
#include "elementwise_body.h"

namespace octavo {
extern const ElementwiseVariant elementwise_avx512 = avx512::elementwise;
}
#endif
