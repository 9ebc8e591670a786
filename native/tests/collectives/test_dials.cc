// Members are dialled at once: one that does not answer keeps a rank from no other, and errors name all of them.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/interruption.h"
#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

// A port of the loopback at which connections are made, and nothing is ever said.
class Mute {
 public:
  explicit Mute(uint16_t port = 0) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    struct sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(port);
    const int on = 1;
    ::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    auto* const where = reinterpret_cast<struct sockaddr*>(&at);
    CHECK(::bind(socket_, where, sizeof at) == 0 && ::listen(socket_, 64) == 0);
    socklen_t size = sizeof at;
    ::getsockname(socket_, where, &size);
    address_ = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  }
  ~Mute() { ::close(socket_); }
  const std::string& address() const { return address_; }

 private:
  const int socket_;
  std::string address_;
};

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

// What connect() says, of a rank alone with these reducers.
std::string refusal(const std::vector<std::string>& reducers, double within_s, ErrorKind* kind) {
  GroupOptions options;
  options.reducers = reducers;
  options.shares.assign(1 + reducers.size(), 1.0 / static_cast<double>(reducers.size()));
  options.shares[0] = 0;
  options.secret = "ours";
  Group group(options);
  try {
    group.connect({group.address()}, soon(within_s));
  } catch (const Error& error) {
    *kind = error.kind;
    return error.what();
  }
  return "";
}

bool names(const std::string& text, const std::string& address) {
  return text.find("reducer " + address) != std::string::npos;
}

TEST(all_reducers_that_do_not_answer_are_named_and_no_other) {
  const Mute first, second, third;
  Reducer good({.secret = "ours", .shm = false});
  ErrorKind kind{};
  const std::string text = refusal({first.address(), good.address(), second.address(), third.address()}, 1, &kind);
  CHECK(kind == ErrorKind::timed_out);
  CHECK(names(text, first.address()));
  CHECK(names(text, second.address()));
  CHECK(names(text, third.address()));
  CHECK(!names(text, good.address()));
  CHECK_EQ(good.counts().groups_served, 1u);  // it was reached beside them
}

TEST(a_reducer_that_refuses_is_told_of_at_once_and_not_behind_one_that_is_silent) {
  const Mute silent;
  Reducer stranger({.secret = "theirs", .shm = false});
  ErrorKind kind{};
  const uint64_t began_ns = monotonic_ns();
  const std::string text = refusal({silent.address(), stranger.address()}, 30, &kind);
  CHECK(testing::within(began_ns, 10));
  CHECK(kind == ErrorKind::untrusted);
  CHECK(names(text, stranger.address()));
}

// By Ctrl-C, say: of one dial, which is the caller's own, and of several at once.
TEST(a_caller_may_interrupt_the_wait_for_ranks_that_have_not_begun) {
  struct Interrupted {};
  for (const uint32_t world : {2u, 4u}) {
    std::vector<std::unique_ptr<Group>> groups;
    std::vector<std::string> addresses;
    for (uint32_t rank = 0; rank < world; ++rank) {
      GroupOptions options;
      options.rank = rank;
      options.world = world;
      options.shares.assign(world, 1.0 / world);
      options.shm = false;
      groups.push_back(std::make_unique<Group>(options));
      addresses.push_back(groups.back()->address());
    }
    const uint64_t began_ns = monotonic_ns();
    const Interruption interruption([&] {
      if (monotonic_ns() - began_ns > 300'000'000) throw Interrupted{};
    });
    bool interrupted = false;
    try {
      groups.back()->connect(addresses, soon(20));
    } catch (const Interrupted&) {
      interrupted = true;
    } catch (const Error& error) {
      testing::failed(__FILE__, __LINE__, error.what());
    }
    CHECK(interrupted);
    CHECK(testing::within(began_ns, 5));
  }
}

TEST(a_lost_reducer_is_reached_beside_others_whose_hosts_do_not_answer) {
  constexpr size_t kSilent = 6;
  std::vector<std::unique_ptr<Reducer>> reducers;
  for (size_t i = 0; i <= kSilent; ++i) reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false}));
  Crew crew{.world = 1, .shares = std::vector<double>(kSilent + 2, 1.0 / (kSilent + 1))};
  crew.shares[0] = 0;
  crew.options = [](uint32_t, GroupOptions* options) {
    options->outlives_reducers = true;
    options->redial_s = 0.1;
  };
  run_ranks(
      crew,
      [&](uint32_t, Group& group) {
        const auto reduce = [&] {
          std::vector<float> array(50'000, 2.0F);
          Shape shape;
          shape.count = array.size();
          shape.dtype = shape.wire = Dtype::float32;
          const auto work = group.all_reduce(shape, array.data(), array.data(), 30);
          CHECK(work->wait(soon(60)));
          CHECK_EQ(work->fault().text, std::string());
        };
        reduce();
        std::vector<std::unique_ptr<Mute>> silent;
        const std::string last = reducers.back()->address();
        for (auto& reducer : reducers) {
          const uint16_t port = port_of(reducer->address());
          reducer.reset();
          if (silent.size() < kSilent) silent.push_back(std::make_unique<Mute>(port));
        }
        for (const Deadline late = soon(20); group.counts().lost_reducers <= kSilent && !late.passed();) reduce();
        Reducer again({.port = port_of(last), .shm = false});
        const uint64_t began_ns = monotonic_ns();
        for (const Deadline late = soon(20); group.counts().reducer_returns == 0 && !late.passed();) ::usleep(1000);
        // One dial of those takes a second.
        CHECK(testing::within(began_ns, kSilent / 2.0));
        CHECK_EQ(group.counts().reducer_returns, 1u);
        reduce();
      },
      &reducers);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
