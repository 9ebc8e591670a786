#include "fetch/rank_reader.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/errors.h"
#include "fetch/episodes.h"
#include "fetch/redraw.h"

namespace geartrain {
namespace {

size_t aligned(size_t bytes) {
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

template <typename T>
std::vector<T> picked(const std::vector<T>& from, const std::vector<uint32_t>& which) {
  std::vector<T> made;
  made.reserve(which.size());
  for (const uint32_t each : which) made.push_back(from[each]);
  return made;
}

}  // namespace

// A draw that this rank reads, and where its row goes: which of the messages, one more for this rank's own batch, and
// the place there.
struct RankReader::Read {
  uint32_t draw, to, at;
};

// The draws of one shard that this rank reads.
struct RankReader::Rows {
  std::vector<uint32_t> draws, rows, generations;
  std::vector<double> probability;
};

RankReader::RankReader(Settings settings, std::vector<ShardView> shards, const Assigner& assigner)
    : settings_(std::move(settings)), shards_(std::move(shards)), assigner_(assigner) {
  check(settings_.window);
  for (const ShardView& shard : shards_) {
    if (shard.store == nullptr) continue;
    const Store& store = *shard.store;
    if (store.per_step()) fail(ErrorKind::schema, "the store has priorities of steps, and rows are read");
    std::vector<uint64_t> bytes;
    for (const uint32_t field : shard.fields) {
      if (field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", field);
      bytes.push_back(fetched_row_bytes(store, field, settings_.window.length));
    }
    const size_t steps = settings_.window.length != 0 ? settings_.window.length : store.header().max_length;
    if (steps_ == 0) {
      row_bytes_ = bytes;
      steps_ = steps;
    } else if (row_bytes_ != bytes || steps_ != steps) {
      fail(ErrorKind::schema, "the shards of a batch have rows of the same fields and lengths");
    }
  }
  if (steps_ == 0) fail(ErrorKind::schema, "a rank has one shard at least");
}

RankReader::Draws RankReader::draw(uint64_t step, size_t n, std::span<const uint64_t> totals) const {
  if (totals.size() != shards_.size()) {
    fail(ErrorKind::schema, totals.size(), " totals were given, there are ", shards_.size(), " shards");
  }
  Draws made;
  made.step = step;
  made.totals.assign(totals.begin(), totals.end());
  std::vector<uint64_t> ends;
  for (const uint64_t total : totals) {
    if (__builtin_add_overflow(made.whole, total, &made.whole)) {
      fail(ErrorKind::schema,
           "the priorities of all shards add up to more than 64 bits; use fewer priority_fraction_bits");
    }
    ends.push_back(made.whole);
  }
  std::vector<uint32_t> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  made.targets.resize(n);
  const uint32_t strata = settings_.stratified ? static_cast<uint32_t>(n) : 0;
  draw_targets({settings_.seed, step, kRowStream}, 0, strata, made.whole, numbers, made.targets);
  made.shard.reserve(n);
  for (uint64_t& target : made.targets) {
    const auto owner = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
    made.shard.push_back(owner);
    target -= ends[static_cast<size_t>(owner)] - totals[static_cast<size_t>(owner)];
  }
  made.assigned = assigner_.assign(made.shard, {}, settings_.in_order);
  for (const int64_t replica : made.assigned.replica) {
    if (static_cast<size_t>(replica) >= settings_.consumers.size()) {
      fail(ErrorKind::schema, "there is no rank for replica ", replica);
    }
  }
  return made;
}

std::vector<RankReader::Traffic> RankReader::outgoing(const Draws& draws) const {
  std::vector<Traffic> made;
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    if (draws.assigned.reader[i] != settings_.rank) continue;
    const uint32_t consumer = settings_.consumers[static_cast<size_t>(draws.assigned.replica[i])];
    if (consumer == settings_.rank) continue;
    auto to = std::ranges::find(made, consumer, &Traffic::rank);
    if (to == made.end()) to = made.insert(made.end(), {consumer, {}});
    to->places.push_back(static_cast<uint32_t>(draws.assigned.place[i]));
  }
  std::ranges::sort(made, {}, &Traffic::rank);
  return made;
}

std::vector<RankReader::Traffic> RankReader::incoming(const Draws& draws) const {
  std::vector<Traffic> made;
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    const auto reader = static_cast<uint32_t>(draws.assigned.reader[i]);
    const uint32_t consumer = settings_.consumers[static_cast<size_t>(draws.assigned.replica[i])];
    if (consumer != settings_.rank || reader == settings_.rank) continue;
    auto from = std::ranges::find(made, reader, &Traffic::rank);
    if (from == made.end()) from = made.insert(made.end(), {reader, {}});
    from->places.push_back(static_cast<uint32_t>(draws.assigned.place[i]));
  }
  std::ranges::sort(made, {}, &Traffic::rank);
  return made;
}

RankReader::Layout RankReader::layout(size_t rows) const {
  Layout made{{}, 0, 0};
  for (const uint64_t bytes : row_bytes_) {
    made.fields.push_back(made.headers);
    made.headers += aligned(bytes * rows);
  }
  made.bytes = made.headers + rows * sizeof(RowHeader);
  return made;
}

RankReader::Found RankReader::read(const Draws& draws, const Batch& batch, std::span<const Message> messages) const {
  // A job may have a thousand shards, and this rank reads few of them: all draws are walked once, not once a shard.
  const auto own = static_cast<uint32_t>(messages.size());
  std::vector<std::vector<Read>> reads(shards_.size());
  std::vector<uint8_t> has_draws(shards_.size(), 0);
  std::vector<uint32_t> sent(messages.size(), 0);
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    const auto number = static_cast<size_t>(draws.shard[i]);
    has_draws[number] = 1;
    if (draws.assigned.reader[i] != settings_.rank) continue;
    if (shards_[number].store == nullptr) {
      fail(ErrorKind::schema, "shard ", number, " is read by a rank that does not have it");
    }
    const uint32_t consumer = settings_.consumers[static_cast<size_t>(draws.assigned.replica[i])];
    uint32_t to = own, at = static_cast<uint32_t>(draws.assigned.place[i]);
    if (consumer != settings_.rank) {  // a message holds its rows in the order of draws, whatever their shard
      to = static_cast<uint32_t>(std::ranges::find(messages, consumer, &Message::rank) - messages.begin());
      if (to == own) fail(ErrorKind::schema, "no message was given for rank ", consumer, ", which gets rows");
      at = sent[to]++;
    }
    reads[number].push_back({static_cast<uint32_t>(i), to, at});
  }
  Found found{.lowest = std::numeric_limits<double>::infinity(), .failed = {}};
  for (size_t number = 0; number < shards_.size(); ++number) {
    if (shards_[number].counts && has_draws[number] != 0) count_for_others(number, draws);
    if (!reads[number].empty()) read_shard(number, draws, reads[number], batch, messages, sent, found);
  }
  return found;
}

// Samples of rows that are read by ranks that have the shard open to read.
void RankReader::count_for_others(size_t number, const Draws& draws) const {
  const ShardView& shard = shards_[number];
  std::vector<uint64_t> targets;
  for (size_t i = 0; i < draws.shard.size(); ++i) {
    if (draws.shard[i] != static_cast<int64_t>(number)) continue;
    if (std::ranges::find(shard.ranks, draws.assigned.reader[i]) == shard.ranks.end()) {
      targets.push_back(draws.targets[i]);
    }
  }
  if (targets.empty()) return;
  std::vector<uint32_t> rows(targets.size()), generations(targets.size()), priorities(targets.size());
  find_rows(population_of(*shard.store, false), settings_.by, targets, rows, generations, priorities);
  std::vector<uint32_t> there, there_generations;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == kNoRow) continue;
    there.push_back(rows[i]);
    there_generations.push_back(generations[i]);
  }
  std::vector<uint8_t> taken(there.size());
  shard.store->count_samples(there, there_generations, taken);
}

void RankReader::draw_again(size_t number, const Draws& draws, uint32_t attempt, Rows& rows,
                            const std::vector<uint32_t>& lost) const {
  const ShardView& shard = shards_[number];
  Store& store = *shard.store;
  const size_t n = lost.size();
  std::vector<uint32_t> found(n), generations(n);
  std::vector<double> probability(n);
  // Ranks that share a shard draw again under different attempts, so that they do not find the same rows.
  DrawPlan plan{.key = {settings_.seed, draws.step, kRowStream}, .by = settings_.by, .limits = {}};
  plan.round = (attempt - 1) * shard.turns + shard.turn + 1;
  if (settings_.stratified) plan.strata = static_cast<uint32_t>(draws.shard.size());
  const std::vector<uint32_t> numbers = picked(rows.draws, lost);
  const auto make = [&] {
    return geartrain::draw(population_of(store, false), plan, numbers, {found, generations, probability});
  };
  uint64_t failed = make();
  if (failed != 0 && !store.read_only()) {
    store.reap();  // sums at odds with their leaves: somebody died in the middle of an update
    failed = make();
    if (failed != 0) {
      store.rebuild();  // or somebody living is in the middle of one: this waits for them
      failed = make();
    }
    if (failed != 0) fail(ErrorKind::corrupt, failed, " draws found no row; store.audit() tells what is wrong");
  }
  const double share = static_cast<double>(draws.totals[number]) / static_cast<double>(draws.whole);
  for (size_t i = 0; i < n; ++i) {
    rows.rows[lost[i]] = found[i];
    rows.generations[lost[i]] = generations[i];
    rows.probability[lost[i]] = probability[i] * share;
  }
}

void RankReader::read_shard(size_t number, const Draws& draws, std::span<const Read> reads, const Batch& batch,
                            std::span<const Message> messages, std::span<const uint32_t> sent, Found& result) const {
  const ShardView& shard = shards_[number];
  const auto own = static_cast<uint32_t>(messages.size());
  const size_t n = reads.size();
  Rows mine;
  std::vector<uint32_t> target, place;
  std::vector<uint64_t> targets;
  for (const Read& each : reads) {
    mine.draws.push_back(each.draw);
    targets.push_back(draws.targets[each.draw]);
    target.push_back(each.to);
    place.push_back(each.at);
  }
  Store& store = *shard.store;
  std::vector<uint32_t> priorities(n);
  mine.rows.resize(n), mine.generations.resize(n), mine.probability.resize(n);
  find_rows(population_of(store, false), settings_.by, targets, mine.rows, mine.generations, priorities);
  for (size_t i = 0; i < n; ++i) {
    mine.probability[i] = static_cast<double>(priorities[i]) / static_cast<double>(draws.whole);
  }

  std::vector<uint32_t> pending(n);
  std::iota(pending.begin(), pending.end(), 0);
  std::vector<uint8_t> torn(n);
  const auto copy_to = [&](uint32_t to, uint32_t attempt, const std::vector<uint32_t>& which) {
    const size_t k = which.size();
    if (k == 0) return;
    const std::vector<uint32_t> rows = picked(mine.rows, which), generations = picked(mine.generations, which);
    std::vector<int32_t> ends;
    RowMetadata found(k, steps_);
    if (settings_.window.length != 0) {
      const std::vector<uint32_t> numbers = picked(mine.draws, which);
      for (const uint32_t row : rows) {
        ends.push_back(static_cast<int32_t>(
            std::min(store.status()[row].length.load(std::memory_order_relaxed), store.header().max_length)));
      }
      place_windows(settings_.window, {settings_.seed, draws.step, kWindowStream}, attempt, numbers, ends, ends);
    }
    const std::vector<uint32_t> places = picked(place, which);
    const Layout made = to == own ? Layout{} : layout(sent[to]);
    std::vector<FetchField> fields;
    for (size_t f = 0; f < shard.fields.size(); ++f) {
      fields.push_back(
          {shard.fields[f], to == own ? batch.arrays.fields[f].out : messages[to].memory + made.fields[f]});
    }
    FetchRequest request;
    request.rows = rows;
    request.generations = generations;
    request.fields = fields;
    request.windows_of(settings_.window, settings_.pad_left);
    request.ends = ends;
    request.places = places;
    request.threads = settings_.threads;
    found.take(&request);
    fetch(store, request);
    for (size_t i = 0; i < k; ++i) {
      torn[which[i]] = found.torn[i];
      const auto row_mask = found.mask.begin() + static_cast<ptrdiff_t>(i * steps_);
      const auto in_row_mask = row_mask + static_cast<ptrdiff_t>(steps_);
      if (to != own) {
        const RowHeader header{rows[i],
                               generations[i],
                               static_cast<uint32_t>(number),
                               found.lengths[i],
                               found.starts[i],
                               static_cast<int32_t>(std::count(row_mask, in_row_mask, uint8_t{1})),
                               found.versions[i],
                               mine.probability[which[i]]};
        std::memcpy(messages[to].memory + made.headers + places[i] * sizeof(RowHeader), &header, sizeof header);
        continue;
      }
      const size_t at = places[i];
      batch.arrays.rows[at] = rows[i];
      batch.arrays.generations[at] = generations[i];
      batch.arrays.probability[at] = mine.probability[which[i]];
      batch.arrays.starts[at] = found.starts[i];
      batch.arrays.lengths[at] = found.lengths[i];
      batch.arrays.versions[at] = found.versions[i];
      batch.shards[at] = static_cast<uint16_t>(number);
      std::copy(row_mask, in_row_mask, batch.arrays.mask.begin() + static_cast<ptrdiff_t>(at * steps_));
    }
  };

  const auto copy = [&](const std::vector<uint32_t>& which, uint32_t attempt) {
    std::vector<std::vector<uint32_t>> of(messages.size() + 1);
    std::vector<uint32_t> rows, generations, lost;
    for (const uint32_t i : which) {
      torn[i] = 1;
      if (mine.rows[i] == kNoRow) continue;
      of[target[i]].push_back(i);
      rows.push_back(mine.rows[i]);
      generations.push_back(mine.generations[i]);
    }
    if (!store.read_only()) {
      std::vector<uint8_t> taken(rows.size());
      store.count_samples(rows, generations, taken);
    }
    for (uint32_t to = 0; to < of.size(); ++to) copy_to(to, attempt, of[to]);
    for (const uint32_t i : which) {
      if (torn[i] != 0) lost.push_back(i);
    }
    return lost;
  };
  const auto again = [&](const std::vector<uint32_t>& lost, uint32_t attempt) {
    try {
      draw_again(number, draws, attempt, mine, lost);
      return true;
    } catch (const Error& error) {
      if (error.kind != ErrorKind::empty) throw;
      result.failed = error.what();
      return false;
    }
  };
  result.redrawn += copy_until_whole(store.header().capacity, std::move(pending), 0, copy, again).rows;
  for (const double each : mine.probability) result.lowest = std::min(result.lowest, each);
  result.local += static_cast<uint64_t>(std::ranges::count(target, own));
}

void RankReader::place(const Batch& batch, std::span<const uint32_t> places, const std::byte* message) const {
  const Layout made = layout(places.size());
  for (size_t f = 0; f < row_bytes_.size(); ++f) {
    const uint64_t bytes = row_bytes_[f];
    for (size_t i = 0; i < places.size(); ++i) {
      std::memcpy(batch.arrays.fields[f].out + places[i] * bytes, message + made.fields[f] + i * bytes, bytes);
    }
  }
  const bool left = settings_.window.length != 0 && settings_.pad_left;
  for (size_t i = 0; i < places.size(); ++i) {
    RowHeader header;
    std::memcpy(&header, message + made.headers + i * sizeof header, sizeof header);
    if (header.shard >= shards_.size()) fail(ErrorKind::frame, "a message has a row of shard ", header.shard);
    const size_t at = places[i];
    batch.arrays.rows[at] = header.row;
    batch.arrays.generations[at] = header.generation;
    batch.arrays.probability[at] = header.probability;
    batch.arrays.starts[at] = header.start;
    batch.arrays.lengths[at] = header.length;
    batch.arrays.versions[at] = header.version;
    batch.shards[at] = static_cast<uint16_t>(header.shard);
    const size_t count = std::clamp<int64_t>(header.steps, 0, static_cast<int64_t>(steps_));
    uint8_t* const mask = batch.arrays.mask.data() + at * steps_;
    std::memset(mask, 0, steps_);
    std::memset(mask + (left ? steps_ - count : 0), 1, count);
  }
}

}  // namespace geartrain
