// Rows allocated and committed many at a time, in any order, against a model of what the store must then hold.

#include <algorithm>
#include <deque>
#include <iterator>
#include <new>
#include <random>
#include <set>

#include "store/store.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace {
thread_local bool out_of_memory = false;
}  // namespace

void* operator new(size_t bytes) {
  void* const memory = out_of_memory ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace geartrain {
namespace {

// The tags that a store holds, oldest first.
std::vector<uint64_t> tags_of(Store& store) {
  std::vector<uint32_t> rows, generations;
  store.keys(&rows, &generations);
  std::vector<uint64_t> tags;
  for (const uint32_t row : rows) tags.push_back(*reinterpret_cast<const uint64_t*>(store.block(0, row)));
  return tags;
}

void evict(std::deque<uint64_t>& model, Remover remover) {
  if (remover == Remover::fifo) {
    model.pop_front();
  } else if (remover == Remover::lifo) {
    model.pop_back();
  } else {
    model.erase(std::min_element(model.begin(), model.end(), [](uint64_t one, uint64_t other) {
      return one % 5 < other % 5;  // the first of equals
    }));
  }
}

void check_against_model(Remover remover, uint64_t max_rows) {
  constexpr uint64_t kCapacity = 40;
  StoreOptions options;
  options.capacity = kCapacity;
  options.max_rows = max_rows;
  options.remover = remover;
  auto store = Store::create(testing::unique_name(), tagged_fields(), options);
  std::mt19937 random(static_cast<uint32_t>(max_rows) * 3 + static_cast<uint32_t>(remover));
  std::deque<uint64_t> model;
  std::vector<uint32_t> held;
  uint64_t tag = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<uint32_t> rows(random() % 12);
    if (held.size() + rows.size() > kCapacity / 2) rows.clear();
    store->allocate(rows);
    held.insert(held.end(), rows.begin(), rows.end());
    while (model.size() + held.size() > kCapacity) evict(model, remover);
    CHECK_EQ(store->counts().writing, held.size());
    // As they were allocated, or in any order, or some of them only.
    if (random() % 3 == 0) std::shuffle(held.begin(), held.end(), random);
    const size_t n = held.empty() ? 0 : random() % (held.size() + 1), from = (held.size() - n) * (random() % 2);
    const std::vector<uint32_t> some(held.begin() + from, held.begin() + from + n);
    held.erase(held.begin() + from, held.begin() + from + n);
    if (random() % 5 == 0) {
      store->abandon(some);
    } else {
      std::vector<uint64_t> tags(n);
      std::vector<uint32_t> generations(n);
      std::vector<double> priorities(n);
      for (size_t i = 0; i < n; ++i) {
        tags[i] = ++tag;
        priorities[i] = static_cast<double>(tag % 5);
      }
      const std::vector<uint32_t> lengths = fill_tagged(*store, some, tags);
      store->commit(some, {lengths, priorities, std::vector<int64_t>(tags.begin(), tags.end())}, generations);
      for (const uint64_t each : tags) {
        if (model.size() == max_rows) evict(model, remover);
        model.push_back(each);
      }
    }
    CHECK(tags_of(*store) == std::vector<uint64_t>(model.begin(), model.end()));
    check_sound(*store);
  }
  CHECK_EQ(fetch_all_tagged(*store).mixed, uint64_t{0});
}

TEST(rows_committed_in_any_order_and_number_are_kept_and_evicted_as_one_by_one) {
  for (const Remover remover : {Remover::fifo, Remover::lifo, Remover::lowest_priority}) {
    for (const uint64_t max_rows : {uint64_t{40}, uint64_t{7}}) check_against_model(remover, max_rows);
  }
}

// With a value for a remover to go by: rows leave from the lowest, in shares of a 64th or what is needed, and memory
// runs out in the middle of each commit.
TEST(rows_are_ranked_without_taking_memory_in_the_middle_of_a_commit) {
  constexpr uint64_t kCapacity = 20'000;
  for (const uint64_t max_rows : {kCapacity, uint64_t{500}}) {  // all rows are looked at, or the list of those kept
    StoreOptions options;
    options.capacity = kCapacity;
    options.max_rows = max_rows;
    options.remover = Remover::lowest_value;
    auto store = Store::create(testing::unique_name(), {{"value", 8, 8, false, {}}}, options);
    std::mt19937 random(static_cast<uint32_t>(max_rows));
    std::multiset<uint64_t> model;
    uint64_t inserted = 0;
    for (const size_t n : {20'000, 1, 377, 5'000, 1, 63}) {
      std::vector<uint32_t> rows(n), generations(n);
      out_of_memory = true;
      store->allocate(rows);
      out_of_memory = false;
      if (max_rows == kCapacity && inserted != 0) CHECK_EQ(store->counts().writing, n);
      std::vector<uint64_t> values(n);
      for (size_t i = 0; i < n; ++i) {
        values[i] = random();
        std::memcpy(store->block(0, rows[i]), &values[i], 8);
      }
      out_of_memory = true;
      store->commit(rows, {}, generations);
      out_of_memory = false;
      inserted += n;
      // The lowest values went, more than needed but never a row that is better than one that stayed, but for the rows
      // that came after.
      model.insert(values.begin(), values.end());
      std::vector<uint32_t> kept, kept_generations;
      store->keys(&kept, &kept_generations);
      CHECK(kept.size() <= max_rows && kept.size() + max_rows / 64 + 1 >= std::min<uint64_t>(max_rows, inserted));
      std::multiset<uint64_t> here;
      for (const uint32_t row : kept) here.insert(*reinterpret_cast<const uint64_t*>(store->block(0, row)));
      CHECK(std::includes(model.begin(), model.end(), here.begin(), here.end()));
      if (n == 1) {  // what went was not better than what stayed
        std::vector<uint64_t> gone;
        std::set_difference(model.begin(), model.end(), here.begin(), here.end(), std::back_inserter(gone));
        here.erase(here.find(values[0]));
        CHECK(gone.empty() || here.empty() || gone.back() <= *here.begin());
      }
      model.clear();
      for (const uint32_t row : kept) model.insert(*reinterpret_cast<const uint64_t*>(store->block(0, row)));
      CHECK(store->audit().empty());
    }
  }
}

TEST(a_row_that_is_named_twice_is_refused_and_stays_to_be_written) {
  StoreOptions options;
  options.capacity = 8;
  auto store = Store::create(testing::unique_name(), tagged_fields(), options);
  uint32_t rows[2], generations[2];
  store->allocate(rows);
  const uint32_t twice[2] = {rows[0], rows[0]};
  CHECK_THROWS(schema, store->commit(twice, {}, generations));
  CHECK_EQ(store->counts().writing, uint64_t{2});
  store->commit(rows, {}, generations);
  CHECK(store->audit().empty());
}

// A list that leads to a row twice: the row is given to nobody twice, and the lists are rebuilt.
TEST(a_list_that_runs_in_a_circle_is_found_before_its_rows_are_given_out) {
  StoreOptions options;
  options.capacity = 8;
  for (const bool free : {true, false}) {
    auto store = Store::create(testing::unique_name(), tagged_fields(), options);
    uint32_t rows[8], generations[8];
    if (!free) {
      store->allocate(rows);
      store->commit(rows, {}, generations);
    }
    const Control& c = store->control();
    const uint32_t head = free ? c.free_head : c.order_head;
    store->status()[store->status()[head].next].next = head;
    CHECK_THROWS(corrupt, store->allocate(rows));
    CHECK(store->audit().empty());
    store->allocate(rows);
    std::sort(rows, rows + 8);
    CHECK(std::unique(rows, rows + 8) == rows + 8);
    store->commit(rows, {}, generations);
    CHECK(store->audit().empty());
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
