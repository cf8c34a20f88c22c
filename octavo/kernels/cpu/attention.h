// Attention over KV pages: what a call is told. Plain pointers, so that any language can make the call.
// Knows nothing of tensors, models or scheduling.
//
// A page is one run of bytes, page_stride bytes after the one before it: [2, Hkv, page_size * head_size] floats of 32 or
// 16 bits, or as many int8 codes and then [2, Hkv, page_size] float scales. Whole pages may be copied freely; cells never written may
// hold anything. Values (1) lie token by token, [page_size, head_size]. Keys (0) lie TRANSPOSED, [head_size, page_size]:
// the scores of a page's tokens are then the lanes of one vector, and no sum over lanes is ever taken.
#pragma once
#include <stdint.h>

#include "threads.h"

extern "C" {

typedef struct {
  const float* queries;   // [T, …]: a token's heads lie next to each other, tokens query_stride floats apart
  int64_t query_stride;
  float* output;          // [T, H * D], tokens output_stride floats apart
  int64_t output_stride;
  const void* pages;
  int64_t page_stride;    // bytes
  const int32_t* query_start;  // [B + 1]
  const int32_t* seq_lens;     // [B] tokens in the pages, this step's included; 0: a row of padding, its output is 0
  const int32_t* page_table;   // [B, table_stride]
  int64_t table_stride;
  int32_t num_rows, num_heads, num_kv_heads, head_size, page_size;
  int32_t is_int8;     // the pages hold codes and scales
  int32_t is_float16;  // … or floats of 16 bits; neither: of 32
  int32_t window;   // a token sees itself and the window − 1 before it; 0: all before it
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // [H] a score of each head beside those of the keys, whose weight is lost; NULL: none
} OctavoAttention;

// head_size even and up to 256, page_size up to 256; 0, or −1 where it cannot. A token's output depends on its query,
// its own row's cells and the page size alone: not on other rows, on how its row was cut into steps, or on the threads.
int octavo_attention(octavo::Threads* threads, const OctavoAttention* call);

typedef struct {
  float* heads;  // [T, H + 2 Hkv, D]: q is changed in place, k and v are read
  int64_t token_stride;
  const float* rotation;  // [T, D/2, 2] cosine and sine; NULL: none
  const float* q_norm;    // [D]; NULL: none
  const float* k_norm;
  float epsilon;
  const int64_t* slots;  // [T] page * page_size + offset; −1: written nowhere
  void* pages;
  int64_t page_stride;
  int32_t num_tokens, num_heads, num_kv_heads, head_size, page_size, is_int8, is_float16;
} OctavoTurn;

// Norm and turn q and k, then write k and v, made finite and what the pages can hold, to them.
int octavo_turn(octavo::Threads* threads, const OctavoTurn* call);
}

namespace octavo {

constexpr int kMaxQueries = 24;    // query vectors of a task: one KV head's, of one or more tokens
constexpr int kTops = 32;          // … in whole vectors
constexpr int kMaxHeadSize = 256;
constexpr int kMaxChunk = 256;
constexpr int kPadding = 16;       // the widest vector
constexpr float kUnseen = -__builtin_inff();  // the largest score of no key

// Some tokens of one row, or one of each of several rows that share what it reads: then `row` is one of them.
struct AttentionTile {
  int32_t row, first, num_tokens, position;  // first: index into T; position: of that token in its row
  const int32_t* tokens;  // indices into T; NULL: those from `first` on
};

// The queries that a tile's tokens bring to one KV head, and the chunks of keys they are to see.
struct AttentionTask {
  AttentionTile tile;
  int32_t first_head, num_heads;
  int32_t first_chunk, end_chunk;
};

// Of each query: the largest score (with room for whole vectors of them), and stride floats: kPadding lanes whose sum
// is that of the weights relative to it, and the weighted values.
struct Partials {
  float* tops;
  float* sums;
  int64_t stride;
};

struct AttentionVariant {
  // Joins what the task's chunks give to the partials. next, where it is not NULL, is what this thread will be given
  // next: its pages are asked for.
  void (*attend)(const OctavoAttention&, const AttentionTask&, int chunk_size, const AttentionTask* next, Partials);
  // The same with what `from` is of. Chunks are always joined in their order.
  void (*merge)(int num_queries, int head_size, Partials into, Partials from);
  void (*finish)(const OctavoAttention&, const AttentionTask&, Partials);
  void (*turn)(const OctavoTurn&, int64_t begin, int64_t end);
};

extern const AttentionVariant attention_portable, attention_avx2, attention_avx512;

}  // namespace octavo
