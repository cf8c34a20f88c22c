// The arithmetic between products for one instruction set, one row at a time. Included by elementwise_<variant>.cpp.
#include "elementwise.h"
#include "elementwise_vector.h"

namespace octavo {
namespace OCTAVO_VARIANT {

OCTAVO_INLINE void rms_norm_to(const float* x, const float* weight, float epsilon, int64_t size, float* y, bool adds) {
  vec sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};  // four chains: an fma has a latency of four cycles
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W) {
    OCTAVO_UNROLL for (int j = 0; j < 4; ++j) {
      const vec a = load(x + i + j * W);
      sums[j] = fma(a, a, sums[j]);
    }
  }
  for (; i < size; i += W) {
    const vec a = size - i >= W ? load(x + i) : load_n(x + i, (int)(size - i));
    sums[0] = fma(a, a, sums[0]);
  }
  const float squares = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const vec factor = set1(1.0f / __builtin_sqrtf(squares / (float)size + epsilon));
  for (i = 0; i + W <= size; i += W) {
    const vec normed = mul(mul(load(x + i), factor), load(weight + i));
    store(y + i, adds ? add(load(y + i), normed) : normed);
  }
  if (i < size) {
    const int n = (int)(size - i);
    const vec normed = mul(mul(load_n(x + i, n), factor), load_n(weight + i, n));
    store_n(y + i, adds ? add(load_n(y + i, n), normed) : normed, n);
  }
}

static void rms_norm(const float* x, const float* weight, float epsilon, int64_t size, float* y) {
  rms_norm_to(x, weight, epsilon, size, y, false);
}

static void rms_norm_add(const float* x, const float* weight, float epsilon, int64_t size, float* y) {
  rms_norm_to(x, weight, epsilon, size, y, true);
}

OCTAVO_INLINE vec capped(vec a, float limit) { return mul(set1(limit), tangent(div(a, set1(limit)))); }

static void cap(float* x, int64_t size, float limit) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(x + i, capped(load(x + i), limit));
  if (i < size) store_n(x + i, capped(load_n(x + i, (int)(size - i)), limit), (int)(size - i));
}

OCTAVO_INLINE vec gated(vec gate, vec up) {
  const vec decay = exponential(sub(set1(0.0f), gate));
  return mul(div(gate, add(set1(1.0f), decay)), up);
}

static void silu_mul(const float* gate, const float* up, int64_t size, float* y) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(y + i, gated(load(gate + i), load(up + i)));
  if (i < size) {
    const int n = (int)(size - i);
    store_n(y + i, gated(load_n(gate + i, n), load_n(up + i, n)), n);
  }
}

// NaN stays NaN: min and max return the second operand if either is NaN.
OCTAVO_INLINE vec gated_within(vec gate, vec up, vec alpha, vec limit, vec offset) {
  const vec g = min(limit, gate), u = max(sub(set1(0.0f), limit), min(limit, up));
  const vec decay = exponential(sub(set1(0.0f), mul(alpha, g)));
  return mul(div(g, add(set1(1.0f), decay)), add(u, offset));
}

static void gate(const float* gate, const float* up, float alpha, float limit, float offset, int64_t size, float* y) {
  const vec a = set1(alpha), l = set1(limit != 0.0f ? limit : __builtin_inff()), o = set1(offset);
  int64_t i = 0;
  for (; i + W <= size; i += W) store(y + i, gated_within(load(gate + i), load(up + i), a, l, o));
  if (i < size) {
    const int n = (int)(size - i);
    store_n(y + i, gated_within(load_n(gate + i, n), load_n(up + i, n), a, l, o), n);
  }
}

static constexpr ElementwiseVariant elementwise = {rms_norm, rms_norm_add, cap, silu_mul, gate};

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
