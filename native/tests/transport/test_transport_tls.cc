// TLS over TCP: refusals name the reason on both sides, traffic is neither read nor changed by others, and
// failures are named errors in bounded time. Delivery of messages is in the suite of all transports.

#include <algorithm>
#include <atomic>
#include <mutex>

#include "tests/support/check.h"
#include "tests/transport/between.h"
#include "tests/transport/certificates.h"
#include "tests/transport/faults.h"
#include "tests/transport/peers.h"
#include "transport/sideband/memory_region.h"

namespace geartrain {
namespace {

Options with(const TlsFiles* files) {
  Options options;
  options.transport = "tcp";
  if (files != nullptr) options.tls = TlsContext::load(*files);
  return options;
}

ListenerOptions listening_with(const TlsFiles* files) {
  ListenerOptions made;
  made.options = with(files);
  made.options.transport.clear();
  return made;
}

bool within(double seconds, const std::function<bool()>& true_now) {
  for (const Deadline deadline = soon(seconds); !deadline.passed(); ::usleep(1000)) {
    if (true_now()) return true;
  }
  return true_now();
}

bool has(const std::string& text, const char* part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::cerr << "'" << part << "' is not in: " << text << std::endl;
  return found;
}

// Both sides' error texts when they do not connect.
void refused(const TlsFiles* dialer, const TlsFiles* at_listener, const char* dialer_error,
             const char* listener_error) {
  Listener listener(listening_with(at_listener));
  const uint64_t began_ns = monotonic_ns();
  try {
    connect(listener.address(), with(dialer), soon(20));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::untrusted);
    CHECK(has(error.what(), dialer_error));
  }
  CHECK(within(3, [&] { return listener.refused() != 0; }));
  CHECK(has(listener.refusal(), listener_error));
  CHECK(testing::within(began_ns, 4));
  try {
    listener.accept(Deadline::after(0));
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::timed_out);
    CHECK(has(error.what(), listener_error));
  }
}

TEST(an_untrusted_certificate_is_refused_with_the_reason_on_both_sides) {
  if (!Authority::not_viable().empty()) return;
  const Authority ours, theirs;
  const TlsFiles good = ours.sign("good", "IP:127.0.0.1");
  const TlsFiles stranger = theirs.sign("stranger", "IP:127.0.0.1");
  TlsFiles spy = stranger;  // trusts us, and is not trusted
  spy.ca = good.ca;
  const TlsFiles elsewhere = ours.sign("elsewhere", "IP:127.0.0.2,DNS:localhost");
  const TlsFiles nameless = ours.sign("nameless", "DNS:*");
  const TlsFiles old = ours.sign_old("old", "IP:127.0.0.1");
  TlsFiles named = ours.sign("named", "DNS:learner.cluster"), strict = good;
  named.name = strict.name = "learner.cluster";
  TlsFiles wild = ours.sign("wild", "DNS:*.cluster");

  refused(nullptr, &good, "it asks for TLS, and none was given here", "it came without TLS");
  refused(&good, nullptr, "the peer uses no TLS", "it asks for TLS, and none is used here");
  refused(&stranger, &good, "the peer's certificate is refused: another authority", "another authority signed it");
  refused(&good, &spy, "the peer's certificate is refused: another authority", "another authority");
  refused(&spy, &good, "the peer refuses this side's certificate: another authority",
          "the peer's certificate is refused: another authority signed it");
  refused(&good, &old, "the peer's certificate is refused: it has expired",
          "refuses this side's certificate: it has exp");
  refused(&old, &good, "the peer refuses this side's certificate: it has expired",
          "the peer's certificate is refused: it has expired");
  refused(&good, &elsewhere, "the peer's certificate is refused: it is not for 127.0.0.1", "refuses this side's cert");
  refused(&good, &nameless, "it is not for 127.0.0.1", "refuses this side's cert");
  refused(&strict, &good, "it is not for learner.cluster", "refuses this side's cert");
  refused(&strict, &wild, "it is not for learner.cluster", "refuses this side's cert");
  refused(&good, &named, "it is not for 127.0.0.1", "refuses this side's cert");
  TlsFiles trusting = named;
  refused(&strict, &trusting, "refuses this side's certificate: it is not valid, or not for this name",
          "the peer's certificate is refused: it is not for learner.cluster");

  Listener listener(listening_with(&named));
  const auto one = connect(listener.address(), with(&named), soon());
  CHECK(has(one->describe(), ", TLSv1.3 TLS_AES_128_GCM_SHA256"));
  CHECK_EQ(listener.refused(), uint64_t{0});
}

TEST(files_that_cannot_be_used_are_errors_where_they_are_given) {
  if (!Authority::not_viable().empty()) return;
  const Authority ours;
  const TlsFiles good = ours.sign("good", "IP:127.0.0.1"), other = ours.sign("other", "IP:127.0.0.1");
  const auto refuses = [&](TlsFiles files, const char* because) {
    try {
      TlsContext::load(files);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::argument);
      CHECK(has(error.what(), because));
    }
  };
  TlsFiles files = good;
  files.certificate = ours.path("nowhere.pem");
  refuses(files, "nowhere.pem': No such file");
  files = good;
  files.key = other.key;
  refuses(files, "other.key': key values mismatch");
  files = good;
  files.key = good.certificate;
  refuses(files, "cannot use the key");
  files = good;
  files.ca = good.key;
  refuses(files, "cannot use the ca");
  files.ca.clear();
  refuses(files, "no ca");
}

TEST(the_secret_is_proved_inside) {
  if (!Authority::not_viable().empty()) return;
  Options options = over("tcp+tls"), other = options;
  options.secret = "open sesame";
  other.secret = "open barley";
  ListenerOptions accepting = listening("tcp+tls", options);
  Listener listener(accepting);
  CHECK_THROWS(untrusted, connect(listener.address(), other, soon()));
  CHECK_THROWS(untrusted, connect(listener.address(), over("tcp+tls"), soon()));
  const auto one = connect(listener.address(), options, soon());
  CHECK(one->authenticated());
}

TEST(keys_are_changed_in_transit_without_effect) {
  if (!Authority::not_viable().empty()) return;
  TlsFiles files = Authority::of_tests().sign("rekeyed", "IP:127.0.0.1");
  files.rekey_bytes = 300'000;
  Listener listener(listening_with(&files));
  const auto one = connect(listener.address(), with(&files), soon());
  const auto other = listener.accept(soon());
  const auto talk = [](Connection& end) {
    const Payload big(1, 100, {12 * kMiB + 5}), small(2, 20'000, {3, 70'000});
    for (uint64_t i = 0; i < 20; ++i) (i % 5 == 0 ? big : small).send(end, i, soon());
    for (uint64_t i = 0; i < 20; ++i) {
      Message message;
      end.receive(&message, soon());
      CHECK_EQ(message.tag, i);
      CHECK((i % 5 == 0 ? big : small).is(message));
    }
  };
  std::thread there([&] { talk(*other); });
  talk(*one);
  there.join();
}

TEST(what_travels_cannot_be_read_on_the_way_and_one_changed_byte_ends_the_connection) {
  if (!Authority::not_viable().empty()) return;
  for (const char* transport : {"tcp", "tcp+tls"}) {
    const bool tls = !std::strcmp(transport, "tcp+tls");
    for (const uint64_t bytes : {uint64_t{20'000}, 9 * kMiB}) {  // on the first connection, and on the lanes
      Listener listener(listening(transport));
      Between between(listener.address());
      const auto one = connect(between.address(), over(transport), soon());
      const auto other = listener.accept(soon());
      const Payload payload(5, 64, {bytes});
      payload.send(*one, 1, soon());
      Message message;
      other->receive(&message, soon());
      CHECK(payload.is(message));
      CHECK_EQ(between.saw(Bytes(payload.header).first(32)), !tls);
      CHECK_EQ(between.saw(Bytes(payload.buffers[0]).first(32)), !tls);
      // The sideband: exposed memory.
      std::vector<std::byte> memory = pattern(77, 5000), into(5000);
      const auto region = other->expose(memory, false);
      const RegionHandle handle = region->handle();
      one->read(std::as_bytes(std::span(&handle, 1)), into, 0, soon());
      CHECK(into == memory);
      CHECK_EQ(between.saw(Bytes(memory).first(32)), !tls);
      if (!tls) continue;
      between.change = true;
      try {
        payload.send(*one, 2, soon());
        other->receive(&message, soon());
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::frame || error.kind == ErrorKind::peer_lost);
      }
      CHECK(within(5, [&] { return other->lost(); }));
      CHECK_THROWS(peer_lost, other->receive(&message, soon()));
      CHECK(within(5, [&] {
        try {
          one->receive(&message, Deadline::after(0));
        } catch (const Error& error) {
          return error.kind != ErrorKind::timed_out;
        }
        return false;
      }));
    }
  }
}

TEST(garbage_and_silence_on_a_port_with_tls_are_refused_and_disturb_no_other) {
  if (!Authority::not_viable().empty()) return;
  ListenerOptions options = listening("tcp+tls");
  options.options.limits.handshake_timeout_s = 1;
  Listener listener(options);
  std::vector<Descriptor> silent;
  for (int i = 0; i < 64; ++i) silent.push_back(raw_tcp(listener.address()));
  std::mt19937_64 random(5);
  for (int i = 0; i < 60; ++i) {
    const Descriptor socket = raw_tcp(listener.address());
    std::vector<uint8_t> garbage(random() % 5000 + 1);
    for (auto& byte : garbage) byte = static_cast<uint8_t>(random());
    // Some begin as a handshake of TLS does, with a record of any length, and some as one without TLS.
    if (i % 3 == 0) garbage.insert(garbage.begin(), {0x16, 0x03, 0x01, static_cast<uint8_t>(i), 0x20, 0x01, 0x00});
    if (i % 3 == 1) garbage[0] = 'G';
    [[maybe_unused]] const ssize_t sent = ::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
    if (i % 4 != 0) continue;
    const auto one = connect(listener.address(), over("tcp+tls"), soon(5));
    const auto other = listener.accept(soon(5));
    Payload(1, 2, {3}).send(*one, 9, soon());
    Message message;
    other->receive(&message, soon());
    CHECK(Payload(1, 2, {3}).is(message));
  }
  ::usleep(1'200'000);
  for (const Descriptor& socket : silent) {
    char byte = 0;
    const ssize_t got = ::recv(socket.get(), &byte, 1, MSG_DONTWAIT);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
  }
  CHECK(listener.refused() >= 64);
  CHECK_THROWS(timed_out, listener.accept(Deadline::after(0)));
}

TEST(a_peer_that_stops_in_the_middle_of_a_handshake_is_a_deadline) {
  if (!Authority::not_viable().empty()) return;
  Descriptor accepting(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  struct sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK_EQ(::bind(accepting.get(), reinterpret_cast<const struct sockaddr*>(&at), sizeof at), 0);
  CHECK_EQ(::listen(accepting.get(), 16), 0);
  socklen_t size = sizeof at;
  ::getsockname(accepting.get(), reinterpret_cast<struct sockaddr*>(&at), &size);
  const std::string address = "id=any;tcp=127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  CHECK_THROWS(timed_out, connect(address, over("tcp+tls"), soon(0.3)));
  // One that hangs up may be out of places: the dialer begins anew until its deadline, and then tells why.
  std::atomic<bool> over_now{false};
  std::thread closer([&] {
    while (!over_now) Descriptor(::accept4(accepting.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
  });
  std::string why;
  try {
    connect(address, over("tcp+tls"), soon(1));
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::timed_out);
    why = error.what();
  }
  over_now = true;
  const Descriptor waker = raw_tcp(address);
  closer.join();
  CHECK(has(why, "hung up during the TLS handshake"));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
