// Rank reader: one rank's part of a global batch that is drawn from the shards of several ranks. All ranks make the
// same draws and assign them alike; each finds and copies the rows that it reads, into its own batch and into messages
// to others.
//
// The draws are independent ones (selection.h) from all shards together, one after the other: of a draw every rank
// knows the shard it falls into, by the shards' totals, and those that read it find the row. A row that is lost on the
// way is drawn again from its own shard, so that no other rank has to know.
//
// A rank reads the shards that it has open: its own, which other ranks may share, and those of ranks of its host, which
// it has opened read-only. Of the latter it cannot count samples, so the rank that leads such a shard counts them in
// its stead. Sums that are at odds with their rows are repaired by those that may; others take such a draw as lost.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fetch/batch_sampler.h"
#include "fetch/windows.h"
#include "selection/assignment.h"
#include "selection/selection.h"

namespace geartrain {

// Metadata of a row in a message between ranks (geartrain/replay/distributed/messages.py, ROW_HEADER).
struct RowHeader {
  uint32_t row, generation, shard;
  int32_t length, start, steps;  // steps: real ones in the window
  int64_t version;
  double probability;
};
static_assert(sizeof(RowHeader) == 40 && offsetof(RowHeader, version) == 24);

class RankReader {
 public:
  // A shard as this rank sees it.
  struct ShardView {
    Store* store = nullptr;        // null: of another host
    std::vector<uint32_t> fields;  // their numbers in this store
    bool counts = false;           // this rank counts the samples of ranks that are not among its own
    uint32_t turn = 0, turns = 1;  // of this rank's redraws, among those of all ranks that read it
    std::vector<uint32_t> ranks;   // that have it open to write
  };
  struct Settings {
    WindowPlan window;
    bool pad_left = true;
    unsigned threads = 1;
    uint64_t seed = 0;
    By by = By::priority;
    bool stratified = false;
    bool in_order = false;  // Assigner::assign
    uint32_t rank = 0;
    std::vector<uint32_t> consumers;  // the rank of each replica
  };

  // The assigner outlives it, and so do the stores. Throws schema for shards with other fields than each other.
  RankReader(Settings settings, std::vector<ShardView> shards, const Assigner& assigner);

  // The draws of a step, as every rank makes them.
  struct Draws {
    uint64_t step = 0, whole = 0;
    std::vector<uint64_t> totals, targets;  // targets: within their shards
    std::vector<int64_t> shard;
    Assigner::Assigned assigned;
  };
  // n draws from shards with these totals. Throws empty where all are 0, schema where they add up to more than 64 bits.
  Draws draw(uint64_t step, size_t n, std::span<const uint64_t> totals) const;

  // Rows that go from one rank to another: how many a rank gets from this one, or sends to it, by rank; ours are none.
  struct Traffic {
    uint32_t rank;
    std::vector<uint32_t> places;  // in the consumer's batch, in the order of draws
  };
  std::vector<Traffic> outgoing(const Draws& draws) const;
  std::vector<Traffic> incoming(const Draws& draws) const;

  // A message of n rows: its size, and where fields and headers begin.
  struct Layout {
    std::vector<size_t> fields;
    size_t headers, bytes;
  };
  Layout layout(size_t rows) const;

  // This rank's batch: what batch_sampler.h names, and the shard of each row.
  struct Batch {
    BatchArrays arrays;
    std::span<uint16_t> shards;
  };
  struct Found {
    double lowest;                      // probability of all rows that this rank has read; inf for none
    uint64_t redrawn = 0, local = 0;    // local: rows of the own batch that this rank has read
    std::optional<std::string> failed;  // a shard has no row (any more): some places are not filled
  };
  // A message on its way to a rank, of `layout(rows that it gets)`.
  struct Message {
    uint32_t rank;
    std::byte* memory;
  };
  // Reads this rank's rows into the batch and the messages, one for each rank of `outgoing`. Walks the draws once, and
  // takes what the rows take. Throws turnover, and corrupt where sums stay at odds with rows after a repair.
  Found read(const Draws& draws, const Batch& batch, std::span<const Message> messages) const;

  // Puts the rows of a message to their places in the batch. Throws frame for rows of no shard.
  void place(const Batch& batch, std::span<const uint32_t> places, const std::byte* message) const;

  uint32_t window() const { return settings_.window.length; }
  size_t steps() const { return steps_; }  // of a row of the mask
  const std::vector<uint64_t>& row_bytes() const { return row_bytes_; }

 private:
  struct Read;
  struct Rows;
  // `sent`: rows of each message, of all shards.
  void read_shard(size_t number, const Draws& draws, std::span<const Read> reads, const Batch& batch,
                  std::span<const Message> messages, std::span<const uint32_t> sent, Found& found) const;
  void count_for_others(size_t number, const Draws& draws) const;
  void draw_again(size_t number, const Draws& draws, uint32_t attempt, Rows& rows,
                  const std::vector<uint32_t>& lost) const;

  Settings settings_;
  std::vector<ShardView> shards_;
  const Assigner& assigner_;
  std::vector<uint64_t> row_bytes_;  // of each field
  size_t steps_ = 0;
};

}  // namespace geartrain
