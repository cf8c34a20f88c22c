// Choosing tokens from logits: greedily, or by temperature, min-p, top-k, top-p and a uniform. The C interface.
// Knows nothing of requests, seeds or stop ids. A row's token depends on that row alone, on every CPU in the same way.
//
// A token's mass is 2⁴⁰ · exp((logit − largest) / temperature), computed in float32 by instructions that every CPU has,
// and rounded to a whole number. Whole numbers give the same sum in any order, so neither vectors nor shortcuts show.
// NaN counts as −inf and +inf as the largest number; where nothing is above −inf token 0 is chosen.
#pragma once
#include <stdint.h>

#include "threads.h"

extern "C" {

struct OctavoChoice {
  double uniform;         // in [0, 1)
  double top_p;           // 1: no limit
  double min_p;           // 0: no limit
  int64_t top_k;          // 0, or the vocabulary's size: no limit
  const int32_t* tokens;  // that the row holds, and is penalised for; NULL: no penalties
  const uint32_t* mask;   // bit i % 32 of word i / 32: whether token i may be chosen; NULL: every one may
  int64_t prompt_len;
  int64_t len;  // prompt and output
  float temperature;
  float repetition;  // for tokens of prompt and output; 1: none
  float frequency;   // for tokens of the output, as often as they occur
  float presence;    // for tokens of the output, once
  int32_t is_greedy;
  int32_t unused;
};

// Fills in every choice's uniform, as sampling/randomness.py has it.
void octavo_uniforms(const int64_t* seeds, const int64_t* positions, int64_t num_rows, OctavoChoice* choices);

// chosen [num_rows] of logits [num_rows, size], size < 2³¹. Rows with penalties or a mask are changed.
void octavo_sample(octavo::Threads* threads, float* logits, int64_t stride, int64_t num_rows, int64_t size,
                   const OctavoChoice* choices, int64_t* chosen);
}

namespace octavo {

constexpr int64_t kChunk = 256;  // tokens whose masses are summed together; a draw walks the sums, then one chunk
constexpr int kGroups = 16;      // of a chunk, each with a largest logit: tokens i, i + 16, …
constexpr int kRungs = 8;
constexpr float kUnit = 1099511627776.0f;  // 2⁴⁰, the mass of the likeliest token
constexpr float kLargest = 3.402823466e+38f;

// What goes over a whole row, for one instruction set. x: logits; but for argmax, maxima and mend without NaN and +inf.
// Amounts are masses that are not yet rounded, or whatever is to be added up: each is rounded to a whole number first.
struct SamplingVariant {
  int64_t (*argmax)(const float* x, int64_t size);
  // tops [chunks, kGroups] → the largest of all; NaNs are passed over, and mentioned.
  float (*maxima)(const float* x, int64_t size, float* tops, bool* has_nans);
  void (*mend)(const float* x, int64_t size, float* y);
  // masses [chunks * kChunk], 0 below `least` and beyond size; sums [chunks]. scale = log2(e) / temperature.
  void (*weigh)(const float* x, int64_t size, float top, float scale, float least, float* masses, uint64_t* sums);
  // sums [kRungs] of the amounts where x ≥ each rung, about.
  void (*ladder)(const float* x, const float* amounts, int64_t size, const float* rungs, float* sums);
  // sums [chunks] of the amounts where x ≥ bound.
  void (*sums_from)(const float* x, const float* amounts, int64_t size, float bound, uint64_t* sums);
  // ids [size + kGroups] of low ≤ x < high, low above −inf, by rising id → how many; stops soon after `most`.
  int64_t (*collect)(const float* x, int64_t size, float low, float high, int64_t most, int32_t* ids);
  // What has no bit in the mask becomes −inf.
  void (*keep)(float* x, int64_t size, const uint32_t* mask);
};

extern const SamplingVariant sampling_portable, sampling_avx2, sampling_avx512;

}  // namespace octavo
