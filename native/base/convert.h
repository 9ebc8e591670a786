// Conversion of array elements between dtypes, within a kind of number as NumPy's "same_kind" has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

// Stored dtypes that native code asks for by name (the codes of geartrain/core/dtypes.py).
enum DtypeCode : uint8_t {
  kBool = 1,
  kInt32 = 7,
  kUint64 = 8,
  kInt64 = 9,
  kFloat16 = 10,
  kFloat32 = 12,
  kFloat64 = 13
};

// Converts `count` elements; neither pointer need be aligned.
using Conversion = void (*)(std::byte* to, const std::byte* from, size_t count);

// From one stored dtype to another: bool to anything, unsigned to signed
// integers and floats, signed integers to floats, and any size to any other. nullptr for the rest, among it everything
// with float16, bfloat16, 8-bit floats and complex numbers.
Conversion conversion(uint8_t from, uint8_t to);

}  // namespace geartrain
