#include "store/priority_updates.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/errors.h"

namespace geartrain {
namespace {

template <typename T>
std::vector<T> permuted(std::span<const T> values, const std::vector<size_t>& places) {
  std::vector<T> made;
  made.reserve(values.size());
  for (const size_t place : places) made.push_back(values[place]);
  return made;
}

}  // namespace

uint64_t apply(Store& store, const PriorityUpdates& updates) {
  const size_t n = updates.rows.size();
  const bool of_steps = !updates.steps.empty() || (n == 0 && store.per_step());
  if (updates.generations.size() != n || updates.priorities.size() != n || (of_steps && updates.steps.size() != n) ||
      (!updates.order.empty() && updates.order.size() != n)) {
    fail(ErrorKind::schema, n, " rows were given with ", updates.generations.size(), " generations, ",
         updates.steps.size(), " steps, ", updates.order.size(), " draws and ", updates.priorities.size(),
         " priorities");
  }
  std::vector<uint32_t> rows, generations, steps;
  std::vector<double> priorities;
  std::span<const double> given = updates.priorities;
  if (std::ranges::is_sorted(updates.order)) {
    rows.assign(updates.rows.begin(), updates.rows.end());
    generations.assign(updates.generations.begin(), updates.generations.end());
    steps.assign(updates.steps.begin(), updates.steps.end());
  } else {
    std::vector<size_t> places(n);
    std::iota(places.begin(), places.end(), size_t{0});
    std::ranges::stable_sort(places, {}, [&](size_t place) { return updates.order[place]; });
    rows = permuted(updates.rows, places);
    generations = permuted(updates.generations, places);
    if (of_steps) steps = permuted(updates.steps, places);
    priorities = permuted(updates.priorities, places);
    given = priorities;
  }
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] < store.header().capacity && (!of_steps || steps[i] < store.header().max_length)) continue;
    rows[i] = generations[i] = 0;  // no row has this generation
    if (of_steps) steps[i] = 0;
  }
  if (of_steps) return store.update_step_priorities(rows, generations, steps, given);
  return store.update_priorities(rows, generations, given);
}

}  // namespace geartrain
