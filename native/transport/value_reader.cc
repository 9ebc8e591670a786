#include "transport/value_reader.h"

namespace geartrain {

ValueReader::Array ValueReader::array(bool scalar) {
  Array array{};
  array.code = number<uint8_t>();
  const auto axes = number<uint8_t>(), in_line = number<uint8_t>();
  array.itemsize = itemsizes_.at(array.code);
  if (array.itemsize == 0) refuse("an array has an unknown dtype");
  if (axes > kMostAxes || in_line > 1 || (scalar && axes != 0)) refuse("an array has too many axes");
  array.in_line = in_line != 0;
  array.shape.reserve(axes);
  size_t bytes = array.itemsize;
  bool empty = false;
  for (uint8_t i = 0; i < axes; ++i) {
    const auto axis = number<uint64_t>();
    if (axis > (uint64_t{1} << 62)) refuse("an array is larger than memory can be");
    array.shape.push_back(axis);
    empty |= axis == 0;
    // The axes next to an empty one count as well: NumPy and torch multiply them.
    if (axis != 0 && (__builtin_mul_overflow(bytes, axis, &bytes) || bytes > (size_t{1} << 62))) {
      refuse("an array is larger than memory can be");
    }
  }
  if (empty) bytes = 0;
  if (array.in_line) {
    array.elements = take(bytes);
  } else {
    array.elements = next_buffer();
    if (array.elements.size() != bytes) refuse("a buffer is not as long as it should be");
  }
  return array;
}

ValueReader::Pickle ValueReader::pickle() {
  const auto n = number<uint32_t>();
  const auto buffers = number<uint32_t>();
  Pickle found{take(n), {}};
  if (buffers > buffers_.size() - buffers_used_) refuse("it has fewer buffers than it refers to");
  found.buffers = buffers_.subspan(buffers_used_, buffers);
  buffers_used_ += buffers;
  return found;
}

}  // namespace geartrain
