#include "transport/providers/lane_threads.h"

#include <poll.h>

#include <algorithm>

#include "base/errors.h"
#include "base/threads.h"
#include "transport/providers/at_once.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr uint32_t kLanesWithoutTls = 2;
constexpr uint32_t kMostLanesByCores = 8;
constexpr int kBrieflyMs = 1;

unsigned most_threads(size_t lanes, bool tls, unsigned asked) {
  if (!tls || lanes < 2) return 1;
  return std::min(static_cast<unsigned>(lanes), asked != 0 ? asked : std::max(1u, available_cores() / 2));
}

}  // namespace

LaneThreads::LaneThreads(size_t lanes, bool tls, unsigned asked)
    : most_(most_threads(lanes, tls, asked)), asked_(asked != 0), now_(most_) {}

void LaneThreads::run(std::span<const size_t> lanes, unsigned threads, void (*body)(void*, size_t), void* context) {
  threads = std::min({threads, most_, static_cast<unsigned>(lanes.size())});
  if (threads <= 1) {
    for (const size_t lane : lanes) body(context, lane);
    return;
  }
  FirstFailure failure;
  parallel_for(lanes.size(), 1, threads, [&](size_t first, size_t last) {
    const unsigned together = working_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (unsigned seen = seen_.load(std::memory_order_relaxed);
         seen < together && !seen_.compare_exchange_weak(seen, together, std::memory_order_relaxed);) {
    }
    for (size_t i = first; i < last; ++i) {
      try {
        body(context, lanes[i]);
      } catch (const Error& error) {
        failure.note(error);
      } catch (...) {
        failure.note_no_memory();
      }
    }
    working_.fetch_sub(1, std::memory_order_relaxed);
  });
  failure.check();
}

bool LaneThreads::wait_briefly(int socket, short events) {
  if (working_.load(std::memory_order_relaxed) < 2) return false;
  struct pollfd one = {socket, events, 0};
  return ::poll(&one, 1, kBrieflyMs) > 0;
}

void LaneThreads::begin_message(uint64_t bytes) {
  if (asked_) return;
  const uint64_t worth = std::clamp<uint64_t>(bytes / kBytesAThread, 1, most_);
  now_.store(static_cast<unsigned>(worth), std::memory_order_relaxed);
}

uint32_t lanes_by_cores(bool tls, unsigned asked_threads) {
  if (!tls) return kLanesWithoutTls;
  if (asked_threads != 0) return std::clamp(asked_threads, kLanesWithoutTls, kMaxLanes);
  return std::clamp(available_cores(), kLanesWithoutTls, kMostLanesByCores);
}

}  // namespace geartrain
