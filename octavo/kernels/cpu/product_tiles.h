// The sums of a tile: some rows of activations times one or two panels of weights, over all of K.
// Knows neither threads nor what is done with the sums. Included by product_kernel.h.

// What a tile fetches for later while it multiplies: num_lines cache lines per step of its own loop, from `at` on, and
// as many `second` bytes further (0: none) where two panels lie apart. At `limit`, where the thread's share ends, it
// goes on with `then`, its share of the next product.
struct Fetch {
  const uint8_t *at, *limit, *then;
  int64_t num_lines, second, then_second;
  Ahead* ahead;
};

// Lines of what lies ahead that are asked for with every step. With 12 and more, tiles begin to wait for them.
constexpr int kAheadLines = 8;

inline void fetch_ahead(Ahead* ahead) {
  if (!ahead || ahead->run == ahead->end) return;
  const uint8_t* at = *ahead->run + ahead->line * 64;
  for (int line = 0; line < kAheadLines; ++line) __builtin_prefetch(at + line * 64, 0, 2);
  ahead->line += kAheadLines;
  if (ahead->line < ahead->num_lines) return;
  ahead->line = 0;
  ++ahead->run;
}

// Whether there is something to fetch, from fetch.at on.
inline bool may_fetch(Fetch& fetch) {
  if (fetch.at < fetch.limit) return true;
  if (!fetch.then) return false;
  fetch.at = fetch.then + (fetch.at - fetch.limit);
  fetch.limit = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
  fetch.second = fetch.then_second;
  return true;
}

inline void fetch_some(Fetch& fetch) {
  if (!may_fetch(fetch)) return;
  for (int64_t line = 0; line < fetch.num_lines; ++line) __builtin_prefetch(fetch.at + line * 64, 0, 2);
  if (fetch.second) {
    const uint8_t* second = fetch.at + fetch.second;
    for (int64_t line = 0; line < fetch.num_lines; ++line) __builtin_prefetch(second + line * 64, 0, 2);
  }
  fetch.at += fetch.num_lines * 64;
}

// A tile at work on packed weights, group after group.
template <int KIND, int ROWS, int PANELS>
struct PackedWork {
  static constexpr Form kForm = form_of(KIND);
  const uint8_t *codes[PANELS], *scales[PANELS], *outer[PANELS];
  int64_t minimums, outer_minimums;  // how far behind their scales
  Floats outer_scale[PANELS], outer_minimum[PANELS];
  Ints dots[ROWS][PANELS];

  inline __attribute__((always_inline)) PackedWork(const OctavoProduct* product, const int64_t* panels) {
    const Places places = places_of(KIND, product->depth);
    minimums = places.minimums;
    outer_minimums = places.outer_minimums - places.outer_scales;
    for (int p = 0; p < PANELS; ++p) {
      scales[p] = static_cast<const uint8_t*>(product->weights) + panels[p] * places.end;
      codes[p] = scales[p] + places.codes;
      outer[p] = scales[p] + places.outer_scales;
    }
  }

  inline __attribute__((always_inline)) void next_outer() {
    for (int p = 0; p < PANELS; ++p) {
      outer_scale[p] = L::load_halves(outer[p]);
      if (kForm.factor != 1.0f) outer_scale[p] = L::mul(outer_scale[p], L::splat(kForm.factor));
      if (kForm.has_minimum) outer_minimum[p] = L::load_halves(outer[p] + outer_minimums);
      outer[p] += kPanel * 2;
    }
  }

  // Part J of a run is in its nibbles here; PLANE has the bits above them.
  template <int J>
  static inline __attribute__((always_inline)) Bytes whole(Bytes nibbles, Bytes plane) {
    constexpr int above = kForm.above();
    if constexpr (kForm.levels != nullptr) return L::look_up(kForm.levels, nibbles);
    else return above ? L::template with_bits<4 - J * above, above == 1 ? 16 : 48>(nibbles, plane) : nibbles;
  }

  inline __attribute__((always_inline)) void dot_part(const OctavoGroup* records, int part,
                                                      const Bytes (&weights)[PANELS]) {
    for (int r = 0; r < ROWS; ++r) {
      const Bytes x = L::splat_bytes(records[r].codes + 4 * part);
      for (int p = 0; p < PANELS; ++p) dots[r][p] = L::template dot<kForm.factor_bits() != 8>(dots[r][p], weights[p], x);
    }
  }

  // Vectors V and on of a run whose first part is FIRST of its group.
  template <int FIRST, int V>
  inline __attribute__((always_inline)) void dot_vectors(const OctavoGroup* records, const Bytes (&plane)[PANELS]) {
    Bytes raw[PANELS], part[PANELS];
    for (int p = 0; p < PANELS; ++p) raw[p] = L::load_bytes(codes[p] + (kForm.bits == 2 ? 0 : V) * 64);
    if constexpr (kForm.bits == 2) {
      for (int p = 0; p < PANELS; ++p) part[p] = L::template with_bits<-2 * V, 3>(L::no_bytes(), raw[p]);
      dot_part(records, FIRST + V, part);
      if constexpr (V + 1 < kForm.parts()) dot_vectors<FIRST, V + 1>(records, plane);
    } else if constexpr (kForm.bits == 8) {
      dot_part(records, FIRST + V, raw);
      if constexpr (V + 1 < kForm.parts()) dot_vectors<FIRST, V + 1>(records, plane);
    } else {
      constexpr int second = V + kForm.nibbles();
      for (int p = 0; p < PANELS; ++p) part[p] = whole<V>(L::low_halves(raw[p]), plane[p]);
      dot_part(records, FIRST + V, part);
      for (int p = 0; p < PANELS; ++p) part[p] = whole<second>(L::high_halves(raw[p]), plane[p]);
      dot_part(records, FIRST + second, part);
      if constexpr (V + 1 < kForm.nibbles()) dot_vectors<FIRST, V + 1>(records, plane);
    }
  }

  template <int RUN>
  inline __attribute__((always_inline)) void add_run(const OctavoGroup* records, Floats (&total)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; ++r) {
      // Σ (code − centre) · x = Σ code · x − centre · Σ x: the sum starts at the last term, and stays exact.
      const int32_t all = records[r].minus_sum, first = records[r].minus_sum_first;
      const int32_t minus_sum = kForm.runs == 1 ? all : RUN == 0 ? first : all - first;
      const Ints start = L::template shift_left<kForm.factor_bits() - 1>(L::splat_int(kForm.has_minimum ? 0 : minus_sum));
      for (int p = 0; p < PANELS; ++p) dots[r][p] = start;
    }
    Bytes plane[PANELS];
    if (kForm.above())
      for (int p = 0; p < PANELS; ++p) plane[p] = L::load_bytes(codes[p] + kForm.nibbles() * 64);
    dot_vectors<RUN * kForm.parts(), 0>(records, plane);
    Floats scale[PANELS];
    for (int p = 0; p < PANELS; ++p) {
      const uint8_t* at = scales[p] + RUN * kPanel;  // runs are two where a scale is a byte, else one
      scale[p] = kForm.is_nested ? L::mul(L::load_small(at), outer_scale[p]) : L::load_halves(at);
      codes[p] += kForm.vectors() * 64;
    }
    for (int r = 0; r < ROWS; ++r) {
      const Floats x_scale = L::splat(records[r].scale);
      for (int p = 0; p < PANELS; ++p)
        total[r][p] = L::fma(L::to_float(dots[r][p]), L::mul(scale[p], x_scale), total[r][p]);
    }
  }

  // scale · Σ codes of a run.
  template <int RUN>
  static inline __attribute__((always_inline)) float sum_of_run(const OctavoGroup& record) {
    if (kForm.runs == 1) return record.scaled_sum;
    const int32_t all = record.minus_sum, first = record.minus_sum_first;
    return record.scale * static_cast<float>(RUN == 0 ? -first : first - all);
  }

  template <int RUN>
  inline __attribute__((always_inline)) void add_minimum(const OctavoGroup* records, Floats (&total)[ROWS][PANELS]) {
    for (int p = 0; kForm.has_minimum && p < PANELS; ++p) {
      const uint8_t* at = scales[p] + minimums + RUN * kPanel;
      const Floats minimum = kForm.is_nested ? L::mul(L::load_small(at), outer_minimum[p]) : L::load_halves(at);
      for (int r = 0; r < ROWS; ++r)
        total[r][p] = L::fma(minimum, L::splat(sum_of_run<RUN>(records[r])), total[r][p]);
    }
  }

  inline __attribute__((always_inline)) void add_group(const OctavoGroup* records, Floats (&total)[ROWS][PANELS]) {
    add_run<0>(records, total);
    add_minimum<0>(records, total);
    if constexpr (kForm.runs == 2) {
      add_run<1>(records, total);
      add_minimum<1>(records, total);
    }
    for (int p = 0; p < PANELS; ++p) scales[p] += kForm.runs * kPanel * kForm.width();
  }
};

template <int KIND>
struct PackedTile {
  static constexpr int kRows = Lanes::kPackedRows;
  static constexpr int kStep = kGroup;  // K-values of a step of the loop
  using Record = OctavoGroup;

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t* panels, Fetch fetch,
                                                         Floats (&total)[ROWS][PANELS]) {
    PackedWork<KIND, ROWS, PANELS> work(product, panels);
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p) total[r][p] = L::splat(0.0f);
    const int64_t num_groups = product->depth / kGroup;
    for (int64_t group = 0; group < num_groups; ++group, records += ROWS) {
      fetch_some(fetch);
      if (ROWS > 1) fetch_ahead(fetch.ahead);
      if (work.kForm.is_nested && group % (kOuter / kGroup) == 0) work.next_outer();
      work.add_group(records, total);
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
      const bool streams = ROWS == 1 && may_fetch(fetch);
      if (ROWS > 1) fetch_some(fetch);
      if (ROWS > 1) fetch_ahead(fetch.ahead);
#pragma GCC unroll 2
      for (int k = 0; k < kSlice; k += 2) {
        // One row waits for memory alone: a line is asked for with every line that is used, and not for longer than that.
        if (streams) {
          for (int p = 0; p < PANELS; ++p)
            for (int byte = 0; byte < 2 * kPanel * kWidth; byte += 64)
              __builtin_prefetch(fetch.at + (p ? fetch.second : 0) + k * kPanel * kWidth + byte, 0, 0);
        }
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
      if (streams) fetch.at += kSlice * kPanel * kWidth;
    }
  }
};

// A panel's weights as float32, laid out as FLOAT32's are.
template <int KIND>
struct Decoder {
  static constexpr Form kForm = form_of(KIND);
  using Work = PackedWork<KIND, 1, 1>;
  Work work;
  float* out;
  Floats scale, offset;

  inline __attribute__((always_inline)) Decoder(const OctavoProduct* product, const int64_t* panel, float* out)
      : work(product, panel), out(out) {}

  inline __attribute__((always_inline)) void put(int part, Bytes codes) {
    float* at = out + part * 4 * kPanel;
    // Codes and scales have so few bits that their product is exact: there is one rounding, with a minimum, or none.
    L::store(at, L::fma(L::to_float(L::template byte_of<0>(codes)), scale, offset));
    L::store(at + kPanel, L::fma(L::to_float(L::template byte_of<1>(codes)), scale, offset));
    L::store(at + 2 * kPanel, L::fma(L::to_float(L::template byte_of<2>(codes)), scale, offset));
    L::store(at + 3 * kPanel, L::fma(L::to_float(L::template byte_of<3>(codes)), scale, offset));
  }

  // Vectors V and on of a run whose first part is FIRST of its group.
  template <int FIRST, int V>
  inline __attribute__((always_inline)) void put_vectors(Bytes plane) {
    const Bytes raw = L::load_bytes(work.codes[0] + (kForm.bits == 2 ? 0 : V) * 64);
    if constexpr (kForm.bits == 2) {
      put(FIRST + V, L::template with_bits<-2 * V, 3>(L::no_bytes(), raw));
      if constexpr (V + 1 < kForm.parts()) put_vectors<FIRST, V + 1>(plane);
    } else if constexpr (kForm.bits == 8) {
      put(FIRST + V, raw);
      if constexpr (V + 1 < kForm.parts()) put_vectors<FIRST, V + 1>(plane);
    } else {
      constexpr int second = V + kForm.nibbles();
      put(FIRST + V, Work::template whole<V>(L::low_halves(raw), plane));
      put(FIRST + second, Work::template whole<second>(L::high_halves(raw), plane));
      if constexpr (V + 1 < kForm.nibbles()) put_vectors<FIRST, V + 1>(plane);
    }
  }

  template <int RUN>
  inline __attribute__((always_inline)) void put_run() {
    const uint8_t* at = work.scales[0] + RUN * kPanel;
    scale = kForm.is_nested ? L::mul(L::load_small(at), work.outer_scale[0]) : L::load_halves(at);
    if (kForm.has_minimum) {
      const uint8_t* minimum = at + work.minimums;
      offset = kForm.is_nested ? L::mul(L::load_small(minimum), work.outer_minimum[0]) : L::load_halves(minimum);
    } else {
      offset = L::mul(scale, L::splat(-static_cast<float>(1 << (kForm.factor_bits() - 1))));
    }
    Bytes plane = L::no_bytes();
    if (kForm.above()) plane = L::load_bytes(work.codes[0] + kForm.nibbles() * 64);
    put_vectors<RUN * kForm.parts(), 0>(plane);
    work.codes[0] += kForm.vectors() * 64;
  }

  // Meanwhile some bytes from `ahead` on (null: none) are fetched.
  inline __attribute__((always_inline)) void run(int64_t num_groups, const uint8_t* ahead, int64_t ahead_bytes) {
    const int64_t per_group = ahead ? ahead_bytes / num_groups / 64 + 1 : 0;
    for (int64_t group = 0; group < num_groups; ++group, out += kGroup * kPanel) {
      for (int64_t line = 0; line < per_group; ++line) __builtin_prefetch(ahead + (group * per_group + line) * 64, 0, 2);
      if (kForm.is_nested && group % (kOuter / kGroup) == 0) work.next_outer();
      put_run<0>();
      if constexpr (kForm.runs == 2) put_run<1>();
      work.scales[0] += kForm.runs * kPanel * kForm.width();
    }
  }
};

// Of panels that were decoded to where product->weights points, one or two, whatever their numbers are.
struct DecodedTile {
  using Plain = FloatTile<OCTAVO_FLOAT32>;
  using Record = Slice;
  static constexpr int kRows = Plain::kRows;

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t*, Fetch fetch, Floats (&total)[ROWS][PANELS]) {
    const int64_t places[2] = {0, 1};
    Plain::template sums<ROWS, PANELS>(product, records, places, fetch, total);
  }
};
