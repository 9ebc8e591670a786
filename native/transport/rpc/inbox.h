// Inbox: one wait for many peers, by threads that execute what they receive, without hand-offs.
//
// Any number of threads may wait for the next message; one of them, the leader, polls the peers, and takes what comes
// itself. While it works on that message no thread polls, so that a quick answer costs no switch between threads; when
// it is not back after kTakeover, another waiting thread takes its place. So a slow answer delays the others by a
// millisecond.
//
// At most `at_once` threads are away with a message that is younger than kLongS: work that needs one lock, as Python
// does, gets slower with every thread more that contends for it. A thread that is away for longer is blocked, or slow
// in any case, and no longer counts; nor does one that announces it (yield_slot).
//
// Order. A peer's next message is not taken before the receiver of the last one calls resume(): at once when order does
// not matter, else when it has queued the message, or is done with it.
//
// A connection in an inbox is received from here and nowhere else.
#pragma once

#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "base/condition_variable.h"
#include "transport/connection.h"

namespace geartrain {

class Inbox {
 public:
  struct Event {
    uint64_t id = 0;
    std::shared_ptr<Connection> connection;
    Message message;
    bool trusted = false;  // as it was added
    bool lost = false;     // the connection has ended, and was removed from the inbox; `reason` says why
    std::string reason;
    uint32_t standing_by = 0;  // threads that could take this one's place
  };

  explicit Inbox(double spin_us = 50.0, uint32_t at_once = 1);
  // Adds a connection for messages and its end; or only its end, when others receive from it. Ids are the caller's, and
  // so is what `trusted` means.
  void add(uint64_t id, std::shared_ptr<Connection> connection, bool trusted = false);
  void watch(uint64_t id, std::shared_ptr<Connection> connection);
  void remove(uint64_t id);
  // The last message of this connection has been handled.
  void resume(uint64_t id);
  // False at the deadline. Throws hung_up once closed.
  bool receive(Event* event, Deadline deadline);
  // This thread will be away for long with the message that it got last: it does not count as at work.
  void yield_slot();
  void close();

  static constexpr double kTakeoverS = 0.001;
  static constexpr double kLongS = 0.005;

 private:
  struct Entry {
    std::shared_ptr<Connection> connection;
    bool watched_only, trusted;
    bool queued;  // in ready_
    bool paused;  // until resume()
    bool muted;   // meanwhile the epoll reports each event of it once
  };
  void listen(uint64_t id, Entry& entry, bool muted);
  void insert(uint64_t id, std::shared_ptr<Connection> connection, bool watched_only, bool trusted);
  struct Away {
    std::thread::id thread;
    uint64_t since_ns;
  };
  bool stand_by(std::unique_lock<std::mutex>& lock, Deadline deadline);
  uint64_t may_lead_ns(bool rested, uint64_t now_ns) const;
  void come_back();
  bool lead(Event* event, Deadline deadline);
  bool take_ready(Event* event);
  bool look_around();
  void sleep(Deadline deadline);
  void mark_ready(uint64_t id);
  void wake_leader() const { ring_bell(bell_); }

  Lifetime life_{"inbox"};
  Descriptor epoll_, bell_;
  std::mutex mutex_;  // of all below
  // Of the waiting threads one has a timed wait, to take the leader's place; the others sleep until it has.
  ConditionVariable deputy_, reserve_;
  bool leading_ = false, has_deputy_ = false, sleeping_ = false, dormant_ = false;
  uint32_t standing_by_ = 0;
  uint64_t left_ns_ = 0;       // when a leader last left, with a message or to look for signals
  uint64_t delivered_ns_ = 0;  // when one last left with a message
  const uint32_t at_once_;
  std::vector<Away> away_;
  std::map<uint64_t, Entry> entries_;
  std::deque<uint64_t> ready_;  // may have something: polled in turns
  Patience patience_;
};

}  // namespace geartrain
