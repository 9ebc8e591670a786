#include "fetch/episodes.h"

#include <string_view>

#include "fetch/transitions.h"

namespace geartrain {

EpisodeMarks episode_marks(const Store& store) {
  if (!shares_rows(store)) return {};
  const FieldRecord* const fields = store.fields();
  for (uint32_t field = 0; field < store.header().field_count; ++field) {
    if (std::string_view(fields[field].name) != "last") continue;
    return {store.block(field, 0), fields[field].stride, store.header().max_length};
  }
  return {};
}

Population population_of(const Store& store, bool steps) {
  Population from{store.priority_tree(), store.bit_tree(), store.words(), store.status().data(), 0,
                  episode_marks(store)};
  if (!steps) return from;
  from.priorities = store.step_tree();
  from.words = store.step_tree().leaves();
  from.row_steps = store.header().max_length;
  return from;
}

}  // namespace geartrain
