// Bindings of groups and reducers. Arrays are passed as addresses, with the object that owns the memory: the group
// keeps it until the work is done or the group's thread has ended, in whatever order Python drops the rest. Every wait
// releases the GIL and checks for signals now and then.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "collectives/group.h"
#include "collectives/reduce_kernels.h"
#include "collectives/reducer.h"
#include "collectives/share_planner.h"
#include "python/bind.h"

namespace geartrain {
namespace {

// A group, and the owners of the memory that its operations use.
class PythonGroup {
 public:
  explicit PythonGroup(const GroupOptions& options) : group_(std::make_unique<Group>(options)) {}
  ~PythonGroup() {
    {
      const Unlocked unlocked;
      group_.reset();  // ends the thread that reads and writes the arrays
    }
    kept_.clear();
  }
  PythonGroup(const PythonGroup&) = delete;
  PythonGroup& operator=(const PythonGroup&) = delete;

  Group& group() { return *group_; }
  const Group& group() const { return *group_; }

  std::shared_ptr<Work> all_reduce(const Shape& shape, uint64_t address, double timeout_s, nb::object keep, bool soon) {
    void* const array = reinterpret_cast<void*>(address);
    return start(std::move(keep), [&] { return group_->all_reduce(shape, array, array, timeout_s, soon); });
  }

  std::shared_ptr<Work> exchange(const Shape& shape, std::vector<Segment> sends, std::vector<Segment> receives,
                                 double timeout_s, nb::object keep, bool soon) {
    return start(std::move(keep),
                 [&] { return group_->exchange(shape, std::move(sends), std::move(receives), timeout_s, soon); });
  }

 private:
  template <typename Start>
  std::shared_ptr<Work> start(nb::object keep, Start&& start) {
    release_done();
    kept_.push_back({nullptr, std::move(keep)});
    std::shared_ptr<Work>& work = kept_.back().work;
    try {
      // With the GIL: it never blocks, and `kept_` is the GIL's.
      work = start();
    } catch (...) {
      kept_.pop_back();
      throw;
    }
    return work;
  }

  struct Kept {
    std::shared_ptr<Work> work;
    nb::object owner;
  };

  void release_done() {
    // Dropping an owner may run any Python, and come back here: the entry goes first.
    while (!kept_.empty() && kept_.front().work->done()) {
      const Kept over = std::move(kept_.front());
      kept_.pop_front();
    }
  }

  std::unique_ptr<Group> group_;
  std::deque<Kept> kept_;
};

std::unique_ptr<PythonGroup> make_group(const nb::dict& given) {
  GroupOptions options;
  options.rank = item(given, "rank", options.rank);
  options.world = item(given, "world_size", options.world);
  options.name = item(given, "name", options.name);
  options.reducers = item(given, "reducers", options.reducers);
  options.shares = item(given, "shares", options.shares);
  options.ring = item(given, "ring", options.ring);
  options.outlives_reducers = item(given, "outlives_reducers", options.outlives_reducers);
  options.reducer_silence_s = item(given, "reducer_silence_s", options.reducer_silence_s);
  options.secret = secret_of(given);
  options.host = item(given, "host", options.host);
  options.advertise = item(given, "advertise", options.advertise);
  options.shm = item(given, "shm", options.shm);
  options.cross_memory = item(given, "cross_memory", options.cross_memory);
  if (given.contains("least_exposed_bytes")) {
    options.least_exposed_bytes = nb::cast<uint64_t>(given["least_exposed_bytes"]);
  }
  options.max_window_bytes = item(given, "max_window_bytes", options.max_window_bytes);
  options.spin_us = item(given, "spin_us", options.spin_us);
  options.fixed_window_bytes = item(given, "fixed_window_bytes", options.fixed_window_bytes);
  const Unlocked unlocked;
  return std::make_unique<PythonGroup>(options);
}

std::unique_ptr<Reducer> make_reducer(const nb::dict& given) {
  ReducerOptions options;
  options.host = item(given, "host", options.host);
  options.port = item(given, "port", options.port);
  options.secret = secret_of(given);
  options.shm = item(given, "shm", options.shm);
  options.max_window_bytes = item(given, "max_window_bytes", options.max_window_bytes);
  options.max_groups = item(given, "max_groups", options.max_groups);
  options.threads = item(given, "threads", options.threads);
  const Unlocked unlocked;
  return std::make_unique<Reducer>(options);
}

Dtype dtype_from(uint32_t code) {
  if (code >= kDtypes) fail(ErrorKind::argument, "no dtype has the number ", code);
  return static_cast<Dtype>(code);
}

Op op_from(uint32_t code) {
  if (code >= kOps) fail(ErrorKind::argument, "no operation has the number ", code);
  return static_cast<Op>(code);
}

// Of an operation that another is a stage of: elements, operation, dtype between hosts, ranks.
using GivenWhole = std::optional<std::tuple<uint64_t, uint32_t, uint32_t, uint32_t>>;

std::optional<Whole> whole_from(const GivenWhole& given) {
  if (!given) return std::nullopt;
  const auto [count, op, wire, world] = *given;
  if (world == 0 || world > kMostMembers) fail(ErrorKind::argument, "no operation is one of ", world, " ranks");
  return Whole{count, op_from(op), dtype_from(wire), world};
}

std::shared_ptr<Work> all_reduce(PythonGroup& group, uint64_t address, uint64_t count, uint32_t dtype, uint32_t wire,
                                 uint32_t op, double timeout_s, nb::object keep, const GivenWhole& whole, bool soon) {
  Shape shape{count, dtype_from(dtype), dtype_from(wire), op_from(op), 0};
  shape.whole = whole_from(whole);
  return group.all_reduce(shape, address, timeout_s, std::move(keep), soon);
}

using Segments = std::vector<std::pair<uint64_t, uint64_t>>;  // address, elements

std::vector<Segment> segments_from(const Segments& given) {
  std::vector<Segment> out;
  for (const auto& [at, count] : given) out.push_back({reinterpret_cast<std::byte*>(at), count});
  return out;
}

std::shared_ptr<Work> exchange(PythonGroup& group, uint32_t collective, const Segments& sends, const Segments& receives,
                               uint32_t dtype, uint32_t op, uint32_t root, double timeout_s, nb::object keep,
                               const GivenWhole& whole, bool soon) {
  if (collective >= kCollectives) fail(ErrorKind::argument, "no collective has the number ", collective);
  const Dtype type = dtype_from(dtype);
  Shape shape{0, type, type, op_from(op), 0, static_cast<Collective>(collective), root};
  shape.whole = whole_from(whole);
  return group.exchange(shape, segments_from(sends), segments_from(receives), timeout_s, std::move(keep), soon);
}

bool wait(Work& work, double timeout_s) {
  return work.done() ||
         patiently(Deadline::after(timeout_s), [&](Deadline slice, Deadline) { return work.wait(slice); });
}

// Kind, text, members; None while there is none.
std::optional<std::tuple<uint32_t, std::string, std::vector<uint32_t>>> fault_tuple(const Fault& fault) {
  if (fault.kind == FaultKind::none) return std::nullopt;
  return std::make_tuple(static_cast<uint32_t>(fault.kind), fault.text, fault.members);
}

nb::dict group_counts(PythonGroup& group) {
  const GroupCounts found = without_gil([&] { return group.group().counts(); });
  nb::dict out, sent, received, links;
  sent["tcp"] = found.sent_tcp;
  sent["shm"] = found.sent_shm;
  received["tcp"] = found.received_tcp;
  received["shm"] = found.received_shm;
  links["tcp"] = found.links_tcp;
  links["shm"] = found.links_shm;
  out["operations"] = found.operations;
  out["by_callers"] = found.by_callers;
  out["elements"] = found.elements;
  out["array_bytes"] = found.array_bytes;
  out["reduced_bytes"] = found.reduced_bytes;
  out["bytes_sent"] = sent;
  out["bytes_received"] = received;
  out["links"] = links;
  out["window_bytes"] = found.window_bytes;
  out["least_delay_us"] = found.least_delay_ns == ~uint64_t{0} ? 0.0 : static_cast<double>(found.least_delay_ns) / 1e3;
  out["refused"] = found.refused;
  out["read_bytes"] = found.read_bytes;
  out["read_operations"] = found.read_operations;
  out["read_denied"] = found.read_denied;
  out["lost_reducers"] = found.lost_reducers;
  out["taken_over_bytes"] = found.taken_over_bytes;
  out["reducer_losses"] = found.reducer_losses;
  out["reducer_returns"] = found.reducer_returns;
  return out;
}

nb::dict reducer_counts(Reducer& reducer) {
  const ReducerCounts found = without_gil([&] { return reducer.counts(); });
  nb::dict out;
  out["groups"] = found.groups;
  out["ranks"] = found.ranks;
  out["groups_served"] = found.groups_served;
  out["groups_failed"] = found.groups_failed;
  out["operations"] = found.operations;
  out["bytes_received"] = found.bytes_received;
  out["bytes_sent"] = found.bytes_sent;
  out["reduced_bytes"] = found.reduced_bytes;
  out["memory_bytes"] = found.memory_bytes;
  out["refused"] = found.refused;
  return out;
}

}  // namespace

void bind_collectives(nb::module_& module) {
  nb::class_<Work>(module, "CollectiveWork")
      .def("wait", &wait)
      .def("done", &Work::done)
      .def("fault", [](const Work& work) { return fault_tuple(work.fault()); });

  nb::class_<PythonGroup>(module, "CollectiveGroup")
      .def_static("make", &make_group)
      .def_prop_ro("address", [](const PythonGroup& group) { return group.group().address(); })
      .def("connect",
           [](PythonGroup& group, const std::vector<std::string>& addresses, double timeout_s) {
             interruptibly([&] { group.group().connect(addresses, Deadline::after(timeout_s)); });
           })
      .def("all_reduce", &all_reduce, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg("keep").none(), nb::arg("whole") = nb::none(), nb::arg("soon") = false)
      .def("exchange", &exchange, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg("keep").none(), nb::arg("whole") = nb::none(), nb::arg("soon") = false)
      .def("counts", &group_counts)
      .def("reducer_events", [](PythonGroup& group) { return group.group().reducer_events(); })
      .def("fault", [](const PythonGroup& group) { return fault_tuple(group.group().fault()); })
      .def("name_of", [](const PythonGroup& group, uint32_t member) { return group.group().name_of(member); })
      .def(
          "abort", [](PythonGroup& group, const std::string& reason) { group.group().abort(reason); },
          nb::call_guard<Unlocked>())
      .def(
          "close", [](PythonGroup& group, double timeout_s) { group.group().close(Deadline::after(timeout_s)); },
          nb::call_guard<Unlocked>());

  nb::class_<Reducer>(module, "CollectiveReducer")
      .def_static("make", &make_reducer)
      .def_prop_ro("address", &Reducer::address)
      .def("counts", &reducer_counts)
      .def(
          "close", [](Reducer& reducer, double timeout_s) { reducer.close(Deadline::after(timeout_s)); },
          nb::call_guard<Unlocked>());

  // Where an array's numbers are: address, elements, DLPack's type code, bits, and whether it may be written.
  module.def("array_memory", [](const AnyArray& array) {
    return nb::make_tuple(reinterpret_cast<uint64_t>(array.data()), array.size(), array.dtype().code,
                          array.dtype().bits * array.dtype().lanes);
  });
  module.def("reduces", [](uint32_t op, uint32_t dtype) { return reduces(op_from(op), dtype_from(dtype)); });
  // values[i] /= divisor at an address, rounded once.
  module.def("divide_memory", [](uint64_t at, uint64_t count, uint32_t dtype, uint32_t divisor) {
    const Dtype type = dtype_from(dtype);
    if (divisor == 0 || !reduces(Op::avg, type)) {
      fail(ErrorKind::argument, name_of(type), " is not divided by ", divisor);
    }
    const Unlocked unlocked;
    divide(type, reinterpret_cast<std::byte*>(at), count, divisor);
  });
  // Workers, and the rates of their links and then the reducers'.
  module.def("plan_shares",
             [](size_t workers, const std::vector<double>& rates) { return plan_shares(workers, rates); });
  module.def("shares_of_equal_links", [](size_t workers, const std::vector<std::string>& reducers) {
    return shares_of_equal_links(workers, reducers);
  });
}

}  // namespace geartrain
