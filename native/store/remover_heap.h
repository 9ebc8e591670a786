// Heap of the lowest_priority remover: a binary min-heap of rows by (priority, age), kept in the segment.
//
// Row status holds each row's slot, so that a changed priority moves one row in O(log n). Under the segment's lock
// throughout; rebuilt from the words when a process dies in the middle.
#pragma once

#include <utility>

#include "store/store.h"

namespace geartrain {

class Heap {
 public:
  explicit Heap(const Store& store)
      : rows_(store.heap_rows()), count_(&store.control().heap_count), status_(store.status()), words_(store.words()) {}

  uint32_t top() const { return *count_ == 0 ? kNoRow : rows_[0]; }

  void push(uint32_t row) {
    place((*count_)++, row);
    up(*count_ - 1);
  }

  void erase(uint32_t row) {
    const uint32_t slot = status_[row].heap_slot;
    const uint32_t last = rows_[--(*count_)];
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
    for (uint32_t slot = 0; slot < *count_; ++slot) {
      misplaced +=
          status_[rows_[slot]].heap_slot != slot || key(rows_[slot == 0 ? 0 : (slot - 1) / 2]) > key(rows_[slot]);
    }
    return misplaced;
  }

 private:
  std::pair<uint32_t, uint64_t> key(uint32_t row) const {
    return {priority_of(words_[row].load(std::memory_order_relaxed)), status_[row].sequence};
  }
  void place(uint32_t slot, uint32_t row) {
    rows_[slot] = row;
    status_[row].heap_slot = slot;
  }
  void up(uint32_t slot) {
    const uint32_t row = rows_[slot];
    const auto mine = key(row);
    while (slot > 0) {
      const uint32_t parent = (slot - 1) / 2;
      if (key(rows_[parent]) <= mine) break;
      place(slot, rows_[parent]);
      slot = parent;
    }
    place(slot, row);
  }
  void down(uint32_t slot) {
    const uint32_t row = rows_[slot];
    const auto mine = key(row);
    for (uint64_t child = 2 * uint64_t{slot} + 1; child < *count_; child = 2 * uint64_t{slot} + 1) {
      if (child + 1 < *count_ && key(rows_[child + 1]) < key(rows_[child])) ++child;
      if (mine <= key(rows_[child])) break;
      place(slot, rows_[child]);
      slot = static_cast<uint32_t>(child);
    }
    place(slot, row);
  }

  uint32_t* rows_;
  uint32_t* count_;
  RowStatus* status_;
  std::atomic<uint64_t>* words_;
};

}  // namespace geartrain
