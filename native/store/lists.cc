// The lists that rows are on: free, held by a client, committed in their order; and keys in that order.

#include <algorithm>
#include <tuple>

#include "base/errors.h"
#include "store/store.h"
#include "store/tasks.h"

namespace geartrain {

void Store::keys(std::vector<uint32_t>* rows, std::vector<uint32_t>* generations) {
  rows->clear();
  generations->clear();
  if (read_only()) {
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
  const uint64_t capacity = header().capacity;
  const uint64_t most = std::min(committed_count(), capacity);
  rows->reserve(most);
  generations->reserve(most);
  const auto add = [&](uint32_t row) {
    rows->push_back(row);
    generations->push_back(generation_of(words()[row].load(kRelaxed)));
  };
  // Open rows are on their writers' lists, and ordered by the sequence number they were published under.
  std::vector<std::pair<uint64_t, uint32_t>> open_rows;  // (sequence, row)
  for (uint32_t slot = 0; slot < kMaxClients && open_rows.size() < control().open_count; ++slot) {
    if (client(slot).in_use == 0) continue;
    uint64_t held = 0;
    for (uint32_t row = client(slot).held; row != kNoRow; row = status()[row].next) {
      if (held++ == capacity) fail_damaged("the rows being written are a circle through row", row);
      if (status()[row].state == RowState::open) open_rows.push_back({status()[row].sequence, row});
    }
  }
  std::sort(open_rows.begin(), open_rows.end());
  auto next = open_rows.begin();
  uint64_t walked = 0;
  for (uint32_t row = control().order_head; row != kNoRow;) {
    const RowStatus& s = status()[row];
    if (walked++ == capacity) fail_damaged("the order list is a circle through row", row);
    for (; next != open_rows.end() && next->first < s.sequence; ++next) add(next->second);
    if (s.state != RowState::under_way) add(row);
    row = s.next;
  }
  for (; next != open_rows.end(); ++next) add(next->second);
}

std::vector<uint32_t> Store::free_rows() {
  ensure_client();
  Guard guard(*this);
  std::vector<uint32_t> rows;
  for (uint32_t row = control().free_head; row != kNoRow; row = status()[row].next) {
    if (rows.size() == header().capacity) fail_damaged("the free queue is a circle through row", row);
    rows.push_back(row);
  }
  return rows;
}

// --- the lists ------------------------------------------------------------------------------------------------

void Store::advance_sequence(uint64_t next) {
  // 2^63 leaves room for commits for ever.
  if (next > uint64_t{1} << 63) fail(ErrorKind::schema, "sequence numbers go up to 2^63, found ", next);
  ensure_client();
  Guard guard(*this);
  set_next_sequence(std::max(next_sequence(), next));
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

void Store::take_free_rows(std::span<uint32_t> rows) {
  if (rows.empty()) return;
  Control& c = control();
  uint32_t row = c.free_head;
  for (uint32_t& taken : rows) {
    // A row that is not free would be handed out with a trajectory in it.
    RowStatus& s = status()[row];
    if (s.state != RowState::free || s.mark != 0) fail_damaged("the free queue leads to row", row);
    s.mark = 1;  // until it is held: a list may run in a circle
    taken = row;
    row = s.next;
  }
  c.free_head = row;
  (row == kNoRow ? c.free_tail : status()[row].previous) = kNoRow;
  c.free_count -= rows.size();
}

void Store::put_free_row(uint32_t row) {
  if (tasks_ != nullptr && !tasks_->freed(row)) return;
  Control& c = control();
  RowStatus& s = status()[row];
  std::atomic_ref(s.state).store(RowState::free, kRelaxed);
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
  std::atomic_ref(s.state).store(state, kRelaxed);
  s.previous = kNoRow;
  s.next = mine.held;
  if (mine.held != kNoRow) status()[mine.held].previous = row;
  mine.held = row;
  ++mine.held_count;
  ++held_count(state);
}

void Store::hold(std::span<const uint32_t> rows, uint32_t slot) {
  if (rows.empty()) return;
  Client& mine = client(slot);
  uint32_t previous = kNoRow;
  for (size_t i = 0; i < rows.size(); ++i) {
    RowStatus& s = status()[rows[i]];
    s.mark = 0;
    s.owner = static_cast<uint16_t>(slot);
    std::atomic_signal_fence(std::memory_order_release);  // as above
    std::atomic_ref(s.state).store(RowState::writing, kRelaxed);
    s.previous = previous;
    s.next = i + 1 < rows.size() ? rows[i + 1] : mine.held;
    previous = rows[i];
  }
  if (mine.held != kNoRow) status()[mine.held].previous = previous;
  mine.held = rows[0];
  mine.held_count += static_cast<uint32_t>(rows.size());
  held_count(RowState::writing) += rows.size();
}

uint64_t& Store::held_count(RowState state) const {
  Control& c = control();
  return state == RowState::writing ? c.writing_count : state == RowState::open ? c.open_count : c.exhausted_count;
}

void Store::unhold(uint32_t row) {
  RowStatus& s = status()[row];
  Client& owner = client(s.owner);
  (s.previous == kNoRow ? owner.held : status()[s.previous].next) = s.next;
  if (s.next != kNoRow) status()[s.next].previous = s.previous;
  --owner.held_count;
  --held_count(s.state);
}

void Store::unhold(std::span<const uint32_t> rows) {
  if (rows.empty()) return;
  // Rows that were allocated together lie on the list one after the other, and leave it together.
  bool chained = true;
  for (size_t i = 0; i + 1 < rows.size() && chained; ++i) chained = status()[rows[i]].next == rows[i + 1];
  if (!chained) {
    for (const uint32_t row : rows) unhold(row);
    return;
  }
  const RowStatus &first = status()[rows.front()], &last = status()[rows.back()];
  Client& owner = client(first.owner);
  (first.previous == kNoRow ? owner.held : status()[first.previous].next) = last.next;
  if (last.next != kNoRow) status()[last.next].previous = first.previous;
  owner.held_count -= static_cast<uint32_t>(rows.size());
  held_count(first.state) -= rows.size();
}

void Store::link_order(std::span<const uint32_t> rows) {
  Control& c = control();
  uint32_t previous = c.order_tail;
  for (size_t i = 0; i < rows.size(); ++i) {
    RowStatus& s = status()[rows[i]];
    s.previous = previous;
    s.next = i + 1 < rows.size() ? rows[i + 1] : kNoRow;
    previous = rows[i];
  }
  if (rows.empty()) return;
  (c.order_tail == kNoRow ? c.order_head : status()[c.order_tail].next) = rows.front();
  c.order_tail = previous;
}

void Store::link_order_before(uint32_t row, uint32_t next) {
  if (next == kNoRow) {
    link_order({&row, 1});
    return;
  }
  RowStatus& s = status()[row];
  s.next = next;
  s.previous = status()[next].previous;
  (s.previous == kNoRow ? control().order_head : status()[s.previous].next) = row;
  status()[next].previous = row;
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

}  // namespace geartrain
