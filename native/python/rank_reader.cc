// Binding of rank readers: a rank's part of a global batch, agreed on, drawn and read, into its batch and into
// messages.

#include "fetch/rank_reader.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "fetch/rank_steps.h"
#include "python/batch_memory.h"
#include "python/bind.h"
#include "python/rank_exchange.h"
#include "selection/importance_weights.h"

namespace geartrain {
namespace {

using PlacedWindowTuple = std::tuple<uint32_t, bool, bool, uint8_t>;  // stride, whole, from_first, at
// store (None: of another host), fields, whether this rank counts for others, turn, turns, ranks that may write
using ShardTuple = std::tuple<nb::object, std::vector<uint32_t>, bool, uint32_t, uint32_t, std::vector<uint32_t>>;

// A message of rows on its way: the peer's rank, its places in the consumer's batch, and its memory.
struct RowsOfPeer {
  uint32_t peer;
  std::vector<uint32_t> places;
  PooledMemory memory;
  size_t bytes;

  RowsOfPeer(RankReader::Traffic traffic, size_t size)
      : peer(traffic.rank), places(std::move(traffic.places)), memory(size), bytes(size) {}
  RowsOfPeer(RowsOfPeer&&) = default;
  RowsOfPeer(const RowsOfPeer&) = delete;

  nb::object array() const {
    return memory.array(std::span<uint8_t>(reinterpret_cast<uint8_t*>(memory.base()), bytes), {bytes});
  }
};

// rows, generations, draws (none), shards, priorities
using GivenTuple = std::tuple<In<uint32_t>, In<uint32_t>, std::optional<In<int64_t>>, In<int64_t>, In<double>>;

constexpr const char* kRefusalNames[] = {"", "disagree", "few rows", "nothing to draw"};

// What a rank has agreed on with the others and has read of one global batch, and what it is to get.
struct RankRead {
  RankRead() = default;
  RankRead(RankRead&&) = default;
  RankRead(const RankRead&) = delete;

  RankSteps::Agreed agreed;
  std::optional<RankSteps::Outcome> outcome;  // none: it is to be told with the rows
  double agreed_s = 0, read_s = 0;            // (CLOCK_MONOTONIC) when ranks had agreed, and when rows were read
  RankReader::Found found;
  std::vector<RowsOfPeer> outgoing, incoming;
  std::vector<int64_t> draws;  // of this rank's batch: their numbers in the global one
};

std::vector<GivenPriorities> given_of(const std::vector<GivenTuple>& updates) {
  std::vector<GivenPriorities> given;
  for (const auto& [rows, generations, draws, shards, priorities] : updates) {
    given.push_back({view(rows), view(generations), view(draws), view(shards), view(priorities)});
  }
  return given;
}

// What `change`, a function of priorities, makes of them; nothing for None.
RankSteps::Change change_by(const nb::object& change, const Unlocked& unlocked) {
  if (change.is_none()) return {};
  return [&change, &unlocked](std::span<double> priorities) {
    call_python(unlocked, [&] {
      const nb::object asked = to_numpy(std::vector<double>(priorities.begin(), priorities.end()));
      const auto found = nb::cast<In<double>>(nb::object(change(asked)));
      if (found.size() != priorities.size()) fail(ErrorKind::schema, "as many priorities are raised as are given");
      std::ranges::copy(view(found), priorities.begin());
    });
  };
}

// --- a round in halves -------------------------------------------------------------------------------------------

nb::list begin_round(const RankSteps& steps, uint64_t step, const std::vector<GivenTuple>& updates) {
  const std::vector<GivenPriorities> given = given_of(updates);
  RankSteps::Parts parts;
  {
    const Unlocked unlocked;
    parts = steps.begin(step, given);
  }
  nb::list made;
  for (const std::vector<std::byte>& each : parts) {
    const auto* const first = reinterpret_cast<const uint8_t*>(each.data());
    made.append(to_numpy(std::vector<uint8_t>(first, first + each.size())));
  }
  return made;
}

// What all ranks have told, for `RankReader.read`, and the updates for this rank as bytes, for `apply`.
nb::object hear_round(const RankSteps& steps, uint64_t step, const std::vector<In<uint8_t>>& parts) {
  std::vector<std::span<const std::byte>> received;
  for (const In<uint8_t>& part : parts) received.push_back(std::as_bytes(view(part)));
  RankRead made;
  std::vector<uint8_t> updates;
  {
    const Unlocked unlocked;
    RankSteps::Heard heard = steps.hear(step, received);
    made.agreed = std::move(heard.agreed);
    made.agreed_s = static_cast<double>(monotonic_ns()) * 1e-9;
    const auto bytes = std::as_bytes(std::span(heard.updates));
    const auto* const first = reinterpret_cast<const uint8_t*>(bytes.data());
    updates.assign(first, first + bytes.size());
  }
  return nb::make_tuple(nb::cast(std::move(made)), to_numpy(std::move(updates)));
}

void apply_round(const RankSteps& steps, const In<uint8_t>& updates, const nb::object& change) {
  const auto bytes = std::as_bytes(view(updates));
  if (bytes.size() % sizeof(PriorityRecord) != 0) fail(ErrorKind::schema, "updates are those that `hear` gave");
  std::vector<PriorityRecord> records(bytes.size() / sizeof(PriorityRecord));
  if (!records.empty()) std::memcpy(records.data(), bytes.data(), bytes.size());
  raising([&] {
    const Unlocked unlocked;
    steps.apply(records, change_by(change, unlocked));
  });
}

class BoundRankReader {
 public:
  BoundRankReader(RankReader::Settings settings, const std::vector<ShardTuple>& shards, nb::object assigner)
      : rank_(settings.rank), consumers_(settings.consumers), assigner_(std::move(assigner)) {
    std::vector<RankReader::ShardView> views;
    for (const auto& [store, fields, counts, turn, turns, ranks] : shards) {
      RankReader::ShardView view{nullptr, fields, counts, turn, turns, ranks};
      if (!store.is_none()) {
        view.store = &nb::cast<Store&>(store);
        view.store->check_open();
        held_.push_back(store);
        stores_.push_back(view.store);
      }
      views.push_back(std::move(view));
    }
    reader_ = std::make_unique<RankReader>(std::move(settings), std::move(views), nb::cast<const Assigner&>(assigner_));
  }

  // Agrees with the other ranks on the batch of a step, draws it and reads this rank's rows; tells the outcome, and
  // weighs the rows, where the exchange does so. `change` is given the priorities of updates that this rank applies,
  // and returns those that are stored; None: they are taken as they are, but positive.
  RankRead build(const nb::object& batch, const RankSteps& steps, PythonRankExchange& exchange, uint64_t step, size_t n,
                 const std::vector<GivenTuple>& updates, const nb::object& change, std::optional<double> beta) const {
    const RankReader::Batch to = checked(batch);
    const std::span<double> weights = beta ? weights_to_fill(batch) : std::span<double>{};
    const std::vector<GivenPriorities> given = given_of(updates);
    return raising([&] {
      const Unlocked unlocked;
      const PythonRankExchange::Use use(exchange, unlocked);
      RankRead made;
      made.agreed = steps.agree(step, given, change_by(change, unlocked), exchange);
      made.agreed_s = static_cast<double>(monotonic_ns()) * 1e-9;
      if (made.agreed.refusal != RankSteps::Refusal::none) return made;
      {
        const auto calls = enter();
        read(made, to, step, n);
      }
      made.read_s = static_cast<double>(monotonic_ns()) * 1e-9;
      made.outcome = steps.tell(made.found.failed.has_value(), made.found.lowest, exchange);
      if (made.outcome && beta) {
        importance_weights(to.arrays.probability, made.agreed.rows, *beta, made.outcome->lowest, weights);
      }
      return made;
    });
  }

  // Draws the batch of a step from what all ranks have told (`RankSteps.hear`), and reads this rank's rows.
  void read_heard(const nb::object& batch, RankRead& heard, uint64_t step, size_t n) const {
    if (heard.agreed.refusal != RankSteps::Refusal::none || !heard.draws.empty()) {
      fail(ErrorKind::schema, "a batch is read once, and after all ranks have agreed");
    }
    const RankReader::Batch to = checked(batch);
    const Unlocked unlocked;
    const auto calls = enter();
    read(heard, to, step, n);
    heard.read_s = static_cast<double>(monotonic_ns()) * 1e-9;
  }

  // Puts the rows of received messages to their places.
  void place(const nb::object& batch, const RankRead& read) const {
    const RankReader::Batch to = checked(batch);
    if (read.draws.size() != to.shards.size()) fail(ErrorKind::schema, "the rows were read for another batch");
    const Unlocked unlocked;
    const auto calls = enter();
    for (const RowsOfPeer& each : read.incoming) reader_->place(to, each.places, each.memory.base());
  }

  uint64_t row_bytes() const {
    uint64_t bytes = 0;
    for (const uint64_t each : reader_->row_bytes()) bytes += each;
    return bytes;
  }

 private:
  // A call of all stores, which those that close them wait for.
  std::vector<std::unique_ptr<Store::Call>> enter() const {
    std::vector<std::unique_ptr<Store::Call>> calls;
    for (const Store* store : stores_) calls.push_back(std::make_unique<Store::Call>(*store));
    return calls;
  }

  void read(RankRead& made, const RankReader::Batch& to, uint64_t step, size_t n) const {
    const RankReader::Draws draws = reader_->draw(step, n, made.agreed.totals);
    for (size_t i = 0; i < n; ++i) {
      if (consumers_[static_cast<size_t>(draws.assigned.replica[i])] == rank_) {
        made.draws.push_back(static_cast<int64_t>(i));
      }
    }
    if (made.draws.size() != to.shards.size()) {
      fail(ErrorKind::schema, "the batch has ", to.shards.size(), " rows, this rank gets ", made.draws.size());
    }
    for (RankReader::Traffic& each : reader_->outgoing(draws)) made.outgoing.push_back(message(std::move(each)));
    for (RankReader::Traffic& each : reader_->incoming(draws)) made.incoming.push_back(message(std::move(each)));
    std::vector<RankReader::Message> messages;
    for (const RowsOfPeer& each : made.outgoing) messages.push_back({each.peer, each.memory.base()});
    made.found = reader_->read(draws, to, messages);
  }

  RowsOfPeer message(RankReader::Traffic traffic) const {
    const size_t bytes = reader_->layout(traffic.places.size()).bytes;
    return RowsOfPeer(std::move(traffic), bytes);
  }

  RankReader::Batch checked(const nb::object& batch) const {
    check_made_for(batch, reader_->window(), reader_->steps(), reader_->row_bytes());
    BatchMemory memory = memory_of(batch);
    if (memory.shards.size() != memory.arrays.rows.size()) {
      fail(ErrorKind::schema, "the batch was made without shards");
    }
    return {std::move(memory.arrays), memory.shards};
  }

  uint32_t rank_;
  std::vector<uint32_t> consumers_;
  nb::object assigner_;
  std::vector<nb::object> held_;
  std::vector<Store*> stores_;
  std::unique_ptr<RankReader> reader_;
};

nb::list rows_of_peers(const std::vector<RowsOfPeer>& all) {
  nb::list made;
  for (const RowsOfPeer& each : all) made.append(nb::make_tuple(each.peer, each.array()));
  return made;
}

}  // namespace

void bind_rank_reader(nb::module_& module) {
  nb::class_<RankSteps>(module, "RankSteps")
      .def(
          "__init__",
          [](RankSteps* self, Store& store, uint32_t rank, uint32_t ranks, int64_t fingerprint, bool by_priority,
             const std::vector<uint32_t>& leaders, uint64_t min_rows, bool with_lowest) {
            new (self) RankSteps(
                {rank, ranks, fingerprint, by_priority ? By::priority : By::row, leaders, min_rows, with_lowest},
                store);
          },
          nb::arg("store"), nb::arg("rank"), nb::arg("ranks"), nb::arg("fingerprint"), nb::arg("by_priority"),
          nb::arg("leaders"), nb::arg("min_rows"), nb::arg("with_lowest"), nb::keep_alive<1, 2>())
      .def("begin", &begin_round)
      .def("hear", &hear_round)
      .def("apply", &apply_round, nb::arg("updates"), nb::arg("change").none());
  nb::class_<RankRead>(module, "RankRead")
      // "disagree", "few rows", "nothing to draw", or ""
      .def_prop_ro("refusal", [](const RankRead& r) { return kRefusalNames[static_cast<size_t>(r.agreed.refusal)]; })
      // (fingerprint, step) of every rank
      .def_prop_ro("status",
                   [](const RankRead& r) {
                     nb::list made;
                     for (const RankStatus& each : r.agreed.status) {
                       made.append(nb::make_tuple(each.fingerprint, each.step));
                     }
                     return made;
                   })
      .def_prop_ro("changed", [](const RankRead& r) { return r.agreed.changed; })
      .def_prop_ro("rows", [](const RankRead& r) { return r.agreed.rows; })
      .def_prop_ro("selection_bytes", [](const RankRead& r) { return r.agreed.sent_bytes; })
      .def_ro("agreed_s", &RankRead::agreed_s)
      .def_ro("read_s", &RankRead::read_s)
      // None where it is told with the rows; of every rank whether it has lost rows for good
      .def_prop_ro("outcome",
                   [](const RankRead& r) -> nb::object {
                     if (!r.outcome) return nb::none();
                     nb::list made;
                     for (const uint8_t each : r.outcome->failed) made.append(each != 0);
                     return made;
                   })
      .def_prop_ro("lowest_of_all",
                   [](const RankRead& r) -> nb::object {
                     return r.outcome ? nb::float_(r.outcome->lowest) : nb::object(nb::none());
                   })
      // (rank, message) each
      .def_prop_ro("sends", [](const RankRead& r) { return rows_of_peers(r.outgoing); })
      .def_prop_ro("receives", [](const RankRead& r) { return rows_of_peers(r.incoming); })
      .def_prop_ro("received_rows",
                   [](const RankRead& r) {
                     size_t rows = 0;
                     for (const RowsOfPeer& each : r.incoming) rows += each.places.size();
                     return rows;
                   })
      .def_prop_ro("sent_rows",
                   [](const RankRead& r) {
                     size_t rows = 0;
                     for (const RowsOfPeer& each : r.outgoing) rows += each.places.size();
                     return rows;
                   })
      .def_prop_ro("local_rows", [](const RankRead& r) { return r.found.local; })
      .def_prop_ro("lowest", [](const RankRead& r) { return r.found.lowest; })
      .def_prop_ro("redrawn", [](const RankRead& r) { return r.found.redrawn; })
      .def_prop_ro("failed", [](const RankRead& r) { return r.found.failed; })
      .def("draws", [](const RankRead& r) { return to_numpy(std::vector<int64_t>(r.draws)); });
  nb::class_<BoundRankReader>(module, "RankReader")
      .def(
          "__init__",
          [](BoundRankReader* self, uint32_t rank, const std::vector<uint32_t>& consumers,
             const std::vector<ShardTuple>& shards, const nb::object& assigner, uint32_t window, bool pad_left,
             unsigned threads, uint64_t seed, bool by_priority, bool stratified, bool in_order,
             const std::optional<PlacedWindowTuple>& windows) {
            RankReader::Settings settings{.window = {.length = window},
                                          .pad_left = pad_left,
                                          .threads = threads,
                                          .seed = seed,
                                          .by = by_priority ? By::priority : By::row,
                                          .stratified = stratified,
                                          .in_order = in_order,
                                          .rank = rank,
                                          .consumers = consumers};
            if (windows) {
              const auto [stride, whole, from_first, at] = *windows;
              settings.window = {window, stride, whole, from_first, static_cast<WindowPlan::At>(at)};
            }
            new (self) BoundRankReader(std::move(settings), shards, assigner);
          },
          nb::arg("rank"), nb::arg("consumers"), nb::arg("shards"), nb::arg("assigner"), nb::arg("window"),
          nb::arg("pad_left"), nb::arg("threads"), nb::arg("seed"), nb::arg("by_priority"), nb::arg("stratified"),
          nb::arg("in_order"), nb::arg("windows").none() = nb::none())
      .def("build", &BoundRankReader::build, nb::arg("batch"), nb::arg("steps"), nb::arg("exchange"), nb::arg("step"),
           nb::arg("n"), nb::arg("updates"), nb::arg("change").none(), nb::arg("beta").none())
      .def("read", &BoundRankReader::read_heard, nb::arg("batch"), nb::arg("heard"), nb::arg("step"), nb::arg("n"))
      .def("place", &BoundRankReader::place, nb::arg("batch"), nb::arg("read"))
      .def_prop_ro("row_bytes", &BoundRankReader::row_bytes)
      // The importance weights of a batch's rows, as `importance_weights` makes them.
      .def_static("weigh", [](const nb::object& batch, uint64_t count, double beta, double lowest) {
        const BatchMemory memory = memory_of(batch);
        importance_weights(memory.arrays.probability, count, beta, lowest, weights_to_fill(batch));
      });
}

}  // namespace geartrain
