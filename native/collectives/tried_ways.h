// Choice between the two ways in which ranks of one host reduce arrays: through rings, or read from one another's
// memory (Way). Which is faster depends on the host, the size and the number of ranks, so both are tried: on rank 0,
// whose word the others follow. No clocks, no threads, no chance: what an operation took is told (Operations).
//
// A ring moves each cache line from core to core twice, a read once, but for the price of a system call and a look-up
// of each page. Where cores are far apart reading wins from 64 KB on; where they are near, rings do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "collectives/protocol.h"

namespace geartrain {

enum class Way : uint8_t { rings, reading };
// The least that is read by choice: below, frames and wakes are what takes the time.
constexpr uint64_t kLeastTried = 64 << 10;

// Arrays of one size, on the rank that chooses.
//
// In a trial both ways are used by turns, a block of operations each, which lasts for some milliseconds (kBlockNs): for
// shorter than that two ranks may happen to share a core. The first operation of a block is not counted, and the best
// of the others is one judgement. The way that was not kept wins if the median of its judgements is so much better
// (kWorth) as chance does not make it. One that is far worse at once (kFarWorse) is not tried any further. Later there
// are other trials, since hosts change: fewer and fewer while nothing comes of them (kMostBetweenTrialsNs).
class TriedWays {
 public:
  // For the operations to come.
  Way now() const { return now_; }
  // The way that is used between trials.
  Way kept() const { return kept_; }
  // An operation took so long in that way. One of another way than now(), begun before that was known, tells nothing.
  void judge(Way way, uint64_t took_ns);

 private:
  static constexpr uint32_t kFirst = 8;  // operations, before the first trial
  static constexpr size_t kTurns = 5;
  void end_trial(bool changes);

  Way kept_ = Way::rings, now_ = Way::rings;
  uint32_t first_ = kFirst;
  uint64_t pause_ns_ = 0, left_ns_ = 0;  // of operations: the last pause, and what is left of it
  uint32_t samples_ = 0;                 // of this block
  uint64_t spent_ns_ = 0, best_ns_ = 0;
  size_t turn_ = 0;
  std::array<std::array<uint64_t, kTurns>, 2> judged_ns_{};  // of the kept way and the other one
};

// All sizes, on every rank. With an operation rank 0 says which way the next one of its size goes (Open::next_way): who
// has done that operation has heard of it. So ranks that wait for each operation agree on every one of them. Those that
// begin several at once may use both ways in one operation when the way changes, which costs time and nothing else.
class AgreedWays {
 public:
  // Whether there is a choice for operations of such a shape.
  static bool has_choice(const Shape& shape) { return size_of(shape).has_value(); }

  // Rank 0 begins an operation: its way. Where memory cannot be read it says so, and uses none but rings.
  Way begin(const Shape& shape, bool readable);
  // What it says with that operation: 1 beyond the way. 0 for shapes without a choice.
  uint32_t word(const Shape& shape) const;
  void judge(const Shape& shape, Way way, uint64_t took_ns);

  // Another rank begins it.
  Way follow(const Shape& shape, uint64_t operation) const;
  void heard(const Shape& shape, uint64_t operation, uint64_t word);

 private:
  static constexpr size_t kSizes = 14;  // powers of two from kLeastTried on; the last one's are all larger ones'
  struct Heard {
    uint64_t operation = 0;
    Way next = Way::rings;
  };
  static std::optional<size_t> size_of(const Shape& shape);

  std::array<TriedWays, 2 * kSizes> tried_;  // of all-reduces, then of reduce-scatters
  std::array<Way, 2 * kSizes> next_{};
  std::array<std::array<Heard, 2>, 2 * kSizes> heard_{};  // the last one, and the one before
};

}  // namespace geartrain
