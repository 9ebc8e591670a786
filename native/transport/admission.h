// Admission: connections to a listener that have yet to authenticate, each a state machine of the handshake
// (security/handshake.h), advanced by incoming data. None of them can block another.
//
// All on the listener's thread, except refused(), refusal() and refused_so_far().
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/connection.h"
#include "transport/options.h"
#include "transport/providers/provider.h"
#include "transport/security/handshake.h"

namespace geartrain {

class Admission {
 public:
  using Deliver = std::function<void(std::shared_ptr<Connection>)>;
  // Sockets are watched by `epoll`, whose events carry the argument of advance(). Authenticated ones go to `deliver`,
  // which throws when it cannot be accepted.
  Admission(const ListenerOptions& options, const std::array<uint8_t, 16>& id, int epoll, Deliver deliver)
      : options_(options), id_(id), epoll_(epoll), deliver_(std::move(deliver)) {}

  // Accepts all that wait at the listening socket. The one that has been silent for longest makes room.
  void take_from(const Descriptor& listening, bool local);
  // The place of an event has become readable; it may have been removed already.
  void advance(const void* event);
  void refuse_late();
  // Until the next of them times out.
  int wait_ms() const;
  void clear() { pending_.clear(); }

  // Any thread.
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  std::string refusal() const;
  std::string refused_so_far() const;  // the end of a sentence; empty: none was

 private:
  // A connected socket that has yet to authenticate.
  struct Pending {
    enum class State { tls, hello, proof, offer, lanes };
    Stream socket;
    bool local;  // through the Unix socket
    Deadline deadline;
    State state;
    Hello hello{};
    Challenge challenge{};
    Proof proof{};
    ShmOffer offer{};
    size_t filled = 0;  // of the structure that the state waits for
    std::vector<Descriptor> fds;
    Session session;
    std::vector<Stream> lanes;
  };
  using Place = std::list<Pending>::iterator;

  void refuse(Place place, const std::string& why);
  Place find(const void* pending);
  template <typename T>
  bool have(Pending& pending, T* wanted);
  template <typename T>
  void reply(const Pending& pending, const T& what);
  bool step(Place place);
  bool secured(Pending& pending);
  bool challenge(Pending& pending);
  Answer judgement(const Pending& pending);
  bool judge(Place place);
  void unwatch(const Pending& pending);
  void complete(Place place);
  void take_offer(Place place);

  const ListenerOptions& options_;
  const std::array<uint8_t, 16>& id_;
  const int epoll_;
  const Deliver deliver_;
  std::list<Pending> pending_;
  std::atomic<uint64_t> refused_{0};
  mutable std::mutex refusal_mutex_;
  std::string refusal_;
};

}  // namespace geartrain
