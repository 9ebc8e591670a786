#include "transport/providers/lane_threads.h"

#include <poll.h>

#include <algorithm>
#include <bit>

#include "base/clock.h"
#include "base/errors.h"
#include "base/threads.h"
#include "transport/providers/at_once.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr uint32_t kLanesWithoutTls = 2;
constexpr uint32_t kMostLanesByCores = 8;
constexpr int kBrieflyMs = 1;

size_t kind_of(uint64_t bytes) {
  return static_cast<size_t>(std::bit_width(std::max<uint64_t>(bytes, 1))) - 1;
}

unsigned most_threads(size_t lanes, bool tls, unsigned asked) {
  if (!tls || lanes < 2) return 1;
  return std::min(static_cast<unsigned>(lanes), asked != 0 ? asked : available_cores());
}

}  // namespace

LaneThreads::LaneThreads(size_t lanes, bool tls, unsigned asked)
    : most_(most_threads(lanes, tls, asked)),
      adapts_(asked == 0 && most_ > 1),
      now_(adapts_ ? std::clamp(available_cores() / 2, 1u, most_) : most_) {}

void LaneThreads::run(std::span<const size_t> lanes, unsigned threads, void (*body)(void*, size_t), void* context) {
  threads = std::min({threads, most_, static_cast<unsigned>(lanes.size())});
  if (threads <= 1) {  // without a look at clocks: there are hundreds of rounds in a message
    for (const size_t lane : lanes) body(context, lane);
    return;
  }
  FirstFailure failure;
  parallel_for(lanes.size(), 1, threads, [&](size_t first, size_t last) {
    const unsigned together = working_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (unsigned seen = seen_.load(std::memory_order_relaxed);
         seen < together && !seen_.compare_exchange_weak(seen, together, std::memory_order_relaxed);) {
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
  failure.check();
}

bool LaneThreads::wait_briefly(int socket, short events) {
  if (working_.load(std::memory_order_relaxed) < 2) return false;
  const uint64_t began_ns = monotonic_ns();
  struct pollfd one = {socket, events, 0};
  const bool ready = ::poll(&one, 1, kBrieflyMs) > 0;
  wall_ns_.fetch_sub(monotonic_ns() - began_ns, std::memory_order_relaxed);  // run() adds more than that
  return ready;
}

void LaneThreads::begin_message(uint64_t bytes) {
  if (!adapts_) return;
  auto& tried = tried_[kind_of(bytes)];
  if (tried == nullptr) tried = std::make_unique<TriedThreads>(now(), most_);
  now_.store(tried->now(), std::memory_order_relaxed);
  wall_ns_.store(0, std::memory_order_relaxed);
  cpu_ns_.store(0, std::memory_order_relaxed);
  began_ns_ = monotonic_ns();
}

void LaneThreads::end_message(uint64_t bytes) {
  if (!adapts_) return;
  const uint64_t wall_ns = wall_ns_.load(std::memory_order_relaxed), cpu_ns = cpu_ns_.load(std::memory_order_relaxed);
  const double share = wall_ns == 0 ? 1.0 : static_cast<double>(cpu_ns) / static_cast<double>(wall_ns);
  TriedThreads& tried = *tried_[kind_of(bytes)];
  tried.judge(bytes, monotonic_ns() - began_ns_, share);
  now_.store(tried.now(), std::memory_order_relaxed);
}

uint32_t lanes_by_cores(bool tls, unsigned asked_threads) {
  if (!tls) return kLanesWithoutTls;
  if (asked_threads != 0) return std::clamp(asked_threads, kLanesWithoutTls, kMaxLanes);
  return std::clamp(available_cores(), kLanesWithoutTls, kMostLanesByCores);
}

}  // namespace geartrain
