// A store of a prompt, its answers, rewards and reference log-probabilities, as tests of tasks use it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "store/tasks.h"
#include "tests/support/check.h"

namespace geartrain {

constexpr uint8_t kInt32 = 7, kFloat32 = 12;
constexpr uint32_t kAnswer = 1, kReward = 2, kRef = 3, kTrain = 4;

// prompt -> answer (appends, divided into answers) -> reward, ref -> train.
inline std::vector<FieldSpec> fields_of_tests() {
  std::vector<FieldSpec> fields;
  fields.push_back({.name = "id", .dtype = 9, .itemsize = 8});
  fields.push_back({.name = "prompt", .dtype = kInt32, .itemsize = 4, .axis = 1});
  fields.push_back({.name = "ids", .dtype = kInt32, .itemsize = 4, .axis = 2, .task = kAnswer});
  fields.push_back({.name = "length", .dtype = kInt32, .itemsize = 4, .axis = 3, .task = kAnswer, .divides = 2});
  fields.push_back({.name = "reward", .dtype = kFloat32, .itemsize = 4, .axis = 3, .task = kReward});
  fields.push_back({.name = "ref", .dtype = kFloat32, .itemsize = 4, .axis = 2, .task = kRef});
  return fields;
}

inline StoreOptions options_of_tests(uint64_t capacity = 16, uint64_t span_bytes = 64 << 10, bool keep = true) {
  StoreOptions options;
  options.capacity = capacity;
  options.max_times_sampled = 1;
  options.axes = {"prompt", "tokens", "answers"};
  options.tasks = {{"answer", {}, keep ? kKeepPartial : 0u},
                   {"reward", {1}, kRewritable},
                   {"ref", {1}, 0},
                   {"train", {2, 3}, kLastTask}};
  options.span_bytes = span_bytes;
  return options;
}

inline std::unique_ptr<Store> made(const StoreOptions& options = options_of_tests()) {
  return Store::create(testing::unique_name(), fields_of_tests(), options);
}

inline SpanLayout layout_of(const Store& store, uint32_t task, uint8_t axis = 0) {
  return {std::vector<FieldRecord>(store.fields(), store.fields() + store.header().field_count), task, axis};
}

inline TaskRow row_of(const Store& store, uint32_t task, const ClaimedRow& claimed, AxisLengths lengths,
                      uint8_t axis = 0) {
  const SpanLayout layout = layout_of(store, task, axis);
  std::vector<SpanPiece> pieces(layout.fields().size());
  TaskRow row{.row = claimed.row, .generation = claimed.generation, .claim = claimed.claim};
  row.lengths = lengths;
  row.units = layout.empty() ? 0 : layout.place(lengths, {}, pieces);
  return row;
}

// Fills every word of a span behind its head with a number, which says who wrote it.
inline void fill_with(const Store& store, const TaskRow& row, uint32_t number) {
  auto* words = reinterpret_cast<uint32_t*>(store.tasks()->heap().head(row.span));
  for (uint64_t i = 16; i < row.units * 16; ++i) words[i] = number;
}
inline bool is_filled_with(const Store& store, uint64_t span, uint32_t number) {
  const uint64_t units = store.tasks()->heap().size_of(span);
  const auto* words = reinterpret_cast<const uint32_t*>(store.tasks()->heap().head(span));
  for (uint64_t i = 16; i < units * 16; ++i) {
    if (words[i] != number) return false;
  }
  return true;
}

inline std::vector<ClaimedRow> insert(Store& store, size_t n, uint32_t prompt = 5) {
  Tasks& tasks = *store.tasks();
  std::vector<TaskRow> rows;
  for (size_t i = 0; i < n; ++i) rows.push_back(row_of(store, 0, {kNoRow, 0, 0}, {prompt}));
  if (!tasks.begin_insert(rows)) return {};
  for (const TaskRow& each : rows) fill_with(store, each, each.row);
  std::vector<uint32_t> generations(n);
  tasks.finish_insert(rows, {}, generations);
  std::vector<ClaimedRow> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back({rows[i].row, generations[i], 0});
  return keys;
}

inline bool put(Store& store, uint32_t task, const ClaimedRow& claimed, AxisLengths lengths, uint32_t number,
                Write write = Write::put, uint8_t axis = 0, uint32_t item = 0) {
  Tasks& tasks = *store.tasks();
  TaskRow row = row_of(store, task, claimed, lengths, axis);
  row.item = item;
  for (;;) {
    if (tasks.begin(write, task, {&row, 1}, axis) == 1) break;
    const auto room = tasks.make_room(task, row);
    if (room == Tasks::Room::given_up) return false;
    if (room == Tasks::Room::never) fail(ErrorKind::no_space, "never");
    if (room == Tasks::Room::wait) tasks.await_space(tasks.table().space_changes.load(), 0.01);
  }
  if (row.skipped) return false;
  if (row.span != 0) fill_with(store, row, number);
  tasks.finish(write, task, {&row, 1});
  return !row.skipped;
}

inline const AxisLengths kLengths{5, 30, 3};

inline void no_problems(Store& store) {
  for (const std::string& problem : store.audit()) testing::failed(__FILE__, __LINE__, problem);
}

// The row is trained on, and freed.
inline size_t train(Store& store, size_t most = 1000) {
  std::vector<uint32_t> rows, generations;
  store.keys(&rows, &generations);
  const size_t n = std::min(rows.size(), most);
  rows.resize(n), generations.resize(n);
  std::vector<uint8_t> taken(n);
  store.count_samples(rows, generations, taken);
  store.release_exhausted(rows, generations);
  return n;
}

}  // namespace geartrain
