// Batches over ranks (rank_reader.h, rank_steps.h): the same as of one rank, whoever reads which row and how it gets
// there; rows that are overwritten meanwhile are drawn again, and what ranks find wrong all of them find.

#include "fetch/rank_reader.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "fetch/rank_steps.h"
#include "selection/importance_weights.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

constexpr size_t kRows = 48;  // of the global batch
using Parts = std::vector<std::vector<std::byte>>;

// Rounds between threads, each of which is a rank.
class Meeting {
 public:
  explicit Meeting(uint32_t ranks) : ranks_(ranks), sent_(ranks) {}

  Parts all_to_all(uint32_t rank, Parts parts) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return sent_[rank].empty(); });
    sent_[rank] = std::move(parts);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return arrived_ == ranks_ || taken_ != 0; });
    Parts made;
    for (const Parts& each : sent_) made.push_back(each[rank]);
    if (++taken_ == ranks_) {
      for (Parts& each : sent_) each.clear();
      arrived_ = taken_ = 0;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return taken_ == 0; });
    }
    return made;
  }

 private:
  const uint32_t ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Parts> sent_;
  uint32_t arrived_ = 0, taken_ = 0;
};

class MeetingExchange final : public RankExchange {
 public:
  MeetingExchange(Meeting& meeting, uint32_t rank, uint32_t ranks, std::vector<uint32_t> leaders, bool tells)
      : meeting_(meeting), rank_(rank), ranks_(ranks), leaders_(std::move(leaders)), tells_(tells) {}

  Parts all_to_all(Parts parts) override { return meeting_.all_to_all(rank_, std::move(parts)); }
  std::vector<uint64_t> totals(std::span<const uint64_t> mine) override {
    std::vector<uint64_t> made;
    const Parts every = gather(std::as_bytes(mine));
    for (const uint32_t leader : leaders_) std::memcpy(&made.emplace_back(), every[leader].data(), sizeof(uint64_t));
    return made;
  }
  std::optional<Parts> outcomes(std::span<const std::byte> mine) override {
    if (!tells_) return std::nullopt;
    return gather(mine);
  }
  Parts gather(std::span<const std::byte> mine) { return all_to_all(Parts(ranks_, {mine.begin(), mine.end()})); }

 private:
  Meeting& meeting_;
  const uint32_t rank_, ranks_;
  const std::vector<uint32_t> leaders_;
  const bool tells_;
};

// A rank's part of a batch of tagged rows, with the memory of all arrays.
struct Part {
  explicit Part(size_t n)
      : tags(n),
        late(n * 3),
        steps(n * kTaggedSteps * kTaggedWidth),
        rows(n),
        generations(n),
        mask(n * kTaggedSteps),
        starts(n),
        lengths(n),
        versions(n),
        probability(n),
        shards(n),
        headers(n) {
    batch.fields = {{0, reinterpret_cast<std::byte*>(tags.data())},
                    {1, reinterpret_cast<std::byte*>(steps.data())},
                    {2, reinterpret_cast<std::byte*>(late.data())}};
    batch.rows = rows;
    batch.generations = generations;
    batch.probability = probability;
    batch.mask = mask;
    batch.starts = starts;
    batch.lengths = lengths;
    batch.versions = versions;
  }
  bool whole(size_t i) const {
    const uint64_t tag = tags[i];
    const uint32_t length = tagged_length(tag);
    bool good = versions[i] == static_cast<int64_t>(tag) && lengths[i] == static_cast<int32_t>(length);
    for (uint32_t k = 0; k < 3; ++k) good &= late[i * 3 + k] == (tag ^ k);
    for (uint32_t t = 0; t < kTaggedSteps; ++t) {
      good &= mask[i * kTaggedSteps + t] == (t < length);
      for (uint32_t k = 0; k < kTaggedWidth; ++k) {
        good &= steps[(i * kTaggedSteps + t) * kTaggedWidth + k] == (t < length ? tagged_step(tag, t, k) : 0);
      }
    }
    return good;
  }
  std::vector<uint64_t> tags, late, steps;
  std::vector<uint32_t> rows, generations;
  std::vector<uint8_t> mask;
  std::vector<int32_t> starts, lengths;
  std::vector<int64_t> versions;
  std::vector<double> probability;
  std::vector<uint16_t> shards;
  std::vector<RowHeader> headers;
  BatchArrays batch;
};

// How the rows of other ranks' shards get to a rank: in messages; read in place, from a store opened read-only; or all
// ranks have all stores open.
enum class Way { messages, in_place, shared };

struct Drawn {
  uint64_t tag;
  double probability, weight;
  bool operator==(const Drawn&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Drawn& drawn) {
  return out << drawn.tag << " (" << drawn.probability << ", " << drawn.weight << ")";
}

// A job: ranks as threads, a store each with its part of the rows, so that all rows in order are those of one store.
class Job {
 public:
  Job(uint32_t ranks, Way way, uint64_t rows) : ranks_(ranks), way_(way), meeting_(ranks) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const uint64_t first = rows * rank / ranks, last = rows * (rank + 1) / ranks;
      StoreOptions options = store_options(last - first);
      names_.push_back(testing::unique_name());
      stores_.push_back(Store::create(names_.back(), tagged_fields(), options));
      for (uint64_t tag = first; tag < last; ++tag) {
        uint32_t row = 0, generation = 0;
        insert_tagged(*stores_[rank], {&tag, 1}, {&row, 1}, {&generation, 1}, 1.0 + static_cast<double>(tag % 5));
      }
    }
    std::vector<ReplicaRanks> replicas;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<uint32_t> near;
      for (uint32_t shard = 0; shard < ranks && way == Way::in_place; ++shard) {
        if (shard != rank) near.push_back(shard);
      }
      replicas.push_back({{rank}, {local_of(rank)}, {near}});
    }
    for (uint32_t shard = 0; shard < ranks; ++shard) shard_ranks_.push_back(ranks_of(shard));
    for (uint32_t shard = 0; shard < ranks; ++shard) leaders_.push_back(shard);
    assigner_ = std::make_unique<Assigner>(replicas, shard_ranks_);
  }

  Store& store(uint32_t rank) { return *stores_[rank]; }

  // body(rank, reader, steps, exchange) on a thread for each rank.
  template <typename Body>
  void run(Body&& body) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<std::unique_ptr<Store>> opened;
        std::vector<RankReader::ShardView> views;
        for (uint32_t shard = 0; shard < ranks_; ++shard) {
          RankReader::ShardView view{
              .store = nullptr, .of = 0, .fields = {0, 1, 2}, .counts = false, .ranks = shard_ranks_[shard]};
          if (shard == rank || way_ == Way::shared) {
            view.store = stores_[shard].get();
          } else if (way_ == Way::in_place) {
            AttachOptions reads;
            reads.read_only = true;
            opened.push_back(Store::attach(names_[shard], reads));
            view.store = opened.back().get();
          }
          view.counts = shard == rank && way_ == Way::in_place;
          view.turn = rank;
          view.turns = ranks_;
          views.push_back(std::move(view));
        }
        RankReader::Settings settings;
        settings.rank = rank;
        settings.replica = rank;
        for (uint32_t each = 0; each < ranks_; ++each) settings.consumers.push_back({each, each, {0, 1, 2}});
        BatchSampler::Settings prioritized;
        prioritized.seed = 5;
        settings.stores = {{.draws = prioritized, .seed = 5}};
        const RankReader reader(settings, views, *assigner_);
        RankSteps::Settings agrees{.rank = rank, .ranks = ranks_, .fingerprint = 11, .stores = {}};
        agrees.stores = {{.store = stores_[rank].get(), .leaders = leaders_}};
        agrees.with_lowest = true;
        const RankSteps steps(agrees);
        MeetingExchange exchange(meeting_, rank, ranks_, leaders_, true);
        body(rank, reader, steps, exchange);
      });
    }
    for (std::thread& each : threads) each.join();
  }

  // A rank's batch of a step, its rows sent and received; nothing where a rank has lost rows for good.
  std::optional<RankSteps::Outcome> read(const RankReader& reader, const RankSteps& steps, MeetingExchange& exchange,
                                         RankReader::Draws& draws, Part& part, RankReader::Found* found) const {
    std::vector<std::vector<std::byte>> memory;
    std::vector<RankReader::Target> targets;
    for (const RankReader::Traffic& each : reader.outgoing(draws)) {
      memory.emplace_back(reader.layout(each.rank, each.places.size()).bytes);
      targets.push_back(reader.message(each.rank, memory.back().data(), each.places.size()));
    }
    const RankReader::Target own{
        .rank = reader.settings().rank, .arrays = reader.arrays_of(part.batch), .headers = part.headers};
    targets.push_back(own);
    *found = reader.read(draws, targets, {});
    Parts sent(ranks_);
    for (size_t i = 0; i < memory.size(); ++i) sent[targets[i].rank] = std::move(memory[i]);
    const Parts received = exchange.all_to_all(std::move(sent));
    const auto outcome = steps.tell(found->failed.has_value(), found->lowest, exchange);
    for (const RankReader::Traffic& each : reader.incoming(draws)) {
      CHECK_EQ(received[each.rank].size(), reader.layout(own.rank, each.places.size()).bytes);
      if (!outcome->failed[each.rank]) reader.place(own, each.places, received[each.rank].data());
    }
    reader.settle(part.headers, part.batch, part.shards);
    return outcome;
  }

  // Draws of this rank's batch, in order.
  static std::vector<uint32_t> mine(const RankReader::Draws& draws, uint32_t rank) {
    std::vector<uint32_t> made;
    for (size_t i = 0; i < draws.assigned.replica.size(); ++i) {
      if (draws.assigned.replica[i] == static_cast<int64_t>(rank)) made.push_back(static_cast<uint32_t>(i));
    }
    return made;
  }

  // By step and draw what all ranks together have got, with updates after every batch.
  std::map<std::pair<uint64_t, uint32_t>, Drawn> train(uint64_t batches) {
    std::map<std::pair<uint64_t, uint32_t>, Drawn> all;
    std::mutex mutex;
    run([&](uint32_t rank, const RankReader& reader, const RankSteps& steps, MeetingExchange& exchange) {
      std::vector<double> priorities;
      std::vector<int64_t> numbers, shards;
      Part part(kRows / ranks_);
      for (uint64_t step = 0; step < batches; ++step) {
        // In two calls, the later half of the global batch first: calls and draws decide the order, not rows.
        std::vector<GivenPriorities> given;
        const auto later = std::ranges::lower_bound(numbers, static_cast<int64_t>(kRows / 2));
        const auto half = static_cast<size_t>(later - numbers.begin());
        const auto from = [&](size_t first, size_t n) {
          return GivenPriorities{std::span(part.rows).subspan(first, n),
                                 std::span(part.generations).subspan(first, n),
                                 std::span(numbers).subspan(first, n),
                                 std::span(shards).subspan(first, n),
                                 {},
                                 std::span(priorities).subspan(first, n)};
        };
        if (step != 0) given = {from(half, priorities.size() - half), from(0, half)};
        const RankSteps::Agreed agreed = steps.agree(step, given, {}, {}, exchange);
        CHECK(agreed.refusal == RankSteps::Refusal::none && agreed.changed == (step != 0));
        RankReader::Draws draws = reader.draw(step, {{kRows}}, agreed.totals);
        RankReader::Found found;
        const auto outcome = read(reader, steps, exchange, draws, part, &found);
        CHECK(!found.failed && std::ranges::count(outcome->failed, 1) == 0);
        std::vector<double> weights(part.probability.size());
        importance_weights(part.probability, agreed.rows[0], 0.4, outcome->lowest[0], weights);
        const std::vector<uint32_t> draws_of_mine = mine(draws, rank);
        priorities.clear(), numbers.clear(), shards.clear();
        const std::lock_guard lock(mutex);
        for (size_t i = 0; i < draws_of_mine.size(); ++i) {
          CHECK(part.whole(i));
          all[{step, draws_of_mine[i]}] = {part.tags[i], part.probability[i], weights[i]};
          priorities.push_back(-1.0 - static_cast<double>((part.tags[i] + draws_of_mine[i]) % 7));
          numbers.push_back(draws_of_mine[i]);
          shards.push_back(part.shards[i]);
        }
      }
    });
    return all;
  }

 private:
  std::vector<uint32_t> ranks_of(uint32_t shard) const {
    if (way_ != Way::shared) return {shard};
    std::vector<uint32_t> all(ranks_);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  std::vector<uint32_t> local_of(uint32_t rank) const { return ranks_of(rank); }

  const uint32_t ranks_;
  const Way way_;
  Meeting meeting_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Store>> stores_;
  std::vector<std::vector<uint32_t>> shard_ranks_;
  std::vector<uint32_t> leaders_;
  std::unique_ptr<Assigner> assigner_;
};

TEST(ranks_make_the_batches_of_one_that_has_all_rows_whichever_way_rows_go) {
  constexpr uint64_t kAll = 90, kBatches = 8;
  const auto alone = Job(1, Way::messages, kAll).train(kBatches);
  CHECK_EQ(alone.size(), kBatches * kRows);
  for (const uint32_t ranks : {2u, 3u}) {
    for (const Way way : {Way::messages, Way::in_place, Way::shared}) {
      Job job(ranks, way, kAll);
      const auto found = job.train(kBatches);
      CHECK_EQ(found.size(), alone.size());
      for (const auto& [at, drawn] : alone) CHECK_EQ(found.at(at), drawn);
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        check_sound(job.store(rank));
        CHECK_EQ(job.store(rank).control().counters.stale_keys.load(), uint64_t{0});
      }
    }
  }
}

TEST(rows_that_are_overwritten_while_ranks_read_them_are_drawn_again_and_never_mixed) {
  for (const Way way : {Way::messages, Way::in_place, Way::shared}) {
    constexpr uint32_t kPair = 2;
    Job job(kPair, way, 8 * kPair);
    std::atomic<uint32_t> at_work{kPair};
    std::vector<std::thread> writers;
    for (uint32_t rank = 0; rank < kPair; ++rank) {
      writers.emplace_back([&, rank] {
        for (uint64_t tag = uint64_t(rank + 1) << 32; at_work != 0; ++tag) {
          uint32_t row = 0, generation = 0;
          insert_tagged(job.store(rank), {&tag, 1}, {&row, 1}, {&generation, 1});
          if (tag % 4 == 0) ::usleep(20);  // rows are read now and then, too
        }
      });
    }
    std::atomic<uint64_t> redrawn{0}, read{0}, mixed{0};
    job.run([&](uint32_t, const RankReader& reader, const RankSteps& steps, MeetingExchange& exchange) {
      Part part(kRows / kPair);
      for (uint64_t step = 0; step < 200; ++step) {
        const RankSteps::Agreed agreed = steps.agree(step, {}, {}, {}, exchange);
        RankReader::Found found;
        RankReader::Draws draws = reader.draw(step, {{kRows}}, agreed.totals);
        const auto outcome = job.read(reader, steps, exchange, draws, part, &found);
        redrawn += found.redrawn[0];
        if (std::ranges::count(outcome->failed, 1) != 0) continue;  // all rows were being written
        for (size_t i = 0; i < part.tags.size(); ++i) mixed += !part.whole(i);
        read += part.tags.size();
      }
      --at_work;
    });
    for (std::thread& each : writers) each.join();
    CHECK(read > 0);
    CHECK(redrawn > 0);
    CHECK_EQ(mixed.load(), uint64_t{0});
    for (uint32_t rank = 0; rank < kPair; ++rank) check_sound(job.store(rank));
  }
}

TEST(a_shard_that_loses_all_rows_after_its_total_was_told_is_told_to_all_ranks) {
  for (const Way way : {Way::messages, Way::in_place}) {
    Job job(2, way, 40);
    job.run([&](uint32_t rank, const RankReader& reader, const RankSteps& steps, MeetingExchange& exchange) {
      const RankSteps::Agreed agreed = steps.agree(0, {}, {}, {}, exchange);
      if (rank == 1) {
        std::vector<uint32_t> rows, generations;
        job.store(1).keys(&rows, &generations);
        CHECK_EQ(job.store(1).remove(rows, generations), uint64_t{0});
      }
      exchange.gather({});  // both know the totals, and one has lost its rows
      Part part(kRows / 2);
      RankReader::Found found;
      RankReader::Draws draws = reader.draw(0, {{kRows}}, agreed.totals);
      const auto outcome = job.read(reader, steps, exchange, draws, part, &found);
      CHECK(outcome->failed[1] != 0);
      if (rank == 1) CHECK(found.failed.has_value());
      // The next batch is of what is left.
      const RankSteps::Agreed left = steps.agree(1, {}, {}, {}, exchange);
      CHECK_EQ(left.totals[1], uint64_t{0});
      CHECK_EQ(left.rows[0], uint64_t{20});
      RankReader::Draws again = reader.draw(1, {{kRows}}, left.totals);
      const auto whole = job.read(reader, steps, exchange, again, part, &found);
      CHECK_EQ(std::ranges::count(whole->failed, 1), 0);
      for (size_t i = 0; i < part.tags.size(); ++i) CHECK(part.whole(i) && part.shards[i] == 0);
    });
  }
}

TEST(what_ranks_find_wrong_all_of_them_find_before_any_of_them_draws) {
  Job job(2, Way::messages, 20);
  job.run([&](uint32_t rank, const RankReader& reader, const RankSteps&, MeetingExchange& exchange) {
    const auto steps_with = [&](int64_t fingerprint, uint64_t min_rows) {
      RankSteps::Settings settings{.rank = rank, .ranks = 2, .fingerprint = fingerprint, .stores = {}};
      settings.stores = {{.store = &job.store(rank), .leaders = {0, 1}, .min_rows = min_rows}};
      return RankSteps(settings);
    };
    using Refusal = RankSteps::Refusal;
    const RankSteps::Agreed other = steps_with(7 + rank, 1).agree(0, {}, {}, {}, exchange);
    CHECK(other.refusal == Refusal::disagree && other.rank == 1 - rank);
    const RankSteps same = steps_with(7, 1);
    CHECK(same.agree(rank, {}, {}, {}, exchange).refusal == Refusal::disagree);
    CHECK(steps_with(7, 21).agree(1, {}, {}, {}, exchange).refusal == Refusal::few_rows);
    // An update of no rows is one, too, and keys of rows that no store can have are stale.
    const uint32_t row = 1'000'000, generation = 1;
    const int64_t shard = 1 - rank, draw = -4;
    const double zero = 0;
    const GivenPriorities stale{{&row, 1}, {&generation, 1}, {&draw, 1}, {&shard, 1}, {}, {&zero, 1}};
    uint32_t changes = 0;
    RankSteps::Hooks count;
    count.change = [&](uint32_t, std::span<double>) { ++changes; };
    const GivenPriorities empty{};
    CHECK(same.agree(2, rank == 0 ? std::span(&stale, 1) : std::span(&empty, 1), {}, count, exchange).changed);
    CHECK_EQ(changes, 1u);
    CHECK_EQ(job.store(rank).control().counters.stale_keys.load(),
             uint64_t{rank});  // rank 1 leads the shard of that key
    // All priorities are zero.
    std::vector<uint32_t> rows, generations;
    job.store(rank).keys(&rows, &generations);
    const std::vector<double> zeros(rows.size());
    job.store(rank).update_priorities(rows, generations, zeros);
    CHECK(same.agree(3, {}, {}, {}, exchange).refusal == Refusal::nothing_to_draw);
    CHECK_THROWS(schema, reader.draw(0, {{kRows}}, std::vector<uint64_t>(3, 1)));
    // Messages that no rank of this version sends.
    const int64_t nowhere = 2;
    const GivenPriorities lost{{&row, 1}, {&generation, 1}, {}, {&nowhere, 1}, {}, {&zero, 1}};
    CHECK_THROWS(schema, same.agree(4, {&lost, 1}, {}, {}, exchange));
    exchange.gather({});
    for (const size_t bytes : {size_t{3}, sizeof(RankStatus), sizeof(RankStatus) + sizeof(ShardStatus) + 5}) {
      if (rank == 0) {
        RankStatus status{};
        status.fingerprint = 7, status.step = 5;
        std::vector<std::byte> message(bytes);
        std::memcpy(message.data(), &status, std::min(bytes, sizeof status));
        exchange.gather(message);
      } else {
        CHECK_THROWS(frame, same.agree(5, {}, {}, {}, exchange));
      }
    }
  });
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
