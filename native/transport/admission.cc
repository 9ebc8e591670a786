#include "transport/admission.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/memfd.h"

namespace geartrain {
namespace {

template <typename T>
std::span<std::byte> writable(T* value) {
  return std::as_writable_bytes(std::span(value, 1));
}

}  // namespace

void Admission::take_from(const Descriptor& listening, bool local) {
  while (listening) {
    Descriptor socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    // The connection that has been silent for longest makes room: silence must not keep others out.
    if (pending_.size() >= options_.options.limits.max_pending) {
      refuse(pending_.begin(), "too many unauthenticated connections");
    }
    const bool tls = !local && options_.options.tls != nullptr;
    pending_.emplace_back(std::move(socket), local, Deadline::after(options_.options.limits.handshake_timeout_s),
                          tls ? Pending::State::tls : Pending::State::hello);
    struct epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.ptr = &pending_.back();
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, pending_.back().socket.get(), &event);
  }
}

void Admission::refuse(Place place, const std::string& why) {
  {
    std::lock_guard lock(refusal_mutex_);
    refusal_ = why;
  }
  refused_.fetch_add(1, std::memory_order_relaxed);
  // Its reply is lost if any of its input is still unread when the socket closes.
  std::byte unread[4096];
  for (int i = 0; i < 16 && place->socket && ::recv(place->socket.get(), unread, sizeof unread, MSG_DONTWAIT) > 0;) ++i;
  pending_.erase(place);
}

void Admission::refuse_late() {
  for (auto place = pending_.begin(); place != pending_.end();) {
    const auto next = std::next(place);
    if (place->deadline.passed()) refuse(place, "it did not authenticate in time");
    place = next;
  }
}

int Admission::wait_ms() const {
  int wait_ms = 60'000;
  for (const Pending& pending : pending_) wait_ms = std::min(wait_ms, pending.deadline.left_ms());
  return wait_ms;
}

std::string Admission::refusal() const {
  std::lock_guard lock(refusal_mutex_);
  return refusal_;
}

std::string Admission::refused_so_far() const {
  const uint64_t refused = this->refused();
  return refused == 0 ? "" : "; refused so far: " + std::to_string(refused) + ", the last one because " + refusal();
}

Admission::Place Admission::find(const void* pending) {
  return std::find_if(pending_.begin(), pending_.end(), [&](const Pending& one) { return &one == pending; });
}

void Admission::advance(const void* pending) {
  const Place place = find(pending);
  if (place == pending_.end()) return;
  try {
    while (step(place)) continue;
  } catch (const Error& error) {
    const Place still = find(pending);
    if (still != pending_.end()) refuse(still, error.what());
  }
}

// Reads what the state waits for. False when it has not all arrived; throws when it never will.
template <typename T>
bool Admission::have(Pending& pending, T* wanted) {
  while (pending.filled < sizeof(T)) {
    const std::span<std::byte> room = writable(wanted).subspan(pending.filled);
    const ssize_t got = pending.socket.tls() != nullptr ? pending.socket.wire().receive(room.data(), room.size())
                                                        : receive_with_fds(pending.socket.get(), room, &pending.fds);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) fail(ErrorKind::peer_lost, "it hung up");
    if (pending.fds.size() > kShmOfferFds) fail(ErrorKind::frame, "unexpected descriptors");
    pending.filled += static_cast<size_t>(got);
  }
  pending.filled = 0;
  return true;
}

// A handshake's answers are small: a socket that does not take one at once has been filled on purpose.
template <typename T>
void Admission::reply(const Pending& pending, const T& what) {
  write_exactly(pending.socket.wire(), std::as_bytes(std::span(&what, 1)), Deadline::after(0));
}

// One step of a handshake. True when there may be another one at once; the place is then still there.
bool Admission::step(Place place) {
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
      fail(ErrorKind::frame, "it sent data before its lanes were connected, or hung up");
  }
  return false;
}

// True when its hello may be there.
bool Admission::secured(Pending& pending) {
  if (pending.socket.tls() == nullptr) {
    char first = 0;
    const ssize_t got = ::recv(pending.socket.get(), &first, 1, MSG_DONTWAIT | MSG_PEEK);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got <= 0) fail(ErrorKind::peer_lost, "it hung up");
    if (first == kHelloMagic[0]) {
      pending.state = Pending::State::hello;  // the reply names what it lacks
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
  fail(ErrorKind::timed_out, "it does not read the TLS handshake");
}

bool Admission::challenge(Pending& pending) {
  // A TLS handshake begins with a record of its own kind.
  const bool begins_tls = pending.hello.magic[0] == 0x16 && pending.hello.magic[1] == 0x03;
  if (!begins_tls && std::memcmp(pending.hello.magic, kHelloMagic, sizeof kHelloMagic) != 0) {
    fail(ErrorKind::frame, "the other side is not geartrain");
  }
  const bool lacks_tls = options_.options.tls != nullptr && !pending.local && pending.socket.tls() == nullptr;
  std::memcpy(pending.challenge.magic, kHelloMagic, sizeof kHelloMagic);
  pending.challenge.version = kProtocolVersion;
  pending.challenge.needs = (options_.options.secret.empty() ? 0u : kNeedsSecret) | (lacks_tls ? kNeedsTls : 0u);
  std::memcpy(pending.challenge.listener, id_.data(), id_.size());
  random_bytes(pending.challenge.nonce);
  reply(pending, pending.challenge);
  if (begins_tls) fail(ErrorKind::untrusted, "it asks for TLS, and none is used here");
  if (lacks_tls) fail(ErrorKind::untrusted, "it came without TLS");
  if (pending.hello.version != kProtocolVersion) fail(ErrorKind::frame, "another version");
  pending.state = Pending::State::proof;
  return true;
}

Answer Admission::judgement(const Pending& pending) {
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

bool Admission::judge(Place place) {
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
  reply(pending, verdict);
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
      return false;  // until its lanes have arrived nothing may follow
    case Intent::lane:
      unwatch(pending);
      owner->lanes.push_back(std::move(pending.socket));
      pending_.erase(place);
      if (owner->lanes.size() == owner->hello.lanes + 1) complete(owner);
      return false;
    case Intent::raw:
      if (options_.raw == nullptr) fail(ErrorKind::frame, "raw connections are not accepted here");
      if (pending.socket.tls() != nullptr) fail(ErrorKind::frame, "raw connections are not under TLS");
      unwatch(pending);
      options_.raw(pending.socket.take(), pending.local);
      pending_.erase(place);
      return false;
  }
  fail(ErrorKind::frame, "an unknown intent");
}

void Admission::unwatch(const Pending& pending) {
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, pending.socket.get(), nullptr);
}

void Admission::complete(Place place) {
  unwatch(*place);
  deliver_(take_tcp(std::move(place->socket), std::move(place->lanes), place->session, options_.options));
  pending_.erase(place);
}

void Admission::take_offer(Place place) {
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
  deliver_(std::move(connection));
  pending_.erase(place);
}

}  // namespace geartrain
