// Memory regions: memory that one side exposes to the other for one-sided reads, or writes: handles, locking while the
// memory is accessed, and access to another process's memory (cross-memory attach, Linux's process_vm_readv).
//
// A handle is a few bytes that travel in any message. Its holder may use the region over the connection that it was
// exposed on, and over no other; its id is 128 random bits. Every access goes through the region: use() checks
// bounds under a lock, and close() waits for that lock, so that after close() the memory is not accessed.
//
// The stamp. A reader that accesses the owner's memory directly reads the stamp, the data and the
// stamp again. The stamp holds the id while the region is open and zeros afterwards: data between two good ones was
// read while the region was open. A process that reuses the owner's pid does not have the stamp either. No process
// writes into another's memory this way: a writer sends a request, and the owner reads from the writer (sideband.h).
//
// Regions are closed with their connection, when this side closes it or notices its end: what the peer's process can
// still reach is not the connection's any more.
//
// Threads: any. A forked child's copies are closed.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/errors.h"
#include "base/lifetime.h"

namespace geartrain {

using ExposedId = std::array<uint8_t, 16>;

struct RegionHandle {
  char magic[8];
  ExposedId id;
  uint64_t bytes;
  uint64_t stamp;  // addresses of the stamp and the memory in the owner's address space
  uint64_t data;
  uint32_t writable;
  uint32_t reserved;  // zero

  // From untrusted bytes. Throws argument.
  static RegionHandle parse(std::span<const std::byte> bytes);
};
static_assert(sizeof(RegionHandle) == 56);

class ExposedRegion {
 public:
  // The memory must outlive the region, or its close().
  ExposedRegion(std::span<std::byte> memory, bool writable);
  ~ExposedRegion() { close(); }
  ExposedRegion(const ExposedRegion&) = delete;
  ExposedRegion& operator=(const ExposedRegion&) = delete;

  RegionHandle handle() const;
  const ExposedId& id() const { return id_; }
  uint64_t bytes() const { return memory_.size(); }
  bool writable() const { return writable_; }
  // The memory is not accessed once this has returned; waits for a piece that is being copied. Idempotent.
  void close();
  bool closed() const;

  // Calls use(its bytes from offset) under the lock; keep it short. False when it is closed or has no such bytes.
  template <typename Use>
  bool use(uint64_t offset, uint64_t bytes, Use&& use) {
    std::lock_guard lock(mutex_);
    if (closed_ || offset > memory_.size() || bytes > memory_.size() - offset) return false;
    use(memory_.subspan(offset, bytes));
    return true;
  }

 private:
  const std::span<std::byte> memory_;
  const bool writable_;
  const Owned owned_;
  ExposedId id_;
  ExposedId stamp_;  // read by other processes
  mutable std::mutex mutex_;
  bool closed_ = false;
};

// The regions that one end of a connection has exposed.
class ExposedRegions {
 public:
  std::shared_ptr<ExposedRegion> add(std::span<std::byte> memory, bool writable);
  // At the connection's end: closes them all, and those that are added later.
  void close();
  std::shared_ptr<ExposedRegion> find(const ExposedId& id) const;  // null when there is none, or it was destroyed

 private:
  mutable std::mutex mutex_;
  std::map<ExposedId, std::weak_ptr<ExposedRegion>> open_;
  size_t sweep_at_ = 64;
  bool closed_ = false;
};

// Result of an access.
enum class Access : uint32_t { ok = 0, closed, beyond, read_only, out_of_reach };
constexpr uint32_t kAccessCount = 5;
// Throws for all but ok: region, and not_viable when out of reach.
void check_access(Access access);
// Checks against the handle itself, before any request.
Access allowed(const RegionHandle& handle, uint64_t offset, uint64_t bytes, bool writing);

// Copies from another process's region. `out_of_reach` when access is denied, or the process has ended.
Access read_across(pid_t owner, const RegionHandle& handle, uint64_t offset, std::span<std::byte> into);
// Plain memory of another process; 0, or the error's number.
int peek(pid_t owner, uint64_t address, std::span<std::byte> into);

}  // namespace geartrain
