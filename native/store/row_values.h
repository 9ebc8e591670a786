// Values of rows, as calls of a store take and give them; and what a journal lacks of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "segment/segment.h"

namespace geartrain {

// What to store with committed rows. Empty spans mean: max_length, Store::new_priority(), version 0.
struct CommitValues {
  std::span<const uint32_t> lengths;
  std::span<const double> priorities;
  std::span<const int64_t> versions;
};

// Changes of a writer's rows that are made together.
struct RowChanges {
  struct Entering {
    std::span<const uint32_t> rows;
    CommitValues values;
    std::span<uint32_t> generations;  // out
  };
  Entering publish = {}, commit = {};
  std::span<const uint32_t> extend = {}, lengths = {}, seal = {}, abandon = {};
  std::span<const double> extend_priorities = {};  // of the new steps, where steps have priorities
  std::span<const uint32_t> episodes = {};         // in the rows that are extended, where rows hold several
  // Of the rows above that stay open: those whose last step is none of a transition, and gets priority 0.
  std::span<const uint32_t> marked = {};
};

// Steps of one field for several rows: row i's are at data + i * row_bytes.
struct FieldSource {
  uint32_t field;
  const std::byte* data;
  uint64_t row_bytes;
};

// A copy of one row's metadata.
struct RowInfo {
  uint64_t sequence;
  int64_t version;
  uint64_t inserted_at_ns;
  uint32_t generation;
  uint32_t priority;  // fixed point
  uint32_t length;
  uint32_t times_sampled;
  RowState state;
};

// A row as a checkpoint keeps it.
struct RestoredRow {
  uint32_t row, generation, priority, length, times_sampled;
  uint64_t sequence, inserted_at_ns;
  int64_t version;
};

// What a journal lacks, and figures of the same instant.
enum class JournalMode : uint32_t { none, full_waits, full_is_error };
struct JournalChanges {
  std::vector<uint32_t> rows, generations;  // to be written
  std::vector<uint64_t> times;              // their content numbers
  std::vector<uint32_t> gone;               // rows that the journal has and the store has not, or no longer so
  uint64_t next_sequence = 0, inserted = 0, open = 0;
};

struct StoreCounts {
  uint64_t free, writing, exhausted, open, committed;  // committed: without the open ones
};

}  // namespace geartrain
