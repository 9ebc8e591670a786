// Random numbers against published vectors, and draws: exact alone, and safe while rows change under them.

#include "selection/selection.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <thread>

#include "segment/descend.h"
#include "selection/allowed_rows.h"
#include "selection/importance_weights.h"
#include "selection/missing_rows.h"
#include "store/store.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

TEST(philox_gives_the_published_vectors) {
  // kat_vectors of the Random123 distribution, philox4x32 10.
  using Four = std::array<uint32_t, 4>;
  const auto same = [](const Four& found, const Four& expected) {
    for (int i = 0; i < 4; ++i) CHECK_EQ(found[i], expected[i]);
  };
  same(philox4x32({0, 0, 0, 0}, {0, 0}), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  same(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  same(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(every_form_of_the_random_numbers_has_the_same_bits) {
  std::mt19937_64 random(3);
  for (size_t n : {1, 7, 8, 9, 64, 83}) {
    const DrawKey key{random(), random(), kStepStream};
    std::vector<uint32_t> draws(n);
    for (uint32_t& draw : draws) draw = static_cast<uint32_t>(random());
    for (const char* form : {"portable", "avx2", "avx512"}) {
      if (!set_random_kernel(form)) continue;  // not on this machine
      std::vector<uint64_t> high(n), low(n);
      random_bits(key, draws.data(), n, 0xabcdef, high.data(), low.data());
      for (size_t i = 0; i < n; ++i) {
        const Random128 expected = random_bits(key, draws[i], 0xabcdef);
        CHECK_EQ(high[i], expected.high);
        CHECK_EQ(low[i], expected.low);
      }
    }
  }
}

TEST(an_integer_below_a_bound_is_the_floor_of_the_product) {
  CHECK_EQ(below({0, 0}, 1000), uint64_t{0});
  CHECK_EQ(below({~uint64_t{0}, ~uint64_t{0}}, 1000), uint64_t{999});
  CHECK_EQ(below({~uint64_t{0}, ~uint64_t{0}}, ~uint64_t{0}), ~uint64_t{0} - 1);
  CHECK_EQ(below({uint64_t{1} << 63, 0}, 1000), uint64_t{500});
  CHECK_EQ(below({(uint64_t{1} << 63) - 1, ~uint64_t{0}}, 1000), uint64_t{499});
  CHECK_EQ(below({~uint64_t{0}, ~uint64_t{0}}, 1), uint64_t{0});
}

TEST(the_nth_set_bit_is_found_at_every_place) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; ++i) {
    const uint64_t word = i == 0 ? ~uint64_t{0} : i == 1 ? uint64_t{1} << 63 : random() & random();
    uint32_t rank = 0;
    for (uint32_t bit = 0; bit < 64; ++bit) {
      if ((word >> bit & 1) != 0) CHECK_EQ(select_bit(word, rank++), bit);
    }
  }
}

std::unique_ptr<Store> store_of(uint64_t capacity, const std::string& name = testing::unique_name()) {
  StoreOptions options;
  options.capacity = capacity;
  return Store::create(name, {{"x", 8, 8, false, {}}}, options);
}

Population population(const Store& store) {
  return {store.priority_tree(), store.bit_tree(), store.words(), store.status().data()};
}

TEST(a_draw_depends_on_its_number_alone_not_on_its_company) {
  auto store = store_of(1000);
  std::vector<uint32_t> rows(1000), generations(1000);
  store->allocate(rows);
  std::vector<double> priorities(1000);
  for (size_t i = 0; i < 1000; ++i) priorities[i] = static_cast<double>(i % 7);
  store->commit(rows, {{}, priorities, {}}, generations);
  const DrawKey key{123, 45, kRowStream};
  std::vector<uint32_t> numbers(100), all(100), some(100), generation(100);
  std::vector<double> probability(100);
  for (uint32_t i = 0; i < 100; ++i) numbers[i] = i;
  for (bool uniform : {false, true}) {
    const auto draw = [&](std::span<const uint32_t> which, std::span<uint32_t> out) {
      const Draws draws{out, std::span(generation).first(which.size()), std::span(probability).first(which.size())};
      return geartrain::draw(population(*store), {key, uniform ? By::row : By::priority}, which, draws);
    };
    CHECK_EQ(draw(numbers, all), uint64_t{0});
    for (size_t i = 0; i < 100; i += 3) {
      const std::span<const uint32_t> one = std::span(numbers).subspan(i, 1);
      draw(one, std::span(some).first(1));
      CHECK_EQ(some[0], all[i]);
    }
  }
}

TEST(rows_drawn_while_others_insert_delete_and_reweigh_were_selectable_and_never_priorityless) {
  constexpr uint32_t kRows = 300;  // a tree of three levels
  auto store = store_of(kRows);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  // Rows committed with priority 0 keep it: none may be drawn by priority.
  threads.emplace_back([&] {
    for (uint32_t i = 0; !stop; ++i) {
      uint32_t row = 0, generation = 0;
      store->allocate({&row, 1});
      const double priority = i % 4 == 0 ? 0.0 : 1.0 + i % 3;
      const int64_t version = i % 4 == 0;
      store->commit({&row, 1}, {{}, {&priority, 1}, {&version, 1}}, {&generation, 1});
    }
  });
  threads.emplace_back([&] {
    std::mt19937 random(5);
    while (!stop) {
      const uint32_t row = random() % kRows;
      const uint64_t word = store->words()[row].load();
      const uint32_t generation = generation_of(word);
      const double priority = 1 + random() % 9;
      if (is_committed(word) && priority_of(word) != 0)
        store->update_priorities({&row, 1}, {&generation, 1}, {&priority, 1});
    }
  });
  constexpr size_t kMany = 2000;  // more than searches begin at the root for
  std::vector<uint32_t> numbers(kMany), rows(kMany), generations(kMany);
  std::vector<double> probability(kMany);
  for (uint32_t i = 0; i < kMany; ++i) numbers[i] = i;
  uint64_t drawn = 0, priorityless = 0;
  for (uint64_t step = 0; drawn < 400'000 && step < 100'000; ++step) {
    const DrawKey key{7, step, kRowStream};
    const size_t n = step % 16 < 14 ? 64 : kMany;
    const Draws out{{rows.data(), n}, {generations.data(), n}, {probability.data(), n}};
    try {
      const bool uniform = step % 2 == 0;
      draw(population(*store), {key, uniform ? By::row : By::priority}, {numbers.data(), n}, out);
      for (size_t i = 0; i < n; ++i) {
        if (rows[i] == kNoRow) continue;
        CHECK(rows[i] < kRows);
        CHECK((generations[i] & 1) != 0);
        const int64_t was_priorityless = store->status()[rows[i]].version.load(std::memory_order_relaxed);
        const bool same = generation_of(store->words()[rows[i]].load()) == generations[i];
        if (!uniform && same && was_priorityless != 0) ++priorityless;
        ++drawn;
      }
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::empty);
    }
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(drawn >= 100'000);
  CHECK_EQ(priorityless, uint64_t{0});
  CHECK(store->audit().empty());
}

TEST(nothing_to_draw_is_an_error_and_names_no_row) {
  auto store = store_of(10);
  uint32_t number = 0, row = 0, generation = 0;
  double probability = 0;
  const Draws out{{&row, 1}, {&generation, 1}, {&probability, 1}};
  for (By by : {By::priority, By::row}) {
    const DrawPlan plan{{}, by};
    CHECK_THROWS(empty, draw(population(*store), plan, {&number, 1}, out));
    CHECK_THROWS(not_enough, draw_distinct(population(*store), plan, {}, out));
  }
  CHECK_EQ(first_rows(population(*store), Order::oldest, 0, {}, {}, out), size_t{0});
}

TEST(every_form_of_the_descent_finds_the_same_leaves) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 40; ++round) {
    const uint64_t rows = 1 + random() % 5000;
    auto store = store_of(rows);
    std::vector<uint32_t> all(rows), generations(rows);
    store->allocate(all);
    std::vector<double> priorities(rows);
    for (double& priority : priorities)
      priority = std::ldexp(static_cast<double>(random() % 1000), static_cast<int>(random() % 6));
    priorities[random() % rows] = 1;
    store->commit(all, {{}, priorities, {}}, generations);
    std::vector<uint32_t> numbers(300), found(300), expected(300), generation(300);
    std::vector<double> probability(300);
    for (uint32_t i = 0; i < 300; ++i) numbers[i] = i;
    for (By by : {By::priority, By::row}) {
      const DrawPlan plan{{static_cast<uint64_t>(round), 1, kRowStream}, by};
      CHECK(set_descend_kernel("portable"));
      draw(population(*store), plan, numbers, {expected, generation, probability});
      for (const char* form : {"avx2", "avx512", "avx512vpopcntdq"}) {
        if (!set_descend_kernel(form)) continue;  // not on this machine
        draw(population(*store), plan, numbers, {found, generation, probability});
        for (size_t i = 0; i < 300; ++i) CHECK_EQ(found[i], expected[i]);
      }
    }
  }
}

TEST(a_uniform_draw_is_the_nth_selectable_row_whatever_is_missing) {
  std::mt19937_64 random(8);
  struct Case {
    const char* what;
    std::function<bool(uint64_t)> missing;
    bool listed;  // for 300 draws
  };
  for (uint64_t rows : {64, 1000, 40'001}) {
    const std::vector<Case> cases{
        {"nothing", [](uint64_t) { return false; }, true},
        {"all from a row on", [&](uint64_t row) { return row >= rows / 3 + 1; }, true},
        {"the first row", [](uint64_t row) { return row == 0; }, true},
        {"a long run and all from a row on", [&](uint64_t row) { return row / 7 == 2 || row > rows - 5; }, true},
        {"half of the rows in one run", [&](uint64_t row) { return row > rows / 4 && row < rows / 4 * 3; }, true},
        {"some here and there", [&](uint64_t row) { return row * 13 / rows != (row + 1) * 13 / rows; }, true},
        {"every second row", [](uint64_t row) { return row % 2 == 0; }, rows == 64},
        {"half of the rows at random", [&](uint64_t) { return random() % 2 == 0; }, rows == 64},
    };
    for (const Case& some : cases) {
      auto store = store_of(rows);
      std::vector<uint32_t> all(rows), generations(rows), gone, gone_generations, left;
      store->allocate(all);
      store->commit(all, {}, generations);
      for (size_t i = 0; i < rows; ++i) {
        const bool is_missing = some.missing(all[i]);
        (is_missing ? gone : left).push_back(all[i]);
        if (is_missing) gone_generations.push_back(generations[i]);
      }
      store->remove(gone, gone_generations);
      std::sort(left.begin(), left.end());
      const Population from = population(*store);
      CHECK_EQ(from.bits.total(), left.size());
      CHECK_EQ(MissingRows(from.bits, rows, left.size(), 300).listed(), some.listed);
      for (size_t n : {1, 20, 300}) {
        std::vector<uint32_t> numbers(n), found(n), generation(n), priority(n);
        std::vector<uint64_t> targets(n);
        std::vector<double> probability(n);
        for (uint32_t i = 0; i < n; ++i) numbers[i] = i;
        for (uint32_t strata : {uint32_t{0}, static_cast<uint32_t>(n)}) {
          const DrawPlan plan{{rows, 3, kRowStream}, By::row, 0, strata};
          CHECK_EQ(draw(from, plan, numbers, {found, generation, probability}), uint64_t{0});
          draw_targets(plan.key, 0, strata, left.size(), numbers, targets);
          for (size_t i = 0; i < n; ++i) {
            CHECK_EQ(found[i], left[targets[i]]);
            CHECK_EQ(generation[i], generation_of(store->words()[found[i]].load()));
            CHECK_EQ(probability[i], 1.0 / static_cast<double>(left.size()));
          }
          CHECK_EQ(find_rows(from, By::row, targets, found, generation, priority), uint64_t{0});
          for (size_t i = 0; i < n; ++i) CHECK_EQ(found[i], left[targets[i]]);
        }
      }
    }
  }
}

TEST(a_row_that_left_since_the_missing_ones_were_listed_is_not_drawn) {
  // Total and bits at odds, as for an instant while a row is removed and another takes its place in the count.
  auto store = store_of(1000);
  std::vector<uint32_t> all(1000), generations(1000);
  store->allocate(all);
  store->commit(all, {}, generations);
  const Population from = population(*store);
  from.bits.leaves()[5].fetch_and(~(uint64_t{1} << 9));
  std::vector<uint32_t> numbers(5000), found(5000), generation(5000);
  std::vector<double> probability(5000);
  for (uint32_t i = 0; i < 5000; ++i) numbers[i] = i;
  CHECK_EQ(draw(from, {{1, 1, kRowStream}, By::row}, numbers, {found, generation, probability}), uint64_t{0});
  for (uint32_t row : found) CHECK(row != 5 * 64 + 9 && row < 1000);
  from.bits.leaves()[5].fetch_or(uint64_t{1} << 9);
}

TEST(importance_weights_are_powers_to_the_last_bits_in_every_form) {
  std::mt19937_64 random(9);
  constexpr size_t kMany = 3001;
  std::vector<double> probability(kMany), expected(kMany), weights(kMany);
  for (double& p : probability) p = std::exp(std::normal_distribution<double>(-9, 6)(random));
  for (double beta : {0.0, 0.4, 1.0, 1.7}) {
    CHECK(set_power_kernel("portable"));
    importance_weights(probability, 1000, beta, 0, expected);
    CHECK_EQ(*std::max_element(expected.begin(), expected.end()), 1.0);
    const double lowest = *std::min_element(probability.begin(), probability.end());
    for (size_t i = 0; i < kMany; ++i) {
      const long double exact =
          std::pow(static_cast<long double>(probability[i]) / lowest, -static_cast<long double>(beta));
      CHECK(std::abs(static_cast<double>(expected[i] / exact - 1)) < 8e-16);
    }
    for (const char* form : {"avx2", "avx512"}) {
      if (!set_power_kernel(form)) continue;  // not on this machine
      importance_weights(probability, 1000, beta, 0, weights);
      for (size_t i = 0; i < kMany; ++i) CHECK_EQ(weights[i], expected[i]);
    }
    // Of a part of the batch, with the whole batch's lowest: the same weights.
    for (size_t first : {0, 1, 2998}) {
      const size_t n = std::min<size_t>(13, kMany - first);
      importance_weights(std::span(probability).subspan(first, n), 1000, beta, lowest, std::span(weights).first(n));
      for (size_t i = 0; i < n; ++i) CHECK_EQ(weights[i], expected[first + i]);
    }
  }
}

TEST(importance_weights_at_the_edges_are_those_of_the_standard_library) {
  const std::vector<double> odd{0.0, 5e-324, 1e-300, 0.5, 1e300, std::numeric_limits<double>::infinity()};
  for (double beta : {0.0, 0.4, 1.0, 3.0}) {
    std::vector<double> weights(odd.size());
    importance_weights(odd, 7, beta, 0, weights);
    const double largest = std::pow(std::numeric_limits<double>::min() * 7, -beta);
    for (size_t i = 0; i < odd.size(); ++i) {
      const double expected = std::pow(std::max(odd[i], std::numeric_limits<double>::min()) * 7, -beta) / largest;
      const bool same = weights[i] == expected || (std::isnan(weights[i]) && std::isnan(expected)) ||
                        std::abs(weights[i] / expected - 1) < 8e-16;
      CHECK(same);
    }
  }
}

TEST(large_batches_are_the_same_draws_as_small_ones) {
  auto store = store_of(3000);
  std::vector<uint32_t> all(3000), generations(3000);
  store->allocate(all);
  std::vector<double> priorities(3000);
  for (size_t i = 0; i < priorities.size(); ++i) priorities[i] = static_cast<double>(i % 11);
  store->commit(all, {{}, priorities, {}}, generations);
  constexpr size_t kMany = 50'000;  // beyond the size from which targets are sorted
  std::vector<uint32_t> numbers(kMany), many(kMany), one(100), generation(kMany);
  std::vector<double> probability(kMany);
  for (uint32_t i = 0; i < kMany; ++i) numbers[i] = i;
  const DrawPlan plan{{1, 2, kRowStream}};
  CHECK_EQ(draw(population(*store), plan, numbers, {many, generation, probability}), uint64_t{0});
  for (size_t at = 0; at < kMany; at += 4999) {
    const size_t n = std::min<size_t>(100, kMany - at);
    draw(population(*store), plan, std::span(numbers).subspan(at, n),
         {std::span(one).first(n), std::span(generation).first(n), std::span(probability).first(n)});
    for (size_t i = 0; i < n; ++i) CHECK_EQ(one[i], many[at + i]);
  }
}

TEST(targets_found_piece_by_piece_are_the_draws_of_the_whole) {
  constexpr uint64_t kRows = 500, kCut = 173;
  auto whole = store_of(kRows), left = store_of(kCut), right = store_of(kRows - kCut);
  const auto fill = [](Store& store, uint64_t first) {
    std::vector<uint32_t> rows(store.header().capacity), generations(rows.size());
    std::vector<double> priorities(rows.size());
    store.allocate(rows);
    for (size_t i = 0; i < rows.size(); ++i) priorities[i] = static_cast<double>((first + i) % 7);
    store.commit(rows, {{}, priorities, {}}, generations);
  };
  fill(*whole, 0), fill(*left, 0), fill(*right, kCut);
  std::vector<uint32_t> numbers(300), rows(300), generations(300), row(1), generation(1), priority(1);
  std::vector<uint64_t> targets(300);
  std::vector<double> probability(300);
  for (uint32_t i = 0; i < 300; ++i) numbers[i] = i;
  for (By by : {By::priority, By::row}) {
    for (uint32_t strata : {0u, 300u}) {
      const auto total_of = [&](Store& store) {
        return by == By::priority ? store.priority_tree().total() : store.bit_tree().total();
      };
      const uint64_t total = total_of(*whole), before = total_of(*left);
      CHECK_EQ(before + total_of(*right), total);
      const DrawPlan plan{{9, 4, kRowStream}, by, 0, strata};
      CHECK_EQ(draw(population(*whole), plan, numbers, {rows, generations, probability}), uint64_t{0});
      draw_targets(plan.key, 0, strata, total, numbers, targets);
      for (size_t i = 0; i < 300; ++i) {
        const bool first = targets[i] < before;
        const uint64_t target = targets[i] - (first ? 0 : before);
        CHECK_EQ(find_rows(population(first ? *left : *right), by, {&target, 1}, row, generation, priority),
                 uint64_t{0});
        CHECK_EQ(row[0] + (first ? 0 : kCut), uint64_t{rows[i]});
        CHECK_EQ(priority[0], by == By::priority ? static_cast<uint32_t>((rows[i] % 7) << 16) : 1u);
      }
      // A total that is no longer true: the row is missing, not another one.
      const uint64_t beyond[2] = {0, total};
      std::vector<uint32_t> two(2), twos(2), priorities(2);
      CHECK_EQ(find_rows(population(*whole), by, beyond, two, twos, priorities), uint64_t{1});
      CHECK(two[0] != kNoRow && two[1] == kNoRow);
    }
  }
  CHECK_THROWS(empty, draw_targets({}, 0, 0, 0, numbers, targets));
}

// Steps by priority, which are refused at a row's end, and rows by their steps: what `draw` takes is what one of the
// attempts finds in the piece that its target falls into, and it takes the first that is not refused.
TEST(attempts_found_piece_by_piece_are_the_draws_of_the_whole) {
  constexpr uint32_t kRows = 90, kCut = 31, kSteps = 8;
  StoreOptions options;
  options.step_priorities = true;
  const auto make = [&](uint32_t first, uint32_t last) {
    options.capacity = last - first;
    auto store = Store::create(testing::unique_name(), {{"t", 4, 4, true, {kSteps}}}, options);
    std::vector<uint32_t> rows(last - first), generations(rows.size()), lengths(rows.size());
    std::vector<double> priorities(rows.size());
    store->allocate(rows);
    for (uint32_t i = 0; i < rows.size(); ++i) {
      lengths[i] = (first + i) * 5 % kSteps + 1;
      priorities[i] = (first + i) % 7;
    }
    store->commit(rows, {lengths, priorities, {}}, generations);
    return store;
  };
  auto whole = make(0, kRows), left = make(0, kCut), right = make(kCut, kRows);
  constexpr uint32_t kDraws = 200;
  std::vector<uint32_t> numbers(kDraws), rows(kDraws), generations(kDraws), steps(kDraws);
  std::vector<double> probability(kDraws);
  for (uint32_t i = 0; i < kDraws; ++i) numbers[i] = i;
  for (const By by : {By::priority, By::row}) {
    const auto population = [&](const Store& store) {
      return by == By::row ? Population{store.priority_tree(), store.bit_tree(), store.words(), store.status().data()}
                           : Population{store.step_tree(), store.bit_tree(), store.step_tree().leaves(),
                                        store.status().data(), kSteps};
    };
    DrawPlan plan{{9, 4, kRowStream}, by, 2, 0};
    plan.need = 1;
    plan.max_steps = by == By::row ? kSteps : 0;
    CHECK(plan.refuses());
    CHECK_EQ(draw(population(*whole), plan, numbers, {rows, generations, probability, steps}), uint64_t{0});
    const auto total_of = [&](Store& store) {
      return by == By::priority ? store.step_tree().total() : store.bit_tree().total();
    };
    const uint64_t total = total_of(*whole), before = total_of(*left);
    CHECK_EQ(before + total_of(*right), total);
    uint32_t refused = 0;
    for (uint32_t i = 0; i < kDraws; ++i) {
      uint32_t row = kNoRow, generation = 0, priority = 0, step = 0;
      for (uint32_t attempt = 0; row == kNoRow && attempt < kRefusals; ++attempt) {
        uint64_t target = 0;
        draw_targets(plan.key, plan.round * kAttemptsPerRound + attempt, 0, total, {&numbers[i], 1}, {&target, 1});
        const bool first = target < before;
        if (!first) target -= before;
        find_drawn(population(first ? *left : *right), plan, attempt, {&numbers[i], 1}, {&target, 1},
                   {{&row, 1}, {&generation, 1}, {&priority, 1}, {&step, 1}});
        refused += row == kNoRow;
        if (row != kNoRow && !first) row += kCut;
      }
      CHECK_EQ(row, rows[i]);
      CHECK(by == By::row || (step == steps[i] && priority == (row % 7) << 16));
    }
    CHECK(refused > 10);
  }
  // All that is left when the others are refused, and nothing at all.
  const Population of_steps{whole->step_tree(), whole->bit_tree(), whole->step_tree().leaves(), whole->status().data(),
                            kSteps};
  DrawPlan plan{.key = {}, .by = By::priority};
  plan.need = kSteps - 1;
  const AllowedSteps few(of_steps, plan);
  for (uint64_t target = 0; target < few.total(); target += 1 << 16) {
    const auto found = few.find(target);
    CHECK(found.row * 5 % kSteps + 1 == kSteps && found.step == 0);
  }
  CHECK_EQ(few.find(few.total()).row, kNoRow);
  plan.need = kSteps;
  CHECK_EQ(AllowedSteps(of_steps, plan).total(), uint64_t{0});
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
