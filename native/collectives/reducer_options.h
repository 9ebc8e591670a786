// Options and counters of a reducer.
#pragma once

#include <cstdint>
#include <string>

namespace geartrain {

struct ReducerOptions {
  std::string host = "127.0.0.1";  // anything but loopback needs a secret
  uint16_t port = 0;
  std::string secret;
  bool shm = true;
  uint64_t max_window_bytes = uint64_t{16} << 20;  // for each rank: bytes received from it and not yet reduced
  uint32_t max_groups = 1024;
  uint32_t threads = 1;  // that receive, reduce and send
};
constexpr uint32_t kMostReducerThreads = 64;

struct ReducerCounts {
  uint64_t groups = 0, ranks = 0;  // now
  uint64_t groups_served = 0, groups_failed = 0, operations = 0;
  uint64_t bytes_received = 0, bytes_sent = 0, reduced_bytes = 0;
  uint64_t memory_bytes = 0;  // of chunks in use now
  uint64_t refused = 0;
};

}  // namespace geartrain
