#include "fetch/batch_sampler.h"

#include <time.h>

#include <algorithm>
#include <numeric>

#include "base/deadline.h"
#include "base/errors.h"
#include "fetch/episodes.h"
#include "fetch/redraw.h"

namespace geartrain {
namespace {

// The draws of a batch that are to be made again, and the rows that stay.
struct Lost {
  std::vector<uint32_t> numbers, kept;

  explicit Lost(const BatchArrays& batch) {
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      if (batch.torn[i] != 0) {
        numbers.push_back(static_cast<uint32_t>(i));
      } else {
        kept.push_back(batch.rows[i]);
      }
    }
  }
};

// With each row that was torn those that stand and fall with it.
void lose_atoms(std::span<uint8_t> torn, size_t atom) {
  if (atom <= 1) return;
  for (size_t first = 0; first < torn.size(); first += atom) {
    const std::span<uint8_t> each = torn.subspan(first, std::min(atom, torn.size() - first));
    if (std::ranges::find(each, uint8_t{1}) != each.end()) std::ranges::fill(each, uint8_t{1});
  }
}

template <typename T>
void scatter(std::span<const T> from, std::span<const uint32_t> numbers, std::span<T> to) {
  for (size_t i = 0; i < numbers.size(); ++i) to[numbers[i]] = from[i];
}

}  // namespace

BatchArrays BatchArrays::part(const Store& store, uint32_t window, const TransitionView* view, size_t first,
                              size_t n) const {
  BatchArrays out;
  for (const FetchField& field : fields) {
    out.fields.push_back({field.field, field.out + first * fetched_row_bytes(store, field.field, window)});
  }
  for (size_t i = 0; i < transitions.size(); ++i) {
    TransitionField field = transitions[i];
    const uint64_t row_bytes = view->row_bytes(store.fields()[field.field], view->roles[i]);
    if (field.out != nullptr) field.out += first * row_bytes;
    if (field.next != nullptr) field.next += first * row_bytes;
    out.transitions.push_back(field);
  }
  if (view != nullptr) {
    out.discount = discount.subspan(first, n);
    out.terminated = terminated.subspan(first, n);
    out.truncated = truncated.subspan(first, n);
    if (!relabelled.empty()) out.relabelled = relabelled.subspan(first, n);
  }
  const size_t steps = view != nullptr ? view->frame_stack : window != 0 ? window : store.header().max_length;
  out.rows = rows.subspan(first, n);
  out.generations = generations.subspan(first, n);
  out.steps = this->steps.subspan(first, n);
  out.probability = probability.subspan(first, n);
  out.torn = torn.subspan(first, n);
  out.mask = mask.subspan(first * steps, n * steps);
  out.starts = starts.subspan(first, n);
  out.lengths = lengths.subspan(first, n);
  out.versions = versions.subspan(first, n);
  return out;
}

BatchSampler::BatchSampler(Store& store, const Settings& settings)
    : store_(store), settings_(settings), from_(population_of(store, false)) {
  check(settings.window);
  if (from_.marks && settings.over_steps && settings.window.stride != 1) {
    fail(ErrorKind::schema, "rows hold several episodes: windows of drawn steps have a stride of 1");
  }
  if (!store.per_step() || settings.form != Form::random || settings.by != By::priority) return;
  if (!settings.replacement || (settings.window.length == 0 && !settings.transitions)) {
    fail(ErrorKind::schema, "the store has priorities of steps: draws by priority need replacement, and a window");
  }
  from_ = population_of(store, true);
}

BatchSampler::Result BatchSampler::sample(const Room& room, size_t n, const Step& step,
                                          const Supplier& supplier) const {
  if (supplier.rows && draws_steps()) {
    fail(ErrorKind::schema, "the store has priorities of steps, and rows were drawn by code that knows none");
  }
  Store::Call call(store_);
  store_.repair_dead_updates();
  if (store_.header().max_age_ns != 0 && !store_.read_only()) store_.expire();
  if (store_.committed_count() < settings_.min_rows) {
    if (!step.admitted) return {};
    fail(ErrorKind::not_enough, settings_.min_rows, " selectable rows are asked for, the store has ",
         store_.committed_count());
  }
  if (step.admitted) return draw_and_gather(room, n, step, supplier, call);
  if (!store_.admit_samples(n, 0.0)) return {};
  try {
    return draw_and_gather(room, n, step, supplier, call);
  } catch (...) {
    if (call.within() && !store_.read_only())
      give_back(store_.control().limiter, 0, n);  // else it was closed while the supplier was asked
    throw;
  }
}

BatchSampler::Result BatchSampler::draw_and_gather(const Room& room, size_t n, const Step& step,
                                                   const Supplier& supplier, Store::Call& call) const {
  Result result{.done = true, .count = store_.committed_count(), .cursor = step.cursor, .redrawn = 0};
  std::vector<uint32_t> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  const BatchArrays* out = nullptr;
  Supplier::Rows drawn;  // of the round
  DrawnRows from;
  const auto steps_of = [&](std::span<const uint32_t> steps) {
    return supplier.rows || draws_steps() ? steps : std::span<const uint32_t>{};
  };
  // The supplier's rows, which are the whole batch, into the batch itself.
  const auto begin_with = [&](Supplier::Rows rows) {
    drawn = std::move(rows);
    numbers.resize(drawn.rows.size());
    std::iota(numbers.begin(), numbers.end(), 0);
    out = &room(numbers.size());
    std::ranges::copy(drawn.rows, out->rows.begin());
    std::ranges::copy(drawn.generations, out->generations.begin());
    std::ranges::copy(drawn.probability, out->probability.begin());
    from = {numbers, out->rows, out->generations, out->probability, drawn.steps};
  };
  if (supplier.rows) {
    begin_with(call.paused([&] { return supplier.rows(0, numbers, {}); }));
  } else {
    out = &room(n);
    result.cursor = draw(step, n, 0, numbers, {}, {out->rows, out->generations, out->probability, out->steps});
    from = {numbers, out->rows, out->generations, out->probability, steps_of(out->steps)};
  }
  std::vector<uint32_t> anchors;
  const auto copy = [&](const std::vector<uint32_t>&, uint32_t round) {
    if (supplier.anchors) {
      anchors = call.paused([&] { return supplier.anchors(round, from); });
      from.steps = anchors;
    }
    if (gather(*out, from, step.step, round) == 0) return std::vector<uint32_t>{};
    lose_atoms(out->torn, settings_.atom);
    return Lost(*out).numbers;
  };
  const bool needs_kept = settings_.form == Form::ordered || !settings_.replacement;
  const auto again = [&](const std::vector<uint32_t>& lost, uint32_t round) {
    const size_t count = lost.size();
    if (supplier.rows) {
      const std::vector<uint32_t> kept = Lost(*out).kept;
      Supplier::Rows rows = call.paused([&] { return supplier.rows(round, lost, kept); });
      if (rows.anew) {
        begin_with(std::move(rows));
        return false;
      }
      drawn = std::move(rows);
      numbers = lost;
    } else {
      drawn.rows.resize(count), drawn.generations.resize(count);
      drawn.probability.resize(count), drawn.steps.resize(count);
      numbers = lost;
      const std::vector<uint32_t> kept = needs_kept ? Lost(*out).kept : std::vector<uint32_t>{};
      Step next = step;
      next.cursor = result.cursor;
      result.cursor = draw(next, out->rows.size(), round, numbers, kept,
                           {drawn.rows, drawn.generations, drawn.probability, drawn.steps});
    }
    from = {numbers, drawn.rows, drawn.generations, drawn.probability, steps_of(drawn.steps)};
    return true;
  };
  Redrawn made;
  do {
    made = copy_until_whole(store_.header().capacity, {}, made.round, copy, again);  // `from` says which are pending
    result.redrawn += made.rows;
    ++made.round;
  } while (!made.whole);
  return result;
}

DrawPlan BatchSampler::plan(const Step& step, uint32_t round, size_t rows) const {
  DrawPlan plan{{settings_.seed, step.step, kRowStream}, settings_.by, round, 0, step.limits};
  if (settings_.form != Form::random || !settings_.replacement) return plan;
  if (settings_.stratified) plan.strata = static_cast<uint32_t>(rows);
  if (settings_.over_steps) plan.max_steps = store_.header().max_length;
  if (settings_.over_steps || from_.row_steps != 0) {
    // The last step has none after it; a whole window needs as many as it is long.
    const uint32_t need = settings_.transitions ? 1 : settings_.window.need();
    const bool before = from_.row_steps != 0 && !settings_.transitions && !settings_.window.from_first;
    (before ? plan.skip : plan.need) = need;
    if (settings_.over_steps && !settings_.transitions) plan.stride = settings_.window.stride;
    if (from_.repeats) plan.needs = settings_.transitions ? settings_.transitions->needs() : settings_.window.needs();
    const bool numbered = settings_.over_steps && !settings_.transitions;
    if (plan.needs.after != 0 && numbered) plan.shift = settings_.window.first_anchor();
  }
  return plan;
}

uint64_t BatchSampler::draw(const Step& step, size_t n, uint32_t round, std::span<const uint32_t> numbers,
                            std::span<const uint32_t> kept, const Draws& draws) const {
  if (settings_.form == Form::ordered) {
    std::vector<uint64_t> sequences(numbers.size());
    const uint64_t after = settings_.cursor ? step.cursor : 0;
    const size_t found = first_rows(from_, settings_.order, after, step.limits, kept, draws, sequences);
    if (found < numbers.size()) {
      fail(ErrorKind::not_enough, n, " rows were asked for, ", found + kept.size(), " can be chosen");
    }
    // The sequence that a row was chosen by: by now another may stand in its place.
    return settings_.cursor ? std::max(step.cursor, *std::max_element(sequences.begin(), sequences.end())) : 0;
  }
  DrawPlan plan = this->plan(step, round, n);
  if (!settings_.replacement) {
    plan.key.stream = kDistinctStream;
    draw_distinct(from_, plan, kept, draws);
    return 0;
  }
  const auto make = [&] { return geartrain::draw(from_, plan, numbers, draws); };
  uint64_t failed = make();  // sums at odds with their leaves: somebody died in the middle of an update
  if (failed != 0 && !store_.read_only()) {
    store_.reap();
    failed = make();
    if (failed != 0) {
      store_.rebuild();  // or somebody living is in the middle of one: this waits for them
      failed = make();
    }
  }
  if (store_.read_only()) {  // which repairs nothing, and can only wait for the living
    for (const Deadline deadline = Deadline::after(store_.lock_timeout_s()); failed != 0 && !deadline.passed();) {
      store_.check_open();
      const struct timespec pause{0, 100'000};
      ::nanosleep(&pause, nullptr);
      failed = make();
    }
    if (failed != 0) {
      fail(ErrorKind::corrupt, failed,
           " draws found no row: a process died while it changed priorities, and mode='r' "
           "repairs nothing. Open the store for writing, which does");
    }
  }
  if (plan.finds_steps(from_) && !settings_.transitions && !settings_.window.from_first) {
    for (uint32_t& each : draws.steps.first(numbers.size())) each += plan.need;  // the last step of what was drawn
  }
  if (failed != 0) fail(ErrorKind::corrupt, failed, " draws found no row; store.audit() tells what is wrong");
  return 0;
}

uint64_t BatchSampler::gather_transitions(const BatchArrays& out, const DrawnRows& drawn, uint64_t step,
                                          uint32_t round) const {
  const size_t n = drawn.rows.size();
  std::vector<uint8_t> taken(n);
  store_.count_samples(drawn.rows, drawn.generations, taken);
  TransitionRequest request;
  request.rows = drawn.rows;
  request.generations = drawn.generations;
  request.places = drawn.numbers;
  request.steps = drawn.steps;
  request.key = {settings_.seed, step, kWindowStream};
  request.round = round;
  request.threads = settings_.threads;
  request.fields = out.transitions;
  request.discount = out.discount;
  request.terminated = out.terminated;
  request.truncated = out.truncated;
  request.relabelled = out.relabelled;
  request.torn = out.torn;
  request.mask = out.mask;
  request.starts = out.starts;
  request.lengths = out.lengths;
  request.versions = out.versions;
  geartrain::gather_transitions(store_, *settings_.transitions, request);
  if (store_.header().max_times_sampled != 0) {
    store_.release_exhausted(drawn.rows, drawn.generations);
    for (size_t i = 0; i < n; ++i) {
      if (taken[i] == 0) out.torn[drawn.numbers[i]] = 1;  // somebody else drew the row's last allowed sample first
    }
  }
  if (drawn.rows.data() != out.rows.data()) {
    scatter<uint32_t>(drawn.rows, drawn.numbers, out.rows);
    scatter<uint32_t>(drawn.generations, drawn.numbers, out.generations);
    scatter<double>(drawn.probability, drawn.numbers, out.probability);
  }
  uint64_t torn = 0;
  for (uint32_t number : drawn.numbers) {
    out.steps[number] = static_cast<uint32_t>(out.starts[number]);
    torn += out.torn[number];
  }
  return torn;
}

uint64_t BatchSampler::gather(const BatchArrays& out, const DrawnRows& drawn, uint64_t step, uint32_t round) const {
  if (settings_.transitions) return gather_transitions(out, drawn, step, round);
  const size_t n = drawn.rows.size();
  const bool whole = drawn.rows.data() == out.rows.data();  // of all the batch's rows, whose arrays lie in `out`
  std::vector<uint8_t> taken(n);
  store_.count_samples(drawn.rows, drawn.generations, taken);
  std::vector<int32_t> ends;
  if (settings_.window.length != 0) {
    ends.resize(n);
    if (drawn.steps.empty()) {
      place_windows(from_, drawn.rows, settings_.window, {settings_.seed, step, kWindowStream}, round, drawn.numbers,
                    ends);
    }
    for (size_t i = 0; i < drawn.steps.size(); ++i) {
      const uint32_t length = store_.status()[drawn.rows[i]].length.load(std::memory_order_relaxed);
      // A length only grows, so that the step is there unless the row is another by now, and torn.
      ends[i] = static_cast<int32_t>(std::min({drawn.steps[i], length, store_.header().max_length}));
    }
  }
  FetchRequest request;
  request.rows = drawn.rows;
  request.generations = drawn.generations;
  request.fields = out.fields;
  request.windows_of(settings_.window, settings_.pad_left);
  request.ends = ends;
  request.within_episodes = true;
  request.threads = settings_.threads;
  const size_t steps = out.mask.size() / std::max<size_t>(1, out.rows.size());
  RowMetadata apart(whole ? 0 : n, steps);
  if (whole) {
    request.torn = out.torn;
    request.mask = out.mask;
    request.starts = out.starts;
    request.lengths = out.lengths;
    request.versions = out.versions;
  } else {
    request.places = drawn.numbers;
    apart.take(&request);
  }
  std::vector<uint32_t> placed(ends.begin(), ends.end());
  fetch(store_, request);
  if (store_.header().max_times_sampled != 0) {
    store_.release_exhausted(drawn.rows, drawn.generations);
    for (size_t i = 0; i < n; ++i) {
      if (taken[i] == 0) request.torn[i] = 1;  // somebody else drew the row's last allowed sample first
    }
  }
  if (placed.empty()) placed.assign(n, 0);
  if (request.whole_episodes) placed.assign(request.starts.begin(), request.starts.end());
  if (whole) {
    std::copy(placed.begin(), placed.end(), out.steps.begin());
  } else {
    scatter<uint32_t>(placed, drawn.numbers, out.steps);
    scatter<uint32_t>(drawn.rows, drawn.numbers, out.rows);
    scatter<uint32_t>(drawn.generations, drawn.numbers, out.generations);
    scatter<double>(drawn.probability, drawn.numbers, out.probability);
    scatter<uint8_t>(apart.torn, drawn.numbers, out.torn);
    scatter<int32_t>(apart.starts, drawn.numbers, out.starts);
    scatter<int32_t>(apart.lengths, drawn.numbers, out.lengths);
    scatter<int64_t>(apart.versions, drawn.numbers, out.versions);
    for (size_t i = 0; i < n; ++i) {
      std::copy_n(apart.mask.begin() + static_cast<ptrdiff_t>(i * steps), steps,
                  out.mask.begin() + static_cast<ptrdiff_t>(drawn.numbers[i] * steps));
    }
  }
  return static_cast<uint64_t>(std::count(request.torn.begin(), request.torn.end(), uint8_t{1}));
}

}  // namespace geartrain
