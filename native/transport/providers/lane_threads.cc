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
constexpr unsigned kSamples = 3;
constexpr double kContended = 0.8, kIdle = 0.92, kFaster = 1.15;
constexpr uint32_t kMostVain = 64;
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

void TriedThreads::judge(uint64_t bytes, uint64_t took_ns, double share) {
  if (bytes > 2 * bytes_ || bytes < bytes_ / 2) {  // no judgement: others than those of before
    bytes_ = bytes;
    samples_ = 0;
    now_ = kept_;
    kept_rate_ = 0;
  }
  if (samples_ == 0) rate_ = share_ = 0;
  rate_ = std::max(rate_, static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(took_ns, 1)));
  share_ = std::max(share_, share);
  if (++samples_ < kSamples) return;
  samples_ = 0;
  if (now_ > kept_ && share_ >= kContended && rate_ >= kFaster * kept_rate_) {
    kept_ = now_;
    kept_rate_ = rate_;
    wait_ = 1;  // on, in this direction; what noise accepted must not make trials frequent
    vain_ /= 2;
  } else if (now_ < kept_ && kept_rate_ < kFaster * rate_) {
    kept_ = now_;
    kept_rate_ = rate_;
    wait_longer();
  } else if (now_ != kept_) {
    now_ = kept_;
    up_ = !up_;
    wait_longer();
  } else if (share_ < kContended && now_ > 1) {
    kept_ = now_ /= 2;
    wait_longer();
  } else if (kept_rate_ = rate_; wait_ != 0) {
    --wait_;
  } else {
    const bool may_have_more = now_ < most_ && share_ >= kIdle;
    up_ = (up_ || now_ == 1) && may_have_more;
    now_ = up_ ? std::min(most_, 2 * now_) : std::max(1u, now_ / 2);
  }
}

void TriedThreads::wait_longer() {
  wait_ = vain_ = std::min(2 * vain_ + 6, kMostVain);
}

LaneThreads::LaneThreads(size_t lanes, bool tls, unsigned asked)
    : most_(most_threads(lanes, tls, asked)),
      adapts_(asked == 0 && most_ > 1),
      tried_(adapts_ ? std::clamp(available_cores() / 2, 1u, most_) : most_, most_),
      now_(tried_.now()) {}

void LaneThreads::run(std::span<const size_t> lanes, unsigned threads, void (*body)(void*, size_t), void* context) {
  threads = std::min({threads, most_, static_cast<unsigned>(lanes.size())});
  if (threads <= 1) {  // without a look at clocks: there are hundreds of rounds in a message
    for (const size_t lane : lanes) body(context, lane);
    return;
  }
  FirstFailure failure;
  parallel_for(lanes.size(), 1, threads, [&](size_t first, size_t last) {
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

void LaneThreads::begin_message() {
  if (!adapts_) return;
  wall_ns_.store(0, std::memory_order_relaxed);
  cpu_ns_.store(0, std::memory_order_relaxed);
  began_ns_ = monotonic_ns();
}

void LaneThreads::end_message(uint64_t bytes) {
  if (!adapts_) return;
  const uint64_t wall_ns = wall_ns_.load(std::memory_order_relaxed), cpu_ns = cpu_ns_.load(std::memory_order_relaxed);
  const double share = wall_ns == 0 ? 1.0 : static_cast<double>(cpu_ns) / static_cast<double>(wall_ns);
  tried_.judge(bytes, monotonic_ns() - began_ns_, share);
  now_.store(tried_.now(), std::memory_order_relaxed);
}

uint32_t lanes_by_cores(bool tls, unsigned asked_threads) {
  if (!tls) return kLanesWithoutTls;
  if (asked_threads != 0) return std::clamp(asked_threads, kLanesWithoutTls, kMaxLanes);
  return std::clamp(available_cores(), kLanesWithoutTls, kMostLanesByCores);
}

}  // namespace geartrain
