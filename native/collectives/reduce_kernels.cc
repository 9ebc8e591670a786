#include "collectives/reduce_kernels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/widest_form.h"

#define GEARTRAIN_INLINE inline __attribute__((always_inline))

namespace geartrain {
namespace {

// Elements of a block: 8 KB of fp32 for the result, and as much for an input that is widened.
constexpr size_t kBlock = 2048;

// --- one element ----------------------------------------------------------------------------------------------------

struct Sum {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};

// A NaN on either side wins; of two equal values (0 and -0) the second.
struct Min {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) return a < b ? a : b;
    return (a < b) | (a != a) ? a : b;
  }
};

struct Max {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) return a > b ? a : b;
    return (a > b) | (a != a) ? a : b;
  }
};

// Narrow integers are multiplied as unsigned ones of 32 bits: C++ would take int for two of 16 bits, which overflows.
struct Product {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, std::make_unsigned_t<T>>;
      return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
};

struct And {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// Of bool, which is any byte: true is whatever is not 0.
template <typename F>
struct Truth {
  template <typename T>
  static GEARTRAIN_INLINE T of(T a, T b) {
    return F::of(static_cast<T>(a != 0), static_cast<T>(b != 0));
  }
};

// Arrays come from messages and from users: any alignment. memcpy of an element is a plain load.
template <typename T>
GEARTRAIN_INLINE T load(const std::byte* from, size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
GEARTRAIN_INLINE void store(std::byte* to, size_t i, T value) {
  std::memcpy(to + i * sizeof(T), &value, sizeof(T));
}

GEARTRAIN_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

GEARTRAIN_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

GEARTRAIN_INLINE float widen_bfloat16(uint16_t half) {
  return bits_to_float(static_cast<uint32_t>(half) << 16);
}

GEARTRAIN_INLINE uint16_t narrow_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// Without a branch, so that it vectorises: the exponent is rebiased by a multiplication, which is exact also for
// subnormals; infinities and NaNs get the rest of their exponent afterwards.
GEARTRAIN_INLINE float widen_float16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float scaled = bits_to_float(shifted) * bits_to_float(0x77800000);  // 2^112
  const uint32_t bits = float_to_bits(scaled) | ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u);
  const uint32_t quiet = (half & 0x7fff) > 0x7c00 ? 0x400000u : 0u;
  return bits_to_float(bits | quiet | static_cast<uint32_t>(half & 0x8000) << 16);
}

GEARTRAIN_INLINE uint16_t narrow_float16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // Normal results: rebias by 112, round the 13 bits that go to nearest even. An overflow carries into the exponent.
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal results: adding 0.5 leaves exactly the wanted bits, rounded by the hardware.
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5F) - 0x3f000000;
  uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;
  half = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : half;
  return static_cast<uint16_t>(half | sign);
}

// --- blocks, for one instruction set each -------------------------------------------------------------------------

template <typename T, typename F>
GEARTRAIN_INLINE void combine_block(const std::byte* a, const std::byte* b, std::byte* out, size_t n) {
  for (size_t i = 0; i < n; ++i) store<T>(out, i, F::of(load<T>(a, i), load<T>(b, i)));
}

template <typename T>
GEARTRAIN_INLINE void divide_block(std::byte* values, size_t n, uint32_t divisor) {
  const T by = static_cast<T>(divisor);
  for (size_t i = 0; i < n; ++i) store<T>(values, i, load<T>(values, i) / by);
}

using Combine = void (*)(const std::byte* a, const std::byte* b, std::byte* out, size_t n);
using Divide = void (*)(std::byte* values, size_t n, uint32_t divisor);
using Widen = void (*)(const std::byte* in, float* out, size_t n);
using Narrow = void (*)(const float* in, std::byte* out, size_t n);

struct Kernel {
  const char* name;
  bool (*viable)();
  Combine combine[kOps][kDtypes];  // none for avg, the 16-bit floats and complex numbers, which are made of others
  Divide divide32, divide64;
  Widen widen_bf16, widen_fp16;
  Narrow narrow_bf16, narrow_fp16;
};

// The functions of one instruction set. The bodies above are inlined into them and compiled for it.
#define GEARTRAIN_KERNEL(SET, ATTRIBUTE)                                                              \
  struct SET {                                                                                        \
    template <typename T, typename F>                                                                 \
    ATTRIBUTE static void combine(const std::byte* a, const std::byte* b, std::byte* out, size_t n) { \
      combine_block<T, F>(a, b, out, n);                                                              \
    }                                                                                                 \
    template <size_t kSize, typename F>                                                               \
    static void combine_bits(const std::byte* a, const std::byte* b, std::byte* out, size_t n) {      \
      combine<uint8_t, F>(a, b, out, n * kSize);                                                      \
    }                                                                                                 \
    template <typename T>                                                                             \
    ATTRIBUTE static void divide(std::byte* values, size_t n, uint32_t divisor) {                     \
      divide_block<T>(values, n, divisor);                                                            \
    }                                                                                                 \
    ATTRIBUTE static void widen_bf16(const std::byte* in, float* out, size_t n) {                     \
      for (size_t i = 0; i < n; ++i) out[i] = widen_bfloat16(load<uint16_t>(in, i));                  \
    }                                                                                                 \
    ATTRIBUTE static void narrow_bf16(const float* in, std::byte* out, size_t n) {                    \
      for (size_t i = 0; i < n; ++i) store<uint16_t>(out, i, narrow_bfloat16(in[i]));                 \
    }                                                                                                 \
    ATTRIBUTE static void widen_fp16(const std::byte* in, float* out, size_t n) {                     \
      for (size_t i = 0; i < n; ++i) out[i] = widen_float16(load<uint16_t>(in, i));                   \
    }                                                                                                 \
    ATTRIBUTE static void narrow_fp16(const float* in, std::byte* out, size_t n) {                    \
      for (size_t i = 0; i < n; ++i) store<uint16_t>(out, i, narrow_float16(in[i]));                  \
    }                                                                                                 \
  };

GEARTRAIN_KERNEL(Plain, )
#if defined(__x86_64__)
GEARTRAIN_KERNEL(Avx2, __attribute__((target("avx2"))))
GEARTRAIN_KERNEL(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

template <typename F>
constexpr bool kOrders = std::is_same_v<F, Min> || std::is_same_v<F, Max>;
template <typename F>
constexpr bool kBitwise = std::is_same_v<F, And> || std::is_same_v<F, Or> || std::is_same_v<F, Xor>;

// What gives the same bits is compiled once: of signed and unsigned numbers unless it goes by their order, and of bytes
// what takes each bit by itself.
template <typename S, typename F, typename T>
constexpr Combine combine_of_integers() {
  if constexpr (kBitwise<F>) {
    return S::template combine_bits<sizeof(T), F>;
  } else {
    return S::template combine<std::conditional_t<kOrders<F>, T, std::make_unsigned_t<T>>, F>;
  }
}

template <typename S, typename F>
constexpr void fill_integers(Combine (&row)[kDtypes]) {
  row[static_cast<size_t>(Dtype::int8)] = combine_of_integers<S, F, int8_t>();
  row[static_cast<size_t>(Dtype::int16)] = combine_of_integers<S, F, int16_t>();
  row[static_cast<size_t>(Dtype::int32)] = combine_of_integers<S, F, int32_t>();
  row[static_cast<size_t>(Dtype::int64)] = combine_of_integers<S, F, int64_t>();
  row[static_cast<size_t>(Dtype::uint8)] = combine_of_integers<S, F, uint8_t>();
  row[static_cast<size_t>(Dtype::uint16)] = combine_of_integers<S, F, uint16_t>();
  row[static_cast<size_t>(Dtype::uint32)] = combine_of_integers<S, F, uint32_t>();
  row[static_cast<size_t>(Dtype::uint64)] = combine_of_integers<S, F, uint64_t>();
}

// `OfBool` is what the operation comes to on truth values.
template <typename S, typename F, typename OfBool>
constexpr void fill(Kernel* made, Op op) {
  Combine(&row)[kDtypes] = made->combine[static_cast<size_t>(op)];
  fill_integers<S, F>(row);
  row[static_cast<size_t>(Dtype::boolean)] = S::template combine<uint8_t, Truth<OfBool>>;
  if constexpr (!kBitwise<F>) {
    row[static_cast<size_t>(Dtype::float32)] = S::template combine<float, F>;
    row[static_cast<size_t>(Dtype::float64)] = S::template combine<double, F>;
  }
}

template <typename S>
constexpr Kernel kernel_of(const char* name, bool (*viable)()) {
  Kernel made{};
  made.name = name;
  made.viable = viable;
  fill<S, Sum, Or>(&made, Op::sum);
  fill<S, Min, And>(&made, Op::min);
  fill<S, Max, Or>(&made, Op::max);
  fill<S, Product, And>(&made, Op::product);
  fill<S, And, And>(&made, Op::band);
  fill<S, Or, Or>(&made, Op::bor);
  fill<S, Xor, Xor>(&made, Op::bxor);
  made.divide32 = S::template divide<float>;
  made.divide64 = S::template divide<double>;
  made.widen_bf16 = S::widen_bf16;
  made.widen_fp16 = S::widen_fp16;
  made.narrow_bf16 = S::narrow_bf16;
  made.narrow_fp16 = S::narrow_fp16;
  return made;
}

const Kernel kKernels[] = {
#if defined(__x86_64__)
    kernel_of<Avx512>("avx512",
                      [] {
                        return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                               __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
                      }),
    kernel_of<Avx2>("avx2", [] { return __builtin_cpu_supports("avx2") != 0; }),
#endif
    kernel_of<Plain>("plain", [] { return true; }),
};

constinit WidestForm<Kernel> reduce_form{kKernels};

// --- arrays ---------------------------------------------------------------------------------------------------------

Combine combine_of(const Kernel& with, Op op, Dtype dtype) {
  return with.combine[static_cast<size_t>(op == Op::avg ? Op::sum : op)][static_cast<size_t>(dtype)];
}

void reduce_plain(const Kernel& with, Op op, Dtype dtype, std::span<const std::byte* const> inputs, std::byte* out,
                  size_t count, uint32_t divisor) {
  const Combine combine = combine_of(with, op, dtype);
  const size_t size = bytes_of(dtype);
  // `out` may be an input that comes late in the order: then the block is computed in a temporary.
  const bool sideband = inputs.size() > 2 && std::find(inputs.begin() + 2, inputs.end(), out) != inputs.end();
  alignas(64) std::byte own[kBlock * sizeof(double)];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    std::byte* const block = sideband ? own : out + at * size;
    if (inputs.size() == 1) {
      if (block != inputs[0] + at * size) std::memmove(block, inputs[0] + at * size, n * size);
    } else {
      combine(inputs[0] + at * size, inputs[1] + at * size, block, n);
    }
    for (size_t i = 2; i < inputs.size(); ++i) combine(block, inputs[i] + at * size, block, n);
    if (op == Op::avg) (dtype == Dtype::float32 ? with.divide32 : with.divide64)(block, n, divisor);
    if (sideband) std::memcpy(out + at * size, block, n * size);
  }
}

void reduce_halves(const Kernel& with, Op op, Dtype dtype, std::span<const std::byte* const> inputs, std::byte* out,
                   size_t count, uint32_t divisor) {
  const Combine combine = combine_of(with, op, Dtype::float32);
  const Widen widen = dtype == Dtype::bfloat16 ? with.widen_bf16 : with.widen_fp16;
  alignas(64) float sum[kBlock], next[kBlock];
  auto* const sums = reinterpret_cast<std::byte*>(sum);
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    widen(inputs[0] + at * 2, sum, n);
    for (size_t i = 1; i < inputs.size(); ++i) {
      widen(inputs[i] + at * 2, next, n);
      combine(sums, reinterpret_cast<const std::byte*>(next), sums, n);
    }
    if (op == Op::avg) with.divide32(sums, n, divisor);
    (dtype == Dtype::bfloat16 ? with.narrow_bf16 : with.narrow_fp16)(sum, out + at * 2, n);
  }
}

bool is_half(Dtype dtype) {
  return dtype == Dtype::bfloat16 || dtype == Dtype::float16;
}

}  // namespace

const char* name_of(Dtype dtype) {
  constexpr const char* names[kDtypes] = {"float32", "float64", "bfloat16", "float16",   "int8",
                                          "int16",   "int32",   "int64",    "uint8",     "bool",
                                          "uint16",  "uint32",  "uint64",   "complex64", "complex128"};
  return names[static_cast<uint8_t>(dtype)];
}

const char* name_of(Op op) {
  constexpr const char* names[kOps] = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
  return names[static_cast<uint8_t>(op)];
}

void reduce(Op op, Dtype dtype, std::span<const std::byte* const> inputs, std::byte* out, size_t count,
            uint32_t divisor) {
  if (divisor == 0) divisor = static_cast<uint32_t>(inputs.size());
  if (is_complex(dtype)) {  // pairs of floats, added up and divided as such
    dtype = dtype == Dtype::complex64 ? Dtype::float32 : Dtype::float64;
    count *= 2;
  }
  (is_half(dtype) ? reduce_halves : reduce_plain)(reduce_form.get(), op, dtype, inputs, out, count, divisor);
}

void divide(Dtype dtype, std::byte* values, size_t count, uint32_t divisor) {
  const std::byte* const one[] = {values};
  reduce(Op::avg, dtype, one, values, count, divisor);
}

bool convertible(Dtype from, Dtype to) {
  return from == to || (from == Dtype::float32 && is_half(to)) || (is_half(from) && to == Dtype::float32);
}

void convert(Dtype from, const std::byte* in, Dtype to, std::byte* out, size_t count) {
  if (from == to) {
    if (in != out && count != 0) std::memmove(out, in, count * bytes_of(from));  // of nothing there may be no address
    return;
  }
  const Kernel& with = reduce_form.get();
  alignas(64) float block[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    if (to == Dtype::float32) {
      (from == Dtype::bfloat16 ? with.widen_bf16 : with.widen_fp16)(in + at * 2, block, n);
      std::memcpy(out + at * 4, block, n * 4);
    } else {
      std::memcpy(block, in + at * 4, n * 4);
      (to == Dtype::bfloat16 ? with.narrow_bf16 : with.narrow_fp16)(block, out + at * 2, n);
    }
  }
}

bool set_reduce_kernel(const char* name) {
  return reduce_form.force(name);
}

}  // namespace geartrain
