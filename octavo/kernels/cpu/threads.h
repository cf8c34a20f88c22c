// A small pool of threads that work off the shares of one job together; the caller is one of them.
// Knows nothing of kernels. One owner: two threads must never call run() on one pool at a time, nor may work call run().
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// The part of [0, count) that belongs to a share: contiguous, sizes differing by one at most.
struct Share {
  int64_t begin, end;
};

static inline Share share_of(int64_t count, int share, int num_shares) {
  return {count * share / num_shares, count * (share + 1) / num_shares};
}

class Threads {
 public:
  using Work = void (*)(void* context, int share, int num_shares);

  // first_cpu: threads are bound one by one to the CPUs that the caller may run on, from this one on; -1: none is. The
  // caller itself stays free: whatever it starts later would inherit its one CPU.
  Threads(int num_threads, int first_cpu);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return num_threads_; }

  // Returns when work has been done for every share, each by whoever came first: a thread that has lost its CPU to somebody
  // else's process is waited for only while it is in the middle of a share.
  void run(Work work, void* context, int num_shares);

 private:
  void serve();
  void work_off();

  const int num_threads_;
  std::vector<std::thread> workers_;
  // The job. Written only while it is closed and nobody is inside.
  Work work_ = nullptr;
  void* context_ = nullptr;
  int num_shares_ = 0;
  bool closing_ = false;
  // Apart, so that those who wait on one do not slow those who count on another.
  alignas(64) std::atomic<uint32_t> turn_{0};  // of the newest job
  alignas(64) std::atomic<uint32_t> open_{0};  // the turn whose job may be entered; 0: none
  alignas(64) std::atomic<int> next_{0};       // share
  alignas(64) std::atomic<int> num_inside_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// body(share, num_shares) for every share; by default as many as there are threads.
template <typename Body>
static inline void run_on(Threads* threads, Body& body, int num_shares = 0) {
  threads->run([](void* context, int share, int num_shares) { (*static_cast<Body*>(context))(share, num_shares); },
               &body, num_shares ? num_shares : threads->size());
}

// So many that a thread which comes late, or is slow, holds up the others by little.
constexpr int kSharesPerThread = 4;

// body(begin, end) for parts of [0, count).
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
