#include "collectives/redial.h"

#include "base/clock.h"
#include "transport/providers/at_once.h"

namespace geartrain {
namespace {

constexpr double kDialS = 1;
constexpr uint32_t kMostRedials = 32;  // at once

}  // namespace

void Redial::start() {
  if (started_.exchange(true)) return;  // stop() may wait for this loop, with the lock
  std::lock_guard lock(mutex_);
  if (stopped_) return;
  try {
    own_ = std::make_unique<EventLoop>("geartr. redial", [](const std::exception&) {});
  } catch (const std::exception&) {
    started_ = false;  // no more threads: with the next loss
    return;
  }
  own_->post([this] {
    const auto every_ns = static_cast<uint64_t>(options_.redial_s * 1e9);
    own_->on_time([this, every_ns, next_ns = monotonic_ns() + every_ns]() mutable -> uint64_t {
      if (const uint64_t now = monotonic_ns(); now < next_ns) return next_ns - now;
      if (!stopped_) dial_all();
      next_ns = monotonic_ns() + every_ns;
      return every_ns;
    });
  });
}

void Redial::stop() {
  stopped_ = true;
  std::lock_guard lock(mutex_);
  if (own_ != nullptr) own_->stop();
}

void Redial::dial_all() {
  std::vector<Wanted> wanted;
  if (!loop_.call([&] { wanted = events_.wanted(); })) return;
  const auto check = [this] {
    if (stopped_) fail(ErrorKind::hung_up, "the group was closed");
  };
  at_once(static_cast<uint32_t>(wanted.size()), kMostRedials, [&](uint32_t i) {
    if (stopped_) return;
    try {
      const std::string& place = options_.reducers[wanted[i].member - options_.world];
      auto dialled = std::make_shared<Dialled>(
          dial(place, options_.secret, wanted[i].join, loop_, options_.shm, Deadline::after(kDialS), check));
      loop_.post([this, member = wanted[i].member, dialled] { events_.reached(member, std::move(*dialled)); });
    } catch (const Error&) {
      // It is not there, or not yet.
    }
  });
}

}  // namespace geartrain
