// Writing rows: allocated blocks become rows by commit, or by publish, extend and seal.

#include <algorithm>

#include "base/clock.h"
#include "base/errors.h"
#include "store/remover_heap.h"
#include "store/store.h"

namespace geartrain {
namespace {

constexpr uint64_t kReapEvery_ns = 100'000'000;

}  // namespace

void Store::allocate(std::span<uint32_t> rows) {
  ensure_client();
  Guard guard(*this);
  Sums sums(*this);
  Control& c = control();
  release_abandoned_locked();
  if (header().max_age_ns != 0) expire_locked(sums, wall_ns());
  if (c.free_count < rows.size()) {
    // Dead writers' rows are reclaimed before living ones' are evicted. Querying the kernel for liveness costs a system
    // call per client, so it is not done for every row of a full store.
    const bool short_of_rows = c.free_count + removable_count() < rows.size();
    if (short_of_rows || monotonic_ns() - c.last_reap_ns > kReapEvery_ns) reap_locked();
  }
  if (c.free_count + removable_count() < rows.size()) {
    fail(ErrorKind::full, rows.size(), " rows were asked for, but of ", header().capacity, " rows ", c.writing_count,
         " are being written, ", c.open_count, " extended and ", c.exhausted_count,
         " read for the last time; commit, seal or abandon some, or create the store with more capacity");
  }
  const size_t free_rows = std::min<uint64_t>(c.free_count, rows.size());
  take_free_rows(rows.first(free_rows));
  for (size_t taken = free_rows; taken < rows.size();) taken += take_victims(sums, rows.subspan(taken));
  hold(rows, client_slot_);
  // A reader that still copies an evicted row must see its new generation before any of the bytes that the
  // caller writes next.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Store::check_values(size_t n, const CommitValues& values) const {
  const auto sized = [&](size_t size, const char* what) {
    if (size != 0 && size != n) fail(ErrorKind::schema, n, " rows were given with ", size, " ", what);
  };
  sized(values.lengths.size(), "lengths");
  sized(values.priorities.size(), "priorities");
  sized(values.versions.size(), "versions");
  for (size_t i = 0; i < values.lengths.size(); ++i) {
    if (values.lengths[i] == 0 || values.lengths[i] > header().max_length) {
      fail(ErrorKind::schema, "row ", i, " has length ", values.lengths[i], ", a block holds 1 to ",
           header().max_length, " steps");
    }
  }
  validate_priorities(values.priorities);
}

void Store::commit(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations) {
  ensure_client();
  check_values(rows.size(), values);
  // Streaming stores by the thread that filled the blocks must not overtake the words that publish them.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Guard guard(*this);
  Sums sums(*this);
  check_held(rows);
  Control& c = control();
  check_the_cap(1);  // the others of one call can make room for each other
  const uint64_t now_ns = wall_ns();
  const bool ordered = header().remover == static_cast<uint32_t>(Remover::lowest_priority);
  // Where others have to make room, row by row: the first ones of a call may have to go for the last ones.
  const bool crowded = committed_count() + rows.size() > header().max_rows;
  for (size_t first = 0, count; first < rows.size(); first += count) {
    count = crowded ? 1 : rows.size();
    const std::span<const uint32_t> together = rows.subspan(first, count);
    if (crowded) make_room_at_the_cap(sums);
    unhold(together);
    for (size_t i = first; i < first + count; ++i) {
      const uint32_t row = rows[i];
      const uint64_t word = write_values(sums, row, i, values, now_ns);
      status()[row].state = RowState::committed;
      make_selectable(sums, row, word);
      generations[i] = generation_of(word);
    }
    c.committed_count.store(committed_count() + count, kRelaxed);
    link_order(together);
    if (!ordered) continue;
    for (const uint32_t row : together) Heap(*this).push(row);
  }
  count(c.counters.inserted, rows.size());
  announce(c.limiter);
}

void Store::publish(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations) {
  ensure_client();
  check_values(rows.size(), values);
  if (header().max_times_sampled != 0) {
    fail(ErrorKind::schema,
         "a store with max_times_sampled removes a row with its last sample, so none can be "
         "published while it is still being extended; commit it when it is complete");
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // as in commit
  Guard guard(*this);
  Sums sums(*this);
  check_held(rows);
  Control& c = control();
  check_the_cap(rows.size());
  const uint64_t now_ns = wall_ns();
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t row = rows[i];
    make_room_at_the_cap(sums);
    const uint64_t word = write_values(sums, row, i, values, now_ns);
    --c.writing_count;
    ++c.open_count;
    status()[row].state = RowState::open;  // it stays on this client's held list
    make_selectable(sums, row, word);
    c.committed_count.store(committed_count() + 1, kRelaxed);
    generations[i] = generation_of(word);
  }
  count(c.counters.inserted, rows.size());
  announce(c.limiter);
}

void Store::extend(std::span<const uint32_t> rows, std::span<const uint32_t> lengths,
                   std::span<const double> priorities) {
  ensure_client();
  if (!priorities.empty() && priorities.size() != rows.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", priorities.size(), " priorities");
  }
  validate_priorities(priorities);
  Guard guard(*this);
  Sums sums(*this);
  check_held(rows, RowState::open);
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t known = status()[rows[i]].length.load(kRelaxed);
    if (lengths[i] < known || lengths[i] > header().max_length) {
      fail(ErrorKind::schema, "row ", rows[i], " has ", known, " steps and a block holds ", header().max_length,
           ": it cannot be extended to ", lengths[i]);
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    RowStatus& s = status()[rows[i]];
    if (per_step()) {
      const uint32_t priority = fixed_point(priorities.empty() ? 1.0 : priorities[i]);
      add_steps(sums, rows[i], generation_of(words()[rows[i]].load(kRelaxed)), s.length.load(kRelaxed), lengths[i],
                priority);
    }
    s.length.store(lengths[i], std::memory_order_release);  // after the steps
  }
}

void Store::seal(std::span<const uint32_t> rows) {
  ensure_client();
  Guard guard(*this);
  check_held(rows, RowState::open);
  const uint64_t now_ns = wall_ns();
  for (const uint32_t row : rows) seal_locked(row, now_ns);
}

void Store::abandon(std::span<const uint32_t> rows) {
  ensure_client();
  try {
    Guard guard(*this);
    check_held(rows);
    for (uint32_t row : rows) {
      unhold(row);
      put_free_row(row);
    }
    count(control().counters.abandoned, rows.size());
  } catch (const Error& error) {
    if (error.kind == ErrorKind::lock_timeout) {
      std::lock_guard lock(given_up_mutex_);
      given_up_.insert(given_up_.end(), rows.begin(), rows.end());
    }
    throw;
  }
}

uint64_t Store::write_values(Sums& sums, uint32_t row, size_t i, const CommitValues& values, uint64_t now_ns) {
  RowStatus& s = status()[row];
  s.sequence.store(control().next_sequence++, kRelaxed);
  s.inserted_at_ns.store(now_ns, kRelaxed);
  s.length.store(values.lengths.empty() ? header().max_length : values.lengths[i], kRelaxed);
  s.version.store(values.versions.empty() ? 0 : values.versions[i], kRelaxed);
  s.times_sampled.store(0, kRelaxed);
  const uint32_t generation = generation_of(words()[row].load(kRelaxed)) + 1;
  const uint32_t priority = fixed_point(values.priorities.empty() ? 1.0 : values.priorities[i]);
  if (!per_step()) return make_word(generation, priority);
  add_steps(sums, row, generation, 0, s.length.load(kRelaxed), priority);
  return make_word(generation, 0);
}

void Store::make_selectable(Sums& sums, uint32_t row, uint64_t word) {
  words()[row].store(word, std::memory_order_release);  // the commit takes effect here
  sums.priorities.add(row, priority_of(word));
  set_bit(sums, row, true);
}

void Store::seal_locked(uint32_t row, uint64_t now_ns) {
  RowStatus& s = status()[row];
  unhold(row);
  // Its number and age are those of its end: it is the newest, and the order list stays sorted.
  s.sequence.store(control().next_sequence++, kRelaxed);
  s.inserted_at_ns.store(now_ns, kRelaxed);
  s.state = RowState::committed;
  link_order({&row, 1});
  if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) Heap(*this).push(row);
}

void Store::check_the_cap(size_t rows) const {
  if (control().open_count + rows > header().max_rows) {
    fail(ErrorKind::full, rows, " more were to be added, but ", control().open_count, " of the ", header().max_rows,
         " rows that may be kept are still being extended; seal some, or create the store with more rows");
  }
}

void Store::make_room_at_the_cap(Sums& sums) {
  // The oldest of the others makes room, by the remover's choice.
  if (committed_count() >= header().max_rows) evict_one(sums);
}

void Store::release_abandoned_locked() {
  std::lock_guard lock(given_up_mutex_);
  for (uint32_t row : given_up_) {
    // Another process has reclaimed them where it took this one for dead.
    if (status()[row].state != RowState::writing || status()[row].owner != client_slot_) continue;
    unhold(row);
    put_free_row(row);
    count(control().counters.abandoned);
  }
  given_up_.clear();
}

}  // namespace geartrain
