// Low-rank adapters of products (decision 052): y [rows, columns] += scale · (norm(x) · Aᵀ) · Bᵀ, for the rows that have an adapter.
// A and B are packed like any weight (product.h), in float32 or bfloat16, and are multiplied by the same kernels: a row's result
// depends on that row and its adapter alone, not on other rows, their adapters, the tiles or the threads.
#pragma once
#include <stdint.h>

#include <vector>

#include "product.h"
#include "threads.h"

extern "C" {

// What one adapter does to one part of a product's columns.
typedef struct {
  const void* down;      // A [rank, depth], packed
  const void* up;        // B [num_columns, rank], packed
  int64_t first_column;  // of the product
  int64_t num_columns;
  int64_t rank;
  float scale;
  int32_t kind;  // OCTAVO_FLOAT32 or OCTAVO_BFLOAT16, of both
} OctavoAdapterPart;

// What one adapter does to one product.
typedef struct {
  const OctavoAdapterPart* parts;
  int64_t num_parts;  // 0: nothing
} OctavoAdapterSite;

typedef struct {
  const OctavoAdapterSite* sites;  // by the product's site
  int64_t num_sites;
} OctavoAdapter;
}

namespace octavo {

// Consecutive rows of a step that have the same adapter, at most kMost: one piece of work.
struct AdaptedRows {
  int64_t first, count;
  const OctavoAdapter* adapter;
};

// A step's rows that have adapters: those of its tokens, and those of its samples. Kept from step to step, to avoid allocations.
struct AdaptedStep {
  std::vector<AdaptedRows> tokens, samples;

  // tokens [num_tokens]: an index into `adapters`, or −1. False: an index is out of range.
  bool plan(const OctavoAdapter* adapters, int64_t num_adapters, const int32_t* of_tokens, int64_t num_tokens,
            const int64_t* sample_at, int64_t num_samples);
  void forget() {
    tokens.clear();
    samples.clear();
  }
};

// y [count] += what the adapter adds to the columns first … first + count − 1 of a site, for one row x [depth]. Its parts are in the
// order of their columns. The caller's thread does it alone.
void add_to_row(const OctavoAdapter& adapter, int64_t site, int64_t first, int64_t count, const float* x, int64_t depth, float* y);

// Whether an adapter of these rows changes the product of this site; −1: none does.
bool is_adapted(const std::vector<AdaptedRows>& rows, int64_t site);

struct AdaptedProduct {
  const float* x;
  int64_t x_stride, depth;
  const float* norm_weight;  // null: x is taken as it is
  float epsilon;
  float* y;
  int64_t y_stride, site;
};

void add_adapters(Threads* threads, const AdaptedProduct& product, const std::vector<AdaptedRows>& rows);

}  // namespace octavo
