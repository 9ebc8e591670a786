#include "base/convert.h"

#include <array>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace geartrain {
namespace {

using Types = std::tuple<bool, uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, float, double>;
constexpr std::array<uint8_t, std::tuple_size_v<Types>> kCodes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13};

// bool, unsigned, signed, float: numbers of a kind may become those of a later one.
template <typename T>
constexpr int kind() {
  if constexpr (std::is_same_v<T, bool>) return 0;
  if constexpr (std::is_floating_point_v<T>) return 3;
  return std::is_unsigned_v<T> ? 1 : 2;
}

template <typename From, typename To>
void convert(std::byte* to, const std::byte* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    // A byte that is to be a bool may hold anything.
    std::conditional_t<std::is_same_v<From, bool>, uint8_t, From> value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    const To converted = std::is_same_v<From, bool> ? static_cast<To>(value != 0) : static_cast<To>(value);
    std::memcpy(to + i * sizeof converted, &converted, sizeof converted);
  }
}

template <typename From, typename To>
constexpr Conversion allowed() {
  if constexpr (kind<From>() <= kind<To>()) return &convert<From, To>;
  return nullptr;
}

template <size_t From, size_t... To>
constexpr std::array<Conversion, sizeof...(To)> row_of(std::index_sequence<To...>) {
  return {allowed<std::tuple_element_t<From, Types>, std::tuple_element_t<To, Types>>()...};
}

template <size_t... From>
constexpr auto table_of(std::index_sequence<From...> all) {
  return std::array{row_of<From>(all)...};
}

constexpr auto kTable = table_of(std::make_index_sequence<std::tuple_size_v<Types>>());

size_t place_of(uint8_t code) {
  size_t at = 0;
  while (at < kCodes.size() && kCodes[at] != code) ++at;
  return at;
}

}  // namespace

Conversion conversion(uint8_t from, uint8_t to) {
  const size_t one = place_of(from), other = place_of(to);
  return one == kCodes.size() || other == kCodes.size() ? nullptr : kTable[one][other];
}

}  // namespace geartrain
