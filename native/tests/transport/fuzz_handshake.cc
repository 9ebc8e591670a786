// Fuzzer of handshakes: arbitrary bytes to a listener and to a dialer; and as an address or a region's handle.

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdio>
#include <cstdlib>

#include "tests/support/fuzz.h"
#include "transport/providers/provider.h"
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

// A listener under arbitrary input: it refuses, or waits for more, and goes on.
void to_a_listener(std::span<const uint8_t> input) {
  static Listener* listener = [] {
    ListenerOptions options;
    options.tcp_host = "";
    options.options.limits.handshake_timeout_s = 0.2;
    return new Listener(options);
  }();
  const std::string name = Address::parse(listener->address()).shm;
  struct sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), name.size());
  const Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto size = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(socket.get(), reinterpret_cast<const struct sockaddr*>(&to), size) != 0) {
    std::perror("connect to the listener");
    std::abort();
  }
  [[maybe_unused]] const ssize_t sent = ::send(socket.get(), input.data(), input.size(), MSG_NOSIGNAL);
  ::shutdown(socket.get(), SHUT_WR);
  char answer[256];
  while (wait_for(socket.get(), POLLIN, Deadline::after(60))) {  // the driver tells what is slow again and again
    if (::recv(socket.get(), answer, sizeof answer, 0) <= 0) return;
  }
  std::fprintf(stderr, "the listener neither answered nor hung up\n");
  std::abort();
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
    if (error.kind != ErrorKind::schema) throw;
  }
  try {
    RegionHandle::parse(std::as_bytes(input));
  } catch (const Error& error) {
    if (error.kind != ErrorKind::schema) throw;
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
  if (data[0] % 3 == 0) to_a_listener(input);
  if (data[0] % 3 == 1) to_a_dialer(input);
  if (data[0] % 3 == 2) as_text(input);
  return 0;
}
