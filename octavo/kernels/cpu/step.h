// A step as a list of operations, run in one call: the C interface. What the list holds is fixed when it is made; how many
// tokens and samples a step has, and where its inputs are, comes with the step.
// Knows nothing of models, nor of who allocated what. Nothing here allocates, but for lists kept from step to step.
#pragma once
#include <stdint.h>

#include "attention.h"
#include "experts.h"
#include "product.h"
#include "threads.h"

extern "C" {

typedef struct {
  int64_t num_tokens, num_samples, num_rows;
  const int64_t* input_ids;    // [T]
  const int64_t* positions;    // [T]
  const int64_t* slots;        // [T] where keys and values go; −1: nowhere
  const int64_t* sample_at;    // [S] indices into T
  const int32_t* query_start;  // [B + 1]
  const int32_t* seq_lens;     // [B]
  const int32_t* page_table;   // [B, table_stride]
  int64_t table_stride;
} OctavoStep;

enum OctavoOpCode {
  OCTAVO_EMBED = 0,
  OCTAVO_ROTATE = 1,
  OCTAVO_LINEAR = 2,
  OCTAVO_GATE = 3,
  OCTAVO_TURN = 4,
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

// y [T, depth] = the input ids' columns of a packed weight, times factor; with `positions` set, those of the positions,
// added to y.
typedef struct {
  const void* table;
  int64_t num_columns, depth;
  float* y;
  float factor;
  int32_t kind, positions;
} OctavoEmbed;

// y [T, num_frequencies, 2]: cosine and sine of position · frequency, times amplitude where a pair turns, of frequency not 0.
typedef struct {
  const float* frequencies;
  float* y;
  int64_t num_frequencies;
  float amplitude;
} OctavoRotate;

// RMSNorm, or LayerNorm where a bias is given; no weight: none.
typedef struct {
  const float* weight;
  const float* bias;
  float epsilon;
} OctavoNorm;

// Products of norm(x), one after the other. All their kinds take activations in the same form.
typedef struct {
  const float* x;
  int64_t x_stride, depth;
  OctavoNorm norm;
  float* normed;   // [rows, depth]: room for norm(x) where products cannot be given it otherwise
  void* prepared;  // room for the activations
  const OctavoProduct* products;  // their num_rows and activations are filled in here
  int64_t num_products;
} OctavoLinear;

// y [rows, size] = silu(x[:, :size]) · x[:, size:].
typedef struct {
  const float* x;
  float* y;
  int64_t x_stride, y_stride, size;
} OctavoGate;

// y [rows, size] = norm(x), or y + norm(x) where it adds; as OctavoGather: y [S, size] = x[sample_at].
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
  int32_t group;  // whose slots and page table a layer has: a step's lie group after group, [G, T] and [G, B, table_stride]
  union {
    OctavoEmbed embed;
    OctavoRotate rotate;
    OctavoLinear linear;
    OctavoGate gate;
    OctavoTurn turn;            // slots and num_tokens are filled in here
    OctavoAttention attention;  // what describes the rows is filled in here
    OctavoMove move;
    OctavoExperts experts;
    OctavoCap cap;
  };
} OctavoOp;

// 0, or 1 + the index of an operation that cannot run. seconds: [num_ops], each increased by what its operation took; or null.
int64_t octavo_run(octavo::Threads* threads, const OctavoOp* ops, int64_t num_ops, const OctavoStep* step, double* seconds);
}
