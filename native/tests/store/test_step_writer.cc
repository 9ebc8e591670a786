// StepWriter: every step that is given is in the rows afterwards, in its place, whatever environments do, whoever reads
// meanwhile, and whoever is killed.

#include "store/step_writer.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <random>
#include <string>
#include <thread>

#include "base/clock.h"
#include "fetch/fetch.h"
#include "tests/support/check.h"
#include "tests/support/tagged_rows.h"

namespace geartrain {
namespace {

constexpr uint32_t kLength = 8;  // steps of a row: seven actions

// An observation is (episode, step within it), an action repeats it: every step can be checked by itself.
std::vector<FieldSpec> step_fields() {
  return {{"obs", kInt64, 8, true, {kLength, 2}},    {"action", kInt64, 8, true, {kLength, 2}},
          {"terminated", kBool, 1, true, {kLength}}, {"truncated", kBool, 1, true, {kLength}},
          {"last", kBool, 1, true, {kLength}},       {"step_version", kInt64, 8, true, {kLength}}};
}
constexpr uint32_t kObs = 0, kAction = 1, kTerminated = 2, kTruncated = 3, kLast = 4, kVersion = 5;

std::unique_ptr<Store> step_store(uint64_t capacity, uint32_t max_times_sampled = 0) {
  StoreOptions options;
  options.capacity = capacity;
  options.max_times_sampled = max_times_sampled;
  options.lock_timeout_s = 30;
  return Store::create(testing::unique_name(), step_fields(), options);
}

StepWriterOptions writer_options(uint32_t environments, Autoreset autoreset, uint32_t publish_every = 0,
                                 uint32_t overlap = 0) {
  StepWriterOptions options;
  options.environments = environments;
  options.autoreset = autoreset;
  options.publish_every = publish_every;
  options.overlap = overlap;
  options.roles = {FieldRole::observation, FieldRole::value, FieldRole::terminated,
                   FieldRole::truncated,   FieldRole::last,  FieldRole::step_version};
  return options;
}

// Environments whose episodes end at random, and what they give to a writer.
class Environments {
 public:
  Environments(Store& store, const StepWriterOptions& options, uint32_t seed, int64_t first_episode)
      : n_(options.environments),
        autoreset_(options.autoreset),
        writer_(store, options),
        random_(seed),
        next_episode_(first_episode),
        obs_(2 * n_),
        finals_(2 * n_),
        actions_(2 * n_),
        terminated_(n_),
        truncated_(n_),
        resetting_(n_) {
    for (uint32_t e = 0; e < n_; ++e) start(e);
    const StepColumn columns[1] = {column(kObs, obs_)};
    writer_.begin(columns, {}, 0, true, &completed);
  }

  void step() {
    advance();
    submit();
  }

  // Gives the writer the step that the environments are at; once more where it was refused.
  void submit() {
    const StepColumn values[1] = {column(kAction, actions_)}, observations[1] = {column(kObs, obs_)},
                     finals[1] = {column(kObs, finals_)};
    StepInput input;
    input.values = values;
    input.observations = observations;
    if (autoreset_ == Autoreset::same_step) input.finals = finals;
    input.terminated = terminated_;
    input.truncated = truncated_;
    input.version = version_;
    CHECK_EQ(writer_.step(input, true, &completed), size_t{0});
    if (autoreset_ != Autoreset::disabled) return;
    std::vector<uint8_t> ended(n_);
    for (uint32_t e = 0; e < n_; ++e) {
      ended[e] = terminated_[e] | truncated_[e];
      if (ended[e] != 0) start(e);
    }
    writer_.begin(observations, ended, version_, true, &completed);
  }

  StepWriter& writer() { return writer_; }

  uint64_t actions = 0, episodes = 0;
  CompletedRows completed;

 private:
  static StepColumn column(uint32_t field, const std::vector<int64_t>& values) {
    return {field, reinterpret_cast<const std::byte*>(values.data()), 16, nullptr};
  }
  void advance() {
    ++version_;
    actions_ = obs_;
    for (uint32_t e = 0; e < n_; ++e) {
      terminated_[e] = truncated_[e] = 0;
      if (resetting_[e] != 0) {  // next_step: this call only brings the first observation
        start(e);
        resetting_[e] = 0;
        continue;
      }
      ++obs_[2 * e + 1];
      ++actions;
      const uint32_t dice = random_() % 16;
      (dice == 0 ? terminated_ : truncated_)[e] = dice <= 1;
      if (dice > 1) continue;
      ++episodes;
      finals_[2 * e] = obs_[2 * e];
      finals_[2 * e + 1] = obs_[2 * e + 1];
      resetting_[e] = autoreset_ == Autoreset::next_step;
      if (autoreset_ == Autoreset::same_step) start(e);
    }
  }
  void start(uint32_t e) {
    obs_[2 * e] = next_episode_++;
    obs_[2 * e + 1] = 0;
  }

  const uint32_t n_;
  const Autoreset autoreset_;
  StepWriter writer_;
  std::mt19937 random_;
  int64_t next_episode_, version_ = 0;
  std::vector<int64_t> obs_, finals_, actions_;
  std::vector<uint8_t> terminated_, truncated_, resetting_;
};

struct Found {
  uint64_t rows = 0, actions = 0, ends = 0, wrong = 0, lost = 0;
};

// Checks every step of the rows by itself, and against its neighbours.
Found check_rows(const Store& store, std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                 uint32_t overlap = 0) {
  const size_t n = rows.size();
  std::vector<int64_t> obs(n * kLength * 2), action(n * kLength * 2), version(n * kLength);
  std::vector<uint8_t> terminated(n * kLength), truncated(n * kLength), last(n * kLength), torn(n);
  std::vector<int32_t> lengths(n);
  const auto out = [](auto& values) { return reinterpret_cast<std::byte*>(values.data()); };
  const FetchField fields[6] = {
      {kObs, out(obs)},   {kAction, out(action)},  {kTerminated, out(terminated)}, {kTruncated, out(truncated)},
      {kLast, out(last)}, {kVersion, out(version)}};
  FetchRequest request;
  request.rows = rows;
  request.generations = generations;
  request.fields = fields;
  request.torn = torn;
  request.lengths = lengths;
  fetch(store, request);
  Found found;
  for (size_t i = 0; i < n; ++i) {
    if (torn[i] != 0) {
      ++found.lost;
      continue;
    }
    ++found.rows;
    const size_t first = i * kLength, length = static_cast<size_t>(lengths[i]);
    const bool closed = last[first + length - 1] != 0;
    const size_t steps = closed ? length - 1 : length;  // of a row that grows the last one has its action as well
    found.actions += steps - std::min<size_t>(steps, obs[2 * first + 1] == 0 ? 0 : overlap);
    bool good = length >= 1;
    for (size_t t = 0; t < steps; ++t) {
      const size_t at = first + t;
      good &= obs[2 * at] == obs[2 * first] && obs[2 * at + 1] == obs[2 * first + 1] + static_cast<int64_t>(t);
      good &= action[2 * at] == obs[2 * at] && action[2 * at + 1] == obs[2 * at + 1];
      good &= last[at] == 0 && version[at] > 0 && (t == 0 || version[at] == version[at - 1] + 1);
      good &= t + 1 == steps || (terminated[at] == 0 && truncated[at] == 0);
    }
    if (closed) {
      const size_t at = first + steps;
      good &= obs[2 * at] == obs[2 * first] && obs[2 * at + 1] == obs[2 * first + 1] + static_cast<int64_t>(steps);
      good &= action[2 * at] == 0 && terminated[at] == 0 && truncated[at] == 0;
      found.ends += terminated[at - 1] + truncated[at - 1];
    }
    found.wrong += !good;
  }
  return found;
}

Found check_all(Store& store, uint32_t overlap = 0) {
  std::vector<uint32_t> rows, generations;
  store.keys(&rows, &generations);
  return check_rows(store, rows, generations, overlap);
}

TEST(every_step_is_in_its_row_in_every_autoreset_mode) {
  for (const Autoreset autoreset : {Autoreset::next_step, Autoreset::same_step, Autoreset::disabled}) {
    for (const uint32_t publish_every : {0u, 3u}) {
      for (const uint32_t overlap : {0u, 2u}) {
        auto store = step_store(600);
        Environments envs(*store, writer_options(3, autoreset, publish_every, overlap), 7, 1);
        for (int i = 0; i < 300; ++i) envs.step();
        CHECK(envs.episodes > 20);
        CompletedRows cut;
        envs.writer().cut({}, true, &cut);
        const Found found = check_all(*store, overlap);
        CHECK_EQ(found.wrong, uint64_t{0});
        CHECK_EQ(found.actions, envs.actions);
        CHECK_EQ(found.ends, envs.episodes);
        CHECK_EQ(found.rows, envs.completed.rows.size() + cut.rows.size());
        CHECK_EQ(store->counts().open + store->counts().writing, uint64_t{0});
        check_sound(*store);
      }
    }
  }
}

TEST(pages_of_large_steps_are_mapped_at_once_where_a_writer_writes_to_them_first) {
  constexpr uint32_t kPixels = 64 << 10, kRows = 4, kSteps = 4;
  StoreOptions store_options;
  store_options.capacity = kRows;
  auto store = Store::create(testing::unique_name(),
                             {{"image", 2, 1, true, {kSteps, kPixels}},
                              {"action", kInt64, 8, true, {kSteps, 2}},
                              {"terminated", kBool, 1, true, {kSteps}},
                              {"truncated", kBool, 1, true, {kSteps}},
                              {"last", kBool, 1, true, {kSteps}},
                              {"step_version", kInt64, 8, true, {kSteps}}},
                             store_options);
  StepWriter writer(*store, writer_options(1, Autoreset::next_step, 0, 1));
  std::vector<uint8_t> image(kPixels);
  const int64_t action[2] = {1, 2};
  const std::vector<uint8_t> no(1, 0);
  const StepColumn observation{0, reinterpret_cast<const std::byte*>(image.data()), kPixels};
  const StepColumn value{1, reinterpret_cast<const std::byte*>(action), sizeof action};
  const StepInput input{.values = {&value, 1}, .observations = {&observation, 1}, .terminated = no, .truncated = no};
  CompletedRows completed;
  std::byte page[1];
  const bool maps = map_for_writing(store->block(0, 0), sizeof page);  // of Linux 5.14
  uint8_t shade = 1;
  std::fill(image.begin(), image.end(), shade);
  CHECK_EQ(writer.begin({&observation, 1}, {}, 0, true, &completed), size_t{0});
  for (uint32_t step = 0; step < 40; ++step) {
    std::fill(image.begin(), image.end(), ++shade);
    CHECK_EQ(writer.step(input, true, &completed), size_t{0});
    if (step == 1) CHECK_EQ(writer.mapped_steps(), uint64_t{maps ? 3u : 0u});
  }
  CHECK_EQ(writer.mapped_steps(), uint64_t{maps ? kRows * kSteps : 0u});  // each step of each row once
  for (size_t i = 0; i < completed.rows.size(); ++i) {
    const std::byte* images = store->block(0, completed.rows[i]);
    if (i + kRows > completed.rows.size() + 1) {
      for (uint32_t t = 1; t < kSteps; ++t) {
        CHECK_EQ(static_cast<int>(images[t * kPixels]), static_cast<int>(images[(t - 1) * kPixels]) + 1);
        CHECK_EQ(static_cast<int>(images[(t + 1) * kPixels - 1]), static_cast<int>(images[t * kPixels]));
      }
    }
  }
}

TEST(environments_whose_newest_step_has_other_values_are_told) {
  auto store = step_store(16);
  for (const uint32_t overlap : {1u, 2u}) {
    StepWriter writer(*store, writer_options(3, Autoreset::disabled, 1, overlap));
    std::vector<int64_t> obs(6), action{1, 1, 2, 2, 3, 3};
    const std::vector<uint8_t> no(3, 0);
    const StepColumn observation{kObs, reinterpret_cast<const std::byte*>(obs.data()), 16};
    const StepColumn value{kAction, reinterpret_cast<const std::byte*>(action.data()), 16};
    const StepInput input{.values = {&value, 1}, .observations = {&observation, 1}, .terminated = no, .truncated = no};
    CompletedRows completed;
    std::vector<uint8_t> differing;
    const std::vector<uint8_t> all(3, 1), none(3, 0), second{0, 1, 0}, first{1, 0, 0};
    writer.differing({&value, 1}, &differing);
    CHECK(differing == all);
    writer.begin({&observation, 1}, {}, 0, true, &completed);
    writer.differing({&value, 1}, &differing);
    CHECK(differing == all);                 // no action yet
    for (int step = 0; step < 20; ++step) {  // through the ends of rows
      writer.step(input, true, &completed);
      writer.differing({&value, 1}, &differing);
      CHECK(differing == none);
      action[3] += 1;  // the last number of the second environment's
      writer.differing({&value, 1}, &differing);
      CHECK(differing == second);
    }
    writer.step(input, true, &completed);
    const std::vector<uint8_t> ends{1, 0, 0};
    writer.cut(ends, true, &completed);
    writer.differing({&value, 1}, &differing);
    CHECK(differing == first);
    writer.abandon();
  }
}

// Values of `n` environments for a store of which two fields tell about rows, and no step is looked at.
struct Shares {
  Shares(uint32_t n, const StepWriterOptions& some, bool share_rows = false) : n(n) {
    std::vector<FieldSpec> fields = step_fields();
    fields.push_back({"geartrain.repeats", kInt32, 4, false, {3}});
    fields.push_back({"geartrain.episodes", kInt32, 4, false, {}});
    store = Store::create(testing::unique_name(), fields, store_options(16));
    StepWriterOptions options = some;
    options.share_rows = share_rows;
    options.roles.push_back(FieldRole::repeats);
    options.roles.push_back(FieldRole::episodes);
    writer.emplace(*store, options);
    begin();
  }

  void begin() { writer->begin(observations, {}, 0, true, &completed); }
  void step(bool ends = false, std::span<const uint8_t> mask = {}) {
    const std::vector<uint8_t> terminated(n, ends), truncated(n, 0);
    writer->step({.values = actions,
                  .observations = observations,
                  .terminated = terminated,
                  .truncated = truncated,
                  .mask = mask},
                 true, &completed);
  }
  void steps(uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) step();
  }
  void end() {
    step(true);
    begin();
  }
  std::string notes(uint32_t row) const {
    const SharedSteps found = store->row_repeats().of(row);
    return std::to_string(found.first) + (found.goes_on_here ? "<" : "") + " " + std::to_string(found.last) +
           (found.goes_on_there ? ">" : "");
  }
  // Of the rows that are complete, in their order.
  std::vector<std::string> notes() const {
    std::vector<std::string> found;
    for (const uint32_t row : completed.rows) found.push_back(notes(row));
    return found;
  }

  const uint32_t n;
  const std::vector<int64_t> values = std::vector<int64_t>(2 * n);
  const std::vector<StepColumn> observations{{kObs, reinterpret_cast<const std::byte*>(values.data()), 16}};
  const std::vector<StepColumn> actions{{kAction, reinterpret_cast<const std::byte*>(values.data()), 16}};
  std::unique_ptr<Store> store;
  std::optional<StepWriter> writer;
  CompletedRows completed;
};

// A row: its first so many steps repeat ("<": its episode began before it), so many of its last ones are repeated (">":
// its episode goes on).
using Notes = std::vector<std::string>;

TEST(rows_note_how_many_steps_they_share_with_their_neighbours) {
  for (const uint32_t publish_every : {0u, 2u}) {
    Shares two(1, writer_options(1, Autoreset::disabled, publish_every, 2));
    two.steps(19);  // rows of seven actions: 0 to 6, 5 to 11, 10 to 16, 15 to the end
    two.end();
    two.steps(3);
    two.end();  // fits a row
    two.steps(8);
    two.writer->cut({}, true, &two.completed);
    two.begin();
    two.steps(6);
    two.end();  // its last action fills the row
    CHECK(two.notes() == (Notes{"0 2>", "2< 2>", "2< 2>", "2< 0", "0 0", "0 2>", "2< 0", "0 0"}));

    Shares none(1, writer_options(1, Autoreset::disabled, publish_every, 0));
    none.steps(9);
    none.end();
    CHECK(none.notes() == (Notes{"0 0>", "0< 0"}));
  }
}

TEST(an_episode_that_is_repeated_as_a_whole_goes_on_from_nowhere) {
  Shares shared(1, writer_options(1, Autoreset::disabled, 0, 3), true);
  shared.steps(3);
  shared.end();     // four actions and the last step: the next episode begins at step 5
  shared.steps(2);  // and fills the row
  CHECK(shared.notes() == Notes{"0 2>"});
  shared.steps(5);  // 2 + 5 actions
  CHECK(shared.notes() == (Notes{"0 2>", "2 3>"}));
  shared.end();
  shared.writer->cut({}, true, &shared.completed);
  CHECK(shared.notes() == (Notes{"0 2>", "2 3>", "3< 0"}));
}

TEST(a_row_whose_last_step_is_refused_is_not_noted_as_followed) {
  Shares both(2, writer_options(2, Autoreset::disabled, 2, 2));
  const uint8_t first[2] = {1, 0}, second[2] = {0, 1};
  for (int i = 0; i < 6; ++i) both.step(false, first);
  std::vector<uint32_t> rows, generations;
  both.store->keys(&rows, &generations);
  const uint32_t filled = rows.at(0);
  for (int i = 0; i < 3; ++i) both.step(false, second);
  both.store->keys(&rows, &generations);
  const uint32_t other = rows.at(0) == filled ? rows.at(1) : rows.at(0);
  both.store->extend(other, kLength);  // nobody else may: what is due next there, four steps, is refused
  CHECK_THROWS(schema, both.step());   // the first environment's row would be full
  CHECK_EQ(both.notes(filled), std::string("0 0"));
  both.store->status()[other].length = 2;
  both.step();
  CHECK_EQ(both.notes(filled), std::string("0 2>"));
}

TEST(rows_that_grow_are_read_whole_beside_their_writers_and_eviction) {
  auto store = step_store(40);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (uint32_t w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      Environments envs(*store, writer_options(4, w == 0 ? Autoreset::next_step : Autoreset::same_step, 2, 1), w,
                        w * 1'000'000);
      while (!stop) envs.step();
      envs.writer().abandon();
    });
  }
  Found seen;
  const uint64_t began = monotonic_ns();
  for (int round = 0; round < 400 || (seen.rows == 0 && testing::within(began, 20)); ++round) {
    const Found found = check_all(*store, 1);
    seen.rows += found.rows;
    seen.wrong += found.wrong;
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  CHECK(seen.rows > 0);
  CHECK_EQ(seen.wrong, uint64_t{0});
  CHECK_EQ(store->counts().open + store->counts().writing, uint64_t{0});
  check_sound(*store);
}

TEST(a_step_that_is_refused_leaves_everything_as_it_was_and_can_be_given_again) {
  auto store = step_store(4);
  Environments envs(*store, writer_options(2, Autoreset::same_step, 1), 3, 1);
  uint32_t taken[2];
  store->allocate(taken);  // no block is left for the rows of the next episodes
  int refused = 0;
  for (int i = 0; i < 100 && refused == 0; ++i) {
    try {
      envs.step();
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::full);
      ++refused;
    }
  }
  CHECK_EQ(refused, 1);
  CHECK_EQ(check_all(*store).wrong, uint64_t{0});
  check_sound(*store);
  store->abandon(taken);
  envs.submit();
  for (int i = 0; i < 5; ++i) envs.step();
  CHECK_EQ(check_all(*store).wrong, uint64_t{0});
  check_sound(*store);
}

TEST(what_is_refused_in_the_middle_of_a_recorders_step_changes_nothing) {
  StoreOptions options = store_options(16);
  const std::vector<FieldSpec> fields{
      {"obs", 12, 4, true, {10, 1}}, {"terminated", 1, 1, true, {10}}, {"last", 1, 1, true, {10}}};
  auto store = Store::create(testing::unique_name(), fields, options);
  StepWriterOptions writing;
  writing.environments = 2;
  writing.publish_every = 2;
  writing.autoreset = Autoreset::disabled;
  writing.roles = {FieldRole::observation, FieldRole::terminated, FieldRole::last};
  StepWriter writer(*store, writing);
  const float values[2] = {1, 2};
  const StepColumn column{0, reinterpret_cast<const std::byte*>(values), sizeof(float)};
  const uint8_t none[2] = {0, 0}, second[2] = {0, 1};
  CompletedRows completed;
  writer.begin({&column, 1}, {}, 0, false, &completed);
  const auto step = [&](const uint8_t* terminated, const uint8_t* mask) {
    StepInput input;
    input.observations = {&column, 1};
    input.terminated = {terminated, 2};
    input.truncated = none;
    if (mask != nullptr) input.mask = {mask, 2};
    writer.step(input, false, &completed);
  };
  const uint8_t first[2] = {1, 0};
  step(none, first);
  step(none, first);  // the first environment's row is published with two steps, the second one's has none
  std::vector<uint32_t> rows, generations;
  store->keys(&rows, &generations);
  CHECK_EQ(rows.size(), size_t{1});
  step(none, first);
  store->extend(rows[0], 10);  // nobody else may: what is due next, four steps, is refused
  CHECK_THROWS(schema, step(second, nullptr));
  CHECK_EQ(store->committed_count(), uint64_t{1});  // the second environment's row, which has ended, is not committed
  CHECK_EQ(completed.rows.size(), size_t{0});
  CHECK(writer.in_episode(1));
  store->status()[rows[0]].length = 2;
  step(second, nullptr);
  CHECK_EQ(completed.rows.size(), size_t{1});
  CHECK_EQ(store->committed_count(), uint64_t{2});
  CHECK_EQ(store->counts().writing, uint64_t{0});
  CHECK_EQ(store->info(rows[0]).length, 4u);
  writer.cut({}, false, &completed);
  check_sound(*store);
}

TEST(what_no_writer_can_record_is_refused) {
  auto store = step_store(8);
  auto options = writer_options(2, Autoreset::same_step);
  const auto refused = [&](const StepWriterOptions& wrong) { CHECK_THROWS(schema, StepWriter(*store, wrong)); };
  refused(writer_options(0, Autoreset::same_step));
  refused(writer_options(5, Autoreset::same_step));
  refused(writer_options(2, Autoreset::same_step, 0, kLength - 1));
  options.roles.pop_back();
  refused(options);
  auto limited = step_store(8, 1);
  CHECK_THROWS(schema, StepWriter(*limited, writer_options(2, Autoreset::same_step, 2)));
  StepWriter writer(*store, writer_options(2, Autoreset::same_step));
  CompletedRows completed;
  StepInput input;
  const std::vector<uint8_t> no(2, 0);
  input.terminated = input.truncated = no;
  CHECK_THROWS(schema, writer.step(input, true, &completed));  // no episode has begun
}

TEST(a_killed_writer_leaves_its_published_steps_and_nothing_else) {
  if (kThreadSanitizer) return;  // it does not follow a fork
  for (int round = 0; round < 12; ++round) {
    auto store = step_store(64);
    int ready[2];
    CHECK(::pipe(ready) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      Environments envs(*store, writer_options(3, Autoreset::next_step, 2, 1), static_cast<uint32_t>(round), 1);
      for (int i = 0;; ++i) {
        envs.step();
        if (i == 4 && ::write(ready[1], "r", 1) != 1) ::_exit(1);
      }
    }
    char byte = 0;
    CHECK(::read(ready[0], &byte, 1) == 1);
    ::usleep(static_cast<useconds_t>(round * 37));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
    store->reap();
    const StoreCounts counts = store->counts();
    CHECK_EQ(counts.open + counts.writing, uint64_t{0});
    CHECK_EQ(counts.free + counts.committed, uint64_t{64});
    const Found found = check_all(*store, 1);
    CHECK(found.rows > 0);
    CHECK_EQ(found.wrong + found.lost, uint64_t{0});
    check_sound(*store);
  }
}

TEST(a_writer_that_came_through_a_fork_refuses_the_parents_rows) {
  if (kThreadSanitizer) return;
  auto store = step_store(16);
  Environments envs(*store, writer_options(2, Autoreset::next_step), 5, 1);
  envs.step();
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      envs.step();
    } catch (const Error& error) {
      ::_exit(error.kind == ErrorKind::closed ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (int i = 0; i < 50; ++i) envs.step();
  CHECK_EQ(check_all(*store).wrong, uint64_t{0});
  check_sound(*store);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
