// A small pool of threads that process the shares of one job together; the caller is one of them. Two threads must never call
// run() on one pool at the same time, and work must not call run().
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// The part of [0, count) that belongs to a share: contiguous, with sizes that differ by at most one.
struct Share {
  int64_t begin, end;
};

static inline Share share_of(int64_t count, int share, int num_shares) {
  return {count * share / num_shares, count * (share + 1) / num_shares};
}

class Threads {
 public:
  using Work = void (*)(void* context, int share, int num_shares);

  // first_cpu: index among the CPUs that the caller may use, from which on workers are pinned, one per CPU; -1: no pinning. The
  // caller itself is not pinned: threads and processes that it starts later would inherit its one CPU.
  Threads(int num_threads, int first_cpu);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return num_threads_; }

  // Returns when all shares are done. Threads claim shares one by one, so the caller waits for a preempted thread only if it is
  // in the middle of a share.
  void run(Work work, void* context, int num_shares);

 private:
  void serve();
  void work_off();

  const int num_threads_;
  std::vector<std::thread> workers_;
  // The job. Written only while it is closed and no worker is inside.
  Work work_ = nullptr;
  void* context_ = nullptr;
  int num_shares_ = 0;
  bool closing_ = false;
  // On separate cache lines, so that threads that wait on one do not slow down those that change another.
  alignas(64) std::atomic<uint32_t> job_{0};   // number of the newest job
  alignas(64) std::atomic<uint32_t> open_{0};  // number of the job that may be entered; 0: none
  alignas(64) std::atomic<int> next_{0};       // next share
  alignas(64) std::atomic<int> num_inside_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Runs body(share, num_shares) for every share; by default one share per thread.
template <typename Body>
static inline void run_on(Threads* threads, Body& body, int num_shares = 0) {
  threads->run([](void* context, int share, int num_shares) { (*static_cast<Body*>(context))(share, num_shares); },
               &body, num_shares ? num_shares : threads->size());
}

// Enough that a late or slow thread delays the others only a little.
constexpr int kSharesPerThread = 4;

// Runs body(begin, end) for parts of [0, count).
template <typename Body>
static inline void parallel_for(Threads* threads, int64_t count, Body body) {
  auto part = [&](int index, int num_shares) {
    const Share share = share_of(count, index, num_shares);
    if (share.begin < share.end) body(share.begin, share.end);
  };
  const int64_t most = static_cast<int64_t>(threads->size()) * kSharesPerThread;
  run_on(threads, part, static_cast<int>(count < most ? (count < 1 ? 1 : count) : most));
}

}  // namespace octavo

extern "C" {
octavo::Threads* octavo_threads_new(int num_threads, int first_cpu);
void octavo_threads_delete(octavo::Threads* threads);
}
