// Exposed memory of a share: numbers of other ranks that its owner reads from where they are, and results that other
// ranks read from the owner's memory. What cannot be read is sent instead.
//
// Numbers are read a piece at a time, of all ranks together no more than stays in the cache. Results are exposed as far
// as they are made, or copied for a rank that cannot read them.
//
// One thread, the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/chunk_buffer.h"
#include "collectives/link.h"
#include "collectives/owned_share.h"
#include "collectives/peer.h"

namespace geartrain {

class ShareExposure {
 public:
  // The other ranks'.
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual ReadExposed read(uint32_t, uint64_t, std::span<std::byte>) { return ReadExposed::denied; }
    virtual void unreadable_part(uint32_t, uint64_t, uint64_t) {}  // a rank's numbers from there on: it sends them
  };
  ShareExposure(ChunkBufferPool& blocks, Memory& memory, uint32_t world, uint32_t self, uint64_t chunk)
      : blocks_(blocks), memory_(memory), world_(world), self_(self), chunk_(chunk) {}

  // Asks for parts where the owner exposes no results. It would keep all of a share that it reads at its own speed, and
  // parts come no faster than the window lets them.
  void decline(uint64_t operation, OwnedShare& share);
  // What is reduced at once: chunks where some are sent.
  uint64_t piece(const OwnedShare& share) const;
  // The next `bytes` of the numbers that ranks expose, and where they are, by rank. False: not all can be read, or not
  // any more.
  bool read(uint64_t operation, OwnedShare& share, uint64_t bytes, std::vector<const std::byte*>* inputs);
  // The next of the results that are made where the owner exposes them. A rank that cannot read them gets a copy: what
  // is on the way to it does not keep the array from the caller. False when there are none to tell of yet.
  bool next_result(uint64_t operation, OwnedShare& share, uint32_t rank, OutFrame* frame);
  // Tells a rank where the next `bytes` for it are.
  void expose(uint64_t operation, OwnedShare& share, uint32_t rank, const std::byte* from, uint64_t bytes,
              OutFrame* frame);
  // A rank cannot read what it was exposed beyond what it has got: it is sent that. Throws frame.
  static void took_unreadable(OwnedShare* share, uint32_t rank, const WireHeader& unreadable);

 private:
  void ask_for_parts(uint64_t operation, OwnedShare& share, uint32_t rank, uint64_t from);

  ChunkBufferPool& blocks_;
  Memory& memory_;
  const uint32_t world_, self_;
  const uint64_t chunk_;
  std::vector<std::byte> read_;  // where numbers are read
};

}  // namespace geartrain
