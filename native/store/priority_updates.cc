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
  // Copies, as another thread may write to the caller's arrays after they were looked at.
  std::vector<uint32_t> rows(updates.rows.begin(), updates.rows.end());
  std::vector<uint32_t> steps(updates.steps.begin(), updates.steps.end()), own_generations;
  std::vector<double> own_priorities;
  std::span<const uint32_t> generations = updates.generations;
  std::span<const double> priorities = updates.priorities;
  if (!std::ranges::is_sorted(updates.order)) {
    std::vector<size_t> places(n);
    std::iota(places.begin(), places.end(), size_t{0});
    std::ranges::stable_sort(places, {}, [&](size_t place) { return updates.order[place]; });
    rows = permuted(updates.rows, places);
    if (of_steps) steps = permuted(updates.steps, places);
    generations = own_generations = permuted(updates.generations, places);
    priorities = own_priorities = permuted(updates.priorities, places);
  }
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] < store.header().capacity && (!of_steps || steps[i] < store.header().max_length)) continue;
    if (own_generations.empty()) {
      own_generations.assign(generations.begin(), generations.end());
      generations = own_generations;
    }
    rows[i] = own_generations[i] = 0;  // no row has this generation
    if (of_steps) steps[i] = 0;
  }
  if (of_steps) return store.update_step_priorities(rows, generations, steps, priorities);
  return store.update_priorities(rows, generations, priorities);
}

}  // namespace geartrain
