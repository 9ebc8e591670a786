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
// Messages are laid out as in geartrain/replay/distributed/messages.py, so that a rank that takes the same steps one by
// one in Python is understood. What ranks find to be wrong all of them find, from the same data.
//
// Threads: one at a time. The store is used within calls of its own (Store::Call), and not during waits for ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "selection/selection.h"
#include "store/store.h"

namespace geartrain {

// A rank's part of the round that begins a batch (rank_status of one store).
struct RankStatus {
  int64_t fingerprint, step, updates;
  int64_t rows, next_sequence, cursor;
  uint64_t total;
};
static_assert(sizeof(RankStatus) == 56);

// A priority given to a row (PRIORITY_UPDATE).
struct PriorityRecord {
  uint32_t store, row, generation, step, call, draw;
  double priority;
};
static_assert(sizeof(PriorityRecord) == 32);

// Priorities that a consumer has given in one call: n of each, `draws` none or n.
struct GivenPriorities {
  std::span<const uint32_t> rows, generations;
  std::span<const int64_t> draws, shards;
  std::span<const double> priorities;
};

// How a rank talks to the others of its group. Every rank makes the same calls in the same order.
class RankExchange {
 public:
  virtual ~RankExchange() = default;
  // parts[i] goes to rank i; what each rank has sent to this one, itself included. Beyond the ranks that send directly
  // to each other the updates may take rounds of their own.
  virtual std::vector<std::vector<std::byte>> all_to_all(std::vector<std::vector<std::byte>> parts) = 0;
  // Of every shard the total that its leader gives.
  virtual std::vector<uint64_t> totals(uint64_t mine) = 0;
  // What every rank gives, of one size; none where the outcome travels with the rows, as the caller's next step.
  virtual std::optional<std::vector<std::vector<std::byte>>> outcomes(std::span<const std::byte> mine) = 0;
};

class RankSteps {
 public:
  struct Settings {
    uint32_t rank = 0, ranks = 1;
    int64_t fingerprint = 0;
    By by = By::priority;
    std::vector<uint32_t> leaders;  // of each shard
    uint64_t min_rows = 1;          // of all shards together
    bool with_lowest = false;       // outcomes tell the lowest probabilities
  };
  // The store outlives it.
  RankSteps(Settings settings, Store& store);

  // What ranks found wrong before any of them draws, or nothing.
  enum class Refusal : uint8_t { none, disagree, few_rows, nothing_to_draw };
  struct Agreed {
    Refusal refusal = Refusal::none;
    uint32_t rank = 0;               // disagree: who differs
    std::vector<RankStatus> status;  // of every rank
    bool changed = false;            // there were updates, which are applied
    uint64_t rows = 0;               // selectable, of all shards
    std::vector<uint64_t> totals;    // of every shard
    size_t sent_bytes = 0;           // by this rank, to the others
  };
  // `change`, where it is given, is called once where any rank has updates, and may change the priorities of those that
  // this rank applies; without it they are taken as they are, but positive.
  using Change = std::function<void(std::span<double>)>;
  Agreed agree(uint64_t step, std::span<const GivenPriorities> given, const Change& change,
               RankExchange& exchange) const;

  // Step 1 in halves: what this rank tells each rank, and what all of them have told this one. `changed` says that
  // there are updates, of which `updates` are for this rank; none is applied.
  using Parts = std::vector<std::vector<std::byte>>;
  Parts begin(uint64_t step, std::span<const GivenPriorities> given) const;
  struct Heard {
    Agreed agreed;
    std::vector<PriorityRecord> updates;
  };
  Heard hear(uint64_t step, std::span<const std::span<const std::byte>> received) const;
  // Updates of one round, in whatever order (store/priority_updates.h). `change`: see agree.
  void apply(const std::vector<PriorityRecord>& updates, const Change& change) const;

  // Of all ranks' reads: whether each has lost rows for good, and the lowest probability of all (with_lowest).
  struct Outcome {
    std::vector<uint8_t> failed;
    double lowest = 0;
  };
  std::optional<Outcome> tell(bool failed, double lowest, RankExchange& exchange) const;

 private:
  bool leads() const;
  uint64_t total() const;
  Refusal refusal_of(const Agreed& agreed) const;  // of a batch of these rows and totals
  Parts parts(const RankStatus& mine, std::span<const GivenPriorities> given) const;

  Settings settings_;
  Store& store_;
};

}  // namespace geartrain
