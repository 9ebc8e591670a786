// Batch sampler: a batch of one store in one call. Rows are drawn, their samples counted, their windows placed, their
// fields copied, and rows that were lost on the way drawn again, until all of them are whole.
//
// Every result is a function of the store's contents, the seed and the step: draws as selection/selection.h defines
// them, windows as place_windows does, lost rows under the next round's attempts.
//
// Threads: any, each with batches of its own. Cost: that of the draw and of one copy of the batch; a few scratch
// arrays of one entry a row.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fetch/fetch.h"
#include "fetch/transitions.h"
#include "fetch/windows.h"
#include "selection/selection.h"

namespace geartrain {

// Where a batch goes. Arrays of one entry a row; `mask` has steps entries a row. Of transitions: `transitions` instead
// of `fields`, and a mask of frame_stack entries a row.
struct BatchArrays {
  std::vector<FetchField> fields;
  std::vector<TransitionField> transitions;
  std::span<float> discount;
  std::span<uint8_t> terminated, truncated, relabelled;  // relabelled: with goals
  std::span<uint32_t> rows, generations, steps;          // steps: those that were drawn, or that windows were placed by
  std::span<double> probability;
  std::span<uint8_t> torn, mask;
  std::span<int32_t> starts, lengths;
  std::span<int64_t> versions;

  // The same for rows [first, first + n).
  BatchArrays part(const Store& store, uint32_t window, const TransitionView* view, size_t first, size_t n) const;
};

// Rows drawn by somebody else, which a BatchSampler is to copy: `numbers` are their places in the batch's part. `steps`
// are the anchors of their windows, or the steps of their transitions; empty: drawn from kWindowStream.
struct DrawnRows {
  std::span<const uint32_t> numbers, rows, generations;
  std::span<const double> probability;
  std::span<const uint32_t> steps = {};
};

class BatchSampler {
 public:
  enum class Form : uint8_t { random, ordered };

  struct Settings {
    WindowPlan window;
    bool pad_left = true;
    unsigned threads = 1;
    uint64_t seed = 0;
    Form form = Form::random;
    By by = By::priority;     // random; in a store with priorities of steps these are drawn, with replacement
    bool replacement = true;  // random
    bool stratified = false;  // random
    bool over_steps = false;  // random, by row, with replacement: rows in proportion to their steps
    // Transitions instead of windows: of any step that has a later one, every such step of a row alike. `start` is that
    // step.
    std::optional<TransitionView> transitions;
    Order order = Order::oldest;
    bool cursor = false;  // ordered: rows up to the cursor are passed over, and it moves on
    uint64_t min_rows = 1;
  };

  // What changes from batch to batch.
  struct Step {
    uint64_t step = 0;
    Limits limits;
    uint64_t cursor = 0;
    bool admitted = false;  // the rate limiter has admitted the rows, and the store was seen to have enough
  };

  struct Result {
    bool done = false;     // false: rows or the rate limiter have to be waited for; nothing was changed
    uint64_t count = 0;    // of selectable rows that these were drawn from
    uint64_t cursor = 0;   // for the next step
    uint64_t redrawn = 0;  // rows lost on the way
  };

  BatchSampler(Store& store, const Settings& settings);

  // Whether steps are drawn and not rows: windows then end at them, or are placed around them.
  bool draws_steps() const { return from_.row_steps != 0 || (settings_.over_steps && from_.marks); }

  // How independent draws of a step are made: which steps count, and which rows.
  DrawPlan plan(const Step& step, uint32_t round, size_t rows) const;

  // Draws and copies out.rows.size() rows. Throws what draws throw, turnover, and corrupt where sums stay at odds with
  // rows after a repair. Where it throws, rows that the rate limiter admitted in here are given back to it.
  Result sample(const BatchArrays& out, const Step& step) const;

  // Draws `numbers` of a batch of n rows under a round, none of `kept` (where no row comes twice), with steps where
  // these are drawn. Returns the cursor after it. Throws what draws throw; of a store that this process only reads,
  // rows that are not found because its sums are being changed are kNoRow.
  uint64_t draw(const Step& step, size_t n, uint32_t round, std::span<const uint32_t> numbers,
                std::span<const uint32_t> kept, const Draws& draws) const;

  // Counts, places and copies rows that were drawn by other means. out.torn is 1 for those that were lost. Returns how
  // many were.
  uint64_t gather(const BatchArrays& out, const DrawnRows& drawn, uint64_t step, uint32_t round) const;

  const TransitionView* view() const { return settings_.transitions ? &*settings_.transitions : nullptr; }

 private:
  uint64_t gather_transitions(const BatchArrays& out, const DrawnRows& drawn, uint64_t step, uint32_t round) const;
  Result draw_and_gather(const BatchArrays& out, const Step& step) const;

  Store& store_;
  Settings settings_;
  Population from_;
};

}  // namespace geartrain
