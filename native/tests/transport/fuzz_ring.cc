// Fuzzer of shared memory: a peer on this host writes anything into the ring, and announces anything as its segments.

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "tests/support/fuzz.h"
#include "transport/providers/frame.h"
#include "transport/providers/provider.h"
#include "transport/providers/shm_control.h"

namespace geartrain {
namespace {

constexpr size_t kAnnouncementBytes = 24;
constexpr uint64_t kSegmentBytes = 65536;

Input input_of(uint8_t announcements, uint64_t head) {
  Input input = {announcements};
  for (uint32_t i = 0; i < announcements; ++i) {
    input.push_back(1);
    for (const uint32_t number : {1u, i, 1u, 0u}) append(&input, number);
    append(&input, kSegmentBytes);
  }
  append(&input, head);
  return input;
}

Input frame(uint8_t announcements, uint16_t flags, const std::vector<uint64_t>& sizes, uint64_t header) {
  Input ring;
  uint64_t payload = 0;
  for (const uint64_t size : sizes) payload += size;
  append(&ring, FrameHeader{kFrameMagic, 1, 2, header, payload, static_cast<uint32_t>(sizes.size()), flags, 0});
  for (const uint64_t size : sizes) append(&ring, size);
  if (flags != 0) append(&ring, SegmentPlace{0, 1});
  ring.resize(ring.size() + ((flags & kHeaderInSegment) != 0 ? 0 : header) + (flags == 0 ? payload : 0), 5);
  ring.resize((ring.size() + 7) / 8 * 8);
  Input input = input_of(announcements, ring.size());
  input.insert(input.end(), ring.begin(), ring.end());
  return input;
}

// A message in parts, of a segment each; `abandoned` is of the last one.
Input parts(uint64_t payload, const std::vector<uint64_t>& bytes, uint32_t abandoned) {
  Input ring;
  append(&ring, FrameHeader{kFrameMagic, 1, 2, 5, payload, 1, kInParts, 0});
  append(&ring, payload);
  append(&ring, uint64_t{5});  // the header
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    append(&ring, SegmentPart{kPartMagic, i + 1 == bytes.size() ? abandoned : 0, {i, 1}, bytes[i]});
  }
  Input input = input_of(static_cast<uint8_t>(bytes.size()), ring.size());
  input.insert(input.end(), ring.begin(), ring.end());
  return input;
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  return {frame(0, 0, {}, 0),
          frame(0, 0, {100, 0, 7}, 30),
          frame(1, kInSegment, {1000, 2000}, 16),
          frame(2, kInSegment | kHeaderInSegment, {5000}, 20000),
          parts(5000, {3000, 2000}, 0),
          parts(100'000, {65536, 100, 1}, 1),
          parts(700, {700}, 0)};
}

}  // namespace geartrain

// u8 announcements, each a u8 of how many descriptors come with it and 24 bytes; u64 how far the ring is written; then
// its contents.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  static const Descriptor segment = make_memory("fuzz segment", kSegmentBytes);
  static const Descriptor memory = make_memory("fuzz control", kControlBytes);
  static const Memory control(memory.get(), kControlBytes, true);
  Reader reader(data, size);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return 0;
  Descriptor mine(ends[0]), theirs(ends[1]);
  for (int left = reader.take<uint8_t>() % 4; left != 0; --left) {
    const int with = reader.take<uint8_t>() % 3;
    const auto words = reader.take(kAnnouncementBytes);
    const int fds[2] = {segment.get(), segment.get()};
    if (words.empty()) break;
    send_with_fds(theirs.get(), std::as_bytes(words), std::span(fds, static_cast<size_t>(with)), Deadline::after(1));
  }
  const auto head = reader.take<uint64_t>();
  auto* header = reinterpret_cast<ControlHeader*>(control.data());
  auto* directions = reinterpret_cast<Direction*>(control.data() + kDirectionsOffset);
  std::memset(control.data(), 0, kRingsOffset);
  std::memcpy(header->magic, kControlMagic, sizeof header->magic);
  header->version = kControlVersion;
  header->slots = kSlots;
  header->ring_bytes = kRingBytes;
  std::byte* ring = control.data() + kRingsOffset;
  if (!reader.rest().empty())
    std::memcpy(ring, reader.rest().data(), std::min<size_t>(reader.rest().size(), kRingBytes));

  ShmOffer offer{};
  std::memcpy(offer.magic, "GEAROFR\n", sizeof offer.magic);
  offer.segment_bytes = kControlBytes;
  std::vector<Descriptor> fds;
  fds.emplace_back(::fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
  fds.emplace_back(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  fds.emplace_back(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  int line[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, line) != 0) return 0;
  fds.emplace_back(line[0]);
  const Descriptor other_end(line[1]);
  Options options;
  options.limits.max_header_bytes = options.limits.max_message_bytes = kRingBytes;
  const auto connection = take_shm(std::move(mine), offer, std::move(fds), {}, options);
  directions[0].head.store(head);
  theirs.reset();
  try {
    std::vector<Message> kept(4);
    for (int i = 0; i < 100'000; ++i) {
      if (connection->poll(&kept[static_cast<size_t>(i) % kept.size()]) == Connection::Poll::nothing) break;
    }
  } catch (const Error& error) {
    if (error.kind != ErrorKind::frame && error.kind != ErrorKind::peer_lost) throw;
  }
  return 0;
}
