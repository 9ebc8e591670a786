// What a group does on its loop: frames of all peers arrive here and are dispatched, to the members, the operations or
// their deadlines; and what becomes of the group when a peer leaves, is lost or tells of a fault.
//
// On the loop, except ReducerEvents::take() and what Membership says of itself.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collectives/deadlines.h"
#include "collectives/membership.h"
#include "collectives/operations.h"
#include "collectives/redial.h"

namespace geartrain {

class GroupSide final : public Peer::Side {
 public:
  // `lost`: a reducer, which may be dialled again (wanted, reached).
  GroupSide(const GroupOptions& options, EventLoop& loop, std::function<void()> lost,
            Operations::Clock now_ns = monotonic_ns);

  Membership& members() { return members_; }
  Operations& operations() { return operations_; }
  ReducerEvents& reducer_events() { return reducer_events_; }

  void begin(const std::shared_ptr<Work>& work);
  // Returns the nanoseconds after which to be called again.
  uint64_t on_time() { return std::min(deadlines_.on_time(), operations_.on_time()); }
  std::vector<Redial::Wanted> wanted() const;
  void reached(uint32_t member, Dialled dialled);
  // Says so to all, and ends the group here.
  void leave();

  std::span<std::byte> room(Peer& peer, const WireHeader& header) override;
  bool used_in_place(Peer& peer, const WireHeader& header, std::span<const std::byte> payload) override {
    return !members_.over() && operations_.used_in_place(peer, header, payload);
  }
  void took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) override;
  bool next(Peer& peer, OutFrame* frame) override { return !members_.over() && operations_.next(peer, frame); }
  void lost(Peer& peer, const std::string& why) override;
  void failed(Peer&, const std::exception& error) noexcept override { members_.failed(error); }
  std::span<std::byte> discard() noexcept override { return discard_; }

 private:
  void told(uint32_t member, Fault fault);
  void left(uint32_t member, uint64_t done);

  const GroupOptions& options_;
  std::vector<std::byte> discard_ = std::vector<std::byte>(kChunkBytes);  // for what arrives after the end
  ReducerEvents reducer_events_;
  Membership members_;
  Operations operations_;
  OperationDeadlines deadlines_;
  bool leaving_ = false;
};

}  // namespace geartrain
