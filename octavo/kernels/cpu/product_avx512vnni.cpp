// The product kernels for AVX-512 with VNNI: 16 lanes are one register. product_kernel.h has tiles and layouts.
#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

namespace octavo {
namespace {

struct Lanes {
  using Floats = __m512;
  using Ints = __m512i;
  using Bytes = __m512i;
  // 32 registers: 10 integer sums and 10 float sums for two panels; the rest hold weights, activations, scales. Five rows
  // measured 2 to 5 % faster than six to eight: loads are not the bottleneck, and the work after a group needs registers to
  // overlap.
  static constexpr int kPackedRows = 5;
  static constexpr int kFloatRows = 8;
  static constexpr bool kByPanel = false, kPairs = false, kCentres = false;

  static Floats splat(float value) { return _mm512_set1_ps(value); }
  static Floats load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, Floats value) { _mm512_storeu_ps(at, value); }
  static Floats load_halves(const void* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
  }
  static Floats load_small(const void* at) {  // 16 signed bytes
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
  }
  // The low or high halves of 16 pairs of bfloat16.
  static Floats widen_low(Ints pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static Floats widen_high(Ints pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  // The largest absolute value of both, compared as integers: NaN is above infinity, which is above all numbers.
  static float largest_size(Floats a, Floats b) {
    const __m512i most = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b)));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(most))));
  }

  static Ints splat_int(int32_t value) { return _mm512_set1_epi32(value); }
  static Ints load_ints(const void* at) { return _mm512_loadu_si512(at); }
  static Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static int32_t total(Ints a) { return _mm512_reduce_add_epi32(a); }
  // Byte J of each lane.
  template <int J>
  static Ints byte_of(Bytes x) {
    return J == 3 ? _mm512_srli_epi32(x, 24) : _mm512_and_si512(_mm512_srli_epi32(x, 8 * J), _mm512_set1_epi32(255));
  }
  static constexpr bool kPicks = true;
  // Looks up four bits of each lane, from SHIFT on, in a table.
  template <int SHIFT>
  static Floats pick(Floats table, Bytes a) { return _mm512_permutexvar_ps(_mm512_srli_epi32(a, SHIFT), table); }
  template <int COUNT>
  static Ints shift_left(Ints a) { return _mm512_slli_epi32(a, COUNT); }
  static Ints nearest(Floats a) { return _mm512_cvtps_epi32(a); }
  static Floats to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
  static Floats power_of_two(Ints n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  }
  static void store_codes(int8_t* at, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtsepi32_epi8(a));
  }

  // Hides the value from the optimiser.
  static void keep(Ints& a) { __asm__ volatile("" : "+v"(a)); }

  static Bytes load_bytes(const void* at) { return _mm512_loadu_si512(at); }
  static Bytes splat_bytes(const int8_t* four) {
    int32_t all;
    memcpy(&all, four, 4);
    return _mm512_set1_epi32(all);
  }
  static Bytes low_halves(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static Bytes high_halves(Bytes a) { return low_halves(_mm512_srli_epi16(a, 4)); }
  static Bytes move_down(Bytes a, int count) { return _mm512_srlv_epi32(a, _mm512_set1_epi32(count)); }
  static Bytes no_bytes() { return _mm512_setzero_si512(); }
  // Looks up each byte, which is below 16, in a table.
  static Bytes look_up(const uint8_t* table, Bytes a) {
    const __m128i lane = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(lane), a);
  }
  // weights | (plane shifted by SHIFT & MASK), in every byte
  template <int SHIFT, int MASK>
  static Bytes with_bits(Bytes weights, Bytes plane) {
    if (SHIFT > 0) plane = _mm512_slli_epi16(plane, SHIFT > 0 ? SHIFT : 0);
    if (SHIFT < 0) plane = _mm512_srli_epi16(plane, SHIFT < 0 ? -SHIFT : 0);
    return _mm512_ternarylogic_epi32(weights, plane, _mm512_set1_epi8(MASK), 0xf8);
  }
  template <bool SMALL>
  static Ints dot(Ints sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
};

#include "product_kernel.h"

}  // namespace

extern const ProductKernels kProductAvx512Vnni;
const ProductKernels kProductAvx512Vnni = {"avx512vnni",  Lanes::kPackedRows, Lanes::kFloatRows,
                                           prepare_share, prepare_row, product_share, finish_row, row_panels,
                                           add_row,       read_all,    dot_all};

}  // namespace octavo
#endif
