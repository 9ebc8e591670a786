// Fetch under concurrency: rows overwritten while they are read are never returned, by any copy kernel or thread count.

#include "fetch/fetch.h"

#include <algorithm>
#include <random>
#include <thread>

#include "base/buffer_pool.h"
#include "base/copy.h"
#include "base/threads.h"
#include "fetch/windows.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

std::unique_ptr<Store> tagged_store(uint64_t capacity) {
  StoreOptions options;
  options.capacity = capacity;
  return Store::create(testing::unique_name(), tagged_fields(), options);
}

TEST(a_row_overwritten_during_its_copy_is_reported_and_never_mixed) {
  constexpr uint32_t kRows = 4;
  auto store = tagged_store(kRows);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      uint64_t tag = uint64_t(w + 1) << 40;
      while (!stop) {
        uint32_t row = 0, generation = 0;
        ++tag;
        insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1});
      }
    });
  }
  TaggedBatch seen;
  std::mt19937 random(3);
  for (int round = 0; round < 200'000 && (seen.torn < 2000 || seen.whole < 2000); ++round) {
    uint32_t rows[8], generations[8];
    int32_t ends[8];
    size_t n = 0;
    while (n < 8) {
      rows[n] = random() % kRows;
      generations[n] = generation_of(store->words()[rows[n]].load());
      ends[n] = static_cast<int32_t>(random() % kTaggedSteps);
      n += generations[n] & 1;
    }
    const uint32_t window = round % 3 == 0 ? 0 : 1 + random() % 40;
    const TaggedBatch batch =
        fetch_tagged(*store, {rows, n}, {generations, n}, window,
                     window == 0 ? std::span<const int32_t>{} : std::span<const int32_t>{ends, n});
    seen.whole += batch.whole;
    seen.torn += batch.torn;
    seen.mixed += batch.mixed;
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  CHECK(seen.torn > 0);
  CHECK(seen.whole > 0);
  CHECK_EQ(seen.mixed, uint64_t{0});
  CHECK(store->audit().empty());
}

TEST(every_copy_kernel_copies_every_length_at_every_alignment) {
  const std::string widest = copy_kernel();
  std::vector<unsigned char> from(20'000), to(20'200), expected;
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 131 + 7);
  for (const char* name : {"avx512", "avx2", "sse2", "memcpy"}) {
    if (!set_copy_kernel(name)) continue;
    for (size_t bytes : {0, 1, 63, 64, 1023, 1024, 1025, 1087, 1279, 1280, 1281, 4096, 9001}) {
      for (size_t shift : {0, 1, 4, 31, 63, 64}) {
        for (bool stream : {false, true}) {
          std::fill(to.begin(), to.end(), 0xee);
          expected.assign(to.begin(), to.end());
          std::copy_n(from.begin() + shift / 2, bytes, expected.begin() + shift);
          copy_block(to.data() + shift, from.data() + shift / 2, bytes, stream);
          stream_fence();
          CHECK(to == expected);
        }
      }
    }
  }
  CHECK(!set_copy_kernel("no such kernel"));
  CHECK(set_copy_kernel(widest.c_str()));
}

TEST(a_large_fetch_gives_the_same_bytes_on_any_number_of_threads) {
  constexpr uint32_t kRows = 64, kBatch = 3000;  // 12 MB: streamed, and split among threads
  auto store = tagged_store(kRows);
  std::vector<uint32_t> rows(kRows), generations(kRows), batch(kBatch), batch_generations(kBatch);
  std::vector<uint64_t> tags(kRows);
  for (uint32_t i = 0; i < kRows; ++i) tags[i] = 1000 + i;
  insert_tagged(*store, tags, rows, generations);
  for (uint32_t i = 0; i < kBatch; ++i) {
    batch[i] = rows[i * 7 % kRows];
    batch_generations[i] = generations[i * 7 % kRows];
  }
  for (unsigned threads : {1u, 2u, 5u}) {
    const TaggedBatch seen = fetch_tagged(*store, batch, batch_generations, 0, {}, threads);
    CHECK_EQ(seen.whole, uint64_t{kBatch});
    CHECK_EQ(seen.mixed, uint64_t{0});
  }
}

TEST(several_threads_may_share_the_pool_of_copying_threads) {
  std::vector<std::thread> callers;
  std::atomic<uint64_t> wrong{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        std::vector<std::atomic<int>> visits(101);
        parallel_for(visits.size(), 1 + round % 7, 1 + round % 5, [&](size_t first, size_t last) {
          for (size_t i = first; i < last; ++i) ++visits[i];
        });
        for (auto& visit : visits) wrong += visit != 1;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), uint64_t{0});
}

// Workers poll for the next job after one that took a while, if the one before came soon, and sleep else: every order
// of their polls' and sleeps' ends, and of jobs of several callers.
TEST(jobs_are_done_at_whatever_distance_they_follow_each_other) {
  std::vector<std::thread> callers;
  std::atomic<uint64_t> wrong{0};
  for (unsigned c = 0; c < 3; ++c) {
    callers.emplace_back([&, c] {
      const auto burn = [](uint64_t ns) {
        for (const uint64_t until_ns = monotonic_ns() + ns; monotonic_ns() < until_ns;) {
        }
      };
      for (uint64_t round = 0; round < 400; ++round) {
        std::vector<int> visits(12);  // not atomic: a piece is one thread's, and the caller's once it returns
        parallel_for(visits.size(), 1, 3, [&](size_t first, size_t last) {
          for (size_t i = first; i < last; ++i) ++visits[i];
          burn(3'000 + 1'000 * (round % 5));
        });
        for (int visit : visits) wrong += visit != 1;
        const uint64_t gap = (round * 7 + c * 3) % 16;
        if (gap == 15) {
          ::usleep(200);
        } else {
          burn(gap * 1'000);
        }
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), uint64_t{0});
}

TEST(a_buffer_is_reused_once_it_came_back_and_never_before) {
  constexpr size_t kBytes = 5'000'000;
  void* first = take_buffer(kBytes);
  std::memset(first, 1, kBytes);
  void* second = take_buffer(kBytes);
  CHECK(first != second);
  const PoolCounts before = pool_counts();
  give_buffer(first);
  void* third = take_buffer(kBytes);
  CHECK_EQ(third, first);
  CHECK_EQ(pool_counts().buffers_made, before.buffers_made);
  CHECK_EQ(pool_counts().buffers_reused, before.buffers_reused + 1);
  give_buffer(second);
  give_buffer(third);
  CHECK_EQ(pool_counts().bytes_in_use, size_t{0});
}

TEST(of_buffers_of_one_size_the_one_that_came_back_last_is_taken_first) {
  constexpr size_t kBytes = 5'000'000;
  void* buffers[3];
  for (void*& buffer : buffers) buffer = take_buffer(kBytes);
  for (void* buffer : buffers) give_buffer(buffer);
  for (size_t i = std::size(buffers); i-- > 0;) CHECK_EQ(take_buffer(kBytes), buffers[i]);
  for (void* buffer : buffers) give_buffer(buffer);
}

TEST(what_does_not_fit_the_store_is_refused) {
  auto store = tagged_store(2);
  const uint32_t rows[1] = {2}, generations[1] = {1};
  uint8_t torn[1];
  FetchRequest request;
  request.rows = rows;
  request.generations = generations;
  request.torn = torn;
  CHECK_THROWS(schema, fetch(*store, request));
  const uint32_t fine[1] = {1};
  request.rows = fine;
  const FetchField fields[1] = {{9, nullptr}};
  request.fields = fields;
  CHECK_THROWS(schema, fetch(*store, request));
  request.fields = {};
  request.generations = {};
  CHECK_THROWS(schema, fetch(*store, request));
}

TEST(rows_go_to_the_places_that_are_asked_for_and_nowhere_else) {
  auto store = tagged_store(8);
  std::vector<uint64_t> tags(8);
  std::vector<uint32_t> rows(8), generations(8);
  for (size_t i = 0; i < 8; ++i) tags[i] = 100 + i;
  insert_tagged(*store, tags, rows, generations);
  const uint64_t block = store->fields()[0].block_bytes;
  std::vector<std::byte> straight(8 * block), placed(11 * block, std::byte{0xee});
  const FetchField to_straight[1] = {{0, straight.data()}}, to_placed[1] = {{0, placed.data()}};
  uint8_t torn[8];
  FetchRequest request;
  request.rows = rows;
  request.generations = generations;
  request.torn = torn;
  request.fields = to_straight;
  CHECK_EQ(fetch(*store, request), uint64_t{0});
  const uint32_t places[8] = {10, 3, 0, 7, 1, 9, 4, 2};
  request.places = places;
  request.fields = to_placed;
  CHECK_EQ(fetch(*store, request), uint64_t{0});
  for (size_t i = 0; i < 8; ++i) {
    CHECK(std::memcmp(placed.data() + places[i] * block, straight.data() + i * block, block) == 0);
  }
  for (size_t untouched : {5, 6, 8}) {
    for (size_t b = 0; b < block; ++b) CHECK(placed[untouched * block + b] == std::byte{0xee});
  }
  request.places = std::span(places).first(7);
  CHECK_THROWS(schema, fetch(*store, request));
}

TEST(windows_of_a_row_are_those_of_a_slow_count) {
  for (uint32_t length = 1; length <= 7; ++length) {
    for (uint32_t stride = 1; stride <= 5; ++stride) {
      for (uint32_t which = 0; which < 4 * length; ++which) {  // and steps behind the anchor
        const WindowPlan plan{length, stride, (which & 1) != 0, (which & 2) != 0, WindowPlan::At::drawn, which / 4};
        if (plan.from_first && plan.after != 0) continue;
        check(plan);
        const uint32_t after = plan.from_first ? length - 1 : plan.after, before = length - 1 - after;
        const uint32_t behind = plan.whole ? after : 0;  // the last anchor
        for (uint32_t row = 0; row <= 12; ++row) {
          std::vector<uint32_t> slow;  // from the row's first anchor on
          for (uint32_t step = 0; step + behind < row; ++step) {
            if ((plan.from_first ? step : row - 1 - behind - step) % stride != 0) continue;
            if (!plan.whole || (step >= before && step + after < row)) slow.push_back(step);
          }
          CHECK_EQ(plan.count(row), static_cast<uint32_t>(slow.size()));
          for (uint32_t number = 0; number < slow.size(); ++number) CHECK_EQ(plan.anchor(row, number), slow[number]);
          const uint32_t draws[1] = {7};
          const int32_t lengths[1] = {static_cast<int32_t>(row)};
          int32_t placed[1] = {-1};
          for (auto at : {WindowPlan::At::drawn, WindowPlan::At::first, WindowPlan::At::last}) {
            WindowPlan some = plan;
            some.at = at;
            place_windows(some, {1, row, kWindowStream}, 0, draws, lengths, placed);
            if (slow.empty()) {
              CHECK_EQ(placed[0], 0);
              continue;
            }
            const auto found = static_cast<uint32_t>(placed[0]);
            if (at == WindowPlan::At::first) CHECK_EQ(found, slow.front());
            if (at == WindowPlan::At::last) CHECK_EQ(found, slow.back());
            CHECK(std::find(slow.begin(), slow.end(), found) != slow.end());
          }
        }
      }
    }
  }
  CHECK_THROWS(schema, check(WindowPlan{.length = 3, .stride = 0}));
  check(WindowPlan{.length = 3, .from_first = true, .at = WindowPlan::At::episode});
  CHECK_THROWS(schema, check(WindowPlan{.length = 3, .at = WindowPlan::At::episode}));
  CHECK_THROWS(schema,
               check(WindowPlan{.length = 3, .whole = true, .from_first = true, .at = WindowPlan::At::episode}));
  CHECK_THROWS(schema, check(WindowPlan{.length = 3, .at = static_cast<WindowPlan::At>(4)}));
  CHECK_THROWS(schema, check(WindowPlan{.length = 3, .after = 3}));
  check(WindowPlan{.length = 3, .fields = {std::nullopt, FieldSteps{}, FieldSteps{{{2, 1}, {0, 2}}, 3}}});
  for (const FieldSteps& bad :
       {FieldSteps{{{2, 2}}, 2}, FieldSteps{{{0, 0}}, 0}, FieldSteps{{{0, 1}}, 2}, FieldSteps{{{0, 2}}, 2, false}}) {
    CHECK_THROWS(schema, check(WindowPlan{.length = 3, .fields = {bad}}));
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
