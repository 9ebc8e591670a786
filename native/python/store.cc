// Binding of Store (store.h). Every call that may wait or copy releases the GIL, and every call may meet a close()
// (released and entered, bind.h).

#include "store/store.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "base/errors.h"
#include "fetch/insert.h"
#include "python/bind.h"

namespace geartrain {
namespace {

using FieldTuple = std::tuple<std::string, int, int, bool, std::vector<uint32_t>>;

std::vector<FieldSpec> specs_of(const std::vector<FieldTuple>& fields) {
  std::vector<FieldSpec> specs;
  for (const auto& [field, dtype, itemsize, timed, shape] : fields) {
    specs.push_back({field, static_cast<uint8_t>(dtype), static_cast<uint8_t>(itemsize), timed, shape});
  }
  return specs;
}

// Bytes that a store of `capacity` rows takes, and the rows of one that takes at most `bytes`.
uint64_t segment_bytes(const std::vector<FieldTuple>& fields, uint64_t capacity, int remover, bool step_priorities) {
  StoreOptions options;
  options.capacity = capacity;
  options.remover = remover_of(static_cast<uint32_t>(remover));
  options.remover_field = remover_field_of(static_cast<uint32_t>(remover));
  options.step_priorities = step_priorities;
  std::vector<FieldRecord> records;
  return plan_segment(specs_of(fields), options, &records).segment_bytes;
}

uint64_t rows_of_bytes(const std::vector<FieldTuple>& fields, uint64_t bytes, int remover, bool step_priorities) {
  StoreOptions options;
  options.remover = remover_of(static_cast<uint32_t>(remover));
  options.remover_field = remover_field_of(static_cast<uint32_t>(remover));
  options.step_priorities = step_priorities;
  return rows_within(specs_of(fields), options, bytes);
}

std::unique_ptr<Store> create(const std::string& name, const std::vector<FieldTuple>& fields, uint64_t capacity,
                              uint64_t max_rows, int remover, uint32_t max_times_sampled, uint64_t max_age_ns,
                              uint32_t priority_fraction_bits, bool persist, bool reserve, double timeout_s,
                              const std::string& trust, bool step_priorities) {
  const std::vector<FieldSpec> specs = specs_of(fields);
  StoreOptions options;
  options.capacity = capacity;
  options.max_rows = max_rows;
  options.remover = remover_of(static_cast<uint32_t>(remover));
  options.remover_field = remover_field_of(static_cast<uint32_t>(remover));
  options.max_times_sampled = max_times_sampled;
  options.max_age_ns = max_age_ns;
  options.priority_fraction_bits = priority_fraction_bits;
  options.persist = persist;
  options.step_priorities = step_priorities;
  options.reserve = reserve;
  options.lock_timeout_s = timeout_s;
  options.trust = trust_of(trust);
  Unlocked unlocked;
  return Store::create(name, specs, options);
}

std::unique_ptr<Store> attach(const std::string& name, bool adopt, bool read_only, double timeout_s,
                              const std::string& trust) {
  const AttachOptions options{adopt, read_only, timeout_s, trust_of(trust)};
  Unlocked unlocked;
  return Store::attach(name, options);
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
  if (field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", field);
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

nb::object allocate(Store& store, size_t n) {
  std::vector<uint32_t> rows;
  released(store, [&] {
    if (n > store.header().capacity) {  // before their numbers take memory
      fail(ErrorKind::full, n, " rows were asked for of a store of ", store.header().capacity);
    }
    rows.resize(n);
    store.allocate(rows);
  });
  return to_numpy(std::move(rows));
}

uint32_t allocate_one(Store& store) {
  uint32_t row = 0;
  released(store, [&] { store.allocate({&row, 1}); });
  return row;
}

uint32_t commit_one(Store& store, uint32_t row, uint32_t length, double priority, int64_t version) {
  uint32_t generation = 0;
  released(store, [&] { store.commit({&row, 1}, {{&length, 1}, {&priority, 1}, {&version, 1}}, {&generation, 1}); });
  return generation;
}

nb::object commit(Store& store, const In<uint32_t>& rows, const std::optional<In<uint32_t>>& lengths,
                  const std::optional<In<double>>& priorities, const std::optional<In<int64_t>>& versions) {
  std::vector<uint32_t> generations(rows.size());
  released(store, [&] { store.commit(view(rows), {view(lengths), view(priorities), view(versions)}, generations); });
  return to_numpy(std::move(generations));
}

uint32_t publish_one(Store& store, uint32_t row, uint32_t length, double priority, int64_t version) {
  uint32_t generation = 0;
  released(store, [&] { store.publish({&row, 1}, {{&length, 1}, {&priority, 1}, {&version, 1}}, {&generation, 1}); });
  return generation;
}

void limit(Store& store, bool enabled, double samples_per_insert, uint64_t min_size, double error_buffer, bool afresh) {
  entered(store, [&] { store.set_limiter({enabled, samples_per_insert, min_size, error_buffer}, afresh); });
}

nb::dict limiter(const Store& store) {
  store.check_open();
  const RateLimiter& found = store.control().limiter;
  nb::dict out;
  out["enabled"] = found.enabled.load() != 0;
  out["samples_per_insert"] = found.samples_per_insert.load();
  out["min_size_to_sample"] = found.min_size.load();
  out["error_buffer"] = found.error_buffer.load();
  out["inserts"] = found.inserts.load();
  out["samples"] = found.samples.load();
  out["insert_wait_s"] = static_cast<double>(found.insert_wait_ns.load()) / 1e9;
  out["sample_wait_s"] = static_cast<double>(found.sample_wait_ns.load()) / 1e9;
  return out;
}

// Copies n rows in. `sources` are (field number, array of n blocks or of n rows of fewer steps).
nb::tuple insert_sources(Store& store, size_t n, const std::vector<std::pair<uint32_t, AnyConstArray>>& sources,
                         const std::optional<In<uint32_t>>& lengths, const std::optional<In<double>>& priorities,
                         const std::optional<In<int64_t>>& versions, unsigned threads) {
  std::vector<InsertField> fields;
  for (const auto& [field, array] : sources) {
    fields.push_back({field, static_cast<const std::byte*>(array.data()), n == 0 ? 0 : array.nbytes() / n});
  }
  std::vector<uint32_t> rows(n), generations(n);
  released(store, [&] {
    insert(store, fields, {view(lengths), view(priorities), view(versions)}, threads, rows, generations);
  });
  return nb::make_tuple(to_numpy(std::move(rows)), to_numpy(std::move(generations)));
}

// Writes fields of rows in place; arrays as those of an insert.
uint64_t rewrite(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                 const std::vector<std::pair<uint32_t, AnyConstArray>>& sources,
                 const std::optional<In<uint32_t>>& starts, const std::optional<In<uint32_t>>& lengths) {
  const size_t n = rows.size();
  std::vector<FieldSource> fields;
  for (const auto& [field, array] : sources) {
    fields.push_back({field, static_cast<const std::byte*>(array.data()), n == 0 ? 0 : array.nbytes() / n});
  }
  if (n == 0) return 0;
  return released(store,
                  [&] { return store.rewrite(view(rows), view(generations), fields, view(starts), view(lengths)); });
}

void check_pairs(const In<uint32_t>& rows, const In<uint32_t>& generations) {
  if (rows.size() != generations.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", generations.size(), " generations");
  }
}

uint64_t update_priorities(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                           const In<double>& priorities) {
  return released(store, [&] { return store.update_priorities(view(rows), view(generations), view(priorities)); });
}

uint64_t update_step_priorities(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                                const In<uint32_t>& steps, const In<double>& priorities) {
  return released(store, [&] {
    return store.update_step_priorities(view(rows), view(generations), view(steps), view(priorities));
  });
}

void check_rows(const Store& store, const In<uint32_t>& rows) {
  for (uint32_t row : view(rows)) {
    if (row >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", store.header().capacity);
    }
  }
}

// The fixed-point priorities of steps, 0 for stale keys; and the sums of rows'.
nb::object step_priorities(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                           const In<uint32_t>& steps) {
  check_rows(store, rows);
  if (generations.size() != rows.size() || steps.size() != rows.size()) {
    fail(ErrorKind::schema, "as many generations and steps as rows are needed");
  }
  std::vector<uint32_t> out(rows.size());
  entered(store, [&] {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = store.step_priority(rows.data()[i], generations.data()[i], steps.data()[i]);
    }
  });
  return to_numpy(std::move(out));
}

nb::object sums_of_steps(const Store& store, const In<uint32_t>& rows) {
  check_rows(store, rows);
  std::vector<uint64_t> out(rows.size());
  released(store, [&] {
    for (size_t i = 0; i < out.size(); ++i) out[i] = store.sum_of_steps(rows.data()[i]);
  });
  return to_numpy(std::move(out));
}

// The fixed-point priorities of rows' first `lengths` steps, one row after the other, and whether each row has them.
nb::tuple copy_step_priorities(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                               const In<uint32_t>& lengths) {
  check_rows(store, rows);
  if (generations.size() != rows.size() || lengths.size() != rows.size()) {
    fail(ErrorKind::schema, "as many generations and lengths as rows are needed");
  }
  size_t total = 0;
  for (uint32_t length : view(lengths)) total += std::min(length, store.header().max_length);
  std::vector<uint32_t> out(total);
  std::vector<uint8_t> whole(rows.size());
  released(store, [&] {
    std::span<uint32_t> rest(out);
    for (size_t i = 0; i < whole.size(); ++i) {
      const uint32_t length = std::min(lengths.data()[i], store.header().max_length);
      whole[i] = store.copy_step_priorities(rows.data()[i], generations.data()[i], rest.first(length));
      rest = rest.subspan(length);
    }
  });
  return nb::make_tuple(to_numpy(std::move(out)), to_numpy(std::move(whole)));
}

uint64_t remove(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  check_pairs(rows, generations);
  return released(store, [&] { return store.remove(view(rows), view(generations)); });
}

nb::object count_samples(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  check_pairs(rows, generations);
  std::vector<uint8_t> taken(rows.size());
  released(store, [&] { store.count_samples(view(rows), view(generations), taken); });
  return to_numpy(std::move(taken));
}

void release_exhausted(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  check_pairs(rows, generations);
  released(store, [&] { store.release_exhausted(view(rows), view(generations)); });
}

nb::tuple keys(Store& store) {
  std::vector<uint32_t> rows, generations;
  released(store, [&] { store.keys(&rows, &generations); });
  return nb::make_tuple(to_numpy(std::move(rows)), to_numpy(std::move(generations)));
}

// The metadata of the given rows, a column each.
nb::dict infos(const Store& store, const In<uint32_t>& rows) {
  const size_t n = rows.size();
  std::vector<uint64_t> sequence(n), inserted_at_ns(n);
  std::vector<int64_t> version(n);
  std::vector<uint32_t> generation(n), priority(n), length(n), times_sampled(n);
  std::vector<uint8_t> state(n);
  store.check_open();
  for (size_t i = 0; i < n; ++i) {
    if (rows.data()[i] >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", rows.data()[i], " is beyond the store's capacity of ", store.header().capacity);
    }
    const RowInfo info = store.info(rows.data()[i]);
    sequence[i] = info.sequence;
    version[i] = info.version;
    inserted_at_ns[i] = info.inserted_at_ns;
    generation[i] = info.generation;
    priority[i] = info.priority;
    length[i] = info.length;
    times_sampled[i] = info.times_sampled;
    state[i] = static_cast<uint8_t>(info.state);
  }
  nb::dict out;
  out["sequence"] = to_numpy(std::move(sequence));
  out["version"] = to_numpy(std::move(version));
  out["inserted_at_ns"] = to_numpy(std::move(inserted_at_ns));
  out["generation"] = to_numpy(std::move(generation));
  out["priority"] = to_numpy(std::move(priority));
  out["length"] = to_numpy(std::move(length));
  out["times_sampled"] = to_numpy(std::move(times_sampled));
  out["state"] = to_numpy(std::move(state));
  return out;
}

nb::object lengths(const Store& store, const In<uint32_t>& rows) {
  store.check_open();
  std::vector<int32_t> out(rows.size());
  for (size_t i = 0; i < out.size(); ++i) {
    if (rows.data()[i] >= store.header().capacity) fail(ErrorKind::schema, "no row ", rows.data()[i]);
    out[i] = static_cast<int32_t>(store.status()[rows.data()[i]].length.load(std::memory_order_relaxed));
  }
  return to_numpy(std::move(out));
}

void restore(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations, const In<uint32_t>& priorities,
             const In<uint32_t>& lengths, const In<uint32_t>& times_sampled, const In<uint64_t>& sequences,
             const In<uint64_t>& inserted_at_ns, const In<int64_t>& versions, uint64_t next_sequence,
             const std::optional<In<uint32_t>>& steps) {
  const size_t n = rows.size();
  for (size_t size : {generations.size(), priorities.size(), lengths.size(), times_sampled.size(), sequences.size(),
                      inserted_at_ns.size(), versions.size()}) {
    if (size != n) fail(ErrorKind::schema, "the columns of a row table differ in length");
  }
  std::vector<RestoredRow> restored(n);
  for (size_t i = 0; i < n; ++i) {
    restored[i] = {rows.data()[i],          generations.data()[i], priorities.data()[i],     lengths.data()[i],
                   times_sampled.data()[i], sequences.data()[i],   inserted_at_ns.data()[i], versions.data()[i]};
  }
  released(store, [&] { store.restore(restored, next_sequence, view(steps)); });
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
  nb::class_<Store>(module, "Store")
      .def_static("create", &create, nb::arg("name"), nb::arg("fields"), nb::arg("capacity"), nb::arg("max_rows"),
                  nb::arg("remover"), nb::arg("max_times_sampled"), nb::arg("max_age_ns"),
                  nb::arg("priority_fraction_bits"), nb::arg("persist"), nb::arg("reserve"), nb::arg("timeout_s"),
                  nb::arg("trust"), nb::arg("step_priorities") = false)
      .def_static("attach", &attach, nb::arg("name"), nb::arg("adopt"), nb::arg("read_only"), nb::arg("timeout_s"),
                  nb::arg("trust") = "user")
      .def("describe", &describe)
      .def("counters", &counters)
      .def("set_counters", &set_counters)
      .def("column", &column)
      .def("segment", &segment)
      .def("layout", &layout)
      .def("allocate", &allocate)
      .def("allocate_one", &allocate_one)
      .def("commit", &commit, nb::arg("rows"), nb::arg("lengths").none(), nb::arg("priorities").none(),
           nb::arg("versions").none())
      .def("commit_one", &commit_one)
      .def("publish_one", &publish_one)
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
      .def(
          "extend",
          [](Store& s, uint32_t row, uint32_t length, double priority) {
            return released(s, [&] { return s.extend(row, length, priority); });
          },
          nb::arg("row"), nb::arg("length"), nb::arg("priority") = 1.0)
      .def("seal_one", [](Store& s, uint32_t row) { return released(s, [&] { return s.seal({&row, 1}); }); })
      .def("abandon",
           [](Store& s, const In<uint32_t>& rows) { return released(s, [&] { return s.abandon(view(rows)); }); })
      .def("abandon_one", [](Store& s, uint32_t row) { return released(s, [&] { return s.abandon({&row, 1}); }); })
      .def("insert", &insert_sources, nb::arg("n"), nb::arg("sources"), nb::arg("lengths").none(),
           nb::arg("priorities").none(), nb::arg("versions").none(), nb::arg("threads"))
      .def("rewrite", &rewrite, nb::arg("rows"), nb::arg("generations"), nb::arg("sources"), nb::arg("starts").none(),
           nb::arg("lengths").none())
      .def("update_priorities", &update_priorities)
      .def("update_step_priorities", &update_step_priorities)
      .def("step_priorities", &step_priorities)
      .def("sums_of_steps", &sums_of_steps)
      .def("copy_step_priorities", &copy_step_priorities)
      .def("raise_priorities",
           [](Store& s, double power) { return released(s, [&] { return s.raise_priorities(power); }); })
      .def("keep_segment", [](Store& s) { entered(s, [&] { s.keep_segment(); }); })
      .def("set_times_sampled",
           [](Store& s, const In<uint32_t>& rows, const In<uint32_t>& generations, const In<uint32_t>& counts) {
             return released(s, [&] { return s.set_times_sampled(view(rows), view(generations), view(counts)); });
           })
      .def("advance_sequence",
           [](Store& s, uint64_t next) { return released(s, [&] { return s.advance_sequence(next); }); })
      .def("remove", &remove)
      .def("count_samples", &count_samples)
      .def("release_exhausted", &release_exhausted)
      .def("expire", [](Store& s) { return released(s, [&] { return s.expire(); }); })
      .def("keys", &keys)
      .def("free_rows", [](Store& s) { return to_numpy(released(s, [&] { return s.free_rows(); })); })
      .def("infos", &infos)
      .def("restore", &restore, nb::arg("rows"), nb::arg("generations"), nb::arg("priorities"), nb::arg("lengths"),
           nb::arg("times_sampled"), nb::arg("sequences"), nb::arg("inserted_at_ns"), nb::arg("versions"),
           nb::arg("next_sequence"), nb::arg("steps").none() = nb::none())
      .def("lengths", &lengths)
      .def("live_clients", [](const Store& s) { return released(s, [&] { return s.live_clients(); }); })
      .def("committed_count", [](const Store& s) { return entered(s, [&] { return s.committed_count(); }); })
      .def("total_priority",
           [](Store& s) {
             return released(s, [&] {
               s.repair_dead_updates();
               return s.per_step() ? s.step_tree().total() : s.priority_tree().total();
             });
           })
      .def("next_sequence", [](const Store& s) { return entered(s, [&] { return s.control().next_sequence; }); })
      .def("reap", [](Store& s) { return released(s, [&] { return s.reap(); }); })
      .def("rebuild", [](Store& s) { return released(s, [&] { return s.rebuild(); }); })
      .def("audit", [](Store& s) { return released(s, [&] { return s.audit(); }); })
      .def("close",
           [](Store& s, bool keep) {
             const Unlocked unlocked;
             s.close(keep);
           })
      .def("unlink", [](Store& s) { return released(s, [&] { return s.unlink(); }); })
      .def_prop_ro("closed", &Store::is_closed);
}

}  // namespace geartrain
