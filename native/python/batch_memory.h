// Memory of a batch that Python holds (sampled_batch.h), for other bindings that fill it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fetch/batch_sampler.h"
#include "python/bind.h"

namespace geartrain {

struct BatchMemory {
  BatchArrays arrays;
  std::span<uint16_t> shards;  // empty where it was made without
};
// Throws nb::cast_error for anything else than a SampledBatch.
BatchMemory memory_of(nb::handle batch);
// Throws schema where the batch's rows have other windows or transitions, or other bytes in a field.
void check_made_for(nb::handle batch, uint32_t window, size_t steps, const std::vector<uint64_t>& row_bytes,
                    const TransitionView* view);
// The importance weights of all its rows, to be filled; the batch has some from here on.
std::span<double> weights_to_fill(nb::handle batch);

}  // namespace geartrain
