// One thread of a reducer: the sessions of its groups there, on its own event loop.
//
// A group that lists a reducer's address several times has as many sessions on it, one for each channel (Join), and
// each owns a share of its own: threads have no data in common. Channel c of a group is served by thread (g + c) mod T,
// with g from the group's id: groups of one channel are spread over the threads, channels of a group are each on
// another one, as far as there are threads. One thread listens for all, and passes connections on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/acceptor.h"
#include "collectives/reducer_options.h"
#include "collectives/reducer_sessions.h"

namespace geartrain {

class ReducerThread final : public Acceptor::Host {
 public:
  // What all threads of a reducer have in common; `address` is set by the one that listens, before any group comes.
  struct Shared {
    explicit Shared(const ReducerOptions& given) : options(given), groups(given.max_groups) {}
    const ReducerOptions options;
    ReducerGroups groups;
    std::string address;
    std::vector<std::unique_ptr<ReducerThread>> threads;
  };
  explicit ReducerThread(Shared& shared);  // throws os
  ~ReducerThread() override;

  // Begins: with a listener, of which all threads get connections, or without. The caller's thread. Throws os,
  // untrusted.
  void start(bool listens);
  // Accepts no more connections. Any thread but the loop's.
  void stop_listening() { acceptor_->close(); }
  // Ends the thread, and what it has.
  void stop();
  bool forked() const { return loop_.forked(); }
  uint64_t refused() const { return acceptor_->refused(); }

  // Any thread; each is false when the thread has ended.
  bool count(ReducerCounts* out);
  bool refuse_groups();
  bool has_ended(bool* all);  // its sessions
  bool end_sessions();        // with a fault that says that the reducer was stopped
  bool has_told(bool* all);   // what the ranks of its sessions were to be told

 private:
  Verdict judge(const Join& join, std::string* refusal) override { return sessions_.judge(join, refusal); }
  void enter(const Join& join, std::unique_ptr<Link> link) override { sessions_.enter(blocks_, join, std::move(link)); }
  Acceptor* acceptor_for(const Join& join) override;
  uint64_t on_time();

  Shared& shared_;
  ChunkBufferPool blocks_;
  ReducerSessions sessions_;
  EventLoop loop_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace geartrain
