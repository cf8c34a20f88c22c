// Attention for any aarch64 CPU.
#if defined(__aarch64__)
#define OCTAVO_NEON
#define OCTAVO_VARIANT neon
#include "attention_body.h"

namespace octavo {
extern const AttentionVariant attention_neon = neon::variant;
}
#endif
