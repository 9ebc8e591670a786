// Congestion window: how far a rank may run ahead of the results it got. It follows the bandwidth-delay product.
//
// A chunk's delay is the time from handing it to the kernel until its result is back; the rate is what came back in
// that time. With too small a window every chunk comes back after the least delay there is, and the rate is
// window / delay; with too large a one the rate stays and the delay grows, in queues that may drop. So
//
//   window = 2 x (highest rate of late) x (least delay of late)
//
// doubles from round to round while it limits the rank, and stops at twice the bandwidth-delay product: one
// in flight, one to fill the gaps that turns and other ranks leave. It grows only when the window was what held the
// limit, so that idle or late ranks do not change it, and shrinks by an eighth at most.
//
// Every rank has its own; the slowest sets the pace of all, since no result comes back before its part was sent.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace geartrain {

class CongestionWindow {
 public:
  CongestionWindow(uint64_t least, uint64_t most) : least_(std::min(least, most)), most_(most), bytes_(least_) {}

  uint64_t bytes() const { return bytes_; }
  uint64_t least_delay_ns() const { return std::min(delays_[0], delays_[1]); }

  // A chunk came back after `delay_ns`, and `delivered` bytes in that time. `held_up`: the window kept bytes back.
  void sample(uint64_t delay_ns, uint64_t delivered, bool held_up, uint64_t now_ns) {
    if (delay_ns == 0) return;
    if (now_ns - turned_ns_ > kMemoryNs) {
      // Paths change: the least delay is that of the last one or two spans of time.
      delays_ = {~uint64_t{0}, delays_[0]};
      turned_ns_ = now_ns;
    }
    delays_[0] = std::min(delays_[0], delay_ns);
    if (!held_up) return;
    rates_[next_++ % rates_.size()] = static_cast<double>(delivered) / static_cast<double>(delay_ns);
    const double rate = *std::max_element(rates_.begin(), rates_.end());
    const auto wanted = static_cast<uint64_t>(2.0 * rate * static_cast<double>(least_delay_ns()));
    const uint64_t low = bytes_ - bytes_ / 8, high = bytes_ * 2;
    bytes_ = std::clamp(std::clamp(wanted, low, high), least_, most_);
  }

  // What the owners allow may be less than was expected.
  void limit(uint64_t most) {
    most_ = std::min(most_, most);
    least_ = std::min(least_, most_);
    bytes_ = std::min(bytes_, most_);
  }
  // It is never smaller than that, but for limit() and fix().
  void at_least(uint64_t bytes) {
    if (fixed_) return;
    least_ = std::min(std::max(least_, bytes), most_);
    bytes_ = std::max(bytes_, least_);
  }
  // For tests and experiments: a fixed window.
  void fix(uint64_t bytes) {
    least_ = most_ = bytes_ = bytes;
    fixed_ = true;
  }

 private:
  static constexpr uint64_t kMemoryNs = 5'000'000'000;
  uint64_t least_, most_, bytes_;
  bool fixed_ = false;
  std::array<uint64_t, 2> delays_{~uint64_t{0}, ~uint64_t{0}};
  uint64_t turned_ns_ = 0;
  std::array<double, 8> rates_{};
  size_t next_ = 0;
};

// Measures the delay of one chunk at a time for a window.
class DelayProbe {
 public:
  // A chunk leaves for a member; it is back when `until` bytes of the operation are. `delivered`: bytes back so far, of
  // all. Nothing happens while another chunk is measured.
  void sent(uint64_t operation, uint32_t member, uint64_t until, uint64_t delivered) {
    if (running_) return;
    running_ = true;
    held_up_ = false;
    operation_ = operation;
    member_ = member;
    until_ = until;
    delivered_ = delivered;
    began_ns_ = monotonic_ns();
  }
  // Nothing more comes from a member.
  void forget(uint32_t member) { running_ = running_ && member_ != member; }
  // The window keeps bytes back.
  void hold_up() { held_up_ = true; }
  // So many bytes are back of a member.
  void returned(uint64_t operation, uint32_t member, uint64_t bytes, uint64_t delivered, CongestionWindow* window) {
    if (!running_ || operation_ != operation || member_ != member || bytes < until_) return;
    running_ = false;
    const uint64_t now = monotonic_ns();
    window->sample(now - began_ns_, delivered - delivered_, held_up_, now);
  }

 private:
  bool running_ = false, held_up_ = false;
  uint64_t operation_ = 0, until_ = 0, began_ns_ = 0, delivered_ = 0;
  uint32_t member_ = 0;
};

}  // namespace geartrain
