// Table of rows' status, bounded: no row number that was read from a segment leads out of it.
#pragma once

#include <cstdint>

#include "segment/segment.h"

namespace geartrain {

class Store;

// The status of rows. Row numbers that were read from the segment (ends and links of lists) are looked up here: one
// that leads out of the table is an Error(corrupt), and the next call that takes the lock rebuilds the lists from the
// rows.
class StatusTable {
 public:
  StatusTable() = default;
  StatusTable(const Store* store, RowStatus* rows, uint64_t capacity)
      : store_(store), rows_(rows), capacity_(capacity) {}
  RowStatus& operator[](uint64_t row) const {
    if (row >= capacity_) [[unlikely]]
      fail_out_of_table(row);
    return rows_[row];
  }
  RowStatus* data() const { return rows_; }

 private:
  [[noreturn]] __attribute__((cold, noinline)) void fail_out_of_table(uint64_t row) const;

  const Store* store_ = nullptr;
  RowStatus* rows_ = nullptr;
  uint64_t capacity_ = 0;
};

}  // namespace geartrain
