// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// A draw's random bits are a pure function of (seed, step, stream, draw, attempt), so any device and any rank can
// make exactly those it needs, in any order, and a resumed run continues where the first one stopped.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace geartrain {

__extension__ using uint128 = unsigned __int128;

struct DrawKey {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t stream = 0;  // below 2^8: what is drawn
};

// Streams in use. Numbers stand for results that people reproduce: never renumber, only append.
constexpr uint32_t kRowStream = 0;
constexpr uint32_t kWindowStream = 1;
constexpr uint32_t kDistinctStream = 2;
constexpr uint32_t kStepStream = 3;
constexpr uint32_t kGoalStream = 4;
constexpr uint32_t kEpochStream = 5;

// 128 random bits, most significant first.
struct Random128 {
  uint64_t high, low;
};

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

// `attempt` is below 2^24: which try at the same draw this is.
inline Random128 random_bits(const DrawKey& key, uint32_t draw, uint32_t attempt) {
  const auto out = philox4x32(
      {draw, key.stream << 24 | attempt, static_cast<uint32_t>(key.step), static_cast<uint32_t>(key.step >> 32)},
      {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)});
  return {uint64_t{out[0]} << 32 | out[1], uint64_t{out[2]} << 32 | out[3]};
}

// The same of n draws at once, halves apart, in the widest form that the CPU has.
void random_bits(const DrawKey& key, const uint32_t* draws, size_t n, uint32_t attempt, uint64_t* high, uint64_t* low);

// Forces "avx512", "avx2" or "portable", for tests; false when this machine does not have it.
bool set_random_kernel(const char* name);

// An integer in [0, bound): floor(bits * bound / 2^128). Off from uniform by less than 2^-64 of a leaf's share.
inline uint64_t below(const Random128& bits, uint64_t bound) {
  const auto low = static_cast<uint128>(bits.low) * bound >> 64;
  return static_cast<uint64_t>((static_cast<uint128>(bits.high) * bound + low) >> 64);
}

}  // namespace geartrain
