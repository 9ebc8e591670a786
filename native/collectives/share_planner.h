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
// Times, costs of other algorithms and numbers of reducers are Python's (tools/plan/allreduce.py).
// Pure functions; errors of kind `argument` for invalid rates. Any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace geartrain {

// The best shares of at least one worker and of reducers, whose links have these rates in bytes a second, each way at
// once, workers first. None below zero, their sum 1. A group of one owns everything itself.
std::vector<double> plan_shares(size_t workers, std::span<const double> rates);

// The same of equal links. A reducer (host:port) that stands there several times has one link for all of its places.
std::vector<double> shares_of_equal_links(size_t workers, std::span<const std::string> reducers);

}  // namespace geartrain
