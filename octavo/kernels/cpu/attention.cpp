// Cuts attention into tiles and chunks, shares them out, and joins what comes back in the order of the chunks.
// Knows nothing of the arithmetic.
#include "attention.h"

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

// Keys of a chunk: whole pages, about kChunk tokens. Part of the arithmetic: it may depend on the page size only.
constexpr int kChunk = 128;
int chunk_size_of(int page_size) { return page_size >= kChunk ? page_size : kChunk / page_size * page_size; }

bool can_do(int head_size, int page_size) {
  return head_size <= kMaxHeadSize && head_size % 2 == 0 && page_size <= kMaxChunk;
}

// A piece of work: a tile with all its chunks (chunk −1), or one chunk of a tile that several may work on.
struct Piece {
  AttentionTile tile;
  int32_t chunk, num_chunks;
  int32_t split;  // index among the tiles that were split
};

struct Work {
  const OctavoAttention& call;
  const AttentionVariant& variant;
  int chunk_size, heads_per_block, num_blocks;  // blocks of query heads, each within one KV head
  int64_t stride;                               // floats of one partial
  std::vector<Piece> pieces;
  std::vector<int64_t> split_at;                // of each split tile: its first partial for block 0
  std::atomic<int64_t> next{0};
  std::unique_ptr<std::atomic<int32_t>[]> num_left;  // of each split tile and block: chunks not done
};

int first_chunk_of(const Work& work, int position) {
  const int first = work.call.window > 0 ? position - work.call.window + 1 : 0;
  return first > 0 ? first / work.chunk_size : 0;
}

// Returns how many partials the split tiles need.
int64_t cut(Work& work) {
  const OctavoAttention& a = work.call;
  const int tokens_per_tile = kMaxQueries / work.heads_per_block;
  int64_t num_partials = 0;
  for (int row = 0; row < a.num_rows; ++row) {
    const int first = a.query_start[row], count = a.query_start[row + 1] - first;
    for (int done = 0; done < count; done += tokens_per_tile) {
      const int tokens = count - done < tokens_per_tile ? count - done : tokens_per_tile;
      const AttentionTile tile = {row, first + done, tokens, a.seq_lens[row] - count + done};
      const int chunks = (tile.position + tokens + work.chunk_size - 1) / work.chunk_size;
      const bool is_split = count <= tokens_per_tile && chunks - first_chunk_of(work, tile.position) > 1;
      if (!is_split) {
        work.pieces.push_back({tile, -1, chunks, -1});
        continue;
      }
      const int32_t split = (int32_t)work.split_at.size();
      work.split_at.push_back(num_partials);
      num_partials += (int64_t)chunks * tokens * work.heads_per_block * work.num_blocks;
      for (int chunk = first_chunk_of(work, tile.position); chunk < chunks; ++chunk) {
        work.pieces.push_back({tile, chunk, chunks, split});
      }
    }
  }
  return num_partials;
}

struct Block {
  int first_head, num_heads;
};

Block block_of(const Work& work, int index) {
  const int group = work.call.num_heads / work.call.num_kv_heads;
  const int per_group = work.num_blocks / work.call.num_kv_heads;
  const int first = index % per_group * work.heads_per_block;
  const int count = group - first < work.heads_per_block ? group - first : work.heads_per_block;
  return {index / per_group * group + first, count};
}

void write_out(const Work& work, const AttentionTile& tile, Block block, const float* partials) {
  const OctavoAttention& a = work.call;
  for (int i = 0; i < tile.num_tokens * block.num_heads; ++i) {
    float* output = a.output + (tile.first + i / block.num_heads) * a.output_stride +
                    (int64_t)(block.first_head + i % block.num_heads) * a.head_size;
    work.variant.finish(partials + i * work.stride, output, a.head_size);
  }
}

void write_zeros(const Work& work, const AttentionTile& tile, Block block) {
  const OctavoAttention& a = work.call;
  for (int token = 0; token < tile.num_tokens; ++token) {
    float* output = a.output + (tile.first + token) * a.output_stride + (int64_t)block.first_head * a.head_size;
    for (int d = 0; d < block.num_heads * a.head_size; ++d) output[d] = 0.0f;
  }
}

void do_whole(const Work& work, const AttentionTile& tile, Block block, int num_chunks) {
  if (work.call.seq_lens[tile.row] <= 0) return write_zeros(work, tile, block);
  alignas(64) float sums[kMaxQueries * (kMaxHeadSize + 2 * kPadding)], part[sizeof(sums) / sizeof(float)];
  const int first = first_chunk_of(work, tile.position);
  for (int chunk = first; chunk < num_chunks; ++chunk) {
    work.variant.chunk(work.call, tile, block.first_head, block.num_heads, work.chunk_size, chunk,
                       chunk == first ? sums : part, work.stride);
    if (chunk == first) continue;
    for (int i = 0; i < tile.num_tokens * block.num_heads; ++i) {
      work.variant.merge(sums + i * work.stride, part + i * work.stride, work.call.head_size);
    }
  }
  write_out(work, tile, block, sums);
}

void do_chunk(Work& work, const Piece& piece, int index, Block block, float* partials) {
  const int num_queries = piece.tile.num_tokens * block.num_heads;
  const int64_t per_block = (int64_t)piece.num_chunks * piece.tile.num_tokens * work.heads_per_block;
  float* first = partials + (work.split_at[piece.split] + index * per_block) * work.stride;
  const auto of_chunk = [&](int chunk) { return first + (int64_t)chunk * num_queries * work.stride; };
  work.variant.chunk(work.call, piece.tile, block.first_head, block.num_heads, work.chunk_size, piece.chunk,
                     of_chunk(piece.chunk), work.stride);
  std::atomic<int32_t>& left = work.num_left[piece.split * work.num_blocks + index];
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // The last to finish joins them: whoever that is, from the first chunk to the last.
  const int begin = first_chunk_of(work, piece.tile.position);
  for (int chunk = begin + 1; chunk < piece.num_chunks; ++chunk) {
    for (int i = 0; i < num_queries; ++i) {
      work.variant.merge(of_chunk(begin) + i * work.stride, of_chunk(chunk) + i * work.stride, work.call.head_size);
    }
  }
  write_out(work, piece.tile, block, of_chunk(begin));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

int octavo_attention(Threads* threads, const OctavoAttention* call) {
  const OctavoAttention& a = *call;
  if (!can_do(a.head_size, a.page_size) || a.num_heads % a.num_kv_heads != 0) return -1;
  const int group = a.num_heads / a.num_kv_heads;
  const int blocks_per_group = (group + kMaxQueries - 1) / kMaxQueries;
  Work work{a, attention_variant(), chunk_size_of(a.page_size), (group + blocks_per_group - 1) / blocks_per_group,
            a.num_kv_heads * blocks_per_group, (a.head_size + 2 * kPadding - 1) / kPadding * kPadding, {}, {}, {}, {}};
  const int64_t num_partials = cut(work);
  static thread_local std::vector<float> partials;  // kept: a step makes this call once a layer
  if ((int64_t)partials.size() < num_partials * work.stride) partials.resize((size_t)(num_partials * work.stride));
  work.num_left.reset(new std::atomic<int32_t>[work.split_at.size() * work.num_blocks]);
  for (const Piece& piece : work.pieces) {
    if (piece.split < 0) continue;
    const int32_t num = piece.num_chunks - first_chunk_of(work, piece.tile.position);
    for (int block = 0; block < work.num_blocks; ++block) work.num_left[piece.split * work.num_blocks + block] = num;
  }
  float* const partials_of_all = partials.data();
  const int64_t count = (int64_t)work.pieces.size() * work.num_blocks;
  auto body = [&](int, int) {
    for (int64_t index; (index = work.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      // Longest first: whole rows of many tokens come last in a batch.
      const Piece& piece = work.pieces[work.pieces.size() - 1 - index / work.num_blocks];
      const int block = (int)(index % work.num_blocks);
      if (piece.chunk < 0) do_whole(work, piece.tile, block_of(work, block), piece.num_chunks);
      else do_chunk(work, piece, block, block_of(work, block), partials_of_all);
    }
  };
  if (count == 1) body(0, 1);
  else run_on(threads, body);
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
