// Sampling for any CPU.
#define OCTAVO_VARIANT portable
#include "sampling_body.h"

namespace octavo {
extern const SamplingVariant sampling_portable = portable::sampling;
}
