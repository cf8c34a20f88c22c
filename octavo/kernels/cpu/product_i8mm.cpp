// The product kernels for aarch64 CPUs with products of byte matrices (FEAT_I8MM). product_kernel.h has tiles and layouts,
// product_lanes_neon.h the operations.
#include "product.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdlib.h>
#include <string.h>

namespace octavo {
namespace {

#include "product_lanes_neon.h"

struct Lanes : NeonLanes {
  // 32 registers: four rows and one panel take 16 integer sums, which leaves room for 8 blocks of weights.
  static constexpr int kPackedRows = 4;
  static constexpr bool kPairs = true, kCentres = false;

  template <bool SMALL>
  static OCTAVO_EACH Ints dot(Ints sum, Bytes weights, Bytes x) {
    return ints([&](int i) { return vusdotq_s32(sum.v[i], weights.v[i], vreinterpretq_s8_u8(x.v[i])); });
  }

  // Two rows are multiplied at once: an instruction multiplies a block, 2 columns × 8 K-values, by 8 K-values of 2 rows.
  struct Blocks {
    uint8x16_t v[8];  // of 2 columns each
  };
  // Columns × K-values 4j … 4j+3, and columns × K-values 4j+4 … 4j+7.
  static OCTAVO_EACH Blocks blocks(Bytes low, Bytes high) {
    const auto first = [&](int i) {
      return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(low.v[i]), vreinterpretq_u32_u8(high.v[i])));
    };
    const auto second = [&](int i) {
      return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(low.v[i]), vreinterpretq_u32_u8(high.v[i])));
    };
    return {{first(0), second(0), first(1), second(1), first(2), second(2), first(3), second(3)}};
  }
  // The sums of two rows, from lanes of columns to blocks of 2 columns × 2 rows, and back.
  static OCTAVO_EACH void pair(Ints& one, Ints& other) {
    const Ints a = one, b = other;
    one = ints([&](int i) { return i % 2 ? vzip2q_s32(a.v[i / 2], b.v[i / 2]) : vzip1q_s32(a.v[i / 2], b.v[i / 2]); });
    other = ints([&](int i) {
      return i % 2 ? vzip2q_s32(a.v[2 + i / 2], b.v[2 + i / 2]) : vzip1q_s32(a.v[2 + i / 2], b.v[2 + i / 2]);
    });
  }
  static OCTAVO_EACH void unpair(Ints& one, Ints& other) {
    const Ints a = one, b = other;
    one = {{vuzp1q_s32(a.v[0], a.v[1]), vuzp1q_s32(a.v[2], a.v[3]), vuzp1q_s32(b.v[0], b.v[1]), vuzp1q_s32(b.v[2], b.v[3])}};
    other = {{vuzp2q_s32(a.v[0], a.v[1]), vuzp2q_s32(a.v[2], a.v[3]), vuzp2q_s32(b.v[0], b.v[1]), vuzp2q_s32(b.v[2], b.v[3])}};
  }
  // one, other: paired sums. x, y: 8 codes of each row.
  static OCTAVO_EACH void dot_pair(Ints& one, Ints& other, const Blocks& weights, const int8_t* x, const int8_t* y) {
    const int8x16_t both = vcombine_s8(vld1_s8(x), vld1_s8(y));
    const Ints a = one, b = other;
    one = ints([&](int i) { return vusmmlaq_s32(a.v[i], weights.v[i], both); });
    other = ints([&](int i) { return vusmmlaq_s32(b.v[i], weights.v[4 + i], both); });
  }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductI8mm;
const ProductKernels kProductI8mm = {"i8mm",        Lanes::kPackedRows, Lanes::kFloatRows,
                                     prepare_share, prepare_row, product_share, finish_row, row_panels,
                                     add_row,       read_all,    dot_all};

}  // namespace octavo
#endif
