// Sampling for AVX2.
#if defined(__x86_64__)
#define OCTAVO_AVX2
#define OCTAVO_VARIANT avx2
#include "sampling_body.h"

namespace octavo {
extern const SamplingVariant sampling_avx2 = avx2::sampling;
}
#endif
