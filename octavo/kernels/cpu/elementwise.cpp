// Distributes rows over threads, and picks the instruction set.
#include "elementwise.h"

#include <string.h>

#include <vector>

namespace octavo {

Instructions best_instructions() {
  const char* name = octavo_isa();
  if (strcmp(name, "portable") == 0) return Instructions::portable;
  if (strcmp(name, "avx512vnni") == 0) return Instructions::avx512;
  return strcmp(name, "avx2") == 0 ? Instructions::avx2 : Instructions::neon;  // dotprod and i8mm are for products
}

namespace {

const ElementwiseVariant& elementwise_variant() {
  switch (best_instructions()) {
#if defined(__x86_64__)
    case Instructions::avx512: return elementwise_avx512;
    case Instructions::avx2: return elementwise_avx2;
#elif defined(__aarch64__)
    case Instructions::neon: return elementwise_neon;
#endif
    default: return elementwise_portable;
  }
}

}  // namespace

void gate_row(const float* gate, const float* up, float alpha, float limit, float offset, int64_t size, float* y) {
  elementwise_variant().gate(gate, up, alpha, limit, offset, size, y);
}

void rms_norm_row(const float* x, const float* weight, float epsilon, int64_t size, float* y) {
  elementwise_variant().rms_norm(x, weight, epsilon, size, y);
}

namespace {

// Numbers that one thread processes in about the time it takes to wake another.
constexpr int64_t kWorthSharing = 8192;

template <typename Body>
void for_rows(Threads* threads, int64_t num_rows, int64_t size, Body body) {
  if (num_rows == 1 || num_rows * size < kWorthSharing) body(0, num_rows);
  else parallel_for(threads, num_rows, body);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

void octavo_rms_norm(Threads* threads, const float* x, int64_t x_stride, const float* weight, float epsilon,
                     int64_t num_rows, int64_t size, float* y, int64_t y_stride) {
  const ElementwiseVariant& variant = elementwise_variant();
  for_rows(threads, num_rows, size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      variant.rms_norm(x + row * x_stride, weight, epsilon, size, y + row * y_stride);
    }
  });
}

void octavo_rms_norm_add(Threads* threads, const float* x, int64_t x_stride, const float* weight, float epsilon,
                         int64_t num_rows, int64_t size, float* y, int64_t y_stride) {
  const ElementwiseVariant& variant = elementwise_variant();
  for_rows(threads, num_rows, size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      variant.rms_norm_add(x + row * x_stride, weight, epsilon, size, y + row * y_stride);
    }
  });
}

void octavo_cap(Threads* threads, float* x, int64_t x_stride, int64_t num_rows, int64_t size, float limit) {
  const ElementwiseVariant& variant = elementwise_variant();
  // Rows are few and as long as the vocabulary: each is split into pieces.
  const int64_t num_pieces = (size + kWorthSharing - 1) / kWorthSharing;
  for_rows(threads, num_rows * num_pieces, kWorthSharing, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece % num_pieces * kWorthSharing, left = size - first;
      variant.cap(x + piece / num_pieces * x_stride + first, left < kWorthSharing ? left : kWorthSharing, limit);
    }
  });
}

void octavo_silu_mul(Threads* threads, const float* x, int64_t x_stride, int64_t num_rows, int64_t size, float* y,
                     int64_t y_stride) {
  const ElementwiseVariant& variant = elementwise_variant();
  for_rows(threads, num_rows, 4 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      variant.silu_mul(x + row * x_stride, x + row * x_stride + size, size, y + row * y_stride);
    }
  });
}

void octavo_rms_norm_prepare(Threads* threads, int kind, const float* x, int64_t x_stride, const float* weight, float epsilon,
                             int64_t num_rows, int64_t size, int32_t tile_rows, void* prepared) {
  const ElementwiseVariant& variant = elementwise_variant();
  const auto prepare_row = product_kernels().prepare_row;
  const int64_t tiles = num_tiles(num_rows, tile_rows), row_bytes = octavo_prepared_bytes(kind, 1, size);
  const int64_t record_bytes = takes_codes(kind) ? (int64_t)sizeof(OctavoGroup) : (int64_t)sizeof(float) * kSlice;
  for_rows(threads, num_rows, size, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> numbers;
    if ((int64_t)numbers.size() < size) numbers.resize((size_t)size);
    int64_t tile = 0;
    for (int64_t row = begin; row < end; ++row) {
      while (tile_begin(tile + 1, tiles, num_rows) <= row) ++tile;
      const int64_t first = tile_begin(tile, tiles, num_rows), height = tile_begin(tile + 1, tiles, num_rows) - first;
      const float* from = x + row * x_stride;
      if (weight != nullptr) variant.rms_norm(from, weight, epsilon, size, numbers.data());
      uint8_t* records = static_cast<uint8_t*>(prepared) + first * row_bytes + (row - first) * record_bytes;
      prepare_row(kind, weight != nullptr ? numbers.data() : from, size, records, height);
    }
  });
}
