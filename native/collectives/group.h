// A group of ranks that reduce arrays together: one of these on every rank.
//
//   Group group(options);                                 // listens; group.address() goes to all other ranks
//   group.connect(addresses, Deadline::after(60));        // everybody's, in the order of the ranks
//   auto work = group.all_reduce(shape, in, out, 30);     // returns at once; the same calls in the same order
//   everywhere work->wait(...);
//
// A thread of its own, the loop, moves everything: the caller only hands over an address and a size, and may go on
// computing. Arrays stay as they are until the work is done. Any thread may call; the order of the calls is the order
// of the operations, which must be the same on all ranks.
//
// Failure. A member that dies, breaks the rules or disagrees ends the group, on every rank, with the same words:
// whoever notices first tells all others, and the first word counts. An operation that is not over at its deadline asks
// the owners what they wait for, and ends the group with the names of those who are behind. After that every operation,
// under way or new, fails with that fault; arrays of unfinished operations hold partly old, partly new numbers, unless
// `in` and `out` are different. Connections cannot be mended: make a new group (a new epoch).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/group_options.h"
#include "collectives/work.h"

namespace geartrain {

class Group {
 public:
  explicit Group(const GroupOptions& options);  // throws schema, os, untrusted
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& address() const;
  // Throws timed_out, not_viable, untrusted, with the members that are missing and why.
  void connect(const std::vector<std::string>& addresses, Deadline deadline);

  // Never waits. Throws schema for what no group can do, hung_up after close().
  std::shared_ptr<Work> all_reduce(const Shape& shape, const void* in, void* out, double timeout_s);

  GroupCounts counts();
  // The fault that ended the group; kind none while it lives.
  Fault fault() const;
  std::string name_of(uint32_t member) const;  // "rank 2", "reducer host:port"
  // How many operations are complete on all ranks, from the first one on: what they left is not needed any more.
  // Behind by an operation or two. Not known to a ring.
  uint32_t settled() const;
  // Ends it on all ranks, with that reason.
  void abort(const std::string& reason);
  // Says goodbye: what other ranks still need of this one as an owner is sent first, within the deadline.
  void close(Deadline deadline);

 private:
  class Body;
  std::unique_ptr<Body> body_;
};

}  // namespace geartrain
