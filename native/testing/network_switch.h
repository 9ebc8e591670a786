// Network switch in a process: frames of TAP devices, or of anything that preserves message boundaries, forwarded
// with a delay, losses, and links to the hosts with a rate and a bounded queue. For tests on kernels without
// netem; geartrain.tools.testing.cluster runs it in a child process and draws the hosts around it.
//
//   host i [the kernel's tbf] -- delay, loss --[downlink: rate j, queue]-- host j
//
// A frame that arrives at a downlink leaves it when the frames before it have, at the link's rate, and is dropped when
// that is more than `queue_s` away. A link that was idle passes `burst_bytes` at once, as tbf does: a sender that is
// late because the switch's processor was busy loses nothing. What a host sends is shaped where it is sent, by the
// host's own kernel, which signals a full queue to TCP instead of losing packets. Broadcast frames (as ARP's requests)
// are copied, and ARP is never lost: a lost request costs a second, which would measure the kernel.
//
// Addresses are given, not learned: host i's is 02:67:74:00:HH:LL with i in the last two bytes; frames to others go
// nowhere.
//
// Control, one line a command: "counters" answers with a line of JSON, the others with "ok": "unplug I" and "plug I"
// (nothing is forwarded from or to host I in between), "delay NANOSECONDS" (of frames that arrive from now on). The end
// of control ends the switch, also when its parent was killed.
#pragma once

#include <cstdint>
#include <vector>

namespace geartrain {

struct SwitchOptions {
  std::vector<int> ports;         // non-blocking descriptors: a read is one frame, a write too
  std::vector<double> rates;      // bytes a second to each host; 0 for no limit
  std::vector<uint32_t> sites;    // of each host; delay and loss are between sites
  double delay_s = 0;             // one way
  double loss = 0;                // of a frame, 0 to 1
  double queue_s = 0.05;          // longest wait in front of a downlink
  uint64_t burst_bytes = 70'000;  // what an idle link passes at once
  uint64_t seed = 1;
  int control = 0, answers = 1;  // descriptors
};

// Forwards until control ends. Throws Error of kind `schema` for options that make no sense, `os` when a port fails.
void run_switch(const SwitchOptions& options);

}  // namespace geartrain
