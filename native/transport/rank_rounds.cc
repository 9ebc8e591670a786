#include "transport/rank_rounds.h"

#include "base/interruption.h"

namespace geartrain {
namespace {

// How long one peer is waited for before the others are looked after.
constexpr double kGlanceS = 0.25;

}  // namespace

RankRounds::RankRounds(uint32_t rank, uint32_t ranks, size_t inline_bytes)
    : rank_(rank), inline_bytes_(inline_bytes), connections_(ranks), received_(ranks), missing_(ranks - 1) {
  if (rank >= ranks) fail(ErrorKind::argument, "rank ", rank, " is none of ", ranks);
}

void RankRounds::add(uint32_t peer, std::shared_ptr<Connection> connection) {
  if (peer >= ranks() || peer == rank_ || connections_[peer] != nullptr || connection == nullptr) {
    fail(ErrorKind::argument, "rank ", peer, " is no other rank of ", ranks(), " or is connected already");
  }
  connections_[peer] = std::move(connection);
  --missing_;
}

Bytes RankRounds::content_of(const Message& message) {
  if (!message.header.empty() || message.buffers.empty()) return message.header;
  return message.buffers.front();
}

Connection& RankRounds::connection_of(uint32_t peer) const {
  if (peer >= ranks() || connections_[peer] == nullptr) fail(ErrorKind::argument, "rank ", peer, " is not connected");
  return *connections_[peer];
}

void RankRounds::all_to_all(uint64_t number, std::span<const Bytes> parts, std::span<Message> received,
                            Deadline deadline) {
  failure_.reset();
  if (parts.size() != ranks() || received.size() != ranks() || missing_ != 0) {
    fail(ErrorKind::argument, "a round of ", ranks(), " connected ranks has as many parts");
  }
  for (uint32_t distance = 1; distance < ranks(); ++distance) {
    const uint32_t peer = (rank_ + distance) % ranks();
    const PartFor message{peer, parts[peer]};
    send(number, std::span(&message, 1), deadline);
  }
  for (uint32_t distance = 1; distance < ranks(); ++distance) {
    const uint32_t peer = (rank_ + ranks() - distance) % ranks();
    receive_from(number, peer, &received[peer], deadline);
  }
}

void RankRounds::send_to(uint64_t number, const PartFor& message, Deadline deadline) {
  const bool small = message.bytes.size() <= inline_bytes_;
  const Bytes buffer = message.bytes;
  connection_of(message.peer)
      .send({number, 0, small ? buffer : Bytes{}, small ? std::span<const Bytes>{} : std::span(&buffer, 1)}, deadline);
  sent_bytes_ += message.bytes.size();
  ++sent_messages_;
}

void RankRounds::send(uint64_t number, std::span<const PartFor> messages, Deadline deadline) {
  failure_.reset();
  for (const PartFor& each : messages) {
    try {
      send_to(number, each, deadline);
    } catch (const Error& error) {
      note(each.peer, error.kind);
      throw;
    }
  }
}

std::optional<RankRounds::Failure> RankRounds::reason_told(uint32_t first) const {
  for (uint32_t distance = 0; distance < ranks(); ++distance) {
    const uint32_t peer = (first + distance) % ranks();
    if (connections_[peer] == nullptr) continue;
    Connection::Look found = connections_[peer]->look_for_end();
    if (found.unread && found.kind == kReason) return Failure{peer, Cause::told, std::move(found.header)};
  }
  return std::nullopt;
}

void RankRounds::note(uint32_t peer, ErrorKind thrown) {
  if (thrown == ErrorKind::peer_lost || thrown == ErrorKind::timed_out) {
    if (const std::optional<Failure> told = reason_told(peer)) fail_by(told->peer, told->cause, told->detail);
  }
  failure_ = {peer, Cause::error, ""};
}

void RankRounds::send_beside(uint64_t number, std::span<const PartFor> messages, Deadline deadline) {
  for (const PartFor& each : messages) send_to(number, each, deadline);
}

void RankRounds::receive(uint64_t number, std::span<PartFrom> messages, Deadline deadline) {
  failure_.reset();
  for (PartFrom& each : messages) {
    connection_of(each.peer);
    receive_from(number, each.peer, &each.message, deadline);
  }
}

void RankRounds::receive_from(uint64_t number, uint32_t peer, Message* message, Deadline deadline) {
  for (;;) {
    try {
      connections_[peer]->receive(message, deadline.sooner(kGlanceS));
      break;
    } catch (const Error& error) {
      if (error.kind != ErrorKind::timed_out) {
        note(peer, error.kind);
        throw;
      }
    }
    check_others(number, deadline.passed());  // one that is gone is an error now, not after this one's turn
    if (deadline.passed()) fail_by(peer, Cause::timed_out, "");
    Interruption::check();
  }
  if (message->kind == kReason) {
    const auto* const text = reinterpret_cast<const char*>(message->header.data());
    fail_by(peer, Cause::told, std::string(text, message->header.size()));
  }
  if (message->tag != number) {
    std::string detail = "is at its exchange " + std::to_string(message->tag) + ", this rank at ";
    fail_by(peer, Cause::refused, detail += std::to_string(number));
  }
  received_[peer] = number;
}

void RankRounds::check_others(uint64_t number, bool late) {
  for (uint32_t other = 0; other < ranks(); ++other) {
    if (connections_[other] == nullptr) continue;
    const Connection::Look found = connections_[other]->look_for_end();
    if (found.unread && found.kind == kReason) fail_by(other, Cause::told, found.header);
    if (found.lost && (late || (!found.unread && received_[other] < number))) fail_by(other, Cause::lost, "");
  }
}

void RankRounds::fail_by(uint32_t peer, Cause cause, const std::string& detail) {
  failure_ = {peer, cause, detail};
  const bool late = cause == Cause::timed_out;
  fail(late ? ErrorKind::timed_out : ErrorKind::peer_lost, "the round of the ranks failed by rank ", peer);
}

}  // namespace geartrain
