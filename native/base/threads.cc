#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>

#include "base/clock.h"
#include "base/condition_variable.h"
#include "base/errors.h"
#include "base/lifetime.h"
#include "base/patience.h"

namespace geartrain {
namespace {

constexpr int kLooks = 16;  // between two looks at the clock

struct Job {
  void (*body)(void*, size_t, size_t);
  void* context;
  size_t count, grain;
  std::atomic<size_t> next{0};
  unsigned wanted;                  // workers that may still join
  std::atomic<unsigned> active{0};  // workers inside; the caller leaves, and the job with it, once there are none
  int caller_core;

  void work() {
    for (;;) {
      const size_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) return;
      body(context, first, std::min(first + grain, count));
    }
  }
};

// A scheduler may wake a worker at its caller's core though others are idle (one that takes a halted core of a virtual
// machine for a busy one), where neither helps the other. So it goes elsewhere, once, with the mask that it has.
void leave_core(int core) {
  cpu_set_t mine, others;
  if (core < 0 || core >= CPU_SETSIZE || ::sched_getcpu() != core) return;
  if (::sched_getaffinity(0, sizeof mine, &mine) != 0) return;
  others = mine;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || ::sched_setaffinity(0, sizeof others, &others) != 0) return;
  ::sched_setaffinity(0, sizeof mine, &mine);
}

// look() until it is true, which this returns, or kWorkersPollNs have passed.
template <typename Look>
bool poll(Look&& look) {
  for (const uint64_t until_ns = monotonic_ns() + kWorkersPollNs; !look();) {
    for (int i = 0; i < kLooks; ++i) pause_briefly();
    if (monotonic_ns() >= until_ns) return look();
  }
  return true;
}

class ThreadPool {
 public:
  void run(Job& job) {
    const unsigned wanted = job.wanted;  // workers count it down once they can see the job
    unsigned polling;
    {
      std::lock_guard lock(mutex_);
      try {
        if (workers_ < wanted) add_workers(wanted);
      } catch (const Error&) {
        // No more threads can be had: those that are there, and the caller, do it all.
      }
      jobs_.push_back(&job);
      polling = std::min(polling_, wanted);
      polling_ -= polling;
      called_ += polling;
      calls_.fetch_add(1, std::memory_order_release);
    }
    for (unsigned i = polling; i < wanted; ++i) work_ready_.notify_one();
    job.work();
    {
      std::lock_guard lock(mutex_);
      const auto at = std::find(jobs_.begin(), jobs_.end(), &job);
      if (at != jobs_.end()) jobs_.erase(at);
    }
    // Nobody joins from here on.
    if (!poll([&] { return job.active.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [&] { return job.active.load(std::memory_order_acquire) == 0; });
    }
  }

 private:
  void add_workers(unsigned wanted) {
    for (; workers_ < wanted; ++workers_) threads_.emplace_back().start("a thread of the pool", [this] { serve(); });
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (jobs_.empty() && !await_soon(lock)) {
        work_ready_.wait(lock);
        if (jobs_.empty()) continue;
      }
      Job& job = *jobs_.front();
      job.active.fetch_add(1, std::memory_order_relaxed);
      if (--job.wanted == 0) jobs_.pop_front();
      lock.unlock();
      leave_core(job.caller_core);
      job.work();
      lock.lock();
      if (job.active.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  // Polls, and returns whether there is a job.
  bool await_soon(std::unique_lock<std::mutex>& lock) {
    ++polling_;
    const uint64_t calls = calls_.load(std::memory_order_relaxed);
    lock.unlock();
    poll([&] { return calls_.load(std::memory_order_acquire) != calls; });
    lock.lock();
    // Whoever posted a job counts on as many as it took from those that polled, and wakes no others for them.
    if (called_ != 0) {
      --called_;
    } else {
      --polling_;
    }
    return !jobs_.empty();
  }

  std::mutex mutex_;
  ConditionVariable work_ready_, done_;
  std::deque<Job*> jobs_;
  std::deque<OwnThread> threads_;
  unsigned workers_ = 0;
  unsigned polling_ = 0, called_ = 0;  // workers that poll; that poll, and have been given a job
  std::atomic<uint64_t> calls_{0};     // jobs posted
};

}  // namespace

void parallel_for(size_t count, size_t grain, unsigned threads, void (*body)(void*, size_t, size_t), void* context) {
  grain = std::max<size_t>(grain, 1);
  const size_t pieces = (count + grain - 1) / grain;
  const auto workers = static_cast<unsigned>(std::min<size_t>(threads, pieces));
  Job job{body, context, count, grain, {0}, workers > 0 ? workers - 1 : 0, {0}, -1};
  if (job.wanted == 0) {
    job.work();
  } else {
    job.caller_core = ::sched_getcpu();
    of_this_process<ThreadPool>().run(job);
  }
}

unsigned available_cores() {
  cpu_set_t mask;
  if (::sched_getaffinity(0, sizeof mask, &mask) != 0) return 1;
  return static_cast<unsigned>(std::max(1, CPU_COUNT(&mask)));
}

}  // namespace geartrain
