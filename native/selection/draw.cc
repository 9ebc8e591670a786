// Draws with replacement, and what all draws share. Without replacement and in order: draw_exact.cc.

#include "selection/selection.h"

#include <algorithm>
#include <bit>

#include "base/errors.h"
#include "segment/bucket_order.h"
#include "selection/allowed_rows.h"

namespace geartrain {
namespace {

// Enough draws at once to keep the memory system busy; more no longer helps.
constexpr size_t kInFlight = 64;

struct ByPriority {
  const Population& from;
  const PriorityTree& tree = from.priorities;

  uint32_t row_of(const PriorityTree::Found& found) const { return static_cast<uint32_t>(found.node); }
  double share(uint64_t word) const { return priority_of(word); }
  bool has(uint64_t word) const { return is_committed(word) && priority_of(word) != 0; }
};

struct ByRow {
  const Population& from;
  const BitTree& tree = from.bits;

  uint32_t row_of(const BitTree::Found& found) const {
    const uint64_t bits = tree.leaves()[found.node].load(std::memory_order_relaxed);
    if (found.residual >= BitLeaf::count(bits)) return kNoRow;
    const auto row = static_cast<uint32_t>(found.node * 64 + select_bit(bits, static_cast<uint32_t>(found.residual)));
    if (row >= from.rows()) return kNoRow;  // a bit behind the last row, in a damaged segment
    __builtin_prefetch(&from.words[row]);
    return row;
  }
  double share(uint64_t) const { return 1.0; }
  bool has(uint64_t word) const { return is_committed(word); }
};

uint64_t target_of(const DrawKey& key, uint32_t strata, uint32_t draw, uint32_t attempt, uint64_t total) {
  const Random128 bits = random_bits(key, draw, attempt);
  if (strata == 0) return below(bits, total);
  const auto first = static_cast<uint64_t>(static_cast<uint128>(draw) * total / strata);
  const auto last = static_cast<uint64_t>(static_cast<uint128>(draw + uint64_t{1}) * total / strata);
  return std::min(first + below(bits, std::max<uint64_t>(last - first, 1)), total - 1);
}

uint64_t length_of(const Population& from, uint32_t row) {
  return std::min(from.status[row].length.load(std::memory_order_relaxed), from.row_steps);
}

uint64_t target_of(const DrawPlan& plan, uint32_t draw, uint32_t attempt, uint64_t total) {
  return target_of(plan.key, plan.strata, draw, plan.round * kAttemptsPerRound + attempt, total);
}

template <typename Kind>
uint64_t find_by(const Kind& kind, std::span<const uint64_t> targets, std::span<uint32_t> rows,
                 std::span<uint32_t> generations, std::span<uint32_t> priorities) {
  Search found[kInFlight];
  uint64_t missing = 0;
  for (size_t first = 0; first < targets.size(); first += kInFlight) {
    const size_t n = std::min(kInFlight, targets.size() - first);
    kind.tree.find(targets.data() + first, n, found);
    for (size_t i = 0; i < n; ++i) rows[first + i] = kind.tree.inside(found[i]) ? kind.row_of(found[i]) : kNoRow;
    for (size_t i = first; i < first + n; ++i) {
      const uint64_t word = rows[i] == kNoRow ? 0 : kind.from.words[rows[i]].load(std::memory_order_acquire);
      if (!kind.has(word)) {
        rows[i] = kNoRow;
        generations[i] = priorities[i] = 0;
        ++missing;
        continue;
      }
      generations[i] = generation_of(word);
      priorities[i] = static_cast<uint32_t>(kind.share(word));
    }
  }
  return missing;
}

// A draw of the batch, and the number it aims at.
struct Aim {
  uint64_t target;
  uint32_t index;
};

// In smaller populations the tree stays in the cache, and ordering the draws costs more than it saves.
constexpr uint64_t kOrderRows = uint64_t{1} << 25;

template <typename Kind>
uint64_t draw_by(const Kind& kind, const DrawPlan& plan, std::span<const uint32_t> numbers, const Draws& out) {
  const Population& from = kind.from;
  const bool over_steps = plan.max_steps != 0;
  const uint32_t per_row = from.row_steps;
  const bool limited = !plan.limits.none() || over_steps || (per_row != 0 && plan.need != 0);
  const DrawKey step_key{plan.key.seed, plan.key.step, kStepStream};
  Search found[kInFlight];
  uint64_t targets[kInFlight];
  uint32_t index[kInFlight], rows[kInFlight];
  std::fill(out.rows.begin(), out.rows.end(), kNoRow);

  // Searches targets[0..n) for index[0..n); those refused come first in index afterwards. Returns how many.
  const auto look = [&](size_t n, uint64_t total, uint32_t attempt) {
    kind.tree.find(targets, n, found);
    for (size_t i = 0; i < n; ++i) {
      rows[i] = kind.tree.inside(found[i]) ? kind.row_of(found[i]) : kNoRow;
      if (limited && rows[i] != kNoRow) {
        __builtin_prefetch(&from.status[per_row != 0 ? rows[i] / per_row : rows[i]]);
      }
    }
    size_t again = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t leaf = rows[i];
      const uint64_t word = leaf == kNoRow ? 0 : from.words[leaf].load(std::memory_order_acquire);
      const uint32_t row = per_row != 0 ? leaf / per_row : leaf;
      const uint32_t row_step = per_row != 0 ? leaf % per_row : 0;
      bool allowed = kind.has(word) && (!limited || plan.limits.allow(from.status[row]));
      if (allowed && limited && per_row != 0) allowed = row_step + uint64_t{plan.need} < length_of(from, row);
      if (allowed && over_steps) {
        const Random128 bits = random_bits(step_key, numbers[index[i]], plan.round * kAttemptsPerRound + attempt);
        allowed = below(bits, plan.max_steps - plan.need) < plan.steps_of(from.status[row]);
      }
      if (!allowed) {
        index[again++] = index[i];
        continue;
      }
      out.rows[index[i]] = row;
      if (per_row != 0) out.steps[index[i]] = row_step;
      out.generations[index[i]] = generation_of(word);
      out.probability[index[i]] =
          over_steps ? std::numeric_limits<double>::quiet_NaN() : kind.share(word) / static_cast<double>(total);
    }
    return again;
  };
  const auto total_now = [&] {
    const uint64_t total = kind.tree.total();
    if (total == 0) fail_empty(plan);
    return total;
  };

  // Large batches are processed roughly in the order of their targets, so that neighbouring draws share
  // cache lines and pages. Strata are in that order already.
  const uint64_t first_total = total_now();
  PooledArray<Aim> aims;
  if (numbers.size() >= kOrderFrom && from.rows() >= kOrderRows && plan.strata == 0) {
    PooledArray<uint64_t> drawn(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) drawn[i] = target_of(plan, numbers[i], 0, first_total);
    aims = bucket_order<Aim>(
        numbers.size(), first_total, [&](size_t i) { return drawn[i]; },
        [&](size_t i) { return Aim{drawn[i], static_cast<uint32_t>(i)}; });
  }
  uint64_t failed = 0;
  for (size_t first = 0; first < numbers.size(); first += kInFlight) {
    size_t n = std::min(kInFlight, numbers.size() - first);
    for (size_t i = 0; i < n; ++i) {
      index[i] = aims.empty() ? static_cast<uint32_t>(first + i) : aims[first + i].index;
      targets[i] = aims.empty() ? target_of(plan, numbers[index[i]], 0, first_total) : aims[first + i].target;
    }
    n = look(n, first_total, 0);
    for (uint32_t attempt = 1; n > 0 && attempt < kRefusals; ++attempt) {
      const uint64_t total = total_now();
      for (size_t i = 0; i < n; ++i) targets[i] = target_of(plan, numbers[index[i]], attempt, total);
      n = look(n, total, attempt);
    }
    failed += n;
  }
  return failed;
}

}  // namespace

uint64_t draw(const Population& from, const DrawPlan& plan, std::span<const uint32_t> numbers, const Draws& out) {
  const uint64_t failed = plan.by == By::priority ? draw_by(ByPriority{from}, plan, numbers, out)
                                                  : draw_by(ByRow{from}, plan, numbers, out);
  if (failed == 0) return 0;
  if (from.row_steps != 0) {
    return plan.limits.none() && plan.need == 0 ? failed : draw_from_allowed_steps(from, plan, numbers, out);
  }
  if (plan.limits.none() && plan.max_steps == 0) return failed;
  // Limits that allow few rows: the remaining draws are made from a copy of just these rows.
  const Allowed allowed(from, plan, {});
  const uint64_t total = allowed.total();
  if (total == 0) fail_empty(plan);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (out.rows[i] == kNoRow) allowed.take(target_of(plan, numbers[i], kRefusals, total), i, out);
  }
  return 0;
}

void draw_targets(const DrawKey& key, uint32_t attempt, uint32_t strata, uint64_t total,
                  std::span<const uint32_t> numbers, std::span<uint64_t> targets) {
  if (total == 0) fail(ErrorKind::empty, "nothing can be drawn from a total of 0");
  for (size_t i = 0; i < numbers.size(); ++i) targets[i] = target_of(key, strata, numbers[i], attempt, total);
}

uint64_t find_rows(const Population& from, By by, std::span<const uint64_t> targets, std::span<uint32_t> rows,
                   std::span<uint32_t> generations, std::span<uint32_t> priorities) {
  return by == By::priority ? find_by(ByPriority{from}, targets, rows, generations, priorities)
                            : find_by(ByRow{from}, targets, rows, generations, priorities);
}

uint32_t select_bit(uint64_t word, uint32_t rank) {
  uint32_t position = 0;
  for (uint32_t half = 32; half != 0; half /= 2) {
    const auto below = static_cast<uint32_t>(std::popcount(word & ((uint64_t{1} << half) - 1)));
    const bool upper = rank >= below;
    position += upper ? half : 0;
    rank -= upper ? below : 0;
    word = upper ? word >> half : word;
  }
  return position;
}

void draw_window_ends(const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                      std::span<const int32_t> lengths, std::span<int32_t> ends) {
  const DrawKey windows{key.seed, key.step, kWindowStream};
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto length = static_cast<uint64_t>(std::max(lengths[i], 1));
    ends[i] = static_cast<int32_t>(below(random_bits(windows, numbers[i], round * kAttemptsPerRound), length));
  }
}

}  // namespace geartrain
