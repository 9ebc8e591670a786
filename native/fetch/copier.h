// Copier: copies drawn rows of a batch to their places in the CPU's stead, as a GPU does. Batch samplers and rank
// readers launch what they have drawn and placed, and go on when they resolve it: whichever rows are torn are drawn
// again by them (redraw.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace geartrain {

// Rows of one store that go to places of a batch, or of a message, of `of` rows.
struct RowsToCopy {
  uint32_t store;
  std::span<const uint32_t> rows, generations;  // none: the copier draws them
  std::span<const int32_t> ends;                // the steps that windows are told by; empty: whole rows
  std::span<const uint32_t> places, numbers;
  uint32_t round;
  size_t of = 0;
};

struct CopiedRows {
  std::vector<uint8_t> torn;
  std::vector<int32_t> lengths, starts, steps;  // steps: real ones in the window
  std::vector<int64_t> versions;
  std::vector<uint32_t> rows, generations;  // where the copier has drawn them
  std::vector<double> probability;
};

class Copier {
 public:
  virtual ~Copier() = default;
  virtual void launch(const RowsToCopy& rows) = 0;
  virtual CopiedRows resolve() = 0;  // of what was launched last
  // Whether it draws the n rows of a batch that begins; what it draws is what native code would draw.
  virtual bool draws(size_t) { return false; }
  // Whether all rows of a batch are copied again where some of them are drawn again: those behind longer ones move.
  virtual bool copies_all() const { return false; }
};

}  // namespace geartrain
