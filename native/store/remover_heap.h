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
        status_(store.status().data()),
        words_(store.words()),
        capacity_(store.header().capacity) {}

  // The rows that are given here are rows of the store, as their callers have checked.

  uint32_t top() const { return *count_ == 0 ? kNoRow : at(0); }

  void push(uint32_t row) {
    const uint32_t slot = *count_;
    check_slot(slot);
    place(slot, row);
    *count_ = slot + 1;
    up(slot);
  }

  void erase(uint32_t row) {
    const uint32_t slot = status_[row].heap_slot;
    check_slot(slot);
    const uint32_t last = at(*count_ - 1);  // of an empty heap: no slot has that number
    --*count_;
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
    const uint64_t count = std::min<uint64_t>(*count_, capacity_);
    const auto is_row = [&](uint64_t slot) { return rows_[slot] < capacity_; };
    for (uint64_t slot = 0; slot < count; ++slot) {
      const uint64_t parent = slot == 0 ? 0 : (slot - 1) / 2;
      misplaced += !is_row(slot) || !is_row(parent) || status_[rows_[slot]].heap_slot != slot ||
                   key(rows_[parent]) > key(rows_[slot]);
    }
    return misplaced + (*count_ - count);
  }

 private:
  void check_slot(uint64_t slot) const {
    if (slot >= capacity_) [[unlikely]]
      store_.fail_damaged("the heap has no slot", slot);
  }
  uint32_t at(uint64_t slot) const {
    check_slot(slot);
    const uint32_t row = rows_[slot];
    if (row >= capacity_) [[unlikely]]
      store_.fail_damaged("the heap has row", row);
    return row;
  }
  std::pair<uint32_t, uint64_t> key(uint32_t row) const {
    return {priority_of(words_[row].load(std::memory_order_relaxed)), status_[row].sequence};
  }
  void place(uint64_t slot, uint32_t row) {
    rows_[slot] = row;
    status_[row].heap_slot = static_cast<uint32_t>(slot);
  }
  void up(uint64_t slot) {
    const uint32_t row = at(slot);
    const auto mine = key(row);
    while (slot > 0) {
      const uint64_t parent = (slot - 1) / 2;
      const uint32_t above = at(parent);
      if (key(above) <= mine) break;
      place(slot, above);
      slot = parent;
    }
    place(slot, row);
  }
  void down(uint64_t slot) {
    const uint32_t row = at(slot);
    const auto mine = key(row);
    const uint64_t count = std::min<uint64_t>(*count_, capacity_);
    for (uint64_t child = 2 * slot + 1; child < count; child = 2 * slot + 1) {
      uint32_t below = at(child);
      auto lowest = key(below);
      if (child + 1 < count) {
        const uint32_t beside = at(child + 1);
        const auto other = key(beside);
        if (other < lowest) {
          below = beside;
          lowest = other;
          ++child;
        }
      }
      if (mine <= lowest) break;
      place(slot, below);
      slot = child;
    }
    place(slot, row);
  }

  const Store& store_;
  uint32_t* rows_;
  uint32_t* count_;
  RowStatus* status_;
  std::atomic<uint64_t>* words_;
  uint64_t capacity_;
};

}  // namespace geartrain
