// Episodes of a store whose rows may hold several: it has `last`, a bool a step, and the reserved `geartrain.episodes`,
// an int32 a row (src/geartrain/store/recorder.py).
#pragma once

#include "selection/episode_marks.h"
#include "selection/selection.h"
#include "store/store.h"

namespace geartrain {

// What is drawn from a store: its rows, or with `steps`, where these have priorities, its steps.
Population population_of(const Store& store, bool steps);

}  // namespace geartrain
