// The product kernels for aarch64 CPUs with dot products of signed bytes (FEAT_DotProd). product_kernel.h has tiles and
// layouts, product_lanes_neon.h the operations.
#include "product.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdlib.h>
#include <string.h>

namespace octavo {
namespace {

#include "product_lanes_neon.h"

struct Lanes : NeonLanes {
  // 32 registers: four rows and one panel take 16 integer sums. The float sums lie in memory and are loaded once in a group.
  static constexpr int kPackedRows = 4;
  static constexpr bool kPairs = false, kCentres = true;

  template <bool SMALL>
  static OCTAVO_EACH Ints dot(Ints sum, Bytes weights, Bytes x) {
    return ints([&](int i) {
      const uint8x16_t w = SMALL ? weights.v[i] : veorq_u8(weights.v[i], vdupq_n_u8(128));
      return vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x.v[i]));
    });
  }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductDotprod;
const ProductKernels kProductDotprod = {"dotprod",     Lanes::kPackedRows, Lanes::kFloatRows,
                                        prepare_share, prepare_row, product_share, finish_row, row_panels,
                                        add_row,       read_all,    dot_all};

}  // namespace octavo
#endif
