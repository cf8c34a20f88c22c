// The sums of a tile: some rows of activations times one or two panels of weights, over all of K.
// Knows neither threads nor what is done with the sums. Included by product_kernel.h.

// What a tile fetches for later while it multiplies: num_lines cache lines per step of its own loop, from `at` on, and as
// many `second` bytes further (0: none) where two panels lie apart. At `limit`, where the thread's share ends, it goes on
// with `then`, its share of the next product.
struct Fetch {
  const uint8_t *at, *limit, *then;
  int64_t num_lines, second, then_second;
};

inline void fetch_some(Fetch& fetch) {
  if (fetch.at >= fetch.limit) {
    if (!fetch.then) return;
    fetch.at = fetch.then + (fetch.at - fetch.limit);
    fetch.limit = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
    fetch.second = fetch.then_second;
  }
  for (int64_t line = 0; line < fetch.num_lines; ++line) __builtin_prefetch(fetch.at + line * 64, 0, 2);
  if (fetch.second)
    for (int64_t line = 0; line < fetch.num_lines; ++line) __builtin_prefetch(fetch.at + fetch.second + line * 64, 0, 2);
  fetch.at += fetch.num_lines * 64;
}

template <int KIND>
struct PackedTile {
  static constexpr bool kMinimum = KIND == OCTAVO_CODES4_MINIMUM;
  static constexpr int kVectors = KIND == OCTAVO_CODES8 ? 8 : 4;  // of 64 bytes, in a group
  static constexpr int kRows = Lanes::kPackedRows;
  static constexpr int kStep = kGroup;  // K-values of a step of the loop
  using Record = OctavoGroup;

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t* panels, Fetch fetch,
                                                         Floats (&total)[ROWS][PANELS]) {
    const int64_t depth = product->depth, num_groups = depth / kGroup;
    const int64_t stride = panel_bytes(KIND, depth), skip = scale_bytes(KIND, depth);
    const uint8_t* scales[PANELS];
    const uint8_t* codes[PANELS];
    for (int p = 0; p < PANELS; ++p) {
      scales[p] = static_cast<const uint8_t*>(product->weights) + panels[p] * stride;
      codes[p] = scales[p] + skip;
    }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p) total[r][p] = L::splat(0.0f);

    for (int64_t group = 0; group < num_groups; ++group, records += ROWS) {
      fetch_some(fetch);
      Ints dots[ROWS][PANELS];
      for (int r = 0; r < ROWS; ++r) {
        // Σ (code − centre) · x = Σ code · x − centre · Σ x: the sum starts at the last term, and stays exact.
        const Ints start = kMinimum ? L::splat_int(0)
                                    : L::shift_left<KIND == OCTAVO_CODES8 ? 7 : 3>(L::splat_int(records[r].minus_sum));
        for (int p = 0; p < PANELS; ++p) dots[r][p] = start;
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        Bytes raw[PANELS], low[PANELS];
        for (int p = 0; p < PANELS; ++p) {
          raw[p] = L::load_bytes(codes[p] + v * 64);
          low[p] = KIND == OCTAVO_CODES8 ? raw[p] : L::low_halves(raw[p]);
        }
        for (int r = 0; r < ROWS; ++r) {
          const Bytes x = L::splat_bytes(records[r].codes + 4 * v);
          for (int p = 0; p < PANELS; ++p) dots[r][p] = L::template dot<KIND != OCTAVO_CODES8>(dots[r][p], low[p], x);
        }
        if (KIND != OCTAVO_CODES8) {
          for (int p = 0; p < PANELS; ++p) raw[p] = L::high_halves(raw[p]);
          for (int r = 0; r < ROWS; ++r) {
            const Bytes x = L::splat_bytes(records[r].codes + 16 + 4 * v);
            for (int p = 0; p < PANELS; ++p) dots[r][p] = L::template dot<true>(dots[r][p], raw[p], x);
          }
        }
      }
      Floats scale[PANELS];
      for (int p = 0; p < PANELS; ++p) scale[p] = L::load_halves(scales[p]);
      for (int r = 0; r < ROWS; ++r) {
        const Floats x_scale = L::splat(records[r].scale);
        for (int p = 0; p < PANELS; ++p)
          total[r][p] = L::fma(L::to_float(dots[r][p]), L::mul(scale[p], x_scale), total[r][p]);
      }
      if (kMinimum) {
        Floats minimum[PANELS];
        for (int p = 0; p < PANELS; ++p) minimum[p] = L::load_halves(scales[p] + num_groups * kPanel * 2);
        for (int r = 0; r < ROWS; ++r) {
          const Floats scaled_sum = L::splat(records[r].scaled_sum);
          for (int p = 0; p < PANELS; ++p) total[r][p] = L::fma(minimum[p], scaled_sum, total[r][p]);
        }
      }
      for (int p = 0; p < PANELS; ++p) {
        codes[p] += kVectors * 64;
        scales[p] += kPanel * 2;
      }
    }
  }
};

struct Slice {
  float values[kSlice];
};

template <int KIND>
struct FloatTile {
  static constexpr int kRows = Lanes::kFloatRows;
  static constexpr int kStep = kSlice;
  static constexpr int kWidth = KIND == OCTAVO_FLOAT32 ? 4 : 2;  // bytes of a weight
  using Record = Slice;

  // The weights of K-values k and k + 1.
  static inline __attribute__((always_inline)) void load_two(const uint8_t* at, Floats& even, Floats& odd) {
    if (KIND == OCTAVO_FLOAT32) {
      even = L::load(reinterpret_cast<const float*>(at));
      odd = L::load(reinterpret_cast<const float*>(at) + kPanel);
    } else {
      const Ints pairs = L::load_ints(at);
      even = L::widen_low(pairs);
      odd = L::widen_high(pairs);
    }
  }

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t* panels, Fetch fetch,
                                                         Floats (&total)[ROWS][PANELS]) {
    const int64_t num_slices = (product->depth + kSlice - 1) / kSlice;
    const uint8_t* weights[PANELS];
    for (int p = 0; p < PANELS; ++p)
      weights[p] = static_cast<const uint8_t*>(product->weights) + panels[p] * num_slices * kSlice * kPanel * kWidth;
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p) total[r][p] = L::splat(0.0f);

    for (int64_t slice = 0; slice < num_slices; ++slice, records += ROWS) {
      fetch_some(fetch);
#pragma GCC unroll 2
      for (int k = 0; k < kSlice; k += 2) {
        Floats w[2][PANELS];
        for (int p = 0; p < PANELS; ++p) load_two(weights[p] + k * kPanel * kWidth, w[0][p], w[1][p]);
        for (int odd = 0; odd < 2; ++odd) {
          for (int r = 0; r < ROWS; ++r) {
            const Floats x = L::splat(records[r].values[k + odd]);
            for (int p = 0; p < PANELS; ++p) total[r][p] = L::fma(x, w[odd][p], total[r][p]);
          }
        }
      }
      for (int p = 0; p < PANELS; ++p) weights[p] += kSlice * kPanel * kWidth;
    }
  }
};
