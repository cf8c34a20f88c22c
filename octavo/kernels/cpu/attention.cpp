// Splits attention into tasks, distributes them over threads, and joins their results in the order of the chunks.
#include "attention.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "elementwise.h"

namespace octavo {
namespace {

const AttentionVariant& attention_variant() {
  switch (best_instructions()) {
#if defined(__x86_64__)
    case Instructions::avx512: return attention_avx512;
    case Instructions::avx2: return attention_avx2;
#elif defined(__aarch64__)
    case Instructions::neon: return attention_neon;
#endif
    default: return attention_portable;
  }
}

// Keys of a chunk: whole pages, about kChunk tokens, so that the L1 cache holds a chunk's keys. Part of the arithmetic: it may
// depend only on the page size.
constexpr int kChunk = 64;
int chunk_size_of(int page_size) { return page_size >= kChunk ? page_size : kChunk / page_size * page_size; }

bool can_do(int head_size, int page_size) {
  return head_size <= kMaxHeadSize && head_size % 2 == 0 && page_size >= 1 && page_size <= kMaxChunk;
}

// The shared piece that has computed a row's first chunks, if any, and the row's place among its tokens.
struct Seed {
  int32_t shared = -1, place = 0;
};

// Work for every block of heads: a tile with all its chunks, or one chunk of a split tile.
struct Piece {
  AttentionTile tile;
  int32_t first_chunk, end_chunk;  // of the tile
  int32_t chunk = -1;              // −1: all
  int32_t split = -1;              // index among the split tiles
  Seed seed;
  int64_t partials = -1;           // offset of the partials of a split or shared piece
};

// The pieces of a call. Kept from call to call, because a step makes one per layer and should not allocate.
struct Work {
  const OctavoAttention* call;
  const AttentionVariant* variant;
  int chunk_size, heads_per_block, num_blocks;  // blocks of query heads, each within one KV head
  int tokens_per_tile;
  int64_t stride;                               // floats of one query's sums
  std::vector<Piece> shared, pieces;            // shared: done before all others
  std::vector<int32_t> alike;                   // rows of one token (whose index is the row's), sorted by first page
  std::vector<Seed> seeds;                      // per row
  std::vector<float> memory;
  int64_t num_floats;                           // of partials
  float* partials;
  int num_splits;
  std::unique_ptr<std::atomic<int32_t>[]> num_left;  // per split tile and block: chunks not done
  int64_t max_left = 0;
};

void describe(Work& work, const OctavoAttention& a) {
  const int group = a.num_heads / a.num_kv_heads, blocks_per_group = (group + kMaxQueries - 1) / kMaxQueries;
  work.call = &a;
  work.variant = &attention_variant();
  work.chunk_size = chunk_size_of(a.page_size);
  work.heads_per_block = (group + blocks_per_group - 1) / blocks_per_group;
  work.num_blocks = a.num_kv_heads * blocks_per_group;
  work.tokens_per_tile = kMaxQueries / work.heads_per_block;
  work.stride = (a.head_size + 2 * kPadding - 1) / kPadding * kPadding;
}

int first_chunk_of(const Work& work, int position) {
  const int window = work.call->window, first = window > 0 ? position - window + 1 : 0;
  return first > 0 ? first / work.chunk_size : 0;
}

// About tokens × chunks that they see: the cost of the call per head.
int64_t count_chunks(const Work& work) {
  const OctavoAttention& a = *work.call;
  int64_t total = 0;
  for (int row = 0; row < a.num_rows; ++row) {
    const int64_t count = a.query_start[row + 1] - a.query_start[row], length = a.seq_lens[row] - count / 2;
    total += count * ((a.window > 0 && length > a.window ? a.window : length) / work.chunk_size + 1);
  }
  return total;
}

// Floats of the partials of one tile and block, for one chunk or several joined.
int64_t partial_size(const Work& work, const AttentionTile& tile) {
  return kTops + (int64_t)tile.num_tokens * work.heads_per_block * work.stride;
}

int64_t reserve(Work& work, int64_t num_floats) {
  work.num_floats += num_floats;
  return work.num_floats - num_floats;
}

// The number of first chunks, all of them full, that the rows alike[begin … end) have in common.
int count_common_chunks(const Work& work, size_t begin, size_t end) {
  const OctavoAttention& a = *work.call;
  const int pages_per_chunk = work.chunk_size / a.page_size;
  const int32_t* first = a.page_table + work.alike[begin] * a.table_stride;
  int common = a.seq_lens[work.alike[begin]] / work.chunk_size;
  for (size_t i = begin + 1; i < end; ++i) {
    const int row = work.alike[i], most = std::min(common, a.seq_lens[row] / work.chunk_size) * pages_per_chunk;
    const int32_t* other = a.page_table + row * a.table_stride;
    common = (int)(std::mismatch(first, first + most, other).first - first) / pages_per_chunk;
  }
  return common;
}

// Rows of one token that begin with the same pages read them together: one read of the pages serves all their queries.
void find_shared(Work& work, int num_threads) {
  const OctavoAttention& a = *work.call;
  work.alike.clear();
  for (int row = 0; row < a.num_rows && a.window == 0 && a.query_start[row + 1] == row + 1; ++row) {
    if (a.seq_lens[row] > work.chunk_size) work.alike.push_back(row);
  }
  const auto first_page = [&](int32_t row) { return a.page_table[row * a.table_stride]; };
  std::sort(work.alike.begin(), work.alike.end(), [&](int32_t one, int32_t other) {
    return first_page(one) != first_page(other) ? first_page(one) < first_page(other) : one < other;
  });
  for (size_t begin = 0, end; begin < work.alike.size(); begin = end) {
    for (end = begin + 1; end < work.alike.size() && first_page(work.alike[end]) == first_page(work.alike[begin]);) ++end;
    const int num_rows = (int)(end - begin);
    const int common = num_rows > 1 ? count_common_chunks(work, begin, end) : 0;
    constexpr int kWorthSharing = 16;  // chunk reads saved: with fewer, two rounds of tasks take longer
    if (common * (num_rows - 1) * work.num_blocks < kWorthSharing) continue;
    // Enough tiles for all threads, of at least two rows each.
    const int least = (num_rows + work.tokens_per_tile - 1) / work.tokens_per_tile;
    const int wanted = (4 * num_threads + work.num_blocks - 1) / work.num_blocks;
    const int num_tiles = std::max(least, std::min(wanted, num_rows / 2));
    for (int tile = 0; tile < num_tiles; ++tile) {
      const Share share = share_of(num_rows, tile, num_tiles);
      const int32_t* rows = work.alike.data() + begin + share.begin;
      Piece piece;
      piece.tile = {rows[0], -1, (int32_t)(share.end - share.begin), common * work.chunk_size, rows};
      piece.first_chunk = 0, piece.end_chunk = common;
      piece.partials = reserve(work, work.num_blocks * partial_size(work, piece.tile));
      for (int place = 0; place < piece.tile.num_tokens; ++place) {
        work.seeds[rows[place]] = {(int32_t)work.shared.size(), place};
      }
      work.shared.push_back(piece);
    }
  }
}

// A tile that costs more than `bearable` is split: otherwise one thread would still be busy after the others have finished.
void add(Work& work, Piece piece, int64_t bearable) {
  const int num_chunks = piece.end_chunk - piece.first_chunk;
  if (num_chunks <= 1 || (int64_t)piece.tile.num_tokens * num_chunks <= bearable) {
    work.pieces.push_back(piece);
    return;
  }
  piece.split = work.num_splits++;
  piece.partials = reserve(work, num_chunks * work.num_blocks * partial_size(work, piece.tile));
  for (piece.chunk = piece.first_chunk; piece.chunk < piece.end_chunk; ++piece.chunk) work.pieces.push_back(piece);
}

void cut(Work& work, int num_threads, int64_t bearable) {
  const OctavoAttention& a = *work.call;
  work.shared.clear();
  work.pieces.clear();
  work.num_floats = work.num_splits = 0;
  work.seeds.assign((size_t)a.num_rows, {});
  if (a.num_rows > 1) find_shared(work, num_threads);
  for (int row = a.num_rows - 1; row >= 0; --row) {  // longest first: rows of many tokens come last in a batch
    const int first = a.query_start[row], count = a.query_start[row + 1] - first;
    for (int end = count; end > 0;) {
      const int token = (end - 1) / work.tokens_per_tile * work.tokens_per_tile;
      Piece piece;
      piece.tile = {row, first + token, end - token, a.seq_lens[row] - count + token, nullptr};
      piece.seed = work.seeds[row];
      piece.first_chunk = piece.seed.shared < 0 ? first_chunk_of(work, piece.tile.position)
                                                : work.shared[piece.seed.shared].end_chunk;
      piece.end_chunk = (a.seq_lens[row] - count + end + work.chunk_size - 1) / work.chunk_size;
      end = token;
      add(work, piece, bearable);
    }
  }
}

void allocate(Work& work) {
  if ((int64_t)work.memory.size() < work.num_floats + kPadding) work.memory.resize((size_t)(work.num_floats + kPadding));
  work.partials = (float*)(((uintptr_t)work.memory.data() + 63) / 64 * 64);
  const int64_t needed = (int64_t)work.num_splits * work.num_blocks;
  if (work.max_left < needed) {
    work.num_left.reset(new std::atomic<int32_t>[(size_t)needed]);
    work.max_left = needed;
  }
  for (const Piece& piece : work.pieces) {
    if (piece.split < 0 || piece.chunk != piece.first_chunk) continue;
    for (int block = 0; block < work.num_blocks; ++block) {
      const int32_t num_chunks = piece.end_chunk - piece.first_chunk;
      work.num_left[piece.split * work.num_blocks + block].store(num_chunks, std::memory_order_relaxed);
    }
  }
}

AttentionTask task_of(const Work& work, const Piece& piece, int block) {
  const int group = work.call->num_heads / work.call->num_kv_heads;
  const int per_group = work.num_blocks / work.call->num_kv_heads, first = block % per_group * work.heads_per_block;
  const bool is_whole = piece.chunk < 0;
  return {piece.tile, block / per_group * group + first, std::min(group - first, work.heads_per_block),
          is_whole ? piece.first_chunk : piece.chunk, is_whole ? piece.end_chunk : piece.chunk + 1};
}

Partials partials_at(const Work& work, const Piece& piece, int64_t index) {
  float* at = work.partials + piece.partials + index * partial_size(work, piece.tile);
  return {at, at + kTops, work.stride};
}

void begin(const Work& work, const Piece& piece, const AttentionTask& task, int block, Partials into) {
  if (piece.seed.shared < 0) {
    std::fill_n(into.tops, kMaxQueries, kUnseen);
    return;
  }
  const Partials from = partials_at(work, work.shared[piece.seed.shared], block);
  const int64_t first = (int64_t)piece.seed.place * task.num_heads;
  memcpy(into.tops, from.tops + first, sizeof(float) * (size_t)task.num_heads);
  memcpy(into.sums, from.sums + first * work.stride, sizeof(float) * (size_t)(task.num_heads * work.stride));
}

struct Buffer {
  alignas(64) float tops[kTops];
  alignas(64) float sums[kMaxQueries * (kMaxHeadSize + 2 * kPadding)];
};

void do_whole(Work& work, const Piece& piece, int block, const AttentionTask& task, const AttentionTask* next) {
  Buffer buffer;
  const Partials into = {buffer.tops, buffer.sums, work.stride};
  begin(work, piece, task, block, into);
  work.variant->attend(*work.call, task, work.chunk_size, next, into);
  work.variant->finish(*work.call, task, into);
}

void do_chunk(Work& work, const Piece& piece, int block, const AttentionTask& task, const AttentionTask* next) {
  const int64_t num_chunks = piece.end_chunk - piece.first_chunk, first = block * num_chunks;
  const Partials ours = partials_at(work, piece, first + piece.chunk - piece.first_chunk);
  std::fill_n(ours.tops, kMaxQueries, kUnseen);
  work.variant->attend(*work.call, task, work.chunk_size, next, ours);
  std::atomic<int32_t>& left = work.num_left[piece.split * work.num_blocks + block];
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // The thread that finishes last joins all chunks, from the first to the last.
  Buffer buffer;
  const Partials into = {buffer.tops, buffer.sums, work.stride};
  begin(work, piece, task, block, into);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int num_queries = task.tile.num_tokens * task.num_heads;
    work.variant->merge(num_queries, work.call->head_size, into, partials_at(work, piece, first + chunk));
  }
  work.variant->finish(*work.call, task, into);
}

void do_shared(Work& work, const Piece& piece, int block, const AttentionTask& task, const AttentionTask* next) {
  const Partials into = partials_at(work, piece, block);
  std::fill_n(into.tops, kMaxQueries, kUnseen);
  work.variant->attend(*work.call, task, work.chunk_size, next, into);
}

// Tasks [begin, end) of the pieces, one after the other. The order is head by head: rows that share pages then find them in the
// cache, and the shortest tiles come last.
void do_tasks(Work& work, const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
  const int64_t num_pieces = (int64_t)pieces.size();
  const auto nth = [&](int64_t index) {
    return task_of(work, pieces[index % num_pieces], (int)(index / num_pieces));
  };
  AttentionTask task = nth(begin), next;
  for (int64_t index = begin; index < end; ++index, task = next) {
    const bool is_last = index + 1 == end;
    if (!is_last) next = nth(index + 1);
    const Piece& piece = pieces[index % num_pieces];
    const auto act = &pieces == &work.shared ? do_shared : piece.chunk < 0 ? do_whole : do_chunk;
    act(work, piece, (int)(index / num_pieces), task, is_last ? nullptr : &next);
  }
}

// A share is several tasks, so that a thread knows its next one and can prefetch for it. Few tasks are one share per thread,
// more are several, because some take longer.
void do_all(Work& work, const std::vector<Piece>& pieces, Threads* threads, int num_threads) {
  const int64_t num_tasks = (int64_t)pieces.size() * work.num_blocks;
  if (num_tasks == 0) return;
  if (num_threads == 1) return do_tasks(work, pieces, 0, num_tasks);
  const int64_t per_thread = (num_tasks + num_threads - 1) / num_threads;
  const int64_t step = per_thread <= 8 ? per_thread : std::min<int64_t>(8, per_thread / 4);
  auto body = [&](int index, int num_shares) {
    const Share share = share_of(num_tasks, index, num_shares);
    do_tasks(work, pieces, share.begin, share.end);
  };
  run_on(threads, body, (int)((num_tasks + step - 1) / step));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

int octavo_attention(Threads* threads, const OctavoAttention* call) {
  const OctavoAttention& a = *call;
  if (!can_do(a.head_size, a.page_size) || a.num_heads % a.num_kv_heads != 0) return -1;
  static thread_local Work kept;
  Work& work = kept;
  describe(work, a);
  const int64_t num_chunks = count_chunks(work);
  constexpr int64_t kWorthWaking = 64 * 1024;  // multiplications: with fewer, waking the other threads takes longer
  const bool is_alone = num_chunks * work.chunk_size * a.num_heads * a.head_size < kWorthWaking;
  const int num_threads = is_alone ? 1 : threads->size();
  cut(work, num_threads, num_threads == 1 ? INT64_MAX : num_chunks * work.num_blocks / (4 * num_threads));
  allocate(work);
  do_all(work, work.shared, threads, num_threads);
  do_all(work, work.pieces, threads, num_threads);
  return 0;
}

int octavo_qk_norm_rope_store(Threads* threads, const OctavoQkNormRope* call) {
  if (!can_do(call->head_size, call->page_size)) return -1;
  const AttentionVariant& variant = attention_variant();
  constexpr int64_t kWorthSharing = 4;  // tokens: with fewer, waking the other threads takes longer
  const auto store = [&](int64_t begin, int64_t end) { variant.qk_norm_rope_store(*call, begin, end); };
  if (call->num_tokens < kWorthSharing) store(0, call->num_tokens);
  else parallel_for(threads, call->num_tokens, store);
  return 0;
}
