#include "store/tasks.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <map>

#include "base/clock.h"
#include "base/errors.h"
#include "base/futex.h"
#include "store/client_lock.h"

namespace geartrain {
namespace {

constexpr uint8_t kDeathsAllowed = 3;
constexpr uint64_t kShareOfTasks = 16;
constexpr double kLookForDeadS = 0.25;

constexpr uint32_t filled_by(uint32_t slot) {
  return slot << 8;
}

}  // namespace

// A walk along the spans of a word: whoever damaged the segment may have made it a circle.
struct Tasks::Chain {
  Chain(const Tasks& of, uint64_t first) : tasks(of), at(first), turtle(first) {}
  explicit operator bool() const { return at != 0; }
  SpanHead& head() const { return tasks.head(at); }
  void next() {
    at = head().next.load(kRelaxed);
    if (at != 0 && at == turtle) tasks.store_.fail_damaged("the spans of a row are a circle through unit", at);
    if (++steps == limit) {
      turtle = at;
      steps = 0;
      limit *= 2;
    }
  }
  const Tasks& tasks;
  uint64_t at, turtle, steps = 0, limit = 2;
};

Tasks::Woken::~Woken() {
  for (uint64_t left = numbers_; left != 0; left &= left - 1) {
    const TaskFigures& figures = tasks_.figures(static_cast<uint32_t>(std::countr_zero(left)) + 1);
    if (figures.waiting.load(std::memory_order_seq_cst) != 0) futex_wake(figures.changes);
  }
  if (space_) {
    tasks_.table_->space_changes.fetch_add(1, std::memory_order_seq_cst);
    if (tasks_.table_->space_waiting.load(std::memory_order_seq_cst) != 0) futex_wake(tasks_.table_->space_changes);
  }
}

Tasks::Tasks(Store& store, std::shared_ptr<const TaskTable> checked, TaskTable* table, std::byte* spans,
             std::atomic<uint64_t>* words, std::atomic<uint64_t>* due)
    : store_(store),
      described_(std::move(checked)),
      table_(table),
      words_(words),
      due_(due),
      due_stride_((store.header().capacity + 63) / 64),
      count_(described_->task_count),
      versions_(reinterpret_cast<std::atomic<int64_t>*>(words + store.header().capacity * (count_ + 1))),
      changes_(reinterpret_cast<std::atomic<uint64_t>*>(versions_ + store.header().capacity * (count_ + 1))),
      heap_(&table->index, spans, described_->span_units) {
  for (uint32_t task = 1; task < count_; ++task) latest_first_.push_back(task);
  std::stable_sort(latest_first_.begin(), latest_first_.end(), [&](uint32_t one, uint32_t other) {
    return std::popcount(record(one).after) > std::popcount(record(other).after);
  });
  const std::vector<FieldRecord> fields(store.fields(), store.fields() + store.header().field_count);
  for (uint32_t task = 0; task <= count_; ++task) layouts_.emplace_back(fields, task);
  for (uint32_t field = 0; field < fields.size(); ++field) {
    if (in_spans(fields[field])) continue;
    columns_.push_back(field);
    column_bytes_ += fields[field].block_bytes;
  }
}

void Store::bind_tasks() {
  tasks_ = std::make_shared<Tasks>(*this, geometry_.tasks, region<TaskTable>(kTasksRegion),
                                   region<std::byte>(kSpansRegion), region<std::atomic<uint64_t>>(kTaskWordsRegion),
                                   region<std::atomic<uint64_t>>(kDueRegion));
}

void Store::clear_tasks() {
  tasks_->clear();
}

void Store::wake_tasks() const {
  tasks_->wake_all();
}

// --- words and bits -------------------------------------------------------------------------------------------

bool Tasks::due_bit(uint32_t task, uint32_t row) const {
  return (due_words(task)[row / 64].load(kRelaxed) >> (row % 64) & 1) != 0;
}

void Tasks::set_due(uint32_t task, uint32_t row, Woken& woken) {
  std::atomic<uint64_t>& word = due_words(task)[row / 64];
  const uint64_t old = word.load(kRelaxed), bit = uint64_t{1} << (row % 64);
  if ((old & bit) != 0) return;
  word.store(old | bit, kRelaxed);
  TaskFigures& its = figures(task);
  its.due.fetch_add(1, kRelaxed);
  its.changes.fetch_add(1, std::memory_order_seq_cst);
  woken.task(task);
}

void Tasks::clear_due(uint32_t task, uint32_t row) {
  std::atomic<uint64_t>& word = due_words(task)[row / 64];
  const uint64_t old = word.load(kRelaxed), bit = uint64_t{1} << (row % 64);
  if ((old & bit) == 0) return;
  word.store(old & ~bit, kRelaxed);
  figures(task).due.fetch_sub(1, kRelaxed);
}

uint64_t Tasks::done_mask(uint32_t row) const {
  uint64_t done = 0;
  for (uint32_t task = 1; task <= count_; ++task) {
    if (word(row, task).state == TaskState::done) done |= uint64_t{1} << (task - 1);
  }
  return done;
}

bool Tasks::is_ready(uint32_t row, uint32_t task) const {
  return word(row, task).state == TaskState::not_done && (record(task).after & ~done_mask(row)) == 0;
}

void Tasks::set_word(uint32_t row, uint32_t task, const TaskWord& word) const {
  words(row)[task].store(word.packed(), std::memory_order_release);
}

SpanHead& Tasks::head(uint64_t span) const {
  SpanHead* const found = heap_.head(span);
  if (found == nullptr || span == 0) store_.fail_damaged("a row's task leads to unit", span);
  return *found;
}

uint64_t Tasks::sequence(uint32_t row) const {
  return store_.status()[row].sequence.load(kRelaxed);
}

bool Tasks::under_way(uint32_t row) const {
  return store_.status()[row].state == RowState::under_way;
}

// Whether it may be rewritten: what a batch has taken stays as it was drawn.
bool Tasks::may_rewrite(const TaskRow& row, uint32_t task) const {
  return has_key(row.row, row.generation) && word(row.row, task).state == TaskState::done && !is_taken(row.row);
}

bool Tasks::has_key(uint32_t row, uint32_t generation) const {
  if (row >= store_.header().capacity) return false;
  const std::atomic<uint64_t>& word = store_.words()[row];
  uint32_t now = generation_of(word.load(std::memory_order_acquire));
  if ((now & 1) == 0 && now + 1 == generation) {
    const std::atomic_ref<const RowState> state(store_.status()[row].state);
    if (state.load(std::memory_order_acquire) == RowState::under_way) return true;
    now = generation_of(word.load(kRelaxed));  // it was committed in between, or was freed
  }
  return (now & 1) != 0 && now == generation;
}

uint64_t Tasks::filled(const TaskWord& word) const {
  if (word.state == TaskState::not_done || word.state == TaskState::taken) return 0;
  uint64_t at = word.span;
  for (uint32_t steps = 0; at != 0 && steps < 2 * kMaxClients; ++steps) {  // of those that rewrite it
    const SpanHead* const found = heap_.head(at);
    if (found == nullptr) return 0;
    if (found->mark.load(std::memory_order_acquire) == kFilled) return at;
    at = found->next.load(kRelaxed);
  }
  return 0;
}

bool Tasks::lengths(uint32_t row, uint32_t generation, AxisLengths* out) const {
  if (!has_key(row, generation)) return false;
  out->fill(0);
  for (uint32_t axis = 0; axis < described_->axis_count; ++axis) {
    const uint32_t owner = described_->axes[axis].owner;
    const uint64_t before = words(row)[owner].load(std::memory_order_acquire);
    const TaskWord word = TaskWord::of(before);
    if (word.state != TaskState::done) continue;
    const uint64_t span = filled(word);
    const SpanHead* const found = span == 0 ? nullptr : heap_.head(span);
    if (found != nullptr) (*out)[axis] = found->lengths[axis].load(kRelaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (found == nullptr || words(row)[owner].load(kRelaxed) != before) return false;
  }
  return has_key(row, generation);
}

void Tasks::locked_lengths(uint32_t row, AxisLengths* out) const {
  out->fill(0);
  for (uint32_t axis = 0; axis < described_->axis_count; ++axis) {
    const TaskWord its = word(row, described_->axes[axis].owner);
    const uint64_t span = its.state == TaskState::done ? filled(its) : 0;
    if (span != 0) (*out)[axis] = head(span).lengths[axis].load(kRelaxed);
  }
}

// --- spans ----------------------------------------------------------------------------------------------------

uint64_t Tasks::take_span(uint32_t task, const TaskRow& from, uint8_t axis) {
  const uint64_t span = heap_.take(from.units);
  if (span == 0) return 0;
  // Counted first: what is not counted would not be looked for after this process's death.
  ++table_->claims[store_.client_slot_.load(kRelaxed)];
  hang(span, task, from, axis);
  return span;
}

// A span hangs on the word of its row's task, in front, and is its writer's until it is filled.
void Tasks::hang(uint64_t span, uint32_t task, const TaskRow& from, uint8_t axis) {
  const uint32_t row = from.row;
  SpanHead& made = head(span);
  TaskWord its = word(row, task);
  made.mark.store(filled_by(store_.client_slot_.load(kRelaxed)), kRelaxed);
  made.next.store(its.span, kRelaxed);
  made.item = from.item;
  for (uint32_t i = 0; i < kMaxAxes; ++i) made.lengths[i].store(from.lengths[i], kRelaxed);
  made.set_owner(row, static_cast<uint16_t>(task));
  made.axis = axis;
  made.reserved = 0;
  its.span = span;
  set_word(row, task, its);
  // A reader that still copies what was freed must see that its row or task has changed before any of the bytes that
  // the caller writes next.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

template <typename Lost>
uint64_t Tasks::sift(uint32_t row, uint32_t task, TaskWord word, uint64_t first, Lost&& lost, Woken& woken) {
  uint64_t kept_first = first, kept_last = first;
  std::vector<uint64_t> gone;
  for (Chain at(*this, word.span); at;) {
    const uint64_t span = at.at;
    const SpanHead& its = at.head();
    if (!its.is_of(row, task)) store_.fail_damaged("a row's task leads to another row's unit", span);
    at.next();
    if (span == first) continue;
    if (lost(its)) {
      gone.push_back(span);
      continue;
    }
    if (kept_last == 0) {
      kept_first = span;
    } else {
      head(kept_last).next.store(span, kRelaxed);
    }
    kept_last = span;
  }
  if (kept_last != 0) head(kept_last).next.store(0, kRelaxed);
  word.span = kept_first;
  set_word(row, task, word);
  // A span that a word leads to is never free, and a reader of one that is freed finds the word changed.
  std::atomic_thread_fence(std::memory_order_release);
  for (const uint64_t span : gone) heap_.give(span);
  if (!gone.empty()) woken.space();
  return kept_first;
}

bool Tasks::has_unfilled(uint32_t row) const {
  for (uint32_t task = 0; task <= count_; ++task) {
    const TaskWord its = word(row, task);
    if (its.state == TaskState::taken) continue;
    for (Chain at(*this, its.span); at; at.next()) {
      if (at.head().mark.load(kRelaxed) != kFilled) return true;
    }
  }
  return false;
}

// --- inserts --------------------------------------------------------------------------------------------------

// Units that inserts leave to what tasks write: rows that are inserted cannot be set back, and where they took all of
// the region none of them could come through.
uint64_t Tasks::kept_from_inserts() const {
  const bool writes =
      std::any_of(layouts_.begin() + 1, layouts_.end(), [](const SpanLayout& its) { return !its.empty(); });
  return writes ? heap_.units() / kShareOfTasks : 0;
}

bool Tasks::begin_insert(std::span<TaskRow> rows) {
  store_.ensure_client();
  uint64_t units = 0;
  for (const TaskRow& each : rows) units += each.units;
  if (rows.size() > store_.header().capacity) {
    fail(ErrorKind::full, rows.size(), " rows are inserted together, and the store has room for ",
         store_.header().capacity);
  }
  if (units != 0 && units + kept_from_inserts() >= heap_.units()) {
    fail(ErrorKind::no_space, "rows of ", units * kSpanUnit, " bytes are inserted together, and the store has ",
         heap_.units() * kSpanUnit, " bytes of spans, of which inserts leave ", kept_from_inserts() * kSpanUnit,
         " to tasks; create it with a larger span_bytes");
  }
  if (rows.empty()) return true;
  check_in_flight(rows.size());
  if (store_.has_journal()) store_.admit_to_journal();
  Store::Guard guard(store_);
  Control& c = store_.control();
  store_.release_abandoned_locked();
  if (places_in_flight() < rows.size()) {
    store_.reap_now_and_then();
    if (places_in_flight() < rows.size()) return false;
  }
  if (c.free_count < rows.size()) store_.reap_locked();
  table_->asked_rows = rows.size();
  table_->asked_units = units;
  if (c.free_count < rows.size() || oldest_waiter() != nullptr) return false;
  if (units != 0 && heap_.free_units() < units + kept_from_inserts()) return false;
  std::vector<uint32_t> taken(rows.size());
  // Spans before rows: without room nothing has changed that others would be woken for, or would wait behind.
  std::vector<uint64_t> spans(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].units == 0) continue;
    spans[i] = heap_.take(rows[i].units);
    if (spans[i] != 0) continue;
    while (i-- > 0) {
      if (spans[i] != 0) heap_.give(spans[i]);
    }
    return false;
  }
  table_->asked_rows = table_->asked_units = 0;
  take_rows(taken);
  store_.hold(taken, store_.client_slot_);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].row = taken[i];
    rows[i].span = spans[i];
    if (spans[i] != 0) hang(spans[i], 0, rows[i], 0);
  }
  return true;
}

void Tasks::finish_insert(std::span<const TaskRow> rows, const CommitValues& values, std::span<uint32_t> generations) {
  store_.ensure_client();
  store_.check_values(rows.size(), values);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // streaming stores of the bytes come before the words
  for (size_t at = 0; at < rows.size(); at += kRowsAHold) {
    const std::span<const TaskRow> some = rows.subspan(at, std::min(kRowsAHold, rows.size() - at));
    Woken woken(*this);
    Store::Guard guard(store_);
    Store::Sums sums(store_);
    std::vector<uint32_t> numbers;
    for (const TaskRow& each : some) numbers.push_back(each.row);
    store_.check_held(numbers);
    const uint64_t now_ns = store_.commit_time(), first = store_.next_sequence();
    const uint32_t fresh = store_.new_priority();
    store_.set_next_sequence(first + some.size());
    std::atomic_signal_fence(std::memory_order_release);
    for (size_t i = 0; i < some.size(); ++i) {
      const uint32_t row = some[i].row;
      store_.write_values(row, at + i, values, fresh, first + i, now_ns);
      version(row, 0).store(values.versions.empty() ? clock() : values.versions[at + i], kRelaxed);
      for (uint32_t task = 1; task <= count_; ++task) version(row, task).store(kNoVersion, kRelaxed);
      settle_version(row);
      if (some[i].span != 0) head(some[i].span).mark.store(kFilled, std::memory_order_release);
      note_change(row, 0);
      set_word(row, 0, {.state = TaskState::done, .span = some[i].span});
      for (uint32_t task = 1; task <= count_; ++task) words(row)[task].store(0, kRelaxed);
      store_.unhold(row);
      // The row is there with this one store.
      std::atomic_ref(store_.status()[row].state).store(RowState::under_way, std::memory_order_release);
      generations[at + i] = generation_of(store_.words()[row].load(kRelaxed)) + 1;
      store_.link_order({&row, 1});
      table_->under_way.fetch_add(1, kRelaxed);
      for (uint32_t task = 1; task <= count_; ++task) {
        figures(task).remaining.fetch_add(1, kRelaxed);
        if (record(task).after == 0 && task != last()) set_due(task, row, woken);
      }
      if (count_ == 0 || record(last()).after == 0) promote(row, sums);
    }
    geartrain::count(store_.control().counters.inserted, some.size());
  }
  announce(store_.control().limiter);
}

void Tasks::abandon_insert(std::span<const TaskRow> rows) {
  store_.ensure_client();
  Woken woken(*this);
  Store::Guard guard(store_);
  for (const TaskRow& each : rows) {
    if (each.row == kNoRow) continue;
    store_.check_held({&each.row, 1});
    sift(each.row, 0, word(each.row, 0), 0, [](const SpanHead&) { return true; }, woken);
    store_.unhold(each.row);
    store_.put_free_row(each.row);
  }
  geartrain::count(store_.control().counters.abandoned, rows.size());
}

void Tasks::take_rows(std::span<uint32_t> rows) {
  Control& c = store_.control();
  std::atomic<uint64_t>* const free = due_words(0);
  const uint64_t capacity = store_.header().capacity;
  uint64_t from = table_->next_row % capacity;
  for (uint32_t& taken : rows) {
    uint64_t found = capacity;
    // The word that the search begins in is looked at twice: from its place on, and at the end before it.
    for (uint64_t i = 0; i <= due_stride_ && found == capacity; ++i) {
      const uint64_t at = (from / 64 + i) % due_stride_;
      uint64_t bits = free[at].load(kRelaxed);
      if (i == 0) bits &= ~uint64_t{0} << (from % 64);
      if (bits != 0) found = at * 64 + static_cast<uint64_t>(std::countr_zero(bits));
    }
    if (found >= capacity) store_.fail_damaged("fewer rows are free than the count says:", c.free_count);
    passed_over(from, found);
    taken = static_cast<uint32_t>(found);
    RowStatus& s = store_.status()[taken];
    if (s.state != RowState::free) store_.fail_damaged("the free rows lead to row", taken);
    free[found / 64].store(free[found / 64].load(kRelaxed) & ~(uint64_t{1} << (found % 64)), kRelaxed);
    (s.previous == kNoRow ? c.free_head : store_.status()[s.previous].next) = s.next;
    (s.next == kNoRow ? c.free_tail : store_.status()[s.next].previous) = s.previous;
    --c.free_count;
    from = (found + 1) % capacity;
  }
  table_->next_row = static_cast<uint32_t>(from);
}

// The ring goes on behind rows that are not free. They are the oldest ones then, and their place does not tell it.
void Tasks::passed_over(uint64_t first, uint64_t last) {
  for (uint64_t row = first; row != last; row = row + 1 == store_.header().capacity ? 0 : row + 1) {
    const RowState state = store_.status()[row].state;
    if (state != RowState::under_way && state != RowState::committed) continue;
    const uint64_t before = sequence(static_cast<uint32_t>(row)) + 1;
    if (before > table_->passed_before.load(kRelaxed)) table_->passed_before.store(before, kRelaxed);
  }
}

std::string Tasks::occupancy() {
  const Control& c = store_.control();
  uint64_t kept_units = 0;
  for (const TakenStep& each : taken_steps()) kept_units += each.units;
  std::string text =
      message_of({"of ", store_.header().capacity, " rows ", table_->under_way.load(kRelaxed), " are under way, ",
                  store_.committed_count(), " finished, ", c.exhausted_count, " read for the last time, ",
                  table_->taken.load(kRelaxed), " kept until they are saved and ", c.writing_count,
                  " being inserted; of ", heap_.units() * kSpanUnit, " bytes of spans ", heap_.free_units() * kSpanUnit,
                  " are free and ", kept_units * kSpanUnit, " of kept rows"});
  for (uint32_t task = 1; task < count_; ++task) {
    text += message_of(
        {"; task '", record(task).name, "' has ", figures(task).due, " due and ", figures(task).claimed, " claimed"});
  }
  return text;
}

// --- claims ---------------------------------------------------------------------------------------------------

void Tasks::check_task(uint32_t task, const char* what) const {
  if (task == 0 || task > count_) fail(ErrorKind::schema, "no task number ", task);
  if (task == last()) {
    fail(ErrorKind::schema, "the last task '", record(task).name, "' is a replay's: its rows are drawn, not ", what);
  }
}

std::vector<ClaimedRow> Tasks::claim(uint32_t task, const Asked& asked) {
  store_.ensure_client();
  check_task(task, "claimed");
  const bool has_axis = asked.max_items == 0 || asked.axis != 0;
  if (!has_axis || asked.axis > described_->axis_count) fail(ErrorKind::schema, "no axis number ", asked.axis);
  std::vector<ClaimedRow> claimed;
  if (figures(task).due.load(kRelaxed) == 0) {
    if (figures(task).claimed.load(kRelaxed) == 0) return claimed;
    Store::Guard guard(store_);
    store_.reap_now_and_then();
  }
  uint64_t items = 0;
  const uint64_t capacity = store_.header().capacity;
  bool more = true;
  while (more && claimed.size() < asked.most) {
    Store::Guard guard(store_);
    store_.reap_now_and_then();
    const uint32_t slot = store_.client_slot_.load(kRelaxed);
    const uint64_t from = table_->next_row % capacity;
    size_t here = 0;
    more = false;
    // Whether the search goes on behind a row.
    const auto take = [&](uint32_t row) {
      if (claimed.size() == asked.most) return false;
      if (here == kRowsAHold) {
        more = true;
        return false;
      }
      if (asked.max_items != 0) {
        AxisLengths lengths;
        locked_lengths(row, &lengths);
        const uint64_t its = lengths[asked.axis - 1];
        if (!claimed.empty() && items + its > asked.max_items) return false;
        items += its;
      }
      TaskWord word = this->word(row, task);
      if (word.state != TaskState::not_done) store_.fail_damaged("a task is due that is not open, of row", row);
      clear_due(task, row);
      word.state = TaskState::claimed;
      word.slot = static_cast<uint8_t>(slot);
      word.claim = next_claim(word.claim);
      // Counted first: a claim that is not counted would not be looked for after this process's death.
      ++table_->claims[slot];
      set_word(row, task, word);
      if (!asked.later) set_version(row, task, clock());
      figures(task).claimed.fetch_add(1, kRelaxed);
      claimed.push_back({row, generation_of(store_.words()[row].load(kRelaxed)) | 1, word.claim});
      ++here;
      return true;
    };
    bool on = true;
    uint64_t walked = 0;
    const uint64_t passed = table_->passed_before.load(kRelaxed);
    for (uint32_t row = store_.control().order_head; on && row != kNoRow && sequence(row) < passed;
         row = store_.status()[row].next) {
      if (walked++ == capacity) store_.fail_damaged("the order list is a circle through row", row);
      if (due_bit(task, row)) on = take(row);
    }
    for (uint64_t i = 0; i <= due_stride_ && on; ++i) {
      const uint64_t at = (from / 64 + i) % due_stride_;
      uint64_t bits = due_words(task)[at].load(kRelaxed);
      const uint64_t behind = ~uint64_t{0} << (from % 64);
      if (i == 0) bits &= behind;
      if (i == due_stride_) bits &= ~behind;
      for (; bits != 0 && on; bits &= bits - 1) {
        const uint64_t row = at * 64 + static_cast<uint64_t>(std::countr_zero(bits));
        if (row >= capacity) store_.fail_damaged("the due rows lead to row", row);
        on = take(static_cast<uint32_t>(row));
      }
    }
  }
  return claimed;
}

bool Tasks::holds_claim(uint32_t task, const ClaimedRow& row) const {
  if (!has_key(row.row, row.generation)) return false;
  const TaskWord its = word(row.row, task);
  return its.state == TaskState::claimed && its.slot == store_.client_slot_.load(kRelaxed) && its.claim == row.claim;
}

bool Tasks::owns(uint32_t task, const ClaimedRow& row) const {
  return holds_claim(task, row);
}

void Tasks::no_claim(TaskWord& word, uint32_t task) {
  figures(task).claimed.fetch_sub(1, kRelaxed);
  if (table_->claims[word.slot] != 0) --table_->claims[word.slot];
  word.slot = 0;
}

// A task that nobody does has a version as long as it keeps what was appended.
void Tasks::forget_version(uint32_t row, uint32_t task) {
  const TaskWord its = word(row, task);
  if (its.state != TaskState::not_done) return;
  for (Chain at(*this, its.span); at; at.next()) {
    if (at.head().mark.load(kRelaxed) == kFilled) return;
  }
  version(row, task).store(kNoVersion, kRelaxed);
  settle_version(row);
}

// A claimed row becomes due again. Spans that another thread is filling stay until it has noticed.
void Tasks::unclaim(uint32_t row, uint32_t task, bool died, Woken& woken) {
  TaskWord its = word(row, task);
  no_claim(its, task);
  const bool keep = (record(task).flags & kKeepPartial) != 0;
  its.state = TaskState::not_done;
  if (died && its.deaths < kMaxDeaths) ++its.deaths;
  const auto lost = [&](const SpanHead& head) {
    return head.mark.load(kRelaxed) == kFilled && (!keep || head.axis == 0);
  };
  sift(row, task, its, 0, lost, woken);
  forget_version(row, task);
  if (died) {
    figures(task).deaths.fetch_add(1, kRelaxed);
    if (its.deaths >= kDeathsAllowed && !rebuilding_) {
      table_->given_up.fetch_add(1, kRelaxed);
      drop_row(row, woken);
      return;
    }
  } else {
    figures(task).released.fetch_add(1, kRelaxed);
  }
  if (!end_if_stale(row, woken) && is_ready(row, task)) set_due(task, row, woken);
}

// Does something with each row that is still claimed so. Returns how many are not.
template <typename Act>
size_t Tasks::for_claimed(uint32_t task, std::span<const ClaimedRow> rows, const char* what, Act&& act) {
  store_.ensure_client();
  check_task(task, what);
  size_t lost = 0;
  for (size_t at = 0; at < rows.size(); at += kRowsAHold) {
    Woken woken(*this);
    Store::Guard guard(store_);
    for (const ClaimedRow& each : rows.subspan(at, std::min(kRowsAHold, rows.size() - at))) {
      if (holds_claim(task, each)) {
        act(each.row, woken);
      } else {
        ++lost;
      }
    }
  }
  return lost;
}

size_t Tasks::release(uint32_t task, std::span<const ClaimedRow> rows) {
  return for_claimed(task, rows, "released", [&](uint32_t row, Woken& woken) { unclaim(row, task, false, woken); });
}

void Tasks::claim_for_others() {
  store_.ensure_client();
  Store::Guard guard(store_);
  store_.client(store_.client_slot_.load(kRelaxed)).claims_for_others = 1;
}

std::vector<Tasks::Again> Tasks::claim_again(uint32_t task, std::span<const ClaimedRow> rows, int64_t version) {
  store_.ensure_client();
  check_task(task, "claimed");
  std::vector<Again> found(rows.size(), Again::stale);
  for (size_t at = 0; at < rows.size(); at += kRowsAHold) {
    Store::Guard guard(store_);
    for (size_t i = at; i < std::min(rows.size(), at + kRowsAHold); ++i) {
      const auto [row, generation, claim] = rows[i];
      if (!has_key(row, generation)) continue;
      TaskWord its = word(row, task);
      if (its.state == TaskState::done && its.claim == claim && claim != 0) found[i] = Again::done;
      if (!due_bit(task, row) || its.claim != claim || claim >= kClaimNumbers) continue;
      clear_due(task, row);
      const uint32_t slot = store_.client_slot_.load(kRelaxed);
      its.state = TaskState::claimed;
      its.slot = static_cast<uint8_t>(slot);
      its.claim = claim == 0 ? next_claim(0) : claim;
      ++table_->claims[slot];  // first, as in claim()
      set_word(row, task, its);
      set_version(row, task, version);
      figures(task).claimed.fetch_add(1, kRelaxed);
      found[i] = Again::claimed;
    }
  }
  return found;
}

void Tasks::say_version(uint32_t task, std::span<const ClaimedRow> rows, int64_t version) {
  for_claimed(task, rows, "claimed", [&](uint32_t row, Woken&) { set_version(row, task, version); });
}

size_t Tasks::drop(uint32_t task, std::span<const ClaimedRow> rows) {
  const size_t lost = for_claimed(task, rows, "dropped", [&](uint32_t row, Woken& woken) {
    drop_row(row, woken);
    table_->dropped.fetch_add(1, kRelaxed);
  });
  store_.settle_journal("removed");
  return lost;
}

bool Tasks::drop_locked(uint32_t row, uint32_t generation) {
  if (store_.status()[row].state == RowState::taken) {
    if (generation_of(store_.words()[row].load(kRelaxed)) != generation) return false;
    free_taken_row(row);
    return true;
  }
  if (!under_way(row) || generation_of(store_.words()[row].load(kRelaxed)) + 1 != generation) return false;
  Woken woken(*this);
  drop_row(row, woken);  // counted as deleted
  return true;
}

// A row under way, which nobody sees any more from the first store on.
void Tasks::drop_row(uint32_t row, Woken& woken) {
  const TaskWord insert = word(row, 0);
  set_word(row, 0, {.state = TaskState::not_done, .span = insert.span});
  for (uint32_t task = 1; task <= count_; ++task) {
    TaskWord its = word(row, task);
    if (its.state == TaskState::claimed) {
      no_claim(its, task);
      its.state = TaskState::not_done;
      set_word(row, task, its);
    }
    if (its.state == TaskState::done) {
      set_word(row, task, {.state = TaskState::not_done, .claim = its.claim, .span = its.span});
    } else {
      not_remaining(task, woken);
    }
    clear_due(task, row);
  }
  store_.unlink_order(row);
  table_->under_way.fetch_sub(1, kRelaxed);
  std::atomic<uint64_t>& main = store_.words()[row];
  main.store(make_word(generation_of(main.load(kRelaxed)) + 2, 0), std::memory_order_release);
  woken.space();
  store_.put_free_row(row);
}

void Tasks::not_remaining(uint32_t task, Woken& woken) {
  TaskFigures& its = figures(task);
  if (its.remaining.fetch_sub(1, kRelaxed) != 1 || table_->finished.load(kRelaxed) == 0) return;
  its.changes.fetch_add(1, std::memory_order_seq_cst);
  woken.task(task);
}

bool Tasks::freed(uint32_t row) {
  if (store_.status()[row].state != RowState::free) note_change(row, 0);
  if (rebuilding_) {
    const bool was_free = store_.status()[row].state == RowState::free;
    uint32_t writer = kNoClient;
    for (uint32_t task = 0; task <= count_; ++task) {
      const TaskWord its = word(row, task);
      const uint64_t chain = was_free || its.state == TaskState::taken ? 0 : its.span;
      for (Chain at(*this, chain); at; at.next()) {
        const uint32_t mark = at.head().mark.load(kRelaxed);
        if (mark != kFilled && lives(mark >> 8)) writer = mark >> 8;
      }
      set_word(row, task, {.span = chain});
    }
    // As below. What else hangs on its words is freed by finish_rebuild().
    if (writer == kNoClient) return true;
    store_.hold(row, writer, RowState::writing);
    return false;
  }
  Woken woken(*this);
  const RowState was = store_.status()[row].state;
  if (count_ != 0 && (was == RowState::committed || was == RowState::exhausted)) not_remaining(last(), woken);
  uint32_t writer = kNoClient;
  for (uint32_t task = 0; task <= count_; ++task) {
    const TaskWord its = word(row, task);
    const uint64_t chain = its.state == TaskState::taken ? 0 : its.span;
    const auto lost = [](const SpanHead& head) { return head.mark.load(kRelaxed) == kFilled; };
    const uint64_t left = sift(row, task, {.span = chain}, 0, lost, woken);
    if (left != 0) writer = head(left).mark.load(kRelaxed) >> 8;
  }
  woken.space();
  if (writer == kNoClient) {
    std::atomic<uint64_t>& free = due_words(0)[row / 64];
    free.store(free.load(kRelaxed) | uint64_t{1} << (row % 64), kRelaxed);
    return true;
  }
  // Somebody fills a span of it, and finds out with the call that would finish it: until then the row is theirs.
  store_.hold(row, writer, RowState::writing);
  return false;
}

// --- writing --------------------------------------------------------------------------------------------------

size_t Tasks::begin(Write write, uint32_t task, std::span<TaskRow> rows, uint8_t axis) {
  store_.ensure_client();
  check_task(task, "written");
  if (write == Write::rewrite && (record(task).flags & kRewritable) == 0) {
    fail(ErrorKind::schema, "the task '", record(task).name, "' is not rewritable");
  }
  // Before any room is taken, which others may wait for. What is only appended is not journaled.
  if (write != Write::append && store_.has_journal()) store_.admit_to_journal();
  size_t begun = 0;
  while (begun < rows.size()) {
    Woken woken(*this);
    Store::Guard guard(store_);
    const SpaceWaiter* waiter = oldest_waiter();
    for (const size_t end = std::min(rows.size(), begun + kRowsAHold); begun < end; ++begun) {
      TaskRow& each = rows[begun];
      each.span = 0;
      const bool open = write == Write::rewrite ? may_rewrite(each, task)
                                                : holds_claim(task, {each.row, each.generation, each.claim});
      each.skipped = !open;
      if ((each.units == 0) != layouts_[task].empty()) {
        fail(ErrorKind::schema, "the task '", record(task).name, "' writes its fields, all together");
      }
      if (!open || each.units == 0) continue;
      AxisLengths known;
      locked_lengths(each.row, &known);
      for (const SpanField& field : layouts_[task].fields()) {
        if (field.axis == 0 || (write == Write::append && field.axis != axis)) continue;
        const AxisRecord& its = described_->axes[field.axis - 1];
        const bool sets = its.owner == task && write != Write::rewrite;  // others have written by these lengths since
        if (!sets && known[field.axis - 1] != each.lengths[field.axis - 1]) {
          fail(ErrorKind::schema, "row ", each.row, " has ", known[field.axis - 1], " ", its.name, ", field '",
               store_.fields()[field.field].name, "' was given with ", each.lengths[field.axis - 1]);
        }
      }
      if (each.units >= heap_.units()) {
        fail(ErrorKind::no_space, "a row of ", each.units * kSpanUnit, " bytes is written, and the store has ",
             heap_.units() * kSpanUnit, " bytes of spans; create it with a larger span_bytes");
      }
      if (waiter != nullptr && waiter->place.load(kRelaxed) - 1 < sequence(each.row)) return begun;
      each.span = take_span(task, each, axis);
      if (each.span == 0) return begun;
      if (waiter == nullptr || !end_wait()) continue;
      woken.space();
      waiter = oldest_waiter();
    }
    if (end_wait()) woken.space();
  }
  return begun;
}

void Tasks::finish(Write write, uint32_t task, std::span<TaskRow> rows) {
  store_.ensure_client();
  std::atomic_thread_fence(std::memory_order_seq_cst);  // streaming stores of the bytes come before the words
  for (size_t at = 0; at < rows.size(); at += kRowsAHold) {
    Woken woken(*this);
    Store::Guard guard(store_);
    Store::Sums sums(store_);
    for (TaskRow& each : rows.subspan(at, std::min(kRowsAHold, rows.size() - at))) {
      if (each.skipped) continue;
      const bool open = write == Write::rewrite ? may_rewrite(each, task)
                                                : holds_claim(task, {each.row, each.generation, each.claim});
      if (!open) {
        each.skipped = true;
        discard(each, task, woken);
        continue;
      }
      TaskWord its = word(each.row, task);
      if (write == Write::append) {
        fill(each);
        its.deaths = 0;
        set_word(each.row, task, its);
        continue;
      }
      if (write == Write::rewrite && is_behind_a_filled_one(its.span, each.span)) {
        discard(each, task, woken);  // by what was begun later and is there already
        continue;
      }
      const uint64_t span = each.span;
      // A rewrite counts from the mark of its span on, should this process die before the word.
      note_change(each.row, task);
      if (span != 0) {
        bring_to_front(each.row, task, span);
        fill(each);
      }
      if (write == Write::put) no_claim(its, task);
      // The task is done with this one store. What else hangs on the chain is cut off after it.
      its.state = TaskState::done;
      its.deaths = 0;
      if (write == Write::rewrite) its.claim = next_claim(its.claim);
      if (span != 0) its.span = span;
      set_word(each.row, task, its);
      const auto lost = [](const SpanHead& one) { return one.mark.load(kRelaxed) == kFilled; };
      sift(each.row, task, its, span, lost, woken);
      if (write != Write::put) continue;
      if (is_stale(each.row) && !is_held(each.row)) {
        figures(task).done.fetch_add(1, kRelaxed);
        not_remaining(task, woken);
        end_if_stale(each.row, woken);
      } else {
        task_done(each.row, task, sums, woken);
      }
    }
  }
  if (write != Write::append) store_.settle_journal("put");
}

// A span is filled, and is its writer's no more.
void Tasks::fill(TaskRow& each) {
  SpanHead& its = head(each.span);
  end_fill();
  its.mark.store(kFilled, std::memory_order_release);
  each.span = 0;
}

void Tasks::end_fill() {
  uint32_t& mine = table_->claims[store_.client_slot_.load(kRelaxed)];
  if (mine != 0) --mine;
}

// Links a span of a word's chain in front of the others, where readers find it.
void Tasks::bring_to_front(uint32_t row, uint32_t task, uint64_t span) {
  TaskWord its = word(row, task);
  if (its.span == span) return;
  for (Chain at(*this, its.span); at; at.next()) {
    SpanHead& one = at.head();
    if (one.next.load(kRelaxed) != span) continue;
    one.next.store(head(span).next.load(kRelaxed), kRelaxed);
    head(span).next.store(its.span, kRelaxed);
    its.span = span;
    set_word(row, task, its);
    return;
  }
  store_.fail_damaged("a span is not its row's any more, unit", span);
}

// Whether a span that is about to be filled was begun before one that is.
bool Tasks::is_behind_a_filled_one(uint64_t chain, uint64_t span) const {
  for (Chain at(*this, chain); at && at.at != span; at.next()) {
    if (at.head().mark.load(kRelaxed) == kFilled) return true;
  }
  return false;
}

// Frees the span of a write that came too late; and its row, where that waited for it alone.
void Tasks::discard(TaskRow& each, uint32_t task, Woken& woken) {
  if (each.span == 0) return;
  const RowStatus& s = store_.status()[each.row];
  TaskWord its = word(each.row, task);
  const uint64_t mine = each.span;
  each.span = 0;
  end_fill();
  bool found = false;
  for (Chain at(*this, its.span); at; at.next()) found |= at.at == mine;
  if (!found) store_.fail_damaged("a span is not its row's any more, unit", mine);
  sift(each.row, task, its, 0, [&](const SpanHead& one) { return &one == heap_.head(mine); }, woken);
  const bool waited = s.state == RowState::writing && word(each.row, 0).state == TaskState::not_done;
  if (!waited || s.owner != store_.client_slot_.load(kRelaxed)) return;
  store_.unhold(each.row);
  store_.put_free_row(each.row);  // or it is somebody else's, who fills another span
}

void Tasks::abandon(uint32_t task, std::span<TaskRow> rows) {
  store_.ensure_client();
  for (size_t at = 0; at < rows.size(); at += kRowsAHold) {
    Woken woken(*this);
    Store::Guard guard(store_);
    for (TaskRow& each : rows.subspan(at, std::min(kRowsAHold, rows.size() - at))) {
      if (!each.skipped) discard(each, task, woken);
    }
    if (end_wait()) woken.space();
  }
}

void Tasks::task_done(uint32_t row, uint32_t task, Store::Sums& sums, Woken& woken) {
  figures(task).done.fetch_add(1, kRelaxed);
  not_remaining(task, woken);
  const uint64_t done = done_mask(row);
  for (uint32_t other = 1; other <= count_; ++other) {
    if ((record(other).after >> (task - 1) & 1) == 0 || (record(other).after & ~done) != 0) continue;
    if (other == last()) {
      promote(row, sums);
      announce(store_.control().limiter);
    } else if (word(row, other).state == TaskState::not_done) {
      set_due(other, row, woken);
    }
  }
}

// The row is committed: all of its tasks are done but the last one.
void Tasks::promote(uint32_t row, Store::Sums& sums) {
  table_->under_way.fetch_sub(1, kRelaxed);
  store_.make_selectable(sums, row, std::atomic_ref<uint32_t>(store_.status()[row].heap_slot).load(kRelaxed));
  std::atomic_ref(store_.status()[row].state).store(RowState::committed, std::memory_order_release);  // after the word
  sums.settle();
  store_.control().committed_count.store(store_.committed_count() + 1, std::memory_order_release);
}

std::vector<ChainPart> Tasks::chain(uint32_t task, const ClaimedRow& row) {
  store_.ensure_client();
  check_task(task, "read");
  Store::Guard guard(store_);
  if (!holds_claim(task, row)) {
    fail(ErrorKind::stale_claim, "row ", row.row, " is not claimed for '", record(task).name, "' by this any more");
  }
  std::vector<ChainPart> parts;
  for (Chain at(*this, word(row.row, task).span); at; at.next()) {
    const SpanHead& its = at.head();
    if (its.mark.load(kRelaxed) != kFilled) continue;
    ChainPart part{at.at, its.size.load(kRelaxed) & kSpanUnits, its.item, its.axis, {}};
    for (uint32_t i = 0; i < kMaxAxes; ++i) part.lengths[i] = its.lengths[i].load(kRelaxed);
    parts.push_back(part);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

// --- rows that batches have taken -----------------------------------------------------------------------------

void Tasks::take(uint32_t row, const TakenWord& by, uint32_t priority) {
  RowStatus& s = store_.status()[row];
  std::atomic_ref<uint32_t>(s.heap_slot).store(priority, kRelaxed);
  if (by.step >= table_->taken_before.load(kRelaxed)) table_->taken_before.store(by.step + 1, kRelaxed);
  note_change(row, last());
  // The row is taken with this one store.
  words(row)[last()].store(by.packed(), std::memory_order_release);
  std::atomic_ref(s.state).store(RowState::taken, kRelaxed);
  table_->taken.fetch_add(1, kRelaxed);
  Woken woken(*this);
  not_remaining(last(), woken);
}

std::vector<Tasks::TakenRow> Tasks::taken(uint64_t step) const {
  std::vector<TakenRow> found;
  if (count_ == 0 || table_->taken.load(kRelaxed) == 0 || step >= table_->taken_before.load(kRelaxed)) return found;
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    const uint64_t word = words(row)[last()].load(std::memory_order_acquire);
    const TakenWord by = TakenWord::of(word);
    if (TaskWord::of(word).state != TaskState::taken || by.step != step) continue;
    const uint64_t main = store_.words()[row].load(std::memory_order_acquire);
    if (is_committed(main)) found.push_back({row, generation_of(main), static_cast<uint32_t>(by.place)});
  }
  std::sort(found.begin(), found.end(), [](const TakenRow& one, const TakenRow& other) {
    return one.place != other.place ? one.place < other.place : one.row < other.row;
  });
  return found;
}

std::vector<Tasks::TakenStep> Tasks::taken_steps() const {
  if (count_ == 0 || table_->taken.load(kRelaxed) == 0) return {};
  std::map<uint64_t, TakenStep> found;
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    const uint64_t taken = words(row)[last()].load(std::memory_order_acquire);
    if (TaskWord::of(taken).state != TaskState::taken) continue;
    const uint64_t step = TakenWord::of(taken).step;
    TakenStep& its = found.try_emplace(step, TakenStep{step, 0, 0}).first->second;
    ++its.rows;
    for (uint32_t task = 0; task < last(); ++task) {
      const uint64_t span = filled(word(row, task));
      if (span != 0) its.units += heap_.head(span)->size.load(kRelaxed) & kSpanUnits;
    }
  }
  std::vector<TakenStep> steps;
  for (const auto& [step, its] : found) steps.push_back(its);
  return steps;
}

// Does something, under the lock, with all rows that steps from the first to the last have taken, oldest first.
template <typename Act>
uint64_t Tasks::for_taken(uint64_t first, uint64_t last_step, Act&& act) {
  store_.ensure_client();
  if (count_ == 0) fail(ErrorKind::schema, "no row is kept in a store without tasks");
  const auto is_one = [&](uint32_t row) {
    const uint64_t word = words(row)[last()].load(std::memory_order_acquire);
    const uint64_t step = TakenWord::of(word).step;
    return TaskWord::of(word).state == TaskState::taken && first <= step && step <= last_step;
  };
  std::vector<uint32_t> rows;
  if (table_->taken.load(kRelaxed) == 0) return 0;
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    if (is_one(row)) rows.push_back(row);
  }
  std::sort(rows.begin(), rows.end(), [&](uint32_t one, uint32_t other) { return sequence(one) < sequence(other); });
  uint64_t found = 0;
  for (size_t at = 0; at < rows.size(); at += kRowsAHold) {
    Store::Guard guard(store_);
    std::vector<uint32_t> some;
    for (const uint32_t row : std::span(rows).subspan(at, std::min(kRowsAHold, rows.size() - at))) {
      if (store_.status()[row].state == RowState::taken && is_one(row)) some.push_back(row);
    }
    act(std::span<const uint32_t>(some));
    found += some.size();
  }
  return found;
}

uint64_t Tasks::untake(uint64_t step) {
  return for_taken(step, step, [&](std::span<const uint32_t> rows) {
    Store::Sums sums(store_);
    const Control& c = store_.control();
    uint32_t next = c.order_head;  // the first row of the order that comes after
    uint64_t walked = 0;
    for (const uint32_t row : rows) {
      RowStatus& s = store_.status()[row];
      store_.set_priority_locked(row, std::atomic_ref<uint32_t>(s.heap_slot).load(kRelaxed));
      note_change(row, last());
      words(row)[last()].store(0, std::memory_order_release);  // it is selectable from here on, for a rebuild
      s.times_sampled.store(0, kRelaxed);
      std::atomic_ref(s.state).store(RowState::committed, std::memory_order_release);
      store_.set_bit(sums, row, true);
      while (next != kNoRow && sequence(next) < sequence(row)) {
        if (walked++ == store_.header().capacity) store_.fail_damaged("the order list is a circle through row", next);
        next = store_.status()[next].next;
      }
      store_.link_order_before(row, next);
      table_->taken.fetch_sub(1, kRelaxed);
      figures(last()).remaining.fetch_add(1, kRelaxed);
      sums.settle();
      store_.control().committed_count.store(store_.committed_count() + 1, std::memory_order_release);
    }
    // Who died while it took them may not have counted them.
    const uint64_t sampled = store_.samples_so_far();
    store_.control().counters.sampled.fetch_sub(std::min<uint64_t>(sampled, rows.size()), kRelaxed);
  });
}

uint64_t Tasks::free_taken(uint64_t step) {
  const uint64_t freed = for_taken(0, step, [&](std::span<const uint32_t> rows) {
    for (const uint32_t row : rows) {
      free_taken_row(row);
      geartrain::count(store_.control().counters.exhausted);
    }
  });
  {
    Store::Guard guard(store_);
    table_->saved_before.store(step + 1, kRelaxed);
  }
  store_.settle_journal("removed");
  return freed;
}

void Tasks::free_taken_row(uint32_t row) {
  std::atomic<uint64_t>& main = store_.words()[row];
  main.store(make_word(generation_of(main.load(kRelaxed)) + 1, 0), std::memory_order_release);
  table_->taken.fetch_sub(1, kRelaxed);
  store_.put_free_row(row);
}

bool Tasks::kept_alone_stop(uint64_t rows) {
  if (table_->taken.load(kRelaxed) == 0 || store_.committed_count() >= rows) return false;
  store_.ensure_client();
  Store::Guard guard(store_);
  store_.reap_now_and_then();
  const Control& c = store_.control();
  if (table_->taken.load(kRelaxed) == 0 || store_.committed_count() >= rows) return false;
  if (c.writing_count + c.exhausted_count != 0) return false;
  if (table_->under_way.load(kRelaxed) != 0) return kept_alone_give_room();
  const uint64_t units = table_->asked_units;
  return c.free_count == 0 || c.free_count < table_->asked_rows ||
         (units != 0 && heap_.free_units() < units + kept_from_inserts());
}

Tasks::Complete Tasks::complete(uint64_t most) {
  store_.ensure_client();
  Store::Guard guard(store_);
  Complete found;
  uint32_t row = store_.control().order_head;
  for (; row != kNoRow && !under_way(row) && found.rows < most; row = store_.status()[row].next) {
    if (found.rows++ == store_.header().capacity) store_.fail_damaged("the order list is a circle through row", row);
  }
  found.before = row == kNoRow ? store_.next_sequence() : sequence(row);
  return found;
}

// --- room -----------------------------------------------------------------------------------------------------

// The one of the oldest row: what it needs is not taken by newer ones. nullptr: nobody waits.
const SpaceWaiter* Tasks::oldest_waiter() const {
  if (table_->waiter_count.load(kRelaxed) == 0) return nullptr;
  const SpaceWaiter* oldest = nullptr;
  for (const SpaceWaiter& each : table_->waiters) {
    if (waits(each) && (oldest == nullptr || each.place.load(kRelaxed) < oldest->place.load(kRelaxed))) oldest = &each;
  }
  return oldest;
}

bool Tasks::waits(const SpaceWaiter& waiter) const {
  return waiter.place.load(kRelaxed) != 0 && store_.client(waiter.slot).in_use != 0;
}

template <typename Is>
bool Tasks::any_waits(Is&& is) const {
  return table_->waiter_count.load(kRelaxed) != 0 &&
         std::ranges::any_of(table_->waiters, [&](const SpaceWaiter& each) { return waits(each) && is(each); });
}

bool Tasks::has_room(uint64_t units) {
  const uint64_t span = heap_.take(units);
  if (span != 0) heap_.give(span);
  return span != 0;
}

void Tasks::register_waiter(uint64_t sequence, uint64_t units, bool claims) {
  const uint32_t slot = store_.client_slot_.load(kRelaxed);
  const auto thread = static_cast<uint32_t>(::gettid());
  SpaceWaiter* room = nullptr;
  for (SpaceWaiter& each : table_->waiters) {
    const bool taken = each.place.load(kRelaxed) != 0;
    if (taken && each.slot == slot && each.thread == thread) {
      room = &each;
      break;
    }
    if (!taken && room == nullptr) room = &each;
  }
  if (room == nullptr) return;  // so many wait that this one is not missed
  if (room->place.load(kRelaxed) == 0) table_->waiter_count.fetch_add(1, kRelaxed);
  room->slot = static_cast<uint16_t>(slot);
  room->thread = thread;
  room->units = units;
  room->claims = claims ? 1 : 0;
  room->place.store(sequence + 1, kRelaxed);
}

// Whether this thread was waiting. If so, those behind it are to be woken.
bool Tasks::end_wait() {
  const uint32_t slot = store_.client_slot_.load(kRelaxed);
  const auto thread = static_cast<uint32_t>(::gettid());
  return end_waits([&](const SpaceWaiter& each) { return each.slot == slot && each.thread == thread; });
}

template <typename Ended>
bool Tasks::end_waits(Ended&& ended) {
  if (table_->waiter_count.load(kRelaxed) == 0) return false;
  bool found = false;
  for (SpaceWaiter& each : table_->waiters) {
    if (each.place.load(kRelaxed) == 0 || !ended(each)) continue;
    each.place.store(0, kRelaxed);
    table_->waiter_count.fetch_sub(1, kRelaxed);
    found = true;
  }
  return found;
}

void Tasks::stop_waiting() {
  store_.ensure_client();
  Woken woken(*this);
  Store::Guard guard(store_);
  if (end_wait()) woken.space();
}

void Tasks::set_back(uint32_t row, Woken& woken) {
  for (const uint32_t task : latest_first_) {
    TaskWord its = word(row, task);
    clear_due(task, row);
    if (its.state == TaskState::claimed) no_claim(its, task);
    if (its.state == TaskState::done) {
      figures(task).remaining.fetch_add(1, kRelaxed);
      figures(task).set_back.fetch_add(1, kRelaxed);
      note_change(row, task);
    }
    const uint64_t chain = its.span;
    its = {.claim = next_claim(its.claim), .span = chain};
    sift(row, task, its, 0, [](const SpanHead&) { return true; }, woken);
    forget_version(row, task);
  }
  for (const uint32_t task : latest_first_) {
    if (record(task).after == 0) set_due(task, row, woken);
  }
  table_->set_back.fetch_add(1, kRelaxed);
}

// Whether it has something to give back, and nobody works on it.
bool Tasks::can_be_set_back(uint32_t row) const {
  return under_way(row) && has_task_spans(row) && !is_claimed(row) && !has_unfilled(row) && may_be_done_again(row);
}

bool Tasks::is_claimed(uint32_t row) const {
  for (uint32_t task = 1; task <= count_; ++task) {
    if (word(row, task).state == TaskState::claimed) return true;
  }
  return false;
}

// Whether those who did the tasks of a row may still be there: loops end when all rows are through (is_over).
bool Tasks::may_be_done_again(uint32_t row) const {
  if (table_->finished.load(kRelaxed) == 0) return true;
  for (uint32_t task = 1; task < count_; ++task) {
    if (word(row, task).state == TaskState::done && figures(task).remaining.load(kRelaxed) == 0) return false;
  }
  return true;
}

bool Tasks::has_task_spans(uint32_t row) const {
  for (uint32_t task = 1; task < count_; ++task) {
    if (word(row, task).span != 0) return true;
  }
  return false;
}

template <typename Is>
bool Tasks::any_under_way(Is&& is) const {
  uint64_t walked = 0;
  for (uint32_t row = store_.control().order_head; row != kNoRow; row = store_.status()[row].next) {
    if (walked++ == store_.header().capacity) store_.fail_damaged("the order list is a circle through row", row);
    if (under_way(row) && is(row)) return true;
  }
  return false;
}

// Whether all that takes room are the row itself and what was inserted, which no task gives back.
bool Tasks::takes_all_room(uint32_t row) const {
  const Control& c = store_.control();
  const uint64_t end = c.exhausted_count + table_->taken.load(kRelaxed);
  if (store_.committed_count() + end + c.writing_count != 0) return false;
  return !any_under_way([&](uint32_t other) { return other != row && has_task_spans(other); });
}

// Whether the first of those who wait gets on if a claim is given up: its row gives room back, or this process may then
// do a task of a row before that one, or go on with another claim, whose row has some.
bool Tasks::helps_if_given_up(uint32_t row, uint64_t first) const {
  if (has_task_spans(row)) return true;
  const uint32_t slot = store_.client_slot_.load(kRelaxed);
  return any_under_way([&](uint32_t other) {
    const uint64_t place = sequence(other);
    if (other == row || (place > first && !has_task_spans(other))) return false;
    if (any_waits([&](const SpaceWaiter& each) { return each.place.load(kRelaxed) == place + 1; })) return false;
    for (uint32_t task = 1; task < count_; ++task) {
      const TaskWord its = word(other, task);
      if (its.state == TaskState::claimed ? its.slot == slot : place < first && due_bit(task, other)) return true;
    }
    return false;
  });
}

// Whether the first row under way waits for room, no other has any to give back, and whoever has claims waits as well.
bool Tasks::kept_alone_give_room() {
  const SpaceWaiter* const oldest = oldest_waiter();
  if (oldest == nullptr || has_room(oldest->units)) return false;
  const uint64_t first = oldest->place.load(kRelaxed) - 1;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (table_->claims[slot] == 0) continue;
    if (!any_waits([&](const SpaceWaiter& each) { return each.slot == slot; })) return false;
  }
  return !any_under_way([&](uint32_t row) {
    const uint64_t place = sequence(row);
    if (place <= first) return place < first;
    return has_task_spans(row) && (is_claimed(row) || may_be_done_again(row));
  });
}

Tasks::Room Tasks::make_room(uint32_t task, const TaskRow& each) {
  store_.ensure_client();
  check_task(task, "written");
  Woken woken(*this);
  Store::Guard guard(store_);
  const auto claims = [&] { return holds_claim(task, {each.row, each.generation, each.claim}); };
  const auto ends = [&](Room result) {
    if (end_wait()) woken.space();
    return result;
  };
  const auto stale = [&] { return !claims() && !may_rewrite(each, task); };
  if (stale()) return ends(Room::given_up);
  const uint64_t mine = sequence(each.row);
  const auto may_give_up = [&] {
    const SpaceWaiter* const oldest = oldest_waiter();
    const uint64_t its = oldest == nullptr ? mine : std::min(mine, oldest->place.load(kRelaxed) - 1);
    return claims() && under_way(each.row) && may_be_done_again(each.row) && helps_if_given_up(each.row, its);
  };
  register_waiter(mine, each.units, may_give_up());
  // Whoever waits makes room for the first of those who do.
  bool is_first = false;
  uint64_t first = 0;
  const auto fits = [&] {
    const SpaceWaiter* const oldest = oldest_waiter();
    is_first = oldest == nullptr || oldest->place.load(kRelaxed) - 1 >= mine;
    first = is_first ? mine : oldest->place.load(kRelaxed) - 1;
    return has_room(is_first ? each.units : oldest->units);
  };
  bool room = fits();
  if (!room && store_.reap_locked() != 0) {
    if (stale()) return ends(Room::given_up);
    room = fits();
  }
  uint64_t walked = 0;
  size_t here = 0;
  for (uint32_t row = store_.control().order_tail; row != kNoRow && !room && sequence(row) > first;
       row = store_.status()[row].previous) {
    if (walked++ == store_.header().capacity) store_.fail_damaged("the order list is a circle through row", row);
    if (!can_be_set_back(row)) continue;
    set_back(row, woken);
    room = fits() || ++here == kRowsAHold;  // the next call goes on
  }
  if (room) return is_first ? Room::made : Room::wait;
  bool older = false, newer = false;
  for (const SpaceWaiter& other : table_->waiters) {
    if (!waits(other)) continue;
    const uint64_t place = other.place.load(kRelaxed) - 1;
    older |= place < mine;
    newer |= place > mine && other.claims != 0;
  }
  if (older && !newer && !has_unfilled(each.row) && may_give_up()) {
    set_back(each.row, woken);
    table_->revoked.fetch_add(1, kRelaxed);
    return ends(Room::given_up);
  }
  return is_first && takes_all_room(each.row) ? ends(Room::never) : Room::wait;
}

// --- waits ----------------------------------------------------------------------------------------------------

namespace {

// Sleeps on a futex of the segment, in slices, so that a handle that is closed meanwhile is noticed.
void sleep_on(const std::atomic<uint32_t>& word, std::atomic<uint32_t>& waiting, uint32_t seen, double timeout_s) {
  if (timeout_s <= 0) return;
  waiting.fetch_add(1, std::memory_order_seq_cst);
  try {
    if (word.load(std::memory_order_seq_cst) == seen) {
      futex_wait(word, seen, static_cast<uint64_t>(timeout_s * 1e9));
    }
  } catch (...) {
    waiting.fetch_sub(1, std::memory_order_seq_cst);
    throw;
  }
  waiting.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace

void Tasks::await_due(uint32_t task, uint32_t seen, double timeout_s) {
  store_.check_usable();
  check_task(task, "waited for");
  TaskFigures& its = figures(task);
  sleep_on(its.changes, its.waiting, seen, std::min(timeout_s, kLookForDeadS));
  if (store_.calls_.must_end()) store_.check_open();
  // Nothing came for a while, and something is claimed: its owner may be dead.
  if (its.changes.load(kRelaxed) == seen) reap_claims();
}

void Tasks::await_space(uint32_t seen, double timeout_s) {
  store_.check_usable();
  sleep_on(table_->space_changes, table_->space_waiting, seen, std::min(timeout_s, kLookForDeadS));
  if (store_.calls_.must_end()) store_.check_open();
  if (table_->space_changes.load(kRelaxed) == seen) reap_claims();
}

// Reclaims what dead processes held, where any has a claim.
void Tasks::reap_claims() {
  const int fd = store_.mapping_->fd();
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    const Client& other = store_.client(slot);
    if (other.in_use == 0 || slot == store_.client_slot_.load(kRelaxed) || client_lives(fd, slot)) continue;
    store_.reap();
    return;
  }
}

// Rows are between two counts for a moment, which only the lock's holder does not see.
bool Tasks::is_over(uint32_t task) const {
  const auto none_left = [&] { return figures(task).remaining.load(kRelaxed) == 0; };
  if (table_->finished.load(std::memory_order_acquire) == 0 || !none_left()) return false;
  const Store::Guard guard(store_);
  return none_left() && store_.control().writing_count == 0;
}

std::optional<uint64_t> Tasks::rows_left() {
  if (table_->finished.load(std::memory_order_acquire) == 0) return std::nullopt;
  const Store::Guard guard(store_);
  const Control& c = store_.control();
  const uint64_t left =
      count_ == 0 ? store_.committed_count() : figures(last()).remaining.load(kRelaxed) - c.exhausted_count;
  if (c.writing_count != 0) return std::nullopt;
  return left;
}

void Tasks::end_inserts() {
  store_.ensure_client();
  Store::Guard guard(store_);
  table_->finished.store(1, std::memory_order_seq_cst);
  wake_all();
}

void Tasks::wake_all() const {
  for (uint32_t task = 1; task <= count_; ++task) {
    figures(task).changes.fetch_add(1, std::memory_order_seq_cst);
    if (figures(task).waiting.load(std::memory_order_seq_cst) != 0) futex_wake(figures(task).changes);
  }
  table_->space_changes.fetch_add(1, std::memory_order_seq_cst);
  if (table_->space_waiting.load(std::memory_order_seq_cst) != 0) futex_wake(table_->space_changes);
}

Tasks::Oldest Tasks::oldest_claim(uint32_t task) {
  check_task(task, "looked for");
  Oldest oldest;
  uint64_t least = UINT64_MAX;
  if (figures(task).claimed.load(kRelaxed) == 0) return oldest;
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    const TaskWord its = word(row, task);
    if (its.state != TaskState::claimed || sequence(row) >= least) continue;
    least = sequence(row);
    oldest = {row, its.slot, store_.client(its.slot).pid, store_.status()[row].inserted_at_ns.load(kRelaxed)};
  }
  return oldest;
}

// --- repair ---------------------------------------------------------------------------------------------------

void Tasks::clear() {
  heap_.clear();
}

// Of a client that is gone: what it had claimed is due again, what it was writing is freed.
void Tasks::release_claims_of(uint32_t slot) {
  const bool died = slot != store_.client_slot_.load(kRelaxed) && store_.client(slot).claims_for_others == 0;
  Woken woken(*this);
  if (end_waits([&](const SpaceWaiter& each) { return each.slot == slot; })) woken.space();
  if (table_->unfinished[slot].exchange(0, kRelaxed) != 0) woken.space();
  const auto mine = [&](const SpanHead& head) { return head.mark.load(kRelaxed) == filled_by(slot); };
  const auto take_spans = [&](uint32_t row) {
    for (uint32_t task = 0; task <= count_; ++task) {
      const TaskWord its = word(row, task);
      if (its.span != 0 && its.state != TaskState::taken) sift(row, task, its, 0, mine, woken);
    }
  };
  // Rows that it inserted.
  for (uint64_t row = store_.client(slot).held, held = 0; row != kNoRow; row = store_.status()[row].next) {
    if (held++ == store_.header().capacity) store_.fail_damaged("a client is said to hold row", row);
    take_spans(static_cast<uint32_t>(row));
  }
  if (table_->claims[slot] == 0) return;
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    // What it was filling first: a row that is given up below must not wait for the dead.
    take_spans(row);
    for (uint32_t task = 1; task < count_; ++task) {
      const TaskWord its = word(row, task);
      if (its.state == TaskState::claimed && its.slot == slot) unclaim(row, task, died, woken);
    }
  }
  table_->claims[slot] = 0;
}

void Tasks::begin_rebuild(std::span<const bool> alive) {
  std::copy(alive.begin(), alive.end(), alive_.begin());
  rebuilding_ = true;
  for (uint64_t i = 0; i < (count_ + 1) * due_stride_; ++i) due_[i].store(0, kRelaxed);
  for (uint32_t task = 0; task <= count_; ++task) {
    figures(task).due.store(0, kRelaxed);
    figures(task).claimed.store(0, kRelaxed);
    figures(task).remaining.store(0, kRelaxed);
  }
  for (uint32_t& claims : table_->claims) claims = 0;
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (!lives(slot)) table_->unfinished[slot].store(0, kRelaxed);
  }
  for (SpaceWaiter& each : table_->waiters) each.place.store(0, kRelaxed);
  table_->waiter_count.store(0, kRelaxed);
  table_->under_way.store(0, kRelaxed);
  table_->taken.store(0, kRelaxed);
  table_->taken_before.store(0, kRelaxed);
  table_->asked_rows = table_->asked_units = 0;
}

bool Tasks::survives(uint32_t row) const {
  return under_way(row) && word(row, 0).state == TaskState::done;
}

void Tasks::finish_rebuild(Store::Sums& sums) {
  Woken woken(*this);
  std::vector<SpanHeap::Living> living;
  std::vector<uint32_t> lost, finished;
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    const RowState state = store_.status()[row].state;
    if (state == RowState::free) {
      for (uint32_t task = 0; task <= count_; ++task) words(row)[task].store(0, kRelaxed);
      due_words(0)[row / 64].fetch_or(uint64_t{1} << (row % 64), kRelaxed);
      continue;
    }
    const bool way = state == RowState::under_way;
    if (state == RowState::taken) {
      table_->taken.fetch_add(1, kRelaxed);
      const uint64_t after = TakenWord::of(words(row)[last()].load(kRelaxed)).step + 1;
      if (after > table_->taken_before.load(kRelaxed)) table_->taken_before.store(after, kRelaxed);
    }
    for (uint32_t task = 0; task <= count_; ++task) {
      TaskWord its = word(row, task);
      if (its.state == TaskState::taken) continue;
      const bool died = its.state == TaskState::claimed && !lives(its.slot);
      const bool partial = (record(task).flags & kKeepPartial) != 0;
      // Of rows that are being inserted, or are gone, only what is being filled.
      const bool kept = state != RowState::writing && (partial || (its.state != TaskState::not_done && !died));
      bool first_filled = true, changed = false;
      uint64_t previous = 0, front = 0;
      for (Chain at(*this, its.span); at;) {
        const uint64_t span = at.at;
        SpanHead& one = at.head();
        if (!one.is_of(row, task)) store_.fail_damaged("a row's task leads to another row's unit", span);
        at.next();
        const uint32_t mark = one.mark.load(kRelaxed);
        // On a task that is not done only what was appended is kept: a put that died before its word was stored is not.
        bool stays = mark == kFilled ? kept && (its.state == TaskState::done || one.axis != 0) : lives(mark >> 8);
        // Of a task that is done readers have the first one that is filled.
        if (stays && mark == kFilled && its.state == TaskState::done) {
          stays = first_filled;
          first_filled = false;
        }
        if (!stays) {
          // A reader that copies it must find the word changed, as after the rewrite that its process did not end.
          changed |= mark == kFilled && its.state == TaskState::done;
          continue;
        }
        if (previous == 0) {
          front = span;
        } else {
          head(previous).next.store(span, kRelaxed);
        }
        previous = span;
        living.push_back({span, one.size.load(kRelaxed) & kSpanUnits});
        if (mark != kFilled && task != 0) ++table_->claims[mark >> 8];
      }
      if (previous != 0) head(previous).next.store(0, kRelaxed);
      its.span = front;
      if (changed) its.claim = next_claim(its.claim);
      if (died) {
        const bool for_others = store_.client(its.slot).claims_for_others != 0;
        its.state = TaskState::not_done;
        its.slot = 0;
        if (!for_others && its.deaths < kMaxDeaths) ++its.deaths;
        (for_others ? figures(task).released : figures(task).deaths).fetch_add(1, kRelaxed);
        if (!for_others && its.deaths >= kDeathsAllowed) lost.push_back(row);
      }
      if (its.state == TaskState::claimed) {
        ++table_->claims[its.slot];
        figures(task).claimed.fetch_add(1, kRelaxed);
      }
      set_word(row, task, its);
      if (task != 0) forget_version(row, task);
      if (way && task != 0 && its.state != TaskState::done) figures(task).remaining.fetch_add(1, kRelaxed);
    }
    settle_version(row);
    if (!way) {
      const bool finished_row = state == RowState::committed || state == RowState::exhausted;
      if (count_ != 0 && finished_row) figures(last()).remaining.fetch_add(1, kRelaxed);
      continue;
    }
    table_->under_way.fetch_add(1, kRelaxed);
    if (count_ == 0 || is_ready(row, last())) {
      finished.push_back(row);
      continue;
    }
    for (uint32_t task = 1; task < count_; ++task) {
      if (is_ready(row, task)) set_due(task, row, woken);
    }
  }
  std::sort(living.begin(), living.end(),
            [](const SpanHeap::Living& one, const SpanHeap::Living& other) { return one.first < other.first; });
  heap_.rebuild(living);
  rebuilding_ = false;
  for (const uint32_t row : finished) promote(row, sums);
  for (const uint32_t row : lost) {
    if (!under_way(row)) continue;
    table_->given_up.fetch_add(1, kRelaxed);
    drop_row(row, woken);
  }
  wake_all();
}

void Tasks::audit(const std::function<void(const std::string&)>& wrong) const {
  uint64_t units = 0, way = 0, taken = 0;
  std::vector<uint64_t> due(count_ + 1), claimed(count_ + 1), remaining(count_ + 1), claims(kMaxClients);
  for (uint32_t row = 0; row < store_.header().capacity; ++row) {
    const RowState state = store_.status()[row].state;
    way += state == RowState::under_way;
    taken += state == RowState::taken;
    if (is_taken(row) != (state == RowState::taken)) wrong(message_of({"row ", row, " is kept by a batch, or not"}));
    if (is_taken(row) && TakenWord::of(words(row)[last()].load()).step >= table_->taken_before) {
      wrong(message_of({"row ", row, " is kept by a step that none should be kept by"}));
    }
    if (count_ != 0 && (state == RowState::committed || state == RowState::exhausted)) ++remaining[last()];
    if (due_bit(0, row) != (state == RowState::free)) wrong(message_of({"row ", row, " has a wrong bit of free rows"}));
    for (uint32_t task = 0; task <= count_; ++task) {
      const TaskWord its = word(row, task);
      if (its.state == TaskState::taken) continue;
      for (Chain at(*this, its.span); at; at.next()) {
        const SpanHead& one = at.head();
        units += one.size.load(kRelaxed) & kSpanUnits;
        if (!one.is_of(row, task)) wrong(message_of({"row ", row, " has a span of another row"}));
        if (one.mark.load(kRelaxed) != kFilled && task != 0) ++claims[one.mark.load(kRelaxed) >> 8 & 0xff];
      }
      if (state == RowState::free && its.packed() != 0) wrong(message_of({"the free row ", row, " has a task"}));
      const bool lives = state == RowState::under_way || state == RowState::committed;
      if (task == 0 && lives && store_.status()[row].version.load(kRelaxed) != version_of(row)) {
        wrong(message_of({"row ", row, " shows another version than its tasks have"}));
      }
      if (task == 0) continue;
      const bool bare = its.state == TaskState::not_done && its.span == 0;
      if (state == RowState::under_way && bare && version(row, task).load(kRelaxed) != kNoVersion) {
        wrong(message_of({"row ", row, " has a version of task ", task, ", which nobody has begun"}));
      }
      if (its.state == TaskState::claimed) {
        ++claimed[task];
        ++claims[its.slot];
      }
      const bool ready = state == RowState::under_way && task != last() && is_ready(row, task);
      due[task] += ready;
      if (due_bit(task, row) != ready) wrong(message_of({"row ", row, " is wrongly due, or not, for task ", task}));
      if (state == RowState::under_way && its.state != TaskState::done) ++remaining[task];
      if (state == RowState::under_way && task == last() && is_ready(row, task)) {
        wrong(message_of({"row ", row, " is finished and not committed"}));
      }
    }
  }
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (store_.client(slot).in_use == 0 && table_->unfinished[slot].load(kRelaxed) != 0) {
      wrong(message_of({"client ", slot, " is gone, and rows of its batches still count as in flight"}));
    }
  }
  uint32_t waiting = 0;
  for (const SpaceWaiter& each : table_->waiters) waiting += each.place.load(kRelaxed) != 0;
  if (waiting != table_->waiter_count)
    wrong(message_of({waiting, " wait for room, the count is ", table_->waiter_count}));
  if (taken != table_->taken.load(kRelaxed)) {
    wrong(message_of({taken, " rows are kept by batches, the count is ", table_->taken}));
  }
  if (way != table_->under_way.load(kRelaxed)) {
    wrong(message_of({way, " rows are under way, the count is ", table_->under_way}));
  }
  for (uint32_t task = 1; task <= count_; ++task) {
    const TaskFigures& its = figures(task);
    if (due[task] != its.due || claimed[task] != its.claimed || remaining[task] != its.remaining) {
      wrong(
          message_of({"task ", task, " has ", due[task], " rows due, ", claimed[task], " claimed and ", remaining[task],
                      " to go, the counts are ", its.due, ", ", its.claimed, " and ", its.remaining}));
    }
  }
  for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
    if (claims[slot] != table_->claims[slot]) {
      wrong(message_of(
          {"client ", slot, " has ", claims[slot], " claims and spans, its count is ", table_->claims[slot]}));
    }
  }
  if (units + heap_.free_units() + 1 != heap_.units()) {
    wrong(message_of({"spans take ", units, " units and ", heap_.free_units(), " are free, of ", heap_.units()}));
  }
  heap_.audit(wrong);
}

}  // namespace geartrain
