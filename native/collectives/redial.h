// Redial: a thread that dials reducers again that a group has lost, once a second, all at once: one that does not
// answer takes a second, and keeps no other waiting. It is there from the first loss on.
//
// Any thread, unless stated otherwise.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/event_loop.h"
#include "collectives/acceptor.h"
#include "collectives/group_options.h"

namespace geartrain {

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
