// Pause before a lost reducer is dialled again: none, but after a return that did not last, which a broken path brings
// about: one that lets a handshake through and nothing larger, or that ends connections. Each such return costs ranks a
// loss, with silence even its time. The pause doubles from one to the next, up to kMost periods of dialling.
//
// One thread, the loop's.
#pragma once

#include <algorithm>
#include <cstdint>

namespace geartrain {

class RedialPause {
 public:
  static constexpr uint64_t kMost = 32, kLasting = 30;  // periods
  static constexpr uint32_t kMany = 3;                  // returns that did not last, of which each was told

  explicit RedialPause(double every_s) : every_ns_(static_cast<uint64_t>(every_s * 1e9)) {}

  // This rank has reached it, or all have.
  void reached(uint64_t now_ns) {
    reached_ns_ = now_ns;
    there_ = true;
  }
  // How long it has to stay for the next loss to be a first one.
  uint64_t lasting_ns() const { return std::max(kLasting * every_ns_, 4 * pause_ns_); }
  bool lasts(uint64_t now_ns) const { return there_ && now_ns - reached_ns_ >= lasting_ns(); }
  // It is lost. That none of these returns lasted is counted where all ranks had reached it.
  void lost(uint64_t now_ns, bool was_back) {
    const bool again = there_ && !lasts(now_ns);
    pause_ns_ = again ? std::min(std::max(2 * pause_ns_, 2 * every_ns_), kMost * every_ns_) : 0;
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
