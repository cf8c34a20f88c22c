// Sampling for any aarch64 CPU.
#if defined(__aarch64__)
#define OCTAVO_NEON
#define OCTAVO_VARIANT neon
#include "sampling_body.h"

namespace octavo {
extern const SamplingVariant sampling_neon = neon::sampling;
}
#endif
