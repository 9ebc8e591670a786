// Segments of big messages of a shm connection: the memory that one side leases, and the leases that it received.
//
// A segment is a sealed memfd in one of kSlots slots. It is announced over the Unix socket with its descriptor, before
// a frame names it, and dropped the same way. `leased[slot]` (shm_control.h) defines which side may access it. Each
// class has one user at a time: the sender's under its turn, the receiver's under the read mutex.
#pragma once

#include <array>

#include "transport/providers/frame.h"
#include "transport/providers/shm_control.h"

namespace geartrain {

constexpr uint32_t kPartSegments = 8;

class OwnSegments {
 public:
  OwnSegments(const Descriptor& socket, Direction& out, uint64_t most_bytes)
      : socket_(socket), out_(out), most_bytes_(most_bytes) {}

  // A segment that is not leased and has so many bytes: the smallest such, or a new one, or kSlots when all are leased.
  // Throws no_space, and what sending a note throws, after which the socket is useless.
  uint32_t try_take(uint64_t needed, Deadline deadline);
  // A segment for a part, of kPartSegments that are kept for them, or kSlots: all are leased, or no memory is left for
  // one. Throws as try_take.
  uint32_t try_take_part(uint64_t bytes, Deadline deadline);
  bool has_parts() const { return parts_ != 0; }
  std::byte* data(uint32_t slot) const { return own_.at(slot).memory.data(); }
  // The frame that names it is about to be published.
  SegmentPlace lease(uint32_t slot);
  bool broken() const { return broken_; }  // half a note may have been sent

 private:
  struct Own {
    Memory memory;
    uint32_t use = 0;
    uint64_t used_ns = 0;
    bool for_parts = false;
  };
  bool is_leased(uint32_t slot) const { return out_.leased[slot].load(std::memory_order_acquire) != 0; }
  uint32_t make(uint32_t slot, uint64_t bytes, bool for_parts, Deadline deadline);
  void give_up(uint32_t slot, Deadline deadline);
  void note(uint32_t word, uint32_t slot, uint64_t bytes, int fd, Deadline deadline);

  const Descriptor& socket_;
  Direction& out_;
  const uint64_t most_bytes_;
  uint64_t own_bytes_ = 0;
  uint32_t parts_ = 0;  // segments that are kept for them
  std::array<Own, kSlots> own_;
  bool broken_ = false;
};

class PeerSegments {
 public:
  explicit PeerSegments(const Descriptor& socket) : socket_(socket) {}

  // Processes announcements of segments. False when the peer's end of the socket is closed. Throws frame.
  bool read_notes();
  // The segment that a frame names. Throws frame.
  std::shared_ptr<Memory> find(const SegmentPlace& place);

 private:
  struct Note {
    uint32_t word;
    uint32_t slot;
    uint32_t use;
    uint32_t reserved;
    uint64_t bytes;
  };
  friend class OwnSegments;
  static_assert(sizeof(Note) == 24);
  struct Theirs {
    std::shared_ptr<Memory> memory;
    uint32_t use = 0;
  };
  const Descriptor& socket_;
  std::array<Theirs, kSlots> theirs_;
  Note note_{};
  size_t filled_ = 0;
  std::vector<Descriptor> fds_;
};

}  // namespace geartrain
