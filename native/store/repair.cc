// Repair: reclaiming the rows of dead processes, rebuilding derived state, and auditing consistency.

#include <time.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
#include "store/client_lock.h"
#include "store/remover_heap.h"
#include "store/store.h"
#include "store/tasks.h"

namespace geartrain {
namespace {

constexpr uint64_t kLastSequence = uint64_t{1} << 63;  // leaves room for commits for ever

}  // namespace

uint32_t Store::reap() {
  ensure_client();
  Guard guard(*this);
  return reap_locked();
}

void Store::rebuild() {
  ensure_client();
  Guard guard(*this);
  rebuild_locked(Steps::all);
}

void Store::repair_dead_updates() {
  if (read_only()) return;
  bool dead = lock_owner_died(control().mutex);
  const uint32_t known = control().client_slots.load(kRelaxed);
  const uint32_t slots = known == 0 ? kMaxClients : std::min(known, kMaxClients);
  for (uint32_t slot = 0; slot < slots && !dead; ++slot) {
    const Client& other = client(slot);
    dead = other.priority_writers.load(kRelaxed) != 0 && other.in_use != 0 && slot != client_slot_ &&
           !client_lives(mapping_->fd(), slot);
  }
  if (dead) reap();
}

// For calls that find their work without it, too: nobody might wait, and find the dead by it.
void Store::reap_now_and_then() {
  constexpr uint64_t kEvery_ns = 100'000'000;  // it costs a system call per client
  if (monotonic_ns() - control().last_reap_ns > kEvery_ns) reap_locked();
}

uint32_t Store::reap_locked() {
  uint32_t dead = 0;
  bool sums_in_doubt = false;
  StepsInDoubt doubt;
  const int fd = mapping_->fd();
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (client(slot).in_use == 0 || slot == client_slot_ || client_lives(fd, slot)) continue;
    sums_in_doubt |= client(slot).priority_writers.load() != 0;
    if (per_step()) {
      doubt.add(journals()[slot], false);
      doubt.clients.push_back(slot);
    }
    reclaim(slot);
    ++dead;
  }
  control().last_reap_ns = monotonic_ns();
  // The journals are struck out last: whoever dies in here leaves the work to the next.
  if (sums_in_doubt) rebuild_trees_locked(doubt);
  return dead;
}

void Store::reclaim(uint32_t slot) {
  Client& gone = client(slot);
  Counters& counters = control().counters;
  const uint64_t now_ns = commit_time();
  if (tasks_ != nullptr) tasks_->release_claims_of(slot);
  for (uint64_t held = 0; gone.held != kNoRow; ++held) {
    const uint32_t row = gone.held;
    if (held == header().capacity || status()[row].owner != slot) fail_damaged("a client is said to hold row", row);
    if (status()[row].state == RowState::open) {
      count_episodes(row);
      end_repeats(row);
      seal_locked(row, now_ns);
      continue;
    }
    const bool was_writing = status()[row].state == RowState::writing;
    unhold(row);
    if (was_writing) {
      (slot == client_slot_ ? counters.abandoned : counters.reclaimed).fetch_add(1, kRelaxed);
    } else {
      free_spent(row);
    }
    put_free_row(row);
  }
  gone.in_use = 0;
  gone.pid = 0;
  gone.priority_writers.store(0);
}

void Store::wait_for_priority_writers() const {
  const uint64_t deadline = monotonic_ns() + static_cast<uint64_t>(lock_timeout_s_ * 1e9);
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    Client& other = client(slot);
    while (other.in_use != 0 && other.priority_writers.load(std::memory_order_seq_cst) != 0) {
      if (slot != client_slot_ && !client_lives(mapping_->fd(), slot)) break;  // died in the middle
      if (calls_.must_end()) refuse_closed();
      if (monotonic_ns() > deadline) {
        fail(ErrorKind::lock_timeout, "process ", other.pid, " has been updating priorities for ", lock_timeout_s_,
             " s; it may be stopped, and the sums cannot be rebuilt meanwhile");
      }
      const struct timespec pause{0, 20'000};
      ::nanosleep(&pause, nullptr);
    }
  }
}

void Store::rebuild_trees_locked(const StepsInDoubt& doubt) {
  control().rebuilding.store(1, std::memory_order_seq_cst);
  wait_for_priority_writers();
  repair_steps_locked(doubt);
  for (const uint32_t slot : doubt.clients) journals()[slot].count.store(0);
  priority_tree_.rebuild();
  bit_tree_.rebuild();
  control().rebuilding.store(0, std::memory_order_seq_cst);
}

void Store::rebuild_locked(Steps steps) {
  Control& c = control();
  c.rebuilding.store(1, std::memory_order_seq_cst);
  wait_for_priority_writers();

  std::array<bool, kMaxClients> alive{};
  const int fd = mapping_->fd();
  StepsInDoubt doubt;
  doubt.everything = steps == Steps::all;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    Client& some = client(slot);
    alive[slot] = some.in_use != 0 && (slot == client_slot_ || client_lives(fd, slot));
    some.in_use = alive[slot];
    some.held = kNoRow;
    some.held_count = 0;
    if (alive[slot]) continue;
    some.priority_writers.store(0);
    if (per_step()) {
      doubt.add(journals()[slot], false);
      journals()[slot].count.store(0);
    }
  }
  c.free_head = c.free_tail = c.order_head = c.order_tail = kNoRow;
  c.free_count = c.writing_count = c.exhausted_count = c.open_count = 0;
  c.heap_count = 0;
  PendingCommit& pending = pending_commit();
  // Others may have committed since where an earlier build, which does not know of it, repaired the segment.
  if (pending.first.load(kRelaxed) + pending.rows != next_sequence()) pending.first.store(0, kRelaxed);
  if (next_sequence() > kLastSequence) set_next_sequence(1);

  const uint64_t rows = header().capacity;
  std::vector<std::pair<uint64_t, uint32_t>> committed;  // (sequence, row)
  uint64_t open_rows = 0, finished = 0;
  if (per_step()) {
    doubt.add(journals()[kMaxClients], true);
    // Whoever dies in here leaves the rows that it finished, which the next does not find pending.
    if (pending.first.load(kRelaxed) != 0) journals()[kMaxClients].count.store(kEverything);
  }
  for (uint64_t word = 0; word < bit_tree_.shape().leaves; ++word) bit_tree_.leaves()[word].store(0, kRelaxed);
  uint64_t under_way = 0;
  struct Rebuild {
    Tasks* tasks;
    ~Rebuild() {
      if (tasks != nullptr) tasks->end_rebuild();
    }
  } rebuild{tasks_.get()};
  if (tasks_ != nullptr) tasks_->begin_rebuild(alive);
  for (uint32_t row = 0; row < rows; ++row) {
    RowStatus& s = status()[row];
    s.mark = 0;
    if (finish_pending(row, s)) {
      ++finished;
      if (per_step()) doubt.rows.push_back(row);
    }
    uint64_t word = words()[row].load(kRelaxed);
    const bool owner_alive = s.owner < kMaxClients && alive[s.owner];
    if ((content_number(row) & 1) != 0) {  // its writer died while it wrote in place
      if (is_committed(word) && s.state == RowState::committed) {
        word = make_word(generation_of(word) + 1, 0);
        words()[row].store(word, kRelaxed);  // its state makes it one that was reclaimed, below
      }
      // Last: who finds the number even, a reader or the next rebuild after a death in here, finds the key stale.
      s.inserted_at_ns.fetch_add(1, std::memory_order_release);
    }
    if (is_committed(word) && tasks_ != nullptr && tasks_->is_taken(row)) {
      words()[row].store(make_word(generation_of(word), 0), kRelaxed);
      std::atomic_ref(s.state).store(RowState::taken, kRelaxed);
    } else if (is_committed(word) && s.state != RowState::exhausted) {
      if (s.state == RowState::open && owner_alive) {
        hold(row, s.owner, RowState::open);
        if (s.sequence > kLastSequence) s.sequence = 0;
        set_next_sequence(std::max(next_sequence(), s.sequence + 1));
        ++open_rows;
      } else {
        if (s.state == RowState::open) {
          count_episodes(row);
          end_repeats(row);
        }
        std::atomic_ref(s.state).store(RowState::committed, kRelaxed);
        committed.emplace_back(s.sequence, row);
      }
      bit_tree_.leaves()[row / 64].fetch_or(uint64_t{1} << (row % 64), kRelaxed);
    } else if (s.state == RowState::under_way && !is_committed(word) && tasks_ != nullptr && tasks_->survives(row)) {
      words()[row].store(make_word(generation_of(word), 0), kRelaxed);
      committed.emplace_back(s.sequence, row);  // on the same list
      ++under_way;
    } else if (s.state == RowState::under_way && !is_committed(word)) {
      words()[row].store(make_word(generation_of(word) + 2, 0), kRelaxed);
      put_free_row(row);
    } else if (is_committed(word) && owner_alive) {
      words()[row].store(make_word(generation_of(word), 0), kRelaxed);
      hold(row, s.owner, RowState::exhausted);
    } else if (is_committed(word)) {
      words()[row].store(make_word(generation_of(word) + 1, 0), kRelaxed);
      put_free_row(row);
    } else {
      words()[row].store(make_word(generation_of(word), 0), kRelaxed);
      const bool half_written =
          s.state == RowState::writing || s.state == RowState::open || s.state == RowState::committed;
      if (half_written && s.state != RowState::committed && owner_alive) {
        hold(row, s.owner, RowState::writing);
      } else {
        if (half_written) {
          c.counters.reclaimed.fetch_add(1, kRelaxed);
        }
        put_free_row(row);
      }
    }
  }
  std::sort(committed.begin(), committed.end());
  // Only a damaged segment has two rows of one number, or numbers that leave no room for others: the order stays.
  const auto same = [](const auto& one, const auto& other) { return one.first == other.first; };
  if (std::adjacent_find(committed.begin(), committed.end(), same) != committed.end() ||
      (!committed.empty() && committed.back().first > kLastSequence)) {
    for (size_t i = 0; i < committed.size(); ++i) {
      committed[i].first = i + 1;
      status()[committed[i].second].sequence.store(i + 1, kRelaxed);
    }
  }
  for (const auto& [sequence, row] : committed) {
    link_order({&row, 1});
    set_next_sequence(std::max(next_sequence(), sequence + 1));
  }
  c.committed_count.store(committed.size() - under_way + open_rows, kRelaxed);
  if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) {
    Heap heap(*this);
    heap.clear();
    for (const auto& [sequence, row] : committed) heap.push(row);
  }
  if (per_step()) {
    repair_steps_locked(doubt);
    journals()[kMaxClients].count.store(0);
  }
  priority_tree_.rebuild();
  bit_tree_.rebuild();
  if (tasks_ != nullptr) {
    Sums sums(*this);
    tasks_->finish_rebuild(sums);
  }
  if (finished != 0) {
    // Their writer had not yet made room for them.
    Sums sums(*this);
    while (committed_count() > header().max_rows && evict_one(sums)) {
    }
    count(c.counters.inserted, finished);
  }
  pending.first.store(0, std::memory_order_release);
  c.rebuilding.store(0, std::memory_order_seq_cst);
}

std::vector<std::string> Store::audit() {
  ensure_client();
  Guard guard(*this);
  Control& c = control();
  std::vector<std::string> problems;
  const auto wrong = [&](const auto&... parts) {
    if (problems.size() < 20) problems.push_back(message_of({parts...}));
  };
  WritersOut sums_stay(*this);
  wait_for_priority_writers();

  const uint64_t rows = header().capacity;
  std::vector<uint8_t> seen(rows, 0);
  const auto walk = [&](uint32_t head, const char* list, auto&& check) {
    uint64_t length = 0;
    uint32_t previous = kNoRow;
    for (uint32_t row = head; row != kNoRow; row = status()[row].next) {
      if (row >= rows || length > rows) {
        wrong("the ", list, " list runs out of the table or in a circle");
        break;
      }
      if (seen[row]++ != 0) wrong("row ", row, " is on two lists, the second is the ", list, " list");
      if (status()[row].previous != previous) wrong("row ", row, " of the ", list, " list has a wrong back link");
      check(row);
      previous = row;
      ++length;
    }
    return length;
  };
  const auto state_is = [&](uint32_t row, RowState expected, bool odd) {
    if (status()[row].state != expected || is_committed(words()[row].load(kRelaxed)) != odd) {
      wrong("row ", row, " is in state ", int(status()[row].state), " with generation ",
            generation_of(words()[row].load(kRelaxed)), " on a list of state ", int(expected));
    }
  };

  uint32_t before = kNoRow;
  const uint64_t free_count = walk(c.free_head, "free", [&](uint32_t row) { state_is(row, RowState::free, false); });
  uint64_t under_way = 0;
  const uint64_t ordered = walk(c.order_head, "order", [&](uint32_t row) {
    const bool way = tasks_ != nullptr && status()[row].state == RowState::under_way;
    under_way += way;
    state_is(row, way ? RowState::under_way : RowState::committed, !way);
    if (before != kNoRow && status()[before].sequence >= status()[row].sequence) {
      wrong("rows ", before, " and ", row, " are out of order");
    }
    before = row;
  });
  const uint64_t committed = ordered - under_way;
  uint64_t held = 0, open_rows = 0;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (client(slot).in_use == 0) continue;
    const uint64_t here = walk(client(slot).held, "held", [&](uint32_t row) {
      const RowState state = status()[row].state;
      const bool published = state == RowState::exhausted || state == RowState::open;
      state_is(row, published ? state : RowState::writing, published);
      open_rows += state == RowState::open;
      if (status()[row].owner != slot) wrong("row ", row, " is held by slot ", slot, " but owned by another");
    });
    if (here != client(slot).held_count) wrong("slot ", slot, " holds ", here, " rows, its count disagrees");
    held += here;
  }
  if (free_count != c.free_count) wrong("the free queue has ", free_count, " rows, its count is ", c.free_count);
  if (committed + open_rows != c.committed_count) {
    wrong(committed, " rows are committed and ", open_rows, " open, the count is ", c.committed_count);
  }
  if (open_rows != c.open_count) wrong(open_rows, " rows are open, the count is ", c.open_count);
  if (held != c.writing_count + c.exhausted_count + open_rows) wrong(held, " rows are held, the counts disagree");
  uint64_t taken = 0;
  for (uint32_t row = 0; row < rows && tasks_ != nullptr; ++row) {
    if (seen[row] != 0 || status()[row].state != RowState::taken) continue;
    state_is(row, RowState::taken, true);
    ++taken;
  }
  if (tasks_ != nullptr) tasks_->audit([&](const std::string& problem) { wrong(problem); });
  if (free_count + ordered + held + taken != rows) {
    wrong("of ", rows, " rows ", free_count, " are free, ", committed, " committed, ", held, " held and ", taken,
          " kept: some are lost");
  }
  for (uint32_t row = 0; row < rows; ++row) {
    const bool bit = (bit_tree_.leaves()[row / 64].load(kRelaxed) >> (row % 64) & 1) != 0;
    const RowState state = status()[row].state;
    if (bit != (state == RowState::committed || state == RowState::open))
      wrong("row ", row, " has a wrong selectable bit");
    if (!bit && priority_of(words()[row].load(kRelaxed)) != 0)
      wrong("row ", row, " has a priority but cannot be selected");
  }
  if (largest_ != nullptr) {
    const PriorityTree& tree = per_step() ? step_tree_ : priority_tree_;
    const uint32_t most = std::max(max_priority(), rounded(1.0));  // what is new before a priority is given has 1
    for (uint64_t leaf = 0; leaf < tree.shape().leaves; ++leaf) {
      const uint32_t priority = priority_of(tree.leaves()[leaf].load(kRelaxed));
      if (priority > most) wrong("place ", leaf, " has priority ", priority, ", the largest is said to be ", most);
    }
  }
  if (priority_tree_.audit() != 0) wrong(priority_tree_.audit(), " sums of priorities are off");
  if (per_step()) audit_steps([&](const std::string& problem) { wrong(problem); });
  if (bit_tree_.audit() != 0) wrong(bit_tree_.audit(), " counts of selectable rows are off");
  if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) {
    const uint64_t misplaced = Heap(*this).audit();
    if (misplaced != 0) wrong(misplaced, " rows are misplaced in the heap");
    if (c.heap_count != committed) wrong("the heap has ", c.heap_count, " rows, ", committed, " are committed");
  }
  return problems;
}

void Store::restore(std::span<const RestoredRow> rows, uint64_t next_sequence, std::span<const uint32_t> steps) {
  ensure_client();
  refuse_spans("restored");
  if (rows.size() != header().capacity) {
    fail(ErrorKind::schema, "a restored store needs all of its ", header().capacity, " rows, found ", rows.size());
  }
  Guard guard(*this);
  Control& c = control();
  if (c.writing_count != rows.size())
    fail(ErrorKind::schema, "only a new store, all its rows allocated, can be restored");
  std::vector<uint8_t> seen(rows.size(), 0);
  uint64_t last_sequence = 0, steps_needed = 0;
  for (const RestoredRow& from : rows) {
    const bool committed = (from.generation & 1) != 0;
    if (from.row >= rows.size() || seen[from.row]++ != 0 || from.length > header().max_length ||
        (committed && from.sequence <= last_sequence) || (committed && from.sequence >= next_sequence)) {
      fail(ErrorKind::schema, "the row table of the checkpoint contradicts itself at row ", from.row);
    }
    if (committed) last_sequence = from.sequence;
    if (committed && per_step()) steps_needed += from.length;
  }
  if (steps.size() != steps_needed) {
    fail(ErrorKind::schema, "the rows of the checkpoint have ", steps_needed, " priorities of steps, found ",
         steps.size());
  }
  Sums sums(*this);
  for (const RestoredRow& from : rows) {
    RowStatus& s = status()[from.row];
    unhold(from.row);
    if ((from.generation & 1) == 0) {
      words()[from.row].store(make_word(from.generation, 0), kRelaxed);
      put_free_row(from.row);
      continue;
    }
    s.sequence.store(from.sequence, kRelaxed);
    s.inserted_at_ns.store(from.inserted_at_ns & ~(content_mask_ & 1), kRelaxed);
    s.version.store(from.version, kRelaxed);
    s.length.store(from.length, kRelaxed);
    s.times_sampled.store(from.times_sampled, kRelaxed);
    note_sampled(from.row, samples_so_far());
    s.state = RowState::committed;
    if (per_step()) {
      sums.begin(from.row);
      for (uint32_t step = 0; step < from.length; ++step) {
        const uint64_t leaf = leaf_of(from.row, step);
        step_tree_.leaves()[leaf].store(make_word(from.generation, steps[step]), kRelaxed);
        sums.steps.add(leaf, steps[step]);
      }
      steps = steps.subspan(from.length);
    }
    const uint32_t priority = per_step() ? 0 : from.priority;
    words()[from.row].store(make_word(from.generation, priority), std::memory_order_release);
    sums.priorities.add(from.row, priority);
    set_bit(sums, from.row, true);
    link_order({&from.row, 1});
    if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) Heap(*this).push(from.row);
    sums.settle();
    c.committed_count.fetch_add(1, std::memory_order_release);
  }
  set_next_sequence(next_sequence);
}

// --- damage that is found on the way ---------------------------------------------------------------------------------

void StatusTable::fail_out_of_table(uint64_t row) const {
  store_->fail_damaged("a list leads to row", row);
}

void Store::fail_damaged(const char* what, uint64_t number) const {
  // As after a death inside the lock. Whoever holds it now is about to leave it with the change half done.
  if (!read_only()) control().rebuilding.store(1, std::memory_order_seq_cst);
  fail(ErrorKind::corrupt, mapping_->path(), " is damaged: ", what, " ", number, ", it has ", header().capacity,
       " rows and ", kMaxClients,
       " clients. The next call rebuilds its lists from its rows; audit() tells whether they "
       "are right");
}

}  // namespace geartrain
