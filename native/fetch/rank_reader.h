// Rank reader: one rank's part of a global batch that is drawn from the shards of several ranks. All ranks know which
// shard each draw falls into and assign them alike; each copies the rows that it reads, into its own batch and into
// messages to others.
//
// Draws come from either of two places. Independent ones (selection.h) from one store need no more than the shards'
// totals: `draw` makes them, and the rank that reads a row finds it. All others (without replacement, in an order, with
// limits, groups, passes, mixtures, a strategy's own) are made by whoever knows how, and given to `read` as rows. A row
// that is lost on the way is drawn again from its own shard, so that no other rank has to know.
//
// A rank reads the shards that it has open: its own, which other ranks may share, and those of ranks of its host, which
// it has opened read-only. Of the latter it cannot count samples, so the rank that leads such a shard counts them in
// its stead. Sums that are at odds with their rows are repaired by those that may; others take such a draw as lost.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fetch/batch_sampler.h"
#include "fetch/copier.h"
#include "fetch/transitions.h"
#include "fetch/windows.h"
#include "selection/assignment.h"
#include "selection/selection.h"

namespace geartrain {

// Metadata of a row in a message between ranks. Python reads it by `_native.wire_records()`.
struct RowHeader {
  uint32_t row, generation, shard;
  int32_t length, start, steps;  // steps: real ones in the window
  int32_t anchor;                // the step that the window was placed by, or the transition's
  uint32_t reserved;
  int64_t version;
  double probability;
};
static_assert(sizeof(RowHeader) == 48 && offsetof(RowHeader, version) == 32);

class RankReader {
 public:
  // A shard as this rank sees it.
  struct ShardView {
    Store* store = nullptr;        // null: of another host
    uint32_t of = 0;               // which store of the job it is a shard of
    std::vector<uint32_t> fields;  // their numbers in this store
    bool counts = false;           // this rank counts the samples of ranks that are not among its own
    uint32_t turn = 0, turns = 1;  // of this rank's redraws, among those of all ranks that read it
    std::vector<uint32_t> ranks;   // that have it open to write
  };
  // A store of the job: how its rows are drawn again.
  struct StorePlan {
    std::optional<BatchSampler::Settings> draws;  // none: by the strategy's own code (Hooks::again)
    uint64_t seed = 0;
    uint32_t atom = 1;     // rows that stand or fall together
    bool limited = false;  // how often rows are sampled: their shard's leader has counted those that were given
  };
  // A rank that gets rows, and which of their arrays.
  struct Consumer {
    uint32_t rank = 0, replica = 0;
    std::vector<uint32_t> arrays;
  };
  struct Settings {
    WindowPlan window;
    bool pad_left = true;
    unsigned threads = 1;
    std::optional<TransitionView> view;  // transitions instead of windows
    bool in_order = false;               // Assigner::assign
    uint32_t rank = 0;
    std::optional<uint32_t> replica;  // whose batch this rank has, or a copy of it
    std::vector<Consumer> consumers;
    std::vector<StorePlan> stores;
  };

  // The assigner outlives it, and so do the stores. Throws schema for shards with other fields than each other.
  RankReader(Settings settings, std::vector<ShardView> shards, const Assigner& assigner);

  // The draws of a step: of all stores, one after the other.
  struct Draws {
    uint64_t step = 0;
    std::vector<int64_t> shard;   // among those of all stores; the same on every rank
    std::vector<size_t> first;    // each store's first draw; and one more, how many there are
    Assigner::Assigned assigned;  // see `assign`
    // Of this rank's shards; kNoRow elsewhere, and where a row was gone before it was found.
    std::vector<uint32_t> rows, generations;
    std::vector<double> probability;
    std::vector<uint32_t> anchors;  // where `placed`: the steps that windows are told by, or of transitions
    std::vector<uint32_t> rounds;   // under which they were drawn; empty: all under the first one
    std::vector<uint8_t> placed;    // of each store: whether its draws have anchors
    std::vector<uint64_t> cursors;  // of each store, for those that are drawn again
    std::vector<double> share;      // of each shard: what a probability within it is multiplied with
    std::vector<uint64_t> targets;  // of draws by totals: within their shards
    std::vector<uint64_t> whole;    // of each store: the sum of its shards' totals
  };
  // Draws from the shards of all stores with these totals, so many of each store, assigned. Throws empty where all of a
  // store's are 0, schema where they add up to more than 64 bits.
  Draws draw(uint64_t step, std::span<const uint64_t> quotas, std::span<const uint64_t> totals) const;
  // Of draws with shards and the rest above: who trains on each, and who reads it.
  void assign(Draws& draws) const;
  // Sets what a probability within this rank's shard of a store is multiplied with.
  void share_of(uint32_t store, double share, Draws& draws) const;

  // Rows that go from one rank to another: how many a rank gets from this one, or sends to it, by rank; ours are none.
  struct Traffic {
    uint32_t rank;
    std::vector<uint32_t> places;  // in the consumer's batch, in the order of draws
  };
  std::vector<Traffic> outgoing(const Draws& draws) const;
  std::vector<Traffic> incoming(const Draws& draws) const;
  // Whether any row goes from one rank to another.
  bool moves(const Draws& draws) const;
  // Numbers of the draws of this rank's batch.
  std::vector<int64_t> own(const Draws& draws) const;

  // A message of n rows to a rank: its size, and where its arrays and headers begin. No rank: one that gets everything.
  struct Layout {
    std::vector<size_t> arrays;
    size_t headers, bytes;
  };
  Layout layout(uint32_t rank, size_t rows) const;
  // Bytes of a row in each of a rank's arrays.
  std::vector<uint64_t> row_bytes(uint32_t rank) const;

  // Where the rows of one rank go: its batch, or a message to it.
  struct Target {
    uint32_t rank;
    std::vector<std::byte*> arrays;  // row_bytes(rank) each
    std::span<RowHeader> headers;    // as many as there are rows
    Copier* copier = nullptr;        // copies the rows, and not the CPU
  };
  // A message in host memory, laid out as `layout` says.
  Target message(uint32_t rank, std::byte* memory, size_t rows) const;
  // The arrays of a batch that is this rank's own.
  std::vector<std::byte*> arrays_of(const BatchArrays& batch) const;

  // What only the user's code knows.
  struct Hooks {
    // The steps that windows of these rows are told by; where it is empty they are placed by the plan.
    std::function<std::vector<int32_t>(const RowsToCopy& rows)> place;
    // Draws `numbers` of a store's n draws again, none of the rows in `kept`. False: there are no other rows.
    struct Again {
      uint32_t store;
      size_t n;
      uint32_t round;
      std::span<const uint32_t> numbers, kept;
    };
    std::function<bool(const Again& again, std::span<uint32_t> rows, std::span<uint32_t> generations,
                       std::span<double> probability)>
        again;
    // Which rows of a store may be drawn again; where it is empty all of them.
    std::function<Limits(uint32_t store)> limits;
  };

  struct Found {
    std::vector<double> lowest;         // of each store: probability of all rows that this rank has read; inf for none
    std::vector<uint64_t> redrawn;      // of each store
    std::vector<uint64_t> cursors;      // of each store, as far as redraws have moved it
    uint64_t local = 0;                 // rows of the own batch that this rank has read
    std::optional<std::string> failed;  // a shard has no row (any more): some places are not filled
  };
  // Reads this rank's rows into `targets`: one for each rank of `outgoing`, and its own batch where it gets rows. The
  // draws are left as they were read. Walks the draws once, and takes what the rows take. Throws turnover, and corrupt
  // where sums stay at odds with rows after a repair.
  Found read(Draws& draws, std::span<const Target> targets, const Hooks& hooks) const;

  // Puts the rows of a message to their places in this rank's batch. Throws frame for rows of no shard.
  void place(const Target& own, std::span<const uint32_t> places, const std::byte* message) const;
  // What the headers say of a batch's rows, in its arrays; and `shards`, of each row.
  void settle(std::span<const RowHeader> headers, const BatchArrays& batch, std::span<uint16_t> shards) const;

  const Settings& settings() const { return settings_; }
  size_t shards() const { return shards_.size(); }  // of all stores
  uint32_t window() const { return settings_.window.length; }
  size_t steps() const { return steps_; }  // of a row of the mask
  // Bytes that are copied of a row's fields, in their order: those of a batch of this rank's.
  std::vector<uint64_t> field_bytes() const;

 private:
  struct Reads;
  void read_shard(size_t number, Draws& draws, const Reads& reads, std::span<const Target> targets, const Hooks& hooks,
                  Found& found) const;
  void copy(size_t number, const Draws& draws, const Reads& reads, std::span<const Target> targets, const Hooks& hooks,
            const std::vector<uint32_t>& which, uint32_t round, bool counted, std::vector<uint8_t>& torn) const;
  void copy_on_host(const ShardView& shard, const Target& target, const RowsToCopy& rows, uint64_t step,
                    CopiedRows& copied) const;
  void find(size_t number, Draws& draws, const std::vector<uint32_t>& which) const;
  void count_for_others(size_t number, const Draws& draws) const;
  bool draw_again(size_t number, Draws& draws, const Reads& reads, const Hooks& hooks, uint32_t attempt,
                  const std::vector<uint32_t>& lost, Found& found) const;
  const Consumer* consumer_of(uint32_t rank) const;

  Settings settings_;
  std::vector<ShardView> shards_;
  std::vector<std::optional<BatchSampler>> samplers_;  // of each shard that this rank has open, where rows are so drawn
  const Assigner& assigner_;
  std::vector<uint64_t> array_bytes_;              // of each array of a row
  std::vector<uint64_t> field_bytes_;              // of each field of a row
  std::vector<std::vector<uint32_t>> of_replica_;  // the consumers of each replica
  size_t steps_ = 0;
};

}  // namespace geartrain
