// The C interface of mixture-of-experts layers. Nothing here allocates.
//
// The call itself routes tokens to experts by their logits, so the caller's list of operations does not depend on them. A
// token's result depends only on its own row, not on the routing of others.
#pragma once
#include <stdint.h>

#include "adapters.h"
#include "product.h"
#include "threads.h"

extern "C" {

// y [T, depth] = Σ weight · down(gate(gate_up(x))) (+ y) over the experts with the num_chosen largest logits of each token;
// of equal ones the first. gate(g, u) = g / (1 + e^(−alpha · g)) · (u + offset), with g clamped to at most limit and u to
// −limit … limit (0: no limit).
typedef struct {
  const float* x;       // [T, depth]
  const float* logits;  // [T, num_experts]
  float* y;
  int64_t x_stride, logits_stride, y_stride;
  const OctavoProduct* gate_up;  // [num_held]: weights [2 · inner, depth], columns of gate first, bias and kind; all
  const OctavoProduct* down;     // of one kind. The call fills in the fields that depend on the step
  int64_t depth, inner;
  int32_t num_experts, num_chosen;
  int32_t first_held, num_held;  // the sum is over those chosen experts that are among these; others are another rank's
  int32_t is_normalised;  // the weights of the chosen experts add up to 1; else they are from the softmax over all
  int32_t adds;
  float alpha, limit, offset;
  void* room;  // scratch memory of octavo_experts_bytes, 64-byte aligned
  // Numbers of the products for adapters, −1: none changes them. An expert's columns follow those of the expert before it, counted
  // from the first that is held: 2 · inner of each, and depth of each.
  int64_t gate_up_site, down_site;
} OctavoExperts;

int64_t octavo_experts_bytes(const OctavoExperts* call, int64_t num_tokens);
}

namespace octavo {

// rows: those of the tokens that have adapters.
void run_experts(Threads* threads, const OctavoExperts& call, int64_t num_tokens, const std::vector<AdaptedRows>& rows);

}  // namespace octavo
