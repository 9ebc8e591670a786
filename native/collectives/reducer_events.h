// What has become of a group's reducers, in words, until it is asked for: each loss, takeover and return, once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace geartrain {

class ReducerEvents {
 public:
  // Of more that nobody asks for only the number is kept.
  static constexpr size_t kMost = 1024;

  // The loop.
  void add(std::string text) {
    std::lock_guard lock(mutex_);
    if (texts_.size() < kMost) {
      texts_.push_back(std::move(text));
    } else {
      ++left_out_;
    }
    any_.store(true, std::memory_order_release);
  }
  // Any thread. The oldest first; at most so many.
  std::vector<std::string> take(size_t most = ~size_t{0}) {
    std::vector<std::string> out;
    if (!any_.load(std::memory_order_acquire)) return out;
    std::lock_guard lock(mutex_);
    while (!texts_.empty() && out.size() < most) {
      out.push_back(std::move(texts_.front()));
      texts_.erase(texts_.begin());
    }
    if (texts_.empty() && left_out_ != 0 && out.size() < most) {
      out.push_back(std::to_string(std::exchange(left_out_, 0)) + " more losses and returns of reducers, not listed");
    }
    any_.store(!texts_.empty() || left_out_ != 0, std::memory_order_release);
    return out;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
  uint64_t left_out_ = 0;
  std::atomic<bool> any_{false};
};

}  // namespace geartrain
