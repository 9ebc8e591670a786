// Rows: how they are taken, committed, weighed and removed.

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "base/clock.h"
#include "base/errors.h"
#include "segment/bucket_order.h"
#include "store/remover_heap.h"
#include "store/store.h"

namespace geartrain {
namespace {

constexpr size_t kAhead = 12;  // rows whose words are fetched ahead of their update
constexpr uint64_t kReapEvery_ns = 100'000'000;

void count(std::atomic<uint64_t>& counter, uint64_t n = 1) {
  if (n != 0) counter.fetch_add(n, kRelaxed);
}

}  // namespace

// Announces that this process is changing weights without the lock, so that a rebuild waits for it, and a
// rebuild after its death knows that sums may be half updated.
class WeightWriter {
 public:
  explicit WeightWriter(Store& store) : writers_(store.client(store.client_slot_).weight_writers) {
    writers_.fetch_add(1, std::memory_order_seq_cst);
    while (store.control().rebuilding.load(std::memory_order_seq_cst) != 0) {
      writers_.fetch_sub(1, std::memory_order_seq_cst);
      {
        Store::Guard wait_for_the_rebuild(store);
      }
      writers_.fetch_add(1, std::memory_order_seq_cst);
    }
  }
  ~WeightWriter() { writers_.fetch_sub(1, std::memory_order_seq_cst); }
  WeightWriter(const WeightWriter&) = delete;
  WeightWriter& operator=(const WeightWriter&) = delete;

 private:
  std::atomic<uint32_t>& writers_;
};

// --- the calls ------------------------------------------------------------------------------------------------

void Store::allocate(std::span<uint32_t> rows) {
  ensure_client();
  Guard guard(*this);
  Sums sums(*this);
  Control& c = control();
  give_up_locked();
  if (header().max_age_ns != 0) expire_locked(wall_ns());
  if (c.free_count < rows.size()) {
    // Dead writers' rows come before living ones' experience. Asking the kernel who is alive costs a system
    // call per client, so it is not done for every row of a full store.
    const bool short_of_rows = c.free_count + removable_count() < rows.size();
    if (short_of_rows || monotonic_ns() - c.last_reap_ns > kReapEvery_ns) reap_locked();
  }
  if (c.free_count + removable_count() < rows.size()) {
    fail(ErrorKind::full, rows.size(), " rows were asked for, but of ", header().capacity, " rows ", c.writing_count,
         " are being written, ", c.growing_count, " extended and ", c.spent_count,
         " read for the last time; commit, seal or abandon some, or create the store with more capacity");
  }
  for (uint32_t& row : rows) {
    if (c.free_count == 0) evict_one(sums);
    row = take_free_row();
    hold(row, client_slot_, RowState::writing);
  }
  // A reader that still copies an evicted row must see its new generation before any of the bytes that the
  // caller writes next.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Store::check_values(size_t n, const CommitValues& values) const {
  const auto sized = [&](size_t size, const char* what) {
    if (size != 0 && size != n) fail(ErrorKind::schema, n, " rows were given with ", size, " ", what);
  };
  sized(values.lengths.size(), "lengths");
  sized(values.weights.size(), "priorities");
  sized(values.versions.size(), "versions");
  for (size_t i = 0; i < values.lengths.size(); ++i) {
    if (values.lengths[i] == 0 || values.lengths[i] > header().max_length) {
      fail(ErrorKind::schema, "row ", i, " has length ", values.lengths[i], ", a block holds 1 to ",
           header().max_length, " steps");
    }
  }
  validate_weights(values.weights);
}

void Store::commit(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations) {
  ensure_client();
  check_values(rows.size(), values);
  // Streaming stores by whoever filled the blocks must not overtake the words that publish them.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Guard guard(*this);
  Sums sums(*this);
  check_held(rows);
  Control& c = control();
  check_the_cap(1);  // the others of one call can make room for each other
  const uint64_t now_ns = wall_ns();
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t row = rows[i];
    make_room_at_the_cap(sums);
    unhold(row);
    const uint64_t word = write_values(row, i, values, now_ns);
    status()[row].state = RowState::committed;
    make_selectable(sums, row, word);
    link_order(row);
    if (header().remover == static_cast<uint32_t>(Remover::lowest_weight)) Heap(*this).push(row);
    generations[i] = generation_of(word);
  }
  count(c.counters.inserted, rows.size());
  announce(c.limiter);
}

void Store::publish(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations) {
  ensure_client();
  check_values(rows.size(), values);
  if (header().max_times_sampled != 0) {
    fail(ErrorKind::schema,
         "a store with max_times_sampled gives a row away with its last sample, so none can be "
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
    const uint64_t word = write_values(row, i, values, now_ns);
    --c.writing_count;
    ++c.growing_count;
    status()[row].state = RowState::growing;  // it stays on this client's held list
    make_selectable(sums, row, word);
    generations[i] = generation_of(word);
  }
  count(c.counters.inserted, rows.size());
  announce(c.limiter);
}

void Store::extend(uint32_t row, uint32_t length) {
  ensure_client();
  Guard guard(*this);
  check_held({&row, 1}, RowState::growing);
  std::atomic<uint32_t>& known = status()[row].length;
  if (length < known.load(kRelaxed) || length > header().max_length) {
    fail(ErrorKind::schema, "row ", row, " has ", known.load(kRelaxed), " steps and a block holds ",
         header().max_length, ": it cannot be extended to ", length);
  }
  known.store(length, std::memory_order_release);  // after the steps
}

void Store::seal(std::span<const uint32_t> rows) {
  ensure_client();
  Guard guard(*this);
  check_held(rows, RowState::growing);
  const uint64_t now_ns = wall_ns();
  for (const uint32_t row : rows) seal_locked(row, now_ns);
}

void Store::seal_locked(uint32_t row, uint64_t now_ns) {
  RowStatus& s = status()[row];
  unhold(row);
  // Its number and age are those of its end: it is the newest, and the order list stays sorted.
  s.sequence.store(control().next_sequence++, kRelaxed);
  s.inserted_at_ns.store(now_ns, kRelaxed);
  s.state = RowState::committed;
  link_order(row);
  if (header().remover == static_cast<uint32_t>(Remover::lowest_weight)) Heap(*this).push(row);
}

uint64_t Store::write_values(uint32_t row, size_t i, const CommitValues& values, uint64_t now_ns) {
  RowStatus& s = status()[row];
  s.sequence.store(control().next_sequence++, kRelaxed);
  s.inserted_at_ns.store(now_ns, kRelaxed);
  s.length.store(values.lengths.empty() ? header().max_length : values.lengths[i], kRelaxed);
  s.version.store(values.versions.empty() ? 0 : values.versions[i], kRelaxed);
  s.times_sampled.store(0, kRelaxed);
  return make_word(generation_of(words()[row].load(kRelaxed)) + 1,
                   fixed_point(values.weights.empty() ? 1.0 : values.weights[i]));
}

void Store::make_selectable(Sums& sums, uint32_t row, uint64_t word) {
  words()[row].store(word, std::memory_order_release);  // the row is true from here on
  sums.weights.add(row, weight_of(word));
  set_bit(sums, row, true);
  control().committed_count.store(committed_count() + 1, kRelaxed);
}

void Store::check_the_cap(size_t rows) const {
  if (control().growing_count + rows > header().max_rows) {
    fail(ErrorKind::full, rows, " more were to be added, but ", control().growing_count, " of the ", header().max_rows,
         " rows that may be kept are still being extended; seal some, or create the store with more rows");
  }
}

void Store::make_room_at_the_cap(Sums& sums) {
  // The oldest of the others makes room, by the remover's choice.
  if (committed_count() >= header().max_rows) evict_one(sums);
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

void Store::give_up_locked() {
  std::lock_guard lock(given_up_mutex_);
  for (uint32_t row : given_up_) {
    // In a forked child these are the parent's, who keeps its own list.
    if (status()[row].state != RowState::writing || status()[row].owner != client_slot_) continue;
    unhold(row);
    put_free_row(row);
    count(control().counters.abandoned);
  }
  given_up_.clear();
}

uint64_t Store::update_weights(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                               std::span<const double> weights) {
  ensure_client();
  if (rows.size() != weights.size() || rows.size() != generations.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", weights.size(), " priorities");
  }
  check_rows(rows);
  validate_weights(weights);
  uint64_t stale = 0;
  const bool ordered = header().remover == static_cast<uint32_t>(Remover::lowest_weight);
  if (ordered || header().max_times_sampled != 0) {
    // The heap follows the weights; and a row that was sampled for the last time keeps its generation while it is
    // read, so that only its state tells that its weight is zero for good.
    Guard guard(*this);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (generation_of(words()[rows[i]].load(kRelaxed)) != generations[i] || (generations[i] & 1) == 0 ||
          status()[rows[i]].state == RowState::spent) {
        ++stale;
        continue;
      }
      set_weight_locked(rows[i], fixed_point(weights[i]));
      if (ordered && status()[rows[i]].state == RowState::committed) Heap(*this).moved(rows[i]);
    }
  } else {
    struct Update {
      uint32_t row, generation, weight;
    };
    const auto update = [&](size_t i) { return Update{rows[i], generations[i], fixed_point(weights[i])}; };
    PooledArray<Update> ordered;  // the same row's updates keep their order, so the last one wins
    if (rows.size() >= kOrderFrom) {
      ordered = bucket_order<Update>(rows.size(), header().capacity, [&](size_t i) { return rows[i]; }, update);
    }
    WeightWriter writer(*this);
    WeightTree::Adder sums(weight_tree_);
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t ahead = i + kAhead;
      if (ahead < rows.size()) weight_tree_.prefetch(ordered.empty() ? rows[ahead] : ordered[ahead].row);
      const auto [row, generation, weight] = ordered.empty() ? update(i) : ordered[i];
      uint64_t old = words()[row].load(kRelaxed);
      bool changed = false;
      while (!changed && generation_of(old) == generation && is_committed(old)) {
        changed = words()[row].compare_exchange_weak(old, make_word(generation, weight), kRelaxed);
      }
      // Whoever changed the word owes the sums the difference, even if the row is evicted in between: the eviction
      // takes away the weight it found.
      if (changed) sums.add(row, uint64_t{weight} - weight_of(old));
      stale += !changed;
    }
  }
  count(control().counters.weights_updated, rows.size() - stale);
  count(control().counters.stale_keys, stale);
  return stale;
}

void Store::raise_weights(double power) {
  ensure_client();
  const auto raised = [&](uint64_t word) { return fixed_point(std::pow(weight_of(word) / weight_scale_, power)); };
  const uint64_t rows = header().capacity;
  if (header().remover == static_cast<uint32_t>(Remover::lowest_weight)) {
    Guard guard(*this);
    Heap heap(*this);
    for (uint32_t row = 0; row < rows; ++row) {
      const uint64_t word = words()[row].load(kRelaxed);
      if (weight_of(word) == 0) continue;
      set_weight_locked(row, raised(word));
      if (status()[row].state != RowState::committed) continue;  // growing: it is not in the heap yet
      heap.moved(row);  // different weights may have become equal, and then age decides
    }
    return;
  }
  WeightWriter writer(*this);
  WeightTree::Adder sums(weight_tree_);
  for (uint64_t row = 0; row < rows; ++row) {
    uint64_t old = words()[row].load(kRelaxed);
    uint64_t fresh = old;
    do {
      if (weight_of(old) == 0) break;  // free, spent or not to be drawn
      fresh = make_word(generation_of(old), raised(old));
    } while (!words()[row].compare_exchange_weak(old, fresh, kRelaxed));
    if (weight_of(old) != 0) sums.add(row, uint64_t{weight_of(fresh)} - weight_of(old));
  }
}

uint64_t Store::remove(std::span<const uint32_t> rows, std::span<const uint32_t> generations) {
  ensure_client();
  check_rows(rows);
  Guard guard(*this);
  Sums sums(*this);
  uint64_t stale = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint64_t word = words()[rows[i]].load(kRelaxed);
    if (generation_of(word) != generations[i] || status()[rows[i]].state != RowState::committed ||
        !is_committed(word)) {
      ++stale;
      continue;
    }
    retire(sums, rows[i]);
    put_free_row(rows[i]);
  }
  count(control().counters.deleted, rows.size() - stale);
  count(control().counters.stale_keys, stale);
  return stale;
}

void Store::count_samples(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                          std::span<uint8_t> taken) {
  ensure_client();
  check_rows(rows);
  uint64_t counted = 0;
  const uint32_t limit = header().max_times_sampled;
  if (limit == 0) {
    for (size_t i = 0; i < rows.size(); ++i) {
      taken[i] = generation_of(words()[rows[i]].load(kRelaxed)) == generations[i];
      if (taken[i] != 0) status()[rows[i]].times_sampled.fetch_add(1, kRelaxed);
      counted += taken[i];
    }
  } else {
    Guard guard(*this);
    Sums sums(*this);
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint32_t row = rows[i];
      RowStatus& s = status()[row];
      const uint64_t word = words()[row].load(kRelaxed);
      taken[i] = generation_of(word) == generations[i] && is_committed(word) && s.state == RowState::committed;
      if (taken[i] == 0) continue;
      ++counted;
      if (s.times_sampled.fetch_add(1, kRelaxed) + 1 < limit) continue;
      // The last sample: out of everybody's sight, but readable under its generation until release_spent.
      if (header().remover == static_cast<uint32_t>(Remover::lowest_weight)) Heap(*this).erase(row);
      unlink_order(row);
      set_bit(sums, row, false);
      control().committed_count.fetch_sub(1, kRelaxed);
      hold(row, client_slot_, RowState::spent);
      set_weight_locked(row, 0);
    }
  }
  count(control().counters.sampled, counted);
}

void Store::release_spent(std::span<const uint32_t> rows, std::span<const uint32_t> generations) {
  if (header().max_times_sampled == 0) return;
  ensure_client();
  check_rows(rows);
  Guard guard(*this);
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowStatus& s = status()[rows[i]];
    if (s.state != RowState::spent || s.owner != client_slot_ ||
        generation_of(words()[rows[i]].load(kRelaxed)) != generations[i]) {
      continue;
    }
    unhold(rows[i]);
    free_spent(rows[i]);
    put_free_row(rows[i]);
  }
}

void Store::set_times_sampled(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                              std::span<const uint32_t> counts) {
  ensure_client();
  check_rows(rows);
  if (generations.size() != rows.size() || counts.size() != rows.size()) {
    fail(ErrorKind::schema, "as many generations and counts as rows are needed");
  }
  Guard guard(*this);
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t generation = generation_of(words()[rows[i]].load(kRelaxed));
    if (generation == generations[i] && (generation & 1) != 0)
      status()[rows[i]].times_sampled.store(counts[i], kRelaxed);
  }
}

void Store::advance_sequence(uint64_t next) {
  // 2^63 leaves room for commits for ever.
  if (next > uint64_t{1} << 63) fail(ErrorKind::schema, "sequence numbers go up to 2^63, found ", next);
  ensure_client();
  Guard guard(*this);
  control().next_sequence = std::max(control().next_sequence, next);
}

uint64_t Store::expire() {
  if (header().max_age_ns == 0) return 0;
  ensure_client();
  Guard guard(*this);
  return expire_locked(wall_ns());
}

void Store::keys(std::vector<uint32_t>* rows, std::vector<uint32_t>* generations) {
  rows->clear();
  generations->clear();
  if (read_only_) {
    // Without the lock the list cannot be walked; the words and sequence numbers can be read.
    std::vector<std::tuple<uint64_t, uint32_t, uint32_t>> found;  // (sequence, row, generation)
    for (uint32_t row = 0; row < header().capacity; ++row) {
      const bool selectable = (bit_tree_.leaves()[row / 64].load(kRelaxed) >> (row % 64) & 1) != 0;
      const uint64_t word = words()[row].load(std::memory_order_acquire);
      if (selectable && is_committed(word)) found.push_back({status()[row].sequence, row, generation_of(word)});
    }
    std::sort(found.begin(), found.end());
    for (const auto& [sequence, row, generation] : found) {
      rows->push_back(row);
      generations->push_back(generation);
    }
    return;
  }
  ensure_client();
  Guard guard(*this);
  rows->reserve(committed_count());
  generations->reserve(committed_count());
  const auto add = [&](uint32_t row) {
    rows->push_back(row);
    generations->push_back(generation_of(words()[row].load(kRelaxed)));
  };
  // Growing rows are on their writers' lists, and among the others by the number they were published under.
  std::vector<std::pair<uint64_t, uint32_t>> growing;  // (sequence, row)
  for (uint32_t slot = 0; slot < kMaxClients && growing.size() < control().growing_count; ++slot) {
    if (client(slot).in_use == 0) continue;
    for (uint32_t row = client(slot).held; row != kNoRow; row = status()[row].next) {
      if (status()[row].state == RowState::growing) growing.push_back({status()[row].sequence, row});
    }
  }
  std::sort(growing.begin(), growing.end());
  auto next = growing.begin();
  for (uint32_t row = control().order_head; row != kNoRow; row = status()[row].next) {
    for (; next != growing.end() && next->first < status()[row].sequence; ++next) add(next->second);
    add(row);
  }
  for (; next != growing.end(); ++next) add(next->second);
}

std::vector<uint32_t> Store::free_rows() {
  ensure_client();
  Guard guard(*this);
  std::vector<uint32_t> rows;
  for (uint32_t row = control().free_head; row != kNoRow; row = status()[row].next) rows.push_back(row);
  return rows;
}

// --- the lists ------------------------------------------------------------------------------------------------

uint32_t Store::take_free_row() {
  Control& c = control();
  const uint32_t row = c.free_head;
  c.free_head = status()[row].next;
  (c.free_head == kNoRow ? c.free_tail : status()[c.free_head].previous) = kNoRow;
  --c.free_count;
  return row;
}

void Store::put_free_row(uint32_t row) {
  Control& c = control();
  RowStatus& s = status()[row];
  s.state = RowState::free;
  s.previous = c.free_tail;
  s.next = kNoRow;
  (c.free_tail == kNoRow ? c.free_head : status()[c.free_tail].next) = row;
  c.free_tail = row;
  ++c.free_count;
}

void Store::hold(uint32_t row, uint32_t slot, RowState state) {
  Client& mine = client(slot);
  RowStatus& s = status()[row];
  // The owner before the state, for a rebuild after a death in between: a row in a held state belongs to its owner.
  s.owner = static_cast<uint16_t>(slot);
  std::atomic_signal_fence(std::memory_order_release);
  s.state = state;
  s.previous = kNoRow;
  s.next = mine.held;
  if (mine.held != kNoRow) status()[mine.held].previous = row;
  mine.held = row;
  ++mine.held_count;
  ++held_count(state);
}

uint64_t& Store::held_count(RowState state) const {
  Control& c = control();
  return state == RowState::writing ? c.writing_count : state == RowState::growing ? c.growing_count : c.spent_count;
}

void Store::unhold(uint32_t row) {
  RowStatus& s = status()[row];
  Client& owner = client(s.owner);
  (s.previous == kNoRow ? owner.held : status()[s.previous].next) = s.next;
  if (s.next != kNoRow) status()[s.next].previous = s.previous;
  --owner.held_count;
  --held_count(s.state);
}

void Store::link_order(uint32_t row) {
  Control& c = control();
  RowStatus& s = status()[row];
  s.previous = c.order_tail;
  s.next = kNoRow;
  (c.order_tail == kNoRow ? c.order_head : status()[c.order_tail].next) = row;
  c.order_tail = row;
}

void Store::unlink_order(uint32_t row) {
  Control& c = control();
  RowStatus& s = status()[row];
  (s.previous == kNoRow ? c.order_head : status()[s.previous].next) = s.next;
  (s.next == kNoRow ? c.order_tail : status()[s.next].previous) = s.previous;
}

void Store::set_bit(Sums& sums, uint32_t row, bool selectable) {
  // Only the lock's holder writes bits, so a load and a store will do.
  const uint64_t bit = uint64_t{1} << (row % 64);
  std::atomic<uint64_t>& word = bit_tree_.leaves()[row / 64];
  const uint64_t old = word.load(kRelaxed);
  word.store(selectable ? old | bit : old & ~bit, kRelaxed);
  sums.bits.add(row / 64, selectable ? 1 : ~uint64_t{0});
}

// --- removal --------------------------------------------------------------------------------------------------

bool Store::evict_one(Sums& sums) {
  const Control& c = control();
  uint32_t victim = kNoRow;
  switch (static_cast<Remover>(header().remover)) {
    case Remover::fifo:
      victim = c.order_head;
      break;
    case Remover::lifo:
      victim = c.order_tail;
      break;
    case Remover::lowest_weight:
      victim = Heap(*this).top();
      break;
  }
  if (victim == kNoRow) return false;
  retire(sums, victim);
  put_free_row(victim);
  count(control().counters.evicted);
  return true;
}

void Store::retire(Sums& sums, uint32_t row) {
  if (header().remover == static_cast<uint32_t>(Remover::lowest_weight)) Heap(*this).erase(row);
  // One exchange takes the weight away and makes every key of the row stale; updates that come later lose.
  const uint32_t generation = generation_of(words()[row].load(kRelaxed));
  const uint64_t old = words()[row].exchange(make_word(generation + 1, 0), std::memory_order_acq_rel);
  sums.weights.add(row, uint64_t{0} - weight_of(old));
  set_bit(sums, row, false);
  unlink_order(row);
  control().committed_count.store(committed_count() - 1, kRelaxed);
}

void Store::free_spent(uint32_t row) {
  const uint32_t generation = generation_of(words()[row].load(kRelaxed));
  words()[row].store(make_word(generation + 1, 0), std::memory_order_release);  // its weight is zero already
  count(control().counters.spent);
}

uint64_t Store::expire_locked(uint64_t now_ns) {
  const Control& c = control();
  const uint64_t limit = header().max_age_ns;
  uint64_t expired = 0;
  Sums sums(*this);
  // The order list is by commit, so the oldest come first.
  while (limit != 0 && c.order_head != kNoRow && status()[c.order_head].inserted_at_ns + limit < now_ns) {
    const uint32_t row = c.order_head;
    retire(sums, row);
    put_free_row(row);
    ++expired;
  }
  count(control().counters.expired, expired);
  return expired;
}

// --- weights and checks ---------------------------------------------------------------------------------------

void Store::set_weight_locked(uint32_t row, uint32_t weight) {
  // Updates without the lock may race for the same word: take what was there, whatever it was.
  uint64_t old = words()[row].load(kRelaxed);
  while (!words()[row].compare_exchange_weak(old, make_word(generation_of(old), weight), kRelaxed)) {
  }
  weight_tree_.add(row, uint64_t{weight} - weight_of(old));
}

uint32_t Store::fixed_point(double weight) {
  const double scaled = weight * weight_scale_;
  if (scaled >= 4294967295.5) {
    count(control().counters.weights_saturated);
    return std::numeric_limits<uint32_t>::max();
  }
  const auto fixed = static_cast<uint32_t>(std::nearbyint(scaled));
  if (fixed == 0 && weight > 0) {
    count(control().counters.weights_rounded_up);  // a row with some weight must stay reachable
    return 1;
  }
  return fixed;
}

void Store::validate_weights(std::span<const double> weights) const {
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!(weights[i] >= 0) || std::isinf(weights[i])) {
      fail(ErrorKind::schema, "a priority is a finite number >= 0, priority ", i, " of ", weights.size(), " is ",
           weights[i]);
    }
  }
}

void Store::check_rows(std::span<const uint32_t> rows) const {
  for (uint32_t row : rows) {
    if (row >= header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", header().capacity);
    }
  }
}

void Store::check_held(std::span<const uint32_t> rows, RowState state) const {
  check_rows(rows);
  const auto clear_marks = [&] {
    for (uint32_t row : rows) status()[row].mark = 0;
  };
  for (uint32_t row : rows) {
    RowStatus& s = status()[row];
    if (s.state != state || s.owner != client_slot_ || s.mark != 0) {
      const bool twice = s.mark != 0;
      clear_marks();
      if (twice) fail(ErrorKind::schema, "row ", row, " is named twice in one call");
      fail(ErrorKind::stale_key, "row ", row, " is not being ", state == RowState::writing ? "written" : "extended",
           " by this process (committed, abandoned or another's)");
    }
    s.mark = 1;
  }
  clear_marks();
}

}  // namespace geartrain
