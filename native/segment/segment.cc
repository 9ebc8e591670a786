#include "segment/segment.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/convert.h"
#include "base/errors.h"
#include "segment/sum_tree.h"

namespace geartrain {
namespace {

constexpr uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}

class Fingerprint {  // FNV-1a, 64 bits
 public:
  template <typename T>
  void add(const T& value) {
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    for (unsigned char byte : bytes) hash_ = (hash_ ^ byte) * 0x100000001b3u;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

FieldRecord record_of(const FieldSpec& field, uint64_t offset) {
  FieldRecord record{};
  std::memcpy(record.name, field.name.data(), field.name.size());
  record.dtype = field.dtype;
  record.itemsize = field.itemsize;
  record.timed = field.timed;
  record.ndim = static_cast<uint8_t>(field.shape.size());
  record.block_bytes = field.itemsize;
  for (size_t i = 0; i < field.shape.size(); ++i) {
    record.shape[i] = field.shape[i];
    if (__builtin_mul_overflow(record.block_bytes, uint64_t{field.shape[i]}, &record.block_bytes)) {
      fail(ErrorKind::schema, "field '", field.name, "' is larger than memory can be");
    }
  }
  record.axis = field.axis;
  record.task = field.task;
  record.divides = field.divides;
  record.kind = field.kind;
  if (in_spans(record)) return record;
  record.stride = round_up(record.block_bytes, kBlockAlignment);
  record.offset = offset;
  return record;
}

void check_spec(const FieldSpec& field) {
  if (field.name.empty() || field.name.size() > kMaxNameBytes) {
    fail(ErrorKind::schema, "a field's name has 1 to ", kMaxNameBytes, " bytes, '", field.name, "' has ",
         field.name.size());
  }
  if (field.shape.size() > kMaxDims || field.itemsize == 0 || (field.timed && field.shape.empty()) ||
      std::count(field.shape.begin(), field.shape.end(), 0u) > 0) {
    fail(ErrorKind::schema, "field '", field.name, "' has no possible shape or element size");
  }
}

constexpr uint8_t kInt32 = 7;  // schema.py's DTYPES
constexpr uint64_t kMostSpanUnits = uint64_t{1} << 40;

void set_name(char (&to)[kMaxNameBytes + 1], const std::string& name, const char* what) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    fail(ErrorKind::schema, what, " has a name of 1 to ", kMaxNameBytes, " bytes, '", name, "' has ", name.size());
  }
  std::memcpy(to, name.data(), name.size());
}

// Tasks, each with all that it comes after.
void plan_tasks(const std::vector<TaskSpec>& tasks, const std::vector<FieldSpec>& fields, TaskTable* table) {
  if (tasks.size() > kMaxTasks) {
    fail(ErrorKind::schema, "a store has at most ", kMaxTasks, " tasks, ", tasks.size(), " were given");
  }
  table->task_count = static_cast<uint32_t>(tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    TaskRecord& record = table->tasks[i + 1];
    set_name(record.name, tasks[i].name, "a task");
    record.flags = tasks[i].flags;
    for (size_t j = 0; j < i; ++j) {
      if (tasks[j].name == tasks[i].name) fail(ErrorKind::schema, "the task '", tasks[i].name, "' is named twice");
    }
    for (const uint32_t other : tasks[i].after) {
      if (other == 0 || other > tasks.size()) {
        fail(ErrorKind::schema, "the task '", tasks[i].name, "' comes after number ", other, " of ", tasks.size());
      }
      record.after |= uint64_t{1} << (other - 1);
    }
  }
  // What comes before a task's tasks comes before it: as many rounds as the longest chain may have links.
  for (size_t round = 0; round < tasks.size(); ++round) {
    for (size_t i = 1; i <= tasks.size(); ++i) {
      for (size_t j = 1; j <= tasks.size(); ++j) {
        if ((table->tasks[i].after >> (j - 1) & 1) != 0) table->tasks[i].after |= table->tasks[j].after;
      }
    }
  }
  const uint64_t all = tasks.size() == kMaxTasks ? ~uint64_t{0} : (uint64_t{1} << tasks.size()) - 1;
  for (size_t i = 1; i <= tasks.size(); ++i) {
    const TaskRecord& record = table->tasks[i];
    const bool last = (record.flags & kLastTask) != 0;
    if ((record.after >> (i - 1) & 1) != 0) {
      fail(ErrorKind::schema, "the task '", tasks[i - 1].name, "' comes after itself");
    }
    if (last != (i == tasks.size())) fail(ErrorKind::schema, "the last task is the one that is last, and no other");
    if (last && record.after != (all & ~(uint64_t{1} << (i - 1)))) {
      fail(ErrorKind::schema, "the last task comes after all others");
    }
  }
  for (const FieldSpec& field : fields) {
    if (field.task > tasks.size() || (field.task != 0 && field.task == tasks.size())) {
      fail(ErrorKind::schema, "field '", field.name, "' is of task ", field.task, ", which has none");
    }
  }
}

// Axes, each of the task that all others with fields of it come after.
void plan_axes(const std::vector<std::string>& axes, const std::vector<FieldSpec>& fields, TaskTable* table) {
  if (axes.size() > kMaxAxes) {
    fail(ErrorKind::schema, "a store has at most ", kMaxAxes, " axes, ", axes.size(), " were given");
  }
  table->axis_count = static_cast<uint32_t>(axes.size());
  for (size_t i = 0; i < axes.size(); ++i) {
    AxisRecord& axis = table->axes[i];
    set_name(axis.name, axes[i], "an axis");
    for (size_t j = 0; j < i; ++j) {
      if (axes[j] == axes[i]) fail(ErrorKind::schema, "the axis '", axes[i], "' is named twice");
    }
    const auto before = [&](uint32_t task, uint32_t other) {
      return task == 0 || (other != 0 && (table->tasks[other].after >> (task - 1) & 1) != 0);
    };
    bool found = false;
    for (const FieldSpec& field : fields) {
      if (field.axis != i + 1) continue;
      if (!found || (field.task != axis.owner && before(field.task, axis.owner))) axis.owner = field.task;
      found = true;
    }
    if (!found) fail(ErrorKind::schema, "no field has the axis '", axes[i], "'");
    for (const FieldSpec& field : fields) {
      if (field.axis == i + 1 && field.task != axis.owner && !before(axis.owner, field.task)) {
        fail(ErrorKind::schema, "the axis '", axes[i], "' is written by two tasks of which none comes after the other");
      }
    }
  }
  for (size_t i = 0; i < fields.size(); ++i) {
    const FieldSpec& field = fields[i];
    if (field.axis > axes.size() || field.divides > axes.size()) {
      fail(ErrorKind::schema, "field '", field.name, "' has an axis that is none");
    }
    if (field.divides == 0) continue;
    AxisRecord& axis = table->axes[field.divides - 1];
    if (field.axis == 0 || field.axis == field.divides || field.dtype != kInt32 || !field.shape.empty() ||
        field.kind != SpanKind::array) {
      fail(ErrorKind::schema, "field '", field.name, "' divides the axis '", axis.name,
           "': it holds lengths, int32, one for each item of another axis");
    }
    if (axis.divided != 0) fail(ErrorKind::schema, "the axis '", axis.name, "' is divided by two fields");
    if (field.task != axis.owner || table->axes[field.axis - 1].owner != axis.owner) {
      fail(ErrorKind::schema, "field '", field.name, "' divides the axis '", axis.name,
           "', whose lengths another task sets");
    }
    axis.divided = static_cast<uint32_t>(i + 1);
  }
  for (const FieldSpec& field : fields) {
    if (field.divides != 0 && table->axes[field.axis - 1].divided != 0) {
      fail(ErrorKind::schema, "the axis '", table->axes[field.axis - 1].name, "' divides another and is divided");
    }
  }
}

void check_for_spans(const StoreOptions& options) {
  const auto refuse = [](const char* what) { fail(ErrorKind::schema, "a store with axes or tasks takes no ", what); };
  if (options.remover != Remover::fifo) refuse("remover: nothing is evicted");
  if (options.step_priorities) refuse("priorities of steps");
  if (options.max_age_ns != 0) refuse("max_age");
  if (options.max_rows != 0 && options.max_rows != options.capacity) refuse("max_rows");
}

}  // namespace

Header plan_segment(const std::vector<FieldSpec>& fields, const StoreOptions& options,
                    std::vector<FieldRecord>* records, TaskTable* table) {
  if (options.capacity == 0) fail(ErrorKind::schema, "a store needs room for at least one row, capacity is 0");
  if (options.capacity > kMaxRows) {
    fail(ErrorKind::schema, "a shard has at most ", kMaxRows, " rows, capacity is ", options.capacity);
  }
  if (options.max_rows > options.capacity) {
    fail(ErrorKind::schema, "max_rows is ", options.max_rows, ", more than the capacity of ", options.capacity);
  }
  if (options.priority_fraction_bits > 32) {
    fail(ErrorKind::schema, "priority_fraction_bits is 0 to 32, found ", options.priority_fraction_bits);
  }
  if (fields.empty() || fields.size() > kMaxFields) {
    fail(ErrorKind::schema, "a store has 1 to ", kMaxFields, " fields, found ", fields.size());
  }
  if (options.remover == Remover::lowest_value || options.remover == Remover::highest_value) {
    if (options.remover_field >= fields.size()) fail(ErrorKind::schema, "the remover goes by a field that is none");
    const FieldSpec& field = fields[options.remover_field];
    if (field.timed || !field.shape.empty() || conversion(field.dtype, 13) == nullptr) {
      fail(ErrorKind::schema, "the remover goes by one number a row, of integers, float32 or float64; '", field.name,
           "' is something else");
    }
  } else if (options.remover_field != 0) {
    fail(ErrorKind::schema, "this remover goes by no field");
  }
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.format_version = kFormatVersion;
  header.header_bytes = sizeof(Header);
  header.capacity = options.capacity;
  header.max_rows = options.max_rows == 0 ? options.capacity : options.max_rows;
  header.max_age_ns = options.max_age_ns;
  header.max_times_sampled = options.max_times_sampled;
  header.priority_fraction_bits = options.priority_fraction_bits;
  header.remover = static_cast<uint32_t>(options.remover) | options.remover_field << 8;
  if (options.content_numbers) header.required_features |= kContentNumbers;
  if (options.max_priority) header.required_features |= kMaxPriority;
  header.persist = options.persist;
  header.max_clients = kMaxClients;
  header.fanout = kFanout;
  header.field_count = static_cast<uint32_t>(fields.size());

  uint64_t end = kRegionsOffset;
  const auto place = [&](RegionId id, uint64_t bytes) {
    header.regions[id] = {end, bytes};
    end = round_up(end + bytes, 4096);
  };
  const uint64_t rows = options.capacity;
  header.max_length = 1;
  for (const FieldSpec& field : fields) {
    if (field.timed && !field.shape.empty()) header.max_length = std::max(field.shape[0], 1u);
  }
  const uint64_t bit_words = (rows + 63) / 64;
  place(kStatusRegion, rows * sizeof(RowStatus));
  place(kWordsRegion, padded_leaves(rows) * 8);
  place(kPriorityNodesRegion, TreeShape::of(rows).nodes * 8);
  place(kBitsRegion, padded_leaves(bit_words) * 8);
  place(kBitNodesRegion, TreeShape::of(bit_words).nodes * 8);
  place(kHeapRegion, options.remover == Remover::lowest_priority ? rows * 4 : 0);
  if (options.step_priorities) {
    // So many that their numbers have 32 bits, and the sum of all priorities 64.
    const uint64_t steps = rows * header.max_length;
    if (steps > kMaxRows) {
      fail(ErrorKind::schema, "a shard with priorities of steps has at most ", kMaxRows, " of them, ", rows,
           " rows of ", header.max_length, " steps have ", steps);
    }
    if (options.remover == Remover::lowest_priority) {
      fail(ErrorKind::schema, "with priorities of steps no row has one that the remover could go by");
    }
    header.required_features |= kStepPriorities;
    place(kStepWordsRegion, padded_leaves(steps) * 8);
    place(kStepNodesRegion, TreeShape::of(steps).nodes * 8);
    place(kStepJournalsRegion, kJournals * sizeof(StepJournal));
  }
  const bool spans = options.span_bytes != 0 || !options.tasks.empty() || !options.axes.empty();
  const std::unique_ptr<TaskTable> own(spans && table == nullptr ? new TaskTable() : nullptr);
  if (own) table = own.get();
  if (spans) {
    check_for_spans(options);
    plan_tasks(options.tasks, fields, table);
    plan_axes(options.axes, fields, table);
    table->span_units = options.span_bytes / kSpanUnit;
    if (table->span_units >= kMostSpanUnits) {
      fail(ErrorKind::schema, "a store has fewer than ", kMostSpanUnits * kSpanUnit, " bytes of spans, found ",
           options.span_bytes);
    }
    header.required_features |= kRowSpans;
    const uint64_t tasks = options.tasks.size() + 1;
    place(kTasksRegion, sizeof(TaskTable));
    place(kTaskWordsRegion, rows * tasks * 24);
    place(kDueRegion, tasks * bit_words * 8);
  }

  const uint64_t columns_start = end;
  records->clear();
  bool timed_seen = false;
  for (const FieldSpec& field : fields) {
    check_spec(field);
    for (const FieldRecord& other : *records) {
      if (field.name == other.name) fail(ErrorKind::schema, "field '", field.name, "' is named twice");
    }
    if (field.timed) {
      if (timed_seen && header.max_length != field.shape[0]) {
        fail(ErrorKind::schema, "timed fields must share their first axis, found ", header.max_length, " and ",
             field.shape[0]);
      }
      header.max_length = field.shape[0];
      timed_seen = true;
    }
    FieldRecord record = record_of(field, end);
    const bool spanned = in_spans(record) || field.divides != 0;
    if (spanned && (!spans || field.timed || (field.kind != SpanKind::array && !field.shape.empty()))) {
      fail(ErrorKind::schema, "field '", field.name, "' cannot be kept in spans");
    }
    if (spans && field.timed) {
      fail(ErrorKind::schema, "field '", field.name, "' has steps, and a store with axes or tasks has none");
    }
    uint64_t column_bytes = 0;
    if (__builtin_mul_overflow(record.stride, rows, &column_bytes) || column_bytes > (uint64_t{1} << 60) - end) {
      fail(ErrorKind::schema, "field '", field.name, "' times ", rows, " rows is larger than memory can be");
    }
    records->push_back(record);
    end = round_up(end + column_bytes, 4096);
  }
  header.regions[kColumnsRegion] = {columns_start, end - columns_start};
  if (spans) place(kSpansRegion, table->span_units * kSpanUnit);
  header.segment_bytes = end;
  header.fingerprint = layout_fingerprint(header, records->data(), spans ? table : nullptr);
  return header;
}

uint64_t layout_fingerprint(const Header& header, const FieldRecord* records, const TaskTable* table) {
  Header plain = header;
  plain.fingerprint = 0;
  plain.created_ns = 0;
  plain.store_id = 0;
  Fingerprint fingerprint;
  for (uint64_t size : {sizeof(Header), sizeof(Control), sizeof(pthread_mutex_t), sizeof(FieldRecord), sizeof(Client),
                        sizeof(RowStatus)}) {
    fingerprint.add(size);
  }
  fingerprint.add(plain);
  for (uint32_t i = 0; i < header.field_count; ++i) fingerprint.add(records[i]);
  if (table != nullptr) {
    for (const uint64_t number : {uint64_t{sizeof(TaskTable)}, uint64_t{sizeof(SpanHead)}, uint64_t{table->axis_count},
                                  uint64_t{table->task_count}, table->span_units}) {
      fingerprint.add(number);
    }
    for (const AxisRecord& axis : table->axes) fingerprint.add(axis);
    for (const TaskRecord& task : table->tasks) fingerprint.add(task);
  }
  return fingerprint.value();
}

uint64_t rows_within(const std::vector<FieldSpec>& fields, StoreOptions options, uint64_t bytes) {
  std::vector<FieldRecord> records;
  const auto taken = [&](uint64_t rows) {
    options.capacity = rows;
    options.max_rows = 0;
    return plan_segment(fields, options, &records).segment_bytes;
  };
  if (taken(1) > bytes) return 0;
  // More rows never take fewer bytes. A row takes at least one block.
  uint64_t fits = 1, beyond = std::min(kMaxRows, bytes / kBlockAlignment) + 1;
  while (beyond - fits > 1) {
    const uint64_t middle = fits + (beyond - fits) / 2;
    bool enough = false;
    try {
      enough = taken(middle) <= bytes;
    } catch (const Error&) {
      // larger than memory can be
    }
    (enough ? fits : beyond) = middle;
  }
  return fits;
}

}  // namespace geartrain
