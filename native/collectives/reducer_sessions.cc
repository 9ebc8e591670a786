#include "collectives/reducer_sessions.h"

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
