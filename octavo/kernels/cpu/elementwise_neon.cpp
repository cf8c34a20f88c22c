// Elementwise operations for any aarch64 CPU.
#if defined(__aarch64__)
#define OCTAVO_NEON
#define OCTAVO_VARIANT neon
#include "elementwise_body.h"

namespace octavo {
extern const ElementwiseVariant elementwise_neon = neon::elementwise;
}
#endif
