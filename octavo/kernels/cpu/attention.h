// The C interface of attention over KV pages. Plain pointers, so that any language can make the call.
//
// A page is one run of bytes, page_stride bytes after the previous one: [2, Hkv, page_size * head_size] floats of 32 or 16
// bits, or as many int8 codes and then [2, Hkv, page_size] float scales. Whole pages may be copied; cells that were never
// written may hold anything. Values (1) are stored token by token, [page_size, head_size]. Keys (0) are stored TRANSPOSED,
// [head_size, page_size]: the scores of a page's tokens are then the lanes of one vector, and no sum over lanes is needed.
#pragma once
#include <stdint.h>

#include "threads.h"

extern "C" {

typedef struct {
  const float* queries;   // [T, …]: a token's heads are contiguous, tokens query_stride floats apart
  int64_t query_stride;
  float* output;          // [T, H * D], tokens output_stride floats apart
  int64_t output_stride;
  const void* pages;
  int64_t page_stride;    // bytes
  const int32_t* query_start;  // [B + 1]
  const int32_t* seq_lens;     // [B] tokens in the pages, this step's included; 0: a padding row, whose output is 0
  const int32_t* page_table;   // [B, table_stride]
  int64_t table_stride;
  int32_t num_rows, num_heads, num_kv_heads, head_size, page_size;
  int32_t is_int8;     // the pages hold codes and scales
  int32_t is_float16;  // … or 16-bit floats; neither: 32-bit floats
  int32_t window;   // a token sees itself and the window − 1 tokens before it; 0: all tokens before it
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // [H] per head, one more score in the softmax, without a value; NULL: none
  int32_t first;         // no token sees the keys before this position
} OctavoAttention;

// head_size must be even and at most 256, page_size at most 256. Returns 0, or −1 if not supported. A token's output depends
// only on its query, its own row's cells and the page size: not on other rows, on how its row was split into steps, or on the
// threads.
int octavo_attention(octavo::Threads* threads, const OctavoAttention* call);

typedef struct {
  float* heads;  // [T, H + 2 Hkv, D]: q is changed in place, k and v are read
  int64_t token_stride;
  const float* rotation;  // [T, D/2, 2] cosine and sine; NULL: none
  const float* q_norm;    // [D]; NULL: none
  const float* k_norm;
  float epsilon;
  const int64_t* slots;  // [T] page * page_size + offset; −1: not stored
  void* pages;
  int64_t page_stride;
  int32_t num_tokens, num_heads, num_kv_heads, head_size, page_size, is_int8, is_float16;
} OctavoQkNormRope;

// RMSNorm and RoPE of q and k, then store k and v in the pages, made finite and clamped to the range of their type.
int octavo_qk_norm_rope_store(octavo::Threads* threads, const OctavoQkNormRope* call);
}

namespace octavo {

constexpr int kMaxQueries = 24;    // query vectors of a task: of one KV head and one or more tokens
constexpr int kTops = 32;          // kMaxQueries, rounded up to whole vectors
constexpr int kMaxHeadSize = 256;
constexpr int kMaxChunk = 256;
constexpr int kPadding = 16;       // the widest vector
constexpr float kUnseen = -__builtin_inff();  // the largest score of no key

// Some tokens of one row, or one token of each of several rows that read the same pages: then `row` is one of them.
struct AttentionTile {
  int32_t row, first, num_tokens, position;  // first: index into T; position: of that token in its row
  const int32_t* tokens;  // indices into T; NULL: those from `first` on
};

// The queries of a tile's tokens for one KV head, and the chunks of keys to attend to.
struct AttentionTask {
  AttentionTile tile;
  int32_t first_head, num_heads;
  int32_t first_chunk, end_chunk;
};

// For each query: the largest score (padded to whole vectors), and `stride` floats: kPadding lanes whose sum is the sum of the
// weights relative to that score, then the weighted values.
struct Partials {
  float* tops;
  float* sums;
  int64_t stride;
};

struct AttentionVariant {
  // Adds the task's chunks to the partials. next: the task that this thread does next, whose pages are prefetched; or NULL.
  void (*attend)(const OctavoAttention&, const AttentionTask&, int chunk_size, const AttentionTask* next, Partials);
  // Adds the chunks of `from` to `into`. Chunks are always added in order.
  void (*merge)(int num_queries, int head_size, Partials into, Partials from);
  void (*finish)(const OctavoAttention&, const AttentionTask&, Partials);
  void (*qk_norm_rope_store)(const OctavoQkNormRope&, int64_t begin, int64_t end);
};

extern const AttentionVariant attention_portable, attention_avx2, attention_avx512, attention_neon;

}  // namespace octavo
