// The product kernels for any aarch64 CPU. product_kernel.h has tiles and layouts, product_lanes_neon.h the operations.
#include "product.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdlib.h>
#include <string.h>

namespace octavo {
namespace {

#include "product_lanes_neon.h"

struct Lanes : NeonLanes {
  // 32 registers: two rows and one panel take 8 integer sums, which leaves room for a dot's products.
  static constexpr int kPackedRows = 2;
  static constexpr bool kPairs = false, kCentres = true;

  // Weights as signed bytes: those of 8 bits less 128. A sum of two products is at most 2 · 128 · 127 and fits into 16 bits.
  template <bool SMALL>
  static OCTAVO_EACH Ints dot(Ints sum, Bytes weights, Bytes x) {
    return ints([&](int i) {
      const int8x16_t w = vreinterpretq_s8_u8(SMALL ? weights.v[i] : veorq_u8(weights.v[i], vdupq_n_u8(128)));
      const int8x16_t y = vreinterpretq_s8_u8(x.v[i]);
      const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(y)), high = vmull_high_s8(w, y);
      return vpadalq_s16(sum.v[i], vpaddq_s16(low, high));
    });
  }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductNeon;
const ProductKernels kProductNeon = {"neon",        Lanes::kPackedRows, Lanes::kFloatRows,
                                     prepare_share, prepare_row, product_share, finish_row, row_panels,
                                     add_row,       read_all,    dot_all};

}  // namespace octavo
#endif
