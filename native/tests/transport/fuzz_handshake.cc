// Fuzzer of handshakes: arbitrary bytes to a listener and to a dialer; and as an address or a region's handle.

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "tests/support/fuzz.h"
#include "transport/admission.h"
#include "transport/memfd.h"
#include "transport/providers/provider.h"
#include "transport/providers/shm_control.h"
#include "transport/security/handshake.h"
#include "transport/sideband/memory_region.h"
#include "transport/transport.h"

namespace geartrain {
namespace {

Hello hello(Intent intent, uint32_t lanes) {
  Hello made{};
  std::memcpy(made.magic, kHelloMagic, sizeof made.magic);
  made.version = kProtocolVersion;
  made.intent = static_cast<uint32_t>(intent);
  made.lanes = lanes;
  return made;
}

Address address_of_nought() {
  Address address;
  address.id = std::string(32, '0');
  return address;
}

// A listener's admission without the listener's thread: what arrived is handled by pump().
class QuietListener {
 public:
  QuietListener()
      : epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        listening_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    options_.tcp_host = "";
    std::string name = "geartrain-fuzz-" + std::to_string(::getpid());
    at_.sun_family = AF_UNIX;
    std::memcpy(at_.sun_path + 1, name.data(), name.size());
    at_bytes_ = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + name.size());
    if (::bind(listening_.get(), reinterpret_cast<const struct sockaddr*>(&at_), at_bytes_) != 0 ||
        ::listen(listening_.get(), 64) != 0) {
      std::perror("listen");
      std::abort();
    }
  }

  Descriptor dial() {
    Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<const struct sockaddr*>(&at_), at_bytes_) != 0) {
      std::perror("connect to the listener");
      std::abort();
    }
    return socket;
  }

  void pump() {
    if (!admission_.take_from(listening_, true)) std::abort();
    struct epoll_event events[32];
    for (int rounds = 0; rounds < 100; ++rounds) {
      const int ready = ::epoll_wait(epoll_.get(), events, 32, 0);
      if (ready <= 0) return;
      for (int i = 0; i < ready; ++i) admission_.advance(events[i].data.u64);
    }
    std::fprintf(stderr, "the listener leaves what has arrived\n");
    std::abort();
  }

  void drop_delivered() { delivered_.clear(); }

 private:
  ListenerOptions options_;
  std::array<uint8_t, 16> id_{};
  Descriptor epoll_, listening_;
  struct sockaddr_un at_{};
  socklen_t at_bytes_ = 0;
  std::vector<std::shared_ptr<Connection>> delivered_;
  Admission admission_{options_,
                       id_,
                       epoll_.get(),
                       {[this](std::shared_ptr<Connection> made) { delivered_.push_back(std::move(made)); },
                        [](size_t) { return true; }}};
};

template <typename T>
bool receive(const Descriptor& socket, T* value) {
  return ::recv(socket.get(), value, sizeof *value, MSG_DONTWAIT) == static_cast<ssize_t>(sizeof *value);
}

void write(const Descriptor& socket, std::span<const uint8_t> bytes) {
  [[maybe_unused]] const ssize_t sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// An offer of shared memory, with the descriptors of a good one.
void send_offer(const Descriptor& socket, std::span<const uint8_t> offer) {
  static const Descriptor memory = make_memory("fuzz control", kControlBytes);
  static const Memory control(memory.get(), kControlBytes, false);
  auto* const header = reinterpret_cast<ControlHeader*>(control.data());
  std::memcpy(header->magic, kControlMagic, sizeof header->magic);
  header->version = kControlVersion;
  header->slots = kSlots;
  header->ring_bytes = kRingBytes;
  if (offer.size() == sizeof(ShmOffer)) {
    std::memcpy(header->nonce, offer.data() + offsetof(ShmOffer, nonce), sizeof header->nonce);
  }
  const Descriptor one(::eventfd(0, EFD_CLOEXEC)), other(::eventfd(0, EFD_CLOEXEC));
  int line[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, line) != 0) std::abort();
  const Descriptor end(line[0]), other_end(line[1]);
  const int fds[kShmOfferFds] = {memory.get(), one.get(), other.get(), end.get()};
  if (offer.empty()) return;
  try {
    send_with_fds(socket.get(), std::as_bytes(offer), fds, Deadline::after(1));
  } catch (const Error& error) {
    if (error.kind != ErrorKind::peer_lost) throw;  // it may have hung up by now
  }
}

constexpr uint8_t kProves = 3, kOffers = 6;  // added to the first byte

// A listener under arbitrary input: it refuses, or waits for more until the dialer hangs up. A dialer that `proves`
// itself sends hellos, of a connection and then of its lanes, and what may follow; the proofs in between are right.
void to_a_listener(Reader input, bool proves, bool offers) {
  static auto& listener = *new QuietListener();
  std::vector<Descriptor> sockets;
  Verdict verdict{};
  do {
    sockets.push_back(listener.dial());
    const Descriptor& socket = sockets.back();
    const auto bytes = input.take(proves ? sizeof(Hello) : input.rest().size());
    Hello hello{};
    if (!bytes.empty()) std::memcpy(&hello, bytes.data(), std::min(bytes.size(), sizeof hello));
    const auto intent = static_cast<Intent>(hello.intent);
    if (proves && intent == Intent::lane && hello.session[0] == 0) {
      std::memcpy(hello.session, verdict.session, sizeof hello.session);
    }
    write(socket, proves ? std::span(reinterpret_cast<const uint8_t*>(&hello), bytes.size()) : bytes);
    listener.pump();
    Challenge challenge;
    if (!proves || !receive(socket, &challenge)) break;
    const Proof proof = prove("", hello, challenge);
    write(socket, std::span(proof.mac));
    listener.pump();
    Verdict answer;
    if (!receive(socket, &answer)) break;
    if (intent == Intent::stream) verdict = answer;
    if (intent == Intent::shm || intent == Intent::raw) {
      const auto rest = input.take(input.rest().size());
      if (offers) {
        send_offer(socket, rest);
      } else {
        write(socket, rest);
      }
      listener.pump();
    }
  } while (!input.rest().empty() && sockets.size() < 20);
  for (const Descriptor& socket : sockets) ::shutdown(socket.get(), SHUT_WR);
  listener.pump();
  listener.drop_delivered();
  char answer[256];
  for (const Descriptor& socket : sockets) {
    ssize_t got;
    while ((got = ::recv(socket.get(), answer, sizeof answer, MSG_DONTWAIT)) > 0) continue;
    if (got < 0 && errno == EAGAIN) {
      std::fprintf(stderr, "the listener did not hang up on a dialer that did\n");
      std::abort();
    }
  }
}

// A dialer under an arbitrary answer.
void to_a_dialer(std::span<const uint8_t> input) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return;
  const Descriptor mine(ends[0]);
  Descriptor theirs(ends[1]);
  [[maybe_unused]] const ssize_t sent = ::send(ends[1], input.data(), input.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  ::shutdown(ends[1], SHUT_WR);
  try {
    greet(mine.get(), Intent::stream, address_of_nought(), {}, Deadline::after(1));
  } catch (const Error& error) {
    if (error.kind != ErrorKind::frame && error.kind != ErrorKind::peer_lost && error.kind != ErrorKind::untrusted) {
      throw;
    }
  }
}

void as_text(std::span<const uint8_t> input) {
  try {
    const Address address = Address::parse(std::string(reinterpret_cast<const char*>(input.data()), input.size()));
    if (Address::parse(address.text()).text() != address.text()) std::abort();
  } catch (const Error& error) {
    if (error.kind != ErrorKind::argument) throw;
  }
  try {
    RegionHandle::parse(std::as_bytes(input));
  } catch (const Error& error) {
    if (error.kind != ErrorKind::argument) throw;
  }
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  std::vector<Input> seeds;
  for (const Hello& greeting : {hello(Intent::stream, 2), hello(Intent::shm, 0), hello(Intent::lane, 1)}) {
    seeds.push_back({0});
    append(&seeds.back(), greeting);
    append(&seeds.back(), Proof{});
    append(&seeds.back(), ShmOffer{{'G', 'E', 'A', 'R', 'O', 'F', 'R', '\n'}, 8192 + (2 << 20), {}});
  }
  // Those that prove themselves: a connection with its lanes and the sideband, a lane of none, one in shared memory.
  for (const uint32_t lanes : {0, 2}) {
    seeds.push_back({kProves});
    append(&seeds.back(), hello(Intent::stream, lanes));
    for (uint32_t lane = 0; lane <= lanes; ++lane) append(&seeds.back(), hello(Intent::lane, lane));
  }
  seeds.push_back({kProves});
  append(&seeds.back(), hello(Intent::lane, 1));
  for (const uint8_t offers : {uint8_t{0}, kOffers}) {
    seeds.push_back({static_cast<uint8_t>(kProves + offers)});
    append(&seeds.back(), hello(Intent::shm, 0));
    append(&seeds.back(), ShmOffer{{'G', 'E', 'A', 'R', 'O', 'F', 'R', '\n'}, kControlBytes, {}});
  }
  seeds.push_back({kProves});
  append(&seeds.back(), hello(Intent::raw, 0));
  Challenge challenge{};
  std::memcpy(challenge.magic, kHelloMagic, sizeof challenge.magic);
  challenge.version = kProtocolVersion;
  seeds.push_back({1});
  append(&seeds.back(), challenge);
  append(&seeds.back(), Verdict{});
  const std::string text = "2id=" + std::string(32, '0') + ";shm=geartrain-x;tcp=127.0.0.1:80;tcp=[::1]:9";
  seeds.emplace_back(text.begin(), text.end());
  return seeds;
}

}  // namespace geartrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  if (size == 0) return 0;
  const std::span<const uint8_t> input(data + 1, size - 1);
  if (data[0] % 3 == 0)
    to_a_listener(Reader(data + 1, size - 1), data[0] / kProves % 2 == 1, data[0] / kOffers % 2 == 1);
  if (data[0] % 3 == 1) to_a_dialer(input);
  if (data[0] % 3 == 2) as_text(input);
  return 0;
}
