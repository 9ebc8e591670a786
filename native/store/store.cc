// Making, joining and leaving a store, and its lock. Rows are in write.cc, priorities.cc, sample_counts.cc, evict.cc
// and lists.cc, repair in repair.cc.

#include "store/store.h"
#include "store/client_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>

#include "base/clock.h"
#include "base/errors.h"

namespace geartrain {
namespace {

// --- fork ---------------------------------------------------------------------------------------------------
//
// A child shares the parent's open files, and with them its leases: if the parent died, the kernel would
// keep its leases for the child. So the child reopens every segment's file at once, in place, and so drops them.

std::mutex open_stores_mutex;
std::vector<int>& open_store_fds() {
  static auto* fds = new std::vector<int>();
  return *fds;
}
std::atomic<uint64_t> fork_epoch{0};

void before_fork() {
  open_stores_mutex.lock();
}
void after_fork_in_parent() {
  open_stores_mutex.unlock();
}
void after_fork_in_child() {
  for (int fd : open_store_fds()) {
    char path[40];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int flags = ::fcntl(fd, F_GETFL);
    const int reopened = ::open(path, (flags & O_ACCMODE) | O_CLOEXEC);
    if (reopened >= 0) {
      ::dup3(reopened, fd, O_CLOEXEC);
      ::close(reopened);
    }
  }
  fork_epoch.fetch_add(1);
  open_stores_mutex.unlock();
}

void remember_fd(int fd) {
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
  std::lock_guard lock(open_stores_mutex);
  open_store_fds().push_back(fd);
}

void forget_fd(int fd) {
  std::lock_guard lock(open_stores_mutex);
  auto& fds = open_store_fds();
  fds.erase(std::remove(fds.begin(), fds.end(), fd), fds.end());
}

int lock_within(pthread_mutex_t* mutex, double timeout_s) {
#if defined(__SANITIZE_THREAD__)
  constexpr clockid_t kClock = CLOCK_REALTIME;  // ThreadSanitizer only knows the call that waits by this clock
#else
  constexpr clockid_t kClock = CLOCK_MONOTONIC;
#endif
  const uint64_t deadline = clock_ns(kClock) + static_cast<uint64_t>(timeout_s * 1e9);
  const struct timespec until{static_cast<time_t>(deadline / 1'000'000'000u),
                              static_cast<long>(deadline % 1'000'000'000u)};
#if defined(__SANITIZE_THREAD__)
  return ::pthread_mutex_timedlock(mutex, &until);
#else
  return ::pthread_mutex_clocklock(mutex, kClock, &until);
#endif
}

}  // namespace

Store::Store(Mapping mapping, Geometry geometry)
    : mapping_(std::make_shared<Mapping>(std::move(mapping))), geometry_(std::move(geometry)) {
  fork_epoch_ = fork_epoch.load();
  read_only_ = !mapping_->writable();
  remember_fd(mapping_->fd());
}

std::unique_ptr<Store> Store::create(const std::string& name, const std::vector<FieldSpec>& fields,
                                     const StoreOptions& options) {
  std::vector<FieldRecord> records;
  Header header = plan_segment(fields, options, &records);
  std::random_device random;
  header.store_id = static_cast<uint64_t>(random()) << 32 | random();
  header.created_ns = clock_ns(CLOCK_REALTIME);

  const std::string path = segment_path(name);
  if (::access(path.c_str(), F_OK) == 0) fail(ErrorKind::exists, path);  // before gigabytes are reserved in vain
  std::unique_ptr<Store> store(
      new Store(Mapping::create(path, header.segment_bytes, options.reserve, options.trust), {header, records}));
  store->lock_timeout_s_ = options.lock_timeout_s;
  std::memcpy(store->base() + kFieldsOffset, records.data(), records.size() * sizeof(FieldRecord));
  std::memcpy(store->base(), &header, sizeof header);
  store->bind_trees();
  Control& control = store->control();
  init_robust_mutex(&control.mutex);
  control.next_sequence = 1;
  control.free_head = control.free_tail = control.order_head = control.order_tail = kNoRow;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) store->client(slot).held = kNoRow;
  for (uint64_t row = 0; row < header.capacity; ++row) store->put_free_row(static_cast<uint32_t>(row));
  store->join();
  store->mapping_->publish();
  return store;
}

std::unique_ptr<Store> Store::attach(const std::string& name, const AttachOptions& options) {
  const std::string path = segment_path(name);
  Mapping mapping = Mapping::attach(path, !options.read_only, options.trust);
  Geometry geometry = checked_geometry(mapping.data(), mapping.bytes(), path);
  std::unique_ptr<Store> store(new Store(std::move(mapping), std::move(geometry)));
  store->lock_timeout_s_ = options.lock_timeout_s;
  store->bind_trees();
  if (options.read_only) return store;

  Gate gate(store->mapping_->fd(), options.lock_timeout_s);
  Control& control = store->control();
  if (control.closed != 0) {
    fail(ErrorKind::missing, "cannot open the segment ", path, ": its last process has just left");
  }
  if (store->live_clients() == 0) {
    const bool clean = control.clean != 0;
    if (!clean && !options.adopt) {
      fail(ErrorKind::stale_store, path, " holds ", store->committed_count(),
           " rows of a run whose processes have all ended without closing it");
    }
    const std::string damage =
        damaged_lists(control, store->clients(), store->status().data(), store->header().capacity);
    if (clean && !damage.empty() && !options.adopt) {
      fail(ErrorKind::corrupt, path, " is damaged: ", damage, ". adopt=True rebuilds its lists from its rows");
    }
    // No other client is attached and the gate keeps it so. The lock may have been held at a power cut, which no kernel
    // remembers: initialise it anew, then rebuild from the authoritative state.
    init_robust_mutex(&control.mutex);
    control.rebuilding.store(damage.empty() ? 0 : 1);  // before the lists of the dead are walked
    control.clean = 0;
    store->join();
    if (!clean) store->rebuild();
  } else {
    const std::string damage = is_robust_mutex(control.mutex)
                                   ? damaged_ends(control, store->clients(), store->header().capacity)
                                   : "its lock is none";
    if (!damage.empty()) fail(ErrorKind::corrupt, path, " is damaged: ", damage, ", and other processes use it");
    store->join();
  }
  return store;
}

void Store::bind_trees() {
  const uint64_t rows = header().capacity;
  priority_tree_ = PriorityTree(words(), region<std::atomic<uint64_t>>(kPriorityNodesRegion), rows);
  bit_tree_ = BitTree(region<std::atomic<uint64_t>>(kBitsRegion), region<std::atomic<uint64_t>>(kBitNodesRegion),
                      (rows + 63) / 64);
  priority_scale_ = std::ldexp(1.0, static_cast<int>(header().priority_fraction_bits));
}

Store::~Store() {
  try {
    close();
  } catch (const Error&) {
    // A store that cannot be left in an orderly way is treated as crashed by the next process, which repairs it.
  }
}

void Store::close(bool keep) {
  if (closed_) return;
  closed_ = true;
  forget_fd(mapping_->fd());
  const uint32_t slot = client_slot_;
  if (slot != kNoClient && fork_epoch_ == fork_epoch.load()) {
    try {
      leave(keep);
    } catch (...) {
      // The lock cannot be acquired. Without its lease this client counts as dead, and others reclaim its rows.
      drop_client_lock(mapping_->fd(), slot);
      client_slot_ = kNoClient;
      throw;
    }
  }
  client_slot_ = kNoClient;
}

void Store::leave(bool keep) {
  Gate gate(mapping_->fd(), lock_timeout_s_);
  {
    Guard guard(*this);
    reclaim(client_slot_);
  }
  drop_client_lock(mapping_->fd(), client_slot_);
  if (live_clients() == 0 && !keep && !keep_) {
    control().clean = 1;
    if (header().persist == 0) {
      control().closed = 1;
      mapping_->unlink();
    }
  }
}

bool Store::unlink() {
  return mapping_->unlink();
}

void Store::check_usable() const {
  if (closed_) fail(ErrorKind::closed, "the store ", mapping_->path(), " was closed");
  if (read_only_) fail(ErrorKind::closed, "the store ", mapping_->path(), " was opened read-only");
}

uint32_t Store::live_clients() const {
  uint32_t live = 0;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    live += client(slot).in_use != 0 && (slot == client_slot_ || client_lives(mapping_->fd(), slot));
  }
  return live;
}

void Store::join() {
  // Slot 0 of a new segment is taken before anyone can see it; later joiners hold the gate.
  Guard guard(*this);
  reap_locked();
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (client(slot).in_use != 0 || !take_client_lock(mapping_->fd(), slot)) continue;
    Client& mine = client(slot);
    mine.pid = ::getpid();
    mine.joined_ns = wall_ns();
    mine.held = kNoRow;
    mine.held_count = 0;
    mine.priority_writers.store(0);
    mine.in_use = 1;
    client_slot_ = slot;
    return;
  }
  fail(ErrorKind::full, mapping_->path(), " already has ", kMaxClients, " processes attached, its limit");
}

void Store::ensure_client() {
  check_usable();
  const uint64_t epoch = fork_epoch.load(std::memory_order_relaxed);
  if (fork_epoch_.load(std::memory_order_relaxed) == epoch) return;
  static std::mutex rejoining;
  std::lock_guard lock(rejoining);
  if (fork_epoch_ == epoch) return;
  Gate gate(mapping_->fd(), lock_timeout_s_);
  if (control().closed != 0) fail(ErrorKind::closed, "the store ", mapping_->path(), " was closed and removed");
  client_slot_ = kNoClient;
  join();
  fork_epoch_ = epoch;
}

Store::Guard::Guard(const Store& store) : store_(store) {
  if (store.read_only_) fail(ErrorKind::closed, "the store ", store.mapping_->path(), " was opened read-only");
  pthread_mutex_t* mutex = &store.control().mutex;
  int error = ::pthread_mutex_trylock(mutex);
  if (error == EBUSY) error = lock_within(mutex, store.lock_timeout_s_);
  const auto repair_or_unlock = [&] {
    try {
      const_cast<Store&>(store).rebuild_locked();
    } catch (...) {
      // The next holder of the lock must try again, so it has to look unfinished to it as well.
      store.control().rebuilding.store(1);
      ::pthread_mutex_unlock(mutex);
      throw;
    }
  };
  if (error == EOWNERDEAD) {
    ::pthread_mutex_consistent(mutex);
    repair_or_unlock();
    store.control().counters.repairs.fetch_add(1, std::memory_order_relaxed);
  } else if (error == ETIMEDOUT) {
    fail(ErrorKind::lock_timeout, "the lock of ", store.mapping_->path(), " could not be acquired for ",
         store.lock_timeout_s_, " s; the process holding it is stopped or starved");
  } else if (error != 0) {
    fail(ErrorKind::corrupt, "the lock of ", store.mapping_->path(), " is unusable: ", std::strerror(error));
  }
  if (error == 0 && store.control().rebuilding.load() != 0) repair_or_unlock();
}

Store::Guard::~Guard() {
  ::pthread_mutex_unlock(&store_.control().mutex);
}

StoreCounts Store::counts() const {
  const Control& c = control();
  return {c.free_count, c.writing_count, c.exhausted_count, c.open_count, removable_count()};
}

RowInfo Store::info(uint32_t row) const {
  const RowStatus& s = status()[row];
  const uint64_t word = words()[row].load(std::memory_order_acquire);
  return {s.sequence,
          s.version.load(std::memory_order_relaxed),
          s.inserted_at_ns,
          generation_of(word),
          priority_of(word),
          s.length.load(std::memory_order_relaxed),
          s.times_sampled.load(std::memory_order_relaxed),
          s.state};
}

}  // namespace geartrain
