// Draws with replacement, and what all draws share. Without replacement and in order: draw_exact.cc.

#include "selection/selection.h"

#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "base/errors.h"
#include "segment/bucket_order.h"
#include "selection/allowed_rows.h"
#include "selection/found_by.h"

namespace geartrain {
namespace {

// Searches at once, which keep the memory system busy. 16 to 128 differ by less than a tenth.
constexpr size_t kInFlight = 64;

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
constexpr uint64_t kOrderRows = uint64_t{1} << 22;

template <typename Tree>
uint64_t total_of(const Tree& tree, const DrawPlan& plan) {
  const uint64_t total = tree.total();
  if (total == 0) fail_empty(plan);
  return total;
}

// What a draw took: a leaf's word, its row and step. A row of kNoRow: refused, and the word is 0.
struct Taken {
  uint64_t word = 0;
  uint32_t row = kNoRow, step = 0;
};

// What a draw may refuse of what it finds, beside what has left meanwhile. None: it draws rows, or steps.
enum class Refusing : uint8_t { no_row, no_step, some };

template <Refusing kRefusing, typename Kind>
struct Refusals {
  static constexpr bool kPlain = kRefusing != Refusing::some;

  Refusals(const Kind& found_by, const DrawPlan& drawn_by)
      : kind(found_by),
        plan(drawn_by),
        per_row(kRefusing == Refusing::no_row ? 0 : kind.from.row_steps),
        over_steps(!kPlain && plan.max_steps != 0),
        finds_steps(!kPlain && plan.finds_steps(kind.from)),
        limited(!kPlain && (!plan.limits.none() || over_steps || (per_row != 0 && plan.refuses_steps()))),
        most_counted(over_steps ? plan.counted(plan.max_steps) : 0) {}

  // Before `take` for n draws that have found these leaves, kInFlight at most.
  void look_ahead(const uint32_t* leaves, const uint32_t* draws, size_t n, uint32_t attempt) {
    if (limited) {
      for (size_t i = 0; i < n; ++i) {
        if (leaves[i] == kNoRow) continue;
        const uint32_t row = per_row != 0 ? leaves[i] / per_row : leaves[i];
        __builtin_prefetch(&kind.from.status[row]);
        if (plan.needs.after != 0) __builtin_prefetch(kind.from.repeats.at(row));
      }
    }
    if (over_steps) {
      const DrawKey key{plan.key.seed, plan.key.step, kStepStream};
      random_bits(key, draws, n, plan.round * kAttemptsPerRound + attempt, high, low);
    }
  }

  Taken take(size_t i, uint32_t leaf) const {
    const Population& from = kind.from;
    if (leaf == kNoRow) return {};
    Taken out{from.words[leaf].load(std::memory_order_acquire), leaf};
    if (!kind.has(out.word)) return {};
    if (per_row != 0) {
      out.row = leaf / per_row;
      out.step = leaf % per_row;
    }
    if (!limited) return out;
    if (!plan.limits.allow(from.status[out.row])) return {};
    if (per_row != 0 && (out.step < plan.skip || out.step + uint64_t{plan.need} >= length_of(from, out.row) ||
                         plan.crosses(from, out.row, out.step) || plan.elsewhere(from, out.row, out.step))) {
      return {};
    }
    if (over_steps) {
      const uint64_t number = below({high[i], low[i]}, most_counted);
      if (number >= plan.steps_of(from.status[out.row])) return {};
      if (finds_steps) {
        if (plan.crosses(from, out.row, number) || plan.elsewhere(from, out.row, number)) return {};
        out.step = static_cast<uint32_t>(number);
      }
    }
    return out;
  }

  const Kind& kind;
  const DrawPlan& plan;
  const uint32_t per_row;
  const bool over_steps, finds_steps, limited;
  const uint32_t most_counted;
  uint64_t high[kInFlight], low[kInFlight];  // bits that decide about steps
};

// Large batches are processed roughly in the order of their targets, so that neighbouring draws share cache lines and
// pages. Strata are in that order already. Empty where the order does not pay.
PooledArray<Aim> aims_in_order(const Population& from, const DrawPlan& plan, uint64_t total,
                               std::span<const uint32_t> numbers) {
  if (numbers.size() < kOrderFrom || from.rows() < kOrderRows || plan.strata != 0) return PooledArray<Aim>();
  PooledArray<uint64_t> drawn(numbers.size());
  for (size_t first = 0; first < numbers.size(); first += kInFlight) {
    const size_t n = std::min(kInFlight, numbers.size() - first);
    make_targets(plan, numbers.data() + first, n, 0, total, &drawn[first]);
  }
  return bucket_order<Aim>(
      numbers.size(), total, [&](size_t i) { return drawn[i]; },
      [&](size_t i) { return Aim{drawn[i], static_cast<uint32_t>(i)}; });
}

// The attempts of a batch's draws: all of the first, then all of those that were refused, and so on.
template <Refusing kRefusing, typename Kind>
class Attempts {
 public:
  Attempts(const Kind& found_by, const DrawPlan& drawn_by, std::span<const uint32_t> draws, const Draws& drawn)
      : kind(found_by),
        plan(drawn_by),
        numbers(draws),
        out(drawn),
        refusals(found_by, drawn_by),
        refused(draws.size()) {}

  // Returns how many failed for good.
  uint64_t make(uint64_t first_total) {
    if constexpr (kRefusing == Refusing::no_row && std::is_same_v<Kind, ByRow>) {
      first_by_row(first_total);
    } else if (const PooledArray<Aim> aims = aims_in_order(kind.from, plan, first_total, numbers); aims.empty()) {
      first(first_total);
    } else {
      first_in_order(aims, first_total);
    }
    for (uint32_t attempt = 1; refusals_left != 0 && attempt < kRefusals; ++attempt) repeat(attempt);
    return refusals_left;
  }

 private:
  void first(uint64_t total) {
    for (size_t at = 0; at < numbers.size(); at += kInFlight) {
      const size_t n = std::min(kInFlight, numbers.size() - at);
      make_targets(plan, numbers.data() + at, n, 0, total, targets);
      kind.find_first(targets, n, found, leaves);
      refusals.look_ahead(leaves, numbers.data() + at, n, 0);
      for (size_t i = 0; i < n; ++i) put(at + i, refusals.take(i, leaves[i]), total);
    }
  }

  // What a draw took goes to its place in one piece, and from there to the arrays in their order: one line that is not
  // in the cache, where four arrays are four.
  void first_in_order(const PooledArray<Aim>& aims, uint64_t total) {
    PooledArray<Taken> all(numbers.size());
    for (size_t at = 0; at < numbers.size(); at += kInFlight) {
      const size_t n = std::min(kInFlight, numbers.size() - at);
      for (size_t i = 0; i < n; ++i) {
        targets[i] = aims[at + i].target;
        __builtin_prefetch(&all[aims[at + i].index], 1);
      }
      kind.find_first(targets, n, found, leaves);
      if (refusals.over_steps) {
        for (size_t i = 0; i < n; ++i) some_numbers[i] = numbers[aims[at + i].index];
      }
      refusals.look_ahead(leaves, some_numbers, n, 0);
      for (size_t i = 0; i < n; ++i) all[aims[at + i].index] = refusals.take(i, leaves[i]);
    }
    for (size_t i = 0; i < numbers.size(); ++i) put(i, all[i], total);
  }

  // Rows that the list of missing ones names need no search, so that only their words are waited for: while those of 64
  // draws are fetched the next draws are made.
  void first_by_row(uint64_t total) {
    constexpr size_t kTogether = 16;  // random numbers that are made at once
    const size_t draws = numbers.size();
    size_t missing = 0;
    std::fill(out.probability.begin(), out.probability.end(), 1.0 / static_cast<double>(total));
    const auto* words = kind.from.words;
    for (size_t at = 0; at < draws + kInFlight; at += kTogether) {
      if (at < draws) {
        const size_t n = std::min(kTogether, draws - at);
        make_targets(plan, numbers.data() + at, n, 0, total, targets);
        kind.aim(targets, n, found, &out.rows[at]);
      }
      if (at < kInFlight) continue;
      const size_t last = std::min(at - kInFlight + kTogether, draws);
      for (size_t i = at - kInFlight; i < last; ++i) {
        const uint32_t row = out.rows[i];
        uint64_t word = 0;
        if (row != kNoRow) {
          word = kind.selectable(row) ? words[row].load(std::memory_order_acquire) : 0;
        }
        const bool is_there = kind.has(word);
        out.rows[i] = is_there ? row : kNoRow;
        out.generations[i] = generation_of(word);
        missing += !is_there;
      }
    }
    for (size_t i = 0; refusals_left < missing; ++i) {
      if (out.rows[i] == kNoRow) refused[refusals_left++] = static_cast<uint32_t>(i);
    }
  }

  void repeat(uint32_t attempt) {
    const size_t all = std::exchange(refusals_left, 0);
    for (size_t at = 0; at < all; at += kInFlight) {
      const size_t n = std::min(kInFlight, all - at);
      const uint64_t total = total_of(kind.tree, plan);
      for (size_t i = 0; i < n; ++i) some_numbers[i] = numbers[refused[at + i]];
      make_targets(plan, some_numbers, n, attempt, total, targets);
      kind.find(targets, n, found, leaves);
      refusals.look_ahead(leaves, some_numbers, n, attempt);
      for (size_t i = 0; i < n; ++i) put(refused[at + i], refusals.take(i, leaves[i]), total);
    }
  }

  void put(size_t at, const Taken& taken, uint64_t total) {
    out.rows[at] = taken.row;
    out.generations[at] = generation_of(taken.word);
    constexpr bool kSome = kRefusing == Refusing::some;
    if (kRefusing == Refusing::no_step || (kSome && (refusals.per_row != 0 || refusals.finds_steps))) {
      out.steps[at] = taken.step;
    }
    out.probability[at] = kSome && refusals.over_steps ? std::numeric_limits<double>::quiet_NaN()
                                                       : kind.share(taken.word) / static_cast<double>(total);
    if (taken.row == kNoRow) refused[refusals_left++] = static_cast<uint32_t>(at);
  }

  const Kind& kind;
  const DrawPlan& plan;
  const std::span<const uint32_t> numbers;
  const Draws& out;
  Refusals<kRefusing, Kind> refusals;
  PooledArray<uint32_t> refused;  // places of the batch, so many
  size_t refusals_left = 0;
  Search found[kInFlight];
  uint64_t targets[kInFlight];
  uint32_t leaves[kInFlight], some_numbers[kInFlight];
};

template <typename Kind, typename Tree>
uint64_t draw_by(const Population& from, const Tree& tree, const DrawPlan& plan, std::span<const uint32_t> numbers,
                 const Draws& out) {
  const uint64_t total = total_of(tree, plan);
  const Kind kind(from, total, numbers.size());
  const bool plain = plan.limits.none() && plan.max_steps == 0 && (from.row_steps == 0 || !plan.refuses_steps());
  if (!plain) return Attempts<Refusing::some, Kind>(kind, plan, numbers, out).make(total);
  if constexpr (std::is_same_v<Kind, ByPriority>) {
    if (from.row_steps != 0) return Attempts<Refusing::no_step, Kind>(kind, plan, numbers, out).make(total);
  }
  return Attempts<Refusing::no_row, Kind>(kind, plan, numbers, out).make(total);
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
  Refusals<Refusing::some, Kind> refusals(kind, plan);
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

StepRange Population::drawn_steps(uint32_t row, const StepNeeds& needs) const {
  const std::atomic<uint64_t>& word = words[row_steps != 0 ? uint64_t{row} * row_steps : row];
  const uint64_t before = word.load(std::memory_order_acquire);
  const SharedSteps shared = repeats.of(row);
  const uint32_t length = status[row].length.load(std::memory_order_relaxed);
  if (!shared.goes_on_here || shared.first >= needs.least()) {
    return RowRepeats::drawn(shared, length, needs);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t now = word.load(std::memory_order_relaxed);
  // Of a row that was replaced meanwhile this says nothing; whoever copies it finds it torn.
  if (!is_committed(before) || generation_of(now) != generation_of(before)) return {};
  fail(ErrorKind::schema, "row ", row, " goes on with the episode of the row before and repeats ", shared.first,
       " of its steps; this view needs ", needs.least(),
       " for the steps at the border: record with overlap=", needs.least(), " or more");
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
