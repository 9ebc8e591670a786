// Heap of the lowest_priority remover: a binary min-heap of rows by (priority, age), kept in the segment.
//
// Row status holds each row's slot, so that a changed priority moves one row in O(log n). Under the segment's lock
// throughout; rebuilt from the words when a process dies in the middle. Slots and row numbers are read from the
// segment, so each is checked before it is used: a wrong one is an Error(corrupt).
#pragma once

#include <algorithm>
#include <utility>

#include "store/store.h"

namespace geartrain {

class Heap {
 public:
  explicit Heap(const Store& store)
      : store_(store),
        rows_(store.heap_rows()),
        count_(&store.control().heap_count),
        status_(store.status()),
        words_(store.words()) {}

  uint32_t top() const { return *count_ == 0 ? kNoRow : at(0); }

  void push(uint32_t row) {
    const uint32_t slot = *count_;
    place(slot, row);
    *count_ = slot + 1;
    up(slot);
  }

  void erase(uint32_t row) {
    const uint32_t slot = status_[row].heap_slot;
    if (*count_ == 0) store_.fail_damaged("the heap has no row, and no row", row);
    const uint32_t last = at(--(*count_));
    if (last == row) return;
    place(slot, last);
    moved(last);
  }

  // Puts a row back in order after its priority changed.
  void moved(uint32_t row) {
    up(status_[row].heap_slot);
    down(status_[row].heap_slot);
  }

  void clear() { *count_ = 0; }

  // The number of rows that sort before their parent or whose slot is wrong.
  uint64_t audit() const {
    uint64_t misplaced = 0;
    const uint64_t rows = store_.header().capacity;
    const uint64_t count = std::min<uint64_t>(*count_, rows);
    const auto is_row = [&](uint64_t slot) { return rows_[slot] < rows; };
    for (uint64_t slot = 0; slot < count; ++slot) {
      const uint64_t parent = slot == 0 ? 0 : (slot - 1) / 2;
      misplaced += !is_row(slot) || !is_row(parent) || status_[rows_[slot]].heap_slot != slot ||
                   key(rows_[parent]) > key(rows_[slot]);
    }
    return misplaced + (*count_ - count);
  }

 private:
  uint32_t at(uint64_t slot) const {
    const uint64_t rows = store_.header().capacity;
    if (slot >= rows || rows_[slot] >= rows) [[unlikely]]
      store_.fail_damaged("the heap is wrong at slot", slot);
    return rows_[slot];
  }
  std::pair<uint32_t, uint64_t> key(uint32_t row) const {
    return {priority_of(words_[row].load(std::memory_order_relaxed)), status_[row].sequence};
  }
  void place(uint32_t slot, uint32_t row) {
    if (slot >= store_.header().capacity) [[unlikely]]
      store_.fail_damaged("the heap has no slot", slot);
    rows_[slot] = row;
    status_[row].heap_slot = slot;
  }
  void up(uint32_t slot) {
    const uint32_t row = at(slot);
    const auto mine = key(row);
    while (slot > 0) {
      const uint32_t parent = (slot - 1) / 2;
      const uint32_t above = at(parent);
      if (key(above) <= mine) break;
      place(slot, above);
      slot = parent;
    }
    place(slot, row);
  }
  void down(uint32_t slot) {
    const uint32_t row = at(slot);
    const auto mine = key(row);
    for (uint64_t child = 2 * uint64_t{slot} + 1; child < *count_; child = 2 * uint64_t{slot} + 1) {
      if (child + 1 < *count_ && key(at(child + 1)) < key(at(child))) ++child;
      const uint32_t below = at(child);
      if (mine <= key(below)) break;
      place(slot, below);
      slot = static_cast<uint32_t>(child);
    }
    place(slot, row);
  }

  const Store& store_;
  uint32_t* rows_;
  uint32_t* count_;
  StatusTable status_;
  std::atomic<uint64_t>* words_;
};

}  // namespace geartrain
