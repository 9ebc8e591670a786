// The sender's side of an all-reduce, without a group around it: what goes first, and how far it runs ahead.

#include "collectives/sharded_allreduce.h"

#include <numeric>

#include "tests/collectives/ranks.h"
#include "tests/collectives/readers.h"

namespace geartrain {
namespace {

// A rank, without a share unless asked for one, all of whose owners take one frame whenever there may be one for them.
class Sender final : public ShardedAllreduce::Host {
 public:
  explicit Sender(uint32_t owners, bool owns = false)
      : shares(blocks_, *this, shares_of(owners, owns), 0, 16 << 20), sent(owners) {}
  void open(uint32_t, uint64_t, const Open&) override {}
  void parts_for(uint32_t owner) override {
    ++asked;
    OutFrame frame;
    if (!shares.next(owner, &frame)) return;
    frames.push_back(frame.header.bytes);
    sent[owner - 1] += frame.header.bytes;
  }
  void taken(uint32_t, uint64_t, uint64_t bytes) override { has = bytes; }
  void adopt_soon() override { adopts = true; }
  void completed(const std::shared_ptr<Work>&) override {}

 private:
  static std::vector<double> shares_of(uint32_t owners, bool owns) {
    std::vector<double> out(owners + 1, 1.0 / (owners + owns));
    if (!owns) out[0] = 0;
    return out;
  }
  ChunkBufferPool blocks_;

 public:
  ShardedAllreduce shares;
  std::vector<uint32_t> frames;
  std::vector<uint64_t> sent;
  uint64_t has = 0;  // reported
  uint64_t asked = 0;
  bool adopts = false;
};

// An owner can reduce nothing before all ranks have sent it something: whole chunks for the owners before it, of each
// rank, would be what the links wait for at the beginning.
TEST(every_owner_gets_a_little_before_any_gets_a_chunk) {
  constexpr uint32_t kOwners = 8;
  const Shape shape = sum_of(kOwners << 16);
  Array array(shape.wire_bytes());
  Sender rank(kOwners);
  rank.shares.begin(std::make_shared<Work>(shape, array.data(), array.data(), 60));
  rank.shares.start();
  CHECK(rank.frames.size() >= 2 * kOwners);
  for (uint32_t i = 0; i < rank.frames.size(); ++i) {
    CHECK_EQ(uint64_t{rank.frames[i]}, i < kOwners ? kFirstBytes : kChunkBytes - kFirstBytes);
  }
  for (const uint64_t bytes : rank.sent) CHECK_EQ(bytes, uint64_t{kChunkBytes});
}

// What is under way at the end is what an operation takes longer than its bytes.
TEST(the_window_begins_with_two_chunks_for_each_of_eight_owners) {
  CHECK_EQ(Sender(2).shares.window().bytes(), uint64_t{256 << 10});
  CHECK_EQ(Sender(8).shares.window().bytes(), uint64_t{256 << 10});
  CHECK_EQ(Sender(32).shares.window().bytes(), uint64_t{512 << 10});
}

// An all-gather of two ranks, of which the other one is the first to begin.
class Late {
 public:
  explicit Late(uint64_t bytes)
      : rank(1, true),
        shape{2 * bytes, Dtype::uint8, Dtype::uint8, Op::sum, 0, Collective::all_gather, 0},
        own(bytes),
        theirs(bytes),
        there(numbers(1, Dtype::uint8, bytes)) {}
  void get(uint64_t at, uint64_t bytes, uint64_t operation = 0) {
    const WireHeader result = frame_of(FrameKind::result, operation, at, bytes);
    const std::span<std::byte> into = rank.shares.room(1, result);
    std::memcpy(into.data(), there.data() + at, bytes);
    rank.shares.took(1, result, into.first(bytes));
  }
  void begin() {
    const uint64_t bytes = own.size();
    rank.shares.begin(std::make_shared<Work>(shape, std::vector<Segment>{{own.data(), bytes}},
                                             std::vector<Segment>{{own.data(), bytes}, {theirs.data(), bytes}}, 60));
  }
  Sender rank;
  const Shape shape;
  Array own, theirs, there;
};

TEST(what_comes_before_an_operation_is_begun_is_kept_until_it_is_opened) {
  constexpr uint64_t kBytes = 100'000;
  Late late(kBytes);
  late.get(0, kChunkBytes);
  late.get(kChunkBytes, 100);
  CHECK_THROWS(frame, late.get(kChunkBytes, 100));                // not the next
  CHECK_THROWS(frame, late.get(kChunkBytes + 100, kChunkBytes));  // across a chunk
  CHECK_THROWS(frame, late.get(0, 100, 1));                       // of another operation
  late.get(kChunkBytes + 100, kChunkBytes - 100);
  late.begin();
  late.get(2 * kChunkBytes, 100);  // the open is not on its way yet
  CHECK(!late.rank.adopts && late.rank.has == 0);
  late.rank.shares.announce(1);
  CHECK(late.rank.adopts);
  late.rank.shares.adopt_all();
  CHECK_EQ(late.rank.has, 2 * uint64_t{kChunkBytes} + 100);
  late.get(late.rank.has, kChunkBytes - 100);
  for (uint64_t at = late.rank.has; at < kBytes; at = late.rank.has)
    late.get(at, std::min<uint64_t>(kChunkBytes, kBytes - at));
  CHECK(late.theirs == late.there);
}

TEST(what_comes_too_early_is_bounded) {
  Late late(1 << 20);
  for (uint64_t at = 0; at < kEagerBytes; at += kChunkBytes) late.get(at, kChunkBytes);
  CHECK_THROWS(frame, late.get(kEagerBytes, 1));
  late.begin();
  late.rank.shares.announce(1);
  late.get(kEagerBytes, kChunkBytes);  // before adopt_all()
  CHECK_EQ(late.rank.has, kEagerBytes + kChunkBytes);
  CHECK(std::memcmp(late.theirs.data(), late.there.data(), late.rank.has) == 0);
}

// Its owner is told by the open how much is expected, and ends the group.
TEST(what_came_early_and_is_more_than_expected_goes_nowhere) {
  Late late(100);
  late.there.resize(200);
  late.get(0, 200);
  late.begin();
  late.rank.shares.announce(1);
  late.rank.shares.adopt_all();
  CHECK_EQ(late.rank.has, uint64_t{0});
  CHECK(late.theirs == Array(100));
}

// The window waits for the share that is furthest behind: what comes of the others leaves it where it is.
TEST(owners_are_asked_for_more_when_the_window_moves) {
  constexpr uint32_t kOwners = 4;
  const Shape shape = sum_of(1 << 20);
  Array array(shape.wire_bytes());
  Sender rank(kOwners);
  const auto work = std::make_shared<Work>(shape, array.data(), array.data(), 60);
  rank.shares.begin(work);
  rank.shares.start();
  for (uint32_t i = 0; i < 40; ++i) rank.parts_for(1 + i % kOwners);
  const auto returns = [&](uint32_t owner) {
    const WireHeader result = frame_of(FrameKind::result, work->number, 0, kFirstBytes);
    const std::span<std::byte> into = rank.shares.room(owner, result);
    rank.shares.took(owner, result, into);
  };
  const uint64_t before = rank.asked;
  for (uint32_t owner = 1; owner < kOwners; ++owner) returns(owner);
  CHECK_EQ(rank.asked, before + kOwners);  // once: nobody was asked at the place where the window is
  returns(kOwners);
  CHECK_EQ(rank.asked, before + 2 * kOwners);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
