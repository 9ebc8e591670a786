// Interruption of a thread's wait by whoever called: a program's signal handlers run between the parts of a long one.
//
//   const Interruption interruption([] { ... });      // may throw; the binding checks for Python's signals here
//   connect(...);                                     // a wait in several steps, far below
//
// Waits call check() about every kInterruptionEveryS, or sleep no longer than until then. Of one thread; they nest.
#pragma once

#include <functional>
#include <utility>

namespace geartrain {

constexpr double kInterruptionEveryS = 0.25;

class Interruption {
 public:
  explicit Interruption(std::function<void()> check)
      : check_(std::move(check)), outer_(std::exchange(current_, this)) {}
  ~Interruption() { current_ = outer_; }
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  // Throws what the caller's function throws. Nothing where there is none.
  static void check() {
    if (current_ != nullptr) current_->check_();
  }
  static bool possible() { return current_ != nullptr; }

 private:
  static inline thread_local Interruption* current_ = nullptr;
  const std::function<void()> check_;
  Interruption* const outer_;
};

}  // namespace geartrain
