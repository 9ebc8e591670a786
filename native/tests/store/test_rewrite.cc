// Writing in place: keys stay valid, readers never see half of it, and a writer killed inside costs that row.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/clock.h"
#include "store/row_copy.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

struct Keys {
  std::vector<uint32_t> rows, generations;
};

constexpr uint32_t kWords = 4096;  // a row of one field of 32 KB, all of whose words are the same

std::vector<FieldSpec> constant_fields() {
  return {{"same", 8, 8, false, {kWords}}, {"steps", 8, 8, true, {16}}};
}

void rewrite_constant(Store& store, const Keys& keys, uint64_t value) {
  const size_t n = keys.rows.size();
  const std::vector<uint64_t> same(n * kWords, value), steps(n * 16, value);
  const FieldSource sources[2] = {{0, reinterpret_cast<const std::byte*>(same.data()), kWords * 8},
                                  {1, reinterpret_cast<const std::byte*>(steps.data()), 128}};
  store.rewrite(keys.rows, keys.generations, sources, {}, {});
}

Keys insert_constant(Store& store, size_t n, uint64_t value) {
  Keys keys{std::vector<uint32_t>(n), std::vector<uint32_t>(n)};
  store.allocate(keys.rows);
  for (const uint32_t row : keys.rows) {
    for (uint32_t f = 0; f < 2; ++f) {
      auto* to = reinterpret_cast<uint64_t*>(store.block(f, row));
      std::fill(to, to + (f == 0 ? kWords : 16), value);
    }
  }
  store.commit(keys.rows, {}, keys.generations);
  return keys;
}

struct Seen {
  uint64_t whole = 0, lost = 0, mixed = 0;
};

Seen read_constant(const Store& store, const Keys& keys) {
  const size_t n = keys.rows.size();
  std::vector<uint64_t> same(n * kWords), steps(n * 16);
  std::vector<uint8_t> torn(n);
  const FetchField fields[2] = {{0, reinterpret_cast<std::byte*>(same.data())},
                                {1, reinterpret_cast<std::byte*>(steps.data())}};
  FetchRequest request;
  request.rows = keys.rows;
  request.generations = keys.generations;
  request.fields = fields;
  request.torn = torn;
  fetch(store, request);
  Seen seen;
  for (size_t i = 0; i < n; ++i) {
    if (torn[i] != 0) {
      ++seen.lost;
      continue;
    }
    ++seen.whole;
    bool good = true;
    for (uint32_t k = 0; k < kWords; ++k) good &= same[i * kWords + k] == same[i * kWords];
    for (uint32_t k = 0; k < 16; ++k) good &= steps[i * 16 + k] == same[i * kWords];
    seen.mixed += !good;
  }
  return seen;
}

TEST(steps_and_values_are_written_where_they_belong_and_keys_stay) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  const uint64_t tags[2] = {21, 22};
  Keys keys{std::vector<uint32_t>(2), std::vector<uint32_t>(2)};
  insert_tagged(*store, tags, keys.rows, keys.generations);
  const uint32_t length = tagged_length(21);
  CHECK(length > 6);
  const std::vector<uint64_t> fresh(2 * 3 * kTaggedWidth, 7), late(2 * 3, 9);
  const FieldSource sources[2] = {{1, reinterpret_cast<const std::byte*>(fresh.data()), 3 * kTaggedWidth * 8},
                                  {2, reinterpret_cast<const std::byte*>(late.data()), 24}};
  const uint64_t before = store->info(keys.rows[0]).inserted_at_ns;
  const uint32_t starts[2] = {2, kTaggedSteps - 1}, lengths[2] = {3, 1};
  CHECK_EQ(store->rewrite(keys.rows, keys.generations, sources, starts, lengths), uint64_t{0});
  const auto* steps = reinterpret_cast<const uint64_t*>(store->block(1, keys.rows[0]));
  for (uint32_t t = 0; t < length; ++t) {
    for (uint32_t k = 0; k < kTaggedWidth; ++k) {
      CHECK_EQ(steps[t * kTaggedWidth + k], t >= 2 && t < 5 ? 7 : tagged_step(21, t, k));
    }
  }
  CHECK_EQ(*reinterpret_cast<const uint64_t*>(store->block(2, keys.rows[1])), uint64_t{9});
  CHECK_EQ(*reinterpret_cast<const uint64_t*>(store->block(0, keys.rows[0])), uint64_t{21});
  // What compares rows, as a checkpoint does, sees that these have changed.
  CHECK_EQ(store->info(keys.rows[0]).inserted_at_ns, before + 2);
  CHECK_EQ(store->info(keys.rows[0]).generation, keys.generations[0]);
  const uint32_t stale[2] = {keys.generations[0] + 2, keys.generations[1]};
  CHECK_EQ(store->rewrite(keys.rows, stale, sources, {}, {}), uint64_t{1});
  const uint32_t beyond[2] = {0, kTaggedSteps};
  CHECK_THROWS(schema, store->rewrite(keys.rows, keys.generations, sources, beyond, {}));
  const uint32_t many[2] = {1, 4};
  CHECK_THROWS(schema, store->rewrite(keys.rows, keys.generations, sources, {}, many));
  const FieldSource odd{1, reinterpret_cast<const std::byte*>(fresh.data()), 20};
  CHECK_THROWS(schema, store->rewrite(keys.rows, keys.generations, {&odd, 1}, {}, {}));
  CHECK(store->audit().empty());
}

TEST(a_row_that_is_still_extended_is_left_alone) {
  auto store = Store::create(testing::unique_name(), constant_fields(), store_options(2));
  Keys keys{std::vector<uint32_t>(1), std::vector<uint32_t>(1)};
  store->allocate(keys.rows);
  const uint32_t length = 1;
  store->publish(keys.rows, {{&length, 1}, {}, {}}, keys.generations);
  const std::vector<uint64_t> same(kWords, 1);
  const FieldSource source{0, reinterpret_cast<const std::byte*>(same.data()), kWords * 8};
  CHECK_EQ(store->rewrite(keys.rows, keys.generations, {&source, 1}, {}, {}), uint64_t{1});
  store->seal(keys.rows);
  CHECK_EQ(store->rewrite(keys.rows, keys.generations, {&source, 1}, {}, {}), uint64_t{0});
}

TEST(a_row_that_is_written_during_every_copy_is_copied_under_the_lock) {
  auto store = Store::create(testing::unique_name(), constant_fields(), store_options(2));
  const Keys keys = insert_constant(*store, 1, 1);
  const uint32_t row = keys.rows[0];
  std::thread writer;
  uint64_t value = 2;
  int copies = 0, disturbed = 0;
  bool whole = false;
  RowCopy copy(*store, row, keys.generations[0]);
  const bool read = copy.until_whole([&] {
    if (writer.joinable()) writer.join();
    if (++copies > 100) return;  // never whole: fails below
    const uint64_t before = store->content_number(row), first = *reinterpret_cast<uint64_t*>(store->block(0, row));
    writer = std::thread([&, fresh = value++] { rewrite_constant(*store, keys, fresh); });
    for (int waited = 0; waited < 200 && store->content_number(row) == before; ++waited) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    disturbed += store->content_number(row) != before;
    whole = *reinterpret_cast<uint64_t*>(store->block(0, row)) == first;
  });
  if (writer.joinable()) writer.join();
  CHECK(read);
  CHECK(whole);
  CHECK(disturbed > 0);
  CHECK_EQ(copies, disturbed + 1);
  CHECK(copies < 100);
  CHECK(store->audit().empty());
}

TEST(readers_beside_writers_see_one_write_or_another) {
  auto store = Store::create(testing::unique_name(), constant_fields(), store_options(6));
  const Keys keys = insert_constant(*store, 4, 1);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (uint64_t w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      for (uint64_t value = 2 + w; !stop; value += 2) rewrite_constant(*store, keys, value);
    });
  }
  Seen seen;
  const uint64_t began = monotonic_ns();
  for (int round = 0; round < 3000 && monotonic_ns() - began < 1'000'000'000; ++round) {
    const Seen now = read_constant(*store, keys);
    seen.whole += now.whole;
    seen.lost += now.lost;
    seen.mixed += now.mixed;
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  CHECK(seen.whole > 0);
  CHECK_EQ(seen.lost, uint64_t{0});
  CHECK_EQ(seen.mixed, uint64_t{0});
  CHECK(store->audit().empty());
}

// Writers are killed at any moment; the one that died inside costs its row, which is counted and can be used again.
TEST(writers_that_are_killed_leave_no_half_row_and_at_most_one_row_less) {
  if (kThreadSanitizer) return;  // it does not follow a fork
  constexpr uint64_t kRows = 6;
  auto store = Store::create(testing::unique_name(), constant_fields(), store_options(kRows));
  uint64_t lost = 0;
  const uint64_t began = monotonic_ns();
  // On a busy machine a writer may be killed before it runs again, time after time: then on, and with longer lives.
  for (int round = 0; round < 60 || (lost == 0 && testing::within(began, 60)); ++round) {
    Keys keys;
    store->keys(&keys.rows, &keys.generations);
    const size_t missing = kRows - keys.rows.size();
    const Keys more = insert_constant(*store, missing, 1);
    keys.rows.insert(keys.rows.end(), more.rows.begin(), more.rows.end());
    keys.generations.insert(keys.generations.end(), more.generations.begin(), more.generations.end());
    int ready[2];
    CHECK(::pipe(ready) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      for (uint64_t value = 100;; ++value) {
        rewrite_constant(*store, keys, value);
        if (value == 101 && ::write(ready[1], "r", 1) != 1) ::_exit(1);
      }
    }
    char byte = 0;
    CHECK(::read(ready[0], &byte, 1) == 1);
    const Seen beside = read_constant(*store, keys);
    CHECK_EQ(beside.mixed, uint64_t{0});
    CHECK_EQ(beside.lost, uint64_t{0});
    ::usleep(static_cast<useconds_t>(round * 7 % (round < 60 ? 190 : 19'000)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
    const uint64_t reclaimed = store->control().counters.reclaimed;
    const Seen after = read_constant(*store, keys);  // the reader repairs what it meets
    CHECK_EQ(after.mixed, uint64_t{0});
    CHECK(after.lost <= 1);
    store->reap();
    CHECK_EQ(store->committed_count(), kRows - after.lost);
    CHECK_EQ(store->control().counters.reclaimed - reclaimed, after.lost);
    check_sound(*store);
    lost += after.lost;
  }
  CHECK(lost > 0);
}

TEST(segments_of_earlier_builds_are_read_as_before_and_not_written_in_place) {
  auto options = store_options(2);
  options.content_numbers = false;
  auto store = Store::create(testing::unique_name(), constant_fields(), options);
  const Keys keys = insert_constant(*store, 1, 1);
  auto again = Store::attach(store->mapping()->path(), {});
  for (const uint64_t time : {uint64_t{6}, uint64_t{7}}) {  // of any commit, even or odd
    store->status()[keys.rows[0]].inserted_at_ns.store(time);
    CHECK_EQ(read_constant(*again, keys).whole, uint64_t{1});
    CHECK_EQ(again->info(keys.rows[0]).inserted_at_ns, time);
  }
  const std::vector<uint64_t> same(kWords, 1);
  const FieldSource source{0, reinterpret_cast<const std::byte*>(same.data()), kWords * 8};
  CHECK_THROWS(schema, again->rewrite(keys.rows, keys.generations, {&source, 1}, {}, {}));
}

// A writer that is stopped inside keeps readers for as long as the lock's timeout, and no longer.
TEST(a_reader_waits_for_a_stopped_writer_no_longer_than_for_the_lock) {
  auto options = store_options(2);
  options.lock_timeout_s = 0.05;
  auto store = Store::create(testing::unique_name(), constant_fields(), options);
  const Keys keys = insert_constant(*store, 1, 1);
  CHECK(::pthread_mutex_lock(&store->control().mutex) == 0);
  store->status()[keys.rows[0]].inserted_at_ns.fetch_add(1);
  const uint64_t began_ns = monotonic_ns();
  CHECK_EQ(read_constant(*store, keys).lost, uint64_t{1});
  CHECK(monotonic_ns() - began_ns >= 50'000'000);
  store->status()[keys.rows[0]].inserted_at_ns.fetch_add(1);
  ::pthread_mutex_unlock(&store->control().mutex);
  CHECK_EQ(read_constant(*store, keys).whole, uint64_t{1});
}

// In a damaged segment every row may say so: a batch of them waited for each as long as for the lock.
TEST(a_reader_does_not_wait_for_a_writer_where_nobody_holds_the_lock) {
  auto options = store_options(2);
  options.lock_timeout_s = 20;
  auto store = Store::create(testing::unique_name(), constant_fields(), options);
  const Keys keys = insert_constant(*store, 2, 1);
  for (const uint32_t row : keys.rows) store->status()[row].inserted_at_ns.fetch_or(1);
  const uint64_t began_ns = monotonic_ns();
  CHECK_EQ(read_constant(*store, keys).lost, uint64_t{2});
  CHECK(monotonic_ns() - began_ns < 20'000'000'000);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
