// Link: ordered bytes between two members of a group, non-blocking, over TCP or through two rings in memory that both
// have mapped.
//
// A ring's memory, one for each direction, after the Unix socket has passed its descriptor:
//
//   0        64         128                256                            256 + ring_bytes
//   +--------+----------+------------------+-----------------------------+---
//   | magic, | written  | taken, sleeping  | the bytes, around and around | the other direction, likewise
//   | size,  | (writer) | (reader)         |                              |
//   | stamp  |          |                  |                              |
//   +--------+----------+------------------+-----------------------------+---
//
// `written` and `taken` count bytes since the beginning and never go back. Each side also has a flag for "my loop
// sleeps": a side that has written or taken something wakes a sleeper through its eventfd. The flag is set before the
// last poll of the ring, and read after the ring was changed (both sequentially consistent), so no wake-up is lost. The
// socket stays open to report the peer's death. The peer's counters are not trusted: a difference of more than the
// ring's size is a broken peer.
//
// What a peer exposes is read right from its memory (process_vm_readv), which is never written. Whether the kernel
// allows that is found by trying, at a number that the writer of a ring keeps, the stamp; the ring says where, and
// which, once the group allows it (allow_reading). The stamp is read again behind those bytes, in the same call: it is
// gone when the peer does not expose its memory any more. The kernel may also take the right away later (other
// credentials, ptrace_scope, seccomp), or deny one address (memory of a device). That is not the peer's doing: it sends
// through the ring then.
//
// One thread, the loop's.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <string>

#include "base/event_loop.h"
#include "base/stage_clock.h"
#include "transport/memfd.h"
#include "transport/transport.h"

namespace geartrain {

constexpr uint64_t kLinkRingBytes = 512 << 10;

// What came of reading what a peer exposes.
enum class ReadExposed : uint8_t {
  read,
  withdrawn,  // it does not expose it any more: its reason is on the way
  denied,     // it does, but cannot be read from here
};

class Link {
 public:
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // The number of bytes sent or received; 0: none now. Throws peer_lost.
  virtual size_t write(std::span<struct iovec> parts) = 0;
  virtual size_t read(std::span<struct iovec> parts) = 0;
  // The next bytes where they are, which the peer may change meanwhile. None: they are not all there, or not in one
  // piece. Then skip() instead of a read.
  virtual std::span<const std::byte> in_place([[maybe_unused]] size_t bytes) const { return {}; }
  virtual void skip([[maybe_unused]] size_t bytes) {}
  // What was read is free for the peer to write to: after the last of several reads.
  virtual void free_read() {}
  // Before sleeping: wakes are wanted, for what comes only if it `reads`. False when there is something to read, or
  // room for a write that found none. `waited`: at once; else a peer that polls may hold them back for a moment.
  virtual bool announce_sleep([[maybe_unused]] bool reads, [[maybe_unused]] bool waited) { return true; }
  virtual void announce_wake() {}
  // Whether this side holds them back, and those that it has: sent, where the peer still sleeps.
  virtual void hold_wakes([[maybe_unused]] bool hold) {}
  virtual void send_wakes() {}
  // The socket: for epoll. `polled`: the bytes do not come through it, only the end does.
  int socket() const { return socket_.get(); }
  virtual bool polled() const { return false; }
  // From now on either side may read what the other exposes; a side that does not say so neither reads nor is read.
  virtual void allow_reading() {}
  // Whether the peer's memory can be read by its addresses.
  virtual bool reads_peer() { return false; }
  // Whether it has been able to, and the kernel does not allow it any more.
  virtual bool read_denied() const { return false; }
  // Whether the peer exposes anything: what there is to be read then is what it meant.
  virtual ReadExposed still_exposes() { return ReadExposed::read; }
  // Throws frame when this link could never read anything.
  virtual ReadExposed read_exposed(uint64_t address, std::span<std::byte> into);
  // What this side has exposed is not to be read any more.
  virtual void take_back() noexcept {}
  // The socket of a polled link has reported the peer's end: read() reports it once all has been read.
  virtual void end() {}
  virtual const char* name() const = 0;
  // Of the loop that looks at this link.
  void time_by(StageClock* stages) { stages_ = stages; }

 protected:
  explicit Link(Descriptor socket) : socket_(std::move(socket)) {}
  const Descriptor socket_;
  StageClock* stages_ = nullptr;
};

// A connected non-blocking TCP socket.
std::unique_ptr<Link> tcp_link(Descriptor socket);

// The dialer makes the memory and sends it with its Join.
struct RingMemory {
  Descriptor memory;
  static RingMemory make();  // throws no_space, os
};
// `wake` is the other side's eventfd. Throws frame when the memory is not what was announced.
std::unique_ptr<Link> ring_link(Descriptor socket, const Descriptor& memory, Descriptor wake, bool dialer);

}  // namespace geartrain
