// Several threads on the lanes of a connection under TLS: they work at once, as many as have a core, and a failure of
// one lane is the end of the connection, told as ever. Strangers attach none.

#include <fcntl.h>

#include <atomic>
#include <mutex>
#include <new>
#include <set>

#include "base/threads.h"
#include "tests/support/check.h"
#include "tests/transport/between.h"
#include "tests/transport/certificates.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/providers/lane_threads.h"
#include "transport/providers/provider.h"

namespace geartrain {
namespace {

constexpr unsigned kThreads = 4;

// Options of a side that works on so many lanes at once.
Options on_threads(unsigned threads) {
  TlsFiles files = Authority::of_tests().sign("threads" + std::to_string(threads), "IP:127.0.0.1");
  files.threads = threads;
  Options options;
  options.tls = TlsContext::load(files);
  options.transport = "tcp";
  options.limits.handshake_timeout_s *= testing::patience();
  return options;
}

const Options& on_four() {
  static const Options options = on_threads(kThreads);
  return options;
}

ListenerOptions listening_with(Options options) {
  ListenerOptions made;
  options.transport.clear();
  made.options = std::move(options);
  return made;
}

struct Ends {
  Listener listener;
  std::shared_ptr<Connection> one, other;
  explicit Ends(const Options& options = on_four()) : listener(listening_with(options)) {
    one = connect(listener.address(), options, soon());
    other = listener.accept(soon());
  }
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(a_round_is_on_several_threads_at_once_and_on_no_more_than_were_asked_for) {
  LaneThreads threads(8, true, 3);
  CHECK_EQ(threads.most(), 3u);
  CHECK_EQ(threads.now(), 3u);
  const size_t lanes[] = {0, 1, 2, 3, 4, 5, 6, 7};
  std::atomic<unsigned> inside{0}, most{0};
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::multiset<size_t> done;
  // Each waits until three are inside: without as many threads none would ever be.
  const Deadline deadline = soon();
  threads.run(lanes, 3, [&](size_t lane) {
    const unsigned now = inside.fetch_add(1) + 1;
    for (unsigned before = most.load(); before < now && !most.compare_exchange_weak(before, now);) continue;
    while (most.load() < 3 && !deadline.passed()) std::this_thread::yield();
    {
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
      done.insert(lane);
    }
    inside.fetch_sub(1);
  });
  CHECK_EQ(most.load(), 3u);
  CHECK_EQ(threads.seen(), 3u);
  CHECK_EQ(ids.size(), size_t{3});
  CHECK(done == std::multiset<size_t>(std::begin(lanes), std::end(lanes)));
}

TEST(without_tls_or_with_one_lane_or_one_core_the_caller_does_it_all) {
  for (LaneThreads* threads :
       {new LaneThreads(8, false, 0), new LaneThreads(1, true, 4), new LaneThreads(8, true, 1)}) {
    const size_t lanes[] = {0, 1, 2};
    std::set<std::thread::id> ids;
    threads->run(lanes, 8, [&](size_t) { ids.insert(std::this_thread::get_id()); });
    CHECK(ids == std::set<std::thread::id>{std::this_thread::get_id()});
    CHECK_EQ(threads->most(), 1u);
    delete threads;
  }
}

TEST(a_message_has_a_thread_for_every_so_many_bytes_up_to_half_of_the_cores) {
  LaneThreads threads(8, true, 0), asked(8, true, 3);
  const unsigned most = std::clamp(available_cores() / 2, 1u, 8u);
  CHECK_EQ(threads.most(), most);
  for (const unsigned wanted : {1u, 2u, 4u, 9u}) {
    const uint64_t bytes = wanted * LaneThreads::kBytesAThread;
    threads.begin_message(bytes);
    asked.begin_message(bytes);
    CHECK_EQ(threads.now(), std::min(wanted, most));
    CHECK_EQ(asked.now(), 3u);
  }
  threads.begin_message(1);
  CHECK_EQ(threads.now(), 1u);
}

TEST(a_failure_of_one_lane_is_thrown_when_all_have_ended) {
  LaneThreads threads(4, true, 4);
  const size_t lanes[] = {0, 1, 2, 3};
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> ended{0};
    try {
      threads.run(lanes, 4, [&](size_t lane) {
        ++ended;
        if (lane == 1) fail(ErrorKind::peer_lost, "gone");
        if (lane == 2) fail(ErrorKind::frame, "damaged");
      });
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::frame);  // what explains the other
      CHECK_EQ(std::string(error.what()), "damaged");
    }
    CHECK_EQ(ended.load(), 4);
  }
  bool no_memory = false;
  try {
    threads.run(lanes, 4, [](size_t lane) {
      if (lane == 3) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    no_memory = true;
  }
  CHECK(no_memory);
}

TEST(messages_stay_whole_and_in_order_and_several_threads_worked_on_them) {
  if (!Authority::not_viable().empty()) return;
  Ends ends;
  CHECK(has(ends.one->describe(), "with 4 lanes, TLSv1.3"));
  const std::vector<Payload> payloads = {
      {1, 100, {12 * kMiB + 5}}, {2, 0, {3, 2 * kMiB, 70'000}}, {3, 5, {9}}, {4, 20'000, {5 * kMiB, 0, 4 * kMiB - 1}}};
  const auto talk = [&](Connection& end) {
    std::thread sender([&] {
      for (size_t i = 0; i < 2 * payloads.size(); ++i) payloads[i % payloads.size()].send(end, i, soon());
    });
    for (size_t i = 0; i < 2 * payloads.size(); ++i) {
      Message message;
      end.receive(&message, soon());
      CHECK_EQ(message.tag, i);
      CHECK(payloads[i % payloads.size()].is(message));
    }
    sender.join();
  };
  std::thread there([&] { talk(*ends.other); });
  talk(*ends.one);
  there.join();
  CHECK(ends.one->counts().bytes_sent[static_cast<size_t>(Path::lanes)] > 4 * 20 * kMiB / 2);
  // A busy machine may give a round no second thread; not all of them.
  const Payload big(5, 0, {32 * kMiB});
  const auto both = [&] {
    const auto at_once = [](Connection& end, const char* what) {
      const std::string text = end.describe();
      const size_t at = text.find("at once so far ", text.find(what));
      return at == std::string::npos ? 0 : std::stoi(text.substr(at + 15));
    };
    return at_once(*ends.one, "encrypted") >= 2 && at_once(*ends.other, "decrypted") >= 2;
  };
  for (const Deadline deadline = soon(60); !both() && !deadline.passed();) {
    std::thread sender([&] { big.send(*ends.one, 0, soon()); });
    Message message;
    ::usleep(20'000);  // so that several lanes have something to be decrypted
    ends.other->receive(&message, soon());
    CHECK(big.is(message));
    sender.join();
  }
  CHECK(both());
}

TEST(a_connection_that_is_cut_among_several_is_the_end_of_all_and_no_message_is_lost_in_silence) {
  if (!Authority::not_viable().empty()) return;
  for (int gone = 0; gone <= 5; ++gone) {  // the first one, each lane and the sideband, in the order in which they came
    for (const bool within_message : {true, false}) {
      Listener listener(listening_with(on_four()));
      Between between(listener.address());
      const auto one = connect(between.address(), on_four(), soon());
      const auto other = listener.accept(soon());
      const Payload small(1, 10, {500}), big(2, 10, {24 * kMiB});
      small.send(*one, 1, soon());
      std::atomic<bool> sent{false};
      std::thread sender;
      if (within_message) {
        sender = std::thread([&] {
          try {
            for (uint64_t tag = 2;; ++tag) {
              big.send(*one, tag, soon(60));
              sent = true;
            }
          } catch (const Error& error) {
            CHECK(error.kind == ErrorKind::peer_lost);
          }
        });
        Message message;
        other->receive(&message, soon());
        CHECK(small.is(message));
      } else {
        Message message;
        other->receive(&message, soon());
        CHECK(small.is(message));
      }
      between.cut = gone;
      const uint64_t began_ns = monotonic_ns();
      uint64_t expected = 2;
      try {
        for (;;) {  // those that were whole come first
          Message message;
          other->receive(&message, soon(60));
          CHECK_EQ(message.tag, expected++);
          CHECK(big.is(message));
        }
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::peer_lost);
      }
      CHECK(testing::within(began_ns, 15));
      if (sender.joinable()) sender.join();
      // The other end is told without a call for another message.
      CHECK_THROWS(peer_lost, {
        Message message;
        one->receive(&message, soon(60));
      });
      CHECK(testing::within(began_ns, 15));
      CHECK_THROWS(peer_lost, small.send(*one, 3, soon()));
    }
  }
}

TEST(a_deadline_in_the_middle_of_a_message_ends_the_connection_and_leaves_no_thread_at_work) {
  if (!Authority::not_viable().empty()) return;
  Ends ends;
  const Payload big(1, 0, {64 * kMiB});
  const uint64_t began_ns = monotonic_ns();
  CHECK_THROWS(timed_out, big.send(*ends.one, 1, Deadline::after(0.3)));  // nobody receives
  CHECK(testing::within(began_ns, 5));
  CHECK_THROWS(peer_lost, big.send(*ends.one, 1, soon()));
  Message message;
  CHECK_THROWS(peer_lost, ends.other->receive(&message, soon()));
}

TEST(an_end_that_is_closed_in_the_middle_of_messages_both_ways_wakes_all_that_wait) {
  if (!Authority::not_viable().empty()) return;
  const Payload big(1, 0, {6 * kMiB});
  for (int round = 0; round < (kThreadSanitizer ? 6 : 20); ++round) {
    Ends ends;
    const auto until_the_end = [](auto&& act) {
      try {
        for (;;) act();
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::hung_up || error.kind == ErrorKind::peer_lost);
      }
    };
    std::vector<std::thread> all;
    for (Connection* end : {ends.one.get(), ends.other.get()}) {
      all.emplace_back([&, end] { until_the_end([&] { big.send(*end, 1, soon(60)); }); });
      all.emplace_back([&, end] {
        until_the_end([&] {
          Message message;
          end->receive(&message, soon(60));
          CHECK(big.is(message));
        });
      });
    }
    ::usleep(static_cast<useconds_t>(3000 * round));
    ends.one->close();
    ends.one->close();
    for (std::thread& thread : all) thread.join();
  }
}

TEST(a_child_that_is_forked_beside_the_threads_uses_connections_of_its_own) {
  if (!Authority::not_viable().empty() || kThreadSanitizer || kAddressSanitizer) return;  // (faults.h: allocators)
  Ends ends;
  std::atomic<bool> done{false};
  const Payload big(1, 0, {8 * kMiB});
  std::thread sender([&] {
    while (!done) big.send(*ends.one, 1, soon(60));
  });
  std::thread receiver([&] {
    try {
      for (;;) {
        Message message;
        ends.other->receive(&message, soon(60));
      }
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::peer_lost || error.kind == ErrorKind::hung_up);
    }
  });
  for (int i = 0; i < 10; ++i) {
    Child child([&] {
      Message message;
      try {
        ends.other->receive(&message, soon());
        ::_exit(2);
      } catch (const Error& error) {
        if (error.kind != ErrorKind::hung_up) ::_exit(3);
      }
      Ends own;
      std::thread there([&] { big.send(*own.one, 9, soon()); });
      own.other->receive(&message, soon());
      there.join();
      if (!big.is(message)) ::_exit(4);
    });
    CHECK_EQ(child.wait(), 0);
  }
  done = true;
  sender.join();
  ends.one->close();
  receiver.join();
}

// A stream under TLS to the listener, by a dialer of these options.
Stream secured(const std::string& address, const Options& options) {
  Stream stream(raw_tcp(address));
  ::fcntl(stream.get(), F_SETFL, O_NONBLOCK);
  secure(&stream, options, "127.0.0.1", soon());
  return stream;
}

TEST(a_stranger_attaches_no_lane_to_a_connection_of_others) {
  if (!Authority::not_viable().empty()) return;
  Options options = on_four();
  options.secret = "open sesame";
  const Authority elsewhere;
  Options stranger = options, guest = options, plain = options;
  stranger.tls = TlsContext::load([&] {
    TlsFiles files = elsewhere.sign("stranger", "IP:127.0.0.1");
    files.ca = Authority::of_tests().path("ca.pem");
    return files;
  }());
  guest.secret = "open barley";
  plain.tls = nullptr;
  Listener listener(listening_with(options));
  const Address address = Address::parse(listener.address());
  Stream first = secured(listener.address(), options);
  const Session session = greet(first.wire(), Intent::stream, address, options, soon(), 2);
  const auto attach = [&](const Options& by, uint32_t number, SessionId id) {
    Stream lane = by.tls == nullptr ? Stream(raw_tcp(listener.address())) : secured(listener.address(), by);
    greet(lane.wire(), Intent::lane, address, by, soon(), number, &id);
    return lane;
  };
  const auto refused = [&](const Options& by, uint32_t number, const SessionId& id, ErrorKind kind) {
    const uint64_t before = listener.refused();
    try {
      attach(by, number, id);
      CHECK(false);
    } catch (const Error& error) {
      if (error.kind != kind) std::cerr << error.what() << std::endl;
      CHECK(error.kind == kind);
    }
    for (const Deadline deadline = soon(); listener.refused() == before && !deadline.passed(); ::usleep(1000)) {
    }
    CHECK_EQ(listener.refused(), before + 1);
  };
  refused(plain, 0, session.id, ErrorKind::untrusted);     // in the clear
  refused(stranger, 0, session.id, ErrorKind::untrusted);  // another authority's certificate
  refused(guest, 0, session.id, ErrorKind::untrusted);     // another secret
  for (size_t byte = 0; byte < session.id.size(); ++byte) {
    SessionId guess = session.id;
    guess[byte] ^= 1;
    refused(options, 0, guess, ErrorKind::peer_lost);
  }
  refused(options, 3, session.id, ErrorKind::peer_lost);  // beyond those that were announced
  std::vector<Stream> lanes(3);
  for (const uint32_t number : {1u, 2u}) lanes[number] = attach(options, number, session.id);
  refused(options, 1, session.id, ErrorKind::peer_lost);  // it is there
  lanes[0] = attach(options, 0, session.id);
  const auto other = listener.accept(soon());
  CHECK(has(other->describe(), "with 2 lanes"));
  refused(options, 3, session.id, ErrorKind::peer_lost);  // it has all of its lanes
  const auto one = take_tcp(std::move(first), std::move(lanes), session, options);
  const Payload big(1, 0, {5 * kMiB});
  std::thread sender([&] { big.send(*one, 1, soon()); });
  Message message;
  other->receive(&message, soon());
  CHECK(big.is(message));
  sender.join();
}

TEST(peers_that_ask_for_different_numbers_of_threads_understand_each_other) {
  if (!Authority::not_viable().empty()) return;
  const Payload big(1, 0, {9 * kMiB});
  for (const unsigned dialer : {1u, 3u}) {
    for (const unsigned accepting : {1u, 4u}) {
      const Options mine = on_threads(dialer);
      Listener listener(listening_with(on_threads(accepting)));
      const auto one = connect(listener.address(), mine, soon());
      const auto other = listener.accept(soon());
      CHECK(has(one->describe(), dialer == 1 ? "with 2 lanes" : "with 3 lanes"));
      for (Connection* end : {one.get(), other.get()}) {
        Connection* peer = end == one.get() ? other.get() : one.get();
        std::thread sender([&] { big.send(*end, 1, soon()); });
        Message message;
        peer->receive(&message, soon());
        CHECK(big.is(message));
        sender.join();
      }
    }
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
