// Faults between processes: killed, stopped, silent and malicious peers. Each is a named error in bounded time,
// nothing leaks, and all others go on.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "base/buffer_pool.h"
#include "tests/support/check.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/memfd.h"
#include "transport/providers/frame.h"
#include "transport/providers/provider.h"
#include "transport/rpc/inbox.h"
#include "transport/rpc/pending_calls.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

TEST(a_peer_killed_in_the_middle_of_big_messages_is_an_error_and_its_memory_comes_back) {
  if (kThreadSanitizer) return;
  connected("tcp");  // the sideband thread keeps two files open
  for (const char* transport : transports_between_processes()) {
    const size_t files = open_files(), in_use = pool_counts().bytes_in_use;
    for (int round = 0; round < 12; ++round) {
      Listener listener(listening(transport));
      const std::string address = listener.address();
      Child child([&] {
        const auto connection = connect(address, over(transport), soon());
        const Payload payload(3, 10, {48 * kMiB, 5});
        for (uint64_t i = 0;; ++i) payload.send(*connection, i, soon());
      });
      const auto connection = listener.accept(soon());
      const Payload expected(3, 10, {48 * kMiB, 5});
      Message message;
      connection->receive(&message, soon());
      ::usleep(static_cast<useconds_t>(round * 3001));
      child.signal(SIGKILL);
      const uint64_t began_ns = monotonic_ns();
      bool lost = false;
      for (int more = 0; !lost && more < 1000; ++more) {
        CHECK(expected.is(message));
        try {
          connection->receive(&message, soon(5));
        } catch (const Error& error) {
          lost = error.kind == ErrorKind::peer_lost;
          CHECK(lost);
          if (!lost) break;
        }
      }
      CHECK(lost);
      CHECK(testing::within(began_ns, 3));
      CHECK(expected.is(message));  // what was received stays
    }
    CHECK_EQ(open_files(), files);
    CHECK_EQ(pool_counts().bytes_in_use, in_use);
  }
}

TEST(a_peer_killed_while_it_is_sent_to_is_an_error) {
  if (kThreadSanitizer) return;
  for (const char* transport : transports_between_processes()) {
    for (const uint64_t bytes : {uint64_t{100}, 40 * kMiB}) {
      Listener listener(listening(transport));
      const std::string address = listener.address();
      Child child([&] {
        const auto connection = connect(address, over(transport), soon());
        Message message;
        for (;;) connection->receive(&message, soon());
      });
      const auto connection = listener.accept(soon());
      const Payload payload(3, 10, {bytes});
      for (uint64_t i = 0; i < 3; ++i) payload.send(*connection, i, soon());
      child.signal(SIGKILL);
      const Deadline deadline = soon(5);
      bool lost = false;
      while (!lost && !deadline.passed()) {
        try {
          payload.send(*connection, 9, deadline);
        } catch (const Error& error) {
          lost = error.kind == ErrorKind::peer_lost;
          CHECK(lost);
          if (!lost) break;
        }
      }
      CHECK(lost);
    }
  }
}

TEST(a_stopped_peer_is_a_deadline_and_goes_on_when_it_goes_on) {
  if (kThreadSanitizer) return;
  for (const char* transport : transports_between_processes()) {
    Listener listener(listening(transport));
    const std::string address = listener.address();
    Child child([&] {
      const auto connection = connect(address, over(transport), soon());
      Message message;
      for (;;) {
        connection->receive(&message, soon());
        connection->send({message.tag, 0, message.header, {}}, soon());
      }
    });
    const auto connection = listener.accept(soon());
    PendingCalls calls(connection);
    Message answer;
    const Payload payload(1, 100, {});
    calls.wait(calls.start(0, payload.header, {}, soon()), &answer, soon());
    child.signal(SIGSTOP);
    const uint64_t tag = calls.start(0, payload.header, {}, soon());
    CHECK_THROWS(timed_out, calls.wait(tag, &answer, Deadline::after(0.1)));
    child.signal(SIGCONT);
    calls.wait(tag, &answer, soon());
    CHECK(payload.is(answer));
  }
}

TEST(a_forked_child_may_not_use_its_parents_connections_and_does_not_keep_them_open) {
  if (kThreadSanitizer) return;
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    PendingCalls calls(pair.one);
    Inbox inbox;
    inbox.add(1, pair.other);
    Payload(1, 5, {kMiB}).send(*pair.one, 1, soon());
    Message kept;
    Inbox::Event event;
    CHECK(inbox.receive(&event, soon()));
    kept = std::move(event.message);
    int pipe[2];
    CHECK_EQ(::pipe(pipe), 0);
    Child child([&] {
      Message message;
      CHECK_THROWS(hung_up, pair.one->send({}, soon()));
      CHECK_THROWS(hung_up, pair.other->receive(&message, soon()));
      CHECK_THROWS(hung_up, inbox.receive(&event, soon()));
      CHECK_THROWS(hung_up, calls.start(0, {}, {}, soon()));
      CHECK_THROWS(hung_up, pair.listener->accept(soon()));
      kept = {};  // the parent still has it
      pair = {};
      // And may make its own.
      Pair own = connected(transport);
      Payload(2, 9, {9}).send(*own.one, 1, soon());
      own.other->receive(&message, soon());
      CHECK(Payload(2, 9, {9}).is(message));
      const char done = testing::failures == 0 ? 'y' : 'n';
      CHECK_EQ(::write(pipe[1], &done, 1), ssize_t{1});
      ::pause();
    });
    char done = 0;
    CHECK_EQ(::read(pipe[0], &done, 1), ssize_t{1});
    CHECK_EQ(done, 'y');
    ::close(pipe[0]);
    ::close(pipe[1]);
    // The child's copies came and went without a trace in the parent.
    for (uint64_t i = 0; i < 80; ++i) {
      Payload(i, 5, {kMiB}).send(*pair.one, i, soon());
      inbox.resume(1);
      CHECK(inbox.receive(&event, soon()));
      CHECK(Payload(i, 5, {kMiB}).is(event.message));
    }
    CHECK(Payload(1, 5, {kMiB}).is(kept));
    inbox.resume(1);
    // The child lives, and the end is seen nevertheless.
    pair.one->close();
    pair.one.reset();
    CHECK(inbox.receive(&event, soon(5)));
    CHECK(event.lost);
  }
}

TEST(garbage_and_silence_on_the_port_are_refused_and_disturb_no_other) {
  ListenerOptions options;
  options.options.limits.handshake_timeout_s = 0.5;
  Listener listener(options);
  std::vector<Descriptor> silent;
  for (int i = 0; i < 64; ++i)
    silent.push_back(i % 2 == 0 ? raw_tcp(listener.address()) : raw_unix(listener.address()));
  std::mt19937_64 random(5);
  for (int i = 0; i < 100; ++i) {
    const Descriptor socket = i % 2 == 0 ? raw_tcp(listener.address()) : raw_unix(listener.address());
    std::vector<std::byte> garbage(random() % 5000);
    for (auto& byte : garbage) byte = static_cast<std::byte>(random());
    if (i % 5 == 0 && garbage.size() > 12) {
      std::memcpy(garbage.data(), kHelloMagic, sizeof kHelloMagic);
      std::memcpy(garbage.data() + 8, &kProtocolVersion, sizeof kProtocolVersion);
    }
    [[maybe_unused]] const ssize_t sent = ::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
    // All the while others get in, and are served.
    const char* transport = i % 2 == 0 ? "tcp" : "shm";
    const auto one = connect(listener.address(), over(transport), soon(5));
    const auto other = listener.accept(soon(5));
    Payload(1, 2, {3}).send(*one, 9, soon());
    Message message;
    other->receive(&message, soon());
    CHECK(Payload(1, 2, {3}).is(message));
  }
  ::usleep(700'000);
  for (const Descriptor& socket : silent) {
    char byte = 0;
    const ssize_t got = ::recv(socket.get(), &byte, 1, MSG_DONTWAIT);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
  }
  CHECK(listener.refused() >= 64);
  CHECK_THROWS(timed_out, listener.accept(Deadline::after(0)));
}

TEST(a_frame_that_claims_what_cannot_be_ends_its_connection_before_memory_is_taken) {
  const uint64_t huge = uint64_t{1} << 63;
  const FrameHeader frames[] = {
      {kFrameMagic, 0, 0, huge, 0, 0, 0, 0},       {kFrameMagic, 0, 0, 0, huge, 1, 0, 0},
      {kFrameMagic, 0, 0, 0, 0, 0xffffffff, 0, 0}, {kFrameMagic, 0, 0, 0, 0, 0, kInSegment, 0},
      {kFrameMagic, 0, 0, 0, 0, 0, kOnLanes, 0},   {kFrameMagic, 0, 0, 0, 0, 0, 0, 1},
      {kFrameMagic + 1, 0, 0, 0, 0, 0, 0, 0},      {kFrameMagic, 0, 0, 0, 10, 0, 0, 0},  // ten bytes in no buffer
  };
  const uint64_t before_mib = resident_mib();
  for (const FrameHeader& frame : frames) {
    Liar liar;
    liar.send(std::as_bytes(std::span(&frame, 1)));
    Message message;
    CHECK_THROWS(frame, liar.victim->receive(&message, soon(5)));
    CHECK_THROWS(peer_lost, liar.victim->receive(&message, soon(5)));
    CHECK_THROWS(peer_lost, liar.victim->send({}, soon(5)));
  }
  for (const std::pair<uint64_t, uint64_t> sizes : {std::pair{huge, huge}, {5, 6}, {5, 4}, {~uint64_t{0}, 11}}) {
    Liar liar;
    const FrameHeader frame = {kFrameMagic, 0, 0, 0, 10, 2, 0, 0};
    liar.send(std::as_bytes(std::span(&frame, 1)));
    liar.send(std::as_bytes(std::span(&sizes.first, 1)));
    liar.send(std::as_bytes(std::span(&sizes.second, 1)));
    Message message;
    CHECK_THROWS(frame, liar.victim->receive(&message, soon(5)));
  }
  // A claim within the limits takes no memory until the bytes are there.
  Liar patient;
  const FrameHeader frame = {kFrameMagic, 0, 0, 0, 8000 * kMiB, 1, 0, 0};
  const uint64_t size = frame.payload_bytes;
  patient.send(std::as_bytes(std::span(&frame, 1)));
  patient.send(std::as_bytes(std::span(&size, 1)));
  Message message;
  CHECK_THROWS(timed_out, patient.victim->receive(&message, Deadline::after(0.1)));
  CHECK(resident_mib() < before_mib + 100);
  patient.socket.reset();
  CHECK_THROWS(peer_lost, patient.victim->receive(&message, soon(5)));
}

TEST(random_bytes_on_a_connection_never_do_more_than_end_it) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    Liar liar;
    std::vector<std::byte> bytes;
    for (int part = 0; part < 4; ++part) {
      // Frames that are nearly right, cut and changed here and there.
      const uint64_t header = random() % 50, buffers = random() % 3;
      std::vector<uint64_t> sizes(buffers);
      uint64_t payload = 0;
      for (uint64_t& size : sizes) payload += size = random() % 200;
      FrameHeader frame = {kFrameMagic, 1, random(), header, payload, static_cast<uint32_t>(buffers), 0, 0};
      const auto append = [&](const void* from, size_t n) {
        const auto* begin = static_cast<const std::byte*>(from);
        bytes.insert(bytes.end(), begin, begin + n);
      };
      append(&frame, sizeof frame);
      append(sizes.data(), 8 * sizes.size());
      bytes.resize(bytes.size() + header + payload, std::byte{7});
    }
    for (uint64_t flips = random() % 4; flips != 0; --flips) {
      bytes[random() % bytes.size()] ^= static_cast<std::byte>(1u << (random() % 8));
    }
    bytes.resize(bytes.size() - random() % bytes.size() / 4);
    liar.send(bytes);
    liar.socket.reset();
    try {
      Message message;
      for (int i = 0; i < 10; ++i) liar.victim->receive(&message, soon(5));
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::frame || error.kind == ErrorKind::peer_lost);
    }
  }
}

TEST(a_segment_that_could_shrink_or_has_another_nonce_is_refused_by_the_handshake) {
  for (const bool sealed : {false, true}) {
    Listener listener({});
    Descriptor socket = raw_unix(listener.address());
    greet(socket.get(), Intent::shm, Address::parse(listener.address()), {}, soon());
    ShmOffer offer{};
    std::memcpy(offer.magic, "GEAROFR\n", 8);
    offer.segment_bytes = 8192 + 2 * kMiB;
    Descriptor memory(::memfd_create("liar", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK_EQ(::ftruncate(memory.get(), static_cast<off_t>(offer.segment_bytes)), 0);
    if (sealed) CHECK_EQ(::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    const int fds[kShmOfferFds] = {memory.get(), memory.get(), memory.get(), memory.get()};
    send_with_fds(socket.get(), std::as_bytes(std::span(&offer, 1)), fds, soon());
    ShmReply reply{};
    read_exactly(socket.get(), std::as_writable_bytes(std::span(&reply, 1)), soon());
    CHECK_EQ(reply.viable, uint32_t{0});
    CHECK(std::strstr(reply.reason, sealed ? "not what this version expects" : "could shrink") != nullptr);
    CHECK(wait_for(socket.get(), POLLRDHUP, soon()));
    CHECK_EQ(listener.refused(), uint64_t{1});
  }
}

TEST(a_reader_that_never_reads_bounds_what_its_peer_may_queue) {
  if (kThreadSanitizer || kAddressSanitizer) return;
  for (const char* transport : transports_between_processes()) {
    Options options;
    options.limits.max_segment_bytes = 64 * kMiB;
    const uint64_t before_mib = resident_mib();
    Pair pair = connected(transport, options);
    const Payload payload(1, 10, {8 * kMiB});
    CHECK_THROWS(timed_out, for (int i = 0; i < 1000; ++i) payload.send(*pair.one, 1, Deadline::after(0.1)));
    CHECK(resident_mib() < before_mib + 200);
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
