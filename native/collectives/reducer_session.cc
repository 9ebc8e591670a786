#include "collectives/reducer_session.h"

#include <algorithm>
#include <cstring>

namespace geartrain {
namespace {

GroupId group_of(const Join& join) {
  GroupId id;
  std::memcpy(id.data(), join.group, id.size());
  return id;
}

}  // namespace

ReducerSession::ReducerSession(EventLoop& loop, ChunkBufferPool& blocks, const Join& join, uint64_t window_bytes,
                               std::string where)
    : first(join),
      where_(std::move(where)),
      loop_(loop),
      peers_(join.world),
      met_(join.world),
      left_at_(join.world, ~uint64_t{0}),
      discard_(kChunkBytes),
      owner_(blocks, *this, join.world, ShareOwner::kNoRank, chunk_bytes(join.owners), window_bytes),
      out_of_memory_{FaultKind::reducer_lost, "reducer " + where_ + " ran out of memory", {join.member}} {}

uint32_t ReducerSession::ranks() const {
  return static_cast<uint32_t>(std::count_if(peers_.begin(), peers_.end(), [](const auto& p) { return p != nullptr; }));
}

bool ReducerSession::drained() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const auto& p) { return p == nullptr || p->drained(); });
}

void ReducerSession::add(uint32_t rank, std::unique_ptr<Link> link) {
  peers_[rank] = std::make_unique<Peer>(loop_, std::move(link), rank, *this);
  met_[rank] = true;
  if (over()) return notify(*peers_[rank]);
  peers_[rank]->kick();
}

bool ReducerSession::begins_again(uint32_t rank) {
  if (over() || owner_.operations() != 0 || owner_.newest() != 0 || left_at_[rank] != ~uint64_t{0}) return false;
  hang_up(rank);
  return true;
}

void ReducerSession::hang_up() {
  for (uint32_t rank = 0; rank < peers_.size(); ++rank) hang_up(rank);
}

void ReducerSession::hang_up(uint32_t rank) {
  if (peers_[rank] == nullptr) return;
  received_ += peers_[rank]->bytes_received();
  sent_ += peers_[rank]->bytes_sent();
  peers_[rank]->close();
  loop_.discard(std::move(peers_[rank]));
}

uint64_t ReducerSession::bytes_received() const {
  uint64_t bytes = received_;
  for (const auto& peer : peers_) bytes += peer != nullptr ? peer->bytes_received() : 0;
  return bytes;
}

uint64_t ReducerSession::bytes_sent() const {
  uint64_t bytes = sent_;
  for (const auto& peer : peers_) bytes += peer != nullptr ? peer->bytes_sent() : 0;
  return bytes;
}

// --- frames ---------------------------------------------------------------------------------------------------------

std::span<std::byte> ReducerSession::room(Peer& peer, const WireHeader& header) {
  if (over()) return discard_;
  if (static_cast<FrameKind>(header.kind) != FrameKind::part) fail(ErrorKind::frame, "it sent data of the wrong kind");
  return owner_.room(peer.member(), header);
}

void ReducerSession::took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) {
  const auto kind = static_cast<FrameKind>(header.kind);
  if (kind == FrameKind::bye) {
    left_at_[peer.member()] = header.operation;
    if (!over() && owner_.newest() > header.operation) end(left_fault(peer.member(), header.operation));
    return;
  }
  if (over()) return;
  switch (kind) {
    case FrameKind::open: {
      if (header.bytes != sizeof(Open)) fail(ErrorKind::frame, "it sent a malformed open");
      Open open;
      std::memcpy(&open, payload.data(), sizeof open);
      for (uint32_t rank = 0; rank < left_at_.size(); ++rank) {
        if (header.operation >= left_at_[rank]) return end(left_fault(rank, header.operation));
      }
      return owner_.open(peer.member(), header.operation, open);
    }
    case FrameKind::part:
      return owner_.took(peer.member(), header);
    case FrameKind::query: {
      uint64_t bytes, of;
      const auto ranks = owner_.least_advanced(header.operation, &bytes, &of);
      peer.send_control(FrameKind::status, header.operation, 0, members_bytes(bytes, of, ranks));
      return peer.kick();
    }
    case FrameKind::fault:
      return end(fault_from(payload));
    default:
      fail(ErrorKind::frame, "it sent a frame of the wrong kind");
  }
}

void ReducerSession::results_for(uint32_t rank) {
  if (peers_[rank] != nullptr) peers_[rank]->kick();
}

// --- the end --------------------------------------------------------------------------------------------------------

void ReducerSession::lost(Peer& peer, const std::string& why) {
  const uint32_t rank = peer.member();
  received_ += peer.bytes_received();
  sent_ += peer.bytes_sent();
  loop_.discard(std::move(peers_[rank]));
  if (over()) return;
  uint64_t operation, bytes, of;
  const bool owes = owner_.involves(rank, &operation, &bytes, &of);
  if (left_at_[rank] != ~uint64_t{0}) return;
  const std::string when =
      owes ? message_of({"in operation ", operation, ", after sending ", bytes, " of ", of, " bytes"})
           : "between operations";
  end({FaultKind::rank_lost,
       message_of({"rank ", rank, " went away (", why, ") ", when, " [seen by reducer ", where_, "]"}),
       {rank}});
}

void ReducerSession::disagree(const std::string& text, std::vector<uint32_t> ranks) {
  end({FaultKind::disagree, text, std::move(ranks)});
}

Fault ReducerSession::left_fault(uint32_t rank, uint64_t operation) {
  return {FaultKind::rank_lost,
          "rank " + std::to_string(rank) + " has left the group, and operation " + std::to_string(operation) +
              " waits for it",
          {rank}};
}

// Behind the rest of a result that is being sent, as it is: a rank that outlives this reducer takes it for one
// (takeover.h). All that is in flight is in blocks of this session, and none of it in a caller's memory.
void ReducerSession::notify(Peer& peer) noexcept {
  try {
    peer.send_control(FrameKind::fault, 0, 0, bytes_of(fault_));
    peer.kick();
  } catch (const std::exception&) {
    // Then its connection tells it.
    peer.close();
    loop_.discard(std::move(peers_[peer.member()]));
  }
}

void ReducerSession::end(const Fault& fault) noexcept {
  if (over()) return;
  fault_.kind = fault.kind;  // whatever follows
  try {
    fault_ = fault;
  } catch (const std::exception&) {
    // A fault without its text.
  }
  for (const auto& peer : peers_) {
    if (peer != nullptr && !peer->closed()) notify(*peer);
  }
}

void ReducerSession::failed(const std::exception& error) noexcept {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return end(out_of_memory_);
  try {
    end({FaultKind::reducer_lost, "reducer " + where_ + " failed: " + error.what(), {first.member}});
  } catch (const std::exception&) {
    end(out_of_memory_);
  }
}

// --- groups ---------------------------------------------------------------------------------------------------------

bool ReducerGroups::has_room(const GroupId& id) const {
  std::lock_guard lock(mutex_);
  return groups_.size() < most_ || groups_.contains(id);
}

void ReducerGroups::begin(const GroupId& id) {
  std::lock_guard lock(mutex_);
  const auto [place, made] = groups_.try_emplace(id);
  ++place->second.open;
  served_ += made;
}

void ReducerGroups::end(const GroupId& id, bool failed) {
  std::lock_guard lock(mutex_);
  const auto place = groups_.find(id);
  place->second.failed |= failed;
  if (--place->second.open != 0) return;
  failed_ += place->second.failed;
  groups_.erase(place);
}

void ReducerGroups::count(ReducerCounts* out) const {
  std::lock_guard lock(mutex_);
  out->groups = groups_.size();
  out->groups_served = served_;
  out->groups_failed = failed_;
}

// --- sessions -------------------------------------------------------------------------------------------------------

ReducerSessions::SessionId ReducerSessions::session_of(const Join& join) {
  return {group_of(join), join.channel};
}

ReducerSession* ReducerSessions::find(const Join& join) const {
  const auto place = sessions_.find(session_of(join));
  return place == sessions_.end() ? nullptr : place->second.get();
}

Acceptor::Host::Verdict ReducerSessions::judge(const Join& join, std::string* refusal) {
  using Verdict = Acceptor::Host::Verdict;
  const auto place = sessions_.find(session_of(join));
  if (place != sessions_.end()) {
    ReducerSession& session = *place->second;
    const Join& first = session.first;
    if (std::memcmp(join.settings, first.settings, sizeof join.settings) != 0 || join.world != first.world ||
        join.owners != first.owners || join.member != first.member) {
      *refusal = "ranks disagree about shares, reducers or the algorithm of the group";
      return Verdict::refused;
    }
    if (!session.met(join.rank)) return Verdict::welcome;
    if (session.begins_again(join.rank)) return Verdict::welcome;
    session.hang_up();
    remove(place);
  }
  if (leaving_) *refusal = "this reducer is stopping";
  if (!groups_.has_room(group_of(join))) *refusal = "this reducer is at its limit of groups";
  if (join.member < join.world) *refusal = "this is a reducer, and not a rank";
  return refusal->empty() ? Verdict::welcome : Verdict::refused;
}

void ReducerSessions::enter(ChunkBufferPool& blocks, const Join& join, std::unique_ptr<Link> link) {
  auto place = sessions_.find(session_of(join));
  if (place == sessions_.end()) {
    auto session = std::make_unique<ReducerSession>(loop_, blocks, join, window_bytes_, where_);
    place = sessions_.emplace(session_of(join), std::move(session)).first;
    try {
      groups_.begin(group_of(join));
    } catch (const std::exception&) {
      sessions_.erase(place);  // which would be taken from a count that it is not in
      throw;
    }
  }
  try {
    place->second->add(join.rank, std::move(link));
  } catch (const std::exception& error) {
    place->second->failed(error);
  }
}

ReducerSessions::Place ReducerSessions::remove(Place place) {
  add_counts(*place->second, &past_);
  groups_.end(place->first.first, place->second->over());
  return sessions_.erase(place);
}

void ReducerSessions::remove_empty() {
  for (auto place = sessions_.begin(); place != sessions_.end();) {
    place = place->second->ranks() != 0 ? std::next(place) : remove(place);
  }
}

void ReducerSessions::stop(const std::string& why) {
  for (const auto& [id, session] : sessions_) {
    session->stop({FaultKind::reducer_lost, why, {session->first.member}});
  }
}

bool ReducerSessions::drained() const {
  return std::all_of(sessions_.begin(), sessions_.end(), [](const auto& one) { return one.second->drained(); });
}

void ReducerSessions::add_counts(const ReducerSession& session, ReducerCounts* out) {
  out->operations += session.owner().operations();
  out->reduced_bytes += session.owner().reduced_bytes();
  out->bytes_received += session.bytes_received();
  out->bytes_sent += session.bytes_sent();
}

void ReducerSessions::count(ReducerCounts* out) const {
  out->operations += past_.operations;
  out->bytes_received += past_.bytes_received;
  out->bytes_sent += past_.bytes_sent;
  out->reduced_bytes += past_.reduced_bytes;
  for (const auto& [id, session] : sessions_) {
    if (id.second == 0) out->ranks += session->ranks();
    add_counts(*session, out);
  }
}

}  // namespace geartrain
