// Pause before a lost reducer is dialled again: none, but after a return that did not last, which a broken path brings
// about: one that lets a handshake through and nothing larger, or that ends connections. Each such return costs ranks a
// loss, with silence even its time. The pause doubles from one to the next, up to kMost periods of dialling.
//
// A return that was worth it makes the next loss a first one again: results came of it, for kCarrying periods and
// kWorth times as long as the loss has cost. So a healthy reducer that is killed now and then is soon back, though it
// never stays for long, and a path that costs a silence each time still needs as long as one without operations.
//
// One thread, the loop's.
#pragma once

#include <algorithm>
#include <cstdint>

namespace geartrain {

class RedialPause {
 public:
  static constexpr uint64_t kMost = 32, kLasting = 30, kCarrying = 3;  // periods
  static constexpr uint64_t kWorth = 10;
  static constexpr uint32_t kMany = 3;  // returns that did not last, of which each was told

  explicit RedialPause(double every_s) : every_ns_(static_cast<uint64_t>(every_s * 1e9)) {}

  // This rank has reached it, or all have.
  void reached(uint64_t now_ns) {
    reached_ns_ = now_ns;
    there_ = true;
  }
  // How long it has to stay for the next loss to be a first one.
  uint64_t lasting_ns() const { return std::max(kLasting * every_ns_, 4 * pause_ns_); }
  bool lasts(uint64_t now_ns) const { return there_ && now_ns - reached_ns_ >= lasting_ns(); }
  // It is lost; since it was reached it has `carried` operations, and `cost_ns` were waited for it in vain. That none
  // of these returns lasted is counted where all ranks had reached it.
  void lost(uint64_t now_ns, bool was_back, bool carried = false, uint64_t cost_ns = 0) {
    const bool again = there_ && !lasts(now_ns);
    const bool worth = carried && now_ns - reached_ns_ >= cost_ns + std::max(kCarrying * every_ns_, kWorth * cost_ns);
    pause_ns_ = again && !worth ? std::min(std::max(2 * pause_ns_, 2 * every_ns_), kMost * every_ns_) : 0;
    in_a_row_ = again ? in_a_row_ + was_back : 0;
    until_ns_ = now_ns + pause_ns_;
    there_ = false;
  }
  bool over(uint64_t now_ns) const { return now_ns >= until_ns_; }
  double pause_s() const { return static_cast<double>(pause_ns_) / 1e9; }
  uint32_t in_a_row() const { return in_a_row_; }
  void settle() { in_a_row_ = 0; }
  uint64_t reached_ns() const { return reached_ns_; }

 private:
  const uint64_t every_ns_;
  uint64_t pause_ns_ = 0, reached_ns_ = 0, until_ns_ = 0;
  uint32_t in_a_row_ = 0;
  bool there_ = false;
};

}  // namespace geartrain
