// Selection of rows: exact, seeded, in bulk.
//
// Works on trees and arrays, wherever they live, independent of stores. Every choice is a function of the population,
// the seed, the step, the draw number and the attempt, so the same population gives the same rows on any machine. While
// rows change under a draw, it is made again with the next attempt; the rows returned were selectable when they were
// read.
//
// Definition of a draw (every other implementation follows this to the bit):
//   total    = the sum of the priorities (by priority) or the number of selectable rows (by row)
//   bits     = 128 bits from Philox(seed, step, stream, draw, attempt); below(x) = floor(bits * x / 2^128)
//   plain    target = below(total)
//   strata   n draws share the total: first = floor(draw * total / n), last = floor((draw + 1) * total / n),
//            target = first + below(max(last - first, 1)), at most total - 1
//   distinct draws 0, 1, 2, ... of kDistinctStream are made like plain ones; each that finds a row not yet chosen
//            chooses it. This is drawing without replacement, one row after the other, each in proportion to its
//            priority among those left. After 4 n + 64 draws the rest are drawn from a copy without the chosen rows;
//            their numbers go on from there, under the round's last attempt.
//   the row is the one whose share of the running sum, in order of row numbers, holds the target
//
// Limits refuse rows after they are drawn; a refused draw is made again with the next attempt. When kRefusals
// attempts were refused, it is made from a copy of the allowed rows.
//
// By step priorities: the population is the steps of rows, its words and sums those of (row, step), in the order of row
// * row_steps + step. A draw is one by priority among them. It is refused like one that limits refuse where the row
// does not have `need` steps after the one drawn, or the limits do not allow the row. So steps that can be used are
// drawn in proportion to their priorities.
//
// Over steps: rows in proportion to length - need. Draw i, which has found a row, is refused unless below(x) < length -
// need, where below(x) is a number up to max_length - need from bits of kStepStream under the same draw and attempt; a
// refused draw is made again like one that limits refuse, in the end from a copy in which rows weigh length - need. No
// sum of lengths is kept, so the probability of a draw is not known.
//
// Rows of several episodes (`marks`): what is drawn with a step must be of its episode. A step drawn by priority is
// refused where one of the `skip` steps before it ends an episode, or it does, or one of the `need - 1` behind it. Over
// steps the number that decides, below(x), is the drawn step itself, and is refused likewise: so steps come alike often
// whatever stands beside them, and the copy that is drawn from in the end is one of steps.
//
// Rows that repeat steps of the row before (`repeats`): a step that is drawn from the neighbour (row_repeats.h) is
// refused likewise.
//
// Cost: one cache miss per level of the tree, 64 draws in flight; no locks. Large batches skip the upper levels
// (guide_table.h) and go in the order of their targets. By row, where few runs of rows are missing, none but the row's
// own (missing_rows.h). The copies cost a pass over the population.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "base/random.h"
#include "segment/segment.h"
#include "segment/sum_tree.h"
#include "selection/episode_marks.h"
#include "selection/row_repeats.h"

namespace geartrain {

// What rows are chosen from. Without `status` (bare arrays) the sequence of a row is its number, and no limit but
// the row's own priority can be set.
struct Population {
  PriorityTree priorities;
  BitTree bits;
  const std::atomic<uint64_t>* words = nullptr;
  const RowStatus* status = nullptr;
  // Steps as the unit: leaves of `priorities`, with `words` of their own, that belong to a row; 0: rows are. `bits` and
  // `status` are of the rows.
  uint32_t row_steps = 0;
  EpisodeMarks marks = {};  // of rows that hold several episodes
  RowRepeats repeats = {};  // of rows that repeat steps of the row before
  uint32_t max_steps = 0;   // of a row

  uint64_t rows() const { return priorities.shape().leaves; }
  // The steps of a row that are drawn from it and not from a neighbour. Throws schema where it repeats too few.
  StepRange drawn_steps(uint32_t row, const StepNeeds& needs) const;
};

// Rows outside these limits are not chosen.
struct Limits {
  int64_t min_version = std::numeric_limits<int64_t>::min();
  uint64_t inserted_from_ns = 0;
  uint32_t min_length = 0;

  bool none() const {
    return min_version == std::numeric_limits<int64_t>::min() && inserted_from_ns == 0 && min_length == 0;
  }
  bool allow(const RowStatus& status) const {
    return status.version.load(std::memory_order_relaxed) >= min_version &&
           status.inserted_at_ns.load(std::memory_order_relaxed) >= inserted_from_ns &&
           status.length.load(std::memory_order_relaxed) >= min_length;
  }
};

enum class By : uint8_t { priority, row };

struct Draws {
  std::span<uint32_t> rows;
  std::span<uint32_t> generations;
  std::span<double> probability;   // of this row or step in one plain draw, regardless of limits
  std::span<uint32_t> steps = {};  // where steps are the unit, or found over steps
};

struct DrawPlan {
  DrawKey key;
  By by = By::priority;
  uint32_t round = 0;   // 0, and one more each time the caller draws again for the same numbers (a torn row)
  uint32_t strata = 0;  // 0: plain draws; n: the n draws of the batch share the total
  Limits limits;
  uint32_t max_steps = 0;  // over steps: of a row, at most; 0: over rows. With By::row and a population with status
  uint32_t need = 0;       // over steps, or where they are the unit: steps at a row's end that do not count
  uint32_t skip = 0;       // where steps are the unit: steps at a row's beginning that do not count
  uint32_t stride = 1;     // over steps: every so many-th counts
  StepNeeds needs = {};    // around a step, in rows that repeat steps; `after` 0 elsewhere
  uint32_t shift = 0;      // from the number that is drawn over steps to the step

  // How many of a row's steps count.
  uint32_t steps_of(const RowStatus& status) const {
    return counted(std::min(status.length.load(std::memory_order_relaxed), max_steps));
  }
  uint32_t counted(uint32_t length) const {
    if (length <= need) return 0;
    return stride == 1 ? length - need : (length - need - 1) / stride + 1;
  }
  // Whether draws over steps of these find the step, and not its row alone.
  bool finds_steps(const Population& from) const { return max_steps != 0 && (from.marks || needs.after != 0); }
  // Whether [step - skip, step + need] crosses from one episode of a row to the next.
  bool crosses(const Population& from, uint32_t row, uint64_t step) const {
    return from.marks && (skip | need) != 0 && from.marks.any(row, step - skip, uint64_t{skip} + need);
  }
  // Whether a neighbouring row has the step as well, and it is drawn from there.
  bool elsewhere(const Population& from, uint32_t row, uint64_t step) const {
    return needs.after != 0 && !from.drawn_steps(row, needs).contains(step + shift);
  }
  // Whether a row or step that a draw finds may be refused.
  bool refuses() const { return !limits.none() || max_steps != 0 || refuses_steps(); }
  // Whether a step may be, by where it is in its row.
  bool refuses_steps() const { return (need | skip | needs.after) != 0; }
};

// Attempts that belong to one round. The last is the one made from a copy.
constexpr uint32_t kAttemptsPerRound = 64;
constexpr uint32_t kRefusals = kAttemptsPerRound - 1;

// With replacement. Returns how many draws failed for good, which only a tree in need of repair causes; their rows
// are kNoRow. Throws empty when there is nothing to draw.
uint64_t draw(const Population& from, const DrawPlan& plan, std::span<const uint32_t> numbers, const Draws& out);

// Without replacement: out.rows.size() rows, none twice and none of `excluded`. Throws not_enough.
void draw_distinct(const Population& from, const DrawPlan& plan, std::span<const uint32_t> excluded, const Draws& out);

// The first rows in some order, none of `excluded`; sequences up to and including `after` are passed over. Equal
// priorities: the older first. Returns how many were found, fewer than out.rows.size() when there are no more. A pass
// over the population. The probabilities are 1; sequences and fixed-point priorities, where asked for, are those that
// the rows were ranked by.
enum class Order : uint8_t { oldest, newest, heaviest };
size_t first_rows(const Population& from, Order order, uint64_t after, const Limits& limits,
                  std::span<const uint32_t> excluded, const Draws& out, std::span<uint64_t> sequences = {},
                  std::span<uint32_t> priorities = {});

// The targets of plain draws (or, of kDistinctStream, distinct ones) in a population of that total, which may
// lie in several pieces (shards): the owner of the piece that a target falls into finds the row.
void draw_targets(const DrawKey& key, uint32_t attempt, uint32_t strata, uint64_t total,
                  std::span<const uint32_t> numbers, std::span<uint64_t> targets);

// What one attempt of `draw` finds for targets in a piece of the population (a shard): their rows, with their
// priorities (1 by row), and steps where these are the unit; kNoRow where the attempt is refused. `numbers` are those
// of the draws.
struct Found {
  std::span<uint32_t> rows, generations, priorities, steps;
};
void find_drawn(const Population& from, const DrawPlan& plan, uint32_t attempt, std::span<const uint32_t> numbers,
                std::span<const uint64_t> targets, const Found& out);

// The rows that targets fall into, as of now, with their priorities (1 by row); kNoRow where the population changed on
// the way. Targets are below the total. Returns how many were not found.
uint64_t find_rows(const Population& from, By by, std::span<const uint64_t> targets, std::span<uint32_t> rows,
                   std::span<uint32_t> generations, std::span<uint32_t> priorities);

// For each draw, the last step of its window: uniform over [0, length).
void draw_window_ends(const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                      std::span<const int32_t> lengths, std::span<int32_t> ends);

// Position of the set bit with `rank` set bits below it. There must be one.
uint32_t select_bit(uint64_t word, uint32_t rank);

}  // namespace geartrain
