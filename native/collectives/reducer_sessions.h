// Sessions on one thread of a reducer, one for each channel of each group: which connections they take, and their end.
//
// A session that a fault has ended stays until its ranks have hung up, so that ranks that join late are told why. Where
// a group outlives its reducers (takeover.h) a rank of that session comes again, for another one: then the old session
// makes way, whatever it still has. Its ranks may all have gone unseen, since their network or hosts were away: the
// kernel needs a quarter of an hour to find that out, or two hours where it has nothing to send.
//
// On the loop, unless stated otherwise.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "collectives/acceptor.h"
#include "collectives/reducer_options.h"
#include "collectives/reducer_session.h"

namespace geartrain {

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
