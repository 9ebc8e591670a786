// Random numbers against published vectors, and draws: exact alone, and safe while rows change under them.

#include "selection.h"

#include <unistd.h>

#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "store.h"

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

TEST(a_draw_depends_on_its_number_alone_not_on_its_company) {
  auto store = store_of(1000);
  std::vector<uint32_t> rows(1000), generations(1000);
  store->allocate(rows);
  std::vector<double> weights(1000);
  for (size_t i = 0; i < 1000; ++i) weights[i] = static_cast<double>(i % 7);
  store->commit(rows, {{}, weights, {}}, generations);
  const DrawKey key{123, 45, kRowStream};
  std::vector<uint32_t> numbers(100), all(100), some(100), generation(100);
  std::vector<double> probability(100);
  for (uint32_t i = 0; i < 100; ++i) numbers[i] = i;
  for (bool uniform : {false, true}) {
    const auto draw = [&](std::span<const uint32_t> which, std::span<uint32_t> out) {
      const Draws draws{out, std::span(generation).first(which.size()), std::span(probability).first(which.size())};
      return uniform ? draw_uniform(store->bit_tree(), store->words(), key, 0, which, draws)
                     : draw_weighted(store->weight_tree(), key, 0, which, draws);
    };
    CHECK_EQ(draw(numbers, all), uint64_t{0});
    for (size_t i = 0; i < 100; i += 3) {
      const std::span<const uint32_t> one = std::span(numbers).subspan(i, 1);
      draw(one, std::span(some).first(1));
      CHECK_EQ(some[0], all[i]);
    }
  }
}

TEST(rows_drawn_while_others_insert_delete_and_reweigh_were_selectable_and_never_weightless) {
  constexpr uint32_t kRows = 64;
  auto store = store_of(kRows);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  // Rows committed with weight 0 keep it: nobody may draw one by weight.
  threads.emplace_back([&] {
    for (uint32_t i = 0; !stop; ++i) {
      uint32_t row = 0, generation = 0;
      store->allocate({&row, 1});
      const double weight = i % 4 == 0 ? 0.0 : 1.0 + i % 3;
      const int64_t version = i % 4 == 0;
      store->commit({&row, 1}, {{}, {&weight, 1}, {&version, 1}}, {&generation, 1});
    }
  });
  threads.emplace_back([&] {
    std::mt19937 random(5);
    while (!stop) {
      const uint32_t row = random() % kRows;
      const uint64_t word = store->words()[row].load();
      const uint32_t generation = generation_of(word);
      const double weight = 1 + random() % 9;
      if (is_committed(word) && weight_of(word) != 0) store->update_weights({&row, 1}, {&generation, 1}, {&weight, 1});
    }
  });
  std::vector<uint32_t> numbers(64), rows(64), generations(64);
  std::vector<double> probability(64);
  for (uint32_t i = 0; i < 64; ++i) numbers[i] = i;
  uint64_t drawn = 0, weightless = 0;
  for (uint64_t step = 0; drawn < 200'000 && step < 100'000; ++step) {
    const DrawKey key{7, step, kRowStream};
    const Draws out{rows, generations, probability};
    try {
      const bool uniform = step % 2 == 0;
      uniform ? draw_uniform(store->bit_tree(), store->words(), key, 0, numbers, out)
              : draw_weighted(store->weight_tree(), key, 0, numbers, out);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] == kNoRow) continue;
        CHECK(rows[i] < kRows);
        CHECK((generations[i] & 1) != 0);
        const int64_t was_weightless = store->status()[rows[i]].version.load(std::memory_order_relaxed);
        const bool same = generation_of(store->words()[rows[i]].load()) == generations[i];
        if (!uniform && same && was_weightless != 0) ++weightless;
        ++drawn;
      }
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::empty);
    }
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(drawn >= 100'000);
  CHECK_EQ(weightless, uint64_t{0});
  CHECK(store->audit().empty());
}

TEST(nothing_to_draw_is_an_error_and_names_no_row) {
  auto store = store_of(10);
  uint32_t number = 0, row = 0, generation = 0;
  double probability = 0;
  const Draws out{{&row, 1}, {&generation, 1}, {&probability, 1}};
  CHECK_THROWS(empty, draw_weighted(store->weight_tree(), {}, 0, {&number, 1}, out));
  CHECK_THROWS(empty, draw_uniform(store->bit_tree(), store->words(), {}, 0, {&number, 1}, out));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
