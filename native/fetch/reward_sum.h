// Sum of n-step rewards: sum of gamma ** k * reward[t + k], in double precision, rounded to float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/convert.h"
#include "fetch/lines.h"
#include "store/store.h"

namespace geartrain {

class RewardSum {
 public:
  RewardSum() = default;
  // Of a field of numbers, one or several a step. `powers`, which outlive this: gamma ** 0, 1, ...
  RewardSum(const FieldRecord& field, std::span<const double> powers);

  // Whether a field's dtype has a sum.
  static bool takes(const FieldRecord& field);

  // Sums `count` steps that begin at `from`; the row may be written meanwhile. `scratch` is of the caller's thread.
  void operator()(std::byte* to, const std::byte* from, uint32_t count, std::vector<double>& scratch) const {
    const size_t numbers = count * elements_;
    if (numbers == 1 && is_float_) {
      copy_few(to, from, sizeof(float));
    } else if (numbers <= kFew && elements_ == 1 && is_float_) {
      float few[kFew];
      copy_few(reinterpret_cast<std::byte*>(few), from, numbers * sizeof(float));
      double sum = 0;
      for (size_t k = 0; k < numbers; ++k) sum += powers_[k] * static_cast<double>(few[k]);
      const auto rounded = static_cast<float>(sum);
      std::memcpy(to, &rounded, sizeof rounded);
    } else {
      sum_many(to, from, count, scratch);
    }
  }

 private:
  static constexpr size_t kFew = 8;

  void sum_many(std::byte* to, const std::byte* from, uint32_t count, std::vector<double>& scratch) const;

  const double* powers_ = nullptr;
  Conversion to_doubles_ = nullptr;
  size_t elements_ = 0, itemsize_ = 0;
  bool is_float_ = false;
};

}  // namespace geartrain
