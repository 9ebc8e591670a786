// Handshake on a socket, before any message: both sides prove that they know the secret, or that none is needed.
//
//   dialer                                    listener
//   Hello      nonce, intent            --->
//                                       <---  Challenge  listener's id, nonce, whether a secret is needed
//   Proof      HMAC over both           --->             verified before the listener reveals anything
//                                       <---  Verdict    accepted or the reason, a session's id, HMAC over all of it
//
// The HMACs cover every byte so far under a label for each side, so that none can be replayed or reflected. All
// structures have a fixed size: what is longer, shorter or later than expected is refused and closed.
//
// A listener that has no place for a dialer says so, in its Challenge or its Verdict (kNeedsPatience, Answer::busy),
// where it can; else it hangs up. Either is no refusal: the dialer begins anew, until its deadline (until_admitted).
//
// Abstract names of Unix sockets belong to whoever binds them first. So without a secret the dialer checks that the
// other side's process is of its own user, as the listener does.
//
// With TLS (tls.h), its handshake comes first and all of this is inside. A dialer without TLS gets a
// Challenge that names the reason; a dialer with TLS where none is used gets one as well, in the clear, and detects it.
#pragma once

#include <optional>

#include "base/deadline.h"
#include "base/sha256.h"
#include "transport/address.h"
#include "transport/options.h"
#include "transport/security/stream.h"

namespace geartrain {

constexpr char kHelloMagic[8] = {'G', 'E', 'A', 'R', 'T', 'P', 'T', '\n'};
constexpr uint32_t kProtocolVersion = 2;
constexpr uint32_t kMaxLanes = 16;

enum class Intent : uint32_t {
  stream = 1,
  shm = 2,
  lane = 3,
  raw = 4,  // no messages: the listener's owner speaks its own protocol from here on (ListenerOptions::raw)
};

struct Hello {
  char magic[8];
  uint32_t version;
  uint32_t intent;
  uint32_t lanes;  // stream: how many will follow, and then the sideband (sideband.h); lane: which of them this is
  uint32_t has_secret;
  uint8_t session[16];  // lane: of its connection
  uint8_t nonce[32];
};
static_assert(sizeof(Hello) == 72);

enum Need : uint32_t {
  kNeedsSecret = 1,
  kNeedsTls = 2,              // to a dialer without TLS; nothing follows
  kNeedsPatience = 4,         // there is no place for it now; nothing follows
  kTakesLanesInAnyOrder = 8,  // and at once; listeners of earlier builds take number 0 first, then 1, and so on
};

struct Challenge {
  char magic[8];
  uint32_t version;
  uint32_t needs;
  uint8_t listener[16];  // the id in its address
  uint8_t nonce[32];
};
static_assert(sizeof(Challenge) == 64);

struct Proof {
  uint8_t mac[32];
};

enum class Answer : uint32_t {
  welcome = 0,
  wrong_secret,
  secret_needed,
  no_secret_here,
  other_user,
  unknown_session,
  other_version,
  busy
};

struct Verdict {
  uint32_t answer;
  uint32_t reserved;
  uint8_t session[16];
  uint8_t mac[32];
};
static_assert(sizeof(Verdict) == 56);

using SessionId = std::array<uint8_t, 16>;

// Result of a handshake: what both sides know of each other.
struct Session {
  SessionId id{};
  SessionId listener{};  // of the listener that was dialled
  bool authenticated = false;
  bool lanes_in_any_order = false;  // kTakesLanesInAnyOrder
  std::string name() const;         // the id's first half, in hexadecimal
};

Proof prove(const std::string& secret, const Hello& hello, const Challenge& challenge);
void seal(const std::string& secret, const Hello& hello, const Challenge& challenge, Verdict* verdict);

// The dialer's half, over a connected non-blocking socket. An address without an id accepts any listener there.
// Throws untrusted, timed_out, frame; and peer_lost where another attempt may succeed: the listener is busy, or hung
// up.
Session greet(Wire wire, Intent intent, const Address& address, const Options& options, Deadline deadline,
              uint32_t lanes = 0, const SessionId* of = nullptr);

// A lane's connection was given up by the listener: only a new session can succeed.
struct SessionGone : Error {
  using Error::Error;
};

// Pauses between a dialer's attempts: longer each time, and random, so that many dialers do not come together again.
class RetryPause {
 public:
  // After an attempt that failed with `error`, while that is handled. Waits if another one may succeed, which is so for
  // peer_lost, and there is time for it. Else throws: timed_out, with what the listener said last, when only the
  // deadline was in the way.
  void wait(const Error& error, Deadline deadline);

 private:
  uint32_t attempts_ = 0;  // that the listener had no place for
  std::string why_;
};

// The result of the first attempt that the listener has a place for. Throws what an attempt throws for good.
template <typename Attempt>
auto until_admitted(Deadline deadline, Attempt&& attempt) {
  for (RetryPause pause;;) {
    try {
      return attempt();
    } catch (const Error& error) {
      pause.wait(error, deadline);
    }
  }
}

// The dialer's TLS handshake with the host that it dialled. Throws untrusted, timed_out, peer_lost.
void secure(Stream* stream, const Options& options, const std::string& host, Deadline deadline);

// Exactly so many bytes, over a non-blocking socket. Throws timed_out and peer_lost, and what a Wire throws.
void write_exactly(Wire wire, Bytes bytes, Deadline deadline);
void read_exactly(Wire wire, std::span<std::byte> bytes, Deadline deadline);
// Waits until the socket has one of the events. False at the deadline.
bool wait_for(int socket, short events, Deadline deadline);

std::string hex(std::span<const uint8_t> bytes);

}  // namespace geartrain
