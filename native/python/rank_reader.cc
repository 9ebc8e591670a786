// Binding of rank readers: a rank's part of a global batch, agreed on, drawn and read, into its batch and into
// messages.

#include "fetch/rank_reader.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"
#include "fetch/rank_steps.h"
#include "python/batch_memory.h"
#include "python/bind.h"
#include "python/python_copier.h"
#include "python/rank_exchange.h"
#include "python/sampled_batch.h"
#include "python/window_plan.h"
#include "selection/importance_weights.h"

namespace geartrain {
namespace {

// rank, replica, which of a row's arrays it gets
using ConsumerTuple = std::tuple<uint32_t, uint32_t, std::vector<uint32_t>>;
// how rows are drawn (none: by code of the strategy's own), seed, atom, whether samples are limited
using StoreTuple = std::tuple<std::optional<DrawsTuple>, uint64_t, uint32_t, bool>;
// store (None: of another host), which store of the job it is of, fields, whether this rank counts for others, turn,
// turns, ranks that may write
using ShardTuple =
    std::tuple<nb::object, uint32_t, std::vector<uint32_t>, bool, uint32_t, uint32_t, std::vector<uint32_t>>;
// shards (among those of all stores), rows, generations, probability, anchors (none), rounds (none), share, cursor
using DrawnTuple = std::tuple<In<int64_t>, In<uint32_t>, In<uint32_t>, In<double>, std::optional<In<uint32_t>>,
                              std::optional<In<uint32_t>>, double, uint64_t>;
using Writable = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// rank, arrays, headers as bytes, and the transfer that copies its rows in the place of the CPU (none)
using TargetTuple = std::tuple<uint32_t, std::vector<AnyArray>, Writable, nb::object>;

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

// rows, generations, draws (none), shards, steps (none), priorities
using GivenTuple = std::tuple<In<uint32_t>, In<uint32_t>, std::optional<In<int64_t>>, In<int64_t>,
                              std::optional<In<uint32_t>>, In<double>>;
// store, by priority, whether draws begin with totals, the leaders of its shards, least rows, least steps
using StoreViewTuple = std::tuple<nb::object, bool, bool, std::vector<uint32_t>, uint64_t, uint64_t>;
// cursor, total of a copy (none), offer (none) of a rank that leads a shard, bytes of an offer
using ToldTuple = std::tuple<uint64_t, std::optional<uint64_t>, std::optional<In<uint8_t>>, size_t>;

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
  std::vector<RankReader::Traffic> expected;  // incoming rows whose memory is the caller's
  std::vector<RowHeader> headers;             // of this rank's batch, in host memory
  std::vector<int64_t> draws;                 // of this rank's batch: their numbers in the global one
  std::vector<size_t> parts;  // of each store the first row of the batch; and one more, how many there are
  uint64_t sent_bytes = 0;    // of fields, in the messages to others
  bool moves = false;         // some row goes from one rank to another
};

// Calls of all stores of a reader, which those that close them wait for. Left where Python is called: it may take long,
// and whoever forks or closes a store holds what it waits for.
class StoreCalls {
 public:
  explicit StoreCalls(const std::vector<Store*>& stores) : stores_(stores) { enter(); }
  void enter() {
    for (const Store* store : stores_) calls_.push_back(std::make_unique<Store::Call>(*store));
  }
  void leave() { calls_.clear(); }

 private:
  const std::vector<Store*>& stores_;
  std::vector<std::unique_ptr<Store::Call>> calls_;
};

// Python, called by a thread that works on stores without the GIL.
class Outside {
 public:
  Outside(const Unlocked& unlocked, StoreCalls& calls) : unlocked_(unlocked), calls_(calls) {}
  const Unlocked& unlocked() const { return unlocked_; }
  template <typename Act>
  void call(Act&& act) const {
    calls_.leave();
    call_python(unlocked_, std::forward<Act>(act));
    calls_.enter();
  }

 private:
  const Unlocked& unlocked_;
  StoreCalls& calls_;
};

template <typename T>
std::vector<T> taken(const nb::object& from, size_t at, size_t n) {
  const auto array = nb::cast<In<T>>(nb::object(from[at]));
  if (array.size() != n) fail(ErrorKind::schema, n, " rows were asked for, ", array.size(), " were given");
  return {array.data(), array.data() + n};
}

// `place(store, numbers, rows, generations, round)` tells windows, `again(store, n, round, numbers, kept)` draws rows
// again, or returns None, and `limits(store)` says which rows native code may draw again. None: as RankReader::Hooks.
RankReader::Hooks hooks_of(const nb::object& place, const nb::object& again, const nb::object& limits,
                           const Outside& outside) {
  RankReader::Hooks hooks;
  if (!place.is_none()) {
    hooks.place = [&](const RowsToCopy& rows) {
      std::vector<int32_t> made;
      outside.call([&] {
        const auto found =
            nb::cast<In<int32_t>>(nb::object(place(rows.store, copied_array(rows.numbers), copied_array(rows.rows),
                                                   copied_array(rows.generations), rows.round)));
        made.assign(found.data(), found.data() + found.size());
      });
      return made;
    };
  }
  if (!again.is_none()) {
    hooks.again = [&](const RankReader::Hooks::Again& asked, std::span<uint32_t> rows, std::span<uint32_t> generations,
                      std::span<double> probability) {
      bool there = false;
      outside.call([&] {
        const nb::object found =
            again(asked.store, asked.n, asked.round, copied_array(asked.numbers), copied_array(asked.kept));
        there = !found.is_none();
        if (!there) return;
        std::ranges::copy(taken<uint32_t>(found, 0, rows.size()), rows.begin());
        std::ranges::copy(taken<uint32_t>(found, 1, rows.size()), generations.begin());
        std::ranges::copy(taken<double>(found, 2, rows.size()), probability.begin());
      });
      return there;
    };
  }
  if (!limits.is_none()) {
    hooks.limits = [&](uint32_t store) {
      Limits made;
      outside.call([&] { made = limits_of(nb::cast<LimitTuple>(nb::object(limits(store)))); });
      return made;
    };
  }
  return hooks;
}

std::vector<GivenPriorities> given_of(const std::vector<GivenTuple>& updates) {
  std::vector<GivenPriorities> given;
  for (const auto& [rows, generations, draws, shards, steps, priorities] : updates) {
    given.push_back({view(rows), view(generations), view(draws), view(shards), view(steps), view(priorities)});
  }
  return given;
}

std::vector<RankSteps::Told> told_of(const std::vector<ToldTuple>& told) {
  std::vector<RankSteps::Told> made;
  for (const auto& [cursor, total, offer, bytes] : told) {
    made.push_back({cursor, total, std::as_bytes(view(offer)), bytes});
  }
  return made;
}

// `change(store, priorities)` returns what is stored of them; None: they are taken as they are, but positive.
// `set(store, rows, generations, priorities)` stores those of rows, in their order, or returns False; None: they are
// stored here.
RankSteps::Hooks update_hooks(const nb::object& change, const nb::object& set, const Unlocked& unlocked) {
  RankSteps::Hooks hooks;
  if (!change.is_none()) {
    hooks.change = [&](uint32_t store, std::span<double> priorities) {
      call_python(unlocked, [&] {
        const auto found = nb::cast<In<double>>(nb::object(change(store, copied_array<double>(priorities))));
        if (found.size() != priorities.size()) fail(ErrorKind::schema, "as many priorities are raised as are given");
        std::ranges::copy(view(found), priorities.begin());
      });
    };
  }
  if (!set.is_none()) {
    hooks.set = [&](uint32_t store, const PriorityUpdates& updates) {
      bool done = false;
      call_python(unlocked, [&] {
        done = nb::cast<bool>(nb::object(set(store, copied_array(updates.rows), copied_array(updates.generations),
                                             copied_array(updates.priorities))));
      });
      return done;
    };
  }
  return hooks;
}

// The steps of a batch over ranks, and the Python objects that they work on.
class BoundRankSteps {
 public:
  BoundRankSteps(RankSteps::Settings settings, std::vector<nb::object> held)
      : held_(std::move(held)), steps_(std::move(settings)) {}
  const RankSteps& steps() const { return steps_; }

 private:
  std::vector<nb::object> held_;
  RankSteps steps_;
};

RankRead agree(const BoundRankSteps& bound, PythonRankExchange& exchange, uint64_t step,
               const std::vector<GivenTuple>& updates, const std::vector<ToldTuple>& told, const nb::object& change,
               const nb::object& set) {
  const std::vector<GivenPriorities> given = given_of(updates);
  const std::vector<RankSteps::Told> tells = told_of(told);
  return raising([&] {
    const Unlocked unlocked;
    const PythonRankExchange::Use use(exchange, unlocked);
    RankRead made;
    made.agreed = bound.steps().agree(step, given, tells, update_hooks(change, set, unlocked), exchange);
    made.agreed_s = static_cast<double>(monotonic_ns()) * 1e-9;
    return made;
  });
}

// --- a round in halves -------------------------------------------------------------------------------------------

nb::list begin_round(const BoundRankSteps& bound, uint64_t step, const std::vector<GivenTuple>& updates) {
  const std::vector<GivenPriorities> given = given_of(updates);
  const RankSteps::Parts parts = without_gil([&] { return bound.steps().begin(step, given, {}); });
  nb::list made;
  for (const std::vector<std::byte>& each : parts) {
    made.append(copied_bytes(each));
  }
  return made;
}

// What all ranks have told, for `RankReader.read`, and the updates for this rank as bytes, for `apply`.
nb::object hear_round(const BoundRankSteps& bound, uint64_t step, const std::vector<In<uint8_t>>& parts) {
  std::vector<std::span<const std::byte>> received;
  for (const In<uint8_t>& part : parts) received.push_back(std::as_bytes(view(part)));
  RankRead made;
  RankSteps::Heard heard = without_gil([&] { return bound.steps().hear(step, received, {}); });
  made.agreed = std::move(heard.agreed);
  made.agreed_s = static_cast<double>(monotonic_ns()) * 1e-9;
  return nb::make_tuple(nb::cast(std::move(made)), copied_bytes(std::as_bytes(std::span(heard.updates))));
}

void apply_round(const BoundRankSteps& bound, const In<uint8_t>& updates, const nb::object& change) {
  const auto bytes = std::as_bytes(view(updates));
  if (bytes.size() % sizeof(PriorityRecord) != 0) fail(ErrorKind::schema, "updates are those that `hear` gave");
  std::vector<PriorityRecord> records(bytes.size() / sizeof(PriorityRecord));
  if (!records.empty()) std::memcpy(records.data(), bytes.data(), bytes.size());
  raising([&] {
    const Unlocked unlocked;
    bound.steps().apply(records, update_hooks(change, nb::none(), unlocked));
  });
}

// The records of messages between ranks, by name, as NumPy makes dtypes of them.
nb::dict wire_records() {
  struct Part {
    const char *name, *format;
    size_t offset;
  };
  const auto record = [](size_t bytes, const std::vector<Part>& parts) {
    nb::list names, formats, offsets;
    for (const Part& part : parts) {
      names.append(part.name);
      formats.append(part.format);
      offsets.append(part.offset);
    }
    nb::dict made;
    made["names"] = names, made["formats"] = formats, made["offsets"] = offsets, made["itemsize"] = bytes;
    return made;
  };
  nb::dict made;
  made["row_header"] = record(sizeof(RowHeader), {{"row", "<u4", offsetof(RowHeader, row)},
                                                  {"generation", "<u4", offsetof(RowHeader, generation)},
                                                  {"shard", "<u4", offsetof(RowHeader, shard)},
                                                  {"length", "<i4", offsetof(RowHeader, length)},
                                                  {"start", "<i4", offsetof(RowHeader, start)},
                                                  {"steps", "<i4", offsetof(RowHeader, steps)},
                                                  {"anchor", "<i4", offsetof(RowHeader, anchor)},
                                                  {"version", "<i8", offsetof(RowHeader, version)},
                                                  {"probability", "<f8", offsetof(RowHeader, probability)}});
  made["rank_status"] = record(sizeof(RankStatus), {{"fingerprint", "<i8", offsetof(RankStatus, fingerprint)},
                                                    {"step", "<i8", offsetof(RankStatus, step)},
                                                    {"updates", "<i8", offsetof(RankStatus, updates)}});
  made["shard_status"] = record(sizeof(ShardStatus), {{"rows", "<i8", offsetof(ShardStatus, rows)},
                                                      {"next_sequence", "<i8", offsetof(ShardStatus, next_sequence)},
                                                      {"cursor", "<i8", offsetof(ShardStatus, cursor)},
                                                      {"total", "<u8", offsetof(ShardStatus, total)},
                                                      {"steps", "<u8", offsetof(ShardStatus, steps)}});
  return made;
}

class BoundRankReader {
 public:
  BoundRankReader(RankReader::Settings settings, const std::vector<ShardTuple>& shards, nb::object assigner)
      : assigner_(std::move(assigner)) {
    std::vector<RankReader::ShardView> views;
    for (const auto& [store, of, fields, counts, turn, turns, ranks] : shards) {
      RankReader::ShardView view{nullptr, of, fields, counts, turn, turns, ranks};
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
  // and returns those that are stored; None: they are taken as they are, but positive. `place` tells windows.
  RankRead build(const nb::object& batch, const BoundRankSteps& bound, PythonRankExchange& exchange, uint64_t step,
                 const std::vector<uint64_t>& quotas, const std::vector<GivenTuple>& updates, const nb::object& change,
                 std::optional<double> beta, const nb::object& place) const {
    const BatchMemory to = checked(batch);
    const std::span<double> weights = beta ? weights_to_fill(batch) : std::span<double>{};
    const std::vector<GivenPriorities> given = given_of(updates);
    return raising([&] {
      const Unlocked unlocked;
      const PythonRankExchange::Use use(exchange, unlocked);
      RankRead made;
      const RankSteps& steps = bound.steps();
      made.agreed = steps.agree(step, given, {}, update_hooks(change, nb::none(), unlocked), exchange, quotas);
      made.agreed_s = static_cast<double>(monotonic_ns()) * 1e-9;
      if (made.agreed.refusal != RankSteps::Refusal::none) return made;
      read_by_totals(made, to, step, quotas, place, unlocked);
      made.outcome = steps.tell(made.found.failed.has_value(), made.found.lowest, exchange);
      if (made.outcome && beta) {
        importance_weights(to.arrays.probability, made.agreed.rows[0], *beta, made.outcome->lowest[0], weights);
      }
      return made;
    });
  }

  // Draws the batch of a step from what all ranks have told (`RankSteps.hear`), and reads this rank's rows.
  void read_heard(const nb::object& batch, RankRead& heard, uint64_t step, const std::vector<uint64_t>& quotas,
                  const nb::object& place) const {
    if (heard.agreed.refusal != RankSteps::Refusal::none || !heard.draws.empty()) {
      fail(ErrorKind::schema, "a batch is read once, and after all ranks have agreed");
    }
    const BatchMemory to = checked(batch);
    raising([&] {
      const Unlocked unlocked;
      read_by_totals(heard, to, step, quotas, place, unlocked);
    });
  }

  // Reads this rank's rows of a batch that somebody else has drawn, of each store a DrawnTuple or None. `own` is a
  // batch, a target, or None where this rank gets no rows; `others` are targets of other ranks, where their messages
  // are not in host memory.
  RankRead read_drawn(const nb::object& own, const std::vector<TargetTuple>& others, bool in_host_memory,
                      const std::vector<std::optional<DrawnTuple>>& drawn, uint64_t step, const nb::object& place,
                      const nb::object& again, const nb::object& limits) const {
    RankReader::Draws draws = draws_of(drawn, step);
    const bool batched = nb::isinstance<SampledBatch>(own);
    std::optional<BatchMemory> to;
    if (batched) to = checked(own);
    std::vector<TargetTuple> given = others;
    if (!batched && !own.is_none()) given.push_back(nb::cast<TargetTuple>(own));
    std::vector<std::unique_ptr<PythonCopier>> copiers;  // of each target; null: the CPU copies its rows
    for (const auto& [rank, arrays, headers, copier] : given) {
      copiers.push_back(copier.is_none() ? nullptr : std::make_unique<PythonCopier>(copier));
    }
    return raising([&] {
      const Unlocked unlocked;
      StoreCalls calls(stores_);
      const Outside outside(unlocked, calls);
      std::vector<RankReader::Target> targets;
      for (size_t i = 0; i < given.size(); ++i) {
        const auto& [rank, arrays, headers, copier] = given[i];
        targets.push_back(target_of(rank, arrays, headers, copiers[i] == nullptr));
        targets.back().copier = copiers[i].get();
        if (copiers[i] != nullptr) {
          copiers[i]->work_in([&](const std::function<void()>& act) { outside.call(act); });
        }
      }
      RankRead made;
      reader_->assign(draws);
      read(made, draws, to ? &*to : nullptr, in_host_memory, targets, hooks_of(place, again, limits, outside));
      return made;
    });
  }

  // (rank, rows) of each other rank that gets rows from this one.
  nb::list outgoing(const std::vector<std::optional<DrawnTuple>>& drawn) const {
    RankReader::Draws draws = draws_of(drawn, 0);
    reader_->assign(draws);
    nb::list made;
    for (const RankReader::Traffic& each : reader_->outgoing(draws)) {
      made.append(nb::make_tuple(each.rank, each.places.size()));
    }
    return made;
  }

  // Puts the rows of received messages to their places.
  void place(const nb::object& batch, RankRead& read) const {
    const BatchMemory to = checked(batch);
    if (read.headers.size() != to.shards.size()) fail(ErrorKind::schema, "the rows were read for another batch");
    for (const RowsOfPeer& each : read.incoming) {
      if (each.bytes != reader_->layout(reader_->settings().rank, each.places.size()).bytes) {
        fail(ErrorKind::schema, "the rows were read by another reader");
      }
    }
    const Unlocked unlocked;
    const RankReader::Target own = own_target(read, to);
    for (const RowsOfPeer& each : read.incoming) reader_->place(own, each.places, each.memory.base());
    reader_->settle(read.headers, to.arrays, to.shards);
  }

  // Bytes of a row in this rank's batch.
  uint64_t row_bytes(uint32_t rank) const {
    uint64_t bytes = 0;
    for (const uint64_t each : reader_->row_bytes(rank)) bytes += each;
    return bytes;
  }

 private:
  RankReader::Draws draws_of(const std::vector<std::optional<DrawnTuple>>& drawn, uint64_t step) const {
    const size_t stores = reader_->settings().stores.size();
    if (drawn.size() != stores) fail(ErrorKind::schema, "draws of ", drawn.size(), " stores were given of ", stores);
    RankReader::Draws made;
    made.step = step;
    made.first = {0};
    made.placed.resize(stores);
    made.cursors.resize(stores);
    made.share.assign(reader_->shards(), 1.0);
    const auto add = [](auto& to, const auto& values, size_t n, const char* what) {
      if (values.size() != n) fail(ErrorKind::schema, n, " draws were given with ", values.size(), " ", what);
      to.insert(to.end(), values.data(), values.data() + n);
    };
    for (size_t store = 0; store < stores; ++store) {
      made.first.push_back(made.first.back());
      if (!drawn[store]) continue;
      const auto& [shard, rows, generations, probability, anchors, rounds, share, cursor] = *drawn[store];
      const size_t n = shard.size(), before = made.shard.size();
      made.first.back() += n;
      add(made.shard, shard, n, "shards");
      add(made.rows, rows, n, "rows");
      add(made.generations, generations, n, "generations");
      add(made.probability, probability, n, "probabilities");
      made.anchors.resize(before + n);
      if (anchors) {
        if (anchors->size() != n) fail(ErrorKind::schema, n, " draws were given with ", anchors->size(), " steps");
        std::copy_n(anchors->data(), n, made.anchors.begin() + static_cast<ptrdiff_t>(before));
        made.placed[store] = 1;
      }
      if (rounds) {
        made.rounds.resize(before);
        add(made.rounds, *rounds, n, "rounds");
      }
      reader_->share_of(static_cast<uint32_t>(store), share, made);
      made.cursors[store] = cursor;
    }
    if (!made.rounds.empty()) made.rounds.resize(made.shard.size());
    return made;
  }

  void read_by_totals(RankRead& made, const BatchMemory& to, uint64_t step, const std::vector<uint64_t>& quotas,
                      const nb::object& place, const Unlocked& unlocked) const {
    StoreCalls calls(stores_);
    const Outside outside(unlocked, calls);
    RankReader::Draws draws = reader_->draw(step, quotas, made.agreed.totals);
    std::vector<RankReader::Target> targets;
    read(made, draws, &to, true, targets, hooks_of(place, nb::none(), nb::none(), outside));
  }

  // Into the targets, a batch in host memory if there is one, and messages to the other ranks that get rows.
  void read(RankRead& made, RankReader::Draws& draws, const BatchMemory* to, bool in_host_memory,
            std::vector<RankReader::Target>& targets, const RankReader::Hooks& hooks) const {
    made.draws = reader_->own(draws);
    for (const size_t first : draws.first) {
      const auto at = std::ranges::lower_bound(made.draws, static_cast<int64_t>(first)) - made.draws.begin();
      made.parts.push_back(static_cast<size_t>(at));
    }
    made.moves = reader_->moves(draws);
    if (to != nullptr) {
      if (made.draws.size() != to->shards.size()) {
        fail(ErrorKind::schema, "the batch has ", to->shards.size(), " rows, this rank gets ", made.draws.size());
      }
      made.headers.resize(made.draws.size());
    }
    std::vector<RankReader::Traffic> outgoing = reader_->outgoing(draws);
    made.outgoing.reserve(outgoing.size());
    for (RankReader::Traffic& each : outgoing) {
      if (!in_host_memory) break;
      const size_t rows = each.places.size(), bytes = reader_->layout(each.rank, rows).bytes;
      const RowsOfPeer& message = made.outgoing.emplace_back(std::move(each), bytes);
      targets.push_back(reader_->message(message.peer, message.memory.base(), rows));
      made.sent_bytes += rows * row_bytes(message.peer);
    }
    std::vector<RankReader::Traffic> incoming = reader_->incoming(draws);
    made.incoming.reserve(incoming.size());
    if (to != nullptr) {
      for (RankReader::Traffic& each : incoming) {
        const size_t bytes = reader_->layout(reader_->settings().rank, each.places.size()).bytes;
        made.incoming.emplace_back(std::move(each), bytes);
      }
      targets.push_back(own_target(made, *to));
    } else {
      made.expected = std::move(incoming);
    }
    made.found = reader_->read(draws, targets, hooks);
    if (to != nullptr) reader_->settle(made.headers, to->arrays, to->shards);
    made.read_s = static_cast<double>(monotonic_ns()) * 1e-9;
  }

  RankReader::Target own_target(RankRead& read, const BatchMemory& to) const {
    return {.rank = reader_->settings().rank, .arrays = reader_->arrays_of(to.arrays), .headers = read.headers};
  }

  // A target in memory of the caller's.
  RankReader::Target target_of(uint32_t rank, const std::vector<AnyArray>& arrays, const Writable& headers,
                               bool on_host) const {
    if (headers.size() % sizeof(RowHeader) != 0) fail(ErrorKind::schema, "headers are of whole rows");
    if (reinterpret_cast<uintptr_t>(headers.data()) % alignof(RowHeader) != 0) {
      fail(ErrorKind::schema, "headers begin at a multiple of ", alignof(RowHeader));
    }
    const size_t rows = headers.size() / sizeof(RowHeader);
    RankReader::Target target{.rank = rank, .arrays = {}, .headers = {}};
    target.headers = {reinterpret_cast<RowHeader*>(headers.data()), rows};
    if (!on_host) return target;
    const std::vector<uint64_t> bytes = reader_->row_bytes(rank);
    if (arrays.size() != bytes.size()) {
      fail(ErrorKind::schema, "rank ", rank, " gets ", bytes.size(), " arrays, ", arrays.size(), " were given");
    }
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (arrays[i].nbytes() != bytes[i] * rows) {
        fail(ErrorKind::schema, "array ", i, " has ", arrays[i].nbytes(), " bytes, ", rows, " rows need ",
             bytes[i] * rows);
      }
      target.arrays.push_back(static_cast<std::byte*>(arrays[i].data()));
    }
    return target;
  }

  BatchMemory checked(const nb::object& batch) const {
    const std::optional<TransitionView>& view = reader_->settings().view;
    check_made_for(batch, reader_->window(), reader_->steps(), reader_->field_bytes(), view ? &*view : nullptr);
    BatchMemory memory = memory_of(batch);
    if (memory.shards.size() != memory.arrays.rows.size()) {
      fail(ErrorKind::schema, "the batch was made without shards");
    }
    return memory;
  }

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
  module.def("wire_records", &wire_records);
  nb::class_<BoundRankSteps>(module, "RankSteps")
      .def(
          "__init__",
          [](BoundRankSteps* self, uint32_t rank, uint32_t ranks, int64_t fingerprint,
             const std::vector<StoreViewTuple>& stores, bool with_lowest) {
            RankSteps::Settings settings{rank, ranks, fingerprint, {}, with_lowest};
            std::vector<nb::object> held;
            for (const auto& [store, by_priority, by_totals, leaders, min_rows, min_steps] : stores) {
              settings.stores.push_back({&nb::cast<Store&>(store), by_priority ? By::priority : By::row, by_totals,
                                         leaders, min_rows, min_steps});
              held.push_back(store);
            }
            new (self) BoundRankSteps(std::move(settings), std::move(held));
          },
          nb::arg("rank"), nb::arg("ranks"), nb::arg("fingerprint"), nb::arg("stores"), nb::arg("with_lowest"))
      .def("agree", &agree, nb::arg("exchange"), nb::arg("step"), nb::arg("updates"), nb::arg("told"),
           nb::arg("change").none(), nb::arg("set").none())
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
      // of every rank, of each store: shard_status of `wire_records`, as bytes
      .def_prop_ro("shards", [](const RankRead& r) { return copied_bytes(std::as_bytes(std::span(r.agreed.shards))); })
      // of each store those of all its shards, as bytes
      .def_prop_ro("offers",
                   [](const RankRead& r) {
                     nb::list made;
                     for (const auto& each : r.agreed.offers) made.append(copied_bytes(each));
                     return made;
                   })
      .def_prop_ro("changed", [](const RankRead& r) { return r.agreed.changed; })
      // selectable, of each store; and of which there are too few
      .def_prop_ro("rows", [](const RankRead& r) { return r.agreed.rows; })
      .def_prop_ro("steps", [](const RankRead& r) { return r.agreed.steps; })
      .def_prop_ro("refused_store", [](const RankRead& r) { return r.agreed.store; })
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
                     return r.outcome ? nb::cast(r.outcome->lowest) : nb::object(nb::none());
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
      .def_ro("sent_bytes", &RankRead::sent_bytes)
      // all ranks have told that they have all of their rows, and none is on its way
      .def_prop_ro(
          "whole",
          [](const RankRead& r) { return r.outcome && std::ranges::count(r.outcome->failed, uint8_t{1}) == 0; })
      // rows that were drawn again, of all stores
      .def_prop_ro("lost",
                   [](const RankRead& r) {
                     return std::accumulate(r.found.redrawn.begin(), r.found.redrawn.end(), uint64_t{0});
                   })
      // (rank, places in this rank's batch) each, of rows whose memory is the caller's
      .def_prop_ro("expected",
                   [](const RankRead& r) {
                     nb::list made;
                     for (const RankReader::Traffic& each : r.expected) {
                       made.append(nb::make_tuple(each.rank, copied_array<uint32_t>(each.places)));
                     }
                     return made;
                   })
      .def_ro("moves", &RankRead::moves)
      .def_prop_ro("local_rows", [](const RankRead& r) { return r.found.local; })
      // of each store
      .def_prop_ro("lowest", [](const RankRead& r) { return r.found.lowest; })
      .def_prop_ro("redrawn", [](const RankRead& r) { return r.found.redrawn; })
      .def_prop_ro("cursors", [](const RankRead& r) { return r.found.cursors; })
      .def_ro("parts", &RankRead::parts)
      .def_prop_ro("failed", [](const RankRead& r) { return r.found.failed; })
      .def("draws", [](const RankRead& r) { return to_numpy(std::vector<int64_t>(r.draws)); });
  nb::class_<BoundRankReader>(module, "RankReader")
      .def(
          "__init__",
          [](BoundRankReader* self, uint32_t rank, const std::vector<ConsumerTuple>& consumers,
             const std::vector<StoreTuple>& stores, const std::vector<ShardTuple>& shards, const nb::object& assigner,
             uint32_t window, bool pad_left, unsigned threads, bool in_order, const std::optional<WindowTuple>& windows,
             const TransitionView* view, std::optional<uint32_t> replica) {
            RankReader::Settings settings{.window = window_plan(window, windows),
                                          .pad_left = pad_left,
                                          .threads = threads,
                                          .view = {},
                                          .in_order = in_order,
                                          .rank = rank,
                                          .replica = replica,
                                          .consumers = {},
                                          .stores = {}};
            if (view != nullptr) settings.view = *view;
            for (const auto& [of, replica, arrays] : consumers) settings.consumers.push_back({of, replica, arrays});
            for (const auto& [draws, seed, atom, limited] : stores) {
              RankReader::StorePlan plan{.draws = {}, .seed = seed, .atom = atom, .limited = limited};
              if (draws) {
                plan.draws = sampler_settings(*draws, settings.window, pad_left, threads, seed, settings.view);
              }
              settings.stores.push_back(std::move(plan));
            }
            new (self) BoundRankReader(std::move(settings), shards, assigner);
          },
          nb::arg("rank"), nb::arg("consumers"), nb::arg("stores"), nb::arg("shards"), nb::arg("assigner"),
          nb::arg("window"), nb::arg("pad_left"), nb::arg("threads"), nb::arg("in_order"), nb::arg("windows").none(),
          nb::arg("view").none(), nb::arg("replica").none())
      .def("build", &BoundRankReader::build, nb::arg("batch"), nb::arg("steps"), nb::arg("exchange"), nb::arg("step"),
           nb::arg("quotas"), nb::arg("updates"), nb::arg("change").none(), nb::arg("beta").none(),
           nb::arg("place").none())
      .def("read", &BoundRankReader::read_heard, nb::arg("batch"), nb::arg("heard"), nb::arg("step"), nb::arg("quotas"),
           nb::arg("place").none())
      .def("read_drawn", &BoundRankReader::read_drawn, nb::arg("own").none(), nb::arg("others"),
           nb::arg("in_host_memory"), nb::arg("drawn"), nb::arg("step"), nb::arg("place").none(),
           nb::arg("again").none(), nb::arg("limits").none())
      .def("outgoing", &BoundRankReader::outgoing, nb::arg("drawn"))
      .def("place", &BoundRankReader::place, nb::arg("batch"), nb::arg("read"))
      .def("row_bytes", &BoundRankReader::row_bytes, nb::arg("rank"))
      // The importance weights of a batch's rows, as `importance_weights` makes them.
      .def_static("weigh", [](const nb::object& batch, uint64_t count, double beta, double lowest) {
        const BatchMemory memory = memory_of(batch);
        importance_weights(memory.arrays.probability, count, beta, lowest, weights_to_fill(batch));
      });
}

}  // namespace geartrain
