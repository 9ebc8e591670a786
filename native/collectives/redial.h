// Redial: a thread that dials reducers again that a group has lost, once a second, all at once: one that does not
// answer takes a second, and keeps no other waiting. It is there from the first loss on.
//
// Any thread, unless stated otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/event_loop.h"
#include "collectives/acceptor.h"
#include "collectives/group_options.h"

namespace geartrain {

// Pause before a lost reducer is dialled again: none, but after a return that did not last, which a broken path brings
// about: one that lets a handshake through and nothing larger, or that ends connections. Each such return costs ranks a
// loss, with silence even its time. The pause doubles from one to the next, up to kMost periods of dialling.
//
// A return that was worth it makes the next loss a first one again: results came of it, for kCarrying periods and
// kWorth times as long as the loss has cost. So a healthy reducer that is killed now and then is soon back, though it
// never stays for long, and a path that costs a silence each time still needs as long as one without operations.
class RedialPause {
 public:
  static constexpr uint64_t kMost = 32, kLasting = 30, kCarrying = 3;  // periods
  static constexpr uint64_t kWorth = 10;
  static constexpr uint32_t kMany = 3;  // returns that did not last, of which each was told

  explicit RedialPause(double every_s) : every_ns_(static_cast<uint64_t>(every_s * 1e9)) {}

  // This rank has reached it, or all have.
  void reached(uint64_t now_ns) {
    reached_ns_ = now_ns;
    there_ = true;
  }
  // How long it has to stay for the next loss to be a first one.
  uint64_t lasting_ns() const { return std::max(kLasting * every_ns_, 4 * pause_ns_); }
  bool lasts(uint64_t now_ns) const { return there_ && now_ns - reached_ns_ >= lasting_ns(); }
  // It is lost; since it was reached it has `carried` operations, and `cost_ns` were waited for it in vain. That none
  // of these returns lasted is counted where all ranks had reached it.
  void lost(uint64_t now_ns, bool was_back, bool carried = false, uint64_t cost_ns = 0) {
    const bool again = there_ && !lasts(now_ns);
    const bool worth = carried && now_ns - reached_ns_ >= cost_ns + std::max(kCarrying * every_ns_, kWorth * cost_ns);
    pause_ns_ = again && !worth ? std::min(std::max(2 * pause_ns_, 2 * every_ns_), kMost * every_ns_) : 0;
    in_a_row_ = again ? in_a_row_ + was_back : 0;
    until_ns_ = now_ns + pause_ns_;
    there_ = false;
  }
  bool over(uint64_t now_ns) const { return now_ns >= until_ns_; }
  double pause_s() const { return static_cast<double>(pause_ns_) / 1e9; }
  uint32_t in_a_row() const { return in_a_row_; }
  void settle() { in_a_row_ = 0; }
  uint64_t reached_ns() const { return reached_ns_; }

 private:
  const uint64_t every_ns_;
  uint64_t pause_ns_ = 0, reached_ns_ = 0, until_ns_ = 0;
  uint32_t in_a_row_ = 0;
  bool there_ = false;
};

class Redial {
 public:
  struct Wanted {
    uint32_t member;
    Join join;
  };
  // Both are called on the group's loop.
  struct Events {
    std::function<std::vector<Wanted>()> wanted;
    std::function<void(uint32_t member, Dialled dialled)> reached;
  };
  Redial(const GroupOptions& options, EventLoop& loop, Events events)
      : options_(options), loop_(loop), events_(std::move(events)) {}

  // On the group's loop, as often as wanted.
  void start();
  // Not on the group's loop, which still runs. It takes as long as dialling, a second at most.
  void stop();

 private:
  void dial_all();

  const GroupOptions& options_;
  EventLoop& loop_;
  const Events events_;
  std::mutex mutex_;
  std::atomic<bool> started_{false}, stopped_{false};
  std::unique_ptr<EventLoop> own_;
};

}  // namespace geartrain
