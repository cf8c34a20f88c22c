// The operations of Lanes that all sets of aarch64 share: 16 lanes are four registers. Included in an anonymous namespace by
// product_neon.cpp, product_dotprod.cpp and product_i8mm.cpp, which add the dot products and the heights of tiles.

#define OCTAVO_EACH inline __attribute__((always_inline))

template <typename Vector, typename Function>
OCTAVO_EACH Vector each(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

struct NeonLanes {
  struct Floats {
    float32x4_t v[4];
  };
  struct Ints {
    int32x4_t v[4];
  };
  struct Bytes {
    uint8x16_t v[4];
  };
  static constexpr int kFloatRows = 3;  // 24 sums of two panels in 32 registers
  static constexpr bool kByPanel = true;

  template <typename Function>
  static OCTAVO_EACH Floats floats(Function function) { return each<Floats>(function); }
  template <typename Function>
  static OCTAVO_EACH Ints ints(Function function) { return each<Ints>(function); }
  template <typename Function>
  static OCTAVO_EACH Bytes bytes(Function function) { return each<Bytes>(function); }

  static OCTAVO_EACH Floats splat(float value) { return floats([&](int) { return vdupq_n_f32(value); }); }
  static OCTAVO_EACH Floats load(const float* at) { return floats([&](int i) { return vld1q_f32(at + 4 * i); }); }
  static OCTAVO_EACH void store(float* at, Floats x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(at + 4 * i, x.v[i]);
  }
  static OCTAVO_EACH Floats load_halves(const void* at) {
    const uint8_t* halves = static_cast<const uint8_t*>(at);
    return floats([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(halves + 8 * i))); });
  }
  static OCTAVO_EACH Floats load_small(const void* at) {  // 16 signed bytes
    const int8x16_t small = vld1q_s8(static_cast<const int8_t*>(at));
    const int16x8_t low = vmovl_s8(vget_low_s8(small)), high = vmovl_high_s8(small);
    return to_float({{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
  }
  // The low or high halves of 16 pairs of bfloat16.
  static OCTAVO_EACH Floats widen_low(Ints pairs) {
    return floats([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(pairs.v[i], 16)); });
  }
  static OCTAVO_EACH Floats widen_high(Ints pairs) {
    const int32x4_t mask = vdupq_n_s32(static_cast<int32_t>(0xffff0000u));
    return floats([&](int i) { return vreinterpretq_f32_s32(vandq_s32(pairs.v[i], mask)); });
  }
  static OCTAVO_EACH Floats add(Floats x, Floats y) { return floats([&](int i) { return vaddq_f32(x.v[i], y.v[i]); }); }
  static OCTAVO_EACH Floats mul(Floats x, Floats y) { return floats([&](int i) { return vmulq_f32(x.v[i], y.v[i]); }); }
  static OCTAVO_EACH Floats div(Floats x, Floats y) { return floats([&](int i) { return vdivq_f32(x.v[i], y.v[i]); }); }
  static OCTAVO_EACH Floats fma(Floats x, Floats y, Floats z) {
    return floats([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
  }
  // Comparisons and not FMIN, FMAX: y if either is NaN, as on x86.
  static OCTAVO_EACH Floats least(Floats x, Floats y) {
    return floats([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
  }
  static OCTAVO_EACH Floats greatest(Floats x, Floats y) {
    return floats([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
  }
  // The largest absolute value of both, compared as integers: NaN is above infinity, which is above all numbers.
  static OCTAVO_EACH float largest_size(Floats x, Floats y) {
    int32x4_t most = vdupq_n_s32(0);
    for (int i = 0; i < 4; ++i) {
      most = vmaxq_s32(most, vreinterpretq_s32_f32(vabsq_f32(x.v[i])));
      most = vmaxq_s32(most, vreinterpretq_s32_f32(vabsq_f32(y.v[i])));
    }
    const int32_t bits = vmaxvq_s32(most);
    float largest;
    memcpy(&largest, &bits, 4);
    return largest;
  }

  static OCTAVO_EACH Ints splat_int(int32_t value) { return ints([&](int) { return vdupq_n_s32(value); }); }
  static OCTAVO_EACH Ints load_ints(const void* at) {
    const uint8_t* from = static_cast<const uint8_t*>(at);
    return ints([&](int i) { return vreinterpretq_s32_u8(vld1q_u8(from + 16 * i)); });
  }
  static OCTAVO_EACH Ints add_ints(Ints x, Ints y) { return ints([&](int i) { return vaddq_s32(x.v[i], y.v[i]); }); }
  static OCTAVO_EACH int32_t total(Ints x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
  }
  // Byte J of each lane.
  template <int J>
  static OCTAVO_EACH Ints byte_of(Bytes x) {
    return ints([&](int i) {
      uint32x4_t word = vreinterpretq_u32_u8(x.v[i]);
      if constexpr (J > 0) word = vshrq_n_u32(word, 8 * J);
      if constexpr (J < 3) word = vandq_u32(word, vdupq_n_u32(255));
      return vreinterpretq_s32_u32(word);
    });
  }
  static constexpr bool kPicks = false;
  template <int COUNT>
  static OCTAVO_EACH Ints shift_left(Ints x) { return ints([&](int i) { return vshlq_n_s32(x.v[i], COUNT); }); }
  static OCTAVO_EACH Ints nearest(Floats x) { return ints([&](int i) { return vcvtnq_s32_f32(x.v[i]); }); }
  static OCTAVO_EACH Floats to_float(Ints x) { return floats([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
  static OCTAVO_EACH Floats power_of_two(Ints n) {
    return floats([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23)); });
  }
  static OCTAVO_EACH void store_codes(int8_t* at, Ints x) {
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.v[0]), x.v[1]), high = vqmovn_high_s32(vqmovn_s32(x.v[2]), x.v[3]);
    vst1q_s8(at, vqmovn_high_s16(vqmovn_s16(low), high));
  }

  // Hides the value from the optimiser.
  template <typename Vector>
  static OCTAVO_EACH void keep(Vector& x) {
    for (int i = 0; i < 4; ++i) __asm__ volatile("" : "+w"(x.v[i]));
  }

  static OCTAVO_EACH Bytes load_bytes(const void* at) {
    const uint8_t* from = static_cast<const uint8_t*>(at);
    return bytes([&](int i) { return vld1q_u8(from + 16 * i); });
  }
  static OCTAVO_EACH Bytes splat_bytes(const int8_t* four) {  // four registers of one value: the compiler keeps one
    uint32_t all;
    memcpy(&all, four, 4);
    return bytes([&](int) { return vreinterpretq_u8_u32(vdupq_n_u32(all)); });
  }
  static OCTAVO_EACH Bytes low_halves(Bytes x) {
    return bytes([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(15)); });
  }
  static OCTAVO_EACH Bytes high_halves(Bytes x) { return bytes([&](int i) { return vshrq_n_u8(x.v[i], 4); }); }
  static OCTAVO_EACH Bytes move_down(Bytes x, int count) {
    const int32x4_t by = vdupq_n_s32(-count);
    return bytes([&](int i) { return vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(x.v[i]), by)); });
  }
  static OCTAVO_EACH Bytes no_bytes() { return bytes([](int) { return vdupq_n_u8(0); }); }
  // Looks up each byte, which is below 16, in a table.
  static OCTAVO_EACH Bytes look_up(const uint8_t* table, Bytes x) {
    const uint8x16_t levels = vld1q_u8(table);
    return bytes([&](int i) { return vqtbl1q_u8(levels, x.v[i]); });
  }
  // weights | (plane shifted by SHIFT & MASK), in every byte. MASK has no bit that a shift brings in from the next byte.
  template <int SHIFT, int MASK>
  static OCTAVO_EACH Bytes with_bits(Bytes weights, Bytes plane) {
    return bytes([&](int i) {
      uint8x16_t bits = plane.v[i];
      if constexpr (SHIFT > 0) bits = vshlq_n_u8(bits, SHIFT);
      if constexpr (SHIFT < 0) bits = vshrq_n_u8(bits, -SHIFT);
      if constexpr (MASK != 255) bits = vandq_u8(bits, vdupq_n_u8(MASK));
      return vorrq_u8(weights.v[i], bits);
    });
  }
};
