// The product kernels, written once over Lanes: included by one file per instruction set, in an anonymous namespace. Must not
// use inline functions of the standard library: the linker could pick another file's copy, compiled for other instructions.
//
// Lanes provides: Floats, Ints (16 lanes each), Bytes (16 × 4), the operations used below, kPackedRows and kFloatRows;
// kCentres: dot<false> subtracts 128 from weights; kByPanel: a group's integer sums are made panel after panel; kPairs: then
// rows can be multiplied two by two (product_i8mm.cpp).

using L = Lanes;
using Floats = L::Floats;
using Ints = L::Ints;
using Bytes = L::Bytes;

#include "product_tiles.h"

// exp(x) for x in [−87, 88], clamped outside: 2ⁿ · a polynomial of degree 6 (Cephes); relative error about 1e-7.
inline Floats exponential(Floats x) {
  x = L::least(L::greatest(x, L::splat(-87.0f)), L::splat(88.0f));
  const Ints n = L::nearest(L::mul(x, L::splat(1.44269504088896341f)));
  const Floats whole = L::to_float(n);
  x = L::fma(whole, L::splat(-0.693359375f), x);
  x = L::fma(whole, L::splat(2.12194440e-4f), x);
  Floats y = L::splat(1.9875691500e-4f);
  y = L::fma(y, x, L::splat(1.3981999507e-3f));
  y = L::fma(y, x, L::splat(8.3334519073e-3f));
  y = L::fma(y, x, L::splat(4.1665795894e-2f));
  y = L::fma(y, x, L::splat(1.6666665459e-1f));
  y = L::fma(y, x, L::splat(5.0000001201e-1f));
  y = L::add(L::fma(y, L::mul(x, x), x), L::splat(1.0f));
  return L::mul(y, L::power_of_two(n));
}

// x / (1 + e^power). NaN stays NaN.
inline Floats share_of_x(Floats x, Floats power) { return L::div(x, L::add(exponential(power), L::splat(1.0f))); }

inline Floats silu(Floats x) { return share_of_x(x, L::mul(x, L::splat(-1.0f))); }

// x / 2 · (1 + tanh u) = x / (1 + e^−2u), with u = √(2/π) · (x + 0.044715 x³).
inline Floats gelu(Floats x) {
  return share_of_x(x, L::mul(x, L::fma(L::mul(x, x), L::splat(-0.0713548162726f), L::splat(-1.59576912161f))));
}

// x / 2 · (1 + erf(x / √2)) = max(x, 0) − |x| / 2 · erfc(|x| / √2), with erfc(z) = a polynomial in 1 / (1 + p z), times
// e^−z² (Abramowitz and Stegun 7.1.26, error at most 1.5e-7). Beyond 20 it is 0 in float32. NaN stays NaN, because least and
// greatest return their second operand then.
inline Floats exact_gelu(Floats x) {
  const Floats size = L::least(L::splat(20.0f), L::greatest(L::mul(x, L::splat(-1.0f)), x));
  const Floats t = L::div(L::splat(1.0f), L::fma(size, L::splat(0.23164189f), L::splat(1.0f)));  // p / √2
  Floats y = L::splat(1.061405429f);
  y = L::fma(y, t, L::splat(-1.453152027f));
  y = L::fma(y, t, L::splat(1.421413741f));
  y = L::fma(y, t, L::splat(-0.284496736f));
  y = L::fma(y, t, L::splat(0.254829592f));
  const Floats power = exponential(L::mul(L::mul(size, size), L::splat(-0.5f)));
  const Floats away = L::mul(L::mul(L::mul(y, t), power), L::mul(size, L::splat(-0.5f)));
  return L::add(L::greatest(L::splat(0.0f), x), away);
}

inline Floats activated(int finish, Floats x) {
  switch (finish) {
    case OCTAVO_FINISH_GELU: return gelu(x);
    case OCTAVO_FINISH_EXACT_GELU: return exact_gelu(x);
    case OCTAVO_FINISH_RELU: return L::greatest(L::splat(0.0f), x);
    default: return x;
  }
}

// ── finishing a vector of 16 columns ────────────────────────────────────────────────────────────────

inline Floats load_some(const float* at, int64_t num_left) {  // a panel's width, or num_left numbers and zeros
  if (num_left >= kPanel) return L::load(at);
  float lanes[kPanel] = {};
  for (int64_t lane = 0; lane < num_left; ++lane) lanes[lane] = at[lane];
  return L::load(lanes);
}

inline void finish_plain(const OctavoProduct* product, int64_t row, int64_t column, Floats value) {
  const int64_t at = row * product->y_stride + column;
  const int64_t num_left = product->num_columns - column;
  if (product->bias) value = L::add(value, load_some(product->bias + column, num_left));
  value = activated(product->finish, value);
  if (product->residual) value = L::add(value, load_some(product->residual + at, num_left));
  if (num_left >= kPanel) return L::store(product->y + at, value);
  float lanes[kPanel];
  L::store(lanes, value);
  for (int64_t lane = 0; lane < num_left; ++lane) product->y[at + lane] = lanes[lane];
}

// Finishes and stores a tile's sums, [num_rows, num_panels]. Compiled once, called for every tile.
__attribute__((noinline)) void finish(const OctavoProduct* product, int64_t row, int num_rows, const int64_t* panels,
                                      int num_panels, const Floats* sums) {
  for (int r = 0; r < num_rows; ++r, sums += num_panels) {
    if (is_gated(product->finish)) {
      const Floats gate = product->finish == OCTAVO_FINISH_GATED ? silu(sums[0]) : gelu(sums[0]);
      L::store(product->y + (row + r) * product->y_stride + panels[0] * kPanel, L::mul(gate, sums[1]));
    } else {
      finish_plain(product, row + r, panels[0] * kPanel, sums[0]);
      if (num_panels == 2 && panels[1] != panels[0]) finish_plain(product, row + r, panels[1] * kPanel, sums[1]);
    }
  }
}

// The same for a row whose plain product was stored and then changed: x [size], or gate and up [2 · size].
void finish_row(int finish, const float* x, int64_t size, float* y) {
  for (int64_t at = 0; at < size; at += kPanel) {
    const int64_t num_left = size - at;
    Floats value = load_some(x + at, num_left);
    if (is_gated(finish)) {
      const Floats gate = finish == OCTAVO_FINISH_GATED ? silu(value) : gelu(value);
      value = L::mul(gate, load_some(x + size + at, num_left));
    } else {
      value = activated(finish, value);
    }
    if (num_left >= kPanel) {
      L::store(y + at, value);
      continue;
    }
    float lanes[kPanel];
    L::store(lanes, value);
    for (int64_t lane = 0; lane < num_left; ++lane) y[at + lane] = lanes[lane];
  }
}

// PANELS is 2, except for a stream of one row. With 2, an odd panel at the end is multiplied twice.
template <typename Tile, int ROWS, int PANELS>
__attribute__((noinline)) void run_tile(const OctavoProduct* product, const void* records, int64_t row,
                                        const int64_t* panels, Fetch& fetch) {
  Floats total[ROWS][PANELS], sums[ROWS][PANELS];  // separate, so that total stays in registers
  Tile::template sums<ROWS, PANELS>(product, static_cast<const typename Tile::Record*>(records), panels, fetch, total);
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) sums[r][p] = total[r][p];
  finish(product, row, ROWS, panels, PANELS, sums[0]);
}

using RunTile = void (*)(const OctavoProduct*, const void*, int64_t, const int64_t*, Fetch&);

// run_tile for 1 … kRows rows, at [rows − 1].
template <typename Tile, int ROWS = Tile::kRows>
struct RunTiles : RunTiles<Tile, ROWS - 1> {
  RunTiles() { this->of[ROWS - 1] = run_tile<Tile, ROWS, 2>; }
};
template <typename Tile>
struct RunTiles<Tile, 0> {
  RunTile of[Tile::kRows];
};

// ── a thread's share of a product ───────────────────────────────────────────────────────────────────

// One row is bound by memory: one panel at a time is one stream of addresses, prefetched this many bytes ahead. Except if it
// must decode: two panels then give two independent chains of sums.
constexpr int64_t kAhead = 8192;
inline bool is_stream(int kind, int64_t num_rows) { return num_rows == 1 && stored_as(kind) == kind; }

// A product of more multiplications takes a millisecond or more: long enough for other processes to slow down one thread.
constexpr int64_t kLong = int64_t{1} << 28;

// The panels of a product; for a gated one those of gate, with those of up `apart` bytes further. They are multiplied per_unit
// at a time. A share owns the units [begin, end); those from `pool` on are claimed one by one.
struct Units {
  const uint8_t* weights;
  int64_t num_panels, num_bytes, apart, per_unit, count;
  int64_t begin, end, pool;
};

inline Units units_of(const OctavoProduct* product, int64_t num_rows, int index, int num_shares) {
  const bool gated = is_gated(product->finish);
  Units units;
  units.weights = static_cast<const uint8_t*>(product->weights);
  units.num_panels = (product->num_columns + kPanel - 1) / kPanel / (gated ? 2 : 1);
  units.num_bytes = panel_bytes(product->kind, product->depth);
  units.apart = gated ? units.num_panels * units.num_bytes : 0;
  units.per_unit = gated || is_stream(product->kind, num_rows) ? 1 : 2;
  units.count = (units.num_panels + units.per_unit - 1) / units.per_unit;
  // A pool lets threads finish together even if some got less CPU time. It breaks runs of addresses, which costs a short
  // product (and one row, bound by memory) more than it gains.
  const bool has_pool = num_rows > 1 && num_shares > 1 && num_rows * product->num_columns * product->depth > kLong;
  units.pool = has_pool ? units.count / 2 : units.count;
  const Share own = share_of(units.pool, index, num_shares);
  units.begin = own.begin;
  units.end = own.end;
  return units;
}

// What to prefetch while the unit at `panel` is multiplied: the next unit, or the next product.
inline Fetch fetch_after(const Units& mine, int64_t panel, int64_t following, bool streams, const Fetch& after) {
  Fetch fetch = after;
  if (streams) {
    fetch.at = mine.weights + panel * mine.num_bytes + kAhead;
    fetch.limit = mine.weights + mine.end * mine.num_bytes;
    fetch.second = mine.apart;
  } else if (following < mine.count) {
    fetch.at = mine.weights + following * mine.per_unit * mine.num_bytes;
    fetch.limit = fetch.at + mine.per_unit * mine.num_bytes;
    fetch.then = nullptr;  // the unit after it is prefetched later
    fetch.second = mine.apart;
  }
  return fetch;
}

// Tile: for a unit's first tile of rows; Others: for the following ones.
template <typename Tile, typename Others>
void share_of_product(const OctavoProduct* product, const OctavoProduct* next, Ahead* ahead, int64_t* num_claimed,
                      int index, int num_shares) {
  const RunTiles<Tile> first;
  const RunTiles<Others> others;
  const int64_t num_rows = product->num_rows, tiles = num_tiles(num_rows, Tile::kRows);
  const int64_t num_steps = (product->depth + Tile::kStep - 1) / Tile::kStep;
  const Units mine = units_of(product, num_rows, index, num_shares);
  const bool gated = mine.apart != 0, streams = is_stream(product->kind, num_rows);
  const auto* records = static_cast<const typename Tile::Record*>(product->activations);

  Fetch after = {};
  if (ahead) after.ahead = ahead + index;
  after.num_lines = mine.per_unit * mine.num_bytes / 64 / (num_steps * tiles) + 1;  // a part with every tile
  if (next) {
    const Units then = units_of(next, num_rows, index, num_shares);
    after.then = then.weights + then.begin * then.per_unit * then.num_bytes;
    after.then_second = then.apart;
  }
  const auto own_or_claimed = [&](int64_t unit) {
    return unit < mine.end ? unit : mine.pool + __atomic_fetch_add(num_claimed, 1, __ATOMIC_RELAXED);
  };
  for (int64_t unit = own_or_claimed(mine.begin), following; unit < mine.count; unit = following) {
    following = own_or_claimed(unit + 1);  // early, so that it can be prefetched
    const int64_t panel = unit * mine.per_unit;
    const int64_t beside = gated ? panel + mine.num_panels : panel + 1 < mine.num_panels ? panel + 1 : panel;
    const int64_t panels[2] = {panel, beside};
    Fetch fetch = fetch_after(mine, panel, following, streams, after);
    if constexpr (Tile::kStreams) {
      if (streams && !gated) {
        run_tile<Tile, 1, 1>(product, records, 0, panels, fetch);
        continue;
      }
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = tile_begin(tile, tiles, num_rows), end = tile_begin(tile + 1, tiles, num_rows);
      const RunTile* run = tile == 0 ? first.of : others.of;
      run[end - begin - 1](product, records + begin * num_steps, begin, panels, fetch);
    }
  }
}

void product_share(const OctavoProduct* product, const OctavoProduct* next, Ahead* ahead, int64_t* num_claimed,
                   int index, int num_shares) {
  const auto run = [&](auto first, auto others) {
    share_of_product<decltype(first), decltype(others)>(product, next, ahead, num_claimed, index, num_shares);
  };
  if (product->kind == OCTAVO_FLOAT32) return run(FloatTile<OCTAVO_FLOAT32>(), FloatTile<OCTAVO_FLOAT32>());
  if (product->kind == OCTAVO_BFLOAT16) return run(FloatTile<OCTAVO_BFLOAT16>(), FloatTile<OCTAVO_BFLOAT16>());
  with_kind(product->kind, [&](auto kind) {
    constexpr int KIND = decltype(kind)::value;
    if (takes_codes(product->kind)) run(PackedTile<KIND>(), PackedTile<KIND>());
    else run(DecodingTile<KIND>(), DecodedTile());
  });
}

template <int KIND, int COUNT>
void some_row_panels(int64_t depth, const RowPanel* items) {
  using Tile = FloatTile<KIND>;
  const uint8_t* weights[COUNT];
  const float* x[COUNT];
  Floats total[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    weights[i] = static_cast<const uint8_t*>(items[i].panel);
    x[i] = items[i].x;
    total[i] = L::splat(0.0f);
  }
  for (int64_t at = 0; at < depth; at += kSlice) {
#pragma GCC unroll 2
    for (int k = 0; k < kSlice; k += 2) {
      for (int i = 0; i < COUNT; ++i) {
        Floats even, odd;
        Tile::load_two(weights[i] + k * kPanel * Tile::kWidth, even, odd);
        total[i] = L::fma(L::splat(x[i][k]), even, total[i]);
        total[i] = L::fma(L::splat(x[i][k + 1]), odd, total[i]);
      }
    }
    for (int i = 0; i < COUNT; ++i) {
      weights[i] += kSlice * kPanel * Tile::kWidth;
      x[i] += kSlice;
    }
  }
  for (int i = 0; i < COUNT; ++i) L::store(items[i].y, total[i]);
}

template <int KIND>
void row_panels_of(int64_t depth, const RowPanel* items, int64_t count) {
  for (; count >= 4; items += 4, count -= 4) some_row_panels<KIND, 4>(depth, items);
  if (count == 3) return some_row_panels<KIND, 3>(depth, items);
  if (count == 2) return some_row_panels<KIND, 2>(depth, items);
  if (count == 1) some_row_panels<KIND, 1>(depth, items);
}

// y [num_left, at most COUNT panels] += COUNT panels of B times x.
template <int KIND, int COUNT>
void add_some_panels(int64_t depth, const float* x, const uint8_t* panels, int64_t num_left, float* y) {
  using Tile = FloatTile<KIND>;
  const int64_t num_bytes = panel_bytes(KIND, depth);
  Floats total[COUNT];
  for (int i = 0; i < COUNT; ++i) total[i] = L::splat(0.0f);
  for (int64_t at = 0; at < depth; at += kSlice, x += kSlice, panels += kSlice * kPanel * Tile::kWidth) {
#pragma GCC unroll 8
    for (int k = 0; k < kSlice; k += 2) {
      for (int i = 0; i < COUNT; ++i) {
        Floats even, odd;
        Tile::load_two(panels + i * num_bytes + k * kPanel * Tile::kWidth, even, odd);
        total[i] = L::fma(L::splat(x[k]), even, total[i]);
        total[i] = L::fma(L::splat(x[k + 1]), odd, total[i]);
      }
    }
  }
  for (int i = 0; i < COUNT; ++i, y += kPanel, num_left -= kPanel) {
    const Floats value = L::add(total[i], load_some(y, num_left));
    if (num_left >= kPanel) {
      L::store(y, value);
      continue;
    }
    float lanes[kPanel];
    L::store(lanes, value);
    for (int64_t lane = 0; lane < num_left; ++lane) y[lane] = lanes[lane];
  }
}

template <int KIND>
void add_row_of(int64_t depth, const float* x, const uint8_t* panels, int64_t num_columns, float* y) {
  constexpr int kMany = 4;
  const int64_t num_bytes = panel_bytes(KIND, depth);
  for (; num_columns > (kMany - 1) * kPanel; num_columns -= kMany * kPanel, panels += kMany * num_bytes, y += kMany * kPanel)
    add_some_panels<KIND, kMany>(depth, x, panels, num_columns, y);
  for (; num_columns > 0; num_columns -= kPanel, panels += num_bytes, y += kPanel)
    add_some_panels<KIND, 1>(depth, x, panels, num_columns, y);
}

void add_row(int kind, int64_t depth, const float* x, const void* weights, int64_t num_columns, float* y) {
  const uint8_t* panels = static_cast<const uint8_t*>(weights);
  if (kind == OCTAVO_FLOAT32) add_row_of<OCTAVO_FLOAT32>(depth, x, panels, num_columns, y);
  else add_row_of<OCTAVO_BFLOAT16>(depth, x, panels, num_columns, y);
}

void row_panels(int kind, int64_t depth, const RowPanel* items, int64_t count) {
  if (kind == OCTAVO_FLOAT32) row_panels_of<OCTAVO_FLOAT32>(depth, items, count);
  else row_panels_of<OCTAVO_BFLOAT16>(depth, items, count);
}

// ── activations ─────────────────────────────────────────────────────────────────────────────────────

inline void quantise_group(const float* x, OctavoGroup* group) {
  const Floats first = L::load(x), second = L::load(x + 16);
  const float largest = L::largest_size(first, second);
  if (!(largest <= 3.402823466e+38f)) {
    *group = {};
    group->scale = group->scaled_sum = __builtin_nanf("");
    return;
  }
  // Below 1e-30 the inverse would overflow, and the group adds nothing to a float32 sum.
  const Floats inverse = L::splat(largest > 1e-30f ? 127.0f / largest : 0.0f);
  const Ints low = L::nearest(L::mul(first, inverse)), high = L::nearest(L::mul(second, inverse));
  L::store_codes(group->codes, low);
  L::store_codes(group->codes + 16, high);
  const int32_t sum_first = L::total(low), sum = sum_first + L::total(high);
  group->scale = largest / 127.0f;
  group->scaled_sum = group->scale * static_cast<float>(sum);
  group->minus_sum = -sum;
  group->minus_sum_first = -sum_first;
}

void quantise(const float* x, int64_t num_groups, OctavoGroup* groups, int64_t step) {
  for (int64_t i = 0; i < num_groups; ++i) quantise_group(x + i * kGroup, groups + i * step);
}

void lay_out(const float* x, int64_t depth, Slice* slices, int64_t step) {
  static_assert(kSlice == kPanel, "a slice is a vector");
  for (int64_t k = 0; k < depth; k += kSlice, slices += step) L::store(slices->values, load_some(x + k, depth - k));
}

void prepare_row(int kind, const float* x, int64_t depth, void* records, int64_t step) {
  if (takes_codes(kind)) quantise(x, depth / kGroup, static_cast<OctavoGroup*>(records), step);
  else lay_out(x, depth, static_cast<Slice*>(records), step);
}

void prepare_share(int kind, const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, void* prepared,
                   int thread, int num_threads) {
  const bool packed = takes_codes(kind);
  const int64_t tiles = num_tiles(num_rows, packed ? Lanes::kPackedRows : Lanes::kFloatRows);
  const int64_t step = packed ? kGroup : kSlice, num_steps = (depth + step - 1) / step;
  const Share share = share_of(num_rows, thread, num_threads);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = tile_begin(tile, tiles, num_rows), end = tile_begin(tile + 1, tiles, num_rows);
    for (int64_t row = begin; row < end; ++row) {
      if (row < share.begin || row >= share.end) continue;
      const int64_t at = begin * num_steps + row - begin, size = packed ? sizeof(OctavoGroup) : sizeof(Slice);
      prepare_row(kind, x + row * x_stride, depth, static_cast<uint8_t*>(prepared) + at * size, end - begin);
    }
  }
}

int64_t read_all(const void* memory, int64_t num_bytes) {
  const uint8_t* bytes = static_cast<const uint8_t*>(memory);
  Ints sums[4] = {L::splat_int(0), L::splat_int(0), L::splat_int(0), L::splat_int(0)};
  for (int64_t at = 0; at + 256 <= num_bytes; at += 256) {
    for (int i = 0; i < 4; ++i) {
      __builtin_prefetch(bytes + at + i * 64 + 4096, 0, 2);
      sums[i] = L::add_ints(sums[i], L::load_ints(bytes + at + i * 64));
    }
  }
  return L::total(L::add_ints(L::add_ints(sums[0], sums[1]), L::add_ints(sums[2], sums[3])));
}

int64_t dot_all(int64_t num_dots) {
  const int8_t four[4] = {1, 2, 3, 4};
  Bytes x = L::splat_bytes(four);
  Ints sums[12];
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = L::splat_int(0);
  for (int64_t i = 0; i < num_dots; i += 12) {
    L::keep(x);
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      sums[j] = L::template dot<false>(sums[j], x, x);
      L::keep(sums[j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) sums[0] = L::add_ints(sums[0], sums[i]);
  return L::total(sums[0]);
}
