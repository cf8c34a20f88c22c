// A small pool of threads that run one piece of work together; the caller is thread 0.
// Knows nothing of kernels. One owner: two threads must never call run() on one pool at a time, nor may work call run().
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// The part of [0, count) that is thread's own: contiguous, sizes differing by one at most.
struct Share {
  int64_t begin, end;
};

static inline Share share_of(int64_t count, int thread, int num_threads) {
  return {count * thread / num_threads, count * (thread + 1) / num_threads};
}

class Threads {
 public:
  using Work = void (*)(void* context, int thread, int num_threads);

  // pin: every thread, the caller included, is bound to one of the CPUs the caller may run on.
  Threads(int num_threads, bool pin);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return num_threads_; }

  // Returns when every thread has returned from work.
  void run(Work work, void* context);

  // Inside work only, and by all threads: nobody passes before everybody has come, and sees what the others wrote.
  void barrier();

 private:
  void serve(int thread);

  const int num_threads_;
  std::vector<std::thread> workers_;
  Work work_ = nullptr;
  void* context_ = nullptr;
  bool closing_ = false;
  // Apart, so that those who wait on one do not slow those who count on another.
  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<int> num_working_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// body(thread, num_threads) on every thread.
template <typename Body>
static inline void run_on(Threads* threads, Body& body) {
  threads->run([](void* context, int thread, int num_threads) { (*static_cast<Body*>(context))(thread, num_threads); },
               &body);
}

// body(begin, end) on every thread that has a share of [0, count).
template <typename Body>
static inline void parallel_for(Threads* threads, int64_t count, Body body) {
  auto part = [&](int thread, int num_threads) {
    const Share share = share_of(count, thread, num_threads);
    if (share.begin < share.end) body(share.begin, share.end);
  };
  run_on(threads, part);
}

}  // namespace octavo

extern "C" {
octavo::Threads* octavo_threads_new(int num_threads, int pin);
void octavo_threads_delete(octavo::Threads* threads);
}
