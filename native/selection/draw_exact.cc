// Choices that take a pass over the population: without replacement, in order, and under limits that allow few rows.

#include <algorithm>
#include <bit>

#include "base/errors.h"
#include "selection/allowed_rows.h"
#include "selection/selection.h"

namespace geartrain {
namespace {

// Calls visit(row, word) for every selectable row that the limits allow.
template <typename Visit>
void for_each_row(const Population& from, const Limits& limits, Visit visit) {
  const uint64_t words = from.bits.shape().leaves;
  for (uint64_t at = 0; at < words; ++at) {
    for (uint64_t bits = from.bits.leaves()[at].load(std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
      const auto row = static_cast<uint32_t>(at * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
      if (row >= from.rows()) break;  // a bit behind the last row, in a damaged segment
      const uint64_t word = from.words[row].load(std::memory_order_acquire);
      if (!is_committed(word)) continue;
      if (!limits.none() && !limits.allow(from.status[row])) continue;
      visit(row, word);
    }
  }
}

}  // namespace

void fail_empty(const DrawPlan& plan) {
  if (const uint32_t more_than = plan.need + plan.skip; more_than != 0) {
    fail(ErrorKind::empty, "no selectable row that the limits allow has more than ", more_than, " step",
         more_than == 1 ? "" : "s", plan.by == By::priority ? ", with priorities above zero" : "");
  }
  if (!plan.limits.none()) fail(ErrorKind::empty, "no selectable row meets the limits on version, age and length");
  fail(ErrorKind::empty,
       plan.by == By::priority ? "no selectable row has a priority above zero" : "the store has no selectable row");
}

Allowed::Allowed(const Population& from, const DrawPlan& plan, std::span<const uint32_t> excluded)
    : from_(from),
      whole_(plan.max_steps != 0
                 ? std::numeric_limits<double>::quiet_NaN()
                 : static_cast<double>(plan.by == By::priority ? from.priorities.total() : from.bits.total())),
      words_(padded_leaves(from.rows())),
      nodes_(TreeShape::of(from.rows()).nodes) {
  tree_ = PriorityTree(words_.get(), nodes_.get(), from.rows());
  for_each_row(from, plan.limits, [&](uint32_t row, uint64_t word) {
    const uint32_t priority = plan.max_steps != 0       ? plan.steps_of(from.status[row])
                              : plan.by == By::priority ? priority_of(word)
                                                        : 1;
    words_.get()[row].store(make_word(generation_of(word), priority), std::memory_order_relaxed);
    rows_ += priority != 0;
  });
  for (uint32_t row : excluded) {
    const uint64_t word = words_.get()[row].load(std::memory_order_relaxed);
    rows_ -= priority_of(word) != 0;
    words_.get()[row].store(make_word(generation_of(word), 0), std::memory_order_relaxed);
  }
  tree_.rebuild();
}

uint32_t Allowed::take(uint64_t target, size_t i, const Draws& out) const {
  PriorityTree::Found found{};
  tree_.find(&target, 1, &found);
  const uint64_t word = words_.get()[found.node].load(std::memory_order_relaxed);
  out.rows[i] = static_cast<uint32_t>(found.node);
  out.generations[i] = generation_of(word);
  out.probability[i] = priority_of(word) / whole_;
  return out.rows[i];
}

void Allowed::remove(uint32_t row) {
  const uint64_t word = words_.get()[row].load(std::memory_order_relaxed);
  words_.get()[row].store(make_word(generation_of(word), 0), std::memory_order_relaxed);
  tree_.add(row, uint64_t{0} - priority_of(word));
  --rows_;
}

SeenRows::SeenRows(size_t most)
    : slots_(std::bit_ceil(2 * most + 2), kNoRow), mask_(static_cast<uint32_t>(slots_.size() - 1)) {}

bool SeenRows::insert(uint32_t row) {
  for (uint32_t slot = row * 2654435761u & mask_;; slot = (slot + 1) & mask_) {
    if (slots_[slot] == row) return false;
    if (slots_[slot] == kNoRow) {
      slots_[slot] = row;
      return true;
    }
  }
}

void draw_distinct(const Population& from, const DrawPlan& plan, std::span<const uint32_t> excluded, const Draws& out) {
  const size_t wanted = out.rows.size();
  const auto fail_not_enough = [&](uint64_t available) {
    fail(ErrorKind::not_enough, wanted, " different rows were asked for, ", available, " can be drawn");
  };
  constexpr size_t kMost = size_t{1} << 29;  // draw numbers are 32 bits, and there may be four times as many and more
  if (wanted > kMost)
    fail(ErrorKind::schema, "at most ", kMost, " different rows can be drawn at once, found ", wanted);
  // Excluded rows that are no longer selectable (a batch's own last allowed samples) take no place among the others.
  const auto taken = static_cast<uint64_t>(std::count_if(excluded.begin(), excluded.end(), [&](uint32_t row) {
    return (from.bits.leaves()[row / 64].load(std::memory_order_relaxed) >> (row % 64) & 1) != 0;
  }));
  if (const uint64_t total = from.bits.total(); total < wanted + taken) fail_not_enough(total - std::min(total, taken));
  SeenRows seen(wanted + excluded.size());
  for (uint32_t row : excluded) seen.insert(row);

  DrawPlan plain = plan;
  plain.key.stream = kDistinctStream;
  plain.strata = 0;
  plain.limits = {};  // a draw that the limits refuse is skipped like one that was chosen before
  constexpr size_t kPiece = 256;
  uint32_t numbers[kPiece], rows[kPiece], generations[kPiece];
  double probability[kPiece];
  const auto most = static_cast<uint32_t>(4 * wanted + 64);
  size_t chosen = 0;
  uint32_t next = 0;
  while (chosen < wanted && next < most) {
    const size_t n = std::min<size_t>({kPiece, most - next, wanted - chosen});
    for (size_t i = 0; i < n; ++i) numbers[i] = next++;
    draw(from, plain, {numbers, n}, {{rows, n}, {generations, n}, {probability, n}});
    for (size_t i = 0; i < n; ++i) {
      if (rows[i] == kNoRow || (!plan.limits.none() && !plan.limits.allow(from.status[rows[i]]))) continue;
      if (!seen.insert(rows[i])) continue;
      out.rows[chosen] = rows[i];
      out.generations[chosen] = generations[i];
      out.probability[chosen] = probability[i];
      ++chosen;
    }
  }
  if (chosen == wanted) return;
  std::vector<uint32_t> gone(excluded.begin(), excluded.end());
  gone.insert(gone.end(), out.rows.begin(), out.rows.begin() + static_cast<ptrdiff_t>(chosen));
  Allowed allowed(from, plan, gone);
  if (allowed.rows() < wanted - chosen) fail_not_enough(chosen + allowed.rows());
  for (; chosen < wanted; ++chosen) {
    const Random128 bits = random_bits(plain.key, next++, plan.round * kAttemptsPerRound + kRefusals);
    allowed.remove(allowed.take(below(bits, allowed.total()), chosen, out));
  }
}

size_t first_rows(const Population& from, Order order, uint64_t after, const Limits& limits,
                  std::span<const uint32_t> excluded, const Draws& out, std::span<uint64_t> sequences,
                  std::span<uint32_t> priorities) {
  struct Ranked {
    uint64_t rank;  // smallest first
    uint64_t sequence;
    uint32_t row, generation, priority;
    bool operator<(const Ranked& other) const {
      return rank != other.rank ? rank < other.rank : sequence < other.sequence;
    }
  };
  const size_t wanted = out.rows.size();
  if (wanted == 0) return 0;
  std::vector<Ranked> best;
  const size_t needed = wanted + excluded.size();
  const size_t keep = 2 * needed + 64;
  best.reserve(keep);
  uint64_t worst = ~uint64_t{0};  // nothing ranked behind this can be among the first
  const auto prune = [&] {
    const auto end = best.begin() + static_cast<ptrdiff_t>(needed);
    std::nth_element(best.begin(), end - 1, best.end());
    best.erase(end, best.end());
    worst = best.back().rank;
  };
  for_each_row(from, limits, [&](uint32_t row, uint64_t word) {
    const uint64_t sequence =
        from.status == nullptr ? row + uint64_t{1} : from.status[row].sequence.load(std::memory_order_relaxed);
    const uint64_t rank = order == Order::oldest   ? sequence
                          : order == Order::newest ? ~sequence
                                                   : ~uint64_t{priority_of(word)};
    if (rank > worst || sequence <= after) return;
    best.push_back({rank, sequence, row, generation_of(word), priority_of(word)});
    if (best.size() == keep) prune();
  });
  if (!excluded.empty()) {
    std::vector<uint32_t> gone(excluded.begin(), excluded.end());
    std::sort(gone.begin(), gone.end());
    std::erase_if(best, [&](const Ranked& some) { return std::binary_search(gone.begin(), gone.end(), some.row); });
  }
  std::sort(best.begin(), best.end());
  const size_t found = std::min(wanted, best.size());
  for (size_t i = 0; i < found; ++i) {
    out.rows[i] = best[i].row;
    out.generations[i] = best[i].generation;
    out.probability[i] = 1.0;
    if (!sequences.empty()) sequences[i] = best[i].sequence;
    if (!priorities.empty()) priorities[i] = best[i].priority;
  }
  for (size_t i = found; i < wanted; ++i) {  // undefined by contract, but deterministic
    out.rows[i] = out.generations[i] = 0;
    out.probability[i] = 0.0;
  }
  return found;
}

}  // namespace geartrain
