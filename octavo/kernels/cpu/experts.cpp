// Chooses experts, sorts (token, expert) pairs by expert, and runs the products of all experts in parallel.
#include "experts.h"

#include <math.h>
#include <string.h>

#include "elementwise.h"

namespace octavo {
namespace {

constexpr int64_t kLine = 64;
// With fewer tokens and little work for each, waking other threads costs more than it saves.
constexpr int64_t kFewTokens = 8;
// From this many rows of one expert on, all threads prepare them together; fewer are prepared by one thread.
constexpr int64_t kWorthSharing = 16;

// The scratch memory of a call, for P = T · num_chosen pairs. A pair's "place" is its index in the order by expert.
struct Room {
  float* weights;      // [P] by token
  int32_t* chosen;     // [P] by token: experts, counted from the first that is held; −1: not held
  int32_t* places;     // [P] by token; −1: its expert is not held
  int32_t* tokens;     // [P] by place
  int32_t* starts;     // [num_experts + 1]: an expert's first place
  int32_t* used;       // [num_experts]: experts that have tokens
  int64_t* claimed;    // [num_experts]: claimed units of its product
  OctavoProduct* products;  // [num_experts]: of the used experts
  float* rows;         // [P, depth] by place: the inputs, later the outputs
  float* inner;        // [P, inner]
  float* gate_up;      // [P, 2 · inner], if the gate is not fused into the product, or adapters may come between the two
  void* prepared;      // the activations of one product
  int64_t num_bytes;
};

template <typename Body>
void for_tokens(Threads* threads, int64_t count, Body body) {
  const auto all = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) body(token);
  };
  if (count < kFewTokens) all(0, count);
  else parallel_for(threads, count, all);
}

bool is_fused(const OctavoExperts& call) {
  const OctavoProduct& product = call.gate_up[0];
  const bool is_silu = call.alpha == 1.0f && call.limit == 0.0f && call.offset == 0.0f;
  return is_silu && product.bias == nullptr && call.inner % kPanel == 0;
}

Room room_of(const OctavoExperts& call, int64_t num_tokens) {
  const int64_t num_pairs = num_tokens * call.num_chosen, depth = call.depth, inner = call.inner;
  int64_t at = 0;
  const auto take = [&](int64_t num_bytes) {
    const int64_t start = at;
    at += round_up(num_bytes, kLine);
    return static_cast<char*>(call.room) + start;
  };
  const int64_t first = octavo_prepared_bytes(call.gate_up[0].kind, num_pairs, depth);
  const int64_t second = octavo_prepared_bytes(call.down[0].kind, num_pairs, inner);
  Room room;
  room.weights = reinterpret_cast<float*>(take(4 * num_pairs));
  room.chosen = reinterpret_cast<int32_t*>(take(4 * num_pairs));
  room.places = reinterpret_cast<int32_t*>(take(4 * num_pairs));
  room.tokens = reinterpret_cast<int32_t*>(take(4 * num_pairs));
  room.starts = reinterpret_cast<int32_t*>(take(4 * (call.num_experts + 1)));
  room.used = reinterpret_cast<int32_t*>(take(4 * call.num_experts));
  room.claimed = reinterpret_cast<int64_t*>(take(8 * call.num_experts));
  room.products = reinterpret_cast<OctavoProduct*>(take(static_cast<int64_t>(sizeof(OctavoProduct)) * call.num_experts));
  room.rows = reinterpret_cast<float*>(take(4 * num_pairs * depth));
  room.inner = reinterpret_cast<float*>(take(4 * num_pairs * inner));
  room.gate_up = reinterpret_cast<float*>(take(is_fused(call) && call.gate_up_site < 0 ? 0 : 8 * num_pairs * inner));
  room.prepared = take(first > second ? first : second);
  room.num_bytes = at;
  return room;
}

// Finds the num_chosen largest logits by insertion; of equal ones the first. NaN counts as the smallest.
void choose(const float* logits, int32_t num_experts, int32_t num_chosen, int32_t* chosen, float* largest) {
  int32_t count = 0;
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    const float logit = logits[expert] == logits[expert] ? logits[expert] : -INFINITY;
    if (count == num_chosen && !(logit > largest[count - 1])) continue;
    int32_t at = count < num_chosen ? count++ : count - 1;
    for (; at > 0 && logit > largest[at - 1]; --at) {
      largest[at] = largest[at - 1];
      chosen[at] = chosen[at - 1];
    }
    largest[at] = logit;
    chosen[at] = expert;
  }
}

// `weights` holds the chosen experts' logits. A NaN among all logits makes the token's weights NaN.
void weigh(const OctavoExperts& call, const float* logits, float* weights) {
  const double top = weights[0];
  double sum = 0.0, broken = 0.0;
  for (int32_t expert = 0; expert < call.num_experts; ++expert) {
    if (!call.is_normalised) sum += exp(logits[expert] - top);
    if (logits[expert] != logits[expert]) broken = NAN;
  }
  for (int32_t i = 0; call.is_normalised && i < call.num_chosen; ++i) sum += exp(weights[i] - top);
  for (int32_t i = 0; i < call.num_chosen; ++i) weights[i] = static_cast<float>(exp(weights[i] - top) / sum + broken);
}

// Counting sort: within an expert tokens keep their order. Returns the number of experts that have tokens.
int64_t sort_pairs(const OctavoExperts& call, const Room& room, int64_t num_tokens) {
  const int64_t num_pairs = num_tokens * call.num_chosen;
  memset(room.starts, 0, sizeof(int32_t) * static_cast<size_t>(call.num_experts + 1));
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (room.chosen[pair] >= 0) ++room.starts[room.chosen[pair] + 1];
  }
  int64_t num_used = 0;
  for (int32_t expert = 0; expert < call.num_held; ++expert) {
    if (room.starts[expert + 1]) room.used[num_used++] = expert;
    room.starts[expert + 1] += room.starts[expert];
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {  // a start advances, and ends as the start of the next expert
    if (room.chosen[pair] < 0) {
      room.places[pair] = -1;
      continue;
    }
    room.places[pair] = room.starts[room.chosen[pair]]++;
    room.tokens[room.places[pair]] = static_cast<int32_t>(pair / call.num_chosen);
  }
  for (int32_t expert = call.num_held; expert > 0; --expert) room.starts[expert] = room.starts[expert - 1];
  room.starts[0] = 0;
  return num_used;
}

// make(place) fills rows [P, depth] at a place; then each expert's rows are prepared for its product.
template <typename Make>
void prepare(Threads* threads, const Room& room, int64_t num_used, int kind, const float* rows, int64_t depth, Make make) {
  const auto share = product_kernels().prepare_share;
  auto body = [&](int index, int num_shares) {
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t start = room.starts[room.used[i]], count = room.starts[room.used[i] + 1] - start;
      const bool is_shared = count >= kWorthSharing;
      if (!is_shared && i % num_shares != index) continue;
      const Share mine = is_shared ? share_of(count, index, num_shares) : Share{0, count};
      for (int64_t row = mine.begin; row < mine.end; ++row) make(start + row);
      char* to = static_cast<char*>(room.prepared) + octavo_prepared_bytes(kind, start, depth);
      share(kind, rows + start * depth, depth, count, depth, to, is_shared ? index : 0, is_shared ? num_shares : 1);
    }
  };
  run_on(threads, body);
}

// One product per used expert. Threads go on to the next product without waiting for each other.
void multiply(Threads* threads, const Room& room, int64_t num_used, const OctavoProduct* products, float* y,
              int64_t y_stride, int finish) {
  for (int64_t i = 0; i < num_used; ++i) {
    const int64_t start = room.starts[room.used[i]];
    OctavoProduct& product = room.products[i] = products[room.used[i]];
    product.num_rows = room.starts[room.used[i] + 1] - start;
    product.activations =
        static_cast<const char*>(room.prepared) + octavo_prepared_bytes(product.kind, start, product.depth);
    product.y = y + start * y_stride;
    product.y_stride = y_stride;
    product.finish = finish;
    room.claimed[i] = 0;
  }
  const auto share = product_kernels().product_share;
  auto body = [&](int index, int num_shares) {
    for (int64_t i = 0; i < num_used; ++i) {
      const OctavoProduct* next = i + 1 < num_used ? room.products + i + 1 : nullptr;
      share(room.products + i, next, nullptr, room.claimed + i, index, num_shares);
    }
  };
  run_on(threads, body);
}

// y [P, width] by place += what the adapter of each pair's token adds to its expert's product of x [P, depth].
void adapt(Threads* threads, const Room& room, int64_t num_used, int64_t site, const OctavoAdapter* const* of_tokens, const float* x,
           int64_t depth, float* y, int64_t width) {
  const int64_t num_places = num_used ? room.starts[room.used[num_used - 1] + 1] : 0;
  parallel_for(threads, num_places, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t expert = room.used[i], first = room.starts[expert], last = room.starts[expert + 1];
      for (int64_t place = first > begin ? first : begin; place < last && place < end; ++place) {
        const OctavoAdapter* adapter = of_tokens[room.tokens[place]];
        if (adapter) add_to_row(*adapter, site, expert * width, width, x + place * depth, depth, y + place * width);
      }
    }
  });
}

// y (+)= Σ weight · row, in the order of choice.
void combine(const OctavoExperts& call, const Room& room, int64_t token) {
  float* y = call.y + token * call.y_stride;
  const int64_t first = token * call.num_chosen;
  bool adds = call.adds != 0;
  for (int32_t i = 0; i < call.num_chosen; ++i) {
    if (room.places[first + i] < 0) continue;
    const float weight = room.weights[first + i];
    const float* row = room.rows + static_cast<int64_t>(room.places[first + i]) * call.depth;
    if (!adds) for (int64_t k = 0; k < call.depth; ++k) y[k] = weight * row[k];
    else for (int64_t k = 0; k < call.depth; ++k) y[k] += weight * row[k];
    adds = true;
  }
  if (!adds) memset(y, 0, sizeof(float) * static_cast<size_t>(call.depth));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

int64_t octavo_experts_bytes(const OctavoExperts* call, int64_t num_tokens) {
  return room_of(*call, num_tokens).num_bytes;
}

namespace octavo {

void run_experts(Threads* threads, const OctavoExperts& c, int64_t num_tokens, const std::vector<AdaptedRows>& rows) {
  if (num_tokens == 0) return;
  static thread_local std::vector<const OctavoAdapter*> of_tokens;
  const bool adapts_gate_up = is_adapted(rows, c.gate_up_site), adapts_down = is_adapted(rows, c.down_site);
  if (adapts_gate_up || adapts_down) {
    of_tokens.assign(static_cast<size_t>(num_tokens), nullptr);
    for (const AdaptedRows& some : rows)
      for (int64_t row = 0; row < some.count; ++row) of_tokens[static_cast<size_t>(some.first + row)] = some.adapter;
  }
  const Room room = room_of(c, num_tokens);
  for_tokens(threads, num_tokens, [&](int64_t token) {
    const float* logits = c.logits + token * c.logits_stride;
    float* weights = room.weights + token * c.num_chosen;
    int32_t* chosen = room.chosen + token * c.num_chosen;
    choose(logits, c.num_experts, c.num_chosen, chosen, weights);
    weigh(c, logits, weights);
    for (int32_t i = 0; i < c.num_chosen; ++i) {
      const int32_t held = chosen[i] - c.first_held;
      chosen[i] = held >= 0 && held < c.num_held ? held : -1;
    }
  });
  const int64_t num_used = sort_pairs(c, room, num_tokens);
  prepare(threads, room, num_used, c.gate_up[0].kind, room.rows, c.depth, [&](int64_t place) {
    memcpy(room.rows + place * c.depth, c.x + room.tokens[place] * c.x_stride, sizeof(float) * static_cast<size_t>(c.depth));
  });
  const bool is_plain = is_fused(c), fused = is_plain && !adapts_gate_up;
  if (fused) multiply(threads, room, num_used, c.gate_up, room.inner, c.inner, OCTAVO_FINISH_GATED);
  else multiply(threads, room, num_used, c.gate_up, room.gate_up, 2 * c.inner, OCTAVO_FINISH_PLAIN);
  if (adapts_gate_up)
    adapt(threads, room, num_used, c.gate_up_site, of_tokens.data(), room.rows, c.depth, room.gate_up, 2 * c.inner);
  const auto finish_row = product_kernels().finish_row;
  prepare(threads, room, num_used, c.down[0].kind, room.inner, c.inner, [&](int64_t place) {
    if (fused) return;
    const float* gate = room.gate_up + place * 2 * c.inner;
    float* inner = room.inner + place * c.inner;
    // What the fused product would have stored: rows without an adapter keep their bits.
    if (is_plain) finish_row(OCTAVO_FINISH_GATED, gate, c.inner, inner);
    else gate_row(gate, gate + c.inner, c.alpha, c.limit, c.offset, c.inner, inner);
  });
  multiply(threads, room, num_used, c.down, room.rows, c.depth, OCTAVO_FINISH_PLAIN);
  if (adapts_down) adapt(threads, room, num_used, c.down_site, of_tokens.data(), room.inner, c.inner, room.rows, c.depth);
  for_tokens(threads, num_tokens, [&](int64_t token) { combine(c, room, token); });
}

}  // namespace octavo
