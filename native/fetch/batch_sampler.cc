#include "fetch/batch_sampler.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

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
    const uint64_t row_bytes = fetched_row_bytes(store, field.field, window, field.steps);
    out.fields.push_back({field.field, field.out + first * row_bytes, field.steps});
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
  if (!mask.empty()) out.mask = mask.subspan(first * steps, n * steps);
  out.starts = starts.subspan(first, n);
  out.lengths = lengths.subspan(first, n);
  out.versions = versions.subspan(first, n);
  return out;
}

BatchSampler::BatchSampler(Store& store, const Settings& settings)
    : store_(store), settings_(settings), from_(population_of(store, false)) {
  check(settings.window);
  if (settings.strict && (store.tasks() == nullptr || settings.form != Form::ordered)) {
    fail(ErrorKind::schema, "rows are drawn in the strict order of inserts from stores with tasks alone");
  }
  if (from_.marks && settings.over_steps && settings.window.stride != 1) {
    fail(ErrorKind::schema, "rows hold several episodes: windows of drawn steps have a stride of 1");
  }
  if (!store.per_step() || settings.form != Form::random || settings.by != By::priority) return;
  if (!settings.replacement || (settings.window.length == 0 && !settings.transitions)) {
    fail(ErrorKind::schema, "the store has priorities of steps: draws by priority need replacement, and a window");
  }
  from_ = population_of(store, true);
}

// --- a batch -------------------------------------------------------------------------------------------------------

// A batch that is being made, by one call of the store or by several. What these have in common is here; what is asked
// for meanwhile is of each call.
class BatchSampler::Begun::Making {
 public:
  struct Asks {
    const Room& room;
    const Supplier& supplier;
    Copier* copier;  // null: the CPU copies
    Store::Call& call;
  };

  Making(const BatchSampler& of, size_t n, const Step& step)
      : of_(of), store_(of.store_), step_(step), numbers_(n), result_{.done = true, .cursor = step.cursor} {}
  Making(const Making&) = delete;

  void draw(const Asks& asks) {
    result_.count = store_.committed_count();
    const size_t n = numbers_.size();
    std::iota(numbers_.begin(), numbers_.end(), 0);
    if (asks.supplier.rows) {
      begin_with(asks, asks.call.paused([&] { return asks.supplier.rows(0, numbers_, {}); }));
      return;
    }
    out_ = &asks.room(n);
    from_ = {numbers_, out_->rows, out_->generations, out_->probability, steps_of(asks, out_->steps)};
    if (asks.copier != nullptr && asks.call.paused([&] { return asks.copier->draws(n); })) {
      drawn_by_copier_ = true;
      return;
    }
    result_.cursor =
        of_.draw(step_, n, 0, numbers_, {}, {out_->rows, out_->generations, out_->probability, out_->steps});
  }

  // Has the rows that were drawn last copied.
  void launch(const Asks& asks, uint32_t round) {
    if (asks.supplier.anchors) {
      anchors_ = asks.call.paused([&] { return asks.supplier.anchors(round, from_); });
      from_.steps = anchors_;
    }
    RowsToCopy rows{0, {}, {}, {}, numbers_, numbers_, round, out_->rows.size()};
    std::vector<uint32_t> all;
    std::vector<int32_t> ends;
    if (!drawn_by_copier_) {
      placed_ = of_.place(from_, step_.step, round);
      hold();
      put_rows();
      rows.rows = from_.rows, rows.generations = from_.generations, rows.ends = placed_.ends;
      if (asks.copier->copies_all() && numbers_.size() != out_->rows.size()) {
        all.resize(out_->rows.size());
        std::iota(all.begin(), all.end(), 0);
        if (!placed_.ends.empty()) ends.assign(out_->steps.begin(), out_->steps.end());
        rows = {0, out_->rows, out_->generations, ends, all, all, round, all.size()};
      }
    }
    launched_ = true;
    asks.call.paused([&] {
      asks.copier->launch(rows);
      return true;
    });
  }

  // Waits for them; the draws that are to be made again.
  std::vector<uint32_t> resolve(const Asks& asks, uint32_t round) {
    const CopiedRows copied = asks.call.paused([&] { return asks.copier->resolve(); });
    if (drawn_by_copier_) {
      std::ranges::copy(copied.rows, out_->rows.begin());
      std::ranges::copy(copied.generations, out_->generations.begin());
      std::ranges::copy(copied.probability, out_->probability.begin());
      placed_ = of_.place(from_, step_.step, round);
      hold();
      put_rows();
      drawn_by_copier_ = false;
    }
    std::ranges::fill(out_->torn, uint8_t{0});
    const bool all = copied.torn.size() != numbers_.size();
    for (size_t i = 0; i < copied.torn.size(); ++i) {
      const size_t at = all ? i : numbers_[i];
      out_->torn[at] = copied.torn[i];
      out_->starts[at] = copied.starts[i];
      out_->lengths[at] = copied.lengths[i];
      out_->versions[at] = copied.versions[i];
      if (of_.settings_.window.of_episodes()) out_->steps[at] = static_cast<uint32_t>(copied.starts[i]);
    }
    std::vector<uint8_t> torn;
    for (const uint32_t number : numbers_) torn.push_back(out_->torn[number]);
    of_.mark_refused(placed_, torn);
    launched_ = false;
    for (size_t i = 0; i < torn.size(); ++i) out_->torn[numbers_[i]] = torn[i];
    return lost();
  }

  void until_whole(const Asks& asks) {
    const auto copy = [&](const std::vector<uint32_t>&, uint32_t round) { return copied(asks, round); };
    const auto again = [&](const std::vector<uint32_t>& lost, uint32_t round) { return draw_again(asks, lost, round); };
    Redrawn made;
    do {
      made = copy_until_whole(store_.header().capacity, {}, made.round, copy, again);  // `from_` says which are pending
      result_.redrawn += made.rows;
      ++made.round;
    } while (!made.whole);
    release();
  }

  // Releases rows on their last sample, which a copier may have copied more than once.
  void release() {
    if (held_.empty()) return;
    store_.release_exhausted(held_, held_generations_);
    held_.clear(), held_generations_.clear();
  }

  // Of a batch that nobody gets, as well.
  void give_up() {
    release();
    if (store_.tasks() != nullptr) store_.tasks()->finished(result_.used_up);
    result_.used_up = 0;
  }

  const Result& result() const { return result_; }

 private:
  std::vector<uint32_t> copied(const Asks& asks, uint32_t round) {
    if (asks.copier != nullptr) {
      if (!launched_) launch(asks, round);
      return resolve(asks, round);
    }
    if (asks.supplier.anchors) {
      anchors_ = asks.call.paused([&] { return asks.supplier.anchors(round, from_); });
      from_.steps = anchors_;
    }
    if (of_.gather(*out_, from_, step_.step, round) == 0) return {};
    return lost();
  }

  bool draw_again(const Asks& asks, const std::vector<uint32_t>& lost, uint32_t round) {
    const size_t count = lost.size();
    if (asks.supplier.rows) {
      const std::vector<uint32_t> kept = Lost(*out_).kept;
      Supplier::Rows rows = asks.call.paused([&] { return asks.supplier.rows(round, lost, kept); });
      if (rows.anew) {
        begin_with(asks, std::move(rows));
        return false;
      }
      drawn_ = std::move(rows);
      numbers_ = lost;
    } else {
      drawn_.rows.resize(count), drawn_.generations.resize(count);
      drawn_.probability.resize(count), drawn_.steps.resize(count);
      numbers_ = lost;
      const bool needs_kept = of_.settings_.form == Form::ordered || !of_.settings_.replacement;
      const std::vector<uint32_t> kept = needs_kept ? Lost(*out_).kept : std::vector<uint32_t>{};
      Step next = step_;
      next.cursor = result_.cursor;
      result_.cursor = of_.draw(next, out_->rows.size(), round, numbers_, kept,
                                {drawn_.rows, drawn_.generations, drawn_.probability, drawn_.steps});
    }
    from_ = {numbers_, drawn_.rows, drawn_.generations, drawn_.probability, steps_of(asks, drawn_.steps)};
    return true;
  }

  // The supplier's rows, which are the whole batch, into the batch itself.
  void begin_with(const Asks& asks, Supplier::Rows rows) {
    drawn_ = std::move(rows);
    numbers_.resize(drawn_.rows.size());
    std::iota(numbers_.begin(), numbers_.end(), 0);
    out_ = &asks.room(numbers_.size());
    std::ranges::copy(drawn_.rows, out_->rows.begin());
    std::ranges::copy(drawn_.generations, out_->generations.begin());
    std::ranges::copy(drawn_.probability, out_->probability.begin());
    from_ = {numbers_, out_->rows, out_->generations, out_->probability, drawn_.steps};
  }

  std::span<const uint32_t> steps_of(const Asks& asks, std::span<const uint32_t> steps) const {
    return asks.supplier.rows || of_.draws_steps() ? steps : std::span<const uint32_t>{};
  }

  // The rows that were drawn last to their places, with the steps that their windows are told by.
  void put_rows() {
    if (from_.rows.data() != out_->rows.data()) {
      scatter<uint32_t>(from_.rows, numbers_, out_->rows);
      scatter<uint32_t>(from_.generations, numbers_, out_->generations);
      scatter<double>(from_.probability, numbers_, out_->probability);
    }
    for (size_t i = 0; i < numbers_.size(); ++i) {
      out_->steps[numbers_[i]] = placed_.ends.empty() ? 0 : static_cast<uint32_t>(placed_.ends[i]);
    }
  }

  void hold() {
    if (store_.header().max_times_sampled == 0) return;
    result_.used_up += placed_.used_up;
    if (of_.settings_.takes) return;
    held_.insert(held_.end(), from_.rows.begin(), from_.rows.end());
    held_generations_.insert(held_generations_.end(), from_.generations.begin(), from_.generations.end());
  }

  std::vector<uint32_t> lost() {
    lose_atoms(out_->torn, of_.settings_.atom);
    return Lost(*out_).numbers;
  }

  const BatchSampler& of_;
  Store& store_;
  Step step_;
  std::vector<uint32_t> numbers_, anchors_;
  std::vector<uint32_t> held_, held_generations_;  // samples of these were counted for a copier
  const BatchArrays* out_ = nullptr;
  Supplier::Rows drawn_;  // of the round
  DrawnRows from_;
  Placed placed_;
  bool launched_ = false, drawn_by_copier_ = false;
  Result result_;
};

BatchSampler::Begun::Begun(std::unique_ptr<Making> making) : making_(std::move(making)) {}
BatchSampler::Begun::Begun(Begun&&) noexcept = default;
BatchSampler::Begun& BatchSampler::Begun::operator=(Begun&&) noexcept = default;
BatchSampler::Begun::~Begun() = default;
const BatchSampler::Result& BatchSampler::Begun::result() const {
  return making_->result();
}

template <typename Make>
bool BatchSampler::admitted(size_t n, const Step& step, const Supplier& supplier, Make&& make) const {
  if (supplier.rows && draws_steps()) {
    fail(ErrorKind::schema, "the store has priorities of steps, and rows were drawn by code that knows none");
  }
  Store::Call call(store_);
  store_.repair_dead_updates();
  if (store_.header().max_age_ns != 0 && !store_.read_only()) store_.expire();
  const uint64_t there = settings_.strict && store_.committed_count() >= settings_.min_rows
                             ? store_.tasks()->complete(settings_.min_rows).rows
                             : store_.committed_count();
  if (there < settings_.min_rows) {
    if (!step.admitted) return false;
    fail(ErrorKind::not_enough, settings_.min_rows, " selectable rows are asked for, the store has ", there);
  }
  if (settings_.min_steps != 0 && store_.step_count_up_to(settings_.min_steps) < settings_.min_steps) {
    if (!step.admitted) return false;
    fail(ErrorKind::not_enough, settings_.min_steps, " steps are asked for, the store has ", store_.step_count());
  }
  if (!step.admitted && !store_.admit_samples(n, 0.0)) return false;
  try {
    make(call);
  } catch (...) {
    // Else it was closed while the supplier was asked.
    if (!step.admitted && call.within() && !store_.read_only()) give_back(store_.control().limiter, 0, n);
    throw;
  }
  return true;
}

BatchSampler::Result BatchSampler::sample(const Room& room, size_t n, const Step& step,
                                          const Supplier& supplier) const {
  Result result;
  admitted(n, step, supplier, [&](Store::Call& call) {
    Begun::Making making(*this, n, step);
    const Begun::Making::Asks asks{room, supplier, nullptr, call};
    making.draw(asks);
    making.until_whole(asks);
    result = making.result();
  });
  return result;
}

std::optional<BatchSampler::Begun> BatchSampler::begin(const Room& room, size_t n, const Step& step,
                                                       const Supplier& supplier, Copier& copier) const {
  if (settings_.transitions) fail(ErrorKind::schema, "transitions are copied by the CPU");
  std::optional<Begun> begun;
  admitted(n, step, supplier, [&](Store::Call& call) {
    auto making = std::make_unique<Begun::Making>(*this, n, step);
    const Begun::Making::Asks asks{room, supplier, &copier, call};
    try {
      making->draw(asks);
      making->launch(asks, 0);
    } catch (...) {
      if (call.within()) making->give_up();
      throw;
    }
    begun = Begun(std::move(making));
  });
  return begun;
}

BatchSampler::Result BatchSampler::finish(Begun& begun, const Room& room, const Supplier& supplier,
                                          Copier& copier) const {
  Store::Call call(store_);
  const Begun::Making::Asks asks{room, supplier, &copier, call};
  try {
    begun.making_->until_whole(asks);
  } catch (...) {
    if (call.within()) begun.making_->give_up();
    throw;
  }
  return begun.making_->result();
}

void BatchSampler::abandon(Begun& begun) const {
  const Store::Call call(store_);
  begun.making_->give_up();
}

DrawPlan BatchSampler::plan(const Step& step, uint32_t round, size_t rows) const {
  DrawPlan plan{{settings_.seed, step.step, kRowStream}, settings_.by, round, 0, step.limits};
  if (settings_.form != Form::random || !settings_.replacement) return plan;
  if (settings_.stratified) plan.strata = static_cast<uint32_t>(rows);
  if (settings_.over_steps) plan.max_steps = store_.header().max_length;
  if (settings_.over_steps || from_.row_steps != 0) {
    // The last step has none after it; a whole window needs as many as it is long. Over steps the first step of what is
    // needed is drawn, else the anchor.
    if (settings_.transitions) {
      plan.need = 1;
    } else if (from_.row_steps != 0) {
      plan.skip = settings_.window.need_before();
      plan.need = settings_.window.need_after();
    } else {
      plan.need = settings_.window.need();
    }
    if (settings_.over_steps && !settings_.transitions) plan.stride = settings_.window.stride;
    if (from_.repeats) plan.needs = settings_.transitions ? settings_.transitions->needs() : settings_.window.needs();
    const bool numbered = settings_.over_steps && !settings_.transitions;
    if (plan.needs.after != 0 && numbered) plan.shift = settings_.window.need_before();
  }
  return plan;
}

uint64_t BatchSampler::draw(const Step& step, size_t n, uint32_t round, std::span<const uint32_t> numbers,
                            std::span<const uint32_t> kept, const Draws& draws) const {
  if (settings_.form == Form::ordered) {
    std::vector<uint64_t> sequences(numbers.size());
    const uint64_t after = settings_.cursor ? step.cursor : 0;
    // Looked at first: it only grows, so that what is found before it has no older row under way.
    const uint64_t before = settings_.strict ? store_.tasks()->complete(UINT64_MAX).before : UINT64_MAX;
    const size_t found = first_rows(from_, settings_.order, after, step.limits, kept, draws, sequences);
    if (found < numbers.size()) {
      fail(ErrorKind::not_enough, n, " rows were asked for, ", found + kept.size(), " can be chosen");
    }
    if (settings_.strict && *std::max_element(sequences.begin(), sequences.end()) >= before) {
      fail(ErrorKind::not_enough, n, " rows were asked for, and an older one is under way");
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
  if (plan.finds_steps(from_) && !settings_.transitions) {
    for (uint32_t& each : draws.steps.first(numbers.size())) each += settings_.window.need_before();
  }
  if (failed != 0) fail(ErrorKind::corrupt, failed, " draws found no row; store.audit() tells what is wrong");
  return 0;
}

uint64_t BatchSampler::gather_transitions(const BatchArrays& out, const DrawnRows& drawn, uint64_t step,
                                          uint32_t round) const {
  Placed placed;
  placed.taken.resize(drawn.rows.size());
  store_.count_samples(drawn.rows, drawn.generations, placed.taken);
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
    std::vector<uint8_t> lost(drawn.rows.size());
    mark_refused(placed, lost);
    for (size_t i = 0; i < lost.size(); ++i) out.torn[drawn.numbers[i]] |= lost[i];
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

BatchSampler::Placed BatchSampler::place(const DrawnRows& drawn, uint64_t step, uint32_t round) const {
  const size_t n = drawn.rows.size();
  Placed placed;
  placed.taken.resize(n);
  const Store::Taking taking{step, drawn.numbers};
  placed.used_up =
      store_.count_samples(drawn.rows, drawn.generations, placed.taken, settings_.takes ? &taking : nullptr);
  if (settings_.window.length == 0) return placed;
  std::vector<int32_t>& ends = placed.ends;
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
  return placed;
}

void BatchSampler::mark_refused(const Placed& placed, std::span<uint8_t> torn) const {
  if (store_.header().max_times_sampled == 0) return;
  for (size_t i = 0; i < torn.size(); ++i) {
    if (placed.taken[i] == 0) torn[i] = 1;
  }
}

uint64_t BatchSampler::gather(const BatchArrays& out, const DrawnRows& drawn, uint64_t step, uint32_t round) const {
  if (settings_.transitions) return gather_transitions(out, drawn, step, round);
  const size_t n = drawn.rows.size();
  const bool whole = drawn.rows.data() == out.rows.data();  // of all the batch's rows, whose arrays lie in `out`
  const Placed where = place(drawn, step, round);
  const std::vector<int32_t>& ends = where.ends;
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
  store_.release_exhausted(drawn.rows, drawn.generations);
  mark_refused(where, request.torn);
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
