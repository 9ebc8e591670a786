// Session of one group on a reducer: its ranks' peers, and the owner of the reducer's share. On the reducer's loop.
//
// Ranks join and leave by themselves. One that leaves in the middle of an operation, violates the protocol or disagrees
// ends the group: the remaining ranks receive the fault, and nothing more is accepted from them. So does memory that
// runs out here.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/peer.h"
#include "collectives/share_owner.h"

namespace geartrain {

class ReducerSession final : public Peer::Side, public ShareOwner::Host {
 public:
  // `first` is the first rank's Join, with which the others must agree; `where` the reducer's address.
  ReducerSession(EventLoop& loop, ChunkBufferPool& blocks, const Join& first, uint64_t window_bytes, std::string where);

  bool has(uint32_t rank) const { return peers_[rank] != nullptr; }
  uint32_t ranks() const;
  bool over() const { return fault_.kind != FaultKind::none; }
  // Whether this rank has been here: it has lost that connection, and comes for another session. It is the same one
  // where this session lives and no operation has begun in it.
  bool met(uint32_t rank) const { return rank < met_.size() && met_[rank]; }
  bool begins_again(uint32_t rank);
  // On all ranks, whatever they were not sent yet.
  void hang_up();
  bool drained() const;
  void add(uint32_t rank, std::unique_ptr<Link> link);
  void stop(const Fault& fault) noexcept { end(fault); }
  // Ends the group after an exception here: memory ran out, usually.
  void failed(const std::exception& error) noexcept;
  Peer* peer(uint32_t rank) { return peers_[rank].get(); }

  uint64_t bytes_received() const;
  uint64_t bytes_sent() const;
  const ShareOwner& owner() const { return owner_; }

  std::span<std::byte> room(Peer& peer, const WireHeader& header) override;
  void took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) override;
  bool next(Peer& peer, OutFrame* frame) override { return !over() && owner_.next(peer.member(), frame); }
  void lost(Peer& peer, const std::string& why) override;
  void failed(Peer&, const std::exception& error) noexcept override { failed(error); }
  std::span<std::byte> discard() noexcept override { return discard_; }
  void results_for(uint32_t rank) override;
  void deliver(uint64_t, uint64_t, std::span<const std::byte>) override {}
  void disagree(const std::string& text, std::vector<uint32_t> ranks) override;

  const Join first;

 private:
  void hang_up(uint32_t rank);
  static Fault left_fault(uint32_t rank, uint64_t operation);
  void notify(Peer& peer) noexcept;
  void end(const Fault& fault) noexcept;

  const std::string where_;
  EventLoop& loop_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank
  std::vector<bool> met_;                     // by rank: it has been here
  std::vector<uint64_t> left_at_;             // by rank: the first operation that it does not take part in
  std::vector<std::byte> discard_;            // for what arrives after the end
  ShareOwner owner_;
  const Fault out_of_memory_;  // made while there is some
  Fault fault_;
  uint64_t received_ = 0, sent_ = 0;  // of ranks that have left
};

}  // namespace geartrain
