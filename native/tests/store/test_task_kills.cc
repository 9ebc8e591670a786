// Death after every relevant instruction of the calls of tasks (tests/support/stepped.h), and at random.
//
// The survivor must find consistent state; what was done is done, what was not begun can be done; and when all tasks of
// all rows were done and the rows are freed, every row and every unit of the spans is free.

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/clock.h"
#include "tests/support/stepped.h"
#include "tests/support/task_rows.h"

namespace geartrain {
namespace {

constexpr uint64_t kStep = 3;     // of the batch that takes rows
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
  bool others_fill = false;     // the survivor was filling a span of row 3
};
TaskRow survivors;

// What is saved of each (row, task) of a store, its bytes included; and what to ask for to hear of later changes.
struct Saved {
  uint64_t next = 0;
  std::map<std::pair<uint32_t, uint32_t>, std::string> parts;
};

Saved saved_of(Store& store) {
  std::vector<SavedRow> rows;
  std::vector<SavedPart> parts;
  Saved found{.next = store.tasks()->changed(0, &rows, &parts), .parts = {}};
  for (const SavedPart& part : parts) {
    const std::array<uint64_t, 2> offsets{0, part.bytes};
    std::vector<std::byte> bytes(part.bytes);
    uint8_t ok = 0;
    store.tasks()->copy_parts({&part, 1}, offsets, bytes.data(), {&ok, 1});
    if (ok == 0) testing::failed(__FILE__, __LINE__, "a part that nobody changes cannot be copied");
    std::string& text = found.parts[{part.row, part.task}];
    text = message_of({part.generation, " ", int(part.state), " ", part.step, " ", part.place, " "});
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return found;
}
Saved before_the_call;

// Whoever asks for the changes since hears of all parts that are others now.
template <typename Complain>
void check_changes_are_told(Store& store, Complain&& complain) {
  const Saved now = saved_of(store);
  std::vector<SavedRow> rows;
  std::vector<SavedPart> parts;
  store.tasks()->changed(before_the_call.next, &rows, &parts);
  for (uint32_t row = 0; row < store.header().capacity; ++row) {
    const auto told = std::find_if(rows.begin(), rows.end(), [&](const SavedRow& each) { return each.row == row; });
    for (uint32_t task = 0; task <= kTrain; ++task) {
      const auto was = before_the_call.parts.find({row, task});
      const auto is = now.parts.find({row, task});
      const bool there = is != now.parts.end();
      if (there == (was != before_the_call.parts.end()) && (!there || is->second == was->second)) continue;
      const bool of_row = told != rows.end() && (told->state == RowState::free || told->state == RowState::writing);
      const bool of_part = std::any_of(parts.begin(), parts.end(), [&](const SavedPart& each) {
        return each.row == row && (each.task == task || (!there && each.task == 0));
      });
      if (!of_row && !of_part) complain("a change of row ", row, ", task ", task, " is not told");
    }
  }
}

// Rows in every state: 0 and 1 only inserted, 2 with two appends by a claim that was released, 3 answered, 4 with a
// reward, 5 finished.
std::unique_ptr<Store> store_before(const Scenario& scenario) {
  auto store = made(scenario.options);
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
  if (scenario.others_fill) {
    survivors = row_of(*store, kReward, tasks.claim(kReward, {})[0], kLengths);
    tasks.begin(Write::put, kReward, {&survivors, 1});
  }
  before_the_call = saved_of(*store);
  return store;
}

void check_survivor(Store& store, const Scenario& scenario, size_t instruction) {
  const auto complain = [&](const auto&... parts) {
    testing::failed(scenario.name, static_cast<int>(instruction), parts...);
  };
  store.reap();
  for (const std::string& problem : store.audit()) complain(problem);
  check_changes_are_told(store, complain);
  Tasks& tasks = *store.tasks();
  if (scenario.others_fill) {
    fill_with(store, survivors, kNumber);
    tasks.finish(Write::put, kReward, {&survivors, 1});
    for (const std::string& problem : store.audit()) complain("after the survivor's put: ", problem);
  }
  const uint64_t rows = tasks.table().under_way.load() + store.committed_count();
  if (tasks.in_flight() != rows + store.counts().writing) complain(tasks.in_flight(), " rows are in flight");
  const uint64_t there = rows + tasks.table().taken.load();
  if (!scenario.may_lose_rows && there < 6) complain("of 6 rows ", there, " are there");
  uint64_t done[kTrain] = {};
  for (uint32_t row = 0; row < store.header().capacity; ++row) {
    for (uint32_t task = 0; task < kTrain; ++task) done[task] += tasks.word(row, task).state == TaskState::done;
  }
  const uint64_t before[] = {6, 3, 2, 1};
  for (uint32_t task = 1; task < kTrain && !scenario.may_lose_rows && !scenario.may_undo_tasks; ++task) {
    if (done[task] < before[task]) complain("task ", task, " was done for ", before[task], ", is for ", done[task]);
  }
  if (!spans_are_whole(store)) complain("a span is torn");
  // What a batch has taken keeps its places, in whichever state; and is given back, or freed.
  std::vector<uint32_t> places;
  for (const Tasks::TakenRow& each : tasks.taken(kStep)) places.push_back(each.place);
  if (std::adjacent_find(places.begin(), places.end(), std::greater_equal<>()) != places.end()) {
    complain("two rows are taken for one place");
  }
  if (tasks.untake(kStep) != places.size()) complain("kept rows are lost");
  for (const std::string& problem : store.audit()) complain("untaken: ", problem);
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
    return [&store] { store.tasks()->abandon(kAnswer, rows); };
  };
  const auto dropped_under_a_writer = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::put, kAnswer, kLengths, 0);
    return [&store] {
      for (const TaskRow& each : rows) store.remove({&each.row, 1}, {&each.generation, 1});
      store.tasks()->finish(Write::put, kAnswer, rows);
    };
  };
  // It fills a span of the same row itself, has the row once that is gone, and ends first.
  const auto dropped_under_another = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::put, kRef, kLengths, 0);
    return [&store] {
      store.remove({&rows[0].row, 1}, {&rows[0].generation, 1});
      store.tasks()->finish(Write::put, kRef, rows);
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
  const auto finish_batch = [](Store& store) -> std::function<void()> {
    train(store);
    return [&store] { store.tasks()->finished(1); };
  };
  const auto say_version = [](Store& store) -> std::function<void()> {
    store.tasks()->advance(3);
    claimed = store.tasks()->claim(kAnswer, {.most = 3, .later = true});
    return [&store] { store.tasks()->say_version(kAnswer, claimed, 2); };
  };
  // Of a row with appended spans, one that is answered and one that is finished.
  const auto advance = [](Store& store) -> std::function<void()> {
    store.tasks()->set_limits({.in_flight = 8, .max_stale = 0});
    return [&store] { store.tasks()->advance(1); };
  };
  const auto put_stale = [begun](Store& store) -> std::function<void()> {
    begun(store, Write::put, kAnswer, kLengths, 0);
    store.tasks()->set_clock(1);
    store.tasks()->set_limits({.in_flight = 8, .max_stale = 0});
    return [&store] { store.tasks()->finish(Write::put, kAnswer, rows); };
  };
  // Rows 3 to 5 are finished and, but for the first `left`, taken.
  const auto take = [](Store& store, size_t left) {
    for (const uint32_t task : {kReward, kRef}) {
      for (const ClaimedRow& each : store.tasks()->claim(task, {.most = 3})) put(store, task, each, kLengths, kNumber);
    }
    static std::vector<uint32_t> all, theirs, places;
    static std::vector<uint8_t> taken;
    store.keys(&all, &theirs);
    if (all.size() != 3) fail(ErrorKind::schema, all.size(), " rows are finished");
    all.erase(all.begin(), all.begin() + static_cast<ptrdiff_t>(left));
    theirs.erase(theirs.begin(), theirs.begin() + static_cast<ptrdiff_t>(left));
    places = {2, 0, 1};
    places.resize(all.size());
    taken.resize(all.size());
    return [&store] {
      const Store::Taking by{kStep, places};
      store.count_samples(all, theirs, taken, &by);
    };
  };
  const auto take_batch = [take](Store& store) -> std::function<void()> { return take(store, 0); };
  const auto untake = [take](Store& store) -> std::function<void()> {
    take(store, 1)();
    return [&store] { store.tasks()->untake(kStep); };
  };
  const auto save = [take](Store& store) -> std::function<void()> {
    take(store, 1)();
    return [&store] { store.tasks()->free_taken(kStep); };
  };
  const auto delete_kept = [take](Store& store) -> std::function<void()> {
    take(store, 1)();
    static std::vector<uint32_t> one(1), its(1);
    one[0] = store.tasks()->taken(kStep)[0].row, its[0] = store.tasks()->taken(kStep)[0].generation;
    return [&store] { store.remove(one, its); };
  };
  const auto rebuild_kept = [take](Store& store) -> std::function<void()> {
    take(store, 1)();
    return [&store] { store.rebuild(); };
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
      {"drop under another's writer", dropped_under_another, options_of_tests(8, 16 << 10), true, false, true},
      {"delete", remove, options_of_tests(8, 16 << 10), true},
      {"set back", set_back, options_of_tests(8, 16 << 10), false, true},
      {"train", train_one, options_of_tests(8, 16 << 10), true},
      {"finish a batch", finish_batch, options_of_tests(8, 16 << 10), true},
      {"say a version", say_version},
      {"advance the clock", advance, options_of_tests(8, 16 << 10), true},
      {"put stale rows", put_stale, options_of_tests(8, 16 << 10), true},
      {"take for a batch", take_batch},
      {"untake", untake},
      {"free what a batch has taken", save, options_of_tests(8, 16 << 10), true},
      {"delete a kept row", delete_kept, options_of_tests(8, 16 << 10), true},
      {"rebuild with kept rows", rebuild_kept},
      {"rebuild", rebuild},
      {"reap", reap},
  };
}

TEST(a_process_killed_after_any_instruction_loses_nothing_and_blocks_no_one) {
  if (kThreadSanitizer) return;
  const char* wanted = std::getenv("GEARTRAIN_TEST_KILLED_CALLS");  // a part of their names
  for (const Scenario& scenario : scenarios()) {
    if (wanted != nullptr && std::strstr(scenario.name, wanted) == nullptr) continue;
    const bool traced = kill_in_every_state(
        scenario.name, [&] { return store_before(scenario); }, scenario.prepare,
        [&](Store& store, size_t instruction) { check_survivor(store, scenario, instruction); },
        [](const Store& store) { return store.header().segment_bytes; });
    if (!traced) {
      std::printf("     skipped: this machine does not let a process trace its child\n");
      return;
    }
  }
}

// What became of each row, by the number that its insert gave it, in memory that no death takes back. A worker notes
// before each call what it is about to do (Call) and after it what it did, so that only the one call that a kill
// interrupts is uncertain.
constexpr uint64_t kNumbers = 1 << 22;
enum Kind : uint8_t { kInserts = 1, kDrops = 2, kTrains = 4 };  // of puts: puts_of()
constexpr uint8_t puts_of(uint32_t task) {
  return static_cast<uint8_t>(16 << (task - 1));
}
struct Entry {
  std::atomic<uint8_t> puts[kTrain], inserted, trained, dropped, maybe;  // puts by task
};
struct Call {
  std::atomic<uint32_t> kinds, rows;
  uint64_t numbers[4];
};
constexpr size_t kMostWorkers = 16;
struct Ledger {
  std::atomic<bool> stop;
  std::atomic<uint64_t> next, claims, torn, trained;
  Call calls[kMostWorkers];
  Entry entries[kNumbers];
};

void train_some(Store& store, Ledger& ledger, Call& call, size_t most);

class Workers {
 public:
  using Work = std::function<void(Store&, Ledger&, Call&, unsigned seed)>;
  Workers(Store& store, size_t n, Work work) : store_(store), work_(std::move(work)), children_(n) {
    void* shared =
        ::mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ledger_ = static_cast<Ledger*>(shared);
    for (size_t i = 0; i < n; ++i) begin(i);
  }
  ~Workers() {
    for (const pid_t child : children_) {
      if (child != 0) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
    }
    ::munmap(ledger_, sizeof(Ledger));
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  Ledger& ledger() { return *ledger_; }
  // One of them, or the one that has the lock, if any has it soon. Another takes its place.
  void kill_one(std::mt19937& random, bool holder) {
    size_t at = random() % children_.size();
#if defined(__GLIBC__)
    const auto* owner = reinterpret_cast<const volatile int*>(&store_.control().mutex.__data.__owner);
    for (int looks = 0; holder && looks < 100'000; ++looks) {
      const auto found = std::find(children_.begin(), children_.end(), static_cast<pid_t>(*owner));
      if (found == children_.end()) continue;
      at = static_cast<size_t>(found - children_.begin());
      break;
    }
#endif
    ::kill(children_[at], SIGKILL);
    int status = 0;
    ::waitpid(children_[at], &status, 0);
    CHECK(WIFSIGNALED(status));
    Call& call = ledger_->calls[at];
    for (uint32_t i = 0; i < call.rows; ++i) {
      ledger_->entries[call.numbers[i]].maybe.fetch_or(static_cast<uint8_t>(call.kinds.load()));
    }
    call.rows = 0;
    begin(at);
  }
  void end() {
    ledger_->stop = true;
    const uint64_t began = monotonic_ns();
    Call call{};
    for (pid_t& child : children_) {
      int status = 0;
      pid_t ended = 0;
      while ((ended = ::waitpid(child, &status, WNOHANG)) == 0 && testing::within(began, 30)) {
        ::usleep(1000);
        train_some(store_, *ledger_, call, 1);  // the last worker may wait for the room that finished rows take
      }
      if (ended != child) testing::failed(__FILE__, __LINE__, "a worker does not end: ", store_.tasks()->occupancy());
      CHECK_EQ(status, 0);
      if (ended == child) child = 0;
    }
  }

 private:
  void begin(size_t at) {
    const unsigned seed = ++seeds_;
    const pid_t child = ::fork();
    if (child != 0) {
      children_[at] = child;
      return;
    }
    try {
      work_(store_, *ledger_, ledger_->calls[at], seed);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a worker: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }

  Store& store_;
  Work work_;
  std::vector<pid_t> children_;
  Ledger* ledger_;
  unsigned seeds_ = 0;
};

uint64_t number_of(const Store& store, uint32_t row) {
  return *reinterpret_cast<const uint64_t*>(store.block(0, row));
}

// A call, with what is known about it before and behind it. `did`: notes what was done.
template <typename Made, typename Did>
void noted(Call& call, uint8_t kinds, std::span<const uint64_t> numbers, Made&& made, Did&& did) {
  std::copy(numbers.begin(), numbers.end(), call.numbers);
  call.kinds = kinds;
  call.rows = static_cast<uint32_t>(numbers.size());
  made();
  did();
  call.rows = 0;
}

void insert_some(Store& store, Ledger& ledger, Call& call, size_t n, uint32_t prompt) {
  Tasks& tasks = *store.tasks();
  std::vector<TaskRow> rows(n, row_of(store, 0, {kNoRow, 0, 0}, {prompt}));
  if (ledger.next + 64 > kNumbers || !tasks.begin_insert(rows)) return;
  const uint64_t first = ledger.next.fetch_add(n) + 1;
  std::vector<uint64_t> numbers;
  for (size_t i = 0; i < n; ++i) {
    numbers.push_back(first + i);
    *reinterpret_cast<uint64_t*>(store.block(0, rows[i].row)) = first + i;
  }
  std::vector<uint32_t> generations(n);
  noted(
      call, kInserts, numbers, [&] { tasks.finish_insert(rows, {}, generations); },
      [&] {
        for (const uint64_t number : numbers) ++ledger.entries[number].inserted;
      });
}

void drop_one(Store& store, Ledger& ledger, Call& call, uint32_t task, const ClaimedRow& row) {
  const uint64_t number = number_of(store, row.row);
  size_t lost = 0;
  noted(
      call, kDrops, {&number, 1}, [&] { lost = store.tasks()->drop(task, {&row, 1}); },
      [&] { ledger.entries[number].dropped.fetch_add(lost == 0 ? 1 : 0); });
}

void train_some(Store& store, Ledger& ledger, Call& call, size_t most) {
  Tasks& tasks = *store.tasks();
  std::vector<uint32_t> all, of_all, rows, generations;
  std::vector<uint64_t> numbers;
  store.keys(&all, &of_all);
  for (size_t i = 0; i < all.size() && rows.size() < most; ++i) {
    const uint64_t number = number_of(store, all[i]);
    if (!tasks.has_key(all[i], of_all[i])) continue;
    rows.push_back(all[i]), generations.push_back(of_all[i]), numbers.push_back(number);
  }
  std::vector<uint8_t> taken(rows.size());
  noted(
      call, kTrains, numbers, [&] { store.count_samples(rows, generations, taken); },
      [&] {
        for (size_t i = 0; i < rows.size(); ++i) ledger.entries[numbers[i]].trained.fetch_add(taken[i]);
      });
  for (size_t i = 0; i < rows.size(); ++i) {
    ledger.trained += taken[i];
    for (uint32_t task = 1; task < kTrain && taken[i] != 0; ++task) {
      const uint64_t span = tasks.filled(tasks.word(rows[i], task));
      if (span == 0 || !is_filled_with(store, span, static_cast<uint32_t>(numbers[i]))) ++ledger.torn;
    }
  }
  store.release_exhausted(rows, generations);
}

// One worker: inserts, claims of any task, appends, puts, drops and training, until it is killed or told to stop.
void work(Store& store, Ledger& ledger, Call& call, unsigned seed) {
  Tasks& tasks = *store.tasks();
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  while (!ledger.stop) {
    const size_t what = below(10);
    if (what < 2) {
      insert_some(store, ledger, call, 1 + below(3), static_cast<uint32_t>(below(60)));
      continue;
    }
    if (what >= 8) {
      train_some(store, ledger, call, 4);
      continue;
    }
    const auto task = static_cast<uint32_t>(1 + below(3));
    for (const ClaimedRow& each : tasks.claim(task, {.most = 1 + below(4)})) {
      ++ledger.claims;
      AxisLengths lengths;
      if (!tasks.lengths(each.row, each.generation, &lengths)) {
        ledger.torn += tasks.owns(task, each);  // otherwise another process, which claimed another task, has dropped it
        continue;
      }
      const uint64_t number = number_of(store, each.row);
      if (task == kAnswer) {
        lengths[1] = static_cast<uint32_t>(below(300)), lengths[2] = 3;
        for (size_t i = below(3); i != 0; --i) {
          TaskRow part = row_of(store, task, each, {0, static_cast<uint32_t>(below(40))}, 2);
          if (tasks.begin(Write::append, task, {&part, 1}, 2) == 1) tasks.finish(Write::append, task, {&part, 1});
        }
      }
      const size_t how = below(20);
      if (how == 0) {
        drop_one(store, ledger, call, task, each);
        continue;
      }
      TaskRow row = row_of(store, task, each, lengths);
      if (how < 3 || tasks.begin(Write::put, task, {&row, 1}) == 0) {
        tasks.release(task, std::span(&each, 1));
        continue;
      }
      if (row.skipped) continue;
      fill_with(store, row, static_cast<uint32_t>(number));
      noted(
          call, puts_of(task), {&number, 1}, [&] { tasks.finish(Write::put, task, {&row, 1}); },
          [&] { ledger.entries[number].puts[task].fetch_add(row.skipped ? 0 : 1); });
    }
  }
}

// Each row that was inserted is there, or was trained on or dropped once; each of its tasks was done once.
void settle_accounts(Store& store, Ledger& ledger, size_t kills, bool tasks_are_done_again) {
  Tasks& tasks = *store.tasks();
  std::map<uint64_t, uint32_t> there;
  for (uint32_t row = 0; row < store.header().capacity; ++row) {
    const RowState state = store.status()[row].state;
    if (state != RowState::under_way && state != RowState::committed) continue;
    CHECK_EQ(++there[number_of(store, row)], 1u);
  }
  uint64_t uncertain = 0, lost = 0, twice = 0, undone = 0;
  for (uint64_t number = 1; number <= ledger.next; ++number) {
    const Entry& entry = ledger.entries[number];
    const auto maybe = [&](uint8_t kinds) { return (entry.maybe & kinds) != 0; };
    const uint32_t ends = there.count(number) + entry.trained + entry.dropped;
    uncertain += entry.maybe != 0;
    twice += ends > 1 || entry.inserted > 1;
    for (uint32_t task = 1; task < kTrain; ++task) {
      twice += entry.puts[task] > 1 && !tasks_are_done_again;
      undone += entry.trained != 0 && entry.puts[task] == 0 && !maybe(puts_of(task));
    }
    lost += entry.inserted != 0 && ends == 0 && !maybe(kDrops | kTrains);
  }
  CHECK_EQ(twice, 0u);
  CHECK_EQ(undone, 0u);
  CHECK_EQ(ledger.torn.load(), 0u);
  CHECK(uncertain <= 4 * kills);
  CHECK(lost <= tasks.table().given_up.load());  // after three deaths without progress
  std::printf(
      "     %zu rows, %zu claims, %zu trained; %zu kills, %zu of them in the lock, %zu rows uncertain, %zu given up\n",
      size_t(ledger.next), size_t(ledger.claims), size_t(ledger.trained), kills,
      size_t(store.control().counters.repairs), size_t(uncertain), size_t(lost));
}

size_t asked_for(const char* name, size_t otherwise) {
  const char* asked = std::getenv(name);
  return asked != nullptr ? static_cast<size_t>(std::atoll(asked)) : otherwise;
}

// GEARTRAIN_TEST_TASK_KILLS=2000, or GEARTRAIN_TEST_TASK_CLAIMS=1000000 for at least so many of both.
TEST(workers_that_are_killed_do_no_task_twice_and_lose_no_row) {
  if (kThreadSanitizer) return;
  const size_t kills = asked_for("GEARTRAIN_TEST_TASK_KILLS", kAddressSanitizer ? 20 : 150);
  const size_t claims = asked_for("GEARTRAIN_TEST_TASK_CLAIMS", 0);
  auto store = made(options_of_tests(64, 128 << 10));
  Workers workers(*store, claims != 0 ? kMostWorkers : 6, work);
  std::mt19937 random(5);
  size_t killed = 0;
  uint64_t seen = 0, seen_ns = monotonic_ns();
  while (killed < kills || workers.ledger().claims < claims) {
    ::usleep(2000 + random() % 8000);
    workers.kill_one(random, killed % 2 == 0);
    if (workers.ledger().claims != seen) seen = workers.ledger().claims, seen_ns = monotonic_ns();
    if (++killed % 20 == 0) {
      store->reap();
      no_problems(*store);
    }
    CHECK(testing::within(seen_ns, 20));
    if (testing::failures != 0) return;
  }
  workers.end();
  store->reap();
  no_problems(*store);
  settle_accounts(*store, workers.ledger(), killed, false);
  CHECK(workers.ledger().claims > 100 && workers.ledger().trained > 10);
}

// Answers that grow until the region is full, by workers that wait for room.
void grow(Store& store, Ledger& ledger, Call& call, unsigned seed) {
  Tasks& tasks = *store.tasks();
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  while (!ledger.stop) {
    const size_t what = below(10);
    if (what < 2) {
      insert_some(store, ledger, call, 1, static_cast<uint32_t>(1 + below(20)));
    } else if (what == 9) {
      train_some(store, ledger, call, 2);
    } else {
      const uint32_t task = what < 6 ? kAnswer : what == 6 ? kReward : kRef;
      const std::vector<ClaimedRow> claimed = tasks.claim(task, {});
      if (claimed.empty()) continue;
      ++ledger.claims;
      const ClaimedRow row = claimed[0];
      const uint64_t number = number_of(store, row.row);
      AxisLengths lengths;
      if (!tasks.lengths(row.row, row.generation, &lengths)) continue;
      bool mine = true;
      if (task == kAnswer) {
        lengths[1] = 0, lengths[2] = 3;
        for (size_t i = 1 + below(4); i != 0 && mine && !ledger.stop; --i) {
          const auto tokens = static_cast<uint32_t>(100 + below(300));
          mine = put(store, task, row, {0, tokens}, 1, Write::append, 2);
          lengths[1] += tokens;
        }
        if (!mine) continue;
        if (below(3) == 0) {
          drop_one(store, ledger, call, task, row);
          continue;
        }
      }
      if (ledger.stop) {
        tasks.release(task, {&row, 1});
        continue;
      }
      noted(
          call, puts_of(task), {&number, 1},
          [&] { mine = put(store, task, row, lengths, static_cast<uint32_t>(number)); },
          [&] { ledger.entries[number].puts[task].fetch_add(mine ? 1 : 0); });
    }
  }
}

TEST(a_full_region_of_growing_rows_is_never_stuck_and_the_oldest_come_through) {
  if (kThreadSanitizer) return;
  const size_t rows = asked_for("GEARTRAIN_TEST_TASK_ROWS", kAddressSanitizer ? 30 : 300);
  auto store = made(options_of_tests(8, 32 << 10));  // an answer and what it is merged from take up to 14 KB
  Workers workers(*store, 6, grow);
  Ledger& ledger = workers.ledger();
  std::mt19937 random(6);
  const TaskTable& table = store->tasks()->table();
  uint64_t oldest = 0, oldest_ns = monotonic_ns();
  double longest_s = 0;
  size_t killed = 0;
  while (ledger.trained < rows || killed < rows / 15) {
    ::usleep(10'000 + random() % 20'000);
    // The oldest row that is there changes again and again.
    uint64_t first = UINT64_MAX;
    for (uint32_t row = 0; row < store->header().capacity; ++row) {
      if (store->status()[row].state == RowState::under_way) first = std::min(first, number_of(*store, row));
    }
    const uint64_t now_ns = monotonic_ns();
    longest_s = std::max(longest_s, static_cast<double>(now_ns - oldest_ns) * 1e-9);
    if (first != oldest) oldest = first, oldest_ns = now_ns;
    if (!testing::within(oldest_ns, 20)) {
      testing::failed(__FILE__, __LINE__, "row ", oldest, " does not come through: ", store->tasks()->occupancy());
      return;
    }
    if (random() % 2 == 0) workers.kill_one(random, killed++ % 2 == 0);
  }
  workers.end();
  store->reap();
  no_problems(*store);
  settle_accounts(*store, ledger, killed, true);
  CHECK(table.set_back.load() > 0);
  std::printf("     %zu rows set back, %zu claims revoked; the oldest row was so for %.2f s at most\n",
              size_t(table.set_back.load()), size_t(table.revoked.load()), longest_s);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
