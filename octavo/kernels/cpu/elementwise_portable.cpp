// Elementwise for portable. Knows nothing of which machine it runs on.
#define OCTAVO_VARIANT portable
#include "elementwise_body.h"

namespace octavo {
extern const ElementwiseVariant elementwise_portable = portable::elementwise;
}
