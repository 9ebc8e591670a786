// Priority updates: what consumers give to rows, or steps, of batches that they were drawn in. On one host and over
// ranks the same rules hold, and this is where they stand.
//
// They are applied in the order of their calls and draws, so that of a row that was drawn twice the later draw's
// priority holds, whichever rank gives it. A row or step that the store cannot have counts as stale, as one does that
// is gone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "store/store.h"

namespace geartrain {

// n of each. `steps` are those of a store with priorities of steps, and empty for others; `order` is by which they are
// applied, and empty where it is theirs already.
struct PriorityUpdates {
  std::span<const uint32_t> rows, generations, steps;
  std::span<const int64_t> order;
  std::span<const double> priorities;
};

// The place of a draw among those of its batch. Keys that are made by hand may name any number; it counts as the
// nearest one that a draw may have.
inline uint32_t draw_order(int64_t draw) {
  return static_cast<uint32_t>(std::clamp<int64_t>(draw, 0, std::numeric_limits<uint32_t>::max()));
}

// Within a call of the store (Store::Call). Returns how many were stale. Throws schema for a priority that is none,
// then none is set; and for steps of a store of rows, or the other way round.
uint64_t apply(Store& store, const PriorityUpdates& updates);

}  // namespace geartrain
