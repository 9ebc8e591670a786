// Numbers that are read from the ranks' memory and not sent, when a rank dies, stops, does not come or aborts.

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "tests/collectives/ranks.h"
#include "tests/collectives/readers.h"

namespace geartrain {
namespace {

constexpr uint64_t kLarge = 400'000;   // float32
constexpr uint64_t kLeast = 64 << 10;  // bytes

// --- with a rank in a process of its own: first, as long as this process has one thread ------------------------------

void say(int to, const std::string& text) {
  const auto bytes = static_cast<uint32_t>(text.size());
  CHECK_EQ(::write(to, &bytes, sizeof bytes), static_cast<ssize_t>(sizeof bytes));
  CHECK_EQ(::write(to, text.data(), bytes), static_cast<ssize_t>(bytes));
}

std::string hear(int from) {
  uint32_t bytes = 0;
  if (::read(from, &bytes, sizeof bytes) != static_cast<ssize_t>(sizeof bytes)) return "nothing";
  std::string text(bytes, 0);
  for (size_t got = 0; got < bytes;) {
    const ssize_t n = ::read(from, text.data() + got, bytes - got);
    if (n <= 0) return "nothing";
    got += static_cast<size_t>(n);
  }
  return text;
}

// Rank 1 of 2; this process is rank 0. The child ends with what `body` returns.
struct Other {
  int to_child[2], to_parent[2];
  pid_t pid = 0;
  std::unique_ptr<Group> group;

  explicit Other(const std::function<int(Group& group, int to, int from)>& body) {
    CHECK(::pipe(to_child) == 0 && ::pipe(to_parent) == 0);
    pid = ::fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      int status = 3;
      try {
        const auto made = join(1, to_parent[1], to_child[0]);
        status = body(*made, to_parent[1], to_child[0]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank 1: %s\n", error.what());
      }
      ::_exit(status);
    }
    group = join(0, to_child[1], to_parent[0]);
  }
  ~Other() {
    end();
    for (const int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(fd);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;

  static std::unique_ptr<Group> join(uint32_t rank, int to, int from) {
    GroupOptions options = options_of({.world = 2, .shm = true}, rank, {});
    options.least_exposed_bytes = kLeast;
    auto made = std::make_unique<Group>(options);
    say(to, made->address());
    const std::string other = hear(from);
    made->connect(rank == 0 ? std::vector{made->address(), other} : std::vector{other, made->address()}, soon(60));
    return made;
  }
  // Its status once it has ended: kills it where it has not.
  int end() {
    if (pid == 0) return 0;
    ::kill(pid, SIGKILL);
    return wait();
  }
  int wait() {
    int status = 0;
    CHECK_EQ(::waitpid(pid, &status, 0), pid);
    pid = 0;
    return status;
  }
};

TEST(a_rank_that_is_killed_after_it_has_exposed_its_numbers_is_named) {
  Other other([](Group& group, int to, int) {
    Array array = numbers(1, Dtype::float32, kLarge);
    const auto work = group.all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
    group.counts();  // the open is on its way
    say(to, "begun");
    ::pause();
    return 0;
  });
  CHECK_EQ(hear(other.to_parent[0]), std::string("begun"));
  other.end();
  Array array = numbers(0, Dtype::float32, kLarge);
  const auto work = other.group->all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
  CHECK(work->wait(soon(60)));
  CHECK(work->fault().kind == FaultKind::rank_lost);
  CHECK(work->fault().members == std::vector<uint32_t>{1});
}

// At any moment: this rank fails with its name, or has all of the sum.
TEST(a_rank_that_is_killed_at_any_moment_leaves_a_fault_or_the_whole_sum) {
  std::mt19937_64 random(5);
  const Array expected = reference(0, 2, sum_of(kLarge));
  uint32_t failed = 0;
  for (int round = 0; round < 5; ++round) {
    Other other([](Group& group, int to, int) {
      say(to, "ready");
      for (;;) {
        Array array = numbers(1, Dtype::float32, kLarge);
        group.all_reduce(sum_of(kLarge), array.data(), array.data(), 60)->wait(soon(60));
      }
      return 0;
    });
    CHECK_EQ(hear(other.to_parent[0]), std::string("ready"));
    const uint64_t until_ns = monotonic_ns() + random() % 30'000'000;
    for (bool killed = false;;) {
      Array array = numbers(0, Dtype::float32, kLarge);
      const auto work = other.group->all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
      while (!killed && monotonic_ns() < until_ns && !work->done()) {
      }
      if (!killed && monotonic_ns() >= until_ns) killed = ::kill(other.pid, SIGKILL) == 0;
      CHECK(work->wait(soon(60)));
      if (work->fault().kind == FaultKind::none) {
        CHECK(array == expected);
        continue;
      }
      CHECK(killed);
      CHECK(work->fault().kind == FaultKind::rank_lost);
      ++failed;
      break;
    }
    other.end();
  }
  CHECK_EQ(failed, 5u);
}

// What a stopped rank was to read is its owner's again when it goes on, and holds other numbers: it fails, and neither
// adds them to its own nor takes them for a result. All comes too late for it, so its array is as it was.
TEST(a_rank_that_was_stopped_does_not_read_what_is_its_owners_again) {
  Other other([](Group& group, int to, int from) {
    Array array = numbers(1, Dtype::float32, kLarge);
    const auto work = group.all_reduce(sum_of(kLarge), array.data(), array.data(), 60);
    group.counts();
    say(to, "begun");
    ::raise(SIGSTOP);
    const bool over = work->wait(soon(60));
    say(to, "over");
    hear(from);
    if (!over || work->fault().kind == FaultKind::none) return 1;
    return array == numbers(1, Dtype::float32, kLarge) ? 0 : 2;
  });
  CHECK_EQ(hear(other.to_parent[0]), std::string("begun"));
  int status = 0;
  CHECK_EQ(::waitpid(other.pid, &status, WUNTRACED), other.pid);
  CHECK(WIFSTOPPED(status));
  void* const mapped =
      ::mmap(nullptr, kLarge * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  CHECK(mapped != MAP_FAILED);
  const auto work = other.group->all_reduce(sum_of(kLarge), mapped, mapped, 0.5);
  CHECK(work->wait(soon(60)));
  CHECK(work->fault().kind == FaultKind::timed_out);
  CHECK(work->fault().members == std::vector<uint32_t>{1});
  std::memset(mapped, 0x7B, kLarge * 4);  // 1e36 each
  CHECK_EQ(::kill(other.pid, SIGCONT), 0);
  CHECK_EQ(hear(other.to_parent[0]), std::string("over"));
  say(other.to_child[1], "end");
  status = other.wait();
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(::munmap(mapped, kLarge * 4), 0);
}

// --- ranks as threads -----------------------------------------------------------------------------------------------

TEST(a_rank_that_does_not_come_is_named_and_the_numbers_are_the_callers_again) {
  std::atomic<int> waiting{2};
  run_readers(3, {}, [&](uint32_t rank, Group& group) {
    if (rank == 2) {
      while (waiting > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    auto array = std::make_unique<Array>(numbers(rank, Dtype::float32, kLarge));
    const auto work = group.all_reduce(sum_of(kLarge), array->data(), array->data(), 4);
    CHECK(work->wait(soon(60)));
    CHECK(work->fault().kind == FaultKind::timed_out);
    if (work->fault().members != std::vector<uint32_t>{2}) {
      testing::failed(__FILE__, __LINE__, work->fault().text);
    }
    array.reset();
    --waiting;
  });
}

TEST(an_abort_in_the_middle_leaves_a_fault_or_the_whole_sum) {
  const Array expected = reference(0, 3, sum_of(kLarge));
  for (int round = 0; round < 8; ++round) {
    run_readers(3, {}, [&](uint32_t rank, Group& group) {
      auto array = std::make_unique<Array>(numbers(rank, Dtype::float32, kLarge));
      const auto work = group.all_reduce(sum_of(kLarge), array->data(), array->data(), 60);
      if (rank == 0) {
        const uint64_t until_ns = monotonic_ns() + static_cast<uint64_t>(round) * 1'000'000;
        while (monotonic_ns() < until_ns) {
        }
        group.abort("on purpose");
      }
      CHECK(work->wait(soon(60)));
      if (work->fault().kind == FaultKind::none) {
        CHECK(*array == expected);
      } else {
        CHECK(work->fault().kind == FaultKind::aborted);
      }
      array.reset();
    });
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
