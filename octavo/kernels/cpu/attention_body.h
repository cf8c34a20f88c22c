// Attention of one task for one instruction set: finds the cells of its chunks and joins their results. Included by
// attention_<variant>.cpp.
#include "attention_kernel.h"
#include "attention_qk_norm_rope.h"

namespace octavo {
namespace OCTAVO_VARIANT {

// Scales of the chunk's keys, then of its values, by place in the chunk.
struct Scales {
  alignas(64) float all[2 * kMaxChunk + kPadding];
};

static int first_seen(const OctavoAttention& a, int position, int start) {
  const int first = a.window > 0 && position - a.window + 1 > a.first ? position - a.window + 1 : a.first;
  return first > start ? first - start : 0;
}

template <class T>
OCTAVO_INLINE const T* keys_of(const OctavoAttention& a, int32_t page, int kv_head) {
  return (const T*)((const char*)a.pages + page * a.page_stride) + (int64_t)kv_head * a.page_size * a.head_size;
}

static int kv_head_of(const OctavoAttention& a, const AttentionTask& task) {
  return task.first_head / (a.num_heads / a.num_kv_heads);
}

template <class T>
static void find_cells(const OctavoAttention& a, const int32_t* table, int kv_head, Chunk<T>& c) {
  c.page_size = a.page_size;
  c.head_size = a.head_size;
  c.key_step = a.page_size;
  c.first_page = c.begin / a.page_size;
  c.first_vector = c.first_page * a.page_size / W;
  c.num_vectors = 0;
  for (int page = c.first_page; page * a.page_size < c.end; ++page) {
    const T* keys = keys_of<T>(a, table[page], kv_head);
    c.values[page - c.first_page] = keys + (int64_t)a.num_kv_heads * a.page_size * a.head_size;
    const int end = c.end - page * a.page_size < a.page_size ? c.end - page * a.page_size : a.page_size;
    for (int key = 0; key < end; key += W) c.keys[c.num_vectors++] = keys + key;
  }
}

static void find_scales(const OctavoAttention& a, const int32_t* table, int kv_head, int first_page, int end,
                        Scales& scales) {
  const int64_t num_codes = (int64_t)2 * a.num_kv_heads * a.page_size * a.head_size;
  const size_t size = sizeof(float) * (size_t)a.page_size;
  for (int page = first_page; page * a.page_size < end; ++page) {
    const float* from = (const float*)(keys_of<int8_t>(a, table[page], 0) + num_codes) + kv_head * a.page_size;
    memcpy(scales.all + page * a.page_size, from, size);
    memcpy(scales.all + kMaxChunk + page * a.page_size, from + a.num_kv_heads * a.page_size, size);
  }
}

// The keys that are read after this chunk's values.
struct After {
  const int32_t* table;
  int num_pages, kv_head;
};

template <class T>
static void look_ahead(const OctavoAttention& a, After after, Chunk<T>& c) {
  const int per_page = (c.page_size + W - 1) / W, num_pages = (c.end - 1) / c.page_size - c.first_page + 1;
  const auto nth = [&](int page) {  // in the order of use
    if (page < num_pages) return (const char*)c.keys[page * per_page];
    if (page < 2 * num_pages) return (const char*)c.values[page - num_pages];
    if (after.num_pages <= 0) return (const char*)c.values[0];  // nothing to prefetch: these are in the cache
    const int next = page - 2 * num_pages < after.num_pages ? page - 2 * num_pages : after.num_pages - 1;
    return (const char*)keys_of<T>(a, after.table[next], after.kv_head);
  };
  for (int v = 0; v < c.num_vectors; ++v) {
    c.after_keys[v] = nth(v / per_page + kAhead) + v % per_page * W * c.head_size * (int)sizeof(T);
  }
  for (int page = 0; page < num_pages; ++page) c.after_values[page] = nth(num_pages + page + kAhead);
}

// For pages that are not a whole number of vectors: copies a chunk's keys to `to`, [head_size, key_step].
template <class T>
static void copy_keys(const OctavoAttention& a, const int32_t* table, int kv_head, int chunk_size, T* to, Chunk<T>& c) {
  c.key_step = (chunk_size + W - 1) / W * W;
  c.first_vector = c.begin / W;
  c.num_vectors = (c.end + W - 1) / W - c.first_vector;
  for (int v = 0; v < c.num_vectors; ++v) {
    c.keys[v] = to + (c.first_vector + v) * W;
    c.after_keys[v] = (const char*)c.keys[v];
  }
  for (int page = c.first_page; page * a.page_size < c.end; ++page) {
    const T* keys = keys_of<T>(a, table[page], kv_head);
    for (int d = 0; d < a.head_size; ++d) {
      memcpy(to + d * c.key_step + page * a.page_size, keys + d * a.page_size, sizeof(T) * (size_t)a.page_size);
    }
  }
}

template <class T>
static void join_chunk(const OctavoAttention& a, const AttentionTask& task, int start, const float* q,
                       const Chunk<T>& c, const float* scales, Partials into) {
  const int num_queries = task.tile.num_tokens * task.num_heads;
  alignas(64) float scores[kMaxQueries * kScoreStride], lanes[kMaxQueries * kPadding], tops[kMaxQueries + kPadding];
  score_all(q, num_queries, c, scores);
  for (int token = 0, i = 0; token < task.tile.num_tokens; ++token) {
    const int position = task.tile.position + token;
    const int begin = first_seen(a, position, start), seen = position + 1 - start, end = seen < c.end ? seen : c.end;
    for (int head = 0; head < task.num_heads; ++head, ++i) {
      tops[i] = weigh(scores + i * kScoreStride, c.begin, c.end, begin, end, a.softcap, scales, lanes + i * kPadding);
    }
  }
  Joining joining;
  plan_joining(num_queries, into.tops, tops, joining);
  for (int i = 0; i < num_queries; ++i) {
    const vec sums = load(lanes + i * kPadding);
    join_at(into.sums + i * into.stride, sums, joining.how[i], joining.ours[i], joining.theirs[i]);
  }
  gather_all(scores, num_queries, c, joining, into);
}

static After after_chunk(const OctavoAttention& a, const AttentionTask& task, int pages_per_chunk, int chunk,
                         const AttentionTask* next) {
  const bool is_last = chunk + 1 == task.end_chunk;
  if (is_last && next == nullptr) return {nullptr, 0, 0};
  const AttentionTask& then = is_last ? *next : task;
  const int first = (is_last ? next->first_chunk : chunk + 1) * pages_per_chunk;
  const int last = (then.tile.position + then.tile.num_tokens - 1) / a.page_size;
  return {a.page_table + then.tile.row * a.table_stride + first, last + 1 - first, kv_head_of(a, then)};
}

template <class T>
static void attend_chunk(const OctavoAttention& a, const AttentionTask& task, int chunk_size, int chunk,
                         const AttentionTask* next, const float* q, Partials into) {
  const int start = chunk * chunk_size, seen = task.tile.position + task.tile.num_tokens - start;
  Chunk<T> c;
  c.begin = first_seen(a, task.tile.position, start);
  c.end = seen < chunk_size ? seen : chunk_size;
  if (c.begin >= c.end) return;
  const int pages_per_chunk = chunk_size / a.page_size, kv_head = kv_head_of(a, task);
  const int32_t* table = a.page_table + task.tile.row * a.table_stride + chunk * pages_per_chunk;
  find_cells(a, table, kv_head, c);
  look_ahead(a, after_chunk(a, task, pages_per_chunk, chunk, next), c);
  Scales scales;
  if (a.is_int8) find_scales(a, table, kv_head, c.first_page, c.end, scales);
  alignas(64) static thread_local T copies[kMaxHeadSize * kMaxChunk];
  if (a.page_size % W != 0) copy_keys(a, table, kv_head, chunk_size, copies, c);
  join_chunk(a, task, start, q, c, a.is_int8 ? scales.all : nullptr, into);
}

// With a soft cap the scores are converted to powers of 2 after the cap; else log2(e) is part of the scale.
static void scale_queries(const OctavoAttention& a, const AttentionTask& task, float* q) {
  const vec scale = set1(a.softcap != 0.0f ? a.scale : a.scale * kLog2E);
  for (int token = 0; token < task.tile.num_tokens; ++token) {
    const int64_t index = task.tile.tokens != nullptr ? task.tile.tokens[token] : task.tile.first + token;
    const float* from = a.queries + index * a.query_stride + (int64_t)task.first_head * a.head_size;
    for (int head = 0; head < task.num_heads; ++head, from += a.head_size, q += kQueryStride) {
      int d = 0;
      for (; d + W <= a.head_size; d += W) store(q + d, mul(load(from + d), scale));
      if (d < a.head_size) store(q + d, mul(load_n(from + d, a.head_size - d), scale));
    }
  }
}

static void attend(const OctavoAttention& a, const AttentionTask& task, int chunk_size, const AttentionTask* next,
                   Partials into) {
  alignas(64) float q[kMaxQueries * kQueryStride];
  scale_queries(a, task, q);
  for (int chunk = task.first_chunk; chunk < task.end_chunk; ++chunk) {
    if (a.is_int8) attend_chunk<int8_t>(a, task, chunk_size, chunk, next, q, into);
    else if (a.is_float16) attend_chunk<Half>(a, task, chunk_size, chunk, next, q, into);
    else attend_chunk<float>(a, task, chunk_size, chunk, next, q, into);
  }
}

static void merge(int num_queries, int head_size, Partials into, Partials from) {
  Joining joining;
  plan_joining(num_queries, into.tops, from.tops, joining);
  for (int i = 0; i < num_queries; ++i) {
    float* to = into.sums + i * into.stride;
    const float* part = from.sums + i * from.stride;
    const auto join = [&](int d) {
      join_at(to + d, load(part + d), joining.how[i], joining.ours[i], joining.theirs[i]);
    };
    join(0);
    for (int d = kPadding; d < kPadding + head_size; d += W) join(d);
  }
}

// The factor of a query's weighted values. top: its largest score, as a power of 2; sum: of its weights relative to that.
static vec share_of_sum(float top, float sum, const float* sink) {
  if (sink == nullptr) return set1(1.0f / sum);
  const float score = *sink * kLog2E, higher = score > top ? score : top;
  const vec keep = weight_of(set1(top - higher));
  return div(keep, fma(keep, set1(sum), weight_of(set1(score - higher))));
}

static void finish(const OctavoAttention& a, const AttentionTask& task, Partials from) {
  const float* part = from.sums;
  for (int token = 0, i = 0; token < task.tile.num_tokens; ++token) {
    float* to = a.output + (task.tile.first + token) * a.output_stride + (int64_t)task.first_head * a.head_size;
    for (int head = 0; head < task.num_heads; ++head, ++i, to += a.head_size, part += from.stride) {
      const bool is_blind = from.tops[i] == kUnseen;  // it has seen no key, and its sums were never set
      const float* sink = a.sinks != nullptr ? a.sinks + task.first_head + head : nullptr;
      const vec share = is_blind ? set1(0.0f) : share_of_sum(from.tops[i], reduce_add(load(part)), sink);
      const auto value = [&](int d) { return is_blind ? share : mul(load(part + kPadding + d), share); };
      int d = 0;
      for (; d + W <= a.head_size; d += W) store(to + d, value(d));
      if (d < a.head_size) store_n(to + d, value(d), a.head_size - d);
    }
  }
}

static constexpr AttentionVariant variant = {attend, merge, finish, qk_norm_rope_store};

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
