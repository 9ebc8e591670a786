// Row copy: a reader's copy of a row without the lock, and whether it holds one state of the row.
//
//   RowCopy copy(store, row, generation);
//   return copy.until_whole([&] {
//     ...                       // read length, blocks, metadata: as often as needed
//   });                         // false: the key is stale
//
// A row that is overwritten or removed gets another generation: the copy is lost with the row. One that is written in
// place (Store::rewrite) keeps it and is copied again; one that is written again and again is copied under the lock,
// where nobody writes. A writer that stays inside for longer than the lock's timeout is stopped; its row is then
// reported as lost, and so is one whose writer died, or that never rests for as long, where the segment is read-only.
//
// Any thread; no more than loads of the row's word and of its status, which a reader of the length has at hand.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "store/store.h"

namespace geartrain {

class RowCopy {
 public:
  RowCopy(const Store& store, uint32_t row, uint32_t generation)
      : store_(store), word_(store.words()[row]), row_(row), generation_(generation) {}
  // Of a copy that was begun by another, whose content it has: for `whole` alone.
  RowCopy(const Store& store, uint32_t row, uint32_t generation, uint64_t content)
      : store_(store), word_(store.words()[row]), row_(row), generation_(generation), number_(content) {}

  bool begin() {
    if (generation_of(word_.load(std::memory_order_acquire)) != generation_ || (generation_ & 1) == 0) return false;
    number_ = store_.content_number(row_);
    // What is read next is at least as new.
    std::atomic_thread_fence(std::memory_order_acquire);
    return (number_ & 1) == 0 || begin_later();
  }

  bool whole() const {
    // Everything was read before these are read again; a writer changes them first.
    std::atomic_thread_fence(std::memory_order_acquire);
    return generation_of(word_.load(std::memory_order_relaxed)) == generation_ &&
           store_.content_number(row_) == number_;
  }

  // The state of the row that was begun with.
  uint64_t content() const { return number_; }

  // Calls `copy` until what it read is one state of the row; false where the row is lost.
  template <typename Copy>
  bool until_whole(const Copy& copy) {
    for (uint32_t tries = 0; tries < kFreeCopies; ++tries) {
      if (!begin()) return false;
      copy();
      if (whole()) return true;
    }
    return copy_locked(copy);
  }

 private:
  // Copies without the lock: a row of 8 MB that is written in a loop has never been whole after thousands of them.
  static constexpr uint32_t kFreeCopies = 8;

  __attribute__((cold, noinline)) bool copy_locked(const std::function<void()>& copy);
  // Waits until nobody writes to the row.
  __attribute__((cold, noinline)) bool begin_later();

  const Store& store_;
  const std::atomic<uint64_t>& word_;
  const uint32_t row_;
  const uint32_t generation_;
  uint64_t number_ = 0;
};

}  // namespace geartrain
