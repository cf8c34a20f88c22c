// The thread pool: workers watch a job counter, spinning briefly and then sleeping.
#include "threads.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace octavo {
namespace {

// A worker spins for this many pauses (about 50 µs) before it sleeps: longer than the serial parts of a step, far shorter than
// the idle time of a server.
constexpr int kPausesBeforeSleep = 4000;
// A caller that waits for a preempted thread yields its CPU after this many pauses.
constexpr int kPausesBeforeYield = 20000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

template <typename Done>
void wait_until(Done done) {
  for (int pauses = 0; !done(); ++pauses) {
    if (pauses < kPausesBeforeYield) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
  }
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
#endif
  return cpus;
}

void bind_to(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // Fails if a container forbids it: the work is then only slower.
  (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
  (void)cpu;
#endif
}

}  // namespace

Threads::Threads(int num_threads, int first_cpu) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  const std::vector<int> cpus = first_cpu >= 0 ? allowed_cpus() : std::vector<int>();
  // No pinning with more threads than CPUs: the scheduler distributes them better.
  const bool binds = first_cpu >= 0 && static_cast<int>(cpus.size()) >= first_cpu + num_threads_;
  for (int thread = 1; thread < num_threads_; ++thread) {
    const int cpu = binds ? cpus[first_cpu + thread] : -1;
    workers_.emplace_back([this, cpu] {
      if (cpu >= 0) bind_to(cpu);
      serve();
    });
  }
}

Threads::~Threads() {
  closing_ = true;
  job_.fetch_add(1);  // a job that is never opened
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void Threads::run(Work work, void* context, int num_shares) {
  if (num_threads_ == 1 || num_shares == 1) {
    for (int share = 0; share < num_shares; ++share) work(context, share, num_shares);
    return;
  }
  work_ = work;
  context_ = context;
  num_shares_ = num_shares;
  next_.store(0, std::memory_order_relaxed);
  uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  if (job == 0) job = 1;  // 0 means closed
  open_.store(job);
  job_.store(job);  // sequentially consistent with num_asleep_: either we see the sleeper, or it sees the job
  if (num_asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  work_off();
  open_.store(0);
  // Sequentially consistent with workers that enter: either we see them inside, or they see that the job is closed.
  wait_until([this] { return num_inside_.load() == 0; });
}

void Threads::work_off() {
  for (int share; (share = next_.fetch_add(1, std::memory_order_relaxed)) < num_shares_;) {
    work_(context_, share, num_shares_);
  }
}

void Threads::serve() {
  uint32_t seen = 0;
  for (;;) {
    for (int pauses = 0; job_.load(std::memory_order_acquire) == seen; ++pauses) {
      if (pauses < kPausesBeforeSleep) {
        pause_briefly();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_.fetch_add(1);
      wake_.wait(lock, [this, seen] { return job_.load() != seen; });
      num_asleep_.fetch_sub(1);
    }
    seen = job_.load();
    num_inside_.fetch_add(1);
    const bool is_open = open_.load() == seen;
    if (is_open) work_off();
    const bool closing = closing_;
    num_inside_.fetch_sub(1, std::memory_order_release);
    if (closing) return;
  }
}

}  // namespace octavo

octavo::Threads* octavo_threads_new(int num_threads, int first_cpu) { return new octavo::Threads(num_threads, first_cpu); }

void octavo_threads_delete(octavo::Threads* threads) { delete threads; }
