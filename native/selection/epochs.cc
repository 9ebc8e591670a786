#include "selection/epochs.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "selection/allowed_rows.h"

namespace geartrain {
namespace {

constexpr size_t kPlacesInFlight = 64;

// The finaliser of SplitMix64.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t low_mask(uint32_t bits) {
  return (uint64_t{1} << bits) - 1;
}

// The order of commits; of bare arrays, whose rows are all there, that of their numbers.
uint64_t sequence_of(const Population& from, uint64_t row) {
  return from.status == nullptr ? row + 1 : from.status[row].sequence.load(std::memory_order_acquire);
}

// Of a row's steps, those that count.
uint64_t steps_of(const Population& from, const EpochPlan& plan, uint64_t row) {
  const uint64_t length =
      from.status == nullptr ? plan.row_steps : from.status[row].length.load(std::memory_order_acquire);
  const uint64_t bounded = plan.row_steps == 0 ? length : std::min<uint64_t>(length, plan.row_steps);
  return bounded > plan.need ? (bounded - plan.need - 1) / plan.stride + 1 : 0;
}

// The same where the row holds several episodes, or where its episodes count.
uint64_t counted_steps_of(const Population& from, const EpochPlan& plan, uint64_t row) {
  const uint64_t steps = steps_of(from, plan, row);
  const auto number = static_cast<uint32_t>(row);
  if (plan.episodes) return from.marks.beginnings(number, steps);
  const bool marked = from.marks && plan.need != 0;
  if (plan.needs.after == 0) return marked ? from.marks.unmarked(number, steps, plan.need) : steps;
  const StepRange range = from.drawn_steps(number, plan.needs);
  uint64_t count = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    count += range.contains(step + plan.shift) && !(marked && from.marks.any(number, step, plan.need));
  }
  return count;
}

bool has_steps(const Population& from, const EpochPlan& plan, uint64_t row) {
  return from.status == nullptr || plan.need == 0 || steps_of(from, plan, row) != 0;
}

// Whether its writer still extends a row, which then has another sequence number once it is complete.
bool in_progress(const Population& from, uint64_t row) {
  if (from.status == nullptr) return false;
  return std::atomic_ref<RowState>(const_cast<RowState&>(from.status[row].state)).load(std::memory_order_acquire) ==
         RowState::open;
}

}  // namespace

Permutation::Permutation(uint64_t seed, uint64_t pass, uint64_t size) : size_(size) {
  const auto bits = static_cast<uint32_t>(size <= 1 ? 0 : std::bit_width(size - 1));
  low_bits_ = (bits + 1) / 2;
  high_bits_ = bits / 2;
  for (uint32_t i = 0; i < kFeistelRounds; ++i) {
    keys_[i] = random_bits({seed, pass, kEpochStream}, i, 0).high;
  }
  if (size > kShuffled) return;
  std::iota(shuffled_.begin(), shuffled_.end(), uint16_t{0});
  for (uint32_t i = static_cast<uint32_t>(size); i-- > 1;) {
    std::swap(shuffled_[i], shuffled_[below(random_bits({seed, pass, kEpochStream}, kFeistelRounds + i, 0), i + 1)]);
  }
}

uint64_t Permutation::once(uint64_t value) const {
  uint64_t low = value & low_mask(low_bits_), high = value >> low_bits_;
  for (int i = 0; i < kFeistelRounds; i += 2) {
    low ^= mixed(high + keys_[i]) & low_mask(low_bits_);
    high ^= mixed(low + keys_[i + 1]) & low_mask(high_bits_);
  }
  return high << low_bits_ | low;
}

uint64_t Permutation::operator()(uint64_t position) const {
  if (size_ <= kShuffled) return shuffled_[position];
  uint64_t value = once(position);
  while (value >= size_) value = once(value);  // ends: a cycle leads back to the position, which is below
  return value;
}

void find_epoch(const Population& from, const EpochPlan& plan, uint64_t position, std::span<uint8_t> taken,
                const Draws& out) {
  const uint64_t elements = plan.elements(from);
  if (plan.first > plan.total || elements > plan.total - plan.first || position > plan.total ||
      taken.size() > plan.total - position) {
    fail(ErrorKind::schema, "positions ", position, " to ", position + taken.size(), " are none of a pass over ",
         plan.total, " elements");
  }
  const Permutation permutation(plan.seed, plan.pass, plan.total);
  const uint64_t per_row = plan.row_steps == 0 ? 1 : plan.row_steps;
  uint64_t found[kPlacesInFlight];
  for (size_t first = 0; first < taken.size(); first += kPlacesInFlight) {
    const size_t n = std::min(kPlacesInFlight, taken.size() - first);
    for (size_t i = 0; i < n; ++i) {
      const uint64_t at = position + first + i;
      found[i] = (plan.shuffle ? permutation(at) : at) - plan.first;  // of another shard: huge, or too large
      if (found[i] >= elements) continue;
      const uint64_t row = found[i] / per_row;
      __builtin_prefetch(&from.words[row]);
      __builtin_prefetch(&from.bits.leaves()[row / 64]);
      if (from.status != nullptr) __builtin_prefetch(&from.status[row]);
    }
    for (size_t i = 0; i < n; ++i) {
      taken[first + i] = 0;
      if (found[i] >= elements) continue;
      const uint64_t row = found[i] / per_row, step = found[i] % per_row;
      // The word first: if the row is replaced before its sequence is read, whoever copies it finds another generation.
      const uint64_t word = from.words[row].load(std::memory_order_acquire);
      const uint64_t bits = from.bits.leaves()[row / 64].load(std::memory_order_relaxed);
      if (!is_committed(word) || (bits >> (row % 64) & 1) == 0) continue;
      // Its state before its sequence number: a row that is completed in between is found with the new one.
      if (in_progress(from, row) || sequence_of(from, row) > plan.upto) continue;
      if (plan.row_steps != 0 ? step >= steps_of(from, plan, row) : !has_steps(from, plan, row)) continue;
      if (plan.row_steps != 0 && plan.need != 0 && from.marks &&
          from.marks.any(static_cast<uint32_t>(row), step, plan.need)) {
        continue;
      }
      if (plan.episodes && !from.marks.begins(static_cast<uint32_t>(row), step)) continue;
      if (plan.elsewhere(from, static_cast<uint32_t>(row), step)) continue;
      taken[first + i] = 1;
      out.rows[first + i] = static_cast<uint32_t>(row);
      out.generations[first + i] = generation_of(word);
      out.steps[first + i] = static_cast<uint32_t>(step);
    }
  }
}

EpochStart start_epoch(const Population& from, const EpochPlan& plan) {
  EpochStart start;
  for_each_selectable(from, Limits{}, [&](uint32_t row) {
    // A bit behind the last row, or of none, in a damaged segment.
    if (row >= from.rows() || !is_committed(from.words[row].load(std::memory_order_acquire))) return;
    if (in_progress(from, row)) return;
    start.upto = std::max(start.upto, sequence_of(from, row));
    start.count += plan.row_steps != 0 ? counted_steps_of(from, plan, row) : has_steps(from, plan, row);
  });
  return start;
}

}  // namespace geartrain
