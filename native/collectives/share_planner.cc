#include "collectives/share_planner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/errors.h"

namespace geartrain {
namespace {

// Tolerance of the shares' sum.
constexpr double kRounding = 1e-6;
// Less than this is rounding too, and makes no member an owner.
constexpr double kNoShare = 1e-9;

double sum(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

void check_rates(std::span<const double> rates, const char* whose) {
  for (size_t i = 0; i < rates.size(); ++i) {
    if (!std::isfinite(rates[i]) || rates[i] <= 0) {
      fail(ErrorKind::argument, "rates are bytes a second, finite and above zero; that of ", whose, " ", i, " is ",
           rates[i]);
    }
  }
}

void check(const Links& links, double bytes) {
  if (links.workers.empty()) fail(ErrorKind::argument, "a group has at least one worker, found none");
  if (!std::isfinite(bytes) || bytes < 0) {
    fail(ErrorKind::argument, "an array has a finite number of bytes, not below zero; found ", bytes);
  }
  check_rates(links.workers, "worker");
  check_rates(links.reducers, "reducer");
}

double slowest(std::span<const double> rates) {
  return *std::min_element(rates.begin(), rates.end());
}

// The smallest whole number that is not below `value`, which may be a rounding above a whole one.
size_t at_least(double value) {
  return value <= 0 ? 0 : static_cast<size_t>(std::ceil(value * (1 - 1e-12)));
}

// Splits `total` in proportion to `parts`; equally where they are all zero.
void split(double total, std::span<const double> parts, std::span<double> into) {
  const double all = sum(parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    into[i] = all > 0 ? total * (parts[i] / all) : total / static_cast<double>(parts.size());
  }
}

}  // namespace

std::vector<double> equal_rates(size_t workers, std::span<const std::string> reducers) {
  constexpr double kRate = 1e9;  // shares depend on ratios only
  std::vector<double> rates(workers, kRate);
  for (const std::string& address : reducers) {
    rates.push_back(kRate / static_cast<double>(std::count(reducers.begin(), reducers.end(), address)));
  }
  return rates;
}

SharesPlan plan_shares(const Links& links, double bytes) {
  check(links, bytes);
  const size_t count = links.workers.size();
  const auto n = static_cast<double>(count);
  SharesPlan plan;
  plan.shares.assign(count + links.reducers.size(), 0.0);
  const std::span<double> of_workers(plan.shares.data(), count);
  const std::span<double> of_reducers(plan.shares.data() + count, links.reducers.size());
  if (count == 1) {
    plan.shares[0] = 1.0;
    return plan;
  }
  // Seconds for an array of one byte, so that shares do not depend on its size, nor on its being empty.
  const double reduced = sum(links.reducers);
  const double unit = std::max(1 / slowest(links.workers), (2 * n - 2) / (sum(links.workers) + (n - 2) / n * reduced));
  double on_reducers = unit * reduced / n;
  if (on_reducers > 1 - kNoShare) on_reducers = 1;
  split(on_reducers, links.reducers, of_reducers);
  // Two workers move K however they share: any split will do, and a split in two is the fairest to their processors.
  std::vector<double> room(count, 0.0);
  if (count > 2) {
    for (size_t i = 0; i < count; ++i) {
      const double beyond = unit * links.workers[i] - 1;
      room[i] = beyond > kNoShare ? beyond : 0;
    }
  }
  split(1.0 - on_reducers, room, of_workers);
  plan.seconds = shares_seconds(links, plan.shares, bytes);
  return plan;
}

std::vector<double> moved_bytes(size_t workers, size_t reducers, std::span<const double> shares, double bytes) {
  if (shares.size() != workers + reducers) {
    fail(ErrorKind::argument, workers, " workers and ", reducers, " reducers own ", workers + reducers,
         " shares, found ", shares.size());
  }
  for (size_t i = 0; i < shares.size(); ++i) {
    if (!(shares[i] >= 0 && shares[i] <= 1 + kRounding)) {
      fail(ErrorKind::argument, "shares are from 0 to 1; number ", i, " is ", shares[i]);
    }
  }
  const double all = sum(shares);
  if (std::abs(all - 1) > kRounding) fail(ErrorKind::argument, "shares add up to 1, found ", all);
  const auto n = static_cast<double>(workers);
  std::vector<double> moved(shares.size());
  for (size_t i = 0; i < shares.size(); ++i) {
    moved[i] = i < workers ? bytes * std::max(0.0, 1 + (n - 2) * shares[i]) : bytes * n * shares[i];
  }
  return moved;
}

double shares_seconds(const Links& links, std::span<const double> shares, double bytes) {
  check(links, bytes);
  const std::vector<double> moved = moved_bytes(links.workers.size(), links.reducers.size(), shares, bytes);
  double seconds = 0;
  for (size_t i = 0; i < moved.size(); ++i) {
    const size_t count = links.workers.size();
    seconds = std::max(seconds, moved[i] / (i < count ? links.workers[i] : links.reducers[i - count]));
  }
  return seconds;
}

SharesPlan plan_dedicated(const Links& links, double bytes) {
  check(links, bytes);
  SharesPlan plan;
  plan.shares.assign(links.workers.size() + links.reducers.size(), 0.0);
  if (links.workers.size() == 1) {
    plan.shares[0] = 1.0;
    return plan;
  }
  if (links.reducers.empty()) fail(ErrorKind::argument, "dedicated shares need a reducer, found none");
  split(1.0, links.reducers, std::span<double>(plan.shares).subspan(links.workers.size()));
  plan.seconds = shares_seconds(links, plan.shares, bytes);
  return plan;
}

double ring_bytes(size_t workers, double bytes) {
  const auto n = static_cast<double>(workers);
  return workers == 0 ? 0 : 2 * (n - 1) / n * bytes;
}

size_t ring_hops(size_t workers) {
  return workers == 0 ? 0 : 2 * (workers - 1);
}

double tree_bytes(size_t workers, double bytes) {
  if (workers == 0) return 0;
  const size_t whole = std::bit_floor(workers);
  return ring_bytes(whole, bytes) + (whole == workers ? 0 : bytes);
}

double tree_seconds(size_t workers, double rate, double bytes) {
  if (workers == 0) return 0;
  const size_t whole = std::bit_floor(workers);
  return (ring_bytes(whole, bytes) + (whole == workers ? 0 : 2 * bytes)) / rate;
}

size_t tree_hops(size_t workers) {
  if (workers == 0) return 0;
  const size_t whole = std::bit_floor(workers);
  return 2 * static_cast<size_t>(std::bit_width(whole) - 1) + (whole == workers ? 0 : 2);
}

size_t reducers_needed(std::span<const double> workers, double reducer_rate) {
  check({workers, {&reducer_rate, 1}}, 0);
  const auto n = static_cast<double>(workers.size());
  if (workers.size() <= 2) return 0;  // they move K, or nothing, by themselves
  return at_least(((2 * n - 2) * slowest(workers) - sum(workers)) * n / ((n - 2) * reducer_rate));
}

size_t dedicated_reducers_needed(std::span<const double> workers, double reducer_rate) {
  check({workers, {&reducer_rate, 1}}, 0);
  if (workers.size() == 1) return 0;
  return at_least(static_cast<double>(workers.size()) * slowest(workers) / reducer_rate);
}

}  // namespace geartrain
