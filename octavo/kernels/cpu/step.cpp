// Runs the operations of a step one after the other, each on all threads.
#include "step.h"

#include <math.h>
#include <string.h>

#include <chrono>

#include "ahead.h"
#include "elementwise.h"

namespace octavo {
namespace {

// With fewer tokens and little work for each, waking other threads costs more than it saves.
constexpr int64_t kFewTokens = 8;

template <typename Body>
void for_tokens(Threads* threads, int64_t count, Body body) {
  if (count < kFewTokens) body(0, count);
  else parallel_for(threads, count, body);
}

// Whether all indices are below `end`. They come with a request: a wrong one would read past the end of a table.
bool are_within(const int64_t* indices, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] < 0 || indices[i] >= end) return false;
  return true;
}

int embed(Threads* threads, const OctavoEmbed& op, const OctavoStep& step) {
  const int64_t* ids = op.positions ? step.positions : step.input_ids;
  if (!are_within(ids, step.num_tokens, op.num_columns)) return -1;
  for_tokens(threads, step.num_tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float* y = op.y + token * op.depth;
      if (!op.positions) {
        octavo_read_columns(op.kind, op.table, op.num_columns, op.depth, ids + token, 1, y);
        if (op.factor != 1.0f) for (int64_t k = 0; k < op.depth; ++k) y[k] *= op.factor;
        continue;
      }
      const float* row = static_cast<const float*>(op.table) + ids[token] * op.depth;
      for (int64_t k = 0; k < op.depth; ++k) y[k] += row[k];
    }
  });
  return 0;
}

void rotate(Threads* threads, const OctavoRotate& op, const OctavoStep& step) {
  for_tokens(threads, step.num_tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float position = static_cast<float>(step.positions[token]);
      float* y = op.y + token * op.num_frequencies * 2;
      for (int64_t i = 0; i < op.num_frequencies; ++i) {
        const float angle = position * op.frequencies[i];
        const float stretch = op.frequencies[i] == 0.0f ? 1.0f : op.amplitude;
        y[2 * i] = stretch * cosf(angle);
        y[2 * i + 1] = stretch * sinf(angle);
      }
    }
  });
}

// Sums in double, in row order: float32 would lose the difference of large numbers.
void layer_norm_row(const float* x, const OctavoNorm& norm, int64_t size, float* y, bool adds) {
  double sum = 0.0, squares = 0.0;
  for (int64_t k = 0; k < size; ++k) sum += x[k];
  const double mean = sum / static_cast<double>(size);
  for (int64_t k = 0; k < size; ++k) squares += (x[k] - mean) * (x[k] - mean);
  const double inverse = 1.0 / sqrt(squares / static_cast<double>(size) + norm.epsilon);
  for (int64_t k = 0; k < size; ++k) {
    const float scaled = static_cast<float>((x[k] - mean) * inverse);
    const float normed = scaled * norm.weight[k] + norm.bias[k];
    y[k] = adds ? y[k] + normed : normed;
  }
}

void normalise(Threads* threads, const OctavoNorm& norm, const float* x, int64_t x_stride, int64_t num_rows, int64_t size,
               float* y, int64_t y_stride, bool adds = false) {
  if (!norm.bias) {
    const auto rms_norm = adds ? octavo_rms_norm_add : octavo_rms_norm;
    return rms_norm(threads, x, x_stride, norm.weight, norm.epsilon, num_rows, size, y, y_stride);
  }
  for_tokens(threads, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) layer_norm_row(x + row * x_stride, norm, size, y + row * y_stride, adds);
  });
}

// Adds what adapters add to a product's rows. A product that has more to do than to be stored is in `unfinished` until then.
void adapt(Threads* threads, const OctavoLinear& op, int64_t num_rows, const std::vector<AdaptedRows>& rows) {
  const OctavoProduct& first = op.products[0];
  const bool is_finished = first.finish == OCTAVO_FINISH_PLAIN;
  AdaptedProduct product = {};
  product.x = op.norm.bias ? op.normed : op.x;
  product.x_stride = op.norm.bias ? op.depth : op.x_stride;
  product.depth = op.depth;
  product.norm_weight = op.norm.bias ? nullptr : op.norm.weight;
  product.epsilon = op.norm.epsilon;
  product.y = is_finished ? first.y - op.first_column : op.unfinished;
  product.y_stride = is_finished ? first.y_stride : first.num_columns;
  product.site = op.site;
  add_adapters(threads, product, rows);
  if (is_finished) return;
  const auto finish_row = product_kernels().finish_row;
  const int64_t size = is_gated(first.finish) ? first.num_columns / 2 : first.num_columns;
  for_tokens(threads, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      finish_row(first.finish, op.unfinished + row * first.num_columns, size, first.y + row * first.y_stride);
  });
}

// adapted: the rows that have adapters.
void linear(Threads* threads, const OctavoLinear& op, int64_t num_rows, const OctavoProduct* after, Ahead* ahead,
            const std::vector<AdaptedRows>& adapted) {
  const int32_t kind = op.products[0].kind;
  if (op.norm.bias) {
    normalise(threads, op.norm, op.x, op.x_stride, num_rows, op.depth, op.normed, op.depth);
    octavo_prepare(threads, kind, op.normed, op.depth, num_rows, op.depth, op.prepared);
  } else {
    octavo_rms_norm_prepare(threads, kind, op.x, op.x_stride, op.norm.weight, op.norm.epsilon, num_rows, op.depth,
                            octavo_tile_rows(kind), op.prepared);
  }
  const bool changes = op.site >= 0 && !adapted.empty() && is_adapted(adapted, op.site);
  for (int64_t i = 0; i < op.num_products; ++i) {
    OctavoProduct product = op.products[i];
    product.num_rows = num_rows;
    product.activations = op.prepared;
    const OctavoProduct* next = i + 1 < op.num_products ? op.products + i + 1 : after;
    if (!changes || product.finish == OCTAVO_FINISH_PLAIN) {
      run_product(threads, &product, next, ahead);
      continue;
    }
    product.y = op.unfinished;
    product.y_stride = product.num_columns;
    product.finish = OCTAVO_FINISH_PLAIN;
    run_product(threads, &product, next, ahead);
  }
  if (changes) adapt(threads, op, num_rows, adapted);
}

int gather(Threads* threads, const OctavoMove& op, const OctavoStep& step) {
  if (!are_within(step.sample_at, step.num_samples, step.num_tokens)) return -1;
  for_tokens(threads, step.num_samples, [&](int64_t begin, int64_t end) {
    for (int64_t sample = begin; sample < end; ++sample) {
      memcpy(op.y + sample * op.y_stride, op.x + step.sample_at[sample] * op.x_stride, sizeof(float) * op.size);
    }
  });
  return 0;
}

int attend(Threads* threads, OctavoAttention call, int32_t group, const OctavoStep& step) {
  call.query_start = step.query_start;
  call.seq_lens = step.seq_lens;
  call.page_table = step.page_table + group * step.num_rows * step.table_stride;
  call.table_stride = step.table_stride;
  call.num_rows = static_cast<int32_t>(step.num_rows);
  return octavo_attention(threads, &call);
}

int qk_norm_rope_store(Threads* threads, OctavoQkNormRope call, int32_t group, const OctavoStep& step) {
  call.slots = step.slots + group * step.num_tokens;
  call.num_tokens = static_cast<int32_t>(step.num_tokens);
  return octavo_qk_norm_rope_store(threads, &call);
}

// The product whose weights are read next after this operation: they are prefetched while it ends.
const OctavoProduct* next_product(const OctavoOp* op, const OctavoOp* end) {
  for (++op; op < end; ++op)
    if (op->code == OCTAVO_LINEAR) return op->linear.products;
  return nullptr;
}

// From this many decode rows on, products have time to prefetch more than weights.
constexpr int64_t kManyRows = 24;

// Plans the prefetches of the operations up to the next attention. Called before the first operation and after every attention.
void plan_ahead(PagesAhead& ahead, int num_threads, const OctavoOp* op, const OctavoOp* end, const OctavoStep& step) {
  ahead.forget();
  if (step.num_rows < kManyRows || step.num_tokens != step.num_rows) return;
  while (op < end && op->code != OCTAVO_ATTEND) ++op;
  if (op == end) return;
  const int32_t* page_table = step.page_table + op->group * step.num_rows * step.table_stride;
  ahead.plan(op->attention, page_table, step.table_stride, step.seq_lens, step.num_rows, num_threads);
}

int run(Threads* threads, const OctavoOp* op, const OctavoOp* end, const OctavoStep& step, Ahead* ahead,
        const AdaptedStep& adapted) {
  const int64_t count = op->count == OCTAVO_PER_TOKEN ? step.num_tokens : step.num_samples;
  const OctavoMove& move = op->move;
  switch (op->code) {
    case OCTAVO_EMBED: return embed(threads, op->embed, step);
    case OCTAVO_ROTATE: rotate(threads, op->rotate, step); return 0;
    case OCTAVO_LINEAR:
      if (count > 0) {
        const auto& rows = op->count == OCTAVO_PER_TOKEN ? adapted.tokens : adapted.samples;
        linear(threads, op->linear, count, next_product(op, end), ahead, rows);
      }
      return 0;
    case OCTAVO_GATE:
      octavo_silu_mul(threads, op->gate.x, op->gate.x_stride, count, op->gate.size, op->gate.y, op->gate.y_stride);
      return 0;
    case OCTAVO_QK_NORM_ROPE_STORE: return qk_norm_rope_store(threads, op->qk_norm_rope, op->group, step);
    case OCTAVO_ATTEND: return attend(threads, op->attention, op->group, step);
    case OCTAVO_GATHER: return gather(threads, move, step);
    case OCTAVO_NORM:
      normalise(threads, move.norm, move.x, move.x_stride, count, move.size, move.y, move.y_stride, move.adds);
      return 0;
    case OCTAVO_CAP:
      octavo_cap(threads, op->cap.x, op->cap.x_stride, count, op->cap.size, op->cap.limit);
      return 0;
    case OCTAVO_EXPERTS:
      run_experts(threads, op->experts, count, op->count == OCTAVO_PER_TOKEN ? adapted.tokens : adapted.samples);
      return 0;
    default: return -1;
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

int64_t octavo_run(Threads* threads, const OctavoOp* ops, int64_t num_ops, const OctavoStep* step, double* seconds) {
  using Clock = std::chrono::steady_clock;
  static thread_local PagesAhead ahead;  // kept from call to call, to avoid allocations
  static thread_local AdaptedStep adapted;
  adapted.forget();
  if (step->adapter_of && !adapted.plan(step->adapters, step->num_adapters, step->adapter_of, step->num_tokens, step->sample_at,
                                        step->num_samples))
    return 1;
  for (int64_t i = 0; i < num_ops; ++i) {
    if (i == 0 || ops[i - 1].code == OCTAVO_ATTEND) plan_ahead(ahead, threads->size(), ops + i, ops + num_ops, *step);
    const auto start = seconds ? Clock::now() : Clock::time_point();
    if (run(threads, ops + i, ops + num_ops, *step, ahead.shares(), adapted) != 0) return 1 + i;
    if (seconds) seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
  }
  return 0;
}
