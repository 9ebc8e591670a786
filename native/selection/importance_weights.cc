// Powers by vectors. Compiled without contraction of products and sums, so that all forms round alike.

#include "selection/importance_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/widest_form.h"

namespace geartrain {
namespace {

// a * b - product, which is exact: product is a * b rounded.
template <bool kFma>
inline __attribute__((always_inline)) double rest_of(double a, double b, double product) {
  if constexpr (kFma) return __builtin_fma(a, b, -product);
  constexpr double kSplit = 134217729.0;  // 2^27 + 1: halves whose products are exact (Dekker, 1971)
  const double as = a * kSplit, bs = b * kSplit;
  const double ah = as - (as - a), bh = bs - (bs - b);
  const double al = a - ah, bl = b - bh;
  return ((ah * bh - product) + ah * bl + al * bh) + al * bl;
}

// The bits of x ** y for normal x > 0, or all bits (a NaN) where the result may be no normal number. Without branches
// and tables, so that a compiler makes vectors of it.
//
//   x = 2^e * m, sqrt(1/2) <= m < sqrt(2)      log2(x) = e + 2 / ln 2 * atanh(s), s = (m - 1) / (m + 1)
//   y * log2(x) = n + r, |r| <= 1/2            2^r by its series
//
// What carries over into the result's last bits (s, log2(x), y * log2(x)) is kept in two doubles.
template <bool kFma>
inline __attribute__((always_inline)) uint64_t power_of(double x, double y) {
  constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd;
  const uint64_t shifted = std::bit_cast<uint64_t>(x) - kRootOfHalf;
  const double m = std::bit_cast<double>((shifted & kMantissa) + kRootOfHalf);
  // The exponent, of 12 bits in two's complement, as the last bits of a double of 2^52 and more.
  const double e =
      std::bit_cast<double>(((shifted >> 52 ^ 0x800) & 0xfff) | 0x4330000000000000) - (4503599627370496.0 + 2048.0);

  const double f = m - 1.0;
  const double d = 2.0 + f, d_low = f - (d - 2.0);
  const double inverse = 1.0 / d;
  const double s = f * inverse;
  const double sd = s * d;
  const double s_low = (((f - sd) - rest_of<kFma>(s, d, sd)) - s * d_low) * inverse;

  constexpr double k = 2.8853900817779268;  // 2 / ln 2, and what follows it
  constexpr double k_low = 0x1.777d0ffda0d24p-55;
  const double z = s * s;
  double p = k / 21;
  p = p * z + k / 19;
  p = p * z + k / 17;
  p = p * z + k / 15;
  p = p * z + k / 13;
  p = p * z + k / 11;
  p = p * z + k / 9;
  p = p * z + k / 7;
  p = p * z + k / 5;
  p = p * z + k / 3;
  const double t = s * k;
  const double t_low = rest_of<kFma>(s, k, t) + (s * k_low + s_low * k) + s * z * p;
  const double log = e + t;
  const double log_low = ((e - log) + t) + t_low;

  const double q = y * log;
  const double q_low = rest_of<kFma>(y, log, q) + y * log_low;
  constexpr double kToInteger = 6755399441055744.0;  // 1.5 * 2^52: sums with it are whole numbers
  const double n = q + kToInteger;
  const double r = (q - (n - kToInteger)) + q_low;
  constexpr double c1 = 0.69314718055994531, c2 = c1 * c1 / 2, c3 = c2 * c1 / 3, c4 = c3 * c1 / 4, c5 = c4 * c1 / 5;
  constexpr double c6 = c5 * c1 / 6, c7 = c6 * c1 / 7, c8 = c7 * c1 / 8, c9 = c8 * c1 / 9, c10 = c9 * c1 / 10;
  constexpr double c11 = c10 * c1 / 11, c12 = c11 * c1 / 12, c13 = c12 * c1 / 13;
  double w = c13;
  w = w * r + c12;
  w = w * r + c11;
  w = w * r + c10;
  w = w * r + c9;
  w = w * r + c8;
  w = w * r + c7;
  w = w * r + c6;
  w = w * r + c5;
  w = w * r + c4;
  w = w * r + c3;
  w = w * r + c2;
  w = w * r + c1;
  const double fraction = 1.0 + r * w;
  const uint64_t power = std::bit_cast<uint64_t>(fraction) + (std::bit_cast<uint64_t>(n) << 52);
  // By whole numbers, since comparisons of doubles stay branches: 0 where all is well, else all bits, which is a NaN.
  constexpr uint64_t kLeast = std::bit_cast<uint64_t>(std::numeric_limits<double>::min());
  constexpr uint64_t kInfinity = std::bit_cast<uint64_t>(std::numeric_limits<double>::infinity());
  const uint64_t is_odd =
      uint64_t{std::bit_cast<uint64_t>(x) - kLeast >= kInfinity - kLeast} |
      uint64_t{(std::bit_cast<uint64_t>(q) & ~(uint64_t{1} << 63)) >= std::bit_cast<uint64_t>(1000.0)};
  return power | (uint64_t{0} - is_odd);
}

double argument_of(double probability, double count) {
  return std::max(probability, std::numeric_limits<double>::min()) * count;
}

// Unscaled weights. False where some of them are for the standard library to compute, which are NaN.
template <bool kFma>
inline __attribute__((always_inline)) bool powers(const double* probability, size_t n, double count, double y,
                                                  double* out) {
  uint64_t odd = 0;
  for (size_t i = 0; i < n; ++i) {
    const double p = probability[i];
    const double least = std::numeric_limits<double>::min();
    const uint64_t power = power_of<kFma>((p < least ? least : p) * count, y);
    odd |= uint64_t{power == ~uint64_t{0}};
    out[i] = std::bit_cast<double>(power);
  }
  return odd == 0;
}

inline __attribute__((always_inline)) void divide_by_largest(double* weights, size_t n, double largest) {
  constexpr size_t kLanes = 16;  // maxima side by side, or each would wait for the one before
  double lanes[kLanes];
  for (double& lane : lanes) lane = largest;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = lanes[lane] < weights[i + lane] ? weights[i + lane] : lanes[lane];
    }
  }
  for (; i < n; ++i) lanes[0] = lanes[0] < weights[i] ? weights[i] : lanes[0];
  for (double lane : lanes) largest = largest < lane ? lane : largest;
  for (i = 0; i < n; ++i) weights[i] /= largest;
}

bool portable_powers(const double* probability, size_t n, double count, double y, double* out) {
  return powers<false>(probability, n, count, y, out);
}
void portable_divide(double* weights, size_t n, double largest) {
  divide_by_largest(weights, n, largest);
}

#if defined(__x86_64__)
#define GEARTRAIN_AVX2 __attribute__((target("avx2,fma")))
#define GEARTRAIN_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,fma,prefer-vector-width=512")))

GEARTRAIN_AVX2 bool avx2_powers(const double* probability, size_t n, double count, double y, double* out) {
  return powers<true>(probability, n, count, y, out);
}
GEARTRAIN_AVX2 void avx2_divide(double* weights, size_t n, double largest) {
  divide_by_largest(weights, n, largest);
}
GEARTRAIN_AVX512 bool avx512_powers(const double* probability, size_t n, double count, double y, double* out) {
  return powers<true>(probability, n, count, y, out);
}
GEARTRAIN_AVX512 void avx512_divide(double* weights, size_t n, double largest) {
  divide_by_largest(weights, n, largest);
}
#endif

struct PowerKernel {
  const char* name;
  bool (*powers)(const double* probability, size_t n, double count, double y, double* out);
  void (*divide_by_largest)(double* weights, size_t n, double largest);
  bool (*viable)();
};

constexpr PowerKernel kPowerKernels[] = {
#if defined(__x86_64__)
    {"avx512", avx512_powers, avx512_divide,
     [] {
       return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
              __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("fma") != 0;
     }},
    {"avx2", avx2_powers, avx2_divide,
     [] { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0; }},
#endif
    {"portable", portable_powers, portable_divide, [] { return true; }},
};

constinit WidestForm<PowerKernel> power_form{kPowerKernels};

void unscaled(std::span<const double> probability, uint64_t count, double beta, std::span<double> weights) {
  const auto rows = static_cast<double>(count);
  if (power_form.get().powers(probability.data(), probability.size(), rows, -beta, weights.data())) return;
  for (size_t i = 0; i < probability.size(); ++i) {
    if (std::isnan(weights[i])) weights[i] = std::pow(argument_of(probability[i], rows), -beta);
  }
}

}  // namespace

void importance_weights(std::span<const double> probability, uint64_t count, double beta, double lowest,
                        std::span<double> weights) {
  double largest = 0;
  if (lowest > 0) unscaled({&lowest, 1}, count, beta, {&largest, 1});
  unscaled(probability, count, beta, weights);
  power_form.get().divide_by_largest(weights.data(), probability.size(), largest);
}

bool set_power_kernel(const char* name) {
  return power_form.force(name);
}

}  // namespace geartrain
