// Batch sampler: a batch of one store in one call. Rows are drawn, their samples counted, their windows placed, their
// fields copied, and rows that were lost on the way drawn again, until all of them are whole.
//
// Every result is a function of the store's contents, the seed and the step: draws as selection/selection.h defines
// them, windows as place_windows does, lost rows under the next round's attempts. Rows and windows that follow from
// somebody else's code are asked for (Supplier), and a GPU copies rows in the CPU's stead (Copier); everything else is
// the same for them.
//
// Threads: any, each with batches of its own. Cost: that of the draw and of one copy of the batch; a few scratch
// arrays of one entry a row.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fetch/copier.h"
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

// Drawn rows, which a BatchSampler is to copy: `numbers` are their places in the batch's part. `steps` are the anchors
// of their windows, or the steps of their transitions; empty: drawn from kWindowStream.
struct DrawnRows {
  std::span<const uint32_t> numbers, rows, generations;
  std::span<const double> probability;
  std::span<const uint32_t> steps = {};
};

// What of a batch follows from somebody else's code. Either function may be missing: then the sampler draws the rows,
// or places the windows, itself. They may throw. They are called outside of the sampler's own call of the store
// (Store::Call), so that they may use the store as anybody may.
struct Supplier {
  // Rows for some draws; `steps` as in DrawnRows. With `anew` they are all rows of the batch, of whatever number: the
  // next of a pass, or what is left of it where no other row was found for some that are lost.
  struct Rows {
    std::vector<uint32_t> rows, generations;
    std::vector<double> probability;
    std::vector<uint32_t> steps;
    bool anew = false;
  };
  // Of a round, 0 for the first one, the draws to be made, all of them or those that are lost, and the rows that stay.
  std::function<Rows(uint32_t round, std::span<const uint32_t> numbers, std::span<const uint32_t> kept)> rows;
  // The steps that the windows of a round's draws are told by.
  std::function<std::vector<uint32_t>(uint32_t round, const DrawnRows& drawn)> anchors;
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
    size_t atom = 1;      // rows that stand or fall together: when one of them is lost, all are
    uint64_t min_rows = 1;
    uint64_t min_steps = 0;
    bool takes = false;   // in a store with tasks: drawn rows are taken by the batch, and stay (Tasks::take)
    bool strict = false;  // ordered, in a store with tasks: no row is drawn while an older one is under way
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
    uint64_t used_up = 0;  // rows whose last samples were drawn; of a batch that was begun
  };

  // A batch that was begun: its rows are drawn, and a copier copies them.
  class Begun {
   public:
    Begun(Begun&&) noexcept;
    Begun& operator=(Begun&&) noexcept;
    ~Begun();
    const Result& result() const;  // so far

   private:
    friend class BatchSampler;
    class Making;
    explicit Begun(std::unique_ptr<Making> making);
    std::unique_ptr<Making> making_;
  };

  BatchSampler(Store& store, const Settings& settings);

  // Whether steps are drawn and not rows: windows then end at them, or are placed around them.
  bool draws_steps() const { return from_.row_steps != 0 || plan({}, 0, 1).finds_steps(from_); }

  // How independent draws of a step are made: which steps count, and which rows.
  DrawPlan plan(const Step& step, uint32_t round, size_t rows) const;

  // Where a batch of so many rows goes; what is returned stays until the next question, of which there is one where a
  // supplier's rows are fewer than before.
  using Room = std::function<const BatchArrays&(size_t rows)>;

  // Draws and copies n rows, or as many as the supplier has for the first round, in a call of the store of its own.
  // Throws closed, what draws and the supplier throw, turnover, and corrupt where sums stay at odds with rows after a
  // repair. Where it throws, rows that the rate limiter admitted in here are given back to it.
  Result sample(const Room& room, size_t n, const Step& step, const Supplier& supplier = {}) const;

  // The same in two halves, for rows that a copier copies: `begin` draws, counts and places them and launches their
  // copies; `finish` resolves these, and draws and copies again what was lost. The fields of a batch are the copier's,
  // and so is its mask. None: rows or the rate limiter have to be waited for. A batch that is not finished, or of which
  // finishing has thrown, is abandoned, so that no row stays held as one on its last sample.
  std::optional<Begun> begin(const Room& room, size_t n, const Step& step, const Supplier& supplier,
                             Copier& copier) const;
  Result finish(Begun& begun, const Room& room, const Supplier& supplier, Copier& copier) const;
  void abandon(Begun& begun) const;

  // Draws `numbers` of a batch of n rows under a round, none of `kept` (where no row comes twice), with steps where
  // these are drawn. Returns the cursor after it. Throws what draws throw; of a store that this process only reads,
  // rows that are not found because its sums are being changed are kNoRow.
  uint64_t draw(const Step& step, size_t n, uint32_t round, std::span<const uint32_t> numbers,
                std::span<const uint32_t> kept, const Draws& draws) const;

  // Counts, places and copies drawn rows. out.torn is 1 for those that were lost. Returns how many were.
  uint64_t gather(const BatchArrays& out, const DrawnRows& drawn, uint64_t step, uint32_t round) const;

  const TransitionView* view() const { return settings_.transitions ? &*settings_.transitions : nullptr; }

 private:
  // Drawn rows that are about to be copied: whether their samples were had in time, and where their windows are.
  struct Placed {
    std::vector<uint8_t> taken;
    std::vector<int32_t> ends;  // empty: whole rows
    uint64_t used_up = 0;
  };
  Placed place(const DrawnRows& drawn, uint64_t step, uint32_t round) const;
  // Sets 1 for those whose last allowed sample somebody else drew first.
  void mark_refused(const Placed& placed, std::span<uint8_t> torn) const;
  uint64_t gather_transitions(const BatchArrays& out, const DrawnRows& drawn, uint64_t step, uint32_t round) const;
  // Calls `make(call)` in a call of the store, once there are enough rows and the rate limiter has admitted n; false
  // where either has to be waited for.
  template <typename Make>
  bool admitted(size_t n, const Step& step, const Supplier& supplier, Make&& make) const;

  Store& store_;
  Settings settings_;
  Population from_;
};

}  // namespace geartrain
