// Threads of our own: the C API gives no access to TensorFlow's.
#ifndef BITTRAIN_PARALLEL_H_
#define BITTRAIN_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bittrain {

// How a thread's floating-point unit treats subnormals. TensorFlow sets it for its own threads,
// and results must not depend on which thread computes them.
#if defined(__x86_64__)
inline uint64_t FloatMode() { return _mm_getcsr(); }
inline void SetFloatMode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
inline bool SubnormalsAreZero() { return FloatMode() & 0x0040; }
#elif defined(__aarch64__)
inline uint64_t FloatMode() {
  uint64_t mode;
  __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void SetFloatMode(uint64_t mode) { __asm__ __volatile__("msr fpcr, %0" ::"r"(mode)); }
inline bool SubnormalsAreZero() { return FloatMode() & (1 << 24); }
#else
inline uint64_t FloatMode() { return 0; }
inline void SetFloatMode(uint64_t) {}
inline bool SubnormalsAreZero() { return false; }
#endif

// Runs shards of work on the calling thread and on idle threads of one pool for the process.
//
// The caller takes shards like everybody else, so work gets done even where there are no other
// threads (none could be started; a forked child). Threads are started when first asked for, and
// never end: they sleep, and the process may exit under them.
class Pool {
 public:
  static Pool& Get() {
    static Pool* pool = new Pool;  // never destroyed, as its threads live on
    return *pool;
  }

  // Calls `fn(shard)` for every shard in [0, shards), on at most `threads` threads at once.
  void Run(int64_t shards, int64_t threads, const std::function<void(int64_t)>& fn) {
    const int64_t helpers = std::min(threads, shards) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < shards; ++i) fn(i);
      return;
    }
    auto job = std::make_shared<Job>();
    job->shards = shards;
    job->fn = &fn;
    job->float_mode = FloatMode();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      StartThreads(helpers);
      for (int64_t i = 0; i < helpers; ++i) queue_.push_back(job);
    }
    for (int64_t i = 0; i < helpers; ++i) work_.notify_one();
    job->Work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.erase(std::remove(queue_.begin(), queue_.end(), job), queue_.end());
    }
    job->Wait();
  }

 private:
  struct Job {
    int64_t shards;
    const std::function<void(int64_t)>* fn;  // valid until the last shard is done
    uint64_t float_mode;
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;

    void Work() {
      int64_t mine = 0;
      for (int64_t i; (i = next.fetch_add(1)) < shards; ++mine) (*fn)(i);
      if (mine == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      done += mine;
      if (done == shards) all_done.notify_one();
    }

    void Wait() {
      std::unique_lock<std::mutex> lock(mutex);
      all_done.wait(lock, [this] { return done == shards; });
    }
  };

  void StartThreads(int64_t wanted) {
    const int64_t most = std::max<int64_t>(std::thread::hardware_concurrency(), 1) - 1;
    while (threads_ < std::min(wanted, most)) {
      try {
        std::thread([this] { Loop(); }).detach();
      } catch (const std::system_error&) {
        return;  // the callers do without
      }
      ++threads_;
    }
  }

  void Loop() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [this] { return !queue_.empty(); });
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      SetFloatMode(job->float_mode);
      job->Work();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::shared_ptr<Job>> queue_;
  int64_t threads_ = 0;
};

// How work on `size` elements is cut: in shards of at least `grain`, which is worth waking a
// thread for, and not many more than there are threads.
struct Shards {
  int64_t size, length, count;

  // Shards begin at multiples of `alignment`.
  Shards(int64_t size, int64_t grain, int64_t alignment, int64_t threads) : size(size) {
    const int64_t wanted = std::max<int64_t>(1, std::min(size / grain, 4 * threads));
    length = std::max<int64_t>((size + wanted - 1) / wanted, 1);
    length = (length + alignment - 1) / alignment * alignment;
    count = (size + length - 1) / length;
  }

  int64_t begin(int64_t shard) const { return shard * length; }
  int64_t end(int64_t shard) const { return std::min(size, (shard + 1) * length); }
};

}  // namespace bittrain

#endif  // BITTRAIN_PARALLEL_H_
