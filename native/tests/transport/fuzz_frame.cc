// Fuzzer of frames: arbitrary bytes of a peer over TCP, with up to two lanes, yield messages, and then the end.

#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/fuzz.h"
#include "transport/providers/frame.h"
#include "transport/providers/provider.h"

namespace geartrain {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

Input message(uint8_t lanes, const std::vector<uint64_t>& sizes, uint64_t header, uint16_t flags) {
  uint64_t payload = 0;
  for (const uint64_t size : sizes) payload += size;
  Input input = {lanes, 0, 0};
  append(&input, FrameHeader{kFrameMagic, 1, 2, header, payload, static_cast<uint32_t>(sizes.size()), flags, 0});
  for (const uint64_t size : sizes) append(&input, size);
  input.resize(input.size() + header + (flags == 0 ? payload : 0), 7);
  const auto first = static_cast<uint16_t>(input.size() - 3);
  std::memcpy(input.data() + 1, &first, sizeof first);
  if (flags != 0) input.resize(input.size() + payload, 9);
  return input;
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  return {message(0, {}, 0, 0), message(0, {3, 0, 70}, 20, 0), message(2, {4000}, 5, kOnLanes),
          message(1, {100, 200}, 0, kOnLanes)};
}

}  // namespace geartrain

// u8 lanes, u16 how much goes to the first connection; the rest goes to the lanes in equal parts.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  Reader reader(data, size);
  const size_t lanes = reader.take<uint8_t>() % 3;
  const auto first = reader.take(reader.take<uint16_t>());
  Options options;
  options.limits.max_header_bytes = kMiB;
  options.limits.max_message_bytes = kMiB;
  std::vector<Stream> mine;
  std::vector<Descriptor> theirs;
  for (size_t i = 0; i <= lanes; ++i) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return 0;
    mine.emplace_back(Descriptor(pair[0]));
    theirs.emplace_back(pair[1]);
    const auto part = i == 0 ? first : reader.take(lanes == i ? size : reader.rest().size() / lanes);
    [[maybe_unused]] const ssize_t sent = ::send(pair[1], part.data(), part.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  theirs.clear();
  Stream socket = std::move(mine.front());
  mine.erase(mine.begin());
  if (!mine.empty()) mine.emplace_back();  // no sideband
  const auto connection = take_tcp(std::move(socket), std::move(mine), {}, options);
  try {
    Message message;
    for (int i = 0; i < 100'000; ++i) {
      if (connection->poll(&message) == Connection::Poll::nothing) break;
    }
  } catch (const Error& error) {
    if (error.kind != ErrorKind::frame && error.kind != ErrorKind::peer_lost) throw;
  }
  return 0;
}
