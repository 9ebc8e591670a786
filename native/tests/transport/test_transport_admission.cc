// Admission under a crowd, under silence and without descriptors: whoever speaks gets in before its deadline, and what
// one connection causes ends that one.

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <set>

#include "tests/support/check.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/memfd.h"
#include "transport/providers/provider.h"
#include "transport/providers/shm_control.h"

namespace geartrain {
namespace {

// Descriptors that this process may have, after as many were asked for as there can be.
size_t most_files() {
  struct rlimit limit{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  return limit.rlim_cur;
}

// As many threads dial at once; all connections are accepted, and each carries a message. Returns how many.
size_t dial_at_once(Listener& listener, const std::string& transport, size_t peers) {
  std::vector<std::shared_ptr<Connection>> dialled(peers);
  std::barrier together(static_cast<std::ptrdiff_t>(peers));
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::string why;
  for (size_t i = 0; i < peers; ++i) {
    threads.emplace_back([&, i] {
      together.arrive_and_wait();
      try {
        dialled[i] = connect(listener.address(), over(transport), soon(60));
        Payload(i, 8, {}).send(*dialled[i], i, soon(60));
      } catch (const Error& error) {
        std::lock_guard lock(mutex);
        why = error.what();
      }
    });
  }
  std::set<uint64_t> tags;
  std::vector<std::shared_ptr<Connection>> accepted;
  try {
    while (tags.size() != peers) {
      accepted.push_back(listener.accept(soon(60)));
      Message message;
      accepted.back()->receive(&message, soon(60));
      CHECK(Payload(message.tag, 8, {}).is(message));
      tags.insert(message.tag);
    }
  } catch (const Error& error) {
    testing::failed(__FILE__, __LINE__, "after ", tags.size(), " of ", peers, ": ", error.what());
  }
  for (std::thread& thread : threads) thread.join();
  if (!why.empty()) testing::failed(__FILE__, __LINE__, "a peer did not connect: ", why);
  return static_cast<size_t>(
      std::count_if(dialled.begin(), dialled.end(), [](const auto& one) { return one != nullptr; }));
}

// Sockets that connect and say nothing, for as long as this lives: each that is hung up on comes again.
class Silence {
 public:
  Silence(const std::string& address, size_t sockets) {
    for (size_t i = 0; i < sockets; ++i) sockets_.push_back(raw_tcp(address));
    thread_ = std::thread([this, address] {
      while (!over_) {
        for (Descriptor& socket : sockets_) {
          char byte = 0;
          if (!over_ && ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0) {
            socket = raw_tcp(address);
            ++again_;
          }
        }
        ::usleep(10'000);
      }
    });
  }
  ~Silence() {
    over_ = true;
    thread_.join();
  }
  size_t again() const { return again_; }

 private:
  std::vector<Descriptor> sockets_;
  std::atomic<bool> over_{false};
  std::atomic<size_t> again_{0};
  std::thread thread_;
};

TEST(a_thousand_peers_that_dial_at_once_connect_beside_a_thousand_silent_ones) {
  // Both ends are here: four sockets each, and what waits for them.
  const size_t files = most_files();
  size_t peers = kThreadSanitizer ? 100 : kAddressSanitizer ? 200 : 1000;
  peers = std::min(peers, files / 18);
  Listener listener(listening("tcp"));
  const Silence silence(listener.address(), peers);
  CHECK_EQ(dial_at_once(listener, "tcp", peers), peers);
}

TEST(peers_for_whom_there_is_no_place_try_again_until_there_is_one) {
  for (const char* transport : transports_between_processes()) {
    Options options;
    options.limits.max_pending = 2;
    Listener listener(listening(transport, options));
    CHECK_EQ(dial_at_once(listener, transport, 30), size_t{30});
  }
  // Also when the program accepts nothing for a while: then nothing is connected that it would lose.
  for (const char* transport : {"inproc", "shm"}) {
    Listener listener(listening(transport));
    std::vector<std::shared_ptr<Connection>> dialled;
    const size_t most = 1024;
    for (size_t i = 0; i < most && transport == std::string("inproc"); ++i) {
      dialled.push_back(connect(listener.address(), over(transport), soon()));
    }
    if (transport == std::string("inproc")) {
      CHECK_THROWS(timed_out, connect(listener.address(), over(transport), Deadline::after(0.05)));
      CHECK_THROWS(timed_out, connect(listener.address(), over("tcp"), Deadline::after(0.3)));
      std::thread late([&] { dialled.push_back(connect(listener.address(), over(transport), soon())); });
      ::usleep(20'000);
      listener.accept(soon());
      late.join();
      CHECK_EQ(dialled.size(), most + 1);
    }
  }
}

TEST(a_dialer_learns_why_it_did_not_get_in) {
  Options options;
  options.limits.max_pending = 1;
  options.limits.handshake_timeout_s = 30;
  Listener listener(listening("tcp", options));
  // One that has proved itself, and whose lanes never come, has the only place.
  const Descriptor first = raw_tcp(listener.address());
  greet(first.get(), Intent::stream, Address::parse(listener.address()), {}, soon(), 2);
  try {
    connect(listener.address(), over("tcp"), Deadline::after(0.5));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::timed_out);
    CHECK(std::strstr(error.what(), "it has no place for another connection now") != nullptr);
    CHECK(std::strstr(error.what(), "attempts") != nullptr);
  }
  CHECK(listener.refused() >= 2);
}

TEST(an_exception_of_any_kind_ends_the_connection_that_caused_it_and_no_other) {
  ListenerOptions options;
  int calls = 0;
  options.raw = [&](Descriptor, bool) {
    if (++calls == 1) throw std::runtime_error("not this one");
    if (calls == 2) throw std::bad_alloc();
  };
  Listener listener(options);
  const Address address = Address::parse(listener.address());
  for (int i = 0; i < 3; ++i) {
    const Descriptor socket = raw_tcp(listener.address());
    greet(socket.get(), Intent::raw, address, {}, soon());
    CHECK(wait_for(socket.get(), POLLRDHUP, soon()));
  }
  CHECK_EQ(listener.refused(), uint64_t{2});
  const auto one = connect(listener.address(), over("tcp"), soon());
  const auto other = listener.accept(soon());
  Payload(1, 2, {3}).send(*one, 9, soon());
  Message message;
  other->receive(&message, soon());
  CHECK(Payload(1, 2, {3}).is(message));
}

TEST(an_offer_that_fails_late_is_answered_on_the_dialers_own_socket) {
  Listener listener({});
  const Descriptor socket = raw_unix(listener.address());
  greet(socket.get(), Intent::shm, Address::parse(listener.address()), {}, soon());
  // A good segment; and as the sideband what cannot be waited for, which is noticed after the socket has an owner.
  const Descriptor memory = make_memory("test connection", kControlBytes);
  const Memory mapped(memory.get(), kControlBytes, true);
  ControlHeader header{};
  std::memcpy(header.magic, kControlMagic, sizeof header.magic);
  header.version = kControlVersion;
  header.slots = kSlots;
  header.ring_bytes = kRingBytes;
  std::memcpy(mapped.data(), &header, sizeof header);
  ShmOffer offer{{'G', 'E', 'A', 'R', 'O', 'F', 'R', '\n'}, kControlBytes, {}};
  const int fds[kShmOfferFds] = {memory.get(), memory.get(), memory.get(), memory.get()};
  send_with_fds(socket.get(), std::as_bytes(std::span(&offer, 1)), fds, soon());
  ShmReply reply{};
  read_exactly(socket.get(), std::as_writable_bytes(std::span(&reply, 1)), soon());
  CHECK_EQ(reply.viable, uint32_t{0});
  CHECK(std::strstr(reply.reason, "cannot watch a socket") != nullptr);
  CHECK(wait_for(socket.get(), POLLRDHUP, soon()));
  CHECK_EQ(listener.refused(), uint64_t{1});
}

TEST(a_listener_without_descriptors_waits_for_some_and_does_not_spin) {
  if (kThreadSanitizer) return;
  int to_parent[2], to_child[2];
  CHECK_EQ(::pipe(to_parent) | ::pipe(to_child), 0);
  Child child([&] {
    const int failures = testing::failures;
    Listener listener(listening("tcp"));
    const std::string address = listener.address();
    const struct rlimit few = {static_cast<rlim_t>(open_files() + 8), static_cast<rlim_t>(open_files() + 8)};
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    std::vector<Descriptor> all;
    for (Descriptor one(::dup(0)); one; one = Descriptor(::dup(0))) all.push_back(std::move(one));
    CHECK_EQ(::write(to_parent[1], address.data(), address.size()), static_cast<ssize_t>(address.size()));
    char go = 0;
    CHECK_EQ(::read(to_child[0], &go, 1), ssize_t{1});  // by now somebody waits
    const uint64_t began_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID), wall_ns = monotonic_ns();
    ::usleep(400'000);
    const uint64_t used_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - began_ns;
    const bool calm = used_ns < (monotonic_ns() - wall_ns) / 4;
    CHECK(calm);
    CHECK(listener.refusal().find("no socket can be made") != std::string::npos);
    all.clear();
    const auto connection = listener.accept(soon());
    Message message;
    connection->receive(&message, soon());
    const char good = testing::failures == failures ? 'y' : 'n';
    connection->send({message.tag, static_cast<uint32_t>(good), {}, {}}, soon());
    ::pause();
  });
  char address[512];
  const ssize_t got = ::read(to_parent[0], address, sizeof address);
  CHECK(got > 0);
  std::thread tell([&] {
    ::usleep(50'000);
    CHECK_EQ(::write(to_child[1], "g", 1), ssize_t{1});
  });
  Options options = over("tcp");
  options.lanes = 0;
  const auto connection = connect(std::string(address, static_cast<size_t>(got)), options, soon());
  tell.join();
  connection->send({1, 0, {}, {}}, soon());
  Message answer;
  connection->receive(&answer, soon());
  CHECK_EQ(static_cast<char>(answer.kind), 'y');
  for (const int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) ::close(fd);
}

// An impostor at the abstract name of a listener that is gone: it welcomes everyone, and sees what it is offered.
void welcome_everyone(const Address& address, uid_t user) {
  const Descriptor listening(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  struct sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path + 1, address.shm.data(), address.shm.size());
  const auto size = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + address.shm.size());
  if (::setuid(user) != 0 || ::bind(listening.get(), reinterpret_cast<const struct sockaddr*>(&at), size) != 0 ||
      ::listen(listening.get(), 4) != 0) {
    ::_exit(2);
  }
  const Descriptor socket(::accept(listening.get(), nullptr, nullptr));
  Hello hello{};
  if (::recv(socket.get(), &hello, sizeof hello, MSG_WAITALL) != sizeof hello) ::_exit(0);  // it was not believed
  Challenge challenge{};
  std::memcpy(challenge.magic, kHelloMagic, sizeof kHelloMagic);
  challenge.version = kProtocolVersion;
  for (size_t i = 0; i < sizeof challenge.listener; ++i) challenge.listener[i] = 0xaa;
  ::send(socket.get(), &challenge, sizeof challenge, MSG_NOSIGNAL);
  Proof proof{};
  ::recv(socket.get(), &proof, sizeof proof, MSG_WAITALL);
  const Verdict welcome{};
  ::send(socket.get(), &welcome, sizeof welcome, MSG_NOSIGNAL);
  char offered = 0;
  ::_exit(::recv(socket.get(), &offered, 1, 0) == 1 ? 1 : 0);
}

TEST(a_dialer_without_a_secret_does_not_believe_another_users_socket) {
  if (kThreadSanitizer || ::geteuid() != 0) return;  // only root can be two users
  Address address;
  address.id = std::string(32, 'a');
  address.shm = "geartrain-test-" + std::to_string(::getpid());
  for (const uid_t user : {uid_t{65534}, uid_t{0}}) {
    Child impostor([&] { welcome_everyone(address, user); });
    try {
      const Deadline deadline = soon();
      for (;;) {
        try {
          connect(address.text(), over("shm"), soon(5));
          CHECK(false);
          break;
        } catch (const Error& error) {
          if (error.kind != ErrorKind::not_viable || deadline.passed()) throw;
          ::usleep(1000);  // it does not listen yet
        }
      }
    } catch (const Error& error) {
      if (user != 0) {
        CHECK(error.kind == ErrorKind::untrusted);
        CHECK(std::strstr(error.what(), "belongs to another user") != nullptr);
      }
    }
    // Of this user it is believed so far as to be offered memory.
    if (user != 0) CHECK_EQ(impostor.wait(), 0);
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
