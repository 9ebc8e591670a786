// Binding of a Store's rows: allocated, committed, inserted, rewritten, their priorities, removed and looked at.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <string.h>

#include <cmath>
#include <limits>

#include "base/errors.h"
#include "fetch/insert.h"
#include "python/bind.h"
#include "store/priority_updates.h"
#include "store/store.h"

namespace geartrain {
namespace {

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

// Zeroes a block of an allocated row unless `taken`, a set of fields' names, has its field's, and adds the name to it.
// The GIL is held throughout: of two threads that ask for one block neither zeroes what the other has written.
void take_block(Store& store, nb::set taken, nb::str name, uint32_t field, uint32_t row) {
  if (taken.contains(name)) return;
  entered(store, [&] { store.clear_block(field, row); });
  taken.add(name);
}

// The priority of one row; of NaN none, so that the row gets what the store gives to new ones. An optional argument
// would cost a microsecond.
std::span<const double> one_of(const double& priority) {
  return std::isnan(priority) ? std::span<const double>() : std::span(&priority, 1);
}

uint32_t commit_one(Store& store, uint32_t row, uint32_t length, double priority, int64_t version) {
  uint32_t generation = 0;
  released(store, [&] { store.commit({&row, 1}, {{&length, 1}, one_of(priority), {&version, 1}}, {&generation, 1}); });
  return generation;
}

nb::object commit(Store& store, const In<uint32_t>& rows, const std::optional<In<uint32_t>>& lengths,
                  const std::optional<In<double>>& priorities, const std::optional<In<int64_t>>& versions) {
  const std::vector<uint32_t> own_rows = copied(rows), own_lengths = copied(lengths);
  std::vector<uint32_t> generations(rows.size());
  released(store, [&] { store.commit(own_rows, {own_lengths, view(priorities), view(versions)}, generations); });
  return to_numpy(std::move(generations));
}

uint32_t publish_one(Store& store, uint32_t row, uint32_t length, double priority, int64_t version) {
  uint32_t generation = 0;
  released(store, [&] { store.publish({&row, 1}, {{&length, 1}, one_of(priority), {&version, 1}}, {&generation, 1}); });
  return generation;
}

// Copies n rows in. `sources` are (field number, array of n blocks or of n rows of fewer steps).
nb::tuple insert_sources(Store& store, size_t n, const std::vector<std::pair<uint32_t, AnyConstArray>>& sources,
                         const std::optional<In<uint32_t>>& lengths, const std::optional<In<double>>& priorities,
                         const std::optional<In<int64_t>>& versions, unsigned threads) {
  std::vector<InsertField> fields;
  for (const auto& [field, array] : sources) {
    fields.push_back({field, static_cast<const std::byte*>(array.data()), n == 0 ? 0 : array.nbytes() / n});
  }
  const std::vector<uint32_t> own_lengths = copied(lengths);
  std::vector<uint32_t> rows(n), generations(n);
  released(store,
           [&] { insert(store, fields, {own_lengths, view(priorities), view(versions)}, threads, rows, generations); });
  return to_numpy_tuple(std::move(rows), std::move(generations));
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
  const std::vector<uint32_t> own_rows = copied(rows), own_starts = copied(starts), own_lengths = copied(lengths);
  return released(store, [&] { return store.rewrite(own_rows, view(generations), fields, own_starts, own_lengths); });
}

void check_pairs(const In<uint32_t>& rows, const In<uint32_t>& generations) {
  if (rows.size() != generations.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", generations.size(), " generations");
  }
}

uint64_t update_priorities(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                           const In<double>& priorities) {
  const std::vector<uint32_t> own_rows = copied(rows);
  return released(store, [&] { return store.update_priorities(own_rows, view(generations), view(priorities)); });
}

uint64_t update_step_priorities(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                                const In<uint32_t>& steps, const In<double>& priorities) {
  const std::vector<uint32_t> own_rows = copied(rows), own_steps = copied(steps);
  return released(
      store, [&] { return store.update_step_priorities(own_rows, view(generations), own_steps, view(priorities)); });
}

uint64_t apply_updates(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                       const std::optional<In<uint32_t>>& steps, const std::optional<In<int64_t>>& draws,
                       const In<double>& priorities) {
  std::vector<int64_t> order = copied(draws);
  for (int64_t& each : order) each = draw_order(each);
  return released(store,
                  [&] { return apply(store, {view(rows), view(generations), view(steps), order, view(priorities)}); });
}

void check_rows(const Store& store, std::span<const uint32_t> rows) {
  for (uint32_t row : rows) {
    if (row >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", store.header().capacity);
    }
  }
}

// The fixed-point priorities of steps, 0 for stale keys; and the sums of rows'.
nb::object step_priorities(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                           const In<uint32_t>& steps) {
  check_rows(store, view(rows));
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
  const std::vector<uint32_t> own_rows = copied(rows);
  check_rows(store, own_rows);
  std::vector<uint64_t> out(rows.size());
  released(store, [&] {
    for (size_t i = 0; i < out.size(); ++i) out[i] = store.sum_of_steps(own_rows[i]);
  });
  return to_numpy(std::move(out));
}

// The fixed-point priorities of rows' first `lengths` steps, one row after the other, and whether each row has them.
nb::tuple copy_step_priorities(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                               const In<uint32_t>& lengths) {
  const std::vector<uint32_t> own_rows = copied(rows), own_lengths = copied(lengths);
  check_rows(store, own_rows);
  if (generations.size() != rows.size() || lengths.size() != rows.size()) {
    fail(ErrorKind::schema, "as many generations and lengths as rows are needed");
  }
  size_t total = 0;
  for (uint32_t length : own_lengths) total += std::min(length, store.header().max_length);
  std::vector<uint32_t> out(total);
  std::vector<uint8_t> whole(rows.size());
  released(store, [&] {
    std::span<uint32_t> rest(out);
    for (size_t i = 0; i < whole.size(); ++i) {
      const uint32_t length = std::min(own_lengths[i], store.header().max_length);
      whole[i] = store.copy_step_priorities(own_rows[i], generations.data()[i], rest.first(length));
      rest = rest.subspan(length);
    }
  });
  return to_numpy_tuple(std::move(out), std::move(whole));
}

uint64_t remove(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  check_pairs(rows, generations);
  const std::vector<uint32_t> own_rows = copied(rows);
  return released(store, [&] { return store.remove(own_rows, view(generations)); });
}

// (taken, how many are in flight now until `finished`). With `places` rows are taken by the batch of a step.
nb::tuple count_samples(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations, uint64_t step,
                        const std::optional<In<uint32_t>>& places) {
  check_pairs(rows, generations);
  std::vector<uint8_t> taken(rows.size());
  const std::vector<uint32_t> own_rows = copied(rows);
  Store::Taking taking{step, {}};
  if (places) taking.places = view(*places);
  const uint64_t used_up = released(
      store, [&] { return store.count_samples(own_rows, view(generations), taken, places ? &taking : nullptr); });
  return nb::make_tuple(to_numpy(std::move(taken)), used_up);
}

void release_exhausted(Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations) {
  check_pairs(rows, generations);
  const std::vector<uint32_t> own_rows = copied(rows);
  released(store, [&] { store.release_exhausted(own_rows, view(generations)); });
}

nb::tuple keys(Store& store) {
  std::vector<uint32_t> rows, generations;
  released(store, [&] { store.keys(&rows, &generations); });
  return to_numpy_tuple(std::move(rows), std::move(generations));
}

// The metadata of the given rows, a column each.
nb::dict infos(const Store& store, const In<uint32_t>& rows) {
  const size_t n = rows.size();
  std::vector<uint64_t> sequence(n), inserted_at_ns(n);
  std::vector<int64_t> version(n);
  std::vector<uint32_t> generation(n), priority(n), length(n), times_sampled(n);
  std::vector<uint8_t> state(n);
  store.check_open();
  const std::vector<uint32_t> own_rows = copied(rows);
  check_rows(store, own_rows);
  for (size_t i = 0; i < n; ++i) {
    const RowInfo info = store.info(own_rows[i]);
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
  const std::vector<uint32_t> own_rows = copied(rows);
  check_rows(store, own_rows);
  std::vector<int32_t> out;
  for (const uint32_t row : own_rows) {
    out.push_back(static_cast<int32_t>(store.status()[row].length.load(std::memory_order_relaxed)));
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

// --- the journal on disk ----------------------------------------------------------------------------------------

nb::tuple journal_changes(Store& store, uint64_t sequence, const In<uint32_t>& generations, const In<uint64_t>& times,
                          bool rewritten) {
  JournalChanges found =
      released(store, [&] { return store.journal_changes(sequence, view(generations), view(times), rewritten); });
  return nb::make_tuple(to_numpy(std::move(found.rows)), to_numpy(std::move(found.generations)),
                        to_numpy(std::move(found.times)), to_numpy(std::move(found.gone)), found.next_sequence,
                        found.inserted, found.open);
}

nb::object journal_state(const Store& store) {
  store.check_open();
  const JournalControl& journal = store.journal_control();
  if (!store.has_journal()) return nb::none();
  nb::dict out;
  out["path"] = nb::bytes(journal.path, ::strnlen(journal.path, kJournalPathBytes));
  out["full_is_error"] = journal.mode.load() == static_cast<uint32_t>(JournalMode::full_is_error);
  out["sync_ns"] = journal.sync_ns.load();
  out["synced_ns"] = journal.synced_ns.load();
  out["error"] = journal.error.load();
  out["rewrites"] = journal.rewrites.load();
  out["rows"] = journal.rows.load();
  out["removals"] = journal.removals.load();
  out["bytes"] = journal.bytes.load();
  out["missed"] = journal.missed.load();
  out["waits"] = journal.waits.load();
  out["priorities"] = journal.priorities.load();
  return out;
}

void journal_count(Store& store, uint64_t rows, uint64_t removals, uint64_t bytes, uint64_t missed) {
  entered(store, [&] {
    store.check_usable();
    JournalControl& journal = store.journal_control();
    count(journal.rows, rows);
    count(journal.removals, removals);
    count(journal.bytes, bytes);
    count(journal.missed, missed);
  });
}

}  // namespace

void bind_store_rows(nb::class_<Store>& store) {
  store.def("allocate", &allocate)
      .def("allocate_one", &allocate_one)
      .def("take_block", &take_block)
      .def("commit", &commit, nb::arg("rows"), nb::arg("lengths").none(), nb::arg("priorities").none(),
           nb::arg("versions").none())
      .def("commit_one", &commit_one)
      .def("publish_one", &publish_one)
      .def(
          "extend",
          [](Store& s, uint32_t row, uint32_t length, double priority) {
            return released(s, [&] { return s.extend({&row, 1}, {&length, 1}, one_of(priority)); });
          },
          nb::arg("row"), nb::arg("length"), nb::arg("priority") = std::numeric_limits<double>::quiet_NaN())
      .def("seal_one", [](Store& s, uint32_t row) { return released(s, [&] { return s.seal({&row, 1}); }); })
      .def("abandon",
           [](Store& s, const In<uint32_t>& rows) {
             const std::vector<uint32_t> own_rows = copied(rows);
             return released(s, [&] { return s.abandon(own_rows); });
           })
      .def("abandon_one", [](Store& s, uint32_t row) { return released(s, [&] { return s.abandon({&row, 1}); }); })
      .def("insert", &insert_sources, nb::arg("n"), nb::arg("sources"), nb::arg("lengths").none(),
           nb::arg("priorities").none(), nb::arg("versions").none(), nb::arg("threads"))
      .def("rewrite", &rewrite, nb::arg("rows"), nb::arg("generations"), nb::arg("sources"), nb::arg("starts").none(),
           nb::arg("lengths").none())
      .def("update_priorities", &update_priorities)
      .def("update_step_priorities", &update_step_priorities)
      .def("apply_updates", &apply_updates, nb::arg("rows"), nb::arg("generations"), nb::arg("steps").none(),
           nb::arg("draws").none(), nb::arg("priorities"))
      .def("step_priorities", &step_priorities)
      .def("sums_of_steps", &sums_of_steps)
      .def("copy_step_priorities", &copy_step_priorities)
      .def_prop_ro("new_priority", [](const Store& s) { return entered(s, [&] { return s.new_priority(); }); })
      .def_prop_ro("max_priority", [](const Store& s) { return entered(s, [&] { return s.max_priority(); }); })
      .def("restore_max_priority",
           [](Store& s, uint32_t largest) { entered(s, [&] { s.restore_max_priority(largest); }); })
      .def("reset_max_priority", [](Store& s) { released(s, [&] { s.reset_max_priority(); }); })
      .def("raise_priorities",
           [](Store& s, double power) { return released(s, [&] { return s.raise_priorities(power); }); })
      .def("set_times_sampled",
           [](Store& s, const In<uint32_t>& rows, const In<uint32_t>& generations, const In<uint32_t>& counts) {
             const std::vector<uint32_t> own_rows = copied(rows);
             return released(s, [&] { return s.set_times_sampled(own_rows, view(generations), view(counts)); });
           })
      .def("remove", &remove)
      .def("count_samples", &count_samples, nb::arg("rows"), nb::arg("generations"), nb::arg("step") = 0,
           nb::arg("places").none() = nb::none())
      .def("release_exhausted", &release_exhausted)
      .def("expire", [](Store& s) { return released(s, [&] { return s.expire(); }); })
      .def("keys", &keys)
      .def("free_rows", [](Store& s) { return to_numpy(released(s, [&] { return s.free_rows(); })); })
      .def("infos", &infos)
      .def("restore", &restore, nb::arg("rows"), nb::arg("generations"), nb::arg("priorities"), nb::arg("lengths"),
           nb::arg("times_sampled"), nb::arg("sequences"), nb::arg("inserted_at_ns"), nb::arg("versions"),
           nb::arg("next_sequence"), nb::arg("steps").none() = nb::none())
      .def("lengths", &lengths)
      .def("set_journal",
           [](Store& s, const nb::bytes& path, bool full_is_error, uint64_t sync_ns) {
             const std::string directory(path.c_str(), path.size());
             return released(s, [&] { return s.set_journal(directory, full_is_error, sync_ns); });
           })
      .def("journal_changes", &journal_changes)
      .def("journal_state", &journal_state)
      .def("journal_count", &journal_count)
      .def("await_journal_request",
           [](const Store& s, uint32_t seen, double timeout_s) {
             return released(s, [&] { return s.await_journal_request(seen, timeout_s); });
           })
      .def("journal_passed",
           [](Store& s, uint32_t ticket, uint64_t synced_ns) {
             return entered(s, [&] { return s.journal_passed(ticket, synced_ns); });
           })
      .def("journal_failed",
           [](Store& s, uint32_t error) { return entered(s, [&] { return s.journal_failed(error); }); })
      .def("request_journal_priorities",
           [](Store& s) { return entered(s, [&] { return s.request_journal_priorities(); }); })
      .def("settle_journal", [](Store& s, const std::string& what,
                                bool durable) { released(s, [&] { s.settle_journal(what.c_str(), durable); }); })
      .def("sync_journal",
           [](Store& s, double timeout_s) { return released(s, [&] { return s.sync_journal(timeout_s); }); });
}

}  // namespace geartrain
