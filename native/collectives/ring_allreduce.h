// Ring all-reduce: every rank exchanges data with its two neighbours only. For networks that allow no more, and as the
// baseline.
//
// The array is cut into N pieces. In 2(N-1) steps every rank sends one piece to the next rank while it receives another
// from the previous one. With four ranks, piece by piece, as seen from rank r:
//
//   step 0   send piece r        receive piece r-1, add one's own numbers to it        \  N-1 steps: afterwards rank r
//   step 1   send piece r-1      receive piece r-2, add ...                            |  has the sum of piece r+1
//   step 2   send piece r-2      receive piece r-3, add ...                            /
//   step 3   send piece r-3      receive piece r-4 = r, complete: keep it              \  N-1 steps: complete pieces
//   step 4   send piece r-4      receive piece r-5, keep it                            |  go around once
//   step 5   ...                                                                       /
//
// What is sent in a step is what was received in the step before. So a rank need not wait for a step's end: each chunk
// is forwarded as soon as it has arrived, and been added to. All steps are then one stream, in which byte b of a step
// may leave once byte b of the step before has arrived, and latency is 2(N-1) chunks instead of 2(N-1) pieces. Each
// rank moves 2(N-1)/N of the array each way.
//
// The order of the sum: piece p begins at rank p and is ((x[p] + x[p+1]) + x[p+2]) + ..., around the ring. It is the
// same on all ranks, but another one for each piece, and so for another N. 16-bit floats are rounded at every hop; that
// is what the ring costs in precision.
//
// One thread, the loop's.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "collectives/chunk_buffer.h"
#include "collectives/peer.h"
#include "collectives/protocol.h"
#include "collectives/work.h"

namespace geartrain {

class RingAllreduce {
 public:
  class Host {
   public:
    virtual ~Host() = default;
    virtual void open_next(uint64_t operation, const Open& open) = 0;
    virtual void ring_for_next() = 0;  // next() has something
    virtual void ring_room() = 0;      // room() has room again
    virtual void disagree(const std::string& text, std::vector<uint32_t> ranks) = 0;
    virtual void completed(const std::shared_ptr<Work>& work) = 0;
  };
  RingAllreduce(ChunkBufferPool& blocks, Host& host, uint32_t rank, uint32_t world);

  void begin(const std::shared_ptr<Work>& work);
  // From the previous rank. Throws frame.
  void open(uint64_t operation, const Open& open);
  std::span<std::byte> room(const WireHeader& header);  // none: too much has come too early
  void took(const WireHeader& header, std::span<const std::byte> payload);
  // For the next rank.
  bool next(OutFrame* frame);

  // Whether an operation has been begun here at all; whether it has all that it receives and waits for the next rank,
  // which takes nothing, and not for the previous one.
  bool begun(uint64_t operation) const { return operation < next_number_; }
  bool waits_for_next(uint64_t operation) const;
  void clear() { operations_.clear(); }

 private:
  // A place in the stream of an operation.
  struct At {
    uint32_t step = 0;
    uint64_t element = 0;  // within the step's piece
    uint64_t bytes = 0;    // of the stream, all steps
  };
  struct Operation {
    std::shared_ptr<Work> work;
    std::vector<uint64_t> starts;
    At sent, received;
  };
  struct Early {
    WireHeader header;
    ChunkBufferRef block;
  };

  uint32_t steps() const { return 2 * (world_ - 1); }
  uint32_t piece(uint32_t step, bool sending) const;
  uint64_t elements(const Operation& operation, uint32_t step, bool sending) const;
  void forward(const Operation& operation, At* at, bool sending, uint64_t count) const;
  void check_place(const Operation& operation, const WireHeader& header) const;
  void add(Operation& operation, std::span<const std::byte> payload);
  void finish(std::map<uint64_t, Operation>::iterator place);
  void compare(uint64_t number, const Shape& mine);

  ChunkBufferPool& blocks_;
  Host& host_;
  const uint32_t rank_, world_;
  uint64_t next_number_ = 0;
  std::map<uint64_t, Operation> operations_;
  std::map<uint64_t, Shape> theirs_;  // of the previous rank, for operations that are not over here
  std::deque<Early> early_;           // of operations that have not begun here
  uint64_t early_bytes_ = 0;
  ChunkBufferRef arriving_;
};

}  // namespace geartrain
