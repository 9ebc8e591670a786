// Validation: a file is a segment that this build can use, or the error says what it is.
//
// Nothing in the file is believed. The geometry (regions, strides, offsets) is computed again from the schema and the
// limits that the header names, and header, field records and the file's size have to agree with it to the byte. The
// caller keeps the copy that was checked: what happens to the header in the file afterwards moves no pointer.
//
// The ends of the lists are checked when a process joins. Links between rows change all the time, under the lock of
// processes that may write to the segment and are therefore trusted; a link that leads out of the table is an error
// where it is followed (store/status_table.h), never a wild access, and the next call rebuilds the lists from
// the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "segment/segment.h"

namespace geartrain {

struct Geometry {
  Header header;
  std::vector<FieldRecord> fields;
  std::shared_ptr<const TaskTable> tasks;  // axes and tasks; none in a store without them
};

// The geometry of the segment at `base`, which has `bytes`. Throws incompatible, naming what was found.
Geometry checked_geometry(const std::byte* base, uint64_t bytes, const std::string& path);

// What is wrong with the ends of the lists and the counts, or empty. May run while other processes use the segment.
std::string damaged_ends(const Control& control, const Client* clients, uint64_t capacity);

// The same, and what is wrong with the rows that clients hold; only while no process is attached. A pass over those
// rows.
std::string damaged_lists(const Control& control, const Client* clients, const RowStatus* rows, uint64_t capacity);

// What is wrong with the counts of a store's tasks, or empty. May run while other processes use the segment.
std::string damaged_tasks(const TaskTable& table, const TaskTable& checked, uint64_t capacity);

// Whether the lock is one that processes share and that survives their deaths, as a new segment's is.
bool is_robust_mutex(const pthread_mutex_t& mutex);
// Whether a process died in the lock and nobody has taken it since: the kernel marks the word.
bool lock_owner_died(const pthread_mutex_t& mutex);
// Whether nobody holds the lock at this moment; false where the C library does not tell.
bool lock_is_free(const pthread_mutex_t& mutex);
// Makes it one. Nobody may hold it.
void init_robust_mutex(pthread_mutex_t* mutex);

}  // namespace geartrain
