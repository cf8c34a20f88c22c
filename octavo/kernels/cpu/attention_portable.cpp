// Attention for portable. Knows nothing of which machine it runs on.
#define OCTAVO_VARIANT portable
#include "attention_body.h"

namespace octavo {
extern const AttentionVariant attention_portable = portable::variant;
}
