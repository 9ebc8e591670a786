// Epochs: every element once a pass, in an order that looks random and that no array holds.
//
// Elements are the places of rows, or of (row, step), of all shards one shard after the other: `total` of them, whether
// or not something is there. Position p of pass e is element permutation(seed, e, total)(p). What is taken of an
// element is decided when it is reached: a selectable row whose sequence is at most `upto`, the largest when the pass
// began, and that has the step. Rows that are still extended are of no pass yet: their numbers change when they are
// complete. So the set of a pass is fixed by one number a shard; rows that come later are of the
// next pass, wherever they lie, and rows that are gone are passed over.
//
// The permutation is a Feistel network of kFeistelRounds rounds over the least power of two that holds all elements,
// its keys from Philox (kEpochStream); elements beyond `total` are mapped on until they are below it (cycle walking),
// twice on average at most. So small a network is not random enough for a handful of elements: up to kShuffled are
// shuffled (Fisher-Yates).
//
// Cost: of a position some 30 ns and the cache misses of its row, 64 in flight; no state but the position.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "selection/selection.h"

namespace geartrain {

constexpr int kFeistelRounds = 8;
constexpr uint64_t kShuffled = 256;

// A bijection of [0, size), the same for the same seed and pass.
class Permutation {
 public:
  Permutation(uint64_t seed, uint64_t pass, uint64_t size);
  uint64_t operator()(uint64_t position) const;

 private:
  uint64_t once(uint64_t value) const;

  uint64_t size_;
  uint32_t low_bits_, high_bits_;
  uint64_t keys_[kFeistelRounds];
  std::array<uint16_t, kShuffled> shuffled_;  // of so few
};

struct EpochPlan {
  uint64_t seed = 0, pass = 0;
  bool shuffle = true;     // else elements in their order
  uint64_t first = 0;      // this population's first element among
  uint64_t total = 0;      // those of all shards
  uint64_t upto = 0;       // sequence
  uint32_t row_steps = 0;  // elements of a row: its steps; 0: rows are the elements
  uint32_t need = 0;       // a row's last steps that do not count
  uint32_t stride = 1;     // of steps: a row has one element for every so many; `step` is then its number
  bool episodes = false;   // of steps those that begin an episode (in a row of one: its first); need 0, stride 1
  StepNeeds needs = {};    // around a step, in rows that repeat steps; `after` 0 elsewhere
  uint32_t shift = 0;      // from an element's number to the step

  // Whether a neighbouring row has the element as well, and it is taken there.
  bool elsewhere(const Population& from, uint32_t row, uint64_t step) const {
    return needs.after != 0 && !from.drawn_steps(row, needs).contains(step + shift);
  }

  // Of rows of several episodes (Population::marks) steps count that `need` more of their episode follow; their stride
  // is 1.

  uint64_t elements(const Population& from) const {
    return from.rows() * (row_steps == 0 ? uint64_t{1} : uint64_t{row_steps});
  }
};

// What is at positions [position, position + taken.size()): 1 where it is this population's and belongs to the pass;
// then its row, generation and step.
void find_epoch(const Population& from, const EpochPlan& plan, uint64_t position, std::span<uint8_t> taken,
                const Draws& out);

// The largest sequence of a selectable row, and with plan.upto 0 how many elements a pass that begins now has.
struct EpochStart {
  uint64_t upto = 0, count = 0;
};
EpochStart start_epoch(const Population& from, const EpochPlan& plan);

}  // namespace geartrain
