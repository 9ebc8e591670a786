#include "transport/providers/shm_segments.h"

#include <bit>
#include <cerrno>

namespace geartrain {
namespace {

constexpr uint64_t kSmallestSegment = uint64_t{256} << 10;
constexpr uint64_t kIdleNs = 10'000'000'000;  // a segment unused for so long is released
constexpr uint32_t kAnnounce = 1, kDrop = 2;

}  // namespace

uint32_t OwnSegments::try_take(uint64_t needed, Deadline deadline) {
  uint32_t best = kSlots, empty = kSlots;
  const uint64_t now = monotonic_ns();
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    Own& own = own_[slot];
    if (own.memory.data() == nullptr) {
      empty = std::min(empty, slot);
    } else if (!is_leased(slot)) {
      const bool fits = own.memory.bytes() >= needed && !own.for_parts;
      if (fits && (best == kSlots || own.memory.bytes() < own_[best].memory.bytes())) {
        best = slot;
      } else if (now - own.used_ns > kIdleNs) {
        give_up(slot, deadline);
      }
    }
  }
  if (best != kSlots) return best;
  // An eighth is lost to rounding at most, and sizes that differ little share a segment.
  const uint64_t unit = std::max(kSmallestSegment, std::bit_floor(needed) / 8);
  const uint64_t bytes = (needed + unit - 1) / unit * unit;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    if (empty != kSlots && own_bytes_ + bytes <= most_bytes_) break;
    if (own_[slot].memory.data() == nullptr || is_leased(slot)) continue;
    give_up(slot, deadline);
    empty = slot;
  }
  const bool fits = own_bytes_ + bytes <= most_bytes_ || own_bytes_ == 0;
  return empty == kSlots || !fits ? kSlots : make(empty, bytes, false, deadline);
}

uint32_t OwnSegments::try_take_part(uint64_t bytes, Deadline deadline) {
  uint32_t empty = kSlots;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    const Own& own = own_[slot];
    if (own.memory.data() == nullptr) {
      empty = std::min(empty, slot);
    } else if (own.for_parts && !is_leased(slot)) {
      return slot;  // the lowest: what was used last is in the caches
    }
  }
  if (parts_ == kPartSegments) return kSlots;
  // Segments of whole messages that the peer has returned make room for a first part: a message of any size goes by it.
  const auto fits = [&] { return empty != kSlots && (own_bytes_ + bytes <= most_bytes_ || own_bytes_ == 0); };
  for (uint32_t slot = 0; slot < kSlots && parts_ == 0 && !fits(); ++slot) {
    if (own_[slot].memory.data() == nullptr || is_leased(slot)) continue;
    give_up(slot, deadline);
    empty = std::min(empty, slot);
  }
  return fits() ? make(empty, bytes, true, deadline) : kSlots;
}

uint32_t OwnSegments::make(uint32_t slot, uint64_t bytes, bool for_parts, Deadline deadline) {
  Own& own = own_[slot];
  const Descriptor fd = make_memory("geartrain message", bytes);  // the mapping is enough afterwards
  own.memory = Memory(fd.get(), bytes, true);
  own.used_ns = monotonic_ns();
  own.for_parts = for_parts;
  if (for_parts) ++parts_;
  ++own.use;
  own_bytes_ += bytes;
  note(kAnnounce, slot, bytes, fd.get(), deadline);
  return slot;
}

void OwnSegments::give_up(uint32_t slot, Deadline deadline) {
  note(kDrop, slot, 0, -1, deadline);
  own_bytes_ -= own_[slot].memory.bytes();
  own_[slot].memory = Memory();
  if (own_[slot].for_parts) --parts_;
  own_[slot].for_parts = false;
}

void OwnSegments::note(uint32_t word, uint32_t slot, uint64_t bytes, int fd, Deadline deadline) {
  const PeerSegments::Note what = {word, slot, own_[slot].use, 0, bytes};
  broken_ = true;
  send_with_fds(socket_.get(), std::as_bytes(std::span(&what, 1)), {&fd, fd < 0 ? size_t{0} : size_t{1}}, deadline);
  broken_ = false;
}

SegmentPlace OwnSegments::lease(uint32_t slot) {
  own_[slot].used_ns = monotonic_ns();
  out_.leased[slot].store(1, std::memory_order_relaxed);
  return {slot, own_[slot].use};
}

bool PeerSegments::read_notes() {
  for (;;) {
    const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&note_, 1));
    const ssize_t got = receive_with_fds(socket_.get(), bytes.subspan(filled_), &fds_);
    if (got == 0) return false;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got < 0) return false;
    filled_ += static_cast<size_t>(got);
    if (fds_.size() > 1) fail(ErrorKind::frame, "the peer sent more descriptors than it announced");
    if (filled_ < sizeof note_) continue;
    filled_ = 0;
    if (note_.slot >= kSlots) fail(ErrorKind::frame, "the peer announces an impossible segment");
    Theirs& theirs = theirs_[note_.slot];
    if (note_.word == kAnnounce && fds_.size() == 1) {
      theirs.memory = std::make_shared<Memory>(open_memory(fds_.front(), note_.bytes));
      theirs.use = note_.use;
    } else if (note_.word == kDrop && fds_.empty()) {
      theirs.memory.reset();
    } else {
      fail(ErrorKind::frame, "the peer announces what is not a segment");
    }
    fds_.clear();
  }
}

std::shared_ptr<Memory> PeerSegments::find(const SegmentPlace& place) {
  if (place.slot >= kSlots) fail(ErrorKind::frame, "the peer refers to an impossible segment");
  const Theirs& theirs = theirs_[place.slot];
  if (theirs.use != place.use) read_notes();  // announced before the frame was visible
  if (theirs.use != place.use || theirs.memory == nullptr) {
    fail(ErrorKind::frame, "the peer refers to a segment that it never announced");
  }
  return theirs.memory;
}

}  // namespace geartrain
