#include "transport/providers/shm_parts.h"

#include <algorithm>
#include <utility>

#include "base/copy.h"
#include "base/threads.h"

namespace geartrain {
namespace {

constexpr uint64_t kOfOneThread = uint64_t{512} << 10;
constexpr uint64_t kLeast = uint64_t{128} << 10;
constexpr uint64_t kMostAtOnce = 8;  // parts of a message that is smaller than so many of the largest
constexpr size_t kMostPieces = 64;

// The other side copies meanwhile: half of the cores each.
unsigned threads_of_part() {
  static const unsigned threads = std::clamp(available_cores() / 2, 1u, 4u);
  return threads;
}

void copy_piece(std::byte* to, const std::byte* from, uint64_t bytes, bool stream) {
  if (bytes > part_segment_bytes()) {  // the rest of a message, which nobody takes yet
    copy_large(to, from, bytes);
    return;
  }
  parallel_for(bytes, kOfOneThread, threads_of_part(), [&](size_t first, size_t last) {
    copy_block(to + first, from + first, last - first, stream);
    if (stream) stream_fence();
  });
}

// do(bytes of the sequence, how many of them come before) for all of `length` from `at` on.
template <typename Byte, typename Do>
void for_pieces(const Sequence<Byte>& sequence, uint64_t at, uint64_t length, Do&& act) {
  struct iovec pieces[kMostPieces];
  for (uint64_t done = 0; done != length;) {
    const size_t n = sequence.vectors(at + done, length - done, pieces, kMostPieces);
    for (size_t i = 0; i < n; ++i) {
      act(std::span(static_cast<std::byte*>(pieces[i].iov_base), pieces[i].iov_len), done);
      done += pieces[i].iov_len;
    }
  }
}

}  // namespace

uint64_t part_segment_bytes() {
  return kOfOneThread * threads_of_part();
}

uint64_t part_bytes(uint64_t payload) {
  return std::clamp(padded(payload / kMostAtOnce), kLeast, part_segment_bytes());
}

void gather(const Sequence<const std::byte>& from, uint64_t at, std::span<std::byte> to) {
  for_pieces(from, at, to.size(), [&](std::span<std::byte> piece, uint64_t before) {
    copy_piece(to.data() + before, piece.data(), piece.size(), false);  // the receiver finds it in the cache
  });
}

void PartialMessage::begin(Message message, uint64_t payload_bytes) {
  if (payload_bytes == 0) fail(ErrorKind::frame, "the peer sent nothing in parts");
  message_ = std::move(message);
  bytes_.clear();
  for (const auto& buffer : message_.buffers) bytes_.add(buffer);
  done_ = 0;
  begun_ = true;
}

bool PartialMessage::add(const SegmentPart& part, const Memory& segment) {
  if (part.bytes == 0 || part.bytes > bytes_.bytes() - done_ || part.bytes > segment.bytes()) {
    fail(ErrorKind::frame, "the peer sent a part of ", part.bytes, " bytes in a segment of ", segment.bytes(),
         ", of a ", "message that has ", bytes_.bytes() - done_, " left");
  }
  const bool stream = bytes_.bytes() >= stream_from();
  for_pieces(bytes_, done_, part.bytes, [&](std::span<std::byte> piece, uint64_t before) {
    copy_piece(piece.data(), segment.data() + before, piece.size(), stream);
  });
  done_ += part.bytes;
  return done_ == bytes_.bytes();
}

Message PartialMessage::take() {
  begun_ = false;
  bytes_.clear();
  return std::exchange(message_, {});
}

}  // namespace geartrain
