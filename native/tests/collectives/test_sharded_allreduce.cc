// The sender's side of an all-reduce, without a group around it: what goes first, and how far it runs ahead.

#include "collectives/sharded_allreduce.h"

#include <numeric>

#include "tests/collectives/ranks.h"
#include "tests/collectives/readers.h"

namespace geartrain {
namespace {

// A rank without a share, all of whose owners take one frame whenever there may be one for them.
class Sender final : public ShardedAllreduce::Host {
 public:
  explicit Sender(uint32_t owners) : shares(blocks_, *this, shares_of(owners), 0, 16 << 20), sent(owners) {}
  void open(uint32_t, uint64_t, const Open&) override {}
  void parts_for(uint32_t owner) override {
    OutFrame frame;
    if (!shares.next(owner, &frame)) return;
    frames.push_back(frame.header.bytes);
    sent[owner - 1] += frame.header.bytes;
  }
  void taken(uint32_t, uint64_t, uint64_t) override {}
  void completed(const std::shared_ptr<Work>&) override {}

 private:
  static std::vector<double> shares_of(uint32_t owners) {
    std::vector<double> out(owners + 1, 1.0 / owners);
    out[0] = 0;
    return out;
  }
  ChunkBufferPool blocks_;

 public:
  ShardedAllreduce shares;
  std::vector<uint32_t> frames;
  std::vector<uint64_t> sent;
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

}  // namespace
}  // namespace geartrain

RUN_TESTS()
