// Of ShardedAllreduce: what becomes of the share of an owner that is lost, while the group goes on (takeover.h).
#include <algorithm>

#include "collectives/sharded_allreduce.h"

namespace geartrain {

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
