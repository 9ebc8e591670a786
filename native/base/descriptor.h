// File descriptors that are closed in forked children.
//
// A connection that a forked child inherits would be two processes reading one stream, and its end would not be seen
// by the peer while either lives. So a child closes every Descriptor of its parent at the fork, before any other code
// runs in it. Any thread.
#pragma once

#include <utility>

#include "base/lifetime.h"

namespace geartrain {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);  // takes ownership; a negative one is none
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owned_(other.owned_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~Descriptor() { reset(); }
  void reset();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  friend class ListeningSocket;
  int fd_ = -1;
  Owned owned_;
};

// An eventfd: what wakes a thread that sleeps in an epoll, here or in another process. Throws os.
Descriptor make_bell();
void ring_bell(const Descriptor& bell);

// A socket that listens until it is reset or dropped. From then on no copy of it does, not that of a child which was
// forked just now and has not closed its own yet, nor that of one between vfork and exec: nobody is accepted by a
// listener that is closed, and its port is free. Whoever has not been accepted is hung up on.
class ListeningSocket {
 public:
  ListeningSocket() = default;
  explicit ListeningSocket(Descriptor socket) : socket_(std::move(socket)) {}
  ListeningSocket(ListeningSocket&&) noexcept = default;
  ListeningSocket& operator=(ListeningSocket&&) noexcept = default;
  ~ListeningSocket() { reset(); }
  void reset();
  const Descriptor& descriptor() const { return socket_; }
  int get() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }

 private:
  Descriptor socket_;
};

}  // namespace geartrain
