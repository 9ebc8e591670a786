// The transport's own threads: an exception ends what it came from, and neither a thread nor the process; and nothing
// that was registered on a caller's stack outlives the call.

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <atomic>
#include <new>

#include "base/event_loop.h"
#include "tests/support/check.h"
#include "tests/transport/certificates.h"
#include "tests/transport/peers.h"
#include "transport/sideband/sideband.h"

namespace geartrain {
namespace {

// Two ends of a stream under TLS, within this process.
struct SecuredPair {
  Stream dialer, listener;

  SecuredPair() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    dialer = Descriptor(ends[0]);
    listener = Descriptor(ends[1]);
    const std::string host = "127.0.0.1";
    const auto context = Authority::of_tests().context();
    dialer.use_tls(context, &host);
    listener.use_tls(context, nullptr);
    bool one = false, other = false;
    for (int i = 0; i < 20 && !(one && other); ++i) {
      one = dialer.tls()->shake_hands() == Tls::Step::done;
      other = listener.tls()->shake_hands() == Tls::Step::done;
    }
    CHECK(one && other);
  }
};

// A sideband whose peer wrote what is not TLS, and hung up: from its second write on, every write throws.
struct Spoilt {
  std::shared_ptr<Sideband> sideband;
  std::atomic<int> reports{0};

  Spoilt() {
    SecuredPair pair;
    [[maybe_unused]] const ssize_t sent =
        ::send(pair.listener.get(), "neither TLS nor anything else", 29, MSG_NOSIGNAL);
    pair.listener = Stream();
    Sideband::Setup setup;
    setup.socket = std::move(pair.dialer);
    setup.regions = std::make_shared<ExposedRegions>();
    setup.lost = [this](const std::string&) { ++reports; };
    sideband = std::make_shared<Sideband>(std::move(setup));
  }
};

RegionHandle region_of(uint64_t bytes, bool writable) {
  static std::vector<std::byte> memory(4096);
  return ExposedRegion(std::span(memory).first(bytes), writable).handle();
}

TEST(a_write_that_throws_under_tls_leaves_no_request_behind) {
  if (!Authority::not_viable().empty()) return;
  Spoilt spoilt;
  for (int i = 0; i < 4; ++i) {
    std::vector<std::byte> into(64);
    try {
      spoilt.sideband->read(region_of(64, true), into, 0, Deadline::after(0.02));
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::timed_out || error.kind == ErrorKind::peer_lost);
    }
    spoilt.sideband->on_ready();  // whoever still waited would be told now
  }
  std::vector<std::byte> from(64);
  CHECK_THROWS(peer_lost, spoilt.sideband->write(region_of(64, true), from, 0, Deadline::after(0.02)));
  CHECK_EQ(spoilt.reports.load(), 1);
}

TEST(a_heartbeat_that_throws_under_tls_loses_the_peer_and_not_the_process) {
  if (!Authority::not_viable().empty()) return;
  Spoilt spoilt;
  for (int i = 0; i < 4; ++i) spoilt.sideband->tick();
  CHECK_EQ(spoilt.reports.load(), 1);
}

// A line that throws whatever it likes when it is served.
class Throwing final : public SidebandLine {
 public:
  explicit Throwing(int kind) : kind_(kind), event_(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  int socket() const override { return event_.get(); }
  void on_ready() override { raise(); }
  void tick() override {}
  bool has_work() const override { return false; }
  void work() override {}
  void fail_line(const std::string& why) noexcept override {
    std::lock_guard lock(mutex_);
    why_ = why;
    event_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  }
  bool failed() {
    std::lock_guard lock(mutex_);
    return !why_.empty();
  }

 private:
  void raise() const {
    if (kind_ == 0) throw std::bad_alloc();
    if (kind_ == 1) throw std::runtime_error("what nobody expects");
    fail(ErrorKind::frame, "what somebody expects");
  }
  const int kind_;
  Descriptor event_;
  std::mutex mutex_;
  std::string why_;
};

TEST(an_exception_in_the_sideband_thread_ends_one_line_and_all_others_are_served) {
  Pair pair = connected("tcp");
  SidebandThread& thread = SidebandThread::of_process();
  for (int kind = 0; kind < 3; ++kind) {
    const auto line = std::make_shared<Throwing>(kind);
    thread.add(line);
    for (const Deadline deadline = soon(); !line->failed() && !deadline.passed();) ::usleep(1000);
    CHECK(line->failed());
    thread.remove(line.get());
    std::vector<std::byte> memory(100, std::byte{7}), into(100);
    const auto region = pair.other->expose(memory, false);
    const RegionHandle handle = region->handle();
    pair.one->read(std::as_bytes(std::span(&handle, 1)), into, 0, soon());
    CHECK(into == memory);
  }
}

TEST(an_exception_in_an_event_loop_is_reported_and_the_loop_goes_on) {
  struct Handler final : EventLoop::Handler {
    Descriptor event{::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)};
    EventLoop* loop = nullptr;
    void ready(uint32_t) override {
      loop->unwatch(event.get());
      throw std::bad_alloc();
    }
  };
  std::atomic<int> failures{0}, tasks{0};
  Handler handler;
  EventLoop loop("test", [&](const std::exception&) { ++failures; });
  handler.loop = &loop;
  loop.post([&] {
    loop.watch(handler.event.get(), EPOLLIN, &handler);
    loop.on_time([&, thrown = false]() mutable -> uint64_t {
      if (!std::exchange(thrown, true)) throw std::runtime_error("a timer");
      return 1'000'000;
    });
  });
  loop.post([&] { throw std::runtime_error("a task"); });
  loop.post([&] { ++tasks; });
  for (const Deadline deadline = soon(); failures.load() < 3 && !deadline.passed();) ::usleep(1000);
  loop.post([&] { ++tasks; });
  loop.stop();
  CHECK_EQ(failures.load(), 3);
  CHECK_EQ(tasks.load(), 2);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
