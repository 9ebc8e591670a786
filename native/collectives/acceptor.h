// Acceptor of a group's members: a Listener that receives authenticated sockets, and dial().
//
// A host with several loops has an acceptor on each, one of which listens: a connection is moved to the loop that will
// serve it as soon as its Join is complete (Host::acceptor_for).
//
// Over a Unix socket the dialer's Join carries the memory of two rings and its loop's eventfd, and the answer carries
// the other loop's: then the two share memory. Whether they can is found by trying: the name of the Unix socket holds
// the listener's random id, and the handshake proves the identity of the listener there. Host names are never compared.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "collectives/link.h"
#include "collectives/protocol.h"
#include "transport/transport.h"

namespace geartrain {

struct AcceptorOptions {
  std::string host = "127.0.0.1";  // to listen on
  uint16_t port = 0;
  std::vector<std::string> advertise;
  std::string secret;
  bool shm = true;
  uint64_t max_window_bytes = uint64_t{16} << 20;
  bool listens = true;  // false: connections come from another acceptor only
};

class Acceptor {
 public:
  class Host {
   public:
    virtual ~Host() = default;
    enum class Verdict { welcome, later, refused };
    // On the loop. `later`: retry() calls again.
    virtual Verdict judge(const Join& join, std::string* refusal) = 0;
    virtual void enter(const Join& join, std::unique_ptr<Link> link) = 0;
    // On the listening one's loop: the acceptor of the loop that serves this; null: the same.
    virtual Acceptor* acceptor_for([[maybe_unused]] const Join& join) { return nullptr; }
  };

  Acceptor(EventLoop& loop, const AcceptorOptions& options, Host& host);
  // After the loop has stopped.
  ~Acceptor();
  // Accepts no more connections. Any thread but the loop's.
  void close();
  // Hangs up on those that wait to be let in. After close(), and after the loop has stopped.
  void hang_up();
  // Of one that listens.
  const std::string& address() const { return listener_->address(); }
  // Refused: without proof, or with an invalid Join.
  uint64_t refused() const { return (listener_ != nullptr ? listener_->refused() : 0) + refused_.load(); }
  // On the loop: those that came too early are judged again; those that send nothing are dropped. Nanoseconds until
  // the next call is due.
  void retry();
  uint64_t due();

 private:
  class Newcomer;
  void admit(Descriptor socket, bool local);
  Newcomer& add(Descriptor socket, bool local);
  bool full() const;
  void move_to(Acceptor& other, Newcomer& newcomer);
  void step(Newcomer& newcomer);
  void drop(Newcomer& newcomer, bool refused);

  EventLoop& loop_;
  const AcceptorOptions options_;
  Host& host_;
  std::list<std::unique_ptr<Newcomer>> newcomers_;  // the loop's
  std::atomic<uint64_t> refused_{0};
  std::unique_ptr<Listener> listener_;
};

struct Dialled {
  std::unique_ptr<Link> link;
  Welcome welcome{};
};

// Blocks the caller's thread. `place` is a listener's address, or host:port of a reducer. While it waits to be let in
// `check` is called now and then, and may throw. Throws untrusted, timed_out, not_viable, peer_lost, frame; with the
// other side's reason where it gave one.
Dialled dial(const std::string& place, const std::string& secret, Join join, const EventLoop& loop, bool shm,
             Deadline deadline, const std::function<void()>& check);

}  // namespace geartrain
