#include "base/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/condition_variable.h"

namespace geartrain {
namespace {

struct Job {
  void (*body)(void*, size_t, size_t);
  void* context;
  size_t count, grain;
  std::atomic<size_t> next{0};
  unsigned wanted;      // workers that may still join
  unsigned active = 0;  // workers inside

  void work() {
    for (;;) {
      const size_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) return;
      body(context, first, std::min(first + grain, count));
    }
  }
};

class ThreadPool {
 public:
  void run(Job& job) {
    const unsigned wanted = job.wanted;  // workers count it down once they can see the job
    {
      std::lock_guard lock(mutex_);
      try {
        while (workers_ < wanted) {
          std::thread([this] { serve(); }).detach();
          ++workers_;
        }
      } catch (const std::system_error&) {
        // No more threads can be had: those that are there, and the caller, do it all.
      }
      jobs_.push_back(&job);
    }
    for (unsigned i = 0; i < wanted; ++i) work_ready_.notify_one();
    job.work();
    std::unique_lock lock(mutex_);
    const auto at = std::find(jobs_.begin(), jobs_.end(), &job);
    if (at != jobs_.end()) jobs_.erase(at);
    done_.wait(lock, [&] { return job.active == 0; });
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_ready_.wait(lock, [&] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      ++job.active;
      if (--job.wanted == 0) jobs_.pop_front();
      lock.unlock();
      job.work();
      lock.lock();
      if (--job.active == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  ConditionVariable work_ready_, done_;
  std::deque<Job*> jobs_;
  unsigned workers_ = 0;
};

// Never destroyed: its threads may outlive main. A forked child has none of the threads, so it starts afresh.
std::atomic<ThreadPool*> pool{nullptr};

ThreadPool& the_threads() {
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
  ThreadPool* current = pool.load();
  if (current == nullptr) {
    auto* fresh = new ThreadPool();
    if (pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

}  // namespace

void parallel_for(size_t count, size_t grain, unsigned threads, void (*body)(void*, size_t, size_t), void* context) {
  grain = std::max<size_t>(grain, 1);
  const size_t pieces = (count + grain - 1) / grain;
  const auto workers = static_cast<unsigned>(std::min<size_t>(threads, pieces));
  Job job{body, context, count, grain, {0}, workers > 0 ? workers - 1 : 0};
  if (job.wanted == 0) {
    job.work();
  } else {
    the_threads().run(job);
  }
}

unsigned available_cores() {
  cpu_set_t mask;
  if (::sched_getaffinity(0, sizeof mask, &mask) != 0) return 1;
  return static_cast<unsigned>(std::max(1, CPU_COUNT(&mask)));
}

}  // namespace geartrain
