#include "collectives/ring_allreduce.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace geartrain {
namespace {

constexpr uint64_t kMostEarlyBytes = uint64_t{64} << 20;  // received before their operation was begun here
constexpr size_t kMostRingOperations = 65536;

}  // namespace

RingAllreduce::RingAllreduce(ChunkBufferPool& blocks, Host& host, uint32_t rank, uint32_t world)
    : blocks_(blocks), host_(host), rank_(rank), world_(world) {}

uint32_t RingAllreduce::piece(uint32_t step, bool sending) const {
  return (rank_ + 2 * world_ - step - (sending ? 0 : 1)) % world_;
}

uint64_t RingAllreduce::elements(const Operation& operation, uint32_t step, bool sending) const {
  const uint32_t p = piece(step, sending);
  return operation.starts[p + 1] - operation.starts[p];
}

void RingAllreduce::forward(const Operation& operation, At* at, bool sending, uint64_t count) const {
  at->element += count;
  at->bytes += count * bytes_of(operation.work->shape.wire);
  while (at->step < steps() && at->element == elements(operation, at->step, sending)) {
    ++at->step;
    at->element = 0;
  }
}

// --- an operation begins --------------------------------------------------------------------------------------------

void RingAllreduce::compare(uint64_t number, const Shape& mine) {
  const auto found = theirs_.find(number);
  if (found == theirs_.end() || found->second == mine) return;
  const uint32_t previous = (rank_ + world_ - 1) % world_;
  host_.disagree(disagreement(number, rank_, mine, previous, found->second),
                 {std::min(rank_, previous), std::max(rank_, previous)});
}

void RingAllreduce::begin(const std::shared_ptr<Work>& work) {
  const Shape& shape = work->shape;
  if (work->in != work->out && shape.count != 0) std::memcpy(work->out, work->in, shape.count * bytes_of(shape.dtype));
  next_number_ = work->number + 1;
  if (world_ == 1) {
    std::byte* const all[] = {work->out};
    if (shape.op == Op::avg) divide(shape.dtype, all[0], shape.count, 1);
    return host_.completed(work);
  }
  Operation& operation = operations_[work->number];
  operation.work = work;
  for (uint64_t p = 0; p < world_; ++p) operation.starts.push_back(shape.count / kGrain * p / world_ * kGrain);
  operation.starts.push_back(shape.count);
  forward(operation, &operation.sent, true, 0);
  forward(operation, &operation.received, false, 0);
  const uint64_t number = work->number;
  host_.open_next(number, open_of(shape, 0));
  host_.ring_for_next();
  compare(number, shape);
  // What came before.
  for (size_t i = 0; i < early_.size() && operations_.contains(number);) {
    if (early_[i].header.operation != number) {
      ++i;
      continue;
    }
    const Early piece = std::move(early_[i]);
    early_.erase(early_.begin() + static_cast<ptrdiff_t>(i));
    early_bytes_ -= piece.header.bytes;
    took(piece.header, {piece.block.data(), piece.header.bytes});
  }
  host_.ring_room();
  // An empty array is over once the previous rank has opened it too.
  const auto place = operations_.find(number);
  if (place != operations_.end() && shape.count == 0 && theirs_.contains(number)) finish(place);
}

void RingAllreduce::open(uint64_t number, const Open& open) {
  const Shape shape = shape_from(open);
  if (theirs_.size() >= kMostRingOperations || !theirs_.emplace(number, shape).second) {
    fail(ErrorKind::frame, "it opened operation ", number, " twice, or too many");
  }
  const auto place = operations_.find(number);
  if (place == operations_.end()) {
    if (begun(number)) fail(ErrorKind::frame, "it opened operation ", number, ", which is over");
    return;
  }
  const std::shared_ptr<Work> work = place->second.work;
  compare(number, work->shape);
  const auto still = operations_.find(number);  // they may disagree
  if (still != operations_.end() && work->shape.count == 0) finish(still);
}

// --- receiving ------------------------------------------------------------------------------------------------------

void RingAllreduce::check_place(const Operation& operation, const WireHeader& header) const {
  const At& at = operation.received;
  const uint64_t size = bytes_of(operation.work->shape.wire);
  const bool over = at.step == steps();
  const uint64_t left = over ? 0 : (elements(operation, at.step, false) - at.element) * size;
  if (header.offset != at.bytes || header.bytes == 0 || header.bytes > left || header.bytes % size != 0) {
    fail(ErrorKind::frame, "it sent ", header.bytes, " bytes at ", header.offset, " of operation ", header.operation,
         ", where ", at.bytes, " was next");
  }
}

std::span<std::byte> RingAllreduce::room(const WireHeader& header) {
  const auto place = operations_.find(header.operation);
  if (place != operations_.end()) {
    check_place(place->second, header);
  } else if (begun(header.operation) || !theirs_.contains(header.operation)) {
    fail(ErrorKind::frame, "it sent a piece of operation ", header.operation, ", which is over or not open");
  } else if (early_bytes_ + header.bytes > kMostEarlyBytes) {
    return {};
  }
  arriving_ = ChunkBufferRef(blocks_);
  return {arriving_.data(), header.bytes};
}

void RingAllreduce::took(const WireHeader& header, std::span<const std::byte> payload) {
  const auto place = operations_.find(header.operation);
  if (place == operations_.end()) {
    early_bytes_ += header.bytes;
    early_.push_back({header, std::move(arriving_)});
    return;
  }
  check_place(place->second, header);
  add(place->second, payload);
  const Operation& operation = place->second;
  // The stream out may end later than the stream in: next() then finishes.
  if (operation.received.step == steps() && operation.sent.step == steps()) {
    finish(place);
  } else {
    host_.ring_for_next();
  }
}

void RingAllreduce::finish(std::map<uint64_t, Operation>::iterator place) {
  const std::shared_ptr<Work> work = place->second.work;
  theirs_.erase(place->first);
  operations_.erase(place);
  host_.completed(work);
}

// One chunk: in the first half it is added to this rank's own numbers, in the second half it is the result.
void RingAllreduce::add(Operation& operation, std::span<const std::byte> payload) {
  const Shape& shape = operation.work->shape;
  const At at = operation.received;
  const uint64_t count = payload.size() / bytes_of(shape.wire);
  std::byte* const mine =
      operation.work->out + (operation.starts[piece(at.step, false)] + at.element) * bytes_of(shape.dtype);
  const bool adding = at.step < world_ - 1;
  if (!adding) {
    convert(shape.wire, payload.data(), shape.dtype, mine, count);
  } else {
    const std::byte* theirs = payload.data();
    alignas(64) std::array<std::byte, 2 * kChunkBytes> wide;
    if (shape.wire != shape.dtype) {
      convert(shape.wire, theirs, shape.dtype, wide.data(), count);
      theirs = wide.data();
    }
    const std::byte* const both[] = {theirs, mine};
    const bool last = at.step == world_ - 2;
    reduce(shape.op == Op::avg ? Op::sum : shape.op, shape.dtype, both, mine, count);
    if (last && shape.op == Op::avg) divide(shape.dtype, mine, count, world_);
    if (last && shape.wire != shape.dtype) {
      // All other ranks get it rounded.
      alignas(64) std::array<std::byte, kChunkBytes> narrow;
      convert(shape.dtype, mine, shape.wire, narrow.data(), count);
      convert(shape.wire, narrow.data(), shape.dtype, mine, count);
    }
  }
  forward(operation, &operation.received, false, count);
}

bool RingAllreduce::waits_for_next(uint64_t number) const {
  const auto place = operations_.find(number);
  return place != operations_.end() && place->second.work->shape.count != 0 && place->second.received.step == steps();
}

// --- sending --------------------------------------------------------------------------------------------------------

bool RingAllreduce::next(OutFrame* frame) {
  for (auto& [number, operation] : operations_) {
    At& at = operation.sent;
    if (at.step == steps()) continue;
    const Shape& shape = operation.work->shape;
    const uint32_t p = piece(at.step, true);
    // What was received a step ago may go.
    uint64_t there = elements(operation, at.step, true);
    if (at.step > 0) {
      const At& received = operation.received;
      if (received.step < at.step) there = received.step == at.step - 1 ? received.element : 0;
    }
    const uint64_t most = kChunkBytes / bytes_of(shape.wire);
    const uint64_t count = std::min(there - std::min(there, at.element), most);
    // Whole chunks, but for the last: many small ones would be more headers than numbers.
    if (count == 0 || (count < most && there != elements(operation, at.step, true))) continue;
    const uint64_t bytes = count * bytes_of(shape.wire);
    frame->header = frame_of(FrameKind::ring, number, at.bytes, bytes);
    frame->data = operation.work->out + (operation.starts[p] + at.element) * bytes_of(shape.dtype);
    // A copy: this piece may be overwritten by the result while the kernel has yet to send it, and is the caller's
    // once the operation is over.
    frame->hold = ChunkBufferRef(blocks_);
    convert(shape.dtype, frame->data, shape.wire, frame->hold.data(), count);
    frame->data = frame->hold.data();
    forward(operation, &at, true, count);
    if (at.step == steps() && operation.received.step == steps()) finish(operations_.find(number));
    return true;
  }
  return false;
}

}  // namespace geartrain
