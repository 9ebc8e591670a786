// Memory that one side lets the other read, or write, without a message: what a handle says, what holds while the
// memory is used, and the way into another process's memory (cross-memory attach, Linux's process_vm_readv).
//
// A handle is a few bytes that travel in any message. Who has it may use the region over the connection that it was
// exposed on, and over no other; its id is 128 random bits. Nothing is done without the region's leave: use() looks at
// bounds under a lock, and close() waits for that lock, so that after close() nobody touches the memory.
//
// The stamp. A reader that goes into the owner's memory by itself asks nobody, so it reads the stamp, the data and the
// stamp again. The stamp holds the id while the region is open and zeros afterwards: data between two good ones was
// read while the region was open. A process that got the owner's number later does not have the stamp either. Nobody
// writes into another's memory this way: a writer asks, and the owner reads from the writer (sideband.h).
//
// Threads: any. A forked child's copies stand for nothing.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/descriptor.h"
#include "base/errors.h"

namespace geartrain {

using ExposedId = std::array<uint8_t, 16>;

struct RegionHandle {
  char magic[8];
  ExposedId id;
  uint64_t bytes;
  uint64_t stamp;  // where the stamp and the memory stand in the owner's address space
  uint64_t data;
  uint32_t writable;
  uint32_t reserved;  // zero

  // From bytes that anyone may have sent. Throws schema.
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
  // Nobody uses the memory once this has returned; waits for a piece that is being copied. Idempotent.
  void close();
  bool closed() const;

  // use(its bytes from offset) while it cannot be closed; keep it short. False when it is closed or has no such bytes.
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
  const uint64_t forks_ = forks();
  ExposedId id_;
  ExposedId stamp_;  // read by other processes
  mutable std::mutex mutex_;
  bool closed_ = false;
};

// What one end of a connection has exposed.
class ExposedRegions {
 public:
  std::shared_ptr<ExposedRegion> add(std::span<std::byte> memory, bool writable);
  std::shared_ptr<ExposedRegion> find(const ExposedId& id) const;  // null when there is none, or it is gone

 private:
  mutable std::mutex mutex_;
  std::map<ExposedId, std::weak_ptr<ExposedRegion>> open_;
  size_t sweep_at_ = 64;
};

// How an access ended.
enum class Access : uint32_t { ok = 0, closed, beyond, read_only, out_of_reach };
constexpr uint32_t kAccessCount = 5;
// Throws for all but ok: region, and not_viable when out of reach.
void check_access(Access access);
// What the handle itself forbids, before anybody is asked.
Access allowed(const RegionHandle& handle, uint64_t offset, uint64_t bytes, bool writing);

// Copies from another process's region. `out_of_reach` when this process may not look there, or it is gone.
Access read_across(pid_t owner, const RegionHandle& handle, uint64_t offset, std::span<std::byte> into);
// Plain memory of another process; 0, or the error's number.
int peek(pid_t owner, uint64_t address, std::span<std::byte> into);

}  // namespace geartrain
