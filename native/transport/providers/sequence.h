// Consecutive spans as one sequence of bytes: the buffers of a message that travels in pieces.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace geartrain {

template <typename Byte>
class Sequence {
 public:
  void clear() { parts_.clear(), ends_.clear(); }
  void add(std::span<Byte> part) {
    if (part.empty()) return;
    parts_.push_back(part);
    ends_.push_back(bytes() + part.size());
  }
  // The same bytes in one part, copied to `into`, which has room for them.
  void gather(std::byte* into) {
    const uint64_t all = bytes();
    for (std::byte* at = into; const std::span<Byte> part : parts_) {
      std::memcpy(at, part.data(), part.size());
      at += part.size();
    }
    clear();
    add({into, all});
  }
  uint64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
  // Up to `most` vectors for the bytes from `at`, `length` of them at most.
  size_t vectors(uint64_t at, uint64_t length, struct iovec* out, size_t most) const {
    size_t part = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
    size_t n = 0;
    while (n < most && length != 0 && part < parts_.size()) {
      const uint64_t skip = at - (ends_[part] - parts_[part].size());
      const uint64_t take = std::min<uint64_t>(length, parts_[part].size() - skip);
      out[n++] = {const_cast<void*>(static_cast<const void*>(parts_[part].data() + skip)), take};
      at += take;
      length -= take;
      ++part;
    }
    return n;
  }

 private:
  std::vector<std::span<Byte>> parts_;
  std::vector<uint64_t> ends_;
};

}  // namespace geartrain
