#include "fetch/episodes.h"

#include <string_view>

#include "base/convert.h"

namespace geartrain {
namespace {

// nullptr: the store has none of that name.
const FieldRecord* field_called(const Store& store, std::string_view name) {
  const FieldRecord* const fields = store.fields();
  for (uint32_t f = 0; f < store.header().field_count; ++f) {
    if (name == fields[f].name) return &fields[f];
  }
  return nullptr;
}

}  // namespace

EpisodeMarks episode_marks(const Store& store) {
  const FieldRecord *last = field_called(store, "last"), *episodes = field_called(store, "geartrain.episodes");
  if (last == nullptr || last->timed == 0 || last->dtype != kBool || last->ndim != 1 || last->itemsize != 1 ||
      episodes == nullptr || episodes->timed != 0 || episodes->dtype != kInt32 || episodes->ndim != 0) {
    return {};
  }
  const std::byte* const column = store.block(static_cast<uint32_t>(last - store.fields()), 0);
  return {column, last->stride, store.header().max_length};
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
