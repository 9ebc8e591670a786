// Admission: connections to a listener that have yet to authenticate, each a state machine of the handshake
// (security/handshake.h), advanced by incoming data. None of them can block another.
//
// Places. A socket that has proved nothing has a place among the silent (it has sent no hello) or among the greeting
// (it has yet to prove); both kinds together have MessageLimits::max_pending. Beyond, one of the larger kind makes
// room: the one that has been silent for longest, if that is a tenth of the handshake's timeout, and else the newcomer.
// So silence does not keep out those who speak, nor hellos those who have yet to speak, and a crowd does not push
// itself out in turns. A stream that has proved itself is counted apart, with all the sockets of its connection, and
// never makes room: beyond as many connections, or half of the sockets that the process may have, dialers are told to
// come again, and do (until_admitted).
//
// All on the listener's thread, except refused(), refusal() and refused_so_far(). An exception of any kind that one
// connection causes ends that connection, and no more.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/connection.h"
#include "transport/options.h"
#include "transport/providers/provider.h"
#include "transport/security/handshake.h"

namespace geartrain {

class Admission {
 public:
  // Authenticated connections go to `deliver`, which throws when it cannot be accepted; `has_room` tells before whether
  // so many more can be.
  struct Host {
    std::function<void(std::shared_ptr<Connection>)> deliver;
    std::function<bool(size_t more)> has_room;
  };
  // Sockets are watched by `epoll`, whose events carry the argument of advance(): kFirstEvent or more.
  static constexpr uint64_t kFirstEvent = 16;
  Admission(const ListenerOptions& options, const std::array<uint8_t, 16>& id, int epoll, Host host);

  // Accepts some of those that wait at the listening socket, and advances them. False when the process, or the system,
  // has no descriptors left: what waits stays there, and should be left alone for a moment.
  bool take_from(const Descriptor& listening, bool local);
  // The socket of an event has become readable; it may have been given up already.
  void advance(uint64_t event);
  void refuse_late();
  // Until the next of them times out.
  int wait_ms() const;
  void clear();
  // Counts what the listener's thread could not do.
  void note_refusal(const std::string& why) noexcept;

  // Any thread.
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  std::string refusal() const;
  std::string refused_so_far() const;  // the end of a sentence; empty: none was

 private:
  enum class State { tls, hello, proof, offer, lanes };
  struct Pending;
  using Places = std::list<Pending>;
  using Place = Places::iterator;
  // A connected socket that has yet to authenticate; with its lanes, once it has proved itself.
  struct Pending {
    uint64_t event;
    Stream socket;
    bool local;  // through the Unix socket
    Deadline deadline;
    Deadline patience;  // from then on it may have to make room
    State state;
    Places* in;  // silent_, greeting_ or proved_
    Hello hello{};
    Challenge challenge{};
    Proof proof{};
    ShmOffer offer{};
    size_t filled = 0;  // of the structure that the state waits for
    std::vector<Descriptor> fds{};
    Session session{};
    std::vector<Stream> lanes{};  // by number, as they come
    size_t come = 0;              // of them
  };

  void add(Descriptor socket, bool local);
  void make_room(Place newcomer);
  Deadline patience() const;
  void move(Place place, Places& to);
  void forget(Place place);
  void refuse(Place place, const std::string& why);
  void tell_busy(const Pending& pending) noexcept;
  bool find(uint64_t event, Place* place);
  bool has_room_for(const Hello& hello) const;
  template <typename T>
  bool have(Pending& pending, T* wanted);
  template <typename T>
  void reply(const Pending& pending, const T& what);
  bool step(Place place);
  bool secured(Pending& pending);
  bool challenge(Place place);
  Answer judgement(const Pending& pending);
  bool judge(Place place);
  Digest session_key(const SessionId& id) const;
  void unwatch(const Pending& pending);
  void complete(Place place);
  void take_offer(Place place);

  const ListenerOptions& options_;
  const std::array<uint8_t, 16>& id_;
  const int epoll_;
  const Host host_;
  const size_t most_places_, most_sockets_;  // without proof; of connections that have proved themselves
  Places silent_, greeting_, proved_;        // the oldest first
  size_t proved_sockets_ = 0;                // that those in proved_ have, or will have
  std::unordered_map<uint64_t, Place> by_event_;
  // Those that wait for lanes. The key is not the id, which lanes prove to know, but its HMAC under a key of this
  // listener's: how long it takes to find none tells nothing about the ids that there are.
  std::map<Digest, Place> by_session_;
  std::string session_key_;
  uint64_t next_event_ = kFirstEvent;
  Deadline next_late_ = Deadline::after(1e9);  // none is late before
  std::atomic<uint64_t> refused_{0};
  mutable std::mutex refusal_mutex_;
  std::string refusal_;
};

}  // namespace geartrain
