// Seeds for libFuzzer: what fuzz_seeds() makes becomes files of the corpus, the folder that is the last argument.

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/support/fuzz.h"
#include "tests/support/sanitizer_options.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc < 2) return 0;
  const std::filesystem::path folder = (*argv)[*argc - 1];
  if (!std::filesystem::is_directory(folder)) return 0;
  size_t number = 0;
  for (const geartrain::Input& seed : geartrain::fuzz_seeds()) {
    char name[32];
    std::snprintf(name, sizeof name, "seed-%04zu", number++);
    std::ofstream(folder / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
  }
  return 0;
}
