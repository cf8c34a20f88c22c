// Low-rank adapters of products (decisions 052 and 065): y [rows, columns] += scale · (norm(x) · Aᵀ) · Bᵀ, for the rows that have an
// adapter. A row's result depends on that row and its adapter alone, not on other rows, their adapters, the tiles or the threads.
//
// The work is divided into tasks inside the product's own parallel section: each thread shrinks some rows (x · Aᵀ), computes its
// share of the base's product, and expands (· Bᵀ) the columns of that share. It waits for others' inner numbers only, which were
// made before the base's product.
//
// A and B are packed like any weight (product.h), in float32 or bfloat16. A's K-values are in four quarters, each packed by
// itself: four sums that can be made at the same time, or by two threads; x · Aᵀ = (first + second) + (third + fourth).
#pragma once
#include <stdint.h>

#include <vector>

#include "product.h"
#include "threads.h"

extern "C" {

// What one adapter does to one part of a product's columns.
typedef struct {
  const void* down;      // A [rank, depth]: four times [rank, quarter_of(depth)], packed
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

constexpr int kQuarters = 4;

// K-values of a quarter; zeros are added at the end.
static inline int64_t quarter_of(int64_t depth) { return round_up(depth, kQuarters * kSlice) / kQuarters; }

// Consecutive rows of a step that have the same adapter, at most kMost: one piece of work.
struct AdaptedRows {
  int64_t first, count;
  const OctavoAdapter* adapter;
};

// A product that adapters change.
struct AdaptedProduct {
  const float* x;
  int64_t x_stride, depth;
  const float* norm_weight;  // null: x is taken as it is
  float epsilon;
  float* y;  // of the site's first column
  int64_t y_stride, site;
  int64_t num_before;  // columns that are computed already, to the left of the product's own
  int finish;          // how y becomes `finished`; PLAIN: it stays as it is
  float* finished;
  int64_t finished_stride;
};

// What one adapter has for a piece of rows: one part of the product's columns, and where its inner numbers are.
struct AdaptedPart {
  const AdaptedRows* rows;
  const OctavoAdapterPart* part;
  float* inner;  // two halves, each [rows, width]
};

// A part's inner numbers, or one half of them.
struct ShrinkTask {
  const AdaptedPart* of;
  int first, count;  // quarters
};

// A step's rows that have adapters: those of its tokens, and those of its samples, and the work on one product. Kept from step to
// step, to avoid allocations.
class AdaptedStep {
 public:
  std::vector<AdaptedRows> tokens, samples;

  // tokens [num_tokens]: an index into `adapters`, or −1. False: an index is out of range.
  bool plan(const OctavoAdapter* adapters, int64_t num_adapters, const int32_t* of_tokens, int64_t num_tokens,
            const int64_t* sample_at, int64_t num_samples);
  void forget() {
    tokens.clear();
    samples.clear();
  }

  // Computes a product and adds what adapters add to it. base: the product's own, stored plainly where it is finished later. next:
  // the product after it. ahead: per thread, or null.
  void run(Threads* threads, const OctavoProduct* base, const OctavoProduct* next, Ahead* ahead, const AdaptedProduct& product,
           const std::vector<AdaptedRows>& rows);

 private:
  void plan_work(const std::vector<AdaptedRows>& rows, int64_t site, int num_threads);
  void shrink(const AdaptedProduct& product, Share tasks);
  void expand(const AdaptedProduct& product, Share parts, int64_t begin, int64_t end) const;
  void finish_columns(const OctavoProduct* base, const AdaptedProduct& product, int64_t begin, int64_t end) const;

  std::vector<AdaptedPart> parts_;
  std::vector<ShrinkTask> tasks_;
  std::vector<float> inner_;
  std::vector<int32_t> claimed_;  // by task
  alignas(64) int64_t num_done_ = 0;
};

// y [count] += what the adapter adds to the columns first … first + count − 1 of a site, for one row x [depth]. Its parts are in the
// order of their columns.
void add_to_row(const OctavoAdapter& adapter, int64_t site, int64_t first, int64_t count, const float* x, int64_t depth, float* y);

// Whether an adapter of these rows changes the product of this site; −1: none does.
bool is_adapted(const std::vector<AdaptedRows>& rows, int64_t site);

}  // namespace octavo
