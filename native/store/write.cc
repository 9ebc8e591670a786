// Writing rows: allocated blocks become rows by commit, or by publish, extend and seal.

#include <algorithm>

#include "base/clock.h"
#include "base/copy.h"
#include "base/errors.h"
#include "store/remover_heap.h"
#include "store/store.h"
#include "store/tasks.h"

namespace geartrain {

void Store::allocate(std::span<uint32_t> rows) {
  ensure_client();
  refuse_spans("allocated");
  Guard guard(*this);
  Control& c = control();
  release_abandoned_locked();
  if (header().max_age_ns != 0) {
    Sums sums(*this);  // settled before a repair, below, makes the sums from the words
    expire_locked(sums, wall_ns());
  }
  if (c.free_count < rows.size()) {
    // Dead writers' rows are reclaimed before living ones' are evicted. Querying the kernel for liveness costs a system
    // call per client, so it is not done for every row of a full store.
    const bool short_of_rows = c.free_count + removable_count() < rows.size();
    if (short_of_rows) {
      reap_locked();
    } else {
      reap_now_and_then();
    }
  }
  if (c.free_count + removable_count() < rows.size()) {
    fail(ErrorKind::full, rows.size(), " rows were asked for, but of ", header().capacity, " rows ", c.writing_count,
         " are being written, ", c.open_count, " extended and ", c.exhausted_count,
         " read for the last time; commit, seal or abandon some, or create the store with more capacity");
  }
  Sums sums(*this);
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

void Store::clear_block(uint32_t field, uint32_t row) const {
  check_usable();
  check_rows({&row, 1});
  check_column(field);
  const RowStatus& s = status()[row];
  if (s.state != RowState::writing || s.owner != client_slot_.load(std::memory_order_acquire)) {
    fail(ErrorKind::stale_key, "row ", row,
         " is not being written by this process (committed, abandoned or another's)");
  }
  zero_block(block(field, row), fields()[field].block_bytes);
}

void Store::commit(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations) {
  apply({.commit = {rows, values, generations}});
}

void Store::publish(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations) {
  apply({.publish = {rows, values, generations}});
}

void Store::extend(std::span<const uint32_t> rows, std::span<const uint32_t> lengths,
                   std::span<const double> priorities) {
  apply({.extend = rows, .lengths = lengths, .extend_priorities = priorities});
}

void Store::seal(std::span<const uint32_t> rows) {
  apply({.seal = rows});
}

// Rows with spans are inserted whole (store/tasks.h).
void Store::refuse_spans(const char* what) const {
  if (tasks_ != nullptr) fail(ErrorKind::schema, "rows of a store with axes or tasks are inserted, not ", what);
}

void Store::apply(const RowChanges& changes) {
  ensure_client();
  refuse_spans("written in place");
  if (!has_journal()) [[likely]]
    return apply_now(changes);
  const bool completes = !changes.commit.rows.empty() || !changes.seal.empty();  // what the journal has
  if (!completes && changes.publish.rows.empty()) return apply_now(changes);
  admit_to_journal();
  std::vector<uint32_t> sealed;  // their generations
  for (const uint32_t row : changes.seal) {
    check_rows({&row, 1});
    sealed.push_back(generation_of(words()[row].load(kRelaxed)));
  }
  RowChanges kept = changes;
  kept.abandon = {};  // cannot be taken back
  apply_now(kept);
  uint32_t error = 0;
  if (completes && !is_settled(&error)) {
    take_back(kept, sealed);
    refuse_journal(error, "", ". No row was committed");
  }
  if (!changes.abandon.empty()) apply_now({.abandon = changes.abandon});
}

// What the journal refused is as it was before the call: rows are being written, or extended. What others have removed
// meanwhile stays gone.
void Store::take_back(const RowChanges& changes, std::span<const uint32_t> sealed) {
  Guard guard(*this);
  Sums sums(*this);
  Control& c = control();
  const auto is_mine = [&](uint32_t row, uint32_t generation, RowState state) {
    return status()[row].state == state && generation_of(words()[row].load(kRelaxed)) == generation;
  };
  for (size_t i = 0; i < changes.seal.size(); ++i) {
    const uint32_t row = changes.seal[i];
    if (!is_mine(row, sealed[i], RowState::committed)) continue;
    if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) Heap(*this).erase(row);
    unlink_order(row);
    hold(row, client_slot_, RowState::open);
  }
  uint64_t taken = 0;
  for (size_t i = 0; i < changes.commit.rows.size(); ++i) {
    const uint32_t row = changes.commit.rows[i];
    if (!is_mine(row, changes.commit.generations[i], RowState::committed)) continue;
    retire(sums, row);
    hold(row, client_slot_, RowState::writing);
    ++taken;
  }
  for (size_t i = 0; i < changes.publish.rows.size(); ++i) {
    const uint32_t row = changes.publish.rows[i];
    if (!is_mine(row, changes.publish.generations[i], RowState::open)) continue;
    unhold(row);
    make_unselectable(sums, row);
    c.committed_count.store(committed_count() - 1, kRelaxed);
    hold(row, client_slot_, RowState::writing);
    ++taken;
  }
  c.counters.inserted.fetch_sub(taken, kRelaxed);
}

void Store::apply_now(const RowChanges& changes) {
  const auto& [publish, commit, extend, lengths, seal, abandon, extend_priorities, episodes, marked] = changes;
  check_values(publish.rows.size(), publish.values);
  check_values(commit.rows.size(), commit.values);
  if (!extend_priorities.empty() && extend_priorities.size() != extend.size()) {
    fail(ErrorKind::schema, extend.size(), " rows were given with ", extend_priorities.size(), " priorities");
  }
  validate_priorities(extend_priorities);
  if (!episodes.empty() && (episodes.size() != extend.size() || episodes_field_ < 0)) {
    fail(ErrorKind::schema, extend.size(), " rows were given with ", episodes.size(), " numbers of episodes");
  }
  if (!publish.rows.empty() && header().max_times_sampled != 0) {
    fail(ErrorKind::schema,
         "a store with max_times_sampled removes a row with its last sample, so none can be "
         "published while it is still being extended; commit it when it is complete");
  }
  // Streaming stores by the thread that filled the blocks must not overtake the words that publish them.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Guard guard(*this);
  Sums sums(*this);
  check_held(publish.rows);
  check_held(commit.rows);
  check_held(abandon);
  check_extended(extend, lengths);
  check_held(seal, RowState::open);
  // Committed rows of one call can make room for each other.
  const size_t least_room = publish.rows.size() + !commit.rows.empty();
  if (least_room != 0) check_the_cap(least_room);

  if (least_room != 0) enter(sums, publish, commit);
  for (size_t i = 0; i < extend.size(); ++i) {
    RowStatus& s = status()[extend[i]];
    if (per_step()) {
      const uint32_t priority = extend_priorities.empty() ? new_priority() : given(extend_priorities[i]);
      add_steps(sums, extend[i], generation_of(words()[extend[i]].load(kRelaxed)), s.length.load(kRelaxed), lengths[i],
                priority);
    }
    // Before the length: who dies in between has it counted again by those who complete the row.
    if (!episodes.empty()) set_episodes(extend[i], episodes[i]);
    s.length.store(lengths[i], std::memory_order_release);  // after the steps
  }
  if (per_step()) clear_last_steps(sums, marked);
  const uint64_t now_ns = seal.empty() ? 0 : commit_time();
  for (const uint32_t row : seal) {
    if (per_step()) clear_followed_steps(sums, row);
    seal_locked(row, now_ns);
  }
  for (const uint32_t row : abandon) {
    unhold(row);
    put_free_row(row);
  }
  count(control().counters.abandoned, abandon.size());
}

void Store::check_extended(std::span<const uint32_t> rows, std::span<const uint32_t> lengths) const {
  check_held(rows, RowState::open);
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t known = status()[rows[i]].length.load(kRelaxed);
    if (lengths[i] < known || lengths[i] > header().max_length) {
      fail(ErrorKind::schema, "row ", rows[i], " has ", known, " steps and a block holds ", header().max_length,
           ": it cannot be extended to ", lengths[i]);
    }
  }
}

// Rows become selectable. Their values are written first, then that they are to be, then their words: a rebuild after a
// death in between goes on with them (finish_pending).
void Store::enter(Sums& sums, const RowChanges::Entering& publish, const RowChanges::Entering& commit) {
  Control& c = control();
  PendingCommit& pending = pending_commit();
  const size_t rows = publish.rows.size() + commit.rows.size();
  const uint64_t first = next_sequence(), now_ns = commit_time();
  const uint32_t fresh = new_priority();  // the same in all that is stored of a row
  // Advanced before any row has such a number, which no other row may ever get.
  set_next_sequence(first + rows);
  std::atomic_signal_fence(std::memory_order_release);
  uint64_t sequence = first;
  for (const RowChanges::Entering* part : {&publish, &commit}) {
    for (size_t i = 0; i < part->rows.size(); ++i) {
      write_values(part->rows[i], i, part->values, fresh, sequence++, now_ns);
    }
  }
  if (rows > 1) {  // one word takes effect by itself
    pending.rows = static_cast<uint32_t>(rows);
    pending.open_rows = static_cast<uint32_t>(publish.rows.size());
    pending.first.store(first, std::memory_order_release);
  }
  // Not what write_values noted for a rebuild: a sampler of the block's last row, which looked at its key long ago, may
  // have put a time there.
  const auto priority_of_row = [&](const RowChanges::Entering& part, size_t i) {
    return part.values.priorities.empty() ? fresh : rounded(part.values.priorities[i]);
  };
  for (size_t i = 0; i < publish.rows.size(); ++i) {
    const uint32_t row = publish.rows[i];
    make_room_at_the_cap(sums);
    --c.writing_count;
    ++c.open_count;
    status()[row].state = RowState::open;  // it stays on this client's held list
    publish.generations[i] = make_selectable(sums, row, priority_of_row(publish, i));
    sums.settle();
    c.committed_count.store(committed_count() + 1, std::memory_order_release);
  }
  const bool ordered = header().remover == static_cast<uint32_t>(Remover::lowest_priority);
  // Where others have to make room, row by row: the first ones of a call may have to go for the last ones.
  const bool crowded = committed_count() + commit.rows.size() > header().max_rows;
  for (size_t at = 0, n; at < commit.rows.size(); at += n) {
    n = crowded ? 1 : commit.rows.size();
    const std::span<const uint32_t> together = commit.rows.subspan(at, n);
    if (crowded) make_room_at_the_cap(sums);
    unhold(together);
    for (size_t i = at; i < at + n; ++i) {
      status()[commit.rows[i]].state = RowState::committed;
      commit.generations[i] = make_selectable(sums, commit.rows[i], priority_of_row(commit, i));
    }
    sums.settle();
    c.committed_count.store(committed_count() + n, std::memory_order_release);
    link_order(together);
    if (!ordered) continue;
    for (const uint32_t row : together) Heap(*this).push(row);
  }
  if (rows > 1) pending.first.store(0, std::memory_order_release);
  count(c.counters.inserted, rows);
  announce(c.limiter);
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

uint64_t Store::commit_time() const {
  return wall_ns() & ~(content_mask_ & 1);  // an even content number
}

void Store::write_values(uint32_t row, size_t i, const CommitValues& values, uint32_t fresh, uint64_t sequence,
                         uint64_t now_ns) {
  RowStatus& s = status()[row];
  s.sequence.store(sequence, kRelaxed);
  s.inserted_at_ns.store(now_ns, kRelaxed);
  s.length.store(values.lengths.empty() ? header().max_length : values.lengths[i], kRelaxed);
  s.version.store(values.versions.empty() ? 0 : values.versions[i], kRelaxed);
  s.times_sampled.store(0, kRelaxed);
  const uint32_t priority = values.priorities.empty() ? fresh : given(values.priorities[i]);
  std::atomic_ref<uint32_t>(s.heap_slot).store(priority, kRelaxed);
}

uint32_t Store::make_selectable(Sums& sums, uint32_t row, uint32_t priority) {
  const uint32_t generation = generation_of(words()[row].load(kRelaxed)) + 1;
  if (per_step()) {
    const uint32_t length = status()[row].length.load(kRelaxed);
    const StepRange own = own_steps(row, length);
    if (own.first != 0) add_steps(sums, row, generation, 0, own.first, 0);
    add_steps(sums, row, generation, own.first, own.until, priority);
    if (own.until != length) add_steps(sums, row, generation, own.until, length, 0);
  }
  const uint32_t of_row = per_step() ? 0 : priority;
  words()[row].store(make_word(generation, of_row), std::memory_order_release);  // the commit takes effect here
  sums.priorities.add(row, of_row);
  set_bit(sums, row, true);
  note_sampled(row, samples_so_far());
  return generation;
}

// In a rebuild: a row whose commit had begun and whose word was not yet stored. False when it is none.
bool Store::finish_pending(uint32_t row, RowStatus& s) {
  const PendingCommit& pending = pending_commit();
  const uint64_t first = pending.first.load(kRelaxed), place = s.sequence.load(kRelaxed) - first;
  const uint64_t word = words()[row].load(kRelaxed);
  const uint32_t length = s.length.load(kRelaxed);
  const bool writing = s.state == RowState::writing || s.state == RowState::open || s.state == RowState::committed;
  if (first == 0 || place >= pending.rows || is_committed(word) || !writing || length == 0 ||
      length > header().max_length) {
    return false;
  }
  s.state = place < pending.open_rows ? RowState::open : RowState::committed;
  const uint32_t generation = generation_of(word) + 1;
  if (per_step()) {
    for (uint32_t step = 0; step < length; ++step) {
      step_tree_.leaves()[leaf_of(row, step)].store(make_word(generation, s.heap_slot), kRelaxed);
    }
  }
  words()[row].store(make_word(generation, per_step() ? 0 : s.heap_slot), std::memory_order_release);
  note_sampled(row, samples_so_far());
  return true;
}

void Store::seal_locked(uint32_t row, uint64_t now_ns) {
  RowStatus& s = status()[row];
  unhold(row);
  // Its number and age are those of its end: it is the newest, and the order list stays sorted.
  const uint64_t sequence = next_sequence();
  set_next_sequence(sequence + 1);
  s.sequence.store(sequence, kRelaxed);
  s.inserted_at_ns.store(now_ns, kRelaxed);
  // After the number: a pass that finds the row complete finds it under that (selection/epochs.cc).
  std::atomic_ref<RowState>(s.state).store(RowState::committed, std::memory_order_release);
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
