// Numbers that are read from the ranks' memory and not sent: right to the bit.

#include <unistd.h>

#include <atomic>

#include "tests/collectives/ranks.h"
#include "tests/collectives/readers.h"

namespace geartrain {
namespace {

constexpr uint64_t kLarge = 400'000;   // float32
constexpr uint64_t kLeast = 64 << 10;  // bytes

void check_sums(uint32_t rank, Group& group, uint32_t world, uint64_t seed, size_t operations) {
  std::vector<Array> arrays, results;
  std::vector<std::shared_ptr<Work>> works;
  const std::vector<Shape> all = shapes(seed, operations);
  arrays.reserve(all.size());
  results.reserve(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    arrays.push_back(numbers(seed + i * 100 + rank, all[i].dtype, all[i].count));
    results.emplace_back(arrays[i].size());
    void* const out = i % 2 == 0 ? arrays[i].data() : results[i].data();
    works.push_back(group.all_reduce(all[i], arrays[i].data(), out, 60));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(works[i]->wait(soon(90)));
    const Array& found = i % 2 == 0 ? arrays[i] : results[i];
    if (works[i]->fault().kind != FaultKind::none || found != reference(seed + i * 100, world, all[i])) {
      testing::failed(__FILE__, __LINE__, all[i].text(), " on rank ", rank, " of ", world, ": ",
                      works[i]->fault().text);
    }
  }
}

// The sum of all ranks' numbers for this one.
void check_reduce_scatter(uint32_t rank, Group& group, uint32_t world, uint64_t count, bool in_place) {
  std::vector<Array> sends;
  std::vector<Segment> segments;
  for (uint32_t to = 0; to < world; ++to) sends.push_back(numbers(rank * 10 + to, Dtype::float32, count + to));
  for (Array& one : sends) segments.push_back({one.data(), one.size() / 4});
  std::vector<Array> inputs;
  std::vector<const std::byte*> at;
  for (uint32_t from = 0; from < world; ++from)
    inputs.push_back(numbers(from * 10 + rank, Dtype::float32, count + rank));
  for (const Array& one : inputs) at.push_back(one.data());
  Array expected(inputs[0].size()), apart(expected.size());
  reduce(Op::sum, Dtype::float32, at, expected.data(), count + rank);
  Shape shape = sum_of(0);
  shape.collective = Collective::reduce_scatter;
  Array& out = in_place ? sends[rank] : apart;
  const auto work = group.exchange(shape, segments, {{out.data(), count + rank}}, 60);
  CHECK(work->wait(soon(90)));
  CHECK(work->fault().kind == FaultKind::none);
  CHECK(out == expected);
}

TEST(numbers_that_are_read_add_up_as_those_that_are_sent) {
  for (const uint32_t world : {1u, 2u, 3u, 5u}) {
    run_readers(world, {}, [&](uint32_t rank, Group& group) {
      check_sums(rank, group, world, 10 * world, 12);
      for (const uint64_t count : {1, 17, 9000, 100'000}) {
        check_reduce_scatter(rank, group, world, count, false);
        check_reduce_scatter(rank, group, world, count, true);
      }
      CHECK((group.counts().read_bytes > 0) == (world > 1));
    });
  }
}

TEST(a_threshold_says_what_is_read) {
  for (const bool never : {false, true}) {
    const Crew crew{.world = 2, .shm = true, .options = [=](uint32_t, GroupOptions* options) {
                      options->least_exposed_bytes = never ? ~uint64_t{0} : kLeast;
                    }};
    run_ranks(crew, [&](uint32_t rank, Group& group) {
      for (int i = 0; i < 200; ++i) {
        const Shape shape = sum_of(kLeast / 4);
        Array array = numbers(rank, shape.dtype, shape.count);
        CHECK(group.all_reduce(shape, array.data(), array.data(), 60, true)->wait(soon(90)));
      }
      CHECK_EQ(group.counts().read_operations, never ? 0u : 200u);
    });
  }
}

TEST(of_large_arrays_nothing_goes_through_a_ring) {
  const Array expected = reference(0, 3, sum_of(kLarge));
  run_readers(3, {.least_bytes = kLeast}, [&](uint32_t rank, Group& group) {
    for (int i = 0; i < 3; ++i) {
      Array array = numbers(rank, Dtype::float32, kLarge);
      const auto work = group.all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
      CHECK(work->wait(soon(90)));
      // It is the caller's again: nobody reads it any more.
      CHECK(array == expected);
      std::fill(array.begin(), array.end(), std::byte{0xAB});
    }
    CHECK(group.counts().sent_shm < 20'000);
    // Two others' parts of its own share, and the two other shares: 4/3 of an array each time.
    const uint64_t array = kLarge * 4;
    CHECK(group.counts().read_bytes > 3 * array * 4 / 3 - 1000 && group.counts().read_bytes < 3 * array * 4 / 3 + 1000);
    // Smaller ones are sent.
    const uint64_t read = group.counts().read_bytes, sent = group.counts().sent_shm;
    Array small = numbers(rank, Dtype::float32, kLeast / 4 - 1);
    CHECK(group.all_reduce(sum_of(small.size() / 4), small.data(), small.data(), 60)->wait(soon(90)));
    CHECK_EQ(group.counts().read_bytes, read);
    CHECK(group.counts().sent_shm > sent + kLeast / 2);
  });
}

TEST(ranks_that_do_not_read_get_and_give_the_same_through_rings) {
  const auto right = [](uint32_t world) {
    return [world](uint32_t rank, Group& group) {
      check_sums(rank, group, world, 77, 10);
      check_reduce_scatter(rank, group, world, 100'000, false);
      Array array = numbers(rank, Dtype::float32, kLarge);
      const auto work = group.all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
      CHECK(work->wait(soon(90)));
      CHECK(array == reference(0, world, sum_of(kLarge)));
    };
  };
  run_readers(3, {.not_reading = {0, 1, 2}}, [&](uint32_t rank, Group& group) {
    right(3)(rank, group);
    CHECK_EQ(group.counts().read_bytes, uint64_t{0});
  });
  run_readers(3, {.not_reading = {1}}, [&](uint32_t rank, Group& group) {
    right(3)(rank, group);
    CHECK((group.counts().read_bytes == 0) == (rank == 1));
  });
  // A rank that exposes nothing reads nothing.
  run_readers(4, {.unequal_least = true}, [&](uint32_t rank, Group& group) {
    right(4)(rank, group);
    CHECK((group.counts().read_bytes == 0) == (rank % 2 == 1));
  });
  // Reduce-scatter is for ranks that all own a share.
  run_readers(3, {}, [](uint32_t rank, Group& group) { check_sums(rank, group, 3, 99, 10); }, {0.6, 0.4, 0});
}

// The last test: nothing is read from another rank's memory after it.
TEST(ranks_that_lose_the_right_to_read_in_the_middle_go_on_through_rings) {
  const Array expected = reference(0, 3, sum_of(kLarge));
  std::atomic<int> begun{0};
  run_readers(3, {}, [&](uint32_t rank, Group& group) {
    const auto runs = [&] {
      Array array = numbers(rank, Dtype::float32, kLarge);
      const auto work = group.all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
      if (rank == 0 && begun == 3) {
        ++begun;
        forbid_reading_across_processes();
      }
      CHECK(work->wait(soon(90)));
      CHECK(work->fault().kind == FaultKind::none);
      CHECK(array == expected);
    };
    runs();
    CHECK(group.counts().sent_shm < 10'000);
    ++begun;
    for (int i = 0; i < 3; ++i) runs();
    while (begun < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    runs();
    check_reduce_scatter(rank, group, 3, 50'000, true);
    CHECK(group.counts().sent_shm > kLarge);
    CHECK_EQ(group.counts().read_denied, uint64_t{2});
  });
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
