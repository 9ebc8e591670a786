#include "collectives/deadlines.h"

#include <algorithm>
#include <set>
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
  // Shortly before the deadline, the owners are queried.
  if (left > work.ask_ns) {
    look_at_ns_ = now + left - work.ask_ns;
    return std::min(sleep, left - work.ask_ns);
  }
  if (asked_ != work.number + 1) {
    asked_ = work.number + 1;
    answers_.clear();
    for (const uint32_t owner : waited_for(work)) {
      if (owner != options_.rank) members_.send_control(owner, FrameKind::query, work.number);
    }
  }
  return std::min(sleep, left);
}

std::vector<uint32_t> OperationDeadlines::waited_for(const Work& work) const {
  return options_.ring ? std::vector<uint32_t>{members_.previous_rank()} : operations_.shares().incomplete(work.number);
}

// Ranks that are behind: owners that do not answer; else those that the owners wait for, and not all alike.
Fault OperationDeadlines::overdue(const Work& work) {
  std::set<uint32_t> silent, behind, all;
  for (const uint32_t owner : waited_for(work)) {
    std::vector<uint32_t> waited;
    uint64_t bytes, of;
    if (owner == options_.rank) {
      waited = operations_.owner().least_advanced(work.number, &bytes, &of);
    } else if (answers_.contains(owner)) {
      waited = answers_[owner];
    } else {
      silent.insert(owner);
      continue;
    }
    if (options_.ring && waited.empty()) waited = {members_.previous_rank()};
    (waited.size() + 1 >= options_.world && options_.world > 2 ? all : behind).insert(waited.begin(), waited.end());
  }
  std::set<uint32_t>& named = !silent.empty() ? silent : !behind.empty() ? behind : all;
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
  if (options_.ring) return answer_around(operation);
  uint64_t bytes, of;
  const auto ranks = operations_.owner().least_advanced(operation, &bytes, &of);
  peer.send_control(FrameKind::status, operation, 0, members_bytes(bytes, of, ranks));
  peer.kick();
}

void OperationDeadlines::took_status(const Peer& peer, uint64_t operation, std::span<const std::byte> payload) {
  uint64_t bytes, of;
  answers_[peer.member()] = members_from(payload, &bytes, &of);
  if (ring_asked_) tell_next(operation, answers_[peer.member()]);
}

void OperationDeadlines::tell_next(uint64_t operation, const std::vector<uint32_t>& ranks) const {
  members_.send_control(members_.next_rank(), FrameKind::status, operation, members_bytes(0, 0, ranks));
}

// Queries go against the ring's direction: each rank names the one before, until one is behind itself or does
// not answer. The last answer counts.
void OperationDeadlines::answer_around(uint64_t operation) {
  if (!operations_.ring().begun(operation)) return tell_next(operation, {options_.rank});
  if (!operations_.ring().waits(operation)) return tell_next(operation, {});
  tell_next(operation, {members_.previous_rank()});
  ring_asked_ = true;
  if (members_.previous_rank() != members_.next_rank()) {
    members_.send_control(members_.previous_rank(), FrameKind::query, operation);
  }
}

}  // namespace geartrain
