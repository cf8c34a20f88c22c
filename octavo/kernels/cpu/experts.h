// A step's tokens through the experts that are chosen for each: the C interface.
// Knows nothing of models, nor of who allocated what. Nothing here allocates.
//
// Which tokens an expert gets is found out inside the call, from the logits: the caller's list of operations is the same
// whatever they are. A token's result depends on its own row alone, not on who else is sent where.
#pragma once
#include <stdint.h>

#include "product.h"
#include "threads.h"

extern "C" {

// y [T, depth] = Σ weight · down(gate(gate_up(x))) (+ y) over the experts with the num_chosen largest logits of each token;
// of equal ones those that come first. gate(g, u) = g / (1 + e^(−alpha · g)) · (u + offset), with g at most limit and u
// between −limit and limit (0: no limit).
typedef struct {
  const float* x;       // [T, depth]
  const float* logits;  // [T, num_experts]
  float* y;
  int64_t x_stride, logits_stride, y_stride;
  const OctavoProduct* gate_up;  // [num_experts]: weights [2 · inner, depth], gate's columns first, bias and kind; of
  const OctavoProduct* down;     // all the same kind. What concerns the step is filled in here
  int64_t depth, inner;
  int32_t num_experts, num_chosen;
  int32_t is_normalised;  // weights of the chosen add up to 1; else they are their shares in the softmax over all
  int32_t adds;
  float alpha, limit, offset;
  void* room;  // octavo_experts_bytes of it, 64-byte aligned
} OctavoExperts;

int64_t octavo_experts_bytes(const OctavoExperts* call, int64_t num_tokens);
void octavo_experts(octavo::Threads* threads, const OctavoExperts* call, int64_t num_tokens);
}
