// Store under concurrency and death, without Python: threads on one handle, handles of their own, forks.

#include "store/store.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "base/clock.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

// A client that does everything at random with rows of its own tags.
class Busy {
 public:
  Busy(Store& store, uint32_t seed) : store_(store), random_(seed), tag_(uint64_t{seed} << 40) {}
  ~Busy() {
    if (length_ != 0) store_.seal({&open_row_, 1});
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

  void step() {
    switch (random_() % 10) {
      case 8:
      case 9:
        grow();
        break;
      case 0:
      case 1:
      case 2:
        insert(1 + random_() % 3);
        break;
      case 3:
        abandon();
        break;
      case 4:
      case 5:
        reweigh();
        break;
      case 6:
        sample();
        break;
      default:
        random_() % 4 == 0 ? remove() : void(store_.expire());
        break;
    }
  }

 private:
  void insert(size_t n) {
    uint32_t rows[3], generations[3];
    uint64_t tags[3];
    for (size_t i = 0; i < n; ++i) tags[i] = ++tag_;
    try {
      insert_tagged(store_, {tags, n}, {rows, n}, {generations, n}, static_cast<double>(random_() % 5));
    } catch (const Error& error) {
      if (error.kind != ErrorKind::full) throw;
    }
  }
  // One row at a time is published at its beginning and extended to its end.
  void grow() {
    const uint64_t tag = open_tag_;
    if (length_ == 0) {
      if (store_.header().max_times_sampled != 0) return;
      try {
        store_.allocate({&open_row_, 1});
      } catch (const Error& error) {
        if (error.kind != ErrorKind::full) throw;
        return;
      }
      open_tag_ = ++tag_ | kOpenTag;
      begin_tagged(store_, open_row_, open_tag_);
      grow_tagged(store_, open_row_, open_tag_, 0, 1);
      const auto version = static_cast<int64_t>(open_tag_);
      const uint32_t one = 1;
      uint32_t generation = 0;
      store_.publish({&open_row_, 1}, {{&one, 1}, {}, {&version, 1}}, {&generation, 1});
      length_ = 1;
    } else if (length_ < tagged_length(tag)) {
      const uint32_t next = std::min<uint32_t>(length_ + 1 + random_() % 40, tagged_length(tag));
      grow_tagged(store_, open_row_, tag, length_, next);
      store_.extend(open_row_, next);
      length_ = next;
    } else {
      store_.seal({&open_row_, 1});
      length_ = 0;
    }
  }
  void abandon() {
    uint32_t row = 0;
    try {
      store_.allocate({&row, 1});
    } catch (const Error& error) {
      if (error.kind != ErrorKind::full) throw;
      return;
    }
    store_.abandon({&row, 1});
  }
  // Shared keys: some are stale by the time they are used.
  size_t some_keys(uint32_t* rows, uint32_t* generations, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      rows[i] = random_() % store_.header().capacity;
      generations[i] = generation_of(store_.words()[rows[i]].load()) | 1;
    }
    return n;
  }
  void reweigh() {
    uint32_t rows[8], generations[8];
    double priorities[8];
    const size_t n = some_keys(rows, generations, 8);
    for (double& priority : priorities) priority = static_cast<double>(random_() % 1000) / 7;
    store_.update_priorities({rows, n}, {generations, n}, {priorities, n});
  }
  void sample() {
    uint32_t rows[4], generations[4];
    uint8_t taken[4];
    const size_t n = some_keys(rows, generations, 4);
    store_.count_samples({rows, n}, {generations, n}, {taken, n});
    const TaggedBatch batch = fetch_tagged(store_, {rows, n}, {generations, n});
    CHECK_EQ(batch.mixed, uint64_t{0});
    store_.release_exhausted({rows, n}, {generations, n});
  }
  void remove() {
    uint32_t row = 0, generation = 0;
    some_keys(&row, &generation, 1);
    store_.remove({&row, 1}, {&generation, 1});
  }

  Store& store_;
  std::mt19937 random_;
  uint64_t tag_;
  uint64_t open_tag_ = 0;
  uint32_t open_row_ = 0, length_ = 0;  // no length: no row is open
};

// Every combination of what changes how rows are removed.
std::vector<StoreOptions> all_kinds() {
  std::vector<StoreOptions> kinds;
  for (Remover remover : {Remover::fifo, Remover::lifo, Remover::lowest_priority}) {
    for (uint32_t samples : {0u, 1u, 3u}) {
      StoreOptions options = store_options(24);
      options.remover = remover;
      options.max_times_sampled = samples;
      options.max_rows = samples == 1 ? 20 : 0;
      options.max_age_ns = samples == 3 ? 2'000'000 : 0;
      kinds.push_back(options);
    }
  }
  return kinds;
}

TEST(threads_sharing_a_handle_leave_consistent_state) {
  for (const StoreOptions& options : all_kinds()) {
    auto store = Store::create(testing::unique_name(), tagged_fields(), options);
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Busy busy(*store, t + 1);
        for (int i = 0; i < (kThreadSanitizer || kAddressSanitizer ? 300 : 2000); ++i) busy.step();
      });
    }
    for (int i = 0; i < 20; ++i) {
      check_sound(*store);
      store->reap();
    }
    for (auto& thread : threads) thread.join();
    check_sound(*store);
    CHECK_EQ(fetch_all_tagged(*store).mixed, uint64_t{0});
    const StoreCounts counts = store->counts();
    CHECK_EQ(counts.free + counts.committed, options.capacity);
  }
}

TEST(threads_with_handles_of_their_own_leave_consistent_state) {
  if (kThreadSanitizer) return;
  for (const StoreOptions& options : all_kinds()) {
    const std::string name = testing::unique_name();
    auto store = Store::create(name, tagged_fields(), options);
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        auto mine = Store::attach(name, {});
        Busy busy(*mine, t + 1);
        for (int i = 0; i < (kAddressSanitizer ? 300 : 1000); ++i) busy.step();
      });
    }
    for (auto& thread : threads) thread.join();
    check_sound(*store);
    CHECK_EQ(store->live_clients(), 1u);
    CHECK_EQ(fetch_all_tagged(*store).mixed, uint64_t{0});
  }
}

// The narrow race of this store: a row is evicted between an update's two halves, the word and the sums.
TEST(updates_that_race_with_evictions_leave_the_sums_exact) {
  for (uint32_t samples : {0u, 1u}) {
    StoreOptions options = store_options(2);
    options.max_times_sampled = samples;
    auto store = Store::create(testing::unique_name(), {{"x", 8, 8, false, {}}}, options);
    std::atomic<bool> stop{false};
    std::vector<std::thread> updaters;
    for (uint32_t row = 0; row < 2; ++row) {
      updaters.emplace_back([&, row] {
        for (uint32_t i = 0; !stop; ++i) {
          const uint32_t generation = generation_of(store->words()[row].load());
          const double priority = i % 3;
          if ((generation & 1) != 0) store->update_priorities({&row, 1}, {&generation, 1}, {&priority, 1});
        }
      });
    }
    const uint64_t deadline = monotonic_ns() + 1'500'000'000;
    uint64_t unsound = 0;
    while (monotonic_ns() < deadline) {
      for (int i = 0; i < 2000; ++i) {
        uint32_t row = 0, generation = 0;
        const double priority = 0;
        uint8_t taken = 0;
        store->allocate({&row, 1});
        store->commit({&row, 1}, {{}, {&priority, 1}, {}}, {&generation, 1});
        store->count_samples({&row, 1}, {&generation, 1}, {&taken, 1});
        store->release_exhausted({&row, 1}, {&generation, 1});
      }
      unsound += !store->audit().empty();
    }
    stop = true;
    for (auto& updater : updaters) updater.join();
    CHECK_EQ(unsound, uint64_t{0});
    check_sound(*store);
  }
}

// With max_priority a store's rows and steps never have more than it says, whoever updates meanwhile.
TEST(the_largest_priority_is_that_of_all_threads_updates) {
  for (const bool per_step : {false, true}) {
    constexpr uint32_t kRows = 256, kSteps = 4, kUpdated = 8;
    StoreOptions options = store_options(2 * kRows);
    options.max_priority = true;
    options.step_priorities = per_step;
    auto store = Store::create(testing::unique_name(), {{"x", 8, 8, true, {kSteps}}}, options);
    std::vector<uint32_t> rows(kRows), generations(kRows), steps(kRows);
    for (uint32_t i = 0; i < kRows; ++i) steps[i] = i % kSteps;
    store->allocate(rows);
    store->commit(rows, {{}, std::vector<double>(kRows, 1e-3), {}}, generations);
    const auto insert = [&] {  // a row without a priority; returns what it got
      uint32_t row = 0, generation = 0;
      store->allocate({&row, 1});
      store->commit({&row, 1}, {}, {&generation, 1});
      const uint32_t found = priority_of(per_step ? store->step_tree().leaves()[uint64_t{row} * kSteps].load()
                                                  : store->words()[row].load());
      store->remove({&row, 1}, {&generation, 1});
      return found;
    };
    // Of rows that no other thread updates; returns the largest.
    const auto update = [&](std::mt19937& random, uint32_t thread, uint32_t least) {
      const uint32_t first = thread * kRows / 2 + random() % (kRows / 2 - kUpdated);
      const std::span<const uint32_t> which(&rows[first], kUpdated), of(&generations[first], kUpdated);
      std::vector<double> priorities(kUpdated);
      for (double& priority : priorities) priority = 1e-3 * (least + random() % 10);
      if (per_step) {
        CHECK_EQ(store->update_step_priorities(which, of, {&steps[first], kUpdated}, priorities), uint64_t{0});
      } else {
        CHECK_EQ(store->update_priorities(which, of, priorities), uint64_t{0});
      }
      return *std::ranges::max_element(priorities);
    };
    const auto fixed = [](double priority) { return static_cast<uint32_t>(std::lround(priority * (1 << 16))); };
    constexpr int kRounds = kThreadSanitizer || kAddressSanitizer ? 5000 : 60'000;
    double most[2] = {0, 0};
    std::atomic<int> lowered{0};
    std::atomic<uint32_t> rising{1};  // so that both threads raise it all the time
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        for (int i = 0; i < kRounds; ++i) {
          const double mine = update(random, t, ++rising);
          if (store->max_priority() < fixed(mine)) ++lowered;
          most[t] = std::max(most[t], mine);
        }
      });
    }
    uint32_t before = 0;
    for (int i = 0; i < kRounds; ++i) {
      const uint32_t found = insert();
      CHECK(found >= before);
      before = found;
    }
    for (auto& thread : threads) thread.join();
    const double largest = std::max(most[0], most[1]);
    CHECK_EQ(lowered.load(), 0);
    CHECK_EQ(store->max_priority(), fixed(largest));
    CHECK_EQ(insert(), store->max_priority());
    check_sound(*store);

    for (const bool raises : {false, true}) {
      threads.clear();
      std::atomic<bool> stop{false};
      for (uint32_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937 random(t);
          while (!stop) {
            if (t < 2) {  // large ones are few, so that it is lowered
              const double mine = update(random, t, random() % 64 == 0 ? 100 : 1);
              if (!raises && store->max_priority() < fixed(mine)) ++lowered;
            } else if (!raises || random() % 2 == 0) {
              store->reset_max_priority();
            } else {
              store->raise_priorities(random() % 2 == 0 ? 0.5 : 2);
            }
          }
        });
      }
      for (int i = 0; i < kRounds / 100; ++i) {
        insert();
        check_sound(*store);
      }
      stop = true;
      for (auto& thread : threads) thread.join();
      CHECK_EQ(lowered.load(), 0);
    }
    store->reset_max_priority();
    uint32_t left = 0;
    for (uint32_t i = 0; i < kRows * (per_step ? kSteps : 1); ++i) {
      const uint64_t word = per_step
                                ? store->step_tree().leaves()[uint64_t{rows[i / kSteps]} * kSteps + i % kSteps].load()
                                : store->words()[rows[i]].load();
      left = std::max(left, priority_of(word));
    }
    CHECK_EQ(store->max_priority(), left);
  }
}

TEST(a_writer_killed_anywhere_loses_nothing_that_was_committed) {
  if (kThreadSanitizer) return;
  std::mt19937 random(11);
  for (const StoreOptions& options : all_kinds()) {
    const std::string name = testing::unique_name();
    auto store = Store::create(name, tagged_fields(), options);
    for (uint32_t kill_number = 0; kill_number < 12; ++kill_number) {
      pid_t children[2];
      for (uint32_t c = 0; c < 2; ++c) {
        children[c] = ::fork();
        if (children[c] != 0) continue;
        Busy busy(*store, 100 * kill_number + c + 1);
        for (;;) busy.step();
      }
      ::usleep(1000 + random() % 3000);
      for (pid_t child : children) {
        ::kill(child, SIGKILL);
        int status = 0;
        ::waitpid(child, &status, 0);
        CHECK(WIFSIGNALED(status));
      }
      CHECK_EQ(fetch_all_tagged(*store).mixed, uint64_t{0});
      store->reap();
      check_sound(*store);
      const StoreCounts counts = store->counts();
      CHECK_EQ(counts.free + counts.committed, options.capacity);
      Busy survivor(*store, 9999 + kill_number);
      for (int i = 0; i < 20; ++i) survivor.step();
      check_sound(*store);
    }
    CHECK_EQ(store->live_clients(), 1u);
  }
}

TEST(nothing_is_changed_when_one_value_of_a_call_is_refused) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  uint32_t rows[2], generations[2];
  store->allocate(rows);
  const uint32_t bad_lengths[2] = {1, kTaggedSteps + 1};
  const double bad_priorities[2] = {1, -1}, good_priorities[2] = {2, 3};
  CHECK_THROWS(schema, store->commit(rows, {bad_lengths, {}, {}}, generations));
  CHECK_THROWS(schema, store->commit(rows, {{}, bad_priorities, {}}, generations));
  const uint32_t twice[2] = {rows[0], rows[0]};
  CHECK_THROWS(schema, store->commit(twice, {}, generations));
  CHECK_EQ(store->committed_count(), uint64_t{0});
  store->commit(rows, {{}, good_priorities, {}}, generations);
  const uint64_t total = store->priority_tree().total();
  CHECK_THROWS(schema, store->update_priorities(rows, generations, bad_priorities));
  const uint32_t beyond[2] = {rows[0], 4};
  CHECK_THROWS(schema, store->update_priorities(beyond, generations, good_priorities));
  CHECK_THROWS(schema, store->remove(beyond, generations));
  CHECK_EQ(store->priority_tree().total(), total);
  CHECK_EQ(store->committed_count(), uint64_t{2});
  check_sound(*store);
}

TEST(rows_that_are_counted_are_found) {
  constexpr uint32_t kRows = 64;
  for (const bool by_step : {false, true}) {
    StoreOptions options = store_options(kRows);
    options.step_priorities = by_step;
    auto store = Store::create(testing::unique_name(), tagged_fields(), options);
    uint32_t rows[kRows], generations[kRows];
    for (int round = 0; round < 500; ++round) {
      store->allocate(rows);
      std::atomic<uint64_t> found{0};
      std::thread sampler([&] {
        while (store->committed_count() == 0) {
        }
        found =
            std::min(store->bit_tree().total(), by_step ? store->step_tree().total() : store->priority_tree().total());
      });
      store->commit(rows, {}, generations);
      sampler.join();
      CHECK(found >= kRows);
      store->remove(rows, generations);
    }
  }
}

TEST(expired_rows_count_once_where_an_insert_also_finds_a_dead_updater) {
  if (kThreadSanitizer) return;
  for (const bool by_step : {false, true}) {
    StoreOptions options = store_options(4);
    options.max_age_ns = 1'000'000;
    options.step_priorities = by_step;
    auto store = Store::create(testing::unique_name(), tagged_fields(), options);
    std::vector<uint32_t> rows(2), generations(2), more(4);
    insert_tagged(*store, std::vector<uint64_t>{1, 2}, rows, generations);
    const pid_t child = ::fork();
    if (child == 0) {
      store->allocate({more.data(), 1});
      for (uint32_t slot = 0; slot < kMaxClients; ++slot) {
        if (store->client(slot).in_use != 0 && store->client(slot).pid == ::getpid()) {
          store->client(slot).priority_writers = 1;
        }
      }
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
    ::usleep(2'000);
    store->allocate(more);
    check_sound(*store);
    CHECK_EQ(store->bit_tree().total(), uint64_t{0});
    CHECK_EQ(store->priority_tree().total(), uint64_t{0});
  }
}

TEST(a_late_note_of_a_sample_is_no_priority_of_the_next_row) {
  constexpr uint32_t kRows = 2048;
  StoreOptions options = store_options(kRows);
  options.remover = Remover::least_recently_sampled;
  auto store = Store::create(testing::unique_name(), tagged_fields(), options);
  std::atomic<bool> over{false};
  std::thread late([&] {  // as samplers do that were stopped between their look at a key and their note
    while (!over) {
      for (uint32_t row = 0; row < kRows; ++row) std::atomic_ref<uint32_t>(store->status()[row].heap_slot).store(12345);
    }
  });
  std::vector<uint32_t> rows(kRows), generations(kRows);
  const std::vector<double> priorities(kRows, 2.0);
  uint64_t wrong = 0;
  for (int round = 0; round < 100; ++round) {
    store->allocate(rows);
    store->commit(rows, {{}, priorities, {}}, generations);
    for (const uint32_t row : rows) wrong += store->info(row).priority != 2u << 16;
  }
  over = true;
  late.join();
  CHECK_EQ(wrong, uint64_t{0});
  check_sound(*store);
}

TEST(an_audit_finds_what_does_not_add_up) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  uint32_t row = 0, generation = 0;
  const uint64_t tag = 1;
  insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1});
  check_sound(*store);
  const auto unsound_after = [&](auto&& damage) {
    damage();
    CHECK(!store->audit().empty());
    store->rebuild();
    check_sound(*store);
  };
  unsound_after([&] { store->control().free_count += 1; });
  unsound_after([&] { store->control().free_head = store->status()[store->control().free_head].next; });
  unsound_after([&] { store->words()[row] += 1; });
  unsound_after([&] { store->bit_tree().leaves()[0] = 0; });
  unsound_after([&] { store->status()[store->control().order_head].next = store->control().order_head; });
  unsound_after([&] { store->priority_tree().nodes()[0] += 3; });
  CHECK_EQ(store->committed_count(), uint64_t{1});
}

TEST(sequence_numbers_can_be_moved_on_and_never_back) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  const auto sequence_of_next = [&] {
    uint32_t row = 0, generation = 0;
    const uint64_t tag = 1;
    insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1});
    return store->info(row).sequence;
  };
  CHECK_EQ(sequence_of_next(), uint64_t{1});
  store->advance_sequence(1000);
  CHECK_EQ(sequence_of_next(), uint64_t{1000});
  store->advance_sequence(5);
  CHECK_EQ(sequence_of_next(), uint64_t{1001});
  store->rebuild();
  CHECK_EQ(sequence_of_next(), uint64_t{1002});
  CHECK_THROWS(schema, store->advance_sequence(~uint64_t{0}));
  check_sound(*store);
}

TEST(sample_counts_are_set_by_key) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(2));
  uint32_t row = 0, generation = 0;
  const uint64_t tag = 1;
  insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1});
  const uint32_t seven = 7, nine = 9, stale = generation + 2;
  store->set_times_sampled({&row, 1}, {&generation, 1}, {&seven, 1});
  store->set_times_sampled({&row, 1}, {&stale, 1}, {&nine, 1});
  CHECK_EQ(store->info(row).times_sampled, 7u);
  const uint32_t beyond = 2;
  CHECK_THROWS(schema, store->set_times_sampled({&beyond, 1}, {&generation, 1}, {&seven, 1}));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
