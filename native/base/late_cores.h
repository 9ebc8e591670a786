// Polls or sleeps, where a thread that polls gets its core back late from a yield.
//
// Either others compute there: a thread that sleeps is scheduled sooner than one that polls then. Or the peers that it
// waits for, and their other clients, have no other core, and what they do is what it waits for: then a sleep ends with
// the first of many answers, whose wake takes the core from the peer before it has sent the next one, and each answer
// costs two switches of threads. A yield looks the same in both cases, so both are tried in turn.
//
// Sleeps are the better choice only where their waits are shorter by far, on average with those that ended at once, or
// cores come back very late: sleeping threads get ahead of those that poll, so that a little shorter says nothing of
// what is better for all. The choice has thirty times as much time as the other one.
//
// A thread's own; times are of one monotonic clock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace geartrain {

class LateCores {
 public:
  static constexpr uint64_t kLateNs = 1'000'000;  // away for so long: it is late

  // Whether to poll now; always, where no core came back late of late.
  bool polls(uint64_t now_ns) {
    if (state_ != State::untroubled && now_ns >= until_ns_) change(now_ns);
    return state_ != State::sleeps;
  }

  // A core came back after so long, to a poll.
  void late(uint64_t now_ns, uint64_t away_ns) {
    late_ns_ = now_ns;
    if (state_ == State::sleeps) return;
    if (state_ == State::untroubled) return rest(now_ns, away_ns);
    ++lates_;
    away_ns_ += away_ns;
    if (away_ns_ > kVeryLateNs * std::max(lates_, kTries)) return rest(now_ns, away_ns_);
    if (lates_ < kTries) return;
    if (slept_.waits < kFew || polled_.mean_ns() > kByFar * slept_.mean_ns()) return rest(now_ns, away_ns_);
    if (lates_ >= kManyLates) {  // what was long ago counts less and less, so that others who come are noticed
      lates_ /= 2;
      away_ns_ /= 2;
    }
    if (polled_.waits >= kManyWaits) {
      polled_.waits /= 2;
      polled_.ns /= 2;
    }
  }

  // Whether waited() is of use.
  bool counts() const { return state_ != State::untroubled; }
  // A wait ended after so long; 0: at once.
  void waited(uint64_t ns) {
    if (polled_last_) {
      polled_last_ = false;
      return;
    }
    Waits& of = state_ == State::sleeps ? slept_ : polled_;
    ++of.waits;
    of.ns += std::min(ns, kIdleNs);
  }

 private:
  static constexpr uint64_t kShare = 30;
  static constexpr uint32_t kTries = 2;  // late cores until the two are compared
  static constexpr uint32_t kManyLates = 8;
  static constexpr double kByFar = 16;
  // On average: 64 clients of one server on two cores are away for 1.2 to 1.8 ms, two busy loops for twice a slice.
  static constexpr uint64_t kVeryLateNs = 2'500'000;
  static constexpr uint64_t kFew = 8, kManyWaits = 256;
  static constexpr uint64_t kIdleNs = 4'000'000;  // longer waits are for a peer that has nothing to send
  static constexpr uint64_t kMostPollsNs = 1'000'000'000;
  static constexpr uint64_t kAloneNs = 100'000'000;  // no core was late for so long: nobody is there any more

  struct Waits {
    uint64_t waits = 0, ns = 0;
    double mean_ns() const { return static_cast<double>(ns) / static_cast<double>(std::max<uint64_t>(waits, 1)); }
  };

  enum class State { untroubled, sleeps, polls };

  void rest(uint64_t now_ns, uint64_t away_ns) {
    sleep(now_ns, kShare * away_ns);
    polled_last_ = true;
  }

  void sleep(uint64_t now_ns, uint64_t for_ns) {
    state_ = State::sleeps;
    slept_ = {};
    since_ns_ = now_ns;
    until_ns_ = now_ns + for_ns;
  }

  void change(uint64_t now_ns) {
    if (state_ == State::sleeps) {
      state_ = State::polls;
      polled_ = {};
      lates_ = 0;
      away_ns_ = 0;
      until_ns_ = now_ns + std::min(kShare * (until_ns_ - since_ns_), kMostPollsNs);
      since_ns_ = late_ns_ = now_ns;
    } else if (now_ns - late_ns_ > kAloneNs) {
      state_ = State::untroubled;
    } else {
      sleep(now_ns, (until_ns_ - since_ns_) / kShare);
    }
  }

  State state_ = State::untroubled;
  uint64_t since_ns_ = 0, until_ns_ = 0;  // in this state
  uint64_t late_ns_ = 0;                  // when a core was late last
  uint64_t away_ns_ = 0;                  // in these polls, of late
  uint32_t lates_ = 0;                    // the same
  bool polled_last_ = false;              // the wait of now was polled for, and does not count among the sleeps
  Waits slept_, polled_;
};

}  // namespace geartrain
