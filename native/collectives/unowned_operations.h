// Operations of which this rank owns no share: their shapes, so that a rank that opens one here by mistake is told, and
// the roots that have announced a broadcast to this rank.
//
// A root opens its broadcast when it begins it, which may be before this rank does. Whichever comes first is kept for
// the other. Of all other operations the last are kept.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "collectives/protocol.h"

namespace geartrain {

class UnownedOperations {
 public:
  using Root = std::pair<uint32_t, Shape>;  // and the shape that it has announced

  // The shape that this rank has begun it with. Null when it has not, or that is not kept any more.
  const Shape* find(uint64_t operation) const;
  // This rank has begun it.
  void add(uint64_t operation, const Shape& shape);
  // A root has announced what this rank is to begin. Throws frame when there are too many.
  void announce(uint32_t rank, uint64_t operation, const Shape& shape);
  // The root has come of what this rank has begun.
  void settle(uint64_t operation) { unannounced_.erase(operation); }
  const Root* root_of(uint64_t operation) const;
  std::optional<Root> take_root(uint64_t operation);

 private:
  std::map<uint64_t, Shape> unannounced_, others_;  // broadcasts on one host whose root is still to come, and the rest
  std::map<uint64_t, Root> announced_;
};

}  // namespace geartrain
