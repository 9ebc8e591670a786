// Making, joining and leaving a store, its lock and its limiter. Rows are in write.cc, priorities.cc, sample_counts.cc,
// evict.cc and lists.cc, repair in repair.cc.

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
#include <new>

#include "base/clock.h"
#include "base/errors.h"
#include "base/sha256.h"
#include "base/timed_lock.h"

namespace geartrain {
namespace {

// What a handle waits for calls in flight when it is closed, beside the lock's timeout: they copy rows, or write a
// disk.
constexpr double kCallsEndS = 60;
constexpr double kExitTimeoutS = 1;

std::atomic<void (*)(Store&)> the_closer{nullptr};

}  // namespace

Store::Store(Mapping mapping, Geometry geometry)
    : mapping_(std::make_shared<Mapping>(std::move(mapping))), geometry_(std::move(geometry)) {
  read_only_ = !mapping_->writable();
  register_store(this);
}

std::unique_ptr<Store> Store::create(const std::string& name, const std::vector<FieldSpec>& fields,
                                     const StoreOptions& options) {
  std::vector<FieldRecord> records;
  const auto table = std::make_shared<TaskTable>();
  Header header = plan_segment(fields, options, &records, table.get());
  const bool spans = (header.required_features & kRowSpans) != 0;
  header.store_id = random_number();
  header.created_ns = clock_ns(CLOCK_REALTIME);

  const std::string path = segment_path(name);
  if (::access(path.c_str(), F_OK) == 0) fail(ErrorKind::exists, path);  // before gigabytes are reserved in vain
  const uint64_t searched = header.regions[kColumnsRegion].offset;       // status, words and trees
  std::unique_ptr<Store> store(
      new Store(Mapping::create(path, header.segment_bytes, options.reserve, options.trust, searched),
                {header, records, spans ? table : nullptr}));
  store->lock_timeout_s_ = options.lock_timeout_s;
  std::memcpy(store->base() + kFieldsOffset, records.data(), records.size() * sizeof(FieldRecord));
  std::memcpy(store->base(), &header, sizeof header);
  if (spans) {
    auto& stored = *store->region<TaskTable>(kTasksRegion);
    stored.axis_count = table->axis_count;
    stored.task_count = table->task_count;
    stored.span_units = table->span_units;
    std::memcpy(stored.axes, table->axes, sizeof table->axes);
    std::memcpy(stored.tasks, table->tasks, sizeof table->tasks);
  }
  store->bind_trees();
  Control& control = store->control();
  init_robust_mutex(&control.mutex);
  control.next_sequence = 1;
  control.free_head = control.free_tail = control.order_head = control.order_tail = kNoRow;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) store->client(slot).held = kNoRow;
  if (spans) store->clear_tasks();
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

  Gate gate(store->mapping_->fd(), options.lock_timeout_s, store->calls_);
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
    std::string damage = damaged_lists(control, store->clients(), store->status().data(), store->header().capacity);
    if (damage.empty()) damage = store->damaged_tasks();
    if (clean && !damage.empty() && !options.adopt) {
      fail(ErrorKind::corrupt, path, " is damaged: ", damage, ". adopt=True rebuilds its lists from its rows");
    }
    // No other client is attached and the gate keeps it so. The lock may have been held at a power cut, which no kernel
    // remembers: initialise it anew, then rebuild from the authoritative state.
    init_robust_mutex(&control.mutex);
    control.rebuilding.store(clean && damage.empty() ? 0 : 1);  // before anything walks a list
    // All died, so none of them for what it had claimed. Whoever dies before it has reclaimed that leaves it as it is.
    for (uint32_t slot = 0; slot < kMaxClients; ++slot) store->client(slot).claims_for_others = 1;
  } else {
    std::string damage = is_robust_mutex(control.mutex)
                             ? damaged_ends(control, store->clients(), store->header().capacity)
                             : "its lock is none";
    if (damage.empty()) damage = store->damaged_tasks();
    if (!damage.empty()) fail(ErrorKind::corrupt, path, " is damaged: ", damage, ", and other processes use it");
  }
  store->join();
  return store;
}

std::string Store::damaged_tasks() const {
  return tasks_ == nullptr ? "" : geartrain::damaged_tasks(tasks_->table(), tasks_->described(), header().capacity);
}

void Store::bind_trees() {
  const uint64_t rows = header().capacity;
  words_ = region<std::atomic<uint64_t>>(kWordsRegion);
  status_ = {this, region<RowStatus>(kStatusRegion), rows};
  priority_tree_ = PriorityTree(words(), region<std::atomic<uint64_t>>(kPriorityNodesRegion), rows);
  bit_tree_ = BitTree(region<std::atomic<uint64_t>>(kBitsRegion), region<std::atomic<uint64_t>>(kBitNodesRegion),
                      (rows + 63) / 64);
  if ((header().required_features & kMaxPriority) != 0) {
    largest_ = &reinterpret_cast<NewPriority*>(base() + kNewPriorityOffset)->largest;
  }
  episodes_field_ = find_episodes_field();
  find_repeats_field();
  find_last_field();
  content_mask_ = (header().required_features & kContentNumbers) != 0 ? ~uint64_t{0} : 0;
  if (!read_only()) reserve_for_ranking();
  if (per_step()) {
    step_tree_ = PriorityTree(region<std::atomic<uint64_t>>(kStepWordsRegion),
                              region<std::atomic<uint64_t>>(kStepNodesRegion), rows * header().max_length);
  }
  if (geometry_.tasks != nullptr) bind_tasks();
  priority_scale_ = std::ldexp(1.0, static_cast<int>(header().priority_fraction_bits));
}

// --- leaving --------------------------------------------------------------------------------------------------

void Store::set_closer(void (*closer)(Store&)) {
  the_closer = closer;
}

Store::~Store() {
  try {
    if (const auto closer = the_closer.load(); closer != nullptr) {
      closer(*this);
    } else {
      close();
    }
  } catch (...) {
    // A store that cannot be left in an orderly way is treated as crashed by the next process, which repairs it.
  }
  unregister_store(this);
}

void Store::close(bool keep) {
  shut(keep, lock_timeout_s_, Deadline::after(lock_timeout_s_ + kCallsEndS));
}

void Store::close_at_exit() noexcept {
  try {
    shut(false, std::min(lock_timeout_s_, kExitTimeoutS), Deadline::after(kExitTimeoutS));
  } catch (...) {
    // As in the destructor.
  }
}

void Store::shut(bool keep, double timeout_s, Deadline calls_end) {
  if (!calls_.close()) {
    calls_.wait_until_left(calls_end);
    return;
  }
  struct Left {
    Lifetime& calls;
    ~Left() { calls.left(); }
  } left{calls_};
  // A truncated file is SIGBUS for whoever touches it, and a program that ends after an error need not.
  const bool whole = mapping_->is_whole();
  // Whoever waits to be admitted looks again. The limiter is another process's memory where the segment was refused.
  if (whole && !read_only() && priority_tree_.leaves() != nullptr) {
    announce(control().limiter);
    if (tasks_ != nullptr) wake_tasks();
  }
  if (!calls_.drain(calls_end)) {
    fail(ErrorKind::lock_timeout, "calls of other threads are still using ", mapping_->path(),
         "; the handle is closed, and leaves the store when the process ends");
  }
  calls_.drained();
  if (client_slot_ == kNoClient) return;
  try {
    if (!whole) {
      fail(ErrorKind::corrupt, mapping_->path(),
           " was truncated while it was in use, and its rows are lost: remove it");
    }
    leave(keep, timeout_s);
  } catch (...) {
    // The lock cannot be acquired. Without its lease this client counts as dead, and others reclaim its rows.
    drop_client_lock(mapping_->fd(), client_slot_);
    client_slot_ = kNoClient;
    throw;
  }
  client_slot_ = kNoClient;
}

void Store::leave(bool keep, double timeout_s) {
  const bool persist = header().persist != 0;
  if (persist && live_clients() == 1) flush();  // most of it before anyone has to wait for it
  Gate gate(mapping_->fd(), timeout_s, calls_);
  bool last = false;
  {
    Guard guard(*this, timeout_s);
    reclaim(client_slot_);
    last = live_clients() == 0 && !keep && !keep_;
    if (last) {
      // Under the lock: nobody else is alive to be killed in it, and what the dead left half done is repaired here.
      reap_locked();
      mark_clean();
    }
  }
  drop_client_lock(mapping_->fd(), client_slot_);
  if (last && !persist) {
    control().closed = 1;
    mapping_->unlink();
    // Another user's file in a directory like /dev/shm is not ours to remove: it stays, to be joined as a clean one.
    if (mapping_->is_named()) control().closed = 0;
  }
}

// Under the lock. The mark is written after everything else, for a disk that loses its power.
void Store::mark_clean() {
  const bool persist = header().persist != 0;
  if (persist) flush();
  control().clean = 1;
  if (persist) mapping_->flush(kControlOffset, sizeof(Control));
}

void Store::seal_segment() {
  ensure_client();
  if (header().persist != 0) flush();  // most of it before anyone has to wait for it
  Gate gate(mapping_->fd(), lock_timeout_s_, calls_);
  Guard guard(*this);
  reap_locked();
  const Control& c = control();
  const uint64_t held = c.writing_count + c.open_count + c.exhausted_count;
  if (held != 0 || live_clients() != 1) {
    fail(ErrorKind::full, "the store ", mapping_->path(), " cannot be sealed: ", held, " rows are being written, and ",
         live_clients() - 1, " other processes have it open; close those first");
  }
  mark_clean();
  read_only_.store(true, kRelaxed);
}

void Store::flush() const {
  mapping_->flush(0, mapping_->bytes());
}

bool Store::unlink() {
  return mapping_->unlink();
}

void Store::refuse_closed() const {
  fail(ErrorKind::closed, "the store ", mapping_->path(),
       lost_in_fork_ ? " cannot be opened again in this forked child" : " was closed");
}

void Store::refuse_writing() const {
  fail(ErrorKind::read_only, "the store ", mapping_->path(),
       " is open with mode='r', which changes nothing: Store.open(name) opens it for writing");
}

void Store::check_column(uint32_t field) const {
  if (field >= header().field_count) fail(ErrorKind::schema, "no field number ", field);
  if (in_spans(fields()[field])) {
    fail(ErrorKind::schema, "field '", fields()[field].name, "' has its own length in each row and no column");
  }
}

void Store::check_usable() const {
  check_open();
  if (read_only()) refuse_writing();
}

void Store::after_fork(bool in_child) {
  if (!in_child) return given_up_mutex_.unlock();
  // Also of a handle that another thread was closing, which had its lease still: the child would keep it alive.
  const bool reopened = (is_closed() && client_slot_ == kNoClient) || mapping_->reopen();
  lost_in_fork_ = !is_closed() && !reopened;
  client_slot_ = kNoClient;
  calls_.forget_other_threads(lost_in_fork_);
  given_up_.clear();  // the parent's rows, which keeps its own list
  given_up_mutex_.unlock();
  // A thread of the parent may have been joining, for as long as others made it wait.
  new (&joining_mutex_) std::mutex;
  new (&journal_mutex_) std::mutex;
}

uint32_t Store::live_clients() const {
  uint32_t live = 0;
  const int fd = mapping_->fd();
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    live += client(slot).in_use != 0 && (slot == client_slot_ || client_lives(fd, slot));
  }
  return live;
}

void Store::join() {
  // Slot 0 of a new segment is taken before anyone can see it; later joiners hold the gate.
  Guard guard(*this);
  if (control().clean != 0) {
    // On the disk too before the first change: a segment that is not left in good order is never taken for one that
    // was.
    control().clean = 0;
    if (header().persist != 0) mapping_->flush(kControlOffset, sizeof(Control));
  }
  reap_locked();
  const int fd = mapping_->fd();
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (client(slot).in_use != 0 || !take_client_lock(fd, slot)) continue;
    Client& mine = client(slot);
    mine.pid = ::getpid();
    mine.joined_ns = wall_ns();
    mine.held = kNoRow;
    mine.held_count = 0;
    mine.priority_writers.store(0);
    mine.claims_for_others = 0;
    mine.in_use = 1;
    uint32_t slots = slot + 1;
    for (uint32_t other = slots; other < kMaxClients; ++other) {
      if (client(other).in_use != 0) slots = other + 1;
    }
    control().client_slots.store(slots, kRelaxed);
    client_slot_ = slot;
    return;
  }
  fail(ErrorKind::full, mapping_->path(), " already has ", kMaxClients, " processes attached, its limit");
}

void Store::ensure_client() {
  check_usable();
  if (client_slot_.load(std::memory_order_acquire) != kNoClient) return;
  std::lock_guard lock(joining_mutex_);
  if (client_slot_ != kNoClient) return;
  Gate gate(mapping_->fd(), lock_timeout_s_, calls_);
  if (control().closed != 0) fail(ErrorKind::closed, "the store ", mapping_->path(), " was closed and removed");
  join();
}

int Store::wait_for_lock(double timeout_s) const {
  const Deadline deadline = Deadline::after(timeout_s);
  for (;;) {
    const double slice_s = std::min(kLookEveryS, static_cast<double>(deadline.left_ns()) / 1e9);
    const int error = lock_within(&control().mutex, slice_s);
    if (error != ETIMEDOUT || deadline.passed()) return error;
    if (calls_.must_end()) refuse_closed();
  }
}

Store::Guard::Guard(const Store& store, double timeout_s) : store_(store) {
  if (!store.mapping_->writable()) store.refuse_writing();
  pthread_mutex_t* mutex = &store.control().mutex;
  int error = ::pthread_mutex_trylock(mutex);
  if (error == EBUSY) error = store.wait_for_lock(timeout_s);
  const auto repair_or_unlock = [&](Steps steps) {
    try {
      const_cast<Store&>(store).rebuild_locked(steps);
    } catch (...) {
      // The next holder of the lock must try again, so it has to look unfinished to it as well.
      store.control().rebuilding.store(1);
      ::pthread_mutex_unlock(mutex);
      throw;
    }
  };
  if (error == EOWNERDEAD) {
    ::pthread_mutex_consistent(mutex);
    // Unless it died in a rebuild, or found damage, its journal and those of the dead name all that is in doubt.
    repair_or_unlock(store.control().rebuilding.load() != 0 ? Steps::all : Steps::noted);
    store.control().counters.repairs.fetch_add(1, std::memory_order_relaxed);
  } else if (error == ETIMEDOUT) {
    fail(ErrorKind::lock_timeout, "the lock of ", store.mapping_->path(), " could not be acquired for ", timeout_s,
         " s; the process holding it is stopped or starved");
  } else if (error != 0) {
    fail(ErrorKind::corrupt, "the lock of ", store.mapping_->path(), " is unusable: ", std::strerror(error));
  }
  if (error == 0 && store.control().rebuilding.load() != 0) repair_or_unlock(Steps::all);
}

Store::Guard::~Guard() {
  ::pthread_mutex_unlock(&store_.control().mutex);
}

// --- the limiter ----------------------------------------------------------------------------------------------

void Store::set_limiter(const RateLimiterSettings& settings, bool afresh) {
  check_usable();
  geartrain::set_limiter(control().limiter, settings, afresh);
}

bool Store::admit_inserts(uint64_t n, double timeout_s) {
  check_usable();
  const bool admitted = geartrain::admit_inserts(control().limiter, n, timeout_s, [this] { return calls_.must_end(); });
  if (!admitted) check_open();
  return admitted;
}

bool Store::admit_samples(uint64_t n, double timeout_s) {
  check_open();
  if (read_only()) {
    if (control().limiter.enabled.load(kRelaxed) == 0) return true;
    fail(ErrorKind::read_only, "the store ", mapping_->path(),
         " has a rate limiter, which counts draws, and mode='r' counts none: open it for writing, or set no limiter");
  }
  const auto enough = [this](uint64_t least) {
    return (limited_by_steps() ? step_count_up_to(least) : control().committed_count.load()) >= least;
  };
  const bool admitted =
      geartrain::admit_samples(control().limiter, n, enough, timeout_s, [this] { return calls_.must_end(); });
  if (!admitted) check_open();
  return admitted;
}

void Store::give_back(uint64_t inserts, uint64_t samples) {
  check_open();
  if (read_only()) return;  // nothing was counted
  geartrain::give_back(control().limiter, inserts, samples);
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
          s.inserted_at_ns.load(std::memory_order_relaxed) & ~(content_mask_ & 1),
          generation_of(word),
          priority_of(word),
          s.length.load(std::memory_order_relaxed),
          s.times_sampled.load(std::memory_order_relaxed),
          s.state};
}

}  // namespace geartrain
