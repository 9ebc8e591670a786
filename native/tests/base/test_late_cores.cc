// Polls and sleeps beside peers and beside others, on made-up machines.

#include "base/late_cores.h"

#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr uint64_t kUs = 1'000, kMs = 1'000'000, kS = 1'000'000'000;

// A core: for how long a poll is away, of how many messages that come meanwhile, and how long a sleep lasts. A message
// takes 5 us of work.
struct Machine {
  uint64_t away_ns;
  uint32_t messages;
  uint64_t slept_ns;
};

// A thread that waits for messages until then, on such a machine. The share of the time in which it polled.
double share_polled(LateCores& cores, uint64_t& now_ns, uint64_t until_ns, const Machine& machine) {
  const uint64_t began_ns = now_ns;
  uint64_t polled_ns = 0;
  while (now_ns < until_ns) {
    const uint64_t from_ns = now_ns;
    const bool polls = cores.polls(now_ns);
    if (polls) {
      now_ns += machine.away_ns;
      if (machine.away_ns >= LateCores::kLateNs) cores.late(now_ns, machine.away_ns);
      if (cores.counts()) cores.waited(machine.away_ns);
      for (uint32_t i = 1; i < machine.messages; ++i) {
        if (cores.counts()) cores.waited(0);
        now_ns += 5 * kUs;
      }
    } else {
      now_ns += machine.slept_ns;
      cores.waited(machine.slept_ns);
    }
    now_ns += 5 * kUs;
    if (polls) polled_ns += now_ns - from_ns;
  }
  return static_cast<double>(polled_ns) / static_cast<double>(now_ns - began_ns);
}

constexpr Machine kPeers{1'500 * kUs, 16, 30 * kUs};       // 16 of the 64 clients of one server
constexpr Machine kPeersAhead{1'500 * kUs, 16, 10 * kUs};  // that get ahead of the others if they sleep
constexpr Machine kAlone{10 * kUs, 1, 40 * kUs};

TEST(peers_that_share_the_core_are_polled_for) {
  for (const Machine& peers : {kPeers, kPeersAhead}) {
    LateCores cores;
    uint64_t now_ns = kS;
    CHECK(share_polled(cores, now_ns, 5 * kS, peers) > 0.9);
  }
}

TEST(beside_others_that_compute_hardly_anything_is_polled) {
  for (const Machine& others : {Machine{1'400 * kUs, 1, 15 * kUs}, Machine{3 * kMs, 1, 15 * kUs},
                                Machine{6 * kMs, 64, 8 * kUs}, Machine{12 * kMs, 16, 100 * kUs}}) {
    LateCores cores;
    uint64_t now_ns = kS;
    CHECK(share_polled(cores, now_ns, 5 * kS, others) < 0.06);
  }
}

TEST(others_that_come_to_peers_are_noticed_and_so_is_that_they_are_gone) {
  LateCores cores;
  uint64_t now_ns = kS;
  CHECK(share_polled(cores, now_ns, 5 * kS, kPeers) > 0.9);
  CHECK(share_polled(cores, now_ns, 10 * kS, {3 * kMs, 1, 15 * kUs}) < 0.1);
  CHECK(share_polled(cores, now_ns, 15 * kS, kPeers) > 0.9);
  CHECK(share_polled(cores, now_ns, 20 * kS, {6 * kMs, 16, 15 * kUs}) < 0.1);
  CHECK(share_polled(cores, now_ns, 25 * kS, kAlone) > 0.9);
  CHECK(!cores.counts());
  CHECK_EQ(share_polled(cores, now_ns, 26 * kS, kAlone), 1.0);
}

TEST(a_thread_that_seldom_waits_sleeps_after_a_late_core) {
  LateCores cores;
  uint64_t now_ns = kS;
  CHECK(cores.polls(now_ns));
  cores.late(now_ns, 2 * kMs);
  CHECK(!cores.polls(now_ns + 59 * kMs));
  CHECK(cores.polls(now_ns += 60 * kMs));  // none of its waits is known
  cores.late(now_ns, 2 * kMs);
  CHECK(cores.polls(now_ns));
  cores.late(now_ns += kMs, kMs);
  CHECK(!cores.polls(now_ns + 89 * kMs));
  CHECK(cores.polls(now_ns + 90 * kMs));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
