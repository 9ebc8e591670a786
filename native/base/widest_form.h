// Forms of one function for different instruction sets: the widest that this CPU has is chosen at the first use.
//
// A form has a `name` and `viable()`, and whatever functions the caller calls. All give the same bits. Any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <span>
#include <string_view>

namespace geartrain {

template <typename Form>
class WidestForm {
 public:
  // The widest first; the last is always viable.
  constexpr explicit WidestForm(std::span<const Form> forms) : forms_(forms) {}

  const Form& get() {
    const Form* now = chosen_.load(std::memory_order_relaxed);
    if (now == nullptr) {
      now = &*std::ranges::find_if(forms_, [](const Form& one) { return one.viable(); });
      chosen_.store(now, std::memory_order_relaxed);
    }
    return *now;
  }
  // Uses one of them from now on, for tests; false when this machine does not have it.
  bool force(std::string_view name) {
    const auto found = std::ranges::find_if(forms_, [&](const Form& one) { return one.name == name && one.viable(); });
    if (found != forms_.end()) chosen_.store(&*found, std::memory_order_relaxed);
    return found != forms_.end();
  }

 private:
  const std::span<const Form> forms_;
  std::atomic<const Form*> chosen_{nullptr};
};

}  // namespace geartrain
