// The pages that the next attention will read, prefetched during the products before it.
//
// With many decode rows, products leave most of the memory bandwidth idle, and attention, each row over its own pages, needs
// more than there is. A layer's pages fit into the last-level cache, so they are fetched there beforehand.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "product.h"

namespace octavo {

class PagesAhead {
 public:
  // call: the next attention, for the rows of the given tables. One share per thread.
  void plan(const OctavoAttention& call, const int32_t* page_table, int64_t table_stride, const int32_t* seq_lens,
            int64_t num_rows, int num_shares) {
    runs_.clear();
    const int64_t page_bytes = bytes_of_page(call), most = most_bytes() / page_bytes;
    for (int64_t row = 0; row < num_rows && static_cast<int64_t>(runs_.size()) < most; ++row) {
      const int32_t *table = page_table + row * table_stride, *before = table - (row > 0 ? table_stride : 0);
      const int64_t unseen = call.window > 0 ? std::max<int64_t>(0, seq_lens[row] - call.window) : 0;
      for (int64_t page = unseen / call.page_size; page * call.page_size < seq_lens[row]; ++page) {
        if (row > 0 && table[page] == before[page]) continue;  // a shared prefix
        runs_.push_back(static_cast<const uint8_t*>(call.pages) + table[page] * call.page_stride);
      }
    }
    const int64_t count = std::min<int64_t>(runs_.size(), most);
    shares_.resize(static_cast<size_t>(num_shares));
    for (int index = 0; index < num_shares; ++index) {
      const Share share = share_of(count, index, num_shares);
      shares_[index] = {runs_.data() + share.begin, runs_.data() + share.end, 0, page_bytes / 64};
    }
  }

  void forget() { shares_.clear(); }

  Ahead* shares() { return shares_.empty() ? nullptr : shares_.data(); }

 private:
  // Bytes of one layer's part of a page; other layers' parts may lie between two of them.
  static int64_t bytes_of_page(const OctavoAttention& call) {
    const int64_t num_cells = int64_t{2} * call.num_kv_heads * call.page_size;
    if (call.is_int8) return num_cells * (call.head_size + 4);
    return num_cells * call.head_size * (call.is_float16 ? 2 : 4);
  }

  // The most to fetch for one layer: more than a part of the last-level cache would evict what was fetched first.
  static int64_t most_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    static const int64_t size = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), int64_t{16} << 20);
#else
    constexpr int64_t size = int64_t{16} << 20;
#endif
    return size / 2;
  }

  std::vector<const uint8_t*> runs_;
  std::vector<Ahead> shares_;  // one per thread of a product
};

}  // namespace octavo
