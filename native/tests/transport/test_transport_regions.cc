// Memory regions that one side exposes to the other, and heartbeats: both over the sideband of a
// connection (sideband.h).

#include <sys/mman.h>

#include <algorithm>

#include "tests/support/check.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/providers/frame.h"
#include "transport/rpc/inbox.h"
#include "transport/sideband/memory_region.h"
#include "transport/sideband/sideband.h"

namespace geartrain {
namespace {

struct Way {
  const char* transport;
  bool cross_memory;
  Path path;
};
const std::vector<Way>& ways() {
  static const std::vector<Way> all = [] {
    std::vector<Way> made;
    for (const char* transport : transports()) {
      const bool memory = !std::strcmp(transport, "inproc"), shm = !std::strcmp(transport, "shm");
      made.push_back({transport, true, memory ? Path::memory : shm ? Path::cma : Path::served});
      if (shm) made.push_back({transport, false, Path::served});
    }
    return made;
  }();
  return all;
}

Pair connected_by(const Way& way, double peer_timeout_s = 30) {
  Options options;
  options.cross_memory = way.cross_memory;
  options.peer_timeout_s = peer_timeout_s;
  return connected(way.transport, options);
}

std::vector<std::byte> handle_of(const ExposedRegion& region) {
  const RegionHandle handle = region.handle();
  const auto bytes = std::as_bytes(std::span(&handle, 1));
  return {bytes.begin(), bytes.end()};
}

TEST(exposed_memory_is_read_and_written_as_it_is_over_every_path) {
  for (const Way& way : ways()) {
    Pair pair = connected_by(way);
    const uint64_t big = kThreadSanitizer ? 5 * kMiB + 5 : 37 * kMiB + 5;
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1000}, kMiB + 3, big}) {
      std::vector<std::byte> memory = pattern(bytes, bytes + 100), into(bytes);
      const auto region = pair.other->expose(memory, true);
      const auto handle = handle_of(*region);
      pair.one->read(handle, into, 64, soon());
      CHECK(std::equal(into.begin(), into.end(), memory.begin() + 64));
      const std::vector<std::byte> fresh = pattern(bytes + 1, bytes);
      std::vector<std::byte> expected = memory;
      std::copy(fresh.begin(), fresh.end(), expected.begin() + 36);
      region->use(0, 0, [](auto) {});  // ThreadSanitizer does not see the synchronisation through the sockets
      pair.one->write(handle, fresh, 36, soon());
      CHECK(memory == expected);
    }
    const ConnectionCounts counts = pair.one->counts();
    CHECK_EQ(counts.bytes_received[static_cast<size_t>(way.path)], 1004 + kMiB + big);
    CHECK_EQ(counts.bytes_sent[static_cast<size_t>(way.path)], 1004 + kMiB + big);
    CHECK(pair.one->one_sided().starts_with(kPathNames[static_cast<size_t>(way.path)]));
    // And the messages have not been disturbed.
    Payload(1, 2, {3}).send(*pair.one, 1, soon());
    Message message;
    pair.other->receive(&message, soon());
    CHECK(Payload(1, 2, {3}).is(message));
  }
}

TEST(a_handle_allows_what_it_says_over_its_connection_and_nothing_else) {
  for (const Way& way : ways()) {
    Pair pair = connected_by(way), stranger = connected_by(way);
    std::vector<std::byte> memory = pattern(1, 1000), into(1000);
    const std::vector<std::byte> before = memory;
    auto region = pair.other->expose(memory, false);
    const auto handle = handle_of(*region);
    CHECK_THROWS(region, pair.one->read(handle, into, 1, soon()));
    CHECK_THROWS(region, pair.one->read(handle, into, ~uint64_t{0}, soon()));
    CHECK_THROWS(region, pair.one->write(handle, into, 0, soon()));
    CHECK_THROWS(argument, pair.one->read(Bytes(handle).first(20), into, 0, soon()));
    CHECK_THROWS(argument, pair.one->read({}, into, 0, soon()));
    // A tampered handle differs from what its owner exposed.
    RegionHandle forged = region->handle();
    forged.writable = 1;
    CHECK_THROWS(region, pair.one->write(std::as_bytes(std::span(&forged, 1)), into, 0, soon()));
    forged.id[3] ^= 1;
    CHECK_THROWS(region, pair.one->read(std::as_bytes(std::span(&forged, 1)), into, 0, soon()));
    if (way.path != Path::cma) {
      CHECK_THROWS(region, stranger.one->read(handle, into, 0, soon()));
      forged = region->handle();
      forged.bytes = 2000;
      CHECK_THROWS(region, pair.one->read(std::as_bytes(std::span(&forged, 1)), into, 500, soon()));
    }
    CHECK_THROWS(region, pair.other->write(handle, into, 0, soon()));  // it is the other end that may
    region->close();
    CHECK(region->closed());
    CHECK_THROWS(region, pair.one->read(handle, into, 0, soon()));
    region = pair.other->expose(memory, true);
    const auto next = handle_of(*region);
    region.reset();
    CHECK_THROWS(region, pair.one->read(next, into, 0, soon()));
    CHECK_THROWS(region, pair.one->write(next, into, 0, soon()));
    CHECK(memory == before);
  }
}

TEST(what_was_read_while_a_region_was_closed_is_an_error_or_was_there) {
  for (const Way& way : ways()) {
    Pair pair = connected_by(way);
    for (int round = 0; round < 12; ++round) {
      constexpr uint64_t kBytes = kThreadSanitizer ? 2 << 20 : 24 << 20;
      void* at = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      const std::span<std::byte> memory(static_cast<std::byte*>(at), kBytes);
      std::fill(memory.begin(), memory.end(), std::byte{1});
      const auto region = pair.other->expose(memory, true);
      const auto handle = handle_of(*region);
      std::atomic<bool> ended{false};
      std::thread user([&] {
        std::vector<std::byte> mine(kBytes);
        const std::vector<std::byte> ones(kBytes, std::byte{1});
        try {
          for (;;) {
            if (round % 2 == 0) {
              pair.one->read(handle, mine, 0, soon());
              CHECK(mine == ones);
            } else {
              pair.one->write(handle, ones, 0, soon());
            }
          }
        } catch (const Error& error) {
          CHECK(error.kind == ErrorKind::region);
        }
        ended = true;
      });
      ::usleep(static_cast<useconds_t>(5000 + round * 1700));
      region->close();
      std::fill(memory.begin(), memory.end(), std::byte{2});
      ::usleep(3000);
      CHECK(std::all_of(memory.begin(), memory.end(), [](std::byte b) { return b == std::byte{2}; }));
      ::munmap(at, kBytes);  // a late access would be killed, or read something else
      user.join();
      CHECK(ended);
    }
  }
}

TEST(both_sides_and_many_threads_read_and_write_at_once) {
  for (const Way& way : ways()) {
    Pair pair = connected_by(way);
    constexpr uint64_t kThreads = 3, kBytes = kThreadSanitizer ? 400'000 : 3 << 20;
    std::vector<std::thread> threads;
    std::atomic<uint64_t> wrong{0};
    for (const auto& [owner, user] : {std::pair{pair.one, pair.other}, {pair.other, pair.one}}) {
      for (uint64_t t = 0; t < kThreads; ++t) {
        threads.emplace_back([&wrong, owner, user, t] {
          std::vector<std::byte> memory(kBytes), into(kBytes);
          const auto region = owner->expose(memory, true);
          const auto handle = handle_of(*region);
          for (uint64_t n = 0; n < 6; ++n) {
            user->write(handle, pattern(t * 100 + n, kBytes), 0, soon(60));
            user->read(handle, into, 0, soon(60));
            wrong += into != pattern(t * 100 + n, kBytes);
          }
        });
      }
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), uint64_t{0});
  }
}

// A child that exposes 256 MiB, sends the handle, and never reads the connection again.
void expose_and_pause(const std::string& address, const Way& way) {
  Options options = over(way.transport);
  options.cross_memory = way.cross_memory;
  const auto connection = connect(address, options, soon());
  std::vector<std::byte> memory(256 * kMiB, std::byte{5});
  const auto region = connection->expose(memory, true);
  const auto handle = handle_of(*region);
  connection->send({1, 0, handle, {}}, soon());
  ::pause();
}

TEST(a_peer_that_never_receives_is_read_and_one_that_is_stopped_or_killed_is_an_error) {
  if (kThreadSanitizer) return;
  for (const Way& way : ways()) {
    if (way.path == Path::memory) continue;
    ListenerOptions options = listening(way.transport);
    options.options.cross_memory = way.cross_memory;
    Listener listener(options);
    const std::string address = listener.address();
    Child child([&] { expose_and_pause(address, way); });
    const auto connection = listener.accept(soon());
    Message handle;
    connection->receive(&handle, soon());
    std::vector<std::byte> into(256 * kMiB);
    connection->read(handle.header, into, 0, soon());
    CHECK(into.front() == std::byte{5} && into.back() == std::byte{5});
    connection->write(handle.header, into, 0, soon());
    CHECK_EQ(connection->counts().bytes_sent[static_cast<size_t>(way.path)], 256 * kMiB);
    child.signal(SIGSTOP);
    CHECK_THROWS(timed_out, connection->write(handle.header, into, 0, Deadline::after(0.1)));
    if (way.path == Path::served) {
      CHECK_THROWS(timed_out, connection->read(handle.header, into, 0, Deadline::after(0.1)));
    }
    child.signal(SIGCONT);
    connection->read(handle.header, std::span(into).first(100), 0, soon());
    // Killed in the middle.
    std::thread killer([&] {
      ::usleep(30'000);
      child.signal(SIGKILL);
    });
    const uint64_t began_ns = monotonic_ns();
    CHECK_THROWS(
        peer_lost, for (;;) {
          connection->read(handle.header, into, 0, soon(5));
          connection->write(handle.header, into, 0, soon(5));
        });
    CHECK(testing::within(began_ns, 8));
    killer.join();
  }
}

TEST(an_end_that_is_closed_ends_reads_of_it_with_its_name) {
  for (const Way& way : ways()) {
    Pair pair = connected_by(way);
    std::vector<std::byte> memory(100), into(100);
    const auto region = pair.other->expose(memory, true);
    const auto handle = handle_of(*region);
    pair.one->close();
    CHECK_THROWS(hung_up, pair.one->read(handle, into, 0, soon()));
    CHECK_THROWS(hung_up, pair.one->expose(memory, true));
  }
}

// --- heartbeats ---------------------------------------------------------------------------------------------------

bool lost_within(const Connection& connection, double seconds) {
  for (const Deadline deadline = soon(seconds); !deadline.passed();) {
    if (connection.lost()) return true;
    ::usleep(20'000);
  }
  return connection.lost();
}

TEST(a_stopped_peer_is_lost_without_any_call_that_waits_for_it_and_a_busy_one_is_not) {
  if (kThreadSanitizer) return;
  for (const char* transport : transports_between_processes()) {
    ListenerOptions options = listening(transport);
    options.options.peer_timeout_s = 2;
    Listener listener(options);
    const std::string address = listener.address();
    const auto idle = [&] {
      const auto connection = connect(address, over(transport), soon());
      ::pause();
    };
    Child busy(idle);  // neither sends nor receives; and yet it lives
    const auto alive = listener.accept(soon());
    Child stopped(idle);
    const auto connection = listener.accept(soon());
    Inbox inbox;
    inbox.add(4, connection);
    CHECK(!lost_within(*connection, 2.6 / testing::patience()));
    stopped.signal(SIGSTOP);
    Inbox::Event event;
    const uint64_t began_ns = monotonic_ns();
    while (inbox.receive(&event, soon(8)) && !event.lost) continue;
    CHECK(testing::within(began_ns, 6));
    CHECK(event.lost && event.id == 4);
    CHECK(event.reason.find("no heartbeat") != std::string::npos);
    CHECK(connection->lost());
    CHECK(!alive->lost());
    Message message;
    CHECK_THROWS(peer_lost, connection->receive(&message, soon(1)));
    CHECK_THROWS(peer_lost, connection->send({}, soon(1)));
  }
}

TEST(a_half_open_connection_is_lost_in_time_and_what_it_had_sent_is_received) {
  ListenerOptions options;
  options.options.peer_timeout_s = 2;
  Liar silent(options);  // both sockets stay open, and nothing comes
  const FrameHeader frame = {kFrameMagic, 3, 4, 0, 0, 0, 0, 0};
  silent.send(std::as_bytes(std::span(&frame, 1)));
  CHECK(lost_within(*silent.victim, 6));
  Message message;
  silent.victim->receive(&message, soon(1));
  CHECK_EQ(message.tag, uint64_t{4});
  CHECK_THROWS(peer_lost, silent.victim->receive(&message, soon(1)));
}

TEST(malformed_sideband_input_ends_the_connection) {
  Liar liar;
  std::vector<std::byte> garbage(1000, std::byte{0x5a});
  write_exactly(liar.sideband.get(), garbage, soon());
  CHECK(lost_within(*liar.victim, 5));
  Message message;
  CHECK_THROWS(peer_lost, liar.victim->receive(&message, soon(1)));
  Options options;
  options.peer_timeout_s = 0.5;
  CHECK_THROWS(argument, connected("tcp", options));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
