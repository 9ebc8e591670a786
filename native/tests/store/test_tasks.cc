// Tasks: claims, puts, appends, drops and set-backs; their fences, their room, and what deaths leave behind.

#include "store/tasks.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "base/errors.h"
#include "base/random.h"
#include "tests/support/check.h"
#include "tests/support/task_rows.h"

namespace geartrain {
namespace {

TEST(a_row_passes_through_its_tasks_and_is_freed) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 3);
  CHECK_EQ(store->committed_count(), 0u);
  CHECK(tasks.claim(kReward, {.most = 5}).empty());
  auto answers = tasks.claim(kAnswer, {.most = 2});
  CHECK_EQ(answers.size(), 2u);
  CHECK_EQ(answers[0].row, keys[0].row);
  CHECK_EQ(answers[1].row, keys[1].row);
  no_problems(*store);
  for (const ClaimedRow& each : answers) CHECK(put(*store, kAnswer, each, kLengths, 7));
  AxisLengths lengths;
  CHECK(tasks.lengths(keys[0].row, keys[0].generation, &lengths));
  CHECK(lengths == kLengths);
  auto rewards = tasks.claim(kReward, {.most = 5}), refs = tasks.claim(kRef, {.most = 5});
  CHECK_EQ(rewards.size(), 2u);
  CHECK_EQ(refs.size(), 2u);
  CHECK(put(*store, kReward, rewards[0], kLengths, 8));
  CHECK_EQ(store->committed_count(), 0u);
  CHECK(put(*store, kRef, refs[0], kLengths, 9));
  CHECK_EQ(store->committed_count(), 1u);
  CHECK_EQ(generation_of(store->words()[keys[0].row].load()), keys[0].generation);
  no_problems(*store);
  CHECK_EQ(train(*store), 1u);
  CHECK(!tasks.has_key(keys[0].row, keys[0].generation));
  no_problems(*store);
  CHECK(put(*store, kReward, rewards[1], kLengths, 8));
  CHECK(put(*store, kRef, refs[1], kLengths, 9));
  CHECK_EQ(train(*store), 1u);
  tasks.drop(kAnswer, tasks.claim(kAnswer, {.most = 1}));
  CHECK_EQ(store->counts().free, 16u);
  CHECK_EQ(tasks.heap().free_units(), tasks.heap().units() - 1);
  no_problems(*store);
}

TEST(axes_that_disagree_are_refused) {
  auto store = made();
  insert(*store, 1);
  auto claimed = store->tasks()->claim(kAnswer, {});
  put(*store, kAnswer, claimed[0], kLengths, 1);
  claimed = store->tasks()->claim(kReward, {});
  try {
    put(*store, kReward, claimed[0], {5, 30, 4}, 1);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::schema);
  }
  CHECK(put(*store, kReward, claimed[0], kLengths, 1));
}

TEST(claims_have_a_fence) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 1);
  const ClaimedRow first = tasks.claim(kAnswer, {})[0];
  CHECK_EQ(tasks.release(kAnswer, std::span(&first, 1)), 0u);
  CHECK_EQ(tasks.release(kAnswer, std::span(&first, 1)), 1u);
  const ClaimedRow second = tasks.claim(kAnswer, {})[0];
  CHECK(!put(*store, kAnswer, first, kLengths, 1));
  CHECK(put(*store, kAnswer, second, kLengths, 2));
  CHECK(!put(*store, kAnswer, second, kLengths, 3));
  CHECK(is_filled_with(*store, tasks.filled(tasks.word(first.row, kAnswer)), 2));
  no_problems(*store);
}

TEST(max_items_bounds_a_claim_of_more_than_one_row) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 6, 40);
  CHECK_EQ(tasks.claim(kAnswer, {.most = 6, .max_items = 10, .axis = 1}).size(), 1u);
  CHECK_EQ(tasks.claim(kAnswer, {.most = 6, .max_items = 80, .axis = 1}).size(), 2u);
  CHECK_EQ(tasks.claim(kAnswer, {.most = 6, .max_items = 119, .axis = 1}).size(), 2u);
  CHECK_EQ(tasks.claim(kAnswer, {.most = 6, .max_items = 1000, .axis = 1}).size(), 1u);
}

TEST(what_was_appended_stays_with_the_row) {
  for (const bool keep : {true, false}) {
    auto store = made(options_of_tests(16, 64 << 10, keep));
    Tasks& tasks = *store->tasks();
    insert(*store, 1);
    ClaimedRow claimed = tasks.claim(kAnswer, {})[0];
    for (uint32_t i = 0; i < 3; ++i) CHECK(put(*store, kAnswer, claimed, {0, 10 + i}, i, Write::append, 2, i % 2));
    const auto parts = tasks.chain(kAnswer, claimed);
    CHECK_EQ(parts.size(), 3u);
    for (uint32_t i = 0; i < 3; ++i) {
      CHECK_EQ(parts[i].lengths[1], 10 + i);
      CHECK_EQ(parts[i].item, i % 2);
      CHECK(is_filled_with(*store, parts[i].span, i));
    }
    no_problems(*store);
    tasks.release(kAnswer, std::span(&claimed, 1));
    claimed = tasks.claim(kAnswer, {})[0];
    CHECK_EQ(tasks.chain(kAnswer, claimed).size(), keep ? 3u : 0u);
    CHECK(put(*store, kAnswer, claimed, kLengths, 9));
    CHECK(is_filled_with(*store, tasks.filled(tasks.word(claimed.row, kAnswer)), 9));
    no_problems(*store);
  }
}

TEST(a_rewrite_replaces_the_whole_span) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 1);
  put(*store, kAnswer, tasks.claim(kAnswer, {})[0], kLengths, 1);
  const ClaimedRow claimed = tasks.claim(kReward, {})[0];
  CHECK(!put(*store, kReward, claimed, kLengths, 5, Write::rewrite));
  CHECK(put(*store, kReward, claimed, kLengths, 2));
  const uint64_t before = tasks.words(claimed.row)[kReward].load();
  CHECK(put(*store, kReward, claimed, kLengths, 3, Write::rewrite));
  CHECK(before != tasks.words(claimed.row)[kReward].load());
  CHECK(is_filled_with(*store, tasks.filled(tasks.word(claimed.row, kReward)), 3));
  // One that is under way is not seen, and one that was begun before another that is there already is lost.
  TaskRow early = row_of(*store, kReward, claimed, kLengths);
  CHECK_EQ(tasks.begin(Write::rewrite, kReward, {&early, 1}), 1u);
  CHECK(is_filled_with(*store, tasks.filled(tasks.word(claimed.row, kReward)), 3));
  no_problems(*store);
  CHECK(put(*store, kReward, claimed, kLengths, 4, Write::rewrite));
  fill_with(*store, early, 5);
  tasks.finish(Write::rewrite, kReward, {&early, 1});
  CHECK(is_filled_with(*store, tasks.filled(tasks.word(claimed.row, kReward)), 4));
  no_problems(*store);
}

TEST(a_row_that_is_dropped_under_a_writer_waits_for_it) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 1);
  const ClaimedRow claimed = tasks.claim(kAnswer, {})[0];
  TaskRow one = row_of(*store, kAnswer, claimed, kLengths), other = row_of(*store, kAnswer, claimed, {0, 8}, 2);
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&one, 1}), 1u);
  CHECK_EQ(tasks.begin(Write::append, kAnswer, {&other, 1}, 2), 1u);
  CHECK_EQ(store->remove({&keys[0].row, 1}, {&keys[0].generation, 1}), 0u);
  no_problems(*store);
  CHECK(!tasks.has_key(keys[0].row, keys[0].generation));
  CHECK_EQ(store->counts().free, 15u);
  tasks.finish(Write::put, kAnswer, {&one, 1});
  CHECK(one.skipped);
  no_problems(*store);
  CHECK_EQ(store->counts().free, 15u);
  tasks.finish(Write::append, kAnswer, {&other, 1});
  CHECK_EQ(store->counts().free, 16u);
  CHECK_EQ(tasks.heap().free_units(), tasks.heap().units() - 1);
  no_problems(*store);
}

TEST(rows_that_are_new_make_room_for_old_ones) {
  // Room for the prompts and two answers of four.
  const uint32_t tokens = 1000;
  auto store = made(options_of_tests(4, 4 * 128 + 2 * (64 + 4032 + 64) + 640));
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 4);
  const auto claimed = tasks.claim(kAnswer, {.most = 4});
  CHECK(put(*store, kAnswer, claimed[3], {5, tokens, 3}, 3));
  CHECK(put(*store, kAnswer, claimed[2], {5, tokens, 3}, 2));
  no_problems(*store);
  CHECK(put(*store, kAnswer, claimed[0], {5, tokens, 3}, 0));  // the newest is set back
  CHECK_EQ(static_cast<int>(tasks.word(keys[3].row, kAnswer).state), 0);
  CHECK_EQ(static_cast<int>(tasks.word(keys[2].row, kAnswer).state), 2);
  no_problems(*store);
  CHECK_EQ(tasks.claim(kAnswer, {.most = 4}).size(), 1u);
  CHECK_EQ(tasks.table().set_back.load(), 1u);
}

TEST(without_room_and_without_others_there_is_an_error) {
  auto store = made(options_of_tests(4, 8 << 10));
  Tasks& tasks = *store->tasks();
  insert(*store, 1);
  const ClaimedRow claimed = tasks.claim(kAnswer, {})[0];
  for (const uint32_t tokens : {1990u, 100'000u}) {
    try {
      put(*store, kAnswer, claimed, {5, tokens, 3}, 3);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::no_space);
    }
  }
  no_problems(*store);
  std::vector<TaskRow> rows(5, row_of(*store, 0, {kNoRow, 0, 0}, {1}));
  try {
    tasks.begin_insert(rows);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::full);
  }
  CHECK_EQ(insert(*store, 3).size(), 3u);
  CHECK(insert(*store, 1).empty());
  no_problems(*store);
}

TEST(what_a_dead_process_had_claimed_is_due_again) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 2);
  for (int death = 0; death < 3; ++death) {
    const pid_t child = ::fork();
    if (child == 0) {
      auto claimed = tasks.claim(kAnswer, {.most = 2});
      bool fine = claimed.size() == 2 && put(*store, kAnswer, claimed[0], {0, 10}, 1, Write::append, 2, 0);
      TaskRow begun = row_of(*store, kAnswer, claimed[1], kLengths);
      fine &= tasks.begin(Write::put, kAnswer, {&begun, 1}) == 1;
      ::_exit(fine ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    CHECK(store->reap() == 1u);
    no_problems(*store);
  }
  // The one that got on was kept, the other given up.
  const auto claimed = tasks.claim(kAnswer, {.most = 2});
  CHECK_EQ(claimed.size(), 1u);
  CHECK_EQ(tasks.chain(kAnswer, claimed[0]).size(), 3u);
  CHECK_EQ(tasks.table().given_up.load(), 1u);
  no_problems(*store);
}

TEST(a_rebuild_finds_what_is_there) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 8);
  auto answers = tasks.claim(kAnswer, {.most = 6});
  for (size_t i = 0; i < 4; ++i) put(*store, kAnswer, answers[i], kLengths, 100 + static_cast<uint32_t>(i));
  put(*store, kAnswer, answers[4], {0, 10}, 4, Write::append, 2, 0);
  put(*store, kAnswer, answers[4], {0, 20}, 5, Write::append, 2, 0);
  auto rewards = tasks.claim(kReward, {.most = 2}), refs = tasks.claim(kRef, {.most = 1});
  put(*store, kReward, rewards[0], kLengths, 1);
  put(*store, kRef, refs[0], kLengths, 1);
  TaskRow begun = row_of(*store, kAnswer, answers[5], kLengths);
  tasks.begin(Write::put, kAnswer, {&begun, 1});
  for (int i = 0; i < 2; ++i) {
    store->rebuild();
    no_problems(*store);
    CHECK_EQ(store->committed_count(), 1u);
    CHECK_EQ(tasks.table().figures[kAnswer].due.load(), 2u);
    CHECK_EQ(tasks.table().figures[kAnswer].claimed.load(), 2u);
    CHECK_EQ(tasks.chain(kAnswer, answers[4]).size(), 2u);
    CHECK(is_filled_with(*store, tasks.filled(tasks.word(answers[1].row, kAnswer)), 101));
  }
  tasks.finish(Write::put, kAnswer, {&begun, 1});
  CHECK(!begun.skipped);
  no_problems(*store);
}

TEST(loops_end_when_nothing_can_come) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  insert(*store, 1);
  tasks.end_inserts();
  CHECK(!tasks.is_over(kAnswer));
  const ClaimedRow claimed = tasks.claim(kAnswer, {})[0];
  CHECK(!tasks.is_over(kReward));
  tasks.drop(kAnswer, std::span(&claimed, 1));
  for (const uint32_t task : {kAnswer, kReward, kRef, kTrain}) CHECK(tasks.is_over(task));
}

// Random calls, audited and rebuilt now and then.
TEST(random_calls_leave_nothing_inconsistent) {
  for (const uint64_t seed : {1u, 2u, 3u, 4u}) {
    auto store = made(options_of_tests(24, 40 << 10));
    Tasks& tasks = *store->tasks();
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    std::map<uint32_t, std::vector<ClaimedRow>> held;
    size_t done = 0;
    for (int call = 0; call < 4000; ++call) {
      const size_t what = below(12);
      if (what < 2) {
        insert(*store, 1 + below(3), static_cast<uint32_t>(1 + below(50)));
      } else if (what < 6) {
        const auto task = static_cast<uint32_t>(1 + below(3));
        for (const ClaimedRow& each : tasks.claim(task, {.most = 1 + below(4)})) held[task].push_back(each);
      } else if (what < 7) {
        done += train(*store, 1 + below(3));
      } else {
        const auto task = static_cast<uint32_t>(1 + below(3));
        if (held[task].empty()) continue;
        const size_t at = below(held[task].size());
        const ClaimedRow each = held[task][at];
        AxisLengths lengths;
        if (!tasks.owns(task, each)) {
          held[task].erase(held[task].begin() + static_cast<ptrdiff_t>(at));
          continue;
        }
        CHECK(tasks.lengths(each.row, each.generation, &lengths));
        if (task == kAnswer) lengths[1] = static_cast<uint32_t>(1 + below(900)), lengths[2] = 3;
        const size_t how = below(8);
        try {
          if (how == 0) {
            tasks.release(task, std::span(&each, 1));
          } else if (how == 1) {
            tasks.drop(task, std::span(&each, 1));
          } else if (how < 4 && task == kAnswer) {
            TaskRow row = row_of(*store, task, each, {0, static_cast<uint32_t>(below(60))}, 2);
            if (tasks.begin(Write::append, task, {&row, 1}, 2) == 1) {
              if (below(5) == 0) {
                tasks.abandon(Write::append, task, {&row, 1});
              } else {
                tasks.finish(Write::append, task, {&row, 1});
              }
            }
            continue;
          } else {
            TaskRow row = row_of(*store, task, each, lengths);
            if (tasks.begin(Write::put, task, {&row, 1}) == 0) {
              tasks.make_room(task, row);
              tasks.stop_waiting();
              continue;
            }
            tasks.finish(Write::put, task, {&row, 1});
          }
        } catch (const Error& error) {
          if (error.kind != ErrorKind::no_space) throw;
        }
        held[task].erase(held[task].begin() + static_cast<ptrdiff_t>(at));
      }
      if (call % 50 == 0) no_problems(*store);
      if (call % 500 == 0) store->rebuild();
      if (testing::failures != 0) return;
    }
    no_problems(*store);
    CHECK(done > 20);
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
