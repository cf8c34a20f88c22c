// The product kernels for AVX2 with FMA and F16C: 16 lanes are two registers. product_kernel.h has tiles and layouts.
#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

namespace octavo {
namespace {

struct Lanes {
  struct Floats {
    __m256 a, b;
  };
  struct Ints {
    __m256i a, b;
  };
  using Bytes = Ints;
  // 16 registers: one row and two panels take four integer sums and four float sums.
  static constexpr int kPackedRows = 2;
  static constexpr int kFloatRows = 3;
  static constexpr bool kByPanel = false, kPairs = false, kCentres = false;

  static Floats splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
  static void store(float* at, Floats value) {
    _mm256_storeu_ps(at, value.a);
    _mm256_storeu_ps(at + 8, value.b);
  }
  static Floats load_halves(const void* at) {
    const __m128i* halves = static_cast<const __m128i*>(at);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  static Floats load_small(const void* at) {  // 16 signed bytes
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(at));
    return to_float({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
  }
  // The low or high halves of 16 pairs of bfloat16.
  static Floats widen_low(Ints pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(pairs.b, 16))};
  }
  static Floats widen_high(Ints pairs) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(pairs.b, mask))};
  }
  static Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static Floats least(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static Floats greatest(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static __m256i size(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
  // The largest absolute value of both, compared as integers: NaN is above infinity, which is above all numbers.
  static float largest_size(Floats x, Floats y) {
    const __m256i eight =
        _mm256_max_epi32(_mm256_max_epi32(size(x.a), size(x.b)), _mm256_max_epi32(size(y.a), size(y.b)));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
  }

  static Ints splat_int(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
  static Ints load_ints(const void* at) {
    const __m256i* ints = static_cast<const __m256i*>(at);
    return {_mm256_loadu_si256(ints), _mm256_loadu_si256(ints + 1)};
  }
  static Ints add_ints(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static int32_t total(Ints x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  // Byte J of each lane.
  template <int J>
  static Ints byte_of(Bytes x) {
    const auto of = [](__m256i half) { return _mm256_and_si256(_mm256_srli_epi32(half, 8 * J), _mm256_set1_epi32(255)); };
    return {of(x.a), of(x.b)};
  }
  static constexpr bool kPicks = false;
  template <int COUNT>
  static Ints shift_left(Ints x) { return {_mm256_slli_epi32(x.a, COUNT), _mm256_slli_epi32(x.b, COUNT)}; }
  static Ints nearest(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static Floats power_of_two(Ints n) {
    const Ints bits = shift_left<23>(add_ints(n, splat_int(127)));
    return {_mm256_castsi256_ps(bits.a), _mm256_castsi256_ps(bits.b)};
  }
  static void store_codes(int8_t* at, Ints x) {
    const __m256i mixed = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), codes);
  }

  // Hides the value from the optimiser.
  static void keep(Ints& x) { __asm__ volatile("" : "+x"(x.a), "+x"(x.b)); }

  static Bytes load_bytes(const void* at) { return load_ints(at); }
  static Bytes splat_bytes(const int8_t* four) {
    int32_t all;
    memcpy(&all, four, 4);
    return splat_int(all);
  }
  static Bytes low_halves(Bytes x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
  }
  static Bytes high_halves(Bytes x) { return low_halves({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }

  static Bytes move_down(Bytes x, int count) {
    const __m256i by = _mm256_set1_epi32(count);
    return {_mm256_srlv_epi32(x.a, by), _mm256_srlv_epi32(x.b, by)};
  }
  static Bytes no_bytes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  // Looks up each byte, which is below 16, in a table.
  static Bytes look_up(const uint8_t* table, Bytes x) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(both, x.a), _mm256_shuffle_epi8(both, x.b)};
  }
  // weights | (plane shifted by SHIFT & MASK), in every byte
  template <int SHIFT, int MASK>
  static Bytes with_bits(Bytes weights, Bytes plane) {
    const auto with = [](__m256i half, __m256i bits) {
      if (SHIFT > 0) bits = _mm256_slli_epi16(bits, SHIFT > 0 ? SHIFT : 0);
      if (SHIFT < 0) bits = _mm256_srli_epi16(bits, SHIFT < 0 ? -SHIFT : 0);
      return _mm256_or_si256(half, _mm256_and_si256(bits, _mm256_set1_epi8(MASK)));
    };
    return {with(weights.a, plane.a), with(weights.b, plane.b)};
  }

  // SMALL: weights are at most 127, so that sums of two products fit into 16 bits. Otherwise even and odd bytes are multiplied
  // separately, as 16-bit numbers.
  template <bool SMALL>
  static __m256i dot_half(__m256i sum, __m256i weights, __m256i x) {
    if (SMALL) return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1)));
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
  }
  template <bool SMALL>
  static Ints dot(Ints sum, Bytes weights, Bytes x) {
    return {dot_half<SMALL>(sum.a, weights.a, x.a), dot_half<SMALL>(sum.b, weights.b, x.b)};
  }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductAvx2;
const ProductKernels kProductAvx2 = {"avx2",        Lanes::kPackedRows, Lanes::kFloatRows,
                                     prepare_share, prepare_row, product_share, finish_row, row_panels,
                                     add_row,       read_all,    dot_all};

}  // namespace octavo
#endif
