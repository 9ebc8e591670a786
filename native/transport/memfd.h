// Memory that can be passed to another process: memfds, which have no name and need no file system, and descriptor
// passing through Unix sockets. Any thread.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor.h"
#include "transport/message.h"

namespace geartrain {

// A mapped memfd.
class Memory {
 public:
  Memory() = default;
  // With `populate`, touching it costs no page faults later. Throws no_space.
  Memory(int fd, uint64_t bytes, bool populate);
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory();
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// A sealed memfd with all its memory reserved: writing to it cannot fail. Throws no_space, os.
Descriptor make_memory(const char* name, uint64_t bytes);

// The peer's memfd, if reading it can never fault. Throws frame.
Memory open_memory(const Descriptor& fd, uint64_t bytes);

// One recvmsg: bytes into `to`, and descriptors that came with them appended to `fds`. As recv returns.
ssize_t receive_with_fds(int socket, std::span<std::byte> to, std::vector<Descriptor>* fds);
// All the bytes, with the descriptors. Throws timed_out, peer_lost.
void send_with_fds(int socket, Bytes bytes, std::span<const int> fds, Deadline deadline);

}  // namespace geartrain
