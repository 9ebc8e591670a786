// Deadlines of a group's operations, and the ranks responsible.
//
// Shortly before a deadline passes, the members that are waited for are queried (query, status). Each answers with the
// members that it waits for itself; with itself, where its caller has not begun the operation; and with those that an
// earlier operation waits for, where it has not come to this one: a member that is held up is not to blame. The asker
// follows the answers, from member to member, to one that names itself or does not answer. In a ring, where a rank
// reaches its neighbours only, each rank asks the one before and passes on what it hears.
//
// On the loop.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "collectives/membership.h"
#include "collectives/operations.h"

namespace geartrain {

class OperationDeadlines {
 public:
  OperationDeadlines(const GroupOptions& options, Membership& members, Operations& operations)
      : options_(options), members_(members), operations_(operations) {}

  void began(const Work& work);
  // Ends the group when an operation is late. Returns the nanoseconds after which to be called again.
  uint64_t on_time();
  // Frames of these kinds.
  void took_query(Peer& peer, uint64_t operation);
  void took_status(const Peer& peer, uint64_t operation, std::span<const std::byte> payload);

 private:
  // What the answers say, as far as they have come.
  struct Blame {
    std::set<uint32_t> seen, silent, behind, some, all;
  };
  uint64_t oldest() const { return operations_.works().front()->number; }
  std::vector<uint32_t> waited_for(uint64_t operation) const;
  std::vector<uint32_t> held_up_by(uint64_t operation) const;
  void ask(uint32_t member, uint64_t operation);
  void follow(uint32_t member, Blame* blame) const;
  Fault overdue(const Work& work) const;
  void tell_next(uint64_t operation, const std::vector<uint32_t>& ranks) const;
  void answer_around(const Peer& peer, uint64_t operation);

  static constexpr uint64_t kNever = ~uint64_t{0};
  const GroupOptions& options_;
  Membership& members_;
  Operations& operations_;
  uint64_t look_at_ns_ = kNever;  // when the next deadline may need an action
  uint64_t asked_ = 0;            // number of the operation that members were queried about, and one
  std::set<uint32_t> queried_;
  std::map<uint32_t, std::vector<uint32_t>> answers_;
  bool ring_asked_ = false;  // the next rank has queried this one
};

}  // namespace geartrain
