// Stream: a connected TCP socket, with or without TLS, as the transports read and write it. Without TLS each call is
// the system's own.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <utility>

#include "base/descriptor.h"
#include "transport/security/tls.h"

namespace geartrain {

// Reference to a stream, not its owner. A plain socket is one.
struct Wire {
  int socket;
  Tls* tls = nullptr;

  Wire(int socket_, Tls* tls_ = nullptr) : socket(socket_), tls(tls_) {}  // NOLINT: on purpose

  // The number of bytes, 0 at the end, -1 and errno; never blocks. With TLS each may throw (tls.h), and receive() is
  // short only when nothing more has arrived.
  ssize_t send(std::span<struct iovec> parts, int flags = 0) const {
    if (tls != nullptr) return tls->send(parts);
    flags |= MSG_NOSIGNAL | MSG_DONTWAIT;
    if (parts.size() == 1) return ::send(socket, parts[0].iov_base, parts[0].iov_len, flags);
    struct msghdr header{};
    header.msg_iov = parts.data();
    header.msg_iovlen = parts.size();
    return ::sendmsg(socket, &header, flags);
  }
  ssize_t receive(std::span<struct iovec> parts) const {
    if (tls != nullptr) return tls->receive(parts);
    if (parts.size() == 1) return ::recv(socket, parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT);
    struct msghdr header{};
    header.msg_iov = parts.data();
    header.msg_iovlen = parts.size();
    return ::recvmsg(socket, &header, MSG_DONTWAIT);
  }
  ssize_t send(const void* from, size_t bytes, int flags = 0) const {
    struct iovec part = {const_cast<void*>(from), bytes};
    return send({&part, 1}, flags);
  }
  ssize_t receive(void* into, size_t bytes) const {
    struct iovec part = {into, bytes};
    return receive({&part, 1});
  }
  // Whether all that was written has been sent; else it is once the socket is writable and this was called again.
  bool flush() const { return tls == nullptr || tls->flush(); }
  // Whether there may be more to receive that no poll() of the socket shows.
  bool unread() const { return tls != nullptr && tls->unread(); }
};

class Stream {
 public:
  Stream() = default;
  Stream(Descriptor socket) : socket_(std::move(socket)) {}  // NOLINT: a plain socket is one
  int get() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  Wire wire() const { return {socket_.get(), tls_.get()}; }
  // Null: without TLS.
  Tls* tls() const { return tls_.get(); }

  // From here on all is under TLS, beginning with its handshake. `host` was dialled; null: the listener's side.
  void use_tls(std::shared_ptr<const TlsContext> context, const std::string* host) {
    tls_ = std::make_unique<Tls>(std::move(context), socket_.get(), host);
  }
  // The socket alone, of one without TLS.
  Descriptor take() { return std::move(socket_); }

 private:
  Descriptor socket_;
  std::unique_ptr<Tls> tls_;
};

}  // namespace geartrain
