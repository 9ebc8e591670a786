// Transitions under concurrency: none is made of two episodes, whoever writes meanwhile, and each is what the slow loop
// over its row says.

#include "fetch/transitions.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "fetch/batch_sampler.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr uint32_t kSteps = 24, kWidth = 5;
constexpr uint64_t kRewardBase = 1 << 20;

// Everything of an episode follows from its tag.
uint32_t length_of(uint64_t tag) {
  return 1 + static_cast<uint32_t>(tag * 0x2545f4914f6cdd1du >> 40) % kSteps;
}
uint64_t frame(uint64_t tag, uint64_t step) {
  return tag * 64 + step;
}
int32_t reward(uint64_t tag, uint64_t step) {
  return static_cast<int32_t>((tag * 31 + step * 7) % kRewardBase);
}
bool ended(uint64_t tag) {
  return tag % 2 == 0;
}

std::vector<FieldSpec> fields(bool truncated) {
  std::vector<FieldSpec> specs{{"obs", 8, 8, true, {kSteps, kWidth}},
                               {"reward", 7, 4, true, {kSteps}},
                               {"terminated", 1, 1, true, {kSteps}},
                               {"tag", 8, 8, false, {}}};
  if (truncated) specs.push_back({"truncated", 1, 1, true, {kSteps}});
  return specs;
}

std::unique_ptr<Store> make_store(uint64_t capacity, bool truncated) {
  StoreOptions options;
  options.capacity = capacity;
  return Store::create(testing::unique_name(), fields(truncated), options);
}

void insert(Store& store, uint64_t tag) {
  uint32_t row = 0, generation = 0;
  store.allocate({&row, 1});
  const uint32_t length = length_of(tag);
  const bool truncated = store.header().field_count > 4;
  // As fill() writes, which ThreadSanitizer does not see either.
  std::vector<uint64_t> frames(kSteps * kWidth);
  std::vector<int32_t> values(kSteps);
  std::vector<uint8_t> ends(kSteps), cuts(kSteps);
  for (uint32_t t = 0; t < length; ++t) {
    for (uint32_t k = 0; k < kWidth; ++k) frames[t * kWidth + k] = frame(tag, t);
    values[t] = reward(tag, t);
  }
  if (length >= 2) (ended(tag) ? ends : cuts)[length - 2] = 3;  // any byte but 0 is true
  const auto put = [&](uint32_t field, const void* data, uint64_t bytes) {
    const InsertField one{field, static_cast<const std::byte*>(data), bytes};
    fill(store, {&row, 1}, {&one, 1}, {}, 1);
  };
  put(0, frames.data(), frames.size() * 8);
  put(1, values.data(), values.size() * 4);
  put(2, ends.data(), ends.size());
  put(3, &tag, 8);
  if (truncated) put(4, cuts.data(), cuts.size());
  const double priority = 1;
  const auto version = static_cast<int64_t>(tag);
  store.commit({&row, 1}, {{&length, 1}, {&priority, 1}, {&version, 1}}, {&generation, 1});
}

TransitionView make_view(uint32_t n_step, uint32_t frame_stack, bool truncated) {
  TransitionView view{
      n_step,
      frame_stack,
      {},
      {TransitionRole::observation, TransitionRole::reward, TransitionRole::terminated, TransitionRole::step}};
  if (truncated) view.roles.push_back(TransitionRole::truncated);
  for (uint32_t k = 0; k <= n_step; ++k) view.powers.push_back(std::pow(0.5, k));
  return view;
}

// A batch, and the slow loop over it.
struct Transitions {
  explicit Transitions(size_t n, const TransitionView& view, bool has_truncated)
      : view(view),
        n(n),
        window(n * view.window_frames() * kWidth),
        next(n * view.frame_stack * kWidth),
        tags(n),
        rewards(n),
        discount(n),
        probability(n),
        rows(n),
        generations(n),
        steps(n),
        starts(n),
        lengths(n),
        versions(n),
        torn(n),
        mask(n * view.frame_stack),
        terminated(n),
        truncated(n) {
    auto* out = reinterpret_cast<std::byte*>(window.data());
    auto* behind = view.shares_window() ? out + kWidth * 8 : reinterpret_cast<std::byte*>(next.data());
    arrays.transitions = {{0, out, behind},
                          {1, reinterpret_cast<std::byte*>(rewards.data())},
                          {2},
                          {3, reinterpret_cast<std::byte*>(tags.data())}};
    if (has_truncated) arrays.transitions.push_back({4});
    arrays.rows = rows;
    arrays.generations = generations;
    arrays.steps = steps;
    arrays.probability = probability;
    arrays.torn = torn;
    arrays.mask = mask;
    arrays.starts = starts;
    arrays.lengths = lengths;
    arrays.versions = versions;
    arrays.discount = discount;
    arrays.terminated = terminated;
    arrays.truncated = truncated;
  }

  void check(size_t i) const {
    const uint64_t tag = tags[i];
    const uint32_t length = length_of(tag), t = static_cast<uint32_t>(starts[i]);
    CHECK_EQ(static_cast<uint64_t>(versions[i]), tag);
    CHECK_EQ(static_cast<uint32_t>(lengths[i]), length);
    CHECK_EQ(steps[i], t);
    CHECK(length >= 2 && t < length - 1);
    const uint32_t m = std::min(view.n_step, length - 1 - t);
    double sum = 0;
    for (uint32_t k = 0; k < m; ++k) sum += std::pow(0.5, k) * reward(tag, t + k);
    CHECK_EQ(rewards[i], static_cast<float>(sum));
    const bool last = t + m == length - 1;
    CHECK_EQ(terminated[i] == 1, last && ended(tag));
    CHECK_EQ(truncated[i] == 1, last && !ended(tag));
    CHECK_EQ(discount[i], last && ended(tag) ? 0.0F : static_cast<float>(std::pow(0.5, m)));
    const size_t stride = view.window_frames() * kWidth;
    for (uint32_t back = 0; back < view.frame_stack; ++back) {
      const size_t at = view.frame_stack - 1 - back;
      const uint64_t now = back <= t ? frame(tag, t - back) : 0, then = back <= t + m ? frame(tag, t + m - back) : 0;
      CHECK_EQ(mask[i * view.frame_stack + at] == 1, back <= t);
      for (uint32_t k = 0; k < kWidth; ++k) {
        CHECK_EQ(window[i * stride + at * kWidth + k], now);
        const uint64_t found = view.shares_window() ? window[i * stride + (at + 1) * kWidth + k]
                                                    : next[(i * view.frame_stack + at) * kWidth + k];
        CHECK_EQ(found, then);
      }
    }
  }

  TransitionView view;
  size_t n;
  std::vector<uint64_t> window, next, tags;
  std::vector<float> rewards, discount;
  std::vector<double> probability;
  std::vector<uint32_t> rows, generations, steps;
  std::vector<int32_t> starts, lengths;
  std::vector<int64_t> versions;
  std::vector<uint8_t> torn, mask, terminated, truncated;
  BatchArrays arrays;
};

TEST(transitions_of_rows_that_writers_replace_are_of_one_episode_each) {
  for (const auto& [n_step, stack, truncated] :
       {std::tuple{1u, 1u, true}, {1u, 4u, false}, {3u, 2u, true}, {9u, 1u, false}}) {
    auto store = make_store(6, truncated);
    for (uint64_t tag = 1; tag <= 6; ++tag) insert(*store, tag * 1000 + 2);
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> written{0};
    std::vector<std::thread> writers;
    for (uint64_t w = 0; w < 2; ++w) {
      writers.emplace_back([&, w] {
        uint64_t tag = (w + 1) << 32;
        while (!stop) {
          insert(*store, ++tag);
          written.fetch_add(1);
        }
      });
    }
    BatchSampler::Settings settings;
    settings.by = By::row;
    settings.seed = n_step;
    settings.over_steps = stack == 1;
    settings.transitions = make_view(n_step, stack, truncated);
    const BatchSampler sampler(*store, settings);
    const Transitions batch(16, *settings.transitions, truncated);
    const BatchSampler::Room room = [&](size_t) -> const BatchArrays& { return batch.arrays; };
    uint64_t redrawn = 0, batches = 0;
    for (uint64_t step = 0; step < 20'000 && (batches < 300 || redrawn < 20); ++step) {
      try {
        BatchSampler::Step what{.step = step, .limits = {}, .cursor = 0, .admitted = false};
        what.limits.min_length = settings.over_steps ? 0 : 2;
        const BatchSampler::Result result = sampler.sample(room, batch.n, what);
        CHECK(result.done);
        redrawn += result.redrawn;
        ++batches;
        for (size_t i = 0; i < batch.n; ++i) batch.check(i);
      } catch (const Error& error) {
        // Six rows may all be too short, or turn over faster than they can be read.
        CHECK(error.kind == ErrorKind::empty || error.kind == ErrorKind::turnover);
      }
    }
    stop = true;
    for (auto& writer : writers) writer.join();
    CHECK(batches > 0);
    CHECK(redrawn > 0);
    CHECK(store->audit().empty());
  }
}

TEST(given_steps_are_those_gathered_and_one_without_a_successor_is_lost) {
  auto store = make_store(4, true);
  for (uint64_t tag : {10u, 11u, 12u}) insert(*store, tag);
  BatchSampler::Settings settings;
  settings.transitions = make_view(2, 1, true);
  const BatchSampler sampler(*store, settings);
  std::vector<uint32_t> rows, generations;
  store->keys(&rows, &generations);
  const std::vector<double> probability(rows.size(), 0.25);
  const Transitions batch(rows.size(), *settings.transitions, true);
  for (uint32_t t = 0; t < kSteps; ++t) {
    std::vector<uint32_t> numbers(rows.size()), steps(rows.size(), t);
    std::iota(numbers.rbegin(), numbers.rend(), 0);  // to the places from the last to the first
    const uint64_t lost = sampler.gather(batch.arrays, {numbers, rows, generations, probability, steps}, 0, 0);
    uint64_t expected = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      uint64_t tag = 0;
      std::memcpy(&tag, store->block(3, rows[i]), 8);
      const bool has = t + 1 < length_of(tag);
      expected += !has;
      CHECK_EQ(batch.torn[numbers[i]] == 0, has);
      CHECK_EQ(batch.rows[numbers[i]], rows[i]);
      CHECK_EQ(batch.probability[numbers[i]], 0.25);
      if (!has) continue;
      CHECK_EQ(batch.starts[numbers[i]], static_cast<int32_t>(t));
      CHECK_EQ(batch.tags[numbers[i]], tag);
      batch.check(numbers[i]);
    }
    CHECK_EQ(lost, expected);
  }
}

TEST(transitions_of_rows_that_are_written_in_place_are_of_one_state_of_the_row) {
  auto store = make_store(2, false);
  const auto same = [&](std::span<const uint32_t> rows, std::span<const uint32_t> generations, uint64_t value) {
    const size_t n = rows.size();
    const std::vector<uint64_t> frames(n * kSteps * kWidth, value), tags(n, value);
    const std::vector<int32_t> rewards(n * kSteps, static_cast<int32_t>(value));
    const FieldSource sources[3] = {
        {0, reinterpret_cast<const std::byte*>(frames.data()), uint64_t{kSteps} * kWidth * 8},
        {1, reinterpret_cast<const std::byte*>(rewards.data()), uint64_t{kSteps} * 4},
        {3, reinterpret_cast<const std::byte*>(tags.data()), 8}};
    CHECK_EQ(store->rewrite(rows, generations, sources, {}, {}), uint64_t{0});
  };
  const std::vector<uint32_t> full(2, kSteps);
  std::vector<uint32_t> rows(2), generations(2);
  store->allocate(rows);
  for (uint32_t row : rows) std::memset(store->block(2, row), 0, kSteps);
  store->commit(rows, {full, {}, {}}, generations);
  same(rows, generations, 1);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t value = 2; !stop; value = value % 1'000'000 + 1) same(rows, generations, value);
  });
  BatchSampler::Settings settings;
  settings.by = By::row;
  settings.over_steps = true;
  settings.transitions = make_view(2, 1, false);
  const BatchSampler sampler(*store, settings);
  const Transitions batch(8, *settings.transitions, false);
  const BatchSampler::Room room = [&](size_t) -> const BatchArrays& { return batch.arrays; };
  std::vector<uint64_t> values;
  for (uint64_t step = 0; step < 300'000 && (step < 300 || values.size() < 20); ++step) {
    const auto result = sampler.sample(room, batch.n, {.step = step, .limits = {}, .cursor = 0, .admitted = false});
    CHECK_EQ(result.redrawn, uint64_t{0});
    for (size_t i = 0; i < batch.n; ++i) {
      const uint64_t value = batch.tags[i];
      for (uint32_t k = 0; k < kWidth; ++k) {
        CHECK_EQ(batch.window[i * kWidth + k], value);
        CHECK_EQ(batch.next[i * kWidth + k], value);
      }
      const double short_of_two = batch.starts[i] == static_cast<int32_t>(kSteps) - 2 ? 1.0 : 1.5;
      CHECK_EQ(batch.rewards[i], static_cast<float>(static_cast<double>(value) * short_of_two));
      if (values.empty() || values.back() != value) values.push_back(value);
    }
  }
  stop = true;
  writer.join();
  CHECK(values.size() >= 20);
}

TEST(what_cannot_be_a_transition_is_refused) {
  auto store = make_store(2, true);
  const std::vector<uint32_t> numbers{0, 1, 2, 3, 4};
  const auto changed = [&](auto change) {
    TransitionView view = make_view(2, 1, true);
    change(view);
    view.check(*store, numbers);
  };
  changed([](TransitionView&) {});
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.n_step = 3; }));  // and not as many powers
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.frame_stack = 0; }));
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.roles.pop_back(); }));
  // Without time; no rewards; no bool; no role.
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.roles[3] = TransitionRole::observation; }));
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.roles[1] = TransitionRole::step; }));
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.roles[0] = TransitionRole::terminated; }));
  CHECK_THROWS(schema, changed([](TransitionView& view) { view.roles[0] = static_cast<TransitionRole>(77); }));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
