// Reduction kernels: several arrays of one type become one, element by element, in a given order.
//
// The order is the contract. a[0] op a[1] op a[2] ... is computed from left to right for every element, so the
// result depends on nothing but the arrays: not on the process that computes it, in pieces of what size, or which came
// first. 16-bit floats are added up and multiplied in fp32 and rounded once at the end, to nearest, ties to even.
// Integers wrap around. A sum of bool is their "or", as NumPy has it, and a product their "and".
// min and max propagate a NaN. Every kernel gives the same bits (except -0 and NaN's payload): none may contract a
// multiply and an add, and nothing is divided before the end.
//
// Blocks are small enough to stay in the L1 cache, so every array is read from memory once and the result written once.
// The widest form that the CPU has is chosen at run time, as in copy.cc. Any thread; nothing here waits or allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace geartrain {

// Numbers of the wire and of the C interface: never renumber, only append.
enum class Dtype : uint8_t {
  float32,
  float64,
  bfloat16,
  float16,
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean,
  uint16,
  uint32,
  uint64,
  complex64,
  complex128
};
constexpr uint8_t kDtypes = 15;
enum class Op : uint8_t { sum, avg, min, max, product, band, bor, bxor };
constexpr uint8_t kOps = 8;

constexpr size_t bytes_of(Dtype dtype) {
  constexpr size_t sizes[kDtypes] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 2, 4, 8, 8, 16};
  return sizes[static_cast<uint8_t>(dtype)];
}
constexpr bool is_float(Dtype dtype) {
  return dtype <= Dtype::float16;
}
constexpr bool is_complex(Dtype dtype) {
  return dtype >= Dtype::complex64;
}
// Which reductions there are: complex numbers are added up alone, bits are those of integers and bool, and averages
// those of floating point.
constexpr bool reduces(Op op, Dtype dtype) {
  if (op == Op::sum) return true;
  if (op == Op::avg) return is_float(dtype) || is_complex(dtype);
  if (op >= Op::band) return !is_float(dtype) && !is_complex(dtype);
  return !is_complex(dtype);
}
const char* name_of(Dtype dtype);
const char* name_of(Op op);

// out[i] = inputs[0][i] op inputs[1][i] op ..., of a reduction that there is; avg is the sum, divided by `divisor` (the
// inputs' number when 0).
// `out` may be one of the inputs. At least one input; all 1-byte aligned or better.
void reduce(Op op, Dtype dtype, std::span<const std::byte* const> inputs, std::byte* out, size_t count,
            uint32_t divisor = 0);

// values[i] /= divisor, for algorithms that add step by step (the ring).
void divide(Dtype dtype, std::byte* values, size_t count, uint32_t divisor);

// float32 to bfloat16 or float16 and back, to nearest, ties to even. The same type is a copy.
void convert(Dtype from, const std::byte* in, Dtype to, std::byte* out, size_t count);
bool convertible(Dtype from, Dtype to);

// Forces "avx512", "avx2" or "plain", for tests; false when this machine does not have it.
bool set_reduce_kernel(const char* name);

}  // namespace geartrain
