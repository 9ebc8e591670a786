#include "collectives/sharded_allreduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace geartrain {
namespace {

constexpr uint64_t kLeastWindow = 256 << 10;

// The owner of a small array, by rotation among the members that have a share.
size_t whole_owner(std::span<const double> shares, uint64_t operation) {
  uint64_t turn = operation % owners_of(shares);
  size_t owner = 0;
  for (;; ++owner) {
    if (shares[owner] > 0 && turn-- == 0) return owner;
  }
}

}  // namespace

std::vector<uint64_t> divide_array(uint64_t count, Dtype wire, std::span<const double> shares, uint64_t operation) {
  std::vector<uint64_t> starts(shares.size() + 1, count);
  if (count * bytes_of(wire) <= kWholeBytes) {
    std::fill_n(starts.begin(), whole_owner(shares, operation) + 1, 0);
    return starts;
  }
  double sum = 0;
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  starts[0] = 0;
  size_t last = shares.size() - 1;
  while (shares[last] <= 0) --last;
  for (size_t owner = 0; owner < last; ++owner) {
    sum += shares[owner];
    const double at = sum / total * static_cast<double>(count / kGrain);
    const auto grains = static_cast<uint64_t>(std::llround(at));
    starts[owner + 1] = shares[owner] <= 0 ? starts[owner] : std::min(count, grains * kGrain);
  }
  return starts;
}

ShardedAllreduce::ShardedAllreduce(ChunkBufferPool& blocks, Host& host, std::vector<double> shares, uint32_t self,
                                   uint64_t window_bytes)
    : blocks_(blocks),
      host_(host),
      shares_(std::move(shares)),
      self_(self),
      chunk_(chunk_bytes(owners_of(shares_))),
      // Every owner gets a turn of two chunks at least.
      window_(std::max<uint64_t>(kLeastWindow, 2 * chunk_ * owners_of(shares_)), window_bytes),
      eager_(shares_.size()),
      kept_(shares_.size()),
      lost_until_(shares_.size()),
      staging_(shares_.size()),
      unsent_(shares_.size()) {
  for (uint32_t owner = 0; owner < shares_.size(); ++owner) {
    if (shares_[owner] > 0 && owner != self_) others_.push_back(owner);
  }
}

ShardedAllreduce::Own ShardedAllreduce::begin(const std::shared_ptr<Work>& work, bool exposed) {
  const Shape& shape = work->shape;
  Operation& operation = operations_.emplace_back();
  operation.work = work;
  operation.number = work->number;
  operation.exposed = exposed;
  begun_ = work->number + 1;
  operation.base = stream_;
  operation.parts.resize(shares_.size());
  const auto size = static_cast<uint32_t>(shares_.size());
  switch (shape.collective) {
    case Collective::all_reduce:
    case Collective::broadcast:
      divide(&operation);
      break;
    case Collective::reduce_scatter:
      for (uint32_t owner = 0; owner < size; ++owner) {
        const Segment& sent = work->sends[owner];
        operation.parts[owner] = {.from = sent.at, .bytes = sent.count * bytes_of(shape.dtype), .used = true};
        operation.bytes += operation.parts[owner].bytes;
      }
      operation.parts[self_].to = work->out;
      operation.parts[self_].back = operation.parts[self_].bytes;
      break;
    case Collective::one_host_broadcast:
      operation.parts[shape.root] = {.to = work->out, .back = shape.wire_bytes(), .used = true};
      break;
    case Collective::all_gather:
    case Collective::all_to_all: {
      for (uint32_t owner = 0; owner < size; ++owner) {
        const Segment& received = work->receives[owner];
        operation.parts[owner] = {.to = received.at, .back = received.count * bytes_of(shape.dtype), .used = true};
      }
      const Segment& own = work->sends[work->sends.size() == 1 ? 0 : self_];
      if (own.count != 0 && own.at != operation.parts[self_].to) {
        std::memcpy(operation.parts[self_].to, own.at, own.count * bytes_of(shape.dtype));
      }
      break;
    }
  }
  stream_ += operation.bytes;
  for (const Part& part : operation.parts) operation.left += part.used;
  for (uint32_t owner = 0; owner < size; ++owner) {
    if (operation.number < lost_until_[owner]) detach(operation, owner);
  }
  if (self_ >= shares_.size() || !operation.parts[self_].used) return {};
  const Part& own = operation.parts[self_];
  operation.serving = exposed && shape.collective == Collective::all_reduce && own.bytes != 0;
  operation.left += operation.serving;
  return {true, own.from, own.to, std::max(own.bytes, own.back)};
}

// The shares of an array that has one place on every rank.
void ShardedAllreduce::divide(Operation* operation) const {
  const Work& work = *operation->work;
  const Shape& shape = work.shape;
  const bool relayed = shape.collective == Collective::broadcast;
  const bool sends = !relayed || shape.root == self_, receives = !relayed || shape.root != self_;
  // The root sends every byte once, and all others pass on what they get.
  std::vector<double> shares = shares_;
  if (relayed) {
    std::fill(shares.begin(), shares.end(), 1.0);
    shares[shape.root] = 0;
  }
  const std::vector<uint64_t> starts = divide_array(shape.count, shape.wire, shares, work.number);
  operation->bytes = sends ? shape.wire_bytes() : 0;
  const bool whole = shape.wire_bytes() <= kWholeBytes;
  for (size_t owner = 0; owner < shares.size(); ++owner) {
    Part& part = operation->parts[owner];
    const uint64_t bytes = (starts[owner + 1] - starts[owner]) * bytes_of(shape.wire);
    part.from = work.in + starts[owner] * bytes_of(shape.dtype);
    part.to = work.out + starts[owner] * bytes_of(shape.dtype);
    part.bytes = sends ? bytes : 0;
    part.back = receives ? bytes : 0;
    // Every member with a share receives the open of every array that is divided, so that any disagreement is detected.
    part.used = whole ? owner == whole_owner(shares, work.number) : shares[owner] > 0;
  }
}

void ShardedAllreduce::start() {
  for (uint32_t owner = 0; owner < lost_until_.size(); ++owner) {
    if (lost_until_[owner] != 0) end_empty(owner);
  }
  first_turn_ = true;
  ask_all();
  first_turn_ = false;
  ask_all();
}

void ShardedAllreduce::ask_all() {
  for (size_t i = 0; i < others_.size(); ++i) host_.parts_for(others_[(self_ + i) % others_.size()]);
}

// --- the window -----------------------------------------------------------------------------------------------------

// The part of the stream that has come back, by the share that is furthest behind.
uint64_t ShardedAllreduce::returned() const {
  if (operations_.empty()) return stream_;
  const Operation& oldest = operations_.front();
  double least = 1;
  for (const Part& part : oldest.parts) {
    if (part.bytes != 0 && !part.lost)
      least = std::min(least, static_cast<double>(part.got) / static_cast<double>(part.bytes));
  }
  return oldest.base + static_cast<uint64_t>(least * static_cast<double>(oldest.bytes));
}

// How much of a part may have been sent by now.
uint64_t ShardedAllreduce::limit(const Operation& operation, const Part& part) const {
  if (part.bytes == 0) return 0;
  if (stream_ - operations_.front().base <= window_.bytes()) return part.bytes;  // all that there is
  const uint64_t until = returned() + window_.bytes();
  if (until <= operation.base) return 0;
  if (until >= operation.base + operation.bytes) return part.bytes;
  const double fraction = static_cast<double>(until - operation.base) / static_cast<double>(operation.bytes);
  const auto bytes = static_cast<uint64_t>(fraction * static_cast<double>(part.bytes));
  // Whole chunks: the owner reduces nothing less.
  return std::min(part.bytes, (bytes / chunk_ + 1) * chunk_);
}

// --- sending --------------------------------------------------------------------------------------------------------

// An owner is told of the operation. Its numbers may be exposed there instead of sent.
void ShardedAllreduce::open(uint32_t owner, Operation& operation) {
  Part& part = operation.parts[owner];
  const Shape& shape = operation.work->shape;
  Open what = open_of(shape, std::max(part.bytes, part.back));
  what.reads = shape.direct() || operation.exposed;
  part.exposed = operation.exposed && part.bytes != 0 && host_.exposes_to(owner);
  if (part.exposed) {
    what.address = reinterpret_cast<uintptr_t>(part.from);
    part.sent = part.bytes;
  }
  host_.open(owner, operation.number, what);
  part.opened = true;
  if (eager_[owner].of(operation.number)) host_.adopt_soon();
}

void ShardedAllreduce::announce(uint32_t owner) {
  if (operations_.empty()) return;
  const uint64_t oldest = operations_.front().number;
  size_t& first = unsent_[owner];
  for (first = std::max<size_t>(first, oldest); first - oldest < operations_.size(); ++first) {
    Operation& operation = operations_[first - oldest];
    const Part& part = operation.parts[owner];
    if (part.used && part.sent != part.bytes) return;
    if (part.used && !part.opened) open(owner, operation);
  }
}

bool ShardedAllreduce::next(uint32_t owner, OutFrame* frame) {
  if (operations_.empty()) return false;
  const uint64_t oldest = operations_.front().number;
  size_t& first = unsent_[owner];
  for (first = std::max<size_t>(first, oldest); first - oldest < operations_.size(); ++first) {
    Operation& operation = operations_[first - oldest];
    Part& part = operation.parts[owner];
    if (!part.used || (part.opened && part.sent == part.bytes)) continue;
    const uint64_t allowed = limit(operation, part);
    const Shape& shape = operation.work->shape;
    if (!part.opened) {
      if (allowed == 0 && part.bytes != 0) {
        probe_.hold_up();
        return false;
      }
      open(owner, operation);
      if (part.sent == part.bytes) continue;
    }
    if (part.sent >= allowed) {
      probe_.hold_up();
      return false;
    }
    if (first_turn_ && part.sent != 0) return false;
    const uint64_t most = first_turn_ && part.bytes > chunk_ ? kFirstBytes : chunk_ - part.sent % chunk_;
    const uint64_t bytes = std::min(most, part.bytes - part.sent);
    frame->header = frame_of(FrameKind::part, operation.number, part.sent, bytes);
    frame->data = part.from + part.sent / bytes_of(shape.wire) * bytes_of(shape.dtype);
    if (shape.wire != shape.dtype) {
      frame->hold = ChunkBufferRef(blocks_);
      convert(shape.dtype, frame->data, shape.wire, frame->hold.data(), bytes / bytes_of(shape.wire));
      frame->data = frame->hold.data();
    }
    part.sent += bytes;
    probe_.sent(operation.number, owner, part.sent, delivered_);
    return true;
  }
  return false;
}

// --- receiving ------------------------------------------------------------------------------------------------------

ShardedAllreduce::Operation* ShardedAllreduce::find(uint64_t number) {
  if (operations_.empty() || number < operations_.front().number) return nullptr;
  const uint64_t at = number - operations_.front().number;
  return at < operations_.size() ? &operations_[at] : nullptr;
}

bool ShardedAllreduce::early(uint32_t owner, const WireHeader& result) const {
  if (shares_[owner] <= 0) return false;
  const Operation* const operation = find(result.operation);
  return operation == nullptr ? result.operation >= begun_
                              : operation->work->shape.direct() && !operation->parts[owner].opened;
}

void ShardedAllreduce::adopt_all() {
  for (uint32_t owner = 0; owner < eager_.size(); ++owner) adopt(owner);
}

void ShardedAllreduce::adopt(uint32_t owner) {
  EagerResults& eager = eager_[owner];
  Operation* const operation = eager.bytes() == 0 || eager.arriving() ? nullptr : find(eager.operation());
  if (operation == nullptr || !operation->parts[owner].opened) return;
  const Part& part = operation->parts[owner];
  const Shape& shape = operation->work->shape;
  const uint64_t bytes = eager.bytes();
  if (!shape.direct() || part.got != 0 || bytes > part.back || bytes % bytes_of(shape.dtype) != 0) {
    return eager.clear();  // the owner has something else there: it will find that ranks disagree
  }
  eager.copy(part.to);
  eager.clear();
  host_.taken(owner, operation->number, bytes);
  gained(*operation, owner, bytes);
}

std::span<std::byte> ShardedAllreduce::room(uint32_t owner, const WireHeader& result) {
  adopt(owner);
  if (early(owner, result)) return eager_[owner].room(blocks_, result);
  Operation* const operation = find(result.operation);
  if (operation == nullptr || !operation->parts[owner].opened || operation->parts[owner].done) {
    fail(ErrorKind::frame, "it sent a result of operation ", result.operation, ", which is not expected");
  }
  const Part& part = operation->parts[owner];
  const Shape& shape = operation->work->shape;
  const uint64_t most = part.back == 0 ? 0 : (part.bytes == 0 ? part.back : part.sent) - part.got;
  if (result.offset != part.got || result.bytes > most || (result.bytes == 0 && (part.bytes | part.back) != 0) ||
      result.bytes % bytes_of(shape.wire) != 0) {
    fail(ErrorKind::frame, "it sent ", result.bytes, " bytes of a result at ", result.offset, ", where ", part.got,
         " was next");
  }
  if (kept_[owner] != nullptr) return kept_[owner]->room(result.bytes);
  if (shape.wire != shape.dtype) {
    ChunkBufferRef& staging = staging_[owner];
    if (!staging) staging = ChunkBufferRef(blocks_);
    return {staging.data(), result.bytes};
  }
  return {part.to + part.got, result.bytes};
}

std::span<std::byte> ShardedAllreduce::exposed_room(uint32_t owner, const WireHeader& result) {
  const Operation* const operation = find(result.operation);
  if (operation == nullptr || (!operation->work->shape.direct() && !operation->exposed)) {
    fail(ErrorKind::frame, "it exposes a result of operation ", result.operation, ", which it has to send");
  }
  return room(owner, result);
}

void ShardedAllreduce::decline(uint32_t owner, const WireHeader& exposed) {
  Operation* const operation = find(exposed.operation);
  if (operation == nullptr || (!operation->work->shape.direct() && !operation->exposed) ||
      !operation->parts[owner].opened || operation->parts[owner].done ||
      exposed.offset != operation->parts[owner].got) {
    fail(ErrorKind::frame, "it exposes a result of operation ", exposed.operation, ", which is not expected");
  }
  operation->parts[owner].declined = true;
  host_.unreadable(owner, exposed.operation, exposed.offset);
}

bool ShardedAllreduce::declined(uint32_t owner, uint64_t number) {
  const Operation* const operation = find(number);
  return operation != nullptr && operation->parts[owner].declined;
}

void ShardedAllreduce::took(uint32_t owner, const WireHeader& result, std::span<std::byte> payload, bool exposed) {
  if (eager_[owner].arriving()) {
    eager_[owner].took(result);
    return adopt(owner);
  }
  Operation& operation = *find(result.operation);
  const Shape& shape = operation.work->shape;
  if (kept_[owner] != nullptr) kept_[owner]->took(payload.size());
  if (shape.wire != shape.dtype || kept_[owner] != nullptr) {
    std::byte* const to = operation.parts[owner].to + result.offset / bytes_of(shape.wire) * bytes_of(shape.dtype);
    convert(shape.wire, payload.data(), shape.dtype, to, payload.size() / bytes_of(shape.wire));
  }
  if ((shape.direct() || exposed) && !payload.empty())
    host_.taken(owner, result.operation, result.offset + payload.size());
  gained(operation, owner, payload.size());
}

void ShardedAllreduce::deliver(uint64_t number, uint64_t offset, std::span<const std::byte> result) {
  Operation& operation = *find(number);
  const Shape& shape = operation.work->shape;
  std::byte* const to = operation.parts[self_].to + offset / bytes_of(shape.wire) * bytes_of(shape.dtype);
  {
    const StageClock::Scope scope(host_.stages(), Stage::deliver);
    convert(shape.wire, result.data(), shape.dtype, to, result.size() / bytes_of(shape.wire));
  }
  gained(operation, self_, result.size());
}

void ShardedAllreduce::took_unreadable_part(uint32_t owner, const WireHeader& unreadable) {
  Operation* const operation = find(unreadable.operation);
  Part* const part = operation == nullptr || owner >= operation->parts.size() ? nullptr : &operation->parts[owner];
  // Results may be on the way for what is before.
  if (part == nullptr || !part->exposed || part->done || unreadable.offset < part->got ||
      unreadable.offset >= part->bytes || unreadable.offset % chunk_ != 0) {
    fail(ErrorKind::frame, "it cannot read operation ", unreadable.operation, " from ", unreadable.offset,
         " on, which was not exposed to it");
  }
  part->exposed = false;
  part->sent = unreadable.offset;
  unsent_[owner] = std::min<size_t>(unsent_[owner], operation->number);
  host_.parts_for(owner);
}

void ShardedAllreduce::took_credit(uint32_t owner, const WireHeader& credit) {
  Operation* const operation = find(credit.operation);
  if (operation == nullptr || owner >= operation->parts.size() || operation->parts[owner].done ||
      operation->parts[owner].back != 0 || credit.offset <= operation->parts[owner].got ||
      credit.offset > operation->parts[owner].sent) {
    fail(ErrorKind::frame, "it sent a credit of operation ", credit.operation, ", which is not expected");
  }
  gained(*operation, owner, credit.offset - operation->parts[owner].got);
}

void ShardedAllreduce::served(uint64_t number) {
  Operation& operation = *find(number);
  if (operation.work->shape.direct()) return done(operation, operation.parts[self_]);
  operation.serving = false;
  release(operation);
}

void ShardedAllreduce::gained(Operation& operation, uint32_t owner, uint64_t bytes) {
  Part& part = operation.parts[owner];
  part.got += bytes;
  delivered_ += bytes;
  probe_.returned(operation.number, owner, part.got, delivered_, &window_);
  if (part.got == std::max(part.bytes, part.back)) done(operation, part);
  // Only where the window has moved may there be something for the owners: it waits for the share furthest behind.
  if (const uint64_t until = returned() + window_.bytes(); until != asked_until_) {
    asked_until_ = until;
    ask_all();
  }
}

void ShardedAllreduce::done(Operation& operation, Part& part) {
  part.done = true;
  release(operation);
}

void ShardedAllreduce::release(Operation& operation) {
  if (--operation.left != 0) return;
  const std::shared_ptr<Work> work = std::move(operation.work);
  while (!operations_.empty() && operations_.front().left == 0) operations_.pop_front();
  host_.completed(work);
}

double ShardedAllreduce::received(uint64_t number) const {
  const Operation* const operation = find(number);
  if (operation == nullptr) return 1;
  double least = 1;
  for (uint32_t owner = 0; owner < operation->parts.size(); ++owner) {
    const Part& part = operation->parts[owner];
    if (owner == self_ || part.back == 0) continue;
    least = std::min(least, static_cast<double>(part.got) / static_cast<double>(part.back));
  }
  return least;
}

std::vector<uint32_t> ShardedAllreduce::incomplete(uint64_t number) const {
  std::vector<uint32_t> owners;
  for (const Operation& operation : operations_) {
    if (operation.number != number) continue;
    for (uint32_t owner = 0; owner < shares_.size(); ++owner) {
      const bool serving = owner == self_ && operation.serving;
      if (operation.parts[owner].used && (serving || !operation.parts[owner].done)) owners.push_back(owner);
    }
  }
  return owners;
}

bool ShardedAllreduce::owes(uint32_t owner, uint64_t* number, uint64_t* bytes, uint64_t* of) const {
  for (const Operation& operation : operations_) {
    const Part& part = operation.parts[owner];
    if (!part.used || part.done || part.lost || operation.left == 0) continue;
    *number = operation.number;
    *bytes = part.got;
    *of = std::max(part.bytes, part.back);
    return true;
  }
  return false;
}

// --- owners that are lost, while the group goes on (takeover.h) ------------------------------------------------------

void ShardedAllreduce::lose(uint32_t owner) {
  lost_until_[owner] = ~uint64_t{0};
  probe_.forget(owner);
  eager_[owner] = EagerResults();  // one that was cut off
  for (Operation& operation : operations_) {
    if (operation.left != 0) detach(operation, owner);
  }
  end_empty(owner);
  ask_all();  // nobody waits for its share at the others any more
}

void ShardedAllreduce::regain(uint32_t owner, uint64_t first) {
  lost_until_[owner] = first;
  kept_[owner]->reset();
}

void ShardedAllreduce::detach(Operation& operation, uint32_t owner) {
  Part& part = operation.parts[owner];
  if (!part.used || part.done) return;
  part.opened = part.lost = true;
  part.sent = part.bytes;
}

// Empty shares are not waited for: their owner would only have compared what ranks ask for.
void ShardedAllreduce::end_empty(uint32_t owner) {
  for (uint64_t number = completed(); number < begun_; ++number) {
    Operation* const operation = find(number);
    if (operation == nullptr || operation->left == 0) continue;
    Part& part = operation->parts[owner];
    if (part.lost && !part.done && part.bytes == 0) done(*operation, part);
  }
}

bool ShardedAllreduce::restore(uint32_t owner, uint64_t first, std::span<const std::byte> results) {
  for (uint64_t number = std::max(first, completed()); number < begun_ && !results.empty(); ++number) {
    Operation* const operation = find(number);
    if (operation == nullptr || operation->left == 0) continue;
    Part& part = operation->parts[owner];
    if (!part.lost || part.done) continue;
    const Shape& shape = operation->work->shape;
    const uint64_t bytes = std::min<uint64_t>(part.bytes - part.got, results.size());
    convert(shape.wire, results.data(), shape.dtype, part.to + part.got / bytes_of(shape.wire) * bytes_of(shape.dtype),
            bytes / bytes_of(shape.wire));
    results = results.subspan(bytes);
    gained(*operation, owner, bytes);
  }
  return results.empty();
}

std::optional<ShardedAllreduce::Rest> ShardedAllreduce::rest(uint32_t owner, uint64_t first) const {
  for (uint64_t number = std::max(first, completed()); number < begun_; ++number) {
    const Operation* const operation = find(number);
    if (operation == nullptr || operation->left == 0) continue;
    const Part& part = operation->parts[owner];
    if (!part.lost || part.done) continue;
    const Shape& whole = operation->work->shape;
    const uint64_t done = part.got / bytes_of(whole.wire);
    Rest rest{number, whole, part.from + done * bytes_of(whole.dtype), part.to + done * bytes_of(whole.dtype)};
    rest.shape.count = part.bytes / bytes_of(whole.wire) - done;
    return rest;
  }
  return std::nullopt;
}

void ShardedAllreduce::repaired(uint32_t owner, uint64_t number) {
  Operation& operation = *find(number);
  gained(operation, owner, operation.parts[owner].bytes - operation.parts[owner].got);
}

}  // namespace geartrain
