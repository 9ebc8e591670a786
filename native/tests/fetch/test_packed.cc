// Rows of their own lengths: written into spans from flat runs, runs a row and appends, and read back packed, while
// they are rewritten, freed and drawn.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "fetch/batch_sampler.h"
#include "fetch/packed.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

// Fields: 0 id (column), 1 prompt, 2 name (text); of "answer" 3 ids, 4 vector, 5 length, 6 note (text an answer); of
// "score" 7 reward, 8 ref; the last task is "train". Axes: 1 prompt, 2 tokens, 3 answers.
enum { kId, kPrompt, kName, kIds, kVector, kLength, kNote, kReward, kRef };
enum { kAnswer = 1, kScore = 2, kTrain = 3 };
constexpr uint8_t kByte = 2, kI32 = 7, kF32 = 12, kI64 = 9;

std::vector<FieldSpec> fields_of_answers() {
  std::vector<FieldSpec> fields;
  fields.push_back({"id", kI64, 8, false, {}});
  fields.push_back({"prompt", kI32, 4, false, {}, 1, 0, 0});
  fields.push_back({"name", kByte, 1, false, {}, 0, 0, 0, SpanKind::text});
  fields.push_back({"ids", kI32, 4, false, {}, 2, kAnswer, 0});
  fields.push_back({"vector", kF32, 4, false, {3}, 2, kAnswer, 0});
  fields.push_back({"length", kI32, 4, false, {}, 3, kAnswer, 2});
  fields.push_back({"note", kByte, 1, false, {}, 3, kAnswer, 0, SpanKind::text});
  fields.push_back({"reward", kF32, 4, false, {}, 3, kScore, 0});
  fields.push_back({"ref", kI32, 4, false, {}, 2, kScore, 0});
  return fields;
}

std::unique_ptr<Store> store_of_answers(uint64_t capacity = 64, uint64_t span_bytes = 8 << 20) {
  StoreOptions options;
  options.capacity = capacity;
  options.max_times_sampled = 1;
  options.axes = {"prompt", "tokens", "answers"};
  options.tasks = {{"answer", {}, kKeepPartial}, {"score", {1}, kRewritable}, {"train", {1, 2}, kLastTask}};
  options.span_bytes = span_bytes;
  return Store::create(testing::unique_name(), fields_of_answers(), options);
}

// One row's values, which follow from a seed.
struct Values {
  explicit Values(uint32_t seed) : id(seed), name("row " + std::to_string(seed)) {
    std::mt19937 random(seed);
    for (uint32_t i = 0; i < random() % 40; ++i) prompt.push_back(static_cast<int32_t>(random()));
    const uint32_t answers = random() % 5;
    for (uint32_t i = 0; i < answers; ++i) {
      length.push_back(random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 300));
      note.push_back(std::string(random() % 9, static_cast<char>('a' + i)));
      reward.push_back(static_cast<float>(random() % 100));
      for (int32_t k = 0; k < length.back(); ++k) ids.push_back(static_cast<int32_t>(random()));
    }
    for (const int32_t each : ids) {
      for (int k = 0; k < 3; ++k) vector.push_back(static_cast<float>(each % 1000 + k));
      ref.push_back(each ^ 0x55555555);
    }
  }
  int64_t id;
  std::vector<int32_t> prompt, ids, length, ref;
  std::vector<float> vector, reward;
  std::string name;
  std::vector<std::string> note;
};

template <typename T>
const std::byte* bytes_of(const T& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

// Values of several rows, as one flat run a field or as a run for each row.
class Given {
 public:
  Given(const std::vector<Values>& rows, bool flat) : rows_(rows), flat_(flat) {}

  template <typename T>
  void array(uint32_t field, std::vector<T> Values::* member) {
    Runs& to = add(field);
    for (const Values& row : rows_) put(to, (row.*member).data(), (row.*member).size() * sizeof(T));
    close(to);
  }
  void text(uint32_t field, const std::function<std::vector<std::string>(const Values&)>& of) {
    Runs& to = add(field);
    to.strings = true;
    for (const Values& row : rows_) {
      std::string all;
      std::vector<uint32_t> sizes;
      for (const std::string& each : of(row)) all += each, sizes.push_back(static_cast<uint32_t>(each.size()));
      put(to, all.data(), all.size());
      if (!flat_ || to.sizes.empty()) to.sizes.emplace_back();
      to.sizes.back().insert(to.sizes.back().end(), sizes.begin(), sizes.end());
    }
    close(to);
  }
  std::vector<PackedSource> sources() {
    std::vector<PackedSource> made;
    for (const auto& each : all_) {
      made.push_back({each->field, each->at, {}});
      if (each->strings) made.back().sizes = each->sizes_at;
    }
    return made;
  }

 private:
  struct Runs {
    uint32_t field;
    bool strings = false;
    std::vector<std::vector<std::byte>> bytes;
    std::vector<std::vector<uint32_t>> sizes;
    std::vector<const std::byte*> at;
    std::vector<const uint32_t*> sizes_at;
  };
  Runs& add(uint32_t field) {
    all_.push_back(std::make_unique<Runs>());
    all_.back()->field = field;
    return *all_.back();
  }
  void put(Runs& to, const void* from, size_t bytes) {
    if (!flat_ || to.bytes.empty()) to.bytes.emplace_back();
    const auto* const begin = static_cast<const std::byte*>(from);
    to.bytes.back().insert(to.bytes.back().end(), begin, begin + bytes);
  }
  static void close(Runs& to) {
    for (const auto& each : to.bytes) to.at.push_back(each.data());
    for (const auto& each : to.sizes) to.sizes_at.push_back(each.data());
  }
  const std::vector<Values>& rows_;
  bool flat_;
  std::vector<std::unique_ptr<Runs>> all_;
};

std::vector<Values> values_from(uint32_t seed, size_t n) {
  std::vector<Values> made;
  for (size_t i = 0; i < n; ++i) made.emplace_back(seed + static_cast<uint32_t>(i));
  return made;
}

std::vector<TaskRow> inserted(Store& store, const std::vector<Values>& values, bool flat = true) {
  std::vector<TaskRow> rows(values.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i].lengths[0] = static_cast<uint32_t>(values[i].prompt.size());
  Given given(values, flat);
  given.array(kPrompt, &Values::prompt);
  given.text(kName, [](const Values& each) { return std::vector<std::string>{each.name}; });
  const std::vector<PackedSource> sources = given.sources();
  size_spans(store, 0, 0, rows, sources, {});
  CHECK(store.tasks()->begin_insert(rows));
  fill_spans(store, 0, 0, rows, sources, {}, 2);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(store.block(kId, rows[i].row), &values[i].id, 8);
  }
  std::vector<uint32_t> generations(rows.size());
  std::vector<double> priorities(rows.size(), 1.0);
  std::vector<int64_t> versions(rows.size());
  std::vector<uint32_t> lengths(rows.size(), 1);
  for (size_t i = 0; i < rows.size(); ++i) versions[i] = values[i].id * 10;
  store.tasks()->finish_insert(rows, {lengths, priorities, versions}, generations);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].generation = generations[i];
  return rows;
}

std::vector<TaskRow> claimed(Store& store, uint32_t task, size_t n) {
  std::vector<TaskRow> rows;
  for (const ClaimedRow& each : store.tasks()->claim(task, {.most = n})) {
    rows.emplace_back();
    rows.back().row = each.row, rows.back().generation = each.generation, rows.back().claim = each.claim;
  }
  return rows;
}

int64_t id_of(const Store& store, uint32_t row) {
  int64_t id = 0;
  std::memcpy(&id, store.block(kId, row), 8);
  return id;
}

void write(Store& store, Write write, uint32_t task, std::vector<TaskRow>& rows, std::span<const PackedSource> sources,
           std::span<const Appended> appended = {}) {
  size_spans(store, task, 0, rows, sources, appended);
  CHECK_EQ(store.tasks()->begin(write, task, rows), rows.size());
  fill_spans(store, task, 0, rows, sources, appended, 2);
  store.tasks()->finish(write, task, rows);
}

void put_answers(Store& store, size_t n, bool flat = true) {
  std::vector<TaskRow> rows = claimed(store, kAnswer, n);
  std::vector<Values> values;
  for (TaskRow& each : rows) {
    values.emplace_back(static_cast<uint32_t>(id_of(store, each.row)));
    each.lengths[1] = static_cast<uint32_t>(values.back().ids.size());
    each.lengths[2] = static_cast<uint32_t>(values.back().length.size());
  }
  Given given(values, flat);
  given.array(kIds, &Values::ids);
  given.array(kVector, &Values::vector);
  given.array(kLength, &Values::length);
  given.text(kNote, [](const Values& each) { return each.note; });
  write(store, Write::put, kAnswer, rows, given.sources());
}

void put_scores(Store& store, size_t n, Write how = Write::put, std::vector<TaskRow> rows = {}, int32_t add = 0) {
  if (how == Write::put) rows = claimed(store, kScore, n);
  std::vector<Values> values;
  for (TaskRow& each : rows) {
    values.emplace_back(static_cast<uint32_t>(id_of(store, each.row)));
    each.lengths = {};
    each.lengths[1] = static_cast<uint32_t>(values.back().ids.size());
    each.lengths[2] = static_cast<uint32_t>(values.back().length.size());
    for (int32_t& ref : values.back().ref) ref += add;
    for (float& reward : values.back().reward) reward += static_cast<float>(add);
  }
  Given given(values, true);
  given.array(kReward, &Values::reward);
  given.array(kRef, &Values::ref);
  write(store, how, kScore, rows, given.sources());
}

struct Memory {
  std::vector<std::byte> bytes;
  PackedRows::Room room() {
    return [this](size_t n) {
      bytes.assign(n + 64, std::byte{0xee});
      const auto at = reinterpret_cast<uintptr_t>(bytes.data());
      return bytes.data() + (64 - at % 64) % 64;
    };
  }
};

template <typename T>
std::vector<T> array_of(const PackedRows& rows, size_t field) {
  const PackedRows::FieldValues& from = rows.field(field);
  std::vector<T> made(from.bytes / sizeof(T));
  if (!made.empty()) std::memcpy(made.data(), from.at, from.bytes);
  return made;
}

std::vector<std::string> strings_of(const PackedRows& rows, size_t field) {
  const PackedRows::FieldValues& from = rows.field(field);
  std::vector<std::string> made;
  for (uint64_t i = 0; i < from.items; ++i) {
    made.emplace_back(reinterpret_cast<const char*>(from.at) + from.bounds[i],
                      static_cast<size_t>(from.bounds[i + 1] - from.bounds[i]));
  }
  return made;
}

void check_batch(const PackedRows& batch, const std::vector<Values>& expected, int32_t added = 0) {
  std::vector<int64_t> id;
  std::vector<int32_t> prompt, ids, length, ref, tokens_at{0}, parts_at{0};
  std::vector<float> vector, reward;
  std::vector<std::string> name, note;
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (const Values& row : expected) {
    id.push_back(row.id);
    name.push_back(row.name);
    append(prompt, row.prompt), append(ids, row.ids), append(vector, row.vector), append(length, row.length);
    append(note, row.note);
    for (const float each : row.reward) reward.push_back(each + static_cast<float>(added));
    for (const int32_t each : row.ref) ref.push_back(each + added);
    tokens_at.push_back(static_cast<int32_t>(ids.size()));
    for (const int32_t each : row.length) parts_at.push_back(parts_at.back() + each);
  }
  CHECK(array_of<int64_t>(batch, kId) == id);
  CHECK(array_of<int32_t>(batch, kPrompt) == prompt);
  CHECK(array_of<int32_t>(batch, kIds) == ids);
  CHECK(array_of<float>(batch, kVector) == vector);
  CHECK(array_of<int32_t>(batch, kLength) == length);
  CHECK(array_of<float>(batch, kReward) == reward);
  CHECK(array_of<int32_t>(batch, kRef) == ref);
  CHECK(strings_of(batch, kName) == name);
  CHECK(strings_of(batch, kNote) == note);
  for (size_t a = 0; a < batch.plan().axes().size(); ++a) {
    if (batch.plan().axes()[a].number != 2) continue;
    CHECK(std::ranges::equal(batch.axis(a).bounds, tokens_at));
    CHECK(std::ranges::equal(batch.axis(a).parts, parts_at));
  }
}

constexpr uint32_t kAllFields[] = {kId, kPrompt, kName, kIds, kVector, kLength, kNote, kReward, kRef};

std::vector<uint32_t> rows_of(const std::vector<TaskRow>& rows) {
  std::vector<uint32_t> made;
  for (const TaskRow& each : rows) made.push_back(each.row);
  return made;
}
std::vector<uint32_t> generations_of(const std::vector<TaskRow>& rows) {
  std::vector<uint32_t> made;
  for (const TaskRow& each : rows) made.push_back(each.generation);
  return made;
}

TEST(rows_written_in_flat_runs_and_in_runs_a_row_are_read_back_packed) {
  for (const bool flat : {true, false}) {
    auto store = store_of_answers();
    const std::vector<Values> values = values_from(100, 40);
    const std::vector<TaskRow> rows = inserted(*store, values, flat);
    store->tasks()->advance(7);
    put_answers(*store, 25, flat);
    store->tasks()->advance(9);
    put_answers(*store, 25, flat);
    put_scores(*store, 40);
    const PackedPlan plan(*store, kAllFields);
    for (const unsigned threads : {1U, 3U}) {
      PackedRows batch(plan, rows_of(rows), generations_of(rows));
      Memory memory;
      CHECK_EQ(batch.read(memory.room(), threads), uint64_t{0});
      check_batch(batch, values);
      CHECK_EQ(batch.versions()[7], int64_t{7});
      CHECK_EQ(batch.versions()[30], int64_t{9});
    }
    CHECK(store->audit().empty());
  }
}

TEST(rows_that_are_skipped_are_passed_over_in_flat_runs) {
  auto store = store_of_answers();
  std::vector<TaskRow> all = inserted(*store, values_from(500, 6));
  std::vector<TaskRow> rows = claimed(*store, kAnswer, 6);
  std::vector<Values> values;
  for (TaskRow& each : rows) {
    values.emplace_back(static_cast<uint32_t>(id_of(*store, each.row)));
    each.lengths[1] = static_cast<uint32_t>(values.back().ids.size());
    each.lengths[2] = static_cast<uint32_t>(values.back().length.size());
  }
  const ClaimedRow lost{rows[2].row, rows[2].generation, rows[2].claim};
  CHECK_EQ(store->tasks()->drop(kAnswer, {&lost, 1}), size_t{0});
  Given given(values, true);
  given.array(kIds, &Values::ids);
  given.array(kVector, &Values::vector);
  given.array(kLength, &Values::length);
  given.text(kNote, [](const Values& each) { return each.note; });
  write(*store, Write::put, kAnswer, rows, given.sources());
  CHECK(rows[2].skipped);
  put_scores(*store, 6);
  values.erase(values.begin() + 2);
  all.erase(all.begin() + 2);
  const PackedPlan plan(*store, kAllFields);
  PackedRows batch(plan, rows_of(all), generations_of(all));
  Memory memory;
  CHECK_EQ(batch.read(memory.room(), 1), uint64_t{0});
  check_batch(batch, values);
  CHECK(store->audit().empty());
}

TEST(appends_of_interleaved_items_are_merged_by_item_and_fill_the_lengths) {
  auto store = store_of_answers();
  inserted(*store, values_from(7, 1));
  std::vector<TaskRow> row = claimed(*store, kAnswer, 1);
  struct Turn {
    uint32_t item;
    std::vector<int32_t> ids;
  };
  // Of the axis that is divided: an append has ids and vectors of one answer.
  const std::vector<Turn> turns = {{2, {1, 2, 3}}, {0, {4}}, {2, {}}, {2, {5, 6}}, {0, {7, 8, 9, 10}}};
  for (const Turn& turn : turns) {
    TaskRow each = row[0];
    each.item = turn.item;
    each.lengths[1] = static_cast<uint32_t>(turn.ids.size());
    std::vector<float> vector;
    for (const int32_t id : turn.ids) vector.insert(vector.end(), {float(id), float(id), float(id)});
    const std::byte *ids = bytes_of(turn.ids), *vectors = bytes_of(vector);
    const std::vector<PackedSource> sources = {{kIds, {&ids, 1}}, {kVector, {&vectors, 1}}};
    size_spans(*store, kAnswer, 2, {&each, 1}, sources, {});
    CHECK_EQ(store->tasks()->begin(Write::append, kAnswer, {&each, 1}, 2), size_t{1});
    fill_spans(*store, kAnswer, 2, {&each, 1}, sources, {}, 1);
    store->tasks()->finish(Write::append, kAnswer, {&each, 1});
    CHECK(!each.skipped);
  }
  CHECK_THROWS(schema, merge_appended(*store, kAnswer, row[0]));  // nothing of item 1
  const std::vector<int32_t> wrong = {5, 1, 5}, few = {5, 0}, right = {5, 0, 5, 0};
  CHECK_THROWS(schema, merge_appended(*store, kAnswer, row[0], wrong));
  CHECK_THROWS(schema, merge_appended(*store, kAnswer, row[0], few));
  const Appended all = merge_appended(*store, kAnswer, row[0], right);
  std::vector<uint8_t> found;
  copy_appended(*store, kAnswer, all, kIds, &found);
  const std::vector<int32_t> merged = {4, 7, 8, 9, 10, 1, 2, 3, 5, 6};
  CHECK_EQ(found.size(), merged.size() * 4);
  CHECK(std::memcmp(found.data(), merged.data(), found.size()) == 0);

  const std::string notes = "onefour";
  const std::byte* text = bytes_of(notes);
  const std::vector<uint32_t> sizes = {3, 0, 0, 4};
  const uint32_t* each_size = sizes.data();
  const std::vector<PackedSource> sources = {{kNote, {&text, 1}, {&each_size, 1}}};
  write(*store, Write::put, kAnswer, row, sources, {&all, 1});
  const uint32_t fields[] = {kIds, kVector, kLength, kNote};
  const PackedPlan plan(*store, fields);
  PackedRows batch(plan, rows_of(row), generations_of(row));
  Memory memory;
  CHECK_EQ(batch.read(memory.room(), 1), uint64_t{0});
  CHECK(array_of<int32_t>(batch, 0) == merged);
  CHECK(array_of<int32_t>(batch, 2) == right);
  CHECK_EQ(array_of<float>(batch, 1)[6], 8.0F);
  CHECK((strings_of(batch, 3) == std::vector<std::string>{"one", "", "", "four"}));
  CHECK(store->audit().empty());
}

TEST(values_that_do_not_add_up_and_fields_that_are_missing_are_refused) {
  auto store = store_of_answers();
  inserted(*store, values_from(7, 1));
  std::vector<TaskRow> row = claimed(*store, kAnswer, 1);
  row[0].lengths[1] = 3, row[0].lengths[2] = 2;
  const std::vector<int32_t> ids = {1, 2, 3}, length = {1, 1}, negative = {4, -1}, right = {1, 2};
  const std::vector<float> vector(9);
  const std::vector<uint32_t> sizes = {0, 0};
  const uint32_t* each_size = sizes.data();
  const std::byte *ids_at = bytes_of(ids), *vector_at = bytes_of(vector), *none = nullptr;
  const auto sources = [&](const std::byte* const& lengths) {
    return std::vector<PackedSource>{{kIds, {&ids_at, 1}},
                                     {kVector, {&vector_at, 1}},
                                     {kLength, {&lengths, 1}},
                                     {kNote, {&none, 1}, {&each_size, 1}}};
  };
  for (const std::vector<int32_t>* bad : {&length, &negative}) {
    const std::byte* at = bytes_of(*bad);
    CHECK_THROWS(schema, size_spans(*store, kAnswer, 0, row, sources(at), {}));
  }
  const std::byte* at = bytes_of(right);
  std::vector<PackedSource> all = sources(at);
  size_spans(*store, kAnswer, 0, row, all, {});
  CHECK(row[0].units > 0);
  all.push_back({kIds, {&ids_at, 1}});
  CHECK_THROWS(schema, size_spans(*store, kAnswer, 0, row, all, {}));
  all.pop_back();
  all.erase(all.begin() + 1);
  CHECK_THROWS(schema, size_spans(*store, kAnswer, 0, row, all, {}));
  all[0].field = kRef;
  CHECK_THROWS(schema, size_spans(*store, kAnswer, 0, row, all, {}));
}

TEST(rows_that_are_gone_or_lack_a_task_are_torn_and_the_task_is_named) {
  auto store = store_of_answers();
  std::vector<TaskRow> rows = inserted(*store, values_from(1, 4));
  put_answers(*store, 2);
  std::vector<uint32_t> numbers = rows_of(rows), generations = generations_of(rows);
  generations[1] += 2;
  numbers.push_back(1'000'000), generations.push_back(1);
  const uint32_t fields[] = {kPrompt, kIds};
  const PackedPlan plan(*store, fields);
  PackedRows batch(plan, numbers, generations);
  Memory memory;
  CHECK_EQ(batch.read(memory.room(), 1), uint64_t{4});
  CHECK(std::ranges::equal(batch.torn(), std::vector<uint8_t>{0, 1, 1, 1, 1}));
  CHECK(std::ranges::equal(batch.unready(), std::vector<uint8_t>{0, 0, kAnswer + 1, kAnswer + 1, 0}));
  CHECK(array_of<int32_t>(batch, 0) == Values(1).prompt);
  CHECK(array_of<int32_t>(batch, 1) == Values(1).ids);
}

TEST(a_batch_of_a_replay_is_packed_and_its_rows_are_freed_with_their_spans) {
  auto store = store_of_answers();
  const std::vector<Values> values = values_from(30, 12);
  inserted(*store, values);
  put_answers(*store, 12);
  put_scores(*store, 12);
  const PackedPlan plan(*store, kAllFields);
  BatchSampler::Settings settings;
  settings.form = BatchSampler::Form::ordered;
  const BatchSampler sampler(*store, settings);
  const uint64_t full = store->tasks()->heap().free_units();
  for (uint64_t step = 0; step < 3; ++step) {
    Memory memory;
    PackedCopier copier(plan, memory.room(), 1);
    std::vector<uint32_t> rows(4), generations(4), steps(4);
    std::vector<double> probability(4);
    std::vector<uint8_t> torn(4);
    std::vector<int32_t> starts(4), lengths(4);
    std::vector<int64_t> versions(4);
    BatchArrays arrays;
    arrays.rows = rows, arrays.generations = generations, arrays.steps = steps, arrays.probability = probability;
    arrays.torn = torn, arrays.starts = starts, arrays.lengths = lengths, arrays.versions = versions;
    const BatchSampler::Room room = [&](size_t) -> const BatchArrays& { return arrays; };
    auto begun = sampler.begin(room, 4, {.step = step}, {}, copier);
    CHECK(begun.has_value());
    CHECK(sampler.finish(*begun, room, {}, copier).done);
    check_batch(copier.rows(),
                {values.begin() + static_cast<long>(4 * step), values.begin() + static_cast<long>(4 * step + 4)});
  }
  CHECK_EQ(store->counts().committed, uint64_t{0});
  CHECK(store->tasks()->heap().free_units() > full);
  CHECK_EQ(store->tasks()->heap().free_units() + 1, store->tasks()->heap().units());
  CHECK(store->audit().empty());
}

// Readers beside a writer that rewrites scores and one that drops and inserts rows: what is read is one state of each
// row, and nothing of another.
TEST(rows_that_are_rewritten_freed_and_inserted_anew_are_read_whole_or_torn) {
  auto store = store_of_answers(32, 2 << 20);
  std::vector<TaskRow> rows = inserted(*store, values_from(1, 16));
  put_answers(*store, 16);
  put_scores(*store, 16);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> rewritten{0};
  std::thread rewriter([&] {
    for (int32_t add = 1; !stop; ++add) {
      put_scores(*store, 0, Write::rewrite, {rows.begin(), rows.begin() + 8}, add);
      rewritten += 8;
    }
  });
  std::thread turnover([&] {
    for (uint32_t seed = 1000; !stop; seed += 4) {
      const std::vector<TaskRow> some = inserted(*store, values_from(seed, 4));
      put_answers(*store, 4);
      std::this_thread::yield();
      store->remove(rows_of(some), generations_of(some));
    }
  });
  uint64_t read = 0, torn = 0;
  const uint64_t began = monotonic_ns();
  while (testing::within(began, 0.5) || rewritten < 100) {
    const uint32_t fields[] = {kId, kIds, kReward, kRef};
    const PackedPlan plan(*store, fields);
    PackedRows batch(plan, rows_of(rows), generations_of(rows));
    Memory memory;
    CHECK_EQ(batch.read(memory.room(), 1), uint64_t{0});
    const std::vector<int32_t> ids = array_of<int32_t>(batch, 1), ref = array_of<int32_t>(batch, 3);
    const std::vector<float> reward = array_of<float>(batch, 2);
    size_t token = 0, answer = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Values expected(static_cast<uint32_t>(i + 1));
      const int32_t add = expected.ids.empty() ? 0 : ref[token] - expected.ref[0];
      bool whole = true;
      for (size_t k = 0; k < expected.ids.size(); ++k, ++token) {
        whole &= ids[token] == expected.ids[k] && ref[token] == expected.ref[k] + add;
      }
      for (size_t k = 0; k < expected.reward.size(); ++k, ++answer) {
        whole &= expected.ids.empty() || reward[answer] == expected.reward[k] + static_cast<float>(add);
      }
      CHECK(whole);
      ++read;
    }
    // Rows that come and go.
    const uint32_t insert[] = {kId, kPrompt, kIds};
    const PackedPlan other(*store, insert);
    std::vector<uint32_t> numbers, generations;
    for (uint32_t row = 0; row < 32; ++row) {
      numbers.push_back(row), generations.push_back(generation_of(store->words()[row].load()) | 1);
    }
    PackedRows any(other, numbers, generations);
    torn += any.read(memory.room(), 1);
    for (size_t i = 0, prompt = 0, at = 0; i < numbers.size(); ++i) {
      const size_t of_prompt = static_cast<size_t>(any.axis(0).lengths[i]),
                   tokens = static_cast<size_t>(any.axis(1).lengths[i]);
      if (any.torn()[i] == 0) {
        const Values expected(static_cast<uint32_t>(array_of<int64_t>(any, 0)[i]));
        const std::vector<int32_t> prompts = array_of<int32_t>(any, 1), all = array_of<int32_t>(any, 2);
        CHECK_EQ(of_prompt, expected.prompt.size());
        CHECK_EQ(tokens, expected.ids.size());
        CHECK(std::equal(expected.prompt.begin(), expected.prompt.end(), prompts.begin() + static_cast<long>(prompt)));
        CHECK(std::equal(expected.ids.begin(), expected.ids.end(), all.begin() + static_cast<long>(at)));
      }
      CHECK(any.torn()[i] == 0 || of_prompt + tokens == 0);
      prompt += of_prompt, at += tokens;
    }
  }
  stop = true;
  rewriter.join();
  turnover.join();
  CHECK(read > 0);
  CHECK(torn > 0);
  CHECK(store->audit().empty());
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
