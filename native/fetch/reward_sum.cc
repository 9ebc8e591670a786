#include "fetch/reward_sum.h"

#include <cmath>
#include <iterator>
#include <limits>

#include "base/copy.h"

namespace geartrain {
namespace {

// Rewards that are summed on the stack.
constexpr size_t kRewardBytes = 1024;

double from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double mantissa = bits & 1023;
  double value;
  if (exponent == 31) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else {
    value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  }
  return bits >> 15 != 0 ? -value : value;
}

void halves_to_doubles(std::byte* to, const std::byte* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
    const double value = from_half(bits);
    std::memcpy(to + i * sizeof value, &value, sizeof value);
  }
}

Conversion to_doubles(uint8_t code) {
  return code == kFloat16 ? &halves_to_doubles : conversion(code, kFloat64);
}

}  // namespace

bool RewardSum::takes(const FieldRecord& field) {
  return to_doubles(field.dtype) != nullptr;
}

RewardSum::RewardSum(const FieldRecord& field, std::span<const double> powers)
    : powers_(powers.data()),
      to_doubles_(to_doubles(field.dtype)),
      elements_(bytes_per_step(field) / field.itemsize),
      itemsize_(field.itemsize),
      is_float_(field.dtype == kFloat32 && field.itemsize == sizeof(float)) {}

void RewardSum::sum_many(std::byte* to, const std::byte* from, uint32_t count, std::vector<double>& scratch) const {
  const size_t numbers = count * elements_;
  alignas(double) std::byte here[kRewardBytes];
  double few[kRewardBytes / sizeof(double)];
  std::vector<std::byte> many;
  std::byte* raw = here;
  double* values = few;
  if (numbers * itemsize_ > sizeof here || numbers > std::size(few)) {
    many.resize(numbers * itemsize_);
    scratch.resize(numbers);
    raw = many.data();
    values = scratch.data();
  }
  copy_lines(raw, from, numbers * itemsize_, false);  // first: it is read once for each sum
  to_doubles_(reinterpret_cast<std::byte*>(values), raw, numbers);
  for (size_t element = 0; element < elements_; ++element) {
    double sum = 0;
    for (size_t k = 0; k < count; ++k) sum += powers_[k] * values[k * elements_ + element];
    const auto rounded = static_cast<float>(sum);
    std::memcpy(to + element * sizeof rounded, &rounded, sizeof rounded);
  }
}

}  // namespace geartrain
