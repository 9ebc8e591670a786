// Numbers that are read from the ranks' memory and not sent: right to the bit, and what becomes of them when a rank
// dies, stops or may not read.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "collectives/sharded_allreduce.h"
#include "collectives/share_owner.h"
#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

constexpr uint64_t kLarge = 400'000;   // float32
constexpr uint64_t kLeast = 64 << 10;  // bytes

Shape sum_of(uint64_t count) {
  return {count, Dtype::float32, Dtype::float32, Op::sum, 0};
}

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

// Which ranks read, and how small an array.
struct Readers {
  uint64_t least_bytes = 1;
  std::vector<uint32_t> not_reading = {};
  bool unequal_least = false;
};

// As run_ranks, of groups on one host.
void run_readers(uint32_t world, const Readers& readers, const std::function<void(uint32_t rank, Group& group)>& body,
                 std::vector<double> shares = {}) {
  Crew crew{.world = world, .shares = std::move(shares), .shm = true};
  crew.options = [&](uint32_t rank, GroupOptions* options) {
    options->least_exposed_bytes = readers.unequal_least && rank % 2 == 1 ? ~uint64_t{0} : readers.least_bytes;
    const auto& none = readers.not_reading;
    options->cross_memory = std::find(none.begin(), none.end(), rank) == none.end();
  };
  run_ranks(crew, body);
}

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
  const auto work = group.run(shape, segments, {{out.data(), count + rank}}, 60);
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

// --- an owner without a group around it -----------------------------------------------------------------------------

class Alone final : public ShareOwner::Host {
 public:
  explicit Alone(uint32_t world = 2)
      : owner(blocks_, *this, world, 0, chunk_bytes(world), 1 << 20), has_results(world) {}
  void results_for(uint32_t rank) override { has_results[rank] = true; }
  void deliver(uint64_t, uint64_t, std::span<const std::byte>) override {}
  void served(uint64_t) override { ++times_served; }
  void disagree(const std::string&, std::vector<uint32_t>) override {}
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
  bool again = false;

 private:
  ChunkBufferPool blocks_;

 public:
  ShareOwner owner;
  std::vector<bool> has_results;  // by rank: told of them
};

Open exposing(const Shape& shape, uint64_t bytes, const Array& array) {
  Open open = open_of(shape, bytes, 0);
  open.reads = 1;
  open.address = reinterpret_cast<uintptr_t>(array.data());
  return open;
}

TEST(an_owner_that_cannot_read_on_asks_for_parts_from_there) {
  constexpr uint64_t kBytes = 1'000'000;
  const Shape shape = sum_of(2 * kBytes / 4);
  Array own = numbers(0, Dtype::float32, kBytes / 4), theirs = numbers(1, Dtype::float32, kBytes / 4);
  const Array expected = reference(0, 2, sum_of(kBytes / 4));
  Alone rank;
  rank.denied_from = 4;
  rank.owner.open_local(0, shape, kBytes, own.data(), 0, own.data());
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
    rank.owner.open_local(0, shape, kBytes, own.data(), 0);
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
  rank.owner.open_local(0, shape, kBytes, own.data(), 0, own.data());
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
  rank.owner.open_local(0, shape, kBytes, own.data(), 0, own.data());
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
  rank.owner.open_local(0, shape, kBytes, own.data(), 0, own.data());
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

// --- the last test: nothing is read from another rank's memory after it ---------------------------------------------

// From here on in this whole process.
void forbid_reading_across_processes() {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const struct sock_fprog program{4, filter};
  CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

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
