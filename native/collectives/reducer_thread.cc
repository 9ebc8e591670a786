#include "collectives/reducer_thread.h"

#include <algorithm>
#include <cstring>

#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr size_t kKeptBlocks = 4096;  // of all threads, free and warm

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

// --- the thread -----------------------------------------------------------------------------------------------------

// What fails outside of a group's session is a connection that is refused or dropped.
ReducerThread::ReducerThread(Shared& shared)
    : shared_(shared),
      blocks_(kKeptBlocks / shared.options.threads),
      loop_("geartr. reducer", [](const std::exception&) {}) {}

ReducerThread::~ReducerThread() {
  loop_.stop();
  sessions_.clear();
  acceptor_.reset();
}

void ReducerThread::start(bool listens) {
  const ReducerOptions& given = shared_.options;
  AcceptorOptions options;
  options.host = given.host;
  options.port = given.port;
  options.advertise = {given.host};
  options.secret = given.secret;
  options.shm = given.shm;
  options.max_window_bytes = given.max_window_bytes;
  options.listens = listens;
  // On the loop: connections are looked at only when this is over.
  loop_.call([&] {
    acceptor_ = std::make_unique<Acceptor>(loop_, options, *this);
    if (listens) shared_.address = Address::parse(acceptor_->address()).tcp.front();
    loop_.on_time([this] { return on_time(); });
  });
}

void ReducerThread::stop() {
  loop_.stop();
  acceptor_->hang_up();
  sessions_.clear();  // their ranks see the end now, and not when this is destroyed
}

bool ReducerThread::count(ReducerCounts* out) {
  return loop_.call([&] {
    out->operations += past_.operations;
    out->bytes_received += past_.bytes_received;
    out->bytes_sent += past_.bytes_sent;
    out->reduced_bytes += past_.reduced_bytes;
    out->memory_bytes += blocks_.in_use() * sizeof(ChunkBuffer);
    for (const auto& [id, session] : sessions_) {
      if (id.second == 0) out->ranks += session->ranks();
      add_counts(*session, out);
    }
  });
}

bool ReducerThread::refuse_groups() {
  return loop_.call([&] { leaving_ = true; });
}

bool ReducerThread::has_ended(bool* all) {
  return loop_.call([&] {
    on_time();
    *all = sessions_.empty();
  });
}

bool ReducerThread::end_sessions() {
  return loop_.call([&] {
    for (const auto& [id, session] : sessions_) {
      session->stop({FaultKind::reducer_lost, "reducer " + shared_.address + " was stopped", {session->first.member}});
    }
  });
}

bool ReducerThread::has_told(bool* all) {
  return loop_.call([&] {
    *all = std::all_of(sessions_.begin(), sessions_.end(), [](const auto& one) { return one.second->drained(); });
  });
}

GroupId ReducerThread::group_of(const Join& join) {
  GroupId id;
  std::memcpy(id.data(), join.group, id.size());
  return id;
}

void ReducerThread::add_counts(const ReducerSession& session, ReducerCounts* out) {
  out->operations += session.owner().operations();
  out->reduced_bytes += session.owner().reduced_bytes();
  out->bytes_received += session.bytes_received();
  out->bytes_sent += session.bytes_sent();
}

// --- connections ----------------------------------------------------------------------------------------------------

Acceptor* ReducerThread::acceptor_for(const Join& join) {
  uint32_t digest;  // the group's id is one already
  std::memcpy(&digest, join.group, sizeof digest);
  return shared_.threads[(uint64_t{digest} + join.channel) % shared_.threads.size()]->acceptor_.get();
}

Acceptor::Host::Verdict ReducerThread::judge(const Join& join, std::string* refusal) {
  const auto place = sessions_.find(session_of(join));
  if (place == sessions_.end()) {
    if (leaving_) *refusal = "this reducer is stopping";
    if (!shared_.groups.has_room(group_of(join))) *refusal = "this reducer is at its limit of groups";
    if (join.member < join.world) *refusal = "this is a reducer, and not a rank";
    return refusal->empty() ? Verdict::welcome : Verdict::refused;
  }
  const Join& first = place->second->first;
  if (std::memcmp(join.settings, first.settings, sizeof join.settings) != 0 || join.world != first.world ||
      join.owners != first.owners || join.member != first.member) {
    *refusal = "ranks disagree about shares, reducers or the algorithm of the group";
  } else if (place->second->has(join.rank)) {
    *refusal = "rank " + std::to_string(join.rank) + " is here already";
  }
  return refusal->empty() ? Verdict::welcome : Verdict::refused;
}

void ReducerThread::enter(const Join& join, std::unique_ptr<Link> link) {
  auto place = sessions_.find(session_of(join));
  if (place == sessions_.end()) {
    auto session =
        std::make_unique<ReducerSession>(loop_, blocks_, join, shared_.options.max_window_bytes, shared_.address);
    place = sessions_.emplace(session_of(join), std::move(session)).first;
    try {
      shared_.groups.begin(group_of(join));
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

// Removes sessions whose ranks have all left.
uint64_t ReducerThread::on_time() {
  for (auto place = sessions_.begin(); place != sessions_.end();) {
    ReducerSession& session = *place->second;
    if (session.ranks() != 0) {
      ++place;
      continue;
    }
    add_counts(session, &past_);
    shared_.groups.end(place->first.first, session.over());
    place = sessions_.erase(place);
  }
  return acceptor_->due();
}

}  // namespace geartrain
