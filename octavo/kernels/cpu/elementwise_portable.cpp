// Elementwise operations for any CPU.
#define OCTAVO_VARIANT portable
#include "elementwise_body.h"

namespace octavo {
extern const ElementwiseVariant elementwise_portable = portable::elementwise;
}
