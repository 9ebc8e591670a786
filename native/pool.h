// Warm memory for batches. A fresh 100 MB buffer costs 25,000 page faults before its first byte; a used one none.
//
// Buffers come back when their last user lets go (in Python: when the last array over them is collected), so a batch
// that somebody still holds is never overwritten. What is kept for later is limited; see kKeepBytes.
#pragma once

#include <cstddef>

namespace geartrain {

// At most this much is kept warm, or four times the largest buffer in use, whichever is more.
constexpr size_t kKeepBytes = size_t{1} << 30;

// A 4096-byte aligned buffer of at least `bytes`; huge pages where they can be had. Any thread. Contents are
// arbitrary. Throws no_space.
void* take_buffer(size_t bytes);
void give_buffer(void* buffer);

struct PoolCounts {
  size_t buffers_made, buffers_reused, bytes_in_use, bytes_kept;
};
PoolCounts pool_counts();

}  // namespace geartrain
