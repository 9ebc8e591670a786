#include "collectives/acceptor.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/interruption.h"
#include "transport/providers/provider.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr size_t kMostNewcomers = 4096;
constexpr double kJoinTimeoutS = 10;    // to send its Join
constexpr double kEarlyTimeoutS = 300;  // for a group that is not ready
constexpr double kCheckEveryS = 0.1;
constexpr size_t kJoinFds = 2;  // the rings' memory, and the dialer's eventfd

}  // namespace

// --- the listening side ---------------------------------------------------------------------------------------------

// A connection that has proved the secret and has yet to send its Join.
class Acceptor::Newcomer final : public EventLoop::Handler {
 public:
  Newcomer(Acceptor& acceptor, Descriptor socket, bool local)
      : acceptor(acceptor), socket(std::move(socket)), local(local), deadline(Deadline::after(kJoinTimeoutS)) {}
  void ready(uint32_t) override {
    if (!gone) acceptor.step(*this);
  }
  Acceptor& acceptor;
  Descriptor socket;
  const bool local;
  Deadline deadline;
  Join join{};
  size_t filled = 0;
  std::vector<Descriptor> fds;
  bool gone = false;
};

Acceptor::Acceptor(EventLoop& loop, const AcceptorOptions& options, Host& host)
    : loop_(loop), options_(options), host_(host) {
  if (!options.listens) return;
  ListenerOptions listening;
  listening.options.secret = options.secret;
  listening.options.limits.max_pending = 256;
  listening.tcp_host = options.host;
  listening.tcp_port = options.port;
  listening.advertise = options.advertise;
  listening.shm = options.shm;
  listening.raw = [this](Descriptor socket, bool local) {
    // Memory or descriptors run out, on the listener's thread or on the loop: that is this connection's end only.
    try {
      auto shared = std::make_shared<Descriptor>(std::move(socket));
      loop_.post([this, shared, local] {
        try {
          admit(std::move(*shared), local);
        } catch (const std::exception&) {
          ++refused_;
        }
      });
    } catch (const std::exception&) {
      ++refused_;
    }
  };
  listener_ = std::make_unique<Listener>(listening);
}

Acceptor::~Acceptor() {
  close();
}

void Acceptor::close() {
  if (listener_ != nullptr) listener_->close();
}

void Acceptor::hang_up() {
  newcomers_.clear();
}

bool Acceptor::full() const {
  return newcomers_.size() >= kMostNewcomers;
}

Acceptor::Newcomer& Acceptor::add(Descriptor socket, bool local) {
  newcomers_.push_back(std::make_unique<Newcomer>(*this, std::move(socket), local));
  return *newcomers_.back();
}

void Acceptor::admit(Descriptor socket, bool local) {
  if (full()) {
    ++refused_;
    return;
  }
  Newcomer& newcomer = add(std::move(socket), local);
  try {
    loop_.watch(newcomer.socket.get(), EPOLLIN | EPOLLRDHUP, &newcomer);
  } catch (const std::exception&) {
    drop(newcomer, true);
  }
}

// A newcomer whose Join is complete continues on the other one's loop, and is gone here. One that has stopped drops it.
void Acceptor::move_to(Acceptor& other, Newcomer& newcomer) {
  loop_.unwatch(newcomer.socket.get());
  auto moved = std::make_shared<Newcomer>(other, std::move(newcomer.socket), newcomer.local);
  moved->join = newcomer.join;
  moved->fds = std::move(newcomer.fds);
  other.loop_.post([&other, moved] {
    try {
      if (other.full()) fail(ErrorKind::no_space, "too many connections at once");
      Newcomer& here = other.add(std::move(moved->socket), moved->local);
      here.join = moved->join;
      here.fds = std::move(moved->fds);
      here.filled = sizeof(Join);
      other.step(here);
    } catch (const std::exception&) {
      ++other.refused_;
    }
  });
  drop(newcomer, false);
}

void Acceptor::drop(Newcomer& newcomer, bool refused) {
  if (refused) ++refused_;
  newcomer.gone = true;
  if (newcomer.socket) loop_.unwatch(newcomer.socket.get());
  const auto place =
      std::find_if(newcomers_.begin(), newcomers_.end(), [&](const auto& one) { return one.get() == &newcomer; });
  loop_.discard(std::move(*place));
  newcomers_.erase(place);
}

// Reads the Join, and admits or refuses the newcomer, which may be dropped afterwards.
void Acceptor::step(Newcomer& newcomer) {
  std::unique_ptr<Link> link;
  Join accepted{};
  try {
    while (newcomer.filled < sizeof(Join)) {
      const auto rest = std::as_writable_bytes(std::span(&newcomer.join, 1)).subspan(newcomer.filled);
      const ssize_t got = receive_with_fds(newcomer.socket.get(), rest, &newcomer.fds);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      // A dialer that chose another path in the meantime.
      if (got == 0 && newcomer.filled == 0) return drop(newcomer, false);
      if (got <= 0) fail(ErrorKind::peer_lost, "it hung up");
      if (newcomer.fds.size() > kJoinFds) fail(ErrorKind::frame, "unexpected descriptors");
      newcomer.filled += static_cast<size_t>(got);
      if (newcomer.filled == sizeof(Join)) newcomer.deadline = Deadline::after(kEarlyTimeoutS);
    }
    const Join& join = newcomer.join;
    if (join.magic != kCollectiveMagic) fail(ErrorKind::frame, "malformed Join");
    if (Acceptor* const other = host_.acceptor_for(join); other != nullptr && other != this) {
      return move_to(*other, newcomer);
    }
    std::string refusal;
    Host::Verdict verdict = Host::Verdict::refused;
    if (join.version != kCollectiveVersion) {
      refusal = "it has version " + std::to_string(kCollectiveVersion) + " of the protocol";
    } else if (join.world == 0 || join.world > kMostMembers || join.rank >= join.world || join.owners == 0 ||
               join.owners > kMostMembers || join.channel >= kMostMembers) {
      refusal = "the group's sizes are invalid";
    } else if (join.ring_bytes != 0 && (join.ring_bytes != kLinkRingBytes || newcomer.fds.size() != kJoinFds)) {
      refusal = "rings of another size, or without their memory";
    } else {
      verdict = host_.judge(join, &refusal);
    }
    if (verdict == Host::Verdict::later) return loop_.unwatch(newcomer.socket.get());
    Welcome welcome{kCollectiveMagic, kCollectiveVersion, options_.max_window_bytes, {}};
    if (verdict == Host::Verdict::refused) put_text(welcome.refusal, refusal.empty() ? "refused" : refusal);
    const auto bytes = std::as_bytes(std::span(&welcome, 1));
    const bool rings = join.ring_bytes != 0 && verdict == Host::Verdict::welcome;
    const int wake = loop_.wake_descriptor();
    loop_.unwatch(newcomer.socket.get());
    // The answer is small: a socket that does not take it at once has been filled on purpose.
    send_with_fds(newcomer.socket.get(), bytes, rings ? std::span(&wake, 1) : std::span<const int>(),
                  Deadline::after(0));
    if (verdict == Host::Verdict::refused) return drop(newcomer, true);
    link = rings ? ring_link(std::move(newcomer.socket), newcomer.fds[0], std::move(newcomer.fds[1]), false)
                 : tcp_link(std::move(newcomer.socket));
    accepted = join;
  } catch (const std::exception&) {
    return drop(newcomer, true);
  }
  drop(newcomer, false);
  host_.enter(accepted, std::move(link));
}

void Acceptor::retry() {
  std::vector<Newcomer*> complete;
  for (const auto& newcomer : newcomers_) {
    if (newcomer->filled == sizeof(Join)) complete.push_back(newcomer.get());
  }
  for (Newcomer* const newcomer : complete) step(*newcomer);
}

uint64_t Acceptor::due() {
  uint64_t least = ~uint64_t{0};
  for (auto place = newcomers_.begin(); place != newcomers_.end();) {
    Newcomer& newcomer = **place++;
    if (newcomer.deadline.passed()) {
      drop(newcomer, true);
    } else {
      least = std::min(least, newcomer.deadline.left_ns());
    }
  }
  return least;
}

// --- the dialing side -----------------------------------------------------------------------------------------------

namespace {

// Sends the Join and receives the Welcome, over a socket that has completed the handshake.
Dialled introduce(Descriptor socket, Join join, const EventLoop& loop, bool rings, Deadline deadline,
                  const std::function<void()>& check) {
  Dialled out;
  RingMemory memory;
  std::vector<int> sent;
  if (rings) {
    memory = RingMemory::make();
    sent = {memory.memory.get(), loop.wake_descriptor()};
    join.ring_bytes = kLinkRingBytes;
  }
  send_with_fds(socket.get(), std::as_bytes(std::span(&join, 1)), sent, deadline);
  std::vector<Descriptor> fds;
  auto rest = std::as_writable_bytes(std::span(&out.welcome, 1));
  while (!rest.empty()) {
    if (!wait_for(socket.get(), POLLIN, deadline.sooner(kCheckEveryS))) {
      if (deadline.passed()) fail(ErrorKind::timed_out, "it did not answer in time");
      check();
      Interruption::check();
      continue;
    }
    const ssize_t got = receive_with_fds(socket.get(), rest, &fds);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got <= 0) fail(ErrorKind::peer_lost, "it hung up");
    rest = rest.subspan(static_cast<size_t>(got));
  }
  if (out.welcome.magic != kCollectiveMagic) fail(ErrorKind::frame, "what answers there is not a member of a group");
  if (const std::string refusal = text_from(out.welcome.refusal); !refusal.empty()) {
    fail(ErrorKind::argument, "it refuses: ", refusal);
  }
  if (rings && fds.size() != 1) fail(ErrorKind::frame, "its answer came without its eventfd");
  out.link = rings ? ring_link(std::move(socket), memory.memory, std::move(fds[0]), true) : tcp_link(std::move(socket));
  return out;
}

Dialled dial_unix(const std::string& name, const Address& address, const Options& options, const Join& join,
                  const EventLoop& loop, Deadline deadline, const std::function<void()>& check) {
  Descriptor socket = connect_unix(name, deadline);
  greet(socket.get(), Intent::raw, address, options, deadline);
  return introduce(std::move(socket), join, loop, true, deadline, check);
}

}  // namespace

Dialled dial(const std::string& place, const std::string& secret, Join join, const EventLoop& loop, bool shm,
             Deadline deadline, const std::function<void()>& check) {
  Address address;
  if (place.find('=') == std::string::npos) {
    address.tcp.push_back(place);
  } else {
    address = Address::parse(place);
  }
  Options options;
  options.secret = secret;
  std::string why;
  if (shm && !address.shm.empty()) {
    try {
      return dial_unix(address.shm, address, options, join, loop, deadline, check);
    } catch (const Error& error) {
      // Another host, or memory that cannot be shared: TCP may do. A refusal is final.
      if (error.kind != ErrorKind::not_viable && error.kind != ErrorKind::no_space) throw;
      why = error.what();
    }
  }
  for (const std::string& where : address.tcp) {
    const bool last = &where == &address.tcp.back();
    try {
      const Deadline soon = last ? deadline : deadline.sooner(options.limits.handshake_timeout_s);
      Descriptor socket = connect_tcp(where, soon);
      const Session session = greet(socket.get(), Intent::raw, address, options, soon);
      if (shm && address.shm.empty()) {
        // A reducer, of which only the port is known. On this host its Unix socket is named by its id.
        try {
          return dial_unix("geartrain-" + hex(session.listener), address, options, join, loop, deadline, check);
        } catch (const Error& error) {
          if (error.kind != ErrorKind::not_viable && error.kind != ErrorKind::no_space) throw;
        }
      }
      return introduce(std::move(socket), join, loop, false, deadline, check);
    } catch (const Error& error) {
      if (last || error.kind == ErrorKind::untrusted || error.kind == ErrorKind::argument) throw;
      why = error.what();
    }
  }
  fail(ErrorKind::not_viable, why.empty() ? "it does not listen for TCP" : why);
}

}  // namespace geartrain
