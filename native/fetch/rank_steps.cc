#include "fetch/rank_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
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

RankSteps::RankSteps(Settings settings) : settings_(std::move(settings)) {
  if (settings_.rank >= settings_.ranks) fail(ErrorKind::schema, "rank ", settings_.rank, " is none of the group");
  if (settings_.stores.empty()) fail(ErrorKind::schema, "ranks draw from one store at least");
  for (uint32_t number = 0; number < settings_.stores.size(); ++number) {
    for (const uint32_t leader : settings_.stores[number].leaders) {
      if (leader >= settings_.ranks) {
        fail(ErrorKind::schema, "rank ", leader, " leads a shard and is none of the group");
      }
      leader_of_.emplace_back(number, leader);
    }
  }
}

bool RankSteps::leads(size_t store) const {
  return std::ranges::find(settings_.stores[store].leaders, settings_.rank) != settings_.stores[store].leaders.end();
}

uint64_t RankSteps::total(size_t store) const {
  const StoreView& of = settings_.stores[store];
  if (!of.by_totals) return 0;
  if (of.by == By::row) return of.store->bit_tree().total();
  return population_of(*of.store, of.store->per_step()).priorities.total();
}

void RankSteps::add_updates(std::span<const GivenPriorities> given, Parts& parts) const {
  for (size_t call = 0; call < given.size(); ++call) {
    const GivenPriorities& from = given[call];
    const size_t n = from.rows.size();
    if (from.generations.size() != n || from.shards.size() != n || from.priorities.size() != n ||
        (!from.draws.empty() && from.draws.size() != n) || (!from.steps.empty() && from.steps.size() != n)) {
      fail(ErrorKind::schema, "an update has as many rows, generations, shards, draws, steps and priorities");
    }
    // As if each rank got its share of them, and some more.
    for (std::vector<std::byte>& part : parts) {
      part.reserve(part.size() + 2 * n * sizeof(PriorityRecord) / parts.size());
    }
    for (size_t i = 0; i < n; ++i) {
      const int64_t shard = from.shards[i];
      if (shard < 0 || static_cast<size_t>(shard) >= leader_of_.size()) {
        fail(ErrorKind::schema, "an update is of shard ", shard, ", there are ", leader_of_.size());
      }
      const auto [store, leader] = leader_of_[static_cast<size_t>(shard)];
      append_record(parts[leader],
                    PriorityRecord{store, from.rows[i], from.generations[i], from.steps.empty() ? 0 : from.steps[i],
                                   static_cast<uint32_t>(call), from.draws.empty() ? 0 : draw_order(from.draws[i]),
                                   from.priorities[i]});
    }
  }
}

void RankSteps::apply(const std::vector<PriorityRecord>& updates, const Hooks& hooks) const {
  for (uint32_t number = 0; number < settings_.stores.size(); ++number) {
    Store& store = *settings_.stores[number].store;
    std::vector<PriorityRecord> ordered;
    std::ranges::copy_if(updates, std::back_inserter(ordered), [&](const auto& each) { return each.store == number; });
    std::ranges::stable_sort(ordered, {}, [](const PriorityRecord& each) { return std::pair(each.call, each.draw); });
    std::vector<uint32_t> rows, generations, steps;
    std::vector<double> priorities;
    for (auto* const of_rows : {&rows, &generations}) of_rows->reserve(ordered.size());
    priorities.reserve(ordered.size());
    for (const PriorityRecord& each : ordered) {
      rows.push_back(each.row);
      generations.push_back(each.generation);
      if (store.per_step()) steps.push_back(each.step);
      priorities.push_back(hooks.change ? each.priority : std::fabs(each.priority));
    }
    if (hooks.change) hooks.change(number, priorities);
    if (rows.empty()) continue;
    const PriorityUpdates given{rows, generations, steps, {}, priorities};
    if (hooks.set && hooks.set(number, given)) continue;
    const Store::Call call(store);
    geartrain::apply(store, given);
  }
}

void RankSteps::check_of_stores(size_t given, const char* what) const {
  const size_t stores = settings_.stores.size();
  if (given != 0 && given != stores) fail(ErrorKind::schema, given, " ", what, " were given for ", stores, " stores");
}

RankSteps::Parts RankSteps::begin(uint64_t step, std::span<const GivenPriorities> given,
                                  std::span<const Told> told) const {
  check_of_stores(told.size(), "offers");
  RankStatus mine{.fingerprint = settings_.fingerprint, .step = static_cast<int64_t>(step), .updates = 0};
  // One of no rows counts, too: as without a group, alpha follows its schedule with it.
  for (const GivenPriorities& each : given)
    mine.updates += std::max<int64_t>(1, static_cast<int64_t>(each.rows.size()));
  std::vector<std::byte> head;
  append_record(head, mine);
  for (size_t number = 0; number < settings_.stores.size(); ++number) {
    const Store& store = *settings_.stores[number].store;
    const Store::Call call(store);
    ShardStatus shard{.rows = 0, .next_sequence = 0, .cursor = 0, .total = total(number), .steps = 0};
    const uint64_t least = settings_.stores[number].min_steps;
    if (least != 0 && leads(number)) shard.steps = store.step_count_up_to(least);
    shard.rows = static_cast<int64_t>(store.committed_count());
    shard.next_sequence = static_cast<int64_t>(store.next_sequence());
    if (!told.empty()) {
      shard.cursor = static_cast<int64_t>(told[number].cursor);
      if (told[number].total) shard.total = *told[number].total;
    }
    append_record(head, shard);
  }
  for (size_t number = 0; number < told.size(); ++number) {
    const Told& each = told[number];
    if (each.offer_bytes == 0 || !leads(number)) continue;
    if (each.offer.size() != each.offer_bytes) fail(ErrorKind::schema, "an offer has as many bytes as all others");
    head.insert(head.end(), each.offer.begin(), each.offer.end());
  }
  Parts made(settings_.ranks, head);
  add_updates(given, made);
  return made;
}

RankSteps::Heard RankSteps::hear(uint64_t step, std::span<const std::span<const std::byte>> received,
                                 std::span<const Told> told, std::span<const uint64_t> quotas) const {
  check_of_stores(told.size(), "offers");
  check_of_stores(quotas.size(), "quotas");
  if (received.size() != settings_.ranks)
    fail(ErrorKind::frame, "a round of ", settings_.ranks, " ranks has as many parts");
  const size_t stores = settings_.stores.size(), head = sizeof(RankStatus) + stores * sizeof(ShardStatus);
  Heard heard;
  Agreed& made = heard.agreed;
  made.shards.resize(settings_.ranks * stores);
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    const std::span<const std::byte> part = received[rank];
    RankStatus status;
    if (part.size() < head) fail(ErrorKind::frame, "rank ", rank, " sent ", part.size(), " bytes as its status");
    std::memcpy(&status, part.data(), sizeof status);
    std::memcpy(&made.shards[rank * stores], part.data() + sizeof status, stores * sizeof(ShardStatus));
    made.status.push_back(status);
    made.changed = made.changed || status.updates != 0;
    const bool differs = status.fingerprint != settings_.fingerprint || status.step != static_cast<int64_t>(step);
    if (made.refusal == Refusal::none && differs) {
      made.refusal = Refusal::disagree;
      made.rank = rank;
    }
  }
  if (made.refusal != Refusal::none) return heard;
  std::vector<size_t> at(settings_.ranks, head);
  made.offers.resize(stores);
  for (size_t number = 0; number < told.size(); ++number) {
    const size_t bytes = told[number].offer_bytes;
    if (bytes == 0) continue;
    for (const uint32_t leader : settings_.stores[number].leaders) {
      const std::span<const std::byte> part = received[leader];
      if (part.size() - at[leader] < bytes) fail(ErrorKind::frame, "rank ", leader, " sent no offer");
      const auto offer = part.subspan(at[leader], bytes);
      made.offers[number].insert(made.offers[number].end(), offer.begin(), offer.end());
      at[leader] += bytes;
    }
  }
  std::vector<PriorityRecord>& updates = heard.updates;
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    const std::span<const std::byte> rest = received[rank].subspan(at[rank]);
    if (rest.size() % sizeof(PriorityRecord) != 0) {
      fail(ErrorKind::frame, "rank ", rank, " sent ", rest.size(), " bytes of priority updates");
    }
    const size_t before = updates.size();
    updates.resize(before + rest.size() / sizeof(PriorityRecord));
    if (!rest.empty()) std::memcpy(&updates[before], rest.data(), rest.size());
  }
  for (size_t number = 0; number < stores; ++number) {
    if (!leads(number)) continue;
    int64_t next_sequence = 0;
    for (size_t rank = 0; rank < settings_.ranks; ++rank) {
      next_sequence = std::max(next_sequence, made.shards[rank * stores + number].next_sequence);
    }
    Store& store = *settings_.stores[number].store;
    const Store::Call call(store);
    store.advance_sequence(static_cast<uint64_t>(next_sequence));
  }
  for (size_t number = 0; number < stores; ++number) {
    made.rows.push_back(0);
    made.steps.push_back(0);
    for (const uint32_t leader : settings_.stores[number].leaders) {
      const ShardStatus& shard = made.shards[leader * stores + number];
      made.rows.back() += static_cast<uint64_t>(shard.rows);
      made.steps.back() += shard.steps;
      made.totals.push_back(shard.total);
    }
  }
  refuse(made, quotas);
  return heard;
}

bool RankSteps::by_totals() const {
  return std::ranges::all_of(settings_.stores, &StoreView::by_totals);
}

// Others than draws by totals are refused by those that make them.
void RankSteps::refuse(Agreed& agreed, std::span<const uint64_t> quotas) const {
  agreed.refusal = Refusal::none;
  size_t first = 0;
  for (uint32_t number = 0; number < settings_.stores.size() && by_totals(); ++number) {
    const StoreView& store = settings_.stores[number];
    const std::span<const uint64_t> totals = std::span(agreed.totals).subspan(first, store.leaders.size());
    first += store.leaders.size();
    const bool empty = std::ranges::count(totals, uint64_t{0}) == std::ssize(totals);
    const bool wanted = quotas.empty() || quotas[number] != 0;
    if (agreed.refusal != Refusal::none) continue;
    if (agreed.rows[number] < store.min_rows || agreed.steps[number] < store.min_steps)
      agreed.refusal = Refusal::few_rows, agreed.store = number;
    else if (empty && wanted)
      agreed.refusal = Refusal::nothing_to_draw, agreed.store = number;
  }
}

RankSteps::Agreed RankSteps::agree(uint64_t step, std::span<const GivenPriorities> given, std::span<const Told> told,
                                   const Hooks& hooks, RankExchange& exchange, std::span<const uint64_t> quotas) const {
  Parts sent = begin(step, given, told);
  size_t sent_bytes = 0;
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    if (rank != settings_.rank) sent_bytes += sent[rank].size();
  }
  const Parts received = exchange.all_to_all(std::move(sent));
  const std::vector<std::span<const std::byte>> views(received.begin(), received.end());
  Heard heard = hear(step, views, told, quotas);
  Agreed& made = heard.agreed;
  made.sent_bytes = sent_bytes;
  if (made.refusal == Refusal::disagree || !made.changed) return std::move(made);
  apply(heard.updates, hooks);
  if (!by_totals() || !told.empty() || made.refusal == Refusal::few_rows) return std::move(made);
  std::vector<uint64_t> mine;
  for (size_t number = 0; number < settings_.stores.size(); ++number) {
    const Store::Call call(*settings_.stores[number].store);
    mine.push_back(total(number));
    if (leads(number)) made.sent_bytes += (settings_.ranks - 1) * sizeof mine[0];
  }
  made.totals = exchange.totals(mine);
  if (made.totals.size() != leader_of_.size()) fail(ErrorKind::frame, "every shard has a total");
  refuse(made, quotas);
  return std::move(made);
}

std::optional<RankSteps::Outcome> RankSteps::tell(bool failed, std::span<const double> lowest,
                                                  RankExchange& exchange) const {
  std::vector<double> both{failed ? 1.0 : 0.0};
  both.insert(both.end(), lowest.begin(), lowest.end());
  const auto flag = static_cast<std::byte>(failed);
  const std::span<const std::byte> mine =
      settings_.with_lowest ? std::as_bytes(std::span<const double>(both)) : std::span(&flag, 1);
  const auto every = exchange.outcomes(mine);
  if (!every) return std::nullopt;
  if (every->size() != settings_.ranks) fail(ErrorKind::frame, "every rank tells the outcome of its read");
  Outcome made{.failed = {}, .lowest = std::vector<double>(lowest.size(), std::numeric_limits<double>::infinity())};
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    const std::vector<std::byte>& each = (*every)[rank];
    if (each.size() != mine.size())
      fail(ErrorKind::frame, "rank ", rank, " sent ", each.size(), " bytes as its outcome");
    if (!settings_.with_lowest) {
      made.failed.push_back(static_cast<uint8_t>(each[0]) != 0);
      continue;
    }
    std::vector<double> told(both.size());
    std::memcpy(told.data(), each.data(), each.size());
    made.failed.push_back(told[0] != 0);
    for (size_t number = 0; number < lowest.size(); ++number) {
      made.lowest[number] = std::min(made.lowest[number], told[number + 1]);
    }
  }
  return made;
}

}  // namespace geartrain
