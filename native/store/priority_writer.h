// Registration of a process that changes priorities without the lock.
#pragma once

#include "store/store.h"

namespace geartrain {

// Registers that this process is changing priorities without the lock, so that a rebuild waits for it, and a
// rebuild after its death knows that sums may be half updated.
class PriorityWriter {
 public:
  explicit PriorityWriter(Store& store) : writers_(store.client(store.client_slot_).priority_writers) {
    writers_.fetch_add(1, std::memory_order_seq_cst);
    while (store.control().rebuilding.load(std::memory_order_seq_cst) != 0) {
      writers_.fetch_sub(1, std::memory_order_seq_cst);
      {
        Store::Guard wait_for_the_rebuild(store);
      }
      writers_.fetch_add(1, std::memory_order_seq_cst);
    }
  }
  ~PriorityWriter() { writers_.fetch_sub(1, std::memory_order_seq_cst); }
  PriorityWriter(const PriorityWriter&) = delete;
  PriorityWriter& operator=(const PriorityWriter&) = delete;

 private:
  std::atomic<uint32_t>& writers_;
};

}  // namespace geartrain
