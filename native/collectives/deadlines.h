// Deadlines of a group's operations, and the ranks responsible: shortly before one passes, the owners are queried for
// the ranks they wait for (query, status), so that the fault can name those that are behind.
//
// On the loop.
#pragma once

#include <cstdint>
#include <map>
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
  std::vector<uint32_t> waited_for(const Work& work) const;
  Fault overdue(const Work& work);
  void tell_next(uint64_t operation, const std::vector<uint32_t>& ranks) const;
  void answer_around(uint64_t operation);

  static constexpr uint64_t kNever = ~uint64_t{0};
  const GroupOptions& options_;
  Membership& members_;
  Operations& operations_;
  uint64_t look_at_ns_ = kNever;  // when the next deadline may need an action
  uint64_t asked_ = 0;            // number of the operation that the owners were queried about, and one
  std::map<uint32_t, std::vector<uint32_t>> answers_;
  bool ring_asked_ = false;  // the next rank has queried this one
};

}  // namespace geartrain
