// The product kernels in plain C++, for any CPU: lanes are arrays, and the compiler does what it can with them.
// Knows nothing of tiles and layouts: product_kernel.h does.
#include "product.h"

#include <math.h>
#include <string.h>

namespace octavo {
namespace {

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  uint32_t bits;
  if (exponent == 0) {
    const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2⁻²⁴: subnormals, and zero
    memcpy(&bits, &small, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct Lanes {
  struct Floats {
    float v[16];
  };
  struct Ints {
    int32_t v[16];
  };
  struct Bytes {
    uint8_t v[64];
  };
  static constexpr int kPackedRows = 2;
  static constexpr int kFloatRows = 2;

  template <typename Function>
  static Floats each(Function function) {
    Floats out;
    for (int i = 0; i < 16; ++i) out.v[i] = function(i);
    return out;
  }
  template <typename Function>
  static Ints each_int(Function function) {
    Ints out;
    for (int i = 0; i < 16; ++i) out.v[i] = function(i);
    return out;
  }

  static Floats splat(float value) { return each([&](int) { return value; }); }
  static Floats load(const float* at) { return each([&](int i) { return at[i]; }); }
  static void store(float* at, Floats x) { memcpy(at, x.v, sizeof(x.v)); }
  static Floats load_halves(const void* at) {
    return each([&](int i) { return half_to_float(static_cast<const uint16_t*>(at)[i]); });
  }
  static Floats as_floats(Ints x) {
    Floats out;
    memcpy(out.v, x.v, sizeof(out.v));
    return out;
  }
  // The halves of 16 pairs of bfloat16.
  static Floats widen_low(Ints pairs) {
    return as_floats(each_int([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(pairs.v[i]) << 16); }));
  }
  static Floats widen_high(Ints pairs) {
    return as_floats(each_int([&](int i) { return static_cast<int32_t>(pairs.v[i] & 0xffff0000u); }));
  }
  static Floats add(Floats x, Floats y) { return each([&](int i) { return x.v[i] + y.v[i]; }); }
  static Floats mul(Floats x, Floats y) { return each([&](int i) { return x.v[i] * y.v[i]; }); }
  static Floats div(Floats x, Floats y) { return each([&](int i) { return x.v[i] / y.v[i]; }); }
  static Floats fma(Floats x, Floats y, Floats z) { return each([&](int i) { return fmaf(x.v[i], y.v[i], z.v[i]); }); }
  static Floats least(Floats x, Floats y) { return each([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; }); }
  static Floats greatest(Floats x, Floats y) { return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
  // The largest absolute value of both: as integers, where NaN lies above infinity and that above all else.
  static float largest_size(Floats x, Floats y) {
    int32_t bits[32], most = 0;
    memcpy(bits, x.v, 64);
    memcpy(bits + 16, y.v, 64);
    for (int32_t value : bits) most = most > (value & 0x7fffffff) ? most : value & 0x7fffffff;
    float largest;
    memcpy(&largest, &most, 4);
    return largest;
  }

  static Ints splat_int(int32_t value) { return each_int([&](int) { return value; }); }
  static Ints load_ints(const void* at) {
    Ints out;
    memcpy(out.v, at, 64);
    return out;
  }
  static Ints add_ints(Ints x, Ints y) {
    return each_int([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) + static_cast<uint32_t>(y.v[i])); });
  }
  static int32_t total(Ints x) {
    uint32_t sum = 0;
    for (int32_t value : x.v) sum += static_cast<uint32_t>(value);
    return static_cast<int32_t>(sum);
  }
  template <int COUNT>
  static Ints shift_left(Ints x) { return each_int([&](int i) { return x.v[i] * (1 << COUNT); }); }
  static Ints nearest(Floats x) { return each_int([&](int i) { return static_cast<int32_t>(nearbyintf(x.v[i])); }); }
  static Floats to_float(Ints x) { return each([&](int i) { return static_cast<float>(x.v[i]); }); }
  static Floats power_of_two(Ints n) { return each([&](int i) { return ldexpf(1.0f, n.v[i]); }); }
  static void store_codes(int8_t* at, Ints x) {
    for (int i = 0; i < 16; ++i) at[i] = static_cast<int8_t>(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
  }

  // The compiler must not reason about it.
  template <typename Vector>
  static void keep(Vector& x) { __asm__ volatile("" : "+m"(x)); }

  static Bytes load_bytes(const void* at) {
    Bytes out;
    memcpy(out.v, at, 64);
    return out;
  }
  static Bytes splat_bytes(const int8_t* four) {
    Bytes out;
    for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(four[i & 3]);
    return out;
  }
  static Bytes low_halves(Bytes x) {
    for (uint8_t& byte : x.v) byte &= 15;
    return x;
  }
  static Bytes high_halves(Bytes x) {
    for (uint8_t& byte : x.v) byte >>= 4;
    return x;
  }
  template <bool HALVES>
  static Ints dot(Ints sum, Bytes weights, Bytes x) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 4; ++j) sum.v[i] += weights.v[4 * i + j] * static_cast<int8_t>(x.v[4 * i + j]);
    }
    return sum;
  }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductPortable;
const ProductKernels kProductPortable = {"portable",    Lanes::kPackedRows, Lanes::kFloatRows,
                                         prepare_share, quantise, product_share, read_all, dot_all};

}  // namespace octavo
