#include "collectives/share_exposure.h"

#include <algorithm>
#include <cstring>

namespace geartrain {
namespace {

// Of numbers that are read: of one rank at once, and of all together, which should stay in the second level of the
// cache.
constexpr uint64_t kReadBytes = 128 << 10;
constexpr uint64_t kReadTogether = 512 << 10;
constexpr uint64_t kLeastShown = 256 << 10;  // of results, before others are told of them; or all of them

}  // namespace

// --- numbers --------------------------------------------------------------------------------------------------------

void ShareExposure::decline(uint64_t operation, OwnedShare& share) {
  if (share.exposed != nullptr) return;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (share.addresses[rank] != 0) ask_for_parts(operation, share, rank, 0);
  }
}

void ShareExposure::ask_for_parts(uint64_t operation, OwnedShare& share, uint32_t rank, uint64_t from) {
  share.addresses[rank] = 0;
  share.received[rank] = from;
  memory_.unreadable_part(rank, operation, from);
}

uint64_t ShareExposure::piece(const OwnedShare& share) const {
  if (!share.only_reads()) return chunk_;
  if (world_ == 1) return chunk_;  // nobody else reads
  return std::max(chunk_, std::min(kReadBytes, kReadTogether / (world_ - 1)) / chunk_ * chunk_);
}

bool ShareExposure::read(uint64_t operation, OwnedShare& share, uint64_t bytes, std::vector<const std::byte*>* inputs) {
  bool all = true;
  uint64_t used = 0;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (share.addresses[rank] == 0) continue;
    read_.resize(std::max(read_.size(), bytes * (world_ - 1)));
    const std::span<std::byte> into = std::span(read_).subspan(used, bytes);
    used += bytes;
    const ReadExposed found = memory_.read(rank, share.addresses[rank] + share.reduced, into);
    (*inputs)[rank] = into.data();
    all &= found == ReadExposed::read;
    // What is withdrawn comes with its reason.
    if (found == ReadExposed::denied) ask_for_parts(operation, share, rank, share.reduced);
  }
  return all;
}

// --- results --------------------------------------------------------------------------------------------------------

bool ShareExposure::next_result(uint64_t operation, OwnedShare& share, uint32_t rank, OutFrame* frame) {
  const uint64_t at = share.sent[rank], there = share.reduced - at;
  if (share.reads[rank]) {
    if (share.only_reads() && there < kLeastShown && share.reduced != share.bytes) return false;
    expose(operation, share, rank, share.exposed + at, std::min(kExposedBytes, there), frame);
    return true;
  }
  const uint64_t bytes = std::min(chunk_, there);
  frame->header = frame_of(FrameKind::result, operation, at, bytes);
  frame->hold = ChunkBufferRef(blocks_);
  std::memcpy(frame->hold.data(), share.exposed + at, bytes);
  frame->data = frame->hold.data();
  share.sent[rank] += bytes;
  return true;
}

void ShareExposure::expose(uint64_t operation, OwnedShare& share, uint32_t rank, const std::byte* from, uint64_t bytes,
                           OutFrame* frame) {
  const ExposedShare exposed{reinterpret_cast<uintptr_t>(from), bytes};
  frame->header = frame_of(FrameKind::expose, operation, share.sent[rank], sizeof exposed);
  frame->hold = ChunkBufferRef(blocks_);
  std::memcpy(frame->hold.data(), &exposed, sizeof exposed);
  frame->data = frame->hold.data();
  share.sent[rank] += bytes;
}

void ShareExposure::took_unreadable(OwnedShare* share, uint32_t rank, const WireHeader& unreadable) {
  const bool direct = share != nullptr && share->shape.direct();
  const bool known = direct || (share != nullptr && share->shows_results());
  if (!known || !share->reads[rank] || unreadable.offset >= share->sent[rank] ||
      unreadable.offset != (direct ? share->received : share->taken)[rank]) {
    fail(ErrorKind::frame, "it cannot read operation ", unreadable.operation, " from ", unreadable.offset,
         " on, which was not exposed");
  }
  share->reads[rank] = false;
  share->sent[rank] = unreadable.offset;
}

}  // namespace geartrain
