#include "fetch/episodes.h"

namespace geartrain {

Population population_of(const Store& store, bool steps) {
  Population from{
      store.priority_tree(), store.bit_tree(),         store.words(), store.status().data(), 0, store.episode_marks(),
      store.row_repeats(),   store.header().max_length};
  if (!steps) return from;
  from.priorities = store.step_tree();
  from.words = store.step_tree().leaves();
  from.row_steps = store.header().max_length;
  return from;
}

}  // namespace geartrain
