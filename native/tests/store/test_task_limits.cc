// Rows in flight, the clock, versions of rows, and the end of stale ones.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/errors.h"
#include "tests/support/check.h"
#include "tests/support/task_rows.h"

namespace geartrain {
namespace {

// Rows whose tasks are all done but the last.
std::vector<ClaimedRow> finished_rows(Store& store, size_t n) {
  const std::vector<ClaimedRow> keys = insert(store, n);
  for (const uint32_t task : {kAnswer, kReward, kRef}) {
    for (const ClaimedRow& each : store.tasks()->claim(task, {.most = n})) put(store, task, each, kLengths, 1);
  }
  return keys;
}

// Draws so many rows, as a batch does; returns how many it used up.
uint64_t draw(Store& store, size_t n) {
  std::vector<uint32_t> rows, generations;
  store.keys(&rows, &generations);
  rows.resize(n), generations.resize(n);
  std::vector<uint8_t> taken(n);
  const uint64_t used_up = store.count_samples(rows, generations, taken);
  store.release_exhausted(rows, generations);
  return used_up;
}

int64_t shown(const Store& store, const ClaimedRow& key) {
  return store.info(key.row).version;
}

TEST(rows_are_in_flight_from_their_insert_until_their_batch_is_finished) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  tasks.set_limits({.in_flight = 4, .max_stale = {}});
  finished_rows(*store, 2);
  insert(*store, 2);
  CHECK_EQ(tasks.in_flight(), 4u);
  CHECK(insert(*store, 1).empty());
  CHECK_EQ(draw(*store, 2), 2u);
  CHECK_EQ(tasks.in_flight(), 4u);  // in a batch
  CHECK(insert(*store, 1).empty());
  tasks.finished(1);
  CHECK_EQ(insert(*store, 1).size(), 1u);
  tasks.finished(9);  // no more than were drawn
  CHECK_EQ(tasks.in_flight(), 3u);
  tasks.drop(kAnswer, tasks.claim(kAnswer, {.most = 2}));
  CHECK_EQ(tasks.in_flight(), 1u);
  try {
    insert(*store, 5);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::full);
  }
  tasks.set_limits({});
  CHECK_EQ(insert(*store, 5).size(), 5u);
  no_problems(*store);
}

TEST(a_row_that_is_being_inserted_is_in_flight) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  tasks.set_limits({.in_flight = 2, .max_stale = {}});
  std::vector<TaskRow> rows(2, row_of(*store, 0, {kNoRow, 0, 0}, {5}));
  CHECK(tasks.begin_insert(rows));
  CHECK_EQ(tasks.in_flight(), 2u);
  CHECK(insert(*store, 1).empty());
  tasks.abandon_insert(rows);
  CHECK_EQ(tasks.in_flight(), 0u);
  CHECK_EQ(insert(*store, 2).size(), 2u);
}

TEST(an_insert_that_waits_is_woken_by_whatever_gives_a_place_back) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const std::vector<std::function<void()>> gives = {
      [&] { tasks.finished(1); },
      [&] { tasks.drop(kAnswer, tasks.claim(kAnswer, {.most = 1})); },
      [&] { tasks.set_limits({.in_flight = 3, .max_stale = {}}); },
      [&] { tasks.set_limits({}); },
  };
  for (const auto& give : gives) {
    tasks.set_limits({.in_flight = 2, .max_stale = {}});
    if (store->committed_count() == 0 && tasks.in_flight() == 0) finished_rows(*store, 1);
    if (store->committed_count() != 0) draw(*store, 1);
    while (tasks.in_flight() < 2) insert(*store, 1);
    std::atomic<bool> inserted{false};
    std::thread loader([&] {
      for (uint32_t seen = tasks.table().space_changes.load(); insert(*store, 1).empty();
           seen = tasks.table().space_changes.load()) {
        tasks.await_space(seen, 60);
      }
      inserted = true;
    });
    while (tasks.table().space_waiting.load() == 0) std::this_thread::yield();
    CHECK(!inserted.load());
    give();
    loader.join();
    tasks.set_limits({});
    tasks.finished(1);
    tasks.drop(kAnswer, tasks.claim(kAnswer, {.most = 9}));
  }
}

// Every way of holding rows: the places of a process that is killed are free after the reap, and no others.
TEST(the_places_of_a_dead_process_are_given_back_and_no_others) {
  if (kThreadSanitizer) return;
  auto store = made();
  Tasks& tasks = *store->tasks();
  finished_rows(*store, 5);
  insert(*store, 2);
  CHECK_EQ(draw(*store, 1), 1u);  // the survivor's
  const std::vector<std::function<void()>> dies_with = {
      [&] {
        std::vector<TaskRow> rows(2, row_of(*store, 0, {kNoRow, 0, 0}, {5}));
        tasks.begin_insert(rows);
      },
      [&] { tasks.claim(kAnswer, {.most = 2}); },
      [&] { draw(*store, 1); },
      [&] {
        std::vector<uint32_t> rows, generations;
        store->keys(&rows, &generations);
        rows.resize(1), generations.resize(1);
        std::vector<uint8_t> taken(1);
        store->count_samples(rows, generations, taken);  // not released: it copies them
      },
  };
  const uint64_t after[] = {7, 7, 6, 5};
  CHECK_EQ(tasks.in_flight(), 7u);
  for (size_t i = 0; i < dies_with.size(); ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      dies_with[i]();
      ::kill(::getpid(), SIGKILL);
    }
    ::waitpid(child, nullptr, 0);
    store->reap();
    CHECK_EQ(tasks.in_flight(), after[i]);
    no_problems(*store);
  }
  store->rebuild();
  CHECK_EQ(tasks.in_flight(), 5u);  // of them the survivor's batch
  tasks.finished(1);
  CHECK_EQ(tasks.in_flight(), 4u);
}

TEST(a_row_has_the_version_of_its_oldest_task_or_else_the_clock_at_its_insert) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  tasks.advance(3);
  CHECK_EQ(tasks.advance(2), 3);
  const ClaimedRow key = insert(*store, 1)[0];
  CHECK_EQ(shown(*store, key), 3);
  tasks.advance(5);
  ClaimedRow claimed = tasks.claim(kAnswer, {})[0];
  CHECK_EQ(shown(*store, key), 5);
  tasks.release(kAnswer, {&claimed, 1});
  CHECK_EQ(shown(*store, key), 3);  // nothing is left of it
  claimed = tasks.claim(kAnswer, {.later = true})[0];
  tasks.say_version(kAnswer, {&claimed, 1}, 4);
  CHECK_EQ(shown(*store, key), 4);
  put(*store, kAnswer, claimed, {0, 3}, 1, Write::append, 2);
  tasks.release(kAnswer, {&claimed, 1});
  CHECK_EQ(shown(*store, key), 4);  // what was appended
  no_problems(*store);
  tasks.advance(9);
  claimed = tasks.claim(kAnswer, {})[0];
  CHECK_EQ(shown(*store, key), 4);  // and is continued
  put(*store, kAnswer, claimed, kLengths, 1);
  claimed = tasks.claim(kReward, {})[0];
  put(*store, kReward, claimed, kLengths, 1);
  CHECK_EQ(shown(*store, key), 4);
  no_problems(*store);
  store->rebuild();
  CHECK_EQ(shown(*store, key), 4);
  tasks.set_clock(1);
  CHECK_EQ(tasks.clock(), 1);
}

TEST(a_row_that_is_set_back_loses_its_version) {
  auto store = made(options_of_tests(16, 16 << 10));
  Tasks& tasks = *store->tasks();
  tasks.advance(1);
  const auto keys = insert(*store, 2);
  const auto claimed = tasks.claim(kAnswer, {.most = 2});
  tasks.advance(2);
  put(*store, kAnswer, claimed[1], {5, 1500, 3}, 1);
  CHECK_EQ(shown(*store, keys[1]), 1);
  tasks.set_clock(7);
  CHECK(put(*store, kAnswer, claimed[0], {5, 2500, 3}, 1));
  CHECK_EQ(tasks.table().set_back.load(), 1u);
  no_problems(*store);
  const ClaimedRow again = tasks.claim(kAnswer, {})[0];
  CHECK_EQ(again.row, keys[1].row);
  CHECK_EQ(shown(*store, keys[1]), 7);
}

TEST(a_stale_row_is_ended_where_nobody_holds_it) {
  for (const bool released : {false, true}) {
    auto store = made();
    Tasks& tasks = *store->tasks();
    tasks.set_limits({.in_flight = 0, .max_stale = 2});
    finished_rows(*store, 1);
    const auto keys = insert(*store, 4);
    auto claimed = tasks.claim(kAnswer, {.most = 3});  // the fourth has no version
    put(*store, kAnswer, claimed[0], kLengths, 1);
    put(*store, kAnswer, claimed[1], {0, 3}, 1, Write::append, 2);
    tasks.advance(2);
    CHECK_EQ(tasks.table().stale.load(), 0u);
    CHECK(!tasks.is_stale(keys[1].row));
    tasks.advance(3);
    CHECK_EQ(tasks.table().stale.load(), 2u);  // the finished and the answered one
    CHECK_EQ(store->committed_count(), 0u);
    CHECK(tasks.is_stale(keys[1].row) && tasks.is_stale(keys[2].row) && !tasks.is_stale(keys[3].row));
    no_problems(*store);
    if (released) {
      tasks.release(kAnswer, std::span(claimed).subspan(1));
      CHECK_EQ(tasks.table().stale.load(), 3u);  // of the other one nothing was left
      CHECK_EQ(tasks.claim(kAnswer, {.most = 9}).size(), 2u);
    } else {
      CHECK(put(*store, kAnswer, claimed[1], kLengths, 1));
      CHECK(put(*store, kAnswer, claimed[2], kLengths, 1));
      CHECK_EQ(tasks.table().stale.load(), 4u);
      CHECK(tasks.claim(kReward, {.most = 9}).empty());
      CHECK_EQ(tasks.claim(kAnswer, {.most = 9}).size(), 1u);
    }
    CHECK_EQ(tasks.table().dropped.load(), 0u);
    no_problems(*store);
  }
}

TEST(a_stale_row_is_ended_by_its_last_holder) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 1);
  put(*store, kAnswer, tasks.claim(kAnswer, {})[0], kLengths, 1);
  const ClaimedRow reward = tasks.claim(kReward, {})[0], ref = tasks.claim(kRef, {})[0];
  tasks.advance(5);
  tasks.set_limits({.in_flight = 1, .max_stale = 5});
  CHECK(!tasks.is_stale(reward.row));
  tasks.set_limits({.in_flight = 1, .max_stale = 4});
  CHECK(put(*store, kReward, reward, kLengths, 1));
  CHECK_EQ(tasks.table().stale.load(), 0u);
  CHECK(insert(*store, 1).empty());
  CHECK(put(*store, kRef, ref, kLengths, 1));
  CHECK_EQ(tasks.table().stale.load(), 1u);
  CHECK_EQ(store->committed_count(), 0u);
  CHECK_EQ(insert(*store, 1).size(), 1u);
  no_problems(*store);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
