// Loads and stores of vectors of 16-bit floats in pages, for one instruction set. Numbers out of range are clamped, so that all
// are finite.
#pragma once
#include "elementwise_vector.h"

namespace octavo {
namespace OCTAVO_VARIANT {

struct Half {
  uint16_t bits;
};

OCTAVO_INLINE vec within_half(vec a) { return max(set1(-65504.0f), min(set1(65504.0f), a)); }

#if defined(OCTAVO_AVX512)

OCTAVO_INLINE vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
OCTAVO_INLINE vec load_n(const Half* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
OCTAVO_INLINE void store(Half* p, vec a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(within_half(a), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(OCTAVO_AVX2)

OCTAVO_INLINE vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
OCTAVO_INLINE vec load_n(const Half* p, int n) {
  Half lanes[W] = {};
  memcpy(lanes, p, sizeof(Half) * (size_t)n);
  return load(lanes);
}
OCTAVO_INLINE void store(Half* p, vec a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(within_half(a), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(OCTAVO_NEON)

OCTAVO_INLINE vec load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p))); }
OCTAVO_INLINE vec load_n(const Half* p, int n) {
  Half lanes[W] = {};
  memcpy(lanes, p, sizeof(Half) * (size_t)n);
  return load(lanes);
}
OCTAVO_INLINE void store(Half* p, vec a) { // rounds to nearest, ties to even
  vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32(within_half(a))));
}

#else

// The biases of the exponents differ by 112: one multiplication corrects that, for subnormal numbers too.
OCTAVO_INLINE vec load_n(const Half* p, int n) {
  ints sizes = {0, 0, 0, 0}, signs = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) {
    sizes[i] = (p[i].bits & 0x7fff) << 13;
    signs[i] = (int32_t)((uint32_t)(p[i].bits & 0x8000) << 16);
  }
  return (vec)((ints)((vec)sizes * set1(0x1p112f)) | signs);
}
OCTAVO_INLINE vec load(const Half* p) { return load_n(p, W); }

// Round to nearest, ties to even. Subnormal numbers are multiples of 2⁻²⁴: adding 0.5 leaves the multiple in the last bits.
OCTAVO_INLINE void store(Half* p, vec a) {
  const ints bits = (ints)within_half(a);
  const ints sizes = bits & 0x7fffffff, small = (ints)((vec)sizes + set1(0.5f)) - (ints)set1(0.5f);
  for (int i = 0; i < W; ++i) {
    const uint32_t size = (uint32_t)sizes[i];
    const uint32_t half = size < 0x38800000 ? (uint32_t)small[i] : (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    p[i].bits = (uint16_t)(half | ((uint32_t)bits[i] >> 16 & 0x8000));
  }
}

#endif

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
