#include "selection/assignment.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/errors.h"

namespace geartrain {

struct Assigner::Atoms {
  std::vector<int64_t> shard, size;
  bool alone = false;  // each is one draw
};

Assigner::Assigner(const std::vector<ReplicaRanks>& replicas, std::vector<std::vector<uint32_t>> shard_ranks)
    : replicas_(replicas.size()), shard_ranks_(std::move(shard_ranks)), local_(replicas.size()) {
  if (replicas_ == 0) fail(ErrorKind::schema, "draws are assigned to one replica at least");
  for (uint32_t number = 0; number < replicas_; ++number) {
    const ReplicaRanks& one = replicas[number];
    if (one.ranks.size() != one.local_shards.size()) fail(ErrorKind::schema, "each rank of a replica has its shards");
    for (size_t preference = 0; preference < one.ranks.size(); ++preference) {
      if (preference == levels_.size()) levels_.emplace_back(shard_ranks_.size());
      for (uint32_t shard : one.local_shards[preference]) {
        if (shard >= shard_ranks_.size()) fail(ErrorKind::schema, "there is no shard ", shard);
        levels_[preference][shard].push_back(number);
        local_[number].emplace_back(shard, one.ranks[preference]);
      }
    }
    for (size_t preference = 0; preference < one.near_shards.size(); ++preference) {
      for (uint32_t shard : one.near_shards[preference]) {
        if (preference >= one.ranks.size() || shard >= shard_ranks_.size()) {
          fail(ErrorKind::schema, "there is no shard ", shard, " near a rank");
        }
        local_[number].emplace_back(shard, one.ranks[preference]);
      }
    }
    // Stable, so of several ranks that have a shard the preferred one is found.
    std::stable_sort(local_[number].begin(), local_[number].end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  find_owners(replicas);
}

void Assigner::find_owners(const std::vector<ReplicaRanks>& replicas) {
  std::vector<Owner> found(shard_ranks_.size());
  for (uint32_t number = 0; number < replicas_; ++number) {
    bool has_one = false;
    for (size_t preference = 0; preference < replicas[number].local_shards.size(); ++preference) {
      for (const uint32_t shard : replicas[number].local_shards[preference]) {
        if (has_one || found[shard].replica >= 0) return;
        has_one = true;
        found[shard] = {static_cast<int32_t>(number), replicas[number].ranks[preference]};
      }
    }
  }
  owners_ = std::move(found);
}

int64_t Assigner::local_rank(int64_t replica, int64_t shard) const {
  const auto& mine = local_[static_cast<size_t>(replica)];
  const auto at = std::lower_bound(mine.begin(), mine.end(), shard,
                                   [](const auto& pair, int64_t wanted) { return pair.first < wanted; });
  return at != mine.end() && at->first == shard ? int64_t{at->second} : -1;
}

namespace {

// Gives atoms of one size to replicas in turn, one each, until there is no room or no atom. Returns those left.
std::span<const uint32_t> in_turn(std::span<const uint32_t> atoms, std::vector<uint32_t> among, int64_t size,
                                  std::vector<int64_t>& room, std::vector<int64_t>& replica) {
  while (!atoms.empty()) {
    std::erase_if(among, [&](uint32_t each) { return room[each] < size; });
    if (among.empty()) break;
    for (uint32_t each : among) {
      if (atoms.empty()) break;
      replica[atoms.front()] = each;
      room[each] -= size;
      atoms = atoms.subspan(1);
    }
  }
  return atoms;
}

}  // namespace

void Assigner::local_first(const Atoms& atoms, std::vector<int64_t>& room, std::vector<int64_t>& replica) const {
  std::vector<int64_t> sizes{1};
  if (!atoms.alone) {
    sizes = atoms.size;
    std::ranges::sort(sizes, std::greater<>());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  }
  std::vector<uint32_t> everyone(replicas_);
  std::iota(everyone.begin(), everyone.end(), 0);
  // Where every replica has the only shard all of them take turns, whichever of their ranks has it.
  const bool any_will_do = shard_ranks_.size() == 1 && atoms.alone &&
                           std::ranges::all_of(local_, [](const auto& each) { return !each.empty(); });
  // Large atoms first: what is left of a replica is then a multiple of every smaller size.
  const size_t count = atoms.shard.size(), shards = shard_ranks_.size();
  std::vector<uint32_t> sorted(count), rest;
  for (int64_t size : sizes) {
    // The atoms of shard s, in order, are sorted[next[s]] to sorted[ends[s] - 1].
    std::vector<uint32_t> ends(shards + 1, 0);
    for (size_t atom = 0; atom < count; ++atom) {
      if (atoms.size[atom] == size) ++ends[static_cast<size_t>(atoms.shard[atom]) + 1];
    }
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    std::vector<uint32_t> next(ends.begin(), ends.end() - 1);
    for (uint32_t atom = 0; atom < count; ++atom) {
      if (atoms.size[atom] == size) sorted[next[static_cast<size_t>(atoms.shard[atom])]++] = atom;
    }
    std::copy(ends.begin(), ends.end() - 1, next.begin());
    for (const auto& level : levels_) {
      if (any_will_do) break;
      for (size_t shard = 0; shard < shards; ++shard) {
        const std::span<const uint32_t> mine(sorted.data() + next[shard], ends[shard + 1] - next[shard]);
        if (mine.empty() || level[shard].empty()) continue;
        size_t given = 0;
        if (level[shard].size() == 1) {  // most shards are of one replica, whose turn it always is
          const uint32_t only = level[shard].front();
          while (given < mine.size() && room[only] >= size) {
            replica[mine[given++]] = only;
            room[only] -= size;
          }
        } else {
          given = mine.size() - in_turn(mine, level[shard], size, room, replica).size();
        }
        next[shard] += static_cast<uint32_t>(given);
      }
    }
    rest.clear();
    for (uint32_t atom = 0; atom < count; ++atom) {  // whatever their shard
      if (replica[atom] < 0 && atoms.size[atom] == size) rest.push_back(atom);
    }
    const auto left = in_turn(rest, everyone, size, room, replica);
    if (!left.empty()) fail(ErrorKind::schema, left.size(), " draws fit into no replica");
  }
}

int64_t Assigner::reader_in_turn(int64_t shard, std::vector<uint32_t>& turn) const {
  const auto& ranks = shard_ranks_[static_cast<size_t>(shard)];
  if (ranks.empty()) fail(ErrorKind::schema, "no rank has shard ", shard);
  uint32_t& next = turn[static_cast<size_t>(shard)];
  const uint32_t reader = ranks[next];
  next = next + 1 == ranks.size() ? 0 : next + 1;
  return reader;
}

// What local_first does, where the draws of a shard have one replica to go to first, and a replica those of one shard:
// then neither has to know of others before the surplus is given away.
Assigner::Assigned Assigner::local_first_of_owners(std::span<const int64_t> shard, std::vector<int64_t> room) const {
  const size_t n = shard.size();
  Assigned made;
  made.replica.resize(n), made.reader.resize(n), made.place.resize(n);
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<uint64_t>(shard[i]) >= owners_.size()) fail(ErrorKind::schema, "there is no shard ", shard[i]);
    const Owner owner = owners_[static_cast<size_t>(shard[i])];
    const bool fits = owner.replica >= 0 && room[static_cast<size_t>(owner.replica)] > 0;
    made.replica[i] = fits ? owner.replica : -1;
    made.reader[i] = owner.rank;
    if (fits) --room[static_cast<size_t>(owner.replica)];
  }
  std::vector<uint32_t> among(replicas_), turn(shard_ranks_.size(), 0);
  std::iota(among.begin(), among.end(), 0);
  std::vector<int64_t> next(replicas_, 0);
  size_t at = among.size();
  for (size_t i = 0; i < n; ++i) {
    if (made.replica[i] < 0) {  // the surplus goes to those that have room, one each
      if (at == among.size()) {
        std::erase_if(among, [&](uint32_t each) { return room[each] == 0; });
        at = 0;
      }
      const uint32_t replica = among[at++];
      --room[replica];
      made.replica[i] = replica;
      const int64_t reader = local_rank(replica, shard[i]);
      made.reader[i] = reader < 0 ? reader_in_turn(shard[i], turn) : reader;
    }
    made.place[i] = next[static_cast<size_t>(made.replica[i])]++;
  }
  return made;
}

Assigner::Assigned Assigner::assign(std::span<const int64_t> shard, std::span<const int64_t> sizes,
                                    bool in_order) const {
  Atoms atoms;
  const size_t n = shard.size();
  std::vector<int64_t> room(replicas_, static_cast<int64_t>(n / replicas_));
  for (size_t i = 0; i < n % replicas_; ++i) ++room[i];
  if (sizes.empty() && !in_order && replicas_ > 1 && !owners_.empty()) {
    return local_first_of_owners(shard, std::move(room));
  }
  if (sizes.empty()) {
    atoms.shard.assign(shard.begin(), shard.end());
    atoms.size.assign(n, 1);
    atoms.alone = true;
  } else {
    size_t at = 0;
    for (int64_t size : sizes) {
      if (size < 1 || static_cast<size_t>(size) > n - at) fail(ErrorKind::schema, "atoms hold other draws than these");
      atoms.shard.push_back(shard[at]);
      at += static_cast<size_t>(size);
    }
    if (at != n) fail(ErrorKind::schema, "atoms hold other draws than these");
    atoms.size.assign(sizes.begin(), sizes.end());
  }
  for (int64_t each : atoms.shard) {
    if (each < 0 || static_cast<size_t>(each) >= shard_ranks_.size())
      fail(ErrorKind::schema, "there is no shard ", each);
  }

  Assigned made;
  made.replica.reserve(n), made.reader.reserve(n), made.place.reserve(n);
  std::vector<int64_t> of_atom(atoms.shard.size(), -1);
  if (in_order || replicas_ == 1) {
    for (size_t number = 0; number < replicas_; ++number) {
      made.replica.insert(made.replica.end(), static_cast<size_t>(room[number]), static_cast<int64_t>(number));
    }
    size_t at = 0;
    for (size_t atom = 0; atom < of_atom.size(); at += static_cast<size_t>(atoms.size[atom++])) {
      of_atom[atom] = made.replica[at];
    }
  } else {
    local_first(atoms, room, of_atom);
    if (atoms.alone) {
      made.replica = of_atom;
    } else {
      for (size_t atom = 0; atom < of_atom.size(); ++atom) {
        made.replica.insert(made.replica.end(), static_cast<size_t>(atoms.size[atom]), of_atom[atom]);
      }
    }
  }

  std::vector<uint32_t> turn(shard_ranks_.size(), 0);
  for (size_t atom = 0; atom < of_atom.size(); ++atom) {
    int64_t reader = local_rank(of_atom[atom], atoms.shard[atom]);
    if (reader < 0) reader = reader_in_turn(atoms.shard[atom], turn);
    if (atoms.alone) {
      made.reader.push_back(reader);
    } else {
      made.reader.insert(made.reader.end(), static_cast<size_t>(atoms.size[atom]), reader);
    }
  }
  std::vector<int64_t> next(replicas_, 0);
  for (int64_t replica : made.replica) made.place.push_back(next[static_cast<size_t>(replica)]++);
  return made;
}

}  // namespace geartrain
