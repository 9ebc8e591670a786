// Messages of many peers in one inbox (inbox.h), and calls that wait for their answers (pending_calls.h).

#include <ctime>

#include "tests/support/check.h"
#include "tests/transport/peers.h"
#include "transport/rpc/inbox.h"
#include "transport/rpc/pending_calls.h"

namespace geartrain {
namespace {

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB;

TEST(an_inbox_serves_many_peers_in_their_order_and_reports_their_end) {
  constexpr uint64_t kPeers = 9, kEach = 200;
  std::vector<Pair> pairs;
  Inbox inbox;
  for (uint64_t i = 0; i < kPeers; ++i) {
    pairs.push_back(connected(transports()[i % transports().size()]));
    inbox.add(i, pairs.back().other);
    CHECK_THROWS(argument, inbox.add(i, pairs.back().other));
  }
  std::vector<std::thread> senders;
  for (uint64_t i = 0; i < kPeers; ++i) {
    senders.emplace_back([&, i] {
      for (uint64_t n = 0; n < kEach; ++n) Payload(n, 50, {n % 50 == 0 ? kMiB : 9}).send(*pairs[i].one, n, soon());
      pairs[i].one->close();
    });
  }
  std::vector<uint64_t> next(kPeers);
  std::atomic<uint64_t> lost{0}, wrong{0};
  std::vector<std::thread> servers;
  for (int t = 0; t < 3; ++t) {
    servers.emplace_back([&] {
      Inbox::Event event;
      try {
        while (inbox.receive(&event, soon(30))) {
          if (event.lost) {
            if (++lost == kPeers) inbox.close();
            continue;
          }
          if (event.message.tag % 40 == 0) ::usleep(1500);  // slow now and then: others must go on meanwhile
          wrong += !Payload(event.message.tag, 50, {event.message.tag % 50 == 0 ? kMiB : 9}).is(event.message);
          // Order is kept: no other thread has a message of this peer before resume().
          wrong += next[event.id]++ != event.message.tag;
          inbox.resume(event.id);
        }
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::hung_up);
      }
    });
  }
  for (auto& sender : senders) sender.join();
  for (auto& server : servers) server.join();
  CHECK_EQ(lost.load(), kPeers);
  CHECK_EQ(wrong.load(), uint64_t{0});
  for (const uint64_t n : next) CHECK_EQ(n, kEach);
}

TEST(a_slow_answer_holds_up_other_peers_for_a_moment_only) {
  Pair slow = connected("shm"), quick = connected("shm");
  Inbox inbox;
  inbox.add(1, slow.other);
  inbox.add(2, quick.other);
  std::atomic<bool> let_go{false};
  std::vector<std::thread> servers;
  for (int t = 0; t < 2; ++t) {
    servers.emplace_back([&] {
      Inbox::Event event;
      try {
        while (inbox.receive(&event, soon())) {
          while (event.id == 1 && !let_go) ::usleep(1000);
          if (!event.lost) event.connection->send({event.message.tag, 0, {}, {}}, soon());
          inbox.resume(event.id);
        }
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::hung_up);
      }
    });
  }
  Message message;
  for (uint64_t i = 0; i < 20; ++i) {
    if (i == 5) Payload(0, 1, {}).send(*slow.one, 1, soon());
    Payload(0, 1, {}).send(*quick.one, i, soon());
    quick.one->receive(&message, soon(5));
    CHECK_EQ(message.tag, i);
  }
  let_go = true;
  slow.one->receive(&message, soon(5));
  inbox.close();
  for (auto& server : servers) server.join();
}

TEST(a_connection_whose_messages_are_all_taken_is_not_read_before_more_has_come) {
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    Inbox inbox;
    inbox.add(1, pair.other);
    Inbox::Event event;
    for (uint64_t n = 0; n < 300; ++n) {
      // One at a time, several at once, and big ones, whose end comes after their beginning.
      const uint64_t together = n % 3 == 2 ? 5 : 1, bytes = n % 50 == 7 ? 2 * kMiB : n % 3 == 0 ? 100 * kKiB : 9;
      std::thread sender([&] {
        for (uint64_t i = 0; i < together; ++i) Payload(n, 50, {bytes}).send(*pair.one, n, soon());
      });
      for (uint64_t i = 0; i < together; ++i) {
        CHECK(inbox.receive(&event, soon()));
        CHECK_EQ(event.message.tag, n);
        // A read would find nothing, which only a bare stream knows.
        if (std::string(transport) == "tcp" && together == 1 && bytes == 9) CHECK(pair.other->drained());
        if (std::string(transport) != "tcp") CHECK(!pair.other->drained());
        inbox.resume(1);
      }
      sender.join();
    }
    pair.one->close();
    CHECK(inbox.receive(&event, soon()));
    CHECK(event.lost);
  }
}

// A slow handler has the last message, and another thread waits for the other peers'.
TEST(what_a_peer_sends_before_its_last_message_is_handled_does_not_keep_the_inbox_awake) {
  const auto used_s = [] {
    struct timespec used{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
  };
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    Inbox inbox;
    inbox.add(1, pair.other);
    Inbox::Event event;
    Payload(0, 50, {9}).send(*pair.one, 0, soon());
    CHECK(inbox.receive(&event, soon()));
    for (uint64_t n = 1; n < 3; ++n) {
      Payload(n, 50, {9}).send(*pair.one, n, soon());
      if (n == 2) pair.one->close();
      const double before_s = used_s();
      CHECK(!inbox.receive(&event, Deadline::after(0.2)));
      CHECK(used_s() - before_s < 0.05);
    }
    for (uint64_t n = 1; n < 3; ++n) {
      inbox.resume(1);
      CHECK(inbox.receive(&event, soon()));
      CHECK_EQ(event.message.tag, n);
    }
    inbox.resume(1);
    CHECK(inbox.receive(&event, soon()));
    CHECK(event.lost);
  }
}

TEST(the_end_of_a_watched_peer_is_reported_without_reading_from_it) {
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    Inbox inbox;
    inbox.watch(5, pair.one);
    Inbox::Event event;
    Payload(1, 1, {}).send(*pair.other, 1, soon());
    CHECK(!inbox.receive(&event, Deadline::after(0.05)));
    pair.other->close();
    CHECK(inbox.receive(&event, soon()));
    CHECK(event.lost);
    CHECK_EQ(event.id, uint64_t{5});
    Message message;
    pair.one->receive(&message, soon());
  }
}

TEST(many_threads_ask_over_one_connection_and_each_gets_its_own_answer) {
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    PendingCalls calls(pair.one);
    std::thread server([&] {
      // Answers every pair of questions in the wrong order.
      std::vector<Message> held;
      for (int n = 0; n < 400; ++n) {
        held.emplace_back();
        pair.other->receive(&held.back(), soon());
        if (held.size() < 2 && n != 399) continue;
        for (; !held.empty(); held.pop_back()) {
          pair.other->send({held.back().tag, 1, held.back().header, {}}, soon());
        }
      }
    });
    std::vector<std::thread> callers;
    std::atomic<uint64_t> wrong{0}, detached{0};
    for (uint64_t t = 0; t < 3; ++t) {
      callers.emplace_back([&, t] {
        std::vector<std::pair<uint64_t, Payload>> open;
        for (uint64_t n = 0; n < 100; ++n) {
          open.emplace_back(0, Payload(t << 32 | n, 40, {}));
          open.back().first = calls.start(0, open.back().second.header, {}, soon());
          if (open.size() < 4 && n != 99) continue;
          for (const auto& [tag, payload] : open) {
            Message answer;
            calls.wait(tag, &answer, soon());
            wrong += !payload.is(answer) || answer.tag != tag;
          }
          open.clear();
        }
      });
    }
    std::thread completer([&] {
      for (int n = 0; n < 100; ++n) {
        Message answer;
        calls.next_detached(&answer, soon());
        ++detached;
      }
    });
    for (int n = 0; n < 100; ++n) calls.detach(calls.start(0, {}, {}, soon()));
    for (auto& caller : callers) caller.join();
    completer.join();
    server.join();
    CHECK_EQ(wrong.load(), uint64_t{0});
    CHECK_EQ(detached.load(), uint64_t{100});
    CHECK_EQ(calls.open(), size_t{0});
    const uint64_t unanswered = calls.start(0, {}, {}, soon());
    Message answer;
    CHECK_THROWS(timed_out, calls.wait(unanswered, &answer, Deadline::after(0.01)));
    calls.forget(unanswered);
    CHECK_THROWS(argument, calls.wait(unanswered, &answer, soon()));
    const uint64_t lost = calls.start(0, {}, {}, soon());
    pair.other->close();
    CHECK_THROWS(peer_lost, calls.wait(lost, &answer, soon()));
    CHECK_THROWS(peer_lost, calls.start(0, {}, {}, soon()));
  }
}

TEST(a_call_starts_once_another_is_answered_whoever_reads_for_how_long) {
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    PendingCalls calls(pair.one, 2);
    const uint64_t slow = calls.start(0, {}, {}, soon()), quick = calls.start(0, {}, {}, soon());
    std::thread reader([&] {
      Message answer;
      calls.wait(slow, &answer, soon(60));
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // it reads
    std::thread starter([&] { calls.start(0, {}, {}, soon(60)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // it waits for a place
    pair.other->send({quick, 1, {}, {}}, soon());
    Message third;
    for (int n = 0; n < 2; ++n) pair.other->receive(&third, soon());
    bool sent = true;
    try {
      pair.other->receive(&third, soon());
    } catch (const Error&) {
      sent = false;
    }
    pair.other->send({slow, 1, {}, {}}, soon());
    starter.join();
    reader.join();
    CHECK(sent);
  }
}

TEST(a_call_that_was_dropped_cannot_be_waited_for) {
  for (const char* transport : transports()) {
    Pair pair = connected(transport);
    PendingCalls calls(pair.one);
    Message answer;
    const uint64_t dropped = calls.start(0, {}, {}, soon());
    calls.drop(dropped);
    CHECK_THROWS(argument, calls.wait(dropped, &answer, soon()));
    CHECK_THROWS(argument, calls.detach(dropped));
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
