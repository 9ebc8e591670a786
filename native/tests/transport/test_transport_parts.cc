// Big messages over shared memory in parts: whole, in order, in little memory, independent of the receiver; golden
// bytes; senders that give up, die, or lie.

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>

#include "base/buffer_pool.h"
#include "tests/support/check.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/providers/frame.h"
#include "transport/providers/provider.h"
#include "transport/providers/shm_control.h"
#include "transport/providers/shm_parts.h"

namespace geartrain {
namespace {

Options copying(uint64_t max_segment_bytes = MessageLimits{}.max_segment_bytes) {
  Options options;
  options.views = false;
  options.limits.max_segment_bytes = max_segment_bytes;
  return options;
}

// KiB of shared memory that this process has touched.
uint64_t shared_kib() {
  std::FILE* file = std::fopen("/proc/self/status", "r");
  char line[256];
  unsigned long found = 0;
  while (std::fgets(line, sizeof line, file) != nullptr && std::sscanf(line, "RssShmem: %lu", &found) != 1) continue;
  std::fclose(file);
  return found;
}

TEST(messages_of_any_form_arrive_in_parts_both_ways_at_once) {
  const std::vector<std::vector<uint64_t>> forms = {{512 * 1024},
                                                    {512 * 1024 + 1},
                                                    {3 * kMiB + 17},
                                                    {0, kMiB, 0, 0, 5, 2 * kMiB - 3},
                                                    {40 * kMiB + 4097, 1},
                                                    {7, 9 * kMiB},
                                                    std::vector<uint64_t>(4096, 901)};
  Pair pair = connected("shm", copying());
  const auto talk = [&](Connection& end) {
    std::thread sender([&] {
      for (size_t i = 0; i < forms.size(); ++i) {
        Payload(i, 10 * i, forms[i]).send(end, i, soon());
        Payload(i, 3, {100}).send(end, 100 + i, soon());
      }
    });
    for (size_t i = 0; i < forms.size(); ++i) {
      Message message;
      end.receive(&message, soon());
      CHECK_EQ(message.tag, uint64_t{i});
      CHECK(Payload(i, 10 * i, forms[i]).is(message));
      end.receive(&message, soon());
      CHECK_EQ(message.tag, 100 + uint64_t{i});
    }
    sender.join();
  };
  std::thread other([&] { talk(*pair.other); });
  talk(*pair.one);
  other.join();
}

TEST(a_message_beyond_the_limit_of_segments_needs_none_of_its_size) {
  constexpr uint64_t kBytes = 192 * kMiB;
  Pair pair = connected("shm", copying(8 * kMiB));
  const Payload payload(1, 10, {kBytes});
  Message message;
  const uint64_t before_kib = shared_kib();
  std::thread sender([&] { payload.send(*pair.one, 1, soon()); });
  pair.other->receive(&message, soon());
  sender.join();
  CHECK(payload.is(message));
  CHECK(shared_kib() - before_kib <= 2 * 8 * 1024 + 4096);  // both ends map it, and rings besides
  CHECK_EQ(pair.other->counts().bytes_received[static_cast<size_t>(Path::segment)], kBytes + 10);
}

TEST(a_sender_needs_no_receiver_for_a_message_in_parts) {
  Pair pair = connected("shm", copying());
  const uint64_t began_ns = monotonic_ns();
  for (uint64_t i = 0; i < 3; ++i) Payload(i, 10, {30 * kMiB}).send(*pair.one, i, soon(5));
  CHECK(testing::within(began_ns, 3));
  for (uint64_t i = 0; i < 3; ++i) {
    Message message;
    pair.other->receive(&message, soon());
    CHECK_EQ(message.tag, i);
    CHECK(Payload(i, 10, {30 * kMiB}).is(message));
  }
}

TEST(a_segment_of_a_whole_message_makes_room_for_parts) {
  Pair pair = connected("shm", copying(4 * kMiB));
  const Payload whole(1, 300'000, {3 * kMiB + 700'000});  // so long a header lies in the segment, too
  whole.send(*pair.one, 1, soon());
  Message message;
  pair.other->receive(&message, soon());
  CHECK(whole.is(message));
  CHECK_THROWS(timed_out, Payload(2, 10, {60 * kMiB}).send(*pair.one, 2, Deadline::after(0.1)));  // nobody takes them
  const Payload parts(3, 10, {60 * kMiB});
  std::thread sender([&] { parts.send(*pair.one, 3, soon()); });
  pair.other->receive(&message, soon());
  sender.join();
  CHECK(parts.is(message));
}

TEST(a_message_whose_sender_times_out_in_its_middle_counts_as_never_sent) {
  const size_t in_use = pool_counts().bytes_in_use;
  Pair pair = connected("shm", copying(4 * kMiB));
  for (int round = 0; round < 3; ++round) {
    CHECK_THROWS(timed_out, Payload(1, 10, {60 * kMiB}).send(*pair.one, 1, Deadline::after(0.1)));
    Payload(2, 10, {100}).send(*pair.one, 2, soon());
    Message message;
    pair.other->receive(&message, soon());
    CHECK_EQ(message.tag, uint64_t{2});
    CHECK_EQ(pool_counts().bytes_in_use, in_use);
    std::thread sender([&] { Payload(3, 10, {60 * kMiB}).send(*pair.one, 3, soon()); });
    pair.other->receive(&message, soon());
    sender.join();
    CHECK(Payload(3, 10, {60 * kMiB}).is(message));
  }
  CHECK_EQ(pair.other->counts().messages_received, uint64_t{6});
}

TEST(a_sender_killed_in_the_middle_of_a_message_is_an_error_and_its_memory_comes_back) {
  if (kThreadSanitizer) return;
  for (int round = 0; round < 12; ++round) {
    const size_t in_use = pool_counts().bytes_in_use;
    Listener listener(listening("shm", copying()));
    const std::string address = listener.address();
    Child child([&] {
      const auto connection = connect(address, over("shm", copying()), soon());
      const Payload payload(3, 10, {96 * kMiB, 5});
      for (uint64_t i = 0;; ++i) payload.send(*connection, i, soon());
    });
    auto connection = listener.accept(soon());
    const Payload expected(3, 10, {96 * kMiB, 5});
    Message message;
    // Some parts, then nothing: the message has begun in every round.
    for (int parts = 0; parts < 20 + round; ++parts) {
      while (!connection->might_have_data()) ::usleep(100);
      connection->poll(&message);
    }
    child.signal(SIGKILL);
    const uint64_t began_ns = monotonic_ns();
    bool lost = false;
    for (int more = 0; !lost && more < 1000; ++more) {
      try {
        connection->receive(&message, soon(5));
        CHECK(expected.is(message));
      } catch (const Error& error) {
        lost = error.kind == ErrorKind::peer_lost;
        CHECK(lost);
        if (!lost) break;
      }
    }
    CHECK(lost);
    CHECK(testing::within(began_ns, 3));
    message = {};
    CHECK_EQ(pool_counts().bytes_in_use, in_use);
  }
}

TEST(a_receiver_killed_in_the_middle_of_a_message_is_an_error_of_its_sender) {
  if (kThreadSanitizer) return;
  Listener listener(listening("shm", copying()));
  const std::string address = listener.address();
  Child child([&] {
    const auto connection = connect(address, over("shm", copying(2 * kMiB)), soon());
    Message message;
    while (connection->poll(&message) == Connection::Poll::nothing) continue;
    ::pause();
  });
  const auto connection = listener.accept(soon());
  std::thread killer([&] {
    ::usleep(50'000);
    child.signal(SIGKILL);
  });
  const Payload payload(1, 10, {64 * kMiB});
  CHECK_THROWS(peer_lost, for (int i = 0; i < 1000; ++i) payload.send(*connection, 1, soon()));
  killer.join();
}

// An end whose peer is this test, which reads and writes the shared memory itself.
struct BareEnd {
  std::shared_ptr<ShmControl> control = std::make_shared<ShmControl>();
  Descriptor socket, sideband;
  std::shared_ptr<Connection> end;
  uint64_t head = 0;

  explicit BareEnd(const Options& options = {}) {
    const Descriptor memory = make_memory("test control", kControlBytes);
    control->memory = Memory(memory.get(), kControlBytes, true);
    control->peer_wake = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    int line[2], side[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, line), 0);
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, side), 0);
    socket = Descriptor(line[0]);
    sideband = Descriptor(side[0]);
    end = make_shm(Descriptor(line[1]), control, Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
                   Descriptor(side[1]), {}, options);
  }
  Direction& direction(bool of_the_end) { return control->direction(of_the_end); }
  // Into the ring that the end reads.
  void write(const void* from, size_t bytes) {
    std::memcpy(control->ring(false) + head, from, bytes);
    head += (bytes + 7) / 8 * 8;
    direction(false).head.store(head);
  }
  void announce(uint32_t slot, uint64_t bytes, std::byte value) const {
    const Descriptor memory = make_memory("test segment", bytes);
    std::memset(Memory(memory.get(), bytes, true).data(), static_cast<int>(value), bytes);
    struct {
      uint32_t word, slot, use, reserved;
      uint64_t bytes;
    } note = {1, slot, 1, 0, bytes};
    const int fd = memory.get();
    send_with_fds(socket.get(), std::as_bytes(std::span(&note, 1)), {&fd, 1}, soon());
  }
  void begin(uint64_t payload, uint16_t flags = kInParts) {
    struct {
      FrameHeader frame;
      uint64_t size;
    } record = {{kFrameMagic, 7, 9, 0, payload, 1, flags, 0}, payload};
    write(&record, sizeof record);
  }
  void part(uint32_t slot, uint64_t bytes, uint32_t abandoned = 0, uint32_t magic = kPartMagic) {
    const SegmentPart record = {magic, abandoned, {slot, 1}, bytes};
    write(&record, sizeof record);
  }
};

TEST(parts_have_their_bytes_and_only_those_who_ask_for_them_get_them) {
  for (const bool asks : {false, true}) {
    BareEnd bare;
    Direction& out = bare.direction(true);
    CHECK_EQ(bare.direction(false).takes_parts.load(), uint32_t{0});  // it takes views
    out.takes_parts.store(asks ? 1 : 0);
    const Payload payload(1, 5, {768 * 1024});
    payload.send(*bare.end, 0x1122334455667788, soon(), 0x99aabbcc);
    const uint64_t parts = asks ? 6 : 0;  // of 128 KiB
    CHECK_EQ(out.head.load(), asks ? 56 + parts * 24 : 40 + 8 + 8 + 8);
    const unsigned char beginning[] = {
        'G',  'T',  'F',  '1',  0xcc, 0xbb, 0xaa, 0x99,
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,  // magic, kind, tag
        5,    0,    0,    0,    0,    0,    0,    0,
        0,    0,    0x0c, 0,    0,    0,    0,    0,  // header, payload
        1,    0,    0,    0,    8,    0,    0,    0,
        0,    0,    0x0c, 0,    0,    0,    0,    0,  // buffers, flags; size
    };
    std::vector<std::byte> ring(out.head.load());
    std::memcpy(ring.data(), bare.control->ring(true), ring.size());
    if (!asks) continue;
    CHECK_EQ(std::memcmp(ring.data(), beginning, sizeof beginning), 0);
    CHECK_EQ(std::memcmp(ring.data() + 48, payload.header.data(), 5), 0);
    for (unsigned char i = 0; i < parts; ++i) {
      const unsigned char part[] = {
          'G', 'T', 'P', '1', 0, 0, 0, 0, i, 0, 0, 0,  // magic, not abandoned, slot
          1,   0,   0,   0,   0, 0, 2, 0, 0, 0, 0, 0,  // the slot's first segment, bytes
      };
      CHECK_EQ(std::memcmp(ring.data() + 56 + 24 * i, part, sizeof part), 0);
      CHECK_EQ(out.leased[i].load(), uint32_t{1});
    }
  }
  // Where it was in version 1 is nothing else.
  BareEnd copies(copying());
  CHECK_EQ(copies.direction(false).takes_parts.load(), uint32_t{1});
  uint32_t at_132 = 0;
  std::memcpy(&at_132, copies.control->memory.data() + kDirectionsOffset + sizeof(Direction) * 1 + 132, 4);
  uint32_t other = 0;
  std::memcpy(&other, copies.control->memory.data() + kDirectionsOffset + 132, 4);
  CHECK_EQ(at_132 + other, uint32_t{1});
}

TEST(parts_of_a_peer_are_checked_one_by_one) {
  constexpr uint64_t kBytes = 10'000;
  const auto ends_with_frame = [](auto&& write) {
    BareEnd bare;
    bare.announce(0, 6000, std::byte{1});
    write(bare);
    Message message;
    CHECK_THROWS(frame, for (int i = 0; i < 10; ++i) bare.end->poll(&message));
    CHECK_THROWS(peer_lost, bare.end->receive(&message, soon(5)));
  };
  ends_with_frame([](BareEnd& bare) { bare.begin(0); });                              // nothing
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes, kInParts | kInSegment); });  // both
  ends_with_frame([](BareEnd& bare) { bare.part(0, 100); });                          // of no message
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.begin(kBytes); });     // another message in between
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(0, 0); });
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(0, 6001); });  // beyond its segment
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(0, ~uint64_t{0}); });
  ends_with_frame([](BareEnd& bare) { bare.begin(5000), bare.part(0, 5001); });  // beyond the message
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(0, 6000), bare.part(0, 6000); });
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(1, 100); });       // never announced
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(kSlots, 100); });  // impossible
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(0, 100, 2); });
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.part(0, 100, 0, kFrameMagic); });
  ends_with_frame([](BareEnd& bare) { bare.begin(kBytes), bare.write("1234", 4); });  // half a part

  BareEnd good;
  good.announce(0, 6000, std::byte{1});
  good.announce(1, 4096, std::byte{2});
  Message message;
  good.begin(kBytes);
  good.part(0, 6000);
  good.part(0, 0, 1);  // abandoned
  good.begin(kBytes);
  good.part(0, 6000);
  CHECK_EQ(static_cast<int>(good.end->poll(&message)), static_cast<int>(Connection::Poll::more));
  CHECK_THROWS(timed_out, good.end->receive(&message, Deadline::after(0.02)));
  good.part(1, 4000);
  good.end->receive(&message, soon(5));
  CHECK_EQ(message.buffers.at(0).size(), size_t{kBytes});
  const auto byte_at = [&](size_t at) { return static_cast<int>(message.buffers[0][at]); };
  CHECK_EQ(byte_at(0) + 10 * byte_at(5999) + 100 * byte_at(6000) + 1000 * byte_at(9999), 1 + 10 + 200 + 2000);
  CHECK_EQ(good.direction(false).tail.load(), good.head);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
