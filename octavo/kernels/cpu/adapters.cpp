// Divides the work of adapters over the threads of a product.
#include "adapters.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "elementwise.h"

namespace octavo {
namespace {

constexpr int64_t kMost = 32;  // rows of a piece: enough to use what was read of A and B, and few enough to share a prompt

constexpr int64_t kFew = 2;  // rows that are multiplied one by one: a tile's layout is not worth it

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

// Lays out x [num_rows, depth] for products of that kind.
void prepare(int kind, const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, uint8_t* prepared) {
  product_kernels().prepare_share(kind, x, x_stride, num_rows, depth, prepared, 0, 1);
}

void multiply(const OctavoProduct& product) {
  int64_t num_claimed = 0;
  product_kernels().product_share(&product, nullptr, nullptr, &num_claimed, 0, 1);
}

int64_t width_of(const OctavoAdapterPart& part) { return round_up(part.rank, kPanel); }

// Rows of x, with their norm, and zeros up to four whole quarters. Kept for the tasks of the same rows.
struct NormedRows {
  Room room;
  const AdaptedRows* rows = nullptr;

  const float* of(const AdaptedProduct& product, const AdaptedRows* wanted) {
    const int64_t stride = kQuarters * quarter_of(product.depth);
    float* numbers = reinterpret_cast<float*>(room.of(wanted->count * stride * 4));
    if (rows == wanted) return numbers;
    rows = wanted;
    for (int64_t row = 0; row < wanted->count; ++row) {
      const float* from = product.x + (wanted->first + row) * product.x_stride;
      float* to = numbers + row * stride;
      if (product.norm_weight) rms_norm_row(from, product.norm_weight, product.epsilon, product.depth, to);
      else memcpy(to, from, sizeof(float) * static_cast<size_t>(product.depth));
      memset(to + product.depth, 0, sizeof(float) * static_cast<size_t>(stride - product.depth));
    }
    return numbers;
  }
};

NormedRows& normed_rows() {
  static thread_local NormedRows rows;
  return rows;
}

// The sums of two or four quarters of one part, for all of its rows: [rows, width], halves after each other.
void shrink_task(const AdaptedProduct& product, const ShrinkTask& task, const float* x) {
  static thread_local Room sums, prepared;
  const ProductKernels& kernels = product_kernels();
  const OctavoAdapterPart& part = *task.of->part;
  const int64_t quarter = quarter_of(product.depth), stride = kQuarters * quarter, width = width_of(part);
  const int64_t num_rows = task.of->rows->count, size = num_rows * width;
  const int64_t quarter_bytes = octavo_packed_bytes(part.kind, part.rank, quarter);
  const uint8_t* weights = static_cast<const uint8_t*>(part.down) + task.first * quarter_bytes;
  float* y = task.of->inner + (task.first ? size : 0);
  if (num_rows <= kFew) {
    for (int64_t row = 0; row < num_rows; ++row)
      kernels.shrink_row(part.kind, weights, quarter_bytes, task.count, x + row * stride + task.first * quarter, quarter,
                         width / kPanel, y + row * width);
    if (task.count == kQuarters) memset(y + size, 0, sizeof(float) * static_cast<size_t>(size));
    return;
  }
  float* of_quarters = reinterpret_cast<float*>(sums.of(kQuarters * size * 4));
  uint8_t* records = prepared.of(octavo_prepared_bytes(part.kind, num_rows, quarter));
  for (int i = 0; i < task.count; ++i) {
    prepare(part.kind, x + (task.first + i) * quarter, stride, num_rows, quarter, records);
    OctavoProduct down = {};
    down.weights = weights + i * quarter_bytes;
    down.activations = records;
    down.y = of_quarters + i * size;
    down.y_stride = width;
    down.num_rows = num_rows;
    down.num_columns = width;
    down.depth = quarter;
    down.kind = part.kind;
    multiply(down);
  }
  for (int i = 0; i < task.count; i += 2, y += size)
    for (int64_t at = 0; at < size; ++at) y[at] = of_quarters[i * size + at] + of_quarters[(i + 1) * size + at];
}

// Columns begin … end − 1 of a part, counted from its first; `begin` is a multiple of kPanel.
void expand_part(const AdaptedProduct& product, const AdaptedPart& one, int64_t begin, int64_t end) {
  static thread_local Room sums, prepared;
  const OctavoAdapterPart& part = *one.part;
  const int64_t num_rows = one.rows->count, width = width_of(part), size = num_rows * width;
  float* inner = reinterpret_cast<float*>(sums.of(size * 4));
  for (int64_t at = 0; at < size; ++at) inner[at] = (one.inner[at] + one.inner[size + at]) * part.scale;
  const uint8_t* weights = static_cast<const uint8_t*>(part.up) + begin / kPanel * panel_bytes(part.kind, part.rank);
  float* y = product.y + one.rows->first * product.y_stride + part.first_column + begin;
  if (num_rows <= kFew) {
    for (int64_t row = 0; row < num_rows; ++row)
      product_kernels().expand_row(part.kind, weights, inner + row * width, part.rank, end - begin, y + row * product.y_stride);
    return;
  }
  uint8_t* records = prepared.of(octavo_prepared_bytes(part.kind, num_rows, width));
  prepare(part.kind, inner, width, num_rows, width, records);
  OctavoProduct up = {};
  up.weights = weights;
  up.activations = records;
  up.y = y;
  up.residual = y;
  up.y_stride = product.y_stride;
  up.num_rows = num_rows;
  up.num_columns = end - begin;
  up.depth = part.rank;
  up.kind = part.kind;
  multiply(up);
}

// The first lines of what is read next: from there on the hardware prefetches by itself.
constexpr int64_t kFirstLines = 32;

void fetch_first(const OctavoAdapterPart& part, int64_t begin, int64_t end) {  // columns of the product
  const int64_t first = part.first_column, last = first + part.num_columns;
  const int64_t from = begin > first ? begin : first, to = end < last ? end : last;
  if (from >= to) return;
  const int64_t bytes = panel_bytes(part.kind, part.rank) / kPanel;
  const uint8_t *at = static_cast<const uint8_t*>(part.up) + (from - first) * bytes, *limit = at + (to - from) * bytes;
  for (int64_t line = 0; line < kFirstLines && at + line * 64 < limit; ++line) __builtin_prefetch(at + line * 64, 0, 2);
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
  if (site >= adapter.num_sites) return;
  const OctavoAdapterSite& of = adapter.sites[site];
  const OctavoAdapterPart *part = of.parts, *end = of.parts + of.num_parts;
  part = std::lower_bound(part, end, first, [](const OctavoAdapterPart& one, int64_t column) { return one.first_column < column; });
  static thread_local Room inner;
  const AdaptedRows row = {0, 1, &adapter};
  AdaptedProduct product = {};
  product.x = x;
  product.depth = depth;
  product.y = y - first;
  NormedRows& numbers = normed_rows();
  numbers.rows = nullptr;
  for (; part < end && part->first_column < first + count; ++part) {
    const AdaptedPart one = {&row, part, reinterpret_cast<float*>(inner.of(8 * width_of(*part)))};
    shrink_task(product, {&one, 0, kQuarters}, numbers.of(product, &row));
    expand_part(product, one, 0, part->num_columns);
  }
}

bool is_adapted(const std::vector<AdaptedRows>& rows, int64_t site) {
  if (site < 0) return false;
  for (const AdaptedRows& some : rows)
    if (site < some.adapter->num_sites && some.adapter->sites[site].num_parts) return true;
  return false;
}

void AdaptedStep::plan_work(const std::vector<AdaptedRows>& rows, int64_t site, int num_threads) {
  parts_.clear();
  tasks_.clear();
  for (const AdaptedRows& some : rows) {
    if (site >= some.adapter->num_sites) continue;
    const OctavoAdapterSite& of = some.adapter->sites[site];
    for (int64_t p = 0; p < of.num_parts; ++p) parts_.push_back({&some, of.parts + p, nullptr});
  }
  // Few tasks are halved, so that threads have equally much to do.
  const int num_halves = static_cast<int>(parts_.size()) % num_threads && parts_.size() < 8 ? 2 : 1;
  int64_t size = 0;
  for (const AdaptedPart& part : parts_) {
    size += 2 * part.rows->count * width_of(*part.part);
    for (int half = 0; half < num_halves; ++half)
      tasks_.push_back({&part, half * kQuarters / num_halves, kQuarters / num_halves});
  }
  if (static_cast<int64_t>(inner_.size()) < size) inner_.resize(static_cast<size_t>(size));
  float* inner = inner_.data();
  for (AdaptedPart& part : parts_) {
    part.inner = inner;
    inner += 2 * part.rows->count * width_of(*part.part);
  }
  claimed_.assign(tasks_.size(), 0);
  num_done_ = 0;
}

// The tasks of this range that no other thread has begun.
void AdaptedStep::shrink(const AdaptedProduct& product, Share tasks) {
  NormedRows& x = normed_rows();
  x.rows = nullptr;
  for (int64_t t = tasks.begin; t < tasks.end; ++t) {
    if (__atomic_exchange_n(&claimed_[static_cast<size_t>(t)], 1, __ATOMIC_RELAXED)) continue;
    const ShrinkTask& task = tasks_[static_cast<size_t>(t)];
    shrink_task(product, task, x.of(product, task.of->rows));
    __atomic_fetch_add(&num_done_, 1, __ATOMIC_RELEASE);
  }
}

// Columns begin … end − 1 of the product, for some of the parts.
void AdaptedStep::expand(const AdaptedProduct& product, Share parts, int64_t begin, int64_t end) const {
  for (int64_t p = parts.begin; p < parts.end; ++p) {
    const AdaptedPart& one = parts_[static_cast<size_t>(p)];
    const int64_t first = one.part->first_column, last = first + one.part->num_columns;
    const int64_t from = begin > first ? begin : first, to = end < last ? end : last;
    if (p + 1 < parts.end) fetch_first(*parts_[static_cast<size_t>(p + 1)].part, begin, end);
    if (from < to) expand_part(product, one, from - first, to - first);
  }
}

void AdaptedStep::run(Threads* threads, const OctavoProduct* base, const OctavoProduct* next, Ahead* ahead,
                      const AdaptedProduct& product, const std::vector<AdaptedRows>& rows) {
  const int num_threads = threads->size();
  plan_work(rows, product.site, num_threads);
  const int64_t num_tasks = static_cast<int64_t>(tasks_.size()), num_parts = static_cast<int64_t>(parts_.size());
  const Share all_parts = {0, num_parts};
  // A thread can expand the columns of its own share at once, if it knows which these are, and panels do not lie across two shares.
  const Units first = units_of(base, base->num_rows, 0, num_threads);
  bool is_alone = first.pool == first.count && product.num_before % kPanel == 0;
  for (const AdaptedPart& part : parts_) is_alone = is_alone && part.part->first_column % kPanel == 0;
  alignas(64) int64_t num_claimed = 0;
  const ProductKernels& kernels = product_kernels();

  auto body = [&](int index, int num_shares) {
    shrink(product, share_of(num_tasks, index, num_shares));
    const Units own = units_of(base, base->num_rows, index, num_shares);
    const int64_t half = own.apart ? own.num_panels * kPanel : 0;  // from the columns of gate to those of up
    const int64_t begin = own.begin * own.per_unit * kPanel, last = own.end * own.per_unit * kPanel;
    const int64_t end = half && last > half ? half : last < base->num_columns ? last : base->num_columns;
    const int64_t before = product.num_before;
    fetch_first(*parts_[0].part, before + begin, before + end);
    kernels.product_share(base, next, ahead ? ahead + index : nullptr, &num_claimed, index, num_shares);
    if (!is_alone) return;
    shrink(product, {0, num_tasks});
    wait_until([&] { return __atomic_load_n(&num_done_, __ATOMIC_ACQUIRE) == num_tasks; });
    if (before) {
      const Share panels = share_of(before / kPanel, index, num_shares);
      expand(product, all_parts, panels.begin * kPanel, panels.end * kPanel);
    }
    if (begin >= end) return;
    expand(product, all_parts, before + begin, before + end);
    if (half) expand(product, all_parts, before + half + begin, before + half + end);
    finish_columns(base, product, begin, end);
  };
  run_on(threads, body);
  if (is_alone) return;
  // Rows are divided instead, which are whole.
  auto expand_rows = [&](int index, int num_shares) {
    const Share pieces = share_of(static_cast<int64_t>(rows.size()), index, num_shares);
    Share parts = {0, 0};
    for (int64_t p = 0; p < num_parts; ++p) {
      const int64_t piece = parts_[static_cast<size_t>(p)].rows - rows.data();
      if (piece < pieces.begin) parts.begin = p + 1;
      if (piece < pieces.end) parts.end = p + 1;
    }
    if (parts.begin < parts.end) expand(product, parts, 0, INT64_MAX);
  };
  run_on(threads, expand_rows);
  const int64_t num_columns = is_gated(product.finish) ? base->num_columns / 2 : base->num_columns;
  auto finish_some = [&](int index, int num_shares) {
    const Share panels = share_of((num_columns + kPanel - 1) / kPanel, index, num_shares);
    const int64_t end = panels.end * kPanel;
    finish_columns(base, product, panels.begin * kPanel, end < num_columns ? end : num_columns);
  };
  if (product.finish != OCTAVO_FINISH_PLAIN) run_on(threads, finish_some);
}

// Columns begin … end − 1 of all rows; of a gated product, counted in gate.
void AdaptedStep::finish_columns(const OctavoProduct* base, const AdaptedProduct& product, int64_t begin, int64_t end) const {
  if (product.finish == OCTAVO_FINISH_PLAIN) return;
  const int64_t half = is_gated(product.finish) ? base->num_columns / 2 : 0;
  for (int64_t row = 0; row < base->num_rows; ++row) {
    const float* x = product.y + row * product.y_stride + begin;
    product_kernels().finish_row(product.finish, x, x + half, end - begin,
                                 product.finished + row * product.finished_stride + begin);
  }
}

}  // namespace octavo
