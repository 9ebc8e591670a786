#include "fetch/transitions.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/convert.h"
#include "base/copy.h"
#include "base/errors.h"
#include "fetch/episodes.h"
#include "fetch/lines.h"
#include "fetch/pieces.h"
#include "fetch/reward_sum.h"
#include "selection/selection.h"
#include "store/row_copy.h"

namespace geartrain {
namespace {

bool is_flag(const FieldRecord& field) {
  return field.timed != 0 && field.dtype == kBool && field.ndim == 1 && field.itemsize == 1;
}
// Rows that are placed together.
constexpr size_t kInFlightRows = 64;
// Rows that are copied field by field between two looks at their words, while the pieces of as many more are asked for.
constexpr size_t kTogether = 16;
constexpr uint32_t kOwnGoal = UINT32_MAX;  // no step of a row

class TransitionGather {
 public:
  TransitionGather(const Store& store, const TransitionView& view, const TransitionRequest& request)
      : store_(store),
        view_(view),
        request_(request),
        numbers_(request.numbers.empty() ? request.places : request.numbers),
        marks_(store.episode_marks()),
        from_(population_of(store, false)) {
    uint64_t row_bytes = 0;
    for (size_t i = 0; i < request.fields.size(); ++i) {
      const FieldRecord& record = store.fields()[request.fields[i].field];
      const TransitionRole role = view.roles[i];
      Part part{
          request.fields[i], role, bytes_per_step(record), record.timed != 0, store.block(request.fields[i].field, 0),
          record.stride};
      part.stride = view.row_bytes(record, role);
      row_bytes += part.stride * (role == TransitionRole::observation && !view.shares_window() ? 2 : 1);
      if (role == TransitionRole::reward) rewards_ = RewardSum(record, view.powers);
      parts_.push_back(part);
    }
    bytes_ = row_bytes * request.rows.size();
    stream_ = bytes_ >= stream_from();
  }

  uint64_t bytes() const { return bytes_; }
  // Steps that are none of a transition: no row was lost there.
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

  void rows(size_t first, size_t last) const {
    Block block(parts_.size());
    for (size_t at = first; at < last; at += kInFlightRows) {
      const size_t n = std::min(kInFlightRows, last - at);
      for (size_t i = 0; i < n; ++i) {
        __builtin_prefetch(&store_.words()[request_.rows[at + i]]);
        __builtin_prefetch(&store_.status()[request_.rows[at + i]].length);
      }
      block.size = 0;
      if (request_.steps.empty()) {
        random_bits(request_.key, numbers_.data() + at, n, request_.round * kAttemptsPerRound, block.high, block.low);
      }
      for (size_t i = 0; i < n; ++i) place(at + i, {block.high[i], block.low[i]}, block);
      for (size_t part = 0; part < parts_.size(); ++part) locate(parts_[part], block, block.from(part));
      ask_for(block, 0);
      for (size_t i = 0; i < block.size; i += kTogether) {
        ask_for(block, i + kTogether);
        copy_rows(block, i, std::min(block.size, i + kTogether));
      }
    }
    if (stream_) stream_fence();
  }

 private:
  struct Part {
    TransitionField to;
    TransitionRole role;
    uint64_t step_bytes;
    bool timed;
    const std::byte* column;  // of the store, and from one row's block to the next
    uint64_t block_stride;
    uint64_t stride = 0;
  };
  static const std::byte* block_of(const Part& part, uint32_t row) { return part.column + row * part.block_stride; }

  // A transition of a row, by what was known of the row when it was looked at.
  struct Placed {
    uint32_t row, generation, length, step, count, to;
    uint32_t goal;                                        // the step whose achieved goal is taken
    uint32_t first, end;                                  // steps of its episode, as far as they matter
    bool goes_on;                                         // in the next row, at the row's last step
    uint32_t behind() const { return step + 1 - first; }  // frames up to its own
  };

  // Transitions that are copied together, and where each of their fields begins.
  struct Block {
    explicit Block(size_t parts) : addresses(parts * kInFlightRows) { copies.reserve(kTogether); }
    const std::byte** from(size_t part) { return addresses.data() + part * kInFlightRows; }
    const std::byte* const* from(size_t part) const { return addresses.data() + part * kInFlightRows; }

    size_t size = 0;
    Placed placed[kInFlightRows];
    std::vector<const std::byte*> addresses;
    std::vector<RowCopy> copies;
    std::vector<double> rewards;
    uint64_t high[kInFlightRows] = {}, low[kInFlightRows] = {};  // random bits of steps that are drawn
  };

  // Adds a row to the block, unless it is lost. `bits`: by which its step is drawn, where none was given.
  void place(size_t i, const Random128& bits, Block& block) const {
    Placed& out = block.placed[block.size];
    out.row = request_.rows[i];
    out.generation = request_.generations[i];
    out.to = request_.places[i];
    request_.torn[out.to] = 1;
    const uint32_t generation = generation_of(store_.words()[out.row].load(std::memory_order_acquire));
    if (generation != out.generation || (generation & 1) == 0) return;
    // Acquire: an open row's steps are written before they are counted.
    out.length = std::min(store_.status()[out.row].length.load(std::memory_order_acquire), store_.header().max_length);
    if (out.length < 2) return;
    const uint32_t steps = out.length - 1;  // the last one has none after it
    if (!request_.steps.empty()) {
      out.step = request_.steps[i];
    } else if (from_.repeats) {
      StepRange mine = from_.drawn_steps(out.row, view_.needs());
      mine.until = std::min(mine.until, steps);
      if (mine.size() == 0) mine = {0, steps};  // else a row that is chosen in an order would be refused for ever
      out.step = mine.first + static_cast<uint32_t>(below(bits, mine.size()));
    } else {
      out.step = static_cast<uint32_t>(below(bits, steps));
    }
    if (out.step >= steps) return;
    out.first = 0;
    out.end = steps;
    if (marks_ && !find_episode(out)) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    out.count = std::min(view_.n_step, out.end - out.step);
    out.goes_on = from_.repeats && out.step + out.count == steps && from_.repeats.of(out.row).goes_on_there;
    out.goal = view_.goals.strategy == GoalStrategy::none ? kOwnGoal : draw_goal(out, numbers_[i]);
    ++block.size;
  }

  // Finds where the episode of a step begins and ends, no further than is asked for. False: it is the last one of it.
  bool find_episode(Placed& one) const {
    const std::byte* const marks = marks_.column + one.row * marks_.stride;
    if (read_byte(marks + one.step) != 0) return false;
    const bool all = view_.goals.strategy != GoalStrategy::none;
    const uint32_t until = all ? one.end : std::min(one.end, one.step + view_.n_step);
    for (uint32_t step = one.step + 1; step < until; ++step) {
      if (read_byte(marks + step) != 0) one.end = step;
      if (one.end == step) break;
    }
    const bool whole = view_.goals.strategy == GoalStrategy::episode;
    const uint32_t from = whole ? 0 : one.step + 1 - std::min(one.step + 1, view_.frame_stack);
    for (one.first = one.step; one.first > from && read_byte(marks + one.first - 1) == 0;) --one.first;
    return true;
  }

  uint32_t draw_goal(const Placed& one, uint32_t number) const {
    const DrawKey key{request_.key.seed, request_.key.step, kGoalStream};
    const uint32_t attempt = request_.round * kAttemptsPerRound;
    if (below(random_bits(key, number, attempt), uint64_t{view_.goals.k} + 1) == 0) return kOwnGoal;
    const uint32_t last = one.end;
    if (view_.goals.strategy == GoalStrategy::final) return last;
    const uint32_t first = (view_.goals.strategy == GoalStrategy::future ? one.step : one.first) + 1;
    return first + static_cast<uint32_t>(below(random_bits(key, number, attempt + 1), last - first + 1));
  }

  // Where a field's part of each transition begins.
  void locate(const Part& part, const Block& block, const std::byte** from) const {
    const auto locate_at = [&](auto&& step_of) {
      for (size_t i = 0; i < block.size; ++i) {
        const Placed& one = block.placed[i];
        from[i] = block_of(part, one.row) + uint64_t{step_of(one)} * part.step_bytes;
      }
    };
    switch (part.role) {
      case TransitionRole::observation:
        locate_at([&](const Placed& one) { return one.step + 1 - std::min(one.behind(), view_.frame_stack); });
        break;
      case TransitionRole::terminated:
      case TransitionRole::truncated:
        locate_at([](const Placed& one) { return one.step + one.count - 1; });
        break;
      case TransitionRole::last:
        locate_at([](const Placed& one) { return one.step + one.count; });
        break;
      default:
        locate_at([&](const Placed& one) { return part.timed ? one.step : 0U; });
    }
  }

  // Asks for the pieces of kTogether rows.
  void ask_for(const Block& block, size_t first) const {
    const size_t last = std::min(block.size, first + kTogether);
    for (size_t number = 0; number < parts_.size(); ++number) {
      const Part& part = parts_[number];
      const std::byte* const* from = block.from(number);
      for (size_t i = first; i < last; ++i) {
        const Placed& one = block.placed[i];
        uint64_t steps = 1;
        if (part.role == TransitionRole::observation) {
          steps = std::min(one.behind(), view_.frame_stack) + one.count;
        } else if (part.role == TransitionRole::reward) {
          steps = one.count;
        }
        prefetch_piece(from[i], steps * part.step_bytes);
      }
    }
    if (view_.goals.strategy == GoalStrategy::none) return;
    for (size_t i = first; i < last; ++i) {
      if (block.placed[i].goal != kOwnGoal) __builtin_prefetch(goal_of(block.placed[i]));
    }
  }

  // Copies transitions of a block field by field; those whose rows changed meanwhile once more, one by one.
  void copy_rows(Block& block, size_t first, size_t last) const {
    std::vector<RowCopy>& copies = block.copies;
    copies.clear();
    bool begun[kTogether];
    for (size_t i = first; i < last; ++i) {
      const Placed& one = block.placed[i];
      copies.emplace_back(store_, one.row, one.generation);
      begun[i - first] = copies.back().begin();
    }
    copy_steps(block, first, last);  // of those that are lost as well, for nothing
    for (size_t i = first; i < last; ++i) {
      RowCopy& copy = copies[i - first];
      const bool whole = begun[i - first] && (copy.whole() || copy.until_whole([&] { copy_steps(block, i, i + 1); }));
      request_.torn[block.placed[i].to] = !whole;
    }
  }

  void copy_steps(Block& block, size_t first, size_t last) const {
    const Placed* const placed = block.placed;
    uint8_t terminated[kTogether] = {}, truncated[kTogether] = {}, ends[kTogether];
    bool has_truncated = false;
    for (size_t i = first; i < last; ++i) ends[i - first] = placed[i].step + placed[i].count == placed[i].end;
    for (size_t number = 0; number < parts_.size(); ++number) {
      const Part& part = parts_[number];
      const std::byte* const* from = block.from(number);
      const auto read_bytes = [&](uint8_t* to) {
        for (size_t i = first; i < last; ++i) to[i - first] = read_byte(from[i]);
      };
      switch (part.role) {
        case TransitionRole::observation:
          copy_observations(part, block, from, first, last);
          if (view_.goals.strategy != GoalStrategy::none && number == view_.goals.desired) {
            for (size_t i = first; i < last; ++i) copy_goal(part, placed[i]);
          }
          break;
        case TransitionRole::reward:
          for (size_t i = first; i < last; ++i) {
            rewards_(part.to.out + placed[i].to * part.stride, from[i], placed[i].count, block.rewards);
          }
          break;
        case TransitionRole::terminated:
          read_bytes(terminated);
          break;
        case TransitionRole::truncated:
          read_bytes(truncated);
          has_truncated = true;
          break;
        case TransitionRole::last:
          read_bytes(ends);
          break;
        case TransitionRole::step:
          for (size_t i = first; i < last; ++i) {
            copy(part.to.out + placed[i].to * part.stride, from[i], part.step_bytes);
          }
          break;
      }
    }
    for (size_t i = first; i < last; ++i) {
      const Placed& one = placed[i];
      // A byte that is to be a bool may hold anything.
      const bool ended = terminated[i - first] != 0, cut = ends[i - first] != 0 && !one.goes_on;
      request_.terminated[one.to] = ended;
      request_.truncated[one.to] = has_truncated ? truncated[i - first] != 0 : cut && !ended;
      request_.discount[one.to] = ended ? 0.0F : static_cast<float>(view_.powers[one.count]);
      request_.starts[one.to] = static_cast<int32_t>(one.step);
      request_.lengths[one.to] = static_cast<int32_t>(one.length);
      if (!request_.relabelled.empty()) request_.relabelled[one.to] = one.goal != kOwnGoal;
      request_.versions[one.to] = store_.status()[one.row].version.load(std::memory_order_relaxed);
      if (view_.frame_stack == 1) {
        request_.mask[one.to] = 1;
        continue;
      }
      uint8_t* mask = request_.mask.data() + size_t{one.to} * view_.frame_stack;
      const uint32_t real = std::min(one.behind(), view_.frame_stack);
      std::memset(mask, 0, view_.frame_stack - real);
      std::memset(mask + view_.frame_stack - real, 1, real);
    }
  }

  void copy_observations(const Part& part, const Block& block, const std::byte* const* from, size_t first,
                         size_t last) const {
    const bool together = view_.shares_window();
    for (size_t i = first; i < last; ++i) {
      const Placed& one = block.placed[i];
      std::byte* const to = part.to.out + one.to * part.stride;
      if (view_.frame_stack == 1) {
        copy(to, from[i], part.step_bytes);
        copy(part.to.next + one.to * part.stride, from[i] + one.count * part.step_bytes, part.step_bytes);
        continue;
      }
      const std::byte* rows = block_of(part, one.row) + one.first * part.step_bytes;
      const uint64_t step = one.step - one.first;
      frames(to, rows, part, together ? step + 1 : step, view_.frame_stack + (together ? 1 : 0));
      if (!together) frames(part.to.next + one.to * part.stride, rows, part, step + one.count, view_.frame_stack);
    }
  }

  const std::byte* goal_of(const Placed& one) const {
    const Part& achieved = parts_[view_.goals.achieved];
    return block_of(achieved, one.row) + one.goal * achieved.step_bytes;
  }

  // The goal in the place of every real frame of the two stacks.
  void copy_goal(const Part& part, const Placed& one) const {
    if (one.goal == kOwnGoal) return;
    const std::byte* const goal = goal_of(one);
    const uint64_t frames = view_.window_frames();
    const auto fill = [&](std::byte* stack, uint64_t real) {
      for (uint64_t frame = frames - std::min(real, frames); frame < frames; ++frame) {
        copy(stack + frame * part.step_bytes, goal, part.step_bytes);
      }
    };
    fill(part.to.out + one.to * part.stride, one.behind() + (view_.shares_window() ? 1 : 0));
    if (!view_.shares_window()) fill(part.to.next + one.to * part.stride, uint64_t{one.behind()} + one.count);
  }

  void copy(std::byte* to, const std::byte* from, uint64_t bytes) const { copy_lines(to, from, bytes, stream_); }

  // The `count` frames of an episode up to and including `last`; zeros before the first.
  void frames(std::byte* to, const std::byte* block, const Part& part, uint64_t last, uint64_t count) const {
    const uint64_t real = std::min(last + 1, count), missing = (count - real) * part.step_bytes;
    if (missing != 0) zero_block(to, missing);
    copy(to + missing, block + (last + 1 - real) * part.step_bytes, real * part.step_bytes);
  }

  const Store& store_;
  const TransitionView& view_;
  const TransitionRequest& request_;
  std::span<const uint32_t> numbers_;
  const EpisodeMarks marks_;
  const Population from_;
  std::vector<Part> parts_;
  RewardSum rewards_;
  mutable std::atomic<uint64_t> refused_{0};
  uint64_t bytes_ = 0;
  bool stream_ = false;
};

}  // namespace

void gather_transitions(const Store& store, const TransitionView& view, const TransitionRequest& request) {
  const size_t n = request.rows.size(), size = request.torn.size();
  if (request.generations.size() != n || request.places.size() != n ||
      (!request.steps.empty() && request.steps.size() != n) ||
      (!request.numbers.empty() && request.numbers.size() != n) || request.discount.size() != size ||
      request.terminated.size() != size || request.truncated.size() != size || request.starts.size() != size ||
      request.lengths.size() != size || request.versions.size() != size ||
      (view.goals.strategy != GoalStrategy::none && request.relabelled.size() != size) ||
      request.mask.size() != size * view.frame_stack || request.fields.size() != view.roles.size()) {
    fail(ErrorKind::schema, "transitions of ", n, " rows were given arrays of other sizes");
  }
  for (uint32_t row : request.rows) {
    if (row >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", store.header().capacity);
    }
  }
  for (uint32_t place : request.places) {
    if (place >= size) fail(ErrorKind::schema, "place ", place, " is none of ", size);
  }
  const TransitionGather gather(store, view, request);
  run_in_pieces(n, gather.bytes(), request.threads, [&](size_t first, size_t last) { gather.rows(first, last); });
  if (store.read_only()) return;
  const auto lost = static_cast<uint64_t>(std::count_if(request.places.begin(), request.places.end(),
                                                        [&](uint32_t place) { return request.torn[place] != 0; }));
  const uint64_t torn = lost - std::min(lost, gather.refused());
  if (torn != 0) store.control().counters.torn.fetch_add(torn, std::memory_order_relaxed);
}

// --- views -----------------------------------------------------------------------------------------------------------

uint64_t TransitionView::row_bytes(const FieldRecord& field, TransitionRole role) const {
  const uint64_t step = bytes_per_step(field);
  switch (role) {
    case TransitionRole::observation:
      return step * window_frames();
    case TransitionRole::reward:
      return step / field.itemsize * sizeof(float);
    case TransitionRole::step:
      return step;
    default:
      return 0;
  }
}

void TransitionView::check(const Store& store, std::span<const uint32_t> fields) const {
  if (n_step == 0 || n_step > (1U << 30) || frame_stack == 0 || frame_stack > (1U << 30) ||
      powers.size() != size_t{n_step} + 1 || roles.size() != fields.size()) {
    fail(ErrorKind::schema, "transitions of ", n_step, " steps and ", frame_stack, " frames were given ", powers.size(),
         " powers of gamma and ", roles.size(), " roles for ", fields.size(), " fields");
  }
  size_t rewards = 0, flags = 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    store.check_column(fields[i]);
    const FieldRecord& record = store.fields()[fields[i]];
    bool fits = true;
    switch (roles[i]) {
      case TransitionRole::observation:
        fits = record.timed != 0;
        break;
      case TransitionRole::reward:
        fits = record.timed != 0 && RewardSum::takes(record) && ++rewards == 1;
        break;
      case TransitionRole::terminated:
        ++flags;
        [[fallthrough]];
      case TransitionRole::truncated:
      case TransitionRole::last:
        fits = is_flag(record);
        break;
      case TransitionRole::step:
        break;
      default:
        fits = false;
    }
    if (!fits) {
      fail(ErrorKind::schema, "the field '", record.name, "' cannot have role ", static_cast<int>(roles[i]),
           " in a transition");
    }
  }
  if (goals.strategy != GoalStrategy::none) {
    const auto observation = [&](uint32_t place) {
      return place < fields.size() && roles[place] == TransitionRole::observation ? &store.fields()[fields[place]]
                                                                                  : nullptr;
    };
    const FieldRecord *achieved = observation(goals.achieved), *desired = observation(goals.desired);
    if (goals.strategy > GoalStrategy::episode || n_step != 1 || achieved == nullptr || desired == nullptr ||
        achieved == desired || bytes_per_step(*achieved) != bytes_per_step(*desired)) {
      fail(ErrorKind::schema, "hindsight needs two observations of one size, and n_step 1");
    }
  }
  if (rewards != 1 || flags != 1) fail(ErrorKind::schema, "transitions need one field of rewards and one `terminated`");
}

}  // namespace geartrain
