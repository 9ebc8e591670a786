// Reducer: owns shares of arrays and contributes none. One process on a host without accelerators serves any number of
// groups at once; it needs a window of memory for every rank of a group, and not their arrays.
//
//   Reducer reducer({.host = "0.0.0.0", .port = 7000, .secret = secret});
//   ... reducer.address() is passed to the groups; they come and go by themselves
//
// A rank that leaves in the middle of an operation ends its group, here and on all other ranks, and no other group.
// A group may list the address several times: it then has as many connections of each rank, a share for each, and with
// several threads each of them is served by another one (reducer_thread.h).
//
// Invalid input, unauthenticated peers and silent ones are refused and counted; memory that runs out ends the group
// that was served, and not the process. Threads of its own, and the listener's.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "collectives/reducer_options.h"

namespace geartrain {

class Reducer {
 public:
  explicit Reducer(const ReducerOptions& options);  // throws os, argument, untrusted
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  std::string address() const;  // host:port
  ReducerCounts counts();       // throws hung_up after close()
  // Accepts no new groups, waits for the present ones to end, up to the deadline, then notifies the rest that it stops.
  // Any number of threads, at once: the nearest deadline counts.
  void close(Deadline deadline);

 private:
  class Body;
  std::unique_ptr<Body> body_;
};

}  // namespace geartrain
