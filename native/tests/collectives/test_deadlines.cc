// Deadlines of operations: who is named when one passes.

#include <atomic>

#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

constexpr uint64_t kSmall = 100, kLarge = 100'000;  // elements: of one owner; divided

std::shared_ptr<Work> start(Group& group, Array* array, double timeout_s) {
  const Shape shape{array->size() / 4, Dtype::float32, Dtype::float32, Op::sum, 0};
  return group.all_reduce(shape, array->data(), array->data(), timeout_s);
}

// Ranks other than the first wait in an operation for rank 1, which does not come; the first rank is an operation
// ahead, and the deadline of that one is the first to pass.
TEST(a_rank_that_is_held_up_is_not_to_blame_for_a_later_operation) {
  for (const bool ring : {true, false}) {
    for (const uint64_t count : {kSmall, kLarge}) {
      for (const uint64_t before : {0, 1, 2, 3}) {  // small arrays have another owner each
        std::atomic<int> waiting{3}, begun{0};
        run_ranks({.world = 4, .ring = ring}, [&](uint32_t rank, Group& group) {
          for (uint64_t i = 0; i < before; ++i) {
            Array array = numbers(rank, Dtype::float32, kSmall);
            CHECK(start(group, &array, 60)->wait(soon(60)));
          }
          if (rank == 1) {
            while (waiting > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return;
          }
          Array first = numbers(rank, Dtype::float32, count), second = first;
          if (rank == 0) {
            while (begun < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          const auto work = start(group, &first, 120);
          ++begun;
          const auto ahead = rank == 0 ? start(group, &second, 0.4 * testing::patience()) : nullptr;
          CHECK(work->wait(soon(60)));
          CHECK(work->fault().kind == FaultKind::timed_out);
          CHECK(work->fault().members == std::vector<uint32_t>{1});
          CHECK(ahead == nullptr || ahead->wait(soon(1)));
          --waiting;
        });
      }
    }
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
