// The C interface of the products: picks the instruction set, computes memory sizes, distributes work over threads.
#include "product.h"

#include <string.h>

#include "arm_features.h"

namespace octavo {

extern const ProductKernels kProductPortable;
#if defined(__x86_64__)
extern const ProductKernels kProductAvx2;
extern const ProductKernels kProductAvx512Vnni;
#elif defined(__aarch64__)
extern const ProductKernels kProductNeon;
extern const ProductKernels kProductDotprod;
extern const ProductKernels kProductI8mm;
#endif

namespace {

const ProductKernels* runnable(const char* name) {  // null: the best one
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx512 && (!name || strcmp(name, kProductAvx512Vnni.name) == 0)) return &kProductAvx512Vnni;
  if (avx2 && (!name || strcmp(name, kProductAvx2.name) == 0)) return &kProductAvx2;
#elif defined(__aarch64__)
  const bool dotprod = has_dotprod(), i8mm = dotprod && has_i8mm();
  if (i8mm && (!name || strcmp(name, kProductI8mm.name) == 0)) return &kProductI8mm;
  if (dotprod && (!name || strcmp(name, kProductDotprod.name) == 0)) return &kProductDotprod;
  if (!name || strcmp(name, kProductNeon.name) == 0) return &kProductNeon;
#endif
  if (!name || strcmp(name, kProductPortable.name) == 0) return &kProductPortable;
  return nullptr;
}

const ProductKernels* chosen = nullptr;

// With fewer activations, the caller alone prepares them faster than it can wake other threads.
constexpr int64_t kWorthSharing = 16384;

}  // namespace

const ProductKernels& product_kernels() {
  if (!chosen) chosen = runnable(nullptr);
  return *chosen;
}

void run_product(Threads* threads, const OctavoProduct* product, const OctavoProduct* next, Ahead* ahead) {
  const auto share = product_kernels().product_share;
  alignas(64) int64_t num_claimed = 0;
  auto body = [&](int index, int num_shares) { share(product, next, ahead, &num_claimed, index, num_shares); };
  run_on(threads, body);
}

}  // namespace octavo

using namespace octavo;

const char* octavo_isa(void) { return product_kernels().name; }

int octavo_use_isa(const char* name) {
  const ProductKernels* found = runnable(name);
  if (found) chosen = found;
  return found != nullptr;
}

int32_t octavo_tile_rows(int kind) {
  return takes_codes(kind) ? product_kernels().packed_tile_rows : product_kernels().float_tile_rows;
}

int64_t octavo_packed_bytes(int kind, int64_t num_columns, int64_t depth) {
  return round_up(num_columns, kPanel) / kPanel * panel_bytes(kind, depth);
}

int64_t octavo_prepared_bytes(int kind, int64_t num_rows, int64_t depth) {
  if (!takes_codes(kind)) return num_rows * round_up(depth, kSlice) * 4;
  return num_rows * (depth / kGroup) * static_cast<int64_t>(sizeof(OctavoGroup));
}

void octavo_prepare(Threads* threads, int kind, const float* x, int64_t x_stride, int64_t num_rows, int64_t depth,
                    void* prepared) {
  const auto share = product_kernels().prepare_share;
  if (num_rows * depth < kWorthSharing) return share(kind, x, x_stride, num_rows, depth, prepared, 0, 1);
  auto body = [=](int index, int num_shares) {
    share(kind, x, x_stride, num_rows, depth, prepared, index, num_shares);
  };
  run_on(threads, body);
}

void octavo_product(Threads* threads, const OctavoProduct* product) {
  octavo_products(threads, product, 1);
}

void octavo_products(Threads* threads, const OctavoProduct* products, int64_t num_products) {
  for (int64_t i = 0; i < num_products; ++i)
    run_product(threads, products + i, i + 1 < num_products ? products + i + 1 : nullptr);
}

int64_t octavo_read_all(Threads* threads, const void* memory, int64_t num_bytes) {
  std::atomic<int64_t> sum{0};
  const auto read = product_kernels().read_all;
  parallel_for(threads, num_bytes / 4096, [&](int64_t begin, int64_t end) {
    sum += read(static_cast<const uint8_t*>(memory) + begin * 4096, (end - begin) * 4096);
  });
  return sum;
}

int64_t octavo_dot_all(Threads* threads, int64_t num_dots) {
  std::atomic<int64_t> sum{0};
  auto body = [&](int, int) { sum += product_kernels().dot_all(num_dots); };
  run_on(threads, body);
  return sum;
}
