// The life of a handle: forks, closing beside other threads' calls, the end of the process, segments that are kept.

#include "store/store.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "base/clock.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

TEST(a_forked_child_is_a_client_of_its_own_and_its_parents_rows_stay_the_parents) {
  if (kThreadSanitizer) return;
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(8));
  uint32_t mine = 0;
  store->allocate({&mine, 1});
  const pid_t child = ::fork();
  if (child == 0) {
    uint32_t generation = 0, row = 0;
    const uint64_t tag = 77;
    try {
      store->commit({&mine, 1}, {}, {&generation, 1});
      ::_exit(1);
    } catch (const Error& error) {
      if (error.kind != ErrorKind::stale_key) ::_exit(2);
    }
    insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1});
    store->allocate({&row, 1});  // held at the child's death
    ::_exit(store->live_clients() == 2 ? 0 : 3);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(store->committed_count(), uint64_t{1});
  CHECK_EQ(store->counts().writing, uint64_t{2});
  CHECK_EQ(store->reap(), 1u);
  CHECK_EQ(store->counts().writing, uint64_t{1});
  uint32_t generation = 0;
  const uint64_t tag = 5;
  commit_tagged(*store, {&mine, 1}, {&tag, 1}, {&generation, 1});
  check_sound(*store);
}

TEST(a_child_forked_while_other_threads_allocate_uses_the_store) {
  if (kThreadSanitizer) return;
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(64));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        uint32_t row = 0;
        store->allocate({&row, 1});
        store->abandon({&row, 1});
      }
    });
  }
  const int forks = kAddressSanitizer ? 60 : 300;
  for (int i = 0; i < forks; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(static_cast<unsigned>(20 * testing::patience()));
      uint32_t row = 0, generation = 0;
      store->allocate({&row, 1});
      store->commit({&row, 1}, {}, {&generation, 1});
      store->close();
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      testing::failed(__FILE__, __LINE__, "child ", i, " ended with status ", status);
      break;
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  check_sound(*store);
}

TEST(a_handle_is_closed_while_threads_use_it_and_everything_they_held_comes_back) {
  const int rounds = kThreadSanitizer || kAddressSanitizer ? 60 : 300;
  const std::string name = testing::unique_name();
  auto living = Store::create(name, tagged_fields(), store_options(24));
  living->set_limiter({true, 0, 1000, 0}, true);  // samples wait for rows that never come
  std::mt19937 random(11);
  for (int round = 0; round < rounds; ++round) {
    auto store = Store::attach(name, {});
    std::atomic<int> began{0}, refused{0};
    const auto until_closed = [&](auto&& work) {
      ++began;
      try {
        for (;;) {
          const Store::Call call(*store);
          try {
            work();
          } catch (const Error& error) {
            if (error.kind != ErrorKind::full) throw;
          }
        }
      } catch (const Error& error) {
        if (error.kind == ErrorKind::closed) ++refused;
      }
    };
    std::vector<std::thread> threads;
    threads.emplace_back(until_closed, [&] {
      uint32_t row = 0, generation = 0;
      const uint64_t tag = 7;
      insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1}, 1.0);
      const double priority = 2;
      store->update_priorities({&row, 1}, {&generation, 1}, {&priority, 1});
    });
    threads.emplace_back(until_closed, [&] {
      uint32_t row = 0;
      store->allocate({&row, 1});
      store->repair_dead_updates();
    });
    threads.emplace_back(until_closed, [&] { store->admit_samples(1, 100); });
    while (began < 3) std::this_thread::yield();
    const uint64_t stop_ns = monotonic_ns() + random() % 300'000;
    while (monotonic_ns() < stop_ns) {
    }
    std::thread another([&] { store->close(); });
    store->close();
    CHECK(store->is_closed());
    CHECK_THROWS(closed, const Store::Call refused_call(*store));
    another.join();
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(refused.load(), 3);
    CHECK_EQ(living->live_clients(), 1u);
    CHECK_EQ(living->counts().writing, 0u);
  }
  check_sound(*living);
}

TEST(stores_are_dropped_by_one_thread_while_another_ends_the_process) {
  if (kThreadSanitizer) return;
  for (int round = 0; round < 30; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(static_cast<unsigned>(30 * testing::patience()));
      std::vector<std::unique_ptr<Store>> stores;
      for (int i = 0; i < 20; ++i)
        stores.push_back(Store::create(testing::unique_name(), tagged_fields(), store_options(8)));
      std::atomic<bool> go{false};
      std::thread dropping([&] {
        while (!go) {
        }
        while (!stores.empty()) stores.pop_back();
        for (;;) ::pause();
      });
      go = true;
      std::exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      testing::failed(__FILE__, __LINE__, "child ", round, " ended with status ", status);
      return;
    }
  }
}

TEST(a_segment_that_is_kept_outlives_its_last_client) {
  const std::string name = testing::unique_name();
  auto store = Store::create(name, tagged_fields(), store_options(2));
  uint32_t row = 0, generation = 0;
  const uint64_t tag = 1;
  insert_tagged(*store, {&tag, 1}, {&row, 1}, {&generation, 1});
  store->keep_segment();
  store->close();
  CHECK_THROWS(stale_store, Store::attach(name, {}));
  AttachOptions adopting;
  adopting.adopt = true;
  auto adopted = Store::attach(name, adopting);
  CHECK_EQ(adopted->committed_count(), uint64_t{1});
  check_sound(*adopted);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
