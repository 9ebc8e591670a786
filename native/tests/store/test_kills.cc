// Death after every relevant instruction of every call of a store (tests/support/stepped.h). The survivor must find
// consistent state, all blocks, and whole rows.

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <set>

#include "tests/support/check.h"
#include "tests/support/stepped.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

constexpr uint64_t kCapacity = 20;  // two nodes of each tree's lowest level

struct Keys {
  std::vector<uint32_t> rows, generations;
};

Keys insert_many(Store& store, size_t n, uint64_t first_tag) {
  Keys keys{std::vector<uint32_t>(n), std::vector<uint32_t>(n)};
  std::vector<uint64_t> tags(n);
  for (size_t i = 0; i < n; ++i) tags[i] = first_tag + i;
  if (n != 0) insert_tagged(store, tags, keys.rows, keys.generations, static_cast<double>(1 + first_tag % 5));
  return keys;
}

// One call, and what it needs: `prepare` runs in the child before its steps are counted.
struct Scenario {
  const char* name;
  StoreOptions options;
  size_t rows_before;                // committed by the survivor, tags 1, 2, 3, ...
  std::vector<uint64_t> may_vanish;  // tags that the call may remove
  std::function<std::function<void()>(Store&, const Keys&)> prepare;
  bool together = false;  // the rows with kTogether come all or not at all
};
const std::vector<uint64_t> kTogether{500, 501, 502};

void check_survivor(Store& store, const Scenario& scenario, size_t instruction) {
  const auto complain = [&](const auto&... parts) {
    testing::failed(scenario.name, static_cast<int>(instruction), parts...);
  };
  store.reap();
  for (const std::string& problem : store.audit()) complain(problem);
  const StoreCounts counts = store.counts();
  if (counts.free + counts.committed != kCapacity)
    complain("blocks are missing: ", counts.free, " and ", counts.committed);
  if (store.live_clients() != 1) complain(store.live_clients(), " clients are counted as alive");
  std::vector<uint32_t> rows, generations;
  store.keys(&rows, &generations);
  const TaggedBatch batch = fetch_tagged(store, rows, generations);
  if (batch.mixed + batch.torn != 0) complain(batch.mixed, " rows are mixed, ", batch.torn, " are torn");
  std::set<uint64_t> tags;
  for (uint32_t row : rows) tags.insert(*reinterpret_cast<const uint64_t*>(store.block(0, row)));
  for (uint64_t tag = 1; tag <= scenario.rows_before; ++tag) {
    const bool may = std::count(scenario.may_vanish.begin(), scenario.may_vanish.end(), tag) != 0;
    if (tags.count(tag) == 0 && !may) complain("the row with tag ", tag, " is lost");
  }
  const auto there = [&](uint64_t tag) { return tags.count(tag) != 0; };
  const auto come = std::count_if(kTogether.begin(), kTogether.end(), there);
  if (scenario.together && come != 0 && static_cast<size_t>(come) != kTogether.size()) {
    complain(come, " rows are there of ", kTogether.size(), " that were to come together");
  }
  if (store.committed_count() > store.header().max_rows) complain(store.committed_count(), " rows are kept");
  const Keys more = insert_many(store, kCapacity / 2, 900);
  if (fetch_tagged(store, more.rows, more.generations).whole == 0) complain("nothing can be inserted any more");
  for (const std::string& problem : store.audit()) complain("afterwards: ", problem);
}

bool run(const Scenario& scenario) {
  Keys keys;
  return kill_in_every_state(
      scenario.name,
      [&] {
        auto store = Store::create(testing::unique_name(), tagged_fields(), scenario.options);
        keys = insert_many(*store, scenario.rows_before, 1);
        return store;
      },
      [&](Store& store) { return scenario.prepare(store, keys); },
      [&](Store& store, size_t instruction) { check_survivor(store, scenario, instruction); },
      // Everything but the columns: the store's own state.
      [](const Store& store) { return store.header().regions[kColumnsRegion].offset; });
}

StoreOptions options_of(Remover remover = Remover::fifo, uint32_t max_times_sampled = 0, uint64_t max_rows = 0) {
  StoreOptions options;
  options.capacity = kCapacity;
  options.remover = remover;
  options.max_times_sampled = max_times_sampled;
  options.max_rows = max_rows;
  return options;
}

std::vector<Scenario> scenarios() {
  static std::vector<uint32_t> rows(3), generations(3);
  static const std::vector<double> priorities{7, 0, 9};
  static const std::vector<int64_t> versions_of_tags{500, 501, 502};
  static std::vector<uint8_t> taken(3);
  const auto allocate = [](Store& store, const Keys&) -> std::function<void()> {
    return [&store] { store.allocate(rows); };
  };
  const auto commit = [](Store& store, const Keys&) -> std::function<void()> {
    static std::vector<uint32_t> lengths;
    store.allocate(rows);
    lengths = fill_tagged(store, rows, kTogether);
    return [&store] { store.commit(rows, {lengths, priorities, versions_of_tags}, generations); };
  };
  const auto update = [](Store& store, const Keys& keys) -> std::function<void()> {
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    return [=, &store] { store.update_priorities(some_rows.first(3), some_generations.first(3), priorities); };
  };
  // The same contents once more: whoever dies inside costs its row all the same, for nobody can tell.
  const auto rewrite = [](Store& store, const Keys& keys) -> std::function<void()> {
    static std::vector<uint64_t> late;
    late.clear();
    for (const uint32_t row : keys.rows) {
      const auto* from = reinterpret_cast<const uint64_t*>(store.block(2, row));
      late.insert(late.end(), from, from + 3);
    }
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    return [=, &store] {
      const FieldSource source{2, reinterpret_cast<const std::byte*>(late.data()), 24};
      store.rewrite(some_rows.first(2), some_generations.first(2), {&source, 1}, {}, {});
    };
  };
  const auto remove = [](Store& store, const Keys& keys) -> std::function<void()> {
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    return [=, &store] { store.remove(some_rows.first(2), some_generations.first(2)); };
  };
  const auto sample = [](Store& store, const Keys& keys) -> std::function<void()> {
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    return [=, &store] { store.count_samples(some_rows.first(3), some_generations.first(3), taken); };
  };
  const auto release = [](Store& store, const Keys& keys) -> std::function<void()> {
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    store.count_samples(some_rows.first(3), some_generations.first(3), taken);
    return [=, &store] { store.release_exhausted(some_rows.first(3), some_generations.first(3)); };
  };
  const auto abandon = [](Store& store, const Keys&) -> std::function<void()> {
    store.allocate(rows);
    return [&store] { store.abandon(rows); };
  };
  const auto publish = [](Store& store, const Keys&) -> std::function<void()> {
    static std::vector<uint32_t> lengths;
    store.allocate(rows);
    lengths = fill_tagged(store, rows, kTogether);
    return [&store] { store.publish(rows, {lengths, priorities, versions_of_tags}, generations); };
  };
  // What a recorder does in one step: one row is published, two are committed, one is extended, sealed and one given
  // up.
  const auto record = [](Store& store, const Keys&) -> std::function<void()> {
    static std::vector<uint32_t> open(1), spare(1), lengths;
    static const int64_t tag = static_cast<int64_t>(kOpenTag | 400);
    static const uint32_t one = 1, whole = tagged_length(static_cast<uint64_t>(tag));
    store.allocate(rows);
    lengths = fill_tagged(store, rows, kTogether);
    store.allocate(spare);
    store.allocate(open);
    begin_tagged(store, open[0], static_cast<uint64_t>(tag));
    grow_tagged(store, open[0], static_cast<uint64_t>(tag), 0, whole);
    store.publish(open, {{&one, 1}, {}, {&tag, 1}}, std::span(generations).first(1));
    return [&store] {
      const std::span<const uint32_t> all(rows), of_all(lengths);
      const std::span<uint32_t> keys(generations);
      const std::span<const int64_t> versions(versions_of_tags);
      store.apply({.publish = {all.first(1), {of_all.first(1), {}, versions.first(1)}, keys.first(1)},
                   .commit = {all.last(2), {of_all.last(2), {}, versions.last(2)}, keys.last(2)},
                   .extend = open,
                   .lengths = {&whole, 1},
                   .seal = open,
                   .abandon = spare});
    };
  };
  const auto seal = [publish](Store& store, const Keys& keys) -> std::function<void()> {
    publish(store, keys)();
    return [&store] { store.seal(rows); };
  };
  const auto expire = [](Store& store, const Keys&) -> std::function<void()> {
    ::usleep(15'000);
    return [&store] { store.expire(); };
  };
  const auto rebuild = [](Store& store, const Keys&) -> std::function<void()> {
    store.allocate(rows);
    return [&store] { store.rebuild(); };
  };
  const auto join_and_leave = [](Store& store, const Keys&) -> std::function<void()> {
    static std::string path;
    path = store.mapping()->path();
    return [] {
      auto second = Store::attach(path, {});
      second->allocate(rows);
      second->close();
    };
  };
  // A process died while it held blocks and was changing priorities: its successor dies while reclaiming them.
  const auto reap = [](Store& store, const Keys&) -> std::function<void()> {
    const pid_t dying = ::fork();
    if (dying == 0) {
      store.reap();
      store.allocate(rows);
      std::vector<uint32_t> slots;
      for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
        if (store.client(slot).in_use != 0 && store.client(slot).pid == ::getpid())
          store.client(slot).priority_writers = 1;
      }
      ::_exit(0);
    }
    ::waitpid(dying, nullptr, 0);
    return [&store] { store.reap(); };
  };
  const auto update_steps = [](Store& store, const Keys& keys) -> std::function<void()> {
    static std::vector<uint32_t> steps;
    steps.clear();
    for (size_t i = 0; i < 3; ++i) steps.push_back(store.status()[keys.rows[i]].length.load() - 1);
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    return
        [=, &store] { store.update_step_priorities(some_rows.first(3), some_generations.first(3), steps, priorities); };
  };
  const auto extend = [](Store& store, const Keys&) -> std::function<void()> {
    static const std::vector<uint64_t> tags{kOpenTag | 500, kOpenTag | 501, kOpenTag | 502};
    static const std::vector<int64_t> versions(tags.begin(), tags.end());
    static std::vector<uint32_t> lengths;
    static const std::vector<uint32_t> one(3, 1);
    store.allocate(rows);
    lengths = fill_tagged(store, rows, tags);
    store.publish(rows, {one, priorities, versions}, generations);
    return [&store] { store.extend(rows, lengths, priorities); };
  };
  // A process died in the middle of an update of steps: its successor dies while it sets their sums right.
  const auto reap_steps = [](Store& store, const Keys& keys) -> std::function<void()> {
    const pid_t dying = ::fork();
    if (dying == 0) {
      store.reap();
      for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
        if (store.client(slot).in_use == 0 || store.client(slot).pid != ::getpid()) continue;
        store.client(slot).priority_writers = 1;
        auto* journals = store.mapping()->data() + store.header().regions[kStepJournalsRegion].offset;
        StepJournal& journal = reinterpret_cast<StepJournal*>(journals)[slot];
        const uint64_t leaf = store.leaf_of(keys.rows[1], 0);
        journal.entries[0] = static_cast<uint32_t>(leaf);
        journal.count = 1;
        store.step_tree().leaves()[leaf] = make_word(keys.generations[1], 77);  // and the sums do not follow
      }
      ::_exit(0);
    }
    ::waitpid(dying, nullptr, 0);
    return [&store] { store.reap(); };
  };
  // A process died in the middle of a commit of several rows: its successor dies while it completes them.
  const auto reap_commit = [commit](Store& store, const Keys& keys) -> std::function<void()> {
    const auto* head = reinterpret_cast<const std::byte*>(store.mapping()->data());
    const auto* pending = reinterpret_cast<const PendingCommit*>(head + kPendingOffset);
    Stepped child(store, "commit", [&] { return commit(store, keys); });
    while (pending->first.load() == 0 && child.step()) {
    }
    for (int more = 0; more < 300 && pending->first.load() != 0; ++more) child.step();
    return [&store] { store.reap(); };
  };
  // A process died while it wrote a row in place: its successor dies while it frees that row. Some of the new bytes are
  // there.
  const auto reap_rewrite = [](Store& store, const Keys& keys) -> std::function<void()> {
    const pid_t dying = ::fork();
    if (dying == 0) {
      store.reap();
      const Store::Guard guard(store);
      const uint32_t row = keys.rows[1];
      store.status()[row].inserted_at_ns |= 1;
      reinterpret_cast<uint64_t*>(store.block(2, row))[0] = ~uint64_t{0};
      ::_exit(0);
    }
    ::waitpid(dying, nullptr, 0);
    return [&store] { store.reap(); };
  };
  const auto by_step = [](StoreOptions options) {
    options.step_priorities = true;
    return options;
  };
  // An audit finds a word above the largest priority that was given.
  const auto by_max = [](StoreOptions options) {
    options.max_priority = true;
    return options;
  };
  const auto raise = [](Store& store, const Keys& keys) -> std::function<void()> {
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    static const std::vector<uint32_t> steps(3, 0);
    if (store.per_step()) {
      store.update_step_priorities(some_rows.first(3), some_generations.first(3), steps, priorities);
    } else {
      store.update_priorities(some_rows.first(3), some_generations.first(3), priorities);
    }
    return [&store] {
      store.raise_priorities(2);
      store.raise_priorities(0.5);
    };
  };
  const auto reset = [update](Store& store, const Keys& keys) -> std::function<void()> {
    update(store, keys)();
    const std::span<const uint32_t> some_rows(keys.rows), some_generations(keys.generations);
    store.update_priorities(some_rows.first(3), some_generations.first(3), std::vector<double>{2, 3, 4});
    return [&store] { store.reset_max_priority(); };
  };
  StoreOptions aging = options_of();
  aging.max_age_ns = 1'000'000;
  const std::vector<uint64_t> oldest{1, 2, 3}, newest{18, 19, 20};
  std::vector<uint64_t> all;
  for (uint64_t tag = 1; tag <= kCapacity; ++tag) all.push_back(tag);
  return {
      {"allocate free rows", options_of(), 4, {}, allocate},
      {"allocate, evicting the oldest", options_of(), 20, oldest, allocate},
      {"allocate, evicting the newest", options_of(Remover::lifo), 20, newest, allocate},
      {"allocate, evicting the lowest priority", options_of(Remover::lowest_priority), 20, oldest, allocate},
      {"commit", options_of(), 4, {}, commit, true},
      {"commit at the cap", options_of(Remover::fifo, 0, 10), 10, oldest, commit, true},
      {"commit into a heap", options_of(Remover::lowest_priority), 4, {}, commit, true},
      {"commit at the cap, evicting the lowest priority", options_of(Remover::lowest_priority, 0, 10), 10, oldest,
       commit},
      {"publish", options_of(), 4, {}, publish, true},
      {"record", options_of(), 4, {}, record, true},
      {"publish at the cap", options_of(Remover::lifo, 0, 10), 10, {8, 9, 10}, publish},
      {"seal", options_of(), 4, {}, seal},
      {"seal into a heap", options_of(Remover::lowest_priority), 4, {}, seal},
      {"abandon", options_of(), 4, {}, abandon},
      {"update priorities without the lock", options_of(), 18, {}, update},
      {"update priorities in a heap", options_of(Remover::lowest_priority), 18, {}, update},
      {"update priorities of rows sampled a few times", options_of(Remover::fifo, 2), 18, {}, update},
      {"write in place", options_of(), 18, {1, 2}, rewrite},
      {"allocate, evicting the most sampled", options_of(Remover::most_sampled), 20, oldest, allocate},
      {"delete", options_of(), 18, {1, 2}, remove},
      {"delete from a heap", options_of(Remover::lowest_priority), 18, {1, 2}, remove},
      {"count last samples", options_of(Remover::fifo, 1), 18, oldest, sample},
      {"count last samples in a heap", options_of(Remover::lowest_priority, 1), 18, oldest, sample},
      {"release exhausted rows", options_of(Remover::fifo, 1), 18, oldest, release},
      {"expire", aging, 4, all, expire},
      {"rebuild", options_of(Remover::lowest_priority), 5, {}, rebuild},
      {"join and leave", options_of(), 4, {}, join_and_leave},
      {"reap", options_of(), 4, {}, reap},
      {"allocate, with priorities of steps", by_step(options_of()), 20, oldest, allocate},
      {"commit, with priorities of steps", by_step(options_of()), 4, {}, commit, true},
      {"commit at the cap, with priorities of steps", by_step(options_of(Remover::fifo, 0, 10)), 10, oldest, commit,
       true},
      {"publish, with priorities of steps", by_step(options_of()), 4, {}, publish, true},
      {"record, with priorities of steps", by_step(options_of()), 4, {}, record, true},
      {"extend, with priorities of steps", by_step(options_of()), 4, {}, extend},
      {"update priorities of steps", by_step(options_of()), 18, {}, update_steps},
      {"delete, with priorities of steps", by_step(options_of()), 18, {1, 2}, remove},
      {"count last samples, with priorities of steps", by_step(options_of(Remover::fifo, 1)), 18, oldest, sample},
      {"rebuild, with priorities of steps", by_step(options_of()), 5, {}, rebuild},
      {"reap a commit", options_of(), 4, {}, reap_commit, true},
      {"reap a commit, with priorities of steps", by_step(options_of()), 4, {}, reap_commit, true},
      {"reap, with priorities of steps", by_step(options_of()), 4, {}, reap_steps},
      {"reap a write in place", options_of(), 4, {2}, reap_rewrite},
      {"commit, keeping the largest priority", by_max(options_of()), 4, {}, commit, true},
      {"commit steps, keeping the largest priority", by_max(by_step(options_of())), 4, {}, commit, true},
      {"extend, keeping the largest priority", by_max(by_step(options_of())), 4, {}, extend},
      {"update, keeping the largest priority", by_max(options_of()), 18, {}, update},
      {"update in a heap, keeping the largest priority", by_max(options_of(Remover::lowest_priority)), 18, {}, update},
      {"update steps, keeping the largest priority", by_max(by_step(options_of())), 18, {}, update_steps},
      {"raise all, keeping the largest priority", by_max(options_of()), 18, {}, raise},
      {"raise all of steps, keeping the largest priority", by_max(by_step(options_of())), 18, {}, raise},
      {"reset the largest priority", by_max(options_of()), 18, {}, reset},
  };
}

TEST(a_process_killed_after_any_instruction_loses_nothing_and_blocks_no_one) {
  if (kThreadSanitizer) return;
  const char* wanted = std::getenv("GEARTRAIN_TEST_KILLED_CALLS");  // a part of their names
  for (const Scenario& scenario : scenarios()) {
    if (wanted != nullptr && std::strstr(scenario.name, wanted) == nullptr) continue;
    if (!run(scenario)) {
      std::printf("     skipped: this machine does not let a process trace its child\n");
      return;
    }
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
