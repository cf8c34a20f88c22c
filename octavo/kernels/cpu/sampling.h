// The C interface of sampling: greedy, or by temperature, min-p, top-k, top-p and a uniform. A row's token depends only on that
// row, and is the same on every CPU.
//
// A token's mass is 2⁴⁰ · exp((logit − largest) / temperature), computed in float32 by instructions that every CPU has, and
// rounded to an integer. Sums of integers do not depend on the order, so vectors and shortcuts do not change the result. NaN
// counts as −inf and +inf as the largest finite number; if no logit is above −inf, token 0 is chosen.
#pragma once
#include <stdint.h>

#include "threads.h"

extern "C" {

struct OctavoChoice {
  double uniform;         // in [0, 1)
  double top_p;           // 1: no limit
  double min_p;           // 0: no limit
  int64_t top_k;          // 0, or the vocabulary size: no limit
  const int32_t* tokens;  // the row's tokens, for penalties; NULL: no penalties
  const uint32_t* mask;   // bit i % 32 of word i / 32: token i is allowed; NULL: all are
  int64_t prompt_len;
  int64_t len;  // prompt and output
  float temperature;
  float repetition;  // for tokens of prompt and output; 1: none
  float frequency;   // for tokens of the output, per occurrence
  float presence;    // for tokens of the output, once
  int32_t is_greedy;
  int32_t unused;
};

// Sets the uniform of every choice, as in sampling/randomness.py.
void octavo_uniforms(const int64_t* seeds, const int64_t* positions, int64_t num_rows, OctavoChoice* choices);

// Chooses tokens `chosen` [num_rows] from logits [num_rows, size], size < 2³¹. Rows with penalties or a mask may be
// changed.
void octavo_sample(octavo::Threads* threads, float* logits, int64_t stride, int64_t num_rows, int64_t size,
                   const OctavoChoice* choices, int64_t* chosen);
}

namespace octavo {

constexpr int64_t kChunk = 256;  // tokens per partial sum; a draw searches the partial sums, then one chunk
constexpr int kGroups = 16;      // groups of a chunk, each with its largest logit: tokens i, i + 16, …
constexpr int kRungs = 8;
constexpr float kUnit = 1099511627776.0f;  // 2⁴⁰, the mass of the likeliest token
constexpr float kLargest = 3.402823466e+38f;

// Passes over a whole row for one instruction set. x: logits, without NaN and +inf except for argmax, maxima and mend.
// Amounts are masses before rounding, or other numbers to add up: each is rounded to an integer first.
struct SamplingVariant {
  int64_t (*argmax)(const float* x, int64_t size);
  // Fills tops [chunks, kGroups] → the largest of all. NaN is skipped and sets has_nans.
  float (*maxima)(const float* x, int64_t size, float* tops, bool* has_nans);
  void (*mend)(const float* x, int64_t size, float* y);
  // masses [chunks * kChunk], 0 below `least` and beyond size; sums [chunks]. scale = log2(e) / temperature.
  void (*weigh)(const float* x, int64_t size, float top, float scale, float least, float* masses, uint64_t* sums);
  // sums [kRungs] of the amounts where x ≥ each rung, approximately.
  void (*ladder)(const float* x, const float* amounts, int64_t size, const float* rungs, float* sums);
  // sums [chunks] of the amounts where x ≥ bound.
  void (*sums_from)(const float* x, const float* amounts, int64_t size, float bound, uint64_t* sums);
  // ids [size + kGroups] with low ≤ x < high, low above −inf, ascending → their number; stops soon after `most`.
  int64_t (*collect)(const float* x, int64_t size, float low, float high, int64_t most, int32_t* ids);
  // Sets tokens without a bit in the mask to −inf.
  void (*keep)(float* x, int64_t size, const uint32_t* mask);
};

extern const SamplingVariant sampling_portable, sampling_avx2, sampling_avx512, sampling_neon;

}  // namespace octavo
