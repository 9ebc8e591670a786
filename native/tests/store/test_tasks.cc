// Tasks: claims, puts, appends, drops and set-backs; their fences, their room, and what deaths leave behind.

#include "store/tasks.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/clock.h"
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

// Rows that all tasks but the last are done for.
std::vector<ClaimedRow> finished(Store& store, size_t n) {
  const auto keys = insert(store, n);
  for (const uint32_t task : {kAnswer, kReward, kRef}) {
    for (const ClaimedRow& each : store.tasks()->claim(task, {.most = n})) put(store, task, each, kLengths, 1);
  }
  return keys;
}

size_t take(Store& store, std::span<const ClaimedRow> rows, uint64_t step, std::vector<uint32_t> places) {
  std::vector<uint32_t> numbers, generations;
  for (const ClaimedRow& each : rows) numbers.push_back(each.row), generations.push_back(each.generation);
  std::vector<uint8_t> taken(rows.size());
  const Store::Taking by{step, places};
  store.count_samples(numbers, generations, taken, &by);
  return static_cast<size_t>(std::count(taken.begin(), taken.end(), uint8_t{1}));
}

std::vector<uint32_t> rows_taken(Store& store, uint64_t step) {
  std::vector<uint32_t> rows;
  for (const Tasks::TakenRow& each : store.tasks()->taken(step)) rows.push_back(each.row);
  return rows;
}

TEST(taken_rows_stay_by_step_and_place_until_they_are_saved) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = finished(*store, 6);
  const auto part = [&](size_t first, size_t n) { return std::span(keys).subspan(first, n); };
  CHECK_EQ(take(*store, part(0, 3), 4, {2, 0, 1}), 3u);
  CHECK_EQ(take(*store, part(2, 2), 5, {0, 1}), 1u);  // the first one is taken already
  no_problems(*store);
  CHECK(rows_taken(*store, 4) == std::vector<uint32_t>({keys[1].row, keys[2].row, keys[0].row}));
  CHECK(rows_taken(*store, 5) == std::vector<uint32_t>({keys[3].row}));
  CHECK(rows_taken(*store, 6).empty());
  const auto steps = tasks.taken_steps();
  CHECK(steps.size() == 2 && steps[0].step == 4 && steps[0].rows == 3 && steps[1].step == 5 && steps[1].rows == 1);
  CHECK_EQ(steps[0].units, 3 * steps[1].units);
  CHECK_EQ(tasks.heap().free_units() + 6 * steps[1].units + 1, tasks.heap().units());
  CHECK_EQ(store->committed_count(), 2u);
  const double priority = 5;
  CHECK_EQ(store->update_priorities({&keys[0].row, 1}, {&keys[0].generation, 1}, {&priority, 1}), 1u);
  CHECK(tasks.has_key(keys[0].row, keys[0].generation));
  CHECK(!put(*store, kReward, keys[0], kLengths, 9, Write::rewrite));  // it stays as it was drawn
  store->reap();
  store->rebuild();
  no_problems(*store);
  CHECK(rows_taken(*store, 4) == std::vector<uint32_t>({keys[1].row, keys[2].row, keys[0].row}));
  CHECK_EQ(tasks.free_taken(4), 3u);
  CHECK_EQ(tasks.table().saved_before.load(), 5u);
  CHECK(rows_taken(*store, 4).empty() && rows_taken(*store, 5).size() == 1);
  CHECK(!tasks.has_key(keys[0].row, keys[0].generation));
  CHECK_EQ(tasks.free_taken(9), 1u);
  CHECK_EQ(tasks.free_taken(9), 0u);
  CHECK_EQ(train(*store), 2u);
  CHECK_EQ(store->counts().free, 16u);
  CHECK_EQ(tasks.heap().free_units(), tasks.heap().units() - 1);
  no_problems(*store);
}

TEST(untaken_rows_are_as_if_they_had_never_been_drawn) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = finished(*store, 6);
  std::vector<uint32_t> before, generations, after;
  store->keys(&before, &generations);
  const double priority = 3;
  store->update_priorities({&keys[3].row, 1}, {&keys[3].generation, 1}, {&priority, 1});
  const uint64_t sum = store->priority_tree().total();
  CHECK_EQ(take(*store, std::span(keys).subspan(1, 3), 0, {0, 1, 2}), 3u);
  CHECK(store->priority_tree().total() < sum);
  CHECK_EQ(tasks.untake(1), 0u);
  CHECK_EQ(tasks.untake(0), 3u);
  no_problems(*store);
  store->keys(&after, &generations);
  CHECK(after == before);  // in the order of inserts
  CHECK_EQ(store->priority_tree().total(), sum);
  CHECK_EQ(store->control().counters.sampled.load(), 0u);
  CHECK_EQ(take(*store, keys, 0, {0, 1, 2, 3, 4, 5}), 6u);
  no_problems(*store);
}

TEST(rows_are_taken_only_where_one_sample_frees_them) {
  StoreOptions options = options_of_tests();
  options.max_times_sampled = 2;
  for (const StoreOptions& each : {options, options_of_tests()}) {
    auto store = made(each);
    const auto keys = finished(*store, 1);
    const bool fits = each.max_times_sampled == 1;
    for (const uint64_t step : {fits ? kMaxTakenSteps : 0, uint64_t{0}}) {
      try {
        CHECK_EQ(take(*store, keys, step, {step == 0 && fits ? uint32_t{kMaxPlaces} : 0}), 1u);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::schema);
      }
    }
    no_problems(*store);
  }
}

TEST(kept_rows_stop_a_draw_where_nothing_else_can_bring_rows) {
  auto store = made(options_of_tests(4, 64 << 10));
  Tasks& tasks = *store->tasks();
  const auto keys = finished(*store, 4);
  CHECK(!tasks.kept_alone_stop(2));
  take(*store, std::span(keys).first(3), 0, {0, 1, 2});
  CHECK(tasks.kept_alone_stop(2));
  CHECK(!tasks.kept_alone_stop(1));
  tasks.free_taken(0);
  CHECK(!tasks.kept_alone_stop(2));
  take(*store, std::span(keys).subspan(3), 1, {0});
  CHECK(!tasks.kept_alone_stop(2));  // rows are free
  CHECK(insert(*store, 4).empty());
  CHECK(tasks.kept_alone_stop(2));  // and too few for an insert
  insert(*store, 3);
  CHECK(!tasks.kept_alone_stop(2));
  tasks.drop(kAnswer, tasks.claim(kAnswer, {.most = 3}));
  // Spans are taken, too: more than what is left.
  auto other = made(options_of_tests(16, 8 << 10));
  const auto rows = finished(*other, 4);
  take(*other, rows, 0, {0, 1, 2, 3});
  CHECK(!other->tasks()->kept_alone_stop(1));
  CHECK(insert(*other, 1, 1500).empty());
  CHECK(other->tasks()->kept_alone_stop(1));
}

TEST(rows_are_complete_up_to_the_first_one_that_is_under_way) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  CHECK_EQ(tasks.complete(9).rows, 0u);
  insert(*store, 4);
  std::vector<ClaimedRow> answers = tasks.claim(kAnswer, {.most = 4});
  const auto finish = [&](size_t i) {
    put(*store, kAnswer, answers[i], kLengths, 1);
    for (const uint32_t task : {kReward, kRef}) put(*store, task, tasks.claim(task, {})[0], kLengths, 1);
  };
  const auto sequence = [&](size_t i) { return store->status()[answers[i].row].sequence.load(); };
  finish(1);
  CHECK(tasks.complete(9).rows == 0 && tasks.complete(9).before == sequence(0));
  finish(0);
  CHECK(tasks.complete(9).rows == 2 && tasks.complete(9).before == sequence(2));
  CHECK_EQ(tasks.complete(1).rows, 1u);
  tasks.drop(kAnswer, {&answers[2], 1});
  CHECK(tasks.complete(9).rows == 2 && tasks.complete(9).before == sequence(3));
  finish(3);
  CHECK(tasks.complete(9).rows == 3 && tasks.complete(9).before == store->next_sequence());
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

TEST(after_the_end_of_inserts_no_row_goes_back_to_a_task_that_is_over) {
  for (const bool finished : {false, true}) {
    // Room for the prompts and two answers, and not for a reward of many answers.
    auto store = made(options_of_tests(2, 2 * 128 + 2 * (64 + 4032 + 64) + 256));
    Tasks& tasks = *store->tasks();
    const auto keys = insert(*store, 2);
    if (finished) tasks.end_inserts();
    const auto claimed = tasks.claim(kAnswer, {.most = 2});
    CHECK(put(*store, kAnswer, claimed[0], {5, 1000, 3}, 0));
    CHECK(put(*store, kAnswer, claimed[1], {5, 1000, 3}, 1));
    CHECK_EQ(tasks.is_over(kAnswer), finished);
    const ClaimedRow first = tasks.claim(kRef, {.most = 1})[0];
    TaskRow row = row_of(*store, kRef, first, {5, 1000, 3});
    CHECK_EQ(tasks.begin(Write::put, kRef, {&row, 1}), 0u);
    CHECK(tasks.make_room(kRef, row) == (finished ? Tasks::Room::wait : Tasks::Room::made));
    CHECK_EQ(static_cast<int>(tasks.word(keys[1].row, kAnswer).state), finished ? 2 : 0);
    tasks.stop_waiting();
    no_problems(*store);
  }
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

// Runs in a child that dies without a word once it is done. What it returns is its exit status.
void dying(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body() ? 0 : 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a child: %s\n", error.what());
      ::_exit(2);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}

void answer(Store& store, const ClaimedRow& key, uint32_t tokens = 30) {
  Tasks& tasks = *store.tasks();
  for (const ClaimedRow& each : tasks.claim(kAnswer, {.most = 100})) {
    if (each.row == key.row) {
      CHECK(put(store, kAnswer, each, {5, tokens, 3}, 1));
    } else {
      tasks.release(kAnswer, std::span(&each, 1));
    }
  }
}

TEST(a_rebuild_leaves_alone_what_a_living_process_fills_in_a_row_that_is_gone) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 1);
  answer(*store, keys[0]);
  const ClaimedRow mine = tasks.claim(kReward, {})[0];
  TaskRow begun = row_of(*store, kReward, mine, kLengths);
  CHECK_EQ(tasks.begin(Write::put, kReward, {&begun, 1}), 1u);
  dying([&] {  // it has the row when it is dropped
    TaskRow its = row_of(*store, kRef, tasks.claim(kRef, {})[0], kLengths);
    return tasks.begin(Write::put, kRef, {&its, 1}) == 1 &&
           store->remove({&keys[0].row, 1}, {&keys[0].generation, 1}) == 0;
  });
  store->rebuild();
  no_problems(*store);
  CHECK_EQ(store->counts().free, 15u);
  insert(*store, 3);
  fill_with(*store, begun, 9);
  no_problems(*store);
  tasks.finish(Write::put, kReward, {&begun, 1});
  CHECK(begun.skipped);
  no_problems(*store);
  CHECK_EQ(store->counts().free, 13u);
}

TEST(what_a_dead_process_was_filling_is_freed_though_its_claim_was_released) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 1);
  const uint64_t free = tasks.heap().free_units();
  dying([&] {
    const ClaimedRow claimed = tasks.claim(kAnswer, {})[0];
    TaskRow its = row_of(*store, kAnswer, claimed, kLengths);
    const bool begun = tasks.begin(Write::put, kAnswer, {&its, 1}) == 1;
    return begun && tasks.release(kAnswer, std::span(&claimed, 1)) == 0;  // as another thread of it does
  });
  store->reap();
  no_problems(*store);
  CHECK_EQ(tasks.heap().free_units(), free);
  CHECK_EQ(tasks.word(keys[0].row, kAnswer).span, 0u);
}

TEST(a_process_that_dies_with_two_tasks_of_a_row_that_is_given_up_is_reclaimed) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 1);
  answer(*store, keys[0]);
  for (int death = 0; death < 3; ++death) {
    dying([&] {
      TaskRow reward = row_of(*store, kReward, tasks.claim(kReward, {})[0], kLengths);
      TaskRow ref = row_of(*store, kRef, tasks.claim(kRef, {})[0], kLengths);
      return tasks.begin(Write::put, kReward, {&reward, 1}) == 1 && tasks.begin(Write::put, kRef, {&ref, 1}) == 1;
    });
    CHECK_EQ(store->reap(), 1u);
    no_problems(*store);
  }
  CHECK_EQ(tasks.table().given_up.load(), 1u);
  CHECK_EQ(store->counts().free, 16u);
  CHECK_EQ(tasks.heap().free_units(), tasks.heap().units() - 1);
}

TEST(an_insert_without_room_wakes_nobody_and_keeps_the_order_of_rows) {
  auto store = made(options_of_tests(16, 16 << 10));
  Tasks& tasks = *store->tasks();
  insert(*store, 1, 1500);
  const uint32_t next = tasks.table().next_row, changes = tasks.table().space_changes.load();
  std::vector<TaskRow> rows(2, row_of(*store, 0, {kNoRow, 0, 0}, {1500}));
  CHECK(!tasks.begin_insert(rows));
  CHECK_EQ(tasks.table().space_changes.load(), changes);
  CHECK_EQ(tasks.table().next_row, next);
  no_problems(*store);
  CHECK_EQ(store->counts().free, 15u);
}

TEST(prompts_leave_room_for_the_oldest_row) {
  auto store = made(options_of_tests(1000, 64 << 10));
  Tasks& tasks = *store->tasks();
  size_t rows = 0;
  while (!insert(*store, 1, 200).empty()) ++rows;
  CHECK(rows > 20 && rows < 1000);
  const auto claimed = tasks.claim(kAnswer, {.most = 3});
  TaskRow first = row_of(*store, kAnswer, claimed[0], {200, 400, 3});
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&first, 1}), 1u);
  if (testing::failures != 0) return;
  tasks.finish(Write::put, kAnswer, {&first, 1});
  // One that is too large for what prompts leave is told at once, though others have claims: those cannot free any.
  TaskRow large = row_of(*store, kAnswer, claimed[1], {200, 3000, 3});
  put(*store, kReward, tasks.claim(kReward, {})[0], {200, 400, 3}, 1);
  put(*store, kRef, tasks.claim(kRef, {})[0], {200, 400, 3}, 1);
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&large, 1}), 0u);
  CHECK(tasks.make_room(kAnswer, large) == Tasks::Room::wait);  // for what is trained on
  CHECK_EQ(train(*store), 1u);
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&large, 1}), 0u);
  CHECK(tasks.make_room(kAnswer, large) == Tasks::Room::never);
  no_problems(*store);
}

// A store of rows that are answered, three of which fill it.
constexpr uint32_t kTokens = 1000;
StoreOptions room_for_three() {
  return options_of_tests(8, 8 * 128 + 3 * (64 + 4032 + 64) + 2048);
}

TEST(a_claim_waits_while_others_rows_can_be_set_back_for_it) {
  auto store = made(room_for_three());
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 5);
  const auto claimed = tasks.claim(kAnswer, {.most = 5});
  for (const size_t i : {1u, 2u, 4u}) CHECK(put(*store, kAnswer, claimed[i], {5, kTokens, 3}, 1));
  // All that could be set back is claimed; then the newest row is released, and its turn comes before any claim's.
  auto rewards = tasks.claim(kReward, {.most = 3});
  TaskRow oldest = row_of(*store, kAnswer, claimed[0], {5, kTokens, 3});
  CHECK(tasks.make_room(kAnswer, oldest) == Tasks::Room::wait);
  tasks.release(kReward, std::span(rewards).last(1));
  dying([&] {
    const ClaimedRow its = tasks.claim(kRef, {.most = 1})[0];
    TaskRow row = row_of(*store, kRef, its, {5, kTokens, 3});
    const auto room = tasks.make_room(kRef, row);
    return room == Tasks::Room::wait && tasks.owns(kRef, its) &&
           tasks.word(keys[4].row, kAnswer).state == TaskState::not_done;
  });
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&oldest, 1}), 1u);
  tasks.finish(Write::put, kAnswer, {&oldest, 1});
  store->reap();
  no_problems(*store);
}

TEST(a_rewrite_that_waits_does_not_keep_claims_from_giving_way) {
  auto store = made(room_for_three());
  Tasks& tasks = *store->tasks();
  insert(*store, 4);
  auto claimed = tasks.claim(kAnswer, {.most = 4});
  CHECK(put(*store, kAnswer, claimed[3], {5, kTokens, 3}, 1));
  const ClaimedRow newest = tasks.claim(kReward, {})[0];
  CHECK(put(*store, kReward, newest, {5, kTokens, 3}, 1));
  const ClaimedRow ref = tasks.claim(kRef, {})[0];  // so that it is not set back
  for (const size_t i : {1u, 2u}) CHECK(put(*store, kAnswer, claimed[i], {0, 900}, 1, Write::append, 2, 0));
  TaskRow rewrite{.row = newest.row, .generation = newest.generation, .units = 60, .lengths = {5, kTokens, 3}};
  CHECK(tasks.make_room(kReward, rewrite) == Tasks::Room::wait);
  TaskRow old = row_of(*store, kAnswer, claimed[0], {5, kTokens, 3});
  std::thread([&] { CHECK(tasks.make_room(kAnswer, old) == Tasks::Room::wait); }).join();
  TaskRow younger = row_of(*store, kAnswer, claimed[2], {0, 900}, 2);
  std::thread([&] { CHECK(tasks.make_room(kAnswer, younger) == Tasks::Room::given_up); }).join();
  CHECK(!tasks.owns(kAnswer, claimed[2]));
  CHECK(tasks.owns(kRef, ref));
  no_problems(*store);
}

TEST(who_got_room_tells_those_who_wait_behind) {
  auto store = made(room_for_three());
  Tasks& tasks = *store->tasks();
  insert(*store, 4);
  const auto claimed = tasks.claim(kAnswer, {.most = 4});
  for (const size_t i : {1u, 2u, 3u}) CHECK(put(*store, kAnswer, claimed[i], {5, kTokens, 3}, 1));
  const auto rewards = tasks.claim(kReward, {.most = 3});
  TaskRow row = row_of(*store, kAnswer, claimed[0], {5, kTokens, 3});
  CHECK(tasks.make_room(kAnswer, row) == Tasks::Room::wait);
  std::vector<TaskRow> fresh(1, row_of(*store, 0, {kNoRow, 0, 0}, {5}));
  CHECK(!tasks.begin_insert(fresh));
  tasks.drop(kReward, std::span(rewards).first(1));
  const uint32_t changes = tasks.table().space_changes.load();
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&row, 1}), 1u);
  CHECK(tasks.table().space_changes.load() != changes);
  CHECK(tasks.begin_insert(fresh));
}

TEST(room_is_not_made_for_a_claim_that_is_lost) {
  auto store = made(room_for_three());
  Tasks& tasks = *store->tasks();
  insert(*store, 4);
  auto claimed = tasks.claim(kAnswer, {.most = 4});
  for (const size_t i : {0u, 1u, 2u}) CHECK(put(*store, kAnswer, claimed[i], {5, kTokens, 3}, 1));
  const auto rewards = tasks.claim(kReward, {.most = 3});
  TaskRow late = row_of(*store, kAnswer, claimed[3], {5, kTokens, 3});
  tasks.release(kAnswer, std::span(&claimed[3], 1));
  const ClaimedRow again = tasks.claim(kAnswer, {})[0];
  TaskRow old = row_of(*store, kReward, rewards[0], {5, kTokens, 3});
  old.units = late.units;
  std::thread([&] { CHECK(tasks.make_room(kReward, old) == Tasks::Room::wait); }).join();
  CHECK(tasks.make_room(kAnswer, late) == Tasks::Room::given_up);
  CHECK(tasks.owns(kAnswer, again));
}

// A process that dies between the mark of its span and the word leaves a word that readers have seen before.
TEST(readers_find_a_word_changed_after_a_rewrite_whose_process_died) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 1);
  answer(*store, keys[0]);
  CHECK(put(*store, kReward, tasks.claim(kReward, {})[0], kLengths, 2));
  TaskRow begun = row_of(*store, kReward, keys[0], kLengths);
  CHECK_EQ(tasks.begin(Write::rewrite, kReward, {&begun, 1}), 1u);
  const uint64_t seen = tasks.words(keys[0].row)[kReward].load(), old = tasks.filled(TaskWord::of(seen));
  tasks.heap().head(begun.span)->mark.store(1);
  store->rebuild();
  no_problems(*store);
  CHECK(tasks.filled(tasks.word(keys[0].row, kReward)) != old);
  CHECK(tasks.words(keys[0].row)[kReward].load() != seen);
}

TEST(what_took_effect_cannot_be_abandoned) {
  auto store = made();
  Tasks& tasks = *store->tasks();
  const auto keys = insert(*store, 1);
  TaskRow row = row_of(*store, kAnswer, tasks.claim(kAnswer, {})[0], kLengths);
  CHECK_EQ(tasks.begin(Write::put, kAnswer, {&row, 1}), 1u);
  tasks.finish(Write::put, kAnswer, {&row, 1});
  tasks.abandon(kAnswer, {&row, 1});
  CHECK(tasks.filled(tasks.word(keys[0].row, kAnswer)) != 0);
  no_problems(*store);
}

TEST(no_loop_ends_while_the_counts_are_made_anew) {
  auto store = made(options_of_tests(2048));
  Tasks& tasks = *store->tasks();
  insert(*store, 3);
  tasks.end_inserts();
  std::atomic<bool> stop{false};
  std::thread rebuilder([&] {
    while (!stop) store->rebuild();
  });
  size_t over = 0;
  const uint64_t began = monotonic_ns();
  while (over == 0 && testing::within(began, 0.2)) over += tasks.is_over(kReward);
  stop = true;
  rebuilder.join();
  CHECK_EQ(over, 0u);
}

// Damage by another process: an error or a store in good order, whatever is called, and no circle is walked for ever.
TEST(damaged_words_and_spans_are_errors) {
  const auto head = [](Store& store, uint32_t row, uint32_t task) {
    return store.tasks()->heap().head(store.tasks()->word(row, task).span);
  };
  const std::function<void(Store&)> damages[] = {
      [&](Store& s) { head(s, 0, 0)->next.store(s.tasks()->word(0, 0).span); },  // a circle of one
      [&](Store& s) { head(s, 2, kAnswer)->next.store(s.tasks()->word(2, kAnswer).span); },
      [&](Store& s) { head(s, 0, kAnswer)->next.store(s.tasks()->word(1, kAnswer).span); },  // into another's chain
      [&](Store& s) { s.tasks()->words(0)[kAnswer].store(s.tasks()->words(1)[kAnswer].load()); },
      [&](Store& s) { s.tasks()->words(0)[kAnswer].store(uint64_t{2} << 62 | kSpanUnits); },  // outside
      [&](Store& s) { head(s, 0, kAnswer)->next.store(s.tasks()->heap().units()); },
      [&](Store& s) { head(s, 0, kAnswer)->size.store(kSpanUnits); },  // escapes
      [&](Store& s) { head(s, 0, kAnswer)->size.fetch_add(1); },       // overlaps the next
      [&](Store& s) { head(s, 0, kAnswer)->size.store(0); },
      [&](Store& s) { head(s, 0, kAnswer)->mark.store(0xffffff00); },  // filled by nobody
      [&](Store& s) { head(s, 0, kAnswer)->lengths[1].store(~0u); },
      [&](Store& s) { s.tasks()->words(3)[kAnswer].store(uint64_t{3} << 62 | 12345); },                // taken
      [&](Store& s) { s.tasks()->words(3)[kReward].store(uint64_t{1} << 62 | uint64_t{200} << 51); },  // by nobody
      [&](Store& s) { s.tasks()->words(3)[kTrain].store(uint64_t{2} << 62); },
      [&](Store& s) { s.tasks()->table().next_row = ~0u; },
      [&](Store& s) { s.tasks()->table().figures[kAnswer].due.store(~0u); },
      [&](Store& s) {
        s.tasks()->table().waiters[3].place.store(1);
        s.tasks()->table().waiter_count.store(9);
      },
      [&](Store& s) {
        s.tasks()->table().waiters[3].slot = 0xffff;
        s.tasks()->table().waiters[3].place.store(1);
      },
      [&](Store& s) { s.tasks()->table().index.free_units.store(kSpanUnits); },
      [&](Store& s) {
        for (auto& block : s.tasks()->table().index.blocks) block.store(7);
      },
      [&](Store& s) { s.tasks()->table().index.words.store(~uint64_t{0}); },
      [&](Store& s) { s.status()[0].previous = 0, s.control().order_tail = 0; },  // a circle of the order
  };
  for (const auto& damage : damages) {
    auto store = made(options_of_tests(8, 8 << 10));
    Tasks& tasks = *store->tasks();
    insert(*store, 5);
    auto claimed = tasks.claim(kAnswer, {.most = 3});
    for (const size_t i : {0u, 1u}) put(*store, kAnswer, claimed[i], kLengths, 1);
    for (int i = 0; i < 2; ++i) put(*store, kAnswer, claimed[2], {0, 10}, 1, Write::append, 2);
    damage(*store);
    const auto attempt = [](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::corrupt || error.kind == ErrorKind::schema || error.kind == ErrorKind::full ||
              error.kind == ErrorKind::no_space);
      }
    };
    for (int round = 0; round < 2; ++round) {
      attempt([&] { insert(*store, 1); });
      for (uint32_t task = 1; task < kTrain; ++task) {
        attempt([&] {
          for (const ClaimedRow& each : tasks.claim(task, {.most = 2})) {
            TaskRow row = row_of(*store, task, each, kLengths);
            if (tasks.begin(Write::put, task, {&row, 1}) == 1) tasks.finish(Write::put, task, {&row, 1});
          }
        });
      }
      attempt([&] { tasks.make_room(kAnswer, row_of(*store, kAnswer, claimed[2], {5, 1700, 3})); });
      attempt([&] { tasks.stop_waiting(); });
      attempt([&] { tasks.release(kAnswer, claimed); });
      attempt([&] { train(*store); });
      bool rebuilt = false;
      attempt([&] { store->rebuild(), rebuilt = true; });
      if (rebuilt) no_problems(*store);
    }
    attempt([&] { store->close(); });
    store->unlink();  // what is damaged is left to whoever opens it next
  }
}

// Threads put, append to, release and drop the same claims, others wait, and the store is closed meanwhile.
TEST(threads_that_share_claims_do_no_harm_and_end_when_the_store_is_closed) {
  for (unsigned round = 0; round < 3; ++round) {
    auto store = made(options_of_tests(8, 24 << 10));
    Tasks& tasks = *store->tasks();
    std::mutex shared_mutex;
    std::array<ClaimedRow, kTrain> shared{};  // the last claim of each task
    std::atomic<size_t> calls{0}, puts{0};
    const auto one_call = [&](std::mt19937& random) {
      const Store::Call call(*store);
      const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
      const auto task = static_cast<uint32_t>(1 + below(3));
      const size_t what = below(12);
      if (what < 2) {
        insert(*store, 1 + below(2));
        return;
      }
      if (what == 2) {
        train(*store, 2);
        return;
      }
      if (what < 6) {
        const auto claimed = tasks.claim(task, {});
        const std::lock_guard lock(shared_mutex);
        if (!claimed.empty()) shared[task] = claimed[0];
        return;
      }
      ClaimedRow row;
      {
        const std::lock_guard lock(shared_mutex);
        row = shared[task];
      }
      if (!tasks.owns(task, row)) return;
      if (what == 6) {
        tasks.release(task, {&row, 1});
      } else if (what == 7 && below(4) == 0) {
        tasks.drop(task, {&row, 1});
      } else if (what < 9 && task == kAnswer) {
        put(*store, task, row, {0, static_cast<uint32_t>(100 + below(300))}, 1, Write::append, 2);
      } else {
        puts += put(*store, task, row, {5, 30, 3}, 2);
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        std::mt19937 random(round * 10 + i);
        for (;; ++calls) {
          try {
            one_call(random);
          } catch (const Error& error) {
            if (error.kind == ErrorKind::closed) return;
            // A row that was put meanwhile has other lengths than those that are given, or an answer has no room.
            CHECK(error.kind == ErrorKind::schema || error.kind == ErrorKind::no_space);
          }
        }
      });
    }
    for (const bool space : {false, true}) {
      threads.emplace_back([&, space] {
        try {
          for (;;) {
            const Store::Call call(*store);
            const auto& changes = space ? tasks.table().space_changes : tasks.table().figures[kRef].changes;
            const uint32_t seen = changes.load();
            space ? tasks.await_space(seen, 60) : tasks.await_due(kRef, seen, 60);
          }
        } catch (const Error& error) {
          CHECK(error.kind == ErrorKind::closed);
        }
      });
    }
    for (const uint64_t began = monotonic_ns(); puts < 30 && testing::within(began, 10);) ::usleep(1000);
    for (int i = 0; i < 5; ++i) no_problems(*store);
    const uint64_t began = monotonic_ns();
    store->close();
    for (std::thread& thread : threads) thread.join();
    CHECK(testing::within(began, 2));
    CHECK(puts >= 30);
  }
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
                tasks.abandon(task, {&row, 1});
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
