#include "fetch/rank_reader.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <ranges>

#include "base/errors.h"
#include "fetch/episodes.h"
#include "fetch/redraw.h"
#include "fetch/transitions.h"

namespace geartrain {
namespace {

size_t aligned(size_t bytes) {
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

template <typename T>
std::vector<T> picked(const std::vector<T>& from, std::span<const uint32_t> which) {
  std::vector<T> made;
  made.reserve(which.size());
  for (const uint32_t each : which) made.push_back(from[each]);
  return made;
}

// The fields of transitions that have arrays of their own, and those of the outputs behind them, in the order of a
// row's arrays (geartrain/replay/transitions.py, TransitionPlan.arrays).
struct TransitionTargets {
  std::vector<TransitionField> fields;
  std::span<float> discount;
  std::span<uint8_t> terminated, truncated, relabelled;

  TransitionTargets(const TransitionView& view, const Store& store, const std::vector<uint32_t>& numbers,
                    const std::vector<std::byte*>& arrays, size_t room) {
    size_t next = 0, reward = 0;
    for (size_t i = 0; i < numbers.size(); ++i) {
      TransitionField to{numbers[i]};
      const uint64_t bytes = view.row_bytes(store.fields()[numbers[i]], view.roles[i]);
      if (view.roles[i] == TransitionRole::observation) {
        to.out = arrays[next++];
        to.next = view.shares_window() ? to.out + bytes / view.window_frames() : arrays[next++];
      } else if (view.roles[i] == TransitionRole::step) {
        to.out = arrays[next++];
      } else if (view.roles[i] == TransitionRole::reward) {
        reward = i;
      }
      fields.push_back(to);
    }
    fields[reward].out = arrays[next++];
    const auto flags = [&] { return std::span(reinterpret_cast<uint8_t*>(arrays[next++]), room); };
    discount = {reinterpret_cast<float*>(arrays[next++]), room};
    terminated = flags();
    truncated = flags();
    if (view.goals.strategy != GoalStrategy::none) relabelled = flags();
  }
};

std::vector<uint64_t> transition_bytes(const TransitionView& view, const std::vector<uint64_t>& field_bytes) {
  std::vector<uint64_t> made;
  uint64_t reward = 0;
  for (size_t i = 0; i < field_bytes.size(); ++i) {
    const TransitionRole role = view.roles[i];
    if (role == TransitionRole::reward) reward = field_bytes[i];
    if (role != TransitionRole::observation && role != TransitionRole::step) continue;
    made.push_back(field_bytes[i]);
    if (role == TransitionRole::observation && !view.shares_window()) made.push_back(field_bytes[i]);
  }
  made.push_back(reward);
  made.push_back(sizeof(float));
  made.push_back(1), made.push_back(1);
  if (view.goals.strategy != GoalStrategy::none) made.push_back(1);
  return made;
}

}  // namespace

// The draws of one shard that this rank reads.
struct RankReader::Reads {
  std::vector<uint32_t> draws;  // their numbers among all
  // A target that gets some of them: which of the draws above, and the places in it.
  struct To {
    uint32_t target;
    std::vector<uint32_t> which, places;
  };
  std::vector<To> to;
};

RankReader::RankReader(Settings settings, std::vector<ShardView> shards, const Assigner& assigner)
    : settings_(std::move(settings)), shards_(std::move(shards)), samplers_(shards_.size()), assigner_(assigner) {
  check(settings_.window);
  for (const StorePlan& store : settings_.stores) {
    if (store.atom == 0) fail(ErrorKind::schema, "an atom has one row at least");
  }
  const std::optional<TransitionView>& view = settings_.view;
  for (size_t number = 0; number < shards_.size(); ++number) {
    const ShardView& shard = shards_[number];
    if (shard.of >= settings_.stores.size()) fail(ErrorKind::schema, "shard ", number, " is of no store");
    if (shard.store == nullptr) continue;
    Store& store = *shard.store;
    if (const auto& draws = settings_.stores[shard.of].draws) samplers_[number].emplace(store, *draws);
    if (view) view->check(store, shard.fields);
    std::vector<uint64_t> bytes;
    for (size_t i = 0; i < shard.fields.size(); ++i) {
      store.check_column(shard.fields[i]);
      bytes.push_back(
          view ? view->row_bytes(store.fields()[shard.fields[i]], view->roles[i])
               : fetched_row_bytes(store, shard.fields[i], settings_.window.length, settings_.window.steps_of(i)));
    }
    const size_t steps = view                           ? view->frame_stack
                         : settings_.window.length != 0 ? settings_.window.length
                                                        : store.header().max_length;
    if (steps_ == 0) {
      field_bytes_ = bytes;
      steps_ = steps;
    } else if (field_bytes_ != bytes || steps_ != steps) {
      fail(ErrorKind::schema, "the shards of a batch have rows of the same fields and lengths");
    }
  }
  if (steps_ == 0) fail(ErrorKind::schema, "a rank has one shard at least");
  array_bytes_ = view ? transition_bytes(*view, field_bytes_) : field_bytes_;
  const size_t arrays = array_bytes_.size();
  for (uint32_t i = 0; i < settings_.consumers.size(); ++i) {
    const Consumer& consumer = settings_.consumers[i];
    for (const uint32_t array : consumer.arrays) {
      if (array >= arrays) fail(ErrorKind::schema, "a row has no array number ", array);
    }
    if (view && !consumer.arrays.empty() && !std::ranges::equal(consumer.arrays, std::views::iota(size_t{0}, arrays))) {
      fail(ErrorKind::schema, "transitions are handed out as a whole");
    }
    if (std::ranges::count(settings_.consumers, consumer.rank, &Consumer::rank) != 1) {
      fail(ErrorKind::schema, "rank ", consumer.rank, " gets the rows of one replica");
    }
    if (consumer.replica >= of_replica_.size()) of_replica_.resize(consumer.replica + size_t{1});
    if (!consumer.arrays.empty()) of_replica_[consumer.replica].push_back(i);
  }
  const Consumer* const me = consumer_of(settings_.rank);
  if (me != nullptr && settings_.replica != me->replica) {
    fail(ErrorKind::schema, "this rank's batch is of another replica than its rows");
  }
}

const RankReader::Consumer* RankReader::consumer_of(uint32_t rank) const {
  const auto found = std::ranges::find(settings_.consumers, rank, &Consumer::rank);
  return found == settings_.consumers.end() || found->arrays.empty() ? nullptr : &*found;
}

std::vector<uint64_t> RankReader::row_bytes(uint32_t rank) const {
  const Consumer* const consumer = consumer_of(rank);
  return consumer == nullptr ? std::vector<uint64_t>{} : picked(array_bytes_, consumer->arrays);
}

std::vector<uint64_t> RankReader::field_bytes() const {
  const Consumer* const consumer = consumer_of(settings_.rank);
  if (consumer == nullptr || settings_.view) return field_bytes_;
  return picked(field_bytes_, consumer->arrays);
}

// --- draws ----------------------------------------------------------------------------------------------------------

RankReader::Draws RankReader::draw(uint64_t step, std::span<const uint64_t> quotas,
                                   std::span<const uint64_t> totals) const {
  const size_t stores = settings_.stores.size();
  if (totals.size() != shards_.size() || quotas.size() != stores) {
    fail(ErrorKind::schema, totals.size(), " totals and ", quotas.size(), " quotas were given, there are ",
         shards_.size(), " shards of ", stores, " stores");
  }
  Draws made;
  made.step = step;
  made.first = {0};
  made.placed.resize(stores);
  made.cursors.resize(stores);
  made.whole.resize(stores);
  made.share.resize(shards_.size());
  size_t shard = 0;
  for (uint32_t store = 0; store < stores; ++store) {
    if (!settings_.stores[store].draws) fail(ErrorKind::schema, "a strategy's own code does not draw by totals");
    const BatchSampler::Settings& by = *settings_.stores[store].draws;
    const size_t first = shard, before = made.shard.size();
    std::vector<uint64_t> ends;
    for (; shard < shards_.size() && shards_[shard].of == store; ++shard) {
      if (samplers_[shard] && samplers_[shard]->draws_steps()) {
        fail(ErrorKind::schema, "steps are not drawn by the totals of rows");
      }
      if (__builtin_add_overflow(made.whole[store], totals[shard], &made.whole[store])) {
        fail(ErrorKind::schema,
             "the priorities of all shards add up to more than 64 bits; use fewer priority_fraction_bits");
      }
      ends.push_back(made.whole[store]);
    }
    for (size_t each = first; each < shard; ++each) {
      made.share[each] = static_cast<double>(totals[each]) / static_cast<double>(made.whole[store]);
    }
    const size_t n = quotas[store];
    made.first.push_back(before + n);
    if (n == 0) continue;
    made.shard.reserve(before + n);
    made.targets.reserve(before + n);
    std::vector<uint32_t> numbers(n);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::vector<uint64_t> targets(n);
    const uint32_t strata = by.stratified ? static_cast<uint32_t>(n) : 0;
    draw_targets({by.seed, step, kRowStream}, 0, strata, made.whole[store], numbers, targets);
    for (const uint64_t target : targets) {
      const auto owner = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), target) - ends.begin());
      made.shard.push_back(static_cast<int64_t>(first + owner));
      made.targets.push_back(target - (ends[owner] - totals[first + owner]));
    }
  }
  const size_t n = made.shard.size();
  made.rows.assign(n, kNoRow);
  made.generations.resize(n);
  made.probability.resize(n);
  assign(made);
  return made;
}

void RankReader::assign(Draws& draws) const {
  std::vector<int64_t> sizes;
  const auto is_atom = [](const StorePlan& store) { return store.atom > 1; };
  if (std::ranges::any_of(settings_.stores, is_atom)) {
    for (size_t store = 0; store < settings_.stores.size(); ++store) {
      const uint32_t atom = settings_.stores[store].atom;
      sizes.insert(sizes.end(), (draws.first[store + 1] - draws.first[store]) / atom, atom);
    }
  }
  draws.assigned = assigner_.assign(draws.shard, sizes, settings_.in_order);
  for (const int64_t replica : draws.assigned.replica) {
    if (static_cast<size_t>(replica) >= of_replica_.size() || of_replica_[static_cast<size_t>(replica)].empty()) {
      fail(ErrorKind::schema, "there is no rank for replica ", replica);
    }
  }
}

void RankReader::share_of(uint32_t store, double share, Draws& draws) const {
  for (size_t number = 0; number < shards_.size(); ++number) {
    if (shards_[number].of == store) draws.share[number] = share;
  }
}

std::vector<RankReader::Traffic> RankReader::outgoing(const Draws& draws) const {
  std::vector<Traffic> made;
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    if (draws.assigned.reader[i] != settings_.rank) continue;
    for (const uint32_t number : of_replica_[static_cast<size_t>(draws.assigned.replica[i])]) {
      const uint32_t consumer = settings_.consumers[number].rank;
      if (consumer == settings_.rank) continue;
      auto to = std::ranges::find(made, consumer, &Traffic::rank);
      if (to == made.end()) to = made.insert(made.end(), {consumer, {}});
      to->places.push_back(static_cast<uint32_t>(draws.assigned.place[i]));
    }
  }
  std::ranges::sort(made, {}, &Traffic::rank);
  return made;
}

std::vector<RankReader::Traffic> RankReader::incoming(const Draws& draws) const {
  std::vector<Traffic> made;
  const Consumer* const me = consumer_of(settings_.rank);
  if (me == nullptr) return made;
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    const auto reader = static_cast<uint32_t>(draws.assigned.reader[i]);
    if (draws.assigned.replica[i] != me->replica || reader == settings_.rank) continue;
    auto from = std::ranges::find(made, reader, &Traffic::rank);
    if (from == made.end()) from = made.insert(made.end(), {reader, {}});
    from->places.push_back(static_cast<uint32_t>(draws.assigned.place[i]));
  }
  std::ranges::sort(made, {}, &Traffic::rank);
  return made;
}

bool RankReader::moves(const Draws& draws) const {
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    for (const uint32_t number : of_replica_[static_cast<size_t>(draws.assigned.replica[i])]) {
      if (settings_.consumers[number].rank != draws.assigned.reader[i]) return true;
    }
  }
  return false;
}

std::vector<int64_t> RankReader::own(const Draws& draws) const {
  std::vector<int64_t> made;
  made.reserve(draws.shard.size());
  for (size_t i = 0; settings_.replica && i < draws.shard.size(); ++i) {
    if (draws.assigned.replica[i] == int64_t{*settings_.replica}) made.push_back(static_cast<int64_t>(i));
  }
  return made;
}

// --- targets --------------------------------------------------------------------------------------------------------

RankReader::Layout RankReader::layout(uint32_t rank, size_t rows) const {
  Layout made{{}, 0, 0};
  for (const uint64_t bytes : row_bytes(rank)) {
    made.arrays.push_back(made.headers);
    made.headers += aligned(bytes * rows);
  }
  made.bytes = made.headers + rows * sizeof(RowHeader);
  return made;
}

RankReader::Target RankReader::message(uint32_t rank, std::byte* memory, size_t rows) const {
  const Layout made = layout(rank, rows);
  Target target{.rank = rank, .arrays = {}, .headers = {}};
  for (const size_t at : made.arrays) target.arrays.push_back(memory + at);
  target.headers = {reinterpret_cast<RowHeader*>(memory + made.headers), rows};
  return target;
}

std::vector<std::byte*> RankReader::arrays_of(const BatchArrays& batch) const {
  std::vector<std::byte*> made;
  if (!settings_.view) {
    for (const FetchField& field : batch.fields) made.push_back(field.out);
    return made;
  }
  const TransitionView& view = *settings_.view;
  std::byte* reward = nullptr;
  for (size_t i = 0; i < batch.transitions.size(); ++i) {
    const TransitionField& field = batch.transitions[i];
    const TransitionRole role = view.roles[i];
    if (role == TransitionRole::reward) reward = field.out;
    if (role != TransitionRole::observation && role != TransitionRole::step) continue;
    made.push_back(field.out);
    if (role == TransitionRole::observation && !view.shares_window()) made.push_back(field.next);
  }
  made.push_back(reward);
  made.push_back(reinterpret_cast<std::byte*>(batch.discount.data()));
  made.push_back(reinterpret_cast<std::byte*>(batch.terminated.data()));
  made.push_back(reinterpret_cast<std::byte*>(batch.truncated.data()));
  if (view.goals.strategy != GoalStrategy::none) {
    made.push_back(reinterpret_cast<std::byte*>(batch.relabelled.data()));
  }
  return made;
}

// --- reading --------------------------------------------------------------------------------------------------------

RankReader::Found RankReader::read(Draws& draws, std::span<const Target> targets, const Hooks& hooks) const {
  // A job may have a thousand shards, and this rank reads few of them: all draws are walked once, not once a shard.
  std::vector<Reads> reads(shards_.size());
  std::vector<uint8_t> has_draws(shards_.size(), 0);
  std::vector<uint32_t> read_of(shards_.size(), 0);  // how many of a shard's draws this rank reads
  std::vector<uint32_t> filled(targets.size(), 0);
  std::vector<uint32_t> target_of(settings_.consumers.size());
  for (size_t i = 0; i < settings_.consumers.size(); ++i) {
    target_of[i] =
        static_cast<uint32_t>(std::ranges::find(targets, settings_.consumers[i].rank, &Target::rank) - targets.begin());
  }
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    const auto number = static_cast<size_t>(draws.shard[i]);
    if (number >= shards_.size()) fail(ErrorKind::schema, "a draw is of shard ", number);
    has_draws[number] = 1;
    read_of[number] += draws.assigned.reader[i] == settings_.rank;
  }
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    const auto number = static_cast<size_t>(draws.shard[i]);
    if (draws.assigned.reader[i] != settings_.rank) continue;
    if (shards_[number].store == nullptr) {
      fail(ErrorKind::schema, "shard ", number, " is read by a rank that does not have it");
    }
    Reads& mine = reads[number];
    if (mine.draws.empty()) mine.draws.reserve(read_of[number]);
    const auto which = static_cast<uint32_t>(mine.draws.size());
    mine.draws.push_back(static_cast<uint32_t>(i));
    for (const uint32_t consumer : of_replica_[static_cast<size_t>(draws.assigned.replica[i])]) {
      const uint32_t target = target_of[consumer];
      if (target == targets.size()) {
        fail(ErrorKind::schema, "no message was given for rank ", settings_.consumers[consumer].rank,
             ", which gets rows");
      }
      auto to = std::ranges::find(mine.to, target, &Reads::To::target);
      if (to == mine.to.end()) {
        to = mine.to.insert(mine.to.end(), {target, {}, {}});
        to->which.reserve(read_of[number]);
        to->places.reserve(read_of[number]);
      }
      to->which.push_back(which);
      // A message holds its rows in the order of draws, whatever their shard.
      const bool own = targets[target].rank == settings_.rank;
      const auto at = own ? static_cast<uint32_t>(draws.assigned.place[i]) : filled[target]++;
      if (at >= targets[target].headers.size()) fail(ErrorKind::schema, "row ", at, " has no place in its batch");
      to->places.push_back(at);
    }
  }
  const size_t stores = settings_.stores.size();
  Found found{.lowest = std::vector<double>(stores, std::numeric_limits<double>::infinity()),
              .redrawn = std::vector<uint64_t>(stores),
              .cursors = std::vector<uint64_t>(stores),
              .failed = {}};
  for (size_t number = 0; number < shards_.size(); ++number) {
    if (shards_[number].counts && has_draws[number] != 0) count_for_others(number, draws);
    if (!reads[number].draws.empty()) read_shard(number, draws, reads[number], targets, hooks, found);
  }
  return found;
}

// Samples of rows that are read by ranks that have the shard open to read.
void RankReader::count_for_others(size_t number, const Draws& draws) const {
  const ShardView& shard = shards_[number];
  if (draws.targets.empty()) fail(ErrorKind::schema, "samples are counted for others of draws by totals only");
  std::vector<uint64_t> targets;
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    if (draws.shard[i] != static_cast<int64_t>(number)) continue;
    if (std::ranges::find(shard.ranks, draws.assigned.reader[i]) == shard.ranks.end()) {
      targets.push_back(draws.targets[i]);
    }
  }
  if (targets.empty()) return;
  std::vector<uint32_t> rows(targets.size()), generations(targets.size()), priorities(targets.size());
  const By by = settings_.stores[shard.of].draws->by;
  find_rows(population_of(*shard.store, false), by, targets, rows, generations, priorities);
  std::vector<uint32_t> there, there_generations;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == kNoRow) continue;
    there.push_back(rows[i]);
    there_generations.push_back(generations[i]);
  }
  std::vector<uint8_t> taken(there.size());
  shard.store->count_samples(there, there_generations, taken);
}

// The rows of draws by totals.
void RankReader::find(size_t number, Draws& draws, const std::vector<uint32_t>& which) const {
  const ShardView& shard = shards_[number];
  const size_t n = which.size();
  std::vector<uint32_t> rows(n), generations(n), priorities(n);
  const By by = settings_.stores[shard.of].draws->by;
  find_rows(population_of(*shard.store, false), by, picked(draws.targets, which), rows, generations, priorities);
  for (size_t i = 0; i < n; ++i) {
    draws.rows[which[i]] = rows[i];
    draws.generations[which[i]] = generations[i];
    draws.probability[which[i]] = static_cast<double>(priorities[i]) / static_cast<double>(draws.whole[shard.of]);
  }
}

void RankReader::read_shard(size_t number, Draws& draws, const Reads& reads, std::span<const Target> targets,
                            const Hooks& hooks, Found& result) const {
  const ShardView& shard = shards_[number];
  const StorePlan& plan = settings_.stores[shard.of];
  const size_t n = reads.draws.size();
  if (!draws.targets.empty()) find(number, draws, reads.draws);
  std::vector<uint8_t> torn(n);
  const auto copy_these = [&](const std::vector<uint32_t>& which, uint32_t attempt) {
    if (attempt != 0 || draws.rounds.empty()) {
      copy(number, draws, reads, targets, hooks, which, attempt, plan.limited && attempt == 0, torn);
    } else {  // rows whose last sample was taken before they were counted were drawn in later rounds
      std::vector<uint32_t> rounds = picked(draws.rounds, reads.draws);
      std::ranges::sort(rounds);
      rounds.erase(std::ranges::unique(rounds).begin(), rounds.end());
      for (const uint32_t round : rounds) {
        std::vector<uint32_t> of_round;
        for (const uint32_t i : which) {
          if (draws.rounds[reads.draws[i]] == round) of_round.push_back(i);
        }
        copy(number, draws, reads, targets, hooks, of_round, round, plan.limited, torn);
      }
    }
    std::vector<uint32_t> lost;
    for (uint32_t i = 0; i < n; i += plan.atom) {  // this rank reads atoms as a whole
      const auto begin = torn.begin() + i;
      if (std::find(begin, begin + plan.atom, uint8_t{1}) == begin + plan.atom) continue;
      for (uint32_t k = 0; k < plan.atom; ++k) lost.push_back(i + k);
    }
    return lost;
  };
  const auto again = [&](const std::vector<uint32_t>& lost, uint32_t attempt) {
    return draw_again(number, draws, reads, hooks, attempt, lost, result);
  };
  if (n % plan.atom != 0) fail(ErrorKind::schema, n, " draws are no whole atoms of ", plan.atom);
  std::vector<uint32_t> pending(n);
  std::iota(pending.begin(), pending.end(), 0);
  const Redrawn made = copy_until_whole(shard.store->header().capacity, std::move(pending), 0, copy_these, again);
  result.redrawn[shard.of] += made.rows;
  double& lowest = result.lowest[shard.of];
  for (const uint32_t draw : reads.draws) lowest = std::min(lowest, draws.probability[draw]);
  for (const Reads::To& to : reads.to) {
    if (targets[to.target].rank == settings_.rank) result.local += to.which.size();
  }
}

// Copies some of a shard's reads to all that get them.
void RankReader::copy(size_t number, const Draws& draws, const Reads& reads, std::span<const Target> targets,
                      const Hooks& hooks, const std::vector<uint32_t>& which, uint32_t round, bool counted,
                      std::vector<uint8_t>& torn) const {
  const ShardView& shard = shards_[number];
  const StorePlan& plan = settings_.stores[shard.of];
  Store& store = *shard.store;
  const auto first = static_cast<uint32_t>(draws.first[shard.of]);
  std::vector<uint32_t> found, rows, generations, numbers;
  for (auto* of_found : {&found, &rows, &generations, &numbers}) of_found->reserve(which.size());
  std::vector<uint32_t> at(reads.draws.size(), kNoRow);  // of each read, its place among those found
  for (const uint32_t i : which) {
    torn[i] = 1;
    const uint32_t draw = reads.draws[i];
    if (draws.rows[draw] == kNoRow) continue;
    torn[i] = 0;
    at[i] = static_cast<uint32_t>(found.size());
    found.push_back(i);
    rows.push_back(draws.rows[draw]);
    generations.push_back(draws.generations[draw]);
    numbers.push_back(draw - first);
  }
  if (found.empty()) return;
  RowsToCopy all{shard.of, rows, generations, {}, {}, numbers, round};
  std::vector<int32_t> ends;
  ends.reserve(found.size());
  if (draws.placed[shard.of] != 0) {
    for (const uint32_t i : found) ends.push_back(static_cast<int32_t>(draws.anchors[reads.draws[i]]));
  } else if (settings_.window.length != 0 && !settings_.view) {
    if (hooks.place) {
      ends = hooks.place(all);
      if (ends.size() != found.size()) fail(ErrorKind::schema, "a window is placed for every row");
    } else {
      ends.resize(rows.size());
      place_windows(population_of(store, false), rows, settings_.window, {plan.seed, draws.step, kWindowStream}, round,
                    numbers, ends);
    }
  }

  // Behind the call-back: where that raises, no row is left held as one on its last sample.
  std::vector<uint8_t> taken(found.size(), 1);
  if (!counted && !store.read_only()) store.count_samples(rows, generations, taken);

  struct Part {
    const Target* target;
    bool all = false;  // of those found
    std::vector<uint32_t> of, rows, generations, places, numbers;
    std::vector<int32_t> ends;
    RowsToCopy asked;
    CopiedRows copied;
  };
  std::vector<Part> parts;
  for (const Reads::To& to : reads.to) {
    Part part{.target = &targets[to.target],
              .of = {},
              .rows = {},
              .generations = {},
              .places = {},
              .numbers = {},
              .ends = {},
              .asked = {},
              .copied = {}};
    part.of.reserve(to.which.size());
    part.places.reserve(to.which.size());
    for (size_t i = 0; i < to.which.size(); ++i) {
      const uint32_t place = at[to.which[i]];
      if (place == kNoRow) continue;
      part.of.push_back(place);
      part.places.push_back(to.places[i]);
    }
    if (part.of.empty()) continue;
    part.all = part.of.size() == found.size();  // in the order of reads, as those found are
    if (!part.all) {
      part.rows = picked(rows, part.of);
      part.generations = picked(generations, part.of);
      part.numbers = picked(numbers, part.of);
      if (!ends.empty()) part.ends = picked(ends, part.of);
    }
    parts.push_back(std::move(part));
  }
  for (Part& part : parts) {
    if (part.all) {
      part.asked = {shard.of, rows, generations, ends, part.places, numbers, round, part.target->headers.size()};
    } else {
      part.asked = {shard.of,     part.rows, part.generations,           part.ends, part.places,
                    part.numbers, round,     part.target->headers.size()};
    }
    if (part.target->copier != nullptr) part.target->copier->launch(part.asked);
  }
  for (Part& part : parts) {
    if (part.target->copier == nullptr) copy_on_host(shard, *part.target, part.asked, draws.step, part.copied);
  }
  for (Part& part : parts) {
    if (part.target->copier != nullptr) part.copied = part.target->copier->resolve();
    const CopiedRows& copied = part.copied;
    for (size_t i = 0; i < part.of.size(); ++i) {
      const uint32_t read = found[part.of[i]];
      if (copied.torn[i] != 0) torn[read] = 1;
      part.target->headers[part.places[i]] = {
          .row = part.asked.rows[i],
          .generation = part.asked.generations[i],
          .shard = static_cast<uint32_t>(number),
          .length = copied.lengths[i],
          .start = copied.starts[i],
          .steps = copied.steps[i],
          .anchor = part.asked.ends.empty() || settings_.window.of_episodes() ? copied.starts[i] : part.asked.ends[i],
          .reserved = 0,
          .version = copied.versions[i],
          .probability = draws.probability[reads.draws[read]]};
    }
  }
  if (store.header().max_times_sampled == 0) return;
  if (!counted) store.release_exhausted(rows, generations);
  for (size_t i = 0; i < found.size(); ++i) {
    if (taken[i] == 0) torn[found[i]] = 1;  // somebody else drew the row's last allowed sample first
  }
}

void RankReader::copy_on_host(const ShardView& shard, const Target& target, const RowsToCopy& rows, uint64_t step,
                              CopiedRows& copied) const {
  const Store& store = *shard.store;
  const size_t n = rows.rows.size();
  const Consumer& consumer = *consumer_of(target.rank);
  std::vector<uint8_t> mask;
  copied.steps.resize(n);
  if (settings_.view) {
    // What it tells of its rows goes to their places, as the rows do.
    const TransitionView& view = *settings_.view;
    const size_t room = target.headers.size();
    const TransitionTargets to(view, store, shard.fields, target.arrays, room);
    RowMetadata found(room, steps_);
    TransitionRequest request;
    request.rows = rows.rows;
    request.generations = rows.generations;
    request.places = rows.places;
    request.numbers = rows.numbers;
    std::vector<uint32_t> steps(rows.ends.begin(), rows.ends.end());
    request.steps = steps;
    request.key = {settings_.stores[shard.of].seed, step, kWindowStream};
    request.round = rows.round;
    request.threads = settings_.threads;
    request.fields = to.fields;
    request.discount = to.discount;
    request.terminated = to.terminated;
    request.truncated = to.truncated;
    request.relabelled = to.relabelled;
    request.torn = found.torn;
    request.mask = found.mask;
    request.starts = found.starts;
    request.lengths = found.lengths;
    request.versions = found.versions;
    gather_transitions(store, view, request);
    copied.torn = picked(found.torn, rows.places);
    copied.lengths = picked(found.lengths, rows.places);
    copied.starts = picked(found.starts, rows.places);
    copied.versions = picked(found.versions, rows.places);
    for (size_t i = 0; i < n; ++i) {
      const auto begin = found.mask.begin() + static_cast<ptrdiff_t>(rows.places[i] * steps_);
      copied.steps[i] = static_cast<int32_t>(std::count(begin, begin + static_cast<ptrdiff_t>(steps_), uint8_t{1}));
    }
    return;
  }
  std::vector<FetchField> fields;
  for (size_t i = 0; i < consumer.arrays.size(); ++i) {
    const uint32_t array = consumer.arrays[i];
    fields.push_back({shard.fields[array], target.arrays[i], settings_.window.steps_of(array)});
  }
  RowMetadata found(n, steps_);
  FetchRequest request;
  request.rows = rows.rows;
  request.generations = rows.generations;
  request.fields = fields;
  request.windows_of(settings_.window, settings_.pad_left);
  request.within_episodes = true;
  request.ends = rows.ends;
  request.places = rows.places;
  request.threads = settings_.threads;
  found.take(&request);
  fetch(store, request);
  for (size_t i = 0; i < n; ++i) {
    const auto begin = found.mask.begin() + static_cast<ptrdiff_t>(i * steps_);
    copied.steps[i] = static_cast<int32_t>(std::count(begin, begin + static_cast<ptrdiff_t>(steps_), uint8_t{1}));
  }
  copied.torn = std::move(found.torn);
  copied.lengths = std::move(found.lengths);
  copied.starts = std::move(found.starts);
  copied.versions = std::move(found.versions);
}

bool RankReader::draw_again(size_t number, Draws& draws, const Reads& reads, const Hooks& hooks, uint32_t attempt,
                            const std::vector<uint32_t>& lost, Found& result) const {
  const ShardView& shard = shards_[number];
  const size_t first = draws.first[shard.of], last = draws.first[shard.of + 1], n = lost.size();
  const std::vector<uint32_t> again = picked(reads.draws, lost);
  std::vector<uint32_t> numbers, kept;
  for (const uint32_t draw : again) {
    numbers.push_back(draw - static_cast<uint32_t>(first));
    draws.rows[draw] = kNoRow;
  }
  // The shard's other rows in this batch, those that other ranks read included, as far as this one knows them.
  for (size_t i = first; i < last; ++i) {
    if (draws.shard[i] == static_cast<int64_t>(number) && draws.rows[i] != kNoRow) kept.push_back(draws.rows[i]);
  }
  // Ranks that share a shard draw again under different rounds, so that they do not find the same rows.
  const uint32_t round = (attempt - 1) * shard.turns + shard.turn + 1;
  std::vector<uint32_t> rows(n), generations(n), steps(n);
  std::vector<double> probability(n);
  const std::optional<BatchSampler>& sampler = samplers_[number];
  try {
    if (sampler) {
      const BatchSampler::Step step{.step = draws.step,
                                    .limits = hooks.limits ? hooks.limits(shard.of) : Limits{},
                                    .cursor = draws.cursors[shard.of],
                                    .admitted = true};
      const uint64_t cursor =
          sampler->draw(step, last - first, round, numbers, kept, {rows, generations, probability, steps});
      result.cursors[shard.of] = std::max(result.cursors[shard.of], cursor);
    } else if (!hooks.again ||
               !hooks.again({shard.of, last - first, round, numbers, kept}, rows, generations, probability)) {
      result.failed = "a shard has no other row for one that was lost";
      return false;
    }
  } catch (const Error& error) {
    if (error.kind != ErrorKind::empty && error.kind != ErrorKind::not_enough) throw;
    result.failed = error.what();
    return false;
  }
  const bool placed = sampler && sampler->draws_steps();
  for (size_t i = 0; i < n; ++i) {
    draws.rows[again[i]] = rows[i];
    draws.generations[again[i]] = generations[i];
    draws.probability[again[i]] = probability[i] * draws.share[number];
    if (placed) draws.anchors[again[i]] = steps[i];
  }
  return true;
}

// --- a batch --------------------------------------------------------------------------------------------------------

void RankReader::place(const Target& own, std::span<const uint32_t> places, const std::byte* message) const {
  const Layout made = layout(settings_.rank, places.size());
  const std::vector<uint64_t> bytes = row_bytes(settings_.rank);
  for (size_t array = 0; array < bytes.size(); ++array) {
    for (size_t i = 0; i < places.size(); ++i) {
      std::memcpy(own.arrays[array] + places[i] * bytes[array], message + made.arrays[array] + i * bytes[array],
                  bytes[array]);
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    RowHeader& header = own.headers[places[i]];
    std::memcpy(&header, message + made.headers + i * sizeof header, sizeof header);
    if (header.shard >= shards_.size()) fail(ErrorKind::frame, "a message has a row of shard ", header.shard);
  }
}

void RankReader::settle(std::span<const RowHeader> headers, const BatchArrays& batch,
                        std::span<uint16_t> shards) const {
  const WindowPlan& window = settings_.window;
  const bool left = settings_.view || (window.length != 0 && settings_.pad_left);
  for (size_t i = 0; i < headers.size(); ++i) {
    const RowHeader& header = headers[i];
    batch.rows[i] = header.row;
    batch.generations[i] = header.generation;
    batch.probability[i] = header.probability;
    batch.starts[i] = header.start;
    batch.lengths[i] = header.length;
    batch.versions[i] = header.version;
    if (!batch.steps.empty()) batch.steps[i] = static_cast<uint32_t>(header.anchor);
    shards[i] = static_cast<uint16_t>(header.shard);
    const size_t count = std::clamp<int64_t>(header.steps, 0, static_cast<int64_t>(steps_));
    uint8_t* const mask = batch.mask.data() + i * steps_;
    std::memset(mask, 0, steps_);
    const auto missing = static_cast<int64_t>(steps_ - count);
    int64_t at = left ? missing : 0;
    if (window.in_place)
      at = std::clamp<int64_t>(window.steps_before() + int64_t{header.start} - header.anchor, 0, missing);
    std::memset(mask + at, 1, count);
  }
}

}  // namespace geartrain
