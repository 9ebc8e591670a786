// Frame of a message: what precedes its bytes in a stream and in a ring.
//
//   FrameHeader | u64 sizes[buffer_count] | SegmentPlace, if in a segment | header | buffers, one after the other
//
// In parts (kInParts), the buffers do not follow, but as many SegmentParts as their bytes need, each at a multiple
// of 8. A part fills the buffers from where the one before it ended. One that says `abandoned` ends the message: its
// sender could not go on, and it counts as never sent.
//
// Frames of a peer are untrusted: check() passes only what the limits allow, before memory
// is allocated for it. All numbers are little-endian; no other machine is supported.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

#include "base/errors.h"
#include "transport/message.h"

namespace geartrain {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kFrameMagic = 0x31465447;  // "GTF1"
constexpr uint32_t kPartMagic = 0x31505447;   // "GTP1"

enum FrameFlag : uint16_t {
  kInSegment = 1,        // shm: the buffers are in a segment, 64-byte aligned, in their order
  kHeaderInSegment = 2,  // and so is the header, before them
  kOnLanes = 4,          // tcp: the buffers come in pieces over the lanes (tcp.cc)
  kInParts = 8,          // shm: the buffers come in parts (shm_parts.h)
};

struct FrameHeader {
  uint32_t magic;
  uint32_t kind;
  uint64_t tag;
  uint64_t header_bytes;
  uint64_t payload_bytes;  // of all buffers
  uint32_t buffer_count;
  uint16_t flags;
  uint16_t reserved;  // zero
};
static_assert(sizeof(FrameHeader) == 40 && alignof(FrameHeader) == 8);

struct SegmentPlace {
  uint32_t slot;
  uint32_t use;  // how many segments used the slot before this one
};
static_assert(sizeof(SegmentPlace) == 8);

struct SegmentPart {
  uint32_t magic;
  uint32_t abandoned;  // 0, or 1: nothing else here counts
  SegmentPlace place;
  uint64_t bytes;  // from the segment's beginning; not zero
};
static_assert(sizeof(SegmentPart) == 24 && offsetof(SegmentPart, place) == 8 && offsetof(SegmentPart, bytes) == 16);

inline FrameHeader frame_of(const Outgoing& message, uint16_t flags) {
  return {kFrameMagic,
          message.kind,
          message.tag,
          message.header.size(),
          message.payload_bytes(),
          static_cast<uint32_t>(message.buffers.size()),
          flags,
          0};
}

// Throws frame when this is not the beginning of a message, or of one beyond the limits.
inline void check(const FrameHeader& frame, const MessageLimits& limits, uint16_t allowed_flags) {
  if (frame.magic != kFrameMagic || frame.reserved != 0 || (frame.flags & ~allowed_flags) != 0) {
    fail(ErrorKind::frame, "the peer sent what is not a message");
  }
  if (frame.header_bytes > limits.max_header_bytes) {
    fail(ErrorKind::frame, "the peer sent a header of ", frame.header_bytes, " bytes, the limit is ",
         limits.max_header_bytes);
  }
  if (frame.buffer_count > limits.max_buffers) {
    fail(ErrorKind::frame, "the peer sent ", frame.buffer_count, " buffers, the limit is ", limits.max_buffers);
  }
  if (frame.payload_bytes > limits.max_message_bytes) {
    fail(ErrorKind::frame, "the peer sent buffers of ", frame.payload_bytes, " bytes, the limit is ",
         limits.max_message_bytes);
  }
}

// The sizes must add up, without overflow.
inline void check_sizes(const FrameHeader& frame, std::span<const uint64_t> sizes) {
  uint64_t left = frame.payload_bytes;
  for (const uint64_t size : sizes) {
    if (size > left) fail(ErrorKind::frame, "the peer sent buffers that are larger than their sum");
    left -= size;
  }
  if (left != 0) fail(ErrorKind::frame, "the peer sent buffers that are smaller than their sum");
}

}  // namespace geartrain
