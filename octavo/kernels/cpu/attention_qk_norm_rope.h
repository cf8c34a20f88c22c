// The work before attention for one instruction set: RMSNorm and RoPE of q and k, and storing k and v in their cells. Included
// by attention_body.h.
#pragma once
#include "attention.h"
#include "attention_half.h"

namespace octavo {
namespace OCTAVO_VARIANT {

// Lanes beyond `size` are 0.
OCTAVO_INLINE vec load_up_to(const float* x, int size) { return size >= W ? load(x) : load_n(x, size); }

OCTAVO_INLINE void store_up_to(float* x, vec a, int size) {
  if (size >= W) store(x, a);
  else store_n(x, a, size);
}

static void normed(const float* x, const float* weight, float epsilon, int size, float* out) {
  vec squares = set1(0.0f);
  for (int d = 0; d < size; d += W) {
    const vec a = load_up_to(x + d, size - d);
    squares = fma(a, a, squares);
  }
  const vec length = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)size + epsilon));
  for (int d = 0; d < size; d += W) {
    const vec a = mul(mul(load_up_to(x + d, size - d), length), load_up_to(weight + d, size - d));
    store_up_to(out + d, a, size - d);
  }
}

static void rotated(const float* x, const float* rotation, int size, float* out) {
  for (int d = 0; d < size; d += W) {
    store_up_to(out + d, rotate_pairs(load_up_to(x + d, size - d), load_up_to(rotation + d, size - d)), size - d);
  }
}

// A token's cell: its page and its offset in it.
struct Cell {
  char* page;
  int offset;
};

OCTAVO_INLINE Cell cell_of(const OctavoQkNormRope& t, int64_t slot) {
  return {(char*)t.pages + slot / t.page_size * t.page_stride, (int)(slot % t.page_size)};
}

template <class T>
OCTAVO_INLINE void scatter(const T* from, int count, T* to, int step) {
  if (step == 1) memcpy(to, from, sizeof(T) * (size_t)count);
  else for (int d = 0; d < count; ++d) to[(int64_t)d * step] = from[d];
}

// Stores k or v of one token and head, finite and followed by zeros, in run `run` of its page; elements are `step` apart.
static void write_cell(const OctavoQkNormRope& t, const float* x, Cell to, int run, int start, int step) {
  const int64_t first = (int64_t)run * t.page_size * t.head_size + start;
  if (t.is_float16) {
    alignas(64) Half halves[kMaxHeadSize + kPadding];
    for (int d = 0; d < t.head_size; d += W) store(halves + d, load(x + d));
    return scatter(halves, t.head_size, (Half*)to.page + first, step);
  }
  if (!t.is_int8) return scatter(x, t.head_size, (float*)to.page + first, step);
  float* scales = (float*)(to.page + (int64_t)2 * t.num_kv_heads * t.page_size * t.head_size);
  vec tops = set1(0.0f);
  for (int d = 0; d < t.head_size; d += W) tops = max(tops, absolute(load(x + d)));
  const float top = reduce_max(tops);
  const vec inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  scales[run * t.page_size + to.offset] = top / 127.0f;
  alignas(64) int8_t codes[kMaxHeadSize + kPadding];
  for (int d = 0; d < t.head_size; d += W) store_int8(codes + d, nearest(mul(load(x + d), inverse)));
  scatter(codes, t.head_size, (int8_t*)to.page + first, step);
}

static void store_token(const OctavoQkNormRope& t, int64_t token, float* buffer) {
  const int size = t.head_size;
  float* heads = t.heads + token * t.token_stride;
  const float* rotation = t.rotation != nullptr ? t.rotation + token * size : nullptr;
  for (int head = 0; head < t.num_heads; ++head) {
    float* x = heads + head * size;
    if (t.q_norm != nullptr) normed(x, t.q_norm, t.epsilon, size, x);
    if (rotation != nullptr) rotated(x, rotation, size, x);
  }
  if (t.slots[token] < 0) return;
  const Cell cell = cell_of(t, t.slots[token]);
  for (int head = 0; head < 2 * t.num_kv_heads; ++head) {
    const bool is_key = head < t.num_kv_heads;
    const float* x = heads + (t.num_heads + head) * size;
    if (is_key && t.k_norm != nullptr) {
      normed(x, t.k_norm, t.epsilon, size, buffer);
      x = buffer;
    }
    if (is_key && rotation != nullptr) {
      rotated(x, rotation, size, buffer);
      x = buffer;
    }
    for (int d = 0; d < size; d += W) store(buffer + d, finite_or_zero(load_up_to(x + d, size - d)));
    if (is_key) write_cell(t, buffer, cell, head, cell.offset, t.page_size);
    else write_cell(t, buffer, cell, head, cell.offset * size, 1);
  }
}

static void qk_norm_rope_store(const OctavoQkNormRope& t, int64_t begin, int64_t end) {
  alignas(64) float buffer[kMaxHeadSize + kPadding] = {0};
  for (int64_t token = begin; token < end; ++token) store_token(t, token, buffer);
}

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
