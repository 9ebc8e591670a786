#include "transport/providers/at_once.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <new>

#include "base/condition_variable.h"
#include "base/interruption.h"
#include "base/lifetime.h"

namespace geartrain {
namespace {

struct NotWanted {};  // ends a thread whose result nobody wants any more

struct Calls {
  explicit Calls(const std::function<void(uint32_t)>& of) : body(of) {}
  ~Calls() {
    over.store(true, std::memory_order_relaxed);
    threads.clear();  // joined, where they are this process's
  }

  const std::function<void(uint32_t)>& body;
  const Owned owned;
  std::mutex mutex;
  ConditionVariable ended;
  uint32_t at_work = 0;  // under the mutex
  std::atomic<bool> over{false};
  FirstFailure failure;
  std::deque<OwnThread> threads;

  void serve(uint32_t i) noexcept {
    try {
      const Interruption interruption([this] {
        if (over.load(std::memory_order_relaxed)) throw NotWanted{};
      });
      body(i);
    } catch (const NotWanted&) {
    } catch (const Error& error) {
      over.store(true, std::memory_order_relaxed);
      failure.note(error);
    } catch (...) {
      over.store(true, std::memory_order_relaxed);
      failure.note_no_memory();
    }
    std::lock_guard lock(mutex);
    --at_work;
    ended.notify_all();
  }

  // False when there is none to be had.
  bool start(uint32_t i) {
    {
      std::lock_guard lock(mutex);
      ++at_work;
    }
    try {
      threads.emplace_back().start("a thread", [this, i] { serve(i); });
      return true;
    } catch (const Error&) {
      std::lock_guard lock(mutex);
      --at_work;
      return false;
    }
  }

  void wait() {
    std::unique_lock lock(mutex);
    while (at_work != 0) {
      ended.wait_for(lock, std::chrono::nanoseconds(static_cast<uint64_t>(kInterruptionEveryS * 1e9)));
      lock.unlock();
      Interruption::check();
      if (owned.forked()) fail(ErrorKind::hung_up, "the process was forked while it connected");
      lock.lock();
    }
  }
};

}  // namespace

void FirstFailure::note(const Error& what) noexcept {
  std::lock_guard lock(mutex_);
  if (no_memory_ || (error_ && (error_->first != ErrorKind::peer_lost || what.kind == ErrorKind::peer_lost))) return;
  try {
    error_.emplace(what.kind, what.what());
  } catch (const std::bad_alloc&) {
    no_memory_ = true;
  }
}

void FirstFailure::note_no_memory() noexcept {
  std::lock_guard lock(mutex_);
  no_memory_ = true;
}

void FirstFailure::check() const {
  std::lock_guard lock(mutex_);
  if (no_memory_) throw std::bad_alloc();
  if (error_) fail(error_->first, error_->second);
}

void at_once(uint32_t count, const std::function<void(uint32_t)>& body) {
  Calls calls(body);
  uint32_t i = 0;
  while (i < count && calls.start(i)) ++i;
  for (; i < count && !calls.over.load(std::memory_order_relaxed); ++i) body(i);
  calls.wait();
  calls.failure.check();
}

void at_once(uint32_t count, uint32_t most_threads, const std::function<void(uint32_t)>& body) {
  if (count == 1) return body(0);
  std::atomic<uint32_t> next{0};
  at_once(std::min(count, most_threads), [&](uint32_t) {
    for (uint32_t i = next++; i < count; i = next++) {
      Interruption::check();
      body(i);
    }
  });
}

}  // namespace geartrain
