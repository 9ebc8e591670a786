// Parts of a big message of a shm connection whose receiver copies (Options::views is off): the sender's copy and the
// receiver's run at the same time, through a few small segments that stay in the caches.
//
//   sender     part 0 | part 1 | part 2 | ...      into a segment that is not leased; then its SegmentPart (frame.h)
//   receiver            part 0 | part 1 | ...      out of it, into the message's own memory; then the lease ends
//
// 1.34 GB take 60 to 70 ms that way where one memcpy takes 65 to 78, and two copies one after the other, or at the same
// time through memory as large as the message, 90 to 110: those bytes go through the memory four times instead of twice
// (two processes in C++ on two cores of an EPYC 9005, parts of 128 KB to 2 MB alike).
//
// A sender never depends on a receiver that does something else: when no part is taken for a while, the rest of the
// message is one last part in a segment of its size.
#pragma once

#include "transport/memfd.h"
#include "transport/message.h"
#include "transport/providers/frame.h"
#include "transport/providers/sequence.h"

namespace geartrain {

// Bytes of a segment for parts, and of a part of a message with such a payload. Several cores copy a part where there
// are more than two.
uint64_t part_segment_bytes();
uint64_t part_bytes(uint64_t payload);

// Copies the bytes from `at` on into `to`.
void gather(const Sequence<const std::byte>& from, uint64_t at, std::span<std::byte> to);

// The message that is coming in parts. One user at a time.
class PartialMessage {
 public:
  bool begun() const { return begun_; }
  // `message` has the form, the header and room for the buffers.
  void begin(Message message, uint64_t payload_bytes);
  // Copies a part. Throws frame when it is not one of this message; true when it was the last.
  bool add(const SegmentPart& part, const Memory& segment);
  Message take();
  void drop() { take(); }

 private:
  Message message_;
  Sequence<std::byte> bytes_;
  uint64_t done_ = 0;
  bool begun_ = false;
};

}  // namespace geartrain
