#include "store/span_layout.h"

#include <atomic>

namespace geartrain {
namespace {

constexpr uint64_t kMostSpanBytes = uint64_t{1} << 46;

constexpr uint64_t aligned(uint64_t bytes) {
  return (bytes + kSpanUnit - 1) / kSpanUnit * kSpanUnit;
}

}  // namespace

SpanLayout::SpanLayout(const std::vector<FieldRecord>& fields, uint32_t task, uint8_t axis) {
  enum Pass : uint8_t { dividing, arrays, strings };
  for (const Pass pass : {dividing, arrays, strings}) {
    for (uint32_t i = 0; i < fields.size(); ++i) {
      const FieldRecord& field = fields[i];
      if (!in_spans(field) || field.task != task || (axis != 0 && field.axis != axis)) continue;
      if (pass != (field.divides != 0 ? dividing : field.kind == SpanKind::array ? arrays : strings)) continue;
      fields_.push_back({i, field.block_bytes, field.axis, field.kind});
    }
    if (pass == arrays) arrays_ = fields_.size();
  }
}

uint64_t SpanLayout::place(const AxisLengths& lengths, std::span<const uint64_t> string_bytes,
                           std::span<SpanPiece> pieces) const {
  uint64_t at = kSpanUnit;
  for (size_t i = 0; i < fields_.size(); ++i) {
    const uint64_t items = fields_[i].items(lengths);
    uint64_t bytes = 0;
    if (i < arrays_) {
      if (__builtin_mul_overflow(items, fields_[i].item_bytes, &bytes)) return 0;
    } else {
      const uint64_t text = string_bytes[i - arrays_];
      if (text > UINT32_MAX) return 0;
      bytes = 4 * (items + 1) + text;
    }
    if (bytes > kMostSpanBytes - at) return 0;
    pieces[i] = {at, bytes};
    at = aligned(at + bytes);
    if (at >= kMostSpanBytes) return 0;
  }
  return at / kSpanUnit;
}

bool SpanLayout::locate(const std::byte* span, uint64_t units, const AxisLengths& lengths,
                        std::span<SpanPiece> pieces) const {
  const uint64_t end = units * kSpanUnit;
  uint64_t at = kSpanUnit;
  for (size_t i = 0; i < fields_.size(); ++i) {
    const uint64_t items = fields_[i].items(lengths);
    uint64_t bytes = 0;
    if (i < arrays_) {
      if (__builtin_mul_overflow(items, fields_[i].item_bytes, &bytes)) return false;
    } else {
      bytes = 4 * (items + 1);
      if (at > end || bytes > end - at) return false;
      // Whoever took the units anew may write there.
      auto* const bound = reinterpret_cast<uint32_t*>(const_cast<std::byte*>(span) + at + 4 * items);
      bytes += std::atomic_ref(*bound).load(std::memory_order_relaxed);
    }
    if (at > end || bytes > end - at) return false;
    pieces[i] = {at, bytes};
    at = aligned(at + bytes);
  }
  return true;
}

}  // namespace geartrain
