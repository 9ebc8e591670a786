#include "transport/admission.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>

#include "transport/memfd.h"

namespace geartrain {
namespace {

constexpr int kAcceptedAtOnce = 64;  // then those that are there get their turn

// Descriptors that this process may have.
size_t most_files() {
  struct rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return size_t{1} << 20;
  return static_cast<size_t>(limit.rlim_cur);
}

// Of a connection that begins with this hello: the stream, its lanes and the sideband.
size_t sockets_of(const Hello& hello) {
  return static_cast<Intent>(hello.intent) == Intent::stream ? size_t{hello.lanes} + 2 : 1;
}

template <typename T>
std::span<std::byte> writable(T* value) {
  return std::as_writable_bytes(std::span(value, 1));
}

}  // namespace

Admission::Admission(const ListenerOptions& options, const std::array<uint8_t, 16>& id, int epoll, Host host)
    : options_(options),
      id_(id),
      epoll_(epoll),
      host_(std::move(host)),
      most_places_(std::max<size_t>(1, std::min<size_t>(options.options.limits.max_pending, most_files() / 4))),
      most_sockets_(most_files() / 2) {
  uint8_t key[32];
  random_bytes(key);
  session_key_.assign(reinterpret_cast<const char*>(key), sizeof key);
}

Digest Admission::session_key(const SessionId& id) const {
  return hmac_sha256(session_key_, {std::as_bytes(std::span(id))});
}

bool Admission::take_from(const Descriptor& listening, bool local) {
  for (int i = 0; listening && i < kAcceptedAtOnce; ++i) {
    Descriptor socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      add(std::move(socket), local);
      continue;
    }
    if (errno == EAGAIN) return true;
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      const int error = errno;
      if (silent_.empty()) {
        note_refusal(std::string("no socket can be made: ") + std::strerror(error));
        return false;
      }
      refuse(silent_.begin(),
             std::string("it sent nothing, and no socket can be made for others: ") + std::strerror(error));
    }
    // Else that connection has ended already, or a signal came.
  }
  return true;
}

void Admission::add(Descriptor socket, bool local) {
  const bool tls = !local && options_.options.tls != nullptr;
  const Deadline deadline = Deadline::after(options_.options.limits.handshake_timeout_s);
  const uint64_t event = next_event_++;
  silent_.push_back({event, std::move(socket), local, deadline, patience(), tls ? State::tls : State::hello, &silent_});
  const Place place = std::prev(silent_.end());
  try {
    by_event_.emplace(event, place);
  } catch (...) {
    silent_.pop_back();
    throw;
  }
  next_late_ = next_late_.sooner(deadline);
  struct epoll_event watched{};
  watched.events = EPOLLIN | EPOLLRDHUP;
  watched.data.u64 = event;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, place->socket.get(), &watched) != 0) {
    return refuse(place, std::string("it cannot be waited for: ") + std::strerror(errno));
  }
  if (silent_.size() + greeting_.size() > most_places_) make_room(place);
  advance(event);  // its hello is often there, and then it is not taken for a silent one
}

// For the newcomer: one that has said nothing for long, or else none.
void Admission::make_room(Place newcomer) {
  Place oldest = greeting_.size() > silent_.size() ? greeting_.begin() : silent_.begin();
  if (!oldest->patience.passed()) oldest = newcomer;
  tell_busy(*oldest);
  refuse(oldest, "too many unauthenticated connections");
}

// So that its dialer knows why, if it reads that before the end.
void Admission::tell_busy(const Pending& pending) noexcept {
  try {
    if (pending.state == State::hello) {
      Challenge challenge{};
      std::memcpy(challenge.magic, kHelloMagic, sizeof kHelloMagic);
      challenge.version = kProtocolVersion;
      challenge.needs = kNeedsPatience;
      std::memcpy(challenge.listener, id_.data(), id_.size());
      reply(pending, challenge);
    } else if (pending.state == State::proof) {
      Verdict verdict{};
      verdict.answer = static_cast<uint32_t>(Answer::busy);
      reply(pending, verdict);
    }
  } catch (const std::exception&) {
    // It does not read, or is gone.
  }
}

void Admission::move(Place place, Places& to) {
  to.splice(to.end(), *place->in, place);
  place->in = &to;
}

void Admission::forget(Place place) {
  if (place->in == &proved_) proved_sockets_ -= sockets_of(place->hello);
  by_session_.erase(session_key(place->session.id));
  by_event_.erase(place->event);
  place->in->erase(place);
}

Deadline Admission::patience() const {
  return Deadline::after(options_.options.limits.handshake_timeout_s / 10);
}

void Admission::clear() {
  by_session_.clear();
  by_event_.clear();
  silent_.clear();
  greeting_.clear();
  proved_.clear();
  proved_sockets_ = 0;
}

void Admission::note_refusal(const std::string& why) noexcept {
  refused_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(refusal_mutex_);
  try {
    refusal_ = why;
  } catch (const std::bad_alloc&) {
    refusal_.clear();
  }
}

void Admission::refuse(Place place, const std::string& why) {
  note_refusal(why);
  // Its reply is lost if any of its input is still unread when the socket closes.
  std::byte unread[4096];
  for (int i = 0; i < 16 && place->socket && ::recv(place->socket.get(), unread, sizeof unread, MSG_DONTWAIT) > 0;) ++i;
  forget(place);
}

void Admission::refuse_late() {
  if (!next_late_.passed()) return;
  next_late_ = Deadline::after(1e9);
  for (Places* const places : {&silent_, &greeting_, &proved_}) {
    for (auto place = places->begin(); place != places->end();) {
      const auto next = std::next(place);
      if (place->deadline.passed()) {
        refuse(place, "it did not authenticate in time");
      } else {
        next_late_ = next_late_.sooner(place->deadline);
      }
      place = next;
    }
  }
}

int Admission::wait_ms() const {
  return std::min(60'000, next_late_.left_ms());
}

std::string Admission::refusal() const {
  std::lock_guard lock(refusal_mutex_);
  return refusal_;
}

std::string Admission::refused_so_far() const {
  const uint64_t refused = this->refused();
  return refused == 0 ? "" : "; refused so far: " + std::to_string(refused) + ", the last one because " + refusal();
}

bool Admission::find(uint64_t event, Place* place) {
  const auto found = by_event_.find(event);
  if (found == by_event_.end()) return false;
  *place = found->second;
  return true;
}

void Admission::advance(uint64_t event) {
  Place place;
  if (!find(event, &place)) return;
  try {
    place->patience = patience();
    move(place, *place->in);  // behind those that have been silent for longer
    while (step(place)) continue;
  } catch (const std::exception& error) {
    // Of no memory as well: this connection is given up, and the listener goes on.
    if (find(event, &place)) {
      refuse(place, error.what());
    } else {
      note_refusal(error.what());
    }
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
    case State::tls:
      return secured(pending);
    case State::hello:
      if (!have(pending, &pending.hello)) return false;
      return challenge(place);
    case State::proof:
      if (!have(pending, &pending.proof)) return false;
      return judge(place);
    case State::offer:
      if (!have(pending, &pending.offer)) return false;
      take_offer(place);
      return false;
    case State::lanes:
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
      pending.state = State::hello;  // the reply names what it lacks
      return true;
    }
    pending.socket.use_tls(options_.options.tls, nullptr);
  }
  switch (pending.socket.tls()->shake_hands()) {
    case Tls::Step::done:
      pending.state = State::hello;
      return true;
    case Tls::Step::wants_read:
      return false;
    case Tls::Step::wants_write:
      break;
  }
  fail(ErrorKind::timed_out, "it does not read the TLS handshake");
}

bool Admission::challenge(Place place) {
  Pending& pending = *place;
  // A TLS handshake begins with a record of its own kind.
  const bool begins_tls = pending.hello.magic[0] == 0x16 && pending.hello.magic[1] == 0x03;
  if (!begins_tls && std::memcmp(pending.hello.magic, kHelloMagic, sizeof kHelloMagic) != 0) {
    fail(ErrorKind::frame, "the other side is not geartrain");
  }
  const bool lacks_tls = options_.options.tls != nullptr && !pending.local && pending.socket.tls() == nullptr;
  std::memcpy(pending.challenge.magic, kHelloMagic, sizeof kHelloMagic);
  pending.challenge.version = kProtocolVersion;
  pending.challenge.needs =
      (options_.options.secret.empty() ? 0u : kNeedsSecret) | (lacks_tls ? kNeedsTls : 0u) | kTakesLanesInAnyOrder;
  std::memcpy(pending.challenge.listener, id_.data(), id_.size());
  random_bytes(pending.challenge.nonce);
  reply(pending, pending.challenge);
  if (begins_tls) fail(ErrorKind::untrusted, "it asks for TLS, and none is used here");
  if (lacks_tls) fail(ErrorKind::untrusted, "it came without TLS");
  if (pending.hello.version != kProtocolVersion) fail(ErrorKind::frame, "another version");
  pending.state = State::proof;
  move(place, greeting_);
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

// Whether there are places for its connection until all its sockets have come.
bool Admission::has_room_for(const Hello& hello) const {
  return proved_.size() < most_places_ && proved_sockets_ + sockets_of(hello) <= most_sockets_ &&
         host_.has_room(proved_.size() + 1);
}

bool Admission::judge(Place place) {
  Pending& pending = *place;
  Verdict verdict{};
  Answer answer = judgement(pending);
  const auto intent = static_cast<Intent>(pending.hello.intent);
  Place owner{};
  if (answer == Answer::welcome && intent == Intent::lane) {
    SessionId of{};
    std::memcpy(of.data(), pending.hello.session, of.size());
    const auto found = by_session_.find(session_key(of));
    if (found != by_session_.end()) owner = found->second;
    const uint32_t number = pending.hello.lanes;
    if (found == by_session_.end() || number >= owner->lanes.size() || owner->lanes[number]) {
      answer = Answer::unknown_session;
    }
  }
  if (answer == Answer::welcome && intent == Intent::stream) {
    if (pending.hello.lanes > kMaxLanes) fail(ErrorKind::frame, "too many lanes");
  }
  if (answer == Answer::welcome && (intent == Intent::stream || intent == Intent::shm) &&
      !has_room_for(pending.hello)) {
    answer = Answer::busy;
  }
  if (answer == Answer::welcome && intent != Intent::lane) {
    random_bytes(pending.session.id);
    pending.session.authenticated = !options_.options.secret.empty();
    std::memcpy(verdict.session, pending.session.id.data(), pending.session.id.size());
  }
  verdict.answer = static_cast<uint32_t>(answer);
  seal(options_.options.secret, pending.hello, pending.challenge, &verdict);
  // Before the dialer can act on the verdict.
  const Deadline deadline = Deadline::after(options_.options.limits.handshake_timeout_s);
  if (answer == Answer::welcome && (intent == Intent::stream || intent == Intent::shm)) {
    if (intent == Intent::stream) {
      pending.lanes.resize(size_t{pending.hello.lanes} + 1);
      by_session_.emplace(session_key(pending.session.id), place);
    }
    move(place, proved_);
    proved_sockets_ += sockets_of(pending.hello);
    pending.deadline = deadline;
  }
  reply(pending, verdict);
  switch (answer) {
    case Answer::welcome:
      break;
    case Answer::busy:
      fail(ErrorKind::peer_lost, "too many connections wait to be accepted, or for their lanes");
    case Answer::unknown_session:
      fail(ErrorKind::untrusted, "it is a lane of a connection that is not known, or was given up");
    default:
      fail(ErrorKind::untrusted, "it did not prove that it knows the secret, or whose it is");
  }
  switch (intent) {
    case Intent::shm:
      if (!pending.local) fail(ErrorKind::frame, "no descriptors can come over TCP");
      pending.state = State::offer;
      return true;
    case Intent::stream:
      pending.state = State::lanes;
      return false;  // until its lanes have arrived nothing may follow
    case Intent::lane:
      unwatch(pending);
      owner->lanes[pending.hello.lanes] = std::move(pending.socket);
      owner->deadline = deadline;
      forget(place);
      if (++owner->come == owner->lanes.size()) complete(owner);
      return false;
    case Intent::raw: {
      if (options_.raw == nullptr) fail(ErrorKind::frame, "raw connections are not accepted here");
      if (pending.socket.tls() != nullptr) fail(ErrorKind::frame, "raw connections are not under TLS");
      unwatch(pending);
      Descriptor socket = pending.socket.take();
      const bool local = pending.local;
      forget(place);
      options_.raw(std::move(socket), local);
      return false;
    }
  }
  fail(ErrorKind::frame, "an unknown intent");
}

void Admission::unwatch(const Pending& pending) {
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, pending.socket.get(), nullptr);
}

void Admission::complete(Place place) {
  unwatch(*place);
  Stream socket = std::move(place->socket);
  std::vector<Stream> lanes = std::move(place->lanes);
  const Session session = place->session;
  forget(place);
  host_.deliver(take_tcp(std::move(socket), std::move(lanes), session, options_.options));
}

void Admission::take_offer(Place place) {
  Pending& pending = *place;
  ShmReply answer{};
  answer.viable = 1;
  std::shared_ptr<Connection> connection;
  unwatch(pending);
  // The connection owns the socket from here on, and closes it when it cannot be made: the answer needs one of its own.
  const Descriptor own(::fcntl(pending.socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!own) fail(ErrorKind::os, "no descriptor for the answer: ", std::strerror(errno));
  try {
    connection =
        take_shm(pending.socket.take(), pending.offer, std::move(pending.fds), pending.session, options_.options);
  } catch (const std::exception& error) {
    answer.viable = 0;
    std::strncpy(answer.reason, error.what(), sizeof answer.reason - 1);
  }
  write_exactly(own.get(), std::as_bytes(std::span(&answer, 1)), Deadline::after(0));
  if (connection == nullptr) return refuse(place, answer.reason);
  forget(place);
  host_.deliver(std::move(connection));
}

}  // namespace geartrain
