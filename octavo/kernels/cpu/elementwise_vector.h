// A vector of floats and its operations, for the instruction set this translation unit is compiled for. Include after setting
// OCTAVO_VARIANT (a separate namespace, so that the linker never mixes two instruction sets) and OCTAVO_AVX512, OCTAVO_AVX2,
// OCTAVO_NEON or none of them. Compile with -ffp-contract=off: a product and a sum may be fused only where the code says fma, or a result would
// depend on how a loop was unrolled.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
#include <immintrin.h>
#elif defined(OCTAVO_NEON)
#include <arm_neon.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_UNROLL _Pragma("GCC unroll 8")

namespace octavo {
namespace OCTAVO_VARIANT {

#if defined(OCTAVO_AVX512)

typedef __m512 vec;
constexpr int W = 16;           // lanes
constexpr int TILE_QUERIES = 6; // 6 × 4 accumulators + 4 operands of 32 registers
constexpr int TILE_VECTORS = 4;

OCTAVO_INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1u); }
OCTAVO_INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
OCTAVO_INLINE vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
OCTAVO_INLINE vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
OCTAVO_INLINE vec load_n(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
}
OCTAVO_INLINE void store(float* p, vec a) { _mm512_storeu_ps(p, a); }
OCTAVO_INLINE void store_n(float* p, vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
OCTAVO_INLINE vec set1(float a) { return _mm512_set1_ps(a); }
OCTAVO_INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
OCTAVO_INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
OCTAVO_INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
OCTAVO_INLINE vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
OCTAVO_INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
OCTAVO_INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); } // b if either is NaN
OCTAVO_INLINE vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
OCTAVO_INLINE vec absolute(vec a) { return _mm512_abs_ps(a); }
OCTAVO_INLINE vec where_less(vec a, vec b, vec yes, vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
OCTAVO_INLINE bool has_nan(vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
OCTAVO_INLINE vec finite_or_zero(vec a) {
  const vec difference = _mm512_sub_ps(a, a);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(difference, _mm512_setzero_ps(), _CMP_EQ_OQ), a);
}
OCTAVO_INLINE float reduce_max(vec a) { return _mm512_reduce_max_ps(a); }
OCTAVO_INLINE float reduce_add(vec a) { return _mm512_reduce_add_ps(a); }
OCTAVO_INLINE vec scale_by_power(vec a, vec power) { return _mm512_scalef_ps(a, power); }
OCTAVO_INLINE void store_int8(int8_t* p, vec whole) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}
OCTAVO_INLINE vec rotate_pairs(vec a, vec factors) { // lanes (2i, 2i + 1) are (real, imaginary)
  const vec crossed = _mm512_mul_ps(_mm512_permute_ps(a, 0xB1), _mm512_movehdup_ps(factors));
  return _mm512_fmaddsub_ps(a, _mm512_moveldup_ps(factors), crossed);
}

#elif defined(OCTAVO_AVX2)

typedef __m256 vec;
constexpr int W = 8;
constexpr int TILE_QUERIES = 6; // 6 × 2 accumulators + 2 operands + 1 of 16 registers
constexpr int TILE_VECTORS = 2;

OCTAVO_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
OCTAVO_INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
OCTAVO_INLINE vec load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
OCTAVO_INLINE vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
OCTAVO_INLINE vec load_n(const int8_t* p, int n) {
  int8_t lanes[16] = {0};
  memcpy(lanes, p, (size_t)n);
  return load(lanes);
}
OCTAVO_INLINE void store(float* p, vec a) { _mm256_storeu_ps(p, a); }
OCTAVO_INLINE void store_n(float* p, vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a); }
OCTAVO_INLINE vec set1(float a) { return _mm256_set1_ps(a); }
OCTAVO_INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
OCTAVO_INLINE vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
OCTAVO_INLINE vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
OCTAVO_INLINE vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
OCTAVO_INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
OCTAVO_INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
OCTAVO_INLINE vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
OCTAVO_INLINE vec absolute(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
OCTAVO_INLINE vec where_less(vec a, vec b, vec yes, vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
OCTAVO_INLINE bool has_nan(vec a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
OCTAVO_INLINE vec finite_or_zero(vec a) {
  return _mm256_and_ps(a, _mm256_cmp_ps(_mm256_sub_ps(a, a), _mm256_setzero_ps(), _CMP_EQ_OQ));
}
OCTAVO_INLINE __m128 halve_max(vec a) { return _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
OCTAVO_INLINE float reduce_max(vec a) {
  __m128 m = halve_max(a);
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
OCTAVO_INLINE float reduce_add(vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
OCTAVO_INLINE vec scale_by_power(vec a, vec power) { // power from −126 to 127
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
OCTAVO_INLINE void store_int8(int8_t* p, vec whole) {
  const __m256i words = _mm256_cvtps_epi32(whole);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
OCTAVO_INLINE vec rotate_pairs(vec a, vec factors) {
  const vec crossed = _mm256_mul_ps(_mm256_permute_ps(a, 0xB1), _mm256_movehdup_ps(factors));
  return _mm256_fmaddsub_ps(a, _mm256_moveldup_ps(factors), crossed);
}

#elif defined(OCTAVO_NEON)

#include "elementwise_vector_neon.h"

#else // portable: SSE2 or NEON through the compiler's vector extension

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
constexpr int W = 4;
constexpr int TILE_QUERIES = 3; // 3 × 4 accumulators of 16 registers
constexpr int TILE_VECTORS = 4;

OCTAVO_INLINE vec load(const float* p) {
  vec a;
  memcpy(&a, p, sizeof a);
  return a;
}
OCTAVO_INLINE vec load_n(const float* p, int n) {
  vec a = {0, 0, 0, 0};
  memcpy(&a, p, sizeof(float) * (size_t)n);
  return a;
}
OCTAVO_INLINE vec load_n(const int8_t* p, int n) {
  vec a = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) a[i] = (float)p[i];
  return a;
}
OCTAVO_INLINE vec load(const int8_t* p) { return load_n(p, W); }
OCTAVO_INLINE void store(float* p, vec a) { memcpy(p, &a, sizeof a); }
OCTAVO_INLINE void store_n(float* p, vec a, int n) { memcpy(p, &a, sizeof(float) * (size_t)n); }
OCTAVO_INLINE vec set1(float a) { return vec{a, a, a, a}; }
OCTAVO_INLINE vec add(vec a, vec b) { return a + b; }
OCTAVO_INLINE vec sub(vec a, vec b) { return a - b; }
OCTAVO_INLINE vec mul(vec a, vec b) { return a * b; }
OCTAVO_INLINE vec div(vec a, vec b) { return a / b; }
OCTAVO_INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
OCTAVO_INLINE vec choose(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }
OCTAVO_INLINE vec max(vec a, vec b) { return choose(a > b, a, b); }
OCTAVO_INLINE vec min(vec a, vec b) { return choose(a < b, a, b); }
OCTAVO_INLINE vec absolute(vec a) { return (vec)((ints)a & 0x7fffffff); }
OCTAVO_INLINE vec where_less(vec a, vec b, vec yes, vec no) { return choose(a < b, yes, no); }
OCTAVO_INLINE bool has_nan(vec a) {
  const ints is_nan = a != a;
  return (is_nan[0] | is_nan[1] | is_nan[2] | is_nan[3]) != 0;
}
OCTAVO_INLINE vec finite_or_zero(vec a) { return (vec)((ints)a & ((a - a) == set1(0.0f))); }
OCTAVO_INLINE float reduce_max(vec a) {
  const float m = a[0] > a[2] ? a[0] : a[2], n = a[1] > a[3] ? a[1] : a[3];
  return m > n ? m : n;
}
OCTAVO_INLINE float reduce_add(vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
OCTAVO_INLINE vec scale_by_power(vec a, vec power) {
  const ints bits = (__builtin_convertvector(power, ints) + 127) << 23;
  return a * (vec)bits;
}
OCTAVO_INLINE void store_int8(int8_t* p, vec whole) {
  for (int i = 0; i < W; ++i) p[i] = (int8_t)(whole[i] == whole[i] ? whole[i] : 0.0f);
}
OCTAVO_INLINE vec rotate_pairs(vec a, vec t) {
  return vec{a[0] * t[0] - a[1] * t[1], a[1] * t[0] + a[0] * t[1], a[2] * t[2] - a[3] * t[3], a[3] * t[2] + a[2] * t[3]};
}

#endif

// Nearest integer, ties to even, for |a| < 2²².
OCTAVO_INLINE vec nearest(vec a) {
  const vec magic = set1(12582912.0f);
  return sub(add(a, magic), magic);
}

// e^a within 2 units in the last place, exactly 1 at 0; 0 below −87.3, where normal floats end; NaN stays NaN.
OCTAVO_INLINE vec exponential(vec a) {
  const vec lowest = set1(-87.3f);
  const vec x = min(set1(88.3f), max(lowest, a));
  const vec power = nearest(mul(x, set1(1.44269504f)));
  const vec r = fma(power, set1(2.12194440e-4f), fma(power, set1(-0.693359375f), x));
  vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  return where_less(a, lowest, set1(0.0f), scale_by_power(y, power));
}

OCTAVO_INLINE vec tangent(vec a) { // tanh
  const vec size = absolute(a), square = mul(a, a);
  vec y = set1(-5.70498872745e-3f);
  y = fma(y, square, set1(2.06390887954e-2f));
  y = fma(y, square, set1(-5.37397155531e-2f));
  y = fma(y, square, set1(1.33314422036e-1f));
  y = fma(y, square, set1(-3.33332819422e-1f));
  const vec near_zero = fma(mul(y, square), a, a);
  const vec rest = sub(set1(1.0f), div(set1(2.0f), add(exponential(add(size, size)), set1(1.0f))));
  const vec far = where_less(a, set1(0.0f), sub(set1(0.0f), rest), rest);
  return where_less(size, set1(0.625f), near_zero, far);
}

} // namespace OCTAVO_VARIANT
} // namespace octavo
