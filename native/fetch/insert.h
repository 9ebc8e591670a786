// Insert: many rows that lie ready in arrays, allocated, copied and committed in one call.
//
// Any thread of any process, like the store's own calls. Every piece of kInsertPiece rows (or half of the rows that the
// store may keep, if that is less) is inserted as a whole or not at all, so that the lock is not held for thousands of
// rows at a time; the blocks are filled without it. Death: as after Store::allocate and Store::commit.
#pragma once

#include <cstdint>
#include <span>

#include "fetch/fetch.h"
#include "store/store.h"

namespace geartrain {

constexpr uint64_t kInsertPiece = 1024;

// `rows` and `generations` take the keys. `threads` 0: up to four of the cores, where the copy is worth more than one.
// Everything in `values` is checked before a row is evicted. Throws what Store::allocate and Store::commit throw.
void insert(Store& store, std::span<const InsertField> fields, const CommitValues& values, unsigned threads,
            std::span<uint32_t> rows, std::span<uint32_t> generations);

}  // namespace geartrain
