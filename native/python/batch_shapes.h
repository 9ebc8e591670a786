// Shapes of a batch's arrays.
#pragma once

#include <vector>

#include "base/errors.h"
#include "fetch/transitions.h"
#include "python/bind.h"

namespace geartrain {

// Of a field with windows of so many steps (0: whole rows), all of them or some.
inline std::vector<size_t> batch_shape(const FieldRecord& field, size_t rows, uint32_t window,
                                       const FieldSteps* steps) {
  std::vector<size_t> shape{rows};
  shape.insert(shape.end(), field.shape, field.shape + field.ndim);
  if (field.timed == 0) return shape;
  if (steps != nullptr) {
    shape[1] = steps->count;
    if (!steps->axis) shape.erase(shape.begin() + 1);
  } else if (window != 0) {
    shape[1] = window;
  }
  return shape;
}

// Of what a field gives to transitions: (rows, ...), observations above a stack of 1 (rows, frame_stack, ...).
inline std::vector<size_t> transition_shape(const FieldRecord& field, TransitionRole role, size_t rows,
                                            const TransitionView& view) {
  std::vector<size_t> shape{rows};
  if (role == TransitionRole::observation && view.frame_stack > 1) shape.push_back(view.frame_stack);
  shape.insert(shape.end(), field.shape + (field.timed != 0 ? 1 : 0), field.shape + field.ndim);
  return shape;
}

// Bytes of an array of that shape; refused on overflow.
inline size_t bytes_of(const std::vector<size_t>& shape, size_t itemsize) {
  size_t bytes = itemsize;
  for (size_t axis : shape) {
    if (__builtin_mul_overflow(bytes, axis, &bytes) || bytes > (size_t{1} << 56)) {
      fail(ErrorKind::no_space, "a batch of ", shape[0], " rows with such windows is larger than memory can be");
    }
  }
  return bytes;
}

}  // namespace geartrain
