// Arithmetic of all-reduce: every kernel against what the language makes of the same numbers.

#include <cmath>
#include <map>

#include "collectives/reduce_kernels.h"
#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

template <typename T>
T at(const Array& array, size_t i) {
  T value;
  std::memcpy(&value, array.data() + i * sizeof(T), sizeof(T));
  return value;
}

TEST(a_sum_is_made_in_the_order_of_its_inputs) {
  for (const char* kernel : {"plain", "avx2", "avx512"}) {
    if (!set_reduce_kernel(kernel)) continue;
    for (const size_t n : {1u, 2u, 3u, 5u, 8u}) {
      std::vector<Array> arrays;
      std::vector<const std::byte*> inputs;
      for (size_t i = 0; i < n; ++i) arrays.push_back(numbers(i, Dtype::float32, 5003));
      for (const Array& array : arrays) inputs.push_back(array.data());
      Array sum(5003 * 4), avg(5003 * 4);
      reduce(Op::sum, Dtype::float32, inputs, sum.data(), 5003);
      reduce(Op::avg, Dtype::float32, inputs, avg.data(), 5003);
      size_t wrong = 0;
      for (size_t i = 0; i < 5003; ++i) {
        volatile float expected = at<float>(arrays[0], i);
        for (size_t k = 1; k < n; ++k) expected = expected + at<float>(arrays[k], i);
        wrong += at<float>(sum, i) != expected || at<float>(avg, i) != expected / static_cast<float>(n);
      }
      CHECK_EQ(wrong, 0u);
    }
  }
  set_reduce_kernel("plain");
}

TEST(all_kernels_give_the_same_bits) {
  for (const Shape& shape : shapes(5, 60)) {
    std::map<std::string, Array> results;
    for (const char* kernel : {"plain", "avx2", "avx512"}) {
      if (set_reduce_kernel(kernel)) results[kernel] = reference(9, 3, shape);
    }
    for (const auto& [name, result] : results) {
      if (result != results["plain"]) testing::failed(__FILE__, __LINE__, name, " differs for the ", shape.text());
    }
  }
}

// What C++ makes of three numbers, one after the other, modulo 2^bits for integers.
template <typename T>
T in_order(Op op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    volatile T out = op == Op::product ? a * b
                     : op == Op::min   ? std::min(a, b)
                     : op == Op::max   ? std::max(a, b)
                                       : a + b;
    return out;
  } else {
    const auto x = static_cast<unsigned __int128>(a), y = static_cast<unsigned __int128>(b);
    switch (op) {
      case Op::min:
        return std::min(a, b);
      case Op::max:
        return std::max(a, b);
      case Op::product:
        return static_cast<T>(x * y);
      case Op::band:
        return static_cast<T>(x & y);
      case Op::bor:
        return static_cast<T>(x | y);
      case Op::bxor:
        return static_cast<T>(x ^ y);
      default:
        return static_cast<T>(x + y);
    }
  }
}

template <typename T>
void check_in_order(Dtype dtype, uint64_t count) {
  std::vector<Array> arrays;
  std::vector<const std::byte*> inputs;
  for (uint64_t i = 0; i < 3; ++i) arrays.push_back(numbers(77 + i, dtype, count));
  for (const Array& array : arrays) inputs.push_back(array.data());
  for (uint8_t code = 0; code < kOps; ++code) {
    const Op op = static_cast<Op>(code);
    if (op == Op::avg || !reduces(op, dtype)) continue;
    Array out(count * sizeof(T));
    reduce(op, dtype, inputs, out.data(), count);
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i) {
      const T expected = in_order(op, in_order(op, at<T>(arrays[0], i), at<T>(arrays[1], i)), at<T>(arrays[2], i));
      wrong += at<T>(out, i) != expected;
    }
    if (wrong != 0) testing::failed(__FILE__, __LINE__, wrong, " differ: ", name_of(op), " of ", name_of(dtype));
  }
}

TEST(every_operation_is_that_of_the_language) {
  for (const char* kernel : {"plain", "avx2", "avx512"}) {
    if (!set_reduce_kernel(kernel)) continue;
    constexpr uint64_t kCount = 4099;
    check_in_order<float>(Dtype::float32, kCount);
    check_in_order<double>(Dtype::float64, kCount);
    check_in_order<int8_t>(Dtype::int8, kCount);
    check_in_order<int16_t>(Dtype::int16, kCount);
    check_in_order<int32_t>(Dtype::int32, kCount);
    check_in_order<int64_t>(Dtype::int64, kCount);
    check_in_order<uint8_t>(Dtype::uint8, kCount);
    check_in_order<uint16_t>(Dtype::uint16, kCount);
    check_in_order<uint32_t>(Dtype::uint32, kCount);
    check_in_order<uint64_t>(Dtype::uint64, kCount);
  }
  set_reduce_kernel("plain");
}

TEST(bool_is_true_where_it_is_not_zero) {
  for (const char* kernel : {"plain", "avx2", "avx512"}) {
    if (!set_reduce_kernel(kernel)) continue;
    std::vector<uint8_t> a(256 * 256), b(256 * 256), out(256 * 256);
    for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<uint8_t>(i / 256), b[i] = static_cast<uint8_t>(i % 256);
    const std::byte* const inputs[] = {reinterpret_cast<std::byte*>(a.data()), reinterpret_cast<std::byte*>(b.data())};
    for (uint8_t code = 0; code < kOps; ++code) {
      const Op op = static_cast<Op>(code);
      if (!reduces(op, Dtype::boolean)) continue;
      reduce(op, Dtype::boolean, inputs, reinterpret_cast<std::byte*>(out.data()), out.size());
      const bool is_and = op == Op::product || op == Op::min || op == Op::band;
      size_t wrong = 0;
      for (size_t i = 0; i < out.size(); ++i) {
        const bool x = a[i] != 0, y = b[i] != 0;
        wrong += out[i] != static_cast<uint8_t>(is_and ? x && y : op == Op::bxor ? x != y : x || y);
      }
      if (wrong != 0) testing::failed(__FILE__, __LINE__, wrong, " differ: ", name_of(op), " of bool");
    }
  }
  set_reduce_kernel("plain");
}

TEST(complex_numbers_are_pairs) {
  for (const Op op : {Op::sum, Op::avg}) {
    const Array a = numbers(1, Dtype::float32, 6002), b = numbers(2, Dtype::float32, 6002);
    const std::byte* const inputs[] = {a.data(), b.data()};
    Array pairs(a.size()), floats(a.size());
    reduce(op, Dtype::complex64, inputs, pairs.data(), 3001);
    reduce(op, Dtype::float32, inputs, floats.data(), 6002);
    CHECK(pairs == floats);
  }
  for (uint8_t op = 0; op < kOps; ++op) {
    CHECK_EQ(reduces(static_cast<Op>(op), Dtype::complex128), op <= static_cast<uint8_t>(Op::avg));
  }
}

TEST(sixteen_bits_are_rounded_to_nearest_even_once) {
  // Every half there is goes to float32 and back unchanged, NaNs to NaNs.
  for (const Dtype half : {Dtype::bfloat16, Dtype::float16}) {
    std::vector<uint16_t> all(65536), back(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(65536);
    convert(half, reinterpret_cast<std::byte*>(all.data()), Dtype::float32, reinterpret_cast<std::byte*>(wide.data()),
            wide.size());
    convert(Dtype::float32, reinterpret_cast<std::byte*>(wide.data()), half, reinterpret_cast<std::byte*>(back.data()),
            wide.size());
    size_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) wrong += !std::isnan(wide[i]) && all[i] != back[i];
    CHECK_EQ(wrong, 0u);
    // Half way between two neighbours goes to the even one; a little more goes up.
    wrong = 0;
    const int ends = half == Dtype::bfloat16 ? 0x7f7f : 0x7bff;
    for (int i = 0; i < ends; ++i) {
      const double middle = (static_cast<double>(wide[i]) + static_cast<double>(wide[i + 1])) / 2;
      const auto exact = static_cast<float>(middle);
      const float above = std::nextafter(exact, INFINITY);
      uint16_t narrow[2];
      const float values[2] = {exact, above};
      convert(Dtype::float32, reinterpret_cast<const std::byte*>(values), half, reinterpret_cast<std::byte*>(narrow),
              2);
      if (static_cast<double>(exact) == middle) wrong += narrow[0] != (i % 2 == 0 ? i : i + 1) || narrow[1] != i + 1;
    }
    CHECK_EQ(wrong, 0u);
  }
}

TEST(a_nan_is_passed_on_by_min_and_max) {
  const float nan = std::nanf("");
  const float a[4] = {nan, 1, 2, -0.0F}, b[4] = {1, nan, 3, 1};
  const std::byte* const inputs[] = {reinterpret_cast<const std::byte*>(a), reinterpret_cast<const std::byte*>(b)};
  float out[4];
  reduce(Op::min, Dtype::float32, inputs, reinterpret_cast<std::byte*>(out), 4);
  CHECK(std::isnan(out[0]) && std::isnan(out[1]) && out[2] == 2);
  reduce(Op::max, Dtype::float32, inputs, reinterpret_cast<std::byte*>(out), 4);
  CHECK(std::isnan(out[0]) && std::isnan(out[1]) && out[2] == 3 && out[3] == 1);
}

TEST(nothing_is_converted_where_there_is_no_address) {
  std::byte untouched{7};
  for (const Dtype to : {Dtype::float32, Dtype::bfloat16}) {
    convert(Dtype::float32, nullptr, to, &untouched, 0);  // which the sanitizer of undefined behaviour judges
  }
  CHECK(untouched == std::byte{7});
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
