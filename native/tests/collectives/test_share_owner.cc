// The owner of a share, without a group around it: what it reads, exposes, sends and remembers.

#include "collectives/share_owner.h"

#include <random>

#include "tests/collectives/ranks.h"
#include "tests/collectives/readers.h"

namespace geartrain {
namespace {

class Alone final : public ShareOwner::Host {
 public:
  explicit Alone(uint32_t world = 2, uint32_t self = 0)
      : owner(blocks_, *this, world, self, chunk_bytes(world), 1 << 20), has_results(world) {}
  void results_for(uint32_t rank) override { has_results[rank] = true; }
  void deliver(uint64_t, uint64_t, std::span<const std::byte> result) override {
    delivered.insert(delivered.end(), result.begin(), result.end());
  }
  void served(uint64_t) override { ++times_served; }
  CongestionWindow* window() override { return &window_; }
  double received(uint64_t) const override { return arrived; }
  bool sends_eagerly(uint32_t) override { return eager; }
  void disagree(const std::string& text, std::vector<uint32_t>) override { said = text; }
  ReadExposed read(uint32_t, uint64_t address, std::span<std::byte> into) override {
    if (answer == ReadExposed::read) std::memcpy(into.data(), reinterpret_cast<const void*>(address), into.size());
    if (++times_read == denied_from) answer = ReadExposed::denied;
    return times_read >= denied_from ? answer : ReadExposed::read;
  }
  void unreadable_part(uint32_t, uint64_t, uint64_t from) override { parts_from = from; }
  void go_on() override { again = true; }
  void run() {
    while (std::exchange(again, false)) owner.go_on();
  }

  ReadExposed answer = ReadExposed::read;
  uint64_t times_read = 0, denied_from = ~uint64_t{0}, times_served = 0, parts_from = ~uint64_t{0};
  bool again = false, eager = false;
  double arrived = 1;  // part of what this rank gets itself
  std::string said;
  Array delivered;  // to this rank itself

 private:
  ChunkBufferPool blocks_;
  CongestionWindow window_{1 << 20, 1 << 20};

 public:
  ShareOwner owner;
  std::vector<bool> has_results;  // by rank: told of them
};

Open exposing(const Shape& shape, uint64_t bytes, const Array& array) {
  Open open = open_of(shape, bytes);
  open.reads = 1;
  open.address = reinterpret_cast<uintptr_t>(array.data());
  return open;
}

// Parts that are the last of their piece are reduced where they are, by turns with parts that are copied first, in the
// order of the ranks whichever of them comes last.
TEST(parts_that_a_piece_waits_for_are_reduced_in_place) {
  constexpr uint32_t kWorld = 3;
  constexpr uint64_t kBytes = 5 * kChunkBytes + 4000;
  const Shape shape = sum_of(kWorld * kBytes / 4);
  const Array expected = reference(0, kWorld, sum_of(kBytes / 4));
  std::mt19937 random(3);
  uint64_t in_place = 0, copied = 0, of_a_chunk = 0;
  for (int round = 0; round < 300; ++round) {
    Alone rank(kWorld, 1);
    std::vector<Array> all;
    for (uint32_t one = 0; one < kWorld; ++one) all.push_back(numbers(one, Dtype::float32, kBytes / 4));
    for (const uint32_t other : {0u, 2u}) rank.owner.open(other, 0, open_of(shape, kBytes));
    rank.owner.open_local(0, shape, kBytes, all[1].data());
    uint64_t at[kWorld] = {}, got = 0;
    OutFrame frame;
    while (at[0] < kBytes || at[2] < kBytes) {
      const uint32_t from = at[2] == kBytes || (at[0] != kBytes && random() % 2 == 0) ? 0 : 2;
      // The first chunk may come in two parts (ShardedAllreduce::next).
      const bool first = at[from] == 0 && random() % 2 == 0;
      const uint64_t most = first ? kFirstBytes : kChunkBytes - at[from] % kChunkBytes;
      const WireHeader part = frame_of(FrameKind::part, 0, at[from], std::min(most, kBytes - at[from]));
      WireHeader wrong = part;
      wrong.offset += 4;
      CHECK_THROWS(frame, rank.owner.took_in_place(from, wrong, all[from].data()));
      const uint64_t before = rank.owner.reduced_bytes();
      if (random() % 3 != 0 && rank.owner.took_in_place(from, part, all[from].data() + at[from])) {
        ++in_place;
        of_a_chunk += part.offset != 0 && part.offset < kChunkBytes;
        CHECK_EQ(rank.owner.reduced_bytes() - before, uint64_t{kWorld} * part.bytes);
      } else {
        std::memcpy(rank.owner.room(from, part).data(), all[from].data() + at[from], part.bytes);
        rank.owner.took(from, part);
        ++copied;
      }
      at[from] += part.bytes;
      while (rank.owner.next(0, &frame)) {
        CHECK(std::memcmp(frame.data, expected.data() + got, frame.header.bytes) == 0);
        got += frame.header.bytes;
      }
    }
    CHECK_EQ(got, kBytes);
    CHECK(rank.delivered == expected);
  }
  CHECK(in_place > 900 && copied > 900 && of_a_chunk > 30);
}

TEST(an_owner_that_cannot_read_on_asks_for_parts_from_there) {
  constexpr uint64_t kBytes = 1'000'000;
  const Shape shape = sum_of(2 * kBytes / 4);
  Array own = numbers(0, Dtype::float32, kBytes / 4), theirs = numbers(1, Dtype::float32, kBytes / 4);
  const Array expected = reference(0, 2, sum_of(kBytes / 4));
  Alone rank;
  rank.denied_from = 4;
  rank.owner.open_local(0, shape, kBytes, own.data(), own.data());
  rank.owner.open(1, 0, exposing(shape, kBytes, theirs));
  rank.run();
  CHECK_EQ(rank.parts_from % kChunkBytes, uint64_t{0});
  CHECK(rank.parts_from > 0 && rank.parts_from < kBytes);
  for (uint64_t at = rank.parts_from; at < kBytes;) {
    const WireHeader part = frame_of(FrameKind::part, 0, at, std::min<uint64_t>(kChunkBytes, kBytes - at));
    const std::span<std::byte> into = rank.owner.room(1, part);
    std::memcpy(into.data(), theirs.data() + at, part.bytes);
    rank.owner.took(1, part);
    at += part.bytes;
  }
  CHECK(own == expected);
  // The other rank reads the first results, and is sent the rest, which it cannot read.
  OutFrame frame;
  CHECK(rank.owner.next(1, &frame));
  CHECK(static_cast<FrameKind>(frame.header.kind) == FrameKind::expose);
  CHECK_THROWS(frame, rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, kBytes + 1, 0)));
  rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, kChunkBytes, 0));
  CHECK_THROWS(frame, rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, kChunkBytes, 0)));
  CHECK_THROWS(frame, rank.owner.took_unreadable(1, frame_of(FrameKind::unreadable, 0, 0, 0)));
  rank.owner.took_unreadable(1, frame_of(FrameKind::unreadable, 0, kChunkBytes, 0));
  uint64_t at = kChunkBytes;
  while (rank.owner.next(1, &frame)) {
    CHECK(static_cast<FrameKind>(frame.header.kind) == FrameKind::result);
    CHECK(std::memcmp(frame.data, expected.data() + at, frame.header.bytes) == 0);
    CHECK(frame.data != own.data() + at);  // the caller may have its array back before this one is sent
    at += frame.header.bytes;
  }
  CHECK_EQ(at, kBytes);
  CHECK_EQ(rank.times_served, uint64_t{1});
}

TEST(an_owner_that_exposes_nothing_asks_for_parts_and_reads_nothing) {
  constexpr uint64_t kBytes = 4'000'000;
  const Shape shape = sum_of(2 * kBytes / 4);
  Array own = numbers(0, Dtype::float32, kBytes / 4), theirs = numbers(1, Dtype::float32, kBytes / 4);
  for (const bool opened_first : {false, true}) {
    Alone rank;
    if (opened_first) rank.owner.open(1, 0, exposing(shape, kBytes, theirs));
    rank.owner.open_local(0, shape, kBytes, own.data());
    if (!opened_first) rank.owner.open(1, 0, exposing(shape, kBytes, theirs));
    CHECK_EQ(rank.times_read, uint64_t{0});
    CHECK_EQ(rank.parts_from, uint64_t{0});
    CHECK_EQ(rank.owner.reduced_bytes(), uint64_t{0});
    const WireHeader part = frame_of(FrameKind::part, 0, 0, kChunkBytes);
    std::memcpy(rank.owner.room(1, part).data(), theirs.data(), kChunkBytes);
    rank.owner.took(1, part);
    CHECK_EQ(rank.owner.reduced_bytes(), uint64_t{2 * kChunkBytes});
  }
}

// A piece of each is no more than a chunk there.
TEST(an_owner_of_many_ranks_reads_no_more_than_a_turn_either) {
  constexpr uint32_t kWorld = 129;
  constexpr uint64_t kBytes = 64 << 10;
  const Shape shape = sum_of(kWorld * kBytes / 4);
  Array own(kBytes);
  const Array theirs(kBytes);
  Alone rank(kWorld);
  for (uint32_t other = 1; other < kWorld; ++other) rank.owner.open(other, 0, exposing(shape, kBytes, theirs));
  rank.owner.open_local(0, shape, kBytes, own.data(), own.data());
  int turns = 0;
  for (uint64_t before = 0; std::exchange(rank.again, false); ++turns) {
    rank.owner.go_on();
    CHECK(rank.owner.reduced_bytes() - before <= 2 << 20);
    before = rank.owner.reduced_bytes();
  }
  CHECK(turns >= 6);
  CHECK_EQ(rank.owner.reduced_bytes(), kWorld * kBytes);
}

// Of a turn's results the others are told when there are enough of them: or when no more will be read.
TEST(results_that_were_held_back_are_told_of_when_the_next_piece_cannot_be_read) {
  constexpr uint32_t kWorld = 9;
  constexpr uint64_t kBytes = 1'000'000;
  const Shape shape = sum_of(kWorld * kBytes / 4);
  Array own(kBytes);
  const Array theirs(kBytes);
  Alone rank(kWorld);
  for (uint32_t other = 1; other < kWorld; ++other) rank.owner.open(other, 0, exposing(shape, kBytes, theirs));
  rank.owner.open_local(0, shape, kBytes, own.data(), own.data());
  rank.again = false;
  rank.owner.go_on();
  OutFrame frame;
  for (uint32_t other = 1; other < kWorld; ++other) CHECK(!rank.owner.next(other, &frame));
  CHECK(rank.again && rank.owner.reduced_bytes() > 0);
  rank.denied_from = rank.times_read + 1;
  rank.has_results.assign(kWorld, false);
  rank.run();
  CHECK_EQ(rank.parts_from, rank.owner.reduced_bytes() / kWorld);
  for (uint32_t other = 1; other < kWorld; ++other) CHECK(rank.has_results[other] && rank.owner.next(other, &frame));
}

TEST(an_array_is_served_when_the_last_has_read_it_and_not_before) {
  constexpr uint64_t kBytes = 300'000;
  const Shape shape = sum_of(2 * kBytes / 4);
  Array own = numbers(0, Dtype::float32, kBytes / 4), theirs = numbers(1, Dtype::float32, kBytes / 4);
  Alone rank;
  rank.owner.open(1, 0, exposing(shape, kBytes, theirs));
  rank.owner.open_local(0, shape, kBytes, own.data(), own.data());
  rank.run();
  OutFrame frame;
  uint64_t shown = 0;
  while (rank.owner.next(1, &frame)) {
    ExposedShare exposed;
    std::memcpy(&exposed, frame.data, sizeof exposed);
    CHECK_EQ(exposed.address, reinterpret_cast<uintptr_t>(own.data()) + shown);
    shown += exposed.bytes;
  }
  CHECK_EQ(shown, kBytes);
  uint64_t bytes, of;
  CHECK(rank.owner.least_advanced(0, &bytes, &of) == std::vector<uint32_t>{1});
  CHECK_EQ(rank.times_served, uint64_t{0});
  rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, kBytes, 0));
  CHECK_EQ(rank.times_served, uint64_t{1});
  CHECK_EQ(rank.owner.operations(), uint64_t{1});
}

TEST(numbers_are_exposed_only_where_they_are_reduced_by_a_rank) {
  const Array array(64);
  for (const Collective kind : {Collective::all_gather, Collective::all_to_all, Collective::broadcast}) {
    Shape shape = sum_of(16);
    shape.collective = kind;
    CHECK_THROWS(frame, shape_from(exposing(shape, 64, array)));
  }
  Shape rounded = sum_of(16);
  rounded.wire = Dtype::bfloat16;
  CHECK_THROWS(frame, shape_from(exposing(rounded, 32, array)));
  CHECK_THROWS(frame, shape_from(exposing(sum_of(16), 0, array)));
  ChunkBufferPool blocks;
  Alone host;
  ShareOwner reducer(blocks, host, 2, ShareOwner::kNoRank, kChunkBytes, 1 << 20);
  CHECK_THROWS(frame, reducer.open(0, 0, exposing(sum_of(16), 64, array)));
  // What is read is not sent as well.
  Alone rank;
  rank.owner.open(1, 0, exposing(sum_of(16), 64, array));
  CHECK_THROWS(frame, rank.owner.room(1, frame_of(FrameKind::part, 0, 0, 64)));
}

// However far the others run ahead of the root: more operations than a peer may have open here.
TEST(broadcasts_that_were_begun_before_their_root_came_leave_nothing_behind) {
  constexpr uint64_t kAhead = 70'000;
  const Shape shape{1, Dtype::float32, Dtype::float32, Op::sum, 0, Collective::one_host_broadcast, 0};
  const Shape other{2, Dtype::float32, Dtype::float32, Op::sum, 0, Collective::one_host_broadcast, 0};
  const Shape sum{1, Dtype::float32, Dtype::float32, Op::sum, 0, Collective::all_reduce, 0};
  Alone rank(2, 1);
  const auto announce = [&](uint64_t number, const Shape& what) {
    rank.owner.open(0, number, open_of(what, what.wire_bytes()));
  };
  for (uint64_t number = 0; number < kAhead; ++number) rank.owner.owns_none(number, shape);
  for (uint64_t number = 0; number < kAhead; ++number) announce(number, shape);
  CHECK_EQ(rank.said, std::string());
  // Nor do announcements of what is not a broadcast here and long forgotten.
  for (uint64_t number = 0; number < kAhead; ++number) rank.owner.owns_none(kAhead + number, sum);
  for (uint64_t number = 0; number < kAhead - 2000; ++number) announce(kAhead + number, shape);
  CHECK_EQ(rank.said, std::string());
  // A root ahead of this rank is remembered, and one that means something else is noticed, early or late.
  announce(2 * kAhead, shape);
  rank.owner.owns_none(2 * kAhead, shape);
  CHECK_EQ(rank.said, std::string());
  announce(2 * kAhead + 1, other);
  rank.owner.owns_none(2 * kAhead + 1, shape);
  CHECK(rank.said.find("disagree at operation 140001") != std::string::npos);
  for (uint64_t number = 2; number < kAhead; ++number) rank.owner.owns_none(2 * kAhead + number, shape);
  announce(2 * kAhead + 2, other);
  CHECK(rank.said.find("disagree at operation 140002") != std::string::npos);
}

// In the middle of a share, with more of it exposed already: what was read stays, and the rest is sent.
TEST(what_a_rank_cannot_read_is_sent_from_there_on) {
  constexpr uint64_t kBytes = 2 * kExposedBytes + 5000;
  Array numbers(kBytes);
  const Shape shape{kBytes, Dtype::uint8, Dtype::uint8, Op::sum, 0, Collective::all_gather, 0};
  Alone rank(2, 0);
  rank.owner.send_local(0, shape, {{numbers.data(), kBytes}, {numbers.data(), kBytes}});
  Open open = open_of(shape, kBytes);
  open.reads = 1;
  rank.owner.open(1, 0, open);
  OutFrame frame;
  const auto unreadable = [&](uint64_t from) {
    rank.owner.took_unreadable(1, frame_of(FrameKind::unreadable, 0, from, 0));
  };
  CHECK_THROWS(frame, unreadable(0));  // nothing is exposed yet
  for (int piece = 0; piece < 3; ++piece) {
    CHECK(rank.owner.next(1, &frame));
    CHECK(static_cast<FrameKind>(frame.header.kind) == FrameKind::expose);
  }
  CHECK(!rank.owner.next(1, &frame));
  rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, kExposedBytes, 0));
  CHECK_THROWS(frame, unreadable(0));
  unreadable(kExposedBytes);
  CHECK_THROWS(frame, unreadable(kExposedBytes));
  uint64_t at = kExposedBytes;
  while (rank.owner.next(1, &frame)) {
    CHECK(static_cast<FrameKind>(frame.header.kind) == FrameKind::result);
    CHECK_EQ(frame.header.offset, at);
    CHECK(frame.data == numbers.data() + at);
    at += frame.header.bytes;
    rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, at, 0));
  }
  CHECK_EQ(at, kBytes);
  CHECK_EQ(rank.owner.operations(), uint64_t{1});
}

// Reports wait in the queue that numbers fill: two ranks that did not wait for each other sent by turns.
TEST(a_rank_sends_no_more_than_a_window_ahead_of_what_it_gets_itself) {
  constexpr uint64_t kBytes = 8 << 20, kWindow = 1 << 20;
  Array numbers(kBytes);
  const Shape shape{2 * kBytes, Dtype::uint8, Dtype::uint8, Op::sum, 0, Collective::all_gather, 0};
  Alone rank;
  rank.arrived = 0;
  rank.owner.send_local(0, shape, {{numbers.data(), kBytes}, {numbers.data(), kBytes}});
  rank.owner.open(1, 0, open_of(shape, kBytes));
  uint64_t at = 0;
  const auto send = [&] {
    for (OutFrame frame; rank.owner.next(1, &frame);) {
      at += frame.header.bytes;
      rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, at, 0));
    }
  };
  for (const double arrived : {0.0, 0.25, 0.5}) {
    rank.arrived = arrived;
    send();
    const auto got = static_cast<uint64_t>(arrived * kBytes);
    CHECK(at > got + kWindow / 2 && at <= got + kWindow + kChunkBytes);
  }
  rank.arrived = 1;
  send();
  CHECK_EQ(at, kBytes);
  CHECK_EQ(rank.times_served, uint64_t{1});
}

// A window that those who came first had filled was a queue in front of the one that came last, whose link was idle.
TEST(a_rank_that_opens_last_finds_its_part_of_the_window_free) {
  constexpr uint64_t kBytes = 1 << 20, kWindow = 1 << 20;
  Array numbers(kBytes);
  const Shape shape{4 * kBytes, Dtype::uint8, Dtype::uint8, Op::sum, 0, Collective::all_gather, 0};
  Alone rank(4);
  rank.owner.send_local(0, shape, std::vector<Segment>(4, {numbers.data(), kBytes}));
  uint64_t sent[4] = {};
  const auto send = [&] {
    OutFrame frame;
    for (bool any = true; std::exchange(any, false);) {
      for (uint32_t to = 1; to < 4; ++to) {
        if (!rank.owner.next(to, &frame)) continue;
        sent[to] += frame.header.bytes;
        any = true;
      }
    }
  };
  for (uint32_t to = 1; to < 4; ++to) {
    rank.owner.open(to, 0, open_of(shape, kBytes));
    send();
    for (uint32_t other = 1; other <= to; ++other) {
      CHECK(sent[other] > kWindow / 4 && sent[other] <= kWindow / 3 + kChunkBytes);
    }
  }
}

// Its link would be idle until its open has come, behind what the others send each other.
TEST(a_rank_that_is_late_is_sent_the_beginning_of_one_operation) {
  constexpr uint64_t kBytes = 1 << 20;
  Array numbers(kBytes);
  const Shape shape{2 * kBytes, Dtype::uint8, Dtype::uint8, Op::sum, 0, Collective::all_gather, 0};
  for (const bool eager : {false, true}) {
    Alone rank;
    rank.eager = eager;
    for (const uint64_t number : {0, 1}) {
      rank.owner.send_local(number, shape, {{numbers.data(), kBytes}, {numbers.data(), kBytes}});
    }
    CHECK_EQ(rank.has_results[1], eager);
    uint64_t sent[2] = {};
    const auto send = [&] {
      for (OutFrame frame; rank.owner.next(1, &frame);) {
        CHECK_EQ(frame.header.offset, sent[frame.header.operation]);
        sent[frame.header.operation] += frame.header.bytes;
      }
    };
    send();
    CHECK(sent[0] == (eager ? kEagerBytes : 0) && sent[1] == 0);
    CHECK_THROWS(frame, rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, 100, 0)));
    rank.owner.open(1, 0, open_of(shape, kBytes));
    send();
    CHECK(sent[0] > kBytes / 2 && sent[1] <= kEagerBytes);
    rank.owner.took_taken(1, frame_of(FrameKind::taken, 0, sent[0], 0));
    send();
    CHECK(sent[0] == kBytes && sent[1] == (eager ? kEagerBytes : 0));
  }
}

// Whatever the ranks' pieces are: results go back before the first chunk is there, and are those of whole chunks.
TEST(the_first_bytes_of_a_share_are_reduced_before_its_first_chunk_is_there) {
  constexpr uint64_t kBytes = 2 * kChunkBytes + 1024;
  const Shape shape = sum_of(kBytes / 4);
  const Array expected = reference(0, 2, shape);
  for (const Collective collective : {Collective::all_reduce, Collective::reduce_scatter}) {
    Shape asked = shape;
    asked.collective = collective;
    Array own = numbers(0, Dtype::float32, kBytes / 4), theirs = numbers(1, Dtype::float32, kBytes / 4);
    Alone rank(2);
    rank.owner.open_local(0, asked, kBytes, own.data());
    rank.owner.open(1, 0, open_of(asked, kBytes));
    uint64_t at = 0, back = 0;
    for (const uint64_t bytes : {uint64_t{1000}, kFirstBytes - 1000, uint64_t{2 * kFirstBytes}, uint64_t{kFirstBytes},
                                 uint64_t{kChunkBytes}, uint64_t{1024}}) {
      const WireHeader part = frame_of(FrameKind::part, 0, at, bytes);
      std::memcpy(rank.owner.room(1, part).data(), theirs.data() + at, bytes);
      rank.owner.took(1, part);
      at += bytes;
      for (OutFrame frame; rank.owner.next(1, &frame);) {
        if (collective == Collective::reduce_scatter) {
          CHECK(static_cast<FrameKind>(frame.header.kind) == FrameKind::credit);
          back = frame.header.offset;
          continue;
        }
        CHECK_EQ(frame.header.offset, back);
        CHECK(std::memcmp(frame.data, expected.data() + back, frame.header.bytes) == 0);
        back += frame.header.bytes;
      }
      CHECK_EQ(back, at == 1000 ? 0 : at);
    }
    CHECK(rank.delivered == expected);
    CHECK_EQ(rank.owner.operations(), uint64_t{1});
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
