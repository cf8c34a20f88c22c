// y = x · Wᵀ on a CPU: the C interface of the product kernels, and the memory layout of weights and activations. Nothing here
// allocates, except each thread's buffer for two decoded panels.
//
// Weights. 16 output columns (rows of W) form a panel: one 64-byte load feeds 16 of them with four K-values each.
// Packed, a panel is [groups] scales of 16 float16, then [groups] minimums of 16 float16 (kinds that have them),
// padded to 64 bytes, then the codes, group of 32 K-values after group. Codes are unsigned:
//   weight = scale · (code − centre)      or, with a minimum,      weight = scale · code + minimum.
// Kinds with levels use the code as an index into a table of levels, and the level in place of the code.
// Nested kinds have one byte per scale and minimum, each times an outer float16 of its 256 K-values, stored behind them:
// exact, and fewer bytes than the products would take. CODES2_NESTED and CODES6_NESTED have two runs of 16 in a group, each
// with its own scale and minimum. A run's codes are vectors of 16 columns × 4 bytes. With 8 bits, vector v holds K-values
// 4v … 4v+3. With 4 to 6 bits, it holds those in its low halves, and 4v … of the run's second half in its high halves; a last
// vector holds the bits above the fourth: those of K-values 4j … 4j+3 are bits j (5 bits), or 2j and 2j+1 (6 bits), of its
// bytes. With 2 bits, a run is one vector: K-values 4j … 4j+3 are bits 2j and 2j+1 of its bytes.
// Plain, a panel is [K] vectors of 16 float32, or [K / 2] of 16 pairs of bfloat16, the even K-value in the low half.
// Columns and K-values that pad a panel are zero.
//
// Activations are prepared once for several products. Rows are divided into tiles of nearly equal height, at most tile_rows of
// the current instruction set; a tile holds, group after group, the records of its rows.
//
// Every element of y is the same chain of operations over K, group after group, for any number of rows, tile, thread or
// instruction set: the same row gives the same bits in any batch.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "threads.h"

extern "C" {

enum OctavoKind {
  OCTAVO_FLOAT32 = 0,
  OCTAVO_CODES8 = 1,          // 8 bits, centre 128: Q8_0
  OCTAVO_CODES4 = 2,          // 4 bits, centre 8: Q4_0
  OCTAVO_CODES4_MINIMUM = 3,  // 4 bits and a minimum: Q4_1
  OCTAVO_BFLOAT16 = 4,        // computed in float32: bit for bit the results of FLOAT32 with the widened weights
  OCTAVO_CODES5 = 5,          // 5 bits, centre 16: Q5_0
  OCTAVO_CODES5_MINIMUM = 6,  // 5 bits and a minimum: Q5_1
  OCTAVO_CODES4_NESTED = 7,   // 4 bits and a minimum: Q4_K
  OCTAVO_CODES5_NESTED = 8,   // 5 bits and a minimum: Q5_K
  OCTAVO_CODES6_NESTED = 9,   // 6 bits, centre 32: Q6_K
  OCTAVO_CODES4_IQ4 = 10,         // 4 bits, IQ4's levels: IQ4_NL
  OCTAVO_CODES4_IQ4_NESTED = 11,  // 4 bits, IQ4's levels: IQ4_XS
  OCTAVO_CODES4_IQ2_NESTED = 12,  // 4 bits, IQ2's levels, in eighths: IQ2_XXS decoded, except for the scales
  OCTAVO_CODES2_NESTED = 13,      // 2 bits and a minimum: Q2_K
  // Combined with a packed kind: the same panels, decoded on the fly and multiplied in float32. Bit for bit the results of
  // FLOAT32 with the decoded weights.
  OCTAVO_DECODED = 64,
};

enum OctavoFinish {
  OCTAVO_FINISH_PLAIN = 0,  // y [rows, columns] = x · Wᵀ (+ bias) (+ residual)
  OCTAVO_FINISH_GATED = 1,  // y [rows, columns / 2] = silu(gate) · up
  OCTAVO_FINISH_GELU = 2,   // y [rows, columns] = gelu(x · Wᵀ (+ bias)), by tanh; no residual
  OCTAVO_FINISH_GATED_GELU = 3,
  OCTAVO_FINISH_RELU = 4,        // as GELU, with max(x, 0)
  OCTAVO_FINISH_EXACT_GELU = 5,  // as GELU, by erf
  // Gated: W has the columns of gate, then of up, each a multiple of 16; neither bias nor residual.
};

// A group of 32 activations of one row. A group with a NaN or an infinity has codes 0 and scale NaN, so that the row's results
// are NaN.
typedef struct {
  int8_t codes[32];
  float scale;
  float scaled_sum;         // scale · Σ codes: factor of a weight's minimum
  int32_t minus_sum;        // −Σ codes: factor of a weight's centre
  int32_t minus_sum_first;  // −Σ of the first 16 codes
} OctavoGroup;

typedef struct {
  const void* weights;      // panels, 64-byte aligned
  const void* activations;  // prepared for the same kind, rows and depth
  float* y;
  const float* bias;      // [columns] or null
  const float* residual;  // same shape as y; may be y itself; or null
  int64_t y_stride;       // floats from row to row of y and residual
  int64_t num_rows, num_columns, depth;
  int32_t kind, finish;
} OctavoProduct;

// "avx512vnni", "avx2" or "portable" on x86-64, "i8mm", "dotprod", "neon" or "portable" on aarch64: the best for this CPU,
// unless octavo_use_isa has chosen another (returns 0 if not supported).
const char* octavo_isa(void);
int octavo_use_isa(const char* name);
// The largest height of a tile of activations for products of that kind; depends on the instruction set.
int32_t octavo_tile_rows(int kind);

int64_t octavo_packed_bytes(int kind, int64_t num_columns, int64_t depth);
int64_t octavo_prepared_bytes(int kind, int64_t num_rows, int64_t depth);

// rows [num_columns, depth]: float32, bfloat16, or GGUF blocks of the kind; depth is a multiple of 32 (nested: 256).
void octavo_pack(octavo::Threads* threads, int kind, const void* rows, int64_t num_columns, int64_t depth,
                 void* packed);
// Quantises float32 rows [num_columns, depth] to CODES8, CODES4 or CODES4_MINIMUM: round to nearest, scale from the group's
// largest (or range, with minimum).
void octavo_pack_quantised(octavo::Threads* threads, int kind, const float* rows, int64_t num_columns, int64_t depth,
                           void* packed);
// out [num_ids, depth]: columns of W as float32, so that an embedding tied to the head needs no second copy. Returns −1, and reads
// nothing, if an id is no column.
int octavo_read_columns(int kind, const void* packed, int64_t num_columns, int64_t depth, const int64_t* ids,
                        int64_t num_ids, float* out);

// x [num_rows, depth] with x_stride floats from row to row → prepared, 64-byte aligned.
void octavo_prepare(octavo::Threads* threads, int kind, const float* x, int64_t x_stride, int64_t num_rows,
                    int64_t depth, void* prepared);
void octavo_product(octavo::Threads* threads, const OctavoProduct* product);
// Several products, one after the other, in one call.
void octavo_products(octavo::Threads* threads, const OctavoProduct* products, int64_t num_products);

// Reads every byte once, to measure the memory bandwidth in benchmarks. The result depends on all bytes.
int64_t octavo_read_all(octavo::Threads* threads, const void* memory, int64_t num_bytes);
// num_dots times 16 × 4 products of bytes on every thread, on registers only: measures the peak arithmetic in benchmarks.
int64_t octavo_dot_all(octavo::Threads* threads, int64_t num_dots);
}

namespace octavo {

constexpr int kPanel = 16;   // columns
constexpr int kGroup = 32;   // K-values that share a scale
constexpr int kOuter = 256;  // K-values that share an outer scale
constexpr int kSlice = 16;   // K-values of a record of plain activations

// Memory that an operation after a product reads, prefetched during the product: runs of num_lines cache lines, some lines with
// every step of a tile. One per share, on separate cache lines, because each is written often.
struct alignas(64) Ahead {
  const uint8_t *const *run, *const *end;  // the next run; the end of the list
  int64_t line;                            // the next line of that run
  int64_t num_lines;
};

// One row of activations and one panel of plain weights.
struct RowPanel {
  const float* x;    // [depth], padded with zeros to a multiple of kSlice
  const void* panel;
  float* y;          // [kPanel]
};

// The kernels of one instruction set. Each call does one share of the work, for callers inside Threads::run.
struct ProductKernels {
  const char* name;
  int packed_tile_rows, float_tile_rows;
  void (*prepare_share)(int kind, const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, void* prepared,
                        int thread, int num_threads);
  // x [depth] as records `step` apart: quantised if the kind takes codes.
  void (*prepare_row)(int kind, const float* x, int64_t depth, void* records, int64_t step);
  // next: the product after this one, whose weights are prefetched towards the end; or null.
  // ahead: other memory to prefetch, per share; or null. num_claimed: one counter for all shares, 0 at first.
  void (*product_share)(const OctavoProduct* product, const OctavoProduct* next, Ahead* ahead, int64_t* num_claimed,
                        int index, int num_shares);
  // y [size] = what a product with this finish would have stored, of the plain product's x [size], or [2 · size] if it is gated.
  void (*finish_row)(int finish, const float* x, int64_t size, float* y);
  // y = panel · x of each, in FLOAT32 or BFLOAT16: the bits of product_share. One panel is a single chain of sums over K, so that several
  // are multiplied at a time.
  void (*row_panels)(int kind, int64_t depth, const RowPanel* items, int64_t count);
  // y [num_columns] += W · x, for W in FLOAT32 or BFLOAT16 and x [depth], padded with zeros to a multiple of kSlice: the bits of product_share
  // with y as residual. A row of an adapter's B is short, so that panels are multiplied together here, too.
  void (*add_row)(int kind, int64_t depth, const float* x, const void* weights, int64_t num_columns, float* y);
  int64_t (*read_all)(const void* memory, int64_t num_bytes);
  int64_t (*dot_all)(int64_t num_dots);
};

const ProductKernels& product_kernels();

// next: the product after this one, or null. ahead: one per thread, or null.
void run_product(Threads* threads, const OctavoProduct* product, const OctavoProduct* next, Ahead* ahead = nullptr);

static inline bool is_gated(int finish) { return finish == OCTAVO_FINISH_GATED || finish == OCTAVO_FINISH_GATED_GELU; }

static inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// The storage kind, without OCTAVO_DECODED.
static inline constexpr int stored_as(int kind) { return kind & ~OCTAVO_DECODED; }
static inline constexpr bool is_packed(int kind) {
  return stored_as(kind) != OCTAVO_FLOAT32 && stored_as(kind) != OCTAVO_BFLOAT16;
}
// Whether its activations are quantised.
static inline constexpr bool takes_codes(int kind) { return is_packed(kind) && stored_as(kind) == kind; }

// The levels of 4-bit codes, centred on a power of two, so that none is negative.
constexpr uint8_t kIq4Levels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kIq2Levels[16] = {72, 89, 107, 64, 56, 39, 21};  // 64 + 8, 25, 43; 64; from code 4 on 64 − 8, 25, 43

struct Form {
  int bits;
  bool has_minimum, is_nested;
  int runs;  // in a group
  const uint8_t* levels = nullptr;
  int level_bits = 0;
  float factor = 1.0f;  // of all outer scales

  constexpr int width() const { return is_nested ? 1 : 2; }  // bytes of a scale
  constexpr int parts() const { return 8 / runs; }           // parts of 4 K-values in a run
  constexpr bool has_nibbles() const { return bits != 8 && bits != 2; }
  constexpr int above() const { return has_nibbles() ? bits - 4 : 0; }
  constexpr int nibbles() const { return has_nibbles() ? parts() / 2 : 0; }  // vectors of nibbles in a run
  constexpr int vectors() const { return has_nibbles() ? nibbles() + (above() != 0) : parts() * bits / 8; }
  constexpr int factor_bits() const { return levels ? level_bits : bits; }  // bits of the factor of an activation
};

static inline constexpr Form form_of(int kind) {  // for packed kinds
  switch (stored_as(kind)) {
    case OCTAVO_CODES8: return {8, false, false, 1};
    case OCTAVO_CODES4: return {4, false, false, 1};
    case OCTAVO_CODES4_MINIMUM: return {4, true, false, 1};
    case OCTAVO_CODES5: return {5, false, false, 1};
    case OCTAVO_CODES5_MINIMUM: return {5, true, false, 1};
    case OCTAVO_CODES4_NESTED: return {4, true, true, 1};
    case OCTAVO_CODES5_NESTED: return {5, true, true, 1};
    case OCTAVO_CODES4_IQ4: return {4, false, false, 1, kIq4Levels, 8};
    case OCTAVO_CODES4_IQ4_NESTED: return {4, false, true, 1, kIq4Levels, 8};
    case OCTAVO_CODES4_IQ2_NESTED: return {4, false, true, 1, kIq2Levels, 7, 0.125f};
    case OCTAVO_CODES2_NESTED: return {2, true, true, 2};
    default: return {6, false, true, 2};
  }
}

// Calls body with a constant whose ::value is the packed kind: compiled once per kind, so that shifts and offsets are constants.
template <typename Body>
void with_kind(int kind, Body body) {
  switch (stored_as(kind)) {
    case OCTAVO_CODES8: return body(std::integral_constant<int, OCTAVO_CODES8>());
    case OCTAVO_CODES4: return body(std::integral_constant<int, OCTAVO_CODES4>());
    case OCTAVO_CODES4_MINIMUM: return body(std::integral_constant<int, OCTAVO_CODES4_MINIMUM>());
    case OCTAVO_CODES5: return body(std::integral_constant<int, OCTAVO_CODES5>());
    case OCTAVO_CODES5_MINIMUM: return body(std::integral_constant<int, OCTAVO_CODES5_MINIMUM>());
    case OCTAVO_CODES4_NESTED: return body(std::integral_constant<int, OCTAVO_CODES4_NESTED>());
    case OCTAVO_CODES5_NESTED: return body(std::integral_constant<int, OCTAVO_CODES5_NESTED>());
    case OCTAVO_CODES4_IQ4: return body(std::integral_constant<int, OCTAVO_CODES4_IQ4>());
    case OCTAVO_CODES4_IQ4_NESTED: return body(std::integral_constant<int, OCTAVO_CODES4_IQ4_NESTED>());
    case OCTAVO_CODES4_IQ2_NESTED: return body(std::integral_constant<int, OCTAVO_CODES4_IQ2_NESTED>());
    case OCTAVO_CODES2_NESTED: return body(std::integral_constant<int, OCTAVO_CODES2_NESTED>());
    default: return body(std::integral_constant<int, OCTAVO_CODES6_NESTED>());
  }
}

// Offsets in a packed panel, in bytes.
struct Places {
  int64_t minimums, outer_scales, outer_minimums, codes, end;
};

static inline Places places_of(int kind, int64_t depth) {
  const Form form = form_of(kind);
  const int64_t num_groups = depth / kGroup, outer = form.is_nested ? depth / kOuter * kPanel * 2 : 0;
  Places places;
  places.minimums = num_groups * form.runs * kPanel * form.width();
  places.outer_scales = places.minimums + (form.has_minimum ? places.minimums : 0);
  places.outer_minimums = places.outer_scales + outer;
  places.codes = round_up(places.outer_minimums + (form.has_minimum ? outer : 0), 64);
  places.end = places.codes + num_groups * form.runs * form.vectors() * 64;
  return places;
}

static inline int64_t panel_bytes(int kind, int64_t depth) {
  if (is_packed(kind)) return places_of(kind, depth).end;
  return round_up(depth, kSlice) * kPanel * (kind == OCTAVO_FLOAT32 ? 4 : 2);
}

// The first row of tile `tile` of a batch, for 0 … num_tiles: heights differ by at most one.
static inline int64_t num_tiles(int64_t num_rows, int tile_rows) { return (num_rows + tile_rows - 1) / tile_rows; }
static inline int64_t tile_begin(int64_t tile, int64_t tiles, int64_t num_rows) { return num_rows * tile / tiles; }

}  // namespace octavo
