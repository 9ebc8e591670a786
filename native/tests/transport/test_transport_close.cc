// The end of listeners, connections and regions, at any moment and from any thread: closed twice, from several threads,
// beside calls that wait, with work under way, and used afterwards. Every call ends by that, with hung_up or the peer's
// loss, and never by its own deadline.
//
// Each race runs at random delays, 1,000 times in all; GEARTRAIN_TEST_ROUNDS says how often.

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>

#include "tests/support/check.h"
#include "tests/transport/peers.h"
#include "transport/sideband/memory_region.h"

namespace geartrain {
namespace {

int rounds() {
  const char* given = std::getenv("GEARTRAIN_TEST_ROUNDS");
  return given != nullptr ? std::atoi(given) : 1000;
}

using Random = std::mt19937_64;

void pause_up_to(Random& random, uint64_t us) {
  const uint64_t until_ns = monotonic_ns() + random() % (us * 1000);
  if (random() % 4 == 0) std::this_thread::yield();
  while (monotonic_ns() < until_ns) continue;
}

// Runs until the end is told; an end by a deadline, or of another kind, is a failure.
template <typename Act>
void until_the_end(const char* what, Act&& act) {
  try {
    for (;;) act();
  } catch (const Error& error) {
    const bool told = error.kind == ErrorKind::hung_up || error.kind == ErrorKind::peer_lost;
    if (!told) testing::failed(__FILE__, __LINE__, what, ": ", error.what());
  }
}

// What programs do with one end of a connection.
void use(Connection& connection, int how, const RegionHandle& peers, Random& random) {
  static const std::vector<std::byte> big(700'000, std::byte{3});
  const Bytes handle = std::as_bytes(std::span(&peers, 1));
  switch (how) {
    case 0:
      return until_the_end("receive", [&] {
        Message message;
        connection.receive(&message, soon());
      });
    case 1: {
      const Bytes one[] = {Bytes(big).first(random() % 2 == 0 ? 100 : big.size())};
      return until_the_end("send", [&] { connection.send({1, 2, Bytes(big).first(50), one}, soon()); });
    }
    case 2:
      return until_the_end("read", [&] {
        std::vector<std::byte> into(200'000);
        try {
          connection.read(handle, into, 0, soon());
        } catch (const Error& error) {
          if (error.kind != ErrorKind::region) throw;  // it was closed
          if (connection.closed() || connection.lost()) fail(ErrorKind::hung_up, "after the end");
        }
      });
    case 3:
      return until_the_end("write", [&] {
        const std::vector<std::byte> from(200'000);
        try {
          connection.write(handle, from, 0, soon());
        } catch (const Error& error) {
          if (error.kind != ErrorKind::region) throw;
          if (connection.closed() || connection.lost()) fail(ErrorKind::hung_up, "after the end");
        }
      });
    default:
      return until_the_end("the rest", [&] {
        Message message;
        if (connection.poll(&message) == Connection::Poll::nothing) connection.arm();
        std::vector<std::byte> memory(64);
        connection.expose(memory, true)->close();
        static_cast<void>(connection.counts());
        static_cast<void>(connection.describe());
        static_cast<void>(connection.one_sided());
        static_cast<void>(connection.tls());
        static_cast<void>(connection.might_have_data());
        if (connection.lost()) fail(ErrorKind::hung_up, "after the end");
      });
  }
}

void refuses_everything(Connection& connection, const RegionHandle& peers) {
  Message message;
  std::vector<std::byte> memory(8);
  const Bytes handle = std::as_bytes(std::span(&peers, 1));
  CHECK(connection.closed());
  CHECK_THROWS(hung_up, connection.send({}, soon()));
  CHECK_THROWS(hung_up, connection.receive(&message, soon()));
  CHECK_THROWS(hung_up, connection.poll(&message));
  CHECK_THROWS(hung_up, static_cast<void>(connection.expose(memory, false)));
  CHECK_THROWS(hung_up, connection.read(handle, memory, 0, soon()));
  CHECK_THROWS(hung_up, connection.write(handle, memory, 0, soon()));
  static_cast<void>(connection.counts());
  static_cast<void>(connection.describe());
  connection.close();
}

TEST(a_connection_ends_at_any_moment_whatever_its_threads_do) {
  for (const char* transport : transports()) {
    Random random(7);
    Listener listener(listening(transport));
    const int times = std::max(1, rounds() / static_cast<int>(transports().size()));
    for (int round = 0; round < times; ++round) {
      Options options;
      options.views = random() % 2 == 0;
      options.cross_memory = random() % 2 == 0;
      auto one = connect(listener.address(), over(transport, options), soon());
      auto other = listener.accept(soon());
      auto memory = std::make_unique<std::vector<std::byte>>(200'000);
      auto region = other->expose(*memory, true);
      const RegionHandle handle = region->handle();
      std::vector<std::thread> users, closers;
      const auto user = [&](const std::shared_ptr<Connection>& connection) {
        users.emplace_back([connection, handle, how = static_cast<int>(random() % 5), seed = random()] {
          Random mine(seed);
          use(*connection, how, handle, mine);
        });
      };
      for (int i = 0; i < 2; ++i) user(one);
      user(other);
      std::weak_ptr<Connection> dropped;
      if (random() % 3 == 0) {
        // The last reference goes while the other end has work under way with it.
        auto brief = connect(listener.address(), over(transport, options), soon());
        const auto its_end = listener.accept(soon());
        user(its_end);
        pause_up_to(random, 500);
        brief.reset();
      }
      for (const auto& connection : {one, random() % 2 == 0 ? one : other}) {
        closers.emplace_back([connection, seed = random()] {
          Random mine(seed);
          pause_up_to(mine, 1500);
          connection->close();
          connection->close();
        });
      }
      // A region's memory is freed as soon as it is closed.
      pause_up_to(random, 800);
      std::thread also([&] { region->close(); });
      region->close();
      memory.reset();
      for (std::thread& thread : closers) thread.join();
      for (std::thread& thread : users) thread.join();
      also.join();
      one->close();
      refuses_everything(*one, handle);
      if (random() % 2 == 0) one.reset();
      other.reset();
    }
  }
}

TEST(a_listener_ends_at_any_moment_whatever_its_threads_do) {
  for (int round = 0; round < rounds(); ++round) {
    Random random(static_cast<uint64_t>(round));
    const std::string transport = transports()[random() % transports().size()];
    auto listener = std::make_shared<Listener>(listening(transport));
    const std::string address = listener->address();
    std::vector<std::thread> threads;
    threads.emplace_back([listener] { until_the_end("accept", [&] { listener->accept(soon()); }); });
    threads.emplace_back([listener] {
      for (int i = 0; i < 10; ++i) {
        static_cast<void>(listener->refused());
        static_cast<void>(listener->refusal());
        static_cast<void>(listener->address());
      }
    });
    threads.emplace_back([address, transport] {
      try {
        for (;;) {
          const auto connection = connect(address, over(transport), soon());
          Message message;
          // Accepted and dropped; or never accepted, because the listener has ended.
          CHECK_THROWS(peer_lost, connection->receive(&message, soon()));
        }
      } catch (const Error& error) {
        if (error.kind != ErrorKind::not_viable) testing::failed(__FILE__, __LINE__, "connect: ", error.what());
      }
    });
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([listener, seed = random()] {
        Random mine(seed);
        pause_up_to(mine, 3000);
        listener->close();
        listener->close();
        CHECK_THROWS(hung_up, listener->accept(soon()));
      });
    }
    if (random() % 2 == 0) listener.reset();
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(a_listener_that_is_dropped_hangs_up_on_those_that_it_never_accepted) {
  for (const char* transport : transports()) {
    auto listener = std::make_unique<Listener>(listening(transport));
    const auto connection = connect(listener->address(), over(transport), soon());
    std::thread waiting([&] {
      Message message;
      CHECK_THROWS(peer_lost, connection->receive(&message, soon()));
    });
    listener.reset();
    waiting.join();
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
