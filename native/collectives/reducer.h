// Reducer: owns shares of arrays and contributes none. One process on a host without accelerators serves any number of
// groups at once; it needs a window of memory for every rank of a group, and not their arrays.
//
//   Reducer reducer({.host = "0.0.0.0", .port = 7000, .secret = secret});
//   ... reducer.address() is passed to the groups; they come and go by themselves
//
// A rank that leaves in the middle of an operation ends its group, here and on all other ranks, and no other group.
// A group may list the address several times: it then has as many connections of each rank, a share for each, and with
// several threads each of them is served by another one (ReducerThread).
//
// Invalid input, unauthenticated peers and silent ones are refused and counted; memory that runs out ends the group
// that was served, and not the process. Threads of its own, and the listener's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/lifetime.h"
#include "collectives/reducer_session.h"

namespace geartrain {

struct ReducerOptions {
  std::string host = "127.0.0.1";  // anything but loopback needs a secret
  uint16_t port = 0;
  std::string secret;
  bool shm = true;
  uint64_t max_window_bytes = uint64_t{16} << 20;  // for each rank: bytes received from it and not yet reduced
  uint32_t max_groups = 1024;
  uint32_t threads = 1;  // that receive, reduce and send
};
constexpr uint32_t kMostReducerThreads = 64;

// One thread of a reducer: the sessions of its groups there, on its own event loop.
//
// A group that lists a reducer's address several times has as many sessions on it, one for each channel (Join), and
// each owns a share of its own: threads have no data in common. Channel c of a group is served by thread (g + c) mod T,
// with g from the group's id: groups of one channel are spread over the threads, channels of a group are each on
// another one, as far as there are threads. One thread listens for all, and passes connections on.
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

class Reducer {
 public:
  explicit Reducer(const ReducerOptions& options);  // throws os, argument, untrusted
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  const std::string& address() const { return shared_.address; }  // host:port
  ReducerCounts counts();                                         // throws hung_up after close()
  // Accepts no new groups, waits for the present ones to end, up to the deadline, then notifies the rest that it stops.
  // Any number of threads, at once: the nearest deadline counts.
  void close(Deadline deadline);

 private:
  template <typename Passed>
  bool wait_for_all(bool (ReducerThread::*what)(bool*), const Passed& passed);
  void leave();
  void stop();

  ReducerThread::Shared shared_;
  const std::vector<std::unique_ptr<ReducerThread>>& threads_ = shared_.threads;
  Lifetime life_{"reducer"};
};

}  // namespace geartrain
