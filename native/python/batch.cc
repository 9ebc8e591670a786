// Binding of batch samplers: a batch (sampled_batch.h) is drawn, and its rows are gathered, in one call.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "fetch/batch_sampler.h"
#include "python/batch_layout.h"
#include "python/batch_memory.h"
#include "python/bind.h"
#include "python/call_python.h"
#include "python/packed_rows.h"
#include "python/python_copier.h"
#include "python/sampled_batch.h"
#include "python/window_plan.h"
#include "selection/importance_weights.h"

namespace geartrain {

BatchMemory memory_of(nb::handle batch) {
  const auto& made = nb::cast<const SampledBatch&>(batch);
  return {made.arrays(), made.shards()};
}

void check_made_for(nb::handle batch, uint32_t window, size_t steps, const std::vector<uint64_t>& row_bytes,
                    const TransitionView* view) {
  if (!nb::cast<const SampledBatch&>(batch).layout().fits(window, steps, row_bytes, view)) {
    fail(ErrorKind::schema, "the batch was made for other fields, windows or transitions");
  }
}

std::span<double> weights_to_fill(nb::handle batch) {
  auto& made = nb::cast<SampledBatch&>(batch);
  return made.weights(0, made.size());
}

namespace {

// From (rows, generations, probability, steps or None, anew), as Supplier::Rows.
Supplier::Rows rows_of(const nb::object& given) {
  using Tuple = std::tuple<In<uint32_t>, In<uint32_t>, In<double>, std::optional<In<uint32_t>>, bool>;
  Tuple found;
  if (!nb::try_cast(given, found)) {
    throw nb::type_error("drawn rows and their generations, and steps, are uint32 (n,), probabilities float64 (n,)");
  }
  const auto& [rows, generations, probability, steps, anew] = found;
  Supplier::Rows made{copied(rows), copied(generations), copied(probability), copied(steps), anew};
  const size_t n = made.rows.size();
  if (n == 0 || made.generations.size() != n || made.probability.size() != n || (steps && made.steps.size() != n)) {
    fail(ErrorKind::schema, n, " rows were drawn, with ", made.generations.size(), " generations, ",
         made.probability.size(), " probabilities and ", made.steps.size(), " steps");
  }
  return made;
}

// Asks Python, with the GIL, for the rows of a round, and makes room for a batch of as many where they are all of it.
template <typename MakeRoom>
auto rows_asked_of(nb::handle rows, const Unlocked& unlocked, MakeRoom make_room) {
  return
      [rows, &unlocked, make_room](uint32_t round, std::span<const uint32_t> numbers, std::span<const uint32_t> kept) {
        Supplier::Rows made;
        call_python(unlocked, [&] {
          made = rows_of(rows(round, copied_array(numbers), copied_array(kept)));
          const size_t size = made.rows.size();
          if (!made.anew && size != numbers.size()) {
            fail(ErrorKind::schema, numbers.size(), " rows were asked for, ", size, " were drawn");
          }
          if (round == 0 || made.anew) make_room(size);
        });
        return made;
      };
}
auto anchors_asked_of(nb::handle anchors, const Unlocked& unlocked) {
  return [anchors, &unlocked](uint32_t round, const DrawnRows& drawn) {
    std::vector<uint32_t> made;
    call_python(unlocked, [&] {
      const auto found = nb::cast<In<int32_t>>(
          anchors(round, copied_array(drawn.numbers), copied_array(drawn.rows), copied_array(drawn.generations)));
      made.assign(found.data(), found.data() + found.size());
    });
    if (made.size() != drawn.rows.size()) {
      fail(ErrorKind::schema, drawn.rows.size(), " windows were asked for, ", made.size(), " were placed");
    }
    return made;
  };
}

class Sampler;

// A batch that is being made: what it asks of Python, and where it goes.
class AskedBatch {
 public:
  // Of `rows` and `anchors`, functions or None, see Supplier. With `into` the rows go to its rows [first, first + n).
  AskedBatch(Sampler& sampler, size_t n, std::optional<double> beta, nb::object rows, nb::object anchors,
             nb::object into, size_t first);

  Supplier supplier(const Unlocked& unlocked) {
    Supplier made;
    if (!rows_.is_none()) {
      made.rows = rows_asked_of(rows_, unlocked, [this](size_t size) { make_room(size); });
    }
    if (!anchors_.is_none()) made.anchors = anchors_asked_of(anchors_, unlocked);
    return made;
  }
  BatchSampler::Room room() {
    return [this](size_t) -> const BatchArrays& { return made_ ? made_->arrays() : part_; };
  }
  void weigh(const BatchSampler::Result& result) {
    if (!result.done || !beta_) return;
    SampledBatch& batch = made_ ? *made_ : *into_;
    const size_t n = made_ ? made_->size() : n_;
    importance_weights(batch.arrays().probability.subspan(first_, n), result.count, *beta_, 0.0,
                       batch.weights(first_, n));
  }
  // (batch, cursor, rows redrawn, rows drawn from), None for the batch that was given.
  nb::object result(const BatchSampler::Result& result) {
    if (!made_) return nb::make_tuple(nb::none(), result.cursor, result.redrawn, result.count);
    return nb::make_tuple(std::move(*made_), result.cursor, result.redrawn, result.count);
  }
  size_t rows_of_batch() const { return into_ == nullptr ? 0 : into_->size(); }

 private:
  void make_room(size_t size);

  Sampler& sampler_;
  size_t n_, first_;
  std::optional<double> beta_;
  nb::object rows_, anchors_, held_;
  SampledBatch* into_ = nullptr;
  std::optional<SampledBatch> made_;
  BatchArrays part_;
};

// A store's sampler; the store outlives it.
class Sampler {
 public:
  Sampler(Store& store, const std::vector<uint32_t>& fields, const BatchSampler::Settings& settings)
      : store_(store), fields_(fields), window_(settings.window), sampler_(store, settings) {
    const TransitionView* view = sampler_.view();
    if (view != nullptr) view->check(store, fields);
    for (size_t i = 0; i < fields.size(); ++i) {
      store.check_column(fields[i]);
      row_bytes_.push_back(view != nullptr ? view->row_bytes(store.fields()[fields[i]], view->roles[i])
                                           : fetched_row_bytes(store, fields[i], window_.length, window_.steps_of(i)));
    }
    steps_ = view != nullptr ? view->frame_stack : window_.length != 0 ? window_.length : store.header().max_length;
  }

  // The n rows of a step, as (batch, cursor, rows redrawn, rows drawn from), or None where rows or the rate limiter
  // have to be waited for. Of `rows` and `anchors`, functions or None, see Supplier; the batch has as many rows as the
  // former returns. With `into` they fill its rows [first, first + n), and None stands for the batch.
  nb::object sample(size_t n, uint64_t step, const std::optional<LimitTuple>& limits, uint64_t cursor, bool admitted,
                    std::optional<double> beta, nb::object rows, nb::object anchors, nb::object into, size_t first) {
    AskedBatch asked(*this, n, beta, std::move(rows), std::move(anchors), std::move(into), first);
    BatchSampler::Result result;
    raising([&] {
      const Unlocked unlocked;
      result = sampler_.sample(asked.room(), n, step_of(step, limits, cursor, admitted), asked.supplier(unlocked));
      asked.weigh(result);
    });
    if (!result.done) return nb::none();
    return asked.result(result);
  }

  // A batch whose rows a transfer copies: one of Python's (python_copier.h), or of packed rows (packed_rows.h). Of a
  // sampler of no fields.
  struct Begun {
    Sampler* sampler;
    AskedBatch asked;
    nb::object transfer;
    std::optional<PythonCopier> called;
    Copier* copier = nullptr;
    std::optional<BatchSampler::Begun> making = {};
    bool finished = false;

    void work_in(PythonCopier::CallPython call) {
      if (called) called->work_in(std::move(call));
    }
  };
  // The same as `sample`, as far as the launch of copies; `store` is the number that the transfer knows this one by.
  std::unique_ptr<Begun> begin(size_t n, uint64_t step, const std::optional<LimitTuple>& limits, uint64_t cursor,
                               bool admitted, std::optional<double> beta, nb::object rows, nb::object anchors,
                               nb::object into, size_t first, nb::object transfer, uint32_t store) {
    AskedBatch asked(*this, n, beta, std::move(rows), std::move(anchors), std::move(into), first);
    std::unique_ptr<Begun> begun(new Begun{this, std::move(asked), std::move(transfer)});
    PackedTransfer* packed = nullptr;
    if (nb::try_cast(begun->transfer, packed) && packed != nullptr) {
      begun->copier = &packed->copier();
    } else {
      begun->called.emplace(begun->transfer, store, first, begun->asked.rows_of_batch());
      begun->copier = &*begun->called;
    }
    raising([&] {
      const Unlocked unlocked;
      begun->work_in(call_without(unlocked));
      begun->making = sampler_.begin(begun->asked.room(), n, step_of(step, limits, cursor, admitted),
                                     begun->asked.supplier(unlocked), *begun->copier);
    });
    return begun->making ? std::move(begun) : nullptr;
  }
  static nb::object finish(Begun& begun) {
    if (!begun.making || begun.finished) fail(ErrorKind::schema, "a batch is finished once");
    BatchSampler::Result result;
    raising([&] {
      const Unlocked unlocked;
      begun.work_in(call_without(unlocked));
      result = begun.sampler->sampler_.finish(*begun.making, begun.asked.room(), begun.asked.supplier(unlocked),
                                              *begun.copier);
      begun.asked.weigh(result);
    });
    begun.finished = true;
    return begun.asked.result(result);
  }
  // The batch is handed to nobody. Nothing where the store was closed.
  static void abandon(Begun& begun) {
    if (!begun.making) return;
    const Unlocked unlocked;
    try {
      begun.sampler->sampler_.abandon(*begun.making);
    } catch (const Error& error) {
      if (error.kind != ErrorKind::closed) throw;
    }
  }

  // Which steps count, as a StepTuple (selection.cc); None where rows are drawn and not steps.
  nb::object step_plan() const {
    const DrawPlan plan = sampler_.plan({}, 0, 1);
    if (!sampler_.draws_steps() && plan.max_steps == 0) return nb::none();
    return nb::make_tuple(plan.max_steps, plan.need, plan.skip, plan.stride, plan.needs.before, plan.needs.after,
                          plan.shift);
  }

 private:
  friend class AskedBatch;
  static BatchSampler::Step step_of(uint64_t step, const std::optional<LimitTuple>& limits, uint64_t cursor,
                                    bool admitted) {
    return {.step = step, .limits = limits_of(limits), .cursor = cursor, .admitted = admitted};
  }
  static PythonCopier::CallPython call_without(const Unlocked& unlocked) {
    return [&unlocked](const std::function<void()>& act) { call_python(unlocked, act); };
  }

  const std::shared_ptr<const BatchLayout>& layout_of(size_t n) {
    if (layout_ == nullptr || layout_->size() != n) {
      layout_ = entered(store_, [&] {
        const bool mask = !fields_.empty();  // else a copier's
        return std::make_shared<BatchLayout>(store_, n, fields_, window_, false, sampler_.view(), mask);
      });
    }
    return layout_;
  }

  // Rows [first, first + n) of a batch, by this store's field numbers: the stores of a mixture may number the same
  // fields differently.
  BatchArrays part_of(const SampledBatch& batch, size_t first, size_t n) const {
    if (!batch.layout().fits(window_.length, steps_, row_bytes_, sampler_.view())) {
      fail(ErrorKind::schema, "the batch was made for other fields, windows or transitions");
    }
    batch.check_part(first, n);
    if (n == 0) fail(ErrorKind::schema, "at least one row is drawn");
    BatchArrays arrays = batch.arrays();
    for (size_t i = 0; i < arrays.fields.size(); ++i) arrays.fields[i].field = fields_[i];
    for (size_t i = 0; i < arrays.transitions.size(); ++i) arrays.transitions[i].field = fields_[i];
    if (first == 0 && n == batch.size()) return arrays;
    return entered(store_, [&] { return arrays.part(store_, window_.length, sampler_.view(), first, n); });
  }

  Store& store_;
  std::vector<uint32_t> fields_;
  std::vector<uint64_t> row_bytes_;
  size_t steps_ = 0;
  WindowPlan window_;
  BatchSampler sampler_;
  std::shared_ptr<const BatchLayout> layout_;  // of the batches that were asked for last
};

AskedBatch::AskedBatch(Sampler& sampler, size_t n, std::optional<double> beta, nb::object rows, nb::object anchors,
                       nb::object into, size_t first)
    : sampler_(sampler),
      n_(n),
      first_(first),
      beta_(beta),
      rows_(std::move(rows)),
      anchors_(std::move(anchors)),
      held_(std::move(into)) {
  if (!held_.is_none()) {
    into_ = &nb::cast<SampledBatch&>(held_);
    part_ = sampler.part_of(*into_, first, n);
  } else {
    first_ = 0;
    if (rows_.is_none()) make_room(n);
  }
}

void AskedBatch::make_room(size_t size) {  // with the GIL
  if (into_ == nullptr) {
    made_.emplace(sampler_.layout_of(size));
  } else if (size != n_) {
    fail(ErrorKind::schema, n_, " rows were asked for, ", size, " were drawn");
  }
}

nb::object weights_of(const In<double>& probability, uint64_t count, double beta, double lowest) {
  std::vector<double> weights(probability.size());
  importance_weights(view(probability), count, beta, lowest, weights);
  return to_numpy(std::move(weights));
}

}  // namespace

void bind_batch(nb::module_& module) {
  nb::class_<TransitionView>(module, "TransitionView")
      .def(
          "__init__",
          [](TransitionView* self, uint32_t n_step, uint32_t frame_stack, std::vector<double> powers,
             const std::vector<uint8_t>& roles, const std::tuple<uint8_t, uint32_t, uint32_t, uint32_t>& goals) {
            const auto [strategy, k, achieved, desired] = goals;
            TransitionView view{n_step,
                                frame_stack,
                                std::move(powers),
                                {},
                                {static_cast<GoalStrategy>(strategy), k, achieved, desired}};
            for (uint8_t role : roles) view.roles.push_back(static_cast<TransitionRole>(role));
            new (self) TransitionView(std::move(view));
          },
          nb::arg("n_step"), nb::arg("frame_stack"), nb::arg("powers"), nb::arg("roles"),
          nb::arg("goals") = std::tuple<uint8_t, uint32_t, uint32_t, uint32_t>{});
  const auto made_by = nb::arg("from_dlpack").none() = nb::none();
  nb::class_<SampledBatch>(module, "SampledBatch")
      .def(
          "__init__",
          [](SampledBatch* self, const Store& store, size_t n, const std::vector<uint32_t>& fields, uint32_t window,
             bool shards, const TransitionView* view, bool mask, const std::optional<WindowTuple>& windows) {
            store.check_open();
            const WindowPlan plan = window_plan(window, windows);
            new (self) SampledBatch(std::make_shared<BatchLayout>(store, n, fields, plan, shards, view, mask));
          },
          nb::arg("store"), nb::arg("n"), nb::arg("fields"), nb::arg("window"), nb::arg("shards"),
          nb::arg("transitions").none() = nb::none(), nb::arg("mask") = true, nb::arg("windows").none() = nb::none())
      .def("__len__", &SampledBatch::size)
      .def("placed_in", &SampledBatch::placed_in, nb::arg("memory"))
      .def("places",
           [](const SampledBatch& b) {
             std::vector<size_t> fields;
             for (const BatchLayout::Field& field : b.layout().fields()) fields.push_back(field.at);
             nb::dict metadata;
             for (const auto& [name, at] : b.layout().metadata()) metadata[name] = at;
             return nb::make_tuple(fields, metadata, b.layout().buffer_bytes());
           })
      .def_prop_ro("weighed", &SampledBatch::weighed)
      .def("forget_weights", &SampledBatch::forget_weights)
      .def_prop_ro("nbytes", &SampledBatch::nbytes)
      .def("field", &SampledBatch::field, nb::arg("number"), made_by)
      .def("rows", [](const SampledBatch& b) { return b.array(b.arrays().rows); })
      .def("generations", [](const SampledBatch& b) { return b.array(b.arrays().generations); })
      .def("steps", [](const SampledBatch& b) { return b.array(b.arrays().steps); })
      .def("torn", [](const SampledBatch& b) { return b.array(b.arrays().torn); })
      .def("buffer", &SampledBatch::buffer)
      .def(
          "probability", [](const SampledBatch& b, nb::handle by) { return b.array(b.arrays().probability, by); },
          made_by)
      .def("mask", &SampledBatch::mask, made_by)
      .def(
          "start", [](const SampledBatch& b, nb::handle by) { return b.array(b.arrays().starts, by); }, made_by)
      .def(
          "length", [](const SampledBatch& b, nb::handle by) { return b.array(b.arrays().lengths, by); }, made_by)
      .def(
          "version", [](const SampledBatch& b, nb::handle by) { return b.array(b.arrays().versions, by); }, made_by)
      .def("importance_weights", &SampledBatch::importance_array, made_by)
      .def("shard", &SampledBatch::shard_array)
      .def("set_shard", &SampledBatch::set_shard)
      .def("set_importance", &SampledBatch::set_importance);
  nb::class_<Sampler>(module, "BatchSampler")
      .def(
          "__init__",
          [](Sampler* self, Store& store, const std::vector<uint32_t>& fields, uint32_t window, bool pad_left,
             unsigned threads, uint64_t seed, const DrawsTuple& draws, uint64_t min_rows, uint64_t min_steps,
             const TransitionView* view, const std::optional<WindowTuple>& windows, size_t atom, bool takes,
             bool strict) {
            const auto transitions = view != nullptr ? std::optional(*view) : std::nullopt;
            BatchSampler::Settings settings =
                sampler_settings(draws, window_plan(window, windows), pad_left, threads, seed, transitions);
            settings.min_rows = min_rows, settings.min_steps = min_steps;
            settings.atom = atom, settings.takes = takes, settings.strict = strict;
            new (self) Sampler(store, fields, settings);
          },
          nb::keep_alive<1, 2>(), nb::arg("store"), nb::arg("fields"), nb::arg("window"), nb::arg("pad_left"),
          nb::arg("threads"), nb::arg("seed"), nb::arg("draws"), nb::arg("min_rows"), nb::arg("min_steps"),
          nb::arg("transitions").none(), nb::arg("windows").none(), nb::arg("atom"), nb::arg("takes"),
          nb::arg("strict"))
      .def("sample", &Sampler::sample, nb::arg("n"), nb::arg("step"), nb::arg("limits").none(), nb::arg("cursor"),
           nb::arg("admitted"), nb::arg("beta").none(), nb::arg("rows").none(), nb::arg("anchors").none(),
           nb::arg("into").none() = nb::none(), nb::arg("first") = 0)
      .def("begin", &Sampler::begin, nb::keep_alive<0, 1>(), nb::arg("n"), nb::arg("step"), nb::arg("limits").none(),
           nb::arg("cursor"), nb::arg("admitted"), nb::arg("beta").none(), nb::arg("rows").none(),
           nb::arg("anchors").none(), nb::arg("into").none(), nb::arg("first"), nb::arg("transfer"), nb::arg("store"))
      .def_prop_ro("step_plan", &Sampler::step_plan);
  nb::class_<Sampler::Begun>(module, "BegunBatch")
      .def("finish", &Sampler::finish)
      .def("abandon", &Sampler::abandon)
      .def_prop_ro("used_up",
                   [](const Sampler::Begun& begun) { return begun.making ? begun.making->result().used_up : 0; });
  module.def("importance_weights", &weights_of);
}

}  // namespace geartrain
