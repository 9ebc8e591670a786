// Death after every relevant instruction of the calls of tasks (tests/support/stepped.h), and at random.
//
// The survivor must find consistent state; what was done is done, what was not begun can be done; and when all tasks of
// all rows were done and the rows are freed, every row and every unit of the spans is free.

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <random>

#include "base/clock.h"
#include "tests/support/stepped.h"
#include "tests/support/task_rows.h"

namespace geartrain {
namespace {

constexpr uint32_t kNumber = 77;  // what the survivor fills spans with; the child has others

bool spans_are_whole(const Store& store) {
  const Tasks& tasks = *store.tasks();
  bool whole = true;
  for (uint32_t row = 0; row < store.header().capacity; ++row) {
    for (uint32_t task = 1; task < kTrain; ++task) {
      const TaskWord word = tasks.word(row, task);
      const uint64_t span = word.state == TaskState::done ? tasks.filled(word) : 0;
      if (span == 0) continue;
      const auto* words = reinterpret_cast<const uint32_t*>(tasks.heap().head(span));
      whole &= is_filled_with(store, span, words[16]);
    }
  }
  return whole;
}

// Does all that is left to do, and frees all rows.
void run_to_the_end(Store& store) {
  Tasks& tasks = *store.tasks();
  for (int round = 0; round < 20; ++round) {
    for (uint32_t task = kAnswer; task < kTrain; ++task) {
      for (const ClaimedRow& each : tasks.claim(task, {.most = 100})) put(store, task, each, kLengths, kNumber);
    }
    train(store);
  }
}

struct Scenario {
  const char* name;
  std::function<std::function<void()>(Store&)> prepare;
  StoreOptions options = options_of_tests(8, 16 << 10);
  bool may_lose_rows = false;   // it drops some, or the death is one too many
  bool may_undo_tasks = false;  // it sets rows back
};

// Rows in every state: 0 and 1 only inserted, 2 with two appends by a claim that was released, 3 answered, 4 with a
// reward, 5 finished.
std::unique_ptr<Store> store_before(const StoreOptions& options) {
  auto store = made(options);
  Tasks& tasks = *store->tasks();
  insert(*store, 6);
  auto claimed = tasks.claim(kAnswer, {.most = 6});
  tasks.release(kAnswer, std::span(claimed).first(2));
  for (uint32_t i = 0; i < 2; ++i) put(*store, kAnswer, claimed[2], {0, 10}, kNumber, Write::append, 2, i);
  tasks.release(kAnswer, std::span(claimed).subspan(2, 1));
  for (size_t i = 3; i < 6; ++i) put(*store, kAnswer, claimed[i], kLengths, kNumber);
  auto rewards = tasks.claim(kReward, {.most = 3}), refs = tasks.claim(kRef, {.most = 3});
  tasks.release(kReward, std::span(rewards).first(1));
  tasks.release(kRef, std::span(refs).first(2));
  for (size_t i = 1; i < 3; ++i) put(*store, kReward, rewards[i], kLengths, kNumber);
  put(*store, kRef, refs[2], kLengths, kNumber);
  return store;
}

void check_survivor(Store& store, const Scenario& scenario, size_t instruction) {
  const auto complain = [&](const auto&... parts) {
    testing::failed(scenario.name, static_cast<int>(instruction), parts...);
  };
  store.reap();
  for (const std::string& problem : store.audit()) complain(problem);
  Tasks& tasks = *store.tasks();
  const uint64_t rows = tasks.table().under_way.load() + store.committed_count();
  if (!scenario.may_lose_rows && rows < 6) complain("of 6 rows ", rows, " are there");
  uint64_t done[kTrain] = {};
  for (uint32_t row = 0; row < store.header().capacity; ++row) {
    for (uint32_t task = 0; task < kTrain; ++task) done[task] += tasks.word(row, task).state == TaskState::done;
  }
  const uint64_t before[] = {6, 3, 2, 1};
  for (uint32_t task = 1; task < kTrain && !scenario.may_lose_rows && !scenario.may_undo_tasks; ++task) {
    if (done[task] < before[task]) complain("task ", task, " was done for ", before[task], ", is for ", done[task]);
  }
  if (!spans_are_whole(store)) complain("a span is torn");
  run_to_the_end(store);
  for (const std::string& problem : store.audit()) complain("afterwards: ", problem);
  if (store.counts().free != store.header().capacity) complain("only ", store.counts().free, " rows are free");
  if (tasks.heap().free_units() != tasks.heap().units() - 1) complain("units are lost");
}

std::vector<Scenario> scenarios() {
  static std::vector<TaskRow> rows;
  static std::vector<ClaimedRow> claimed;
  static std::vector<uint32_t> generations;
  const auto begun = [](Store& store, Write write, uint32_t task, AxisLengths lengths, uint8_t axis) {
    claimed = store.tasks()->claim(task, {.most = 2});
    rows.clear();
    for (const ClaimedRow& each : claimed) rows.push_back(row_of(store, task, each, lengths, axis));
    if (store.tasks()->begin(write, task, rows, axis) != rows.size()) fail(ErrorKind::full, "no room");
    for (const TaskRow& each : rows) fill_with(store, each, 5);
  };
  const auto begin_insert = [](Store& store) -> std::function<void()> {
    rows.assign(2, row_of(store, 0, {kNoRow, 0, 0}, {5}));
    return [&store] { store.tasks()->begin_insert(rows); };
  };
  const auto finish_insert = [](Store& store) -> std::function<void()> {
    rows.assign(2, row_of(store, 0, {kNoRow, 0, 0}, {5}));
    generations.resize(2);
    store.tasks()->begin_insert(rows);
    return [&store] { store.tasks()->finish_insert(rows, {}, generations); };
  };
  const auto abandon_insert = [](Store& store) -> std::function<void()> {
    rows.assign(2, row_of(store, 0, {kNoRow, 0, 0}, {5}));
    store.tasks()->begin_insert(rows);
    return [&store] { store.tasks()->abandon_insert(rows); };
  };
  const auto claim = [](Store& store) -> std::function<void()> {
    return [&store] { store.tasks()->claim(kAnswer, {.most = 3}); };
  };
  const auto begin_put = [](Store& store) -> std::function<void()> {
    claimed = store.tasks()->claim(kAnswer, {.most = 3});
    rows.clear();
    for (const ClaimedRow& each : claimed) rows.push_back(row_of(store, kAnswer, each, kLengths));
    return [&store] { store.tasks()->begin(Write::put, kAnswer, rows); };
  };
  const auto finish_put = [begun](uint32_t task) {
    return [begun, task](Store& store) -> std::function<void()> {
      begun(store, Write::put, task, kLengths, 0);
      return [&store, task] { store.tasks()->finish(Write::put, task, rows); };
    };
  };
  const auto finish_append = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::append, kAnswer, {0, 12}, 2);
    return [&store] { store.tasks()->finish(Write::append, kAnswer, rows); };
  };
  // Of a row with appended spans.
  const auto finish_merged = [](Store& store) -> std::function<void()> {
    claimed = store.tasks()->claim(kAnswer, {.most = 3});
    put(store, kAnswer, claimed[2], {0, 9}, 6, Write::append, 2, 4);
    rows.assign(1, row_of(store, kAnswer, claimed[2], kLengths));
    store.tasks()->begin(Write::put, kAnswer, rows);
    fill_with(store, rows[0], 5);
    // Another append, begun later, comes to lie in front.
    static TaskRow late;
    late = row_of(store, kAnswer, claimed[2], {0, 3}, 2);
    store.tasks()->begin(Write::append, kAnswer, {&late, 1}, 2);
    return [&store] {
      store.tasks()->finish(Write::put, kAnswer, rows);
      store.tasks()->finish(Write::append, kAnswer, {&late, 1});
    };
  };
  const auto rewrite = [](Store& store) -> std::function<void()> {
    rows.clear();
    for (uint32_t row = 0; row < store.header().capacity; ++row) {
      const TaskWord word = store.tasks()->word(row, kReward);
      if (word.state != TaskState::done) continue;
      const uint32_t generation = generation_of(store.words()[row].load()) | 1;
      rows.push_back(row_of(store, kReward, {row, generation, 0}, kLengths));
    }
    return [&store] {
      store.tasks()->begin(Write::rewrite, kReward, rows);
      for (const TaskRow& each : rows) {
        auto* words = reinterpret_cast<uint32_t*>(store.tasks()->heap().head(each.span));
        for (uint64_t i = 16; i < each.units * 16; ++i) words[i] = 5;
      }
      store.tasks()->finish(Write::rewrite, kReward, rows);
    };
  };
  const auto release = [](Store& store) -> std::function<void()> {
    claimed = store.tasks()->claim(kAnswer, {.most = 3});
    put(store, kAnswer, claimed[0], {0, 12}, 5, Write::append, 2, 0);
    return [&store] { store.tasks()->release(kAnswer, claimed); };
  };
  const auto drop = [](Store& store) -> std::function<void()> {
    claimed = store.tasks()->claim(kAnswer, {.most = 3});
    return [&store] { store.tasks()->drop(kAnswer, claimed); };
  };
  const auto abandon = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::put, kAnswer, kLengths, 0);
    return [&store] { store.tasks()->abandon(Write::put, kAnswer, rows); };
  };
  const auto dropped_under_a_writer = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::put, kAnswer, kLengths, 0);
    return [&store] {
      for (const TaskRow& each : rows) store.remove({&each.row, 1}, {&each.generation, 1});
      store.tasks()->finish(Write::put, kAnswer, rows);
    };
  };
  const auto remove = [](Store& store) -> std::function<void()> {
    static std::vector<uint32_t> all, theirs;
    all.clear(), theirs.clear();
    for (uint32_t row = 0; row < 6; ++row) {
      all.push_back(row);
      theirs.push_back(generation_of(store.words()[row].load()) | 1);
    }
    return [&store] { store.remove(all, theirs); };
  };
  const auto set_back = [](Store& store) -> std::function<void()> {
    claimed = store.tasks()->claim(kAnswer, {.most = 1});
    rows.assign(1, row_of(store, kAnswer, claimed[0], {5, 2800, 3}));
    return [&store] { store.tasks()->make_room(kAnswer, rows[0]); };
  };
  const auto train_one = [](Store& store) -> std::function<void()> {
    static std::vector<uint32_t> all, theirs;
    static std::vector<uint8_t> taken(1);
    store.keys(&all, &theirs);
    return [&store] {
      store.count_samples(all, theirs, taken);
      store.release_exhausted(all, theirs);
    };
  };
  const auto rebuild = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::put, kAnswer, kLengths, 0);
    return [&store] { store.rebuild(); };
  };
  const auto reap = [begun](Store& store) -> std::function<void()> {
    const pid_t dying = ::fork();
    if (dying == 0) {
      store.reap();
      begun(store, Write::put, kAnswer, kLengths, 0);
      store.tasks()->claim(kRef, {.most = 1});
      ::_exit(0);
    }
    ::waitpid(dying, nullptr, 0);
    return [&store] { store.reap(); };
  };
  return {
      {"begin inserts", begin_insert},
      {"finish inserts", finish_insert},
      {"abandon inserts", abandon_insert},
      {"claim", claim},
      {"begin puts", begin_put},
      {"finish puts", finish_put(kAnswer)},
      {"finish puts of the last task but one", finish_put(kRef)},
      {"finish appends", finish_append},
      {"finish a put of what was appended", finish_merged},
      {"rewrite", rewrite},
      {"release", release},
      {"release, keeping nothing", release, options_of_tests(8, 16 << 10, false)},
      {"drop", drop, options_of_tests(8, 16 << 10), true},
      {"abandon puts", abandon},
      {"drop under a writer", dropped_under_a_writer, options_of_tests(8, 16 << 10), true},
      {"delete", remove, options_of_tests(8, 16 << 10), true},
      {"set back", set_back, options_of_tests(8, 16 << 10), false, true},
      {"train", train_one, options_of_tests(8, 16 << 10), true},
      {"rebuild", rebuild},
      {"reap", reap},
  };
}

TEST(a_process_killed_after_any_instruction_loses_nothing_and_blocks_no_one) {
  if (kThreadSanitizer) return;
  const char* wanted = std::getenv("GEARTRAIN_KILLED_CALLS");  // a part of their names
  for (const Scenario& scenario : scenarios()) {
    if (wanted != nullptr && std::strstr(scenario.name, wanted) == nullptr) continue;
    const bool traced = kill_in_every_state(
        scenario.name, [&] { return store_before(scenario.options); }, scenario.prepare,
        [&](Store& store, size_t instruction) { check_survivor(store, scenario, instruction); },
        [](const Store& store) { return store.header().segment_bytes; });
    if (!traced) {
      std::printf("     skipped: this machine does not let a process trace its child\n");
      return;
    }
  }
}

// What became of each inserted row and task, in memory that no death takes back.
struct Ledger {
  std::atomic<uint64_t> inserted, trained, dropped, claims, twice;
  std::atomic<uint8_t> puts[1 << 22];  // by (insert's number) * 4 + task
};

// One worker: inserts, claims of any task, appends, puts, drops and training, until it is killed or told to stop.
void work(Store& store, Ledger& ledger, unsigned seed, const std::atomic<bool>& stop) {
  Tasks& tasks = *store.tasks();
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const auto number_of = [&](uint32_t row) { return *reinterpret_cast<const uint64_t*>(store.block(0, row)); };
  // What is counted is counted right behind the call that did it. Deaths in between leave a count that is one too low.
  while (!stop) {
    const size_t what = below(10);
    if (what < 2) {
      std::vector<TaskRow> rows(1 + below(3), row_of(store, 0, {kNoRow, 0, 0}, {static_cast<uint32_t>(below(60))}));
      if (!tasks.begin_insert(rows)) continue;
      for (const TaskRow& each : rows) *reinterpret_cast<uint64_t*>(store.block(0, each.row)) = ++ledger.inserted;
      std::vector<uint32_t> generations(rows.size());
      tasks.finish_insert(rows, {}, generations);
    } else if (what < 8) {
      const auto task = static_cast<uint32_t>(1 + below(3));
      for (const ClaimedRow& each : tasks.claim(task, {.most = 1 + below(4)})) {
        ++ledger.claims;
        AxisLengths lengths;
        if (!tasks.lengths(each.row, each.generation, &lengths)) continue;
        const uint64_t number = number_of(each.row);
        if (task == kAnswer) {
          lengths[1] = static_cast<uint32_t>(below(300)), lengths[2] = 3;
          for (size_t i = below(3); i != 0; --i) {
            TaskRow part = row_of(store, task, each, {0, static_cast<uint32_t>(below(40))}, 2);
            if (tasks.begin(Write::append, task, {&part, 1}, 2) == 1) tasks.finish(Write::append, task, {&part, 1});
          }
        }
        const size_t how = below(20);
        if (how == 0) {
          if (tasks.drop(task, std::span(&each, 1)) == 0) ++ledger.dropped;
          continue;
        }
        TaskRow row = row_of(store, task, each, lengths);
        if (how < 3 || tasks.begin(Write::put, task, {&row, 1}) == 0) {
          tasks.stop_waiting();
          tasks.release(task, std::span(&each, 1));
          continue;
        }
        if (row.skipped) continue;
        fill_with(store, row, static_cast<uint32_t>(number));
        tasks.finish(Write::put, task, {&row, 1});
        if (!row.skipped && number * 4 + task < sizeof ledger.puts) {
          if (ledger.puts[number * 4 + task].fetch_add(1) != 0) ++ledger.twice;
        }
      }
    } else {
      std::vector<uint32_t> rows, generations;
      store.keys(&rows, &generations);
      rows.resize(std::min<size_t>(rows.size(), 4)), generations.resize(rows.size());
      std::vector<uint8_t> taken(rows.size());
      store.count_samples(rows, generations, taken);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (taken[i] == 0) continue;
        ++ledger.trained;
        const uint64_t number = number_of(rows[i]);
        for (uint32_t task = 1; task < kTrain; ++task) {
          const uint64_t span = tasks.filled(tasks.word(rows[i], task));
          if (span == 0 || !is_filled_with(store, span, static_cast<uint32_t>(number))) ++ledger.twice;
        }
      }
      store.release_exhausted(rows, generations);
    }
  }
}

TEST(workers_that_are_killed_do_no_task_twice_and_lose_no_row) {
  if (kThreadSanitizer) return;
  void* shared = ::mmap(nullptr, sizeof(Ledger) + 64, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& ledger = *static_cast<Ledger*>(shared);
  auto& stop = *reinterpret_cast<std::atomic<bool>*>(static_cast<std::byte*>(shared) + sizeof(Ledger));
  const char* asked = std::getenv("GEARTRAIN_TASK_KILLS");
  const int kills = asked != nullptr ? std::atoi(asked) : kAddressSanitizer ? 20 : 150;
  StoreOptions options = options_of_tests(64, 128 << 10);
  auto store = made(options);
  std::mt19937 random(5);
  std::vector<pid_t> workers(6);
  unsigned seed = 0;
  const auto begin = [&] {
    const pid_t child = ::fork();
    if (child != 0) return child;
    try {
      work(*store, ledger, ++seed + static_cast<unsigned>(::getpid()), stop);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a worker: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  };
  for (pid_t& worker : workers) worker = begin();
  for (int kill = 0; kill < kills; ++kill) {
    ::usleep(2000 + random() % 8000);
    pid_t& worker = workers[random() % workers.size()];
    ::kill(worker, SIGKILL);
    int status = 0;
    ::waitpid(worker, &status, 0);
    CHECK(WIFSIGNALED(status));
    worker = begin();
    if (kill % 20 == 0) {
      store->reap();
      for (const std::string& problem : store->audit()) testing::failed(__FILE__, kill, problem);
    }
  }
  stop = true;
  for (const pid_t worker : workers) {
    int status = 0;
    ::waitpid(worker, &status, 0);
    CHECK_EQ(status, 0);
  }
  store->reap();
  no_problems(*store);
  Tasks& tasks = *store->tasks();
  CHECK_EQ(ledger.twice.load(), 0u);
  // What was inserted is there, or trained on, dropped, given up; the counts of those who died may be one too low each.
  const uint64_t there = tasks.table().under_way.load() + store->committed_count();
  const uint64_t inserted = store->control().counters.inserted.load();
  const uint64_t gone =
      store->control().counters.exhausted.load() + tasks.table().dropped.load() + tasks.table().given_up.load();
  CHECK(inserted <= there + gone + static_cast<uint64_t>(kills));
  CHECK(there + gone <= inserted + static_cast<uint64_t>(kills) * 3);
  CHECK(ledger.claims.load() > 100 && ledger.trained.load() > 10);
  std::printf("     %zu rows, %zu claims, %zu trained, %d kills\n", size_t(inserted), size_t(ledger.claims.load()),
              size_t(ledger.trained.load()), kills);
  ::munmap(shared, sizeof(Ledger) + 64);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
