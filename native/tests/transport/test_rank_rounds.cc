// Rounds of ranks (rank_rounds.h): what each has sent arrives, and whoever does not take part is named.

#include "transport/rank_rounds.h"

#include <memory>
#include <thread>
#include <vector>

#include "tests/support/check.h"
#include "tests/transport/peers.h"

namespace geartrain {
namespace {

constexpr uint32_t kRanks = 3;
constexpr size_t kInline = 4096;

struct Group {
  explicit Group(const std::string& transport) {
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      rounds.push_back(std::make_unique<RankRounds>(rank, kRanks, kInline));
    for (uint32_t one = 0; one < kRanks; ++one) {
      for (uint32_t other = one + 1; other < kRanks; ++other) {
        CHECK(!rounds[one]->carries(0));
        Pair pair = connected(transport);
        rounds[one]->add(other, pair.one);
        rounds[other]->add(one, pair.other);
        ends.push_back(std::move(pair));
      }
    }
  }
  // The end of a connection that is this rank's.
  Connection& end(uint32_t rank, uint32_t peer) const {
    const uint32_t low = std::min(rank, peer), high = std::max(rank, peer);
    const Pair& pair = ends[low == 0 ? high - 1 : 2];
    return rank == low ? *pair.one : *pair.other;
  }
  std::vector<std::unique_ptr<RankRounds>> rounds;
  std::vector<Pair> ends;
};

std::vector<Bytes> nothing() {
  return std::vector<Bytes>(kRanks);
}

TEST(every_rank_gets_what_each_has_sent_it_round_after_round) {
  for (const char* transport : transports()) {
    const Group group(transport);
    const auto part = [](uint64_t round, uint32_t from, uint32_t to) {
      return pattern(round * 100 + from * 10 + to, (round * 37 + from * 5 + to) % kInline);
    };
    std::atomic<uint64_t> wrong{0};
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        RankRounds& rounds = *group.rounds[rank];
        for (uint64_t round = 1; round <= 300; ++round) {
          std::vector<std::vector<std::byte>> sent;
          for (uint32_t to = 0; to < kRanks; ++to) sent.push_back(part(round, rank, to));
          const std::vector<Bytes> parts(sent.begin(), sent.end());
          std::vector<Message> received(kRanks);
          wrong += rounds.begin() != round;
          rounds.all_to_all(round, parts, received, soon());
          for (uint32_t from = 0; from < kRanks; ++from) {
            const std::vector<std::byte> expected = from == rank ? std::vector<std::byte>{} : part(round, from, rank);
            wrong += !std::ranges::equal(RankRounds::content_of(received[from]), expected);
          }
        }
      });
    }
    for (std::thread& each : threads) each.join();
    CHECK_EQ(wrong.load(), uint64_t{0});
    for (const auto& each : group.rounds) {
      CHECK(each->carries(kInline) && !each->carries(kInline + 1));
      CHECK_EQ(each->sent_messages(), uint64_t{300 * (kRanks - 1)});
    }
  }
}

TEST(rounds_are_begun_before_others_are_received_and_reach_some_of_the_ranks) {
  for (const char* transport : transports()) {
    const Group group(transport);
    const auto part = [](uint64_t round, uint32_t from) { return pattern(round * 10 + from, 40 + round); };
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      RankRounds& rounds = *group.rounds[rank];
      const uint32_t next = (rank + 1) % kRanks, last = (rank + 2) % kRanks;
      const auto one = part(1, rank), two = part(2, rank), three = part(3, rank);
      const RankRounds::PartFor both[] = {{next, one}, {last, one}}, to_next[] = {{next, two}},
                                again[] = {{next, three}};
      rounds.send(rounds.begin(), both, soon());
      rounds.send(rounds.begin(), to_next, soon());
      rounds.send_beside(rounds.begin(), again, soon());
      CHECK_EQ(rounds.sent_messages(), uint64_t{4});
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const uint32_t next = (rank + 1) % kRanks, last = (rank + 2) % kRanks;
      RankRounds::PartFrom both[] = {{next, {}}, {last, {}}}, of_last[] = {{last, {}}};
      group.rounds[rank]->receive(1, both, soon());
      for (const RankRounds::PartFrom& each : both)
        CHECK(std::ranges::equal(RankRounds::content_of(each.message), part(1, each.peer)));
      group.rounds[rank]->receive(2, of_last, soon());
      CHECK(std::ranges::equal(RankRounds::content_of(of_last[0].message), part(2, last)));
      CHECK_THROWS(peer_lost, group.rounds[rank]->receive(4, of_last, soon()));  // it is at its third
      CHECK(group.rounds[rank]->failure()->cause == RankRounds::Cause::refused);
    }
  }
}

TEST(a_rank_that_does_not_take_part_is_named) {
  for (const char* transport : transports()) {
    // It sends nothing.
    {
      const Group group(transport);
      std::vector<Message> received(kRanks);
      CHECK_THROWS(timed_out, group.rounds[0]->all_to_all(1, nothing(), received, Deadline::after(0.3)));
      CHECK_EQ(group.rounds[0]->failure()->peer, 2u);
      CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::timed_out);
    }
    // It is gone, while another one is waited for.
    {
      const Group group(transport);
      group.end(1, 0).close();
      std::vector<Message> received(kRanks);
      const uint64_t began = monotonic_ns();
      bool thrown = false;
      try {
        group.rounds[0]->all_to_all(1, nothing(), received, soon());
      } catch (const Error&) {
        thrown = true;
      }
      CHECK(thrown && testing::within(began, 5));
      CHECK_EQ(group.rounds[0]->failure()->peer, 1u);
    }
    // It leaves and says why, while another one is waited for.
    {
      const Group group(transport);
      const std::string why = "rank 2 was lost";
      std::thread leaver([&] {
        ::usleep(100'000);
        group.end(1, 0).send({0, RankRounds::kReason, std::as_bytes(std::span(why)), {}}, soon());
        group.end(1, 0).close();
      });
      std::vector<Message> received(kRanks);
      const uint64_t began = monotonic_ns();
      CHECK_THROWS(peer_lost, group.rounds[0]->all_to_all(1, nothing(), received, soon()));
      leaver.join();
      CHECK(testing::within(began, 5));
      CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::told);
      CHECK_EQ(group.rounds[0]->failure()->detail, why);
    }
    // It has sent its part, and is gone: what does not come within the deadline may wait for it.
    {
      const Group group(transport);
      group.end(1, 0).send({1, 0, {}, {}}, soon());
      std::thread leaver([&] {
        ::usleep(100'000);
        group.end(1, 0).close();
      });
      std::vector<Message> received(kRanks);
      CHECK_THROWS(peer_lost, group.rounds[0]->all_to_all(1, nothing(), received, Deadline::after(0.6)));
      leaver.join();
      CHECK_EQ(group.rounds[0]->failure()->peer, 1u);
      CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::lost);
    }
    // It has left, and said why.
    {
      const Group group(transport);
      const std::string why = "rank 2 aborted";
      group.end(2, 0).send({0, RankRounds::kReason, std::as_bytes(std::span(why)), {}}, soon());
      std::vector<Message> received(kRanks);
      CHECK_THROWS(peer_lost, group.rounds[0]->all_to_all(1, nothing(), received, soon()));
      CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::told);
      CHECK_EQ(group.rounds[0]->failure()->detail, why);
    }
    // It is at another exchange.
    {
      const Group group(transport);
      group.end(2, 0).send({7, 0, {}, {}}, soon());
      std::vector<Message> received(kRanks);
      CHECK_THROWS(peer_lost, group.rounds[0]->all_to_all(1, nothing(), received, soon()));
      CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::refused);
      CHECK_EQ(group.rounds[0]->failure()->detail, std::string("is at its exchange 7, this rank at 1"));
    }
  }
}

// Sends to rank 1, small messages or large ones, until that fails; a socket may take some for a peer that is gone.
void send_until_it_fails(RankRounds& rounds, size_t bytes, ErrorKind expected, double within_s) {
  const std::vector<std::byte> message(bytes);
  const RankRounds::PartFor to_one[] = {{1, message}};
  const Deadline until = soon();
  while (!until.passed()) {
    try {
      rounds.send(rounds.begin(), to_one, Deadline::after(within_s));
    } catch (const Error& error) {
      CHECK(error.kind == expected);
      return;
    }
    ::usleep(1000);
  }
  CHECK(!"a send fails");
}

TEST(a_send_that_fails_names_who_the_ranks_that_left_have_named) {
  for (const char* transport : transports()) {
    for (const size_t bytes : {size_t{1}, 2 * kInline}) {
      const auto said = [](Connection& end, const std::string& why) {
        end.send({0, RankRounds::kReason, std::as_bytes(std::span(why)), {}}, soon());
      };
      // The peer has left because of another one, and said so.
      {
        const Group group(transport);
        said(group.end(1, 0), "rank 2 was lost");
        group.end(1, 0).close();
        send_until_it_fails(*group.rounds[0], bytes, ErrorKind::peer_lost, 60);
        CHECK_EQ(group.rounds[0]->failure()->peer, 1u);
        CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::told);
        CHECK_EQ(group.rounds[0]->failure()->detail, std::string("rank 2 was lost"));
      }
      // It is gone without a word, and another one has said that it is.
      {
        const Group group(transport);
        said(group.end(2, 0), "rank 1 was lost");
        group.end(1, 0).close();
        send_until_it_fails(*group.rounds[0], bytes, ErrorKind::peer_lost, 60);
        CHECK_EQ(group.rounds[0]->failure()->peer, 2u);
        CHECK_EQ(group.rounds[0]->failure()->detail, std::string("rank 1 was lost"));
      }
      // It is gone without a word, and nobody knows more.
      {
        const Group group(transport);
        group.end(1, 0).close();
        send_until_it_fails(*group.rounds[0], bytes, ErrorKind::peer_lost, 60);
        CHECK_EQ(group.rounds[0]->failure()->peer, 1u);
        CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::error);
      }
    }
  }
}

TEST(a_send_that_nobody_takes_in_time_names_who_another_rank_has_named) {
  const Group group("tcp");
  const std::string why = "rank 1 does not answer";
  group.end(2, 0).send({0, RankRounds::kReason, std::as_bytes(std::span(why)), {}}, soon());
  send_until_it_fails(*group.rounds[0], 8 << 20, ErrorKind::peer_lost, 0.2);
  CHECK(group.rounds[0]->failure()->cause == RankRounds::Cause::told);
  CHECK_EQ(group.rounds[0]->failure()->detail, why);
}

TEST(a_rank_that_has_sent_its_part_may_leave_while_others_have_not) {
  for (const char* transport : transports()) {
    const Group group(transport);
    group.end(1, 0).send({1, 0, {}, {}}, soon());
    std::thread late([&] {
      ::usleep(100'000);
      group.end(1, 0).close();
      ::usleep(600'000);
      group.end(2, 0).send({1, 0, {}, {}}, soon());
    });
    std::vector<Message> received(kRanks);
    group.rounds[0]->all_to_all(1, nothing(), received, soon());
    late.join();
    CHECK(!group.rounds[0]->failure());
  }
}

TEST(closing_a_connection_ends_a_round_that_waits) {
  const Group group("shm");
  std::thread closer([&] {
    ::usleep(100'000);
    for (uint32_t peer = 1; peer < kRanks; ++peer) group.end(0, peer).close();
  });
  std::vector<Message> received(kRanks);
  const uint64_t began = monotonic_ns();
  CHECK_THROWS(hung_up, group.rounds[0]->all_to_all(1, nothing(), received, soon(60)));
  CHECK(testing::within(began, 5));
  closer.join();
}

TEST(a_rank_is_connected_once_with_every_other) {
  RankRounds rounds(1, kRanks, kInline);
  const Pair pair = connected("inproc");
  rounds.add(0, pair.one);
  CHECK_THROWS(argument, rounds.add(0, pair.other));
  CHECK_THROWS(argument, rounds.add(1, pair.other));
  CHECK_THROWS(argument, rounds.add(kRanks, pair.other));
  CHECK_THROWS(argument, rounds.add(2, nullptr));
  std::vector<Message> received(kRanks);
  CHECK_THROWS(argument, rounds.all_to_all(1, nothing(), received, soon()));
  CHECK_THROWS(argument, RankRounds(kRanks, kRanks, kInline));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
