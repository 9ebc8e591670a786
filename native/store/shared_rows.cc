// Rows that hold several episodes, and rows that repeat steps of the row before: the fields that tell so. How many
// steps can be drawn.

#include <algorithm>
#include <bit>
#include <charconv>
#include <string_view>

#include "base/convert.h"
#include "store/store.h"

namespace geartrain {
namespace {

// nullptr: the store has none of that name.
const FieldRecord* field_called(const Store& store, std::string_view name) {
  const FieldRecord* const fields = store.fields();
  for (uint32_t f = 0; f < store.header().field_count; ++f) {
    if (name == fields[f].name) return &fields[f];
  }
  return nullptr;
}

}  // namespace

EpisodeMarks Store::episode_marks() const {
  if (episodes_field_ < 0) return {};
  const FieldRecord* const last = field_called(*this, "last");
  const std::byte* const column = block(static_cast<uint32_t>(last - fields()), 0);
  return {column, last->stride, header().max_length};
}

// Where the marks are, too.
int32_t Store::find_episodes_field() const {
  const FieldRecord *last = field_called(*this, "last"), *episodes = field_called(*this, "geartrain.episodes");
  const bool found = last != nullptr && last->timed != 0 && last->dtype == kBool && last->ndim == 1 &&
                     last->itemsize == 1 && episodes != nullptr && episodes->timed == 0 && episodes->dtype == kInt32 &&
                     episodes->ndim == 0;
  return found ? static_cast<int32_t>(episodes - fields()) : -1;
}

// "geartrain.repeats", or with ".N" behind it for views whose sums have N steps.
void Store::find_repeats_field() {
  constexpr std::string_view kRepeats = "geartrain.repeats";
  for (uint32_t f = 0; f < header().field_count; ++f) {
    const FieldRecord& field = fields()[f];
    std::string_view rest = field.name;
    if (!rest.starts_with(kRepeats) || field.timed != 0 || field.dtype != kInt32 || field.ndim != 1) continue;
    rest.remove_prefix(kRepeats.size());
    uint32_t n_step = 1;
    if (!rest.empty()) {
      const char* const end = rest.data() + rest.size();
      const auto [read, error] = std::from_chars(rest.data() + 1, end, n_step);
      if (rest.front() != '.' || error != std::errc() || read != end || n_step < 2) continue;
    }
    if (field.shape[0] != 3) continue;
    repeats_field_ = static_cast<int32_t>(f);
    repeats_n_step_ = n_step;
  }
}

StepRange Store::own_steps(uint32_t row, uint32_t length) const {
  if (repeats_field_ < 0) return {0, length};
  StepRange own = RowRepeats::drawn(row_repeats().of(row), length, {0, repeats_n_step_});
  own.first = std::min(own.first, length);
  own.until = std::clamp(own.until, own.first, length);
  return own;
}

RowRepeats Store::row_repeats() const {
  if (repeats_field_ < 0) return {};
  const auto field = static_cast<uint32_t>(repeats_field_);
  return {block(field, 0), fields()[field].stride};
}

void Store::find_last_field() {
  const FieldRecord* const last = field_called(*this, "last");
  const bool marks = last != nullptr && last->timed != 0 && last->dtype == kBool && last->ndim == 1;
  last_field_ = marks ? last : nullptr;
}

uint32_t Store::counted_steps(uint32_t row, uint32_t length) const {
  const uint32_t steps = std::min(length, header().max_length);
  StepRange range{0, steps};
  if (repeats_field_ >= 0) range = RowRepeats::drawn(row_repeats().of(row), steps, {0, 1});
  if (last_field_ == nullptr || range.size() == 0) return range.size();
  const EpisodeMarks marks{block(static_cast<uint32_t>(last_field_ - fields()), 0), last_field_->stride,
                           header().max_length};
  if (episodes_field_ < 0) return range.size() - (range.until == steps && marks.any(row, steps - 1, 1));
  return static_cast<uint32_t>(marks.unmarked(row, range.until, 1) - marks.unmarked(row, range.first, 1));
}

uint64_t Store::step_count() const {
  const Counters& counters = control().counters;
  uint64_t removed = 0;  // before the rows are looked at
  for (const auto* const each :
       {&counters.evicted, &counters.expired, &counters.exhausted, &counters.deleted, &counters.reclaimed}) {
    removed += each->load();
  }
  uint64_t count = 0;
  const uint64_t capacity = header().capacity;
  for (uint64_t at = 0; at * 64 < capacity; ++at) {
    for (uint64_t bits = bit_tree_.leaves()[at].load(kRelaxed); bits != 0; bits &= bits - 1) {
      const uint64_t row = at * 64 + static_cast<uint64_t>(std::countr_zero(bits));
      if (row >= capacity) break;
      const uint32_t length = status()[row].length.load(std::memory_order_acquire);
      count += counted_steps(static_cast<uint32_t>(row), length);
    }
  }
  steps_and_removed_.store(count + removed * header().max_length, kRelaxed);
  return count;
}

uint64_t Store::step_count_up_to(uint64_t enough) const {
  const Counters& counters = control().counters;
  const uint64_t known = steps_and_removed_.load(kRelaxed);
  uint64_t removed = 0;
  for (const auto* const each :
       {&counters.evicted, &counters.expired, &counters.exhausted, &counters.deleted, &counters.reclaimed}) {
    removed += each->load();
  }
  const uint64_t lost = removed * header().max_length;
  return known >= lost && known - lost >= enough ? known - lost : step_count();
}

void Store::set_episodes(uint32_t row, uint32_t episodes) {
  std::byte* const count = block(static_cast<uint32_t>(episodes_field_), row);
  std::atomic_ref<int32_t>(*reinterpret_cast<int32_t*>(count)).store(static_cast<int32_t>(episodes), kRelaxed);
}

void Store::count_episodes(uint32_t row) {
  if (episodes_field_ < 0) return;
  set_episodes(row, episode_marks().episodes(row, status()[row].length.load(kRelaxed)));
}

void Store::end_repeats(uint32_t row) {
  if (repeats_field_ < 0) return;
  auto* const numbers = reinterpret_cast<int32_t*>(block(static_cast<uint32_t>(repeats_field_), row));
  std::atomic_ref<int32_t>(numbers[1]).store(0, kRelaxed);
  std::atomic_ref<int32_t>(numbers[2]).fetch_and(~RowRepeats::kGoesOnThere, kRelaxed);
}

}  // namespace geartrain
