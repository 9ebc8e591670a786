// Forks beside threads that are within OpenSSL: a child finds none of its locks held, and makes connections of its own;
// what it has of its parent's is whole, and ends with it.

#include <sys/socket.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/support/check.h"
#include "tests/transport/certificates.h"
#include "tests/transport/faults.h"
#include "transport/security/stream.h"

namespace geartrain {
namespace {

// Both ends of one TLS session in this thread.
struct Session {
  Stream one, other;
  explicit Session(const std::shared_ptr<const TlsContext>& context) {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    one = Stream(Descriptor(ends[0]));
    other = Stream(Descriptor(ends[1]));
    const std::string host = "127.0.0.1";
    one.use_tls(context, &host);
    other.use_tls(context, nullptr);
    for (bool mine = false, theirs = false; !mine || !theirs;) {
      mine = one.tls()->shake_hands() == Tls::Step::done;
      theirs = other.tls()->shake_hands() == Tls::Step::done;
    }
  }
  void talk() const {
    char sent[] = "words", got[sizeof sent] = {};
    for (int i = 0; i < 20; ++i) {
      CHECK_EQ(one.wire().send(sent, sizeof sent), static_cast<ssize_t>(sizeof sent));
      CHECK_EQ(other.wire().receive(got, sizeof got), static_cast<ssize_t>(sizeof got));
      CHECK_EQ(std::string(got), std::string(sent));
    }
  }
};

TEST(a_child_forked_beside_handshakes_and_records_shakes_hands_itself_and_ends_what_it_has_of_its_parent) {
  if (!Authority::not_viable().empty() || kThreadSanitizer || kAddressSanitizer) return;  // (faults.h: allocators)
  const auto context = Authority::of_tests().context();
  TlsFiles files = Authority::of_tests().sign("forks", "IP:127.0.0.1");
  files.rekey_bytes = 10;  // keys change all the time
  const auto rekeying = TlsContext::load(files);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!over) Session(context).talk();
    });
  }
  auto* shared = new Session(rekeying);
  threads.emplace_back([&] {
    while (!over) shared->talk();
  });
  for (int i = 0; i < 400; ++i) {
    Child child([&] {
      ::alarm(static_cast<unsigned>(20 * testing::patience()));
      delete shared;
      const auto own = TlsContext::load(files);
      Session(own).talk();
      Session(context).talk();
    });
    const int status = child.wait();
    if (status != 0) std::fprintf(stderr, "child %d ended with %d\n", i, status);
    CHECK_EQ(status, 0);
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  delete shared;
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
