// The vector of elementwise_vector.h in NEON, which every aarch64 CPU has. Included there, in the variant's namespace.

typedef float32x4_t vec;
typedef int32x4_t ints;
constexpr int W = 4;
constexpr int TILE_QUERIES = 6; // 6 × 4 accumulators + 4 operands of 32 registers
constexpr int TILE_VECTORS = 4;

OCTAVO_INLINE vec load(const float* p) { return vld1q_f32(p); }
OCTAVO_INLINE vec load_n(const float* p, int n) {
  float lanes[W] = {0, 0, 0, 0};
  memcpy(lanes, p, sizeof(float) * (size_t)n);
  return load(lanes);
}
OCTAVO_INLINE vec load(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
OCTAVO_INLINE vec load_n(const int8_t* p, int n) {
  int8_t lanes[W] = {0, 0, 0, 0};
  memcpy(lanes, p, (size_t)n);
  return load(lanes);
}
OCTAVO_INLINE void store(float* p, vec a) { vst1q_f32(p, a); }
OCTAVO_INLINE void store_n(float* p, vec a, int n) {
  float lanes[W];
  store(lanes, a);
  memcpy(p, lanes, sizeof(float) * (size_t)n);
}
OCTAVO_INLINE vec set1(float a) { return vdupq_n_f32(a); }
OCTAVO_INLINE vec add(vec a, vec b) { return vaddq_f32(a, b); }
OCTAVO_INLINE vec sub(vec a, vec b) { return vsubq_f32(a, b); }
OCTAVO_INLINE vec mul(vec a, vec b) { return vmulq_f32(a, b); }
OCTAVO_INLINE vec div(vec a, vec b) { return vdivq_f32(a, b); }
OCTAVO_INLINE vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
// Comparisons and not FMAX, FMIN: b if either is NaN, as on x86.
OCTAVO_INLINE vec max(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
OCTAVO_INLINE vec min(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
OCTAVO_INLINE vec absolute(vec a) { return vabsq_f32(a); }
OCTAVO_INLINE vec where_less(vec a, vec b, vec yes, vec no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
OCTAVO_INLINE bool has_nan(vec a) { return vminvq_u32(vceqq_f32(a, a)) == 0; }
OCTAVO_INLINE vec finite_or_zero(vec a) {
  const uint32x4_t is_finite = vceqq_f32(vsubq_f32(a, a), vdupq_n_f32(0.0f));
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), is_finite));
}
OCTAVO_INLINE float reduce_max(vec a) {
  const vec two = max(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(max(two, vextq_f32(two, two, 1)), 0);
}
OCTAVO_INLINE float reduce_add(vec a) {
  const vec two = vaddq_f32(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(two, 0) + vgetq_lane_f32(two, 1);
}
OCTAVO_INLINE vec scale_by_power(vec a, vec power) { // power from −126 to 127
  const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(power), vdupq_n_s32(127)), 23);
  return vmulq_f32(a, vreinterpretq_f32_s32(bits));
}
OCTAVO_INLINE void store_int8(int8_t* p, vec whole) {
  const int16x4_t halves = vqmovn_s32(vcvtnq_s32_f32(whole));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(halves, halves))), 0);
  memcpy(p, &four, sizeof four);
}
OCTAVO_INLINE vec rotate_pairs(vec a, vec factors) { // lanes (2i, 2i + 1) are (real, imaginary)
  const vec crossed = vmulq_f32(vrev64q_f32(a), vtrn2q_f32(factors, factors));
  const uint32x4_t minus_even = vreinterpretq_u32_u64(vdupq_n_u64(0x80000000u));
  const vec signed_cross = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(crossed), minus_even));
  return vfmaq_f32(signed_cross, a, vtrn1q_f32(factors, factors));
}
