// Cuts attention into tasks, shares them out, and joins what comes back in the order of the chunks.
// Knows nothing of the arithmetic.
#include "attention.h"

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
#endif
    default: return attention_portable;
  }
}

// Keys of a chunk: whole pages, about kChunk tokens, so that a core's nearest cache holds a chunk's keys. Part of the
// arithmetic: it may depend on the page size only.
constexpr int kChunk = 64;
int chunk_size_of(int page_size) { return page_size >= kChunk ? page_size : kChunk / page_size * page_size; }

bool can_do(int head_size, int page_size) {
  return head_size <= kMaxHeadSize && head_size % 2 == 0 && page_size >= 1 && page_size <= kMaxChunk;
}

// To be done for every block of heads: a tile with all its chunks, or one chunk of a tile that is split.
struct Piece {
  AttentionTile tile;
  int32_t first_chunk, end_chunk;  // of the tile
  int32_t chunk;                   // −1: all
  int32_t split;                   // index among the split tiles
};

// What a call is cut into. Kept from call to call: a step makes one a layer, and nothing should then be allocated.
struct Work {
  const OctavoAttention* call;
  const AttentionVariant* variant;
  int chunk_size, heads_per_block, num_blocks;  // blocks of query heads, each within one KV head
  int64_t stride;                               // floats of one query's sums
  std::vector<Piece> pieces;
  std::vector<int64_t> split_at;                // of each split tile: where its partials begin
  std::vector<float> memory;
  float* partials;
  std::unique_ptr<std::atomic<int32_t>[]> num_left;  // of each split tile and block: chunks not done
  size_t max_left = 0;
  int64_t num_tasks;
  alignas(64) std::atomic<int64_t> next;
};

void describe(Work& work, const OctavoAttention& a) {
  const int group = a.num_heads / a.num_kv_heads, blocks_per_group = (group + kMaxQueries - 1) / kMaxQueries;
  work.call = &a;
  work.variant = &attention_variant();
  work.chunk_size = chunk_size_of(a.page_size);
  work.heads_per_block = (group + blocks_per_group - 1) / blocks_per_group;
  work.num_blocks = a.num_kv_heads * blocks_per_group;
  work.stride = (a.head_size + 2 * kPadding - 1) / kPadding * kPadding;
}

int first_chunk_of(const Work& work, int position) {
  const int window = work.call->window, first = window > 0 ? position - window + 1 : 0;
  return first > 0 ? first / work.chunk_size : 0;
}

// Tokens × chunks that they see, about: what the call costs one head.
int64_t count_chunks(const Work& work) {
  const OctavoAttention& a = *work.call;
  int64_t total = 0;
  for (int row = 0; row < a.num_rows; ++row) {
    const int64_t count = a.query_start[row + 1] - a.query_start[row], length = a.seq_lens[row] - count / 2;
    total += count * ((a.window > 0 && length > a.window ? a.window : length) / work.chunk_size + 1);
  }
  return total;
}

// Floats of one chunk's partials of a tile and block.
int64_t partial_size(const Work& work, const AttentionTile& tile) {
  return kTops + (int64_t)tile.num_tokens * work.heads_per_block * work.stride;
}

// A tile costing more than `bearable` is split: whole, it would keep one thread busy after the others have finished.
void cut(Work& work, int64_t bearable) {
  const OctavoAttention& a = *work.call;
  const int tokens_per_tile = kMaxQueries / work.heads_per_block;
  int64_t num_floats = 0;
  work.pieces.clear();
  work.split_at.clear();
  for (int row = a.num_rows - 1; row >= 0; --row) {  // longest first: rows of many tokens come last in a batch
    const int first = a.query_start[row], count = a.query_start[row + 1] - first;
    for (int end_token = count; end_token > 0;) {
      const int token = (end_token - 1) / tokens_per_tile * tokens_per_tile, num_tokens = end_token - token;
      end_token = token;
      const AttentionTile tile = {row, first + token, num_tokens, a.seq_lens[row] - count + token};
      const int begin = first_chunk_of(work, tile.position);
      const int end = (tile.position + num_tokens + work.chunk_size - 1) / work.chunk_size;
      if (end - begin <= 1 || (int64_t)num_tokens * (end - begin) <= bearable) {
        work.pieces.push_back({tile, begin, end, -1, -1});
        continue;
      }
      const int32_t split = (int32_t)work.split_at.size();
      work.split_at.push_back(num_floats);
      num_floats += (end - begin) * work.num_blocks * partial_size(work, tile);
      for (int chunk = begin; chunk < end; ++chunk) work.pieces.push_back({tile, begin, end, chunk, split});
    }
  }
  work.num_tasks = (int64_t)work.pieces.size() * work.num_blocks;
  if ((int64_t)work.memory.size() < num_floats + kPadding) work.memory.resize((size_t)(num_floats + kPadding));
  work.partials = (float*)(((uintptr_t)work.memory.data() + 63) / 64 * 64);
}

void count_split_chunks(Work& work) {
  const size_t needed = work.split_at.size() * work.num_blocks;
  if (work.max_left < needed) {
    work.num_left.reset(new std::atomic<int32_t>[needed]);
    work.max_left = needed;
  }
  for (const Piece& piece : work.pieces) {
    if (piece.chunk != piece.first_chunk) continue;
    for (int block = 0; block < work.num_blocks; ++block) {
      const int32_t num = piece.end_chunk - piece.first_chunk;
      work.num_left[piece.split * work.num_blocks + block].store(num, std::memory_order_relaxed);
    }
  }
}

// Tasks go head by head: rows that share pages then find them in the cache, and the shortest tiles come last.
const Piece& piece_of(const Work& work, int64_t index) { return work.pieces[index % (int64_t)work.pieces.size()]; }

AttentionTask task_of(const Work& work, int64_t index) {
  const Piece& piece = piece_of(work, index);
  const int block = (int)(index / (int64_t)work.pieces.size()), group = work.call->num_heads / work.call->num_kv_heads;
  const int per_group = work.num_blocks / work.call->num_kv_heads, first = block % per_group * work.heads_per_block;
  const bool is_whole = piece.chunk < 0;
  return {piece.tile, block / per_group * group + first, std::min(group - first, work.heads_per_block),
          is_whole ? piece.first_chunk : piece.chunk, is_whole ? piece.end_chunk : piece.chunk + 1};
}

void do_whole(const Work& work, const AttentionTask& task, const AttentionTask* next) {
  alignas(64) float tops[kTops], sums[kMaxQueries * (kMaxHeadSize + 2 * kPadding)];
  const Partials partials = {tops, sums, work.stride};
  work.variant->attend(*work.call, task, work.chunk_size, next, partials);
  work.variant->finish(*work.call, task, partials);
}

void do_chunk(Work& work, const AttentionTask& task, const AttentionTask* next, const Piece& piece, int block) {
  const int64_t size = partial_size(work, piece.tile), num_chunks = piece.end_chunk - piece.first_chunk;
  float* first = work.partials + work.split_at[piece.split] + block * num_chunks * size;
  const auto nth = [&](int64_t chunk) {
    return Partials{first + chunk * size, first + chunk * size + kTops, work.stride};
  };
  work.variant->attend(*work.call, task, work.chunk_size, next, nth(piece.chunk - piece.first_chunk));
  std::atomic<int32_t>& left = work.num_left[piece.split * work.num_blocks + block];
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // The last to finish joins them: whoever that is, from the first chunk to the last.
  const int num_queries = task.tile.num_tokens * task.num_heads;
  for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
    work.variant->merge(num_queries, work.call->head_size, nth(0), nth(chunk));
  }
  work.variant->finish(*work.call, task, nth(0));
}

// Tasks [begin, end), one after the other.
void do_tasks(Work& work, int64_t begin, int64_t end) {
  AttentionTask task = task_of(work, begin), next;
  for (int64_t index = begin; index < end; ++index, task = next) {
    const bool is_last = index + 1 == end;
    if (!is_last) next = task_of(work, index + 1);
    const Piece& piece = piece_of(work, index);
    if (piece.chunk < 0) do_whole(work, task, is_last ? nullptr : &next);
    else do_chunk(work, task, is_last ? nullptr : &next, piece, (int)(index / (int64_t)work.pieces.size()));
  }
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
  constexpr int64_t kWorthSharing = 64 * 1024;  // products: below, waking the others takes longer
  const int num_threads = threads->size();
  if (num_threads == 1 || num_chunks * work.chunk_size * a.num_heads * a.head_size < kWorthSharing) {
    cut(work, INT64_MAX);
    if (work.num_tasks > 0) do_tasks(work, 0, work.num_tasks);
    return 0;
  }
  cut(work, num_chunks * work.num_blocks / (4 * num_threads));
  count_split_chunks(work);
  // Several at a time, so that a thread knows what it does next and can ask for it: few tasks in one go, more in
  // several, as some take longer.
  const int64_t per_thread = (work.num_tasks + num_threads - 1) / num_threads;
  const int64_t step = per_thread <= 8 ? per_thread : std::min<int64_t>(8, per_thread / 4);
  work.next.store(0, std::memory_order_relaxed);
  auto body = [&](int, int) {
    for (int64_t begin; (begin = work.next.fetch_add(step, std::memory_order_relaxed)) < work.num_tasks;) {
      do_tasks(work, begin, std::min(begin + step, work.num_tasks));
    }
  };
  run_on(threads, body);
  return 0;
}

int octavo_turn(Threads* threads, const OctavoTurn* call) {
  if (!can_do(call->head_size, call->page_size)) return -1;
  const AttentionVariant& variant = attention_variant();
  constexpr int64_t kWorthSharing = 4;  // tokens: below, waking the others takes longer
  if (call->num_tokens < kWorthSharing) variant.turn(*call, 0, call->num_tokens);
  else parallel_for(threads, call->num_tokens, [&](int64_t begin, int64_t end) { variant.turn(*call, begin, end); });
  return 0;
}
