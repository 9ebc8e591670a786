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

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/acceptor.h"
#include "collectives/peer.h"
#include "collectives/ring_allreduce.h"
#include "collectives/sharded_allreduce.h"
#include "collectives/share_owner.h"
#include "collectives/work.h"

namespace geartrain {

struct GroupOptions {
  uint32_t rank = 0, world = 1;
  std::string name = "default";
  std::vector<std::string> reducers;  // host:port of each
  std::vector<double> shares;         // of the ranks, then of the reducers; none below zero, 1 in all. Empty: equal
  bool ring = false;                  // the ring instead of shares; then there are no reducers
  std::string secret;                 // of ranks and reducers; empty: a key of one's own in the address, for ranks
  std::string host = "127.0.0.1";     // to listen on
  std::vector<std::string> advertise;
  bool shm = true;  // between members of one host
  uint64_t max_window_bytes = uint64_t{16} << 20;
  uint64_t fixed_window_bytes = 0;  // 0: it adapts
};

struct GroupCounts {
  uint64_t operations = 0, elements = 0, array_bytes = 0;
  uint64_t sent_tcp = 0, received_tcp = 0, sent_shm = 0, received_shm = 0;  // of frames, headers and all
  uint64_t reduced_bytes = 0;                                               // as an owner
  uint64_t window_bytes = 0, least_delay_ns = 0;
  uint64_t links_tcp = 0, links_shm = 0, refused = 0;
};

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
