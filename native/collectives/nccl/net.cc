// The table of point-to-point messages. NCCL takes no plugin without one, and uses it for all that is not an all-reduce
// over CollNet; so it is there, and plain: one TCP connection for each pair, its bytes moved by whoever asks (test()),
// no threads.
//
// A message is its length in 8 bytes, and its bytes. The side that connects first sends the listener's key.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor.h"
#include "base/sha256.h"
#include "collectives/nccl/plugin.h"

namespace geartrain::nccl {
namespace {

constexpr uint32_t kMagic = 0x324e5447;  // "GTN2"
constexpr size_t kMostStrangers = 64;    // connected, without their key yet
constexpr double kStrangerS = 10;
constexpr int kDeadMs = 30'000;  // a host that has not acknowledged for so long is dead

using Key = std::array<uint8_t, 16>;

class PairConnection;

struct PairHandle {
  uint32_t magic;
  Key key;
  sockaddr_in address;
  PairConnection* begun;  // by connect(), in the copy of the side that connects; null as it is given out
};
static_assert(sizeof(PairHandle) <= kNcclHandleBytes);

Descriptor tcp_socket() {
  Descriptor made(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made) fail(ErrorKind::os, "cannot make a socket: ", std::strerror(errno));
  return made;
}

// Small messages leave at once, and a dead host is found where nothing is sent as well.
void tune(int fd) {
  const int on = 1, idle_s = 10, interval_s = 5, probes = 4;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kDeadMs, sizeof kDeadMs);
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

// One direction of a pair: NCCL sends on one side and receives on the other. One thread at a time, as NCCL calls it.
class PairConnection {
 public:
  struct Request {
    PairConnection* of = nullptr;
    bool used = false, done = false;
    uint64_t length = 0, bytes = 0, capacity = 0;  // the header, done of header and body, and what a body may have
    std::byte* at = nullptr;
  };

  PairConnection(Descriptor socket, bool sends) : socket_(std::move(socket)), sends_(sends) {}

  int fd() const { return socket_.get(); }
  bool sends() const { return sends_; }

  // Null when so many are in progress already.
  Request* begin(std::byte* at, uint64_t bytes) {
    const auto free = std::ranges::find_if(requests_, [](const Request& one) { return !one.used; });
    if (free == requests_.end()) return nullptr;
    *free = {this, true, false, sends_ ? bytes : 0, 0, bytes, at};
    waiting_.push_back(&*free);
    progress();
    return &*free;
  }

  // Moves what can be moved now. Throws peer_lost, frame.
  void progress() {
    while (!waiting_.empty() && move(*waiting_.front())) {
      waiting_.front()->done = true;
      waiting_.pop_front();
    }
  }

 private:
  // True when it is done.
  bool move(Request& request) {
    constexpr uint64_t head = sizeof request.length;
    while (request.bytes < head || request.bytes < head + request.length) {
      std::array<iovec, 2> parts{};
      size_t count = 0;
      if (request.bytes < head) {
        parts[count++] = {reinterpret_cast<std::byte*>(&request.length) + request.bytes, head - request.bytes};
      }
      // The length has to be known before a body is received.
      const uint64_t of_body = request.bytes < head ? 0 : request.bytes - head;
      if (request.length > of_body && (sends_ || request.bytes >= head)) {
        parts[count++] = {request.at + of_body, request.length - of_body};
      }
      const ssize_t moved = transfer(parts.data(), count);
      if (moved < 0) return false;
      const bool was_head = request.bytes < head;
      request.bytes += static_cast<uint64_t>(moved);
      if (!sends_ && was_head && request.bytes >= head && request.length > request.capacity) {
        fail(ErrorKind::frame, "a message of ", request.length, " bytes for a receive of ", request.capacity);
      }
    }
    return true;
  }

  // Below zero: nothing for now.
  ssize_t transfer(iovec* parts, size_t count) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t moved = sends_ ? ::sendmsg(fd(), &message, MSG_NOSIGNAL) : ::recvmsg(fd(), &message, 0);
    if (moved > 0) return moved;
    if (moved < 0 && would_block()) return -1;
    fail(ErrorKind::peer_lost, "the peer is gone: ", moved == 0 ? "it hung up" : std::strerror(errno));
  }

  Descriptor socket_;
  const bool sends_;
  std::array<Request, kNcclMostRequests> requests_;
  std::deque<Request*> waiting_;  // in their order
};

class PairListener {
 public:
  explicit PairListener(const std::string& host) : socket_(tcp_socket()) {
    handle_.magic = kMagic;
    handle_.address.sin_family = AF_INET;
    ::inet_pton(AF_INET, host.c_str(), &handle_.address.sin_addr);
    auto* const name = reinterpret_cast<sockaddr*>(&handle_.address);
    socklen_t bytes = sizeof handle_.address;
    if (::bind(socket_.get(), name, bytes) != 0 || ::listen(socket_.get(), 1024) != 0 ||
        ::getsockname(socket_.get(), name, &bytes) != 0) {
      fail(ErrorKind::os, "cannot listen on ", host, ": ", std::strerror(errno));
    }
    random_bytes(handle_.key);
  }

  const PairHandle& handle() const { return handle_; }

  // A peer that has sent the key, or null. Never blocks.
  std::unique_ptr<PairConnection> accept() {
    while (strangers_.size() < kMostStrangers) {
      Descriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) break;
      strangers_.push_back({std::move(socket), {}, 0, Deadline::after(kStrangerS)});
    }
    std::unique_ptr<PairConnection> found;
    std::erase_if(strangers_, [&](Stranger& one) {
      if (found != nullptr) return false;
      const ssize_t came = ::recv(one.socket.get(), one.key.data() + one.bytes, one.key.size() - one.bytes, 0);
      if (came <= 0) return came == 0 || !would_block() || one.until.passed();
      one.bytes += static_cast<size_t>(came);
      if (one.bytes < one.key.size()) return false;
      if (one.key == handle_.key) {
        tune(one.socket.get());
        found = std::make_unique<PairConnection>(std::move(one.socket), false);
      }
      return true;
    });
    return found;
  }

 private:
  struct Stranger {
    Descriptor socket;
    Key key;
    size_t bytes;
    Deadline until;
  };
  ListeningSocket socket_;
  PairHandle handle_{};
  std::vector<Stranger> strangers_;
};

// --- the table -------------------------------------------------------------------------------------------------------

NcclResult listen(int device, void* handle, void** listener) {
  return guarded("listen", [&] {
    if (device != 0) fail(ErrorKind::argument, "there is device 0, found ", device);
    auto made = std::make_unique<PairListener>(settings().host);
    std::memcpy(handle, &made->handle(), sizeof(PairHandle));
    *listener = made.release();
    return kNcclSuccess;
  });
}

NcclResult connect(int /*device*/, void* bytes, void** connection, void** /*offload*/) {
  *connection = nullptr;
  return guarded("connect", [&] {
    PairHandle handle;
    std::memcpy(&handle, bytes, sizeof handle);
    if (handle.magic != kMagic) fail(ErrorKind::argument, "not a handle of this plugin: every rank needs the same one");
    std::unique_ptr<PairConnection> begun(std::exchange(handle.begun, nullptr));
    // Whatever happens, the handle does not keep what is closed.
    std::memcpy(bytes, &handle, sizeof handle);
    if (begun == nullptr) {
      begun = std::make_unique<PairConnection>(tcp_socket(), true);
      const auto* const to = reinterpret_cast<const sockaddr*>(&handle.address);
      if (::connect(begun->fd(), to, sizeof handle.address) != 0 && errno != EINPROGRESS) {
        fail(ErrorKind::peer_lost, "cannot connect: ", std::strerror(errno));
      }
    }
    pollfd writable{begun->fd(), POLLOUT, 0};
    if (::poll(&writable, 1, 0) == 1) {
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(begun->fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) fail(ErrorKind::peer_lost, "cannot connect: ", std::strerror(error));
      tune(begun->fd());
      // The first bytes on a new connection: there is room for them.
      const ssize_t sent = ::send(begun->fd(), handle.key.data(), handle.key.size(), MSG_NOSIGNAL);
      if (sent != static_cast<ssize_t>(handle.key.size())) fail(ErrorKind::peer_lost, "cannot send the key");
      *connection = begun.release();
      return kNcclSuccess;
    }
    handle.begun = begun.release();
    std::memcpy(bytes, &handle, sizeof handle);
    return kNcclSuccess;
  });
}

NcclResult accept(void* listener, void** connection, void** /*offload*/) {
  *connection = nullptr;
  return guarded("accept", [&] {
    *connection = static_cast<PairListener*>(listener)->accept().release();
    return kNcclSuccess;
  });
}

void begin_request(void* connection, bool sends, void* data, int bytes, void* region, void** request) {
  auto& own = *static_cast<PairConnection*>(connection);
  if (own.sends() != sends || bytes < 0) fail(ErrorKind::argument, "not a message for this side of a connection");
  const auto size = static_cast<uint64_t>(bytes);
  if (size != 0) check_region(region, data, size, "a message");
  *request = own.begin(static_cast<std::byte*>(data), size);
}

NcclResult isend(void* connection, void* data, int bytes, int /*tag*/, void* region, void** request) {
  *request = nullptr;
  return guarded("isend", [&] {
    begin_request(connection, true, data, bytes, region, request);
    return kNcclSuccess;
  });
}

NcclResult irecv(void* connection, int count, void** data, int* bytes, int* /*tags*/, void** regions, void** request) {
  *request = nullptr;
  return guarded("irecv", [&] {
    if (count != 1) fail(ErrorKind::argument, "one message at a time, asked for ", count);
    begin_request(connection, false, data[0], bytes[0], regions[0], request);
    return kNcclSuccess;
  });
}

NcclResult iflush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;  // host memory: what has been received is there
  return kNcclSuccess;
}

NcclResult test(void* request, int* done, int* bytes) {
  *done = 0;
  return guarded("test", [&] {
    auto& asked = *static_cast<PairConnection::Request*>(request);
    if (!asked.used) fail(ErrorKind::argument, "a request that is over already");
    if (!asked.done) asked.of->progress();
    if (!asked.done) return kNcclSuccess;
    asked.used = false;
    *done = 1;
    if (bytes != nullptr) *bytes = static_cast<int>(asked.length);
    return kNcclSuccess;
  });
}

NcclResult close_connection(void* connection) {
  delete static_cast<PairConnection*>(connection);
  return kNcclSuccess;
}

NcclResult close_listen(void* listener) {
  delete static_cast<PairListener*>(listener);
  return kNcclSuccess;
}

}  // namespace
}  // namespace geartrain::nccl

extern "C" __attribute__((visibility("default"))) NcclNet ncclNetPlugin_v7;
NcclNet ncclNetPlugin_v7 = {
    "geartrain",
    geartrain::nccl::init,
    geartrain::nccl::devices,
    geartrain::nccl::get_properties,
    geartrain::nccl::listen,
    geartrain::nccl::connect,
    geartrain::nccl::accept,
    geartrain::nccl::reg_mr,
    geartrain::nccl::reg_mr_dma_buf,
    geartrain::nccl::dereg_mr,
    geartrain::nccl::isend,
    geartrain::nccl::irecv,
    geartrain::nccl::iflush,
    geartrain::nccl::test,
    geartrain::nccl::close_connection,
    geartrain::nccl::close_connection,
    geartrain::nccl::close_listen,
    nullptr,  // nothing is offloaded to a GPU
    nullptr,
};
