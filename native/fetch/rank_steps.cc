#include "fetch/rank_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/errors.h"
#include "fetch/episodes.h"
#include "store/priority_updates.h"

namespace geartrain {
namespace {

template <typename T>
void append_record(std::vector<std::byte>& to, const T& record) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&record);
  to.insert(to.end(), bytes, bytes + sizeof record);
}

}  // namespace

RankSteps::RankSteps(Settings settings, Store& store) : settings_(std::move(settings)), store_(store) {
  if (store.per_step()) fail(ErrorKind::schema, "the store has priorities of steps, and rows are updated");
  if (settings_.rank >= settings_.ranks) fail(ErrorKind::schema, "rank ", settings_.rank, " is none of the group");
  for (const uint32_t leader : settings_.leaders) {
    if (leader >= settings_.ranks) fail(ErrorKind::schema, "rank ", leader, " leads a shard and is none of the group");
  }
}

bool RankSteps::leads() const {
  return std::ranges::find(settings_.leaders, settings_.rank) != settings_.leaders.end();
}

uint64_t RankSteps::total() const {
  return settings_.by == By::priority ? store_.priority_tree().total() : store_.bit_tree().total();
}

RankSteps::Parts RankSteps::parts(const RankStatus& mine, std::span<const GivenPriorities> given) const {
  Parts made(settings_.ranks);
  for (auto& each : made) append_record(each, mine);
  for (size_t call = 0; call < given.size(); ++call) {
    const GivenPriorities& from = given[call];
    const size_t n = from.rows.size();
    if (from.generations.size() != n || from.shards.size() != n || from.priorities.size() != n ||
        (!from.draws.empty() && from.draws.size() != n)) {
      fail(ErrorKind::schema, "an update has as many rows, generations, shards, draws and priorities");
    }
    for (size_t i = 0; i < n; ++i) {
      const int64_t shard = from.shards[i];
      if (shard < 0 || static_cast<size_t>(shard) >= settings_.leaders.size()) {
        fail(ErrorKind::schema, "an update is of shard ", shard, ", there are ", settings_.leaders.size());
      }
      const int64_t draw = from.draws.empty() ? 0 : from.draws[i];  // keys made by hand may have any number
      const int64_t most = std::numeric_limits<uint32_t>::max();
      append_record(made[settings_.leaders[static_cast<size_t>(shard)]],
                    PriorityRecord{0, from.rows[i], from.generations[i], 0, static_cast<uint32_t>(call),
                                   static_cast<uint32_t>(std::clamp<int64_t>(draw, 0, most)), from.priorities[i]});
    }
  }
  return made;
}

void RankSteps::apply(const std::vector<PriorityRecord>& updates, const Change& change) const {
  const size_t n = updates.size();
  std::vector<uint32_t> rows(n), generations(n);
  std::vector<int64_t> order(n);
  std::vector<double> priorities(n);
  for (size_t i = 0; i < n; ++i) {
    rows[i] = updates[i].row;
    generations[i] = updates[i].generation;
    order[i] = static_cast<int64_t>(updates[i].call) << 32 | updates[i].draw;
    priorities[i] = change ? updates[i].priority : std::fabs(updates[i].priority);
  }
  if (change) change(priorities);
  if (n == 0) return;
  const Store::Call call(store_);
  geartrain::apply(store_, {rows, generations, {}, order, priorities});
}

RankSteps::Parts RankSteps::begin(uint64_t step, std::span<const GivenPriorities> given) const {
  RankStatus mine{.fingerprint = settings_.fingerprint,
                  .step = static_cast<int64_t>(step),
                  .updates = 0,
                  .rows = 0,
                  .next_sequence = 0,
                  .cursor = 0,
                  .total = 0};
  // One of no rows counts, too: as without a group, alpha follows its schedule with it.
  for (const GivenPriorities& each : given)
    mine.updates += std::max<int64_t>(1, static_cast<int64_t>(each.rows.size()));
  {
    const Store::Call call(store_);
    mine.total = total();
    mine.rows = static_cast<int64_t>(store_.committed_count());
    mine.next_sequence = static_cast<int64_t>(store_.next_sequence());
  }
  return parts(mine, given);
}

RankSteps::Heard RankSteps::hear(uint64_t step, std::span<const std::span<const std::byte>> received) const {
  if (received.size() != settings_.ranks)
    fail(ErrorKind::frame, "a round of ", settings_.ranks, " ranks has as many parts");
  Heard heard;
  Agreed& made = heard.agreed;
  int64_t next_sequence = 0;
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    const std::span<const std::byte> part = received[rank];
    RankStatus status;
    if (part.size() < sizeof status)
      fail(ErrorKind::frame, "rank ", rank, " sent ", part.size(), " bytes as its status");
    std::memcpy(&status, part.data(), sizeof status);
    made.status.push_back(status);
    made.changed = made.changed || status.updates != 0;
    next_sequence = std::max(next_sequence, status.next_sequence);
    const bool differs = status.fingerprint != settings_.fingerprint || status.step != static_cast<int64_t>(step);
    if (made.refusal == Refusal::none && differs) {
      made.refusal = Refusal::disagree;
      made.rank = rank;
    }
  }
  if (made.refusal != Refusal::none) return heard;
  std::vector<PriorityRecord>& updates = heard.updates;
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    const std::span<const std::byte> rest = received[rank].subspan(sizeof(RankStatus));
    if (rest.size() % sizeof(PriorityRecord) != 0) {
      fail(ErrorKind::frame, "rank ", rank, " sent ", rest.size(), " bytes of priority updates");
    }
    const size_t before = updates.size();
    updates.resize(before + rest.size() / sizeof(PriorityRecord));
    if (!rest.empty()) std::memcpy(&updates[before], rest.data(), rest.size());
  }
  if (leads()) {
    const Store::Call call(store_);
    store_.advance_sequence(static_cast<uint64_t>(next_sequence));
  }
  for (const uint32_t leader : settings_.leaders) {
    made.rows += static_cast<uint64_t>(made.status[leader].rows);
    made.totals.push_back(made.status[leader].total);
  }
  made.refusal = refusal_of(made);
  return heard;
}

RankSteps::Refusal RankSteps::refusal_of(const Agreed& agreed) const {
  if (agreed.rows < settings_.min_rows) return Refusal::few_rows;
  const bool empty = std::ranges::count(agreed.totals, uint64_t{0}) == std::ssize(agreed.totals);
  return empty ? Refusal::nothing_to_draw : Refusal::none;
}

RankSteps::Agreed RankSteps::agree(uint64_t step, std::span<const GivenPriorities> given, const Change& change,
                                   RankExchange& exchange) const {
  Parts sent = begin(step, given);
  size_t sent_bytes = 0;
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    if (rank != settings_.rank) sent_bytes += sent[rank].size();
  }
  const Parts received = exchange.all_to_all(std::move(sent));
  const std::vector<std::span<const std::byte>> views(received.begin(), received.end());
  Heard heard = hear(step, views);
  Agreed& made = heard.agreed;
  made.sent_bytes = sent_bytes;
  if (made.refusal == Refusal::disagree || !made.changed) return std::move(made);
  apply(heard.updates, change);
  if (made.refusal == Refusal::few_rows) return std::move(made);
  uint64_t mine = 0;
  {
    const Store::Call call(store_);
    mine = total();
  }
  made.totals = exchange.totals(mine);
  if (made.totals.size() != settings_.leaders.size()) fail(ErrorKind::frame, "every shard has a total");
  if (leads()) made.sent_bytes += (settings_.ranks - 1) * sizeof mine;
  made.refusal = refusal_of(made);
  return std::move(made);
}

std::optional<RankSteps::Outcome> RankSteps::tell(bool failed, double lowest, RankExchange& exchange) const {
  const double both[2] = {failed ? 1.0 : 0.0, lowest};
  const auto flag = static_cast<std::byte>(failed);
  const std::span<const std::byte> mine = settings_.with_lowest ? std::as_bytes(std::span(both)) : std::span(&flag, 1);
  const auto every = exchange.outcomes(mine);
  if (!every) return std::nullopt;
  if (every->size() != settings_.ranks) fail(ErrorKind::frame, "every rank tells the outcome of its read");
  Outcome made{.failed = {}, .lowest = std::numeric_limits<double>::infinity()};
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    const std::vector<std::byte>& each = (*every)[rank];
    if (each.size() != mine.size())
      fail(ErrorKind::frame, "rank ", rank, " sent ", each.size(), " bytes as its outcome");
    if (!settings_.with_lowest) {
      made.failed.push_back(static_cast<uint8_t>(each[0]) != 0);
      continue;
    }
    double told[2];
    std::memcpy(told, each.data(), sizeof told);
    made.failed.push_back(told[0] != 0);
    made.lowest = std::min(made.lowest, told[1]);
  }
  return made;
}

}  // namespace geartrain
