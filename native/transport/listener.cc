// Listener: its addresses, its thread, and the connections that are not accepted yet. Authentication is
// Admission's.

#include "transport/listener.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>

#include "base/condition_variable.h"
#include "base/interruption.h"
#include "base/lifetime.h"
#include "transport/admission.h"
#include "transport/providers/provider.h"

namespace geartrain {
namespace {

constexpr size_t kMostAccepted = 1024;  // authenticated, and not accepted by the program yet
constexpr int kBacklog = 4096;          // not yet accepted by the thread; the system may have a lower limit
constexpr double kPauseS = 0.1;         // without descriptors, until the next attempt to accept
constexpr uint64_t kStopEvent = 1, kUnixEvent = 2, kTcpEvent = 3;
static_assert(kTcpEvent < Admission::kFirstEvent);

bool is_loopback(const struct sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return (ntohl(reinterpret_cast<const struct sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const struct sockaddr_in6*>(address)->sin6_addr);
}

bool is_wildcard(const struct sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return reinterpret_cast<const struct sockaddr_in*>(address)->sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const struct sockaddr_in6*>(address)->sin6_addr);
}

// IPv4 addresses of the interfaces that are up; loopback only when there is nothing else.
std::vector<std::string> interface_hosts() {
  std::vector<std::string> hosts;
  struct ifaddrs* all = nullptr;
  if (::getifaddrs(&all) == 0) {
    for (const struct ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_UP) == 0 ||
          (one->ifa_flags & IFF_LOOPBACK) != 0) {
        continue;
      }
      char text[INET_ADDRSTRLEN];
      ::inet_ntop(AF_INET, &reinterpret_cast<const struct sockaddr_in*>(one->ifa_addr)->sin_addr, text, sizeof text);
      hosts.emplace_back(text);
    }
    ::freeifaddrs(all);
  }
  if (hosts.empty()) hosts.emplace_back("127.0.0.1");
  return hosts;
}

}  // namespace

// --- the listener ---------------------------------------------------------------------------------------------------

class Listener::Body {
 public:
  explicit Body(const ListenerOptions& options)
      : options_(options), epoll_(::epoll_create1(EPOLL_CLOEXEC)), stop_(make_bell()) {
    check_options(options_.options);
    random_bytes(id_);
    address_.id = hex(id_);
    if (!epoll_) fail(ErrorKind::os, "cannot make an epoll: ", std::strerror(errno));
    watch(stop_.get(), kStopEvent);
    if (options_.shm) listen_unix();
    if (!options_.tcp_host.empty()) listen_tcp();
    thread_.start("the listener's thread", [this] { serve(); });
  }

  ~Body() { close(); }

  // Connections within this process need no socket. Throws untrusted, peer_lost, timed_out.
  std::shared_ptr<Connection> connect_within(const Options& dialer, Deadline deadline) {
    if (dialer.secret != options_.options.secret) fail(ErrorKind::untrusted, "the peer refuses: it has another secret");
    auto [mine, theirs] = make_inproc(dialer, options_.options, !dialer.secret.empty());
    std::unique_lock lock(mutex_);
    while (!life_.closed() && ready_.size() >= kMostAccepted) {
      if (deadline.passed()) {
        fail(ErrorKind::timed_out, "the listener's program accepted none of ", kMostAccepted,
             " connections before the deadline");
      }
      accepted_.wait_for(lock, std::chrono::nanoseconds(deadline.sooner(kInterruptionEveryS).left_ns()));
      lock.unlock();
      Interruption::check();
      lock.lock();
    }
    if (life_.closed()) fail(ErrorKind::peer_lost, why_closed_);
    ready_.push_back(std::move(theirs));
    arrived_.notify_one();
    return mine;
  }

  std::shared_ptr<Connection> accept(Deadline deadline) {
    life_.check_process();
    std::unique_lock lock(mutex_);
    while (ready_.empty() && !life_.closed()) {
      const uint64_t left_ns = deadline.left_ns();
      if (left_ns == 0) fail(ErrorKind::timed_out, "no connection before the deadline", admission_.refused_so_far());
      arrived_.wait_for(lock, std::chrono::nanoseconds(left_ns));
    }
    if (life_.closed()) fail(ErrorKind::hung_up, why_closed_);
    auto connection = std::move(ready_.front());
    ready_.pop_front();
    accepted_.notify_one();
    return connection;
  }

  // The port is free when this returns: a process that listens on it again need not wait. The thread never blocks for
  // long, so the limit is for a machine that does not schedule it.
  void close() {
    if (life_.forked()) return;
    std::unique_lock lock(mutex_);
    life_.close();
    arrived_.notify_all();
    accepted_.notify_all();
    ring_bell(stop_);
    arrived_.wait_for(lock, std::chrono::seconds(5), [this] { return gone_; });
  }

  const std::string& address() const { return text_; }
  const std::string& id() const { return address_.id; }
  void name() { text_ = address_.text(); }
  uint64_t refused() const { return admission_.refused(); }
  std::string refusal() const { return admission_.refusal(); }

 private:
  // For events that concern no connection: the listening sockets, and the end.
  void watch(int fd, uint64_t which) {
    struct epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = which;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      fail(ErrorKind::os, "cannot wait for a listening socket: ", std::strerror(errno));
    }
  }

  void listen_unix() {
    unix_ = ListeningSocket(Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
    address_.shm = "geartrain-" + address_.id;
    struct sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, address_.shm.data(), address_.shm.size());
    const auto size = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + address_.shm.size());
    if (!unix_ || ::bind(unix_.get(), reinterpret_cast<const struct sockaddr*>(&at), size) != 0 ||
        ::listen(unix_.get(), kBacklog) != 0) {
      fail(ErrorKind::os, "cannot listen on a Unix socket: ", std::strerror(errno));
    }
    watch(unix_.get(), kUnixEvent);
  }

  void listen_tcp() {
    struct addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    struct addrinfo* found = nullptr;
    const std::string port = std::to_string(options_.tcp_port);
    if (const int error = ::getaddrinfo(options_.tcp_host.c_str(), port.c_str(), &hints, &found); error != 0) {
      fail(ErrorKind::argument, "host is a name or address of this machine, to listen on, found '", options_.tcp_host,
           "': ", ::gai_strerror(error));
    }
    const std::unique_ptr<struct addrinfo, void (*)(struct addrinfo*)> addresses(found, ::freeaddrinfo);
    if (!is_loopback(found->ai_addr) && options_.options.secret.empty()) {
      fail(ErrorKind::untrusted, "listening on ", options_.tcp_host,
           " lets in everyone who can reach it: give a secret, or listen on 127.0.0.1");
    }
    tcp_ = ListeningSocket(Descriptor(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
    const int on = 1;
    if (tcp_) ::setsockopt(tcp_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!tcp_ || ::bind(tcp_.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(tcp_.get(), kBacklog) != 0) {
      fail(ErrorKind::os, "cannot listen on ", options_.tcp_host, " port ", options_.tcp_port, ": ",
           std::strerror(errno));
    }
    struct sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    ::getsockname(tcp_.get(), reinterpret_cast<struct sockaddr*>(&bound), &size);
    const uint16_t bound_port =
        ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const struct sockaddr_in6*>(&bound)->sin6_port
                                          : reinterpret_cast<const struct sockaddr_in*>(&bound)->sin_port);
    std::vector<std::string> hosts = options_.advertise;
    if (hosts.empty() && is_wildcard(found->ai_addr)) hosts = interface_hosts();
    if (hosts.empty()) hosts = {options_.tcp_host};
    for (const std::string& host : hosts) address_.tcp.push_back(host + ":" + std::to_string(bound_port));
    watch(tcp_.get(), kTcpEvent);
  }

  // --- the thread -------------------------------------------------------------------------------------------------

  void serve() noexcept {
    std::string why;  // empty: nothing to say, or no memory to say it in
    try {
      while (serve_events()) continue;
    } catch (const std::exception& error) {
      // Not what one connection causes, which ends that one (admission.cc). Without its thread nothing is accepted.
      try {
        why = std::string("the listener's thread has ended: ") + error.what();
      } catch (const std::bad_alloc&) {
        why.clear();
      }
    }
    admission_.clear();
    unix_.reset();
    tcp_.reset();
    std::lock_guard lock(mutex_);
    if (life_.close() && !why.empty()) why_closed_ = std::move(why);
    ready_.clear();  // their dialers see the end
    gone_ = true;
    arrived_.notify_all();
    accepted_.notify_all();
  }

  // One round of events. False when the listener is closed.
  bool serve_events() {
    struct epoll_event events[64];
    const int wait_ms = paused_ ? std::min(admission_.wait_ms(), pause_.left_ms()) : admission_.wait_ms();
    const int ready = ::epoll_wait(epoll_.get(), events, 64, wait_ms);
    {
      std::lock_guard lock(mutex_);
      if (life_.closed()) return false;
    }
    for (int i = 0; i < ready; ++i) {
      const uint64_t event = events[i].data.u64;
      if (event == kUnixEvent) {
        accept_from(unix_, true);
      } else if (event == kTcpEvent) {
        accept_from(tcp_, false);
      } else if (event >= Admission::kFirstEvent) {
        admission_.advance(event);
      }
    }
    admission_.refuse_late();
    if (paused_ && pause_.passed()) pause(false);
    return true;
  }

  void accept_from(const ListeningSocket& listening, bool local) {
    bool good = false;
    try {
      good = admission_.take_from(listening.descriptor(), local);
    } catch (const std::bad_alloc&) {
      admission_.note_refusal("no memory for another connection");
    }
    if (!good) pause(true);
  }

  // The listening sockets stay readable while nothing can be accepted: the thread must not spin meanwhile.
  void pause(bool paused) {
    paused_ = paused;
    pause_ = Deadline::after(kPauseS);
    for (const auto& [socket, which] : {std::pair{unix_.get(), kUnixEvent}, {tcp_.get(), kTcpEvent}}) {
      struct epoll_event event{};
      event.events = paused ? 0u : EPOLLIN | EPOLLRDHUP;
      event.data.u64 = which;
      if (socket >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event);
    }
  }

  void deliver(std::shared_ptr<Connection> connection) {
    std::lock_guard lock(mutex_);
    if (life_.closed()) fail(ErrorKind::peer_lost, why_closed_);
    if (ready_.size() >= kMostAccepted) fail(ErrorKind::peer_lost, "the listener has too many connections to take");
    ready_.push_back(std::move(connection));
    arrived_.notify_one();
  }

  bool has_room(size_t more) {
    std::lock_guard lock(mutex_);
    return ready_.size() + more <= kMostAccepted;
  }

  const ListenerOptions options_;
  Lifetime life_{"listener"};
  std::array<uint8_t, 16> id_{};
  Address address_;
  std::string text_;
  Descriptor epoll_, stop_;
  ListeningSocket unix_, tcp_;
  Admission admission_{options_,
                       id_,
                       epoll_.get(),
                       {[this](std::shared_ptr<Connection> one) { deliver(std::move(one)); },
                        [this](size_t more) { return has_room(more); }}};
  bool paused_ = false;  // the thread's
  Deadline pause_ = Deadline::after(0);
  std::mutex mutex_;
  ConditionVariable arrived_, accepted_;
  std::deque<std::shared_ptr<Connection>> ready_;
  bool gone_ = false;  // gone: the sockets are closed
  std::string why_closed_ = "the listener was closed";
  OwnThread thread_;

 public:
  // Listeners of this process, by id, for dialers in it.
  struct Registry : ForkSafe {
    std::map<std::string, std::weak_ptr<Body>> listeners;

    void after_fork(bool in_child) {
      if (in_child) listeners.clear();
      mutex.unlock();
    }
  };
};

Listener::Listener(const ListenerOptions& options) : body_(std::make_shared<Body>(options)) {
  body_->name();
  auto& registry = of_process<Body::Registry>();
  std::lock_guard lock(registry.mutex);
  registry.listeners[body_->id()] = body_;
}

Listener::~Listener() {
  close();
}

std::shared_ptr<Connection> Listener::accept(Deadline deadline) {
  return body_->accept(deadline);
}

const std::string& Listener::address() const {
  return body_->address();
}

uint64_t Listener::refused() const {
  return body_->refused();
}

std::string Listener::refusal() const {
  return body_->refusal();
}

void Listener::close() {
  auto& registry = of_process<Body::Registry>();
  {
    std::lock_guard lock(registry.mutex);
    registry.listeners.erase(body_->id());
  }
  body_->close();
}

std::shared_ptr<Connection> dial_inproc(const Address& address, const Options& options, Deadline deadline) {
  std::shared_ptr<Listener::Body> body;
  {
    auto& registry = of_process<Listener::Body::Registry>();
    std::lock_guard lock(registry.mutex);
    const auto found = registry.listeners.find(address.id);
    if (found != registry.listeners.end()) body = found->second.lock();
  }
  if (body == nullptr) fail(ErrorKind::not_viable, "the peer is another process");
  return body->connect_within(options, deadline);
}

}  // namespace geartrain
