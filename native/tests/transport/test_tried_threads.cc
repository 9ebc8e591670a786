// The search for a number of threads, on made-up machines: how fast so many threads are, what share of a core each has,
// and noise. It comes near the best number within some tens of messages, stays there, and follows a machine that
// changes.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>

#include "tests/support/check.h"
#include "transport/providers/tried_threads.h"

namespace geartrain {
namespace {

using OfThreads = std::function<double(unsigned)>;

constexpr double kPoor = 0.85;  // of the best, and less
constexpr int kSettled = 90, kMessages = 1200;

enum class Noise { one_sided, two_sided };  // disturbances that take time; and times that vary both ways

struct Machine {
  OfThreads speed, share;

  // Of numbers whose threads have their cores.
  double best(unsigned most) const {
    double found = 0;
    for (unsigned n = 1; n <= most; ++n) found = n == 1 || share(n) >= 0.8 ? std::max(found, speed(n)) : found;
    return found;
  }
};

OfThreads up_to(unsigned cores) {
  return [cores](unsigned n) { return static_cast<double>(std::min(n, cores)); };
}

OfThreads on_cores(unsigned cores) {
  return [cores](unsigned n) { return 0.98 * std::min(1.0, static_cast<double>(cores) / n); };
}

double alone(unsigned) {
  return 0.98;
}

// What messages had after the first kSettled: their speed together, of the best, how many were poor, and how many of
// those one after the other.
struct Found {
  double speed = 0, poor = 0;
  int longest = 0;
};

struct Search {
  TriedThreads threads;
  std::mt19937 random;
  double noise;
  Noise kind;
  unsigned most;

  Search(unsigned begin, unsigned most_, double noise_, Noise kind_, unsigned seed)
      : threads(begin, most_), random(seed), noise(noise_), kind(kind_), most(most_) {}

  // By the generator alone: the standard's distributions differ between libraries.
  double disturbance() {
    const double u = 2.0 * static_cast<double>(random()) / 4294967295.0 - 1;
    return 1 + noise * (kind == Noise::two_sided ? u : 2 * std::max(0.0, u));
  }

  Found messages(const Machine& machine, int n = kMessages) {
    Found found;
    const double best = machine.best(most);
    double took = 0, least = 0;
    int poor = 0, row = 0;
    for (int i = 0; i < n; ++i) {
      const unsigned now = threads.now();
      const double speed = machine.speed(now);
      threads.judge(40'000'000, static_cast<uint64_t>(2e7 / speed * disturbance()), machine.share(now));
      if (i < kSettled) continue;
      took += 1 / speed;
      least += 1 / best;
      row = speed < kPoor * best ? row + 1 : 0;
      poor += row != 0 ? 1 : 0;
      found.longest = std::max(found.longest, row);
    }
    found.speed = least / took;
    found.poor = static_cast<double>(poor) / (n - kSettled);
    return found;
  }
};

// The worst of runs from every beginning, with seeds of their own.
Found worst(unsigned most, double noise, Noise kind, const Machine& machine, const Machine* before = nullptr) {
  Found all{1, 0, 0};
  for (unsigned seed = 0; seed < (noise == 0 ? 1u : 40u); ++seed) {
    for (const unsigned begin : {1u, std::max(1u, most / 2), most}) {
      Search search(begin, most, noise, kind, seed * 31 + begin);
      if (before != nullptr) search.messages(*before);
      const Found found = search.messages(machine);
      all = {std::min(all.speed, found.speed), std::max(all.poor, found.poor), std::max(all.longest, found.longest)};
    }
  }
  return all;
}

void check_finds(const char* what, unsigned most, const Machine& machine, const Machine* before = nullptr) {
  struct Case {
    double noise;
    Noise kind;
    double speed, poor;
    int longest;
  };
  // Trials of neighbours, three messages each, are the part of the time that is lost where nothing is uncertain.
  for (const Case& one : {Case{0, Noise::two_sided, 0.95, 0.07, 12}, Case{0.1, Noise::one_sided, 0.94, 0.08, 30},
                          Case{0.1, Noise::two_sided, 0.94, 0.08, 30}, Case{0.2, Noise::one_sided, 0.93, 0.2, 100},
                          Case{0.2, Noise::two_sided, 0.92, 0.2, 100}, Case{0.3, Noise::one_sided, 0.90, 0.3, 200},
                          Case{0.3, Noise::two_sided, 0.88, 0.3, 200}}) {
    const Found found = worst(most, one.noise, one.kind, machine, before);
    const bool good = found.speed >= one.speed && found.poor <= one.poor && found.longest <= one.longest;
    if (!good) {
      std::fprintf(stderr, "%s, noise %g (%s): %.3f of the best, %.3f poor, %d in a row\n", what, one.noise,
                   one.kind == Noise::two_sided ? "both ways" : "one way", found.speed, found.poor, found.longest);
    }
    CHECK(good);
  }
}

TEST(machines_that_are_faster_with_threads_up_to_their_cores) {
  for (const unsigned cores : {4u, 8u, 16u}) check_finds("16 lanes", 16, {up_to(cores), alone});
  check_finds("six cores, eight lanes", 8, {up_to(6), alone});
  check_finds("three of four", 4, {up_to(3), on_cores(3)});
  for (const double power : {0.3, 0.5, 0.8}) {
    check_finds("less and less", 16, {[power](unsigned n) { return std::pow(n, power); }, alone});
  }
}

// GB/s of 10.5, 41.9 and 335 MB on 1, 2, 4 and 8 threads of a machine with 16 cores (docs/benchmarks/messages.md), and
// straight lines between.
TEST(what_was_measured_on_sixteen_cores) {
  for (const std::array<double, 4>& gb_s :
       {std::array{1.78, 2.08, 2.96, 2.28}, std::array{1.95, 3.10, 4.59, 5.61}, std::array{1.91, 2.83, 5.42, 6.65}}) {
    const auto speed = [&](unsigned n) {
      const unsigned at = n < 2 ? 0 : n < 4 ? 1 : n < 8 ? 2 : 3;
      const double from = 1u << at, more = at == 3 ? 0 : (n - from) / from;
      return at == 3 ? gb_s[3] : gb_s[at] + more * (gb_s[at + 1] - gb_s[at]);
    };
    check_finds("sixteen cores", 8, {speed, alone});
  }
}

TEST(machines_on_which_more_threads_are_slower) {
  check_finds("from three on", 8, {[](unsigned n) { return n <= 2 ? 1.0 * n : 2 - 0.15 * (n - 2); }, alone});
  check_finds("two cores of eight busy", 8, {[](unsigned n) { return n <= 6 ? 1.0 * n : 4.5; }, on_cores(6)});
  check_finds("two cores that both sides share", 2,
              {[](unsigned n) { return n == 1 ? 1.0 : 0.8; }, [](unsigned n) { return n == 1 ? 0.98 : 0.85; }});
  // Eight lanes on so many threads: three, five, six and seven are no better than the number below.
  check_finds("whole lanes", 8, {[](unsigned n) { return 8 / std::ceil(8.0 / n); }, alone});
}

TEST(a_machine_that_changes_in_the_middle) {
  const Machine two{up_to(2), on_cores(2)}, eight{up_to(8), on_cores(8)}, one{up_to(1), on_cores(1)};
  const Machine link{up_to(1), alone}, wider{up_to(6), alone}, half{up_to(4), alone};
  check_finds("cores become idle", 8, eight, &two);
  check_finds("all but one do", 8, eight, &one);
  check_finds("cores become busy", 8, two, &eight);
  check_finds("all but one do", 8, one, &eight);
  check_finds("a faster link", 8, wider, &link);
  check_finds("a slower link", 8, half, &wider);
}

TEST(no_more_threads_than_are_faster_and_none_that_wait_for_cores) {
  // One core; a link, or a peer, that one thread, or two, keep busy.
  const auto on_more_than = [](unsigned threads, unsigned most, const Machine& machine, unsigned begin) {
    Search search(begin, most, 0.3, Noise::one_sided, begin);
    search.messages(machine, 300);
    int more = 0;
    for (int i = 0; i < 3000; ++i) {
      search.messages(machine, 1);
      more += search.threads.now() > threads ? 1 : 0;
    }
    return more;
  };
  for (const unsigned begin : {1u, 2u, 8u}) {
    const int on_one_core = on_more_than(1, 8, {up_to(1), on_cores(1)}, begin);
    CHECK(on_one_core >= 3 * 5 && on_one_core <= 3000 / 10);  // tried now and then
  }
  for (const unsigned begin : {1u, 2u}) {
    const Machine shared{[](unsigned n) { return n == 1 ? 1.0 : 0.9; },
                         [](unsigned n) { return n == 1 ? 0.98 : 0.85; }};
    const int more = on_more_than(1, 2, shared, begin);
    CHECK(more >= 3 * 5 && more <= 3000 / 10);
  }
  for (const double noise : {0.0, 0.1}) {
    int on_two = 0;
    Search search(8, 8, noise, Noise::one_sided, 5);
    const Machine link{[](unsigned n) { return n == 1 ? 1 : 1.6; }, alone};
    search.messages(link, 300);
    for (int i = 0; i < 3000; ++i) {
      search.messages(link, 1);
      on_two += search.threads.now() == 2 ? 1 : 0;
    }
    CHECK(on_two >= (noise == 0 ? 2700 : 1000));
  }
}

TEST(threads_that_wait_for_cores_are_halved_at_once) {
  Search search(8, 8, 0.1, Noise::one_sided, 1);
  search.messages({up_to(8), on_cores(8)}, 300);
  const Machine busy{up_to(8), [](unsigned n) { return n > 1 ? 0.5 : 0.85; }};  // faster, at the cost of others
  search.messages(busy, 6 * 3);
  int more = 0;
  for (int i = 0; i < 600; ++i) {
    search.messages(busy, 1);
    more += search.threads.now() > 1 ? 1 : 0;
  }
  CHECK(more <= 60);
}

TEST(any_number_of_threads_is_one_that_there_may_be) {
  for (unsigned most = 1; most <= 16; ++most) {
    for (unsigned begin = 1; begin <= most; ++begin) {
      Search search(begin, most, 0.3, Noise::two_sided, begin);
      for (int i = 0; i < 300; ++i) {
        CHECK(search.threads.now() >= 1 && search.threads.now() <= most);
        search.threads.judge(i % 7 == 0 ? 0 : 1'000'000, i % 5 == 0 ? 0 : 1000, (i % 11) / 10.0);
      }
      CHECK(search.threads.now() <= most);
    }
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
