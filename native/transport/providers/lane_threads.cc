#include "transport/providers/lane_threads.h"

#include <poll.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "base/threads.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr uint32_t kLanesWithoutTls = 2;
constexpr uint32_t kMostLanesByCores = 8;
constexpr uint64_t kJudgedNs = 4'000'000;  // of work: one preemption in less would decide
constexpr double kContended = 0.8, kIdle = 0.92;
constexpr uint32_t kMostVain = 256;
constexpr int kBrieflyMs = 1;

unsigned most_threads(size_t lanes, bool tls, unsigned asked) {
  if (!tls || lanes < 2) return 1;
  return std::min(static_cast<unsigned>(lanes), asked != 0 ? asked : available_cores());
}

// The first failure of a round, whichever thread it was on.
struct FirstFailure {
  std::mutex mutex;
  std::optional<std::pair<ErrorKind, std::string>> error;
  bool no_memory = false;

  void note(const Error& what) noexcept {
    std::lock_guard lock(mutex);
    // An end of the stream may be the consequence of what another lane has found.
    if (no_memory || (error && (error->first != ErrorKind::peer_lost || what.kind == ErrorKind::peer_lost))) return;
    try {
      error.emplace(what.kind, what.what());
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  }
  void note_no_memory() noexcept {
    std::lock_guard lock(mutex);
    no_memory = true;
  }
};

}  // namespace

void ThreadsByShare::judge(double share) {
  if (share < kContended && now_ > 1) {
    now_ /= 2;
    wait_ = vain_ = std::min(2 * vain_ + 4, kMostVain);
  } else if (share < kIdle) {
    return;
  } else if (wait_ != 0) {
    --wait_;
  } else if (now_ < most_) {
    now_ = std::min(most_, 2 * now_);
  } else {
    vain_ = 0;
  }
}

LaneThreads::LaneThreads(size_t lanes, bool tls, unsigned asked)
    : most_(most_threads(lanes, tls, asked)),
      adapts_(asked == 0 && most_ > 1),
      by_share_(adapts_ ? std::clamp(available_cores() / 2, 1u, most_) : most_, most_),
      now_(by_share_.now()) {}

void LaneThreads::run(std::span<const size_t> lanes, unsigned threads, void (*body)(void*, size_t), void* context) {
  if (most_ == 1) {
    for (const size_t lane : lanes) body(context, lane);
    return;
  }
  FirstFailure failure;
  parallel_for(lanes.size(), 1, std::clamp(threads, 1u, most_), [&](size_t first, size_t last) {
    const unsigned at_once = working_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (unsigned seen = seen_.load(std::memory_order_relaxed);
         seen < at_once && !seen_.compare_exchange_weak(seen, at_once, std::memory_order_relaxed);) {
    }
    const uint64_t wall_ns = monotonic_ns(), cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (size_t i = first; i < last; ++i) {
      try {
        body(context, lanes[i]);
      } catch (const Error& error) {
        failure.note(error);
      } catch (...) {
        failure.note_no_memory();
      }
    }
    cpu_ns_.fetch_add(clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns, std::memory_order_relaxed);
    wall_ns_.fetch_add(monotonic_ns() - wall_ns, std::memory_order_relaxed);
    working_.fetch_sub(1, std::memory_order_relaxed);
  });
  if (failure.no_memory) throw std::bad_alloc();
  if (failure.error) fail(failure.error->first, failure.error->second);
}

bool LaneThreads::wait_briefly(int socket, short events) {
  if (working_.load(std::memory_order_relaxed) < 2) return false;
  const uint64_t began_ns = monotonic_ns();
  struct pollfd one = {socket, events, 0};
  const bool ready = ::poll(&one, 1, kBrieflyMs) > 0;
  wall_ns_.fetch_sub(monotonic_ns() - began_ns, std::memory_order_relaxed);  // run() adds more than that
  return ready;
}

void LaneThreads::end_message() {
  const uint64_t wall_ns = wall_ns_.load(std::memory_order_relaxed);
  if (!adapts_ || wall_ns < kJudgedNs) return;
  const double share = static_cast<double>(cpu_ns_.load(std::memory_order_relaxed)) / static_cast<double>(wall_ns);
  wall_ns_.store(0, std::memory_order_relaxed);
  cpu_ns_.store(0, std::memory_order_relaxed);
  by_share_.judge(share);
  now_.store(by_share_.now(), std::memory_order_relaxed);
}

uint32_t lanes_by_cores(bool tls, unsigned asked_threads) {
  if (!tls) return kLanesWithoutTls;
  if (asked_threads != 0) return std::clamp(asked_threads, kLanesWithoutTls, kMaxLanes);
  return std::clamp(available_cores(), kLanesWithoutTls, kMostLanesByCores);
}

}  // namespace geartrain
