// Distributes the rows that have adapters over threads. Each piece of work is done by one thread from end to end, so that nothing
// waits between the two products.
#include "adapters.h"

#include <stdlib.h>

#include <algorithm>

#include "elementwise.h"

namespace octavo {
namespace {

constexpr int kTogether = 4;  // pieces of one row each that one thread computes together
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

// What one piece of rows needs for its inner numbers, part after part: [rows, width], with width the rank rounded up.
int64_t inner_floats(const OctavoAdapterSite& site, int64_t num_rows) {
  int64_t total = 0;
  for (int64_t p = 0; p < site.num_parts; ++p) total += round_up(site.parts[p].rank, kPanel) * num_rows;
  return total;
}

// inner [rows, width] = x · Aᵀ of one part.
void shrink(const OctavoAdapterPart& part, int64_t num_rows, int64_t depth, const uint8_t* prepared, float* inner) {
  OctavoProduct down = {};
  down.weights = part.down;
  down.activations = prepared;
  down.y = inner;
  down.y_stride = round_up(part.rank, kPanel);
  down.num_rows = num_rows;
  down.num_columns = part.rank;
  down.depth = depth;
  down.kind = part.kind;
  multiply(down);
}

// The same for one row: lists the panels of A.
void list_panels(const OctavoAdapterPart& part, int64_t depth, const uint8_t* prepared, float* inner, std::vector<RowPanel>& list) {
  const int64_t num_bytes = panel_bytes(part.kind, depth);
  const uint8_t* panel = static_cast<const uint8_t*>(part.down);
  for (int64_t k = 0; k < part.rank; k += kPanel, panel += num_bytes)
    list.push_back({reinterpret_cast<const float*>(prepared), panel, inner + k});
}

// y += scale · inner · Bᵀ for one part's columns begin … end − 1, counted from the part's first; `begin` is a multiple of kPanel.
void expand(const AdaptedProduct& product, const AdaptedRows& rows, const OctavoAdapterPart& part, int64_t begin, int64_t end,
            float* inner, uint8_t* inner_prepared) {
  const int64_t width = round_up(part.rank, kPanel);
  for (int64_t row = 0; row < rows.count; ++row)
    for (int64_t k = 0; k < part.rank; ++k) inner[row * width + k] *= part.scale;
  const uint8_t* weights = static_cast<const uint8_t*>(part.up) + begin / kPanel * panel_bytes(part.kind, part.rank);
  float* y = product.y + rows.first * product.y_stride + part.first_column + begin;
  if (rows.count == 1) {
    std::fill(inner + part.rank, inner + width, 0.0f);  // NaN where x is not finite, though A is padded with zeros
    return product_kernels().add_row(part.kind, part.rank, inner, weights, end - begin, y);
  }
  prepare(part.kind, inner, width, nullptr, 0.0f, rows.count, part.rank, nullptr, inner_prepared);
  OctavoProduct up = {};
  up.weights = weights;
  up.activations = inner_prepared;
  up.y = y;
  up.residual = y;
  up.y_stride = product.y_stride;
  up.num_rows = rows.count;
  up.num_columns = end - begin;
  up.depth = part.rank;
  up.kind = part.kind;
  multiply(up);
}

// The columns of a part that belong to a share of all panels, counted from the part's first. `before`: those of the parts before it, each a
// whole number of panels.
Share columns_of(const OctavoAdapterPart& part, const Share& panels, int64_t before) {
  const int64_t begin = panels.begin * kPanel - before, end = panels.end * kPanel - before;
  return {begin < 0 ? 0 : begin, end > part.num_columns ? part.num_columns : end};
}

template <typename Body>
void for_parts(const OctavoAdapterSite& site, int share, int num_shares, Body body) {
  int64_t total = 0, before = 0;
  for (int64_t p = 0; p < site.num_parts; ++p) total += round_up(site.parts[p].num_columns, kPanel);
  const Share panels = share_of(total / kPanel, share, num_shares);
  for (int64_t p = 0; p < site.num_parts; ++p) {
    const Share columns = columns_of(site.parts[p], panels, before);
    before += round_up(site.parts[p].num_columns, kPanel);
    body(site.parts[p], columns);
  }
}

// One share of the columns of some pieces of rows: of several only if each has one row, so that their A's are multiplied together. Columns are
// divided over threads where there are fewer pieces than threads: each then computes the inner numbers of its parts anew.
void add_pieces(const AdaptedProduct& product, const AdaptedRows* some, int64_t count, int share, int num_shares) {
  static thread_local Room numbers, prepared, inner, inner_prepared;
  static thread_local std::vector<RowPanel> list;
  int64_t num_inner = 0, num_prepared = 0, widest = 0;
  const auto site_of = [&](const AdaptedRows& rows) -> const OctavoAdapterSite& { return rows.adapter->sites[product.site]; };
  const auto changes = [&](const AdaptedRows& rows) { return product.site < rows.adapter->num_sites && site_of(rows).num_parts; };
  // A layout in float32, the same for both kinds.
  const auto bytes_of = [&](int64_t num_rows, int64_t depth) { return round_up(octavo_prepared_bytes(OCTAVO_FLOAT32, num_rows, depth), 64); };
  for (int64_t i = 0; i < count; ++i) {
    if (!changes(some[i])) continue;
    num_inner += inner_floats(site_of(some[i]), some[i].count);
    num_prepared += bytes_of(some[i].count, product.depth);
    for (int64_t p = 0; p < site_of(some[i]).num_parts; ++p) widest = std::max(widest, site_of(some[i]).parts[p].rank);
  }
  if (!num_inner) return;
  uint8_t* records = prepared.of(num_prepared);
  float* room = reinterpret_cast<float*>(inner.of(4 * num_inner));
  list.clear();
  int kind = -1;
  const auto multiply_list = [&] {
    if (!list.empty()) product_kernels().row_panels(kind, product.depth, list.data(), static_cast<int64_t>(list.size()));
    list.clear();
  };
  float* at = room;
  for (int64_t i = 0; i < count; ++i) {
    const AdaptedRows& rows = some[i];
    if (!changes(rows)) continue;
    prepare(OCTAVO_FLOAT32, product.x + rows.first * product.x_stride, product.x_stride, product.norm_weight, product.epsilon, rows.count,
            product.depth, reinterpret_cast<float*>(numbers.of(4 * product.depth)), records);
    for_parts(site_of(rows), share, num_shares, [&](const OctavoAdapterPart& part, const Share& columns) {
      if (columns.begin < columns.end) {
        if (part.kind != kind) multiply_list();
        kind = part.kind;
        if (rows.count == 1) list_panels(part, product.depth, records, at, list);
        else shrink(part, rows.count, product.depth, records, at);
      }
      at += round_up(part.rank, kPanel) * rows.count;
    });
    records += bytes_of(rows.count, product.depth);
  }
  multiply_list();
  at = room;
  for (int64_t i = 0; i < count; ++i) {
    const AdaptedRows& rows = some[i];
    if (!changes(rows)) continue;
    uint8_t* scaled = inner_prepared.of(bytes_of(rows.count, widest));
    for_parts(site_of(rows), share, num_shares, [&](const OctavoAdapterPart& part, const Share& columns) {
      if (columns.begin < columns.end) expand(product, rows, part, columns.begin, columns.end, at, scaled);
      at += round_up(part.rank, kPanel) * rows.count;
    });
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
    const int64_t inner_bytes = round_up(round_up(part->rank, kPanel) * 4, 64);
    uint8_t* room = inner.of(inner_bytes + octavo_prepared_bytes(part->kind, 1, part->rank));
    shrink(*part, 1, depth, records, reinterpret_cast<float*>(room));
    expand(product, row, *part, 0, part->num_columns, reinterpret_cast<float*>(room), room + inner_bytes);
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
  const bool is_single = std::all_of(rows.begin(), rows.end(), [](const AdaptedRows& some) { return some.count == 1; });
  // As many together as leave each thread a group: their A's are multiplied four panels at a time.
  const int most = num_shares > 1 || !is_single ? 1 : std::min(kTogether, num_pieces / threads->size());
  const int num_groups = (num_pieces + most - 1) / most;
  auto body = [&](int index, int) {
    const Share group = share_of(num_pieces, index / num_shares, num_groups);
    add_pieces(product, rows.data() + group.begin, group.end - group.begin, index % num_shares, num_shares);
  };
  run_on(threads, body, num_groups * num_shares);
}

}  // namespace octavo
