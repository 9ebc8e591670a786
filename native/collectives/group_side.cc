#include "collectives/group_side.h"

#include <utility>

namespace geartrain {

GroupSide::GroupSide(const GroupOptions& options, EventLoop& loop, std::function<void()> lost, Operations::Clock now_ns)
    : options_(options),
      members_(options, loop, *this,
               {.ended = [this] { operations_.finish_all(); },
                .welcome = [this](uint64_t most) { operations_.limit_windows(most); },
                .entered = [this](uint32_t member) { operations_.entered(member); }}),
      operations_(options, members_, loop, reducer_events_, std::move(lost), std::move(now_ns)),
      deadlines_(options, members_, operations_) {}

void GroupSide::begin(const std::shared_ptr<Work>& work) {
  if (members_.over()) return work->finish(members_.ending());
  try {
    operations_.add(work);
    deadlines_.began(*work);
    if (Fault missing = members_.missing_for(work->number); missing.kind != FaultKind::none) {
      return members_.end(std::move(missing));
    }
    operations_.start(work);
  } catch (const std::exception& error) {
    members_.failed(error);
    if (!work->done()) work->finish(members_.ending());  // it may not be among those in flight yet
  }
}

std::vector<Redial::Wanted> GroupSide::wanted() const {
  std::vector<Redial::Wanted> out;
  if (members_.over()) return out;
  for (const uint32_t member : operations_.wanted()) out.push_back({member, members_.join_to(member)});
  return out;
}

void GroupSide::reached(uint32_t member, Dialled dialled) {
  if (!members_.over() && !leaving_) operations_.reached(member, std::move(dialled));
}

void GroupSide::leave() {
  const auto& works = operations_.works();
  members_.for_each_open([&](Peer& peer) {
    peer.send_control(FrameKind::bye, works.empty() ? operations_.next_number() : works.front()->number);
    peer.kick();
  });
  leaving_ = true;
  members_.end({FaultKind::closed, "the group was closed", {}}, false);
  members_.refuse_waiting();
}

std::span<std::byte> GroupSide::room(Peer& peer, const WireHeader& header) {
  if (members_.over()) return discard_;
  return operations_.room(peer, header);
}

void GroupSide::took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) {
  const auto kind = static_cast<FrameKind>(header.kind);
  if (kind == FrameKind::fault) return told(peer.member(), fault_from(payload));
  if (kind == FrameKind::bye) return left(peer.member(), header.operation);
  if (members_.over()) return;
  if (kind == FrameKind::query) return deadlines_.took_query(peer, header.operation);
  if (kind == FrameKind::status) return deadlines_.took_status(peer, header.operation, payload);
  operations_.took(peer, header, payload);
}

// A reducer that has lost one rank's connection only tells all others that this rank is lost. Ranks find that out by
// themselves, which are all connected where the group outlives reducers.
void GroupSide::told(uint32_t member, Fault fault) {
  const bool lost = fault.kind == FaultKind::rank_lost || fault.kind == FaultKind::reducer_lost;
  if (!members_.over() && lost && operations_.lose(member, fault.text)) return;
  members_.end(std::move(fault));
}

void GroupSide::lost(Peer& peer, const std::string& why) {
  const uint32_t member = peer.member();
  members_.discard(member);
  if (leaving_ || members_.over() || operations_.lose(member, why)) return;
  uint64_t operation, bytes, of;
  if (members_.has_left(member)) {
    // It sent its results before, unless it left in a hurry. A rank that has done all that it began lacks nothing,
    // whatever a reducer's loss would have made the other tell.
    const auto& works = operations_.works();
    if (!works.empty() && operations_.owes(member)) members_.end(members_.left_fault(member, works.front()->number));
    return;
  }
  std::string when;
  if (operations_.shares().owes(member, &operation, &bytes, &of)) {
    when = message_of({"in operation ", operation, ", after ", bytes, " of ", of, " bytes of its share"});
  } else if (member < options_.world && operations_.owner().involves(member, &operation, &bytes, &of)) {
    when = message_of({"in operation ", operation, ", after sending ", bytes, " of ", of, " bytes"});
  } else {
    when = message_of({"between operations, after ", operations_.done()});
  }
  members_.end(
      {member < options_.world ? FaultKind::rank_lost : FaultKind::reducer_lost,
       message_of({members_.name_of(member), " went away (", why, ") ", when, " [seen by rank ", options_.rank, "]"}),
       {member}});
}

void GroupSide::left(uint32_t member, uint64_t done) {
  members_.left(member, done);
  for (const auto& work : operations_.works()) {
    if (work->number >= done) return members_.end(members_.left_fault(member, work->number));
  }
  operations_.left();
}

}  // namespace geartrain
