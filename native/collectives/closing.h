// Closing: one orderly end, whoever asks for it and however often.
//
//   if (!closing.enter(deadline)) return;   // another thread has done it by now
//   ... until closing.deadline() ...
//   closing.leave();
//
// The first caller does the work, the others wait for it. The nearest deadline of all callers counts.
#pragma once

#include <mutex>
#include <optional>

#include "base/condition_variable.h"
#include "base/deadline.h"

namespace geartrain {

class Closing {
 public:
  bool enter(Deadline deadline) {
    std::unique_lock lock(mutex_);
    const bool first = !deadline_.has_value();
    if (first || deadline.left_ns() < deadline_->left_ns()) deadline_ = deadline;
    if (first) return true;
    changed_.wait(lock, [&] { return over_; });
    return false;
  }
  Deadline deadline() const {
    std::lock_guard lock(mutex_);
    return *deadline_;
  }
  void leave() {
    std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  bool begun() const {
    std::lock_guard lock(mutex_);
    return deadline_.has_value();
  }

 private:
  mutable std::mutex mutex_;
  ConditionVariable changed_;
  std::optional<Deadline> deadline_;
  bool over_ = false;
};

}  // namespace geartrain
