// What becomes of a segment whose records lead out of it: an error here, a rebuild by the next holder of the lock.

#include "base/errors.h"
#include "store/store.h"

namespace geartrain {

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
