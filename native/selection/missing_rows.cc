#include "selection/missing_rows.h"

#include <bit>

#include "selection/selection.h"

namespace geartrain {
namespace {

// Fewer draws than this do not repay a look for the last row.
constexpr size_t kListFrom = 16;
// Runs that are listed where the missing rows are many: a few long runs, or else too many to go on.
constexpr uint32_t kLongRuns = 8;

}  // namespace

MissingRows::MissingRows(const BitTree& bits, uint64_t rows, uint64_t total, size_t draws)
    : bits_(bits), total_(total) {
  if (total == rows) {
    listed_ = true;
    return;
  }
  if (total == 0 || total > rows || draws < kListFrom) return;
  const uint64_t last = total - 1;
  Search found{};
  bits.find(&last, 1, &found);
  if (!bits.inside(found)) return;
  const uint64_t word = bits.leaves()[found.node].load(std::memory_order_relaxed);
  if (found.residual >= BitLeaf::count(word)) return;
  end_ = found.node * 64 + select_bit(word, static_cast<uint32_t>(found.residual)) + 1;
  if (end_ > rows || end_ < total) return;
  const uint64_t missing = end_ - total;
  if (missing == 0) {
    listed_ = true;
    return;
  }
  const auto most = static_cast<uint32_t>(std::min<size_t>(kMostRuns, draws / 4));
  most_runs_ = missing <= most ? most : std::min(most, kLongRuns);
  visits_ = 64 + 16 * most_runs_;
  if (!visit(bits.shape().levels - 1, 0)) return;
  if (runs_ == 0 || missing_[runs_] != missing) return;  // rows changed meanwhile
  runs_padded_ = std::bit_ceil(runs_ + 1);
  for (uint32_t i = runs_; i < runs_padded_; ++i) before_[i] = ~uint32_t{0};
  listed_ = true;
}

// Lists what is missing below a node. False where there is too much of it.
bool MissingRows::visit(int level, uint64_t node) {
  if (visits_-- == 0) return false;
  const TreeShape& shape = bits_.shape();
  const uint64_t children = level == 0 ? shape.leaves : shape.width[level - 1];
  const uint64_t rows_of_child = uint64_t{64} << (4 * level);
  for (uint64_t child = node * kFanout; child < std::min((node + 1) * kFanout, children); ++child) {
    const uint64_t first = child * rows_of_child;
    if (first >= end_) break;
    const uint64_t here = std::min(rows_of_child, end_ - first);
    const uint64_t selectable = level == 0
                                    ? BitLeaf::count(bits_.leaves()[child].load(std::memory_order_relaxed))
                                    : bits_.nodes()[shape.offset[level - 1] + child].load(std::memory_order_relaxed);
    if (selectable == here) continue;
    const bool fits = selectable == 0 ? add(first, here) : level == 0 ? add_word(child) : visit(level - 1, child);
    if (!fits) return false;
  }
  return true;
}

bool MissingRows::add_word(uint64_t at) {
  const uint64_t here = std::min<uint64_t>(64, end_ - at * 64);
  uint64_t missing = ~bits_.leaves()[at].load(std::memory_order_relaxed) & (~uint64_t{0} >> (64 - here));
  while (missing != 0) {
    const auto first = static_cast<uint64_t>(std::countr_zero(missing));
    const auto count = static_cast<uint64_t>(std::countr_one(missing >> first));
    if (!add(at * 64 + first, count)) return false;
    if (first + count == 64) break;
    missing = missing >> (first + count) << (first + count);
  }
  return true;
}

// A run that begins where the last one ends continues it.
bool MissingRows::add(uint64_t first, uint64_t count) {
  if (runs_ == 0 || first != last_run_end_) {
    if (runs_ == most_runs_) return false;
    before_[runs_] = static_cast<uint32_t>(first - missing_[runs_]);
    missing_[runs_ + 1] = missing_[runs_];
    ++runs_;
  }
  missing_[runs_] += static_cast<uint32_t>(count);
  last_run_end_ = first + count;
  return true;
}

}  // namespace geartrain
