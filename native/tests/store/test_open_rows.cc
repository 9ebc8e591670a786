// Open rows: read up to their published length, extended by their writer alone, and kept after its death.

#include "store/store.h"

#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

TEST(an_open_row_is_read_up_to_its_published_length) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  std::atomic<bool> done{false};
  std::atomic<uint64_t> whole{0}, mixed{0};
  std::thread reader([&] {
    std::mt19937 random(3);
    while (!done.load()) {
      std::vector<uint32_t> rows, generations;
      store->keys(&rows, &generations);
      const std::vector<int32_t> ends(rows.size(), static_cast<int32_t>(random() % kTaggedSteps));
      for (const TaggedBatch& batch :
           {fetch_tagged(*store, rows, generations), fetch_tagged(*store, rows, generations, 8, ends)}) {
        whole += batch.whole;
        mixed += batch.mixed;
      }
    }
  });
  for (uint64_t episode = 1; episode <= 300 || whole.load() < 100; ++episode) {
    const uint64_t tag = kOpenTag | episode;
    uint32_t row = 0, generation = 0;
    store->allocate({&row, 1});
    begin_tagged(*store, row, tag);
    grow_tagged(*store, row, tag, 0, 1);
    const uint32_t one = 1;
    const auto version = static_cast<int64_t>(tag);
    store->publish({&row, 1}, {{&one, 1}, {}, {&version, 1}}, {&generation, 1});
    for (uint32_t length = 2; length <= tagged_length(tag); ++length) {
      grow_tagged(*store, row, tag, length - 1, length);
      store->extend(row, length);
    }
    store->seal({&row, 1});
  }
  done = true;
  reader.join();
  CHECK_EQ(mixed.load(), uint64_t{0});
  check_sound(*store);
}

TEST(an_open_row_is_its_writers_alone) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(3));
  uint32_t rows[2], generations[2];
  store->allocate(rows);
  const uint32_t lengths[2] = {5, 5};
  store->publish(rows, {lengths, {}, {}}, generations);
  check_sound(*store);
  CHECK_EQ(store->committed_count(), uint64_t{2});
  CHECK_EQ(store->counts().open, uint64_t{2});
  CHECK_EQ(store->bit_tree().total(), uint64_t{2});
  // Neither the remover nor another client can remove it.
  uint32_t more[2];
  CHECK_THROWS(full, store->allocate(more));
  CHECK_EQ(store->remove(rows, generations), uint64_t{2});
  CHECK_THROWS(stale_key, store->abandon(rows));
  CHECK_THROWS(schema, store->extend(rows[0], 4));
  CHECK_THROWS(schema, store->extend(rows[0], kTaggedSteps + 1));
  const double priorities[2] = {3, 4};
  CHECK_EQ(store->update_priorities(rows, generations, priorities), uint64_t{0});
  store->extend(rows[0], 6);
  CHECK_EQ(store->info(rows[0]).length, 6u);
  store->rebuild();  // as after a death
  check_sound(*store);
  CHECK_EQ(store->counts().open, uint64_t{2});
  store->seal(rows);
  check_sound(*store);
  CHECK_EQ(store->info(rows[0]).generation, generations[0]);
  CHECK_THROWS(stale_key, store->extend(rows[0], 7));
  store->allocate(more);  // evicts the one sealed first
  CHECK_EQ(store->info(rows[1]).generation, generations[1]);
}

TEST(what_a_dead_writer_has_published_stays) {
  if (kThreadSanitizer) return;
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  const pid_t child = ::fork();
  if (child == 0) {
    uint32_t row = 0, generation = 0;
    const uint32_t three = 3;
    store->allocate({&row, 1});
    store->publish({&row, 1}, {{&three, 1}, {}, {}}, {&generation, 1});
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  CHECK_EQ(store->counts().open, uint64_t{1});
  CHECK_EQ(store->reap(), 1u);
  CHECK_EQ(store->counts().open, uint64_t{0});
  CHECK_EQ(store->counts().committed, uint64_t{1});
  check_sound(*store);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
