// Whom an owner of shares waits for (share_owner.h).
#include <algorithm>

#include "collectives/share_owner.h"

namespace geartrain {

std::vector<uint32_t> ShareOwner::least_advanced(uint64_t number, uint64_t* bytes, uint64_t* of) const {
  *bytes = *of = 0;
  // Ranks take one operation after the other: who is behind in an earlier one holds up this one too.
  for (const auto& [at, share] : operations_) {
    if (at > number) break;
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < world_; ++rank) most = std::max(most, share.missing(rank));
    if (most == 0) continue;  // all is there
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (share.missing(rank) == most) ranks.push_back(rank);
    }
    *bytes = share.bytes - std::min(most, share.bytes);
    *of = share.bytes;
    return ranks;
  }
  std::vector<uint32_t> ranks;
  if (operations_.contains(number)) return ranks;
  // No rank has opened it here, or it is over: a rank that queries it can only wait for what is in flight.
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_ && next_open_[rank] <= number) ranks.push_back(rank);
  }
  return ranks;
}

bool ShareOwner::involves(uint32_t rank, uint64_t* number, uint64_t* bytes, uint64_t* of) const {
  for (const auto& [at, share] : operations_) {
    if (share.ended[rank] || (!share.opened[rank] && share.open_count == 0)) continue;
    *number = at;
    *bytes = share.shape.direct() ? share.sent[rank] : share.received[rank];
    *of = share.bytes;
    return true;
  }
  return false;
}

}  // namespace geartrain
