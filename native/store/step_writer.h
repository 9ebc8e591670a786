// StepWriter: the steps of n environments, recorded into rows of a store, one call a step for all of them.
//
//   StepWriter writer(store, options);
//   writer.begin(observations, mask, version);     // the first observation of each episode
//   writer.step(input, false, &completed);          // what the actions brought, and the observations they led to
//
// A row holds one episode, or a piece of it. Step t of it has the observation that was acted on, the action, what the
// action brought, and `terminated`; the step after the last action has the observation that it led to, zeros, and is
// marked `last`. So n actions fill n + 1 steps. An episode that fills its row goes on in a new one, which repeats
// `overlap` steps, and both note how many (selection/row_repeats.h). With `publish_every` a row can be sampled before
// its episode ends.
//
//   step      0    1    2    3              the row of an episode of three actions
//   obs      o0   o1   o2   o3
//   action   a0   a1   a2    0
//   last      0    0    0    1
//
// With `share_rows` the next episode of an environment goes on in the same row, behind the step that is marked `last`,
// where it has room for an action. A row is published with the first episode that ends in it, is extended by each
// further one, and ends where it is full. Its field `episodes` counts those that have published steps: it changes with
// the row's length, under the lock, and is counted again where a process died within a call. Who copies a row that is
// open meanwhile may see it count the steps that come. With priorities of steps those that are marked get 0, as they
// begin no transition.
//
//   step      0    1    2    3    4    5    the row of an episode of two actions, and one of two that goes on
//   obs      o0   o1   o2   p0   p1   p2
//   last      0    0    1    0    0    .
//
// An episode can be taken back (discard): the writer keeps the keys of the rows that it has completed of each
// environment's newest episode.
//
// Steps are written in place, without the lock. The store is called where rows begin, are published or extended, and
// end: once for all environments of a step, each in a few hundred nanoseconds a row.
//
// Errors. Everything is checked before anything is written. Blocks for rows that begin are allocated first, and what
// rows become is one call to the store (Store::apply), so that whatever it refuses, a full store or a lock that is not
// to be had, leaves the writer as it was and the step can be given again; so does a rate limiter that does not admit a
// row.
//
// One thread at a time, within a Store::Call where others may close the store. After a fork the rows stay the parent's:
// a call in the child throws closed. When its process is killed, published rows stay with their published steps and the
// others are reclaimed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/convert.h"
#include "store/store.h"

namespace geartrain {

// What happens where an episode ends, as Gymnasium's vector environments have it.
enum class Autoreset : uint8_t {
  next_step,  // the next call brings the first observation of the next episode, and its action is ignored
  same_step,  // this call brings it; the observation that the action led to is given apart
  disabled,   // the caller begins the next episode
};

// What a field of the store is for.
enum class FieldRole : uint8_t {
  observation,
  value,
  terminated,
  truncated,
  last,
  step_version,
  episode_return,
  none,
  episodes,
  repeats
};

struct StepWriterOptions {
  uint32_t environments = 1;
  uint32_t publish_every = 0;           // steps; 0: rows are committed when they end
  uint32_t overlap = 0;                 // steps; each is drawn once where there is a field of role `repeats`
  std::optional<double> priority = {};  // of what is published; none: Store::new_priority()
  Autoreset autoreset = Autoreset::next_step;
  std::vector<FieldRole> roles;  // of every field
  bool share_rows = false;       // an episode goes on in the row of the one before; needs a field of role `episodes`
};

// A field's values for all environments: those of environment e are at data + e * stride.
struct StepColumn {
  uint32_t field;
  const std::byte* data;
  uint64_t stride;
  Conversion convert = nullptr;  // nullptr: the field's own dtype
};

struct StepInput {
  std::span<const StepColumn> values;
  std::span<const StepColumn> observations;
  std::span<const StepColumn> finals;  // same_step: where an episode ends; other environments' are not read
  std::span<const uint8_t> terminated, truncated;
  std::span<const uint8_t> mask;  // environments that were stepped; empty: all
  int64_t version = 0;            // of the model that chose the actions
};

// Keys of rows that a call completed, and of which environments they are.
struct CompletedRows {
  std::vector<uint32_t> rows, generations, environments;
};

class StepWriter {
 public:
  // Throws schema: roles or numbers that do not fit the store.
  StepWriter(Store& store, const StepWriterOptions& options);
  StepWriter(const StepWriter&) = delete;
  StepWriter& operator=(const StepWriter&) = delete;

  // Begins an episode in each environment of `mask` (empty: all). One that is in progress is kept as it is. Returns how
  // many rows, or steps where the rate limiter counts these, it would have to admit first, with nothing done; 0 when
  // done.
  size_t begin(std::span<const StepColumn> observations, std::span<const uint8_t> mask, int64_t version, bool admitted,
               CompletedRows* completed);
  // Records a step. Returns as `begin`.
  size_t step(const StepInput& input, bool admitted, CompletedRows* completed);
  // Ends the episodes of `mask` where they are, and keeps their steps.
  size_t cut(std::span<const uint8_t> mask, bool admitted, CompletedRows* completed);
  // Takes back the episode of an environment's newest step: the one in progress or, as long as the next one has no
  // action, the one that has ended. What was not published is dropped; its rows that can be sampled are completed and
  // deleted, earlier ones too, and the rate limiter gets their inserts back. Rows that hold other episodes as well
  // stay, and are returned. The environment is in no episode then; the next one stays if it had begun. A process that
  // is killed meanwhile leaves some of the rows. Where the deletion throws (the lock was not to be had), it can be
  // called again.
  void discard(uint32_t environment, CompletedRows* kept);
  // Which environments' newest step has other values than these, byte by byte, or is not there: 1 for each of them.
  // Columns have the fields' own dtypes.
  void differing(std::span<const StepColumn> values, std::vector<uint8_t>* out) const;
  // Returns the blocks of unpublished rows to the store, and closes published ones with their published steps.
  void abandon();

  // Throws closed: the store is closed, or this is a forked child.
  void check_usable() const;
  // Whether this process is a child of the one that made the writer.
  bool is_foreign() const { return owned_.forked(); }
  const StepWriterOptions& options() const { return options_; }
  std::optional<double> priority() const { return priority_; }
  // What steps, or rows, that are published from now on enter with.
  void set_priority(std::optional<double> priority) { priority_ = priority; }
  uint64_t rows() const { return completed_rows_; }
  // Of large steps that went to a place this writer had not written to yet, whose pages it therefore mapped at once.
  uint64_t mapped_steps() const { return mapped_steps_; }
  bool in_episode(uint32_t environment) const { return environments_[environment].is_in_episode(); }

 private:
  struct Environment {
    uint32_t row = kNoRow;
    uint32_t steps = 0;      // of the row's, where the next action goes
    uint32_t first = 0;      // where its episode begins in the row
    uint32_t published = 0;  // steps of it that can be sampled
    uint32_t generation = 0;
    uint32_t episodes = 1;  // in its row, the present one included
    int64_t version = 0;
    double sum = 0;        // of its rewards
    bool between = false;  // the row's last episode has ended, and the next one goes on in it
    bool goes_on = false;  // its episode began in the row before
    bool dropped = false;  // between, and the last one was taken back before any step of it was published
    uint32_t counted = 0;  // the row's steps below are known to the rate limiter, or need not be
    bool row_admitted = false;
    uint32_t steps_admitted = 0;  // by the rate limiter, of this row

    bool is_in_episode() const { return row != kNoRow && !between; }
    bool has_steps() const { return is_in_episode() && (steps != first || goes_on); }
    bool has_actions() const { return is_in_episode() && steps != first; }
  };
  struct TimedField {
    uint32_t field;
    FieldRole role;
    uint8_t dtype;
    std::byte* base;
    uint64_t stride;  // from row to row
    uint64_t step_bytes;
    uint64_t count;  // elements of a step
    int32_t large;   // its place in written_; -1: steps of few pages
  };
  // A completed row of the episode of an environment's newest step.
  struct Part {
    uint32_t row, generation;
    bool shared;  // with other episodes
    bool row_admitted;
    uint32_t steps_admitted;
  };
  // What the rate limiter has to admit: an environment, and how many of its row's steps it then knows of.
  struct Owed {
    uint32_t environment, steps;
  };
  // Rows of one call to the store.
  struct Group {
    std::vector<uint32_t> environments, rows, lengths, generations;
    std::vector<double> priorities;  // empty where none is given
    std::vector<int64_t> versions;
    std::vector<uint32_t> episodes;  // where rows hold several
    void clear();
  };

  std::byte* at(const TimedField& field, uint32_t row, uint32_t step) const {
    return field.base + row * field.stride + step * field.step_bytes;
  }
  const TimedField& timed(uint32_t field) const { return timed_[place_[field]]; }
  void write(const StepColumn& column, uint32_t environment, uint32_t row, uint32_t step);
  void map_steps(const TimedField& field, uint32_t row, uint32_t step, uint32_t count);
  void write_flag(FieldRole role, uint32_t row, uint32_t step, bool value) const;
  void add_reward(Environment& environment, uint32_t steps) const;
  void mark_last(const Environment& environment, uint32_t step) const;
  void end_row(uint32_t environment, uint32_t steps);
  // Whether a row whose episode ends at `last` has room for another one's action.
  bool has_room(uint32_t last) const { return options_.share_rows && uint64_t{last} + 3 <= max_length_; }
  void end_episode(uint32_t environment, uint32_t last);
  void go_on_in_rows();
  void begin_episode(uint32_t environment, std::span<const StepColumn> observations, int64_t version,
                     bool after_end = false);
  void put(Group& group, uint32_t environment, uint32_t length);
  void take_fresh(size_t count);
  void give_back_fresh();
  void open_row(uint32_t environment, int64_t version);
  // Steps of the present episode that the next row repeats, if this step fills the environment's row.
  uint32_t repeated(const Environment& mine) const { return std::min(options_.overlap, mine.steps + 1 - mine.first); }
  // Notes how many of a row's last steps the next row repeats, and that the episode goes on there; or takes it back.
  void set_followed(uint32_t row, bool followed, uint32_t steps) const;
  // Notes how many of a row's first steps repeat, and whether its episode began in the row before.
  void set_repeated(uint32_t row, uint32_t steps, bool goes_on) const;
  std::atomic_ref<int32_t> repeats(uint32_t row, int number) const;
  // Notes that an environment's row is to be sampled with so many steps; how much the rate limiter has to admit.
  size_t owe(uint32_t environment, uint32_t steps);
  bool must_wait(size_t owed, bool admitted) const {
    return owed != 0 && !admitted && store_.control().limiter.enabled.load(kRelaxed) != 0;
  }
  void settle(CompletedRows* completed, bool admitted);
  void reserve_part(uint32_t environment);
  bool is_stale(const Part& part) const;
  void move_on_to_fresh(uint32_t environment);
  void clear_groups();

  Store& store_;
  const std::shared_ptr<Mapping> mapping_;
  const StepWriterOptions options_;
  std::optional<double> priority_;
  const Owned owned_;
  std::vector<Environment> environments_;
  std::vector<TimedField> timed_;
  std::vector<uint32_t> place_;    // of a field in timed_
  std::vector<uint32_t> per_row_;  // fields without time
  // Of fields of large steps: how many of each row's this writer has written to, at most.
  std::vector<std::vector<uint32_t>> written_;
  uint64_t mapped_steps_ = 0;
  const uint32_t max_length_;
  int32_t return_field_ = -1;
  int32_t episodes_field_ = -1;
  int32_t reward_field_ = -1;
  int32_t repeats_field_ = -1;
  std::vector<uint8_t> reset_next_;  // next_step: the next call begins an episode here
  // Of each environment, of its newest episode; of the one before, as long as `after_end_` says that the present one
  // was begun by the end of that (same_step) and has no action yet.
  std::vector<std::vector<Part>> parts_;
  std::vector<uint8_t> after_end_;
  uint64_t completed_rows_ = 0;

  // Of one call, kept for their memory.
  std::vector<uint32_t> stepped_, ended_, full_, begun_, fresh_, unused_, joined_, marked_;
  std::vector<Owed> owed_;
  std::vector<double> sums_;
  Group publish_, commit_, extend_, seal_;
};

}  // namespace geartrain
