// Control segment of a shm connection: counters, flags and two rings shared by two processes on one host.
//
// The control segment, a memfd made by the dialer:
//
//   offset 0        ControlHeader   magic, version, the handshake's nonce and its answer
//          4096     Direction [2]   dialer to listener, listener to dialer
//          8192     ring      [2]   kRingBytes each
//
// A ring holds frames (frame.h), each beginning at a multiple of 8; positions count bytes for ever, modulo its size.
// The receiver copies everything out before it reads it, because the sender could change it meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "transport/memfd.h"

namespace geartrain {

constexpr char kControlMagic[8] = {'G', 'E', 'A', 'R', 'S', 'H', 'M', '\n'};
constexpr uint32_t kControlVersion = 1;
constexpr uint64_t kRingBytes = uint64_t{1} << 20;
constexpr uint32_t kSlots = 64;
struct ControlHeader {
  char magic[8];
  uint32_t version;
  uint32_t slots;
  uint64_t ring_bytes;
  uint8_t nonce[32];
  uint8_t answer[32];  // the nonce, every bit inverted
};

struct Direction {
  alignas(64) std::atomic<uint64_t> head;            // the sender's: bytes ever written
  alignas(64) std::atomic<uint64_t> tail;            // the receiver's: bytes ever read
  alignas(64) std::atomic<uint32_t> asleep;          // set by the receiver, cleared by the side that wakes it
  std::atomic<uint32_t> takes_parts;                 // set by a receiver that copies, and may be sent parts (frame.h)
  alignas(64) std::atomic<uint32_t> short_of_room;   // set by the sender, cleared by the side that wakes it
  alignas(64) std::atomic<uint32_t> leased[kSlots];  // set by the sender, cleared by the receiver
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(offsetof(Direction, tail) == 64 && offsetof(Direction, asleep) == 128);
static_assert(offsetof(Direction, takes_parts) == 132);  // unused before, and zero: such peers are sent no parts
static_assert(offsetof(Direction, short_of_room) == 192 && offsetof(Direction, leased) == 256);
static_assert(sizeof(Direction) == 512);

constexpr uint64_t kDirectionsOffset = 4096;
constexpr uint64_t kRingsOffset = 8192;
constexpr uint64_t kControlBytes = kRingsOffset + 2 * kRingBytes;
static_assert(sizeof(ControlHeader) <= kDirectionsOffset);
static_assert(kDirectionsOffset + 2 * sizeof(Direction) <= kRingsOffset);

// The control segment as one side sees it. Messages that view a segment keep it, so it may outlive the connection.
struct ShmControl {
  Memory memory;
  bool dialer = false;
  Descriptor peer_wake;
  const Owned owned;

  ControlHeader& header() const { return *reinterpret_cast<ControlHeader*>(memory.data()); }
  Direction& direction(bool outgoing) const {
    return reinterpret_cast<Direction*>(memory.data() + kDirectionsOffset)[outgoing == dialer ? 0 : 1];
  }
  std::byte* ring(bool outgoing) const { return memory.data() + kRingsOffset + (outgoing == dialer ? 0 : kRingBytes); }

  // Bytes into a ring, or out of it, at a position that counts for ever; returns the position after them.
  uint64_t put(uint64_t at, Bytes bytes) const {
    std::byte* to = ring(true);
    const uint64_t offset = at % kRingBytes;
    const uint64_t first = std::min<uint64_t>(bytes.size(), kRingBytes - offset);
    if (first != 0) std::memcpy(to + offset, bytes.data(), first);
    if (first != bytes.size()) std::memcpy(to, bytes.data() + first, bytes.size() - first);
    return at + bytes.size();
  }
  uint64_t get(uint64_t at, std::span<std::byte> to) const {
    const std::byte* from = ring(false);
    const uint64_t offset = at % kRingBytes;
    const uint64_t first = std::min<uint64_t>(to.size(), kRingBytes - offset);
    if (first != 0) std::memcpy(to.data(), from + offset, first);
    if (first != to.size()) std::memcpy(to.data() + first, from, to.size() - first);
    return at + to.size();
  }

  void wake_if(std::atomic<uint32_t>& flag) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what was published before, the flag after
    if (flag.load(std::memory_order_relaxed) != 0 && flag.exchange(0) != 0) ring_bell(peer_wake);
  }
};

}  // namespace geartrain
