// Records of rows and their parts: what journals and checkpoints keep of a store with spans.
//
// A part is what one task has for one row; of task 0, what the insert wrote. Its bytes are, of task 0, the blocks of
// the columns first, in the order of the schema, then the fields of its span in the order of its layout (SpanLayout),
// all of them unpadded. A field of strings is its bounds, u32 [items + 1], then the text.
//
// Both records are formats: little-endian, without padding, and never changed without a new version of those who write
// them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "segment/segment.h"

namespace geartrain {

struct SavedRow {
  uint64_t sequence, inserted_at_ns;
  uint32_t row;
  uint32_t generation;  // of the key, odd, also under way; even: of a row that is not there
  uint32_t priority;    // fixed point
  uint32_t times_sampled;
  RowState state;
  uint8_t reserved[7];
};
static_assert(sizeof(SavedRow) == 40 && offsetof(SavedRow, state) == 32);

struct SavedPart {
  uint64_t change;  // number of its last change
  int64_t version;  // of the policy that did the task, or kNoVersion
  uint64_t bytes;   // as above
  uint64_t span;    // where it lies in this segment; nothing to those who load it
  uint64_t step;    // of the batch that took the row
  uint32_t place;   // in that batch
  uint32_t row, generation;
  uint16_t task;
  TaskState state;  // claimed: told as not done
  uint8_t reserved;
  uint32_t lengths[kMaxAxes];  // items of each axis in its span
};
static_assert(sizeof(SavedPart) == 88 && offsetof(SavedPart, lengths) == 56);

}  // namespace geartrain
