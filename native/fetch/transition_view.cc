#include "fetch/transition_view.h"

#include "base/convert.h"
#include "base/errors.h"
#include "fetch/reward_sum.h"

namespace geartrain {
namespace {

bool is_flag(const FieldRecord& field) {
  return field.timed != 0 && field.dtype == kBool && field.ndim == 1 && field.itemsize == 1;
}

}  // namespace

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
