// The arithmetic of paged attention for one instruction set: one tile of queries against one chunk of keys.
// Knows nothing of threads or of how work is cut. Included by attention_<variant>.cpp.
//
// Every sum has one order that depends on nothing but positions: over the head for a score, over lanes of fixed positions
// and then a fixed tree for the weights, over keys for the values. Keys that a query must not see have weight 0 exactly.
#include "attention.h"
#include "elementwise_vector.h"

namespace octavo {
namespace OCTAVO_VARIANT {

constexpr int kAhead = 4;
constexpr int kScoreStride = kMaxChunk + kPadding;

template <class T>
struct Chunk {
  const T* keys[kMaxChunk];          // of each vector of keys: its first element; the next of the head is page_size on
  int at[kMaxChunk];                 // … its first key's place in the chunk
  int lanes[kMaxChunk];
  int num_vectors;
  const T* values[kMaxChunk];        // of each page from first_page on
  const float* key_scales[kMaxChunk];
  const float* value_scales[kMaxChunk];
  // Pages lie anywhere and the processor foresees nothing across them: while one is multiplied, the one that comes
  // kAhead pages later is asked for. Of each vector of keys and of each page of values: what then comes.
  const char* after_keys[kMaxChunk];
  const char* after_values[kMaxChunk];
  bool is_asking;                    // few queries: memory is what takes the time
  int page_size, head_size;
  int first_page;                    // within the chunk
  int begin, end;                    // keys of the chunk that some query of the tile sees
};

template <int NQ, int NV, bool ASKING, class T>
static void score_block(const float* q, const T* const* keys, const char* const* after, int page_size, int head_size,
                        float* out) {
  vec sums[NQ][NV];
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = set1(0.0f);
  const T* at[NV];
  OCTAVO_UNROLL for (int v = 0; v < NV; ++v) at[v] = keys[v];
  for (int d = 0; d < head_size; ++d) {
    vec k[NV];
    OCTAVO_UNROLL for (int v = 0; v < NV; ++v) {
      k[v] = load(at[v]);
      if (ASKING) __builtin_prefetch(after[v] + d * page_size * (int)sizeof(T), 0, 2);
      at[v] += page_size;
    }
    OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) {
      const vec x = set1(q[i * kMaxHeadSize + d]);
      OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = fma(x, k[v], sums[i][v]);
    }
  }
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) OCTAVO_UNROLL for (int v = 0; v < NV; ++v)
      store(out + i * kScoreStride + v * W, sums[i][v]);
}

// A page is no whole number of vectors: its last one has fewer lanes.
template <class T>
static void score_short(const float* q, int num_queries, const T* keys, int lanes, int page_size, int head_size,
                        float* out) {
  for (int i = 0; i < num_queries; ++i) {
    vec sum = set1(0.0f);
    for (int d = 0; d < head_size; ++d) {
      sum = fma(set1(q[i * kMaxHeadSize + d]), load_n(keys + (int64_t)d * page_size, lanes), sum);
    }
    store_n(out + i * kScoreStride, sum, lanes);
  }
}

template <int NQ, bool ASKING, class T>
static void score_queries(const float* q, const Chunk<T>& c, float* out) {
  int v = 0;
  for (; v + TILE_VECTORS <= c.num_vectors; v += TILE_VECTORS) {
    score_block<NQ, TILE_VECTORS, ASKING>(q, c.keys + v, c.after_keys + v, c.page_size, c.head_size, out + c.at[v]);
  }
  if (TILE_VECTORS > 2 && v + 2 <= c.num_vectors) {
    score_block<NQ, 2, ASKING>(q, c.keys + v, c.after_keys + v, c.page_size, c.head_size, out + c.at[v]);
    v += 2;
  }
  if (v < c.num_vectors) score_block<NQ, 1, ASKING>(q, c.keys + v, c.after_keys + v, c.page_size, c.head_size, out + c.at[v]);
}

template <class T>
static void score(const float* q, int num_queries, const Chunk<T>& c, float* out) {
  if (c.page_size % W != 0) {
    for (int v = 0; v < c.num_vectors; ++v) {
      score_short(q, num_queries, c.keys[v], c.lanes[v], c.page_size, c.head_size, out + c.at[v]);
    }
    return;
  }
  switch (num_queries) {
    case 1: return c.is_asking ? score_queries<1, true>(q, c, out) : score_queries<1, false>(q, c, out);
    case 2: return c.is_asking ? score_queries<2, true>(q, c, out) : score_queries<2, false>(q, c, out);
    case 3: return c.is_asking ? score_queries<3, true>(q, c, out) : score_queries<3, false>(q, c, out);
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
    case 4: return c.is_asking ? score_queries<4, true>(q, c, out) : score_queries<4, false>(q, c, out);
    case 5: return c.is_asking ? score_queries<5, true>(q, c, out) : score_queries<5, false>(q, c, out);
    case 6: return c.is_asking ? score_queries<6, true>(q, c, out) : score_queries<6, false>(q, c, out);
#endif
  }
}

// Weighted values of NQ queries, NV vectors of the head. TAIL: the last vector has `lanes` lanes.
template <int NQ, int NV, bool TAIL, bool ASKING, class T>
static void gather_block(const float* weights, const Chunk<T>& c, int offset, int lanes, float* out, int64_t stride) {
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
        x[v] = TAIL && v == NV - 1 ? load_n(value + v * W, lanes) : load(value + v * W);
        if (ASKING) __builtin_prefetch(after + v * W * (int)sizeof(T), 0, 2);
      }
      OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) {
        const vec w = set1(weight[i * kScoreStride + key]);
        OCTAVO_UNROLL for (int v = 0; v < NV; ++v) sums[i][v] = fma(w, x[v], sums[i][v]);
      }
      after += c.head_size * (int)sizeof(T);
    }
  }
  OCTAVO_UNROLL for (int i = 0; i < NQ; ++i) OCTAVO_UNROLL for (int v = 0; v < NV; ++v)
      store(out + i * stride + v * W, sums[i][v]);
}

template <int NQ, bool ASKING, class T>
static void gather_queries(const float* weights, const Chunk<T>& c, float* out, int64_t stride) {
  int offset = 0;
  for (; offset + TILE_VECTORS * W <= c.head_size; offset += TILE_VECTORS * W) {
    gather_block<NQ, TILE_VECTORS, false, ASKING>(weights, c, offset, W, out + offset, stride);
  }
  if (TILE_VECTORS > 2 && offset + 2 * W <= c.head_size) {
    gather_block<NQ, 2, false, ASKING>(weights, c, offset, W, out + offset, stride);
    offset += 2 * W;
  }
  for (; offset < c.head_size; offset += W) {
    const int lanes = c.head_size - offset;
    if (lanes >= W) gather_block<NQ, 1, false, ASKING>(weights, c, offset, W, out + offset, stride);
    else gather_block<NQ, 1, true, ASKING>(weights, c, offset, lanes, out + offset, stride);
  }
}

template <class T>
static void gather(const float* weights, int num_queries, const Chunk<T>& c, float* out, int64_t stride) {
  switch (num_queries) {
    case 1: return c.is_asking ? gather_queries<1, true>(weights, c, out, stride) : gather_queries<1, false>(weights, c, out, stride);
    case 2: return c.is_asking ? gather_queries<2, true>(weights, c, out, stride) : gather_queries<2, false>(weights, c, out, stride);
    case 3: return c.is_asking ? gather_queries<3, true>(weights, c, out, stride) : gather_queries<3, false>(weights, c, out, stride);
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
    case 4: return c.is_asking ? gather_queries<4, true>(weights, c, out, stride) : gather_queries<4, false>(weights, c, out, stride);
    case 5: return c.is_asking ? gather_queries<5, true>(weights, c, out, stride) : gather_queries<5, false>(weights, c, out, stride);
    case 6: return c.is_asking ? gather_queries<6, true>(weights, c, out, stride) : gather_queries<6, false>(weights, c, out, stride);
#endif
  }
}

// Scores of the keys from `begin` to `end` → weights, in place; 0 for the tile's other keys.
static PartialHeader weigh(float* scores, int begin, int end, int tile_begin, int tile_end, float softcap) {
  const int from = tile_begin / W * W, to = (tile_end + W - 1) / W * W;
  for (int key = from; key < begin; ++key) scores[key] = -__builtin_inff();
  for (int key = end; key < to; ++key) scores[key] = -__builtin_inff();
  if (softcap != 0.0f) {
    for (int key = begin / W * W; key < end; key += W) {
      const vec capped = mul(set1(softcap), tangent(div(load(scores + key), set1(softcap))));
      store(scores + key, capped);
    }
    for (int key = begin / W * W; key < begin; ++key) scores[key] = -__builtin_inff();
    for (int key = end; key < to; ++key) scores[key] = -__builtin_inff();
  }
  vec tops = set1(-__builtin_inff());
  for (int key = from; key < to; key += W) tops = max(tops, load(scores + key));
  const float top = reduce_max(tops);
  vec sums = set1(0.0f);
  for (int key = from; key < to; key += W) {
    // Unseen keys are −∞ and so weigh 0, unless a score of the query's own is broken: then all of it is.
    const vec weights = exponential(sub(load(scores + key), set1(top)));
    store(scores + key, weights);
    sums = add(sums, weights);
  }
  return {top, reduce_add(sums)};
}

template <class T>
static void find_cells(const OctavoAttention& a, const AttentionTile& tile, int kv_head, int chunk_start, Chunk<T>& c) {
  const int64_t run = (int64_t)a.page_size * a.head_size, num_runs = 2 * a.num_kv_heads;
  const int32_t* table = a.page_table + tile.row * a.table_stride + chunk_start / a.page_size;
  c.page_size = a.page_size;
  c.head_size = a.head_size;
  c.first_page = c.begin / a.page_size;
  c.num_vectors = 0;
  for (int page = c.first_page; page * a.page_size < c.end; ++page) {
    const T* keys = (const T*)((const char*)a.pages + table[page] * a.page_stride) + kv_head * run;
    const int start = page * a.page_size, index = page - c.first_page;
    c.values[index] = keys + a.num_kv_heads * run;
    if (a.is_int8) {
      c.key_scales[index] = (const float*)(keys + (num_runs - kv_head) * run) + kv_head * a.page_size;
      c.value_scales[index] = c.key_scales[index] + a.num_kv_heads * a.page_size;
    }
    for (int key = 0; key < a.page_size && start + key < c.end; key += W) {
      c.keys[c.num_vectors] = keys + key;
      c.at[c.num_vectors] = start + key;
      c.lanes[c.num_vectors++] = a.page_size - key < W ? a.page_size - key : W;
    }
  }
}

// next_run: where the same pages hold the next KV head, whose turn is likely to come next.
template <class T>
static void look_ahead(Chunk<T>& c, int num_pages, int64_t next_run) {
  const int per_page = (c.page_size + W - 1) / W;
  const auto nth = [&](int page) {  // in the order of use: keys, values, the next head's keys
    if (page < num_pages) return (const char*)c.keys[page * per_page];
    if (page < 2 * num_pages) return (const char*)c.values[page - num_pages];
    const int next = page - 2 * num_pages < num_pages ? page - 2 * num_pages : num_pages - 1;
    return (const char*)(c.keys[next * per_page] + next_run);
  };
  for (int v = 0; v < c.num_vectors; ++v) {
    c.after_keys[v] = nth(v / per_page + kAhead) + v % per_page * W * (int)sizeof(T);
  }
  for (int page = 0; page < num_pages; ++page) c.after_values[page] = nth(num_pages + page + kAhead);
}

template <class T>
static void scale_by_cells(const Chunk<T>& c, const float* const* scales, float* numbers) {
  for (int key = c.begin; key < c.end; ++key) {
    const int page = key / c.page_size;
    numbers[key] *= scales[page - c.first_page][key - page * c.page_size];
  }
}

template <class T>
static void attend_chunk(const OctavoAttention& a, const AttentionTile& tile, int first_head, int num_heads,
                         int chunk_size, int chunk, float* partials, int64_t stride) {
  const int num_queries = tile.num_tokens * num_heads, start = chunk * chunk_size;
  const int last = tile.position + tile.num_tokens - 1;
  const auto first_seen = [&](int position) {
    const int key = a.window > 0 ? position - a.window + 1 - start : 0;
    return key > 0 ? key : 0;
  };
  Chunk<T> c;
  c.begin = first_seen(tile.position);
  c.end = last + 1 - start < chunk_size ? last + 1 - start : chunk_size;
  if (c.begin >= c.end) {
    for (int i = 0; i < num_queries; ++i) *(PartialHeader*)(partials + i * stride) = {-__builtin_inff(), 0.0f};
    return;
  }
  find_cells(a, tile, first_head / (a.num_heads / a.num_kv_heads), start, c);
  c.is_asking = num_queries <= TILE_QUERIES;
  look_ahead(c, (c.end - 1) / c.page_size - c.first_page + 1, (int64_t)a.page_size * a.head_size);

  alignas(64) float q[kMaxQueries * kMaxHeadSize];
  alignas(64) float scores[kMaxQueries * kScoreStride];
  for (int i = 0; i < num_queries; ++i) {
    const float* from = a.queries + (tile.first + i / num_heads) * a.query_stride +
                        (int64_t)(first_head + i % num_heads) * a.head_size;
    for (int d = 0; d < a.head_size; ++d) q[i * kMaxHeadSize + d] = from[d] * a.scale;
  }
  for (int i = 0; i < num_queries; i += TILE_QUERIES) {
    const int count = num_queries - i < TILE_QUERIES ? num_queries - i : TILE_QUERIES;
    score(q + i * kMaxHeadSize, count, c, scores + i * kScoreStride);
  }
  for (int i = 0; i < num_queries; ++i) {
    float* row = scores + i * kScoreStride;
    const int position = tile.position + i / num_heads;
    const int begin = first_seen(position), end = position + 1 - start < c.end ? position + 1 - start : c.end;
    PartialHeader* header = (PartialHeader*)(partials + i * stride);
    if (begin >= end) {
      for (int key = c.begin; key < c.end; ++key) row[key] = 0.0f;
      *header = {-__builtin_inff(), 0.0f};
      continue;
    }
    if (a.is_int8) scale_by_cells(c, c.key_scales, row);
    *header = weigh(row, begin, end, c.begin, c.end, a.softcap);
    if (a.is_int8) scale_by_cells(c, c.value_scales, row);
  }
  for (int i = 0; i < num_queries; i += TILE_QUERIES) {
    const int count = num_queries - i < TILE_QUERIES ? num_queries - i : TILE_QUERIES;
    gather(scores + i * kScoreStride, count, c, partials + i * stride + kPadding, stride);
  }
}

static void chunk_of_any(const OctavoAttention& a, const AttentionTile& tile, int first_head, int num_heads,
                         int chunk_size, int chunk, float* partials, int64_t stride) {
  if (a.is_int8) attend_chunk<int8_t>(a, tile, first_head, num_heads, chunk_size, chunk, partials, stride);
  else attend_chunk<float>(a, tile, first_head, num_heads, chunk_size, chunk, partials, stride);
}

static void merge(float* into, const float* from, int head_size) {
  PartialHeader* a = (PartialHeader*)into;
  const PartialHeader* b = (const PartialHeader*)from;
  if (b->sum == 0.0f) return;  // it saw no key
  if (a->sum == 0.0f) {
    memcpy(into, from, sizeof(float) * (size_t)(kPadding + head_size));
    return;
  }
  const float top = a->top > b->top ? a->top : b->top;
  alignas(64) float factors[kPadding] = {a->top - top, b->top - top};
  for (int i = 0; i < kPadding; i += W) store(factors + i, exponential(load(factors + i)));
  const vec ours = set1(factors[0]), theirs = set1(factors[1]);
  *a = {top, a->sum * factors[0] + b->sum * factors[1]};
  for (int d = 0; d < head_size; d += W) {  // both are padded to whole vectors
    float* at = into + kPadding + d;
    store(at, fma(load(from + kPadding + d), theirs, mul(load(at), ours)));
  }
}

static void finish(const float* partial, float* output, int head_size) {
  const float sum = ((const PartialHeader*)partial)->sum, share = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int d = 0; d < head_size; ++d) output[d] = partial[kPadding + d] * share;
}

static void normed(const float* x, const float* weight, float epsilon, int size, float* out) {
  vec squares = set1(0.0f);
  for (int d = 0; d < size; d += W) {
    const int lanes = size - d;
    const vec a = lanes >= W ? load(x + d) : load_n(x + d, lanes);
    squares = fma(a, a, squares);
  }
  const float length = 1.0f / __builtin_sqrtf(reduce_add(squares) / (float)size + epsilon);
  for (int d = 0; d < size; ++d) out[d] = x[d] * length * weight[d];
}

static void turned(const float* x, const float* rotation, int size, float* out) {
  for (int d = 0; d < size; d += W) {
    const int lanes = size - d;
    if (lanes >= W) store(out + d, turn_pairs(load(x + d), load(rotation + d)));
    else store_n(out + d, turn_pairs(load_n(x + d, lanes), load_n(rotation + d, lanes)), lanes);
  }
}

static float largest(const float* x, int size) {
  float top = 0.0f;
  for (int d = 0; d < size; ++d) top = __builtin_fabsf(x[d]) > top ? __builtin_fabsf(x[d]) : top;
  return top;
}

// k or v of one token and head, finite, to its cell of run `run` of the page; step: how far its elements lie apart.
static void write_cell(const OctavoTurn& t, const float* x, char* page, int run, int offset, int start, int step) {
  const int64_t run_size = (int64_t)t.page_size * t.head_size;
  if (!t.is_int8) {
    float* cell = (float*)page + run * run_size + start;
    if (step == 1) memcpy(cell, x, sizeof(float) * (size_t)t.head_size);
    else for (int d = 0; d < t.head_size; ++d) cell[d * step] = x[d];
    return;
  }
  int8_t* cell = (int8_t*)page + run * run_size + start;
  float* scales = (float*)(page + 2 * t.num_kv_heads * run_size);
  const float top = largest(x, t.head_size), inverse = top > 0.0f ? 127.0f / top : 0.0f;
  scales[run * t.page_size + offset] = top / 127.0f;
  alignas(64) int8_t quantised[kMaxHeadSize + kPadding];
  for (int d = 0; d < t.head_size; d += W) store_int8(quantised + d, nearest(mul(load(x + d), set1(inverse))));
  for (int d = 0; d < t.head_size; ++d) cell[d * step] = quantised[d];
}

static void turn(const OctavoTurn& t, int64_t begin, int64_t end) {
  alignas(64) float buffer[kMaxHeadSize + kPadding] = {0};
  const int size = t.head_size;
  for (int64_t token = begin; token < end; ++token) {
    float* heads = t.heads + token * t.token_stride;
    const float* rotation = t.rotation != nullptr ? t.rotation + token * size : nullptr;
    const int64_t slot = t.slots[token];
    char* page = (char*)t.pages + slot / t.page_size * t.page_stride;
    const int offset = (int)(slot % t.page_size);
    for (int head = 0; head < t.num_heads; ++head) {
      float* x = heads + head * size;
      if (t.q_norm != nullptr) normed(x, t.q_norm, t.epsilon, size, x);
      if (rotation != nullptr) turned(x, rotation, size, x);
    }
    if (slot < 0) continue;
    for (int head = 0; head < 2 * t.num_kv_heads; ++head) {
      const bool is_key = head < t.num_kv_heads;
      const float* x = heads + (t.num_heads + head) * size;
      if (is_key && t.k_norm != nullptr) {
        normed(x, t.k_norm, t.epsilon, size, buffer);
        x = buffer;
      }
      if (is_key && rotation != nullptr) {
        turned(x, rotation, size, buffer);
        x = buffer;
      }
      if (x != buffer) memcpy(buffer, x, sizeof(float) * (size_t)size);
      for (int d = 0; d < size; d += W) store(buffer + d, finite_or_zero(load(buffer + d)));
      if (is_key) write_cell(t, buffer, page, head, offset, offset, t.page_size);
      else write_cell(t, buffer, page, head, offset, offset * size, 1);
    }
  }
}

static constexpr AttentionVariant variant = {chunk_of_any, merge, finish, turn};

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
