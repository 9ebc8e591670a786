#include "transport/security/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/interruption.h"

namespace geartrain {
namespace {

constexpr double kShortestPauseS = 0.004, kLongestPauseS = 0.25;

// Throws untrusted when the process at the other end of a Unix socket is another user's.
void check_owner(int socket) {
  struct ucred who{};
  socklen_t size = sizeof who;
  int domain = 0;
  socklen_t domain_size = sizeof domain;
  if (::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size) != 0 || domain != AF_UNIX) return;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) {
    fail(ErrorKind::untrusted,
         "it is not known whose process the peer is, and no secret was given: ", std::strerror(errno));
  }
  if (who.uid != ::geteuid()) {
    fail(ErrorKind::untrusted, "the peer's socket belongs to another user (", who.uid, "), and no secret was given");
  }
}

Bytes label(const char* text) {
  return std::as_bytes(std::span(text, std::strlen(text)));
}

template <typename T>
Bytes bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

const char* reason(Answer answer) {
  switch (answer) {
    case Answer::welcome:
      return "welcome";
    case Answer::wrong_secret:
      return "it has another secret";
    case Answer::secret_needed:
      return "it asks for a secret, and none was given here";
    case Answer::no_secret_here:
      return "it has no secret, and one was given here";
    case Answer::other_user:
      return "it belongs to another user, and no secret was given";
    case Answer::unknown_session:
      return "it does not know the connection of this lane";
    case Answer::other_version:
      return "it has another version of the protocol";
    case Answer::busy:
      return "it has no place for another connection now";
  }
  return "it gave no reason";
}

}  // namespace

std::string hex(std::span<const uint8_t> bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::string Session::name() const {
  return hex(std::span(id).first(8));
}

Proof prove(const std::string& secret, const Hello& hello, const Challenge& challenge) {
  Proof proof{};
  if (secret.empty()) return proof;
  const Digest mac = hmac_sha256(secret, {label("geartrain dialer"), bytes_of(hello), bytes_of(challenge)});
  std::memcpy(proof.mac, mac.data(), mac.size());
  return proof;
}

void seal(const std::string& secret, const Hello& hello, const Challenge& challenge, Verdict* verdict) {
  std::memset(verdict->mac, 0, sizeof verdict->mac);
  if (secret.empty()) return;
  const Digest mac =
      hmac_sha256(secret, {label("geartrain listener"), bytes_of(hello), bytes_of(challenge), bytes_of(*verdict)});
  std::memcpy(verdict->mac, mac.data(), mac.size());
}

bool wait_for(int socket, short events, Deadline deadline) {
  struct pollfd one = {socket, events, 0};
  for (;;) {
    const Deadline slice = Interruption::possible() ? deadline.sooner(kInterruptionEveryS) : deadline;
    const int ready = ::poll(&one, 1, slice.left_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail(ErrorKind::os, "cannot wait for a socket: ", std::strerror(errno));
    if (deadline.passed()) return false;
    Interruption::check();
  }
}

void RetryPause::wait(const Error& error, Deadline deadline) {
  if (error.kind != ErrorKind::peer_lost && (error.kind != ErrorKind::timed_out || attempts_ == 0)) {
    throw;  // of its own type
  }
  double pause_s = 0;
  if (error.kind == ErrorKind::peer_lost) {
    ++attempts_;
    why_ = error.what();
    uint32_t random = 0;
    random_bytes(std::span(reinterpret_cast<uint8_t*>(&random), sizeof random));
    pause_s = std::min(kLongestPauseS, kShortestPauseS * static_cast<double>(1u << std::min(attempts_, 10u)));
    pause_s *= 0.5 + 0.5 * static_cast<double>(random) / 4294967296.0;
  }
  if (error.kind == ErrorKind::timed_out || static_cast<double>(deadline.left_ns()) * 1e-9 <= pause_s) {
    fail(ErrorKind::timed_out, "the listener let this side in before the deadline in none of ", attempts_,
         " attempts; the last one failed because ", why_);
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
  Interruption::check();
}

void write_exactly(Wire wire, Bytes bytes, Deadline deadline) {
  while (!bytes.empty() || !wire.flush()) {
    const ssize_t written = bytes.empty() ? (errno = EAGAIN, -1) : wire.send(bytes.data(), bytes.size());
    if (written > 0) {
      bytes = bytes.subspan(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      if (!wait_for(wire.socket, POLLOUT, deadline))
        fail(ErrorKind::timed_out, "the peer did not take the handshake in time");
    } else if (errno != EINTR) {
      fail(ErrorKind::peer_lost, "the peer hung up during the handshake: ", std::strerror(errno));
    }
  }
}

void read_exactly(Wire wire, std::span<std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t got = wire.receive(bytes.data(), bytes.size());
    if (got > 0) {
      bytes = bytes.subspan(static_cast<size_t>(got));
    } else if (got == 0) {
      fail(ErrorKind::peer_lost, "the peer hung up during the handshake");
    } else if (errno == EAGAIN) {
      if (!wait_for(wire.socket, POLLIN, deadline))
        fail(ErrorKind::timed_out, "the peer did not answer the handshake in time");
    } else if (errno != EINTR) {
      fail(ErrorKind::peer_lost, "the peer hung up during the handshake: ", std::strerror(errno));
    }
  }
}

void secure(Stream* stream, const Options& options, const std::string& host, Deadline deadline) {
  stream->use_tls(options.tls, &host);
  for (;;) {
    const Tls::Step step = stream->tls()->shake_hands();
    if (step == Tls::Step::done) return;
    if (!wait_for(stream->get(), step == Tls::Step::wants_write ? POLLOUT : POLLIN, deadline)) {
      fail(ErrorKind::timed_out, "the peer did not go on with the TLS handshake in time");
    }
  }
}

Session greet(Wire wire, Intent intent, const Address& address, const Options& options, Deadline deadline,
              uint32_t lanes, const SessionId* of) {
  if (options.secret.empty()) check_owner(wire.socket);
  Hello hello{};
  std::memcpy(hello.magic, kHelloMagic, sizeof hello.magic);
  hello.version = kProtocolVersion;
  hello.intent = static_cast<uint32_t>(intent);
  hello.lanes = lanes;
  hello.has_secret = !options.secret.empty();
  if (of != nullptr) std::memcpy(hello.session, of->data(), of->size());
  random_bytes(hello.nonce);
  write_exactly(wire, bytes_of(hello), deadline);

  Challenge challenge{};
  const auto answer_bytes = std::as_writable_bytes(std::span(&challenge, 1));
  // Something else may say a few bytes only, and hang up: that is no listener without a place, to be tried again.
  read_exactly(wire, answer_bytes.first(sizeof challenge.magic), deadline);
  if (std::memcmp(challenge.magic, kHelloMagic, sizeof challenge.magic) != 0) {
    throw NobodyListens("what answers there is not geartrain", ErrorKind::frame);
  }
  read_exactly(wire, answer_bytes.subspan(sizeof challenge.magic), deadline);
  if (challenge.version != kProtocolVersion) {
    fail(ErrorKind::frame, "the peer has version ", challenge.version, " of the protocol, this is version ",
         kProtocolVersion);
  }
  if (!address.id.empty() && address.id != Address::kAnyId && hex(challenge.listener) != address.id) {
    throw NobodyListens("another listener answers there: the one with this address is gone", ErrorKind::frame);
  }
  if ((challenge.needs & kNeedsPatience) != 0) fail(ErrorKind::peer_lost, "the peer is busy: ", reason(Answer::busy));
  if ((challenge.needs & kNeedsTls) != 0) {
    fail(ErrorKind::untrusted, "the peer refuses: it asks for TLS, and none was given here");
  }
  const bool needs_secret = (challenge.needs & kNeedsSecret) != 0;
  if (needs_secret != (hello.has_secret != 0)) {
    fail(ErrorKind::untrusted,
         "the peer refuses: ", reason(needs_secret ? Answer::secret_needed : Answer::no_secret_here));
  }
  const Proof proof = prove(options.secret, hello, challenge);
  write_exactly(wire, bytes_of(proof), deadline);

  Verdict verdict{};
  read_exactly(wire, std::as_writable_bytes(std::span(&verdict, 1)), deadline);
  const auto answer = static_cast<Answer>(verdict.answer);
  if (answer == Answer::busy) fail(ErrorKind::peer_lost, "the peer is busy: ", reason(answer));
  if (answer == Answer::unknown_session) {
    throw SessionGone(ErrorKind::peer_lost, std::string("the peer refuses: ") + reason(answer));
  }
  if (answer != Answer::welcome) fail(ErrorKind::untrusted, "the peer refuses: ", reason(answer));
  Verdict expected = verdict;
  seal(options.secret, hello, challenge, &expected);
  Digest mine, theirs;
  std::memcpy(mine.data(), expected.mac, mine.size());
  std::memcpy(theirs.data(), verdict.mac, theirs.size());
  if (!same_digest(mine, theirs)) fail(ErrorKind::untrusted, "the peer does not know the secret");
  Session session;
  std::memcpy(session.id.data(), verdict.session, session.id.size());
  std::memcpy(session.listener.data(), challenge.listener, session.listener.size());
  session.authenticated = !options.secret.empty();
  session.lanes_in_any_order = (challenge.needs & kTakesLanesInAnyOrder) != 0;
  return session;
}

}  // namespace geartrain
