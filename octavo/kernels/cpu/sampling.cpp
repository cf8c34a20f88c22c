// Chooses a token for each row, and distributes rows over threads. Passes over whole rows are in the SamplingVariant of the
// instruction set.
#include "sampling.h"

#include <math.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "elementwise.h"
#include "sampling_cut.h"

namespace octavo {
namespace {

const SamplingVariant& sampling_variant() {
  switch (best_instructions()) {
#if defined(__x86_64__)
    case Instructions::avx512: return sampling_avx512;
    case Instructions::avx2: return sampling_avx2;
#elif defined(__aarch64__)
    case Instructions::neon: return sampling_neon;
#endif
    default: return sampling_portable;
  }
}

// Rounds as the variants do: after adding 2⁵², a double's last bits are the nearest integer.
uint64_t whole(float amount) {
  const double magic = 4503599627370496.0, shifted = (double)amount + magic;
  uint64_t bits, none;
  memcpy(&bits, &shifted, sizeof bits);
  memcpy(&none, &magic, sizeof none);
  return bits ^ none;
}

// The smallest float that is not below `number`: a float is below one exactly if it is below the other.
float not_below(double number) {
  const float rounded = (float)number;
  return (double)rounded < number ? nextafterf(rounded, INFINITY) : rounded;
}

// The smallest integer that is at least `share` of the total, and at least 1.
uint64_t part_of(uint64_t total, double share) {
  const double part = ceil(share * (double)total);
  if (!(part > 1.0)) return 1;
  return part < (double)total ? (uint64_t)part : total;
}

constexpr double kLightest = 0.44;  // a smaller mass rounds to 0
constexpr int64_t kFew = 4096;      // tokens that are handled one by one as fast as one pass over the whole row

// Logits that one thread processes in about the time it takes to wake another, which may have fallen asleep since the last
// product. Drawing from a row costs about kDrawEffort passes over it.
constexpr int64_t kWorthSharing = 1 << 19, kDrawEffort = 8;
constexpr Cut kAll = {0, 0};
constexpr float kUnlikeliest = -1e30f;  // far below any logit; penalties do not make it infinite

struct Candidate {
  uint32_t key;
  int32_t id;
  uint64_t amount;
};

// The interval [low, high) of logits in which a target is reached. high INFINITY: no upper end.
struct Ends {
  float low, high;
};

class Row {
 public:
  int64_t choose(const SamplingVariant& variant, float* logits, int64_t size, const OctavoChoice& choice) {
    variant_ = &variant;
    choice_ = &choice;
    x_ = logits;
    size_ = size;
    num_chunks_ = (size + kChunk - 1) / kChunk;
    const bool is_listed = choice.mask && list_allowed();
    if (choice.mask && !is_listed) variant.keep(logits, size, choice.mask);
    if (choice.tokens) penalise(logits);
    if (is_listed) return choose_allowed();
    if (choice.is_greedy || !(choice.temperature > 0.0f)) {
      const int64_t likeliest = variant.argmax(x_, size_);
      if (!choice.mask || x_[likeliest] > -INFINITY) return likeliest;
      lift(logits);
      return variant.argmax(x_, size_);
    }
    if (!find_top()) {
      if (!choice.mask) return 0;
      lift(logits);
      x_ = logits;
      if (!find_top()) return 0;
    }
    const bool has_top_k = choice.top_k > 0 && choice.top_k < size;
    if (has_top_k && collect_top_k() <= kFew) return choose_among_few();
    weigh(x_, size_);
    Cut cut = has_top_k ? cut_top_k() : kAll;
    if (choice.top_p < 1.0) cut = cut_top_p();  // within the first cut, through sums_
    return draw(cut);
  }

 private:
  // ── a mask that leaves few tokens: no other token of the row is read ───────────────────────────────

  // Sets ids_ [num_listed_] to the tokens that the mask allows. False: there are none, or many. The mask may be in memory that another
  // process writes to: whatever it holds, no more than kFew ids are written.
  bool list_allowed() {
    const uint32_t* mask = choice_->mask;
    const int64_t num_words = size_ / 32;
    const uint32_t rest = size_ % 32 ? mask[num_words] & ((1u << (size_ % 32)) - 1) : 0;
    int64_t num = __builtin_popcount(rest);
    for (int64_t i = 0; i < num_words && num <= kFew; ++i) num += __builtin_popcount(mask[i]);
    if (num == 0 || num > kFew) return false;
    ids_.resize((size_t)(size_ + kGroups));
    num_listed_ = 0;
    for (int64_t i = 0; i <= num_words; ++i) {
      if (i == num_words && !rest) break;
      for (uint32_t bits = i < num_words ? mask[i] : rest; bits; bits &= bits - 1) {
        if (num_listed_ == kFew) return false;
        ids_[(size_t)num_listed_++] = (int32_t)(i * 32) + __builtin_ctz(bits);
      }
    }
    return num_listed_ > 0;
  }

  int64_t choose_allowed() {
    values_.resize((size_t)num_listed_);
    top_ = -INFINITY;
    int64_t likeliest = ids_[0];
    for (int64_t i = 0; i < num_listed_; ++i) {
      const float value = x_[ids_[(size_t)i]];
      if (value > top_) {  // not for NaN
        top_ = value;
        likeliest = ids_[(size_t)i];
      }
      const float number = value == value ? value : -INFINITY;
      values_[(size_t)i] = number < kLargest ? number : kLargest;
    }
    if (choice_->is_greedy || !(choice_->temperature > 0.0f)) return likeliest;
    if (top_ > kLargest) top_ = kLargest;
    if (top_ == -INFINITY) {  // a bias or penalty has excluded all of them
      top_ = kUnlikeliest;
      std::fill(values_.begin(), values_.end(), kUnlikeliest);
    }
    return draw_listed(choice_->top_k > 0 && choice_->top_k < size_);
  }

  // Makes every token that the mask allows possible again. Used if a bias or penalty has excluded all of them.
  void lift(float* logits) const {
    for (int64_t i = 0; i < size_; ++i) {
      if (choice_->mask[i / 32] >> (i % 32) & 1) logits[i] = kUnlikeliest;
    }
  }

  // The same operations as sampling/penalties.py, in the same order.
  void penalise(float* logits) {
    const OctavoChoice& choice = *choice_;
    seen_.resize((size_t)size_, 0);
    const auto each = [&](int64_t begin, auto change) {
      for (int64_t i = begin; i < choice.len; ++i) {
        const int64_t id = choice.tokens[i];
        if (id >= 0 && id < size_) change(logits[id], seen_[(size_t)id]);
      }
    };
    if (choice.repetition != 1.0f) {
      each(0, [&](float& logit, uint8_t& seen) {
        if (!seen) logit = logit > 0.0f ? logit / choice.repetition : logit * choice.repetition;
        seen = 1;
      });
      each(0, [](float&, uint8_t& seen) { seen = 0; });
    }
    if (choice.frequency != 0.0f) each(choice.prompt_len, [&](float& logit, uint8_t&) { logit -= choice.frequency; });
    if (choice.presence != 0.0f) {
      each(choice.prompt_len, [&](float& logit, uint8_t& seen) {
        if (!seen) logit -= choice.presence;
        seen = 1;
      });
      each(choice.prompt_len, [](float&, uint8_t& seen) { seen = 0; });
    }
  }

  // Whether any logit is above −inf. Afterwards x_ has neither NaN nor +inf.
  bool find_top() {
    tops_.resize((size_t)(num_chunks_ * kGroups));
    sums_.resize((size_t)num_chunks_);
    bool has_nans = false;
    top_ = variant_->maxima(x_, size_, tops_.data(), &has_nans);
    if (has_nans || top_ > kLargest) {
      mended_.resize((size_t)size_);
      variant_->mend(x_, size_, mended_.data());
      x_ = mended_.data();
      top_ = variant_->maxima(x_, size_, tops_.data(), &has_nans);
    }
    return top_ > -INFINITY;
  }

  // Fills masses_ [whole chunks] and sums_ [chunks].
  void weigh(const float* x, int64_t num) {
    const size_t num_chunks = (size_t)((num + kChunk - 1) / kChunk);
    if (masses_.size() < num_chunks * kChunk) masses_.resize(num_chunks * kChunk);
    if (sums_.size() < num_chunks) sums_.resize(num_chunks);
    weigh(x, num, masses_.data(), sums_.data());
  }

  void weigh(const float* x, int64_t num, float* masses, uint64_t* sums) const {
    const float scale = (float)(1.4426950408889634 / (double)choice_->temperature);
    const float least = choice_->min_p < 1.0 ? not_below(choice_->min_p) : 1.0f;  // the likeliest token is kept
    variant_->weigh(x, num, top_, scale < kLargest ? scale : kLargest, least * kUnit, masses, sums);
  }

  uint64_t total() const {
    uint64_t total = 0;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) total += sums_[(size_t)chunk];
    return total;
  }

  // The logit of a token with that mass.
  float logit_of(double mass) const {
    const double below = (double)choice_->temperature * log((mass > kLightest ? mass : kLightest) / (double)kUnit);
    return fmaxf((float)((double)top_ + below), -kLargest);
  }

  // ── top-k of few tokens: only their masses are computed ─────────────────────────────────────────────

  int64_t collect_top_k() {
    ones_.resize((size_t)(num_chunks_ * kChunk), 1.0f);
    ends_ = {low_by_tops(ones_.data(), (uint64_t)choice_->top_k, logit_of(0)), INFINITY};
    return collect(kFew);
  }

  int64_t choose_among_few() {
    values_.resize((size_t)num_listed_);
    for (int64_t i = 0; i < num_listed_; ++i) values_[(size_t)i] = x_[ids_[(size_t)i]];
    return draw_listed(true);
  }

  // Draws from the tokens ids_ [num_listed_] with logits values_.
  int64_t draw_listed(bool has_top_k) {
    weigh(values_.data(), num_listed_);
    few_.clear();
    for (int64_t i = 0; i < num_listed_; ++i) {
      few_.push_back({key_of(values_[(size_t)i]), ids_[(size_t)i], whole(masses_[(size_t)i])});
    }
    if (has_top_k) keep((uint64_t)choice_->top_k, [](const Candidate&) { return (uint64_t)1; });
    if (choice_->top_p < 1.0) {
      keep(part_of(amount_of_few(), choice_->top_p), [](const Candidate& one) { return one.amount; });
    }
    uint64_t threshold = threshold_of(amount_of_few());
    for (const Candidate& one : few_) {
      if (one.amount > threshold) return one.id;
      threshold -= one.amount;
    }
    return 0;  // not reached: the threshold is below the sum
  }

  uint64_t amount_of_few() const {
    uint64_t total = 0;
    for (const Candidate& one : few_) total += one.amount;
    return total;
  }

  template <typename Amount>
  Cut cut_few(uint64_t target, Amount amount) {
    const auto key = [&](int32_t i) { return few_[(size_t)i].key; };
    const auto amount_at = [&](int32_t i) { return amount(few_[(size_t)i]); };
    return find_cut((int64_t)few_.size(), target, key, amount_at, &inside_);
  }

  template <typename Amount>
  void keep(uint64_t target, Amount amount) {
    const Cut cut = cut_few(target, amount);
    size_t num = 0;
    for (size_t i = 0; i < few_.size(); ++i) {
      if (cut.keeps(few_[i].key, (int64_t)i)) few_[num++] = few_[i];
    }
    few_.resize(num);
  }

  // ── cuts of the whole row; afterwards sums_ holds the masses of the kept tokens ─────────────────────

  Cut cut_top_k() {
    const uint64_t num = (uint64_t)choice_->top_k;
    const float low = logit_of(0);
    variant_->sums_from(x_, ones_.data(), size_, low, sums_.data());
    if (total() <= num) {  // all tokens with a mass are kept
      variant_->sums_from(x_, masses_.data(), size_, -kLargest, sums_.data());
      return kAll;
    }
    const Cut cut = cut_where(ones_.data(), ones_.data(), num, low);
    variant_->sums_from(x_, masses_.data(), size_, ends_.high, sums_.data());
    add_kept(cut);
    return cut;
  }

  Cut cut_top_p() {
    const uint64_t all = total(), nucleus = part_of(all, choice_->top_p);
    const size_t num_chunks = (tops_.size() + kChunk - 1) / kChunk;
    top_masses_.resize(num_chunks * kChunk);
    top_sums_.resize(num_chunks);
    weigh(tops_.data(), (int64_t)tops_.size(), top_masses_.data(), top_sums_.data());
    // Tokens with less than an equal share of the remaining mass are outside: all together have less than it.
    const float low = logit_of((double)(all - nucleus) / (double)size_);
    const Cut cut = cut_where(masses_.data(), top_masses_.data(), nucleus, low);
    add_kept(cut);
    return cut;
  }

  // Sets few_ to the tokens among which the target is reached, ends_ to their interval, and sums_ to the amounts above it, by
  // chunk.
  Cut cut_where(const float* amounts, const float* top_amounts, uint64_t target, float low) {
    ends_ = {low_by_tops(top_amounts, target, low), INFINITY};
    if (collect(kFew) > kFew) {
      for (int i = 0; i < 2; ++i) narrow(x_, amounts, size_, target, &ends_);
      collect(size_);
    }
    uint64_t above = list(amounts);
    // The ladder's sums are rounded, so the ends may be wrong.
    if (above >= target || above + amount_of_few() < target) {
      ends_ = {-kLargest, INFINITY};
      collect(size_);
      above = list(amounts);
    }
    Cut cut = cut_few(target - above, [](const Candidate& one) { return one.amount; });
    cut.last = few_[(size_t)cut.last].id;
    return cut;
  }

  uint64_t list(const float* amounts) {
    if (ends_.high < INFINITY) variant_->sums_from(x_, amounts, size_, ends_.high, sums_.data());
    else std::fill(sums_.begin(), sums_.begin() + num_chunks_, 0);
    few_.clear();
    for (int64_t i = 0; i < num_listed_; ++i) {
      const int32_t id = ids_[(size_t)i];
      const uint64_t amount = whole(amounts[id]);
      if (amount) few_.push_back({key_of(x_[id]), id, amount});
    }
    return total();
  }

  void add_kept(const Cut& cut) {
    for (const Candidate& one : few_) {
      if (cut.keeps(one.key, one.id)) sums_[(size_t)(one.id / kChunk)] += whole(masses_[(size_t)one.id]);
    }
  }

  // Sets ids_ [num_listed_] to the tokens within ends_, but stops soon after `most`.
  int64_t collect(int64_t most) {
    ids_.resize((size_t)(size_ + kGroups));
    return num_listed_ = variant_->collect(x_, size_, ends_.low, ends_.high, most, ids_.data());
  }

  // A logit at or above which the target is surely reached, because the groups' largest tokens alone reach it: as high as these
  // can show, or `low`.
  float low_by_tops(const float* amounts, uint64_t target, float low) const {
    Ends ends = {low, INFINITY};
    const uint64_t safe = target + target / 1000;
    for (int i = 0; i < 3; ++i) narrow(tops_.data(), amounts, (int64_t)tops_.size(), safe, &ends);
    return ends.low;
  }

  void narrow(const float* x, const float* amounts, int64_t num, uint64_t target, Ends* ends) const {
    const double from = ends->high < INFINITY ? ends->high : top_, step = (from - ends->low) / kRungs;
    float rungs[kRungs], sums[kRungs];
    for (int i = 0; i < kRungs; ++i) rungs[i] = i + 1 < kRungs ? (float)(from - step * (i + 1)) : ends->low;
    variant_->ladder(x, amounts, num, rungs, sums);
    int i = 0;
    while (i + 1 < kRungs && (double)sums[i] < (double)target) ++i;
    if (i > 0) ends->high = rungs[i - 1];
    ends->low = rungs[i];
  }

  // ── drawing ─────────────────────────────────────────────────────────────────────────────────────────

  uint64_t threshold_of(uint64_t total) const {
    const double threshold = choice_->uniform > 0.0 ? choice_->uniform * (double)total : 0.0;
    return threshold < (double)(total - 1) ? (uint64_t)threshold : total - 1;
  }

  // The token at which the cumulative mass of the kept tokens, in the order of ids, passes the threshold.
  int64_t draw(const Cut& cut) const {
    uint64_t threshold = threshold_of(total());
    int64_t chunk = 0;
    while (sums_[(size_t)chunk] <= threshold) threshold -= sums_[(size_t)chunk++];
    for (int64_t id = chunk * kChunk;; ++id) {
      const uint64_t mass = cut.keeps(key_of(x_[id]), id) ? whole(masses_[(size_t)id]) : 0;
      if (mass > threshold) return id;
      threshold -= mass;
    }
  }

  const SamplingVariant* variant_;
  const OctavoChoice* choice_;
  const float* x_;
  int64_t size_, num_chunks_, num_listed_;
  float top_;
  Ends ends_;
  std::vector<float> tops_, mended_, masses_, top_masses_, values_, ones_;
  std::vector<uint64_t> sums_, top_sums_;
  std::vector<int32_t> ids_, inside_;
  std::vector<Candidate> few_;
  std::vector<uint8_t> seen_;
};

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

uint64_t mixed(uint64_t state) {  // the output of splitmix64 for one state
  uint64_t z = state + kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

void octavo_uniforms(const int64_t* seeds, const int64_t* positions, int64_t num_rows, OctavoChoice* choices) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint64_t bits = mixed(mixed((uint64_t)seeds[i]) + (uint64_t)positions[i] * kGolden);
    choices[i].uniform = (double)(bits >> 11) * 0x1p-53;
  }
}

void octavo_sample(Threads* threads, float* logits, int64_t stride, int64_t num_rows, int64_t size,
                   const OctavoChoice* choices, int64_t* chosen) {
  const SamplingVariant& variant = sampling_variant();
  std::atomic<int64_t> next{0};  // threads claim rows one by one, because their costs differ
  auto body = [&](int, int) {
    static thread_local Row row;  // keeps its memory from step to step
    for (int64_t i = next++; i < num_rows; i = next++) {
      chosen[i] = row.choose(variant, logits + i * stride, size, choices[i]);
    }
  };
  int64_t effort = 0;
  for (int64_t i = 0; i < num_rows; ++i) effort += choices[i].is_greedy ? size : kDrawEffort * size;
  if (num_rows > 1 && effort >= kWorthSharing) run_on(threads, body);
  else body(0, 1);
}
