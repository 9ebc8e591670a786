// shm: how two processes come to share a control segment (shm_control.h), and whether they can.

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/memfd.h"
#include "transport/providers/provider.h"
#include "transport/providers/shm_control.h"
#include "transport/security/handshake.h"

namespace geartrain {

namespace {

constexpr char kOfferMagic[8] = {'G', 'E', 'A', 'R', 'O', 'F', 'R', '\n'};

}  // namespace

Descriptor connect_unix(const std::string& name, Deadline deadline) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail(ErrorKind::os, "cannot make a Unix socket: ", std::strerror(errno));
  struct sockaddr_un to{};
  to.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof to.sun_path) fail(ErrorKind::argument, "the name of a socket is too long");
  std::memcpy(to.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + name.size());
  while (::connect(socket.get(), reinterpret_cast<const struct sockaddr*>(&to), size) != 0) {
    if (errno == ECONNREFUSED || errno == ENOENT) {
      throw NobodyListens("its socket is not there: another host, another network namespace, or it is gone");
    }
    if (errno != EAGAIN && errno != EINTR) {
      fail(ErrorKind::not_viable, "its socket cannot be connected: ", std::strerror(errno));
    }
    // The listener's backlog is full, and a Unix socket cannot be waited for: retry shortly.
    if (deadline.passed()) fail(ErrorKind::timed_out, "the peer took no connection before the deadline");
    wait_for(-1, 0, Deadline::after(0.001));
  }
  return socket;
}

namespace {

std::shared_ptr<Connection> dial_once(const Address& address, const Options& options, Deadline deadline) {
  Descriptor socket = connect_unix(address.shm, deadline);
  const Session session = greet(socket.get(), Intent::shm, address, options, deadline);

  auto control = std::make_shared<ShmControl>();
  const Descriptor memory = make_memory("geartrain connection", kControlBytes);
  control->memory = Memory(memory.get(), kControlBytes, true);
  control->dialer = true;
  ControlHeader& header = control->header();
  std::memcpy(header.magic, kControlMagic, sizeof header.magic);
  header.version = kControlVersion;
  header.slots = kSlots;
  header.ring_bytes = kRingBytes;
  ShmOffer offer{};
  std::memcpy(offer.magic, kOfferMagic, sizeof offer.magic);
  offer.segment_bytes = kControlBytes;
  random_bytes(offer.nonce);
  std::memcpy(header.nonce, offer.nonce, sizeof header.nonce);

  Descriptor mine(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  control->peer_wake = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!mine || !control->peer_wake) fail(ErrorKind::os, "cannot make an eventfd: ", std::strerror(errno));
  int line[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, line) != 0) {
    fail(ErrorKind::os, "cannot make a pair of sockets: ", std::strerror(errno));
  }
  Descriptor sideband(line[0]);
  const Descriptor sideband_peer_end(line[1]);
  const int fds[kShmOfferFds] = {memory.get(), mine.get(), control->peer_wake.get(), sideband_peer_end.get()};
  send_with_fds(socket.get(), std::as_bytes(std::span(&offer, 1)), fds, deadline);
  ShmReply reply{};
  read_exactly(socket.get(), std::as_writable_bytes(std::span(&reply, 1)), deadline);
  reply.reason[sizeof reply.reason - 1] = 0;
  if (reply.viable == 0) fail(ErrorKind::not_viable, "the peer answered: ", reply.reason);
  for (size_t i = 0; i < sizeof header.nonce; ++i) {
    if (header.answer[i] != static_cast<uint8_t>(~offer.nonce[i])) {
      fail(ErrorKind::not_viable, "the peer's answer does not show in the memory it was to share");
    }
  }
  return make_shm(std::move(socket), std::move(control), std::move(mine), std::move(sideband), session, options);
}

}  // namespace

std::shared_ptr<Connection> dial_shm(const Address& address, const Options& options, Deadline deadline) {
  if (address.shm.empty()) fail(ErrorKind::not_viable, "the peer does not listen for it");
  return until_admitted(deadline, [&] { return dial_once(address, options, deadline); });
}

std::shared_ptr<Connection> take_shm(Descriptor socket, const ShmOffer& offer, std::vector<Descriptor> fds,
                                     const Session& session, const Options& options) {
  if (std::memcmp(offer.magic, kOfferMagic, sizeof offer.magic) != 0 || fds.size() != kShmOfferFds ||
      offer.segment_bytes != kControlBytes) {
    fail(ErrorKind::not_viable, "the offer is not what this version expects");
  }
  auto control = std::make_shared<ShmControl>();
  control->memory = open_memory(fds[0], kControlBytes);
  ControlHeader& header = control->header();
  if (std::memcmp(header.magic, kControlMagic, sizeof header.magic) != 0 || header.version != kControlVersion ||
      header.slots != kSlots || header.ring_bytes != kRingBytes) {
    fail(ErrorKind::not_viable, "the segment is not what this version expects");
  }
  if (std::memcmp(header.nonce, offer.nonce, sizeof header.nonce) != 0) {
    fail(ErrorKind::not_viable, "the nonce in the segment is not the one that was sent");
  }
  for (size_t i = 0; i < sizeof header.nonce; ++i) header.answer[i] = static_cast<uint8_t>(~offer.nonce[i]);
  for (size_t i = 1; i < kShmOfferFds; ++i) {
    ::fcntl(fds[i].get(), F_SETFL, O_NONBLOCK);  // a misbehaving descriptor must not block writes
  }
  control->peer_wake = std::move(fds[1]);
  return make_shm(std::move(socket), std::move(control), std::move(fds[2]), std::move(fds[3]), session, options);
}

std::string shm_not_viable() {
  try {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
      fail(ErrorKind::os, "no Unix sockets: ", std::strerror(errno));
    }
    const Descriptor one(pair[0]), other(pair[1]);
    const Descriptor memory = make_memory("geartrain probe", 4096);
    const Memory mine(memory.get(), 4096, true);
    mine.data()[17] = std::byte{42};
    const int fd = memory.get();
    const std::byte word{1};
    send_with_fds(one.get(), {&word, 1}, {&fd, 1}, Deadline::after(1));
    std::vector<Descriptor> fds;
    std::byte got{};
    if (receive_with_fds(other.get(), {&got, 1}, &fds) != 1 || fds.size() != 1) {
      return "descriptors do not pass through Unix sockets here";
    }
    if (open_memory(fds[0], 4096).data()[17] != std::byte{42}) return "a memfd's memory is not shared here";
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace geartrain
