#include "selection.h"

#include <algorithm>
#include <bit>

#include "errors.h"
#include "segment.h"

namespace geartrain {
namespace {

constexpr size_t kInFlight = 16;

// Draws `numbers` through `tree`; accept(found, i) takes a leaf or refuses it, and then it is drawn again.
template <typename Tree, typename Accept>
uint64_t draw(const Tree& tree, const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
              const char* what_is_empty, Accept accept) {
  uint64_t failed = 0;
  uint64_t targets[kInFlight];
  typename Tree::Found found[kInFlight];
  size_t index[kInFlight];
  for (size_t first = 0; first < numbers.size(); first += kInFlight) {
    size_t n = std::min(kInFlight, numbers.size() - first);
    for (size_t i = 0; i < n; ++i) index[i] = first + i;
    for (uint32_t attempt = 0; n > 0 && attempt < kAttemptsPerRound; ++attempt) {
      const uint64_t total = tree.total();
      if (total == 0) fail(ErrorKind::empty, what_is_empty);
      for (size_t i = 0; i < n; ++i) {
        targets[i] = below(random_bits(key, numbers[index[i]], round * kAttemptsPerRound + attempt), total);
      }
      tree.find(targets, n, found);
      size_t again = 0;
      for (size_t i = 0; i < n; ++i) {
        if (!tree.inside(found[i]) || !accept(found[i], index[i], total)) index[again++] = index[i];
      }
      n = again;
    }
    failed += n;
  }
  return failed;
}

}  // namespace

uint32_t select_bit(uint64_t word, uint32_t rank) {
  uint32_t position = 0;
  for (uint32_t half = 32; half != 0; half /= 2) {
    const auto below = static_cast<uint32_t>(std::popcount(word & ((uint64_t{1} << half) - 1)));
    const bool upper = rank >= below;
    position += upper ? half : 0;
    rank -= upper ? below : 0;
    word = upper ? word >> half : word;
  }
  return position;
}

uint64_t draw_weighted(const WeightTree& tree, const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                       const Draws& out) {
  std::fill(out.rows.begin(), out.rows.end(), kNoRow);
  return draw(tree, key, round, numbers, "no selectable row has a weight above zero",
              [&](const WeightTree::Found& found, size_t i, uint64_t total) {
                const uint64_t word = tree.leaves()[found.leaf].load(std::memory_order_acquire);
                if (!is_committed(word) || weight_of(word) == 0) return false;
                out.rows[i] = static_cast<uint32_t>(found.leaf);
                out.generations[i] = generation_of(word);
                out.probability[i] = static_cast<double>(weight_of(word)) / static_cast<double>(total);
                return true;
              });
}

uint64_t draw_uniform(const BitTree& tree, const std::atomic<uint64_t>* words, const DrawKey& key, uint32_t round,
                      std::span<const uint32_t> numbers, const Draws& out) {
  std::fill(out.rows.begin(), out.rows.end(), kNoRow);
  return draw(tree, key, round, numbers, "the store has no selectable row",
              [&](const BitTree::Found& found, size_t i, uint64_t total) {
                const uint64_t bits = tree.leaves()[found.leaf].load(std::memory_order_relaxed);
                if (found.residual >= BitLeaf::count(bits)) return false;
                const uint64_t row = found.leaf * 64 + select_bit(bits, static_cast<uint32_t>(found.residual));
                const uint64_t word = words[row].load(std::memory_order_acquire);
                if (!is_committed(word)) return false;
                out.rows[i] = static_cast<uint32_t>(row);
                out.generations[i] = generation_of(word);
                out.probability[i] = 1.0 / static_cast<double>(total);
                return true;
              });
}

void draw_window_ends(const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                      std::span<const int32_t> lengths, std::span<int32_t> ends) {
  const DrawKey windows{key.seed, key.step, kWindowStream};
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto length = static_cast<uint64_t>(std::max(lengths[i], 1));
    ends[i] = static_cast<int32_t>(below(random_bits(windows, numbers[i], round * kAttemptsPerRound), length));
  }
}

}  // namespace geartrain
