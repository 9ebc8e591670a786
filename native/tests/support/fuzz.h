// Shared by the fuzzers. Each fuzz_x.cc has LLVMFuzzerTestOneInput, for libFuzzer, and seeds made from real
// messages; without libFuzzer fuzz_driver.cc mutates those with a fixed seed and budget.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace geartrain {

using Input = std::vector<uint8_t>;

std::vector<Input> fuzz_seeds();

template <typename T>
void append(Input* input, const T& value) {
  const auto* begin = reinterpret_cast<const uint8_t*>(&value);
  input->insert(input->end(), begin, begin + sizeof value);
}

// Takes values off the front of an input; zeros once it is used up.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : left_(data, size) {}
  template <typename T>
  T take() {
    T value{};
    const size_t bytes = left_.size() < sizeof value ? left_.size() : sizeof value;
    if (bytes != 0) std::memcpy(&value, left_.data(), bytes);
    left_ = left_.subspan(bytes);
    return value;
  }
  std::span<const uint8_t> take(size_t bytes) {
    const auto part = left_.first(bytes < left_.size() ? bytes : left_.size());
    left_ = left_.subspan(part.size());
    return part;
  }
  std::span<const uint8_t> rest() const { return left_; }

 private:
  std::span<const uint8_t> left_;
};

}  // namespace geartrain
