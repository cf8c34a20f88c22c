// Attention for AVX2.
#if defined(__x86_64__)
#define OCTAVO_AVX2
#define OCTAVO_VARIANT avx2
#include "attention_body.h"

namespace octavo {
extern const AttentionVariant attention_avx2 = avx2::variant;
}
#endif
