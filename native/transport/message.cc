#include "transport/message.h"

#include <algorithm>
#include <cstdlib>

#include "base/buffer_pool.h"
#include "base/errors.h"

namespace geartrain {

namespace {

// Below this, memory comes from the allocator; above, from the pool of warm buffers.
constexpr uint64_t kPooledFrom = uint64_t{64} << 10;

}  // namespace

void make_room(Message* message, uint64_t header_bytes, std::span<const uint64_t> buffer_bytes) {
  uint64_t total = padded(header_bytes);
  for (const uint64_t bytes : buffer_bytes) total += padded(bytes);
  std::byte* at = nullptr;
  if (total < kPooledFrom) {
    at = static_cast<std::byte*>(std::aligned_alloc(64, std::max<uint64_t>(total, 64)));
    if (at == nullptr) fail(ErrorKind::no_space, "no memory for a message of ", total, " bytes");
    message->owner = std::shared_ptr<void>(at, [](void* memory) { std::free(memory); });
  } else {
    at = static_cast<std::byte*>(take_buffer(total));
    message->owner = std::shared_ptr<void>(at, [](void* memory) { give_buffer(memory); });
  }
  message->header = {at, header_bytes};
  at += padded(header_bytes);
  message->buffers.clear();
  message->buffers.reserve(buffer_bytes.size());
  for (const uint64_t bytes : buffer_bytes) {
    message->buffers.emplace_back(at, bytes);
    at += padded(bytes);
  }
}

}  // namespace geartrain
