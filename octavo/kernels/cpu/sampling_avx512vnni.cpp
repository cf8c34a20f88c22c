// Sampling for AVX-512.
#if defined(__x86_64__)
#define OCTAVO_AVX512
#define OCTAVO_VARIANT avx512
#include "sampling_body.h"

namespace octavo {
extern const SamplingVariant sampling_avx512 = avx512::sampling;
}
#endif
