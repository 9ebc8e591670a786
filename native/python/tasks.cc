// Binding of Tasks (store/tasks.h): rows with spans are inserted, claimed, written, released and dropped, and waited
// for.
//
// Values come as runs: one buffer that has those of all rows, or a buffer for each row. Python has checked dtypes and
// shapes; what bounds a copy is checked here once more. Every wait ends at a deadline, when the store is closed, and
// for Python's signals.

#include "store/tasks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <memory>

#include "base/deadline.h"
#include "base/errors.h"
#include "fetch/packed.h"
#include "python/bind.h"
#include "python/host_array.h"

namespace geartrain {
namespace {

using LengthTable = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Tasks& tasks_of(const Store& store) {
  store.check_open();
  Tasks* const tasks = store.tasks();
  if (tasks == nullptr) fail(ErrorKind::schema, "the store has neither axes nor tasks");
  return *tasks;
}

void check_task_number(const Tasks& tasks, uint32_t task) {
  if (task == 0 || task > tasks.count()) fail(ErrorKind::schema, "no task number ", task);
}

double seconds_left(const Deadline& deadline) {
  return static_cast<double>(deadline.left_ns()) / 1e9;
}

// The values of the rows that are written, as Python gave them: (field, runs, sizes) each. `runs` is a buffer or a list
// of buffers, `sizes` the same of uint32, of strings alone.
class GivenValues {
 public:
  GivenValues(const Store& store, const nb::list& sources, size_t rows) : store_(store), rows_(rows) {
    for (const nb::handle each : sources) {
      const auto parts = nb::cast<nb::tuple>(each);
      Given given;
      given.field = nb::cast<uint32_t>(parts[0]);
      if (given.field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", given.field);
      given.runs = opened(parts[1]);
      if (!parts[2].is_none()) given.sizes = opened(parts[2]);
      given_.push_back(std::move(given));
    }
    for (Given& given : given_) {
      for (const auto& run : given.runs) given.at.push_back(reinterpret_cast<const std::byte*>(run->data()));
      for (const auto& sizes : given.sizes) given.sizes_at.push_back(reinterpret_cast<const uint32_t*>(sizes->data()));
      sources_.push_back({given.field, given.at, given.sizes_at});
    }
  }

  std::span<const PackedSource> sources() const { return sources_; }

  // Throws schema unless every run has the bytes that the rows' lengths say. Rows that are passed over count as well.
  void check(std::span<const TaskRow> rows) const {
    for (const Given& given : given_) {
      const FieldRecord& field = store_.fields()[given.field];
      uint64_t items = 0;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (given.runs.size() != 1) items = 0;
        items += field.axis == 0 ? 1 : rows[i].lengths[field.axis - 1];
        if (given.runs.size() == 1 && i + 1 < rows.size()) continue;
        const size_t run = given.runs.size() == 1 ? 0 : i;
        uint64_t wanted = items * field.block_bytes;
        if (field.kind != SpanKind::array) {
          if (given.sizes.size() != given.runs.size() || given.sizes[run]->bytes() != 4 * items) {
            fail(ErrorKind::schema, "field '", field.name, "' needs ", items, " strings");
          }
          wanted = 0;
          for (uint64_t each = 0; each < items; ++each) wanted += given.sizes_at[run][each];
        }
        if (given.runs[run]->bytes() != wanted) {
          fail(ErrorKind::schema, "field '", field.name, "' needs ", items, " items, which are ", wanted,
               " bytes; found ", given.runs[run]->bytes());
        }
      }
    }
  }

 private:
  using Buffers = std::vector<std::unique_ptr<HostArray>>;
  struct Given {
    uint32_t field = 0;
    Buffers runs, sizes;
    std::vector<const std::byte*> at;
    std::vector<const uint32_t*> sizes_at;
  };

  Buffers opened(nb::handle values) const {
    Buffers buffers;
    const auto open = [&](nb::handle value) {
      auto array = std::make_unique<HostArray>();
      if (!array->open(value.ptr())) fail(ErrorKind::schema, "values of rows are C-contiguous buffers");
      buffers.push_back(std::move(array));
    };
    if (PyList_Check(values.ptr()) == 0) {
      open(values);
      return buffers;
    }
    for (const nb::handle value : nb::cast<nb::list>(values)) open(value);
    if (buffers.size() != rows_) {
      fail(ErrorKind::schema, buffers.size(), " buffers were given for ", rows_, " rows");
    }
    return buffers;
  }

  const Store& store_;
  const size_t rows_;
  std::vector<Given> given_;
  std::vector<PackedSource> sources_;
};

void set_lengths(const Tasks& tasks, const LengthTable& lengths, std::span<TaskRow> rows) {
  const size_t axes = tasks.described().axis_count;
  if (lengths.shape(0) != rows.size() || lengths.shape(1) != axes) {
    fail(ErrorKind::schema, "lengths are (", rows.size(), ", ", axes, "), found (", lengths.shape(0), ", ",
         lengths.shape(1), ")");
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t axis = 0; axis < axes; ++axis) rows[i].lengths[axis] = lengths.data()[i * axes + axis];
  }
}

// --- inserts --------------------------------------------------------------------------------------------------------

// Inserts rows, all or none. Returns (rows, generations); None where there was no room in time; how many of them to
// insert first where fewer may be in flight now.
nb::object insert_with_spans(Store& store, size_t n, const nb::list& sources, const LengthTable& lengths,
                             const std::optional<In<double>>& priorities, const std::optional<In<int64_t>>& versions,
                             unsigned threads, double timeout_s) {
  Tasks& tasks = tasks_of(store);
  std::vector<TaskRow> rows(n);
  std::vector<uint32_t> generations(n), numbers(n);
  set_lengths(tasks, lengths, rows);
  const GivenValues values(store, sources, n);
  values.check(rows);
  // Columns are written as those of any insert, spans by fill_spans.
  std::vector<PackedSource> in_span;
  std::vector<InsertField> columns;
  for (const PackedSource& source : values.sources()) {
    const FieldRecord& field = store.fields()[source.field];
    if (in_spans(field)) {
      in_span.push_back(source);
    } else {
      columns.push_back({source.field, source.runs[0], field.block_bytes});
    }
  }
  const CommitValues commit{{}, view(priorities), view(versions)};
  uint64_t first = 0;
  const bool inserted = patiently(Deadline::after(timeout_s), [&](Deadline slice, Deadline) {
    const Store::Call call(store);
    store.check_values(n, commit);
    size_spans(store, 0, 0, rows, in_span, {});
    for (;;) {
      const uint32_t seen = tasks.table().space_changes.load(std::memory_order_acquire);
      if (tasks.begin_insert(rows)) break;
      if (const uint64_t places = tasks.places_in_flight(); n > 1 && places < n) {
        first = std::max<uint64_t>(1, places);
        return true;
      }
      if (slice.passed()) return false;
      tasks.await_space(seen, seconds_left(slice));
    }
    try {
      for (size_t i = 0; i < n; ++i) numbers[i] = rows[i].row;
      fill(store, numbers, columns, {}, threads);
      fill_spans(store, 0, 0, rows, in_span, {}, threads);
      tasks.finish_insert(rows, commit, generations);
    } catch (...) {
      try {
        tasks.abandon_insert(rows);
      } catch (const Error&) {
        // The first error is the cause. Rows that are left are reclaimed when this process leaves.
      }
      throw;
    }
    return true;
  });
  if (!inserted) return nb::none();
  if (first != 0) return nb::int_(first);
  return to_numpy_tuple(std::move(numbers), std::move(generations));
}

// --- claims ---------------------------------------------------------------------------------------------------------

std::vector<ClaimedRow> claimed_of(const In<uint32_t>& rows, const In<uint32_t>& generations,
                                   const In<uint16_t>& claims) {
  if (generations.size() != rows.size() || claims.size() != rows.size()) {
    fail(ErrorKind::schema, "as many generations and claims as rows are needed");
  }
  std::vector<ClaimedRow> claimed(rows.size());
  for (size_t i = 0; i < claimed.size(); ++i) {
    claimed[i] = {rows.data()[i], generations.data()[i], claims.data()[i]};
  }
  return claimed;
}

// Claims rows that are due, and waits for some. Returns (rows, generations, claims, lengths); True where none can
// become due any more, None where none was in time.
// `later`: say_version() follows.
nb::object claim_rows(Store& store, uint32_t task, size_t most, uint64_t max_items, uint32_t axis, double timeout_s,
                      bool later) {
  Tasks& tasks = tasks_of(store);
  const size_t axes = tasks.described().axis_count;
  check_task_number(tasks, task);
  std::vector<ClaimedRow> claimed;
  std::vector<uint32_t> lengths;
  bool over = false;
  patiently(Deadline::after(timeout_s), [&](Deadline slice, Deadline) {
    const Store::Call call(store);
    for (;;) {
      const uint32_t seen = tasks.table().figures[task].changes.load(std::memory_order_acquire);
      claimed = tasks.claim(task, {most, max_items, axis, later});
      if (!claimed.empty()) break;
      over = tasks.is_over(task);
      if (over) return true;
      if (slice.passed()) return false;
      tasks.await_due(task, seen, seconds_left(slice));
    }
    lengths.resize(claimed.size() * axes);
    for (size_t i = 0; i < claimed.size(); ++i) {
      AxisLengths its{};
      tasks.lengths(claimed[i].row, claimed[i].generation, &its);
      std::copy_n(its.begin(), axes, lengths.begin() + static_cast<std::ptrdiff_t>(i * axes));
    }
    return true;
  });
  if (over) return nb::bool_(true);
  if (claimed.empty()) return nb::none();
  const size_t n = claimed.size();
  std::vector<uint32_t> rows(n), generations(n);
  std::vector<uint16_t> numbers(n);
  for (size_t i = 0; i < n; ++i) {
    rows[i] = claimed[i].row;
    generations[i] = claimed[i].generation;
    numbers[i] = claimed[i].claim;
  }
  return nb::make_tuple(to_numpy(std::move(rows)), to_numpy(std::move(generations)), to_numpy(std::move(numbers)),
                        to_numpy<uint32_t>(std::move(lengths), {n, axes}));
}

// act(tasks, claimed, ...) of rows that a task has claimed, as a function of Python's: (task, rows, generations,
// claims,
// ...).
template <typename... More, typename Act>
auto of_claimed(Act act) {
  return [act](Store& store, uint32_t task, const In<uint32_t>& rows, const In<uint32_t>& generations,
               const In<uint16_t>& claims, More... more) {
    const std::vector<ClaimedRow> claimed = claimed_of(rows, generations, claims);
    return released(store, [&] { return act(tasks_of(store), task, claimed, more...); });
  };
}

// Whether each row is there and too old: uint8.
nb::object stale_rows(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  const Tasks& tasks = tasks_of(store);
  if (generations.size() != rows.size()) fail(ErrorKind::schema, "as many generations as rows are needed");
  std::vector<uint8_t> stale(rows.size());
  released(store, [&] {
    for (size_t i = 0; i < stale.size(); ++i) {
      stale[i] = tasks.has_key(rows.data()[i], generations.data()[i]) && tasks.is_stale(rows.data()[i]);
    }
  });
  return to_numpy(std::move(stale));
}

void limit_tasks(Store& store, std::optional<uint64_t> in_flight, std::optional<uint64_t> max_stale) {
  released(store, [&] { tasks_of(store).set_limits({in_flight.value_or(0), max_stale}); });
}

// Claims rows once more by the numbers of earlier claims, 0 where nobody has claimed a loaded row. Returns a
// Tasks::Again of each.
std::vector<int> claim_again(Tasks& tasks, uint32_t task, const std::vector<ClaimedRow>& claimed, int64_t version) {
  std::vector<int> out;
  for (const Tasks::Again each : tasks.claim_again(task, claimed, version)) out.push_back(static_cast<int>(each));
  return out;
}

// Items of each axis in rows, 0 where they are not known yet: (lengths (n, axes), whether each key holds (n,)).
nb::tuple lengths_of_rows(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  const size_t n = rows.size(), axes = tasks_of(store).described().axis_count;
  if (generations.size() != n) fail(ErrorKind::schema, "as many generations as rows are needed");
  std::vector<uint32_t> lengths(n * axes);
  std::vector<uint8_t> found(n);
  released(store, [&] {
    for (size_t i = 0; i < n; ++i) {
      AxisLengths its{};
      found[i] = tasks_of(store).lengths(rows.data()[i], generations.data()[i], &its);
      std::copy_n(its.begin(), axes, lengths.begin() + static_cast<std::ptrdiff_t>(i * axes));
    }
  });
  return nb::make_tuple(to_numpy<uint32_t>(std::move(lengths), {n, axes}), to_numpy(std::move(found)));
}

// --- writing --------------------------------------------------------------------------------------------------------

// What became of each row that was to be written.
enum class Wrote : uint8_t { done = 0, stale = 1, waits = 2 };

// Rows whose spans were begun are filled and take effect; those that have no room yet are waited for meanwhile.
class RowWriter {
 public:
  RowWriter(Store& store, Write write, uint32_t task, uint8_t axis, std::span<TaskRow> rows,
            std::span<const PackedSource> sources, std::span<const Appended> appended, unsigned threads)
      : store_(store),
        tasks_(tasks_of(store)),
        write_(write),
        task_(task),
        axis_(axis),
        rows_(rows),
        sources_(sources),
        appended_(appended),
        threads_(threads) {}

  // Until the slice passes; whether all rows are through.
  bool run(Deadline slice) {
    for (size_t late = SIZE_MAX;;) {  // the row for which room was made when the slice had passed
      const uint32_t seen = tasks_.table().space_changes.load(std::memory_order_acquire);
      write_some();
      if (at_ == rows_.size()) return true;
      switch (tasks_.make_room(task_, rows_[at_])) {
        case Tasks::Room::made:
          if (late == at_) return false;  // others took it
          if (slice.passed()) late = at_;
          continue;  // what others gave up for it is not left unused
        case Tasks::Room::given_up:
          rows_[at_++].skipped = true;
          continue;
        case Tasks::Room::never:
          fail(ErrorKind::no_space, "no space for a row of ", rows_[at_].units * kSpanUnit,
               " bytes, and nothing is left that could give any back: ", tasks_.occupancy(),
               "; create the store with a larger span_bytes");
        case Tasks::Room::wait:
          break;
      }
      if (slice.passed()) return false;
      tasks_.await_space(seen, seconds_left(slice));
    }
  }
  Wrote wrote(size_t i) const { return rows_[i].skipped ? Wrote::stale : i < at_ ? Wrote::done : Wrote::waits; }

 private:
  void write_some() {
    const std::span<TaskRow> left = rows_.subspan(at_);
    size_t begun = 0;
    try {
      begun = tasks_.begin(write_, task_, left, axis_);
      if (begun == 0) return;
      fill_spans(store_, task_, axis_, rows_, sources_, appended_, threads_);
      tasks_.finish(write_, task_, left.first(begun));
    } catch (...) {
      try {
        tasks_.abandon(task_, left);
      } catch (const Error&) {
        // The first error is the cause. Spans that are left are freed when this process leaves.
      }
      throw;
    }
    at_ += begun;
  }

  Store& store_;
  Tasks& tasks_;
  Write write_;
  uint32_t task_;
  uint8_t axis_;
  std::span<TaskRow> rows_;
  std::span<const PackedSource> sources_;
  std::span<const Appended> appended_;
  unsigned threads_;
  size_t at_ = 0;
};

Write write_of(int number) {
  if (number < 0 || number > 2) fail(ErrorKind::schema, "no way to write rows: ", number);
  return static_cast<Write>(number);
}

// Runs a writer until its rows are through or the time is over; `prepare` once before, without the GIL.
template <typename Prepare>
void run_writer(Store& store, RowWriter& writer, double timeout_s, const Prepare& prepare) {
  Tasks& tasks = tasks_of(store);
  bool prepared = false;
  const auto give_up_waiting = [&] {
    try {
      released(store, [&] { tasks.stop_waiting(); });
    } catch (const Error&) {
      // The store is closed: nothing of it waits any more.
    }
  };
  try {
    const bool all = patiently(Deadline::after(timeout_s), [&](Deadline slice, Deadline) {
      const Store::Call call(store);
      if (!prepared) prepare();
      prepared = true;
      return writer.run(slice);
    });
    if (!all) give_up_waiting();
  } catch (...) {
    give_up_waiting();
    throw;
  }
}

// Writes rows of a task: put (0), append (1), rewrite (2). `merges`: of a put of one row, what was appended becomes one
// span with what is given; `parts` are then the lengths that divide the axis, None where they follow from the appends.
// Returns a Wrote of each row, uint8.
nb::object write_rows(Store& store, int write, uint32_t task, uint8_t axis, const In<uint32_t>& rows,
                      const In<uint32_t>& generations, const std::optional<In<uint16_t>>& claims,
                      const nb::list& sources, const LengthTable& lengths, uint32_t item, bool merges,
                      const std::optional<In<int32_t>>& parts, unsigned threads, double timeout_s, bool durable) {
  Tasks& tasks = tasks_of(store);
  const Write how = write_of(write);
  const size_t n = rows.size();
  if (generations.size() != n || (claims && claims->size() != n)) {
    fail(ErrorKind::schema, "as many generations and claims as rows are needed");
  }
  check_task_number(tasks, task);
  if (axis > tasks.described().axis_count) fail(ErrorKind::schema, "no axis number ", axis);
  if (merges && n != 1) fail(ErrorKind::schema, "what was appended is put row by row, found ", n, " rows");
  std::vector<TaskRow> written(n);
  for (size_t i = 0; i < n; ++i) {
    written[i].row = rows.data()[i];
    if (written[i].row >= store.header().capacity) fail(ErrorKind::schema, "no row ", written[i].row);
    written[i].generation = generations.data()[i];
    if (claims) written[i].claim = claims->data()[i];
    written[i].item = item;
  }
  set_lengths(tasks, lengths, written);
  const GivenValues values(store, sources, n);
  const std::vector<int32_t> given = copied(parts);
  std::vector<Appended> appended(merges ? 1 : 0);
  RowWriter writer(store, how, task, axis, written, values.sources(), appended, threads);
  run_writer(store, writer, timeout_s, [&] {
    if (merges) {
      appended[0] = merge_appended(store, task, written[0],
                                   parts ? std::optional(std::span<const int32_t>(given)) : std::nullopt);
    }
    values.check(written);
    size_spans(store, task, axis, written, values.sources(), appended);
  });
  if (durable) released(store, [&] { store.settle_journal("put", true); });
  std::vector<uint8_t> out(n);
  for (size_t i = 0; i < n; ++i) {
    out[i] = static_cast<uint8_t>(writer.wrote(i));
  }
  return to_numpy(std::move(out));
}

// The whole of a put or an append of one row in one call, for NumPy arrays that need no conversion. The fields of the
// task are looked up once. Whatever is out of the ordinary is left to the caller, who converts it or says what is
// wrong.
class OneRowWriter {
 public:
  // `axis`: that appends extend; 0: puts.
  OneRowWriter(Store& store, uint32_t task, uint8_t axis, const nb::list& names, std::vector<uint32_t> fields)
      : store_(store), task_(task), axis_(axis), fields_(std::move(fields)), names_(all_interned(names)) {
    check_task_number(tasks_of(store), task);
    if (axis > tasks_of(store).described().axis_count) fail(ErrorKind::schema, "no axis number ", axis);
    if (names_.size() != fields_.size()) fail(ErrorKind::schema, "as many names as fields are needed");
    for (const uint32_t field : fields_) {
      if (field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", field);
    }
  }

  // Writes the row of a claim. `known`: lengths of the row's axes that the task does not set. Returns a Wrote, or None
  // with nothing done for arguments that it does not take.
  nb::object write(nb::handle values, uint32_t row, uint32_t generation, uint16_t claim, const In<uint32_t>& known,
                   uint32_t item, double timeout_s) {
    const size_t count = fields_.size();
    if (PyDict_CheckExact(values.ptr()) == 0 || static_cast<size_t>(PyDict_GET_SIZE(values.ptr())) != count) {
      return nb::none();
    }
    if (count == 0 || store_.is_closed() || row >= store_.header().capacity) return nb::none();
    const TaskTable& described = tasks_of(store_).described();
    if (known.size() != described.axis_count) return nb::none();
    TaskRow written{.row = row, .generation = generation, .claim = claim, .item = item};
    std::array<bool, kMaxAxes> told{};
    std::array<HostArray, kMaxFields> arrays;
    std::array<const std::byte*, kMaxFields> at{};
    std::array<PackedSource, kMaxFields> sources;
    for (size_t f = 0; f < count; ++f) {
      PyObject* value = PyDict_GetItemWithError(values.ptr(), names_[f].ptr());
      if (value == nullptr) {
        PyErr_Clear();
        return nb::none();
      }
      const FieldRecord& field = store_.fields()[fields_[f]];
      if (field.kind != SpanKind::array || !arrays[f].open(value) || !fits(field, arrays[f])) return nb::none();
      if (field.axis != 0) {
        const size_t axis = field.axis - 1u;
        const auto items = static_cast<uint64_t>(arrays[f].shape()[0]);
        if (!told[axis] && described.axes[axis].owner != task_) written.lengths[axis] = known.data()[axis];
        if (!told[axis] && described.axes[axis].owner == task_) written.lengths[axis] = static_cast<uint32_t>(items);
        told[axis] = true;
        if (items != written.lengths[axis]) return nb::none();
      }
      at[f] = arrays[f].data();
      sources[f] = {fields_[f], std::span(&at[f], 1)};
    }
    const std::span<const PackedSource> all = std::span(sources).first(count);
    RowWriter writer(store_, axis_ == 0 ? Write::put : Write::append, task_, axis_, {&written, 1}, all, {}, 0);
    run_writer(store_, writer, timeout_s, [&] { size_spans(store_, task_, axis_, {&written, 1}, all, {}); });
    return nb::int_(static_cast<int>(writer.wrote(0)));
  }

 private:
  // Whether the array has the dtype of the field, and its shape: (items, ...) with an axis.
  static bool fits(const FieldRecord& field, const HostArray& array) {
    const auto shape = array.shape();
    const size_t lead = field.axis != 0;
    if (array.code() != field.dtype || shape.size() != lead + field.ndim) return false;
    for (size_t d = 0; d < field.ndim; ++d) {
      if (static_cast<uint64_t>(shape[lead + d]) != field.shape[d]) return false;
    }
    return lead == 0 || static_cast<uint64_t>(shape[0]) <= UINT32_MAX / 2;
  }

  Store& store_;
  uint32_t task_;
  uint8_t axis_;
  std::vector<uint32_t> fields_;
  std::vector<nb::object> names_;
};

// What was appended to a claimed row so far: (axis, items (p,), lengths (p, axes), values), in the order of items and
// then of appends. `fields`: whose values; each is (bytes) or, of strings, (bytes, sizes).
nb::tuple appended_parts(Store& store, uint32_t task, uint32_t row, uint32_t generation, uint16_t claim,
                         const std::vector<uint32_t>& fields) {
  Tasks& tasks = tasks_of(store);
  check_task_number(tasks, task);
  if (row >= store.header().capacity) fail(ErrorKind::schema, "no row ", row);
  for (const uint32_t field : fields) {
    if (field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", field);
  }
  const size_t axes = tasks.described().axis_count;
  Appended found;
  std::vector<std::vector<uint8_t>> values(fields.size());
  std::vector<std::vector<uint32_t>> sizes(fields.size());
  released(store, [&] {
    found.parts = tasks.chain(task, {row, generation, claim});
    std::erase_if(found.parts, [](const ChainPart& part) { return part.axis == 0; });
    std::stable_sort(found.parts.begin(), found.parts.end(),
                     [](const ChainPart& one, const ChainPart& other) { return one.item < other.item; });
    if (found.parts.empty()) return;
    found.axis = found.parts[0].axis;
    for (size_t i = 0; i < fields.size(); ++i) {
      copy_appended(store, task, found, fields[i], &values[i], &sizes[i]);
    }
    // Copies of a row that was lost meanwhile may be of another's bytes.
    if (!tasks.owns(task, {row, generation, claim})) {
      fail(ErrorKind::stale_claim, "row ", row, " is not claimed by this process any more");
    }
  });
  std::vector<uint32_t> items, lengths;
  for (const ChainPart& part : found.parts) {
    items.push_back(part.item);
    lengths.insert(lengths.end(), part.lengths.begin(), part.lengths.begin() + static_cast<std::ptrdiff_t>(axes));
  }
  const size_t count = items.size();
  nb::list copies;
  for (size_t i = 0; i < fields.size(); ++i) {
    copies.append(nb::make_tuple(to_numpy(std::move(values[i])), to_numpy(std::move(sizes[i]))));
  }
  return nb::make_tuple(found.axis, to_numpy(std::move(items)), to_numpy<uint32_t>(std::move(lengths), {count, axes}),
                        copies);
}

// --- who watches ----------------------------------------------------------------------------------------------------

// Figures of each task, and of all rows that are under way.
nb::dict task_figures(const Store& store) {
  const Tasks& tasks = tasks_of(store);
  nb::list each;
  for (uint32_t task = 1; task <= tasks.count(); ++task) {
    const TaskFigures& its = tasks.table().figures[task];
    nb::dict figures;
    figures["due"] = its.due.load();
    figures["claimed"] = its.claimed.load();
    figures["remaining"] = its.remaining.load();
    for (const auto& [name, counter] : Tasks::kFigures) figures[name] = (its.*counter).load();
    each.append(figures);
  }
  nb::dict out;
  out["tasks"] = each;
  out["finished"] = tasks.table().finished.load() != 0;
  out["under_way"] = tasks.table().under_way.load();
  if (tasks.count() != 0) {
    out["kept"] = tasks.table().taken.load();
    out["in_flight"] = tasks.in_flight();
    out["stale"] = tasks.table().stale.load();
    out["clock"] = tasks.clock();
  }
  out["dropped"] = tasks.table().dropped.load();
  out["given_up"] = tasks.table().given_up.load();
  out["set_back"] = tasks.table().set_back.load();
  out["revoked"] = tasks.table().revoked.load();
  out["span_bytes"] = tasks.heap().units() * kSpanUnit;
  out["free_span_bytes"] = tasks.heap().free_units() * kSpanUnit;
  return out;
}

// The oldest row that is claimed for a task: (row, pid of the claimer, when it was inserted in ns); None: none is.
nb::object oldest_claim(const Store& store, uint32_t task) {
  const Tasks::Oldest found = released(store, [&] { return tasks_of(store).oldest_claim(task); });
  if (found.row == kNoRow) return nb::none();
  return nb::make_tuple(found.row, found.pid, found.inserted_at_ns);
}

// Rows that the batch of a step has taken, by their places: rows, generations, places.
nb::tuple rows_taken_by(const Store& store, uint64_t step) {
  const std::vector<Tasks::TakenRow> found = released(store, [&] { return tasks_of(store).taken(step); });
  std::vector<uint32_t> rows, generations, places;
  for (const Tasks::TakenRow& each : found) {
    rows.push_back(each.row), generations.push_back(each.generation), places.push_back(each.place);
  }
  return to_numpy_tuple(std::move(rows), std::move(generations), std::move(places));
}

// --- what is saved --------------------------------------------------------------------------------------------------

using RecordBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Records as bytes (n, size): saved_parts.py has their dtypes.
template <typename Record>
nb::object record_bytes(std::vector<Record>&& records) {
  const size_t count = records.size();
  return to_numpy<uint8_t>(std::move(records), {count, sizeof(Record)});
}

// A copy, as another thread may write to the caller's array.
template <typename Record>
std::vector<Record> records_of(const RecordBytes& bytes) {
  if (bytes.shape(1) != sizeof(Record)) {
    fail(ErrorKind::schema, "records have ", sizeof(Record), " bytes, found ", bytes.shape(1));
  }
  std::vector<Record> records(bytes.shape(0));
  if (!records.empty()) std::memcpy(records.data(), bytes.data(), records.size() * sizeof(Record));
  return records;
}

nb::tuple changed_parts(Store& store, uint64_t since) {
  Tasks& tasks = tasks_of(store);
  std::vector<SavedRow> rows;
  std::vector<SavedPart> parts;
  const uint64_t next = released(store, [&] { return tasks.changed(since, &rows, &parts); });
  return nb::make_tuple(next, record_bytes(std::move(rows)), record_bytes(std::move(parts)));
}

nb::tuple copy_parts(const Store& store, const RecordBytes& records) {
  const Tasks& tasks = tasks_of(store);
  const auto parts = records_of<SavedPart>(records);
  std::vector<uint64_t> offsets(parts.size() + 1);
  // Of parts that were told by changed_parts: a longer one than the store has is none.
  const uint64_t most = store.header().segment_bytes;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].bytes > most || offsets[i] > UINT64_MAX - most) {
      fail(ErrorKind::schema, "a part has ", parts[i].bytes, " bytes, and the store ", most);
    }
    offsets[i + 1] = offsets[i] + parts[i].bytes;
  }
  std::vector<uint8_t> ok(parts.size());
  auto bytes = std::make_unique<std::vector<uint8_t>>();
  released(store, [&] {
    bytes->resize(offsets.back());
    tasks.copy_parts(parts, offsets, reinterpret_cast<std::byte*>(bytes->data()), ok);
  });
  return to_numpy_tuple(std::move(*bytes), std::move(offsets), std::move(ok));
}

void load_parts(Store& store, const RecordBytes& records, const In<uint8_t>& bytes, const In<uint64_t>& given) {
  Tasks& tasks = tasks_of(store);
  const auto parts = records_of<SavedPart>(records);
  const std::vector<uint64_t> offsets = copied(given);
  if (offsets.size() != parts.size() + 1) fail(ErrorKind::schema, "one offset more than parts is needed");
  released(store, [&] { tasks.load_parts(parts, offsets, std::as_bytes(view(bytes))); });
}

void finish_load(Store& store, const RecordBytes& records, uint64_t next_sequence) {
  Tasks& tasks = tasks_of(store);
  const auto rows = records_of<SavedRow>(records);
  released(store, [&] { tasks.finish_load(rows, next_sequence); });
}

// What is saved of a store beside its rows. Numbers are those of the moment.
nb::dict task_state(const Store& store) {
  const Tasks& tasks = tasks_of(store);
  const TaskTable& table = tasks.table();
  const Tasks::Limits limits = tasks.limits();
  nb::dict out;
  out["clock"] = tasks.clock();
  out["finished"] = table.finished.load() != 0;
  out["saved_before"] = table.saved_before.load();
  out["next_row"] = std::atomic_ref(const_cast<uint32_t&>(table.next_row)).load();
  out["passed_before"] = table.passed_before.load();
  out["in_flight"] = limits.in_flight;
  out["max_stale"] = limits.max_stale ? nb::cast(*limits.max_stale) : nb::none();
  for (const auto& [name, counter] : Tasks::kCounters) out[name] = (table.*counter).load();
  nb::list each;
  for (uint32_t task = 1; task <= tasks.count(); ++task) {
    nb::dict figures;
    for (const auto& [name, counter] : Tasks::kFigures) figures[name] = (table.figures[task].*counter).load();
    each.append(figures);
  }
  out["tasks"] = each;
  return out;
}

// Of a store that was loaded, with a dict as above.
void restore_task_state(Store& store, const nb::dict& state) {
  Tasks& tasks = tasks_of(store);
  const auto number = [&](const nb::dict& from, const char* name) { return nb::cast<uint64_t>(from[name]); };
  Tasks::Restored restored;
  restored.clock = nb::cast<int64_t>(state["clock"]);
  restored.finished = nb::cast<bool>(state["finished"]);
  restored.saved_before = number(state, "saved_before");
  restored.next_row = number(state, "next_row");
  restored.passed_before = number(state, "passed_before");
  restored.limits.in_flight = number(state, "in_flight");
  if (!state["max_stale"].is_none()) restored.limits.max_stale = number(state, "max_stale");
  for (const auto& [name, counter] : Tasks::kCounters) restored.counters.push_back(number(state, name));
  const auto each = nb::cast<nb::list>(state["tasks"]);
  if (each.size() != tasks.count()) {
    fail(ErrorKind::schema, "figures of ", each.size(), " tasks were saved, the store has ", tasks.count());
  }
  for (const nb::handle its : each) {
    const auto figures = nb::cast<nb::dict>(its);
    for (const auto& [name, counter] : Tasks::kFigures) restored.figures.push_back(number(figures, name));
  }
  released(store, [&] { tasks.restore(restored); });
}

}  // namespace

void bind_one_row_writer(nb::module_& module) {
  nb::class_<OneRowWriter>(module, "OneRowWriter")
      .def(nb::init<Store&, uint32_t, uint8_t, const nb::list&, std::vector<uint32_t>>(), nb::keep_alive<1, 2>())
      .def("write", &OneRowWriter::write);
}

void bind_tasks(nb::class_<Store>& store) {
  store
      .def("insert_with_spans", &insert_with_spans, nb::arg("n"), nb::arg("sources"), nb::arg("lengths"),
           nb::arg("priorities").none(), nb::arg("versions").none(), nb::arg("threads"), nb::arg("timeout_s"))
      .def("claim_rows", &claim_rows, nb::arg("task"), nb::arg("most"), nb::arg("max_items"), nb::arg("axis"),
           nb::arg("timeout_s"), nb::arg("later") = false)
      .def("release_rows", of_claimed([](Tasks& tasks, uint32_t task, const std::vector<ClaimedRow>& claimed) {
             return tasks.release(task, claimed);
           }))
      .def("say_version", of_claimed<int64_t>([](Tasks& tasks, uint32_t task, const std::vector<ClaimedRow>& claimed,
                                                 int64_t version) { tasks.say_version(task, claimed, version); }))
      .def("stale_rows", &stale_rows)
      .def("limit_tasks", &limit_tasks, nb::arg("in_flight").none(), nb::arg("max_stale").none())
      .def("check_in_flight", [](const Store& s, uint64_t rows) { tasks_of(s).check_in_flight(rows); })
      .def("finished", [](Store& s, uint64_t rows) { released(s, [&] { tasks_of(s).finished(rows); }); })
      .def("clock", [](const Store& s) { return tasks_of(s).clock(); })
      .def("advance", [](Store& s, int64_t v) { return released(s, [&] { return tasks_of(s).advance(v); }); })
      .def("set_clock", [](Store& s, int64_t v) { released(s, [&] { tasks_of(s).set_clock(v); }); })
      .def("drop_rows", of_claimed([](Tasks& tasks, uint32_t task, const std::vector<ClaimedRow>& claimed) {
             return tasks.drop(task, claimed);
           }))
      // Whether each is claimed by this process, by that claim.
      .def("owned_rows", of_claimed([](const Tasks& tasks, uint32_t task, const std::vector<ClaimedRow>& claimed) {
             std::vector<bool> owned;
             for (const ClaimedRow& each : claimed) owned.push_back(tasks.owns(task, each));
             return owned;
           }))
      .def("claim_again", of_claimed<int64_t>(&claim_again))
      .def("claim_for_others", [](Store& s) { released(s, [&] { tasks_of(s).claim_for_others(); }); })
      .def("lengths_of_rows", &lengths_of_rows)
      .def("write_rows", &write_rows, nb::arg("write"), nb::arg("task"), nb::arg("axis"), nb::arg("rows"),
           nb::arg("generations"), nb::arg("claims").none(), nb::arg("sources"), nb::arg("lengths"), nb::arg("item"),
           nb::arg("merges"), nb::arg("parts").none(), nb::arg("threads"), nb::arg("timeout_s"),
           nb::arg("durable") = false)
      .def("appended_parts", &appended_parts)
      .def("task_figures", &task_figures)
      .def("oldest_claim", &oldest_claim)
      .def("occupancy", [](const Store& s) { return released(s, [&] { return tasks_of(s).occupancy(); }); })
      .def("rows_left", [](Store& s) { return released(s, [&] { return tasks_of(s).rows_left(); }); })
      .def("taken", &rows_taken_by)
      .def("untake", [](Store& s, uint64_t step) { return released(s, [&] { return tasks_of(s).untake(step); }); })
      .def("free_taken",
           [](Store& s, uint64_t step) { return released(s, [&] { return tasks_of(s).free_taken(step); }); })
      .def("taken_steps",
           [](const Store& s) {
             nb::list steps;
             for (const auto& [step, rows, units] : released(s, [&] { return tasks_of(s).taken_steps(); })) {
               steps.append(nb::make_tuple(step, rows, units * kSpanUnit));
             }
             return steps;
           })
      .def("saved_before", [](const Store& s) { return tasks_of(s).table().saved_before.load(); })
      .def("kept_alone_stop",
           [](Store& s, uint64_t rows) { return released(s, [&] { return tasks_of(s).kept_alone_stop(rows); }); })
      .def("complete",
           [](Store& s, uint64_t most) {
             const Tasks::Complete found = released(s, [&] { return tasks_of(s).complete(most); });
             return nb::make_tuple(found.rows, found.before);
           })
      .def("changed_parts", &changed_parts)
      .def("copy_parts", &copy_parts)
      .def("begin_load", [](Store& s) { released(s, [&] { tasks_of(s).begin_load(); }); })
      .def("load_parts", &load_parts)
      .def("finish_load", &finish_load)
      .def("task_state", &task_state)
      .def("restore_task_state", &restore_task_state)
      .def("end_inserts", [](Store& s) { released(s, [&] { tasks_of(s).end_inserts(); }); })
      .def("is_over", [](const Store& s, uint32_t task) {
        return released(s, [&] {
          const Tasks& tasks = tasks_of(s);
          check_task_number(tasks, task);
          return tasks.is_over(task);
        });
      });
}

}  // namespace geartrain
