// Rows allocated and committed many at a time, in any order, against a model of what the store must then hold.

#include <algorithm>
#include <deque>
#include <random>

#include "store/store.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

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
    for (const std::string& problem : store->audit()) testing::failed(__FILE__, __LINE__, problem);
  }
  CHECK_EQ(fetch_all_tagged(*store).mixed, uint64_t{0});
}

TEST(rows_committed_in_any_order_and_number_are_kept_and_evicted_as_one_by_one) {
  for (const Remover remover : {Remover::fifo, Remover::lifo, Remover::lowest_priority}) {
    for (const uint64_t max_rows : {uint64_t{40}, uint64_t{7}}) check_against_model(remover, max_rows);
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
