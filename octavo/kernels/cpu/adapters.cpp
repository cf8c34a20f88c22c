// Distributes the rows that have adapters over threads. Each piece of work is done by one thread from end to end, so that nothing
// waits between the two products.
#include "adapters.h"

#include <stdlib.h>

#include <algorithm>

#include "elementwise.h"

namespace octavo {
namespace {

constexpr int64_t kMost = 32;  // rows of a piece: enough to use what was read of A and B, and few enough to share a prompt

// Memory of one thread, aligned for the kernels.
class Room {
 public:
  ~Room() { free(memory_); }
  uint8_t* of(int64_t num_bytes) {
    if (num_bytes > size_) {
      free(memory_);
      size_ = round_up(num_bytes, 4096);
      memory_ = static_cast<uint8_t*>(aligned_alloc(64, static_cast<size_t>(size_)));
    }
    return memory_;
  }

 private:
  uint8_t* memory_ = nullptr;
  int64_t size_ = 0;
};

// Lays out x [num_rows, depth] for products of that kind; weight not null: its RMSNorm.
void prepare(int kind, const float* x, int64_t x_stride, const float* weight, float epsilon, int64_t num_rows, int64_t depth,
             float* numbers, uint8_t* prepared) {
  const ProductKernels& kernels = product_kernels();
  const int64_t tiles = num_tiles(num_rows, kernels.float_tile_rows), row_bytes = octavo_prepared_bytes(kind, 1, depth);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = tile_begin(tile, tiles, num_rows), end = tile_begin(tile + 1, tiles, num_rows);
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * x_stride;
      if (weight) {
        rms_norm_row(from, weight, epsilon, depth, numbers);
        from = numbers;
      }
      uint8_t* records = prepared + begin * row_bytes + (row - begin) * static_cast<int64_t>(sizeof(float)) * kSlice;
      kernels.prepare_row(kind, from, depth, records, end - begin);
    }
  }
}

void multiply(const OctavoProduct& product) {
  int64_t num_claimed = 0;
  product_kernels().product_share(&product, nullptr, nullptr, &num_claimed, 0, 1);
}

// One part's columns begin … end − 1, counted from the part's first; `begin` is a multiple of kPanel.
void add_part(const AdaptedProduct& product, const AdaptedRows& rows, const OctavoAdapterPart& part, int64_t begin, int64_t end,
              const uint8_t* prepared, uint8_t* room) {
  const int64_t width = round_up(part.rank, kPanel);
  float* inner = reinterpret_cast<float*>(room);  // [rows, width]
  uint8_t* inner_prepared = room + round_up(rows.count * width * 4, 64);
  OctavoProduct down = {};
  down.weights = part.down;
  down.activations = prepared;
  down.y = inner;
  down.y_stride = width;
  down.num_rows = rows.count;
  down.num_columns = part.rank;
  down.depth = product.depth;
  down.kind = part.kind;
  multiply(down);
  for (int64_t row = 0; row < rows.count; ++row)
    for (int64_t k = 0; k < part.rank; ++k) inner[row * width + k] *= part.scale;
  prepare(part.kind, inner, width, nullptr, 0.0f, rows.count, part.rank, nullptr, inner_prepared);
  OctavoProduct up = {};
  up.weights = static_cast<const uint8_t*>(part.up) + begin / kPanel * panel_bytes(part.kind, part.rank);
  up.activations = inner_prepared;
  up.y = product.y + rows.first * product.y_stride + part.first_column + begin;
  up.residual = up.y;
  up.y_stride = product.y_stride;
  up.num_rows = rows.count;
  up.num_columns = end - begin;
  up.depth = part.rank;
  up.kind = part.kind;
  multiply(up);
}

// One share of the columns of one piece of rows. Columns are divided over threads where there are fewer pieces than threads: each
// then computes the inner numbers of its parts anew.
void add_piece(const AdaptedProduct& product, const AdaptedRows& rows, int share, int num_shares) {
  static thread_local Room numbers, prepared, inner;
  const OctavoAdapterSite& site = rows.adapter->sites[product.site];
  if (!site.num_parts) return;
  int64_t total = 0, widest = 0;
  for (int64_t p = 0; p < site.num_parts; ++p) {
    total += round_up(site.parts[p].num_columns, kPanel);
    if (site.parts[p].rank > widest) widest = site.parts[p].rank;
  }
  const Share panels = share_of(total / kPanel, share, num_shares);
  if (panels.begin == panels.end) return;
  const int kind = site.parts[0].kind;  // a layout in float32, the same for both kinds
  uint8_t* records = prepared.of(octavo_prepared_bytes(kind, rows.count, product.depth));
  prepare(kind, product.x + rows.first * product.x_stride, product.x_stride, product.norm_weight, product.epsilon, rows.count,
          product.depth, reinterpret_cast<float*>(numbers.of(4 * product.depth)), records);
  uint8_t* room = inner.of(round_up(rows.count * round_up(widest, kPanel) * 4, 64) +
                           octavo_prepared_bytes(kind, rows.count, widest));
  int64_t before = 0;  // columns of the parts so far, each a whole number of panels
  for (int64_t p = 0; p < site.num_parts; ++p) {
    const OctavoAdapterPart& part = site.parts[p];
    int64_t begin = panels.begin * kPanel - before, end = panels.end * kPanel - before;
    before += round_up(part.num_columns, kPanel);
    if (begin < 0) begin = 0;
    if (end > part.num_columns) end = part.num_columns;
    if (begin < end) add_part(product, rows, part, begin, end, records, room);
  }
}

template <typename Of>
bool plan_rows(std::vector<AdaptedRows>& rows, const OctavoAdapter* adapters, int64_t num_adapters, int64_t count, Of of) {
  rows.clear();
  for (int64_t row = 0; row < count; ++row) {
    const int32_t index = of(row);
    if (index < -1 || index >= num_adapters) return false;
    if (index < 0) continue;
    const OctavoAdapter* adapter = adapters + index;
    const bool follows = !rows.empty() && rows.back().adapter == adapter && rows.back().first + rows.back().count == row;
    if (follows && rows.back().count < kMost) ++rows.back().count;
    else rows.push_back({row, 1, adapter});
  }
  return true;
}

}  // namespace

bool AdaptedStep::plan(const OctavoAdapter* adapters, int64_t num_adapters, const int32_t* of_tokens, int64_t num_tokens,
                       const int64_t* sample_at, int64_t num_samples) {
  for (int64_t sample = 0; sample < num_samples; ++sample)
    if (sample_at[sample] < 0 || sample_at[sample] >= num_tokens) return false;
  return plan_rows(tokens, adapters, num_adapters, num_tokens, [&](int64_t row) { return of_tokens[row]; }) &&
         plan_rows(samples, adapters, num_adapters, num_samples, [&](int64_t row) { return of_tokens[sample_at[row]]; });
}

void add_to_row(const OctavoAdapter& adapter, int64_t site, int64_t first, int64_t count, const float* x, int64_t depth, float* y) {
  static thread_local Room prepared, inner;
  if (site >= adapter.num_sites) return;
  const OctavoAdapterSite& of = adapter.sites[site];
  const OctavoAdapterPart* end = of.parts + of.num_parts;
  const OctavoAdapterPart* part = std::lower_bound(
      of.parts, end, first, [](const OctavoAdapterPart& one, int64_t column) { return one.first_column < column; });
  if (part == end || part->first_column >= first + count) return;
  const AdaptedRows row = {0, 1, &adapter};
  AdaptedProduct product = {};
  product.depth = depth;
  product.y = y - first;
  uint8_t* records = prepared.of(octavo_prepared_bytes(part->kind, 1, depth));
  prepare(part->kind, x, depth, nullptr, 0.0f, 1, depth, nullptr, records);
  for (; part < end && part->first_column < first + count; ++part) {
    uint8_t* room = inner.of(round_up(round_up(part->rank, kPanel) * 4, 64) + octavo_prepared_bytes(part->kind, 1, part->rank));
    add_part(product, row, *part, 0, part->num_columns, records, room);
  }
}

bool is_adapted(const std::vector<AdaptedRows>& rows, int64_t site) {
  if (site < 0) return false;
  for (const AdaptedRows& some : rows)
    if (site < some.adapter->num_sites && some.adapter->sites[site].num_parts) return true;
  return false;
}

void add_adapters(Threads* threads, const AdaptedProduct& product, const std::vector<AdaptedRows>& rows) {
  const int num_pieces = static_cast<int>(rows.size());
  const int num_shares = num_pieces >= threads->size() ? 1 : threads->size();
  auto body = [&](int index, int) {
    const AdaptedRows& some = rows[static_cast<size_t>(index / num_shares)];
    if (product.site < some.adapter->num_sites) add_piece(product, some, index % num_shares, num_shares);
  };
  run_on(threads, body, num_pieces * num_shares);
}

}  // namespace octavo
