// CPU features that choose between forms of one function.
#pragma once

#include <cstdlib>
#include <string_view>

namespace geartrain {

// False with GEARTRAIN_AVX512=0 in the environment: benchmarks use it to measure what processors without AVX-512 run.
inline bool avx512_allowed() {
  static const bool allowed = [] {
    const char* const given = std::getenv("GEARTRAIN_AVX512");
    return given == nullptr || std::string_view(given) != "0";
  }();
  return allowed;
}

}  // namespace geartrain
