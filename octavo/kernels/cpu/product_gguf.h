// Reads one group of 32 weights from a row of GGUF quants. Layouts: ggml-quants.h. Used only by product_pack.cpp.
#pragma once

#include <stdint.h>
#include <string.h>

#include "product.h"

namespace octavo {

// A group of weights in the form of a panel.
struct Group {
  uint32_t parts[8];        // unsigned codes of K-values 4i … 4i+3, one per byte
  uint16_t scale, minimum;  // float16; for nested kinds the outer ones
  int8_t inner_scale[2], inner_minimum[2];
};

static inline uint32_t load_word(const uint8_t* at) {
  uint32_t word;
  memcpy(&word, at, 4);
  return word;
}

static inline uint16_t load_half(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, 2);
  return half;
}

constexpr uint32_t kLowHalves = 0x0f0f0f0fu, kOnes = 0x01010101u;

// Weights and bytes of one quant.
static inline int64_t quant_weights(int kind) { return form_of(kind).is_nested ? kOuter : kGroup; }
static inline int64_t quant_bytes(int kind) {
  switch (kind) {
    case OCTAVO_CODES8: return 34;
    case OCTAVO_CODES4: return 18;
    case OCTAVO_CODES4_MINIMUM: return 20;
    case OCTAVO_CODES5: return 22;
    case OCTAVO_CODES5_MINIMUM: return 24;
    case OCTAVO_CODES4_NESTED: return 144;
    case OCTAVO_CODES5_NESTED: return 176;
    case OCTAVO_CODES4_IQ4: return 18;
    case OCTAVO_CODES4_IQ4_NESTED: return 136;
    case OCTAVO_CODES4_IQ2_NESTED: return 138;
    case OCTAVO_CODES2_NESTED: return 84;
    default: return 210;
  }
}

// 16 bytes: the first 16 K-values in the low halves, the others in the high halves.
static inline void read_nibbles(const uint8_t* at, Group& group) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t four = load_word(at + 4 * i);
    group.parts[i] = four & kLowHalves;
    group.parts[4 + i] = four >> 4 & kLowHalves;
  }
}

// Scale, minimum, fifth bits, nibbles: those that the kind has.
static inline Group read_small_quant(int kind, const uint8_t* quant) {
  const Form form = form_of(kind);
  Group group = {};
  group.scale = load_half(quant);
  if (form.has_minimum) group.minimum = load_half(quant + 2);
  const uint8_t* at = quant + (form.has_minimum ? 4 : 2);
  if (form.bits == 8) {
    for (int i = 0; i < 8; ++i) group.parts[i] = load_word(at + 4 * i) ^ 0x80808080u;  // signed → centred on 128
    return group;
  }
  const uint32_t fifth = form.bits == 5 ? load_word(at) : 0;  // bit i belongs to K-value i
  if (form.bits == 5) at += 4;
  read_nibbles(at, group);
  for (int i = 0; fifth && i < 8; ++i) {
    // Moves four neighbouring bits to the lowest bits of four bytes.
    group.parts[i] |= ((fifth >> 4 * i & 15) * 0x00204081u & kOnes) << 4;
  }
  return group;
}

// Eight 6-bit scales and minimums in twelve bytes: the first four of each in the low bits of bytes 0 … 3 and 4 … 7, the
// last four in the nibbles of bytes 8 … 11, their top two bits in the top bits of bytes 0 … 7.
static inline void read_six_bits(const uint8_t* from, int which, Group& group) {
  if (which < 4) {
    group.inner_scale[0] = static_cast<int8_t>(from[which] & 63);
    group.inner_minimum[0] = static_cast<int8_t>(from[which + 4] & 63);
  } else {
    group.inner_scale[0] = static_cast<int8_t>((from[which + 4] & 15) | (from[which - 4] >> 6) << 4);
    group.inner_minimum[0] = static_cast<int8_t>(from[which + 4] >> 4 | (from[which] >> 6) << 4);
  }
}

// Q4_K and Q5_K: 32 bytes of nibbles hold two groups. Bit g of byte i is the fifth bit of weight i of group g.
static inline Group read_q45_k(int kind, const uint8_t* quant, int which) {
  Group group = {};
  group.scale = load_half(quant);
  group.minimum = load_half(quant + 2) ^ 0x8000;  // the stored minimum is subtracted
  read_six_bits(quant + 4, which, group);
  const bool has_fifth = form_of(kind).bits == 5;
  const uint8_t* nibbles = quant + (has_fifth ? 48 : 16) + which / 2 * 32;
  for (int i = 0; i < 8; ++i) {
    group.parts[i] = load_word(nibbles + 4 * i) >> (which % 2 * 4) & kLowHalves;
    if (has_fifth) group.parts[i] |= (load_word(quant + 16 + 4 * i) >> which & kOnes) << 4;
  }
  return group;
}

// Q6_K: two halves of four groups. Groups 0 and 1 of a half are in the low nibbles of its 64 bytes, 2 and 3 in the high
// ones; bits 2g and 2g + 1 of byte i are the top two of weight i of group g.
static inline Group read_q6_k(const uint8_t* quant, int which) {
  Group group = {};
  group.scale = load_half(quant + 208);
  memcpy(group.inner_scale, quant + 192 + 2 * which, 2);
  const int half = which / 4, within = which % 4;
  const uint8_t *nibbles = quant + half * 64 + within % 2 * 32, *twos = quant + 128 + half * 32;
  for (int i = 0; i < 8; ++i) {
    const uint32_t top = load_word(twos + 4 * i) >> (2 * within) & 3 * kOnes;
    group.parts[i] = (load_word(nibbles + 4 * i) >> (within / 2 * 4) & kLowHalves) | top << 4;
  }
  return group;
}

// Q2_K: 16 scales and minimums in the halves of 16 bytes, two halves of four groups in 32 bytes each: bits 2g and 2g + 1
// of byte i are weight i of group g.
static inline Group read_q2_k(const uint8_t* quant, int which) {
  Group group = {};
  group.scale = load_half(quant + 80);
  group.minimum = load_half(quant + 82) ^ 0x8000;  // the stored minimum is subtracted
  for (int run = 0; run < 2; ++run) {
    group.inner_scale[run] = static_cast<int8_t>(quant[2 * which + run] & 15);
    group.inner_minimum[run] = static_cast<int8_t>(quant[2 * which + run] >> 4);
  }
  const uint8_t* twos = quant + 16 + which / 4 * 32;
  for (int i = 0; i < 8; ++i) group.parts[i] = load_word(twos + 4 * i) >> (which % 4 * 2) & 3 * kOnes;
  return group;
}

// IQ4_XS: eight scales, centred on 32; their top two bits come first, then the low four.
static inline Group read_iq4_xs(const uint8_t* quant, int which) {
  Group group = {};
  group.scale = load_half(quant);
  const int top = load_half(quant + 2) >> (2 * which) & 3, low = quant[4 + which / 2] >> (which % 2 * 4) & 15;
  group.inner_scale[0] = static_cast<int8_t>((top << 4 | low) - 32);
  read_nibbles(quant + 8 + 16 * which, group);
  return group;
}

// IQ2_WIDE, Octavo's own: the outer scale, eight scales of one byte, then nibbles group after group.
static inline Group read_iq2_wide(const uint8_t* quant, int which) {
  Group group = {};
  group.scale = load_half(quant);
  memcpy(group.inner_scale, quant + 2 + which, 1);
  read_nibbles(quant + 10 + 16 * which, group);
  return group;
}

static inline Group read_quant(int kind, const uint8_t* row, int64_t group) {
  const int64_t groups = quant_weights(kind) / kGroup;
  const uint8_t* quant = row + group / groups * quant_bytes(kind);
  const int which = static_cast<int>(group % groups);
  switch (kind) {
    case OCTAVO_CODES6_NESTED: return read_q6_k(quant, which);
    case OCTAVO_CODES2_NESTED: return read_q2_k(quant, which);
    case OCTAVO_CODES4_IQ4_NESTED: return read_iq4_xs(quant, which);
    case OCTAVO_CODES4_IQ2_NESTED: return read_iq2_wide(quant, which);
    default: return form_of(kind).is_nested ? read_q45_k(kind, quant, which) : read_small_quant(kind, quant);
  }
}

}  // namespace octavo
