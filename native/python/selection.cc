// Bindings of selection (geartrain._native.Candidates): rows that can be drawn, as trees over arrays, and the draws.

#include "selection/selection.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/errors.h"
#include "fetch/episodes.h"
#include "python/bind.h"
#include "python/window_plan.h"
#include "segment/segment.h"
#include "selection/allowed_rows.h"
#include "selection/assignment.h"
#include "selection/epochs.h"

namespace geartrain {
namespace {

// Rows with their priorities and selectable bits: a store's own, or made from an array. Whoever looks at a store's may
// meet a close(), or sums that a dead process left half changed: at_work().
class Candidates {
 public:
  explicit Candidates(Store& store) : store_(&store), from_(population_of(store, false)) {
    if (store.per_step()) steps_.emplace(population_of(store, true));
  }

  // A copy of fixed-point priorities; every row is selectable and has generation 1.
  explicit Candidates(const In<uint32_t>& priorities) {
    const uint64_t n = priorities.size();
    if (n == 0 || n > kMaxRows) fail(ErrorKind::schema, "1 to ", kMaxRows, " rows can be drawn from, found ", n);
    const uint64_t bit_words = (n + 63) / 64;
    words_ = Words(padded_leaves(n));
    nodes_ = Words(TreeShape::of(n).nodes);
    bits_ = Words(padded_leaves(bit_words));
    bit_nodes_ = Words(TreeShape::of(bit_words).nodes);
    auto* words = words_.get();
    auto* bits = bits_.get();
    for (uint64_t row = 0; row < n; ++row) {
      words[row].store(make_word(1, priorities.data()[row]), std::memory_order_relaxed);
      bits[row / 64].store(bits[row / 64].load(std::memory_order_relaxed) | uint64_t{1} << (row % 64),
                           std::memory_order_relaxed);
    }
    from_.priorities = PriorityTree(words, nodes_.get(), n);
    from_.bits = BitTree(bits, bit_nodes_.get(), bit_words);
    from_.words = words;
    from_.priorities.rebuild();
    from_.bits.rebuild();
  }
  Candidates(const Candidates&) = delete;
  Candidates& operator=(const Candidates&) = delete;

  const Population& population() const { return from_; }
  // What is drawn by priority, or by row: of a store with priorities of steps its steps, or its rows.
  const Population& drawn(bool by_priority) const { return by_priority && steps_ ? *steps_ : from_; }
  bool is_array() const { return store_ == nullptr; }

  // work() without the GIL, while the store is open and its sums are right.
  // A store with priorities of steps has none of rows.
  void check_by(bool by_priority) const {
    if (by_priority && store_ != nullptr && store_->per_step()) {
      fail(ErrorKind::schema,
           "the store keeps priorities of steps and none of rows, so rows cannot be chosen by priority; "
           "geartrain.Replay with Prioritized draws its steps");
    }
  }

  template <typename Work>
  auto at_work(Work&& work) const {
    const Unlocked unlocked;
    std::optional<Store::Call> call;
    if (store_ != nullptr) {
      call.emplace(*store_);
      store_->repair_dead_updates();
    }
    return std::forward<Work>(work)();
  }
  void check_open() const {
    if (store_ != nullptr) store_->check_open();
  }

 private:
  Store* store_ = nullptr;  // Python keeps it alive
  Words words_, nodes_, bits_, bit_nodes_;
  Population from_;
  std::optional<Population> steps_;
};

Limits checked_limits(const Candidates& from, const std::optional<LimitTuple>& limits) {
  if (limits && from.is_array()) fail(ErrorKind::schema, "bare arrays have no versions, ages or lengths to limit");
  return limits_of(limits);
}

void check_stride(const Candidates& from, uint32_t stride) {
  if (stride == 0) fail(ErrorKind::schema, "a stride is at least 1");
  if (stride != 1 && from.population().marks) {
    fail(ErrorKind::schema, "rows hold several episodes, whose steps have a stride of 1");
  }
}

// Which steps count: max_steps, need, skip, stride, needs (before, after) and shift of a DrawPlan.
using StepTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;
// needs (before, after) and shift of an EpochPlan.
using NeedsTuple = std::tuple<uint32_t, uint32_t, uint32_t>;

void check_needs(const Candidates& from, const StepNeeds& needs) {
  if (needs.after != 0 && !from.population().repeats) fail(ErrorKind::schema, "no row of these repeats steps");
}

DrawPlan plan_of(const Candidates& from, bool by_priority, const DrawKey& key, const std::optional<LimitTuple>& limits,
                 const std::optional<StepTuple>& steps) {
  DrawPlan plan{.key = key, .by = by_priority ? By::priority : By::row, .limits = checked_limits(from, limits)};
  if (!steps) return plan;
  if (from.is_array()) fail(ErrorKind::schema, "bare arrays have no steps to count");
  std::tie(plan.max_steps, plan.need, plan.skip, plan.stride, plan.needs.before, plan.needs.after, plan.shift) = *steps;
  check_stride(from, plan.stride);
  check_needs(from, plan.needs);
  return plan;
}

void check_strata(const In<uint32_t>& numbers, uint32_t strata) {
  if (strata == 0) return;
  for (uint32_t number : view(numbers)) {
    if (number >= strata) fail(ErrorKind::schema, "draw ", number, " is none of ", strata, " strata");
  }
}

void check_known(const Candidates& from, std::span<const uint32_t> rows) {
  for (uint32_t row : rows) {
    if (row >= from.population().rows()) fail(ErrorKind::schema, "there is no row ", row);
  }
}

// Arrays for n draws, in recycled memory.
struct DrawnArrays {
  explicit DrawnArrays(size_t n, bool with_steps = false)
      : size(n), memory((with_steps ? 3 : 2) * PooledMemory::padded(4 * n) + PooledMemory::padded(8 * n)) {
    out = {memory.take_items<uint32_t>(n), memory.take_items<uint32_t>(n), memory.take_items<double>(n)};
    if (with_steps) out.steps = memory.take_items<uint32_t>(n);
  }
  template <typename T>
  nb::object array(std::span<T> values) const {
    return memory.array(values, {size});
  }

  const size_t size;
  PooledMemory memory;
  Draws out;
};

// Arrays for n rows, filled by `choose` without the GIL, which returns a number that goes with them.
template <typename Choose>
nb::tuple chosen(const Candidates& from, size_t n, Choose choose) {
  const DrawnArrays all(n);
  const uint64_t count = from.at_work([&]() -> uint64_t { return choose(all.out); });
  return nb::make_tuple(all.array(all.out.rows), all.array(all.out.generations), all.array(all.out.probability), count);
}

// Returns (rows, generations, probability, number of draws that failed).
nb::tuple draw_rows(const Candidates& from, bool by_priority, uint64_t seed, uint64_t step, uint32_t round,
                    const In<uint32_t>& numbers, uint32_t strata, const std::optional<LimitTuple>& limits) {
  from.check_by(by_priority);
  const DrawPlan plan{
      {seed, step, kRowStream}, by_priority ? By::priority : By::row, round, strata, checked_limits(from, limits)};
  check_strata(numbers, strata);
  return chosen(from, numbers.size(),
                [&](const Draws& out) { return draw(from.population(), plan, view(numbers), out); });
}

// Draws of steps, or of rows by their steps. Returns (rows, generations, probability, steps, number that failed).
nb::tuple draw_steps(const Candidates& from, bool by_priority, uint64_t seed, uint64_t step, uint32_t round,
                     const In<uint32_t>& numbers, uint32_t strata, const std::optional<LimitTuple>& limits,
                     const StepTuple& steps) {
  DrawPlan plan = plan_of(from, by_priority, {seed, step, kRowStream}, limits, steps);
  plan.round = round;
  plan.strata = strata;
  check_strata(numbers, strata);
  const Population& population = from.drawn(by_priority);
  const DrawnArrays all(numbers.size(), true);
  const uint64_t failed = from.at_work([&] {
    if (population.row_steps == 0 && !plan.finds_steps(population)) std::ranges::fill(all.out.steps, 0U);
    return draw(population, plan, view(numbers), all.out);
  });
  return nb::make_tuple(all.array(all.out.rows), all.array(all.out.generations), all.array(all.out.probability),
                        all.array(all.out.steps), failed);
}

// What one attempt finds for targets: (rows, generations, priorities, steps), rows kNoRow where it is refused.
nb::tuple find_drawn_rows(const Candidates& from, bool by_priority, uint64_t seed, uint64_t step, uint32_t attempt,
                          const In<uint32_t>& numbers, const In<uint64_t>& targets,
                          const std::optional<LimitTuple>& limits, const std::optional<StepTuple>& steps) {
  DrawPlan plan = plan_of(from, by_priority, {seed, step, kRowStream}, limits, steps);
  plan.round = attempt / kAttemptsPerRound;
  if (numbers.size() != targets.size()) fail(ErrorKind::schema, "as many targets as draws are needed");
  const size_t n = numbers.size();
  std::vector<uint32_t> rows(n), generations(n), priorities(n), found(n);
  from.at_work([&] {
    find_drawn(from.drawn(by_priority), plan, attempt % kAttemptsPerRound, view(numbers), view(targets),
               {rows, generations, priorities, found});
    return 0;
  });
  return to_numpy_tuple(std::move(rows), std::move(generations), std::move(priorities), std::move(found));
}

nb::tuple distinct_rows(const Candidates& from, bool by_priority, uint64_t seed, uint64_t step, uint32_t round,
                        size_t n, const In<uint32_t>& excluded, const std::optional<LimitTuple>& limits) {
  from.check_by(by_priority);
  check_known(from, view(excluded));
  const DrawPlan plan{
      {seed, step, kDistinctStream}, by_priority ? By::priority : By::row, round, 0, checked_limits(from, limits)};
  return chosen(from, n, [&](const Draws& out) {
    draw_distinct(from.population(), plan, view(excluded), out);
    return 0;
  });
}

// Returns (rows, generations, probability, number found); entries beyond that number are undefined.
nb::tuple first(const Candidates& from, int order, size_t n, uint64_t after, const In<uint32_t>& excluded,
                const std::optional<LimitTuple>& limits) {
  from.check_by(static_cast<Order>(order) == Order::heaviest);
  check_known(from, view(excluded));
  const Limits limit = checked_limits(from, limits);
  return chosen(from, n, [&](const Draws& out) {
    return first_rows(from.population(), static_cast<Order>(order), after, limit, view(excluded), out);
  });
}

// The same as (rows, generations, sequences, priorities), of those that were found: the numbers they were ranked by.
nb::tuple first_ranked(const Candidates& from, int order, size_t n, uint64_t after, const In<uint32_t>& excluded,
                       const std::optional<LimitTuple>& limits) {
  from.check_by(static_cast<Order>(order) == Order::heaviest);
  check_known(from, view(excluded));
  const Limits limit = checked_limits(from, limits);
  std::vector<uint32_t> rows(n), generations(n), priorities(n);
  std::vector<uint64_t> sequences(n);
  std::vector<double> probability(n);
  from.at_work([&] {
    const size_t found = first_rows(from.population(), static_cast<Order>(order), after, limit, view(excluded),
                                    {rows, generations, probability}, sequences, priorities);
    rows.resize(found), generations.resize(found), priorities.resize(found), sequences.resize(found);
  });
  return to_numpy_tuple(std::move(rows), std::move(generations), std::move(sequences), std::move(priorities));
}

// Returns (rows, generations, priorities, number not found).
template <typename AtWork>
nb::tuple found(const Population& from, By by, const In<uint64_t>& targets, AtWork at_work) {
  const size_t n = targets.size();
  PooledMemory memory(3 * PooledMemory::padded(4 * n));
  const auto rows = memory.take_items<uint32_t>(n), generations = memory.take_items<uint32_t>(n),
             priorities = memory.take_items<uint32_t>(n);
  const uint64_t missing = at_work([&] { return find_rows(from, by, view(targets), rows, generations, priorities); });
  return nb::make_tuple(memory.array(rows, {n}), memory.array(generations, {n}), memory.array(priorities, {n}),
                        missing);
}

// A copy of the rows that limits allow, except the excluded ones, from which rows can be taken one by one.
class AllowedRows {
 public:
  AllowedRows(const Candidates& from, bool by_priority, const std::optional<LimitTuple>& limits,
              const In<uint32_t>& excluded, const std::optional<StepTuple>& steps) {
    const DrawPlan plan = plan_of(from, by_priority, {}, limits, steps);
    check_known(from, view(excluded));
    from.at_work([&] { allowed_.emplace(from.population(), plan, view(excluded)); });
  }
  const Allowed& get() const { return *allowed_; }

  // (rows, generations, priorities) of all that are left and have a priority, in the order of their numbers.
  nb::tuple priorities() const {
    std::vector<uint32_t> rows, generations, priorities;
    const Population left = allowed_->population();
    for (uint64_t row = 0; row < left.rows(); ++row) {
      const uint64_t word = left.words[row].load(std::memory_order_relaxed);
      if (priority_of(word) == 0) continue;
      rows.push_back(static_cast<uint32_t>(row));
      generations.push_back(generation_of(word));
      priorities.push_back(priority_of(word));
    }
    return to_numpy_tuple(std::move(rows), std::move(generations), std::move(priorities));
  }

  // (row, generation, priority) of the row that the target falls into, which is then removed.
  nb::tuple take(uint64_t target) {
    if (target >= allowed_->total()) fail(ErrorKind::schema, "target ", target, " is beyond the total");
    uint32_t row = 0, generation = 0;
    double probability = 0;
    const uint64_t before = allowed_->total();
    allowed_->take(target, 0, {{&row, 1}, {&generation, 1}, {&probability, 1}});
    allowed_->remove(row);
    return nb::make_tuple(row, generation, before - allowed_->total());
  }

 private:
  std::optional<Allowed> allowed_;
};

// The steps that count of the rows that limits allow: of a store with priorities of steps, or over steps.
class StepSums {
 public:
  StepSums(const Candidates& from, const std::optional<LimitTuple>& limits, const StepTuple& steps)
      : from_(from), by_priority_(std::get<0>(steps) == 0) {
    const Population& population = from.drawn(by_priority_);
    if (by_priority_ && population.row_steps == 0) fail(ErrorKind::schema, "the store keeps no priorities of steps");
    const DrawPlan plan = plan_of(from, by_priority_, {}, limits, steps);
    from.at_work([&] { allowed_.emplace(population, plan); });
  }
  uint64_t total() const { return allowed_->total(); }

  // (rows, generations, priorities, steps) that targets fall into; rows kNoRow where priorities were lowered meanwhile.
  nb::tuple find(const In<uint64_t>& targets) const {
    const size_t n = targets.size();
    std::vector<uint32_t> rows(n), generations(n), priorities(n), steps(n);
    from_.at_work([&] {
      for (size_t i = 0; i < n; ++i) {
        const auto found = allowed_->find(targets.data()[i]);
        rows[i] = found.row, generations[i] = generation_of(found.word);
        priorities[i] = from_.drawn(by_priority_).row_steps != 0 ? priority_of(found.word) : found.row != kNoRow;
        steps[i] = found.step;
      }
      return 0;
    });
    return to_numpy_tuple(std::move(rows), std::move(generations), std::move(priorities), std::move(steps));
  }

 private:
  const Candidates& from_;
  const bool by_priority_;
  std::optional<AllowedSteps> allowed_;
};

nb::object targets(uint64_t seed, uint64_t step, bool distinct, uint32_t attempt, const In<uint32_t>& numbers,
                   uint32_t strata, uint64_t total) {
  std::vector<uint64_t> out(numbers.size());
  draw_targets({seed, step, distinct ? kDistinctStream : kRowStream}, attempt, strata, total, view(numbers), out);
  return to_numpy(std::move(out));
}

// Fixed-point priorities of some rows.
nb::object priorities_of(const Candidates& from, const In<uint32_t>& rows) {
  from.check_open();
  check_known(from, view(rows));
  std::vector<uint32_t> priorities(rows.size());
  for (size_t i = 0; i < priorities.size(); ++i) {
    priorities[i] = priority_of(from.population().words[rows.data()[i]].load(std::memory_order_relaxed));
  }
  return to_numpy(std::move(priorities));
}

// The order of commits of some rows; of bare arrays their row numbers, from 1.
nb::object sequences_of(const Candidates& from, const In<uint32_t>& rows) {
  from.check_open();
  check_known(from, view(rows));
  std::vector<uint64_t> sequences(rows.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const uint32_t row = rows.data()[i];
    sequences[i] =
        from.is_array() ? row + uint64_t{1} : from.population().status[row].sequence.load(std::memory_order_relaxed);
  }
  return to_numpy(std::move(sequences));
}

nb::object window_ends(uint64_t seed, uint64_t step, uint32_t round, const In<uint32_t>& numbers,
                       const In<int32_t>& lengths) {
  if (numbers.size() != lengths.size()) fail(ErrorKind::schema, "as many lengths as draws are needed");
  std::vector<int32_t> ends(numbers.size());
  draw_window_ends({seed, step, 0}, round, view(numbers), view(lengths), ends);
  return to_numpy(std::move(ends));
}

// Sequence and number of elements of a pass that begins now.
nb::tuple begin_pass(const Candidates& from, uint32_t row_steps, uint32_t need, uint32_t stride, bool episodes,
                     const NeedsTuple& needs) {
  check_stride(from, stride);
  EpochPlan plan{.row_steps = row_steps, .need = need, .stride = stride, .episodes = episodes};
  std::tie(plan.needs.before, plan.needs.after, plan.shift) = needs;
  check_needs(from, plan.needs);
  const EpochStart start = from.at_work([&] { return start_epoch(from.population(), plan); });
  return nb::make_tuple(start.upto, start.count);
}

// Returns (taken, rows, generations, steps), (n,) each, of n positions.
nb::tuple find_in_pass(const Candidates& from, uint64_t seed, uint64_t pass, bool shuffle, uint64_t first,
                       uint64_t total, uint64_t upto, uint32_t row_steps, uint32_t need, uint64_t position, size_t n,
                       uint32_t stride, bool episodes, const NeedsTuple& needs) {
  check_stride(from, stride);
  if (n > (size_t{1} << 31)) fail(ErrorKind::schema, n, " positions are more than one call looks at");
  EpochPlan plan{seed, pass, shuffle, first, total, upto, row_steps, need, stride, episodes};
  std::tie(plan.needs.before, plan.needs.after, plan.shift) = needs;
  check_needs(from, plan.needs);
  std::vector<uint8_t> taken(n);
  std::vector<uint32_t> rows(n), generations(n), steps(n);
  from.at_work([&] {
    find_epoch(from.population(), plan, position, taken, {rows, generations, {}, steps});
    return 0;
  });
  return to_numpy_tuple(std::move(taken), std::move(rows), std::move(generations), std::move(steps));
}

}  // namespace

void bind_selection(nb::module_& module) {
  nb::class_<Candidates>(module, "Candidates")
      .def(nb::init<Store&>(), nb::keep_alive<1, 2>())
      .def(nb::init<const In<uint32_t>&>(), nb::arg("priorities").noconvert())  // floats would be cut to integers
      .def("total_priority",
           [](const Candidates& c) { return c.at_work([&] { return c.drawn(true).priorities.total(); }); })
      .def("count", [](const Candidates& c) { return c.at_work([&] { return c.population().bits.total(); }); })
      .def("rows", [](const Candidates& c) { return c.population().rows(); })
      .def_prop_ro("shares_rows", [](const Candidates& c) { return static_cast<bool>(c.population().marks); })
      .def_prop_ro("repeats_steps", [](const Candidates& c) { return static_cast<bool>(c.population().repeats); })
      .def("begin_pass", &begin_pass, nb::arg("row_steps"), nb::arg("need"), nb::arg("stride") = 1,
           nb::arg("episodes") = false, nb::arg("needs") = NeedsTuple{})
      .def("find_in_pass", &find_in_pass, nb::arg("seed"), nb::arg("number"), nb::arg("shuffle"), nb::arg("first"),
           nb::arg("total"), nb::arg("upto"), nb::arg("row_steps"), nb::arg("need"), nb::arg("position"), nb::arg("n"),
           nb::arg("stride") = 1, nb::arg("episodes") = false, nb::arg("needs") = NeedsTuple{})
      .def("priorities", &priorities_of)
      .def("sequences", &sequences_of)
      .def("draw", &draw_rows, nb::arg("by_priority"), nb::arg("seed"), nb::arg("step"), nb::arg("round"),
           nb::arg("numbers"), nb::arg("strata") = 0, nb::arg("limits").none() = nb::none())
      .def("draw_steps", &draw_steps, nb::arg("by_priority"), nb::arg("seed"), nb::arg("step"), nb::arg("round"),
           nb::arg("numbers"), nb::arg("strata"), nb::arg("limits").none(), nb::arg("steps"))
      .def("find_drawn", &find_drawn_rows, nb::arg("by_priority"), nb::arg("seed"), nb::arg("step"), nb::arg("attempt"),
           nb::arg("numbers"), nb::arg("targets"), nb::arg("limits").none(), nb::arg("steps").none())
      .def("draw_distinct", &distinct_rows, nb::arg("by_priority"), nb::arg("seed"), nb::arg("step"), nb::arg("round"),
           nb::arg("n"), nb::arg("excluded"), nb::arg("limits").none() = nb::none())
      .def("first", &first, nb::arg("order"), nb::arg("n"), nb::arg("after"), nb::arg("excluded"),
           nb::arg("limits").none() = nb::none())
      .def("first_ranked", &first_ranked, nb::arg("order"), nb::arg("n"), nb::arg("after"), nb::arg("excluded"),
           nb::arg("limits").none() = nb::none())
      .def("find", [](const Candidates& c, bool by_priority, const In<uint64_t>& targets) {
        return found(c.population(), by_priority ? By::priority : By::row, targets,
                     [&](auto&& work) { return c.at_work(work); });
      });
  nb::class_<AllowedRows>(module, "AllowedRows")
      .def(nb::init<const Candidates&, bool, const std::optional<LimitTuple>&, const In<uint32_t>&,
                    const std::optional<StepTuple>&>(),
           nb::keep_alive<1, 2>(), nb::arg("candidates"), nb::arg("by_priority"), nb::arg("limits").none(),
           nb::arg("excluded"), nb::arg("steps").none() = nb::none())
      .def("total", [](const AllowedRows& a) { return a.get().total(); })
      .def("count", [](const AllowedRows& a) { return a.get().rows(); })
      .def("find",
           [](const AllowedRows& a, const In<uint64_t>& targets) {
             return found(a.get().population(), By::priority, targets, [](auto&& work) {
               const Unlocked unlocked;
               return work();
             });
           })
      .def("priorities", &AllowedRows::priorities)
      .def("take", &AllowedRows::take);
  nb::class_<StepSums>(module, "AllowedSteps")
      .def(nb::init<const Candidates&, const std::optional<LimitTuple>&, const StepTuple&>(), nb::keep_alive<1, 2>(),
           nb::arg("candidates"), nb::arg("limits").none(), nb::arg("steps"))
      .def("total", &StepSums::total)
      .def("find", &StepSums::find);
  using Numbers = std::vector<std::vector<uint32_t>>;
  nb::class_<Assigner>(module, "Assigner")
      .def(
          "__init__",
          [](Assigner* made, const Numbers& ranks, const std::vector<Numbers>& local_shards, const Numbers& shard_ranks,
             const std::vector<Numbers>& near_shards) {
            if (ranks.size() != local_shards.size() || (!near_shards.empty() && near_shards.size() != ranks.size()))
              fail(ErrorKind::schema, "each replica has ranks and their shards");
            std::vector<ReplicaRanks> replicas;
            for (size_t i = 0; i < ranks.size(); ++i) {
              replicas.push_back({ranks[i], local_shards[i], near_shards.empty() ? Numbers{} : near_shards[i]});
            }
            new (made) Assigner(replicas, shard_ranks);
          },
          nb::arg("ranks"), nb::arg("local_shards"), nb::arg("shard_ranks"),
          nb::arg("near_shards") = std::vector<Numbers>{})
      // (replica, reader, place) of each draw
      .def(
          "assign",
          [](const Assigner& a, const In<int64_t>& shard, const std::optional<In<int64_t>>& sizes, bool in_order) {
            auto made = a.assign(view(shard), view(sizes), in_order);
            return nb::make_tuple(to_numpy(std::move(made.replica)), to_numpy(std::move(made.reader)),
                                  to_numpy(std::move(made.place)));
          },
          nb::arg("shard"), nb::arg("sizes").none(), nb::arg("in_order"));
  module.def("draw_targets", &targets);
  module.attr("LAST_ATTEMPT") = kRefusals;
  module.def("window_ends", &window_ends);
}

}  // namespace geartrain
