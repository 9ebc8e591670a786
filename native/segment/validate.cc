#include "segment/validate.h"

#include <cstring>
#include <string_view>

#include "base/errors.h"

namespace geartrain {
namespace {

// Bytes of an element by dtype code, schema.py's DTYPES; 0: no such type.
constexpr uint8_t kItemBytes[] = {0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1};
constexpr uint32_t kMaxAxis = 0x7fffffffu;

// Whether the bytes are text that Python can show: UTF-8 without surrogates or overlong forms.
bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
    const unsigned first = byte(0);
    const size_t more = first < 0x80                    ? 0
                        : first >= 0xc2 && first < 0xe0 ? 1
                        : (first & 0xf0) == 0xe0        ? 2
                        : first >= 0xf0 && first < 0xf5 ? 3
                                                        : 9;
    if (more == 9) return false;
    for (size_t i = 1; i <= more; ++i) {
      if ((byte(i) & 0xc0) != 0x80) return false;
    }
    if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) || (first == 0xf0 && byte(1) < 0x90) ||
        (first == 0xf4 && byte(1) >= 0x90)) {
      return false;
    }
    at += more + 1;
  }
  return true;
}

// The field that a record describes; an empty name when it describes none.
FieldSpec spec_of(const FieldRecord& record) {
  FieldSpec field;
  const size_t length = ::strnlen(record.name, sizeof record.name);
  const bool typed = record.dtype < sizeof kItemBytes && kItemBytes[record.dtype] == record.itemsize;
  if (length > kMaxNameBytes || !is_utf8({record.name, length}) || !typed || record.itemsize == 0 ||
      record.ndim > kMaxDims || record.kind > SpanKind::text) {
    return field;
  }
  for (uint32_t d = 0; d < record.ndim; ++d) {
    if (record.shape[d] == 0 || record.shape[d] > kMaxAxis) return field;
    field.shape.push_back(record.shape[d]);
  }
  field.dtype = record.dtype;
  field.itemsize = record.itemsize;
  field.timed = record.timed != 0;
  field.axis = record.axis;
  field.task = record.task;
  field.divides = record.divides;
  field.kind = record.kind;
  field.name.assign(record.name, length);
  return field;
}

// A name of the table; empty when it is none.
std::string name_of(const char (&stored)[kMaxNameBytes + 1]) {
  const size_t length = ::strnlen(stored, sizeof stored);
  return length > kMaxNameBytes || !is_utf8({stored, length}) ? std::string() : std::string(stored, length);
}

// Options that the table was planned from; false when it describes none.
bool read_tasks(const TaskTable& table, StoreOptions* options) {
  if (table.axis_count > kMaxAxes || table.task_count > kMaxTasks) return false;
  for (uint32_t i = 0; i < table.axis_count; ++i) options->axes.push_back(name_of(table.axes[i].name));
  for (uint32_t i = 1; i <= table.task_count; ++i) {
    TaskSpec task{name_of(table.tasks[i].name), {}, table.tasks[i].flags};
    for (uint32_t other = 1; other <= kMaxTasks; ++other) {
      if ((table.tasks[i].after >> (other - 1) & 1) != 0) task.after.push_back(other);
    }
    options->tasks.push_back(task);
  }
  if (table.span_units >= uint64_t{1} << 40) return false;
  options->span_bytes = table.span_units * kSpanUnit;
  return true;
}

bool is_end(uint32_t row, uint64_t capacity) {
  return row < capacity || row == kNoRow;
}

}  // namespace

Geometry checked_geometry(const std::byte* base, uint64_t bytes, const std::string& path) {
  const auto refuse = [&](const auto&... parts) { fail(ErrorKind::incompatible, path, " cannot be used: ", parts...); };
  if (bytes < kRegionsOffset) refuse("it has ", bytes, " bytes, less than a segment's head");
  // One copy, which is checked and used: another process may write to the file meanwhile.
  Geometry found;
  Header& header = found.header;
  std::memcpy(&header, base, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) refuse("it is not a geartrain segment (magic)");
  if (header.format_version != kFormatVersion) {
    refuse("it has format version ", header.format_version, ", this build reads version ", kFormatVersion,
           "; save it with the build that made it and load the checkpoint here");
  }
  if ((header.required_features & ~kKnownFeatures) != 0) {
    refuse("it needs features this build does not have (bits ", header.required_features, ")");
  }
  if (header.field_count == 0 || header.field_count > kMaxFields || header.segment_bytes != bytes) {
    refuse("its header is damaged or it was cut: ", bytes, " bytes on disk, ", header.segment_bytes, " in the header");
  }
  found.fields.resize(header.field_count);
  std::memcpy(found.fields.data(), base + kFieldsOffset, header.field_count * sizeof(FieldRecord));
  std::shared_ptr<TaskTable> table;
  const bool spans = (header.required_features & kRowSpans) != 0;
  if (spans) {
    const Region& at = header.regions[kTasksRegion];
    if (at.bytes != sizeof(TaskTable) || at.offset > bytes || bytes - at.offset < at.bytes || at.offset % 4096 != 0) {
      refuse("its tasks lie outside of it");
    }
    table = std::make_shared<TaskTable>();
    const auto& stored = *reinterpret_cast<const TaskTable*>(base + at.offset);
    table->axis_count = stored.axis_count;
    table->task_count = stored.task_count;
    table->span_units = stored.span_units;
    std::memcpy(table->axes, stored.axes, sizeof table->axes);
    std::memcpy(table->tasks, stored.tasks, sizeof table->tasks);
  }
  if (header.fingerprint != layout_fingerprint(header, found.fields.data(), table.get())) {
    refuse("its layout differs from this build's (fingerprint), or its header is damaged");
  }
  // A fingerprint can be made to fit. So the layout is planned once more, from what its creator chose.
  std::vector<FieldSpec> specs;
  for (const FieldRecord& record : found.fields) {
    specs.push_back(spec_of(record));
    if (specs.back().name.empty()) refuse("field ", specs.size() - 1, " of its schema is none (name, dtype or shape)");
  }
  if ((header.remover & 0xff) >= kRemovers) refuse("its remover is none");
  StoreOptions options;
  options.capacity = header.capacity;
  options.max_rows = header.max_rows;
  options.max_age_ns = header.max_age_ns;
  options.max_times_sampled = header.max_times_sampled;
  options.priority_fraction_bits = header.priority_fraction_bits;
  options.remover = remover_of(header.remover);
  options.remover_field = remover_field_of(header.remover);
  options.content_numbers = (header.required_features & kContentNumbers) != 0;
  options.persist = header.persist != 0;
  options.step_priorities = (header.required_features & kStepPriorities) != 0;
  options.max_priority = (header.required_features & kMaxPriority) != 0;
  if (spans && !read_tasks(*table, &options)) refuse("its axes or tasks are none");
  std::vector<FieldRecord> records;
  const auto wanted = std::make_shared<TaskTable>();
  Header planned{};
  try {
    planned = plan_segment(specs, options, &records, wanted.get());
  } catch (const Error& error) {
    refuse("its header describes no store: ", error.what());
  }
  planned.created_ns = header.created_ns;
  planned.store_id = header.store_id;
  if (std::memcmp(&planned, &header, sizeof header) != 0 ||
      std::memcmp(records.data(), found.fields.data(), records.size() * sizeof(FieldRecord)) != 0 ||
      (spans && (std::memcmp(wanted->axes, table->axes, sizeof table->axes) != 0 ||
                 std::memcmp(wanted->tasks, table->tasks, sizeof table->tasks) != 0))) {
    refuse("the places of its parts do not follow from its schema; it needs ", planned.segment_bytes, " bytes and has ",
           bytes);
  }
  found.tasks = std::move(table);
  return found;
}

std::string damaged_ends(const Control& control, const Client* clients, uint64_t capacity) {
  for (const auto& [row, which] : {std::pair{control.free_head, "free queue"},
                                   {control.free_tail, "free queue"},
                                   {control.order_head, "order list"},
                                   {control.order_tail, "order list"}}) {
    if (!is_end(row, capacity)) return message_of({"its ", which, " ends in row ", row, " of ", capacity});
  }
  for (const uint64_t count : {control.free_count, control.writing_count, control.exhausted_count, control.open_count,
                               control.committed_count.load(), uint64_t{control.heap_count}}) {
    if (count > capacity) return message_of({"it counts ", count, " rows of ", capacity});
  }
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (clients[slot].in_use != 0 && !is_end(clients[slot].held, capacity)) {
      return message_of({"client ", slot, " holds row ", clients[slot].held, " of ", capacity});
    }
  }
  return {};
}

std::string damaged_tasks(const TaskTable& table, const TaskTable& checked, uint64_t capacity) {
  if (table.next_row >= capacity) return message_of({"rows are taken from ", table.next_row, " of ", capacity, " on"});
  for (uint32_t task = 1; task <= checked.task_count; ++task) {
    const TaskFigures& its = table.figures[task];
    for (const uint32_t count : {its.due.load(), its.claimed.load(), its.remaining.load()}) {
      if (count > capacity) return message_of({"task ", task, " counts ", count, " rows of ", capacity});
    }
  }
  if (table.under_way.load() > capacity) return message_of({"it counts ", table.under_way, " rows of ", capacity});
  if (table.taken.load() > capacity) return message_of({"it counts ", table.taken, " kept rows of ", capacity});
  if (table.index.free_units.load() > checked.span_units) {
    return message_of({"it counts ", table.index.free_units, " free units of ", checked.span_units});
  }
  return {};
}

std::string damaged_lists(const Control& control, const Client* clients, const RowStatus* rows, uint64_t capacity) {
  std::string damage = damaged_ends(control, clients, capacity);
  uint64_t held = 0;
  for (uint32_t slot = 0; slot < kMaxClients && damage.empty(); ++slot) {
    if (clients[slot].in_use == 0) continue;
    uint32_t previous = kNoRow;
    for (uint32_t row = clients[slot].held; row != kNoRow; row = rows[row].next) {
      if (row >= capacity || ++held > capacity || rows[row].owner != slot || rows[row].previous != previous) {
        return message_of({"the rows that client ", slot, " holds are no list"});
      }
      previous = row;
    }
  }
  return damage;
}

void init_robust_mutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(mutex, &attributes);
  ::pthread_mutexattr_destroy(&attributes);
}

bool is_robust_mutex(const pthread_mutex_t& mutex) {
#if defined(__GLIBC__)
  // The kind selects the code that runs on a lock; those for other kinds end the process when the rest does not fit.
  static const int expected = [] {
    pthread_mutex_t made;
    init_robust_mutex(&made);
    const int kind = made.__data.__kind;
    ::pthread_mutex_destroy(&made);
    return kind;
  }();
  return mutex.__data.__kind == expected;
#else
  return true;
#endif
}

bool lock_owner_died(const pthread_mutex_t& mutex) {
#if defined(__GLIBC__)
  constexpr unsigned kOwnerDied = 0x40000000;  // FUTEX_OWNER_DIED of <linux/futex.h>
  return (static_cast<unsigned>(__atomic_load_n(&mutex.__data.__lock, __ATOMIC_RELAXED)) & kOwnerDied) != 0;
#else
  static_cast<void>(mutex);  // found when somebody takes the lock
  return false;
#endif
}

bool lock_is_free(const pthread_mutex_t& mutex) {
#if defined(__GLIBC__)
  return __atomic_load_n(&mutex.__data.__lock, __ATOMIC_ACQUIRE) == 0;
#else
  static_cast<void>(mutex);
  return false;
#endif
}

}  // namespace geartrain
