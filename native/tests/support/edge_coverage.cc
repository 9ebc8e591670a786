// Compiled without coverage or sanitizers of its own. Threads count into one table without atomics: a count that is
// lost costs an input, not a finding.
#include "tests/support/edge_coverage.h"

#include <algorithm>
#include <atomic>
#include <bit>

namespace geartrain {
namespace {

constexpr uint64_t kEdges = 1 << 16;  // by hash: two of them may share a place
uint8_t counts[kEdges];
uint8_t seen[kEdges];  // a bit for each class of counts
uint16_t touched[kEdges];
std::atomic<uint32_t> touched_count{0};
uint64_t edges = 0;
bool compiled_in = false;
thread_local uint64_t previous = 0;

inline void count_edge(uint64_t at) {
  compiled_in = true;
  const uint64_t block = (at * 0x9e3779b97f4a7c15ull) >> 48;
  const uint64_t edge = (block ^ previous) % kEdges;
  previous = block >> 1;
  if (counts[edge] == 0) {
    const uint32_t place = touched_count.fetch_add(1, std::memory_order_relaxed);
    if (place < kEdges) touched[place] = static_cast<uint16_t>(edge);
  }
  if (counts[edge] != 255) ++counts[edge];
}

}  // namespace

bool has_edge_coverage() {
  return compiled_in;
}

void clear_edge_coverage() {
  const uint64_t n = touched_count.load(std::memory_order_relaxed);
  for (uint64_t i = 0; i < n && i < kEdges; ++i) counts[touched[i]] = 0;
  touched_count.store(0, std::memory_order_relaxed);
  previous = 0;
}

bool found_new_edges() {
  bool found = false;
  const uint64_t n = touched_count.load(std::memory_order_relaxed);
  for (uint64_t i = 0; i < n && i < kEdges; ++i) {
    const unsigned count = counts[touched[i]];
    if (count == 0) continue;  // another thread's, that is there twice
    const int kind = count < 4 ? static_cast<int>(count) - 1
                               : std::min(static_cast<int>(std::bit_width(count)), 7);  // to 127, and more
    const auto bit = static_cast<uint8_t>(1u << kind);
    uint8_t& known = seen[touched[i]];
    if ((known & bit) != 0) continue;
    edges += known == 0;
    known |= bit;
    found = true;
  }
  return found;
}

uint64_t edges_seen() {
  return edges;
}

}  // namespace geartrain

extern "C" void __sanitizer_cov_trace_pc() {
  geartrain::count_edge(reinterpret_cast<uint64_t>(__builtin_return_address(0)));
}
