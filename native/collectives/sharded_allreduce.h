// Sharded all-reduce: every share of the array has one owner, which reduces it and returns it to all (share_owner.h).
//
// Shares are a vector, one number for each rank and each reducer, and the only choice: equal shares
// on the ranks move the bytes of a ring in two hops instead of 2(N-1); all of it on reducers moves every byte once out
// and once back; anything between is as correct, and what the planner picks for the links at hand (share_planner.h).
//
// This is the sender's side, one for a group. What makes it reach the theoretical time on shaped links:
//
// * The first owner rotates with the rank, and all ranks move on to the next after a turn, so that at no time all ranks
//   send to one owner.
// * The first turn of an operation is a small piece for every owner, which reduces it before the rest of its first
// chunk
//   is there (share_owner.h): no result comes back before all owners before this one have had their turn, of every
//   rank, and what is longer than TCP's first window (14 KB, also after a pause) takes a round trip more.
// * One window over the whole array, in lock step: with the results of a fraction f of the array back from *all*
//   owners, no share goes beyond f + window/bytes. The results are the credits. Without it TCP would give unequal
//   shares equal rates, and the last one would end alone. The window also bounds what an owner holds.
// * The window follows the bandwidth-delay product (congestion_window.h).
// * Operations are one stream: the next one's parts are sent as soon as the window allows, behind the last one's.
// * An array of at most 16 KB goes whole to one owner, by turns: two messages instead of two for each owner.
//
// One thread, the loop's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collectives/chunk_buffer.h"
#include "collectives/congestion_window.h"
#include "collectives/peer.h"
#include "collectives/protocol.h"
#include "collectives/work.h"

namespace geartrain {

constexpr uint64_t kWholeBytes = 16 << 10;  // arrays up to this size are not divided

// Where the shares of an array of `count` elements begin: one more than there are owners. Boundaries are multiples of
// 16 elements; an array of at most kWholeBytes belongs to one of the members that have a share, by the operation's
// number.
std::vector<uint64_t> divide_array(uint64_t count, Dtype wire, std::span<const double> shares, uint64_t operation);

// Eager results: what an owner sends of an operation that this rank has not begun. It is kept until then, so that the
// link of a rank that begins last is not idle until the others know that it has begun.
//
// One owner's, of one operation at a time, kEagerBytes at most: anything else ends its connection.
class EagerResults {
 public:
  // The destination of the next one, which took() is called for when it is there. Throws frame.
  std::span<std::byte> room(ChunkBufferPool& blocks, const WireHeader& result) {
    const uint64_t within = bytes_ % kChunkBytes;
    if ((bytes_ != 0 && result.operation != operation_) || result.offset != bytes_ || result.bytes == 0 ||
        within + result.bytes > kChunkBytes || bytes_ + result.bytes > kEagerBytes) {
      fail(ErrorKind::frame, "it sent ", result.bytes, " bytes at ", result.offset, " of operation ", result.operation,
           ", which was not begun here, where ", bytes_, " are of operation ", operation_);
    }
    if (within == 0) blocks_.emplace_back(blocks);
    operation_ = result.operation;
    arriving_ = true;
    return {blocks_.back().data() + within, result.bytes};
  }
  void took(const WireHeader& result) {
    bytes_ += result.bytes;
    arriving_ = false;
  }
  bool arriving() const { return arriving_; }
  uint64_t operation() const { return operation_; }
  uint64_t bytes() const { return bytes_; }
  bool of(uint64_t operation) const { return bytes_ != 0 && operation_ == operation; }
  void copy(std::byte* to) const {
    for (uint64_t at = 0; at < bytes_; at += kChunkBytes) {
      std::memcpy(to + at, blocks_[at / kChunkBytes].data(), std::min<uint64_t>(kChunkBytes, bytes_ - at));
    }
  }
  void clear() {
    blocks_.clear();
    bytes_ = 0;
  }

 private:
  uint64_t operation_ = 0, bytes_ = 0;
  bool arriving_ = false;  // a result whose bytes are not all there
  std::vector<ChunkBufferRef> blocks_;
};

// Results of one reducer, in the order in which it sends them, over all operations: the last ones, for ranks that lose
// it before they have them. They arrive here, and are copied to their places when a frame is complete, so that a frame
// that is cut off leaves the caller's numbers as they are.
//
// A rank runs no further than a window ahead of the results that it got, and nothing is reduced that one rank has not
// sent: no rank has more than a window of results that another one lacks.
class KeptResults {
 public:
  // What ranks may differ by, with a window of so many bytes.
  static constexpr uint64_t reach(uint64_t window_bytes) { return window_bytes + 2 * kChunkBytes; }

  // The memory is not touched before it is needed.
  explicit KeptResults(uint64_t window_bytes)
      : size_(reach(window_bytes) + kChunkBytes), memory_(new std::byte[size_ + kChunkBytes]) {}

  // The destination of the next frame, which took() is called for when it is there.
  std::span<std::byte> room(uint64_t bytes) { return {memory_.get() + position_ % size_, bytes}; }
  void took(uint64_t bytes) {
    const uint64_t end = position_ % size_ + bytes;
    if (end > size_) std::memcpy(memory_.get(), memory_.get() + size_, end - size_);
    position_ += bytes;
  }
  void reset() { position_ = 0; }
  // How many bytes have come.
  uint64_t position() const { return position_; }
  // Those from `from` on, of which there are no more than reach().
  void copy(uint64_t from, std::byte* out) const {
    for (uint64_t at = from; at != position_;) {
      const uint64_t bytes = std::min(position_ - at, size_ - at % size_);
      std::memcpy(out + (at - from), memory_.get() + at % size_, bytes);
      at += bytes;
    }
  }

 private:
  const uint64_t size_;
  const std::unique_ptr<std::byte[]> memory_;  // and a frame beyond, which goes around
  uint64_t position_ = 0;
};

class ShardedAllreduce {
 public:
  class Host {
   public:
    virtual ~Host() = default;
    // Announces the operation to an owner.
    virtual void open(uint32_t owner, uint64_t operation, const Open& open) = 0;
    // Whether an owner can probably read this rank's memory. One that cannot says so (took_unreadable_part).
    virtual bool exposes_to([[maybe_unused]] uint32_t owner) { return false; }
    virtual void parts_for(uint32_t owner) = 0;                                  // next() may have something for it
    virtual void taken(uint32_t owner, uint64_t operation, uint64_t bytes) = 0;  // reports what has come
    // What comes behind that cannot be read.
    virtual void unreadable([[maybe_unused]] uint32_t owner, [[maybe_unused]] uint64_t operation,
                            [[maybe_unused]] uint64_t from) {}
    virtual void adopt_soon() {}  // calls adopt_all(), and not from here
    virtual StageClock* stages() { return nullptr; }
    virtual void completed(const std::shared_ptr<Work>& work) = 0;
  };
  ShardedAllreduce(ChunkBufferPool& blocks, Host& host, std::vector<double> shares, uint32_t self,
                   uint64_t window_bytes);

  // Begins an operation. What there is to be done at this rank itself as an owner is passed on by the caller.
  struct Own {
    bool used = false;
    const std::byte* numbers = nullptr;
    std::byte* result = nullptr;
    uint64_t bytes = 0;  // on the wire
  };
  // `exposed`: owners read this rank's numbers and expose results, where they can.
  Own begin(const std::shared_ptr<Work>& work, bool exposed = false);
  // Announces it to the other owners; after the caller's own share was passed on.
  void start();
  // Opens those operations at an owner that send it nothing: before anything else, since an open is what allows it to
  // send. Behind a window of this rank's own numbers it would keep the other direction of the link idle for so long.
  void announce(uint32_t owner);
  bool next(uint32_t owner, OutFrame* frame);
  // The destination of a result. Throws frame when it is not the expected one. Of operations that were not begun, or
  // whose open waits to be sent, results are kept until that.
  std::span<std::byte> room(uint32_t owner, const WireHeader& result);
  // `exposed`: this rank has read it.
  void took(uint32_t owner, const WireHeader& result, std::span<std::byte> payload, bool exposed = false);
  // Results that came before the operation was opened go to their places.
  void adopt_all();
  // room() for a result that the owner exposes, which no other kind of operation has.
  std::span<std::byte> exposed_room(uint32_t owner, const WireHeader& result);
  // This rank cannot read what an owner exposes there: it asks for results from there on, and ignores what else was
  // exposed of that operation before the owner knew (declined). Throws frame.
  void decline(uint32_t owner, const WireHeader& exposed);
  bool declined(uint32_t owner, uint64_t operation);
  void deliver(uint64_t operation, uint64_t offset, std::span<const std::byte> result);  // of this rank's own share
  // An owner cannot read this rank's numbers from there on. Throws frame.
  void took_unreadable_part(uint32_t owner, const WireHeader& unreadable);
  // An owner is done with a share up to there, and this rank gets no result of it. Throws frame.
  void took_credit(uint32_t owner, const WireHeader& credit);
  void served(uint64_t operation);  // all ranks have what they get from this one's memory

  // An owner that may be lost (takeover.h). Its results are kept, for ranks that lack them, and frames of them that are
  // cut off leave the array as it is.
  void keep_results(uint32_t owner, uint64_t window_bytes) {
    kept_[owner] = std::make_unique<KeptResults>(window_bytes);
  }
  uint64_t position(uint32_t owner) const { return kept_[owner]->position(); }  // bytes of results that have come of it
  void copy_kept(uint32_t owner, uint64_t from, std::byte* out) const { kept_[owner]->copy(from, out); }
  // It has its share again in operations from `first` on, of which none was begun.
  void regain(uint32_t owner, uint64_t first);
  // It is lost: nothing more comes of it, nor is sent. Its share of each operation that is not done waits for others.
  void lose(uint32_t owner);
  // Results of it that another rank had, the next ones after those that came here; of operations from `first` on.
  // False: there are more than operations in progress lack.
  bool restore(uint32_t owner, uint64_t first, std::span<const std::byte> results);
  // What is not done of its share, of the first operation from `first` on where there is any.
  struct Rest {
    uint64_t operation;
    Shape shape;
    const std::byte* in;
    std::byte* out;
  };
  std::optional<Rest> rest(uint32_t owner, uint64_t first) const;
  void repaired(uint32_t owner, uint64_t operation);  // that was done

  // The part, 0 to 1, that has come of what this rank gets in an operation, from the owner furthest behind.
  double received(uint64_t operation) const;
  // Owners that have not returned all of an operation, for diagnosis.
  std::vector<uint32_t> incomplete(uint64_t operation) const;
  // What an owner has returned of the first operation that it has not finished, and has a share of.
  bool owes(uint32_t owner, uint64_t* operation, uint64_t* bytes, uint64_t* of) const;
  // How many operations are complete here, from the first one on without a gap; and on all ranks, as owners report.
  uint64_t completed() const { return operations_.empty() ? begun_ : operations_.front().number; }
  uint64_t begun() const { return begun_; }
  CongestionWindow& window() { return window_; }
  void clear() { operations_.clear(); }

 private:
  struct Part {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    uint64_t bytes = 0, back = 0;  // on the wire: to be sent, and of results
    uint64_t sent = 0, got = 0;    // of results, or else credits
    bool used = false, opened = false, done = false, declined = false, exposed = false, lost = false;
  };
  struct Operation {
    std::shared_ptr<Work> work;
    uint64_t number = 0;
    uint64_t base = 0, bytes = 0;  // in the stream of all that is sent
    std::vector<Part> parts;       // by owner
    uint32_t left = 0;             // parts that are not done, and one while `serving`
    bool exposed = false;
    bool serving = false;  // other ranks still read or are sent results from this one's array
  };

  void divide(Operation* operation) const;
  void open(uint32_t owner, Operation& operation);
  void detach(Operation& operation, uint32_t owner);
  void end_empty(uint32_t owner);
  void ask_all();  // for what there may be for the owners
  bool early(uint32_t owner, const WireHeader& result) const;
  void adopt(uint32_t owner);
  Operation* find(uint64_t number);
  const Operation* find(uint64_t number) const { return const_cast<ShardedAllreduce*>(this)->find(number); }
  void done(Operation& operation, Part& part);
  void release(Operation& operation);
  uint64_t returned() const;
  uint64_t limit(const Operation& operation, const Part& part) const;
  void gained(Operation& operation, uint32_t owner, uint64_t bytes);

  ChunkBufferPool& blocks_;
  Host& host_;
  const std::vector<double> shares_;
  const uint32_t self_;
  const uint64_t chunk_;
  CongestionWindow window_;
  std::deque<Operation> operations_;
  std::vector<uint32_t> others_;                    // other members that own a share
  std::vector<EagerResults> eager_;                 // by owner
  std::vector<std::unique_ptr<KeptResults>> kept_;  // by owner; null: it is not lost without the group
  std::vector<uint64_t> lost_until_;                // by owner: the first operation of which it has its share
  std::vector<ChunkBufferRef> staging_;             // by owner: where its results of another type arrive, in pieces
  std::vector<size_t> unsent_;  // by owner: number of the first operation that may have something for it
  uint64_t stream_ = 0;         // where the next operation begins
  uint64_t asked_until_ = 0;    // how far the window went when all were asked last
  uint64_t begun_ = 0;
  uint64_t delivered_ = 0;   // bytes of results so far
  bool first_turn_ = false;  // of an operation, for ask_all()
  DelayProbe probe_;
};

}  // namespace geartrain
