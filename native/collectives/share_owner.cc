#include "collectives/share_owner.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"

namespace geartrain {
namespace {

constexpr size_t kMostOperations = 65536;  // begun by some rank and not over
constexpr size_t kNotOwned = 1024;         // shapes kept of what others may still open here by mistake
// Of numbers that are read from other ranks: of one of them at once, of all together, which should stay in the second
// level of the cache, and what is reduced before it is another's turn.
constexpr uint64_t kReadBytes = 128 << 10;
constexpr uint64_t kReadTogether = 512 << 10;
constexpr uint64_t kTurnBytes = 1 << 20;
constexpr uint64_t kLeastShown = 256 << 10;  // of results, before others are told of them; or all of them

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
    operation.addresses.resize(world_);
    operation.reads.resize(world_);
    operation.sent.resize(world_);
    operation.ended.resize(world_);
  } else if (operation.shape != shape ||
             (operation.share_bytes != share_bytes && shape.collective != Collective::all_to_all)) {
    disagree(number, rank, shape, operation.first_rank, operation.shape);
    return operations_.end();
  }
  operation.opened[rank] = true;
  ++operation.open_count;
  return place;
}

void ShareOwner::open(uint32_t rank, uint64_t number, const Open& open) {
  const Shape shape = shape_from(open);
  if (shape.collective != Collective::all_reduce && (self_ == kNoRank || shape.root >= world_)) {
    fail(ErrorKind::frame, "it opened an operation that is not made here");
  }
  // It comes when it is begun, before opens of earlier operations that the window holds back.
  if (shape.collective == Collective::one_host_broadcast && rank == shape.root) return announced(rank, number, shape);
  if (number < next_open_[rank]) fail(ErrorKind::frame, "it opened operation ", number, " twice");
  if ((open.share_bytes > shape.wire_bytes() && shape.collective != Collective::all_to_all) ||
      open.share_bytes % bytes_of(shape.wire) != 0) {
    fail(ErrorKind::frame, "it opened an operation with a share of ", open.share_bytes, " bytes");
  }
  if (operations_.size() >= kMostOperations) fail(ErrorKind::frame, "it opened too many operations");
  next_open_[rank] = number + 1;
  completed_[rank] = open.completed;
  if (const Shape* const mine = not_owned(number); mine != nullptr) {
    return disagree(number, rank, shape, self_, *mine);
  }
  if (open.address != 0 && self_ == kNoRank) fail(ErrorKind::frame, "it exposes its numbers to a reducer");
  const Place place = find_or_make(rank, number, shape, open.share_bytes);
  if (place == operations_.end()) return;
  place->second.reads[rank] = open.reads != 0;
  if (!shape.direct()) {
    place->second.addresses[rank] = open.address;
    if (open.address != 0) place->second.received[rank] = open.share_bytes;
    if (self_ != kNoRank && place->second.opened[self_]) decline_addresses(place);
    return advance(place);
  }
  place->second.wanted.resize(world_);
  place->second.wanted[rank] = open.share_bytes;
  if (place->second.opened[self_] && agrees(number, place->second, rank)) host_.results_for(rank);
}

void ShareOwner::open_local(uint64_t number, const Shape& shape, uint64_t share_bytes, const std::byte* numbers,
                            uint64_t completed, std::byte* exposed) {
  completed_[self_] = static_cast<uint32_t>(completed);
  next_own_ = number + 1;
  if (differs_from_root(number, shape)) return;
  const Place place = find_or_make(self_, number, shape, share_bytes);
  if (place == operations_.end()) return;
  Operation& operation = place->second;
  operation.local = numbers;
  operation.exposed = share_bytes == 0 ? nullptr : exposed;
  operation.received[self_] = share_bytes;
  decline_addresses(place);
  if (operation.exposed == nullptr) return advance(place);
  operation.taken.resize(world_);
  // The others are told of it before the work begins.
  operation.waits = true;
  host_.go_on();
}

// An owner whose results are not exposed sends them, and would keep all of a share that it reads at its own speed: it
// asks for parts, which come no faster than the window lets them.
void ShareOwner::decline_addresses(Place place) {
  Operation& operation = place->second;
  if (operation.exposed != nullptr) return;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (operation.addresses[rank] == 0) continue;
    operation.addresses[rank] = operation.received[rank] = 0;
    host_.unreadable_part(rank, place->first, 0);
  }
}

void ShareOwner::go_on() {
  const auto place =
      std::find_if(operations_.begin(), operations_.end(), [](const auto& one) { return one.second.waits; });
  if (place == operations_.end()) return;
  const auto next = std::find_if(std::next(place), operations_.end(), [](const auto& one) { return one.second.waits; });
  const bool more = next != operations_.end();
  place->second.waits = false;
  advance(place);
  if (more) host_.go_on();
}

void ShareOwner::send_local(uint64_t number, const Shape& shape, std::vector<Segment> sends, uint64_t completed) {
  completed_[self_] = static_cast<uint32_t>(completed);
  next_own_ = number + 1;
  if (differs_from_root(number, shape)) return;
  const Place place = find_or_make(self_, number, shape, sends[self_].count * bytes_of(shape.dtype));
  if (place == operations_.end()) return;
  Operation& operation = place->second;
  operation.sends = std::move(sends);
  operation.wanted.resize(world_);
  std::vector<uint32_t> waiting;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank == self_ || !operation.opened[rank]) continue;
    if (!agrees(number, operation, rank)) return;
    waiting.push_back(rank);
  }
  if (world_ == 1) {
    operations_.erase(place);
    ++done_;
    return host_.served(number);
  }
  for (const uint32_t rank : waiting) host_.results_for(rank);
}

void ShareOwner::owns_none(uint64_t number, const Shape& shape) {
  next_own_ = number + 1;
  if (const auto place = operations_.find(number); place != operations_.end()) {
    return disagree(number, self_, shape, place->second.first_rank, place->second.shape);
  }
  if (const auto root = announced_.find(number); root != announced_.end()) {
    const auto [rank, others] = root->second;
    announced_.erase(root);
    if (others != shape) disagree(number, self_, shape, rank, others);
    return;
  }
  if (shape.collective == Collective::one_host_broadcast) {
    unannounced_.emplace(number, shape);  // until the root comes, however late: as many as are in flight here
    return;
  }
  not_owned_.emplace(number, shape);
  if (not_owned_.size() > kNotOwned) not_owned_.erase(not_owned_.begin());
}

const Shape* ShareOwner::not_owned(uint64_t number) const {
  if (const auto found = unannounced_.find(number); found != unannounced_.end()) return &found->second;
  const auto found = not_owned_.find(number);
  return found == not_owned_.end() ? nullptr : &found->second;
}

// A rank is the root of a broadcast, of which this one owns nothing if it agrees.
void ShareOwner::announced(uint32_t rank, uint64_t number, const Shape& shape) {
  if (const auto place = operations_.find(number); place != operations_.end() && place->second.opened[self_]) {
    return disagree(number, rank, shape, self_, place->second.shape);
  }
  if (const Shape* const mine = not_owned(number); mine != nullptr && *mine != shape) {
    return disagree(number, rank, shape, self_, *mine);
  }
  // What was begun here is settled, or its shape not kept any more. Nothing would ever remove an entry of it.
  if (number < next_own_) {
    unannounced_.erase(number);
    return;
  }
  if (announced_.size() >= kMostOperations) fail(ErrorKind::frame, "it opened too many operations");
  announced_.emplace(number, std::pair(rank, shape));
}

// Whether another rank has announced itself as the root of an operation of which this one owns a share.
bool ShareOwner::differs_from_root(uint64_t number, const Shape& shape) {
  const auto root = announced_.find(number);
  if (root == announced_.end()) return false;
  disagree(number, self_, shape, root->second.first, root->second.second);
  return true;
}

void ShareOwner::disagree(uint64_t number, uint32_t rank, const Shape& shape, uint32_t other, const Shape& others) {
  host_.disagree(disagreement(number, rank, shape, other, others), {std::min(rank, other), std::max(rank, other)});
}

// Whether a rank expects as much as there is for it.
bool ShareOwner::agrees(uint64_t number, const Operation& operation, uint32_t rank) {
  const uint64_t size = bytes_of(operation.shape.dtype), there = operation.sends[rank].count;
  if (operation.wanted[rank] == there * size) return true;
  host_.disagree("ranks disagree at operation " + std::to_string(number) + " (" + operation.shape.text() + "): rank " +
                     std::to_string(rank) + " expects " + std::to_string(operation.wanted[rank] / size) +
                     " elements of rank " + std::to_string(self_) + ", which has " + std::to_string(there) + " for it",
                 {std::min(rank, self_), std::max(rank, self_)});
  return false;
}

std::span<std::byte> ShareOwner::room(uint32_t rank, const WireHeader& part) {
  const auto place = operations_.find(part.operation);
  if (place == operations_.end() || !place->second.opened[rank]) {
    fail(ErrorKind::frame, "it sent a part of operation ", part.operation, ", which it has not opened");
  }
  Operation& operation = place->second;
  if (operation.shape.direct() ||
      (operation.shape.collective == Collective::broadcast && rank != operation.shape.root)) {
    fail(ErrorKind::frame, "it sent a part of operation ", part.operation, ", to which it does not contribute");
  }
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

// --- reducing -------------------------------------------------------------------------------------------------------

// Reduces every chunk that has arrived from all.
void ShareOwner::advance(Place place) {
  Operation& operation = place->second;
  const uint64_t number = place->first, size = operation.share_bytes;
  const bool relayed = operation.shape.collective == Collective::broadcast && size != 0;
  const uint32_t root = operation.shape.root;
  // Recipients of what is relayed may come later.
  if (relayed ? !operation.opened[self_] || !operation.opened[root] : operation.open_count < world_) return;
  const uint64_t there =
      relayed ? operation.received[root] : *std::min_element(operation.received.begin(), operation.received.end());
  if (operation.waits) return;
  bool any = false, read_all = true;
  for (uint64_t turn = 0; operation.reduced < size;) {
    const uint64_t bytes = std::min(piece(operation), size - operation.reduced);
    if (there < operation.reduced + bytes) break;
    if (turn >= kTurnBytes && operation.exposed != nullptr) {
      operation.waits = true;
      host_.go_on();
      break;
    }
    read_all = reduce_chunk(number, operation, bytes);
    if (!read_all) break;
    turn += bytes * world_;
    any = true;
  }
  if (size == 0 && !operation.empty_done) {
    operation.empty_done = any = true;
    if (self_ != kNoRank) host_.deliver(number, 0, {});
  }
  // Where not all can be read any more, results that were held back are told of now.
  if (!any && read_all) {
    // It may be a recipient that has come.
    if (relayed && operation.reduced != 0) {
      for (uint32_t rank = 0; rank < world_; ++rank) {
        if (rank != self_) host_.results_for(rank);
      }
    }
    return;
  }
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

// Whether no rank's window waits for reports of this share: else each chunk is reported at once, since ranks that send
// go no further than the share that is furthest behind, of any owner.
bool ShareOwner::only_reads(const Operation& operation) const {
  if (operation.exposed == nullptr) return false;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_ && operation.addresses[rank] == 0) return false;
  }
  return true;
}

// What is reduced at once: chunks where some are sent.
uint64_t ShareOwner::piece(const Operation& operation) const {
  if (!only_reads(operation)) return chunk_;
  return std::max(chunk_, std::min(kReadBytes, kReadTogether / (world_ - 1)) / chunk_ * chunk_);
}

// Numbers that ranks expose, and where they are. False: not all can be read, or not any more.
bool ShareOwner::read_inputs(uint64_t number, Operation& operation, uint64_t bytes,
                             std::vector<const std::byte*>* inputs) {
  bool all = true;
  uint64_t used = 0;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (operation.addresses[rank] == 0) continue;
    read_.resize(std::max(read_.size(), bytes * (world_ - 1)));
    const std::span<std::byte> into = std::span(read_).subspan(used, bytes);
    used += bytes;
    const ReadExposed found = host_.read(rank, operation.addresses[rank] + operation.reduced, into);
    (*inputs)[rank] = into.data();
    all &= found == ReadExposed::read;
    if (found != ReadExposed::denied) continue;  // what is withdrawn comes with its reason
    operation.addresses[rank] = 0;
    operation.received[rank] = operation.reduced;
    host_.unreadable_part(rank, number, operation.reduced);
  }
  return all;
}

bool ShareOwner::reduce_chunk(uint64_t number, Operation& operation, uint64_t bytes) {
  const Shape& shape = operation.shape;
  const uint64_t at = operation.reduced, count = bytes / bytes_of(shape.wire);
  ChunkBufferRef result;
  std::byte* into = nullptr;
  if (shape.collective == Collective::broadcast) {
    result = std::move(operation.inputs[shape.root].front());
    into = result.data();
    operation.inputs[shape.root].pop_front();
  } else {
    ChunkBufferRef own;
    std::vector<const std::byte*> inputs(world_);
    if (!read_inputs(number, operation, bytes, &inputs)) return false;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (inputs[rank] != nullptr) continue;
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
    if (operation.exposed == nullptr) result = ChunkBufferRef(blocks_);
    into = operation.exposed == nullptr ? result.data() : operation.exposed + at;
    reduce(shape.op, shape.wire, inputs, into, count, shape.whole ? shape.whole->world : 0);
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (rank == self_ || operation.addresses[rank] != 0) continue;
      operation.inputs[rank].pop_front();
      held_[rank] -= bytes;
    }
    reduced_bytes_ += bytes * world_;
  }
  operation.reduced += bytes;
  if (operation.exposed == nullptr && shape.collective != Collective::reduce_scatter &&
      (world_ > 1 || self_ == kNoRank)) {
    operation.results.push_back(result);
  } else {
    operation.results_from += chunk_;
  }
  if (shape.collective == Collective::broadcast) forget_sent(operation);  // there may be no recipients
  // Last: the receiver may request the next piece at once.
  if (self_ != kNoRank) host_.deliver(number, at, {into, bytes});
  return true;
}

// --- sending --------------------------------------------------------------------------------------------------------

bool ShareOwner::next(uint32_t rank, OutFrame* frame) {
  for (auto place = operations_.begin(); place != operations_.end(); ++place) {
    Operation& operation = place->second;
    if (operation.ended[rank]) continue;
    if (operation.shape.direct()) {
      if (next_local(place, rank, frame)) return true;
      continue;
    }
    const uint64_t at = operation.sent[rank];
    if (operation.share_bytes == 0) {
      if (!operation.empty_done) continue;
      *frame = {frame_of(FrameKind::result, place->first, 0, 0), nullptr, {}};
      frame->header.settled = settled();
      end(place, rank);
      return true;
    }
    if (gets_credit(operation, rank)) {
      const uint64_t now = credit(operation);
      if (now == at || !operation.opened[rank]) continue;
      if (only_reads(operation) && now != operation.share_bytes) continue;
      *frame = {frame_of(FrameKind::credit, place->first, now, 0), nullptr, {}};
      operation.sent[rank] = now;
      if (now == operation.share_bytes) end(place, rank);
      return true;
    }
    if (at == operation.reduced || !operation.opened[rank]) continue;
    if (operation.exposed != nullptr) {
      if (next_exposed(place, rank, frame)) return true;
      continue;
    }
    const uint64_t bytes = std::min(chunk_, operation.share_bytes - at);
    ChunkBufferRef& block = operation.results[(at - operation.results_from) / chunk_];
    *frame = {frame_of(FrameKind::result, place->first, at, bytes), block.data(), block};
    frame->header.settled = settled();
    operation.sent[rank] += bytes;
    const bool relayed = operation.shape.collective == Collective::broadcast;
    const uint32_t root = operation.shape.root;
    const bool forgotten = (relayed || operation.sent[rank] != operation.share_bytes) && forget_sent(operation);
    if (operation.sent[rank] == operation.share_bytes) end(place, rank);
    if (relayed && forgotten) host_.results_for(root);
    return true;
  }
  return false;
}

// From the caller's memory, to a rank that has opened the operation.
bool ShareOwner::next_local(Place place, uint32_t rank, OutFrame* frame) {
  Operation& operation = place->second;
  if (!operation.opened[self_] || !operation.opened[rank]) return false;
  const uint64_t at = operation.sent[rank], all = operation.wanted[rank];
  if (all == 0) {
    *frame = {frame_of(FrameKind::result, place->first, 0, 0), nullptr, {}};
    end(place, rank);
    return true;
  }
  if (at == all) return false;
  if (operation.reads[rank]) {
    expose(place->first, operation, rank, operation.sends[rank].at + at, std::min(kExposedBytes, all - at), frame);
    return true;
  }
  if (!may_send(operation, rank)) {
    sample_.held_up = true;
    return false;
  }
  const uint64_t bytes = std::min(chunk_, all - at);
  *frame = {frame_of(FrameKind::result, place->first, at, bytes), operation.sends[rank].at + at, {}};
  frame->header.settled = settled();
  operation.sent[rank] += bytes;
  under_way_ += bytes;
  if (!sample_.running) sample_ = {true, false, place->first, at + bytes, monotonic_ns(), taken_, rank};
  return true;
}

// A result that is in the caller's memory. It is copied for a rank that cannot read it: what is on the way to that one
// does not keep the array from the caller.
bool ShareOwner::next_exposed(Place place, uint32_t rank, OutFrame* frame) {
  Operation& operation = place->second;
  const uint64_t at = operation.sent[rank], there = operation.reduced - at;
  if (operation.reads[rank]) {
    if (only_reads(operation) && there < kLeastShown && operation.reduced != operation.share_bytes) return false;
    expose(place->first, operation, rank, operation.exposed + at, std::min(kExposedBytes, there), frame);
    frame->header.settled = settled();
    return true;
  }
  const uint64_t bytes = std::min(chunk_, there);
  frame->header = frame_of(FrameKind::result, place->first, at, bytes);
  frame->header.settled = settled();
  frame->hold = ChunkBufferRef(blocks_);
  std::memcpy(frame->hold.data(), operation.exposed + at, bytes);
  frame->data = frame->hold.data();
  operation.sent[rank] += bytes;
  if (operation.sent[rank] == operation.share_bytes) end(place, rank);
  return true;
}

void ShareOwner::expose(uint64_t number, Operation& operation, uint32_t rank, const std::byte* from, uint64_t bytes,
                        OutFrame* frame) {
  const ExposedShare exposed{reinterpret_cast<uintptr_t>(from), bytes};
  frame->header = frame_of(FrameKind::expose, number, operation.sent[rank], sizeof exposed);
  frame->hold = ChunkBufferRef(blocks_);
  std::memcpy(frame->hold.data(), &exposed, sizeof exposed);
  frame->data = frame->hold.data();
  operation.sent[rank] += bytes;
}

// The window over all that is under way; and within an operation all ranks move on together, so that none is served
// last.
bool ShareOwner::may_send(const Operation& operation, uint32_t rank) const {
  const uint64_t window = host_.window()->bytes();
  if (under_way_ != 0 && under_way_ + chunk_ > window) return false;
  double least = 1, all = 0;
  for (uint32_t other = 0; other < world_; ++other) {
    if (other == self_ || !operation.opened[other] || operation.wanted[other] == 0 || operation.reads[other]) continue;
    const auto wanted = static_cast<double>(operation.wanted[other]);
    least = std::min(least, static_cast<double>(operation.received[other]) / wanted);
    all += wanted;
  }
  const double until = (least + static_cast<double>(window) / all) * static_cast<double>(operation.wanted[rank]);
  return static_cast<double>(operation.sent[rank]) <= until;
}

void ShareOwner::took_taken(uint32_t rank, const WireHeader& taken) {
  const auto place = operations_.find(taken.operation);
  if (place != operations_.end() && shows_results(place->second) && place->second.reads[rank] &&
      taken.offset > place->second.taken[rank] && taken.offset <= place->second.sent[rank]) {
    place->second.taken[rank] = taken.offset;
    if (taken.offset == place->second.share_bytes) end(place, rank);
    return;
  }
  if (place == operations_.end() || !place->second.shape.direct() || taken.offset <= place->second.received[rank] ||
      taken.offset > place->second.sent[rank]) {
    fail(ErrorKind::frame, "it took ", taken.offset, " bytes of operation ", taken.operation, ", which were not sent");
  }
  Operation& operation = place->second;
  const uint64_t bytes = taken.offset - operation.received[rank];
  operation.received[rank] = taken.offset;
  if (operation.reads[rank]) {
    if (taken.offset == operation.wanted[rank]) end(place, rank);
    return;
  }
  under_way_ -= bytes;
  taken_ += bytes;
  if (sample_.running && sample_.operation == taken.operation && sample_.rank == rank &&
      taken.offset >= sample_.until) {
    sample_.running = false;
    const uint64_t now = monotonic_ns();
    host_.window()->sample(now - sample_.began_ns, taken_ - sample_.taken, sample_.held_up, now);
  }
  if (taken.offset == operation.wanted[rank]) end(place, rank);
  for (uint32_t i = 1; i < world_; ++i) host_.results_for((self_ + i) % world_);
}

void ShareOwner::took_unreadable(uint32_t rank, const WireHeader& unreadable) {
  const auto place = operations_.find(unreadable.operation);
  const bool direct = place != operations_.end() && place->second.shape.direct();
  const bool known = direct || (place != operations_.end() && shows_results(place->second));
  if (!known || !place->second.reads[rank] || unreadable.offset >= place->second.sent[rank] ||
      unreadable.offset != (direct ? place->second.received : place->second.taken)[rank]) {
    fail(ErrorKind::frame, "it cannot read operation ", unreadable.operation, " from ", unreadable.offset,
         " on, which was not exposed");
  }
  Operation& operation = place->second;
  operation.reads[rank] = false;
  operation.sent[rank] = unreadable.offset;
  host_.results_for(rank);
}

// Whether results are read, or copied from, where they were made.
bool ShareOwner::shows_results(const Operation& operation) {
  return operation.exposed != nullptr && operation.shape.collective == Collective::all_reduce;
}

bool ShareOwner::gets_credit(const Operation& operation, uint32_t rank) const {
  const Shape& shape = operation.shape;
  return shape.collective == Collective::reduce_scatter ||
         (shape.collective == Collective::broadcast && rank == shape.root);
}

// How much of a share is done with: for a relay, what all recipients have taken.
uint64_t ShareOwner::credit(const Operation& operation) const {
  if (operation.shape.collective == Collective::reduce_scatter) return operation.reduced;
  return std::min(operation.results_from, operation.reduced);
}

uint32_t ShareOwner::settled() const {
  return *std::min_element(completed_.begin(), completed_.end());
}

// Drops results that every rank has taken. True when there were some.
bool ShareOwner::forget_sent(Operation& operation) {
  const bool relayed = operation.shape.collective == Collective::broadcast;
  uint64_t least = operation.reduced;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_ && !gets_credit(operation, rank)) least = std::min(least, operation.sent[rank]);
  }
  bool any = false;
  while (!operation.results.empty() && std::min(operation.results_from + chunk_, operation.share_bytes) <= least) {
    if (relayed) {
      held_[operation.shape.root] -= std::min(chunk_, operation.share_bytes - operation.results_from);
    }
    operation.results.pop_front();
    operation.results_from += chunk_;
    any = true;
  }
  return any;
}

void ShareOwner::end(Place place, uint32_t rank) {
  Operation& operation = place->second;
  operation.ended[rank] = true;
  ++operation.end_count;
  const bool direct = operation.shape.direct(), served = direct || shows_results(operation);
  if (operation.end_count + direct < world_) return;
  ++done_;
  const uint64_t number = place->first;
  operations_.erase(place);
  if (served) host_.served(number);
}

// --- diagnosis ------------------------------------------------------------------------------------------------------

// The bytes that an operation waits for a rank to send or to take. One that has not even opened it is behind all
// others.
uint64_t ShareOwner::missing(const Operation& operation, uint32_t rank) const {
  if (!operation.opened[rank]) return ~uint64_t{0};
  if (operation.shape.direct()) {
    // What it has opened and this rank has not begun waits for this rank.
    return rank == self_ || operation.ended[rank] || !operation.opened[self_]
               ? 0
               : operation.wanted[rank] - operation.received[rank] + 1;
  }
  if (operation.shape.collective == Collective::broadcast && rank != operation.shape.root) {
    return rank == self_ ? 0 : operation.reduced - operation.sent[rank];
  }
  if (shows_results(operation) && operation.reduced == operation.share_bytes) {
    return operation.ended[rank] ? 0 : operation.share_bytes - operation.taken[rank];
  }
  return operation.share_bytes - operation.received[rank];
}

std::vector<uint32_t> ShareOwner::least_advanced(uint64_t number, uint64_t* bytes, uint64_t* of) const {
  *bytes = *of = 0;
  // Ranks take one operation after the other: who is behind in an earlier one holds up this one too.
  for (const auto& [at, operation] : operations_) {
    if (at > number) break;
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < world_; ++rank) most = std::max(most, missing(operation, rank));
    if (most == 0) continue;  // all is there
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (missing(operation, rank) == most) ranks.push_back(rank);
    }
    *bytes = operation.share_bytes - std::min(most, operation.share_bytes);
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
    *bytes = operation.shape.direct() ? operation.sent[rank] : operation.received[rank];
    *of = operation.share_bytes;
    return true;
  }
  return false;
}

}  // namespace geartrain
