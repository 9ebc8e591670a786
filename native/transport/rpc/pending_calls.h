// Questions over one connection, and the answers to them, which come in any order.
//
// Who waits for an answer reads the connection itself, and passes on what belongs to others; there is no thread in
// between. Threads: any number. The other side answers with a message that has the question's tag.
#pragma once

#include <unordered_map>

#include "transport/connection.h"

namespace geartrain {

class PendingCalls {
 public:
  // At most `max_open` questions wait for answers at a time.
  explicit PendingCalls(std::shared_ptr<Connection> connection, size_t max_open = 1024)
      : connection_(std::move(connection)), max_open_(max_open) {}

  // Sends the question, once there is room for it, and returns its tag. The answer to a `loose` one is handed out by
  // next_loose().
  uint64_t start(uint32_t kind, Bytes header, std::span<const Bytes> buffers, bool loose, Deadline deadline);
  // The answer. Throws timed_out (it may be waited for again), peer_lost, hung_up, schema (no such question).
  void wait(uint64_t tag, Message* answer, Deadline deadline);
  // Whether wait() would not wait.
  bool ready(uint64_t tag) const;
  // From now on the answer is handed out by next_loose(). Not while somebody waits for it.
  void loosen(uint64_t tag);
  // Nobody will ask for the answer: it is dropped when it comes. Who waits for it now gets hung_up.
  void forget(uint64_t tag);
  // Any answer to a loose question; its tag is the message's. Throws timed_out, peer_lost (for all of them).
  void next_loose(Message* answer, Deadline deadline);

  // A message of that tag to which no answer is kept.
  void tell(uint64_t tag, uint32_t kind, Bytes header, Deadline deadline);
  size_t open() const;
  Connection& connection() const { return *connection_; }
  const std::shared_ptr<Connection>& shared_connection() const { return connection_; }

 private:
  struct Question {
    bool loose = false;
    bool answered = false;
    bool forgotten = false;
    Message answer;
    std::condition_variable* waiter = nullptr;
  };
  template <typename Done>
  void read_until(std::unique_lock<std::mutex>& lock, std::condition_variable* waiter, Deadline deadline, Done&& done);
  void deliver(Message&& message);
  void wake_another();

  const std::shared_ptr<Connection> connection_;
  const size_t max_open_;
  mutable std::mutex mutex_;  // of all below
  std::unordered_map<uint64_t, Question> questions_;
  std::deque<uint64_t> loose_answered_;
  std::deque<std::condition_variable*> waiters_;
  std::condition_variable loose_;  // of who waits in next_loose, and need not read while no loose question is open
  size_t loose_open_ = 0;
  size_t unanswered_ = 0;
  uint64_t next_tag_ = 1;
  bool reading_ = false;
  bool failed_ = false;
  ErrorKind failed_kind_ = ErrorKind::peer_lost;
  std::string reason_;
};

}  // namespace geartrain
