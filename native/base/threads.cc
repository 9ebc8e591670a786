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

// What a caller polls for until the last workers are done, before it sleeps: they are in their last pieces.
constexpr uint64_t kLastPiecesNs = 50'000;
// A worker polls for its next job for at most a quarter of what the last one took, and so long; only if the one before
// came as soon. What is wasted is bounded so, and a loop that copies one batch after the other has its workers awake.
constexpr uint64_t kPollShare = 4, kMostPollNs = 100'000;
constexpr int kLooks = 16;  // between two looks at the clock

struct Job {
  void (*body)(void*, size_t, size_t);
  void* context;
  size_t count, grain;
  std::atomic<size_t> next{0};
  unsigned wanted;                  // workers that may still join
  std::atomic<unsigned> active{0};  // workers inside; the caller leaves, and the job with it, once there are none
  uint64_t began_ns;                // by the caller: a worker that woke up late has not worked for long
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

// look() until it is true, which this returns, or so much time has passed.
template <typename Look>
bool poll(uint64_t most_ns, Look&& look) {
  for (const uint64_t until_ns = monotonic_ns() + most_ns; !look();) {
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
      gap_ns_ = job.began_ns - std::min(job.began_ns, ended_ns_);
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
      ended_ns_ = monotonic_ns();
      took_ns_ = ended_ns_ - job.began_ns;
    }
    // Nobody joins from here on.
    if (!poll(kLastPiecesNs, [&] { return job.active.load(std::memory_order_acquire) == 0; })) {
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
    for (bool late = false;;) {
      if (jobs_.empty() && !await_soon(lock, late)) {
        work_ready_.wait(lock);
        late = jobs_.empty();
        if (late) continue;
      }
      late = false;
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

  // Whether there is a job, for which this polled if the last one came soon after the one before it, or this was woken
  // for it too late.
  bool await_soon(std::unique_lock<std::mutex>& lock, bool late) {
    const uint64_t most_ns = std::min(took_ns_ / kPollShare, kMostPollNs);
    if (!late && gap_ns_ > most_ns) return false;
    ++polling_;
    const uint64_t calls = calls_.load(std::memory_order_relaxed);
    lock.unlock();
    poll(most_ns, [&] { return calls_.load(std::memory_order_acquire) != calls; });
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
  // When a job ended last, and how long it took; how long after the one before it the last one came.
  uint64_t ended_ns_ = 0, took_ns_ = 0, gap_ns_ = 0;
  std::atomic<uint64_t> calls_{0};  // jobs posted
};

}  // namespace

void parallel_for(size_t count, size_t grain, unsigned threads, void (*body)(void*, size_t, size_t), void* context) {
  grain = std::max<size_t>(grain, 1);
  const size_t pieces = (count + grain - 1) / grain;
  const auto workers = static_cast<unsigned>(std::min<size_t>(threads, pieces));
  Job job{body, context, count, grain, {0}, workers > 0 ? workers - 1 : 0, {0}, 0, -1};
  if (job.wanted == 0) {
    job.work();
  } else {
    job.began_ns = monotonic_ns();
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
