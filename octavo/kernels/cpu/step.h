// The C interface of a step: a list of operations, run in one call. The list is fixed when it is made; the number of tokens and
// samples and the addresses of the inputs come with the step. Nothing here allocates, except lists kept from step to step.
#pragma once
#include <stdint.h>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "product.h"
#include "threads.h"

extern "C" {

typedef struct {
  int64_t num_tokens, num_samples, num_rows;
  const int64_t* input_ids;    // [T]
  const int64_t* positions;    // [T]
  const int64_t* slots;        // [T] where keys and values are stored; −1: not stored
  const int64_t* sample_at;    // [S] indices into T
  const int32_t* query_start;  // [B + 1]
  const int32_t* seq_lens;     // [B]
  const int32_t* page_table;   // [B, table_stride]
  int64_t table_stride;
  const int32_t* adapter_of;      // [T] indices into `adapters`, −1: none; or null: no token has one
  const OctavoAdapter* adapters;  // [num_adapters]
  int64_t num_adapters;
} OctavoStep;

enum OctavoOpCode {
  OCTAVO_EMBED = 0,
  OCTAVO_ROTATE = 1,
  OCTAVO_LINEAR = 2,
  OCTAVO_GATE = 3,
  OCTAVO_QK_NORM_ROPE_STORE = 4,
  OCTAVO_ATTEND = 5,
  OCTAVO_GATHER = 6,
  OCTAVO_NORM = 7,
  OCTAVO_EXPERTS = 8,
  OCTAVO_CAP = 9,
};

enum OctavoCount {
  OCTAVO_PER_TOKEN = 0,
  OCTAVO_PER_SAMPLE = 1,
};

// y [T, depth] = columns of a packed weight at the input ids, times factor. With `positions` set: rows of a float32 table at
// the positions, added to y.
typedef struct {
  const void* table;
  int64_t num_columns, depth;
  float* y;
  float factor;
  int32_t kind, positions;
} OctavoEmbed;

// y [T, num_frequencies, 2]: cosine and sine of position · frequency, times amplitude unless the frequency is 0.
typedef struct {
  const float* frequencies;
  float* y;
  int64_t num_frequencies;
  float amplitude;
} OctavoRotate;

// RMSNorm, or LayerNorm if there is a bias; no weight: no norm.
typedef struct {
  const float* weight;
  const float* bias;
  float epsilon;
} OctavoNorm;

// Products of norm(x), one after the other. Their kinds take activations in the same form.
typedef struct {
  const float* x;
  int64_t x_stride, depth;
  OctavoNorm norm;
  float* normed;   // [rows, depth]: buffer for norm(x), used for a LayerNorm
  float* unfinished;  // [rows, all columns]: buffer for products that are changed by adapters before they are finished; or null
  void* prepared;  // buffer for the activations
  const OctavoProduct* products;  // octavo_run fills in num_rows and activations
  int64_t num_products;
  int64_t site;  // number of this product for adapters, which change it when all of it is there; −1: none does
  int64_t first_column;  // columns of the site's products that an earlier operation has computed, to the left of these
} OctavoLinear;

// y [rows, size] = silu(x[:, :size]) · x[:, size:].
typedef struct {
  const float* x;
  float* y;
  int64_t x_stride, y_stride, size;
} OctavoGate;

// OCTAVO_NORM: y [rows, size] = norm(x), or y + norm(x) if `adds`. OCTAVO_GATHER: y [S, size] = x[sample_at].
typedef struct {
  const float* x;
  float* y;
  int64_t x_stride, y_stride, size;
  OctavoNorm norm;
  int32_t adds;
} OctavoMove;

// x [rows, size] = limit · tanh(x / limit).
typedef struct {
  float* x;
  int64_t x_stride, size;
  float limit;
} OctavoCap;

typedef struct {
  int32_t code, count;
  int32_t group;  // of the layer, for slots [G, T] and page tables [G, B, table_stride]
  union {
    OctavoEmbed embed;
    OctavoRotate rotate;
    OctavoLinear linear;
    OctavoGate gate;
    OctavoQkNormRope qk_norm_rope;  // octavo_run fills in slots and num_tokens
    OctavoAttention attention;  // octavo_run fills in what describes the rows
    OctavoMove move;
    OctavoExperts experts;
    OctavoCap cap;
  };
} OctavoOp;

// Returns 0, or 1 + the index of an operation that cannot run. seconds: [num_ops], to which each operation's time is added; or
// null.
int64_t octavo_run(octavo::Threads* threads, const OctavoOp* ops, int64_t num_ops, const OctavoStep* step, double* seconds);
}
