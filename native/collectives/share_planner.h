// Share planner: which share of an array each member of a group should own, and how long the all-reduce then takes.
//
// Every share has one owner, which receives it from all workers, sums, and returns the sum to all of them. N workers
// with links of b_i bytes a second, each way at once; M reducers with links of r_j; an array of K bytes. What a member
// moves, each way:
//
//   worker that owns the fraction x     K (1 + (N - 2) x)   sends the rest of its array, K (1 - x), and the sum of its
//                                                           share to N - 1 others; a group of one moves nothing
//   reducer that owns the fraction y    K N y
//
// The slowest member decides. No worker can take less than K / b_i, and all links full to the end give the other bound:
//
//   T = max(K / min b,  K (2 N - 2) / (sum b + (N - 2) / N sum r))
//
// T is reached: reducers are filled first, since they have nothing else to do, and workers own what is left, each in
// proportion to what its link can carry beyond K. Where links are equal and reducers are none, all workers own 1 / N:
// the ring's bytes. tests/collectives/test_share_planner.py holds this against a linear program.
//
// Only bytes are counted here: latency is hops times a one-way delay, for the caller to add (kDirectHops, *_hops).
// Pure functions; errors of kind `argument` for invalid clusters. Any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace geartrain {

// A cluster's links, in bytes a second, each way at once. At least one worker; all rates finite and above zero.
struct Links {
  std::span<const double> workers;
  std::span<const double> reducers;
};

struct SharesPlan {
  std::vector<double> shares;  // of workers, then of reducers: none below zero, their sum 1
  double seconds = 0;          // as shares_seconds() estimates
};

// Rates of equal links, of workers and then of reducers (host:port): an address that stands there several times has one
// link for all of its places.
std::vector<double> equal_rates(size_t workers, std::span<const std::string> reducers);

// The best shares. A group of one owns everything itself.
SharesPlan plan_shares(const Links& links, double bytes);

// Bytes that each member moves, each way, with these shares (workers first; as many as workers and reducers, none below
// zero, 1 in all but for rounding).
std::vector<double> moved_bytes(size_t workers, size_t reducers, std::span<const double> shares, double bytes);

// What those shares take: the slowest member's bytes over its rate.
double shares_seconds(const Links& links, std::span<const double> shares, double bytes);

// All shares on the reducers, in proportion to their rates. Needs at least one of them, except in a group of one.
SharesPlan plan_dedicated(const Links& links, double bytes);

// The ring: 2 (N - 1) steps of K / N, at the pace of the slowest link.
double ring_bytes(size_t workers, double bytes);
size_t ring_hops(size_t workers);

// Halving and doubling, the tree with the ring's bytes: 2 log2(N) steps. Where N is no power of two, the workers beyond
// the last one first give their whole array to a partner and get the result last: two more steps, and K more bytes each
// way through the partner, one way at a time.
double tree_bytes(size_t workers, double bytes);
double tree_seconds(size_t workers, double rate, double bytes);
size_t tree_hops(size_t workers);

// Every owner is one hop away, and so is the result.
constexpr size_t kDirectHops = 2;

// How many reducers of that rate the best shares, or dedicated ones, need to reach K / min b.
size_t reducers_needed(std::span<const double> workers, double reducer_rate);
size_t dedicated_reducers_needed(std::span<const double> workers, double reducer_rate);

}  // namespace geartrain
