// One place to wait for many peers, and a thread that serves them all without handing anything to another.
//
// Any number of threads may ask for the next message; one of them waits for the peers, and takes what comes itself.
// While it works on that message nobody waits, so that a quick answer costs no switch between threads; when it is not
// back after kTakeover, another thread that asked takes its place. So a slow answer holds up the others for a
// millisecond.
//
// At most `at_once` threads are away with a message that is younger than kLongS: work that needs one lock, as Python
// does, gets slower by every thread more that wants it. Who is away for longer waits for something, or is slow in any
// case, and no longer counts; nor does who says so (step_aside).
//
// Order. A peer's next message is not taken before whoever got the last one calls resume(): at once when order does
// not matter, else when it has put the message where it belongs, or is done with it.
//
// A connection in an inbox is received from here and nowhere else.
#pragma once

#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "transport/connection.h"

namespace geartrain {

class Inbox {
 public:
  struct Event {
    uint64_t id = 0;
    std::shared_ptr<Connection> connection;
    Message message;
    bool lost = false;  // the connection is gone, and no longer in the inbox; `reason` says why
    std::string reason;
    uint32_t standing_by = 0;  // threads that could take this one's place
  };

  explicit Inbox(double spin_us = 30.0, uint32_t at_once = 1);
  // Messages and the end of a connection; or only its end, when others receive from it. Ids are the caller's.
  void add(uint64_t id, std::shared_ptr<Connection> connection);
  void watch(uint64_t id, std::shared_ptr<Connection> connection);
  void remove(uint64_t id);
  // The last message of this connection is taken care of.
  void resume(uint64_t id);
  // False at the deadline. Throws hung_up once closed.
  bool receive(Event* event, Deadline deadline);
  // This thread will be away for longer than usual with the message that it got last: it waits for somebody else.
  void step_aside();
  void close();

  static constexpr double kTakeoverS = 0.001;
  static constexpr double kLongS = 0.005;

 private:
  struct Entry {
    std::shared_ptr<Connection> connection;
    bool watched_only;
    bool queued;  // in ready_
    bool paused;  // until resume()
  };
  void insert(uint64_t id, std::shared_ptr<Connection> connection, bool watched_only);
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
  void wake_leader() const;

  const uint64_t forks_;
  Descriptor epoll_, bell_;
  std::mutex mutex_;  // of all below
  // Of those that stand by, one looks at the clock, to take the leader's place; the others sleep until it has.
  std::condition_variable deputy_, reserve_;
  bool leading_ = false, has_deputy_ = false, sleeping_ = false, dormant_ = false, closed_ = false;
  uint32_t standing_by_ = 0;
  uint64_t left_ns_ = 0;  // when a leader last left with a message
  const uint32_t at_once_;
  std::vector<Away> away_;
  std::map<uint64_t, Entry> entries_;
  std::deque<uint64_t> ready_;  // may have something: looked at in turns
  Patience patience_;
};

}  // namespace geartrain
