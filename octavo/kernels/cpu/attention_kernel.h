// The arithmetic of paged attention for one instruction set: scores, weights and weighted values of one chunk of keys.
// Included by attention_body.h.
//
// Every sum has one order that depends only on positions: over the head for a score, over lanes of fixed positions and then a
// fixed tree for the weights, over keys for the values, over chunks for the total. Keys that a query must not see have exactly
// weight 0, and a chunk without a seen key changes nothing.
#pragma once
#include "attention.h"
#include "attention_half.h"

namespace octavo {
namespace OCTAVO_VARIANT {

constexpr int kAhead = 4;                          // pages
constexpr int kScoreStride = kMaxChunk + kPadding;
constexpr int kQueryStride = kMaxHeadSize + kPadding;  // not a power of two, or queries would share a few cache sets
constexpr float kLog2E = 1.44269504f;

// A chunk of one KV head's keys and values. T: their type in the pages.
template <class T>
struct Chunk {
  const T* keys[kMaxChunk];    // per vector of keys: its first element; the head's next element is key_step further
  const T* values[kMaxChunk];  // per page from first_page on
  int64_t key_step;
  int num_vectors, first_vector;
  int page_size, head_size;
  int first_page;              // within the chunk
  int begin, end;              // keys of the chunk that some query of the task sees
  // Pages may lie anywhere, so the hardware cannot prefetch across them: while a page is multiplied, the one that comes kAhead
  // pages later is prefetched. Per vector of keys and per page of values: the address to prefetch.
  const char* after_keys[kMaxChunk];
  const char* after_values[kMaxChunk];
};

// How to combine the sums so far with those of a chunk.
struct Joining {
  enum How : uint8_t { set, keep, join };
  How how[kMaxQueries];
  alignas(64) float ours[kMaxQueries + kPadding], theirs[kMaxQueries + kPadding];
};

OCTAVO_INLINE void join_at(float* into, vec from, Joining::How how, float ours, float theirs) {
  if (how == Joining::join) store(into, fma(from, set1(theirs), mul(load(into), set1(ours))));
  else if (how == Joining::set) store(into, from);
}

// 2^a for a ≤ 0, within 2 units in the last place, exactly 1 at 0 and exactly 0 at −∞; NaN stays NaN.
OCTAVO_INLINE vec weight_of(vec a) {
#if defined(OCTAVO_AVX512)
  const vec x = max(set1(-200.0f), a);
#else
  const vec x = max(set1(-126.0f), a);
#endif
  const vec power = nearest(x), r = sub(x, power);
  vec y = set1(1.32647273e-3f);
  y = fma(y, r, set1(9.67151299e-3f));
  y = fma(y, r, set1(5.55073358e-2f));
  y = fma(y, r, set1(2.40222424e-1f));
  y = fma(y, r, set1(6.93147004e-1f));
  y = scale_by_power(fma(y, r, set1(1.0f)), power);
#if defined(OCTAVO_AVX512)
  return y;
#else
  return where_less(a, set1(-126.0f), set1(0.0f), y);
#endif
}

// Keeps a loaded vector in its register: otherwise the compiler loads it again for every query, and loading takes longer than
// multiplying.
OCTAVO_INLINE vec held(vec a) {
#if defined(OCTAVO_AVX512)
  __asm__("" : "+v"(a));
#elif defined(OCTAVO_AVX2)
  __asm__("" : "+x"(a));
#elif defined(OCTAVO_NEON)
  __asm__("" : "+w"(a));
#endif
  return a;
}

OCTAVO_INLINE void ask(const char* line) { __builtin_prefetch(line, 0, 2); }

template <int NQ, int NV, class T>
static void score_block(const float* q, const T* const* keys, const char* const* after, int64_t step, int head_size,
                        float* out) {
  vec sums[NQ][NV];
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = set1(0.0f);
  const T* at[NV];
  OCTAVO_UNROLL for (int v = 0; v < NV; ++v) at[v] = keys[v];
  for (int d = 0; d < head_size; ++d) {
    vec k[NV];
    OCTAVO_UNROLL for (int v = 0; v < NV; ++v) {
      k[v] = held(load(at[v]));
      at[v] += step;
    }
    // A cache line holds kVectors of the vectors, which are consecutive for every d: each line is prefetched once.
    constexpr int kVectors = 64 / (W * (int)sizeof(T)) < NV ? 64 / (W * (int)sizeof(T)) : NV;
    OCTAVO_UNROLL for (int v = 0; v < NV / kVectors; ++v) {
      ask(after[d % kVectors * (NV / kVectors) + v] + d / kVectors * kVectors * W * (int)sizeof(T));
    }
    OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) {
      const vec x = set1(q[i * kQueryStride + d]);
      OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = fma(x, k[v], sums[i][v]);
    }
  }
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) OCTAVO_UNROLL for (int v = 0; v < NV; ++v)
      store(out + i * kScoreStride + v * W, sums[i][v]);
}

template <int NQ, class T>
static void score(const float* q, const Chunk<T>& c, float* out) {
  out += c.first_vector * W;
  int v = 0;
  for (; v + TILE_VECTORS <= c.num_vectors; v += TILE_VECTORS) {
    score_block<NQ, TILE_VECTORS>(q, c.keys + v, c.after_keys + v, c.key_step, c.head_size, out + v * W);
  }
  if (TILE_VECTORS > 2 && v + 2 <= c.num_vectors) {
    score_block<NQ, 2>(q, c.keys + v, c.after_keys + v, c.key_step, c.head_size, out + v * W);
    v += 2;
  }
  if (v < c.num_vectors) score_block<NQ, 1>(q, c.keys + v, c.after_keys + v, c.key_step, c.head_size, out + v * W);
}

// Weighted values of NQ queries for NV vectors of the head. TAIL: the last vector has `lanes` lanes.
template <int NQ, int NV, bool TAIL, class T>
static void gather_block(const float* weights, const Chunk<T>& c, const Joining& joining, int first, int offset,
                         int lanes, Partials into) {
  vec sums[NQ][NV];
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = set1(0.0f);
  const int last_page = (c.end - 1) / c.page_size;
  for (int page = c.first_page; page <= last_page; ++page) {
    const int start = page * c.page_size;
    const int from = c.begin > start ? c.begin - start : 0;
    const int to = c.end - start < c.page_size ? c.end - start : c.page_size;
    const T* value = c.values[page - c.first_page] + (int64_t)from * c.head_size + offset;
    const float* weight = weights + start;
    const char* after = c.after_values[page - c.first_page] + (from * c.head_size + offset) * (int)sizeof(T);
    for (int key = from; key < to; ++key, value += c.head_size) {
      vec x[NV];
      OCTAVO_UNROLL for (int v = 0; v < NV; ++v) {
        x[v] = held(TAIL && v == NV - 1 ? load_n(value + v * W, lanes) : load(value + v * W));
        if (v * W * sizeof(T) % 64 == 0) ask(after + v * W * (int)sizeof(T));
      }
      OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) {
        const vec w = set1(weight[i * kScoreStride + key]);
        OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = fma(w, x[v], sums[i][v]);
      }
      after += c.head_size * (int)sizeof(T);
    }
  }
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) {
    float* out = into.sums + (first + i) * into.stride + kPadding + offset;
    OCTAVO_UNROLL for (int v = 0; v < NV; ++v) {
      join_at(out + v * W, sums[i][v], joining.how[first + i], joining.ours[first + i], joining.theirs[first + i]);
    }
  }
}

template <int NQ, class T>
static void gather(const float* weights, const Chunk<T>& c, const Joining& joining, int first, Partials into) {
  weights += first * kScoreStride;
  int offset = 0;
  for (; offset + TILE_VECTORS * W <= c.head_size; offset += TILE_VECTORS * W) {
    gather_block<NQ, TILE_VECTORS, false>(weights, c, joining, first, offset, W, into);
  }
  if (TILE_VECTORS > 2 && offset + 2 * W <= c.head_size) {
    gather_block<NQ, 2, false>(weights, c, joining, first, offset, W, into);
    offset += 2 * W;
  }
  for (; offset < c.head_size; offset += W) {
    const int lanes = c.head_size - offset;
    if (lanes >= W) gather_block<NQ, 1, false>(weights, c, joining, first, offset, W, into);
    else gather_block<NQ, 1, true>(weights, c, joining, first, offset, lanes, into);
  }
}

// Splits queries into groups that fit into registers, as evenly as possible: seven are four and three, not six and one.
template <class Body>
OCTAVO_INLINE void in_groups(int num_queries, Body body) {
  const int num_groups = (num_queries + TILE_QUERIES - 1) / TILE_QUERIES;
  for (int group = 0; group < num_groups; ++group) {
    const int first = num_queries * group / num_groups;
    body(first, num_queries * (group + 1) / num_groups - first);
  }
}

template <class T>
static void score_all(const float* q, int num_queries, const Chunk<T>& c, float* scores) {
  in_groups(num_queries, [&](int first, int count) {
    const float* from = q + first * kQueryStride;
    float* to = scores + first * kScoreStride;
    switch (count) {
      case 1: return score<1>(from, c, to);
      case 2: return score<2>(from, c, to);
      case 3: return score<3>(from, c, to);
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2) || defined(OCTAVO_NEON)  // TILE_QUERIES is 6
      case 4: return score<4>(from, c, to);
      case 5: return score<5>(from, c, to);
      case 6: return score<6>(from, c, to);
#endif
    }
  });
}

template <class T>
static void gather_all(const float* weights, int num_queries, const Chunk<T>& c, const Joining& joining,
                       Partials into) {
  in_groups(num_queries, [&](int first, int count) {
    switch (count) {
      case 1: return gather<1>(weights, c, joining, first, into);
      case 2: return gather<2>(weights, c, joining, first, into);
      case 3: return gather<3>(weights, c, joining, first, into);
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2) || defined(OCTAVO_NEON)  // TILE_QUERIES is 6
      case 4: return gather<4>(weights, c, joining, first, into);
      case 5: return gather<5>(weights, c, joining, first, into);
      case 6: return gather<6>(weights, c, joining, first, into);
#endif
    }
  });
}

alignas(64) static const float kIota[kPadding] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Sets the scores of keys before `begin` and from `end` on to kUnseen.
OCTAVO_INLINE vec only_seen(vec scores, int begin, int end) {
  const vec at = load(kIota), unseen = set1(kUnseen);
  return where_less(at, set1((float)begin), unseen, where_less(at, set1((float)end), scores, unseen));
}

// Scores of one query → weights, in place, and the lanes of their sum. Returns the largest score; kUnseen if it sees no key
// from `begin` to `end`. scales: of the chunk's keys, then, kMaxChunk further, of its values; NULL: 1.
static float weigh(float* scores, int tile_begin, int tile_end, int begin, int end, float softcap, const float* scales,
                   float* sum_lanes) {
  const int from = tile_begin / W * W;
  vec tops = set1(kUnseen);
  for (int key = from; key < tile_end; key += W) {
    vec x = load(scores + key);
    if (scales != nullptr) x = mul(x, load(scales + key));
    if (softcap != 0.0f) x = mul(set1(softcap * kLog2E), tangent(div(x, set1(softcap))));
    if (key < begin || key + W > end) x = only_seen(x, begin - key, end - key);
    store(scores + key, x);
    tops = max(tops, x);
  }
  const float top = reduce_max(tops);
  if (top == kUnseen) return top;
  vec sums = set1(0.0f);
  for (int key = from; key < tile_end; key += W) {
    // Unseen keys have score −∞ and so weight 0, unless one of the query's own scores is NaN: then all weights are.
    const vec weights = weight_of(sub(load(scores + key), set1(top)));
    sums = add(sums, weights);
    store(scores + key, scales != nullptr ? mul(weights, load(scales + kMaxChunk + key)) : weights);
  }
  store(sum_lanes, sums);
  return top;
}

// Sets tops to the larger of both and computes the factors, in vectors over queries: the result does not depend on the lane.
static void plan_joining(int num_queries, float* tops, const float* chunk_tops, Joining& joining) {
  for (int i = 0; i < num_queries; ++i) {
    joining.how[i] = chunk_tops[i] == kUnseen ? Joining::keep : tops[i] == kUnseen ? Joining::set : Joining::join;
  }
  for (int i = 0; i < num_queries; i += W) {
    const vec a = load(tops + i), b = load(chunk_tops + i), top = max(a, b);
    store(joining.ours + i, weight_of(sub(a, top)));
    store(joining.theirs + i, weight_of(sub(b, top)));
    store(tops + i, top);
  }
}

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
