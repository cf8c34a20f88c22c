// Sampling for portable. Knows nothing of which machine it runs on.
#define OCTAVO_VARIANT portable
#include "sampling_body.h"

namespace octavo {
extern const SamplingVariant sampling_portable = portable::sampling;
}
