// Assignment of the draws of a global batch to replicas (who trains on a row) and to ranks (who reads it from its
// shard), the same on every rank. src/geartrain/replay/distributed/assignment.py says what for.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace geartrain {

// A replica's ranks that get fields, the one with the most bytes a row first, and for each the shards in its host's
// memory.
struct ReplicaRanks {
  std::vector<uint32_t> ranks;
  std::vector<std::vector<uint32_t>> local_shards;
  // For each rank the shards that it can read besides: it does so where it gets their rows, which it gets no sooner for
  // that. Empty: none.
  std::vector<std::vector<uint32_t>> near_shards = {};
};

class Assigner {
 public:
  // `shard_ranks`: for each shard, the ranks that have it in their host's memory. Throws schema for a shard that is
  // none of these.
  Assigner(const std::vector<ReplicaRanks>& replicas, std::vector<std::vector<uint32_t>> shard_ranks);

  struct Assigned {
    std::vector<int64_t> replica, reader;
    std::vector<int64_t> place;  // of the row in its replica's batch, in the order of draws
  };

  // Of each draw the shard; `sizes` of the atoms that neighbouring draws stand and fall together in, or empty where
  // each stands alone. In order: replica i gets the i-th slice. Otherwise a replica gets rows of its own shards while
  // there are any. Every replica gets n / replicas draws, the first ones one more where that leaves a rest. Throws
  // schema where atoms do not fit, and for a shard that no rank has.
  // Cost: a few passes over the draws, and over the replicas that have room; two where every shard is of one replica
  // and every replica has one shard, as where each rank has its own.
  Assigned assign(std::span<const int64_t> shard, std::span<const int64_t> sizes, bool in_order) const;

 private:
  struct Atoms;
  void local_first(const Atoms& atoms, std::vector<int64_t>& room, std::vector<int64_t>& replica) const;
  void find_owners(const std::vector<ReplicaRanks>& replicas);
  Assigned local_first_of_owners(std::span<const int64_t> shard, std::vector<int64_t> room) const;
  // The shard's ranks in turn, for a row that goes to a replica without it.
  int64_t reader_in_turn(int64_t shard, std::vector<uint32_t>& turn) const;
  int64_t local_rank(int64_t replica, int64_t shard) const;

  size_t replicas_;
  std::vector<std::vector<uint32_t>> shard_ranks_;
  // For each preference and shard, the replicas whose rank of that preference has the shard.
  std::vector<std::vector<std::vector<uint32_t>>> levels_;
  // For each replica its shards in order, and the first of its ranks that has each.
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> local_;
  // Of each shard the only replica that has it, and its rank (no replica: -1); empty where some replica has several
  // shards or some shard has several replicas.
  struct Owner {
    int32_t replica = -1;
    uint32_t rank = 0;
  };
  std::vector<Owner> owners_;
};

}  // namespace geartrain
