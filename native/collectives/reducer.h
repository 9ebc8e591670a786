// Reducer: owns shares of arrays and contributes none. One process on a host without accelerators serves any number of
// groups at once; it needs a window of memory for every rank of a group, and not their arrays.
//
//   Reducer reducer({.host = "0.0.0.0", .port = 7000, .secret = secret});
//   ... reducer.address() is passed to the groups; they come and go by themselves
//
// A rank that leaves in the middle of an operation ends its group, here and on all other ranks, and no other group.
// Invalid input, unauthenticated peers and silent ones are refused and counted; memory that runs out ends the group
// that was served, and not the process. One thread of its own, and the listener's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/acceptor.h"

namespace geartrain {

struct ReducerOptions {
  std::string host = "127.0.0.1";  // anything but loopback needs a secret
  uint16_t port = 0;
  std::string secret;
  bool shm = true;
  uint64_t max_window_bytes = uint64_t{16} << 20;  // for each rank: bytes received from it and not yet reduced
  uint32_t max_groups = 1024;
};

struct ReducerCounts {
  uint64_t groups = 0, ranks = 0;  // now
  uint64_t groups_served = 0, groups_failed = 0, operations = 0;
  uint64_t bytes_received = 0, bytes_sent = 0, reduced_bytes = 0;
  uint64_t memory_bytes = 0;  // of chunks in use now
  uint64_t refused = 0;
};

class Reducer {
 public:
  explicit Reducer(const ReducerOptions& options);  // throws os, schema, untrusted
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
