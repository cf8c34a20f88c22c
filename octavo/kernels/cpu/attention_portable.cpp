// Attention for any CPU.
#define OCTAVO_VARIANT portable
#include "attention_body.h"

namespace octavo {
extern const AttentionVariant attention_portable = portable::variant;
}
