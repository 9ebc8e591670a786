// Stage clock: the time that one thread after the other spends in each stage of a loop, and how often it enters them.
// Off by default: a stage costs one comparison then, and a look at the clock when it is on.
//
//   const StageClock::Scope scope(clock, Stage::sum);   // until the end of the block; then the stage before it goes on
//
// Who has the loop's turn only. Time is counted once: a stage within another one is not part of that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace geartrain {

// Their order is that of the C interface (geartrain_allreduce.h: gt_profile). Only append.
enum class Stage : uint8_t {
  outside,   // nobody runs the loop, or its thread sleeps with nothing in progress
  protocol,  // frames and operations: whatever is none of the others
  copy_out,  // into rings
  copy_in,   // out of rings
  read,      // out of another process's memory
  sum,
  deliver,  // results into this rank's own array, where they were made elsewhere
  wake,     // of a peer that sleeps
  poll,     // looks that found nothing
  yield,    // the core is offered to others meanwhile
  sleep,    // with something in progress
};
constexpr size_t kStages = 11;

struct StageTimes {
  std::array<uint64_t, kStages> ns{}, entered{};
};

class StageClock {
 public:
  bool on() const { return on_; }
  // From zero.
  void start() {
    times_ = {};
    stage_ = Stage::outside;
    last_ns_ = monotonic_ns();
    on_ = true;
  }
  void stop() { on_ = false; }
  const StageTimes& times() const { return times_; }

  // From now on. Returns the stage until now.
  Stage turn_to(Stage stage) { return on_ ? turn_at(stage, monotonic_ns()) : stage_; }
  Stage turn_at(Stage stage, uint64_t now_ns) {
    if (!on_) return stage_;
    const Stage before = resume(stage, now_ns);
    times_.entered[static_cast<size_t>(stage)] += 1;
    return before;
  }

  // A look has found something: what follows is no poll.
  void found() {
    if (on_ && stage_ == Stage::poll) turn_to(Stage::protocol);
  }

  class Scope {
   public:
    Scope(StageClock* clock, Stage stage) : clock_(clock != nullptr && clock->on_ ? clock : nullptr) {
      if (clock_ != nullptr) before_ = clock_->turn_to(stage);
    }
    ~Scope() {
      if (clock_ != nullptr && clock_->on_) clock_->resume(before_, monotonic_ns());
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StageClock* const clock_;
    Stage before_ = Stage::outside;
  };

 private:
  Stage resume(Stage stage, uint64_t now_ns) {
    times_.ns[static_cast<size_t>(stage_)] += now_ns - last_ns_;
    last_ns_ = now_ns;
    const Stage before = stage_;
    stage_ = stage;
    return before;
  }

  bool on_ = false;
  Stage stage_ = Stage::outside;
  uint64_t last_ns_ = 0;
  StageTimes times_;
};

}  // namespace geartrain
