// Binding of rank readers: the rows of a global batch that one rank reads, into its batch and into messages.

#include "fetch/rank_reader.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "python/batch_memory.h"
#include "python/bind.h"
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

// What a rank has read of one global batch, and what it is to get.
struct RankRead {
  RankRead() = default;
  RankRead(RankRead&&) = default;
  RankRead(const RankRead&) = delete;

  RankReader::Found found;
  std::vector<RowsOfPeer> outgoing, incoming;
  std::vector<int64_t> draws;  // of this rank's batch: their numbers in the global one
};

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

 private:
  // Without the GIL, as a call of all stores.
  template <typename Work>
  decltype(auto) at_work(Work&& work) const {
    const Unlocked unlocked;
    std::vector<std::unique_ptr<Store::Call>> calls;
    for (const Store* store : stores_) calls.push_back(std::make_unique<Store::Call>(*store));
    return std::forward<Work>(work)();
  }

 public:
  RankRead read(const nb::object& batch, uint64_t step, size_t n, const In<uint64_t>& totals) const {
    const RankReader::Batch to = checked(batch);
    return at_work([&] {
      const RankReader::Draws draws = reader_->draw(step, n, view(totals));
      RankRead made;
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
      return made;
    });
  }

  // Puts the rows of received messages to their places.
  void place(const nb::object& batch, const RankRead& read) const {
    const RankReader::Batch to = checked(batch);
    if (read.draws.size() != to.shards.size()) fail(ErrorKind::schema, "the rows were read for another batch");
    at_work([&] {
      for (const RowsOfPeer& each : read.incoming) reader_->place(to, each.places, each.memory.base());
    });
  }

  uint64_t row_bytes() const {
    uint64_t bytes = 0;
    for (const uint64_t each : reader_->row_bytes()) bytes += each;
    return bytes;
  }

 private:
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
  nb::class_<RankRead>(module, "RankRead")
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
      .def("read", &BoundRankReader::read, nb::arg("batch"), nb::arg("step"), nb::arg("n"), nb::arg("totals"))
      .def("place", &BoundRankReader::place, nb::arg("batch"), nb::arg("read"))
      .def_prop_ro("row_bytes", &BoundRankReader::row_bytes)
      // The importance weights of a batch's rows, as `importance_weights` makes them.
      .def_static("weigh", [](const nb::object& batch, uint64_t count, double beta, double lowest) {
        const BatchMemory memory = memory_of(batch);
        importance_weights(memory.arrays.probability, count, beta, lowest, weights_to_fill(batch));
      });
}

}  // namespace geartrain
