// Passes of sampling over whole rows of logits, for one instruction set. Included by sampling_<variant>.cpp. No fma: CPUs
// without it would round differently.
#include <string.h>

#include "elementwise_vector.h"
#include "sampling.h"

#define OCTAVO_MEMBER inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_VARIANT {

// Lanes of 64-bit sums of amounts, each rounded to the nearest integer, ties to even.
#if defined(OCTAVO_AVX512)

struct Sum {
  __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();

  OCTAVO_MEMBER void add(vec amounts) {
    low = _mm512_add_epi64(low, _mm512_cvtps_epi64(_mm512_castps512_ps256(amounts)));
    high = _mm512_add_epi64(high, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(amounts, 1)));
  }
  OCTAVO_MEMBER uint64_t total() const { return (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(low, high)); }
};

// a · 2^n, with n in the last bits of b.
OCTAVO_INLINE vec shift_exponent(vec a, vec b) {
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(b), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), power));
}
OCTAVO_INLINE vec add_from(vec sum, vec a, vec bound, vec amount) {  // sum + amount where a ≥ bound
  return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(a, bound, _CMP_GE_OQ), sum, amount);
}
// Writes first + lane for the lanes with low ≤ a < high, and up to W unused numbers after them → the number of lanes.
OCTAVO_INLINE int put_lanes(vec a, vec low, vec high, int32_t first, int32_t* ids) {
  const __mmask16 inside = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a, low, _CMP_GE_OQ), a, high, _CMP_LT_OQ);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(inside, _mm512_add_epi32(lanes, _mm512_set1_epi32(first))));
  return __builtin_popcount(inside);
}

#elif defined(OCTAVO_AVX2)

struct Sum {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

  // After adding 2⁵², a double's last bits are the nearest integer.
  OCTAVO_MEMBER __m256i whole(__m128 amounts) const {
    const __m256d magic = _mm256_set1_pd(4503599627370496.0);
    return _mm256_castpd_si256(_mm256_xor_pd(_mm256_add_pd(_mm256_cvtps_pd(amounts), magic), magic));
  }
  OCTAVO_MEMBER void add(vec amounts) {
    low = _mm256_add_epi64(low, whole(_mm256_castps256_ps128(amounts)));
    high = _mm256_add_epi64(high, whole(_mm256_extractf128_ps(amounts, 1)));
  }
  OCTAVO_MEMBER uint64_t total() const {
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i*)lanes, _mm256_add_epi64(low, high));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
};

OCTAVO_INLINE vec shift_exponent(vec a, vec b) {
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(b), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), power));
}
OCTAVO_INLINE vec add_from(vec sum, vec a, vec bound, vec amount) {
  return _mm256_add_ps(sum, _mm256_and_ps(amount, _mm256_cmp_ps(a, bound, _CMP_GE_OQ)));
}
OCTAVO_INLINE uint32_t lanes_in(vec a, vec low, vec high) {  // bit i: low ≤ a < high
  const __m256 inside = _mm256_and_ps(_mm256_cmp_ps(a, low, _CMP_GE_OQ), _mm256_cmp_ps(a, high, _CMP_LT_OQ));
  return (uint32_t)_mm256_movemask_ps(inside);
}

#elif defined(OCTAVO_NEON)

struct Sum {
  int64x2_t low = vdupq_n_s64(0), high = vdupq_n_s64(0);

  OCTAVO_MEMBER void add(vec amounts) {
    low = vaddq_s64(low, vcvtnq_s64_f64(vcvt_f64_f32(vget_low_f32(amounts))));
    high = vaddq_s64(high, vcvtnq_s64_f64(vcvt_high_f64_f32(amounts)));
  }
  OCTAVO_MEMBER uint64_t total() const { return (uint64_t)vaddvq_s64(vaddq_s64(low, high)); }
};

OCTAVO_INLINE vec shift_exponent(vec a, vec b) {
  const ints power = vshlq_n_s32(vreinterpretq_s32_f32(b), 23);
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), power));
}
OCTAVO_INLINE vec add_from(vec sum, vec a, vec bound, vec amount) {
  return vaddq_f32(sum, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(amount), vcgeq_f32(a, bound))));
}
OCTAVO_INLINE uint32_t lanes_in(vec a, vec low, vec high) {
  const uint32_t bits[W] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vandq_u32(vcgeq_f32(a, low), vcltq_f32(a, high)), vld1q_u32(bits)));
}

#else

typedef double doubles __attribute__((vector_size(16)));
typedef uint64_t longs __attribute__((vector_size(16)));

struct Sum {
  longs low = {0, 0}, high = {0, 0};

  OCTAVO_MEMBER longs whole(float first, float second) const {
    const doubles magic = {4503599627370496.0, 4503599627370496.0};
    return (longs)(doubles{(double)first, (double)second} + magic) ^ (longs)magic;
  }
  OCTAVO_MEMBER void add(vec amounts) {
    low += whole(amounts[0], amounts[1]);
    high += whole(amounts[2], amounts[3]);
  }
  OCTAVO_MEMBER uint64_t total() const { return low[0] + low[1] + high[0] + high[1]; }
};

OCTAVO_INLINE vec shift_exponent(vec a, vec b) { return (vec)((ints)a + ((ints)b << 23)); }
OCTAVO_INLINE vec add_from(vec sum, vec a, vec bound, vec amount) { return sum + (vec)((ints)amount & (a >= bound)); }
OCTAVO_INLINE uint32_t lanes_in(vec a, vec low, vec high) {
  const ints inside = (a >= low) & (a < high) & ints{1, 2, 4, 8};
  return (uint32_t)((inside[0] | inside[1]) | (inside[2] | inside[3]));
}

#endif

#if !defined(OCTAVO_AVX512)
OCTAVO_INLINE int put_lanes(vec a, vec low, vec high, int32_t first, int32_t* ids) {
  const uint32_t inside = lanes_in(a, low, high);
  int num = 0;
  if (!inside) return num;
  OCTAVO_UNROLL for (int lane = 0; lane < W; ++lane) {  // no branch, because it could not be predicted
    ids[num] = first + lane;
    num += inside >> lane & 1;
  }
  return num;
}
#endif

constexpr int kVectors = (int)(kChunk / W);  // of a chunk
constexpr float kNever = -__builtin_inff();

OCTAVO_INLINE int64_t num_chunks(int64_t size) { return (size + kChunk - 1) / kChunk; }

// The last chunk of x, padded with −inf.
static __attribute__((noinline)) const float* fill_up(const float* x, int64_t num, float* filled) {
  for (int64_t i = 0; i < kChunk; ++i) filled[i] = i < num ? x[i] : kNever;
  return filled;
}

OCTAVO_INLINE const float* chunk_of(const float* x, int64_t size, int64_t chunk, float* filled) {
  const int64_t num_left = size - chunk * kChunk;
  return num_left >= kChunk ? x + chunk * kChunk : fill_up(x + chunk * kChunk, num_left, filled);
}

// 2⁴⁰ · 2^a for a ≤ 0, within 2 units in the last place and exact at 0; rounds to 0 below −80 and for NaN.
OCTAVO_INLINE vec mass_of(vec a) {
  // After adding 1.5 · 2²³, a float's last bits are the nearest integer.
  const vec magic = set1(12582912.0f), x = max(a, set1(-80.0f)), shifted = add(x, magic);
  const vec f = sub(x, sub(shifted, magic));
  vec y = set1(1.535336196e-04f * kUnit);
  y = add(mul(y, f), set1(1.339887502e-03f * kUnit));
  y = add(mul(y, f), set1(9.618436918e-03f * kUnit));
  y = add(mul(y, f), set1(5.550332367e-02f * kUnit));
  y = add(mul(y, f), set1(2.402264774e-01f * kUnit));
  y = add(mul(y, f), set1(6.931471825e-01f * kUnit));
  y = add(mul(y, f), set1(kUnit));
  return shift_exponent(y, shifted);
}

static int64_t argmax(const float* x, int64_t size) {
  float filled[kChunk], largest = kNever;
  int64_t best = -1;
  for (int64_t chunk = 0; chunk < num_chunks(size); ++chunk) {
    const float* at = chunk_of(x, size, chunk, filled);
    vec tops[4] = {set1(kNever), set1(kNever), set1(kNever), set1(kNever)};  // four chains, to hide the latency
    for (int i = 0; i < kVectors; i += 4) {
      OCTAVO_UNROLL for (int j = 0; j < 4; ++j) tops[j] = max(load(at + (i + j) * W), tops[j]);  // skips NaN
    }
    const float top = reduce_max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    if (top > largest) {
      largest = top;
      best = chunk;
    }
  }
  if (best < 0) return 0;
  int64_t i = best * kChunk;
  while (x[i] != largest) ++i;
  return i;
}

static float maxima(const float* x, int64_t size, float* tops, bool* has_nans) {
  float filled[kChunk];
  bool is_broken = false;
  vec largest = set1(kNever);
  for (int64_t chunk = 0; chunk < num_chunks(size); ++chunk) {
    const float* at = chunk_of(x, size, chunk, filled);
    vec found[kGroups / W];
    OCTAVO_UNROLL for (int j = 0; j < kGroups / W; ++j) found[j] = set1(kNever);
    for (int i = 0; i < kVectors; i += kGroups / W) {
      OCTAVO_UNROLL for (int j = 0; j < kGroups / W; ++j) {
        const vec a = load(at + (i + j) * W);
        is_broken |= has_nan(a);
        found[j] = max(a, found[j]);
      }
    }
    OCTAVO_UNROLL for (int j = 0; j < kGroups / W; ++j) {
      store(tops + chunk * kGroups + j * W, found[j]);
      largest = max(found[j], largest);
    }
  }
  *has_nans = is_broken;
  return reduce_max(largest);
}

static void mend(const float* x, int64_t size, float* y) {
  for (int64_t i = 0; i < size; ++i) {
    const float a = x[i] == x[i] ? x[i] : kNever;
    y[i] = a < kLargest ? a : kLargest;
  }
}

template <bool HAS_LEAST>
OCTAVO_INLINE void weigh_all(const float* x, int64_t size, float top, float scale, float least, float* masses,
                             uint64_t* sums) {
  float filled[kChunk];
  for (int64_t chunk = 0; chunk < num_chunks(size); ++chunk) {
    const float* at = chunk_of(x, size, chunk, filled);
    Sum sum;
    for (int i = 0; i < kVectors; ++i) {
      vec mass = mass_of(mul(sub(load(at + i * W), set1(top)), set1(scale)));
      if (HAS_LEAST) mass = where_less(mass, set1(least), set1(0.0f), mass);
      store(masses + chunk * kChunk + i * W, mass);
      sum.add(mass);
    }
    sums[chunk] = sum.total();
  }
}

static void weigh(const float* x, int64_t size, float top, float scale, float least, float* masses, uint64_t* sums) {
  if (least > 0.0f) weigh_all<true>(x, size, top, scale, least, masses, sums);
  else weigh_all<false>(x, size, top, scale, least, masses, sums);
}

static void ladder(const float* x, const float* amounts, int64_t size, const float* rungs, float* sums) {
  float filled[kChunk];
  vec totals[kRungs];
  OCTAVO_UNROLL for (int rung = 0; rung < kRungs; ++rung) totals[rung] = set1(0.0f);
  for (int64_t chunk = 0; chunk < num_chunks(size); ++chunk) {
    const float* at = chunk_of(x, size, chunk, filled);
    for (int i = 0; i < kVectors; ++i) {
      const vec a = load(at + i * W), amount = load(amounts + chunk * kChunk + i * W);
      OCTAVO_UNROLL for (int rung = 0; rung < kRungs; ++rung) {
        totals[rung] = add_from(totals[rung], a, set1(rungs[rung]), amount);
      }
    }
  }
  OCTAVO_UNROLL for (int rung = 0; rung < kRungs; ++rung) sums[rung] = reduce_add(totals[rung]);
}

static void sums_from(const float* x, const float* amounts, int64_t size, float bound, uint64_t* sums) {
  float filled[kChunk];
  for (int64_t chunk = 0; chunk < num_chunks(size); ++chunk) {
    const float* at = chunk_of(x, size, chunk, filled);
    Sum sum;
    for (int i = 0; i < kVectors; ++i) {
      sum.add(where_less(load(at + i * W), set1(bound), set1(0.0f), load(amounts + chunk * kChunk + i * W)));
    }
    sums[chunk] = sum.total();
  }
}

static int64_t collect(const float* x, int64_t size, float low, float high, int64_t most, int32_t* ids) {
  float filled[kChunk];
  int64_t num = 0;
  for (int64_t chunk = 0; chunk < num_chunks(size) && num <= most; ++chunk) {
    const float* at = chunk_of(x, size, chunk, filled);
    for (int i = 0; i < kVectors; ++i) {
      num += put_lanes(load(at + i * W), set1(low), set1(high), (int32_t)(chunk * kChunk) + i * W, ids + num);
    }
  }
  return num;
}

typedef uint32_t words __attribute__((vector_size(32)));

static void keep(float* x, int64_t size, const uint32_t* mask) {
  const words lanes = {1, 2, 4, 8, 16, 32, 64, 128}, never = words{} + 0xFF800000u;  // −inf
  for (int64_t begin = 0; begin < size; begin += 32) {
    const uint32_t bits = mask[begin / 32];
    if (bits == 0xFFFFFFFFu) continue;
    if (size - begin < 32) {
      for (int64_t i = begin; i < size; ++i) x[i] = bits >> (i - begin) & 1 ? x[i] : kNever;
      break;
    }
    OCTAVO_UNROLL for (int part = 0; part < 4; ++part) {
      float* at = x + begin + 8 * part;
      words value, on = ((words{} + (bits >> 8 * part)) & lanes) == lanes;
      memcpy(&value, at, sizeof value);
      value = (value & on) | (never & ~on);
      memcpy(at, &value, sizeof value);
    }
  }
}

static constexpr SamplingVariant sampling = {argmax, maxima, mend, weigh, ladder, sums_from, collect, keep};

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
