#include "collectives/membership.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "base/interruption.h"
#include "base/sha256.h"
#include "transport/providers/at_once.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr char kHostMark[] = ";host=";
constexpr char kKeyMark[] = ";key=";
constexpr uint64_t kNever = ~uint64_t{0};
constexpr double kDialPauseS = 0.05;
constexpr uint32_t kMostDials = 32;  // at once

void add_counts(const Peer& peer, GroupCounts* out) {
  const bool tcp = std::strcmp(peer.transport(), "tcp") == 0;
  (tcp ? out->sent_tcp : out->sent_shm) += peer.bytes_sent();
  (tcp ? out->received_tcp : out->received_shm) += peer.bytes_received();
  out->read_denied += peer.read_denied();
}

// The same for processes that find each other's Unix sockets: one kernel and one network.
std::string host_token() {
  char boot[64] = {}, network[64] = {};
  const Descriptor id(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!id || ::read(id.get(), boot, sizeof boot) <= 0) return {};
  const ssize_t length = ::readlink("/proc/self/ns/net", network, sizeof network);
  if (length <= 0) return {};
  std::vector<std::byte> both;
  append(&both, boot, sizeof boot);
  append(&both, network, static_cast<size_t>(length));
  const Digest digest = sha256(both);
  return hex(std::span(digest).first(8));
}

// What stands behind a mark, up to the next one. Empty: nothing.
std::string marked(const std::string& address, const char* mark) {
  const size_t at = address.find(mark);
  if (at == std::string::npos) return {};
  const size_t from = at + std::strlen(mark);
  return address.substr(from, address.find(';', from) - from);
}

[[noreturn]] void fail_by(const Fault& ended) {
  fail(ended.kind == FaultKind::closed ? ErrorKind::hung_up : ErrorKind::peer_lost, ended.text);
}

// Of dials at once: which members were not reached, and why.
class Unreached {
 public:
  // Trying again does not help, and nor does waiting for the others.
  static bool is_final(ErrorKind kind) {
    return kind != ErrorKind::not_viable && kind != ErrorKind::peer_lost && kind != ErrorKind::timed_out;
  }
  void note(uint32_t member, const Error& error) {
    std::lock_guard lock(mutex_);
    errors_.emplace(member, error);
  }
  bool any() const {
    std::lock_guard lock(mutex_);
    return !errors_.empty();
  }
  // Throws MembersUnreached where there is one, with the kind of one that says more than that nobody answers.
  void check() const {
    std::lock_guard lock(mutex_);
    if (errors_.empty()) return;
    ErrorKind kind = errors_.begin()->second.kind;
    std::string text;
    std::vector<uint32_t> members;
    for (const auto& [member, error] : errors_) {
      if (is_final(error.kind)) kind = error.kind;
      text += (text.empty() ? "" : "; ") + std::string(error.what());
      members.push_back(member);
    }
    throw MembersUnreached(kind, text, members);
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint32_t, Error> errors_;  // by member
};

}  // namespace

std::string ranks_text(std::span<const uint32_t> ranks) {
  std::string out;
  for (const uint32_t rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return out;
}

Membership::Membership(const GroupOptions& options, EventLoop& loop, Peer::Side& side, Events events)
    : options_(options),
      members_(options.world + static_cast<uint32_t>(options.reducers.size())),
      loop_(loop),
      side_(side),
      events_(std::move(events)),
      out_of_memory_(std::make_shared<const Fault>(
          Fault{FaultKind::aborted, "rank " + std::to_string(options.rank) + " ran out of memory", {options.rank}})),
      peers_(members_),
      dropped_(members_),
      left_at_(members_, kNever) {}

void Membership::open() {
  AcceptorOptions acceptor;
  acceptor.host = options_.host;
  acceptor.advertise = options_.advertise;
  acceptor.secret = options_.secret;
  acceptor.shm = options_.shm;
  acceptor.max_window_bytes = options_.max_window_bytes;
  if (options_.secret.empty()) {
    // The address admits its holder: it is passed to the other ranks, and nowhere else.
    std::array<uint8_t, 16> key;
    random_bytes(key);
    acceptor.secret = hex(key);
  }
  acceptor_ = std::make_unique<Acceptor>(loop_, acceptor, *this);
  address_ = acceptor_->address();
  if (const std::string host = host_token(); options_.shm && !host.empty()) address_ += kHostMark + host;
  if (options_.secret.empty()) address_ += kKeyMark + acceptor.secret;
}

void Membership::connect(const std::vector<std::string>& addresses, Deadline deadline) {
  if (addresses.size() != options_.world) {
    fail(ErrorKind::argument, "there are ", options_.world, " ranks, but ", addresses.size(), " addresses");
  }
  const std::string host = marked(addresses[0], kHostMark);
  one_host_ = !host.empty() && std::all_of(addresses.begin(), addresses.end(), [&](const std::string& address) {
    return marked(address, kHostMark) == host;
  });
  Join join{};
  join.magic = kCollectiveMagic;
  join.version = kCollectiveVersion;
  join.rank = options_.rank;
  join.world = options_.world;
  join.owners = owners_of(options_.shares);
  put_text(join.name, options_.name);
  identify(addresses, &join);
  const bool posted = loop_.post([this, join] {
    expected_ = join;
    ready_ = true;
    acceptor_->retry();
  });
  if (!posted) fail(ErrorKind::hung_up, "the group was closed");
  try {
    dial_members(join, addresses, deadline);
  } catch (const MembersUnreached& error) {
    // Members that were reached are told at once; they would wait for this one until their deadlines.
    const FaultKind kind = error.members[0] < options_.world ? FaultKind::rank_lost : FaultKind::reducer_lost;
    const std::string text = "rank " + std::to_string(options_.rank) + " " + error.what();
    loop_.post([this, kind, text, members = error.members] { end({kind, text, members}); });
    throw;
  }
  wait_for_all(deadline);
}

// A member that does not answer keeps this rank from no other, and all that it cannot reach are named.
void Membership::dial_members(const Join& join, const std::vector<std::string>& addresses, Deadline deadline) {
  std::vector<uint32_t> members;
  for (uint32_t member = 0; member < members_; ++member) {
    if (linked(member) && (member < options_.rank || member >= options_.world)) members.push_back(member);
  }
  Unreached unreached;
  const auto dial_one = [&](uint32_t i) {
    if (deadline.passed() && unreached.any()) return;  // it had no turn, which is not its fault
    Join to = join;
    to.member = members[i];
    to.channel = channel_of(members[i]);
    try {
      dial_member(members[i], to, addresses, deadline);
    } catch (const MembersUnreached& error) {
      unreached.note(members[i], error);
      if (Unreached::is_final(error.kind)) throw;
    }
  };
  try {
    at_once(static_cast<uint32_t>(members.size()), kMostDials, dial_one);
  } catch (const Error&) {
    unreached.check();
    throw;
  }
  unreached.check();
}

// Whether this rank and that member are connected.
bool Membership::linked(uint32_t member) const {
  if (member == options_.rank) return false;
  if (options_.ring) return member == next_rank() || member == previous_rank();
  if (options_.outlives_reducers && member < options_.world) return true;
  return options_.shares[member] > 0 || (member < options_.world && options_.shares[options_.rank] > 0);
}

// Among the connections to one reducer, which may be listed once for each of its threads.
uint32_t Membership::channel_of(uint32_t member) const {
  if (member < options_.world) return 0;
  const auto here = options_.reducers.begin() + (member - options_.world);
  return static_cast<uint32_t>(std::count(options_.reducers.begin(), here, *here));
}

void Membership::identify(const std::vector<std::string>& addresses, Join* join) const {
  std::vector<std::byte> who, how;
  for (const std::string& address : addresses) append(&who, address.c_str(), address.size() + 1);
  append(&who, options_.name.c_str(), options_.name.size() + 1);
  const uint32_t numbers[] = {options_.world, members_, options_.ring};
  append(&how, numbers, 3);
  append(&how, options_.shares.data(), options_.shares.size());
  if (const uint64_t window = options_.most_window_bytes(); options_.outlives_reducers) append(&how, &window, 1);
  const Digest group = sha256(who), settings = sha256(how);
  std::memcpy(join->group, group.data(), sizeof join->group);
  std::memcpy(join->settings, settings.data(), sizeof join->settings);
}

void Membership::dial_member(uint32_t member, const Join& join, const std::vector<std::string>& addresses,
                             Deadline deadline) {
  const bool rank = member < options_.world;
  std::string place = rank ? addresses[member] : options_.reducers[member - options_.world];
  std::string secret = options_.secret;
  if (rank) {
    if (secret.empty()) secret = marked(place, kKeyMark);
    place.resize(std::min({place.size(), place.find(kHostMark), place.find(kKeyMark)}));
  }
  const auto check = [this] {
    if (const Fault ended = fault(); ended.kind != FaultKind::none) fail_by(ended);
  };
  for (;;) {
    try {
      auto dialled = std::make_shared<Dialled>(dial(place, secret, join, loop_, options_.shm, deadline, check));
      const bool posted = loop_.post([this, member, dialled] {
        events_.welcome(dialled->welcome.max_window_bytes);
        add_peer(member, std::move(dialled->link));
      });
      if (!posted) fail(ErrorKind::hung_up, "the group was closed");
      return;
    } catch (const Error& error) {
      // A member that has not started yet, or is restarting.
      const bool again = error.kind == ErrorKind::not_viable || error.kind == ErrorKind::peer_lost;
      if (!again || deadline.passed()) {
        // Named by the error itself: the fault that follows may come too late for who asks, or after another one.
        throw MembersUnreached(error.kind, "cannot reach " + name_of(member) + ": " + error.what(), {member});
      }
      check();
      Interruption::check();
      std::this_thread::sleep_for(std::chrono::duration<double>(kDialPauseS));
    }
  }
}

void Membership::wait_for_all(Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (fault_ != nullptr) fail_by(*fault_);
    std::vector<uint32_t> missing;
    for (uint32_t member = 0; member < members_; ++member) {
      if (linked(member) && !met_.contains(member)) missing.push_back(member);
    }
    if (missing.empty()) return;
    if (deadline.passed()) {
      fail(ErrorKind::timed_out, "rank(s) ", ranks_text(missing), " did not join the group '", options_.name,
           "' in time");
    }
    met_changed_.wait_for(lock, std::chrono::nanoseconds(std::min<uint64_t>(deadline.left_ns(), 100'000'000)));
    lock.unlock();
    Interruption::check();
    lock.lock();
  }
}

Acceptor::Host::Verdict Membership::judge(const Join& join, std::string* refusal) {
  if (fault_ == nullptr && !ready_) return Verdict::later;
  if (fault_ != nullptr) {
    *refusal = fault_->text;
  } else if (std::memcmp(join.group, expected_.group, sizeof join.group) != 0) {
    *refusal = "it belongs to another group, or to another epoch of this one";
  } else if (std::memcmp(join.settings, expected_.settings, sizeof join.settings) != 0 ||
             join.world != options_.world) {
    *refusal = "ranks disagree about shares, reducers or the algorithm of the group";
  } else if (join.member != options_.rank || join.rank <= options_.rank || !linked(join.rank)) {
    *refusal = "rank " + std::to_string(join.rank) + " is not expected here";
  } else if (peers_[join.rank] != nullptr) {
    *refusal = "rank " + std::to_string(join.rank) + " is here already";
  } else {
    return Verdict::welcome;
  }
  return Verdict::refused;
}

void Membership::add_peer(uint32_t member, std::unique_ptr<Link> link) {
  if (peers_[member] != nullptr || over()) return;
  if (!dropped_[member]) {
    if (options_.cross_memory) link->allow_reading();
    peers_[member] = std::make_unique<Peer>(loop_, std::move(link), member, side_);
    events_.entered(member);
    kick(member);
  }
  std::lock_guard lock(mutex_);
  met_.insert(member);
  met_changed_.notify_all();
}

Fault Membership::fault() const {
  std::lock_guard lock(mutex_);
  return fault_ == nullptr ? Fault{} : *fault_;
}

std::string Membership::name_of(uint32_t member) const {
  return member < options_.world ? "rank " + std::to_string(member)
         : member < members_     ? "reducer " + options_.reducers[member - options_.world]
                                 : "no member";
}

Fault Membership::left_fault(uint32_t member, uint64_t operation) const {
  return {member < options_.world ? FaultKind::rank_lost : FaultKind::reducer_lost,
          name_of(member) + " has left the group, and operation " + std::to_string(operation) + " waits for it",
          {member}};
}

void Membership::send_control(uint32_t member, FrameKind kind, uint64_t operation, uint64_t offset,
                              std::span<const std::byte> payload) const {
  if (peers_[member] == nullptr) return;
  peers_[member]->send_control(kind, operation, offset, payload);
  peers_[member]->kick();
}

void Membership::kick(uint32_t member) const {
  if (peers_[member] != nullptr) peers_[member]->kick();
}

void Membership::end(Fault fault, bool notify) {
  if (over()) return;
  std::shared_ptr<const Fault> ending;
  try {
    ending = std::make_shared<const Fault>(std::move(fault));
  } catch (const std::bad_alloc&) {
    ending = out_of_memory_;
  }
  end_by(std::move(ending), notify);
}

void Membership::failed(const std::exception& error) noexcept {
  if (over()) return;
  std::shared_ptr<const Fault> ending = out_of_memory_;
  if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr) {
    try {
      const std::string text = "rank " + std::to_string(options_.rank) + " failed: " + error.what();
      ending = std::make_shared<const Fault>(Fault{FaultKind::aborted, text, {options_.rank}});
    } catch (const std::exception&) {
      ending = out_of_memory_;
    }
  }
  end_by(std::move(ending), true);
}

// First what needs no memory: it may be the lack of it that ends the group.
void Membership::end_by(std::shared_ptr<const Fault> fault, bool notify) {
  {
    std::lock_guard lock(mutex_);
    fault_ = std::move(fault);
    met_changed_.notify_all();
  }
  for_each_open([](Peer& peer) { peer.blank(); });
  events_.ended();
  std::vector<std::byte> payload;
  for_each_open([&](Peer& peer) {
    try {
      if (notify && payload.empty()) payload = bytes_of(*fault_);
      if (notify) peer.send_control(FrameKind::fault, 0, 0, payload);
      peer.kick();
    } catch (const std::exception&) {
      // Then its connection tells it.
      peer.close();
      discard(peer.member());
    }
  });
  if (!notify) return;
  try {
    refuse_waiting();
  } catch (const std::exception&) {
    // They find out when the listener is gone.
  }
}

void Membership::discard(uint32_t member) {
  add_counts(*peers_[member], &gone_counts_);
  loop_.discard(std::move(peers_[member]));
}

void Membership::drop(uint32_t member) {
  dropped_[member] = true;
  if (peers_[member] == nullptr) return;
  peers_[member]->close();
  discard(member);
}

void Membership::readmit(uint32_t member, Dialled dialled) {
  dropped_[member] = false;
  events_.welcome(dialled.welcome.max_window_bytes);
  add_peer(member, std::move(dialled.link));
}

Join Membership::join_to(uint32_t member) const {
  Join join = expected_;
  join.member = member;
  join.channel = channel_of(member);
  return join;
}

bool Membership::has_left(uint32_t member) const {
  return left_at_[member] != kNever;
}

Fault Membership::missing_for(uint64_t operation) const {
  for (uint32_t member = 0; member < members_; ++member) {
    if (operation >= left_at_[member]) return left_fault(member, operation);
  }
  return {};
}

void Membership::count(GroupCounts* out) const {
  *out = gone_counts_;
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    add_counts(*peer, out);
    ++(std::strcmp(peer->transport(), "tcp") == 0 ? out->links_tcp : out->links_shm);
  }
}

}  // namespace geartrain
