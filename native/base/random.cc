#include "base/random.h"

#include "base/widest_form.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // some compilers' own header trips over it
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace geartrain {
namespace {

constexpr int kPhiloxRounds = 10;

void portable_bits(const DrawKey& key, const uint32_t* draws, size_t n, uint32_t attempt, uint64_t* high,
                   uint64_t* low) {
  for (size_t i = 0; i < n; ++i) {
    const Random128 bits = random_bits(key, draws[i], attempt);
    high[i] = bits.high;
    low[i] = bits.low;
  }
}

#if defined(__x86_64__)

// A counter's four words stand in the lower halves of 64-bit lanes. What the products leave in the upper halves is
// never read: the next product takes lower halves alone, and the last round's result is masked.

__attribute__((target("avx2"))) void avx2_bits(const DrawKey& key, const uint32_t* draws, size_t n, uint32_t attempt,
                                               uint64_t* high, uint64_t* low) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    __m256i c0 = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(draws + i)));
    __m256i c1 = _mm256_set1_epi64x(static_cast<long long>(key.stream << 24 | attempt));
    __m256i c2 = _mm256_set1_epi64x(static_cast<long long>(key.step & 0xffffffffu));
    __m256i c3 = _mm256_set1_epi64x(static_cast<long long>(key.step >> 32));
    auto k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi64x(k0));
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi64x(k1));
      c1 = p1;
      c3 = p0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const __m256i lower = _mm256_set1_epi64x(0xffffffff);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i),
                        _mm256_or_si256(_mm256_slli_epi64(c0, 32), _mm256_and_si256(c1, lower)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i),
                        _mm256_or_si256(_mm256_slli_epi64(c2, 32), _mm256_and_si256(c3, lower)));
  }
  portable_bits(key, draws + i, n - i, attempt, high + i, low + i);
}

__attribute__((target("avx512f"))) void avx512_bits_of_draws(const DrawKey& key, const uint32_t* draws, size_t n,
                                                             uint32_t attempt, uint64_t* high, uint64_t* low) {
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m512i c0 = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(draws + i)));
    __m512i c1 = _mm512_set1_epi64(static_cast<long long>(key.stream << 24 | attempt));
    __m512i c2 = _mm512_set1_epi64(static_cast<long long>(key.step & 0xffffffffu));
    __m512i c3 = _mm512_set1_epi64(static_cast<long long>(key.step >> 32));
    auto k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      constexpr int kXor3 = 0x96;
      const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
      c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(k0), kXor3);
      c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(k1), kXor3);
      c1 = p1;
      c3 = p0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const __m512i lower = _mm512_set1_epi64(0xffffffff);
    _mm512_storeu_si512(high + i, _mm512_or_si512(_mm512_slli_epi64(c0, 32), _mm512_and_si512(c1, lower)));
    _mm512_storeu_si512(low + i, _mm512_or_si512(_mm512_slli_epi64(c2, 32), _mm512_and_si512(c3, lower)));
  }
  portable_bits(key, draws + i, n - i, attempt, high + i, low + i);
}

#endif

struct RandomKernel {
  const char* name;
  void (*bits)(const DrawKey&, const uint32_t*, size_t, uint32_t, uint64_t*, uint64_t*);
  bool (*viable)();
};

constexpr RandomKernel kRandomKernels[] = {
#if defined(__x86_64__)
    {"avx512", avx512_bits_of_draws, [] { return __builtin_cpu_supports("avx512f") != 0; }},
    {"avx2", avx2_bits, [] { return __builtin_cpu_supports("avx2") != 0; }},
#endif
    {"portable", portable_bits, [] { return true; }},
};

constinit WidestForm<RandomKernel> random_form{kRandomKernels};

}  // namespace

void random_bits(const DrawKey& key, const uint32_t* draws, size_t n, uint32_t attempt, uint64_t* high, uint64_t* low) {
  random_form.get().bits(key, draws, n, attempt, high, low);
}

bool set_random_kernel(const char* name) {
  return random_form.force(name);
}

}  // namespace geartrain
