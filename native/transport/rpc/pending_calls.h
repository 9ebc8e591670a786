// Pending calls over one connection: requests, and their answers, which come in any order.
//
// A thread that waits for an answer reads the connection itself, and passes on answers of other threads; there is no
// thread in between. Threads: any number. The other side answers with a message that has the request's tag.
//
// Forks: they stay the parent's. In a child whatever could wait throws hung_up, and the rest has no effect: another
// thread of the parent's may have held the mutex.
#pragma once

#include <unordered_map>

#include "base/condition_variable.h"
#include "transport/connection.h"

namespace geartrain {

class PendingCalls {
 public:
  // At most `max_open` requests wait for answers at a time.
  explicit PendingCalls(std::shared_ptr<Connection> connection, size_t max_open = 1024)
      : connection_(std::move(connection)), max_open_(max_open) {}

  // Sends the request, once there is room for it, and returns its tag.
  uint64_t start(uint32_t kind, Bytes header, std::span<const Bytes> buffers, Deadline deadline);
  // The answer. Throws timed_out (it may be waited for again), peer_lost, hung_up, argument (no such request).
  void wait(uint64_t tag, Message* answer, Deadline deadline);
  // From now on the answer is returned by next_detached(). Not while a thread waits for it.
  void detach(uint64_t tag);
  // Abandons the call: its answer is dropped when it comes. A thread that waits for it gets hung_up.
  void forget(uint64_t tag);
  // Nobody wants the answer, but the call goes on, and counts among the open ones until it is answered. Nothing where a
  // thread waits for it, or where it is detached.
  void drop(uint64_t tag);
  // Any answer to a detached request; its tag is the message's. Throws timed_out, peer_lost (for all of them).
  void next_detached(Message* answer, Deadline deadline);

  size_t open() const;
  Connection& connection() const { return *connection_; }
  const std::shared_ptr<Connection>& shared_connection() const { return connection_; }

 private:
  struct Question {
    bool detached = false;
    bool answered = false;
    bool forgotten = false;
    bool dropped = false;
    Message answer;
    ConditionVariable* waiter = nullptr;
  };
  template <typename Done>
  void read_until(std::unique_lock<std::mutex>& lock, ConditionVariable* waiter, Deadline deadline, Done&& done);
  void deliver(Message&& message);
  void wake_another();
  void make_place();

  const Lifetime life_{"connection", "connect again here"};
  const std::shared_ptr<Connection> connection_;
  const size_t max_open_;
  mutable std::mutex mutex_;  // of all below
  std::unordered_map<uint64_t, Question> questions_;
  std::deque<uint64_t> detached_answered_;
  std::deque<ConditionVariable*> waiters_;
  std::vector<ConditionVariable*> starting_;  // of threads that wait for a place among the open calls
  ConditionVariable detached_;  // of threads in next_detached, which need not read while no detached request is open
  size_t detached_open_ = 0;
  size_t unanswered_ = 0;
  uint64_t next_tag_ = 1;
  bool reading_ = false;
  bool failed_ = false;
  ErrorKind failed_kind_ = ErrorKind::peer_lost;
  std::string reason_;
};

}  // namespace geartrain
