// Packs weights into panels and reads them back: plain weights, GGUF quants, and float32 quantised here. Runs once, when a
// model is loaded; only octavo_read_columns runs in a step.
#include "product.h"

#include <math.h>
#include <string.h>

#include "product_gguf.h"

namespace octavo {
namespace {

// Nearest integer, ties to even, for |value| < 2²²: by the rounding of the sum, without a call.
float nearest(float value) { return (value + 12582912.0f) - 12582912.0f; }

uint16_t float_to_half(float value) {  // round to nearest even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = fabsf(value);
  if (size < 6.103515625e-5f) return sign | static_cast<uint16_t>(nearest(size * 16777216.0f));
  if (!(size < 65520.0f)) return sign | (size >= 65520.0f ? 0x7c00 : 0x7e00);
  bits = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

float half_to_float(uint16_t half) {
  const int exponent = half >> 10 & 31;
  float size = ldexpf(static_cast<float>((half & 1023) | (exponent ? 1024 : 0)), exponent ? exponent - 25 : -24);
  if (exponent == 31) size = half & 1023 ? NAN : INFINITY;
  return half & 0x8000 ? -size : size;
}

// Writes and reads the groups of one column in its panel.
template <int KIND>
struct Column {
  static constexpr Form form = form_of(KIND);
  static constexpr uint32_t kTop = kOnes * (form.above() == 2 ? 3 : 1);  // the bits above the fourth, moved down
  Places places;
  uint8_t* panel;
  int64_t lane;

  Column(int64_t depth, void* panel, int64_t lane)
      : places(places_of(KIND, depth)), panel(static_cast<uint8_t*>(panel)), lane(lane) {}

  uint8_t* scale(int64_t group, int run) const {
    return panel + ((group * form.runs + run) * kPanel + lane) * form.width();
  }
  uint8_t* minimum(int64_t group, int run) const { return scale(group, run) + places.minimums; }
  uint8_t* outer(int64_t group) const {
    return panel + places.outer_scales + (group / (kOuter / kGroup) * kPanel + lane) * 2;
  }
  uint8_t* outer_minimum(int64_t group) const { return outer(group) + places.outer_minimums - places.outer_scales; }
  uint8_t* vectors(int64_t group, int run) const {
    return panel + places.codes + (group * form.runs + run) * form.vectors() * 64 + lane * 4;
  }

  // Copies the fields of a group in either direction: copy(place, field, bytes).
  template <typename Copy>
  void scales(int64_t at, Group& group, Copy copy) const {
    if (form.is_nested) {
      for (int run = 0; run < form.runs; ++run) {
        copy(scale(at, run), group.inner_scale + run, 1);
        if (form.has_minimum) copy(minimum(at, run), group.inner_minimum + run, 1);
      }
      copy(outer(at), &group.scale, 2);
      if (form.has_minimum) copy(outer_minimum(at), &group.minimum, 2);
    } else {
      copy(scale(at, 0), &group.scale, 2);
      if (form.has_minimum) copy(minimum(at, 0), &group.minimum, 2);
    }
  }

  void write(int64_t at, Group group) const {
    scales(at, group, [](uint8_t* place, const void* field, size_t size) { memcpy(place, field, size); });
    for (int run = 0; run < form.runs; ++run) {
      uint8_t* to = vectors(at, run);
      const uint32_t* parts = group.parts + run * form.parts();
      uint32_t plane = 0;
      for (int j = 0; j < form.parts(); ++j) plane |= (parts[j] >> 4 & kTop) << j * form.above();
      for (int v = 0; v < form.vectors(); ++v) {
        uint32_t word = parts[v];
        if (form.bits == 2) word = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6;
        if (form.has_nibbles()) {
          const bool is_plane = v == form.nibbles();
          word = is_plane ? plane : (word & kLowHalves) | (parts[v + form.nibbles()] & kLowHalves) << 4;
        }
        memcpy(to + v * 64, &word, 4);
      }
    }
  }

  Group read(int64_t at) const {
    Group group = {};
    scales(at, group, [](const uint8_t* place, void* field, size_t size) { memcpy(field, place, size); });
    for (int run = 0; run < form.runs; ++run) {
      const uint8_t* from = vectors(at, run);
      uint32_t* parts = group.parts + run * form.parts();
      const uint32_t plane = form.above() ? load_word(from + form.nibbles() * 64) : 0;
      for (int j = 0; j < form.parts(); ++j) {
        if (form.bits == 8) {
          parts[j] = load_word(from + j * 64);
        } else if (form.bits == 2) {
          parts[j] = load_word(from) >> 2 * j & 3 * kOnes;
        } else {
          const bool is_low = j < form.nibbles();
          const uint32_t word = load_word(from + (is_low ? j : j - form.nibbles()) * 64);
          const uint32_t top = plane >> j * form.above() & kTop;
          parts[j] = (is_low ? word & kLowHalves : word >> 4 & kLowHalves) | (form.above() ? top << 4 : 0);
        }
      }
    }
    return group;
  }

  void decode(int64_t at, float* out) const {
    const Group group = read(at);
    const float outer_scale = half_to_float(group.scale) * form.factor, outer_minimum = half_to_float(group.minimum);
    const int centre = form.has_minimum ? 0 : 1 << (form.factor_bits() - 1);
    for (int k = 0; k < kGroup; ++k) {
      const int run = form.runs == 2 ? k / 16 : 0;
      const float inner = form.is_nested ? static_cast<float>(group.inner_scale[run]) : 1.0f;
      const float inner_minimum = form.is_nested ? static_cast<float>(group.inner_minimum[run]) : 1.0f;
      const int code = static_cast<int>(group.parts[k / 4] >> k % 4 * 8 & 255);
      out[k] = outer_scale * inner * static_cast<float>((form.levels ? form.levels[code] : code) - centre);
      if (form.has_minimum) out[k] += outer_minimum * inner_minimum;
    }
  }
};

// Index of a plain weight in its panel.
inline int64_t plain_at(int kind, int64_t k, int64_t lane) {
  return kind == OCTAVO_FLOAT32 ? k * kPanel + lane : (k / 2 * kPanel + lane) * 2 + k % 2;
}

// A panel is its rows' 32-bit words, a float32 or a pair of bfloat16, transposed. Done in blocks that stay in the first cache.
template <int KIND, typename Weight>
void pack_plain_panel(const void* rows, int64_t num_columns, int64_t depth, void* packed, int64_t panel) {
  constexpr int64_t per_word = sizeof(uint32_t) / sizeof(Weight);
  Weight* to = static_cast<Weight*>(packed) + panel * round_up(depth, kSlice) * kPanel;
  const Weight* from = static_cast<const Weight*>(rows) + panel * kPanel * depth;
  const int64_t left = num_columns - panel * kPanel, num_lanes = left < kPanel ? left : kPanel, num_words = depth / per_word;
  if (num_lanes < kPanel || depth % kSlice) memset(to, 0, panel_bytes(KIND, depth));
  for (int64_t begin = 0; begin < num_words; begin += kSlice) {
    const int64_t end = begin + kSlice < num_words ? begin + kSlice : num_words;
    for (int64_t lane = 0; lane < num_lanes; ++lane) {
      const Weight* row = from + lane * depth;
      for (int64_t word = begin; word < end; ++word)
        memcpy(to + (word * kPanel + lane) * per_word, row + word * per_word, sizeof(uint32_t));
    }
  }
  if (depth % per_word)
    for (int64_t lane = 0; lane < num_lanes; ++lane) to[plain_at(KIND, depth - 1, lane)] = from[lane * depth + depth - 1];
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

constexpr uint16_t kHalfNan = 0x7e00;

int clamp(float value, int low, int high) {
  return value < static_cast<float>(low) ? low : value > static_cast<float>(high) ? high : static_cast<int>(value);
}

Group quantise_group(int kind, const float* weights) {
  float lowest = weights[0], highest = weights[0];
  bool is_finite = true;
  for (int k = 0; k < kGroup; ++k) {
    lowest = weights[k] < lowest ? weights[k] : lowest;
    highest = weights[k] > highest ? weights[k] : highest;
    is_finite &= weights[k] - weights[k] == 0.0f;
  }
  Group group = {};
  if (!is_finite) {
    group.scale = group.minimum = kHalfNan;  // all 32 weights become NaN
    return group;
  }
  // The codes are computed with the scale as stored, so that its rounding adds no error.
  const float extreme = -lowest > highest ? lowest : highest;
  group.scale = float_to_half(kind == OCTAVO_CODES8   ? fabsf(extreme) / 127.0f
                              : kind == OCTAVO_CODES4 ? extreme / -8.0f
                                                      : (highest - lowest) / 15.0f);
  const bool has_minimum = kind == OCTAVO_CODES4_MINIMUM;
  if (has_minimum) group.minimum = float_to_half(lowest);
  const float scale = half_to_float(group.scale), from = half_to_float(group.minimum);
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  const int centre = has_minimum ? 0 : kind == OCTAVO_CODES8 ? 128 : 8, most = kind == OCTAVO_CODES8 ? 255 : 15;
  for (int k = 0; k < kGroup; ++k) {
    const float whole = nearest((weights[k] - from) * inverse) + static_cast<float>(centre);
    const int code = clamp(whole, kind == OCTAVO_CODES8 ? 1 : 0, most);
    group.parts[k / 4] |= static_cast<uint32_t>(code) << k % 4 * 8;
  }
  return group;
}

// group_of(column, group) → Group.
template <int KIND, typename GroupOf>
void write_panels(Threads* threads, int64_t num_columns, int64_t depth, void* packed, GroupOf group_of) {
  const int64_t size = panel_bytes(KIND, depth);
  parallel_for(threads, round_up(num_columns, kPanel) / kPanel, [=](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      uint8_t* to = static_cast<uint8_t*>(packed) + panel * size;
      memset(to, 0, size);
      for (int64_t lane = 0; lane < kPanel && panel * kPanel + lane < num_columns; ++lane) {
        const Column<KIND> column(depth, to, lane);
        for (int64_t group = 0; group < depth / kGroup; ++group)
          column.write(group, group_of(panel * kPanel + lane, group));
      }
    }
  });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

void octavo_pack(Threads* threads, int kind, const void* rows, int64_t num_columns, int64_t depth, void* packed) {
  if (is_packed(kind)) {
    return with_kind(kind, [=](auto constant) {
      constexpr int known = decltype(constant)::value;
      const int64_t row_bytes = depth / quant_weights(known) * quant_bytes(known);
      write_panels<known>(threads, num_columns, depth, packed, [=](int64_t column, int64_t group) {
        return read_quant(known, static_cast<const uint8_t*>(rows) + column * row_bytes, group);
      });
    });
  }
  parallel_for(threads, round_up(num_columns, kPanel) / kPanel, [=](int64_t begin, int64_t end) {
    const bool wide = kind == OCTAVO_FLOAT32;
    const auto pack_plain =
        wide ? pack_plain_panel<OCTAVO_FLOAT32, float> : pack_plain_panel<OCTAVO_BFLOAT16, uint16_t>;
    for (int64_t panel = begin; panel < end; ++panel) pack_plain(rows, num_columns, depth, packed, panel);
  });
}

void octavo_pack_quantised(Threads* threads, int kind, const float* rows, int64_t num_columns, int64_t depth,
                           void* packed) {
  with_kind(kind, [=](auto constant) {
    constexpr int known = decltype(constant)::value;
    write_panels<known>(threads, num_columns, depth, packed, [=](int64_t column, int64_t group) {
      return quantise_group(known, rows + column * depth + group * kGroup);
    });
  });
}

int octavo_read_columns(int kind, const void* packed, int64_t num_columns, int64_t depth, const int64_t* ids,
                        int64_t num_ids, float* out) {
  for (int64_t i = 0; i < num_ids; ++i)
    if (ids[i] < 0 || ids[i] >= num_columns) return -1;
  for (int64_t i = 0; i < num_ids; ++i, out += depth) {
    const int64_t lane = ids[i] % kPanel;
    const uint8_t* panel = static_cast<const uint8_t*>(packed) + ids[i] / kPanel * panel_bytes(kind, depth);
    if (!is_packed(kind)) {
      read_plain_column(kind, panel, depth, lane, out);
      continue;
    }
    with_kind(kind, [=](auto constant) {
      const Column<decltype(constant)::value> column(depth, const_cast<uint8_t*>(panel), lane);  // only read
      for (int64_t group = 0; group < depth / kGroup; ++group) column.decode(group, out + group * kGroup);
    });
  }
  return 0;
}
