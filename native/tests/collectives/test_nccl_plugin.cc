// The network plugin for NCCL under a simulated NCCL (simulated_nccl.h). What only a GPU can show, whether NCCL chooses
// CollNet and what it gains, is not tested.

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/collectives/simulated_nccl.h"
#include "tests/support/child.h"

extern char** environ;

namespace geartrain {
namespace {

const LoadedPlugin& plugin() {
  static const LoadedPlugin loaded(GEARTRAIN_NCCL_PLUGIN_FILE);
  return loaded;
}

// As NCCL does: point-to-point messages first.
const NcclCollNet& begun() {
  ::setenv("GEARTRAIN_NCCL_HOST", "127.0.0.1", 1);
  const NcclNet& net = *plugin().net;
  const NcclCollNet& table = *plugin().collnet;
  int count = 0;
  CHECK_EQ(net.init(NcclLog::line), kNcclSuccess);
  CHECK(net.devices(&count) == kNcclSuccess && count == 1);
  CHECK_EQ(table.init(NcclLog::line), kNcclSuccess);
  CHECK(table.devices(&count) == kNcclSuccess && count == 1);
  return table;
}

constexpr std::pair<NcclDtype, Dtype> kTypes[] = {{kNcclInt8, Dtype::int8},       {kNcclUint8, Dtype::uint8},
                                                  {kNcclInt32, Dtype::int32},     {kNcclUint32, Dtype::uint32},
                                                  {kNcclInt64, Dtype::int64},     {kNcclUint64, Dtype::uint64},
                                                  {kNcclFloat16, Dtype::float16}, {kNcclFloat32, Dtype::float32},
                                                  {kNcclFloat64, Dtype::float64}, {kNcclBfloat16, Dtype::bfloat16}};
constexpr std::pair<NcclOp, Op> kHows[] = {
    {kNcclSum, Op::sum}, {kNcclProd, Op::product}, {kNcclMax, Op::max}, {kNcclMin, Op::min}};

// Slice by slice the same numbers as a whole array reduced in rank order.
Array expected(uint64_t seed, int ranks, uint64_t count, Dtype dtype, Op op) {
  return reference(seed, static_cast<uint32_t>(ranks), {count, dtype, dtype, op, 0});
}

TEST(without_its_variable_the_plugin_refuses_and_says_which) {
  ::unsetenv("GEARTRAIN_NCCL_HOST");
  CHECK(plugin().net->init(NcclLog::line) != kNcclSuccess);
  CHECK(plugin().collnet->init(NcclLog::line) != kNcclSuccess);
  CHECK(NcclLog::has("GEARTRAIN_NCCL_HOST is not set"));
  for (const char* wrong : {"nowhere", "0.0.0.0", "192.0.2.77"}) {
    ::setenv("GEARTRAIN_NCCL_HOST", wrong, 1);
    CHECK(plugin().net->init(NcclLog::line) != kNcclSuccess);
    CHECK(NcclLog::has(wrong));
  }
  ::setenv("GEARTRAIN_NCCL_HOST", "127.0.0.1", 1);
  ::setenv("GEARTRAIN_REDUCERS", "10.0.0.9:7777", 1);
  CHECK(plugin().net->init(NcclLog::line) != kNcclSuccess);
  CHECK(NcclLog::has("GEARTRAIN_REDUCERS needs"));
  ::unsetenv("GEARTRAIN_REDUCERS");
}

TEST(one_device_takes_host_memory_and_both_tables_describe_it_alike) {
  const NcclCollNet& table = begun();
  NcclProperties pairs{}, groups{};
  CHECK_EQ(plugin().net->get_properties(0, &pairs), kNcclSuccess);
  CHECK_EQ(table.get_properties(0, &groups), kNcclSuccess);
  CHECK_EQ(std::string(pairs.name), std::string(groups.name));
  CHECK_EQ(groups.memory, kNcclHostMemory);
  CHECK(groups.guid == pairs.guid && groups.speed_mbps > 0 && groups.most_receives == 1 && groups.offload == 0);
  CHECK_EQ(table.get_properties(1, &groups), kNcclInvalidArgument);
  void* region = nullptr;
  int memory = 0;
  CHECK_EQ(table.reg_mr(nullptr, &memory, sizeof memory, kNcclCudaMemory, &region), kNcclInvalidArgument);
}

TEST(a_child_forked_beside_a_thread_within_the_plugin_uses_it) {
  ::setenv("GEARTRAIN_NCCL_HOST", "127.0.0.1", 1);
  CHECK_EQ(plugin().net->init(NcclLog::line), kNcclSuccess);
  std::atomic<bool> over{false};
  std::thread asks([&] {
    NcclProperties properties{};
    while (!over) CHECK_EQ(plugin().net->get_properties(0, &properties), kNcclSuccess);
  });
  int hung = 0;
  for (int i = 0; i < 40 && hung == 0; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      NcclProperties properties{};
      ::_exit(plugin().net->get_properties(0, &properties) == kNcclSuccess ? 0 : 1);
    }
    hung += !testing::child_succeeds(child, 5);
  }
  over = true;
  asks.join();
  CHECK_EQ(hung, 0);
}

// Whatever of its parent's locks is held by a thread that it does not have: its requests are refused at once.
TEST(a_child_forked_beside_a_thread_that_tests_a_request_is_refused_at_once) {
  if (kAddressSanitizer) return;  // its own locks may be held for ever in a child that is forked beside a thread
  const NcclCollNet& table = begun();
  run_nccl(table, 1, 4096, [&](int, SimulatedRank& own) {
    const auto post = [&](void** request) {
      return table.iallreduce(own.group(), own.sent(0), own.received(0), 16, kNcclInt32, kNcclSum, own.region(),
                              own.region(), request);
    };
    std::atomic<bool> end{false};
    std::thread asks([&] {
      while (!end) {
        void* request = nullptr;
        CHECK_EQ(post(&request), kNcclSuccess);
        int bytes = 0;
        for (int done = 0; done == 0;) CHECK_EQ(table.test(request, &done, &bytes), kNcclSuccess);
      }
    });
    int wrong = 0;
    for (int i = 0; i < 200 && wrong == 0; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        void* request = nullptr;
        ::_exit(post(&request) != kNcclSuccess && request == nullptr ? 0 : 1);
      }
      wrong += !testing::child_succeeds(child, 5);
    }
    end = true;
    asks.join();
    CHECK_EQ(wrong, 0);
    own.close();
  });
}

TEST(sums_products_and_extremes_of_ten_types_are_supported_and_no_others) {
  const NcclCollNet& table = begun();
  int supported = 0, all = 0;
  for (int dtype = 0; dtype < kNcclDtypes + 2; ++dtype) {
    for (int op = 0; op < kNcclOps + 2; ++op) {
      CHECK_EQ(table.reduce_support(dtype, op, &supported), kNcclSuccess);
      all += supported;
      CHECK_EQ(supported == 1, dtype <= kNcclBfloat16 && op < kNcclOps);
    }
  }
  CHECK_EQ(all, 40);
}

TEST(slices_in_progress_are_all_reduced_to_the_bits_of_rank_order) {
  const NcclCollNet& table = begun();
  run_nccl(table, 3, 4096, [&](int rank, SimulatedRank& own) {
    uint64_t seed = 7;
    for (const auto& [theirs, ours] : kTypes) {
      for (const auto& [their_op, our_op] : kHows) {
        constexpr uint64_t kCount = 5000;  // 5000 bytes to 40,000: two slices to ten, the last one shorter
        const Array in = numbers(seed + static_cast<uint64_t>(rank), ours, kCount);
        Array out;
        CHECK_EQ(own.all_reduce(in, &out, theirs, their_op), kNcclSuccess);
        CHECK(out == expected(seed, 3, kCount, ours, our_op));
        seed += 100;
      }
    }
    own.close();
  });
}

TEST(communicators_of_one_process_do_not_wait_for_each_other) {
  const NcclCollNet& table = begun();
  std::vector<std::thread> communicators;
  for (uint64_t seed = 1000; seed < 4000; seed += 1000) {
    communicators.emplace_back([&table, seed] {
      run_nccl(table, 2, 16 << 10, [seed](int rank, SimulatedRank& own) {
        for (uint64_t round = 0; round < 3; ++round) {
          const uint64_t from = seed + 10 * round;
          const Array in = numbers(from + static_cast<uint64_t>(rank), Dtype::float32, 50'001);
          Array out;
          CHECK_EQ(own.all_reduce(in, &out, kNcclFloat32, kNcclSum), kNcclSuccess);
          CHECK(out == expected(from, 2, 50'001, Dtype::float32, Op::sum));
        }
        own.close();
      });
    });
  }
  for (std::thread& one : communicators) one.join();
}

TEST(a_request_too_many_is_put_off_and_never_blocks) {
  const NcclCollNet& table = begun();
  run_nccl(table, 2, 4096, [&](int rank, SimulatedRank& own) {
    std::vector<void*> requests;
    void* request = nullptr;
    const auto post = [&] {
      return table.iallreduce(own.group(), own.sent(0), own.received(static_cast<int>(requests.size()) % 8), 16,
                              kNcclInt32, kNcclMax, own.region(), own.region(), &request);
    };
    std::memset(own.sent(0), rank, 64);
    for (int i = 0; i < kNcclMostRequests; ++i) {
      CHECK_EQ(post(), kNcclSuccess);
      CHECK(request != nullptr);
      requests.push_back(request);
    }
    CHECK_EQ(post(), kNcclSuccess);
    CHECK(request == nullptr);
    int done = 0, bytes = 0;
    for (void* const one : requests) {
      for (done = 0; done == 0;) {
        CHECK_EQ(table.test(one, &done, &bytes), kNcclSuccess);
        std::this_thread::yield();
      }
      CHECK_EQ(bytes, 64);
    }
    CHECK_EQ(table.test(requests[0], &done, &bytes), kNcclInvalidArgument);  // over, and not asked for twice
    CHECK_EQ(std::to_integer<int>(own.received(0)[5]), 1);
    own.close();
  });
}

TEST(memory_that_was_not_registered_and_unknown_types_are_refused_at_the_door) {
  const NcclCollNet& table = begun();
  run_nccl(table, 1, 4096, [&](int, SimulatedRank& own) {
    Array other(4096);
    void* request = nullptr;
    const auto refused = [&](void* in, void* out, int count, NcclDtype dtype, NcclOp op) {
      return table.iallreduce(own.group(), in, out, count, dtype, op, own.region(), own.region(), &request) ==
                 kNcclInvalidArgument &&
             request == nullptr;
    };
    CHECK(refused(other.data(), own.received(0), 16, kNcclFloat32, kNcclSum));
    CHECK(refused(own.sent(0), own.received(7), 1025, kNcclFloat32, kNcclSum));
    CHECK(refused(own.sent(0), own.received(0), -1, kNcclFloat32, kNcclSum));
    CHECK(refused(own.sent(0), own.received(0), 16, kNcclFloat8e4m3, kNcclSum));
    CHECK(refused(own.sent(0), own.received(0), 16, kNcclFloat32, kNcclOps));
    own.close();
  });
}

TEST(handles_of_others_and_ranks_out_of_range_do_not_connect) {
  const NcclCollNet& table = begun();
  NcclHandle handle{}, foreign{};
  void *listener = nullptr, *group = nullptr;
  CHECK_EQ(table.listen(0, handle.data(), &listener), kNcclSuccess);
  void* handles[] = {foreign.data()};
  CHECK_EQ(table.connect(handles, 1, 0, listener, &group), kNcclInvalidArgument);
  handles[0] = handle.data();
  CHECK_EQ(table.connect(handles, 1, 1, listener, &group), kNcclInvalidArgument);
  CHECK(group == nullptr);
  CHECK_EQ(table.close_listen(listener), kNcclSuccess);
  CHECK_EQ(table.listen(1, handle.data(), &listener), kNcclInvalidArgument);
  CHECK_EQ(plugin().net->connect(0, foreign.data(), &group, nullptr), kNcclInvalidArgument);
}

TEST(ranks_that_ask_for_different_things_get_an_error_from_test) {
  const NcclCollNet& table = begun();
  run_nccl(table, 2, 4096, [](int rank, SimulatedRank& own) {
    const Array in = numbers(1, Dtype::int32, 64);
    Array out;
    CHECK_EQ(own.all_reduce(in, &out, kNcclInt32, rank == 0 ? kNcclSum : kNcclMax), kNcclInvalidUsage);
    own.close();
  });
}

TEST(a_reducer_sums_for_the_ranks) {
  Reducer reducer({.secret = "a secret of the job", .shm = false});
  ::setenv("GEARTRAIN_REDUCERS", reducer.address().c_str(), 1);
  ::setenv("GEARTRAIN_SECRET", "a secret of the job", 1);
  const NcclCollNet& table = begun();
  run_nccl(table, 2, 16 << 10, [](int rank, SimulatedRank& own) {
    const Array in = numbers(50 + static_cast<uint64_t>(rank), Dtype::bfloat16, 60'000);
    Array out;
    CHECK_EQ(own.all_reduce(in, &out, kNcclBfloat16, kNcclSum), kNcclSuccess);
    CHECK(out == expected(50, 2, 60'000, Dtype::bfloat16, Op::sum));
    own.close();
  });
  CHECK(NcclLog::has("over 1 reducers"));
  ::unsetenv("GEARTRAIN_REDUCERS");
  ::unsetenv("GEARTRAIN_SECRET");
  begun();
}

// A rank as a process of its own. It tells this process its handle, gets all, and all-reduces until that fails.
int rank_process(int rank, int ranks) {
  const NcclCollNet& table = begun();
  SimulatedRank own(table, rank, ranks, 4096);
  NcclHandle mine = own.listen();
  std::vector<NcclHandle> handles(static_cast<size_t>(ranks));
  if (::write(0, mine.data(), mine.size()) != static_cast<ssize_t>(mine.size())) return 10;
  const size_t bytes = handles.size() * sizeof(NcclHandle);
  if (::recv(0, handles.data(), bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) return 11;
  if (own.connect(handles) != kNcclSuccess) return 12;
  const Array in = numbers(static_cast<uint64_t>(rank), Dtype::float32, 20'000);
  const Array right = expected(0, ranks, 20'000, Dtype::float32, Op::sum);
  Array out;
  for (bool first = true;; first = false) {
    const NcclResult result = own.all_reduce(in, &out, kNcclFloat32, kNcclSum);
    if (result != kNcclSuccess) {
      own.close();
      return testing::failures != 0 ? 13 : result;
    }
    if (out != right) return 14;
    if (first && ::write(0, "r", 1) != 1) return 15;
  }
}

TEST(a_rank_that_is_killed_is_an_error_of_test_on_all_others) {
  constexpr int kRanks = 3;
  std::vector<pid_t> pids;
  std::vector<Descriptor> ends;
  for (int rank = 0; rank < kRanks; ++rank) {
    int pair[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    ends.emplace_back(pair[0]);
    const Descriptor theirs(pair[1]);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), 0);
    std::string number = std::to_string(rank), of = std::to_string(kRanks), self = "/proc/self/exe", mode = "--rank";
    char* arguments[] = {self.data(), mode.data(), number.data(), of.data(), nullptr};
    pid_t pid = 0;
    CHECK_EQ(::posix_spawn(&pid, self.c_str(), &actions, nullptr, arguments, environ), 0);
    ::posix_spawn_file_actions_destroy(&actions);
    pids.push_back(pid);
  }
  std::vector<NcclHandle> handles(kRanks);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    CHECK_EQ(::recv(ends[rank].get(), handles[rank].data(), sizeof(NcclHandle), MSG_WAITALL),
             static_cast<ssize_t>(sizeof(NcclHandle)));
  }
  const size_t bytes = handles.size() * sizeof(NcclHandle);
  for (const Descriptor& end : ends) CHECK_EQ(::write(end.get(), handles.data(), bytes), static_cast<ssize_t>(bytes));
  char reduced = 0;
  for (const Descriptor& end : ends) CHECK(::recv(end.get(), &reduced, 1, MSG_WAITALL) == 1 && reduced == 'r');
  const uint64_t killed_ns = monotonic_ns();
  ::kill(pids[1], SIGKILL);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    CHECK_EQ(::waitpid(pids[rank], &status, 0), pids[rank]);
    if (rank == 1) continue;
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), kNcclRemoteError);
  }
  CHECK(testing::within(killed_ns, 20));
}

// --- point-to-point messages -----------------------------------------------------------------------------------------

struct Pair {
  void *sending = nullptr, *receiving = nullptr;

  explicit Pair(const NcclNet& net) : net_(net) {
    NcclHandle handle{};
    void* listener = nullptr;
    CHECK_EQ(net.listen(0, handle.data(), &listener), kNcclSuccess);
    const Deadline deadline = soon();
    while ((sending == nullptr || receiving == nullptr) && !deadline.passed()) {
      if (sending == nullptr) CHECK_EQ(net.connect(0, handle.data(), &sending, nullptr), kNcclSuccess);
      if (receiving == nullptr) CHECK_EQ(net.accept(listener, &receiving, nullptr), kNcclSuccess);
    }
    CHECK(sending != nullptr && receiving != nullptr);
    CHECK_EQ(net.close_listen(listener), kNcclSuccess);
  }
  ~Pair() {
    if (sending != nullptr) net_.close_send(sending);
    if (receiving != nullptr) net_.close_recv(receiving);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

 private:
  const NcclNet& net_;
};

TEST(messages_arrive_in_order_with_their_lengths) {
  begun();
  const NcclNet& net = *plugin().net;
  Pair pair(net);
  constexpr size_t kMost = 3 << 20;
  Array out(kMost), in(kMost);
  void *sent_from = nullptr, *received_to = nullptr;
  CHECK_EQ(net.reg_mr(pair.sending, out.data(), kMost, kNcclHostMemory, &sent_from), kNcclSuccess);
  CHECK_EQ(net.reg_mr(pair.receiving, in.data(), kMost, kNcclHostMemory, &received_to), kNcclSuccess);
  std::mt19937_64 random(3);
  for (std::byte& byte : out) byte = static_cast<std::byte>(random());
  const std::vector<int> lengths{0, 1, 7, 8, 100'000, 2'000'000, 0, 17};
  std::vector<void*> sends, receives;
  size_t at = 0;
  for (const int length : lengths) {
    void *send = nullptr, *receive = nullptr, *into = in.data() + at;
    int tag = 0, room = length + 3;
    CHECK_EQ(net.isend(pair.sending, out.data() + at, length, tag, sent_from, &send), kNcclSuccess);
    CHECK_EQ(net.irecv(pair.receiving, 1, &into, &room, &tag, &received_to, &receive), kNcclSuccess);
    CHECK(send != nullptr && receive != nullptr);
    sends.push_back(send);
    receives.push_back(receive);
    at += static_cast<size_t>(length) + 64;
  }
  const Deadline deadline = soon();
  at = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    int sent = 0, received = 0, bytes = 0, ignored = 0;
    while ((sent == 0 || received == 0) && !deadline.passed()) {
      if (sent == 0) CHECK_EQ(net.test(sends[i], &sent, &ignored), kNcclSuccess);
      if (received == 0) CHECK_EQ(net.test(receives[i], &received, &bytes), kNcclSuccess);
    }
    CHECK(sent == 1 && received == 1);
    CHECK_EQ(bytes, lengths[i]);
    CHECK(std::memcmp(in.data() + at, out.data() + at, static_cast<size_t>(lengths[i])) == 0);
    at += static_cast<size_t>(lengths[i]) + 64;
  }
  net.dereg_mr(pair.sending, sent_from);
  net.dereg_mr(pair.receiving, received_to);
}

TEST(messages_too_many_are_put_off_and_too_long_ones_or_a_lost_peer_are_errors) {
  begun();
  const NcclNet& net = *plugin().net;
  for (const bool too_long : {true, false}) {
    Pair pair(net);
    Array bytes(4096);
    void* region = nullptr;
    CHECK_EQ(net.reg_mr(pair.receiving, bytes.data(), 4096, kNcclHostMemory, &region), kNcclSuccess);
    void *request = nullptr, *first = nullptr, *into = bytes.data();
    int tag = 0, room = 16, done = 0, length = 0;
    for (int i = 0; i < kNcclMostRequests; ++i) {
      CHECK_EQ(net.irecv(pair.receiving, 1, &into, &room, &tag, &region, &request), kNcclSuccess);
      CHECK(request != nullptr);
      if (i == 0) first = request;
    }
    CHECK_EQ(net.irecv(pair.receiving, 1, &into, &room, &tag, &region, &request), kNcclSuccess);
    CHECK(request == nullptr);
    CHECK_EQ(net.test(first, &done, &length), kNcclSuccess);
    CHECK_EQ(done, 0);
    if (too_long) {
      CHECK_EQ(net.isend(pair.sending, bytes.data(), 17, tag, region, &request), kNcclSuccess);
    } else {
      net.close_send(std::exchange(pair.sending, nullptr));
    }
    const Deadline deadline = soon();
    NcclResult result = kNcclSuccess;
    while (result == kNcclSuccess && done == 0 && !deadline.passed()) result = net.test(first, &done, &length);
    CHECK_EQ(result, kNcclRemoteError);
    net.dereg_mr(pair.receiving, region);
  }
}

}  // namespace
}  // namespace geartrain

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--rank") == 0) {
    return geartrain::rank_process(std::atoi(argv[2]), std::atoi(argv[3]));
  }
  return testing::run_all(argc, argv);
}
