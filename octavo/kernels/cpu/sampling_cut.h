// The cut of a filter: tokens are kept in descending order of logits, equal ones in ascending order of ids, until they reach a
// number or a mass. Without sorting: counts by the bits of the logits.
#pragma once
#include <stdint.h>
#include <string.h>

#include <vector>

namespace octavo {

// Integers in the order of the floats. −0 becomes 0.
inline uint32_t key_of(float value) {
  value += 0.0f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float value_of(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct Cut {
  uint32_t key;
  int64_t last;  // the last kept index among those with that key

  bool keeps(uint32_t other, int64_t index) const { return other > key || (other == key && index <= last); }
};

// Finds the cut for items with key(i) and amount(i), i in [0, num), num ≥ 1: keeps the fewest that reach the target, or all;
// equal keys in order of i.
template <typename Key, typename Amount>
Cut find_cut(int64_t num, uint64_t target, Key key, Amount amount, std::vector<int32_t>* scratch) {
  constexpr int kMostBits = 11;
  uint64_t buckets[1 << kMostBits];
  scratch->resize((size_t)num);
  int32_t* inside = scratch->data();  // items whose keys are from low to high
  uint32_t low = UINT32_MAX, high = 0;
  for (int32_t i = 0; i < num; ++i) {
    inside[i] = i;
    low = key(i) < low ? key(i) : low;
    high = key(i) > high ? key(i) : high;
  }
  uint64_t before = 0;  // amount above high
  while (low < high) {
    const int most_bits = num <= 64 ? 6 : kMostBits;  // for few items, clearing many buckets would take longer
    const int num_bits = 32 - __builtin_clz(high - low), shift = num_bits > most_bits ? num_bits - most_bits : 0;
    uint32_t bucket = (high - low) >> shift;
    memset(buckets, 0, sizeof(uint64_t) * (bucket + 1));
    for (int64_t j = 0; j < num; ++j) buckets[(key(inside[j]) - low) >> shift] += amount(inside[j]);
    while (bucket > 0 && before + buckets[bucket] < target) before += buckets[bucket--];
    low += bucket << shift;
    const uint32_t end = low + ((1u << shift) - 1);
    high = end < high ? end : high;
    int64_t num_left = 0;
    for (int64_t j = 0; j < num; ++j) {
      const int32_t i = inside[j];
      inside[num_left] = i;
      num_left += key(i) >= low && key(i) <= high;
    }
    num = num_left;
  }
  Cut cut = {low, -1};
  for (int64_t j = 0; j < num && before < target; ++j) {
    before += amount(inside[j]);
    cut.last = inside[j];
  }
  return cut;
}

}  // namespace octavo
