// Conformance suite of every provider: whole messages in order, deadlines, bounded queues, and detection of the
// end.

#include <sys/mman.h>

#include "base/buffer_pool.h"
#include "base/sha256.h"
#include "tests/support/check.h"
#include "tests/transport/peers.h"
#include "transport/rpc/inbox.h"
#include "transport/rpc/pending_calls.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB;

std::string text(const Digest& digest) {
  return hex(digest);
}

Bytes bytes(std::string_view characters) {
  return std::as_bytes(std::span(characters));
}

TEST(hashes_and_proofs_are_those_of_the_standards) {
  CHECK_EQ(text(sha256(bytes(""))), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(text(sha256(bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(text(sha256(bytes(std::string(1'000'000, 'a')))),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // RFC 4231, cases 2 and 6.
  CHECK_EQ(text(hmac_sha256("Jefe", {bytes("what do ya want "), bytes("for nothing?")})),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(
      text(hmac_sha256(std::string(131, '\xaa'), {bytes("Test Using Larger Than Block-Size Key - Hash Key First")})),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(messages_arrive_whole_and_in_order_whatever_their_sizes) {
  const std::vector<std::pair<uint64_t, std::vector<uint64_t>>> forms = {
      {0, {}},
      {1, {}},
      {5, {0}},
      {100, {1, 0, 63, 64, 65}},
      {32 * kKiB - 40, {}},
      {32 * kKiB - 39, {}},
      {200 * kKiB, {3}},
      {17 * kKiB, {600 * kKiB, 5}},
      {3, {kMiB, 2 * kMiB + 1}},
      {9, {12 * kMiB + 7, 0, 5}},
      {3 * kMiB, {9 * kMiB}},
      {64, std::vector<uint64_t>(3000, 3)},
      {64, std::vector<uint64_t>(4096, 9000)},
  };
  for (const char* transport : transports()) {
    for (const bool views : {true, false}) {
      Options options;
      options.views = views;
      Pair pair = connected(transport, options);
      CHECK_EQ(std::string(pair.one->transport()), provider_of(transport));
      CHECK_EQ(pair.one->tls().empty(), std::strcmp(transport, "tcp+tls") != 0);
      CHECK_EQ(pair.one->tls(), pair.other->tls());
      CHECK_EQ(pair.one->name().size(), size_t{16});
      std::thread sender([&] {
        for (size_t i = 0; i < forms.size(); ++i) {
          Payload(i, forms[i].first, forms[i].second).send(*pair.one, i << 40, soon(), static_cast<uint32_t>(i));
        }
      });
      for (size_t i = 0; i < forms.size(); ++i) {
        Message message;
        pair.other->receive(&message, soon());
        CHECK_EQ(message.tag, uint64_t{i} << 40);
        CHECK_EQ(message.kind, static_cast<uint32_t>(i));
        CHECK(Payload(i, forms[i].first, forms[i].second).is(message));
      }
      sender.join();
      const ConnectionCounts sent = pair.one->counts(), received = pair.other->counts();
      CHECK_EQ(sent.messages_sent, uint64_t{forms.size()});
      CHECK_EQ(received.messages_received, uint64_t{forms.size()});
      uint64_t out = 0, in = 0;
      for (size_t i = 0; i < kPathCount; ++i) {
        out += sent.bytes_sent[i];
        in += received.bytes_received[i];
      }
      CHECK_EQ(out, in);
      CHECK_EQ(received.bytes_received[static_cast<size_t>(Path::view)] != 0, views && !std::strcmp(transport, "shm"));
    }
  }
}

TEST(random_messages_both_ways_from_many_threads_stay_whole_and_in_order) {
  constexpr uint64_t kThreads = 3, kEach = 150;
  const auto both_ways = [&](const char* transport, bool views) {
    Options options;
    options.views = views;
    Pair pair = connected(transport, options);
    std::vector<std::thread> threads;
    std::atomic<uint64_t> wrong{0};
    const auto form = [](uint64_t tag) {
      std::mt19937_64 random(tag);
      const uint64_t top = random() % 20 == 0 ? 2 * kMiB : random() % 4 == 0 ? 80 * kKiB : 2000;
      std::vector<uint64_t> sizes(random() % 4);
      for (uint64_t& size : sizes) size = random() % top;
      return Payload(tag, random() % 300, sizes);
    };
    for (Connection* end : {pair.one.get(), pair.other.get()}) {
      for (uint64_t t = 0; t < kThreads; ++t) {
        threads.emplace_back([=] {
          for (uint64_t i = 0; i < kEach; ++i) form(t << 32 | i).send(*end, t << 32 | i, soon(100));
        });
      }
      threads.emplace_back([&, end] {
        std::array<uint64_t, kThreads> next{};
        for (uint64_t n = 0; n < kThreads * kEach; ++n) {
          Message message;
          end->receive(&message, soon(100));
          wrong += !form(message.tag).is(message);
          wrong += (message.tag & 0xffffffff) != next.at(message.tag >> 32)++;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), uint64_t{0});
  };
  for (const char* transport : transports()) both_ways(transport, true);
  both_ways("shm", false);
}

TEST(two_peers_that_both_send_first_do_not_wait_for_each_other) {
  const auto both = [](const char* transport, bool views) {
    Options options;
    options.views = views;
    Pair pair = connected(transport, options);
    const auto talk = [](Connection& end) {
      for (uint64_t i = 0; i < 60; ++i) Payload(i, 100, {kMiB}).send(end, i, soon());
      for (uint64_t i = 0; i < 60; ++i) {
        Message message;
        end.receive(&message, soon());
        CHECK_EQ(message.tag, i);
        CHECK(Payload(i, 100, {kMiB}).is(message));
      }
    };
    std::thread other([&] { talk(*pair.other); });
    talk(*pair.one);
    other.join();
  };
  for (const char* transport : transports()) both(transport, true);
  both("shm", false);
}

TEST(every_wait_ends_at_its_deadline) {
  for (const char* transport : transports()) {
    Options options;
    options.limits.max_queued_bytes = 4 * kMiB;
    options.limits.max_segment_bytes = 16 * kMiB;
    Pair pair = connected(transport, options);
    Message message;
    CHECK_THROWS(timed_out, pair.one->receive(&message, Deadline::after(0.02)));
    CHECK_THROWS(timed_out, pair.one->receive(&message, Deadline::after(0)));
    // The peer does not read: data in flight is bounded, and the sender times out.
    const uint64_t began_ns = monotonic_ns();
    uint64_t sent = 0;
    bool timed_out = false;
    const Payload payload(1, 10, {kMiB});
    while (!timed_out && sent < 1000) {
      try {
        payload.send(*pair.one, sent, Deadline::after(0.2));
        ++sent;
      } catch (const Error& error) {
        timed_out = error.kind == ErrorKind::timed_out;
        CHECK(timed_out);
        if (!timed_out) break;
      }
    }
    CHECK(timed_out);
    CHECK(sent < 100);
    CHECK(testing::within(began_ns, 15));
    // What was sent whole is received whole.
    for (uint64_t i = 0; i < sent; ++i) {
      pair.other->receive(&message, soon());
      CHECK_EQ(message.tag, i);
      CHECK(payload.is(message));
    }
  }
}

TEST(what_was_sent_before_the_end_is_received_and_then_the_end_is_an_error) {
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    for (uint64_t i = 0; i < 5; ++i) Payload(i, 20, {i * 100 * kKiB}).send(*pair.one, i, soon());
    pair.one->close();
    CHECK_THROWS(hung_up, Payload(1, 1, {}).send(*pair.one, 1, soon()));
    pair.one.reset();
    Message message;
    for (uint64_t i = 0; i < 5; ++i) {
      pair.other->receive(&message, soon());
      CHECK(Payload(i, 20, {i * 100 * kKiB}).is(message));
    }
    CHECK_THROWS(peer_lost, pair.other->receive(&message, soon()));
    CHECK_THROWS(peer_lost, pair.other->receive(&message, soon()));
    CHECK(pair.other->lost());
    CHECK_THROWS(peer_lost, Payload(1, 1, {}).send(*pair.other, 1, soon()));
  }
}

TEST(the_end_wakes_every_waiting_thread) {
  for (const char* transport : transports()) {
    for (const bool own : {true, false}) {
      Pair pair = connected(transport);
      std::atomic<int> kind{-1};
      std::thread waiting([&] {
        Message message;
        try {
          pair.one->receive(&message, soon(100));
        } catch (const Error& error) {
          kind = static_cast<int>(error.kind);
        }
      });
      ::usleep(20'000);
      (own ? pair.one : pair.other)->close();
      waiting.join();
      CHECK_EQ(kind.load(), static_cast<int>(own ? ErrorKind::hung_up : ErrorKind::peer_lost));
    }
  }
}

TEST(messages_that_are_kept_are_never_overwritten_and_their_memory_comes_back) {
  for (const char* transport : transports()) {
    const size_t in_use = pool_counts().bytes_in_use;
    std::vector<Message> kept;
    {
      Options options;
      options.limits.max_segment_bytes = 64 * kMiB;
      Pair pair = connected(transport, options);
      // More than there are segments for: the later ones are copied.
      for (uint64_t i = 0; i < 150; ++i) {
        Payload(i, 8, {600 * kKiB + i}).send(*pair.one, i, soon());
        kept.emplace_back();
        pair.other->receive(&kept.back(), soon());
      }
      for (uint64_t i = 0; i < 150; ++i) CHECK(Payload(i, 8, {600 * kKiB + i}).is(kept[i]));
      kept.erase(kept.begin(), kept.begin() + 75);
      for (uint64_t i = 0; i < 75; ++i) {
        Payload(i, 8, {600 * kKiB + i}).send(*pair.one, i, soon());
        kept.emplace_back();
        pair.other->receive(&kept.back(), soon());
      }
    }
    // The connection is closed, the messages are not.
    for (uint64_t i = 0; i < 150; ++i) {
      const uint64_t seed = (i + 75) % 150;
      CHECK(Payload(seed, 8, {600 * kKiB + seed}).is(kept[i]));
    }
    kept.clear();
    CHECK_EQ(pool_counts().bytes_in_use, in_use);
  }
}

TEST(what_is_beyond_a_limit_is_refused_by_its_sender) {
  Options options;
  options.limits.max_header_bytes = 100;
  options.limits.max_message_bytes = 1000;
  options.limits.max_buffers = 3;
  for (const char* transport : transports()) {
    Pair pair = connected(transport, options);
    CHECK_THROWS(frame, Payload(1, 101, {}).send(*pair.one, 1, soon()));
    CHECK_THROWS(frame, Payload(1, 1, {1001}).send(*pair.one, 1, soon()));
    CHECK_THROWS(frame, Payload(1, 1, {1, 1, 1, 1}).send(*pair.one, 1, soon()));
    Payload(1, 100, {500, 499, 1}).send(*pair.one, 1, soon());
    Message message;
    pair.other->receive(&message, soon());
    CHECK(Payload(1, 100, {500, 499, 1}).is(message));
  }
}

TEST(the_fastest_provider_that_works_is_chosen_and_the_others_are_explained) {
  ListenerOptions options;
  Listener all(options);
  CHECK_EQ(std::string(connect(all.address(), {}, soon())->transport()), "inproc");
  options.shm = false;
  const Listener tcp_only(options);
  Options shm;
  shm.transport = "shm";
  CHECK_THROWS(not_viable, connect(tcp_only.address(), shm, soon()));
  // As another process would see it, were the listener in this one.
  Address elsewhere = Address::parse(all.address());
  elsewhere.shm += "-of-another-host";
  const std::string address = elsewhere.text();
  Options tcp;
  tcp.transport = "tcp";
  CHECK_EQ(std::string(connect(address, tcp, soon())->transport()), "tcp");
  CHECK_THROWS(not_viable, connect(address, shm, soon()));
  for (const Provider& provider : kProviders) CHECK_EQ(provider.not_viable(), "");
  Options unknown;
  unknown.transport = "pigeon";
  CHECK_THROWS(argument, connect(address, unknown, soon()));
  for (const char* malformed : {"", "id=", "tcp=1:2", "id=12;tcp=1:2", "hello"}) {
    CHECK_THROWS(argument, Address::parse(malformed));
  }
  // An address without an id, for places that are known before their listeners are.
  const std::string place = Address::parse(address).tcp.at(0);
  CHECK_EQ(std::string(connect("id=any;tcp=" + place, {}, soon())->transport()), "tcp");
}

TEST(a_secret_is_proved_on_both_sides_or_there_is_no_connection) {
  Options secret, other, none;
  secret.secret = "open sesame";
  other.secret = "open barley";
  for (const char* transport : transports()) {
    for (Options* options : {&secret, &other, &none}) {
      options->tls.reset();
      *options = over(transport, *options);
    }
    CHECK(connected(transport, secret).one->authenticated());
    CHECK(!connected(transport, none).other->authenticated());
    const Listener guarded(listening(transport, secret));
    CHECK_THROWS(untrusted, connect(guarded.address(), other, soon()));
    CHECK_THROWS(untrusted, connect(guarded.address(), none, soon()));
    const Listener open(listening(transport));
    CHECK_THROWS(untrusted, connect(open.address(), secret, soon()));
  }
  ListenerOptions everywhere;
  everywhere.tcp_host = "0.0.0.0";
  CHECK_THROWS(untrusted, Listener{everywhere});
  everywhere.options.secret = "open sesame";
  Listener guarded(everywhere);
  CHECK(Address::parse(guarded.address()).tcp.size() >= 1);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
