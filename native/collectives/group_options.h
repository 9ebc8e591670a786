// Options and counters of a group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/stage_clock.h"

namespace geartrain {

struct GroupOptions {
  uint32_t rank = 0, world = 1;
  std::string name = "default";
  std::vector<std::string> reducers;  // host:port of each
  std::vector<double> shares;         // of the ranks, then of the reducers; none below zero, their sum 1. Empty: equal
  bool outlives_reducers = false;     // the group goes on without a reducer that is lost; ranks reduce its share
  bool ring = false;                  // the ring instead of shares; then there are no reducers
  std::string secret;                 // of ranks and reducers; empty: a key in the address, for ranks
  std::string host = "127.0.0.1";     // to listen on
  std::vector<std::string> advertise;
  double redial_s = 1;  // how often a lost reducer is dialled again
  double reducer_silence_s =
      3;                     // outlives_reducers: one that is waited for is given up when it has said nothing so long
  bool shm = true;           // between members of one host
  bool cross_memory = true;  // there: memory is read from the process that it belongs to, where that works
  // Of an array that is reduced whose numbers are read so, and not sent through rings. Not given: where many ranks
  // share each core, which change turns less often by that (Operations).
  std::optional<uint64_t> least_exposed_bytes;
  uint64_t max_window_bytes = uint64_t{16} << 20;
  uint64_t fixed_window_bytes = 0;  // 0: it adapts
  // How long who waits polls the rings of ranks that are all on one host, before it sleeps (EventLoop::spin). Below 0:
  // some 50 us, unless others need the cores.
  double spin_us = -1;

  // How far any rank may run ahead of its results: the same on all ranks of a group that outlives reducers.
  uint64_t most_window_bytes() const { return fixed_window_bytes != 0 ? fixed_window_bytes : max_window_bytes; }
};

struct GroupCounts {
  uint64_t operations = 0, elements = 0, array_bytes = 0;
  uint64_t by_callers = 0;  // operations that ended on a caller's thread
  uint64_t sent_tcp = 0, received_tcp = 0, sent_shm = 0, received_shm = 0;  // of frames, headers and all
  uint64_t reduced_bytes = 0;                                               // as an owner
  uint64_t window_bytes = 0, least_delay_ns = 0;
  uint64_t links_tcp = 0, links_shm = 0, refused = 0;
  uint64_t lost_reducers = 0, taken_over_bytes = 0;  // that the group goes on without, and of what ranks did for them
  uint64_t reducer_losses = 0, reducer_returns = 0;  // so far
  uint64_t read_bytes = 0;                           // out of other processes' memory: inputs as an owner, and results
  uint64_t read_operations = 0;                      // reductions whose inputs are read
  uint64_t read_denied = 0;  // links whose peer's memory could be read, until the kernel did not allow it any more
  StageTimes stages;         // since Group::profile(true)
};

}  // namespace geartrain
