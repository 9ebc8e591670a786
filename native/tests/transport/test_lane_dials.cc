// Lanes are dialled at once, under one deadline; by listeners of earlier builds, which say nothing of it, one after the
// other. What is refused, interrupted or late ends the waits of all.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "base/interruption.h"
#include "tests/support/check.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/providers/at_once.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

// A listener that answers handshakes as the test says.
class Answering {
 public:
  // Of a lane: 0 welcomes it. Called when its hello has come, on the thread of its own.
  using Judge = std::function<Answer(uint32_t number)>;
  Answering(uint32_t needs, Judge judge) : needs_(needs), judge_(std::move(judge)) {
    door_ = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    struct sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(::bind(door_.get(), reinterpret_cast<const struct sockaddr*>(&at), sizeof at), 0);
    CHECK_EQ(::listen(door_.get(), 64), 0);
    socklen_t size = sizeof at;
    ::getsockname(door_.get(), reinterpret_cast<struct sockaddr*>(&at), &size);
    place_ = "id=any;tcp=127.0.0.1:" + std::to_string(ntohs(at.sin_port));
    thread_ = std::thread([this] { serve(); });
  }
  ~Answering() {
    over = true;
    ::shutdown(door_.get(), SHUT_RDWR);
    thread_.join();
    for (std::thread& each : handshakes_) each.join();
  }
  const std::string& address() const { return place_; }
  std::atomic<bool> over{false};
  std::atomic<int> under_way{0}, most{0};

 private:
  void serve() {
    while (!over) {
      const int socket = ::accept4(door_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (socket >= 0) handshakes_.emplace_back([this, socket] { shake_hands(Descriptor(socket)); });
    }
  }

  void shake_hands(Descriptor socket) {
    try {
      const auto bytes = [](auto* value) { return std::as_writable_bytes(std::span(value, 1)); };
      Hello hello{};
      read_exactly(socket.get(), bytes(&hello), soon());
      const int now = under_way.fetch_add(1) + 1;
      for (int before = most.load(); before < now && !most.compare_exchange_weak(before, now);) continue;
      const bool lane = static_cast<Intent>(hello.intent) == Intent::lane;
      Verdict verdict{};
      verdict.answer = static_cast<uint32_t>(lane ? judge_(hello.lanes) : Answer::welcome);
      Challenge challenge{};
      std::memcpy(challenge.magic, kHelloMagic, sizeof challenge.magic);
      challenge.version = kProtocolVersion;
      challenge.needs = needs_;
      write_exactly(socket.get(), bytes(&challenge), soon());
      Proof proof{};
      read_exactly(socket.get(), bytes(&proof), soon());
      under_way.fetch_sub(1);
      write_exactly(socket.get(), bytes(&verdict), soon());
    } catch (const Error&) {  // the dialer has hung up
    }
    while (!over) ::usleep(1000);
  }

  const uint32_t needs_;
  const Judge judge_;
  std::string place_;
  Descriptor door_;
  std::thread thread_;
  std::vector<std::thread> handshakes_;
};

Options of_lanes(uint32_t lanes) {
  Options options;
  options.transport = "tcp";
  options.lanes = lanes;
  options.peer_timeout_s = 0;
  return options;
}

TEST(all_lanes_are_dialled_at_once_where_the_listener_takes_them_so) {
  std::atomic<uint32_t> come{0};
  const Deadline deadline = soon();
  Answering listener(kTakesLanesInAnyOrder, [&](uint32_t) {
    ++come;
    while (come < 6 && !deadline.passed()) ::usleep(500);  // none is answered before all have come
    return Answer::welcome;
  });
  const auto one = connect(listener.address(), of_lanes(5), soon(10));
  CHECK_EQ(come.load(), 6u);  // and the sideband
  CHECK(!deadline.passed());
  CHECK(one->describe().find("with 5 lanes") != std::string::npos);
}

TEST(listeners_of_earlier_builds_get_one_lane_after_the_other_in_order) {
  std::mutex mutex;
  std::vector<uint32_t> order;
  Answering listener(0, [&](uint32_t number) {
    std::lock_guard lock(mutex);
    order.push_back(number);
    return Answer::welcome;
  });
  const auto one = connect(listener.address(), of_lanes(5), soon(10));
  CHECK(order == std::vector<uint32_t>({0, 1, 2, 3, 4, 5}));
  CHECK_EQ(listener.most.load(), 1);
}

TEST(lanes_that_are_never_answered_are_one_deadline) {
  Answering* at = nullptr;
  Answering listener(kTakesLanesInAnyOrder, [&](uint32_t number) {
    while (number % 2 == 1 && !at->over) ::usleep(1000);
    return Answer::welcome;
  });
  at = &listener;
  const uint64_t began_ns = monotonic_ns();
  CHECK_THROWS(timed_out, connect(listener.address(), of_lanes(8), Deadline::after(0.5)));
  CHECK(monotonic_ns() - began_ns >= 500'000'000);
  CHECK(testing::within(began_ns, 2));
}

TEST(a_lane_that_is_refused_ends_the_waits_of_the_others) {
  Answering* at = nullptr;
  Answering listener(kTakesLanesInAnyOrder, [&](uint32_t number) {
    if (number == 3) return Answer::wrong_secret;
    while (!at->over) ::usleep(1000);
    return Answer::welcome;
  });
  at = &listener;
  const uint64_t began_ns = monotonic_ns();
  CHECK_THROWS(untrusted, connect(listener.address(), of_lanes(8), soon(100)));
  CHECK(testing::within(began_ns, 5));
}

TEST(a_session_that_the_listener_gives_up_among_its_lanes_is_begun_anew) {
  std::atomic<int> refused{0};
  Answering listener(kTakesLanesInAnyOrder, [&](uint32_t number) {
    return number == 1 && refused.fetch_add(1) < 2 ? Answer::unknown_session : Answer::welcome;
  });
  const auto one = connect(listener.address(), of_lanes(3), soon(20));
  CHECK_EQ(refused.load(), 3);
}

struct Pair {
  Descriptor one, other;
  Pair() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    one = Descriptor(ends[0]);
    other = Descriptor(ends[1]);
  }
};

TEST(calls_are_at_once_and_the_first_failure_is_thrown_when_all_have_ended) {
  std::atomic<int> inside{0};
  const Deadline deadline = soon();
  at_once(9, [&](uint32_t) {
    ++inside;
    while (inside < 9 && !deadline.passed()) ::usleep(100);
  });
  CHECK(!deadline.passed());
  const Pair silent;
  std::atomic<int> ended{0};
  const uint64_t began_ns = monotonic_ns();
  struct Ends {
    std::atomic<int>& of;
    ~Ends() { ++of; }
  };
  CHECK_THROWS(frame, at_once(4, [&](uint32_t i) {
                 const Ends at_the_end{ended};
                 if (i == 2) fail(ErrorKind::frame, "damaged");
                 wait_for(silent.one.get(), POLLIN, soon(100));
               }));
  CHECK_EQ(ended.load(), 4);
  CHECK(testing::within(began_ns, 2));
  at_once(0, [](uint32_t) { CHECK(false); });
}

TEST(an_interruption_of_the_caller_ends_all_waits) {
  const Pair silent;
  std::atomic<int> ended{0};
  struct Interrupted {};
  bool interrupted = false;
  const uint64_t began_ns = monotonic_ns();
  try {
    const Interruption interruption([] { throw Interrupted{}; });
    at_once(4, [&](uint32_t) {
      wait_for(silent.one.get(), POLLIN, soon(100));
      ++ended;
    });
  } catch (const Interrupted&) {
    interrupted = true;
  }
  CHECK(interrupted);
  CHECK_EQ(ended.load(), 0);
  CHECK(testing::within(began_ns, 2));
}

TEST(a_child_that_an_interruption_forks_is_refused_and_does_not_wait_for_the_threads) {
  if (kThreadSanitizer || kAddressSanitizer) return;  // (faults.h: allocators)
  const Pair silent;
  pid_t child = -1;
  const pid_t parent = ::getpid();
  try {
    const Interruption interruption([&] {
      if (child == -1) child = ::fork();
      if (child > 0) {
        char byte = 1;
        CHECK_EQ(::write(silent.other.get(), &byte, 1), ssize_t{1});  // the parent goes on
      }
    });
    at_once(3, [&](uint32_t) { CHECK(wait_for(silent.one.get(), POLLIN, soon(100))); });
    CHECK_EQ(::getpid(), parent);
  } catch (const Error& error) {
    if (::getpid() != parent) ::_exit(error.kind == ErrorKind::hung_up ? 0 : 1);
    throw;
  }
  if (::getpid() != parent) ::_exit(2);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
