// Steps of a batch over ranks: all ranks tell their shards' totals, send each other priority updates and apply them;
// then each draws and reads (rank_reader.h), and tells whether it has all of its rows.
//
//   1. status      of every rank: step, fingerprint, rows and total of its shard; with the updates for each rank
//   2. updates     applied by the leaders of their shards, in the order of calls and draws; and then new totals
//   3. read        the caller's: draws and rows
//   4. outcome     of every rank's read: whether it has lost rows for good, and the lowest probability
//
// Where updates take effect with a later batch, the totals that come with the status are those of the draws: `begin`
// and `hear` are the halves of that round, between which other messages may be on their way, and `apply` is the
// caller's.
//
// A job may draw from several stores, each with a shard or more; statuses tell of all of them. What a strategy needs to
// know of every shard before it draws, such as the first rows in an order, travels with the status as its offer.
//
// What ranks find to be wrong all of them find, from the same data.
//
// Threads: one at a time. The stores are used within calls of their own (Store::Call), and not during waits for ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "selection/selection.h"
#include "store/priority_updates.h"
#include "store/store.h"

namespace geartrain {

// The records of the round that begins a batch. Python reads them by `_native.wire_records()`.
//
// A rank's status, and of each store its shard's.
struct RankStatus {
  int64_t fingerprint, step, updates;
};
static_assert(sizeof(RankStatus) == 24);
struct ShardStatus {
  int64_t rows, next_sequence;
  int64_t cursor;  // the last sequence number that a redraw has used
  uint64_t total;  // what draws are below, where they need no more than the totals of all shards
  uint64_t steps;  // that can be drawn, or fewer that are enough; 0 where no least number of them is asked for
};
static_assert(sizeof(ShardStatus) == 40);

// A priority given to a row, or to a step of it. Where one was drawn twice the later draw's holds, as on one rank.
struct PriorityRecord {
  uint32_t store, row, generation, step, call, draw;
  double priority;
};
static_assert(sizeof(PriorityRecord) == 32);

// Priorities that a consumer has given in one call: n of each, `draws` and `steps` none or n.
struct GivenPriorities {
  std::span<const uint32_t> rows, generations;
  std::span<const int64_t> draws, shards;  // shards: among those of all stores
  std::span<const uint32_t> steps;
  std::span<const double> priorities;
};

// How a rank talks to the others of its group. Every rank makes the same calls in the same order.
class RankExchange {
 public:
  virtual ~RankExchange() = default;
  // parts[i] goes to rank i; what each rank has sent to this one, itself included. Beyond the ranks that send directly
  // to each other the updates may take rounds of their own.
  virtual std::vector<std::vector<std::byte>> all_to_all(std::vector<std::vector<std::byte>> parts) = 0;
  // Of every shard of every store the total that its leader gives; `mine`: of this rank's shard of each store.
  virtual std::vector<uint64_t> totals(std::span<const uint64_t> mine) = 0;
  // What every rank gives, of one size; none where the outcome travels with the rows, as the caller's next step.
  virtual std::optional<std::vector<std::vector<std::byte>>> outcomes(std::span<const std::byte> mine) = 0;
};

class RankSteps {
 public:
  // A store of the job, and this rank's shard of it.
  struct StoreView {
    Store* store = nullptr;
    By by = By::priority;
    bool by_totals = true;          // draws begin with the shards' totals
    std::vector<uint32_t> leaders;  // of each of its shards
    uint64_t min_rows = 1;          // of all its shards together
    uint64_t min_steps = 0;         // likewise
  };
  struct Settings {
    uint32_t rank = 0, ranks = 1;
    int64_t fingerprint = 0;
    std::vector<StoreView> stores;
    bool with_lowest = false;  // outcomes tell the lowest probabilities
  };
  // The stores outlive it.
  explicit RankSteps(Settings settings);

  // What this rank tells of its shard of a store besides what it finds there.
  struct Told {
    uint64_t cursor = 0;
    std::optional<uint64_t> total;     // of a copy of the priorities that draws are made from
    std::span<const std::byte> offer;  // from those that lead a shard
    size_t offer_bytes = 0;            // of every shard's
  };

  // What ranks found wrong before any of them draws, or nothing.
  enum class Refusal : uint8_t { none, disagree, few_rows, nothing_to_draw };
  struct Agreed {
    Refusal refusal = Refusal::none;
    uint32_t rank = 0;                           // disagree: who differs
    std::vector<RankStatus> status;              // of every rank
    std::vector<ShardStatus> shards;             // of every rank, of each store
    std::vector<std::vector<std::byte>> offers;  // of each store, those of all its shards
    uint32_t store = 0;                          // few_rows, nothing_to_draw: of which
    bool changed = false;                        // there were updates, which are applied
    std::vector<uint64_t> rows;                  // selectable, of all shards of each store
    std::vector<uint64_t> steps;                 // likewise, where a least number is asked for
    std::vector<uint64_t> totals;                // of every shard, of one store after the other
    size_t sent_bytes = 0;                       // by this rank, to the others
  };
  // How priorities are stored. `change` is called once for each store where any rank has updates, of whichever store,
  // and may change the priorities of those that this rank applies; without it they are taken as they are, but positive.
  // `set`, where it is given, stores those of rows, and returns false for the stores of which it does not.
  struct Hooks {
    std::function<void(uint32_t store, std::span<double>)> change;
    std::function<bool(uint32_t store, const PriorityUpdates& updates)> set;
  };
  // Steps 1 and 2, with the totals of after the updates where all draws begin with totals. `told`: of each store; none
  // where they do. `quotas`: rows that are drawn of each store; empty: of all some.
  Agreed agree(uint64_t step, std::span<const GivenPriorities> given, std::span<const Told> told, const Hooks& hooks,
               RankExchange& exchange, std::span<const uint64_t> quotas = {}) const;

  // Step 1 in halves: what this rank tells each rank, and what all of them have told this one. `changed` says that
  // there are updates, of which `updates` are for this rank; none is applied.
  using Parts = std::vector<std::vector<std::byte>>;
  Parts begin(uint64_t step, std::span<const GivenPriorities> given, std::span<const Told> told) const;
  struct Heard {
    Agreed agreed;
    std::vector<PriorityRecord> updates;
  };
  Heard hear(uint64_t step, std::span<const std::span<const std::byte>> received, std::span<const Told> told,
             std::span<const uint64_t> quotas = {}) const;
  // Updates of one round, in whatever order (store/priority_updates.h).
  void apply(const std::vector<PriorityRecord>& updates, const Hooks& hooks) const;

  // Of all ranks' reads: whether each has lost rows for good, and the lowest probability of all (with_lowest).
  struct Outcome {
    std::vector<uint8_t> failed;
    std::vector<double> lowest;  // of each store
  };
  std::optional<Outcome> tell(bool failed, std::span<const double> lowest, RankExchange& exchange) const;

  const Settings& settings() const { return settings_; }

 private:
  void check_of_stores(size_t given, const char* what) const;  // one for each store, or none
  bool leads(size_t store) const;
  uint64_t total(size_t store) const;
  bool by_totals() const;                                               // all draws begin with totals
  void refuse(Agreed& agreed, std::span<const uint64_t> quotas) const;  // a batch of these rows and totals
  void add_updates(std::span<const GivenPriorities> given, Parts& parts) const;

  Settings settings_;
  std::vector<std::pair<uint32_t, uint32_t>> leader_of_;  // of each shard of all stores: its store, and its leader
};

}  // namespace geartrain
