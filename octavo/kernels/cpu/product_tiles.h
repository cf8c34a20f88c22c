// The sums of a tile: some rows of activations times one or two panels of weights, over all of K. Included by product_kernel.h.

// What a tile prefetches while it multiplies: num_lines cache lines per step of its loop, from `at` on, and as many `second`
// bytes further (0: none) if the two panels are not adjacent. At `limit`, the end of the thread's share, it continues with
// `then`, its share of the next product.
struct Fetch {
  const uint8_t *at, *limit, *then;
  int64_t num_lines, second, then_second;
  Ahead* ahead;
};

// Lines of Ahead that are prefetched with every step. With 12 and more, tiles begin to wait for them.
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

// Whether there is something to prefetch, from fetch.at on.
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

// The state of a tile with packed weights, which are processed group after group. L is a parameter because not all Lanes have
// pairs.
template <int KIND, int ROWS, int PANELS, typename L = Lanes>
struct PackedWork {
  static constexpr Form kForm = form_of(KIND);
  // One pair is no faster than two single rows: its weights must be rearranged.
  static constexpr bool kPairs = L::kPairs && ROWS > 2;
  // All kinds with factors of 8 bits have a centre of 128, which Lanes with kCentres subtract in their dots.
  static constexpr bool kStartsAtZero = kForm.has_minimum || (L::kCentres && kForm.factor_bits() == 8);
  static_assert(!(kForm.has_minimum && kForm.factor_bits() == 8), "dots of 8 bits may be centred");
  const uint8_t *codes[PANELS], *scales[PANELS], *outer[PANELS];
  int64_t minimums, outer_minimums;  // offsets from their scales
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

  // Part J of a run, from its nibbles and `plane`, which has the bits above them.
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

  // Vectors from V on of a run whose first part is part FIRST of its group.
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

  // Σ (code − centre) · x = Σ code · x − centre · Σ x: a sum starts with the last term, and stays exact.
  template <int RUN>
  static inline __attribute__((always_inline)) Ints start_of(const OctavoGroup& record) {
    const int32_t all = record.minus_sum, first = record.minus_sum_first;
    const int32_t minus_sum = kForm.runs == 1 ? all : RUN == 0 ? first : all - first;
    return L::template shift_left<kForm.factor_bits() - 1>(L::splat_int(kStartsAtZero ? 0 : minus_sum));
  }

  template <int RUN>
  inline __attribute__((always_inline)) Floats scale_of_run(int p) const {
    const uint8_t* at = scales[p] + RUN * kPanel;  // kinds with two runs have scales of one byte
    return kForm.is_nested ? L::mul(L::load_small(at), outer_scale[p]) : L::load_halves(at);
  }

  // Parts `part` and `part` + 1 of a group times all rows: rows two by two if L can, the last of an odd number alone.
  inline __attribute__((always_inline)) void dot_two_parts(const OctavoGroup* records, int part, Bytes low, Bytes high,
                                                           Ints (&sums)[ROWS]) {
    if constexpr (kPairs) {
      const auto blocks = L::blocks(low, high);
      for (int r = 0; r + 1 < ROWS; r += 2)
        L::dot_pair(sums[r], sums[r + 1], blocks, records[r].codes + 4 * part, records[r + 1].codes + 4 * part);
    }
    for (int r = kPairs ? ROWS / 2 * 2 : 0; r < ROWS; ++r) {
      constexpr bool kSmall = kForm.factor_bits() != 8;
      sums[r] = L::template dot<kSmall>(sums[r], low, L::splat_bytes(records[r].codes + 4 * part));
      sums[r] = L::template dot<kSmall>(sums[r], high, L::splat_bytes(records[r].codes + 4 * part + 4));
    }
  }

  // As dot_vectors, for one panel and two vectors at a time.
  template <int FIRST, int V>
  inline __attribute__((always_inline)) void dot_two_vectors(const OctavoGroup* records, const uint8_t* at, Bytes plane,
                                                             Ints (&sums)[ROWS]) {
    const Bytes one = L::load_bytes(at + (kForm.bits == 2 ? 0 : V) * 64);
    if constexpr (kForm.bits == 2) {
      const Bytes low = L::template with_bits<-2 * V, 3>(L::no_bytes(), one);
      dot_two_parts(records, FIRST + V, low, L::template with_bits<-2 * V - 2, 3>(L::no_bytes(), one), sums);
      if constexpr (V + 2 < kForm.parts()) dot_two_vectors<FIRST, V + 2>(records, at, plane, sums);
    } else {
      const Bytes other = L::load_bytes(at + (V + 1) * 64);
      if constexpr (kForm.bits == 8) {
        dot_two_parts(records, FIRST + V, one, other, sums);
        if constexpr (V + 2 < kForm.parts()) dot_two_vectors<FIRST, V + 2>(records, at, plane, sums);
      } else {
        constexpr int second = V + kForm.nibbles();
        dot_two_parts(records, FIRST + V, whole<V>(L::low_halves(one), plane), whole<V + 1>(L::low_halves(other), plane),
                      sums);
        dot_two_parts(records, FIRST + second, whole<second>(L::high_halves(one), plane),
                      whole<second + 1>(L::high_halves(other), plane), sums);
        if constexpr (V + 2 < kForm.nibbles()) dot_two_vectors<FIRST, V + 2>(records, at, plane, sums);
      }
    }
  }

  // Panel after panel: the integer sums of all rows and one panel fill half of the registers, and none leaves them.
  template <int RUN>
  inline __attribute__((always_inline)) void add_run_by_panel(const OctavoGroup* records,
                                                              Floats (&total)[ROWS][PANELS]) {
    for (int p = 0; p < PANELS; ++p) {
      Ints sums[ROWS];
      for (int r = 0; r < ROWS; ++r) sums[r] = start_of<RUN>(records[r]);
      if constexpr (kPairs)
        for (int r = 0; r + 1 < ROWS; r += 2) L::pair(sums[r], sums[r + 1]);
      Bytes plane = L::no_bytes();
      if (kForm.above()) plane = L::load_bytes(codes[p] + kForm.nibbles() * 64);
      dot_two_vectors<RUN * kForm.parts(), 0>(records, codes[p], plane, sums);
      if constexpr (kPairs)
        for (int r = 0; r + 1 < ROWS; r += 2) L::unpair(sums[r], sums[r + 1]);
      const Floats scale = scale_of_run<RUN>(p);
      codes[p] += kForm.vectors() * 64;
      for (int r = 0; r < ROWS; ++r)
        total[r][p] = L::fma(L::to_float(sums[r]), L::mul(scale, L::splat(records[r].scale)), total[r][p]);
    }
  }

  template <int RUN>
  inline __attribute__((always_inline)) void add_run_together(const OctavoGroup* records, Floats (&total)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; ++r) {
      const Ints start = start_of<RUN>(records[r]);
      for (int p = 0; p < PANELS; ++p) dots[r][p] = start;
    }
    Bytes plane[PANELS];
    if (kForm.above())
      for (int p = 0; p < PANELS; ++p) plane[p] = L::load_bytes(codes[p] + kForm.nibbles() * 64);
    dot_vectors<RUN * kForm.parts(), 0>(records, plane);
    Floats scale[PANELS];
    for (int p = 0; p < PANELS; ++p) {
      scale[p] = scale_of_run<RUN>(p);
      codes[p] += kForm.vectors() * 64;
    }
    for (int r = 0; r < ROWS; ++r) {
      const Floats x_scale = L::splat(records[r].scale);
      for (int p = 0; p < PANELS; ++p)
        total[r][p] = L::fma(L::to_float(dots[r][p]), L::mul(scale[p], x_scale), total[r][p]);
    }
  }

  template <int RUN>
  inline __attribute__((always_inline)) void add_run(const OctavoGroup* records, Floats (&total)[ROWS][PANELS]) {
    if constexpr (L::kByPanel) add_run_by_panel<RUN>(records, total);
    else add_run_together<RUN>(records, total);
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
  static constexpr bool kStreams = true;  // one row is multiplied panel after panel
  static constexpr int kRows = Lanes::kPackedRows;
  static constexpr int kStep = kGroup;  // K-values of a step of the loop
  using Record = OctavoGroup;

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t* panels, Fetch& fetch,
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
  static constexpr bool kStreams = true;
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
                                                         const int64_t* panels, Fetch& fetch,
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
        // One row is bound by memory: prefetch one line with every line that is used, without keeping it in the caches.
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

// The state of a tile with packed weights that are multiplied in float32, group after group: four K-values at a time, so that
// decoding some overlaps multiplying others. L is a parameter because not all Lanes have pick.
template <int KIND, int ROWS, int PANELS, typename L = Lanes>
struct DecodingWork {
  static constexpr Form kForm = form_of(KIND);
  static constexpr float kMinusCentre = -static_cast<float>(1 << (kForm.factor_bits() - 1));
  static constexpr bool kPicks = L::kPicks && (kForm.bits == 2 || kForm.bits == 4);
  static constexpr bool kKeeps = ROWS > 1 || L::kFloatRows == 2;  // with 2 at most, the first of two tiles may have 1 row
  PackedWork<KIND, 1, PANELS> work;
  float* decoded[PANELS];
  Floats scale[PANELS], offset[PANELS], table;
  Bytes bits[PANELS];  // with two bits, the run's codes; else the bits above the fourth; the next ones are lowest

  inline __attribute__((always_inline)) DecodingWork(const OctavoProduct* product, const int64_t* panels, float* room)
      : work(product, panels) {
    for (int p = 0; kKeeps && p < PANELS; ++p) decoded[p] = room + p * product->depth * kPanel;
    float factors[16];
    for (int code = 0; code < 16; ++code) {
      if constexpr (kForm.levels != nullptr) factors[code] = kForm.levels[code];
      else factors[code] = static_cast<float>(code & ((1 << kForm.bits) - 1));
    }
    table = L::load(factors);
  }

  // Part `part` of a run: four K-values of each column, one per byte; a table lookup ignores the bits above.
  inline __attribute__((always_inline)) Bytes next_codes(int part, int p) {
    if constexpr (kForm.bits == 8) return L::load_bytes(work.codes[p] + part * 64);
    const Bytes lowest = bits[p];
    if constexpr (kForm.bits == 2 || kForm.above() != 0)
      bits[p] = L::template with_bits<kForm.bits == 2 ? -2 : -kForm.above(), 255>(L::no_bytes(), lowest);
    if constexpr (kForm.bits == 2) return kPicks ? lowest : L::template with_bits<0, 3>(L::no_bytes(), lowest);
    // All low halves come first, then all high halves.
    const int in_high = part / kForm.nibbles(), vector = part - in_high * kForm.nibbles();
    const Bytes moved = L::move_down(L::load_bytes(work.codes[p] + vector * 64), 4 * in_high);
    if constexpr (kPicks) return moved;
    const Bytes nibbles = L::low_halves(moved);
    if constexpr (kForm.levels != nullptr) return L::look_up(kForm.levels, nibbles);
    return kForm.above() ? L::template with_bits<4, kForm.above() == 1 ? 16 : 48>(nibbles, lowest) : nibbles;
  }

  // K-values J … 3 of four.
  template <int J>
  inline __attribute__((always_inline)) void add(const Slice* records, int k, const Bytes (&codes)[PANELS],
                                                 Floats (&total)[ROWS][PANELS]) {
    Floats weights[PANELS];
    for (int p = 0; p < PANELS; ++p) {
      if constexpr (kPicks) weights[p] = L::template pick<8 * J>(table, codes[p]);
      else weights[p] = L::to_float(L::template byte_of<J>(codes[p]));
      // At most one rounding, the same as in decoding: with a minimum, code · scale is exact.
      weights[p] = L::fma(weights[p], scale[p], offset[p]);
      if (kKeeps) L::store(decoded[p] + J * kPanel, weights[p]);
    }
    for (int r = 0; r < ROWS; ++r) {
      const Floats x = L::splat(records[r].values[k + J]);
      for (int p = 0; p < PANELS; ++p) total[r][p] = L::fma(x, weights[p], total[r][p]);
    }
    if constexpr (J < 3) add<J + 1>(records, k, codes, total);
  }

  template <int RUN>
  inline __attribute__((always_inline)) void add_run(const Slice* records, Floats (&total)[ROWS][PANELS]) {
    for (int p = 0; p < PANELS; ++p) {
      const uint8_t *at = work.scales[p] + RUN * kPanel, *minimum = at + work.minimums;
      scale[p] = kForm.is_nested ? L::mul(L::load_small(at), work.outer_scale[p]) : L::load_halves(at);
      if (!kForm.has_minimum) offset[p] = L::mul(scale[p], L::splat(kMinusCentre));
      else if (!kForm.is_nested) offset[p] = L::load_halves(minimum);
      else offset[p] = L::mul(L::load_small(minimum), work.outer_minimum[p]);
      if (kForm.bits == 2 || kForm.above()) bits[p] = L::load_bytes(work.codes[p] + kForm.nibbles() * 64);
    }
    for (int part = 0; part < kForm.parts(); ++part) {
      Bytes codes[PANELS];
      for (int p = 0; p < PANELS; ++p) codes[p] = next_codes(part, p);
      const int k = 4 * (RUN * kForm.parts() + part);
      add<0>(records + k / kSlice * ROWS, k % kSlice, codes, total);
      for (int p = 0; kKeeps && p < PANELS; ++p) decoded[p] += 4 * kPanel;
    }
    for (int p = 0; p < PANELS; ++p) work.codes[p] += kForm.vectors() * 64;
  }
};

// A thread's buffer for two panels as float32, kept between calls; 64-byte aligned.
inline float* decoded_room(int64_t depth) {
  struct Room {
    void* at = nullptr;
    int64_t num_bytes = 0;
    ~Room() { free(at); }
  };
  static thread_local Room room;
  const int64_t num_bytes = 2 * depth * kPanel * static_cast<int64_t>(sizeof(float));
  if (room.num_bytes < num_bytes) {
    free(room.at);
    room.at = aligned_alloc(64, static_cast<size_t>(num_bytes));
    if (!room.at) abort();
    room.num_bytes = num_bytes;
  }
  return static_cast<float*>(room.at);
}

// Packed weights, decoded on the fly: the first tile of rows stores the panels as float32 for the following tiles.
template <int KIND>
struct DecodingTile {
  static constexpr bool kStreams = false;
  static constexpr int kRows = Lanes::kFloatRows;
  static constexpr int kStep = kSlice;
  using Record = Slice;

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t* panels, Fetch& fetch,
                                                         Floats (&total)[ROWS][PANELS]) {
    using Work = DecodingWork<KIND, ROWS, PANELS>;
    Work work(product, panels, Work::kKeeps ? decoded_room(product->depth) : nullptr);
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p) total[r][p] = L::splat(0.0f);
    const int64_t num_groups = product->depth / kGroup;
    for (int64_t group = 0; group < num_groups; ++group, records += kGroup / kSlice * ROWS) {
      for (int step = 0; step < kGroup / kStep; ++step) fetch_some(fetch);
      if (ROWS > 1) fetch_ahead(fetch.ahead);
      if (work.kForm.is_nested && group % (kOuter / kGroup) == 0) work.work.next_outer();
      work.template add_run<0>(records, total);
      if constexpr (work.kForm.runs == 2) work.template add_run<1>(records, total);
      for (int p = 0; p < PANELS; ++p) work.work.scales[p] += work.kForm.runs * kPanel * work.kForm.width();
    }
  }
};

// The following tiles, which use the decoded panels.
struct DecodedTile {
  using Plain = FloatTile<OCTAVO_FLOAT32>;
  using Record = Slice;
  static constexpr int kRows = Plain::kRows;

  template <int ROWS, int PANELS>
  static inline __attribute__((always_inline)) void sums(const OctavoProduct* product, const Record* records,
                                                         const int64_t*, Fetch& fetch, Floats (&total)[ROWS][PANELS]) {
    OctavoProduct plain = *product;
    plain.weights = decoded_room(product->depth);
    const int64_t panels[2] = {0, 1};
    Plain::template sums<ROWS, PANELS>(&plain, records, panels, fetch, total);
  }
};
