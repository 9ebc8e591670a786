// Meeting: the listener's thread, which answers every handshake a step at a time, and connect(), which tries the
// providers in their order.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <thread>

#include "transport/memfd.h"
#include "transport/providers/provider.h"
#include "transport/sideband/sideband.h"

namespace geartrain {
namespace {

constexpr size_t kMostAccepted = 1024;  // connections that nobody has asked for yet
constexpr uint32_t kMostBuffers = 16384;

void check_options(const Options& options) {
  const MessageLimits& limits = options.limits;
  if (limits.max_buffers > kMostBuffers) {
    fail(ErrorKind::schema, "a message has ", kMostBuffers, " buffers at most, found max_buffers=", limits.max_buffers);
  }
  if (options.lanes > kMaxLanes)
    fail(ErrorKind::schema, "there are ", kMaxLanes, " lanes at most, found ", options.lanes);
  if (options.peer_timeout_s != 0 && options.peer_timeout_s < kLeastPeerTimeoutS) {
    fail(ErrorKind::schema, "peers give a sign of life every ", kBeatS, " s: peer_timeout_s is 0, for none, or ",
         kLeastPeerTimeoutS, " and more, found ", options.peer_timeout_s);
  }
  if (options.transport.empty()) return;
  for (const Provider& provider : kProviders) {
    if (options.transport == provider.name) return;
  }
  fail(ErrorKind::schema, "there is no transport '", options.transport, "'; there are inproc, shm and tcp");
}

template <typename T>
std::span<std::byte> writable(T* value) {
  return std::as_writable_bytes(std::span(value, 1));
}

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

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(by, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

}  // namespace

// --- addresses ----------------------------------------------------------------------------------------------------

std::string Address::text() const {
  std::string out = "id=" + id;
  if (!shm.empty()) out += ";shm=" + shm;
  for (const std::string& place : tcp) out += ";tcp=" + place;
  return out;
}

Address Address::parse(const std::string& text) {
  Address address;
  if (text.size() > 4096) fail(ErrorKind::schema, "an address has 4096 characters at most, found ", text.size());
  for (const std::string& part : split(text, ';')) {
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals), value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (value.empty()) fail(ErrorKind::schema, "not an address of a listener: '", text, "'");
    if (key == "id") address.id = value;
    if (key == "shm") address.shm = value;
    if (key == "tcp") address.tcp.push_back(value);
  }
  if (address.id.size() != 32 && address.id != Address::kAnyId) {
    fail(ErrorKind::schema, "not an address of a listener: '", text, "'");
  }
  return address;
}

// --- the listener ---------------------------------------------------------------------------------------------------

class Listener::Body {
 public:
  explicit Body(const ListenerOptions& options) : options_(options), forks_(forks()) {
    check_options(options_.options);
    random_bytes(id_);
    address_.id = hex(id_);
    epoll_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
    stop_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_ || !stop_) fail(ErrorKind::os, "cannot make an epoll or an eventfd: ", std::strerror(errno));
    watch(stop_.get(), nullptr);
    if (options_.shm) listen_unix();
    if (!options_.tcp_host.empty()) listen_tcp();
    thread_ = std::make_unique<std::thread>([this] { serve(); });
  }

  ~Body() {
    close();
    if (forks_ == forks()) {
      thread_->join();
    } else {
      static_cast<void>(thread_.release());  // a forked child never had it
    }
  }

  // Connections within this process come without a socket. Throws untrusted, peer_lost.
  std::shared_ptr<Connection> meet(const Options& dialer) {
    if (dialer.secret != options_.options.secret) fail(ErrorKind::untrusted, "the peer refuses: it has another secret");
    auto [mine, theirs] = make_inproc(dialer, options_.options, !dialer.secret.empty());
    deliver(std::move(theirs));
    return mine;
  }

  std::shared_ptr<Connection> accept(Deadline deadline) {
    if (forks_ != forks()) {
      fail(ErrorKind::hung_up, "this listener belongs to the process that this one was forked from; make one here");
    }
    std::unique_lock lock(mutex_);
    while (ready_.empty() && !closed_) {
      const uint64_t left_ns = deadline.left_ns();
      if (left_ns == 0) fail(ErrorKind::timed_out, "nobody connected before the deadline", refused_so_far());
      arrived_.wait_for(lock, std::chrono::nanoseconds(left_ns));
    }
    if (closed_) fail(ErrorKind::hung_up, "the listener was closed");
    auto connection = std::move(ready_.front());
    ready_.pop_front();
    return connection;
  }

  // The port is free when this returns: whoever starts again under it need not wait. The thread is never long in
  // anything, so the limit is for a machine that does not let it run.
  void close() {
    if (forks_ != forks()) return;
    std::unique_lock lock(mutex_);
    closed_ = true;
    arrived_.notify_all();
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
    arrived_.wait_for(lock, std::chrono::seconds(5), [this] { return gone_; });
  }

  const std::string& address() const { return text_; }
  const std::string& id() const { return address_.id; }
  void name() { text_ = address_.text(); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  std::string refusal() const {
    std::lock_guard lock(refusal_mutex_);
    return refusal_;
  }

 private:
  // A socket that somebody connected and that has yet to prove itself.
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

  void watch(int fd, Pending* pending) {
    struct epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.ptr = pending;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void listen_unix() {
    unix_ = Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    address_.shm = "geartrain-" + address_.id;
    struct sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, address_.shm.data(), address_.shm.size());
    const auto size = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + address_.shm.size());
    if (!unix_ || ::bind(unix_.get(), reinterpret_cast<const struct sockaddr*>(&at), size) != 0 ||
        ::listen(unix_.get(), 128) != 0) {
      fail(ErrorKind::os, "cannot listen on a Unix socket: ", std::strerror(errno));
    }
    watch(unix_.get(), nullptr);
  }

  void listen_tcp() {
    struct addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    struct addrinfo* found = nullptr;
    const std::string port = std::to_string(options_.tcp_port);
    if (const int error = ::getaddrinfo(options_.tcp_host.c_str(), port.c_str(), &hints, &found); error != 0) {
      fail(ErrorKind::schema, "cannot listen on '", options_.tcp_host, "': ", ::gai_strerror(error));
    }
    const std::unique_ptr<struct addrinfo, void (*)(struct addrinfo*)> addresses(found, ::freeaddrinfo);
    if (!is_loopback(found->ai_addr) && options_.options.secret.empty()) {
      fail(ErrorKind::untrusted, "listening on ", options_.tcp_host,
           " lets in everyone who can reach it: give a secret, or listen on 127.0.0.1");
    }
    tcp_ = Descriptor(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (tcp_) ::setsockopt(tcp_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!tcp_ || ::bind(tcp_.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(tcp_.get(), 512) != 0) {
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
    watch(tcp_.get(), nullptr);
  }

  // --- the thread -------------------------------------------------------------------------------------------------

  void serve() {
    struct epoll_event events[64];
    for (;;) {
      int wait_ms = 60'000;
      for (const Pending& pending : pending_) wait_ms = std::min(wait_ms, pending.deadline.left_ms());
      const int ready = ::epoll_wait(epoll_.get(), events, 64, wait_ms);
      {
        std::lock_guard lock(mutex_);
        if (closed_) break;
      }
      take_from(unix_, true);
      take_from(tcp_, false);
      for (int i = 0; i < ready; ++i) {
        auto* pending = static_cast<Pending*>(events[i].data.ptr);
        if (pending != nullptr) advance(pending);
      }
      for (auto place = pending_.begin(); place != pending_.end();) {
        const auto next = std::next(place);
        if (place->deadline.passed()) refuse(place, "it did not prove itself in time");
        place = next;
      }
    }
    pending_.clear();
    unix_.reset();
    tcp_.reset();
    std::lock_guard lock(mutex_);
    ready_.clear();  // their dialers see the end
    gone_ = true;
    arrived_.notify_all();
  }

  void take_from(const Descriptor& listening, bool local) {
    while (listening) {
      Descriptor socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) return;
      // Whoever says nothing for longest makes room: silence must not keep others out.
      if (pending_.size() >= options_.options.limits.max_pending) {
        refuse(pending_.begin(), "too many connections had not proved themselves");
      }
      const bool tls = !local && options_.options.tls != nullptr;
      pending_.emplace_back(std::move(socket), local, Deadline::after(options_.options.limits.handshake_timeout_s),
                            tls ? Pending::State::tls : Pending::State::hello);
      watch(pending_.back().socket.get(), &pending_.back());
    }
  }

  void refuse(Place place, const std::string& why) {
    {
      std::lock_guard lock(refusal_mutex_);
      refusal_ = why;
    }
    refused_.fetch_add(1, std::memory_order_relaxed);
    // What was said to it is lost if anything of its own is still unread when the socket closes.
    std::byte unread[4096];
    for (int i = 0; i < 16 && place->socket && ::recv(place->socket.get(), unread, sizeof unread, MSG_DONTWAIT) > 0;)
      ++i;
    pending_.erase(place);
  }

  std::string refused_so_far() const {
    const uint64_t refused = this->refused();
    return refused == 0 ? "" : "; refused so far: " + std::to_string(refused) + ", the last one because " + refusal();
  }

  // The pending connection may be gone: refused by an earlier event of the same round.
  Place find(const Pending* pending) {
    return std::find_if(pending_.begin(), pending_.end(), [&](const Pending& one) { return &one == pending; });
  }

  void advance(const Pending* pending) {
    const Place place = find(pending);
    if (place == pending_.end()) return;
    try {
      while (step(place)) continue;
    } catch (const Error& error) {
      const Place still = find(pending);
      if (still != pending_.end()) refuse(still, error.what());
    }
  }

  // Reads what the state waits for. False when it has not all come; throws when it never will.
  template <typename T>
  bool have(Pending& pending, T* wanted) {
    while (pending.filled < sizeof(T)) {
      const std::span<std::byte> room = writable(wanted).subspan(pending.filled);
      const ssize_t got = pending.socket.tls() != nullptr ? pending.socket.wire().receive(room.data(), room.size())
                                                          : receive_with_fds(pending.socket.get(), room, &pending.fds);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return false;
      if (got <= 0) fail(ErrorKind::peer_lost, "it hung up");
      if (pending.fds.size() > kShmOfferFds) fail(ErrorKind::frame, "descriptors that nobody asked for");
      pending.filled += static_cast<size_t>(got);
    }
    pending.filled = 0;
    return true;
  }

  // A handshake's answers are small: a socket that does not take one at once has been filled on purpose.
  template <typename T>
  void say(const Pending& pending, const T& what) {
    write_exactly(pending.socket.wire(), std::as_bytes(std::span(&what, 1)), Deadline::after(0));
  }

  // One step of a handshake. True when there may be another one at once; the place is then still there.
  bool step(Place place) {
    Pending& pending = *place;
    switch (pending.state) {
      case Pending::State::tls:
        return secured(pending);
      case Pending::State::hello:
        if (!have(pending, &pending.hello)) return false;
        return challenge(pending);
      case Pending::State::proof:
        if (!have(pending, &pending.proof)) return false;
        return judge(place);
      case Pending::State::offer:
        if (!have(pending, &pending.offer)) return false;
        take_offer(place);
        return false;
      case Pending::State::lanes:
        fail(ErrorKind::frame, "it speaks before its lanes are there, or hung up");
    }
    return false;
  }

  // True when its hello may be there.
  bool secured(Pending& pending) {
    if (pending.socket.tls() == nullptr) {
      char first = 0;
      const ssize_t got = ::recv(pending.socket.get(), &first, 1, MSG_DONTWAIT | MSG_PEEK);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
      if (got <= 0) fail(ErrorKind::peer_lost, "it hung up");
      if (first == kHelloMagic[0]) {
        pending.state = Pending::State::hello;  // it is told what it lacks
        return true;
      }
      pending.socket.use_tls(options_.options.tls, nullptr);
    }
    switch (pending.socket.tls()->shake_hands()) {
      case Tls::Step::done:
        pending.state = Pending::State::hello;
        return true;
      case Tls::Step::wants_read:
        return false;
      case Tls::Step::wants_write:
        break;
    }
    fail(ErrorKind::timed_out, "it takes nothing of the TLS handshake");
  }

  bool challenge(Pending& pending) {
    // A TLS handshake begins with a record of its own kind.
    const bool begins_tls = pending.hello.magic[0] == 0x16 && pending.hello.magic[1] == 0x03;
    if (!begins_tls && std::memcmp(pending.hello.magic, kHelloMagic, sizeof kHelloMagic) != 0) {
      fail(ErrorKind::frame, "what connected there is not geartrain");
    }
    const bool lacks_tls = options_.options.tls != nullptr && !pending.local && pending.socket.tls() == nullptr;
    std::memcpy(pending.challenge.magic, kHelloMagic, sizeof kHelloMagic);
    pending.challenge.version = kProtocolVersion;
    pending.challenge.needs = (options_.options.secret.empty() ? 0u : kNeedsSecret) | (lacks_tls ? kNeedsTls : 0u);
    std::memcpy(pending.challenge.listener, id_.data(), id_.size());
    random_bytes(pending.challenge.nonce);
    say(pending, pending.challenge);
    if (begins_tls) fail(ErrorKind::untrusted, "it asks for TLS, and none is used here");
    if (lacks_tls) fail(ErrorKind::untrusted, "it came without TLS");
    if (pending.hello.version != kProtocolVersion) fail(ErrorKind::frame, "another version");
    pending.state = Pending::State::proof;
    return true;
  }

  Answer judgement(const Pending& pending) {
    const std::string& secret = options_.options.secret;
    const Proof expected = prove(secret, pending.hello, pending.challenge);
    Digest mine, theirs;
    std::memcpy(mine.data(), expected.mac, mine.size());
    std::memcpy(theirs.data(), pending.proof.mac, theirs.size());
    if ((pending.hello.has_secret != 0) != !secret.empty()) {
      return secret.empty() ? Answer::no_secret_here : Answer::secret_needed;
    }
    if (!same_digest(mine, theirs)) return Answer::wrong_secret;
    if (pending.local && secret.empty()) {
      struct ucred who{};
      socklen_t size = sizeof who;
      if (::getsockopt(pending.socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != ::geteuid()) {
        return Answer::other_user;
      }
    }
    return Answer::welcome;
  }

  bool judge(Place place) {
    Pending& pending = *place;
    Verdict verdict{};
    Answer answer = judgement(pending);
    const auto intent = static_cast<Intent>(pending.hello.intent);
    Place owner = pending_.end();
    if (answer == Answer::welcome && intent == Intent::lane) {
      owner = std::find_if(pending_.begin(), pending_.end(), [&](const Pending& one) {
        return one.state == Pending::State::lanes &&
               std::memcmp(one.session.id.data(), pending.hello.session, one.session.id.size()) == 0;
      });
      if (owner == pending_.end() || pending.hello.lanes != owner->lanes.size()) answer = Answer::unknown_session;
    }
    if (answer == Answer::welcome && intent != Intent::lane) {
      random_bytes(pending.session.id);
      pending.session.authenticated = !options_.options.secret.empty();
      std::memcpy(verdict.session, pending.session.id.data(), pending.session.id.size());
    }
    verdict.answer = static_cast<uint32_t>(answer);
    seal(options_.options.secret, pending.hello, pending.challenge, &verdict);
    say(pending, verdict);
    if (answer != Answer::welcome)
      fail(ErrorKind::untrusted, "it did not prove that it knows the secret, or whose it is");
    switch (intent) {
      case Intent::shm:
        if (!pending.local) fail(ErrorKind::frame, "no descriptors can come over TCP");
        pending.state = Pending::State::offer;
        return true;
      case Intent::stream:
        if (pending.hello.lanes > kMaxLanes) fail(ErrorKind::frame, "too many lanes");
        pending.state = Pending::State::lanes;
        return false;  // until its lanes have come it has nothing to say
      case Intent::lane:
        unwatch(pending);
        owner->lanes.push_back(std::move(pending.socket));
        pending_.erase(place);
        if (owner->lanes.size() == owner->hello.lanes + 1) complete(owner);
        return false;
      case Intent::raw:
        if (options_.raw == nullptr) fail(ErrorKind::frame, "nobody here takes raw connections");
        if (pending.socket.tls() != nullptr) fail(ErrorKind::frame, "raw connections are not under TLS");
        unwatch(pending);
        options_.raw(pending.socket.take(), pending.local);
        pending_.erase(place);
        return false;
    }
    fail(ErrorKind::frame, "an intent that this version does not know");
  }

  void unwatch(const Pending& pending) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pending.socket.get(), nullptr); }

  void complete(Place place) {
    unwatch(*place);
    deliver(take_tcp(std::move(place->socket), std::move(place->lanes), place->session, options_.options));
    pending_.erase(place);
  }

  void take_offer(Place place) {
    Pending& pending = *place;
    ShmReply reply{};
    reply.viable = 1;
    std::shared_ptr<Connection> connection;
    unwatch(pending);
    const int socket = pending.socket.get();
    Descriptor plain = pending.socket.take();
    try {
      connection = take_shm(std::move(plain), pending.offer, std::move(pending.fds), pending.session, options_.options);
    } catch (const Error& error) {
      reply.viable = 0;
      std::strncpy(reply.reason, error.what(), sizeof reply.reason - 1);
    }
    write_exactly(socket, std::as_bytes(std::span(&reply, 1)), Deadline::after(0));
    if (connection == nullptr) return refuse(place, reply.reason);
    deliver(std::move(connection));
    pending_.erase(place);
  }

  void deliver(std::shared_ptr<Connection> connection) {
    std::lock_guard lock(mutex_);
    if (closed_) fail(ErrorKind::peer_lost, "the listener was closed");
    if (ready_.size() >= kMostAccepted) fail(ErrorKind::peer_lost, "the listener has too many connections to take");
    ready_.push_back(std::move(connection));
    arrived_.notify_one();
  }

  const ListenerOptions options_;
  const uint64_t forks_;
  std::array<uint8_t, 16> id_{};
  Address address_;
  std::string text_;
  Descriptor epoll_, stop_, unix_, tcp_;
  std::list<Pending> pending_;  // the thread's
  std::atomic<uint64_t> refused_{0};
  mutable std::mutex refusal_mutex_;
  std::string refusal_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::shared_ptr<Connection>> ready_;
  bool closed_ = false, gone_ = false;  // gone: the sockets are closed
  std::unique_ptr<std::thread> thread_;

 public:
  // Listeners of this process, by id, for dialers in it.
  struct Registry {
    std::mutex mutex;
    std::map<std::string, std::weak_ptr<Body>> listeners;
  };
  static Registry& registry() {
    static auto* made = [] {
      static auto* of_process = new Registry();  // never deleted: listeners may outlive main
      ::pthread_atfork([] { of_process->mutex.lock(); }, [] { of_process->mutex.unlock(); },
                       [] {
                         of_process->listeners.clear();
                         of_process->mutex.unlock();
                       });
      return of_process;
    }();
    return *made;
  }
};

Listener::Listener(const ListenerOptions& options) : body_(std::make_shared<Body>(options)) {
  body_->name();
  Body::Registry& registry = Body::registry();
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
  Body::Registry& registry = Body::registry();
  {
    std::lock_guard lock(registry.mutex);
    registry.listeners.erase(body_->id());
  }
  body_->close();
}

// --- the dialer ---------------------------------------------------------------------------------------------------

std::shared_ptr<Connection> dial_inproc(const Address& address, const Options& options, Deadline) {
  std::shared_ptr<Listener::Body> body;
  {
    Listener::Body::Registry& registry = Listener::Body::registry();
    std::lock_guard lock(registry.mutex);
    const auto found = registry.listeners.find(address.id);
    if (found != registry.listeners.end()) body = found->second.lock();
  }
  if (body == nullptr) fail(ErrorKind::not_viable, "the peer is another process");
  return body->meet(options);
}

const std::array<Provider, 3> kProviders = {{
    {"inproc", inproc_not_viable},
    {"shm", shm_not_viable},
    {"tcp", tcp_not_viable},
}};

std::shared_ptr<Connection> connect(const std::string& text, const Options& options, Deadline deadline) {
  check_options(options);
  const Address address = Address::parse(text);
  using Dial = std::shared_ptr<Connection> (*)(const Address&, const Options&, Deadline);
  constexpr Dial kDials[] = {dial_inproc, dial_shm, dial_tcp};
  std::vector<std::pair<std::string, std::string>> considered;
  for (size_t i = 0; i < kProviders.size(); ++i) {
    if (!options.transport.empty() && options.transport != kProviders[i].name) continue;
    try {
      auto connection = kDials[i](address, options, deadline);
      connection->considered_ = std::move(considered);
      return connection;
    } catch (const Error& error) {
      if (error.kind == ErrorKind::untrusted || error.kind == ErrorKind::timed_out) throw;
      considered.emplace_back(kProviders[i].name, error.what());
    }
  }
  std::string reasons;
  for (const auto& [name, reason] : considered) reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
  fail(ErrorKind::not_viable,
       options.transport.empty() ? "no transport reaches the peer. "
                                 : "the transport asked for does not reach the peer. ",
       reasons);
}

}  // namespace geartrain
