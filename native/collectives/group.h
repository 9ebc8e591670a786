// Group: ranks that reduce arrays together, one instance on every rank.
//
//   Group group(options);                                 // listens; group.address() goes to all other ranks
//   group.connect(addresses, Deadline::after(60));        // of all ranks, in their order
//   auto work = group.all_reduce(shape, in, out, 30);     // returns at once; the same calls in the same order
//   everywhere work->wait(...);
//
// A thread of its own, the loop, moves everything: the caller passes an address and a size, and may go on
// computing. Arrays stay as they are until the work is done. Any thread may call; the order of the calls is the order
// of the operations, which must be the same on all ranks.
//
// Where all ranks share memory, a caller that waits runs the loop in its thread's place (EventLoop::Turn) for as long
// as GroupOptions::spin_us says, and begins small operations itself: nobody is woken then. Faults, deadlines and the
// end are the loop's, whoever runs it.
//
// Failure. A member that dies, violates the protocol or disagrees ends the group, on every rank, with the same fault:
// the first rank to notice notifies all others, and the first fault counts. At its deadline an operation queries
// the owners for the ranks they wait for, and ends the group with the names of those that are behind. After that every
// operation, in flight or new, fails with that fault; arrays of unfinished operations hold partly old, partly new
// numbers, unless `in` and `out` are different. Connections are not restored: make a new group (a new epoch). Memory
// that runs out on the loop is such a fault too.
//
// The end. close() may be called by any number of threads, at once and beside every other call: operations in progress
// get a moment to complete and then fail, waits and connect() end, and afterwards all_reduce(), connect() and counts()
// throw hung_up. What remains are the name, the address and the fault. The destructor ends operations at once, without
// a word to the others but the end of its connections; no array is touched after it. A forked child may only destroy.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/lifetime.h"
#include "collectives/group_side.h"

namespace geartrain {

class Group {
 public:
  explicit Group(const GroupOptions& options);  // throws argument, os, untrusted
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& address() const { return members_.address(); }
  // Throws timed_out, not_viable, untrusted, with the members that are missing and why; hung_up after close().
  void connect(const std::vector<std::string>& addresses, Deadline deadline) { members_.connect(addresses, deadline); }

  // Never blocks. Throws argument for invalid shapes, hung_up after close().
  // `soon`: this thread waits for it next.
  std::shared_ptr<Work> all_reduce(const Shape& shape, const void* in, void* out, double timeout_s, bool soon = false);

  // Every other collective (protocol.h), among ranks that all own a share and no reducers. Of reduce_scatter `sends`
  // are what each rank gets the sum of, and `receives` is one, this rank's; of all_gather the other way round; of
  // all_to_all one for each rank both; of broadcast the same one both. A result is not written over what is still to be
  // sent: only this rank's own part may be in place. Never blocks. Throws as all_reduce().
  std::shared_ptr<Work> exchange(const Shape& shape, std::vector<Segment> sends, std::vector<Segment> receives,
                                 double timeout_s, bool soon = false);

  // Changes GroupOptions::spin_us. Throws hung_up after close().
  void spin(double spin_us);
  // Measures where the time goes from now on (GroupCounts::stages), or stops. Throws hung_up after close().
  void profile(bool on);
  GroupCounts counts();  // throws hung_up after close()
  // What has become of reducers since the last call, the oldest first (takeover.h); at most so many. Also after
  // close().
  std::vector<std::string> reducer_events(size_t most = ~size_t{0}) { return side_.reducer_events().take(most); }
  // The fault that ended the group; kind none while it lives.
  Fault fault() const { return members_.fault(); }
  std::string name_of(uint32_t member) const { return members_.name_of(member); }  // "rank 2", "reducer host:port"
  // Ends the group on all ranks, with that reason. Nothing after close().
  void abort(const std::string& reason);
  // Leaves the group: what other ranks still need of this one as an owner is sent first, within the deadline; and
  // within a second, where operations are in progress here. Of several calls the nearest deadline counts.
  void close(Deadline deadline);

 private:
  std::shared_ptr<Work> post(const std::shared_ptr<Work>& work, uint64_t bytes, bool soon);
  void on_loop(const std::function<void()>& act);
  void wait_while(const std::function<bool()>& waiting);
  void leave();

  const GroupOptions options_;
  Lifetime life_{"group"};
  // The loop's.
  GroupSide side_;
  Membership& members_ = side_.members();
  Operations& operations_ = side_.operations();
  Redial redial_;

  EventLoop loop_;  // the last: nothing of the above is used once it has stopped
};

}  // namespace geartrain
