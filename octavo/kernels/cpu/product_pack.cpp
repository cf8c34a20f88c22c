// Weights into panels and back: plain ones as they are, GGUF quants, and float32 by rounding it here.
// Knows nothing of products. Runs once, when a model is loaded; only octavo_read_columns runs in a step.
#include "product.h"

#include <math.h>
#include <string.h>

namespace octavo {
namespace {

uint16_t float_to_half(float value) {  // round to nearest even; weights' scales are far below where it would overflow
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = fabsf(value);
  if (size < 6.103515625e-5f) return sign | static_cast<uint16_t>(nearbyintf(size * 16777216.0f));
  bits = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

float half_to_float(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const float size = exponent ? ldexpf(static_cast<float>((half & 1023) | 1024), exponent - 25)
                              : ldexpf(static_cast<float>(half & 1023), -24);
  return half & 0x8000 ? -size : size;
}

// One GGUF quant of 32 weights: its scale, its minimum (Q4_1) and its codes.
constexpr int64_t quant_bytes(int kind) { return kind == OCTAVO_CODES8 ? 34 : kind == OCTAVO_CODES4 ? 18 : 20; }
constexpr int64_t quant_header(int kind) { return kind == OCTAVO_CODES4_MINIMUM ? 4 : 2; }

struct PanelWriter {
  int kind;
  int64_t num_groups;
  uint8_t *scales, *codes;

  PanelWriter(int kind, int64_t depth, void* packed, int64_t panel) : kind(kind), num_groups(depth / kGroup) {
    scales = static_cast<uint8_t*>(packed) + panel * panel_bytes(kind, depth);
    codes = scales + scale_bytes(kind, depth);
    memset(scales, 0, panel_bytes(kind, depth));
  }

  void write(int64_t group, int lane, const uint8_t* quant) {
    memcpy(scales + (group * kPanel + lane) * 2, quant, 2);
    if (kind == OCTAVO_CODES4_MINIMUM) memcpy(scales + ((num_groups + group) * kPanel + lane) * 2, quant + 2, 2);
    const uint8_t* source = quant + quant_header(kind);
    const int num_vectors = kind == OCTAVO_CODES8 ? 8 : 4;
    for (int v = 0; v < num_vectors; ++v) {
      uint32_t four;
      memcpy(&four, source + 4 * v, 4);
      if (kind == OCTAVO_CODES8) four ^= 0x80808080u;  // signed → centred on 128
      memcpy(codes + ((group * num_vectors + v) * kPanel + lane) * 4, &four, 4);
    }
  }
};

// Where a plain weight lies in its panel.
inline int64_t plain_at(int kind, int64_t k, int64_t lane) {
  return kind == OCTAVO_FLOAT32 ? k * kPanel + lane : (k / 2 * kPanel + lane) * 2 + k % 2;
}

template <int KIND, typename Weight>
void pack_plain_panel(const void* rows, int64_t num_columns, int64_t depth, void* packed, int64_t panel) {
  Weight* to = static_cast<Weight*>(packed) + panel * round_up(depth, kSlice) * kPanel;
  memset(to, 0, panel_bytes(KIND, depth));
  for (int64_t lane = 0; lane < kPanel && panel * kPanel + lane < num_columns; ++lane) {
    const Weight* row = static_cast<const Weight*>(rows) + (panel * kPanel + lane) * depth;
    for (int64_t k = 0; k < depth; ++k) to[plain_at(KIND, k, lane)] = row[k];
  }
}

void read_plain_column(int kind, const void* panel, int64_t depth, int64_t lane, float* out) {
  for (int64_t k = 0; k < depth; ++k) {
    if (kind == OCTAVO_FLOAT32) {
      out[k] = static_cast<const float*>(panel)[plain_at(kind, k, lane)];
    } else {
      const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(panel)[plain_at(kind, k, lane)]) << 16;
      memcpy(out + k, &bits, 4);
    }
  }
}

void put_nibble(uint8_t* codes, int k, int code) { codes[k & 15] |= static_cast<uint8_t>(code << (k < 16 ? 0 : 4)); }

int clamp(float value, int low, int high) {
  return value < static_cast<float>(low) ? low : value > static_cast<float>(high) ? high : static_cast<int>(value);
}

void quantise_group(int kind, const float* weights, uint8_t* quant) {
  float lowest = weights[0], highest = weights[0];
  for (int k = 1; k < kGroup; ++k) {
    lowest = fminf(lowest, weights[k]);
    highest = fmaxf(highest, weights[k]);
  }
  memset(quant, 0, quant_bytes(kind));
  // The codes are cut by the scale as stored, so that its rounding costs nothing more.
  const float extreme = -lowest > highest ? lowest : highest;
  const uint16_t scale_half = float_to_half(kind == OCTAVO_CODES8   ? fabsf(extreme) / 127.0f
                                            : kind == OCTAVO_CODES4 ? extreme / -8.0f
                                                                    : (highest - lowest) / 15.0f);
  const uint16_t lowest_half = float_to_half(lowest);
  const float scale = half_to_float(scale_half), from = half_to_float(lowest_half);
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  memcpy(quant, &scale_half, 2);
  if (kind == OCTAVO_CODES4_MINIMUM) memcpy(quant + 2, &lowest_half, 2);
  uint8_t* codes = quant + quant_header(kind);
  for (int k = 0; k < kGroup; ++k) {
    switch (kind) {
      case OCTAVO_CODES8:
        codes[k] = static_cast<uint8_t>(clamp(nearbyintf(weights[k] * inverse), -127, 127));
        break;
      case OCTAVO_CODES4: put_nibble(codes, k, clamp(nearbyintf(weights[k] * inverse) + 8.0f, 0, 15)); break;
      default: put_nibble(codes, k, clamp(nearbyintf((weights[k] - from) * inverse), 0, 15));
    }
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

void octavo_pack(Threads* threads, int kind, const void* rows, int64_t num_columns, int64_t depth, void* packed) {
  parallel_for(threads, round_up(num_columns, kPanel) / kPanel, [=](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      if (!is_packed(kind)) {
        const bool wide = kind == OCTAVO_FLOAT32;
        const auto pack_plain = wide ? pack_plain_panel<OCTAVO_FLOAT32, float> : pack_plain_panel<OCTAVO_BFLOAT16, uint16_t>;
        pack_plain(rows, num_columns, depth, packed, panel);
        continue;
      }
      PanelWriter writer(kind, depth, packed, panel);
      for (int lane = 0; lane < kPanel && panel * kPanel + lane < num_columns; ++lane) {
        const int64_t first = (panel * kPanel + lane) * (depth / kGroup);
        for (int64_t group = 0; group < depth / kGroup; ++group)
          writer.write(group, lane, static_cast<const uint8_t*>(rows) + (first + group) * quant_bytes(kind));
      }
    }
  });
}

void octavo_pack_quantised(Threads* threads, int kind, const float* rows, int64_t num_columns, int64_t depth,
                           void* packed) {
  parallel_for(threads, round_up(num_columns, kPanel) / kPanel, [=](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      PanelWriter writer(kind, depth, packed, panel);
      for (int lane = 0; lane < kPanel && panel * kPanel + lane < num_columns; ++lane) {
        for (int64_t group = 0; group < depth / kGroup; ++group) {
          uint8_t quant[34];
          quantise_group(kind, rows + (panel * kPanel + lane) * depth + group * kGroup, quant);
          writer.write(group, lane, quant);
        }
      }
    }
  });
}

void octavo_read_columns(int kind, const void* packed, int64_t, int64_t depth, const int64_t* ids, int64_t num_ids,
                         float* out) {
  for (int64_t i = 0; i < num_ids; ++i, out += depth) {
    const int64_t lane = ids[i] % kPanel;
    const uint8_t* panel = static_cast<const uint8_t*>(packed) + ids[i] / kPanel * panel_bytes(kind, depth);
    if (!is_packed(kind)) {
      read_plain_column(kind, panel, depth, lane, out);
      continue;
    }
    const uint8_t* codes = panel + scale_bytes(kind, depth);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel);
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t group = k / kGroup, within = k % kGroup;
      const float scale = half_to_float(scales[group * kPanel + lane]);
      if (kind == OCTAVO_CODES8) {
        const int code = codes[(k / 4 * kPanel + lane) * 4 + k % 4];
        out[k] = scale * static_cast<float>(code - 128);
        continue;
      }
      const uint8_t byte = codes[((group * 4 + within % 16 / 4) * kPanel + lane) * 4 + k % 4];
      const int code = within < 16 ? byte & 15 : byte >> 4;
      if (kind == OCTAVO_CODES4) {
        out[k] = scale * static_cast<float>(code - 8);
      } else {
        const float minimum = half_to_float(scales[(depth / kGroup + group) * kPanel + lane]);
        out[k] = minimum + scale * static_cast<float>(code);
      }
    }
  }
}
