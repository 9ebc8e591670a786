// Rank rounds: all-to-all of small messages among ranks that are connected with each other, one message to every other
// rank and one from each of them. What the agreements of a batch over ranks are (geartrain/replay/distributed/).
//
// Messages carry the number of their round as tag. A rank that leaves the group says why in a message of another kind
// instead. Up to `inline_bytes` a message is sent as a header, which waits for nobody whose peer has received all
// rounds before; so every rank sends all of its messages before it receives the first.
//
// Threads: one at a time makes rounds; others may close the connections, which ends its waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/errors.h"
#include "transport/connection.h"

namespace geartrain {

class RankRounds {
 public:
  static constexpr uint32_t kReason = 1;  // kind of the message that tells why a rank leaves

  RankRounds(uint32_t rank, uint32_t ranks, size_t inline_bytes);

  void add(uint32_t peer, std::shared_ptr<Connection> connection);
  // Whether this rank is connected with all others, and messages of so many bytes may be sent.
  bool carries(size_t bytes) const { return missing_ == 0 && bytes <= inline_bytes_; }

  // The next round's number; exchanges of rows count as rounds as well.
  uint64_t begin() { return ++number_; }

  // Sends parts[i] to rank i, and receives one message of each. parts[rank] is not looked at, and received[rank] stays
  // as it is. Throws what Connection throws, with failure() set.
  void all_to_all(uint64_t number, std::span<const Bytes> parts, std::span<Message> received, Deadline deadline);
  // Its halves, with some of the ranks. Between them other rounds may be begun: a rank sends and receives its rounds
  // each in the order of their numbers, as all ranks do. Messages beyond `inline_bytes` wait for their peers.
  // `send_beside` is called by another thread than the one that makes rounds: what it throws sets no failure(), since a
  // rank that does not take its messages is found by those that are received.
  struct PartFor {
    uint32_t peer;
    Bytes bytes;
  };
  struct PartFrom {
    uint32_t peer;
    Message message;
  };
  void send(uint64_t number, std::span<const PartFor> messages, Deadline deadline);
  void send_beside(uint64_t number, std::span<const PartFor> messages, Deadline deadline);
  void receive(uint64_t number, std::span<PartFrom> messages, Deadline deadline);
  // What a rank has sent, of a message received; empty for none.
  static Bytes content_of(const Message& message);

  // Of the last round, where it threw: which peer it was and what of it. `error`: what the connection threw, unless a
  // rank has said why it leaves (`told`): that may be why another one is gone, or takes no messages.
  enum class Cause : uint8_t { error, lost, timed_out, told, refused };
  struct Failure {
    uint32_t peer;
    Cause cause;
    std::string detail;
  };
  const std::optional<Failure>& failure() const { return failure_; }
  // What a rank has said of why it leaves, as its last message that is not received yet: `first`'s, else another's. Any
  // thread that sends or receives.
  std::optional<Failure> reason_told(uint32_t first) const;

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return static_cast<uint32_t>(connections_.size()); }
  uint64_t sent_bytes() const { return sent_bytes_; }
  uint64_t sent_messages() const { return sent_messages_; }

 private:
  void receive_from(uint64_t number, uint32_t peer, Message* message, Deadline deadline);
  Connection& connection_of(uint32_t peer) const;
  void send_to(uint64_t number, const PartFor& message, Deadline deadline);
  // While another rank is waited for: throws where one is gone whose message of the round has not come, or where one
  // has said why it leaves; `late`: also where one is gone that has done its part.
  void check_others(uint64_t number, bool late);
  // Of what a connection threw: sets failure(), and throws the reason where a rank has told one.
  void note(uint32_t peer, ErrorKind thrown);
  [[noreturn]] void fail_by(uint32_t peer, Cause cause, const std::string& detail);

  const uint32_t rank_;
  const size_t inline_bytes_;
  std::vector<std::shared_ptr<Connection>> connections_;  // by rank; null: itself, or not connected yet
  std::vector<uint64_t> received_;                        // by rank: the number of its last round that has come
  uint32_t missing_;
  uint64_t number_ = 0;
  std::atomic<uint64_t> sent_bytes_ = 0, sent_messages_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace geartrain
