#include "transport/sideband/memory_region.h"

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/sha256.h"
#include "base/threads.h"

namespace geartrain {
namespace {

constexpr char kRegionMagic[8] = {'G', 'E', 'A', 'R', 'R', 'E', 'G', '\n'};
constexpr uint64_t kCopyPiece = uint64_t{4} << 20;

Access read_piece(pid_t owner, const RegionHandle& handle, uint64_t offset, std::span<std::byte> into) {
  ExposedId before{}, after{};
  const auto at = [](uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); };
  const struct iovec mine[3] = {
      {before.data(), before.size()}, {into.data(), into.size()}, {after.data(), after.size()}};
  const struct iovec theirs[3] = {
      {at(handle.stamp), before.size()}, {at(handle.data + offset), into.size()}, {at(handle.stamp), after.size()}};
  const ssize_t got = ::process_vm_readv(owner, mine, 3, theirs, 3, 0);
  if (got < 0) return errno == EFAULT ? Access::closed : Access::out_of_reach;  // a stamp that is unmapped is invalid
  const bool whole = static_cast<uint64_t>(got) == into.size() + before.size() + after.size();
  return whole && before == handle.id && after == handle.id ? Access::ok : Access::closed;
}

}  // namespace

RegionHandle RegionHandle::parse(std::span<const std::byte> bytes) {
  RegionHandle handle{};
  if (bytes.size() == sizeof handle) std::memcpy(&handle, bytes.data(), sizeof handle);
  if (std::memcmp(handle.magic, kRegionMagic, sizeof handle.magic) != 0 || handle.reserved != 0) {
    fail(ErrorKind::argument, "not a region's handle: ", bytes.size(), " bytes");
  }
  return handle;
}

ExposedRegion::ExposedRegion(std::span<std::byte> memory, bool writable) : memory_(memory), writable_(writable) {
  random_bytes(id_);
  stamp_ = id_;
}

RegionHandle ExposedRegion::handle() const {
  RegionHandle handle{};
  std::memcpy(handle.magic, kRegionMagic, sizeof handle.magic);
  handle.id = id_;
  handle.bytes = memory_.size();
  handle.stamp = reinterpret_cast<uintptr_t>(stamp_.data());
  handle.data = reinterpret_cast<uintptr_t>(memory_.data());
  handle.writable = writable_;
  return handle;
}

void ExposedRegion::close() {
  if (owned_.forked()) return;  // the lock may be held by a thread that this process does not have
  std::lock_guard lock(mutex_);
  closed_ = true;
  auto* stamp =
      const_cast<volatile uint8_t*>(stamp_.data());  // other processes read it: the store must not be optimised away
  for (size_t i = 0; i < stamp_.size(); ++i) stamp[i] = 0;
}

bool ExposedRegion::closed() const {
  if (owned_.forked()) return true;
  std::lock_guard lock(mutex_);
  return closed_;
}

std::shared_ptr<ExposedRegion> ExposedRegions::add(std::span<std::byte> memory, bool writable) {
  auto region = std::make_shared<ExposedRegion>(memory, writable);
  std::lock_guard lock(mutex_);
  if (closed_) {
    region->close();
    return region;
  }
  if (open_.size() >= sweep_at_) {
    std::erase_if(open_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = 2 * open_.size() + 64;
  }
  open_[region->id()] = region;
  return region;
}

void ExposedRegions::close() {
  std::map<ExposedId, std::weak_ptr<ExposedRegion>> open;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    open.swap(open_);
  }
  for (const auto& [id, weak] : open) {
    if (const auto region = weak.lock()) region->close();
  }
}

std::shared_ptr<ExposedRegion> ExposedRegions::find(const ExposedId& id) const {
  std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  return found == open_.end() ? nullptr : found->second.lock();
}

Access allowed(const RegionHandle& handle, uint64_t offset, uint64_t bytes, bool writing) {
  if (writing && handle.writable == 0) return Access::read_only;
  return offset > handle.bytes || bytes > handle.bytes - offset ? Access::beyond : Access::ok;
}

void check_access(Access access) {
  switch (access) {
    case Access::ok:
      return;
    case Access::closed:
      fail(ErrorKind::region, "the region is closed, or was never exposed over this connection");
    case Access::beyond:
      fail(ErrorKind::region, "the region ends before the bytes asked for");
    case Access::read_only:
      fail(ErrorKind::region, "the region is for reading only: its owner must expose it with writable=True");
    case Access::out_of_reach:
      break;
  }
  fail(ErrorKind::not_viable, "the peer's memory is out of reach");
}

Access read_across(pid_t owner, const RegionHandle& handle, uint64_t offset, std::span<std::byte> into) {
  static const unsigned threads = std::min(available_cores(), 4u);
  if (into.size() < 2 * kCopyPiece) return read_piece(owner, handle, offset, into);
  std::atomic<uint32_t> worst{0};
  parallel_for(into.size(), kCopyPiece, threads, [&](size_t first, size_t last) {
    for (size_t at = first; at < last && worst.load(std::memory_order_relaxed) == 0; at += kCopyPiece) {
      const size_t bytes = std::min<size_t>(kCopyPiece, last - at);
      const Access access = read_piece(owner, handle, offset + at, into.subspan(at, bytes));
      if (access != Access::ok) worst.store(static_cast<uint32_t>(access), std::memory_order_relaxed);
    }
  });
  return static_cast<Access>(worst.load());
}

int peek(pid_t owner, uint64_t address, std::span<std::byte> into) {
  const struct iovec mine = {into.data(), into.size()};
  const struct iovec theirs = {reinterpret_cast<void*>(static_cast<uintptr_t>(address)), into.size()};
  const ssize_t got = ::process_vm_readv(owner, &mine, 1, &theirs, 1, 0);
  if (got < 0) return errno;
  return static_cast<size_t>(got) == into.size() ? 0 : EFAULT;
}

}  // namespace geartrain
