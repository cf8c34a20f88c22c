// The product kernels in the compiler's vector extension, for any little-endian CPU: 16 lanes are four vectors of four.
// product_kernel.h has tiles and layouts.
#include "product.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

namespace octavo {
namespace {

typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef uint32_t FourWords __attribute__((vector_size(16)));
typedef int16_t EightShorts __attribute__((vector_size(16)));

template <typename Vector, typename Function>
inline __attribute__((always_inline)) Vector each(Function function) {
  Vector out;
  for (int i = 0; i < 4; ++i) out.v[i] = function(i);
  return out;
}

struct Lanes {
  struct Floats {
    FourFloats v[4];
  };
  struct Ints {
    FourInts v[4];
  };
  struct Bytes {
    FourWords v[4];
  };
  static constexpr int kPackedRows = 1;
  static constexpr int kFloatRows = 2;
  static constexpr bool kByPanel = false, kPairs = false, kCentres = false;

  template <typename Vector>
  static Vector load_any(const void* at) {
    Vector out;
    memcpy(out.v, at, 64);
    return out;
  }
  template <typename Function>
  static Floats floats(Function function) { return each<Floats>(function); }
  template <typename Function>
  static Ints ints(Function function) { return each<Ints>(function); }
  template <typename Function>
  static Bytes bytes(Function function) { return each<Bytes>(function); }

  static Floats splat(float value) { return floats([&](int) { return FourFloats{value, value, value, value}; }); }
  static Floats load(const float* at) { return load_any<Floats>(at); }
  static void store(float* at, Floats x) { memcpy(at, x.v, 64); }
  static Floats load_halves(const void* at) {
    const uint16_t* halves = static_cast<const uint16_t*>(at);
    return floats([&](int i) {
      const FourInts half = {halves[4 * i], halves[4 * i + 1], halves[4 * i + 2], halves[4 * i + 3]};
      // The exponent biases differ by 112; the product is right for subnormals too. Not finite: all exponent bits are set.
      const FourFloats size = (FourFloats)((half & 0x7fff) << 13) * 5.192296858534828e33f;
      const FourInts not_finite = ((half & 0x7c00) == 0x7c00) & 0x7f800000;
      return (FourFloats)((FourInts)size | not_finite | (half & 0x8000) << 16);
    });
  }
  static Floats load_small(const void* at) {  // 16 signed bytes
    const int8_t* small = static_cast<const int8_t*>(at);
    return floats([&](int i) {
      const FourInts four = {small[4 * i], small[4 * i + 1], small[4 * i + 2], small[4 * i + 3]};
      return __builtin_convertvector(four, FourFloats);
    });
  }
  // The low or high halves of 16 pairs of bfloat16.
  static Floats widen_low(Ints pairs) {
    return floats([&](int i) { return (FourFloats)((FourWords)pairs.v[i] << 16); });
  }
  static Floats widen_high(Ints pairs) {
    return floats([&](int i) { return (FourFloats)((FourWords)pairs.v[i] & 0xffff0000u); });
  }
  static Floats add(Floats x, Floats y) { return floats([&](int i) { return x.v[i] + y.v[i]; }); }
  static Floats mul(Floats x, Floats y) { return floats([&](int i) { return x.v[i] * y.v[i]; }); }
  static Floats div(Floats x, Floats y) { return floats([&](int i) { return x.v[i] / y.v[i]; }); }
  // Sixteen calls if the compiler may not assume FMA: not inlined, or they would be most of the code.
#if !defined(__FP_FAST_FMAF)
  __attribute__((noinline))
#endif
  static Floats fma(Floats x, Floats y, Floats z) {
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) z.v[i][j] = fmaf(x.v[i][j], y.v[i][j], z.v[i][j]);
    return z;
  }
  static FourFloats choose(FourInts which, FourFloats yes, FourFloats no) {
    return (FourFloats)(((FourInts)yes & which) | ((FourInts)no & ~which));
  }
  static Floats least(Floats x, Floats y) {
    return floats([&](int i) { return choose(x.v[i] < y.v[i], x.v[i], y.v[i]); });
  }
  static Floats greatest(Floats x, Floats y) {
    return floats([&](int i) { return choose(x.v[i] > y.v[i], x.v[i], y.v[i]); });
  }
  // The largest absolute value of both, compared as integers: NaN is above infinity, which is above all numbers.
  static float largest_size(Floats x, Floats y) {
    int32_t bits[32], most = 0;
    memcpy(bits, x.v, 64);
    memcpy(bits + 16, y.v, 64);
    for (int32_t value : bits) most = most > (value & 0x7fffffff) ? most : value & 0x7fffffff;
    float largest;
    memcpy(&largest, &most, 4);
    return largest;
  }

  static Ints splat_int(int32_t value) { return ints([&](int) { return FourInts{value, value, value, value}; }); }
  static Ints load_ints(const void* at) { return load_any<Ints>(at); }
  static Ints add_ints(Ints x, Ints y) {
    return ints([&](int i) { return (FourInts)((FourWords)x.v[i] + (FourWords)y.v[i]); });
  }
  static int32_t total(Ints x) {
    const FourWords sum = (FourWords)x.v[0] + (FourWords)x.v[1] + (FourWords)x.v[2] + (FourWords)x.v[3];
    return static_cast<int32_t>(sum[0] + sum[1] + sum[2] + sum[3]);
  }
  // Byte J of each lane.
  template <int J>
  static Ints byte_of(Bytes x) {
    return ints([&](int i) { return (FourInts)((load_any<Ints>(&x).v[i] >> 8 * J) & 255); });
  }
  static constexpr bool kPicks = false;
  template <int COUNT>
  static Ints shift_left(Ints x) { return ints([&](int i) { return x.v[i] * (1 << COUNT); }); }
  // For |x| < 2²².
  static Ints nearest(Floats x) {
    return ints([&](int i) { return __builtin_convertvector((x.v[i] + 12582912.0f) - 12582912.0f, FourInts); });
  }
  static Floats to_float(Ints x) { return floats([&](int i) { return __builtin_convertvector(x.v[i], FourFloats); }); }
  static Floats power_of_two(Ints n) { return floats([&](int i) { return (FourFloats)((n.v[i] + 127) << 23); }); }
  static void store_codes(int8_t* at, Ints x) {  // within −127 … 127
    for (int i = 0; i < 16; ++i) at[i] = static_cast<int8_t>(x.v[i / 4][i % 4]);
  }

  // Hides the value from the optimiser.
  template <typename Vector>
  static void keep(Vector& x) { __asm__ volatile("" : "+m"(x)); }

  static Bytes load_bytes(const void* at) { return load_any<Bytes>(at); }
  static Bytes splat_bytes(const int8_t* four) {
    uint32_t all;
    memcpy(&all, four, 4);
    return bytes([&](int) { return FourWords{all, all, all, all}; });
  }
  static Bytes low_halves(Bytes x) { return bytes([&](int i) { return x.v[i] & 0x0f0f0f0fu; }); }
  static Bytes high_halves(Bytes x) { return bytes([&](int i) { return x.v[i] >> 4 & 0x0f0f0f0fu; }); }
  static Bytes move_down(Bytes x, int count) { return bytes([&](int i) { return x.v[i] >> count; }); }
  static Bytes no_bytes() { return bytes([](int) { return FourWords{}; }); }
  // Looks up each byte, which is below 16, in a table.
  static Bytes look_up(const uint8_t* table, Bytes x) {
    uint8_t codes[64];
    memcpy(codes, x.v, 64);
    for (uint8_t& code : codes) code = table[code];
    return load_bytes(codes);
  }
  // weights | (plane shifted by SHIFT & MASK), in every byte
  template <int SHIFT, int MASK>
  static Bytes with_bits(Bytes weights, Bytes plane) {
    constexpr int left = SHIFT > 0 ? SHIFT : 0, right = SHIFT < 0 ? -SHIFT : 0;
    return bytes([&](int i) { return weights.v[i] | (plane.v[i] << left >> right & MASK * 0x01010101u); });
  }
  // A product of an unsigned and a signed byte fits into 16 bits, a sum of two does not: even and odd bytes are separate.
  template <bool SMALL>
  static Ints dot(Ints sum, Bytes weights, Bytes x) {
    return ints([&](int i) {
      const EightShorts w = (EightShorts)weights.v[i], y = (EightShorts)x.v[i];
      const FourInts even = (FourInts)((w & 255) * (y << 8 >> 8)), odd = (FourInts)((w >> 8 & 255) * (y >> 8));
      return sum.v[i] + ((even << 16 >> 16) + (even >> 16)) + ((odd << 16 >> 16) + (odd >> 16));
    });
  }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductPortable;
const ProductKernels kProductPortable = {"portable",    Lanes::kPackedRows, Lanes::kFloatRows,
                                         prepare_share, prepare_row, product_share, finish_row, row_panels,
                                         add_row,       read_all,    dot_all};

}  // namespace octavo
