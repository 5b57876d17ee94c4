/// A thread pool whose callers work too: any number of calls at once, fork-safe, joined at exit.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradquorum {

/// Nearest even, subnormals kept, for the lifetime of the object: another library of the process
/// may have set flush-to-zero in this thread, which must not change results.
class [[maybe_unused]] FloatModes {
 public:
#if defined(__x86_64__)
  FloatModes() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
  ~FloatModes() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  FloatModes() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~FloatModes() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  FloatModes() = default;
#endif
  FloatModes(const FloatModes&) = delete;
  FloatModes& operator=(const FloatModes&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;  ///< Modes of the thread before.
#elif defined(__aarch64__)
  std::uint64_t saved_ = 0;  ///< Modes of the thread before.
#endif
};

/// Waits up to 20 us for what another thread is about to do, without sleeping: it may take longer to be woken.
/// Returns whether it was done in time.
template <class Done>
bool spin_until(Done&& done) {
  constexpr std::chrono::microseconds longest{20};
  const auto begin = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
#if defined(__x86_64__)
      _mm_pause();
#elif defined(__aarch64__)
      __asm__ volatile("isb");
#endif
    }
  } while (std::chrono::steady_clock::now() - begin < longest);
  return false;
}

/// Runs the pieces of jobs on the callers' threads and on helpers started on demand.
class ThreadPool {
 public:
  /// Calls task(i) once for each i < count, on at most `num_threads` threads, the caller's among them.
  /// Returns when all have ended; the first exception of a task is thrown here, the rest is not started.
  template <class Task>
  static void run(std::size_t num_threads, std::size_t count, Task&& task) {
    const FloatModes modes;
    if (num_threads <= 1 || count <= 1) {
      for (std::size_t i = 0; i < count; ++i) task(i);
      return;
    }
    Job job(count, std::min(num_threads, count) - 1,
            [](void* self, std::size_t i) { (*static_cast<std::remove_reference_t<Task>*>(self))(i); }, &task);
    current().run(job);
    if (job.error) std::rethrow_exception(job.error);
  }

  /// Most helper threads of a process.
  static constexpr std::size_t max_helpers = 255;

 private:
  /// One call of run(); lives on its caller's stack.
  struct Job {
    Job(std::size_t count_in, std::size_t helpers_in, void (*call_in)(void*, std::size_t), void* self_in)
        : count(count_in), helpers(helpers_in), call(call_in), self(self_in) {}
    const std::size_t count;                ///< Number of pieces.
    const std::size_t helpers;              ///< Most helpers wanted.
    void (*const call)(void*, std::size_t); ///< Runs one piece.
    void* const self;                       ///< The task.
    std::atomic<std::size_t> next{0};       ///< Next piece; atomic.
    std::atomic<bool> failed{false};        ///< A piece has thrown; atomic.
    std::exception_ptr error;               // Guarded by: the pool's mutex_ while helpers run
    std::size_t joined = 0;                 // Guarded by: the pool's mutex_
    std::atomic<std::size_t> active{0};     ///< Helpers at work; changed with the pool's mutex_ held.
    std::condition_variable idle;           ///< Signalled when active falls to 0.
    Job* link = nullptr;                    // Guarded by: the pool's mutex_
  };

  /// The pool of this process, made when first needed.
  static ThreadPool& current() {
    static const bool prepared = prepare();
    (void)prepared;
    ThreadPool* pool = slot().load(std::memory_order_acquire);
    while (pool == nullptr) {
      ThreadPool* const fresh = new ThreadPool();
      if (slot().compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
      delete fresh;
    }
    return *pool;
  }

  /// The pool of the process; null at first and in a forked child, whose threads did not come along.
  static std::atomic<ThreadPool*>& slot() {
    static std::atomic<ThreadPool*> pool{nullptr};
    return pool;
  }

  /// What a fork left behind, kept reachable: its mutex may be locked for ever, its threads are gone.
  static ThreadPool*& abandoned() {
    static ThreadPool* pool = nullptr;
    return pool;
  }

  /// Once per process image: what happens at exit and at a fork.
  static bool prepare() {
    slot();
    abandoned();
    std::atexit([] {
      if (ThreadPool* const pool = slot().load(std::memory_order_acquire)) pool->stop();
    });
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] {
      if (ThreadPool* const pool = slot().exchange(nullptr, std::memory_order_acq_rel)) {
        pool->previous_ = abandoned();
        abandoned() = pool;
      }
    });
#endif
    return true;
  }

  /// Works on the job until no piece is left.
  static std::exception_ptr work(Job& job) noexcept {
    try {
      while (!job.failed.load(std::memory_order_relaxed)) {
        const std::size_t i = job.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= job.count) break;
        job.call(job.self, i);
      }
    } catch (...) {
      job.failed.store(true, std::memory_order_relaxed);
      return std::current_exception();
    }
    return nullptr;
  }

  /// Offers the job to the helpers, works on it, and waits for those that joined.
  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!stopped_) {
        grow(job.helpers);
        job.link = jobs_;
        jobs_ = &job;
        posted_.fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (job.helpers == 1) wake_.notify_one();
    else wake_.notify_all();
    std::exception_ptr error = work(job);
    std::unique_lock<std::mutex> lock(mutex_);
    for (Job** place = &jobs_; *place != nullptr; place = &(*place)->link) {
      if (*place == &job) {
        *place = job.link;
        break;
      }
    }
    if (job.active != 0) {
      lock.unlock();
      spin_until([&job] { return job.active.load(std::memory_order_relaxed) == 0; });
      lock.lock();
    }
    job.idle.wait(lock, [&job] { return job.active == 0; });
    if (error && !job.error) job.error = error;
  }

  /// Starts helpers until there are `wanted`; fewer if the system gives no more. With mutex_ held.
  void grow(std::size_t wanted) noexcept {
    try {
      wanted = std::min(wanted, max_helpers);
      if (helpers_.capacity() < max_helpers) helpers_.reserve(max_helpers);
      while (helpers_.size() < wanted) helpers_.emplace_back([this] { help(); });
    } catch (const std::exception&) {  // The callers do the work alone.
    }
  }

  /// A job that still wants helpers, or null. With mutex_ held.
  Job* wanting() noexcept {
    for (Job* job = jobs_; job != nullptr; job = job->link)
      if (job->joined < job->helpers && job->next.load(std::memory_order_relaxed) < job->count) return job;
    return nullptr;
  }

  /// The life of a helper.
  void help() noexcept {
    const FloatModes modes;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return stopped_ || (job = wanting()) != nullptr; });
      if (stopped_) return;
      ++job->joined;
      ++job->active;
      lock.unlock();
      std::exception_ptr error = work(*job);
      lock.lock();
      if (error && !job->error) job->error = std::move(error);
      error = nullptr;
      if (--job->active == 0) job->idle.notify_all();  // Under the lock: the job dies right after.
      const std::size_t posted = posted_.load(std::memory_order_relaxed);
      lock.unlock();
      spin_until([this, posted] { return posted_.load(std::memory_order_relaxed) != posted; });  // Merges have two.
      lock.lock();
    }
  }

  /// Joins the helpers; calls that still run go on alone. The pool itself stays valid.
  void stop() noexcept {
    std::vector<std::thread> helpers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      helpers.swap(helpers_);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers) helper.join();
  }

  std::mutex mutex_;                  ///< Held for a few steps only, never during a piece.
  std::condition_variable wake_;      ///< A job came, or the pool stops.
  Job* jobs_ = nullptr;               // Guarded by: mutex_
  std::atomic<std::size_t> posted_{0};  ///< Jobs that came so far; changed with mutex_ held.
  bool stopped_ = false;              // Guarded by: mutex_
  std::vector<std::thread> helpers_;  // Guarded by: mutex_
  ThreadPool* previous_ = nullptr;    ///< Next of the abandoned ones; only a forked child touches it.
};

}  // namespace gradquorum
