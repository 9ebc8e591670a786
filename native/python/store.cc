// Binding of Store (store.h): the segment, its figures and limiter, and the handle; its rows are bound in
// store_rows.cc. Every call that may wait or copy releases the GIL, and every call may meet a close() (released and
// entered, bind.h).

#include "store/store.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "base/errors.h"
#include "python/bind.h"
#include "store/client_lock.h"
#include "store/tasks.h"

namespace geartrain {
namespace {

using FieldTuple = std::tuple<std::string, int, int, bool, std::vector<uint32_t>>;
// Of a store with axes or tasks: a field's axis, task, the axis it divides, and kind; a task's name, the numbers of the
// tasks that it comes after, and flags.
using PlaceTuple = std::tuple<uint8_t, uint8_t, uint8_t, uint8_t>;
using TaskTuple = std::tuple<std::string, std::vector<uint32_t>, uint32_t>;

std::vector<FieldSpec> specs_of(const std::vector<FieldTuple>& fields) {
  std::vector<FieldSpec> specs;
  for (const auto& [field, dtype, itemsize, timed, shape] : fields) {
    specs.push_back({field, static_cast<uint8_t>(dtype), static_cast<uint8_t>(itemsize), timed, shape});
  }
  return specs;
}

StoreOptions options_of(uint64_t capacity, uint32_t remover, bool step_priorities) {
  StoreOptions options;
  options.capacity = capacity;
  options.remover = remover_of(remover);
  options.remover_field = remover_field_of(remover);
  options.step_priorities = step_priorities;
  return options;
}

// Bytes that a store of `capacity` rows takes, and the rows of one that takes at most `bytes`.
uint64_t segment_bytes(const std::vector<FieldTuple>& fields, uint64_t capacity, uint32_t remover,
                       bool step_priorities) {
  std::vector<FieldRecord> records;
  return plan_segment(specs_of(fields), options_of(capacity, remover, step_priorities), &records).segment_bytes;
}

uint64_t rows_of_bytes(const std::vector<FieldTuple>& fields, uint64_t bytes, uint32_t remover, bool step_priorities) {
  return rows_within(specs_of(fields), options_of(0, remover, step_priorities), bytes);
}

std::unique_ptr<Store> create(const std::string& name, const std::vector<FieldTuple>& fields, uint64_t capacity,
                              uint64_t max_rows, uint32_t remover, uint32_t max_times_sampled, uint64_t max_age_ns,
                              uint32_t priority_fraction_bits, bool persist, bool reserve, double timeout_s,
                              const std::string& trust, bool step_priorities, bool max_priority,
                              const std::vector<PlaceTuple>& places, const std::vector<std::string>& axes,
                              const std::vector<TaskTuple>& tasks, uint64_t span_bytes) {
  std::vector<FieldSpec> specs = specs_of(fields);
  if (!places.empty() && places.size() != specs.size()) fail(ErrorKind::schema, "every field needs its place");
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [axis, task, divides, kind] = places[i];
    if (kind > static_cast<uint8_t>(SpanKind::text)) fail(ErrorKind::schema, "no kind number ", kind);
    specs[i].axis = axis;
    specs[i].task = task;
    specs[i].divides = divides;
    specs[i].kind = static_cast<SpanKind>(kind);
  }
  StoreOptions options = options_of(capacity, remover, step_priorities);
  options.max_rows = max_rows;
  options.max_times_sampled = max_times_sampled;
  options.max_age_ns = max_age_ns;
  options.priority_fraction_bits = priority_fraction_bits;
  options.persist = persist;
  options.max_priority = max_priority;
  options.reserve = reserve;
  options.lock_timeout_s = timeout_s;
  options.trust = trust_of(trust);
  options.axes = axes;
  for (const auto& [task, after, flags] : tasks) options.tasks.push_back({task, after, flags});
  options.span_bytes = span_bytes;
  Unlocked unlocked;
  return Store::create(name, specs, options);
}

std::unique_ptr<Store> attach(const std::string& name, bool adopt, bool read_only, double timeout_s,
                              const std::string& trust) {
  const AttachOptions options{adopt, read_only, timeout_s, trust_of(trust)};
  Unlocked unlocked;
  return Store::attach(name, options);
}

// Axes (name, number of the task that sets the lengths, number of the field that divides it from 1 on), tasks (name,
// the tasks it comes after as bits, flags) and the fields' places, as they were checked when the segment was opened.
void describe_tasks(const Store& store, nb::dict& out) {
  const TaskTable& table = store.tasks()->described();
  nb::list axes, tasks, places;
  for (uint32_t i = 0; i < table.axis_count; ++i) {
    const AxisRecord& axis = table.axes[i];
    axes.append(nb::make_tuple(std::string(axis.name), axis.owner, axis.divided));
  }
  for (uint32_t i = 1; i <= table.task_count; ++i) {
    const TaskRecord& task = table.tasks[i];
    tasks.append(nb::make_tuple(std::string(task.name), task.after, task.flags));
  }
  for (uint32_t i = 0; i < store.header().field_count; ++i) {
    const FieldRecord& field = store.fields()[i];
    places.append(nb::make_tuple(field.axis, field.task, field.divides, static_cast<uint8_t>(field.kind)));
  }
  out["axes"] = axes;
  out["tasks"] = tasks;
  out["places"] = places;
  out["span_bytes"] = table.span_units * kSpanUnit;
}

nb::dict describe(const Store& store) {
  const Header& h = store.header();
  nb::dict out;
  out["capacity"] = h.capacity;
  out["max_rows"] = h.max_rows;
  out["max_length"] = h.max_length;
  out["max_age_ns"] = h.max_age_ns;
  out["max_times_sampled"] = h.max_times_sampled;
  out["priority_fraction_bits"] = h.priority_fraction_bits;
  out["remover"] = h.remover;
  out["persist"] = h.persist != 0;
  out["step_priorities"] = store.per_step();
  out["max_priority"] = store.keeps_max_priority();
  out["nbytes"] = h.segment_bytes;
  out["column_bytes"] = h.regions[kColumnsRegion].bytes;
  out["created_ns"] = h.created_ns;
  out["store_id"] = h.store_id;
  out["fingerprint"] = h.fingerprint;
  out["path"] = store.mapping()->path();
  nb::list fields;
  for (uint32_t i = 0; i < h.field_count; ++i) {
    const FieldRecord& f = store.fields()[i];
    nb::list shape;
    for (uint32_t d = 0; d < f.ndim; ++d) shape.append(f.shape[d]);
    fields.append(nb::make_tuple(std::string(f.name), f.dtype, nb::tuple(shape), f.timed != 0));
  }
  out["fields"] = fields;
  if (store.tasks() != nullptr) describe_tasks(store, out);
  return out;
}

// The names of Counters' members, in their order.
constexpr const char* kCounterNames[] = {"inserted",
                                         "evicted",
                                         "expired",
                                         "exhausted",
                                         "deleted",
                                         "abandoned",
                                         "reclaimed",
                                         "sampled",
                                         "torn",
                                         "stale_keys",
                                         "priorities_updated",
                                         "priorities_saturated",
                                         "priorities_rounded_up",
                                         "repairs"};
static_assert(sizeof(kCounterNames) / sizeof(kCounterNames[0]) == kCounterCount);

std::atomic<uint64_t>* counter_array(const Store& store) {
  return reinterpret_cast<std::atomic<uint64_t>*>(&store.control().counters);
}

nb::dict counters(const Store& store) {
  const StoreCounts n = entered(store, [&] { return store.counts(); });
  nb::dict out;
  out["free"] = n.free;
  out["writing"] = n.writing;
  out["exhausted_unreleased"] = n.exhausted;
  out["open"] = n.open;
  out["committed"] = n.committed;
  for (int i = 0; i < kCounterCount; ++i) out[kCounterNames[i]] = counter_array(store)[i].load();
  return out;
}

void set_counters(Store& store, const nb::dict& values) {
  std::optional<uint64_t> given[kCounterCount];
  for (int i = 0; i < kCounterCount; ++i) {
    if (values.contains(kCounterNames[i])) given[i] = nb::cast<uint64_t>(values[kCounterNames[i]]);
  }
  entered(store, [&] {
    store.check_usable();
    for (int i = 0; i < kCounterCount; ++i) {
      if (given[i]) counter_array(store)[i].store(*given[i]);
    }
  });
}

// All blocks of a field as one strided array over the segment, (capacity, *shape); rows are 64-byte aligned.
nb::object column(const Store& store, uint32_t field) {
  store.check_open();
  store.check_column(field);
  const FieldRecord& f = store.fields()[field];
  std::vector<size_t> shape{store.header().capacity};
  shape.insert(shape.end(), f.shape, f.shape + f.ndim);
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t d = shape.size() - 1; d > 0; --d) {
    strides[d] = step;
    step *= static_cast<int64_t>(shape[d]);
  }
  strides[0] = static_cast<int64_t>(f.stride / f.itemsize);
  const nb::capsule owner = keep_alive(store.mapping());
  const nb::dlpack::dtype dtype = array_dtype(f.dtype, f.itemsize);
  std::byte* data = store.block(field, 0);
  if (store.read_only()) {
    return nb::cast(nb::ndarray<nb::numpy, nb::ro>(data, shape.size(), shape.data(), owner, strides.data(), dtype));
  }
  return nb::cast(nb::ndarray<nb::numpy>(data, shape.size(), shape.data(), owner, strides.data(), dtype));
}

// The whole segment as bytes, for devices that read it directly.
nb::object segment(const Store& store) {
  store.check_open();
  const size_t bytes = store.mapping()->bytes();
  const nb::capsule owner = keep_alive(store.mapping());
  auto* data = reinterpret_cast<uint8_t*>(store.mapping()->data());
  if (store.read_only()) return nb::cast(nb::ndarray<nb::numpy, nb::ro, const uint8_t>(data, {bytes}, owner));
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(data, {bytes}, owner));
}

// Where in the segment the words, the selectable bits, the metadata and the columns are: offsets and strides in bytes.
nb::dict layout(const Store& store) {
  store.check_open();
  const Header& h = store.header();
  nb::dict out;
  out["words"] = h.regions[kWordsRegion].offset;
  out["bits"] = h.regions[kBitsRegion].offset;
  out["status"] = h.regions[kStatusRegion].offset;
  out["status_stride"] = sizeof(RowStatus);
  out["sequence"] = offsetof(RowStatus, sequence);
  out["version"] = offsetof(RowStatus, version);
  out["length"] = offsetof(RowStatus, length);
  out["inserted_at_ns"] = offsetof(RowStatus, inserted_at_ns);
  out["content_numbers"] = (h.required_features & kContentNumbers) != 0;
  nb::list columns;
  for (uint32_t i = 0; i < h.field_count; ++i) {
    columns.append(nb::make_tuple(store.fields()[i].offset, store.fields()[i].stride));
  }
  out["columns"] = columns;
  return out;
}

// Processes that are attached and alive, as dicts: pid (of the namespace that it joined from), joined_ns, and rows, how
// many it is writing or extending. Numbers may be a moment old; nothing is locked. Works read-only.
nb::list clients(const Store& store) {
  struct Found {
    int32_t pid;
    uint64_t joined_ns;
    uint32_t rows;
  };
  const std::vector<Found> found = released(store, [&] {
    std::vector<Found> living;
    for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
      const Client& client = store.client(slot);
      if (client.in_use == 0) continue;
      // A handle's own lease is no obstacle to itself.
      if (client.pid == ::getpid() || client_lives(store.mapping()->fd(), slot)) {
        living.push_back({client.pid, client.joined_ns, client.held_count});
      }
    }
    return living;
  });
  nb::list out;
  for (const Found& client : found) {
    nb::dict entry;
    entry["pid"] = client.pid;
    entry["joined_ns"] = client.joined_ns;
    entry["rows"] = client.rows;
    out.append(entry);
  }
  return out;
}

// The thread that holds the segment's lock now, 0 for none: whom others wait for, where it is stopped.
int lock_holder(const Store& store) {
  store.check_open();
  return store.control().mutex.__data.__owner;  // glibc's
}

void limit(Store& store, bool enabled, double samples_per_insert, uint64_t min_size, double error_buffer, bool afresh,
           bool steps) {
  const uint32_t unit = steps ? RateLimiter::kSteps : RateLimiter::kRows;
  entered(store, [&] { store.set_limiter({enabled, samples_per_insert, min_size, error_buffer, unit}, afresh); });
}

nb::dict limiter(const Store& store) {
  store.check_open();
  const RateLimiter& found = store.control().limiter;
  nb::dict out;
  out["enabled"] = found.enabled.load() != 0;
  out["unit"] = found.unit.load() == RateLimiter::kSteps ? "steps" : "rows";
  out["samples_per_insert"] = found.samples_per_insert.load();
  out["min_size_to_sample"] = found.min_size.load();
  out["error_buffer"] = found.error_buffer.load();
  out["inserts"] = found.inserts.load();
  out["samples"] = found.samples.load();
  out["insert_wait_s"] = static_cast<double>(found.insert_wait_ns.load()) / 1e9;
  out["sample_wait_s"] = static_cast<double>(found.sample_wait_ns.load()) / 1e9;
  if (store.tasks() != nullptr && store.tasks()->count() != 0) {
    const Tasks::Limits limits = store.tasks()->limits();
    out["in_flight"] = store.tasks()->in_flight();
    if (limits.in_flight != 0) out["most_in_flight"] = limits.in_flight;
    if (limits.max_stale) out["max_stale"] = *limits.max_stale;
  }
  return out;
}

}  // namespace

void bind_store(nb::module_& module) {
  Store::set_closer([](Store& store) {
    std::optional<Unlocked> unlocked;
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) unlocked.emplace();
    store.close();
  });
  nb::list names;
  for (const char* name : kCounterNames) names.append(name);
  module.attr("COUNTERS") = names;
  module.def("segment_bytes", &segment_bytes, nb::arg("fields"), nb::arg("capacity"), nb::arg("remover"),
             nb::arg("step_priorities") = false);
  module.def("rows_within", &rows_of_bytes, nb::arg("fields"), nb::arg("nbytes"), nb::arg("remover"),
             nb::arg("step_priorities") = false);
  nb::class_<Store> bound(module, "Store");
  bind_store_rows(bound);
  bind_tasks(bound);
  bound
      .def_static("create", &create, nb::arg("name"), nb::arg("fields"), nb::arg("capacity"), nb::arg("max_rows"),
                  nb::arg("remover"), nb::arg("max_times_sampled"), nb::arg("max_age_ns"),
                  nb::arg("priority_fraction_bits"), nb::arg("persist"), nb::arg("reserve"), nb::arg("timeout_s"),
                  nb::arg("trust"), nb::arg("step_priorities") = false, nb::arg("max_priority") = false,
                  nb::arg("places") = std::vector<PlaceTuple>(), nb::arg("axes") = std::vector<std::string>(),
                  nb::arg("tasks") = std::vector<TaskTuple>(), nb::arg("span_bytes") = 0)
      .def_static("attach", &attach, nb::arg("name"), nb::arg("adopt"), nb::arg("read_only"), nb::arg("timeout_s"),
                  nb::arg("trust") = "user")
      .def("describe", &describe)
      .def("counters", &counters)
      .def("set_counters", &set_counters)
      .def("column", &column)
      .def("segment", &segment)
      .def("layout", &layout)
      .def("limit", &limit)
      .def("limiter", &limiter)
      .def_prop_ro("limited",
                   [](const Store& s) { return entered(s, [&] { return s.control().limiter.enabled.load() != 0; }); })
      .def("admit_inserts", [](Store& s, uint64_t n,
                               double timeout_s) { return released(s, [&] { return s.admit_inserts(n, timeout_s); }); })
      .def("admit_samples", [](Store& s, uint64_t n,
                               double timeout_s) { return released(s, [&] { return s.admit_samples(n, timeout_s); }); })
      .def("give_back",
           [](Store& s, uint64_t inserts, uint64_t samples) { entered(s, [&] { s.give_back(inserts, samples); }); })
      .def_prop_ro("read_only", [](const Store& s) { return s.read_only(); })
      .def("seal_segment", [](Store& s) { released(s, [&] { s.seal_segment(); }); })
      .def("keep_segment", [](Store& s) { entered(s, [&] { s.keep_segment(); }); })
      .def("advance_sequence",
           [](Store& s, uint64_t next) { return released(s, [&] { return s.advance_sequence(next); }); })
      .def("live_clients", [](const Store& s) { return released(s, [&] { return s.live_clients(); }); })
      .def("closed_in_order", [](const Store& s) { return released(s, [&] { return s.closed_in_order(); }); })
      .def("clients", &clients)
      .def("lock_holder", &lock_holder)
      .def("step_count", [](const Store& s) { return released(s, [&] { return s.step_count(); }); })
      .def("step_count_up_to",
           [](const Store& s, uint64_t enough) { return released(s, [&] { return s.step_count_up_to(enough); }); })
      .def("counted_steps",
           [](const Store& s, uint32_t row, uint32_t length) {
             return entered(s, [&] { return row < s.header().capacity ? s.counted_steps(row, length) : 0; });
           })
      .def_prop_ro("limited_by_steps", [](const Store& s) { return entered(s, [&] { return s.limited_by_steps(); }); })
      .def("committed_count", [](const Store& s) { return entered(s, [&] { return s.committed_count(); }); })
      .def("total_priority",
           [](Store& s) {
             return released(s, [&] {
               s.repair_dead_updates();
               return s.per_step() ? s.step_tree().total() : s.priority_tree().total();
             });
           })
      .def("next_sequence", [](const Store& s) { return entered(s, [&] { return s.next_sequence(); }); })
      .def("reap", [](Store& s) { return released(s, [&] { return s.reap(); }); })
      .def("rebuild", [](Store& s) { return released(s, [&] { return s.rebuild(); }); })
      .def("audit", [](Store& s) { return released(s, [&] { return s.audit(); }); })
      .def(
          "close", [](Store& s, bool keep) { s.close(keep); }, nb::call_guard<Unlocked>())
      .def_prop_ro("timeout_s", [](const Store& s) { return s.lock_timeout_s(); })
      .def("unlink", [](Store& s) { return released(s, [&] { return s.unlink(); }); })
      // What most operations ask first, before they call any library's functions.
      .def_prop_ro("closed", [](const Store& s) {
        sleep_at_finalization();
        return s.is_closed();
      });
}

}  // namespace geartrain
