// Attention for AVX-512.
#if defined(__x86_64__)
#define OCTAVO_AVX512
#define OCTAVO_VARIANT avx512
#include "attention_body.h"

namespace octavo {
extern const AttentionVariant attention_avx512 = avx512::variant;
}
#endif
