// tcp: dialing. Sockets to the places where a peer listens, secured, greeted and joined into one connection (tcp.cc).

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/providers/at_once.h"
#include "transport/providers/lane_threads.h"
#include "transport/providers/provider.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

Stream connect_stream(const std::string& place, const Options& options, Deadline deadline) {
  Stream stream = connect_tcp(place, deadline);
  if (options.tls == nullptr) return stream;
  std::string host = place.substr(0, place.rfind(':'));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  try {
    secure(&stream, options, host, deadline);
  } catch (const Error& error) {
    fail(error.kind, place, ": ", error.what());
  }
  return stream;
}

Stream dial_lane(const std::string& place, const Address& address, const Options& options, Deadline deadline,
                 uint32_t number, const Session& session) {
  Stream lane = until_admitted(deadline, [&]() -> Stream {
    Stream dialled = connect_stream(place, options, deadline);
    try {
      greet(dialled.wire(), Intent::lane, address, options, deadline, number, &session.id);
    } catch (const SessionGone&) {
      return {};
    }
    return dialled;
  });
  if (!lane) fail(ErrorKind::peer_lost, "the peer has given up the connection of this lane");
  return lane;
}

// All the streams of one connection: the first one, and then all others at once, each of which takes four times the
// network's round trip and two signatures. An attempt that fails half-way leaves nothing: the next one is another
// session.
std::shared_ptr<Connection> dial_place(const std::string& place, const Address& address, const Options& options,
                                       Deadline deadline) {
  Stream socket = connect_stream(place, options, deadline);
  const bool tls = options.tls != nullptr;
  const uint32_t lanes = options.lanes == kLanesByCores ? lanes_by_cores(tls, tls ? options.tls->threads() : 0)
                                                        : std::min(options.lanes, kMaxLanes);
  const Session session = greet(socket.wire(), Intent::stream, address, options, deadline, lanes);
  std::vector<Stream> joined(size_t{lanes} + 1);
  const auto dial = [&](uint32_t i) { joined[i] = dial_lane(place, address, options, deadline, i, session); };
  if (session.lanes_in_any_order) {
    at_once(lanes + 1, dial);
  } else {
    for (uint32_t i = 0; i <= lanes; ++i) dial(i);
  }
  return take_tcp(std::move(socket), std::move(joined), session, options);
}

}  // namespace

void prepare_tcp(int socket, bool heartbeats) {
  const int on = 1, idle_s = 10, interval_s = 3, probes = 3,
            unacknowledged_ms = heartbeats ? 0 : 30'000;  // 0: no limit
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

Descriptor connect_tcp(const std::string& host_and_port, Deadline deadline) {
  const size_t colon = host_and_port.rfind(':');
  if (colon == std::string::npos) fail(ErrorKind::argument, "an address is host:port, found '", host_and_port, "'");
  const std::string host = host_and_port.substr(0, colon), port = host_and_port.substr(colon + 1);
  struct addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  struct addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    fail(ErrorKind::not_viable, "cannot resolve ", host, ": ", ::gai_strerror(error));
  }
  const std::unique_ptr<struct addrinfo, void (*)(struct addrinfo*)> addresses(found, ::freeaddrinfo);
  std::string why = "it has no address";
  bool nobody = true;  // listens at any of them
  for (const struct addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Descriptor socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) {
      why = std::string("no socket can be made: ") + std::strerror(errno);
      nobody = false;
      continue;
    }
    int error = ::connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      if (!wait_for(socket.get(), POLLOUT, deadline)) {
        fail(ErrorKind::timed_out, host_and_port, " did not answer before the deadline");
      }
      socklen_t size = sizeof error;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) {
      prepare_tcp(socket.get());
      return socket;
    }
    why = std::strerror(error);
    nobody &= error == ECONNREFUSED;
  }
  if (nobody) throw NobodyListens(host_and_port + ": " + why);
  fail(ErrorKind::not_viable, host_and_port, ": ", why);
}

std::shared_ptr<Connection> dial_tcp(const Address& address, const Options& options, Deadline deadline) {
  if (address.tcp.empty()) fail(ErrorKind::not_viable, "the peer does not listen for it");
  std::string why;
  bool nobody = true;  // listens at any of them
  for (const std::string& place : address.tcp) {
    try {
      // An address that does not answer must not use up the time of the next one.
      const Deadline soon =
          &place == &address.tcp.back() ? deadline : deadline.sooner(options.limits.handshake_timeout_s);
      return until_admitted(soon, [&] { return dial_place(place, address, options, soon); });
    } catch (const Error& error) {
      const bool last = &place == &address.tcp.back();
      const bool refused = dynamic_cast<const NobodyListens*>(&error) != nullptr;
      if (error.kind == ErrorKind::untrusted || (last && (!refused || nobody))) throw;
      nobody &= refused;
      why = error.what();
    }
  }
  fail(ErrorKind::not_viable, why);
}

std::string tcp_not_viable() {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  struct sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!socket || ::bind(socket.get(), reinterpret_cast<struct sockaddr*>(&loopback), sizeof loopback) != 0) {
    return std::string("no socket can be bound: ") + std::strerror(errno);
  }
  return "";
}

}  // namespace geartrain
