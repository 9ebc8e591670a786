// Operations of a group that are in flight: their order, the algorithm of each, and the dispatch of their
// frames. Several run at the same time; each ends by itself (Work::finish), or all by the group's fault.
//
// On the loop.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/membership.h"
#include "collectives/ring_allreduce.h"
#include "collectives/sharded_allreduce.h"
#include "collectives/share_owner.h"
#include "collectives/takeover.h"
#include "collectives/work.h"

namespace geartrain {

class Operations final : public ShareOwner::Host, public ShardedAllreduce::Host, public RingAllreduce::Host {
 public:
  // `lost`: a reducer, which may be dialled again (wanted, reached). `now_ns` is for takeovers.
  using Clock = std::function<uint64_t()>;
  Operations(const GroupOptions& options, Membership& members, EventLoop& loop, ReducerEvents& events,
             std::function<void()> lost, Clock now_ns);

  // Gives it its number. Then start(), unless the group ended over it.
  void add(const std::shared_ptr<Work>& work);
  void start(const std::shared_ptr<Work>& work);
  // All fail with the group's fault.
  void finish_all() noexcept;

  // Whether a reducer is lost without the end of the group; then it is.
  bool lose(uint32_t member, const std::string& why);
  std::vector<uint32_t> wanted() const;
  void reached(uint32_t member, Dialled dialled);
  uint64_t on_time() const;  // Takeover::on_time
  void entered(uint32_t rank) const;
  void left() const;  // a rank has
  // In a group that outlives reducers nobody leaves before all ranks have what it has done: it may be the only one that
  // has the results of a reducer that is lost next.
  void tell_complete();       // tells all ranks how many operations this one has done
  bool all_complete() const;  // whether all ranks have done all that there are
  // Whether a rank that is gone owes something here.
  bool owes(uint32_t rank) const;
  // Whether other ranks may still need this one.
  bool serves() const;
  // Members that an operation of this rank waits for, but in a ring.
  std::vector<uint32_t> waited_for(uint64_t operation) const;

  // Peer::Side for frames of these kinds: open, ring, part, result.
  std::span<std::byte> room(const Peer& peer, const WireHeader& header);
  bool used_in_place(const Peer& peer, const WireHeader& header, std::span<const std::byte> payload);
  void took(const Peer& peer, const WireHeader& header, std::span<std::byte> payload);
  bool next(const Peer& peer, OutFrame* frame);

  const std::vector<std::shared_ptr<Work>>& works() const { return works_; }  // in flight, in their order
  uint64_t next_number() const { return next_number_; }
  uint64_t done() const { return done_; }
  ShareOwner& owner() { return owner_; }
  ShardedAllreduce& shares() { return shares_; }
  RingAllreduce& ring() { return ring_; }
  // What the owners allow may be less than was expected.
  void limit_windows(uint64_t most) {
    shares_.window().limit(most);
    direct_.limit(most);
  }
  void count(GroupCounts* out);

 private:
  void start_now(const std::shared_ptr<Work>& work);
  bool holds() const;
  void resumed();
  bool exposes(const Shape& shape) const;
  void opened(uint32_t rank, uint64_t operation, const Open& open);
  void took_complete(uint32_t rank, uint64_t operations);
  void tell_complete(uint32_t rank);
  Takeover& takeover_of(const Peer& peer, const WireHeader& header) const;
  void open(uint32_t owner, uint64_t operation, const Open& open) override;
  void parts_for(uint32_t owner) override { members_.kick(owner); }
  void results_for(uint32_t rank) override { members_.kick(rank); }
  void deliver(uint64_t operation, uint64_t offset, std::span<const std::byte> result) override {
    shares_.deliver(operation, offset, result);
  }
  bool exposes_to(uint32_t owner) override;
  ReadExposed read(uint32_t rank, uint64_t address, std::span<std::byte> into) override;
  void unreadable_part(uint32_t rank, uint64_t operation, uint64_t from) override {
    members_.send_control(rank, FrameKind::unreadable_part, operation, from);
  }
  void go_on() override;
  void taken(uint32_t owner, uint64_t operation, uint64_t bytes) override {
    members_.send_control(owner, FrameKind::taken, operation, bytes);
  }
  void adopt_soon() override;
  bool sends_eagerly(uint32_t rank) override;
  void unreadable(uint32_t owner, uint64_t operation, uint64_t from) override {
    members_.send_control(owner, FrameKind::unreadable, operation, from);
  }
  CongestionWindow* window() override { return &direct_; }
  StageClock* stages() override { return &loop_.stages(); }
  double received(uint64_t operation) const override { return shares_.received(operation); }
  void served(uint64_t operation) override { shares_.served(operation); }
  void open_next(uint64_t operation, const Open& what) override { open(members_.next_rank(), operation, what); }
  void ring_for_next() override { members_.kick(members_.next_rank()); }
  void ring_room() override;
  void disagree(const std::string& text, std::vector<uint32_t> ranks) override {
    members_.end({FaultKind::disagree, text, std::move(ranks)});
  }
  void completed(const std::shared_ptr<Work>& work) override;
  void check_ring(const Peer& peer) const;
  void announce(const Work& work);
  void took_exposed(const Peer& peer, const WireHeader& header, std::span<const std::byte> payload);

  const GroupOptions& options_;
  Membership& members_;
  EventLoop& loop_;
  const uint64_t least_exposed_bytes_;
  const bool shares_cores_;                   // more ranks than cores
  bool going_on_ = false, adopting_ = false;  // it was posted
  ChunkBufferPool blocks_;
  CongestionWindow direct_;  // of what is sent from the caller's memory
  ShareOwner owner_;
  ShardedAllreduce shares_;
  RingAllreduce ring_;
  std::vector<std::unique_ptr<Takeover>> takeovers_;  // by reducer, where the group outlives it
  // By rank, where the group outlives reducers: how many operations it has done, as it says and as it was told.
  std::vector<uint64_t> complete_, told_complete_;
  bool turn_ = false;                       // of the takeovers, before the rest
  std::deque<std::shared_ptr<Work>> held_;  // not begun yet (Takeover::holds)
  std::vector<std::shared_ptr<Work>> works_;
  uint64_t next_number_ = 0;
  uint64_t done_ = 0, by_callers_ = 0, elements_ = 0, array_bytes_ = 0, read_bytes_ = 0, read_operations_ = 0;
};

}  // namespace geartrain
