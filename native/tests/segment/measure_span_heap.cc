// How full a region gets before a row finds no span, and the CPU time of a take or give. Not a test.
//
//   measure_span_heap [region in MiB, 1024] [part of a distribution's name]
//
// Rows are taken until six times the region was taken. If one does not fit, the ratio of the region to the bytes of all
// rows is noted, and random rows are freed until it fits. A row is one span: a head, then fields of 4, 1, 4 and 4 bytes
// a token, each 64-byte aligned.

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "segment/span_heap.h"

namespace geartrain {
namespace {

using Random = std::mt19937_64;
constexpr uint64_t kFields[] = {4, 1, 4, 4};  // bytes a token

struct Distribution {
  const char* name;
  double mean, sigma;  // of a lognormal one; sigma 0: uniform
  uint64_t least, most;

  uint64_t tokens(Random& random) const {
    if (sigma == 0) return least + random() % (most - least + 1);
    std::lognormal_distribution<double> lognormal(std::log(mean) - sigma * sigma / 2, sigma);
    return std::clamp(static_cast<uint64_t>(lognormal(random)), least, most);
  }
};

constexpr Distribution kDistributions[] = {
    {"200..2,048 uniform", 0, 0, 200, 2048},
    {"20..2,000 mean 500", 520, 0.8, 20, 2000},
    {"20 k max mean 5 k", 5200, 0.7, 100, 20'000},
    {"128 k max mean 9 k", 9100, 1, 100, 131'072},
};

uint64_t cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

struct Churn {
  const char* name;
  bool each;      // a row is freed before each take as well, once the region was full
  uint64_t part;  // of the rows that are freed when one does not fit; 0: one row
};

constexpr Churn kChurns[] = {{"freed: 1 at a time", false, 0}, {"1 for 1", true, 0}, {"a third", false, 3}};

struct Row {
  uint64_t units, bytes;  // bytes: without padding, the head included
};

Row random_row(const Distribution& distribution, int answers, Random& random) {
  uint64_t tokens = 0;
  for (int i = 0; i < answers; ++i) tokens += distribution.tokens(random);
  Row row{1, kSpanUnit};
  for (const uint64_t bytes : kFields) {
    row.units += (tokens * bytes + kSpanUnit - 1) / kSpanUnit;
    row.bytes += tokens * bytes;
  }
  return row;
}

void measure(const Distribution& distribution, int answers, const Churn& churn, SpanHeap& heap) {
  heap.clear();
  Random random(7);
  std::vector<std::pair<uint64_t, Row>> rows;  // first unit
  std::vector<double> ratios, free_rows;
  uint64_t bytes = 0, taken = 0, calls = 0;
  const double region = static_cast<double>(heap.units() * kSpanUnit);
  uint64_t spent = 0;
  while (taken < 6 * heap.units()) {
    // Many at a time between two looks at the clock.
    constexpr int kTogether = 64;
    Row wanted[kTogether];
    uint64_t victims[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      wanted[i] = random_row(distribution, answers, random);
      victims[i] = random();
    }
    const bool full = !ratios.empty();
    const auto began = cpu_ns();
    for (int i = 0; i < kTogether; ++i) {
      const auto free_one = [&](uint64_t victim) {
        std::swap(rows[victim % rows.size()], rows.back());
        bytes -= rows.back().second.bytes;
        heap.give(rows.back().first);
        rows.pop_back();
        ++calls;
      };
      if (full && churn.each) free_one(victims[i]);
      for (;;) {
        const uint64_t first = heap.take(wanted[i].units);
        ++calls;
        if (first != 0) {
          rows.push_back({first, wanted[i]});
          bytes += wanted[i].bytes;
          taken += wanted[i].units;
          break;
        }
        ratios.push_back(region / static_cast<double>(bytes));
        free_rows.push_back(static_cast<double>(heap.free_units()) / static_cast<double>(wanted[i].units));
        uint64_t freed = churn.part == 0 ? 1 : rows.size() / churn.part;
        for (; freed > 0; --freed) free_one(random());
      }
    }
    if (full)
      spent += cpu_ns() - began;
    else
      calls = 0;
  }
  if (heap.audit(nullptr) != 0) std::abort();
  const auto percentile = [](std::vector<double>& values, double part) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
  };
  std::printf(
      "%-18s  rows of %-2d  %-18s  %6zu rows  region/rows median %.4f p99 %.4f  free/wanted %6.1f  %6zu failed  %4.0f "
      "ns\n",
      distribution.name, answers, churn.name, rows.size(), percentile(ratios, 0.5), percentile(ratios, 0.99),
      percentile(free_rows, 0.5), ratios.size(), static_cast<double>(spent) / static_cast<double>(calls));
}

}  // namespace
}  // namespace geartrain

int main(int argc, char** argv) {
  using namespace geartrain;
  const uint64_t bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1024) << 20;
  void* const region = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (bytes == 0 || region == MAP_FAILED) return 1;
  const auto index = std::make_unique<SpanIndex>();
  SpanHeap heap(index.get(), static_cast<std::byte*>(region), bytes / kSpanUnit);
  for (const Distribution& distribution : kDistributions) {
    if (argc > 2 && std::string(distribution.name).find(argv[2]) == std::string::npos) continue;
    for (const int answers : {16, 1}) {
      for (const Churn& churn : kChurns) measure(distribution, answers, churn, heap);
    }
  }
}
