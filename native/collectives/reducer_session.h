// Sessions of groups on a reducer: the ranks' peers of one group, and the owner of the reducer's share. On the
// reducer's loop, unless stated otherwise.
//
// Ranks join and leave by themselves. One that leaves in the middle of an operation, violates the protocol or disagrees
// ends the group: the remaining ranks receive the fault, and nothing more is accepted from them. So does memory that
// runs out here.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/acceptor.h"
#include "collectives/peer.h"
#include "collectives/share_owner.h"

namespace geartrain {

struct ReducerCounts {
  uint64_t groups = 0, ranks = 0;  // now
  uint64_t groups_served = 0, groups_failed = 0, operations = 0;
  uint64_t bytes_received = 0, bytes_sent = 0, reduced_bytes = 0;
  uint64_t memory_bytes = 0;  // of chunks in use now
  uint64_t refused = 0;
};

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

using GroupId = std::array<uint8_t, 16>;

// Groups that have a session on any thread. Any thread.
class ReducerGroups {
 public:
  explicit ReducerGroups(uint32_t most) : most_(most) {}
  // Whether a session of this group may begin. Two threads that are asked at once may both have room for the last one.
  bool has_room(const GroupId& id) const;
  void begin(const GroupId& id);
  void end(const GroupId& id, bool failed);
  void count(ReducerCounts* out) const;

 private:
  struct Sessions {
    uint32_t open = 0;
    bool failed = false;
  };
  const uint32_t most_;
  mutable std::mutex mutex_;
  std::map<GroupId, Sessions> groups_;
  uint64_t served_ = 0, failed_ = 0;
};

// Sessions on one thread of a reducer, one for each channel of each group: which connections they take, and their end.
//
// A session that a fault has ended stays until its ranks have hung up, so that ranks that join late are told why. Where
// a group outlives its reducers (takeover.h) a rank of that session comes again, for another one: then the old session
// makes way, whatever it still has. Its ranks may all have gone unseen, since their network or hosts were away: the
// kernel needs a quarter of an hour to find that out, or two hours where it has nothing to send.
class ReducerSessions {
 public:
  // `where` is the reducer's address, known before the first connection.
  ReducerSessions(EventLoop& loop, ReducerGroups& groups, uint64_t window_bytes, const std::string& where)
      : loop_(loop), groups_(groups), window_bytes_(window_bytes), where_(where) {}

  // Acceptor::Host's.
  Acceptor::Host::Verdict judge(const Join& join, std::string* refusal);
  void enter(ChunkBufferPool& blocks, const Join& join, std::unique_ptr<Link> link);
  // New groups are refused from now on.
  void leave() { leaving_ = true; }
  // Removes sessions whose ranks have all left.
  void remove_empty();
  // Ends all that there are.
  void stop(const std::string& why);
  bool drained() const;
  bool empty() const { return sessions_.empty(); }
  // The session of a group's channel; null: there is none.
  ReducerSession* find(const Join& join) const;
  void count(ReducerCounts* out) const;
  void clear() { sessions_.clear(); }

 private:
  using SessionId = std::pair<GroupId, uint32_t>;  // and the channel
  using Place = std::map<SessionId, std::unique_ptr<ReducerSession>>::iterator;

  static SessionId session_of(const Join& join);
  static void add_counts(const ReducerSession& session, ReducerCounts* out);
  Place remove(Place place);

  EventLoop& loop_;
  ReducerGroups& groups_;
  const uint64_t window_bytes_;
  const std::string& where_;
  std::map<SessionId, std::unique_ptr<ReducerSession>> sessions_;
  ReducerCounts past_;
  bool leaving_ = false;
};

}  // namespace geartrain
