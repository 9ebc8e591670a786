// Rows that hold several episodes, and rows that repeat steps of the row before: the fields that tell so.

#include <algorithm>
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
