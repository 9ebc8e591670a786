// One share of one operation, at its owner: what has come from each rank, what is reduced, and what each rank was sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/chunk_buffer.h"
#include "collectives/protocol.h"
#include "collectives/work.h"

namespace geartrain {

struct OwnedShare {
  OwnedShare(const Shape& shape, uint64_t bytes, uint32_t first_rank, uint32_t world, uint32_t self);

  Shape shape;
  uint64_t bytes;            // of the share
  uint32_t first_rank;       // whose shape it is
  uint32_t self;             // the owner's rank, or that of none
  std::vector<bool> opened;  // by rank
  uint32_t open_count = 0;
  std::vector<uint64_t> received;   // by rank: bytes, from the start of the share; or those that it took
  std::vector<ChunkQueue> inputs;   // by rank: chunks from `reduced` on
  std::vector<uint64_t> addresses;  // by rank: of its numbers, where they are not sent
  const std::byte* local = nullptr;
  std::byte* exposed = nullptr;  // where the results are, instead of `results`
  std::vector<Segment> sends;    // by rank, where the shape is direct
  std::vector<uint64_t> wanted;  // by rank: bytes that it expects, where the shape is direct
  std::vector<bool> reads;       // by rank: whether it reads them, or results, from here by itself
  std::vector<uint64_t> taken;   // by rank: bytes of exposed results that it has read
  uint64_t reduced = 0;
  bool waits = false;       // for ShareOwner::go_on()
  bool empty_done = false;  // an empty share: every rank has opened it
  ChunkQueue results;       // chunks from `results_from` on
  uint64_t results_from = 0;
  std::vector<uint64_t> sent;  // by rank: bytes of results taken by ShareOwner::next()
  std::vector<bool> ended;     // by rank: the last result was taken
  uint32_t end_count = 0;

  // Whether the owner passes on the root's numbers, and reduces none.
  bool relayed() const { return shape.collective == Collective::broadcast; }
  // Whether results are read, or copied from, where they were made.
  bool shows_results() const { return exposed != nullptr && shape.collective == Collective::all_reduce; }
  // Whether a rank is told how far the share is, instead of being sent results.
  bool gets_credit(uint32_t rank) const;
  // How much of the share is done with: for a relay, what all recipients have taken.
  uint64_t credit() const;
  // Whether no rank's window waits for reports of this share: else each chunk is reported at once, since ranks that
  // send go no further than the share that is furthest behind, of any owner.
  bool only_reads() const;
  // Drops results that every rank has taken: how many bytes of them there were.
  uint64_t forget_sent(uint64_t chunk);
  // The bytes that the operation waits for a rank to send or to take. One that has not even opened it is behind all
  // others.
  uint64_t missing(uint32_t rank) const;
};

}  // namespace geartrain
