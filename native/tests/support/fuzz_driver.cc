// Fuzz driver (fuzz_x [runs] [seconds] [seed] [corpus]): the seeds and the files of the folder `corpus` as they are,
// and then mutations of them and of each input that took an edge of the code as often as none before it. Such inputs
// are kept in `corpus`. The same for the same seed of the generator where the code is, one thread's and without clocks.
//
// Findings are those of the sanitizers, an exception that is not an Error, or an input that takes five seconds twice.
// The input is then in a file, whose name is printed; fuzz_x FILE runs it alone. With libFuzzer (clang)
// fuzz_seed_files.cc is in this one's place.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/support/edge_coverage.h"
#include "tests/support/fuzz.h"
#include "tests/support/sanitizer_options.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace geartrain {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kSlow_s = 5;
constexpr size_t kMostKept = 20'000;  // inputs

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

void put(Input* input, std::mt19937_64& random, uint64_t value, size_t bytes) {
  if (input->size() < bytes) return;
  std::memcpy(input->data() + random() % (input->size() - bytes + 1), &value, bytes);
}

void mutate(Input* input, const std::vector<Input>& corpus, size_t most, std::mt19937_64& random) {
  static constexpr uint64_t kTelling[] = {0,          1,          2,          7,          8,          63,
                                          64,         255,        4095,       4096,       65535,      1 << 20,
                                          0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 63, ~0ull};
  const auto at = [&](size_t size) { return static_cast<std::ptrdiff_t>(random() % (size + 1)); };
  switch (random() % 8) {
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
      const Input& other = corpus[random() % corpus.size()];
      const auto first = at(other.size());
      input->insert(input->begin() + at(input->size()), other.begin() + first, other.end());
      break;
    }
    case 6:  // small numbers, of kinds and counts
      if (!input->empty()) (*input)[random() % input->size()] += static_cast<uint8_t>(random() % 9 + 252);
      break;
    default: {
      const auto first = at(input->size());
      const auto last =
          first + static_cast<std::ptrdiff_t>(random() % (input->size() - static_cast<size_t>(first) + 1));
      input->erase(input->begin() + first, input->begin() + std::min<std::ptrdiff_t>(last, first + 16));
    }
  }
  if (input->size() > most) input->resize(most);
}

const Input* running = nullptr;

void write_file(const std::string& path, const Input& input) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
}

void write_finding() {
  if (running == nullptr) return;
  const std::string path = "fuzz-finding-" + std::to_string(::getpid());
  write_file(path, *running);
  std::fprintf(stderr, "the input is in %s\n", path.c_str());
}

double seconds_of(const Input& input) {
  running = &input;
  clear_edge_coverage();
  const auto began = Clock::now();
  LLVMFuzzerTestOneInput(input.data(), input.size());
  return seconds_since(began);
}

Input contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// In the order of their names.
std::vector<Input> files_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> inputs;
  for (const auto& path : paths) inputs.push_back(contents(path));
  return inputs;
}

int run(uint64_t runs, double seconds, uint64_t seed, const char* folder) {
  auto corpus = fuzz_seeds();
  if (folder != nullptr) {
    for (Input& input : files_of(folder)) corpus.push_back(std::move(input));
  }
  const size_t given = corpus.size();
  size_t most = 1 << 12;  // bytes of an input: a mutated seed is not cut
  for (const Input& one : corpus) most = std::max(most, 2 * one.size());
  most = std::min<size_t>(most, 1 << 20);
  const auto began = Clock::now();
  std::mt19937_64 random(20261122 + seed);
  double slowest = 0;
  uint64_t done = 0, kept = 0;
  for (; done < runs && seconds_since(began) < seconds; ++done) {
    // The newest ones more often: what they reached has been tried least.
    const size_t newest = random() % 2 == 0 ? corpus.size() : std::max<size_t>(1, corpus.size() / 8);
    Input input = corpus[done < given ? done : corpus.size() - 1 - random() % newest];
    for (uint64_t n = done < given ? 0 : 1 + random() % 5; n != 0; --n) mutate(&input, corpus, most, random);
    double took = seconds_of(input);
    if (found_new_edges() && done >= given && corpus.size() < kMostKept) {
      if (folder != nullptr) {
        char name[64];
        std::snprintf(name, sizeof name, "/%llu-%llu", static_cast<unsigned long long>(seed),
                      static_cast<unsigned long long>(done));
        write_file(std::string(folder) + name, input);
      }
      corpus.push_back(input);
      ++kept;
    }
    if (took >= kSlow_s) {  // on a busy machine it may have waited for a processor: once more
      std::printf("input %llu took %.3f s\n", static_cast<unsigned long long>(done), took);
      took = std::min(took, seconds_of(input));
    }
    slowest = std::max(slowest, took);
  }
  std::printf("%llu inputs, the slowest took %.3f s; %llu of them new, %llu edges\n",
              static_cast<unsigned long long>(done), slowest, static_cast<unsigned long long>(kept),
              static_cast<unsigned long long>(edges_seen()));
  return slowest < kSlow_s ? 0 : 1;
}

}  // namespace
}  // namespace geartrain

int main(int argc, char** argv) {
  // Of the sanitizers; without them, of what abort() and a lost exception do.
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(geartrain::write_finding);
  if (__sanitizer_set_death_callback == nullptr) std::signal(SIGABRT, [](int) { geartrain::write_finding(); });
  if (argc == 2 && std::filesystem::is_regular_file(argv[1])) {
    const geartrain::Input input = geartrain::contents(argv[1]);
    std::printf("it took %.3f s\n", geartrain::seconds_of(input));
    return 0;
  }
  const uint64_t runs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20'000;
  const double seconds = argc > 2 ? std::strtod(argv[2], nullptr) : 10;
  return geartrain::run(runs, seconds, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0,
                        argc > 4 ? argv[4] : nullptr);
}
