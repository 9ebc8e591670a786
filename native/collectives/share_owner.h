// Owner of a share: receives every rank's numbers of it, reduces them in the order of the ranks, and returns the result
// to all. The same code on a rank and in a reducer.
//
// Numbers come in chunks. As soon as a chunk has arrived from every rank it is reduced, whatever order the chunks came
// in, and can be sent back while the next one is in flight; of the first one even a part, in multiples of kFirstBytes,
// so that results set out as early as can be. A rank never runs more than a window ahead of the results it got, so an
// owner holds a window of every rank and not their arrays; anything beyond is refused.
//
// A rank that owns a share passes its own numbers by address (open_local), without a copy, and gets its results by
// Host::deliver.
//
// Other collectives than all_reduce are the same with fewer contributors or fewer recipients (protocol.h: Collective).
// Who contributes and gets no result gets credits, by which it knows how far it may run ahead. An owner that passes on
// one rank's numbers, a relay, gives credit for what all recipients have taken. An owner that is the only contributor
// holds nothing: it sends from the caller's memory (send_local) to each rank, of which one that has not opened the
// operation keeps the first kEagerBytes (EagerResults), and no more than the group's window ahead of what these have
// taken and of what this rank itself gets in that operation, so that all transfers of it go on at one pace. A rank of
// the same host that can read that memory is told where it is instead: one copy where a ring takes two, and none of
// them here.
//
// Ranks on one host may expose their numbers instead of sending them (Open::address). They are then read from there
// (share_exposure.h), and reduced right into the place of this rank's result, which the others read in turn. A few
// pieces at a time: what arrives meanwhile is not kept waiting (Host::go_on). This rank's array is its caller's again
// when all have what they need of it (served). An owner that does not expose its results reads nothing either, and asks
// for parts: it holds a window of them, and not its share.
//
// One thread, the loop's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/chunk_buffer.h"
#include "collectives/congestion_window.h"
#include "collectives/owned_share.h"
#include "collectives/peer.h"
#include "collectives/protocol.h"
#include "collectives/share_exposure.h"
#include "collectives/work.h"

namespace geartrain {

// Operations of which this rank owns no share: their shapes, so that a rank that opens one here by mistake is told, and
// the roots that have announced a broadcast to this rank.
//
// A root opens its broadcast when it begins it, which may be before this rank does. Whichever comes first is kept for
// the other. Of all other operations the last are kept.
class UnownedOperations {
 public:
  using Root = std::pair<uint32_t, Shape>;  // and the shape that it has announced

  // The shape that this rank has begun it with. Null when it has not, or that is not kept any more.
  const Shape* find(uint64_t operation) const;
  // This rank has begun it.
  void add(uint64_t operation, const Shape& shape);
  // A root has announced what this rank is to begin. Throws frame when there are too many.
  void announce(uint32_t rank, uint64_t operation, const Shape& shape);
  // The root has come of what this rank has begun.
  void settle(uint64_t operation) { unannounced_.erase(operation); }
  const Root* root_of(uint64_t operation) const;
  std::optional<Root> take_root(uint64_t operation);

 private:
  std::map<uint64_t, Shape> unannounced_, others_;  // broadcasts on one host whose root is still to come, and the rest
  std::map<uint64_t, Root> announced_;
};

class ShareOwner {
 public:
  class Host : public ShareExposure::Memory {
   public:
    virtual void results_for(uint32_t rank) = 0;  // next() has something for it
    virtual void deliver(uint64_t operation, uint64_t offset,
                         std::span<const std::byte> result) = 0;  // to this rank itself
    // All ranks have what send_local() was given, or the results that are exposed.
    virtual void served([[maybe_unused]] uint64_t operation) {}
    virtual void go_on() {}                                 // calls go_on() soon, and not from here
    virtual CongestionWindow* window() { return nullptr; }  // of a rank
    virtual StageClock* stages() { return nullptr; }
    // Whether to send to a rank what it has not asked for yet (EagerResults).
    virtual bool sends_eagerly([[maybe_unused]] uint32_t rank) { return false; }
    // The part, 0 to 1, that has come of what this rank gets in an operation, from the rank furthest behind.
    virtual double received([[maybe_unused]] uint64_t operation) const { return 1; }
    virtual void disagree(const std::string& text, std::vector<uint32_t> ranks) = 0;
  };
  // `self` is the owner's own rank, or kNoRank. `window_bytes` is what a rank may have here and not yet reduced.
  static constexpr uint32_t kNoRank = ~0u;
  ShareOwner(ChunkBufferPool& blocks, Host& host, uint32_t world, uint32_t self, uint64_t chunk, uint64_t window_bytes);

  // From a rank. Each throws frame when it is not what may come next from it.
  void open(uint32_t rank, uint64_t operation, const Open& open);
  std::span<std::byte> room(uint32_t rank, const WireHeader& part);
  void took(uint32_t rank, const WireHeader& part);
  // Instead of both, where that is the last that a piece waits for: it is reduced right from there. Else false.
  bool took_in_place(uint32_t rank, const WireHeader& part, const std::byte* numbers);
  // This rank's own numbers, of type shape.dtype, which stay unchanged until the last result was delivered. Results
  // are made in `exposed` where that is not null, which may be `numbers`: they stay there until they were served.
  void open_local(uint64_t operation, const Shape& shape, uint64_t share_bytes, const std::byte* numbers,
                  std::byte* exposed = nullptr);
  // Reduces more of what was left when Host::go_on() was called.
  void go_on();

  // This rank has begun an operation and owns no share of it: who opens it here is mistaken, unless it announces itself
  // as the root of the same broadcast.
  void owns_none(uint64_t operation, const Shape& shape);
  // This rank's numbers for each of the ranks, which stay unchanged until they were served.
  void send_local(uint64_t operation, const Shape& shape, std::vector<Segment> sends);
  // A rank has got so much of that. Throws frame.
  void took_taken(uint32_t rank, const WireHeader& taken);
  // A rank cannot read what it was exposed beyond what it has got: it is sent that. Throws frame.
  void took_unreadable(uint32_t rank, const WireHeader& unreadable);

  // The next piece of a result for a rank. False when there is none now.
  bool next(uint32_t rank, OutFrame* frame);

  // The ranks that an operation waits for: those that have sent the least, of it or of an earlier one.
  std::vector<uint32_t> least_advanced(uint64_t operation, uint64_t* bytes, uint64_t* of) const;
  // The first operation that some rank has begun and that is not over, or a number beyond all.
  uint64_t oldest() const { return operations_.empty() ? ~uint64_t{0} : operations_.begin()->first; }
  // One beyond the last operation in flight; 0 when there is none.
  uint64_t newest() const { return operations_.empty() ? 0 : operations_.rbegin()->first + 1; }
  // The first operation that a rank has not completed, in either direction.
  bool involves(uint32_t rank, uint64_t* operation, uint64_t* bytes, uint64_t* of) const;
  uint64_t reduced_bytes() const { return reduced_bytes_; }
  uint64_t operations() const { return done_; }

 private:
  using Place = std::map<uint64_t, OwnedShare>::iterator;

  Place expected(uint32_t rank, const WireHeader& part);
  Place find_or_make(uint32_t rank, uint64_t operation, const Shape& shape, uint64_t share_bytes);
  void advance(Place place);
  uint64_t next_piece(const OwnedShare& share, uint64_t there) const;
  // `numbers`: of rank `there`, in none of its chunks.
  bool reduce_chunk(uint64_t number, OwnedShare& share, uint64_t bytes, uint32_t there = kNoRank,
                    const std::byte* numbers = nullptr);
  void tell(Place place);
  void end(Place place, uint32_t rank);
  bool forget_sent(OwnedShare& share);
  bool may_send(uint64_t operation, const OwnedShare& share, uint32_t rank) const;
  bool next_local(Place place, uint32_t rank, OutFrame* frame);
  bool agrees(uint64_t number, const OwnedShare& share, uint32_t rank);
  void disagree(uint64_t number, uint32_t rank, const Shape& shape, uint32_t other, const Shape& others);
  void announced(uint32_t rank, uint64_t number, const Shape& shape);
  bool differs_from_root(uint64_t number, const Shape& shape);

  ChunkBufferPool& blocks_;
  Host& host_;
  const uint32_t world_, self_;
  const uint64_t chunk_, window_bytes_;
  std::map<uint64_t, OwnedShare> operations_;
  std::vector<uint64_t> next_open_;  // by rank: no operation below this may be opened by it any more
  std::vector<uint64_t> held_;       // by rank: bytes here and not yet reduced, or relayed
  uint64_t reduced_bytes_ = 0, done_ = 0;
  uint64_t next_own_ = 0;  // one beyond the last operation that this rank has begun
  UnownedOperations unowned_;
  ShareExposure exposure_;

  // Of what is sent from the caller's memory: bytes that are not taken yet, and those that are.
  uint64_t under_way_ = 0, taken_ = 0;
  DelayProbe probe_;
};

}  // namespace geartrain
