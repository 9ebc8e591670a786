#include "collectives/unowned_operations.h"

namespace geartrain {
namespace {

constexpr size_t kMostAnnounced = 65536;
constexpr size_t kMostOthers = 1024;

}  // namespace

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
