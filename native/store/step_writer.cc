#include "store/step_writer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string_view>

#include "base/errors.h"
#include "base/shared_file.h"

namespace geartrain {
namespace {

// Steps of so many bytes are large: the pages of a first one are mapped at once, for 0.7 us less a page.
constexpr uint64_t kLargeStep = 32 << 10;

bool in_mask(std::span<const uint8_t> mask, size_t environment) {
  return mask.empty() || mask[environment] != 0;
}

}  // namespace

void StepWriter::Group::clear() {
  environments.clear();
  rows.clear();
  lengths.clear();
  generations.clear();
  priorities.clear();
  versions.clear();
  episodes.clear();
}

StepWriter::StepWriter(Store& store, const StepWriterOptions& options)
    : store_(store),
      mapping_(store.mapping()),
      options_(options),
      priority_(options.priority),
      max_length_(store.header().max_length) {
  store.check_usable();
  const Header& header = store.header();
  if (options.roles.size() != header.field_count) fail(ErrorKind::schema, "every field needs a role");
  if (options.environments < 1) fail(ErrorKind::schema, "a recorder needs an environment at least");
  if (header.max_length < 2 || options.overlap + 2 > header.max_length) {
    fail(ErrorKind::schema, "rows of ", header.max_length, " steps hold ", header.max_length - 1,
         " actions, so overlap must be below that, found ", options.overlap);
  }
  if (header.capacity < 2 * uint64_t{options.environments}) {
    fail(ErrorKind::schema, "the steps of ", options.environments, " environments need at least ",
         2 * uint64_t{options.environments}, " rows, the store has ", header.capacity);
  }
  if (options.publish_every != 0 && header.max_times_sampled != 0) {
    fail(ErrorKind::schema,
         "a store with max_times_sampled removes a row with its last sample, so rows cannot be "
         "published while they grow: leave out publish_every");
  }
  if (options.share_rows && header.max_times_sampled != 0) {
    fail(ErrorKind::schema,
         "a store with max_times_sampled removes a row with its last sample, so rows of several episodes, which are "
         "published while they grow, cannot be in it: leave out share_rows");
  }
  place_.assign(header.field_count, 0);
  for (uint32_t f = 0; f < header.field_count; ++f) {
    const FieldRecord& record = store.fields()[f];
    if (options.roles[f] == FieldRole::episode_return) return_field_ = static_cast<int32_t>(f);
    if (options.roles[f] == FieldRole::episodes) episodes_field_ = static_cast<int32_t>(f);
    if (options.roles[f] == FieldRole::repeats) repeats_field_ = static_cast<int32_t>(f);
    if (record.timed == 0) {
      per_row_.push_back(f);
      continue;
    }
    if (std::string_view(record.name) == "reward") reward_field_ = static_cast<int32_t>(f);
    place_[f] = static_cast<uint32_t>(timed_.size());
    const uint64_t step_bytes = bytes_per_step(record);
    const bool large = step_bytes >= kLargeStep;
    timed_.push_back({f, options.roles[f], record.dtype, store.block(f, 0), record.stride, step_bytes,
                      step_bytes / record.itemsize, large ? static_cast<int32_t>(written_.size()) : -1});
    if (large) written_.emplace_back(header.capacity, 0);
  }
  if (return_field_ >= 0 && (reward_field_ < 0 || conversion(timed(reward_field_).dtype, 13) == nullptr)) {
    fail(ErrorKind::schema, "episode_return sums up the field 'reward', which must be of integers, float32 or float64");
  }
  if (options.share_rows) {
    const FieldRecord* counts = episodes_field_ < 0 ? nullptr : &store.fields()[episodes_field_];
    if (counts == nullptr || counts->timed != 0 || counts->block_bytes < sizeof(int32_t) || !store.episode_marks()) {
      fail(ErrorKind::schema, "rows of several episodes need a field of their number, an int32 a row");
    }
    if (return_field_ >= 0) fail(ErrorKind::schema, "a row of several episodes has no episode_return");
  }
  if (repeats_field_ >= 0 && !store.row_repeats()) {
    fail(ErrorKind::schema, "rows that repeat steps need a field of how many, three int32 a row");
  }
  environments_.resize(options.environments);
  parts_.resize(options.environments);
  after_end_.assign(options.environments, 0);
  reset_next_.assign(options.environments, 0);
}

void StepWriter::check_usable() const {
  if (is_foreign()) {
    fail(ErrorKind::closed, "this recorder was made before a fork, and its rows are the parent's; make another one");
  }
  store_.check_open();
}

// --- writing steps ---------------------------------------------------------------------------------------------

void StepWriter::map_steps(const TimedField& field, uint32_t row, uint32_t step, uint32_t count) {
  uint32_t& written = written_[static_cast<size_t>(field.large)][row];
  if (step + count <= written) return;
  const uint32_t first = std::max(step, written);
  if (map_for_writing(at(field, row, first), (step + count - first) * field.step_bytes)) {
    mapped_steps_ += step + count - first;
  }
  written = step + count;
}

void StepWriter::write(const StepColumn& column, uint32_t environment, uint32_t row, uint32_t step) {
  const TimedField& field = timed(column.field);
  if (field.large >= 0) map_steps(field, row, step, 1);
  const std::byte* from = column.data + environment * column.stride;
  std::byte* to = at(field, row, step);
  if (column.convert != nullptr) {
    column.convert(to, from, field.count);
  } else {
    std::memcpy(to, from, field.step_bytes);
  }
}

void StepWriter::differing(std::span<const StepColumn> values, std::vector<uint8_t>* out) const {
  check_usable();
  out->assign(options_.environments, 0);
  for (uint32_t e = 0; e < options_.environments; ++e) {
    const Environment& mine = environments_[e];
    (*out)[e] = !mine.is_in_episode() || mine.steps == 0;
    for (const StepColumn& column : values) {
      if ((*out)[e] != 0) break;
      const TimedField& field = timed(column.field);
      const std::byte* given = column.data + e * column.stride;
      (*out)[e] = std::memcmp(at(field, mine.row, mine.steps - 1), given, field.step_bytes) != 0;
    }
  }
}

void StepWriter::add_reward(Environment& environment, uint32_t step) const {
  const TimedField& field = timed(static_cast<uint32_t>(reward_field_));
  const Conversion convert = conversion(field.dtype, 13);
  const std::byte* from = at(field, environment.row, step);
  double sum = 0;
  for (uint64_t i = 0; i < field.count; ++i) {
    double value = 0;
    convert(reinterpret_cast<std::byte*>(&value), from + i * (field.step_bytes / field.count), 1);
    sum += value;
  }
  environment.sum += sum / static_cast<double>(field.count);
}

// The step behind the last action: its observation is there already.
void StepWriter::mark_last(const Environment& environment, uint32_t step) const {
  for (const TimedField& field : timed_) {
    if (field.role == FieldRole::observation) continue;
    std::memset(at(field, environment.row, step), 0, field.step_bytes);
    if (field.role == FieldRole::last) *at(field, environment.row, step) = std::byte{1};
  }
}

void StepWriter::end_row(uint32_t environment, uint32_t steps) {
  Environment& mine = environments_[environment];
  mark_last(mine, steps);
  if (mine.published != 0) {
    put(extend_, environment, steps + 1);
    put(seal_, environment, steps + 1);
    return;
  }
  if (return_field_ >= 0) {
    const FieldRecord& record = store_.fields()[return_field_];
    conversion(13, record.dtype)(store_.block(static_cast<uint32_t>(return_field_), mine.row),
                                 reinterpret_cast<const std::byte*>(&mine.sum), 1);
  }
  put(commit_, environment, steps + 1);
}

// Ends an episode whose row has room for another one.
void StepWriter::end_episode(uint32_t environment, uint32_t last) {
  mark_last(environments_[environment], last);
  put(environments_[environment].published == 0 ? publish_ : extend_, environment, last + 1);
  joined_.push_back(environment);
  marked_.push_back(environments_[environment].row);
}

// After the call to the store: the next episodes of `joined_` begin behind what is published.
void StepWriter::go_on_in_rows() {
  for (const uint32_t e : joined_) {
    Environment& mine = environments_[e];
    mine.steps = mine.first = mine.counted = mine.published;
    mine.between = true;
  }
}

// Its first observation, in the row that is there or in a fresh one.
void StepWriter::begin_episode(uint32_t environment, std::span<const StepColumn> observations, int64_t version,
                               bool after_end) {
  Environment& mine = environments_[environment];
  after_end_[environment] = after_end;
  if (!after_end) parts_[environment].clear();
  if (mine.row == kNoRow) {
    open_row(environment, version);
  } else if (mine.between) {
    mine.between = mine.dropped = false;
    ++mine.episodes;
  } else if (mine.steps == 0) {
    set_repeated(mine.row, 0, false);  // the episode that filled the row before does not go on here after all
  }
  mine.goes_on = false;
  for (const StepColumn& column : observations) write(column, environment, mine.row, mine.steps);
  reset_next_[environment] = 0;
}

// --- rows ------------------------------------------------------------------------------------------------------

void StepWriter::put(Group& group, uint32_t environment, uint32_t length) {
  const Environment& mine = environments_[environment];
  group.environments.push_back(environment);
  group.rows.push_back(mine.row);
  group.lengths.push_back(length);
  group.generations.push_back(mine.generation);
  if (priority_) group.priorities.push_back(*priority_);
  group.versions.push_back(mine.version);
  if (options_.share_rows) group.episodes.push_back(mine.episodes);
}

void StepWriter::take_fresh(size_t count) {
  fresh_.resize(count);
  if (count != 0) store_.allocate(fresh_);
}

void StepWriter::give_back_fresh() {
  try {
    if (!fresh_.empty()) store_.abandon(fresh_);
  } catch (const Error&) {
    // The error that made them useless is the cause. Where the lock was not to be had, the next allocate frees them.
  }
}

void StepWriter::open_row(uint32_t environment, int64_t version) {
  Environment& mine = environments_[environment];
  mine = {.row = fresh_.back(), .version = version};
  fresh_.pop_back();
  for (const uint32_t f : per_row_) std::memset(store_.block(f, mine.row), 0, store_.fields()[f].block_bytes);
  if (options_.share_rows) {
    const int32_t one = 1;
    std::memcpy(store_.block(static_cast<uint32_t>(episodes_field_), mine.row), &one, sizeof one);
  }
}

std::atomic_ref<int32_t> StepWriter::repeats(uint32_t row, int number) const {
  auto* const numbers = reinterpret_cast<int32_t*>(store_.block(static_cast<uint32_t>(repeats_field_), row));
  return std::atomic_ref<int32_t>(numbers[number]);
}

void StepWriter::set_followed(uint32_t row, bool followed, uint32_t steps) const {
  if (repeats_field_ < 0) return;
  const int32_t edges = repeats(row, 2).load(kRelaxed), there = RowRepeats::kGoesOnThere;
  repeats(row, 1).store(static_cast<int32_t>(steps), kRelaxed);
  repeats(row, 2).store(followed ? edges | there : edges & ~there, kRelaxed);
}

void StepWriter::set_repeated(uint32_t row, uint32_t steps, bool goes_on) const {
  if (repeats_field_ < 0) return;
  repeats(row, 0).store(static_cast<int32_t>(steps), kRelaxed);
  repeats(row, 2).store(goes_on ? RowRepeats::kGoesOnHere : 0, kRelaxed);
}

// The call to the store, one for all groups: it is made whole or, where it throws, not at all. What it takes to know of
// it afterwards is allocated before.
void StepWriter::settle(CompletedRows* completed, bool admitted) {
  const size_t ending = completed->rows.size() + commit_.rows.size() + seal_.rows.size();
  completed->rows.reserve(ending);
  completed->generations.reserve(ending);
  completed->environments.reserve(ending);
  for (const Group* group : {&commit_, &seal_}) {
    for (const uint32_t e : group->environments) reserve_part(e);
  }
  const size_t changes =
      publish_.rows.size() + commit_.rows.size() + extend_.rows.size() + seal_.rows.size() + unused_.size();
  if (changes != 0) {
    store_.apply(
        {.publish = {publish_.rows, {publish_.lengths, publish_.priorities, publish_.versions}, publish_.generations},
         .commit = {commit_.rows, {commit_.lengths, commit_.priorities, commit_.versions}, commit_.generations},
         .extend = extend_.rows,
         .lengths = extend_.lengths,
         .seal = seal_.rows,
         .abandon = unused_,
         .extend_priorities = extend_.priorities,
         .episodes = extend_.episodes,
         .marked = marked_});  // draws refuse these steps, and without a priority do not find them
  }
  if (options_.autoreset == Autoreset::same_step) {
    for (const uint32_t e : stepped_) {
      if (after_end_[e] == 0) continue;
      parts_[e].clear();  // of the episode before
      after_end_[e] = 0;
    }
  }
  if (changes == 0) return;
  for (const auto& [e, steps] : owed_) {
    Environment& mine = environments_[e];
    if (admitted) {
      mine.row_admitted = true;
      mine.steps_admitted += steps - mine.counted;
    }
    mine.counted = steps;
  }
  for (size_t i = 0; i < publish_.rows.size(); ++i) {
    Environment& mine = environments_[publish_.environments[i]];
    mine.published = publish_.lengths[i];
    mine.generation = publish_.generations[i];
  }
  for (size_t i = 0; i < extend_.rows.size(); ++i) {
    environments_[extend_.environments[i]].published = extend_.lengths[i];
  }
  for (const Group* group : {&commit_, &seal_}) {
    completed->rows.insert(completed->rows.end(), group->rows.begin(), group->rows.end());
    completed->generations.insert(completed->generations.end(), group->generations.begin(), group->generations.end());
    completed->environments.insert(completed->environments.end(), group->environments.begin(),
                                   group->environments.end());
    for (size_t i = 0; i < group->rows.size(); ++i) {
      const uint32_t e = group->environments[i];
      Environment& mine = environments_[e];
      parts_[e].push_back({mine.row, group->generations[i], mine.episodes > 1U + after_end_[e], mine.row_admitted,
                           mine.steps_admitted});
      mine.row = kNoRow;
    }
    completed_rows_ += group->rows.size();
  }
}

void StepWriter::clear_groups() {
  for (Group* group : {&publish_, &commit_, &extend_, &seal_}) group->clear();
  unused_.clear();
  joined_.clear();
  marked_.clear();
  stepped_.clear();
  owed_.clear();
}

size_t StepWriter::owe(uint32_t environment, uint32_t steps) {
  const Environment& mine = environments_[environment];
  owed_.push_back({environment, steps});
  return store_.limited_by_steps() ? steps - mine.counted : size_t{mine.published == 0};
}

size_t StepWriter::begin(std::span<const StepColumn> observations, std::span<const uint8_t> mask, int64_t version,
                         bool admitted, CompletedRows* completed) {
  check_usable();
  clear_groups();
  size_t owed = 0, fresh = 0;
  for (uint32_t e = 0; e < options_.environments; ++e) {
    const Environment& mine = environments_[e];
    if (!in_mask(mask, e)) continue;
    if (mine.has_actions()) owed += owe(e, mine.steps);
    fresh += mine.row == kNoRow || (mine.has_actions() && !has_room(mine.steps));
  }
  if (must_wait(owed, admitted)) return owed;
  take_fresh(fresh);
  try {
    for (uint32_t e = 0; e < options_.environments; ++e) {
      const Environment& mine = environments_[e];
      if (!in_mask(mask, e) || !mine.has_actions()) continue;
      if (has_room(mine.steps)) {
        end_episode(e, mine.steps);
      } else {
        end_row(e, mine.steps);
      }
    }
    settle(completed, admitted);
  } catch (...) {
    give_back_fresh();
    throw;
  }
  go_on_in_rows();
  for (uint32_t e = 0; e < options_.environments; ++e) {
    if (!in_mask(mask, e)) continue;
    begin_episode(e, observations, version);
    if (environments_[e].published == 0) environments_[e].version = version;
  }
  return 0;
}

size_t StepWriter::step(const StepInput& input, bool admitted, CompletedRows* completed) {
  check_usable();
  const uint32_t max_length = store_.header().max_length;
  const bool same_step = options_.autoreset == Autoreset::same_step;
  ended_.clear();
  full_.clear();
  begun_.clear();
  clear_groups();
  size_t owed = 0;
  const auto due = [&](const Environment& mine) {
    return options_.publish_every != 0 && mine.steps + 1 - mine.published >= options_.publish_every;
  };
  for (uint32_t e = 0; e < options_.environments; ++e) {
    const Environment& mine = environments_[e];
    if (!in_mask(input.mask, e)) continue;
    if (reset_next_[e] != 0) {
      begun_.push_back(e);
      continue;
    }
    if (!mine.is_in_episode()) {
      fail(ErrorKind::schema, "environment ", e, " is in no episode: give its first observation to reset() first",
           completed_rows_ == 0 ? "" : ", as after every end of an episode without autoreset");
    }
    const bool ends = input.terminated[e] != 0 || input.truncated[e] != 0;
    const bool fills = !ends && mine.steps + 2 == max_length;
    if (ends) ended_.push_back(e);
    if (fills) full_.push_back(e);
    stepped_.push_back(e);
    if (ends || fills || due(mine)) owed += owe(e, mine.steps + 1);
  }
  if (same_step && !ended_.empty() && input.finals.empty()) {
    fail(ErrorKind::schema, "the episode of environment ", ended_.front(),
         " has ended: with autoreset='same_step' the observation it ended with is needed as well (final_observation)");
  }
  if (must_wait(owed, admitted)) return owed;
  size_t fresh = full_.size();
  for (const uint32_t e : begun_) fresh += environments_[e].row == kNoRow;
  for (const uint32_t e : ended_) fresh += same_step && !has_room(environments_[e].steps + 1);
  take_fresh(fresh);
  sums_.clear();
  try {
    for (const StepColumn& column : input.values) {
      for (const uint32_t e : stepped_) write(column, e, environments_[e].row, environments_[e].steps);
    }
    for (const uint32_t e : stepped_) {
      const bool final = same_step && (input.terminated[e] != 0 || input.truncated[e] != 0);
      for (const StepColumn& column : final ? input.finals : input.observations) {
        write(column, e, environments_[e].row, environments_[e].steps + 1);
      }
    }
    for (const TimedField& field : timed_) {
      if (field.role == FieldRole::observation || field.role == FieldRole::value) continue;
      for (const uint32_t e : stepped_) {
        std::byte* to = at(field, environments_[e].row, environments_[e].steps);
        if (field.role == FieldRole::terminated) *to = std::byte{input.terminated[e] != 0};
        if (field.role == FieldRole::truncated) *to = std::byte{input.truncated[e] != 0};
        if (field.role == FieldRole::last) *to = std::byte{0};
        if (field.role == FieldRole::step_version) std::memcpy(to, &input.version, sizeof input.version);
      }
    }
    if (return_field_ >= 0) {
      for (const uint32_t e : stepped_) {
        sums_.push_back(environments_[e].sum);
        add_reward(environments_[e], environments_[e].steps);
      }
    }
    size_t next_fresh = fresh_.size();
    for (const uint32_t e : full_) {  // full_ takes the last of the fresh rows, in this order
      const Environment& mine = environments_[e];
      const uint32_t to = fresh_[--next_fresh], count = repeated(mine), first = mine.steps + 1 - count;
      set_followed(mine.row, true, count);
      end_row(e, mine.steps + 1);
      for (const TimedField& field : timed_) {
        if (field.large >= 0) map_steps(field, to, 0, count + 1);
        std::memcpy(at(field, to, 0), at(field, mine.row, first), (count + 1) * field.step_bytes);
      }
    }
    for (const uint32_t e : ended_) {
      const uint32_t last = environments_[e].steps + 1;
      if (has_room(last)) {
        end_episode(e, last);
      } else {
        end_row(e, last);
      }
    }
    for (const uint32_t e : stepped_) {
      const Environment& mine = environments_[e];
      const bool closes = input.terminated[e] != 0 || input.truncated[e] != 0 || mine.steps + 2 == max_length;
      if (!closes && due(mine)) put(mine.published == 0 ? publish_ : extend_, e, mine.steps + 1);
    }
    settle(completed, admitted);
  } catch (...) {
    for (size_t i = 0; i < sums_.size(); ++i) environments_[stepped_[i]].sum = sums_[i];
    for (const uint32_t e : full_) set_followed(environments_[e].row, false, 0);
    give_back_fresh();
    throw;
  }
  for (const uint32_t e : stepped_) ++environments_[e].steps;
  for (const uint32_t e : full_) {
    const Environment& mine = environments_[e];  // whose step is counted by now
    const uint32_t behind = mine.steps - mine.first, count = std::min(options_.overlap, behind);
    open_row(e, input.version);
    set_repeated(environments_[e].row, count, count != behind);
    environments_[e].steps = environments_[e].counted = count;
    environments_[e].goes_on = true;
  }
  go_on_in_rows();
  for (const uint32_t e : ended_) {
    if (same_step) begin_episode(e, input.observations, input.version, true);
    reset_next_[e] = options_.autoreset == Autoreset::next_step;
  }
  for (const uint32_t e : begun_) begin_episode(e, input.observations, input.version);
  return 0;
}

size_t StepWriter::cut(std::span<const uint8_t> mask, bool admitted, CompletedRows* completed) {
  check_usable();
  clear_groups();
  size_t owed = 0;
  for (uint32_t e = 0; e < options_.environments; ++e) {
    const Environment& mine = environments_[e];
    if (in_mask(mask, e) && mine.has_actions()) owed += owe(e, mine.steps);
  }
  if (must_wait(owed, admitted)) return owed;
  begun_.clear();  // and have no steps: what their rows hold is of the episodes before
  for (uint32_t e = 0; e < options_.environments; ++e) {
    const Environment& mine = environments_[e];
    if (!in_mask(mask, e) || mine.row == kNoRow) continue;
    if (after_end_[e] == 0 && (mine.dropped || (mine.is_in_episode() && !mine.has_steps()))) begun_.push_back(e);
    if (mine.has_actions()) {
      end_row(e, mine.steps);
    } else if (mine.published != 0) {
      put(seal_, e, mine.published);  // of the episodes before
    } else {
      unused_.push_back(mine.row);  // nothing was done in it
    }
  }
  settle(completed, admitted);
  for (const uint32_t e : begun_) parts_[e].clear();
  for (uint32_t e = 0; e < options_.environments; ++e) {
    if (!in_mask(mask, e)) continue;
    reset_next_[e] = 0;
    environments_[e] = {};
  }
  return 0;
}

// --- taking back -----------------------------------------------------------------------------------------------

bool StepWriter::is_stale(const Part& part) const {
  return generation_of(store_.words()[part.row].load(kRelaxed)) != part.generation;
}

// Room for another one. Those of an episode without an end are forgotten as others evict them.
void StepWriter::reserve_part(uint32_t environment) {
  std::vector<Part>& parts = parts_[environment];
  if (parts.size() < parts.capacity()) return;
  std::erase_if(parts, [this](const Part& part) { return is_stale(part); });
  if (parts.size() > parts.capacity() / 2 || parts.capacity() == 0) parts.reserve(2 * parts.capacity() + 4);
}

// The first observation of an episode that was begun in the row of the one before goes to a fresh row.
void StepWriter::move_on_to_fresh(uint32_t environment) {
  const Environment& mine = environments_[environment];
  take_fresh(1);
  for (const TimedField& field : timed_) {
    if (field.large >= 0) map_steps(field, fresh_[0], 0, 1);
    std::memcpy(at(field, fresh_[0], 0), at(field, mine.row, mine.steps), field.step_bytes);
  }
}

void StepWriter::discard(uint32_t environment, CompletedRows* kept) {
  check_usable();
  clear_groups();
  fresh_.clear();
  Environment& mine = environments_[environment];
  std::vector<Part>& parts = parts_[environment];
  const bool ended = after_end_[environment] != 0;
  if (!ended && mine.is_in_episode() && !mine.has_steps()) return;
  // Whether the row in progress has steps of it that can be sampled, and others' too.
  const bool holds = mine.row != kNoRow && !mine.dropped &&
                     (ended          ? mine.episodes > 1
                      : mine.between ? true
                                     : mine.published > mine.first);
  const bool shared = mine.episodes > 1U + ended;
  // A row of other episodes is left where the next one may go on in it.
  const bool stays = holds && shared && (ended || mine.between);
  const bool moves = holds && !shared && ended;
  const bool unpublished = !ended && mine.is_in_episode() && mine.published == 0;
  if (moves) move_on_to_fresh(environment);
  if (holds && !stays) put(seal_, environment, mine.published);
  if (unpublished) unused_.push_back(mine.row);
  CompletedRows sealed;
  try {
    settle(&sealed, false);
  } catch (...) {
    give_back_fresh();
    throw;
  }
  completed_rows_ -= sealed.rows.size();
  if (moves) {
    open_row(environment, mine.version);
  } else if (unpublished) {
    mine = {};
  } else if (!ended && mine.is_in_episode()) {  // in a row of others, and nothing of it was published
    mine.steps = mine.first;
    mine.between = mine.dropped = true;
    --mine.episodes;
  }
  std::vector<uint32_t> rows, generations;
  for (const Part& part : parts) {
    if (is_stale(part)) continue;
    auto& to = part.shared ? kept->rows : rows;
    to.push_back(part.row);
    (part.shared ? kept->generations : generations).push_back(part.generation);
  }
  if (stays) {
    kept->rows.push_back(mine.row);
    kept->generations.push_back(mine.generation);
  }
  kept->environments.assign(kept->rows.size(), environment);
  std::vector<uint8_t> removed(rows.size());
  if (!rows.empty()) store_.remove(rows, generations, removed);
  uint64_t inserts = 0;
  size_t i = 0;
  for (const Part& part : parts) {
    while (i < rows.size() && removed[i] == 0) ++i;
    if (i == rows.size() || part.row != rows[i] || part.generation != generations[i]) continue;
    inserts += store_.limited_by_steps() ? part.steps_admitted : uint64_t{part.row_admitted};
    ++i;
  }
  parts.clear();
  after_end_[environment] = 0;
  if (inserts != 0) store_.give_back(inserts, 0);
}

void StepWriter::abandon() {
  if (is_foreign() || store_.is_closed()) return;
  std::vector<uint32_t> unpublished, published;
  for (Environment& mine : environments_) {
    if (mine.row != kNoRow) (mine.published != 0 ? published : unpublished).push_back(mine.row);
    mine.row = kNoRow;
  }
  if (!unpublished.empty()) store_.abandon(unpublished);
  if (!published.empty()) store_.seal(published);
}

}  // namespace geartrain
