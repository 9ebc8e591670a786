// Reader of encoded values: the parts of a message that anyone may have sent, within bounds and one budget. The format
// is documented in python/codec.cc; what builds Python's objects out of the parts is python/decode.cc.
//
// The budget. Every value takes at least one byte, so a message can never hold more values than bytes. The reader
// counts the values that open containers still wait for (`owed`), and refuses a container that would make them more
// than the bytes that are left: all claims of a message together are at most its header's length, however they are
// nested, and memory made for claims is in proportion to what came. Text, numbers and elements are bounded by the bytes
// themselves: nothing is allocated here.
//
// Malformed input is an Error of kind frame; after one the reader is of no use.
#pragma once

#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "base/errors.h"
#include "transport/message.h"

namespace geartrain {

constexpr uint32_t kMostIntBytes = 1 << 16;
constexpr uint32_t kMostAxes = 64;

class ValueReader {
 public:
  using ItemSizes = std::array<uint8_t, 256>;  // by dtype code; 0: there is none

  // The arguments must outlive it.
  ValueReader(Bytes header, std::span<const std::span<std::byte>> buffers, const ItemSizes& itemsizes,
              uint32_t max_depth)
      : header_(header), buffers_(buffers), itemsizes_(itemsizes), max_depth_(max_depth) {}

  // The type of the next value, `depth` containers deep; its content follows.
  char tag(uint32_t depth) {
    if (depth > max_depth_) refuse("it is nested too deep");
    const auto found = static_cast<char>(number<uint8_t>());
    --owed_;
    return found;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  // l t e z, and m with two values for each of its items: how many follow.
  uint32_t items(uint32_t values_each) {
    const auto n = number<uint32_t>();
    owed_ += uint64_t{n} * values_each;
    if (owed_ > left()) refuse("it ends too early");
    return n;
  }
  // x: which of torch's values its one value, which follows, is made into.
  uint8_t kind() {
    const auto which = number<uint8_t>();
    if (++owed_ > left()) refuse("it ends too early");
    return which;
  }
  // I s b y: their bytes.
  Bytes text() { return take(number<uint32_t>()); }
  Bytes digits() {
    const Bytes found = text();
    if (found.size() > kMostIntBytes) refuse("an int is too long");
    return found;
  }
  // B Y.
  std::span<std::byte> buffer_of_bytes() {
    const std::span<std::byte> from = next_buffer();
    if (number<uint64_t>() != from.size()) refuse("a buffer is not as long as it should be");
    return from;
  }

  struct Array {
    uint8_t code, itemsize;
    bool in_line;  // in the header, of no particular alignment; else a buffer of the message
    std::vector<size_t> shape;
    Bytes elements;
  };
  // a A g.
  Array array(bool scalar);

  struct Pickle {
    Bytes text;
    std::span<const std::span<std::byte>> buffers;
  };
  Pickle pickle();

  // After the outermost value.
  void finish() const {
    if (left() != 0) refuse("something follows its value");
    if (buffers_used_ != buffers_.size()) refuse("it has more buffers than it refers to");
  }

  [[noreturn]] static void refuse(const char* what) { fail(ErrorKind::frame, "the message cannot be decoded: ", what); }

 private:
  size_t left() const { return header_.size() - at_; }
  Bytes take(size_t bytes) {
    if (bytes > left()) refuse("it ends too early");
    const Bytes found = header_.subspan(at_, bytes);
    at_ += bytes;
    return found;
  }
  std::span<std::byte> next_buffer() {
    if (buffers_used_ == buffers_.size()) refuse("it has fewer buffers than it refers to");
    return buffers_[buffers_used_++];
  }

  const Bytes header_;
  const std::span<const std::span<std::byte>> buffers_;
  const ItemSizes& itemsizes_;
  const uint32_t max_depth_;
  size_t at_ = 0;
  size_t buffers_used_ = 0;
  uint64_t owed_ = 1;  // values that have yet to come, as far as is known
};

}  // namespace geartrain
