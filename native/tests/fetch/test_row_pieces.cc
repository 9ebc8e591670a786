// Row pieces: the copies that they tell of make what a fetch makes, and a row that changes meanwhile is known.

#include "fetch/row_pieces.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "fetch/fetch.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

constexpr uint32_t kFields = 3;
constexpr std::byte kOld{0xa5};

// A batch of tagged rows by pieces, whose copies are made when it is asked for them.
struct Copied {
  Copied(const Store& store, size_t n, size_t room, uint32_t window)
      : known(n, window != 0 ? window : kTaggedSteps),
        contents(n),
        words(3, std::vector<uint64_t>(n * kFields)),
        gaps(2, std::vector<uint64_t>(2 * n * kFields)) {
    for (uint32_t f = 0; f < kFields; ++f) {
      fields[f] = {f, nullptr};
      offsets[f] = bytes;
      bytes += room * fetched_row_bytes(store, f, window, nullptr);
    }
    request.rows.window = window;
    request.rows.fields = fields;
    known.take(&request.rows);
    request.offsets = offsets;
    request.contents = contents;
    request.to = words[0];
    request.from = words[1];
    request.bytes = words[2];
    request.gap_at = gaps[0];
    request.gap_bytes = gaps[1];
    batch.assign(bytes, kOld);
  }

  void copy(const Store& store) {
    for (size_t g = 0; g < found.gaps; ++g) std::memset(&batch[gaps[0][g]], 0, gaps[1][g]);
    const std::byte* const base = store.block(0, 0) - store.fields()[0].offset;
    for (size_t p = 0; p < found.pieces; ++p) std::memcpy(&batch[words[0][p]], base + words[1][p], words[2][p]);
  }

  FetchField fields[kFields];
  uint64_t offsets[kFields];
  uint64_t bytes = 0;
  RowMetadata known;
  std::vector<uint64_t> contents;
  std::vector<std::vector<uint64_t>> words, gaps;
  std::vector<std::byte> batch;
  PieceRequest request;
  PieceCounts found;
};

struct Rows {
  std::vector<uint32_t> rows, generations;
};

Rows inserted(Store& store, const std::vector<uint64_t>& tags) {
  Rows made{std::vector<uint32_t>(tags.size()), std::vector<uint32_t>(tags.size())};
  insert_tagged(store, tags, made.rows, made.generations);
  return made;
}

TEST(copies_of_the_pieces_make_the_batch_of_a_fetch) {
  constexpr size_t kRows = 9;
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(16));
  std::vector<uint64_t> tags(kRows);
  for (size_t i = 0; i < kRows; ++i) tags[i] = 7 * i + 3;
  const Rows keys = inserted(*store, tags);
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const size_t n = 1 + random() % 12;
    const uint32_t window = round % 3 == 0 ? 0 : 1 + random() % 150;
    std::vector<uint32_t> rows(n), generations(n), places(n);
    std::vector<int32_t> ends(n);
    for (size_t i = 0; i < n; ++i) {
      const size_t which = random() % kRows;
      rows[i] = keys.rows[which];
      generations[i] = keys.generations[which] + (random() % 8 == 0 ? 2 : 0);
      places[i] = static_cast<uint32_t>(n - 1 - i);
      ends[i] = static_cast<int32_t>(random() % kTaggedSteps);
    }
    Copied made(*store, n, n, window);
    FetchRequest& asked = made.request.rows;
    asked.rows = rows;
    asked.generations = generations;
    asked.pad_left = round % 2 == 0;
    if (round % 5 != 0 && window != 0) asked.ends = ends;
    if (round % 4 != 0) asked.places = places;
    made.found = locate_pieces(*store, made.request);
    made.copy(*store);
    CHECK_EQ(find_changed(*store, rows, generations, made.contents, asked.torn), uint64_t{0});

    std::vector<std::byte> expected(made.bytes, kOld);
    RowMetadata known(n, window != 0 ? window : kTaggedSteps);
    FetchRequest direct = asked;
    known.take(&direct);
    FetchField fields[kFields];
    for (uint32_t f = 0; f < kFields; ++f) fields[f] = {f, &expected[made.offsets[f]]};
    direct.fields = fields;
    CHECK_EQ(fetch(*store, direct), made.found.torn);
    CHECK(known.torn == made.known.torn);
    CHECK(expected == made.batch);  // where keys are stale both have left what was there
    for (size_t i = 0; i < n; ++i) {
      if (known.torn[i] != 0) continue;
      CHECK_EQ(known.starts[i], made.known.starts[i]);
      CHECK_EQ(known.lengths[i], made.known.lengths[i]);
      CHECK_EQ(known.versions[i], made.known.versions[i]);
      const size_t steps = known.mask.size() / n;
      CHECK(std::equal(&known.mask[i * steps], &known.mask[i * steps] + steps, &made.known.mask[i * steps]));
    }
  }
}

TEST(a_row_that_changes_while_its_pieces_are_copied_is_told) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  const Rows keys = inserted(*store, {21, 22, 23, 24});
  Copied made(*store, 4, 4, 5);
  made.request.rows.rows = keys.rows;
  made.request.rows.generations = keys.generations;
  made.found = locate_pieces(*store, made.request);
  CHECK_EQ(made.found.torn, uint64_t{0});
  // One is removed and another written anew in its place, one is written in place, and two stay as they are.
  store->remove({keys.rows.data() + 1, 1}, {keys.generations.data() + 1, 1});
  inserted(*store, {25});
  const std::vector<uint64_t> late(3, 9);
  const FieldSource source{2, reinterpret_cast<const std::byte*>(late.data()), 24};
  CHECK_EQ(store->rewrite({keys.rows.data() + 2, 1}, {keys.generations.data() + 2, 1}, {&source, 1}, {}, {}),
           uint64_t{0});
  made.copy(*store);
  CHECK_EQ(find_changed(*store, keys.rows, keys.generations, made.contents, made.known.torn), uint64_t{2});
  CHECK(made.known.torn == (std::vector<uint8_t>{0, 1, 1, 0}));
  // What is torn already stays so and is not counted again.
  CHECK_EQ(find_changed(*store, keys.rows, keys.generations, made.contents, made.known.torn), uint64_t{0});
  CHECK(made.known.torn == (std::vector<uint8_t>{0, 1, 1, 0}));
}

TEST(a_row_that_grows_while_its_pieces_are_copied_is_whole) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  uint32_t row = 0, generation = 0;
  store->allocate({&row, 1});
  begin_tagged(*store, row, 31);
  grow_tagged(*store, row, 31, 0, 6);
  const uint32_t length = 3;
  store->publish({&row, 1}, {{&length, 1}, {}, {}}, {&generation, 1});
  Copied made(*store, 1, 1, 0);
  made.request.rows.rows = {&row, 1};
  made.request.rows.generations = {&generation, 1};
  made.found = locate_pieces(*store, made.request);
  const uint32_t longer = 6;
  store->extend(row, longer);
  made.copy(*store);
  CHECK_EQ(find_changed(*store, {&row, 1}, {&generation, 1}, made.contents, made.known.torn), uint64_t{0});
  CHECK_EQ(made.known.lengths[0], 3);
  const auto* steps = reinterpret_cast<const uint64_t*>(&made.batch[made.offsets[1]]);
  CHECK_EQ(steps[2 * kTaggedWidth], tagged_step(31, 2, 0));
  CHECK_EQ(steps[3 * kTaggedWidth], uint64_t{0});
}

TEST(what_leads_out_of_the_segment_or_of_its_arrays_is_refused) {
  auto store = Store::create(testing::unique_name(), tagged_fields(), store_options(4));
  const Rows keys = inserted(*store, {41});
  Copied made(*store, 1, 1, 5);
  const uint32_t beyond = 4;
  made.request.rows.rows = {&beyond, 1};
  made.request.rows.generations = keys.generations;
  CHECK_THROWS(schema, locate_pieces(*store, made.request));
  CHECK_THROWS(schema, find_changed(*store, {&beyond, 1}, keys.generations, made.contents, made.known.torn));
  made.request.rows.rows = keys.rows;
  made.request.bytes = made.request.bytes.first(2);
  CHECK_THROWS(schema, locate_pieces(*store, made.request));
  made.request.bytes = made.words[2];
  made.fields[1].field = kFields;
  CHECK_THROWS(schema, locate_pieces(*store, made.request));
  CHECK_THROWS(schema, find_changed(*store, keys.rows, keys.generations, made.contents, {}));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
