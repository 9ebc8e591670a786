#include "collectives/share_owner.h"

#include <algorithm>

namespace geartrain {
namespace {

constexpr size_t kMostOperations = 65536;  // begun by some rank and not over

}  // namespace

ShareOwner::ShareOwner(ChunkBufferPool& blocks, Host& host, uint32_t world, uint32_t self, uint64_t chunk,
                       uint64_t window_bytes)
    : blocks_(blocks),
      host_(host),
      world_(world),
      self_(self),
      chunk_(chunk),
      window_bytes_(window_bytes),
      next_open_(world),
      completed_(world),
      held_(world) {}

// --- receiving ------------------------------------------------------------------------------------------------------

ShareOwner::Place ShareOwner::find_or_make(uint32_t rank, uint64_t number, const Shape& shape, uint64_t share_bytes) {
  const auto [place, made] = operations_.try_emplace(number);
  Operation& operation = place->second;
  if (made) {
    operation.shape = shape;
    operation.share_bytes = share_bytes;
    operation.first_rank = rank;
    operation.opened.resize(world_);
    operation.received.resize(world_);
    operation.inputs.resize(world_);
    operation.sent.resize(world_);
    operation.ended.resize(world_);
  } else if (operation.shape != shape || operation.share_bytes != share_bytes) {
    host_.disagree(disagreement(number, rank, shape, operation.first_rank, operation.shape),
                   {std::min(rank, operation.first_rank), std::max(rank, operation.first_rank)});
    return operations_.end();
  }
  operation.opened[rank] = true;
  ++operation.open_count;
  return place;
}

void ShareOwner::open(uint32_t rank, uint64_t number, const Open& open) {
  const Shape shape = shape_from(open);
  if (number < next_open_[rank]) fail(ErrorKind::frame, "it opened operation ", number, " twice");
  if (open.share_bytes > shape.wire_bytes() || open.share_bytes % bytes_of(shape.wire) != 0) {
    fail(ErrorKind::frame, "it opened an operation with a share of ", open.share_bytes, " bytes");
  }
  if (operations_.size() >= kMostOperations) fail(ErrorKind::frame, "it opened too many operations");
  next_open_[rank] = number + 1;
  completed_[rank] = open.completed;
  const Place place = find_or_make(rank, number, shape, open.share_bytes);
  if (place != operations_.end()) advance(place);
}

void ShareOwner::open_local(uint64_t number, const Shape& shape, uint64_t share_bytes, const std::byte* numbers,
                            uint64_t completed) {
  completed_[self_] = static_cast<uint32_t>(completed);
  const Place place = find_or_make(self_, number, shape, share_bytes);
  if (place == operations_.end()) return;
  place->second.local = numbers;
  place->second.received[self_] = share_bytes;
  advance(place);
}

std::span<std::byte> ShareOwner::room(uint32_t rank, const WireHeader& part) {
  const auto place = operations_.find(part.operation);
  if (place == operations_.end() || !place->second.opened[rank]) {
    fail(ErrorKind::frame, "it sent a part of operation ", part.operation, ", which it has not opened");
  }
  Operation& operation = place->second;
  const uint64_t at = operation.received[rank];
  if (part.offset != at || part.bytes == 0 || part.bytes > operation.share_bytes - at ||
      at % chunk_ + part.bytes > chunk_ || part.bytes % bytes_of(operation.shape.wire) != 0) {
    fail(ErrorKind::frame, "it sent ", part.bytes, " bytes at ", part.offset, " of a share of ", operation.share_bytes,
         ", where ", at, " was next");
  }
  if (held_[rank] + part.bytes > window_bytes_ + 2 * kChunkBytes) fail(ErrorKind::frame, "it runs ahead of its window");
  if (at % chunk_ == 0) operation.inputs[rank].emplace_back(blocks_);
  return {operation.inputs[rank].back().data() + at % chunk_, part.bytes};
}

void ShareOwner::took(uint32_t rank, const WireHeader& part) {
  const auto place = operations_.find(part.operation);
  Operation& operation = place->second;
  operation.received[rank] += part.bytes;
  held_[rank] += part.bytes;
  if (operation.received[rank] % chunk_ == 0 || operation.received[rank] == operation.share_bytes) advance(place);
}

// --- sending --------------------------------------------------------------------------------------------------------

// Reduces every chunk that has arrived from all.
void ShareOwner::advance(Place place) {
  Operation& operation = place->second;
  if (operation.open_count < world_) return;
  const uint64_t number = place->first, size = operation.share_bytes;
  const uint64_t there = *std::min_element(operation.received.begin(), operation.received.end());
  bool any = false;
  while (operation.reduced < size && there >= std::min(size, operation.reduced + chunk_)) {
    reduce_chunk(number, operation, std::min(chunk_, size - operation.reduced));
    any = true;
  }
  if (size == 0 && !operation.empty_done) {
    operation.empty_done = any = true;
    if (self_ != kNoRank) host_.deliver(number, 0, {});
  }
  if (!any) return;
  const bool over = operation.reduced == size;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_) host_.results_for(rank);
  }
  // The ranks may have taken everything at once, and the operation be removed with it.
  if (over && self_ != kNoRank) {
    const Place still = operations_.find(number);
    if (still != operations_.end()) end(still, self_);
  }
}

void ShareOwner::reduce_chunk(uint64_t number, Operation& operation, uint64_t bytes) {
  const Shape& shape = operation.shape;
  const uint64_t at = operation.reduced, count = bytes / bytes_of(shape.wire);
  ChunkBufferRef own;
  std::vector<const std::byte*> inputs(world_);
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_) {
      inputs[rank] = operation.inputs[rank].front().data();
      continue;
    }
    inputs[rank] = operation.local + at / bytes_of(shape.wire) * bytes_of(shape.dtype);
    if (shape.wire == shape.dtype) continue;
    own = ChunkBufferRef(blocks_);  // this rank's own numbers are rounded like all others
    convert(shape.dtype, inputs[rank], shape.wire, own.data(), count);
    inputs[rank] = own.data();
  }
  ChunkBufferRef result(blocks_);
  reduce(shape.op, shape.wire, inputs, result.data(), count);
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank == self_) continue;
    operation.inputs[rank].pop_front();
    held_[rank] -= bytes;
  }
  operation.reduced += bytes;
  reduced_bytes_ += bytes * world_;
  if (world_ > 1 || self_ == kNoRank) {
    operation.results.push_back(result);
  } else {
    operation.results_from += chunk_;
  }
  // Last: the receiver may request the next piece at once.
  if (self_ != kNoRank) host_.deliver(number, at, {result.data(), bytes});
}

bool ShareOwner::next(uint32_t rank, OutFrame* frame) {
  for (auto place = operations_.begin(); place != operations_.end(); ++place) {
    Operation& operation = place->second;
    if (operation.ended[rank]) continue;
    const uint64_t at = operation.sent[rank];
    if (operation.share_bytes == 0) {
      if (!operation.empty_done) continue;
      *frame = {frame_of(FrameKind::result, place->first, 0, 0), nullptr, {}};
      frame->header.settled = settled();
      end(place, rank);
      return true;
    }
    if (at == operation.reduced) continue;
    const uint64_t bytes = std::min(chunk_, operation.share_bytes - at);
    ChunkBufferRef& block = operation.results[(at - operation.results_from) / chunk_];
    *frame = {frame_of(FrameKind::result, place->first, at, bytes), block.data(), block};
    frame->header.settled = settled();
    operation.sent[rank] += bytes;
    if (operation.sent[rank] == operation.share_bytes) {
      end(place, rank);
    } else {
      forget_sent(operation);
    }
    return true;
  }
  return false;
}

uint32_t ShareOwner::settled() const {
  return *std::min_element(completed_.begin(), completed_.end());
}

void ShareOwner::forget_sent(Operation& operation) {
  uint64_t least = operation.reduced;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_) least = std::min(least, operation.sent[rank]);
  }
  while (!operation.results.empty() && operation.results_from + chunk_ <= least) {
    operation.results.pop_front();
    operation.results_from += chunk_;
  }
}

void ShareOwner::end(Place place, uint32_t rank) {
  Operation& operation = place->second;
  operation.ended[rank] = true;
  if (++operation.end_count < world_) return;
  ++done_;
  operations_.erase(place);
}

// --- diagnosis ------------------------------------------------------------------------------------------------------

std::vector<uint32_t> ShareOwner::least_advanced(uint64_t number, uint64_t* bytes, uint64_t* of) const {
  *bytes = *of = 0;
  // Ranks take one operation after the other: who is behind in an earlier one holds up this one too.
  for (const auto& [at, operation] : operations_) {
    if (at > number) break;
    // A rank that has not even opened it is behind those that have sent nothing yet.
    const auto progress = [&](uint32_t rank) { return operation.opened[rank] ? operation.received[rank] + 1 : 0; };
    uint64_t least = ~uint64_t{0};
    for (uint32_t rank = 0; rank < world_; ++rank) least = std::min(least, progress(rank));
    if (least == operation.share_bytes + 1) continue;  // all is there
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (progress(rank) == least) ranks.push_back(rank);
    }
    *bytes = least == 0 ? 0 : least - 1;
    *of = operation.share_bytes;
    return ranks;
  }
  std::vector<uint32_t> ranks;
  if (operations_.contains(number)) return ranks;
  // No rank has opened it here, or it is over: a rank that queries it can only wait for what is in flight.
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_ && next_open_[rank] <= number) ranks.push_back(rank);
  }
  return ranks;
}

bool ShareOwner::involves(uint32_t rank, uint64_t* number, uint64_t* bytes, uint64_t* of) const {
  for (const auto& [at, operation] : operations_) {
    if (operation.ended[rank] || (!operation.opened[rank] && operation.open_count == 0)) continue;
    *number = at;
    *bytes = operation.received[rank];
    *of = operation.share_bytes;
    return true;
  }
  return false;
}

}  // namespace geartrain
