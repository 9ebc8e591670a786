#include "collectives/share_owner.h"

#include <algorithm>
#include <string>
#include <utility>

namespace geartrain {
namespace {

constexpr size_t kMostAnnounced = 65536;
constexpr size_t kMostOthers = 1024;
constexpr size_t kMostOperations = 65536;  // begun by some rank and not over
constexpr uint64_t kTurnBytes = 1 << 20;   // of exposed numbers, reduced before it is another's turn

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
      held_(world),
      exposure_(blocks, host, world, self, chunk) {}

// --- receiving ------------------------------------------------------------------------------------------------------

ShareOwner::Place ShareOwner::find_or_make(uint32_t rank, uint64_t number, const Shape& shape, uint64_t share_bytes) {
  const auto [place, made] = operations_.try_emplace(number, shape, share_bytes, rank, world_, self_);
  OwnedShare& share = place->second;
  if (!made && (share.shape != shape || (share.bytes != share_bytes && shape.collective != Collective::all_to_all))) {
    disagree(number, rank, shape, share.first_rank, share.shape);
    return operations_.end();
  }
  share.opened[rank] = true;
  ++share.open_count;
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
  if (const Shape* const mine = unowned_.find(number); mine != nullptr) {
    return disagree(number, rank, shape, self_, *mine);
  }
  if (open.address != 0 && self_ == kNoRank) fail(ErrorKind::frame, "it exposes its numbers to a reducer");
  const Place place = find_or_make(rank, number, shape, open.share_bytes);
  if (place == operations_.end()) return;
  place->second.reads[rank] = open.reads != 0;
  if (!shape.direct()) {
    place->second.addresses[rank] = open.address;
    if (open.address != 0) place->second.received[rank] = open.share_bytes;
    if (self_ != kNoRank && place->second.opened[self_]) exposure_.decline(number, place->second);
    return advance(place);
  }
  place->second.wanted.resize(world_);
  place->second.wanted[rank] = open.share_bytes;
  if (place->second.opened[self_] && agrees(number, place->second, rank)) host_.results_for(rank);
}

void ShareOwner::open_local(uint64_t number, const Shape& shape, uint64_t share_bytes, const std::byte* numbers,
                            std::byte* exposed) {
  next_own_ = number + 1;
  if (differs_from_root(number, shape)) return;
  const Place place = find_or_make(self_, number, shape, share_bytes);
  if (place == operations_.end()) return;
  OwnedShare& share = place->second;
  share.local = numbers;
  share.exposed = share_bytes == 0 ? nullptr : exposed;
  share.received[self_] = share_bytes;
  exposure_.decline(number, share);
  if (share.exposed == nullptr) return advance(place);
  share.taken.resize(world_);
  // The others are told of it before the work begins.
  share.waits = true;
  host_.go_on();
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

void ShareOwner::send_local(uint64_t number, const Shape& shape, std::vector<Segment> sends) {
  next_own_ = number + 1;
  if (differs_from_root(number, shape)) return;
  const Place place = find_or_make(self_, number, shape, sends[self_].count * bytes_of(shape.dtype));
  if (place == operations_.end()) return;
  OwnedShare& share = place->second;
  share.sends = std::move(sends);
  share.wanted.resize(world_);
  std::vector<uint32_t> waiting;  // not all ranks begin with the same one
  for (uint32_t i = 1; i < world_; ++i) {
    const uint32_t rank = (self_ + i) % world_;
    if (share.opened[rank] && !agrees(number, share, rank)) return;
    if (share.opened[rank] || host_.sends_eagerly(rank)) waiting.push_back(rank);
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
  if (const auto root = unowned_.take_root(number)) {
    if (root->second != shape) disagree(number, self_, shape, root->first, root->second);
    return;
  }
  unowned_.add(number, shape);
}

// A rank is the root of a broadcast, of which this one owns nothing if it agrees.
void ShareOwner::announced(uint32_t rank, uint64_t number, const Shape& shape) {
  if (const auto place = operations_.find(number); place != operations_.end() && place->second.opened[self_]) {
    return disagree(number, rank, shape, self_, place->second.shape);
  }
  if (const Shape* const mine = unowned_.find(number); mine != nullptr && *mine != shape) {
    return disagree(number, rank, shape, self_, *mine);
  }
  // What was begun here is over, or its shape not kept any more. Nothing would ever remove an entry of it.
  if (number < next_own_) return unowned_.settle(number);
  unowned_.announce(rank, number, shape);
}

// Whether another rank has announced itself as the root of an operation of which this one owns a share.
bool ShareOwner::differs_from_root(uint64_t number, const Shape& shape) {
  const UnownedOperations::Root* const root = unowned_.root_of(number);
  if (root == nullptr) return false;
  disagree(number, self_, shape, root->first, root->second);
  return true;
}

void ShareOwner::disagree(uint64_t number, uint32_t rank, const Shape& shape, uint32_t other, const Shape& others) {
  host_.disagree(disagreement(number, rank, shape, other, others), {std::min(rank, other), std::max(rank, other)});
}

// Whether a rank expects as much as there is for it.
bool ShareOwner::agrees(uint64_t number, const OwnedShare& share, uint32_t rank) {
  const uint64_t size = bytes_of(share.shape.dtype), there = share.sends[rank].count;
  if (share.wanted[rank] == there * size) return true;
  host_.disagree("ranks disagree at operation " + std::to_string(number) + " (" + share.shape.text() + "): rank " +
                     std::to_string(rank) + " expects " + std::to_string(share.wanted[rank] / size) +
                     " elements of rank " + std::to_string(self_) + ", which has " + std::to_string(there) + " for it",
                 {std::min(rank, self_), std::max(rank, self_)});
  return false;
}

// The share that a part is of. Throws frame when it is not what may come next.
ShareOwner::Place ShareOwner::expected(uint32_t rank, const WireHeader& part) {
  const auto place = operations_.find(part.operation);
  if (place == operations_.end() || !place->second.opened[rank]) {
    fail(ErrorKind::frame, "it sent a part of operation ", part.operation, ", which it has not opened");
  }
  const OwnedShare& share = place->second;
  if (share.shape.direct() || (share.relayed() && rank != share.shape.root)) {
    fail(ErrorKind::frame, "it sent a part of operation ", part.operation, ", to which it does not contribute");
  }
  const uint64_t at = share.received[rank];
  if (part.offset != at || part.bytes == 0 || part.bytes > share.bytes - at || at % chunk_ + part.bytes > chunk_ ||
      part.bytes % bytes_of(share.shape.wire) != 0) {
    fail(ErrorKind::frame, "it sent ", part.bytes, " bytes at ", part.offset, " of a share of ", share.bytes,
         ", where ", at, " was next");
  }
  if (held_[rank] + part.bytes > window_bytes_ + 2 * kChunkBytes) fail(ErrorKind::frame, "it runs ahead of its window");
  return place;
}

std::span<std::byte> ShareOwner::room(uint32_t rank, const WireHeader& part) {
  OwnedShare& share = expected(rank, part)->second;
  const uint64_t at = part.offset;
  // What came before of a chunk may have been reduced in place.
  if (at % chunk_ == 0 || share.inputs[rank].empty()) share.inputs[rank].push_back(ChunkBufferRef(blocks_));
  return {share.inputs[rank].back().data() + at % chunk_, part.bytes};
}

void ShareOwner::took(uint32_t rank, const WireHeader& part) {
  const auto place = operations_.find(part.operation);
  OwnedShare& share = place->second;
  share.received[rank] += part.bytes;
  held_[rank] += part.bytes;
  const uint64_t at = share.received[rank];
  if (at % chunk_ == 0 || at == share.bytes || (at < chunk_ && at % kFirstBytes == 0)) advance(place);
}

bool ShareOwner::took_in_place(uint32_t rank, const WireHeader& part, const std::byte* numbers) {
  const Place place = expected(rank, part);
  OwnedShare& share = place->second;
  const uint64_t until = part.offset + part.bytes;
  if (share.relayed() || share.exposed != nullptr || share.open_count < world_ || part.offset != share.reduced ||
      next_piece(share, until) != part.bytes) {
    return false;
  }
  for (uint32_t other = 0; other < world_; ++other) {
    if (other != rank && share.received[other] < until) return false;
  }
  share.received[rank] = until;
  held_[rank] += part.bytes;
  reduce_chunk(place->first, share, part.bytes, rank, numbers);
  tell(place);
  return true;
}

// --- reducing -------------------------------------------------------------------------------------------------------

// Reduces every chunk that has arrived from all.
void ShareOwner::advance(Place place) {
  OwnedShare& share = place->second;
  const uint64_t number = place->first, size = share.bytes;
  const bool relayed = share.relayed() && size != 0;
  const uint32_t root = share.shape.root;
  // Recipients of what is relayed may come later.
  if (relayed ? !share.opened[self_] || !share.opened[root] : share.open_count < world_) return;
  const uint64_t there =
      relayed ? share.received[root] : *std::min_element(share.received.begin(), share.received.end());
  if (share.waits) return;
  bool any = false, read_all = true;
  for (uint64_t turn = 0; share.reduced < size;) {
    const uint64_t bytes = next_piece(share, there);
    if (bytes == 0) break;
    if (turn >= kTurnBytes && share.exposed != nullptr) {
      share.waits = true;
      host_.go_on();
      break;
    }
    read_all = reduce_chunk(number, share, bytes);
    if (!read_all) break;
    turn += bytes * world_;
    any = true;
  }
  if (size == 0 && !share.empty_done) {
    share.empty_done = any = true;
    if (self_ != kNoRank) host_.deliver(number, 0, {});
  }
  // Where not all can be read any more, results that were held back are told of now.
  if (!any && read_all) {
    // It may be a recipient that has come.
    if (relayed && share.reduced != 0) {
      for (uint32_t rank = 0; rank < world_; ++rank) {
        if (rank != self_) host_.results_for(rank);
      }
    }
    return;
  }
  tell(place);
}

// Results are there for all ranks.
void ShareOwner::tell(Place place) {
  const uint64_t number = place->first;
  const bool over = place->second.reduced == place->second.bytes;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (rank != self_) host_.results_for(rank);
  }
  // The ranks may have taken everything at once, and the operation be removed with it.
  if (over && self_ != kNoRank) {
    const Place still = operations_.find(number);
    if (still != operations_.end()) end(still, self_);
  }
}

// How much is reduced next, of what is there: a chunk, or less of the first one.
uint64_t ShareOwner::next_piece(const OwnedShare& share, uint64_t there) const {
  const uint64_t left = chunk_ - share.reduced % chunk_;
  const uint64_t piece =
      std::min(share.exposed != nullptr ? exposure_.piece(share) : left, share.bytes - share.reduced);
  if (there >= share.reduced + piece) return piece;
  if (share.reduced >= chunk_ || share.exposed != nullptr || share.relayed()) return 0;
  return (there - share.reduced) / kFirstBytes * kFirstBytes;
}

bool ShareOwner::reduce_chunk(uint64_t number, OwnedShare& share, uint64_t bytes, uint32_t there,
                              const std::byte* numbers) {
  const Shape& shape = share.shape;
  const uint64_t at = share.reduced, count = bytes / bytes_of(shape.wire);
  const uint64_t within = share.exposed == nullptr ? at % chunk_ : 0;
  const bool keeps =
      share.exposed == nullptr && shape.collective != Collective::reduce_scatter && (world_ > 1 || self_ == kNoRank);
  ChunkBufferRef result;
  std::byte* into = nullptr;
  if (share.relayed()) {
    result = std::move(share.inputs[shape.root].front());
    into = result.data();
    share.inputs[shape.root].pop_front();
  } else {
    ChunkBufferRef own;
    std::vector<const std::byte*> inputs(world_);
    if (!exposure_.read(number, share, bytes, &inputs)) return false;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (inputs[rank] != nullptr) continue;
      if (rank == there) {
        inputs[rank] = numbers;
        continue;
      }
      if (rank != self_) {
        inputs[rank] = share.inputs[rank].front().data() + within;
        continue;
      }
      inputs[rank] = share.local + at / bytes_of(shape.wire) * bytes_of(shape.dtype);
      if (shape.wire == shape.dtype) continue;
      own = ChunkBufferRef(blocks_);  // this rank's own numbers are rounded like all others
      convert(shape.dtype, inputs[rank], shape.wire, own.data(), count);
      inputs[rank] = own.data();
    }
    if (share.exposed == nullptr) result = keeps && within != 0 ? share.results.back() : ChunkBufferRef(blocks_);
    into = share.exposed == nullptr ? result.data() + within : share.exposed + at;
    {
      const StageClock::Scope scope(host_.stages(), Stage::sum);
      reduce(shape.op, shape.wire, inputs, into, count, shape.whole ? shape.whole->world : 0);
    }
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (rank == self_ || share.addresses[rank] != 0) continue;
      const bool ends = (at + bytes) % chunk_ == 0 || at + bytes == share.bytes;
      if (ends && !share.inputs[rank].empty()) share.inputs[rank].pop_front();
      held_[rank] -= bytes;
    }
    reduced_bytes_ += bytes * world_;
  }
  share.reduced += bytes;
  if (within == 0 && keeps) share.results.push_back(result);
  if (within == 0 && !keeps) share.results_from += chunk_;
  if (share.relayed()) forget_sent(share);  // there may be no recipients
  // Last: the receiver may request the next piece at once.
  if (self_ != kNoRank) host_.deliver(number, at, {into, bytes});
  return true;
}

// --- sending --------------------------------------------------------------------------------------------------------

bool ShareOwner::next(uint32_t rank, OutFrame* frame) {
  for (auto place = operations_.begin(); place != operations_.end(); ++place) {
    OwnedShare& share = place->second;
    if (share.ended[rank]) continue;
    if (share.shape.direct()) {
      if (next_local(place, rank, frame)) return true;
      continue;
    }
    const uint64_t at = share.sent[rank];
    if (share.bytes == 0) {
      if (!share.empty_done) continue;
      *frame = {frame_of(FrameKind::result, place->first, 0, 0), nullptr, {}};
      end(place, rank);
      return true;
    }
    if (share.gets_credit(rank)) {
      const uint64_t now = share.credit();
      if (now == at || !share.opened[rank]) continue;
      if (share.only_reads() && now != share.bytes) continue;
      *frame = {frame_of(FrameKind::credit, place->first, now, 0), nullptr, {}};
      share.sent[rank] = now;
      if (now == share.bytes) end(place, rank);
      return true;
    }
    if (at == share.reduced || !share.opened[rank]) continue;
    if (share.exposed != nullptr) {
      if (!exposure_.next_result(place->first, share, rank, frame)) continue;
      if (!share.reads[rank] && share.sent[rank] == share.bytes) end(place, rank);
      return true;
    }
    const uint64_t within = at % chunk_, bytes = std::min(chunk_ - within, share.reduced - at);
    ChunkBufferRef& block = share.results[(at - share.results_from) / chunk_];
    *frame = {frame_of(FrameKind::result, place->first, at, bytes), block.data() + within, block};
    share.sent[rank] += bytes;
    const bool relayed = share.relayed();
    const uint32_t root = share.shape.root;
    const bool forgotten = (relayed || share.sent[rank] != share.bytes) && forget_sent(share);
    if (share.sent[rank] == share.bytes) end(place, rank);
    if (relayed && forgotten) host_.results_for(root);
    return true;
  }
  return false;
}

// From the caller's memory, to a rank that has opened the operation or will; the beginning of it where it has not yet.
bool ShareOwner::next_local(Place place, uint32_t rank, OutFrame* frame) {
  OwnedShare& share = place->second;
  if (!share.opened[self_]) return false;
  const uint64_t at = share.sent[rank], all = share.sends[rank].count * bytes_of(share.shape.dtype);
  const bool opened = share.opened[rank];
  if (!opened) {
    // Of one operation at a time; ranks open one after the other.
    const bool first = place == operations_.begin() || std::prev(place)->second.opened[rank];
    if (!first || all == 0 || at + chunk_ > kEagerBytes || !host_.sends_eagerly(rank)) return false;
  }
  if (all == 0) {
    *frame = {frame_of(FrameKind::result, place->first, 0, 0), nullptr, {}};
    end(place, rank);
    return true;
  }
  if (at == all) return false;
  if (share.reads[rank]) {
    exposure_.expose(place->first, share, rank, share.sends[rank].at + at, std::min(kExposedBytes, all - at), frame);
    return true;
  }
  if (!may_send(place->first, share, rank)) {
    if (opened) probe_.hold_up();
    return false;
  }
  const uint64_t bytes = std::min(chunk_, all - at);
  *frame = {frame_of(FrameKind::result, place->first, at, bytes), share.sends[rank].at + at, {}};
  share.sent[rank] += bytes;
  under_way_ += bytes;
  if (opened) probe_.sent(place->first, rank, share.sent[rank], taken_);
  return true;
}

// The window over all that is under way, of which every rank that the operation is for has its part, opened or not: one
// that opens last finds it free, while the others' data are in flight. And within an operation all ranks move on
// together, so that none is served last, in both directions: numbers that run ahead fill the queue in which reports of
// what is received wait, and the links' two directions take turns.
bool ShareOwner::may_send(uint64_t operation, const OwnedShare& share, uint32_t rank) const {
  const uint64_t window = host_.window()->bytes();
  if (under_way_ != 0 && under_way_ + chunk_ > window) return false;
  double least = host_.received(operation), all = 0;
  for (uint32_t other = 0; other < world_; ++other) {
    if (other == self_ || share.sends[other].count == 0 || share.reads[other]) continue;
    const auto wanted = static_cast<double>(share.sends[other].count * bytes_of(share.shape.dtype));
    all += wanted;
    if (share.opened[other]) least = std::min(least, static_cast<double>(share.received[other]) / wanted);
  }
  const auto bytes = static_cast<double>(share.sends[rank].count * bytes_of(share.shape.dtype));
  const double until = (least + static_cast<double>(window) / all) * bytes;
  return static_cast<double>(share.sent[rank]) <= until;
}

void ShareOwner::took_taken(uint32_t rank, const WireHeader& taken) {
  const auto place = operations_.find(taken.operation);
  if (place != operations_.end() && place->second.shows_results() && place->second.reads[rank] &&
      taken.offset > place->second.taken[rank] && taken.offset <= place->second.sent[rank]) {
    place->second.taken[rank] = taken.offset;
    if (taken.offset == place->second.bytes) end(place, rank);
    return;
  }
  if (place == operations_.end() || !place->second.shape.direct() || !place->second.opened[rank] ||
      taken.offset <= place->second.received[rank] || taken.offset > place->second.sent[rank]) {
    fail(ErrorKind::frame, "it took ", taken.offset, " bytes of operation ", taken.operation, ", which were not sent");
  }
  OwnedShare& share = place->second;
  const uint64_t bytes = taken.offset - share.received[rank];
  share.received[rank] = taken.offset;
  if (share.reads[rank]) {
    if (taken.offset == share.wanted[rank]) end(place, rank);
    return;
  }
  under_way_ -= bytes;
  taken_ += bytes;
  probe_.returned(taken.operation, rank, taken.offset, taken_, host_.window());
  if (taken.offset == share.wanted[rank]) end(place, rank);
  for (uint32_t i = 1; i < world_; ++i) host_.results_for((self_ + i) % world_);
}

void ShareOwner::took_unreadable(uint32_t rank, const WireHeader& unreadable) {
  const auto place = operations_.find(unreadable.operation);
  ShareExposure::took_unreadable(place == operations_.end() ? nullptr : &place->second, rank, unreadable);
  host_.results_for(rank);
}

// Drops results that every rank has taken. True when there were some.
bool ShareOwner::forget_sent(OwnedShare& share) {
  const uint64_t bytes = share.forget_sent(chunk_);
  if (share.relayed()) held_[share.shape.root] -= bytes;
  return bytes != 0;
}

void ShareOwner::end(Place place, uint32_t rank) {
  OwnedShare& share = place->second;
  share.ended[rank] = true;
  ++share.end_count;
  const bool direct = share.shape.direct(), served = direct || share.shows_results();
  if (share.end_count + direct < world_) return;
  ++done_;
  const uint64_t number = place->first;
  operations_.erase(place);
  if (served) host_.served(number);
}

// --- whom it waits for ----------------------------------------------------------------------------------------------

std::vector<uint32_t> ShareOwner::least_advanced(uint64_t number, uint64_t* bytes, uint64_t* of) const {
  *bytes = *of = 0;
  // Ranks take one operation after the other: who is behind in an earlier one holds up this one too.
  for (const auto& [at, share] : operations_) {
    if (at > number) break;
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < world_; ++rank) most = std::max(most, share.missing(rank));
    if (most == 0) continue;  // all is there
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      if (share.missing(rank) == most) ranks.push_back(rank);
    }
    *bytes = share.bytes - std::min(most, share.bytes);
    *of = share.bytes;
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
  for (const auto& [at, share] : operations_) {
    if (share.ended[rank] || (!share.opened[rank] && share.open_count == 0)) continue;
    *number = at;
    *bytes = share.shape.direct() ? share.sent[rank] : share.received[rank];
    *of = share.bytes;
    return true;
  }
  return false;
}

// --- operations of which this rank owns no share ---------------------------------------------------------------------

const Shape* UnownedOperations::find(uint64_t operation) const {
  if (const auto found = unannounced_.find(operation); found != unannounced_.end()) return &found->second;
  const auto found = others_.find(operation);
  return found == others_.end() ? nullptr : &found->second;
}

void UnownedOperations::add(uint64_t operation, const Shape& shape) {
  if (shape.collective == Collective::one_host_broadcast) {
    unannounced_.emplace(operation, shape);  // until the root comes, however late: as many as are in flight here
    return;
  }
  others_.emplace(operation, shape);
  if (others_.size() > kMostOthers) others_.erase(others_.begin());
}

void UnownedOperations::announce(uint32_t rank, uint64_t operation, const Shape& shape) {
  if (announced_.size() >= kMostAnnounced) fail(ErrorKind::frame, "it opened too many operations");
  announced_.emplace(operation, Root(rank, shape));
}

const UnownedOperations::Root* UnownedOperations::root_of(uint64_t operation) const {
  const auto found = announced_.find(operation);
  return found == announced_.end() ? nullptr : &found->second;
}

std::optional<UnownedOperations::Root> UnownedOperations::take_root(uint64_t operation) {
  const auto found = announced_.find(operation);
  if (found == announced_.end()) return std::nullopt;
  Root root = std::move(found->second);
  announced_.erase(found);
  return root;
}

}  // namespace geartrain
