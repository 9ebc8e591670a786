// Draws with replacement, and what all draws share. Without replacement and in order: draw_exact.cc.

#include "selection/selection.h"

#include <algorithm>
#include <bit>

#include "base/errors.h"
#include "segment/bucket_order.h"
#include "selection/allowed_rows.h"
#include "selection/missing_rows.h"

namespace geartrain {
namespace {

// Enough draws at once to keep the memory system busy; more no longer helps.
constexpr size_t kInFlight = 64;

// What is drawn from: where targets fall, what a row's share of the total is, and whether it can be drawn.
struct ByPriority {
  ByPriority(const Population& population, uint64_t /*total*/, size_t /*draws*/) : from(population) {}

  const Population& from;
  const PriorityTree& tree = from.priorities;

  void find(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    tree.find(targets, n, found);
    for (size_t i = 0; i < n; ++i) rows[i] = tree.inside(found[i]) ? static_cast<uint32_t>(found[i].node) : kNoRow;
  }
  double share(uint64_t word) const { return priority_of(word); }
  bool has(uint64_t word) const { return is_committed(word) && priority_of(word) != 0; }
};

struct ByRow {
  ByRow(const Population& population, uint64_t total, size_t draws)
      : from(population), missing(population.bits, population.rows(), total, draws) {}

  const Population& from;
  const BitTree& tree = from.bits;
  MissingRows missing;

  void find(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    if (missing.listed() && tree.total() == missing.total()) {
      const auto* words = tree.leaves();
      for (size_t i = 0; i < n; ++i) {
        rows[i] = targets[i] < missing.total() ? static_cast<uint32_t>(missing.row_of(targets[i])) : kNoRow;
        if (rows[i] == kNoRow) continue;
        __builtin_prefetch(&words[rows[i] / 64]);
        __builtin_prefetch(&from.words[rows[i]]);
      }
      for (size_t i = 0; i < n; ++i) {  // its bit tells what the list was too old for
        if (rows[i] == kNoRow) continue;
        if ((words[rows[i] / 64].load(std::memory_order_relaxed) >> (rows[i] % 64) & 1) == 0) rows[i] = kNoRow;
      }
      return;
    }
    tree.find(targets, n, found);
    for (size_t i = 0; i < n; ++i) rows[i] = row_of(found[i]);
  }
  double share(uint64_t) const { return 1.0; }
  bool has(uint64_t word) const { return is_committed(word); }

 private:
  uint32_t row_of(const Search& found) const {
    if (!tree.inside(found)) return kNoRow;
    const uint64_t bits = tree.leaves()[found.node].load(std::memory_order_relaxed);
    if (found.residual >= BitLeaf::count(bits)) return kNoRow;
    const auto row = static_cast<uint32_t>(found.node * 64 + select_bit(bits, static_cast<uint32_t>(found.residual)));
    if (row >= from.rows()) return kNoRow;  // a bit behind the last row, in a damaged segment
    __builtin_prefetch(&from.words[row]);
    return row;
  }
};

uint64_t target_of(const Random128& bits, uint32_t strata, uint32_t draw, uint64_t total) {
  if (strata == 0) return below(bits, total);
  const auto first = static_cast<uint64_t>(static_cast<uint128>(draw) * total / strata);
  const auto last = static_cast<uint64_t>(static_cast<uint128>(draw + uint64_t{1}) * total / strata);
  return std::min(first + below(bits, std::max<uint64_t>(last - first, 1)), total - 1);
}

// Targets of n draws, kInFlight at most.
void make_targets(const DrawKey& key, uint32_t strata, const uint32_t* draws, size_t n, uint32_t attempt,
                  uint64_t total, uint64_t* targets) {
  uint64_t high[kInFlight], low[kInFlight];
  random_bits(key, draws, n, attempt, high, low);
  for (size_t i = 0; i < n; ++i) targets[i] = target_of({high[i], low[i]}, strata, draws[i], total);
}

uint64_t length_of(const Population& from, uint32_t row) {
  return std::min(from.status[row].length.load(std::memory_order_relaxed), from.row_steps);
}

void make_targets(const DrawPlan& plan, const uint32_t* draws, size_t n, uint32_t attempt, uint64_t total,
                  uint64_t* targets) {
  make_targets(plan.key, plan.strata, draws, n, plan.round * kAttemptsPerRound + attempt, total, targets);
}

uint64_t target_of(const DrawPlan& plan, uint32_t draw, uint32_t attempt, uint64_t total) {
  uint64_t target = 0;
  make_targets(plan, &draw, 1, attempt, total, &target);
  return target;
}

template <typename Kind>
uint64_t find_by(const Kind& kind, std::span<const uint64_t> targets, std::span<uint32_t> rows,
                 std::span<uint32_t> generations, std::span<uint32_t> priorities) {
  Search found[kInFlight];
  uint64_t missing = 0;
  for (size_t first = 0; first < targets.size(); first += kInFlight) {
    const size_t n = std::min(kInFlight, targets.size() - first);
    kind.find(targets.data() + first, n, found, rows.data() + first);
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

template <typename Tree>
uint64_t total_of(const Tree& tree, const DrawPlan& plan) {
  const uint64_t total = tree.total();
  if (total == 0) fail_empty(plan);
  return total;
}

// What a draw refuses of what it finds. Plain: rows are drawn, and nothing is.
template <bool kPlain, typename Kind>
struct Refusals {
  Refusals(const Kind& found_by, const DrawPlan& drawn_by)
      : kind(found_by),
        plan(drawn_by),
        per_row(kPlain ? 0 : kind.from.row_steps),
        over_steps(!kPlain && plan.max_steps != 0),
        finds_steps(!kPlain && plan.finds_steps(kind.from)),
        limited(!kPlain && (!plan.limits.none() || over_steps || (per_row != 0 && (plan.need | plan.skip) != 0))),
        most_counted(over_steps ? plan.counted(plan.max_steps) : 0) {}

  // Before `take` for n draws that have found these leaves, kInFlight at most.
  void look_ahead(const uint32_t* leaves, const uint32_t* draws, size_t n, uint32_t attempt) {
    if (limited) {
      for (size_t i = 0; i < n; ++i) {
        if (leaves[i] != kNoRow) __builtin_prefetch(&kind.from.status[per_row != 0 ? leaves[i] / per_row : leaves[i]]);
      }
    }
    if (over_steps) {
      const DrawKey key{plan.key.seed, plan.key.step, kStepStream};
      random_bits(key, draws, n, plan.round * kAttemptsPerRound + attempt, high, low);
    }
  }

  struct Taken {
    uint64_t word = 0;
    uint32_t row = kNoRow, step = 0;  // kNoRow: refused
  };
  Taken take(size_t i, uint32_t leaf) const {
    const Population& from = kind.from;
    Taken out;
    out.word = leaf == kNoRow ? 0 : from.words[leaf].load(std::memory_order_acquire);
    const uint32_t row = per_row != 0 ? leaf / per_row : leaf;
    out.step = per_row != 0 ? leaf % per_row : 0;
    bool allowed = kind.has(out.word) && (!limited || plan.limits.allow(from.status[row]));
    if (allowed && limited && per_row != 0) {
      allowed = out.step >= plan.skip && out.step + uint64_t{plan.need} < length_of(from, row) &&
                !plan.crosses(from, row, out.step);
    }
    if (allowed && over_steps) {
      const uint64_t number = below({high[i], low[i]}, most_counted);
      allowed = number < plan.steps_of(from.status[row]);
      if (allowed && finds_steps) {
        allowed = !plan.crosses(from, row, number);
        out.step = static_cast<uint32_t>(number);
      }
    }
    if (allowed) out.row = row;
    return out;
  }

  const Kind& kind;
  const DrawPlan& plan;
  const uint32_t per_row;
  const bool over_steps, finds_steps, limited;
  const uint32_t most_counted;
  uint64_t high[kInFlight], low[kInFlight];  // bits that decide about steps
};

template <bool kPlain, typename Kind>
uint64_t draw_by(const Kind& kind, uint64_t first_total, const DrawPlan& plan, std::span<const uint32_t> numbers,
                 const Draws& out) {
  const Population& from = kind.from;
  Refusals<kPlain, Kind> refusals(kind, plan);
  Search found[kInFlight];
  uint64_t targets[kInFlight];
  uint32_t index[kInFlight], rows[kInFlight];
  std::fill(out.rows.begin(), out.rows.end(), kNoRow);

  // Searches targets[0..n) for index[0..n); those refused come first in index afterwards. Returns how many.
  const auto look = [&](size_t n, uint64_t total, uint32_t attempt) {
    kind.find(targets, n, found, rows);
    uint32_t draws[kInFlight];
    if (refusals.over_steps) {
      for (size_t i = 0; i < n; ++i) draws[i] = numbers[index[i]];
    }
    refusals.look_ahead(rows, draws, n, attempt);
    size_t again = 0;
    for (size_t i = 0; i < n; ++i) {
      const auto taken = refusals.take(i, rows[i]);
      if (taken.row == kNoRow) {
        index[again++] = index[i];
        continue;
      }
      out.rows[index[i]] = taken.row;
      if (refusals.per_row != 0 || refusals.finds_steps) out.steps[index[i]] = taken.step;
      out.generations[index[i]] = generation_of(taken.word);
      out.probability[index[i]] = refusals.over_steps ? std::numeric_limits<double>::quiet_NaN()
                                                      : kind.share(taken.word) / static_cast<double>(total);
    }
    return again;
  };
  // Large batches are processed roughly in the order of their targets, so that neighbouring draws share
  // cache lines and pages. Strata are in that order already.
  PooledArray<Aim> aims;
  if (numbers.size() >= kOrderFrom && from.rows() >= kOrderRows && plan.strata == 0) {
    PooledArray<uint64_t> drawn(numbers.size());
    for (size_t first = 0; first < numbers.size(); first += kInFlight) {
      const size_t n = std::min(kInFlight, numbers.size() - first);
      make_targets(plan, numbers.data() + first, n, 0, first_total, &drawn[first]);
    }
    aims = bucket_order<Aim>(
        numbers.size(), first_total, [&](size_t i) { return drawn[i]; },
        [&](size_t i) { return Aim{drawn[i], static_cast<uint32_t>(i)}; });
  }
  uint64_t failed = 0;
  for (size_t first = 0; first < numbers.size(); first += kInFlight) {
    size_t n = std::min(kInFlight, numbers.size() - first);
    if (aims.empty()) {
      make_targets(plan, numbers.data() + first, n, 0, first_total, targets);
      for (size_t i = 0; i < n; ++i) index[i] = static_cast<uint32_t>(first + i);
    } else {
      for (size_t i = 0; i < n; ++i) {
        index[i] = aims[first + i].index;
        targets[i] = aims[first + i].target;
      }
    }
    n = look(n, first_total, 0);
    for (uint32_t attempt = 1; n > 0 && attempt < kRefusals; ++attempt) {
      const uint64_t total = total_of(kind.tree, plan);
      uint32_t again[kInFlight];
      for (size_t i = 0; i < n; ++i) again[i] = numbers[index[i]];
      make_targets(plan, again, n, attempt, total, targets);
      n = look(n, total, attempt);
    }
    failed += n;
  }
  return failed;
}

template <typename Kind, typename Tree>
uint64_t draw_by(const Population& from, const Tree& tree, const DrawPlan& plan, std::span<const uint32_t> numbers,
                 const Draws& out) {
  const uint64_t total = total_of(tree, plan);
  const Kind kind(from, total, numbers.size());
  const bool plain = plan.limits.none() && plan.max_steps == 0 && from.row_steps == 0;
  return plain ? draw_by<true>(kind, total, plan, numbers, out) : draw_by<false>(kind, total, plan, numbers, out);
}

}  // namespace

uint64_t draw(const Population& from, const DrawPlan& plan, std::span<const uint32_t> numbers, const Draws& out) {
  const uint64_t failed = plan.by == By::priority ? draw_by<ByPriority>(from, from.priorities, plan, numbers, out)
                                                  : draw_by<ByRow>(from, from.bits, plan, numbers, out);
  if (failed == 0) return 0;
  if (from.row_steps != 0 || plan.finds_steps(from)) {
    return plan.refuses() ? draw_from_allowed_steps(from, plan, numbers, out) : failed;
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
  for (size_t first = 0; first < numbers.size(); first += kInFlight) {
    const size_t n = std::min(kInFlight, numbers.size() - first);
    make_targets(key, strata, numbers.data() + first, n, attempt, total, targets.data() + first);
  }
}

uint64_t find_rows(const Population& from, By by, std::span<const uint64_t> targets, std::span<uint32_t> rows,
                   std::span<uint32_t> generations, std::span<uint32_t> priorities) {
  if (by == By::priority) return find_by(ByPriority{from, 0, 0}, targets, rows, generations, priorities);
  return find_by(ByRow{from, from.bits.total(), targets.size()}, targets, rows, generations, priorities);
}

namespace {

template <typename Kind>
void find_drawn_by(const Kind& kind, const DrawPlan& plan, uint32_t attempt, std::span<const uint32_t> numbers,
                   std::span<const uint64_t> targets, const Found& out) {
  Refusals<false, Kind> refusals(kind, plan);
  Search found[kInFlight];
  uint32_t leaves[kInFlight];
  for (size_t first = 0; first < targets.size(); first += kInFlight) {
    const size_t n = std::min(kInFlight, targets.size() - first);
    kind.find(targets.data() + first, n, found, leaves);
    refusals.look_ahead(leaves, numbers.data() + first, n, attempt);
    for (size_t i = 0; i < n; ++i) {
      const auto taken = refusals.take(i, leaves[i]);
      const bool none = taken.row == kNoRow;
      out.rows[first + i] = taken.row;
      out.generations[first + i] = none ? 0 : generation_of(taken.word);
      out.priorities[first + i] = none ? 0 : static_cast<uint32_t>(kind.share(taken.word));
      out.steps[first + i] = none ? 0 : taken.step;
    }
  }
}

}  // namespace

void find_drawn(const Population& from, const DrawPlan& plan, uint32_t attempt, std::span<const uint32_t> numbers,
                std::span<const uint64_t> targets, const Found& out) {
  if (plan.by == By::priority) return find_drawn_by(ByPriority{from, 0, 0}, plan, attempt, numbers, targets, out);
  find_drawn_by(ByRow{from, from.bits.total(), targets.size()}, plan, attempt, numbers, targets, out);
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
  uint64_t high[kInFlight], low[kInFlight];
  for (size_t first = 0; first < numbers.size(); first += kInFlight) {
    const size_t n = std::min(kInFlight, numbers.size() - first);
    random_bits(windows, numbers.data() + first, n, round * kAttemptsPerRound, high, low);
    for (size_t i = 0; i < n; ++i) {
      const auto length = static_cast<uint64_t>(std::max(lengths[first + i], 1));
      ends[first + i] = static_cast<int32_t>(below({high[i], low[i]}, length));
    }
  }
}

}  // namespace geartrain
