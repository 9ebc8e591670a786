#include "collectives/deadlines.h"

#include <algorithm>
#include <string>

#include "base/clock.h"

namespace geartrain {

void OperationDeadlines::began(const Work& work) {
  const uint64_t left = work.deadline.left_ns();
  look_at_ns_ = std::min(look_at_ns_, monotonic_ns() + left - std::min(left, work.ask_ns));
}

uint64_t OperationDeadlines::on_time() {
  const uint64_t sleep = members_.due();
  if (members_.over() || operations_.works().empty()) return sleep;
  const uint64_t now = monotonic_ns();
  if (now < look_at_ns_) return std::min(sleep, look_at_ns_ - now);
  const auto soonest = std::min_element(
      operations_.works().begin(), operations_.works().end(),
      [](const auto& one, const auto& other) { return one->deadline.left_ns() < other->deadline.left_ns(); });
  const Work& work = **soonest;
  const uint64_t left = work.deadline.left_ns();
  if (left == 0) {
    members_.end(overdue(work));
    return sleep;
  }
  // Shortly before the deadline, the members that are waited for are queried. The oldest operation tells why: later
  // ones wait for it.
  if (left > work.ask_ns) {
    look_at_ns_ = now + left - work.ask_ns;
    return std::min(sleep, left - work.ask_ns);
  }
  if (asked_ != oldest() + 1) {
    asked_ = oldest() + 1;
    queried_.clear();
    answers_.clear();
    for (const uint32_t member : waited_for(oldest())) ask(member, oldest());
  }
  return std::min(sleep, left);
}

void OperationDeadlines::ask(uint32_t member, uint64_t operation) {
  if (member == options_.rank || member >= members_.size() || members_.peer(member) == nullptr) return;
  if (queried_.insert(member).second) members_.send_control(member, FrameKind::query, operation);
}

// Members that an operation of this rank waits for.
std::vector<uint32_t> OperationDeadlines::waited_for(uint64_t operation) const {
  if (!options_.ring) return operations_.waited_for(operation);
  return {operations_.ring().waits_for_next(operation) ? members_.next_rank() : members_.previous_rank()};
}

// The answer to a query, where all ranks are connected: what this member waits for, as an owner and as a rank.
std::vector<uint32_t> OperationDeadlines::held_up_by(uint64_t operation) const {
  const uint32_t self = options_.rank;
  uint64_t bytes, of;
  std::vector<uint32_t> ranks;
  if (options_.shares[self] > 0) ranks = operations_.owner().least_advanced(operation, &bytes, &of);
  const auto& works = operations_.works();
  const bool waiting = !works.empty() && oldest() <= operation;
  if (operation >= operations_.next_number()) {
    if (!waiting) return {self};  // its caller is late
    std::erase(ranks, self);
  }
  if (ranks.empty() && waiting) {
    ranks = waited_for(oldest());
    std::erase(ranks, self);
  }
  return ranks;
}

void OperationDeadlines::follow(uint32_t member, Blame* blame) const {
  if (!blame->seen.insert(member).second) return;
  std::vector<uint32_t> waited;
  if (member == options_.rank) {
    uint64_t bytes, of;
    waited = operations_.owner().least_advanced(oldest(), &bytes, &of);
  } else if (const auto answer = answers_.find(member); answer != answers_.end()) {
    waited = answer->second;
  } else {
    blame->silent.insert(member);
    return;
  }
  if (options_.ring && waited.empty()) waited = {member};
  (waited.size() + 1 >= options_.world && options_.world > 2 ? blame->all : blame->some)
      .insert(waited.begin(), waited.end());
  for (const uint32_t next : waited) {
    if (next == member && member != options_.rank) blame->behind.insert(member);
    if (next != options_.rank && queried_.contains(next)) follow(next, blame);
  }
}

// Members that are behind: those that do not answer; else those that say so themselves; else those that are waited for,
// and not all alike.
Fault OperationDeadlines::overdue(const Work& work) const {
  Blame blame;
  for (const uint32_t member : waited_for(oldest())) follow(member, &blame);
  std::set<uint32_t>& named = !blame.silent.empty()   ? blame.silent
                              : !blame.behind.empty() ? blame.behind
                              : !blame.some.empty()   ? blame.some
                                                      : blame.all;
  if (named.size() > 1) named.erase(options_.rank);
  std::vector<uint32_t> ranks;
  std::string reducers;
  for (const uint32_t member : named) {
    if (member < options_.world) ranks.push_back(member);
    if (member >= options_.world) reducers += (reducers.empty() ? "" : ", ") + members_.name_of(member);
  }
  std::string text = "operation " + std::to_string(work.number) + " (" + work.shape.text() + ") was not over in time";
  if (!ranks.empty()) text += ", waiting for rank(s) " + ranks_text(ranks);
  if (!reducers.empty()) text += (ranks.empty() ? ", waiting for " : " and ") + reducers;
  text += " [seen by rank " + std::to_string(options_.rank) + "]";
  return {FaultKind::timed_out, text, {named.begin(), named.end()}};
}

void OperationDeadlines::took_query(Peer& peer, uint64_t operation) {
  if (options_.ring) return answer_around(peer, operation);
  members_.send_control(peer.member(), FrameKind::status, operation, 0, members_bytes(0, 0, held_up_by(operation)));
}

void OperationDeadlines::took_status(const Peer& peer, uint64_t operation, std::span<const std::byte> payload) {
  uint64_t bytes, of;
  const std::vector<uint32_t>& ranks = answers_[peer.member()] = members_from(payload, &bytes, &of);
  if (options_.ring) {
    if (ring_asked_) tell_next(operation, ranks);
  } else if (asked_ == operation + 1) {
    for (const uint32_t rank : ranks) ask(rank, operation);
  }
}

void OperationDeadlines::tell_next(uint64_t operation, const std::vector<uint32_t>& ranks) const {
  members_.send_control(members_.next_rank(), FrameKind::status, operation, 0, members_bytes(0, 0, ranks));
}

// Queries go against the ring's direction: each rank names the one before, until one is behind itself or does
// not answer. The last answer counts. They are about the oldest operation that is not over, wherever they come to: a
// rank that waits in an earlier one than the asker is held up, and not behind.
void OperationDeadlines::answer_around(const Peer& peer, uint64_t operation) {
  const bool begun = operations_.ring().begun(operation);
  if (peer.member() != members_.next_rank()) {  // it has more for this rank, which does not take it
    return members_.send_control(peer.member(), FrameKind::status, operation, 0,
                                 members_bytes(0, 0, begun ? std::vector<uint32_t>{} : std::vector{options_.rank}));
  }
  if (operations_.works().empty() || oldest() > operation) {
    return tell_next(operation, begun ? std::vector<uint32_t>{} : std::vector{options_.rank});
  }
  const uint32_t waited = waited_for(oldest()).front();
  tell_next(operation, {waited});
  if (waited == peer.member()) return;
  ring_asked_ = true;
  members_.send_control(waited, FrameKind::query, oldest());
}

}  // namespace geartrain
