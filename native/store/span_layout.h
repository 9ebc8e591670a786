// Span layout: where the fields of one insert, put or append lie in their span.
//
//   head             64 bytes (segment/span_heap.h): the items of each axis
//   arrays           items of each field, one behind the other; each field 64-byte aligned. Lengths that divide an axis
//                    come first, next to the head: who reads a row needs both before anything else
//   strings          of each field of strings u32 [items + 1], where they begin and the last one ends; then their bytes
//
// Arrays come first, so that where they lie follows from the head alone. A field without an axis has one item. All that
// is read from a span may be another process's: sizes are bounded by the span's.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "segment/segment.h"

namespace geartrain {

using AxisLengths = std::array<uint32_t, kMaxAxes>;

struct SpanField {
  uint32_t field;       // number in the schema
  uint64_t item_bytes;  // of strings 1
  uint8_t axis;         // counted from 1; 0: none
  SpanKind kind;

  uint64_t items(const AxisLengths& lengths) const { return axis == 0 ? 1 : lengths[axis - 1]; }
};

// Where a field lies, from the span's first byte; of strings `at` is where their bounds lie.
struct SpanPiece {
  uint64_t at, bytes;
};

class SpanLayout {
 public:
  SpanLayout() = default;
  // Fields of a task; with an axis only those that have it, as an append writes them.
  SpanLayout(const std::vector<FieldRecord>& fields, uint32_t task, uint8_t axis = 0);

  const std::vector<SpanField>& fields() const { return fields_; }  // lengths that divide, other arrays, then strings
  bool empty() const { return fields_.empty(); }
  size_t arrays() const { return arrays_; }  // how many of the fields are no strings

  // Units of a span, its head included, and where its fields lie. `string_bytes`: of each field of strings, of all
  // items together. 0 where they are more than any region holds.
  uint64_t place(const AxisLengths& lengths, std::span<const uint64_t> string_bytes, std::span<SpanPiece> pieces) const;

  // Where fields of a filled span of so many units lie; false where they do not fit into it.
  bool locate(const std::byte* span, uint64_t units, const AxisLengths& lengths, std::span<SpanPiece> pieces) const;

 private:
  std::vector<SpanField> fields_;
  size_t arrays_ = 0;
};

}  // namespace geartrain
