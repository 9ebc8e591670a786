#include "collectives/share_planner.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/errors.h"

namespace geartrain {
namespace {

// Less than this is a rounding, and makes no member an owner.
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

// Splits `total` in proportion to `parts`; equally where they are all zero.
void split(double total, std::span<const double> parts, std::span<double> into) {
  const double all = sum(parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    into[i] = all > 0 ? total * (parts[i] / all) : total / static_cast<double>(parts.size());
  }
}

}  // namespace

std::vector<double> plan_shares(size_t count, std::span<const double> rates) {
  if (count == 0 || count > rates.size()) {
    fail(ErrorKind::argument, "a group has at least one worker, and a rate for each; found ", count, " workers");
  }
  const std::span<const double> workers = rates.first(count), reducers = rates.subspan(count);
  check_rates(workers, "worker");
  check_rates(reducers, "reducer");
  std::vector<double> shares(rates.size());
  if (count == 1) {
    shares[0] = 1.0;
    return shares;
  }
  const auto n = static_cast<double>(count);
  // Seconds for an array of one byte: shares do not depend on its size.
  const double reduced = sum(reducers);
  const double unit =
      std::max(1 / *std::ranges::min_element(workers), (2 * n - 2) / (sum(workers) + (n - 2) / n * reduced));
  double on_reducers = unit * reduced / n;
  if (on_reducers > 1 - kNoShare) on_reducers = 1;
  split(on_reducers, reducers, std::span(shares).subspan(count));
  // Two workers move K however they share: any split will do, and a split in two is the fairest to their processors.
  std::vector<double> room(count, 0.0);
  if (count > 2) {
    for (size_t i = 0; i < count; ++i) {
      const double beyond = unit * workers[i] - 1;
      room[i] = beyond > kNoShare ? beyond : 0;
    }
  }
  split(1.0 - on_reducers, room, std::span(shares).first(count));
  return shares;
}

std::vector<double> shares_of_equal_links(size_t workers, std::span<const std::string> reducers) {
  std::vector<double> rates(workers, 1.0);
  for (const std::string& address : reducers) {
    rates.push_back(1.0 / static_cast<double>(std::count(reducers.begin(), reducers.end(), address)));
  }
  return plan_shares(workers, rates);
}

}  // namespace geartrain
