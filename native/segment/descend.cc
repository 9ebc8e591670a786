#include "segment/descend.h"

#include <bit>

#include "base/widest_form.h"

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define GEARTRAIN_VECTORS 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // some compilers' own header trips over it
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#define GEARTRAIN_VECTORS 0
#endif

namespace geartrain {
namespace {

using Word = std::atomic<uint64_t>;

inline void arrive(Search& search, uint64_t child, uint64_t passed, uint64_t width, const Word* next) {
  const uint64_t node = search.node * kFanout + child;
  search = node < width ? Search{node, search.residual - passed} : Search{width - 1, ~uint64_t{0}};
  if (next != nullptr) {
    __builtin_prefetch(next + search.node * kFanout);
    __builtin_prefetch(next + search.node * kFanout + 8);
  }
}

template <Count kCount>
inline uint64_t value_of(uint64_t word) {
  if constexpr (kCount == Count::low_half) return word & 0xffffffffu;
  if constexpr (kCount == Count::bits) return static_cast<uint64_t>(std::popcount(word));
  return word;
}

template <Count kCount>
void portable(const Word* level, uint64_t width, size_t n, Search* searches, const Word* next) {
  for (size_t i = 0; i < n; ++i) {
    const Word* child = level + searches[i].node * kFanout;
    const uint64_t target = searches[i].residual;
    uint64_t sum = 0, index = 0, passed = 0;
    for (uint64_t c = 0; c + 1 < kFanout; ++c) {  // no branches: which child it is cannot be predicted
      sum += value_of<kCount>(child[c].load(std::memory_order_relaxed));
      const bool beyond = sum <= target;
      index += beyond;
      passed = beyond ? sum : passed;
    }
    arrive(searches[i], index, passed, width, next);
  }
}

#if GEARTRAIN_VECTORS

// Running sums of 8 lanes: each step adds the lanes 1, 2 and 4 below.
__attribute__((target("avx512f"))) inline __m512i running_sums(__m512i v) {
  const __m512i zero = _mm512_setzero_si512();
  v = _mm512_add_epi64(v, _mm512_alignr_epi64(v, zero, 7));
  v = _mm512_add_epi64(v, _mm512_alignr_epi64(v, zero, 6));
  return _mm512_add_epi64(v, _mm512_alignr_epi64(v, zero, 4));
}

// Takes one search down, given what its node's children count.
__attribute__((target("avx512f,popcnt"))) inline void step_down(__m512i low, __m512i high, Search& search,
                                                                uint64_t width, const Word* next) {
  alignas(64) uint64_t sums[8 + kFanout];
  sums[7] = 0;  // the sum before the first child, so that looking it up takes no branch
  low = running_sums(low);
  high = _mm512_add_epi64(running_sums(high), _mm512_permutexvar_epi64(_mm512_set1_epi64(7), low));
  const __m512i target = _mm512_set1_epi64(static_cast<long long>(search.residual));
  const auto beyond = static_cast<unsigned>(_mm512_cmple_epu64_mask(low, target)) |
                      static_cast<unsigned>(_mm512_cmple_epu64_mask(high, target)) << 8;
  _mm512_store_si512(sums + 8, low);
  _mm512_store_si512(sums + 16, high);
  const auto index = static_cast<uint64_t>(std::popcount(beyond & 0x7fffu));
  arrive(search, index, sums[7 + index], width, next);
}

template <Count kCount>
__attribute__((target("avx512f,popcnt"))) void avx512(const Word* level, uint64_t width, size_t n, Search* searches,
                                                      const Word* next) {
  const __m512i mask = _mm512_set1_epi64(kCount == Count::low_half ? 0xffffffffLL : -1LL);
  for (size_t i = 0; i < n; ++i) {
    const Word* child = level + searches[i].node * kFanout;
    step_down(_mm512_and_si512(_mm512_load_si512(child), mask), _mm512_and_si512(_mm512_load_si512(child + 8), mask),
              searches[i], width, next);
  }
}

__attribute__((target("avx512f,avx512vpopcntdq,popcnt"))) void avx512_bits(const Word* level, uint64_t width, size_t n,
                                                                           Search* searches, const Word* next) {
  for (size_t i = 0; i < n; ++i) {
    const Word* child = level + searches[i].node * kFanout;
    step_down(_mm512_popcnt_epi64(_mm512_load_si512(child)), _mm512_popcnt_epi64(_mm512_load_si512(child + 8)),
              searches[i], width, next);
  }
}

// Running sums of 4 lanes.
__attribute__((target("avx2"))) inline __m256i running_sums(__m256i v) {
  v = _mm256_add_epi64(v, _mm256_slli_si256(v, 8));
  const __m256i middle = _mm256_permute4x64_epi64(v, 0b01010101);
  return _mm256_add_epi64(v, _mm256_blend_epi32(_mm256_setzero_si256(), middle, 0b11110000));
}

template <Count kCount>
__attribute__((target("avx2,popcnt"))) void avx2(const Word* level, uint64_t width, size_t n, Search* searches,
                                                 const Word* next) {
  alignas(32) uint64_t sums[4 + kFanout];
  sums[3] = 0;
  const __m256i sign = _mm256_set1_epi64x(static_cast<long long>(uint64_t{1} << 63));  // compares are signed
  for (size_t i = 0; i < n; ++i) {
    const auto* child = reinterpret_cast<const __m256i*>(level + searches[i].node * kFanout);
    const __m256i target = _mm256_xor_si256(_mm256_set1_epi64x(static_cast<long long>(searches[i].residual)), sign);
    __m256i carry = _mm256_setzero_si256();
    unsigned before = 0;  // bit c: the sum up to child c is beyond the target
    for (int part = 0; part < 4; ++part) {
      __m256i v = _mm256_load_si256(child + part);
      if constexpr (kCount == Count::low_half) v = _mm256_and_si256(v, _mm256_set1_epi64x(0xffffffff));
      v = _mm256_add_epi64(running_sums(v), carry);
      carry = _mm256_permute4x64_epi64(v, 0b11111111);
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 4) + part, v);
      const __m256i above = _mm256_cmpgt_epi64(_mm256_xor_si256(v, sign), target);
      before |= static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(above))) << (4 * part);
    }
    const auto index = static_cast<uint64_t>(std::popcount(~before & 0x7fffu));
    arrive(searches[i], index, sums[3 + index], width, next);
  }
}

#endif

using Step = void (*)(const Word*, uint64_t, size_t, Search*, const Word*);

struct Form {
  const char* name;
  Step sum, low_half, bits;
  bool (*viable)();
};

constexpr Form kForms[] = {
#if GEARTRAIN_VECTORS
    {"avx512vpopcntdq", avx512<Count::sum>, avx512<Count::low_half>, avx512_bits,
     [] { return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vpopcntdq") != 0; }},
    {"avx512", avx512<Count::sum>, avx512<Count::low_half>, portable<Count::bits>,
     [] { return __builtin_cpu_supports("avx512f") != 0; }},
    {"avx2", avx2<Count::sum>, avx2<Count::low_half>, portable<Count::bits>,
     [] { return __builtin_cpu_supports("avx2") != 0; }},
#endif
    {"portable", portable<Count::sum>, portable<Count::low_half>, portable<Count::bits>, [] { return true; }},
};

constinit WidestForm<Form> descend_form{kForms};

}  // namespace

void descend(Count count, const Word* level, uint64_t width, size_t n, Search* searches, const Word* next) {
  const Form& use = descend_form.get();
  const Step step = count == Count::sum ? use.sum : count == Count::low_half ? use.low_half : use.bits;
  step(level, width, n, searches, next);
}

bool set_descend_kernel(const char* name) {
  return descend_form.force(name);
}

}  // namespace geartrain
