#include "collectives/owned_share.h"

#include <algorithm>

namespace geartrain {

OwnedShare::OwnedShare(const Shape& shape, uint64_t bytes, uint32_t first_rank, uint32_t world, uint32_t self)
    : shape(shape),
      bytes(bytes),
      first_rank(first_rank),
      self(self),
      opened(world),
      received(world),
      inputs(world),
      addresses(world),
      reads(world),
      sent(world),
      ended(world) {}

bool OwnedShare::gets_credit(uint32_t rank) const {
  return shape.collective == Collective::reduce_scatter || (relayed() && rank == shape.root);
}

uint64_t OwnedShare::credit() const {
  if (shape.collective == Collective::reduce_scatter) return reduced;
  return std::min(results_from, reduced);
}

bool OwnedShare::only_reads() const {
  if (exposed == nullptr) return false;
  for (uint32_t rank = 0; rank < addresses.size(); ++rank) {
    if (rank != self && addresses[rank] == 0) return false;
  }
  return true;
}

uint64_t OwnedShare::forget_sent(uint64_t chunk) {
  uint64_t least = reduced;
  for (uint32_t rank = 0; rank < sent.size(); ++rank) {
    if (rank != self && !gets_credit(rank)) least = std::min(least, sent[rank]);
  }
  uint64_t dropped = 0;
  while (!results.empty() && std::min(results_from + chunk, bytes) <= least) {
    dropped += std::min(chunk, bytes - results_from);
    results.pop_front();
    results_from += chunk;
  }
  return dropped;
}

uint64_t OwnedShare::missing(uint32_t rank) const {
  if (!opened[rank]) return ~uint64_t{0};
  if (shape.direct()) {
    // What it has opened and this rank has not begun waits for this rank.
    return rank == self || ended[rank] || !opened[self] ? 0 : wanted[rank] - received[rank] + 1;
  }
  if (relayed() && rank != shape.root) return rank == self ? 0 : reduced - sent[rank];
  if (shows_results() && reduced == bytes) return ended[rank] ? 0 : bytes - taken[rank];
  return bytes - received[rank];
}

}  // namespace geartrain
