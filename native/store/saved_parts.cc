// Parts of rows, for journals and checkpoints: what has changed, copies of it, and new stores made of them.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/errors.h"
#include "store/tasks.h"

namespace geartrain {
namespace {

constexpr uint64_t kMostChanges = uint64_t{1} << 63;  // leaves room for others for ever

[[noreturn]] void refuse(const char* what, uint32_t row, uint32_t task) {
  fail(ErrorKind::schema, "what was saved contradicts itself at row ", row, ", task number ", task, ": ", what);
}

uint32_t number_at(const std::byte* at) {
  uint32_t number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

}  // namespace

// --- what has changed ---------------------------------------------------------------------------------------------

SavedPart Tasks::saved_part(uint32_t row, uint32_t task, uint32_t generation) const {
  const uint64_t raw = words(row)[task].load(kRelaxed);
  TaskWord its = TaskWord::of(raw);
  SavedPart part{};
  part.change = change(row, task).load(kRelaxed);
  part.version = kNoVersion;
  part.row = row;
  part.generation = generation;
  part.task = static_cast<uint16_t>(task);
  if (its.state == TaskState::taken && count_ != 0 && task == last()) {
    part.state = TaskState::taken;
    part.step = TakenWord::of(raw).step;
    part.place = static_cast<uint32_t>(TakenWord::of(raw).place);
    return part;
  }
  if (its.state != TaskState::done) return part;
  part.state = TaskState::done;
  part.version = version(row, task).load(kRelaxed);
  if (task == 0) part.bytes = column_bytes_;
  const uint64_t span = layouts_[task].empty() ? 0 : filled(its);
  if (span == 0) return part;
  const SpanHead& found = head(span);
  part.span = span;
  AxisLengths lengths;
  for (uint32_t axis = 0; axis < kMaxAxes; ++axis) lengths[axis] = found.lengths[axis].load(kRelaxed);
  std::array<SpanPiece, kMaxFields> pieces;
  if (!layouts_[task].locate(reinterpret_cast<const std::byte*>(&found), heap_.size_of(span), lengths, pieces)) {
    store_.fail_damaged("the fields of a task leave their span, of row", row);
  }
  std::copy(lengths.begin(), lengths.end(), part.lengths);
  for (size_t i = 0; i < layouts_[task].fields().size(); ++i) part.bytes += pieces[i].bytes;
  return part;
}

uint64_t Tasks::changed(uint64_t since, std::vector<SavedRow>* rows, std::vector<SavedPart>* parts) {
  store_.ensure_client();
  rows->clear();
  parts->clear();
  uint64_t next = 0;
  {
    const Store::Guard guard(store_);
    next = table_->change.load(kRelaxed) + 1;
  }
  if (since == next) return next;
  const uint32_t capacity = static_cast<uint32_t>(store_.header().capacity);
  const auto any_of = [&](uint32_t row) {
    for (uint32_t task = 0; task <= count_; ++task) {
      const uint64_t number = change(row, task).load(std::memory_order_acquire);
      if (number != 0 && number >= since) return true;
    }
    return false;
  };
  for (uint32_t first = 0; first < capacity; first += kRowsAHold) {
    const uint32_t end = std::min<uint32_t>(capacity, first + kRowsAHold);
    // Without the lock: what changes from here on has a number that the next call asks for.
    uint32_t from = first;
    while (from < end && !any_of(from)) ++from;
    if (from == end) continue;
    const Store::Guard guard(store_);
    for (uint32_t row = from; row < end; ++row) {
      if (!any_of(row)) continue;
      const RowStatus& s = store_.status()[row];
      const uint64_t word = store_.words()[row].load(kRelaxed);
      SavedRow told{};
      told.row = row;
      told.generation = generation_of(word) + (s.state == RowState::under_way ? 1 : 0);
      told.state = s.state;
      if (s.state == RowState::free || s.state == RowState::writing) {
        if (since != 0 || told.generation != 0) rows->push_back(told);
        continue;
      }
      told.sequence = s.sequence.load(kRelaxed);
      told.inserted_at_ns = s.inserted_at_ns.load(kRelaxed);
      told.times_sampled = s.times_sampled.load(kRelaxed);
      const bool waits = s.state == RowState::under_way || s.state == RowState::taken;
      told.priority = waits ? std::atomic_ref(const_cast<uint32_t&>(s.heap_slot)).load(kRelaxed) : priority_of(word);
      rows->push_back(told);
      for (uint32_t task = 0; task <= count_; ++task) {
        if (change(row, task).load(kRelaxed) < since) continue;
        const SavedPart part = saved_part(row, task, told.generation);
        if (since != 0 || part.state != TaskState::not_done) parts->push_back(part);
      }
    }
  }
  return next;
}

void Tasks::copy_parts(std::span<const SavedPart> parts, std::span<const uint64_t> offsets, std::byte* out,
                       std::span<uint8_t> ok) const {
  for (size_t i = 0; i < parts.size(); ++i) {
    const SavedPart& part = parts[i];
    ok[i] = 0;
    if (part.row >= store_.header().capacity || part.task > count_) continue;
    const auto is_same = [&] {
      return has_key(part.row, part.generation) &&
             change(part.row, part.task).load(std::memory_order_acquire) == part.change;
    };
    if (!is_same()) continue;
    std::byte* at = out + offsets[i];
    const std::byte* const end = at + part.bytes;
    bool whole = part.state == TaskState::done || part.bytes == 0;
    const auto add = [&](const std::byte* from, uint64_t bytes) {
      whole = whole && bytes <= static_cast<uint64_t>(end - at);
      if (!whole) return;
      std::memcpy(at, from, bytes);
      at += bytes;
    };
    if (part.task == 0 && part.state == TaskState::done) {
      for (const uint32_t field : columns_) add(store_.block(field, part.row), store_.fields()[field].block_bytes);
    }
    if (part.span != 0) {
      const SpanHead* const head = heap_.head(part.span);
      const uint64_t units = head == nullptr ? 0 : head->size.load(kRelaxed) & kSpanUnits;
      AxisLengths lengths;
      std::copy_n(part.lengths, kMaxAxes, lengths.begin());
      std::array<SpanPiece, kMaxFields> pieces;
      const auto* const from = reinterpret_cast<const std::byte*>(head);
      if (units == 0 || units > heap_.units() - part.span ||
          !layouts_[part.task].locate(from, units, lengths, pieces)) {
        continue;
      }
      for (size_t j = 0; j < layouts_[part.task].fields().size(); ++j) add(from + pieces[j].at, pieces[j].bytes);
    }
    // Everything was read before these are read again; a writer changes them first.
    std::atomic_thread_fence(std::memory_order_acquire);
    ok[i] = whole && at == end && is_same();
  }
}

// --- a new store out of what was saved ------------------------------------------------------------------------------

void Tasks::begin_load() {
  store_.ensure_client();
  Store::Guard guard(store_);
  if (store_.control().free_count != store_.header().capacity) {
    fail(ErrorKind::schema, "only a new store can be loaded");
  }
  std::vector<uint32_t> rows(store_.header().capacity);
  take_rows(rows);
  store_.hold(rows, store_.client_slot_);
}

void Tasks::load_parts(std::span<const SavedPart> parts, std::span<const uint64_t> offsets,
                       std::span<const std::byte> bytes) {
  store_.ensure_client();
  for (size_t at = 0; at < parts.size(); at += kRowsAHold) {
    Store::Guard guard(store_);
    for (size_t i = at; i < std::min(parts.size(), at + kRowsAHold); ++i) {
      if (offsets[i] > bytes.size() || offsets[i + 1] < offsets[i] || offsets[i + 1] > bytes.size()) {
        refuse("its bytes lie outside of those that were given", parts[i].row, parts[i].task);
      }
      load_part(parts[i], bytes.subspan(offsets[i], offsets[i + 1] - offsets[i]));
    }
  }
}

void Tasks::load_part(const SavedPart& part, std::span<const std::byte> bytes) {
  const uint32_t row = part.row, task = part.task;
  const auto no = [&](const char* what) { refuse(what, row, task); };
  if (row >= store_.header().capacity || task > count_) no("there is no such row or task");
  const RowStatus& s = store_.status()[row];
  if (s.state != RowState::writing || s.owner != store_.client_slot_.load(kRelaxed)) no("the row is not loaded");
  if (words(row)[task].load(kRelaxed) != 0) no("it is there twice");
  if (part.bytes != bytes.size()) no("its length is another");
  if (part.change >= kMostChanges) no("its change has no such number");
  const bool is_last = count_ != 0 && task == last();
  // Numbers stay, so that what was saved before is known to be the same.
  change(row, task).store(part.change, kRelaxed);
  if (part.change > table_->change.load(kRelaxed)) table_->change.store(part.change, kRelaxed);
  if (part.state != (is_last ? TaskState::taken : TaskState::done)) no("it is in no state that is saved");
  if (is_last) {
    if (!bytes.empty() || part.step >= kMaxTakenSteps || part.place >= kMaxPlaces) no("no batch has such a place");
    words(row)[task].store(TakenWord{part.step, part.place}.packed(), kRelaxed);
    return;
  }
  version(row, task).store(part.version, kRelaxed);
  const std::byte *from = bytes.data(), *const end = from + bytes.size();
  const auto has = [&](uint64_t more) {
    if (more > static_cast<uint64_t>(end - from)) no("its fields are longer than it");
  };
  if (task == 0) {
    for (const uint32_t field : columns_) {
      const uint64_t its = store_.fields()[field].block_bytes;
      has(its);
      std::memcpy(store_.block(field, row), from, its);
      from += its;
    }
  }
  uint64_t span = 0;
  const SpanLayout& layout = layouts_[task];
  if (!layout.empty()) {
    TaskRow made{.row = row};
    std::copy_n(part.lengths, kMaxAxes, made.lengths.begin());
    // Where strings end is among the bytes.
    std::array<uint64_t, kMaxFields> text{};
    const std::byte* at = from;
    for (size_t i = 0; i < layout.fields().size(); ++i) {
      const uint64_t items = layout.fields()[i].items(made.lengths);
      uint64_t its = items * layout.fields()[i].item_bytes;
      if (items != 0 && its / items != layout.fields()[i].item_bytes) no("its fields are longer than it");
      if (i >= layout.arrays()) {
        its = 4 * (items + 1);
        if (its > static_cast<uint64_t>(end - at)) no("its fields are longer than it");
        uint32_t before = number_at(at);
        if (before != 0) no("its strings do not begin");
        for (uint64_t item = 1; item <= items; ++item) {
          const uint32_t bound = number_at(at + 4 * item);
          if (bound < before) no("its strings end before they begin");
          before = bound;
        }
        text[i - layout.arrays()] = before;
        its += before;
      }
      if (its > static_cast<uint64_t>(end - at)) no("its fields are longer than it");
      at += its;
    }
    std::array<SpanPiece, kMaxFields> pieces;
    made.units = layout.place(made.lengths, text, pieces);
    if (made.units == 0) no("no span has such a length");
    span = heap_.take(made.units);
    if (span == 0) {
      fail(ErrorKind::no_space, "what was saved takes more than the store's ", heap_.units() * kSpanUnit,
           " bytes of spans; load it with a larger span_bytes");
    }
    hang(span, task, made, 0);
    auto* const to = reinterpret_cast<std::byte*>(heap_.head(span));
    for (size_t i = 0; i < layout.fields().size(); ++i) {
      std::memcpy(to + pieces[i].at, from, pieces[i].bytes);
      from += pieces[i].bytes;
    }
    head(span).mark.store(kFilled, std::memory_order_release);
  }
  if (from != end) no("it is longer than its fields");
  set_word(row, task, {.state = TaskState::done, .span = span});
}

// Whether the parts of a row can be those of one row.
void Tasks::check_loaded(uint32_t row) const {
  if (word(row, 0).state != TaskState::done) refuse("it was never inserted", row, 0);
  const uint64_t done = done_mask(row);
  for (uint32_t task = 1; task <= count_; ++task) {
    const TaskWord its = word(row, task);
    if (its.state == TaskState::not_done) continue;
    if ((record(task).after & ~done) != 0) refuse("a task before it is not done", row, task);
    if (its.state == TaskState::taken || its.span == 0) continue;
    AxisLengths known;
    locked_lengths(row, &known);
    for (const SpanField& field : layouts_[task].fields()) {
      if (field.axis == 0) continue;
      if (head(its.span).lengths[field.axis - 1].load(kRelaxed) != known[field.axis - 1]) {
        refuse("an axis has another length in another task", row, task);
      }
    }
  }
}

void Tasks::finish_load(std::span<const SavedRow> rows, uint64_t next_sequence) {
  store_.ensure_client();
  Store::Guard guard(store_);
  const uint64_t capacity = store_.header().capacity;
  if (store_.control().writing_count != capacity)
    fail(ErrorKind::schema, "only a store that is loaded can be finished");
  std::vector<uint8_t> seen(capacity);
  uint64_t before = 0;
  for (const SavedRow& each : rows) {
    const bool there = each.state != RowState::free;
    if (each.row >= capacity || seen[each.row]++ != 0) refuse("a row is none, or is there twice", each.row, 0);
    if (there != ((each.generation & 1) != 0)) refuse("its generation is another's", each.row, 0);
    if (!there) continue;
    if (each.sequence <= before || each.sequence >= next_sequence) refuse("rows are out of order", each.row, 0);
    before = each.sequence;
    check_loaded(each.row);
  }
  Woken woken(*this);
  Store::Sums sums(store_);
  const auto free = [&](uint32_t row, uint32_t generation) {
    store_.words()[row].store(make_word(generation, 0), kRelaxed);
    store_.unhold(row);
    store_.put_free_row(row);
  };
  for (const SavedRow& each : rows) {
    const uint32_t row = each.row;
    if (each.state == RowState::free) {
      free(row, each.generation);
      continue;
    }
    RowStatus& s = store_.status()[row];
    store_.unhold(row);
    s.sequence.store(each.sequence, kRelaxed);
    s.inserted_at_ns.store(each.inserted_at_ns & ~(store_.content_mask_ & 1), kRelaxed);
    s.length.store(store_.header().max_length, kRelaxed);
    s.times_sampled.store(each.times_sampled, kRelaxed);
    std::atomic_ref(s.heap_slot).store(each.priority, kRelaxed);
    for (uint32_t task = 0; task <= count_; ++task) {
      if (word(row, task).state == TaskState::not_done) version(row, task).store(kNoVersion, kRelaxed);
    }
    settle_version(row);
    if (is_taken(row)) {
      version(row, last()).store(kNoVersion, kRelaxed);
      settle_version(row);
      const uint64_t after = TakenWord::of(words(row)[last()].load(kRelaxed)).step + 1;
      if (after > table_->taken_before.load(kRelaxed)) table_->taken_before.store(after, kRelaxed);
      store_.words()[row].store(make_word(each.generation, 0), kRelaxed);
      std::atomic_ref(s.state).store(RowState::taken, kRelaxed);
      table_->taken.fetch_add(1, kRelaxed);
      continue;
    }
    store_.words()[row].store(make_word(each.generation - 1, 0), kRelaxed);
    std::atomic_ref(s.state).store(RowState::under_way, std::memory_order_release);
    store_.link_order({&row, 1});
    table_->under_way.fetch_add(1, kRelaxed);
    for (uint32_t task = 1; task <= count_; ++task) {
      if (word(row, task).state == TaskState::done) continue;
      figures(task).remaining.fetch_add(1, kRelaxed);
      if (task != last() && is_ready(row, task)) set_due(task, row, woken);
    }
    if (count_ == 0 || is_ready(row, last())) promote(row, sums);
  }
  for (uint32_t row = 0; row < capacity; ++row) {
    if (seen[row] == 0) free(row, 0);
  }
  store_.set_next_sequence(next_sequence);
}

void Tasks::restore(const Restored& state) {
  store_.ensure_client();
  if (state.saved_before > kMaxTakenSteps) fail(ErrorKind::schema, "steps are below 2^40, found ", state.saved_before);
  {
    Store::Guard guard(store_);
    table_->clock.store(state.clock);
    table_->finished.store(state.finished ? 1 : 0, std::memory_order_seq_cst);
    table_->saved_before.store(state.saved_before, kRelaxed);
    table_->next_row = static_cast<uint32_t>(state.next_row % store_.header().capacity);
    table_->passed_before.store(std::min(state.passed_before, store_.next_sequence()), kRelaxed);
    for (size_t i = 0; i < std::size(kCounters); ++i) {
      (table_->*kCounters[i].second).store(state.counters[i], kRelaxed);
    }
    for (uint32_t task = 1; task <= count_; ++task) {
      for (size_t i = 0; i < std::size(kFigures); ++i) {
        const uint64_t events = state.figures[(task - 1) * std::size(kFigures) + i];
        (figures(task).*kFigures[i].second).store(events, kRelaxed);
      }
    }
  }
  if (count_ != 0) set_limits(state.limits);
}

}  // namespace geartrain
