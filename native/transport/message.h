// Messages: a small header, and big out-of-band buffers, each at a multiple of 64 bytes; and the limits of what one
// side accepts from the other. transport.h defines the ownership of their memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace geartrain {

// Limits of what one side accepts from the other. A message beyond a limit is refused before memory is allocated for
// it.
struct MessageLimits {
  uint64_t max_header_bytes = uint64_t{64} << 20;
  uint64_t max_message_bytes = uint64_t{16} << 30;  // all buffers of one message
  uint32_t max_buffers = 4096;
  uint64_t max_queued_bytes = uint64_t{256} << 20;  // received by a waiting send, and not yet returned by receive()
  uint64_t max_segment_bytes = uint64_t{8} << 30;   // shm: leased to the peer and kept warm, for one connection
  // Connections to a listener that have not yet authenticated, and as many again that have and wait for their lanes; a
  // quarter of the files that the process may have, where that is less (admission.h).
  uint32_t max_pending = 1024;
  double handshake_timeout_s = 5.0;
};

// The path of a message. What was sent through a `segment` is received as a `view` when it was not copied out.
// Exposed memory is read and written across processes (`cma`), or `served` by the peer's transport.
enum class Path : uint32_t { memory, ring, segment, view, stream, lanes, cma, served };
constexpr size_t kPathCount = 8;
constexpr const char* kPathNames[kPathCount] = {"memory", "ring",  "segment", "view",
                                                "stream", "lanes", "cma",     "served"};

using Bytes = std::span<const std::byte>;

struct Outgoing {
  uint64_t tag = 0;  // the caller's own: both are transmitted unchanged
  uint32_t kind = 0;
  Bytes header;
  std::span<const Bytes> buffers;

  uint64_t payload_bytes() const {
    uint64_t bytes = 0;
    for (const Bytes& buffer : buffers) bytes += buffer.size();
    return bytes;
  }
};

struct Message {
  uint64_t tag = 0;
  uint32_t kind = 0;
  std::span<std::byte> header;
  std::vector<std::span<std::byte>> buffers;
  std::shared_ptr<void> owner;  // of the header's and all buffers' memory

  uint64_t bytes() const {
    uint64_t sum = header.size();
    for (const auto& buffer : buffers) sum += buffer.size();
    return sum;
  }
};

// Memory for a message of that form: `header` and `buffers` are set, their contents arbitrary. Throws no_space.
void make_room(Message* message, uint64_t header_bytes, std::span<const uint64_t> buffer_bytes);

// Offsets in memory and in rings: the next buffer begins at a multiple of 64.
constexpr uint64_t padded(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

}  // namespace geartrain
