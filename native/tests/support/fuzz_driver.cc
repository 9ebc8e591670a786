// Fuzz driver (fuzz_x [runs] [seconds] [seed]): the seeds as they are, and then mutations of them, the same for the
// same seed of the generator. Findings are those of the sanitizers, an exception that is not an Error, or an input
// that takes five seconds twice.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "tests/support/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kSlow_s = 5;

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

void put(Input* input, std::mt19937_64& random, uint64_t value, size_t bytes) {
  if (input->size() < bytes) return;
  std::memcpy(input->data() + random() % (input->size() - bytes + 1), &value, bytes);
}

void mutate(Input* input, const std::vector<Input>& seeds, size_t most, std::mt19937_64& random) {
  static constexpr uint64_t kTelling[] = {0,          1,          2,          7,          8,          63,
                                          64,         255,        4095,       4096,       65535,      1 << 20,
                                          0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 63, ~0ull};
  const auto at = [&](size_t size) { return static_cast<std::ptrdiff_t>(random() % (size + 1)); };
  switch (random() % 7) {
    case 0:
      if (!input->empty()) (*input)[random() % input->size()] ^= static_cast<uint8_t>(1u << (random() % 8));
      break;
    case 1:
      put(input, random, random(), 1);
      break;
    case 2:
      put(input, random, kTelling[random() % std::size(kTelling)], 4);
      break;
    case 3:
      put(input, random, kTelling[random() % std::size(kTelling)], 8);
      break;
    case 4:
      input->resize(input->size() - random() % (input->size() / 2 + 1));
      break;
    case 5: {
      const Input& other = seeds[random() % seeds.size()];
      const auto first = at(other.size());
      input->insert(input->begin() + at(input->size()), other.begin() + first, other.end());
      break;
    }
    default: {
      const auto first = at(input->size());
      const auto last =
          first + static_cast<std::ptrdiff_t>(random() % (input->size() - static_cast<size_t>(first) + 1));
      input->erase(input->begin() + first, input->begin() + std::min<std::ptrdiff_t>(last, first + 16));
    }
  }
  if (input->size() > most) input->resize(most);
}

double seconds_of(const Input& input) {
  const auto began = Clock::now();
  LLVMFuzzerTestOneInput(input.data(), input.size());
  return seconds_since(began);
}

int run(uint64_t runs, double seconds, uint64_t seed) {
  const auto seeds = fuzz_seeds();
  size_t most = 1 << 16;  // bytes of an input: a mutated seed is not cut
  for (const Input& seed : seeds) most = std::max(most, 2 * seed.size());
  const auto began = Clock::now();
  std::mt19937_64 random(20261122 + seed);
  double slowest = 0;
  uint64_t done = 0;
  for (; done < runs && seconds_since(began) < seconds; ++done) {
    Input input = seeds[done < seeds.size() ? done : random() % seeds.size()];
    for (uint64_t n = done < seeds.size() ? 0 : 1 + random() % 5; n != 0; --n) mutate(&input, seeds, most, random);
    double took = seconds_of(input);
    if (took >= kSlow_s) {  // on a busy machine it may have waited for a processor: once more
      std::printf("input %llu took %.3f s\n", static_cast<unsigned long long>(done), took);
      took = std::min(took, seconds_of(input));
    }
    slowest = std::max(slowest, took);
  }
  std::printf("%llu inputs, the slowest took %.3f s\n", static_cast<unsigned long long>(done), slowest);
  return slowest < kSlow_s ? 0 : 1;
}

}  // namespace
}  // namespace geartrain

int main(int argc, char** argv) {
  const uint64_t runs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20'000;
  const double seconds = argc > 2 ? std::strtod(argv[2], nullptr) : 10;
  return geartrain::run(runs, seconds, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0);
}
