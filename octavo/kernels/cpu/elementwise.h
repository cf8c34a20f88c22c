// The C interface of the operations between products: norms, gates, caps, and preparing activations. A row's result depends
// only on that row, not on the batch or the threads.
#pragma once
#include <stdint.h>

#include "product.h"
#include "threads.h"

extern "C" {

// y [num_rows, size] = x / sqrt(mean(x²) + epsilon) * weight; y may be x.
void octavo_rms_norm(octavo::Threads* threads, const float* x, int64_t x_stride, const float* weight, float epsilon,
                     int64_t num_rows, int64_t size, float* y, int64_t y_stride);
// The same, added to y.
void octavo_rms_norm_add(octavo::Threads* threads, const float* x, int64_t x_stride, const float* weight, float epsilon,
                         int64_t num_rows, int64_t size, float* y, int64_t y_stride);

// x [num_rows, size] = limit · tanh(x / limit).
void octavo_cap(octavo::Threads* threads, float* x, int64_t x_stride, int64_t num_rows, int64_t size, float limit);

// y [num_rows, size] = silu(gate) * up of x [num_rows, 2 * size]: gate, then up.
void octavo_silu_mul(octavo::Threads* threads, const float* x, int64_t x_stride, int64_t num_rows, int64_t size, float* y,
                     int64_t y_stride);

// RMSNorm of x, or x itself if weight is NULL, prepared for products with weights of that kind, in one pass: the same as
// octavo_prepare of the norm. If activations are quantised, size is a multiple of 32. Rows are stored in tiles of at most
// tile_rows, of nearly equal height; for each piece of K a tile holds the records of its rows. tile_rows 1: row after row.
void octavo_rms_norm_prepare(octavo::Threads* threads, int kind, const float* x, int64_t x_stride, const float* weight,
                             float epsilon, int64_t num_rows, int64_t size, int32_t tile_rows, void* prepared);
}

namespace octavo {

enum class Instructions { portable, avx2, avx512, neon };
Instructions best_instructions();  // according to octavo_isa

struct ElementwiseVariant {
  void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t size, float* y);
  void (*rms_norm_add)(const float* x, const float* weight, float epsilon, int64_t size, float* y);
  void (*cap)(float* x, int64_t size, float limit);
  void (*silu_mul)(const float* gate, const float* up, int64_t size, float* y);
  void (*gate)(const float* gate, const float* up, float alpha, float limit, float offset, int64_t size, float* y);
};

// y [size] = g / (1 + e^(−alpha · g)) · (u + offset), with g at most limit and u between −limit and limit (0: no limit).
void gate_row(const float* gate, const float* up, float alpha, float limit, float offset, int64_t size, float* y);

void rms_norm_row(const float* x, const float* weight, float epsilon, int64_t size, float* y);

extern const ElementwiseVariant elementwise_portable, elementwise_avx2, elementwise_avx512, elementwise_neon;

}  // namespace octavo
