#include "collectives/group.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "base/clock.h"
#include "base/sha256.h"

namespace geartrain {
namespace {

constexpr char kKeyMark[] = ";key=";
constexpr uint64_t kNever = ~uint64_t{0};
constexpr double kDialPauseS = 0.05;

void check_options(GroupOptions* options) {
  const size_t members = options->world + options->reducers.size();
  if (options->world == 0 || options->rank >= options->world) {
    fail(ErrorKind::schema, "rank ", options->rank, " is not one of ", options->world);
  }
  if (members > kMostMembers) fail(ErrorKind::schema, "a group has ", kMostMembers, " members at most");
  if (options->ring && !options->reducers.empty()) fail(ErrorKind::schema, "a ring has no place for reducers");
  if (options->shares.empty()) {
    options->shares.assign(members, 0.0);
    std::fill_n(options->shares.begin(), options->world, 1.0 / options->world);
  }
  double sum = 0;
  for (const double share : options->shares) {
    if (!(share >= 0) || share > 1) fail(ErrorKind::schema, "a share is a number from 0 to 1, found ", share);
    sum += share;
  }
  if (options->shares.size() != members) {
    fail(ErrorKind::schema, "there are ", options->world, " ranks and ", options->reducers.size(), " reducers, but ",
         options->shares.size(), " shares");
  }
  if (std::abs(sum - 1) > 1e-6) fail(ErrorKind::schema, "shares are 1 in all, found ", sum);
}

std::string ranks_text(std::span<const uint32_t> ranks) {
  std::string out;
  for (const uint32_t rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return out;
}

}  // namespace

class Group::Body final : public Peer::Side,
                          public Owner::Host,
                          public Shares::Host,
                          public Ring::Host,
                          public Door::Host {
 public:
  explicit Body(GroupOptions options)
      : options_(std::move(options)),
        members_(options_.world + static_cast<uint32_t>(options_.reducers.size())),
        peers_(members_),
        left_at_(members_, kNever),
        owner_(blocks_, *this, options_.world, options_.rank, chunk_bytes(owners()), options_.max_window_bytes),
        shares_(blocks_, *this, options_.shares, options_.rank, options_.max_window_bytes),
        ring_(blocks_, *this, options_.rank, options_.world),
        loop_("geartrain group") {
    if (options_.fixed_window_bytes != 0) shares_.window().fix(options_.fixed_window_bytes);
    DoorOptions door;
    door.host = options_.host;
    door.advertise = options_.advertise;
    door.secret = options_.secret;
    door.shm = options_.shm;
    door.max_window_bytes = options_.max_window_bytes;
    if (options_.secret.empty()) {
      // Whoever is told the address may come in: it goes to the other ranks, and nowhere else.
      std::array<uint8_t, 16> key;
      random_bytes(key);
      door.secret = Hex(key);
    }
    door_ = std::make_unique<Door>(loop_, door, *this);
    address_ = door_->address();
    if (options_.secret.empty()) address_ += kKeyMark + door.secret;
    loop_.post([this] { loop_.on_time([this] { return on_time(); }); });
  }

  ~Body() override {
    door_->close();
    loop_.stop();
    peers_.clear();
    if (fault_.kind == FaultKind::none) fault_ = {FaultKind::closed, "the group was closed", {}};
    finish_all();
    door_.reset();
  }

  // --- meeting, on the caller's thread ------------------------------------------------------------------------------

  const std::string& address() const { return address_; }

  void connect(const std::vector<std::string>& addresses, Deadline deadline) {
    if (addresses.size() != options_.world) {
      fail(ErrorKind::schema, "there are ", options_.world, " ranks, but ", addresses.size(), " addresses");
    }
    Join join{};
    join.magic = kCollectiveMagic;
    join.version = kCollectiveVersion;
    join.rank = options_.rank;
    join.world = options_.world;
    join.owners = owners();
    put_text(join.name, options_.name);
    identify(addresses, &join);
    loop_.post([this, join] {
      expected_ = join;
      ready_ = true;
      door_->retry();
    });
    for (uint32_t member = 0; member < members_; ++member) {
      if (!linked(member) || (member > options_.rank && member < options_.world)) continue;
      Join to = join;
      to.member = member;
      dial_member(member, to, addresses, deadline);
    }
    wait_for_all(deadline);
  }

  // --- operations, from any thread ----------------------------------------------------------------------------------

  std::shared_ptr<Work> all_reduce(const Shape& shape, const void* in, void* out, double timeout_s) {
    if (shape.op == Op::avg && !is_float(shape.dtype)) {
      fail(ErrorKind::schema, "the average of ", geartrain::name_of(shape.dtype), " is not one of them");
    }
    if (shape.wire != shape.dtype && (shape.dtype != Dtype::float32 || !convertible(shape.dtype, shape.wire))) {
      fail(ErrorKind::schema, geartrain::name_of(shape.dtype), " cannot travel as ", geartrain::name_of(shape.wire));
    }
    Shape asked = shape;
    asked.algorithm = options_.ring;
    auto work =
        std::make_shared<Work>(asked, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), timeout_s);
    // Under the mutex, so that numbers follow the order of the calls.
    std::lock_guard lock(order_mutex_);
    if (!loop_.post([this, work] { begin(work); })) fail(ErrorKind::hung_up, "the group was closed");
    return work;
  }

  GroupCounts counts() {
    GroupCounts out;
    call([&] {
      out = gone_counts_;
      for (const auto& peer : peers_) {
        if (peer != nullptr) count(*peer, &out, true);
      }
      out.operations = operations_done_;
      out.elements = elements_;
      out.array_bytes = array_bytes_;
      out.reduced_bytes = owner_.reduced_bytes();
      out.window_bytes = shares_.window().bytes();
      out.least_delay_ns = shares_.window().least_delay_ns();
    });
    out.refused = door_->refused();
    return out;
  }

  Fault fault() const {
    std::lock_guard lock(mutex_);
    return fault_;
  }

  std::string name_of(uint32_t member) const {
    return member < options_.world ? "rank " + std::to_string(member)
           : member < members_     ? "reducer " + options_.reducers[member - options_.world]
                                   : "nobody";
  }

  uint32_t settled() const { return settled_.load(std::memory_order_relaxed); }

  void abort(const std::string& reason) {
    call([&] {
      end({FaultKind::aborted, "rank " + std::to_string(options_.rank) + " aborted: " + reason, {options_.rank}});
    });
  }

  void close(Deadline deadline) {
    // What others still wait for goes first.
    for (bool waiting = true; waiting && !deadline.passed();) {
      call([&] {
        waiting = fault_.kind == FaultKind::none && (owner_.oldest() < next_number_ || !works_.empty());
        for (const auto& peer : peers_) waiting |= peer != nullptr && !peer->closed() && !peer->drained();
      });
      if (waiting) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    call([&] {
      for (const auto& peer : peers_) {
        if (peer == nullptr || peer->closed()) continue;
        peer->say(FrameKind::bye, works_.empty() ? next_number_ : works_.front()->number);
        peer->kick();
      }
      closing_ = true;
      end({FaultKind::closed, "the group was closed", {}}, false);
    });
    for (bool waiting = true; waiting && !deadline.passed();) {
      waiting = false;
      call([&] {
        for (const auto& peer : peers_) waiting |= peer != nullptr && !peer->closed() && !peer->drained();
      });
      if (waiting) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    loop_.stop();
    peers_.clear();  // the others see the end now, and not when somebody destroys this
  }

 private:
  static std::string Hex(std::span<const uint8_t> bytes) {
    std::string text;
    for (const uint8_t byte : bytes) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    return text;
  }

  uint32_t owners() const {
    return static_cast<uint32_t>(
        std::count_if(options_.shares.begin(), options_.shares.end(), [](double share) { return share > 0; }));
  }

  // Whether this rank and that member speak to each other.
  bool linked(uint32_t member) const {
    if (member == options_.rank) return false;
    if (options_.ring) return member == next_rank() || member == previous_rank();
    return options_.shares[member] > 0 || (member < options_.world && options_.shares[options_.rank] > 0);
  }

  uint32_t next_rank() const { return (options_.rank + 1) % options_.world; }
  uint32_t previous_rank() const { return (options_.rank + options_.world - 1) % options_.world; }

  void identify(const std::vector<std::string>& addresses, Join* join) const {
    std::vector<std::byte> who, how;
    for (const std::string& address : addresses) append(&who, address.c_str(), address.size() + 1);
    append(&who, options_.name.c_str(), options_.name.size() + 1);
    const uint32_t numbers[] = {options_.world, members_, options_.ring};
    append(&how, numbers, 3);
    append(&how, options_.shares.data(), options_.shares.size());
    const Digest group = sha256(who), settings = sha256(how);
    std::memcpy(join->group, group.data(), sizeof join->group);
    std::memcpy(join->settings, settings.data(), sizeof join->settings);
  }

  void dial_member(uint32_t member, const Join& join, const std::vector<std::string>& addresses, Deadline deadline) {
    const bool rank = member < options_.world;
    std::string place = rank ? addresses[member] : options_.reducers[member - options_.world];
    std::string secret = options_.secret;
    if (const size_t mark = place.find(kKeyMark); rank && mark != std::string::npos) {
      if (secret.empty()) secret = place.substr(mark + sizeof kKeyMark - 1);
      place.resize(mark);
    }
    for (;;) {
      try {
        auto dialled = std::make_shared<Dialled>(dial(place, secret, join, loop_, options_.shm, deadline));
        const bool posted = loop_.post([this, member, dialled] {
          shares_.window().limit(dialled->welcome.max_window_bytes);
          meet(member, std::move(dialled->link));
        });
        if (!posted) fail(ErrorKind::hung_up, "the group was closed");
        return;
      } catch (const Error& error) {
        // Somebody who has not come up yet, or is just coming back.
        const bool again = error.kind == ErrorKind::not_viable || error.kind == ErrorKind::peer_lost;
        if (!again || deadline.passed()) {
          throw Error(error.kind, "cannot reach " + name_of(member) + ": " + error.what());
        }
        if (const Fault ended = fault(); ended.kind != FaultKind::none) fail(ErrorKind::peer_lost, ended.text);
        std::this_thread::sleep_for(std::chrono::duration<double>(kDialPauseS));
      }
    }
  }

  void wait_for_all(Deadline deadline) {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (fault_.kind != FaultKind::none) fail(ErrorKind::peer_lost, fault_.text);
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
    }
  }

  // Runs on the loop and waits for it; at once when the loop has stopped.
  void call(const std::function<void()>& what) {
    std::mutex mutex;
    std::condition_variable over;
    bool done = false;
    const bool posted = loop_.post([&] {
      what();
      std::lock_guard lock(mutex);
      done = true;
      over.notify_all();
    });
    if (!posted) return;
    std::unique_lock lock(mutex);
    over.wait(lock, [&] { return done; });
  }

  // --- on the loop from here on -------------------------------------------------------------------------------------

  Verdict judge(const Join& join, std::string* refusal) override {
    if (!ready_) return Verdict::later;
    if (fault_.kind != FaultKind::none) {
      *refusal = fault_.text;
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

  void enter(const Join& join, std::unique_ptr<Link> link) override { meet(join.rank, std::move(link)); }

  void meet(uint32_t member, std::unique_ptr<Link> link) {
    if (peers_[member] != nullptr || fault_.kind != FaultKind::none) return;
    peers_[member] = std::make_unique<Peer>(loop_, std::move(link), member, *this);
    peers_[member]->kick();
    std::lock_guard lock(mutex_);
    met_.insert(member);
    met_changed_.notify_all();
  }

  void begin(const std::shared_ptr<Work>& work) {
    if (fault_.kind != FaultKind::none) return work->finish(fault_);
    work->number = next_number_++;
    works_.push_back(work);
    const uint64_t left = work->deadline.left_ns();
    look_at_ns_ = std::min(look_at_ns_, monotonic_ns() + left - std::min(left, work->ask_ns));
    for (uint32_t member = 0; member < members_; ++member) {
      if (work->number >= left_at_[member]) return end(left_fault(member, work->number));
    }
    if (options_.ring) return ring_.begin(work);
    const auto [first, last] = shares_.begin(work);
    if (first <= last) {
      owner_.open_local(work->number, work->shape, (last - first) * bytes_of(work->shape.wire),
                        work->in + first * bytes_of(work->shape.dtype), shares_.completed());
    }
    if (fault_.kind == FaultKind::none) shares_.start();
  }

  void open(uint32_t owner, uint64_t operation, const Open& open) override {
    peers_[owner]->say(FrameKind::open, operation, 0, std::as_bytes(std::span(&open, 1)));
  }
  void parts_for(uint32_t owner) override {
    if (peers_[owner] != nullptr) peers_[owner]->kick();
  }
  void results_for(uint32_t rank) override {
    if (peers_[rank] != nullptr) peers_[rank]->kick();
  }
  void deliver(uint64_t operation, uint64_t offset, std::span<const std::byte> result) override {
    shares_.deliver(operation, offset, result);
  }
  void open_next(uint64_t operation, const Open& what) override { open(next_rank(), operation, what); }
  void ring_for_next() override { parts_for(next_rank()); }
  void ring_room() override {
    if (peers_[previous_rank()] != nullptr) peers_[previous_rank()]->resume();
  }
  void disagree(const std::string& text, std::vector<uint32_t> ranks) override {
    end({FaultKind::disagree, text, std::move(ranks)});
  }

  void completed(const std::shared_ptr<Work>& work) override {
    std::erase(works_, work);
    settled_.store(std::max(shares_.settled(), options_.shares[options_.rank] > 0 ? owner_.settled() : 0u),
                   std::memory_order_relaxed);
    ++operations_done_;
    elements_ += work->shape.count;
    array_bytes_ += work->shape.count * bytes_of(work->shape.dtype);
    work->finish();
  }

  std::span<std::byte> room(Peer& peer, const WireHeader& header) override {
    if (fault_.kind != FaultKind::none) return nowhere_;
    switch (static_cast<FrameKind>(header.kind)) {
      case FrameKind::ring:
        check_ring(peer);
        return ring_.room(header);
      case FrameKind::part:
        if (peer.member() >= options_.world || options_.shares[options_.rank] <= 0) {
          fail(ErrorKind::frame, "it sent a part to somebody who owns nothing");
        }
        if (options_.ring) fail(ErrorKind::frame, "it sent a part into a ring");
        return owner_.room(peer.member(), header);
      case FrameKind::result:
        return shares_.room(peer.member(), header);
      default:
        fail(ErrorKind::frame, "it sent data of no known kind");
    }
  }

  void took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) override {
    const auto kind = static_cast<FrameKind>(header.kind);
    if (kind == FrameKind::fault) return end(fault_from(payload));
    if (kind == FrameKind::bye) {
      return left(peer.member(), header.operation);
    }
    if (fault_.kind != FaultKind::none) return;
    switch (kind) {
      case FrameKind::open: {
        if (peer.member() >= options_.world || header.bytes != sizeof(Open))
          fail(ErrorKind::frame, "it opened nothing");
        Open open;
        std::memcpy(&open, payload.data(), sizeof open);
        if (!options_.ring) return owner_.open(peer.member(), header.operation, open);
        check_ring(peer);
        return ring_.open(header.operation, open);
      }
      case FrameKind::ring:
        return ring_.took(header, payload);
      case FrameKind::part:
        return owner_.took(peer.member(), header);
      case FrameKind::result:
        return shares_.took(peer.member(), header, payload);
      case FrameKind::query: {
        if (options_.ring) return answer_around(header.operation);
        uint64_t bytes, of;
        const auto ranks = owner_.least_advanced(header.operation, &bytes, &of);
        peer.say(FrameKind::status, header.operation, 0, members_bytes(bytes, of, ranks));
        return peer.kick();
      }
      case FrameKind::status: {
        uint64_t bytes, of;
        answers_[peer.member()] = members_from(payload, &bytes, &of);
        if (ring_asked_) tell_next(header.operation, answers_[peer.member()]);
        return;
      }
      default:
        fail(ErrorKind::frame, "it sent a frame of the wrong kind");
    }
  }

  bool next(Peer& peer, OutFrame* frame) override {
    if (fault_.kind != FaultKind::none) return false;
    // Results first: they are what the other side waits for before it may go on.
    if (options_.ring) return peer.member() == next_rank() && ring_.next(frame);
    return (peer.member() < options_.world && owner_.next(peer.member(), frame)) || shares_.next(peer.member(), frame);
  }

  void lost(Peer& peer, const std::string& why) override {
    const uint32_t member = peer.member();
    count(peer, &gone_counts_, false);
    loop_.discard(std::move(peers_[member]));
    if (closing_ || fault_.kind != FaultKind::none) return;
    uint64_t operation, bytes, of;
    if (left_at_[member] != kNever) {
      // What it had done it has sent before, unless it was in a hurry.
      if (shares_.owes(member, &operation, &bytes, &of)) end(left_fault(member, operation));
      return;
    }
    std::ostringstream text;
    text << name_of(member) << " went away (" << why << ")";
    if (shares_.owes(member, &operation, &bytes, &of)) {
      text << " in operation " << operation << ", after " << bytes << " of " << of << " bytes of its share";
    } else if (member < options_.world && owner_.involves(member, &operation, &bytes, &of)) {
      text << " in operation " << operation << ", after sending " << bytes << " of " << of << " bytes";
    } else {
      text << " between operations, after " << operations_done_;
    }
    text << " [seen by rank " << options_.rank << "]";
    end({member < options_.world ? FaultKind::rank_lost : FaultKind::reducer_lost, text.str(), {member}});
  }

  void left(uint32_t member, uint64_t done) {
    left_at_[member] = done;
    for (const auto& work : works_) {
      if (work->number >= done) return end(left_fault(member, work->number));
    }
  }

  Fault left_fault(uint32_t member, uint64_t operation) const {
    return {member < options_.world ? FaultKind::rank_lost : FaultKind::reducer_lost,
            name_of(member) + " has left the group, and operation " + std::to_string(operation) + " waits for it",
            {member}};
  }

  // The group is over: everybody is told, and nothing of the callers' memory is touched any more.
  void end(Fault fault, bool tell = true) {
    if (fault_.kind != FaultKind::none) return;
    {
      std::lock_guard lock(mutex_);
      fault_ = std::move(fault);
      met_changed_.notify_all();
    }
    const std::vector<std::byte> said = bytes_of(fault_);
    for (const auto& peer : peers_) {
      if (peer == nullptr || peer->closed()) continue;
      peer->blank();
      if (tell) peer->say(FrameKind::fault, 0, 0, said);
      peer->kick();
    }
    finish_all();
  }

  void finish_all() {
    shares_.clear();
    ring_.clear();
    std::vector<std::shared_ptr<Work>> works;
    works.swap(works_);
    for (const auto& work : works) work->finish(fault_);
  }

  // --- the ring -----------------------------------------------------------------------------------------------------

  void check_ring(const Peer& peer) const {
    if (!options_.ring || peer.member() != previous_rank()) {
      fail(ErrorKind::frame, "it sent what only the previous rank of a ring may send");
    }
  }

  void tell_next(uint64_t operation, const std::vector<uint32_t>& ranks) {
    if (peers_[next_rank()] == nullptr) return;
    peers_[next_rank()]->say(FrameKind::status, operation, 0, members_bytes(0, 0, ranks));
    peers_[next_rank()]->kick();
  }

  // Who is behind is asked against the ring's direction: each names the one before, until one is behind itself or does
  // not answer. The last answer counts.
  void answer_around(uint64_t operation) {
    if (!ring_.begun(operation)) return tell_next(operation, {options_.rank});
    if (!ring_.waits(operation)) return tell_next(operation, {});
    tell_next(operation, {previous_rank()});
    ring_asked_ = true;
    if (peers_[previous_rank()] == nullptr || previous_rank() == next_rank()) return;
    peers_[previous_rank()]->say(FrameKind::query, operation);
    peers_[previous_rank()]->kick();
  }

  // --- deadlines ----------------------------------------------------------------------------------------------------

  uint64_t on_time() {
    const uint64_t sleep = door_->due();
    if (fault_.kind != FaultKind::none || works_.empty()) return sleep;
    const uint64_t now = monotonic_ns();
    if (now < look_at_ns_) return std::min(sleep, look_at_ns_ - now);
    const auto soonest = std::min_element(works_.begin(), works_.end(), [](const auto& one, const auto& other) {
      return one->deadline.left_ns() < other->deadline.left_ns();
    });
    const Work& work = **soonest;
    const uint64_t left = work.deadline.left_ns();
    if (left == 0) {
      end(overdue(work));
      return sleep;
    }
    // A little before, the owners are asked what they wait for.
    if (left > work.ask_ns) {
      look_at_ns_ = now + left - work.ask_ns;
      return std::min(sleep, left - work.ask_ns);
    }
    if (asked_ != work.number + 1) {
      asked_ = work.number + 1;
      answers_.clear();
      for (const uint32_t owner : waited_for(work)) {
        if (owner == options_.rank || peers_[owner] == nullptr) continue;
        peers_[owner]->say(FrameKind::query, work.number);
        peers_[owner]->kick();
      }
    }
    return std::min(sleep, left);
  }

  std::vector<uint32_t> waited_for(const Work& work) const {
    return options_.ring ? std::vector<uint32_t>{previous_rank()} : shares_.incomplete(work.number);
  }

  // Who is behind: owners that do not even answer; else those whom the owners wait for, and not for everybody alike.
  Fault overdue(const Work& work) {
    std::set<uint32_t> silent, behind, all;
    for (const uint32_t owner : waited_for(work)) {
      std::vector<uint32_t> waited;
      uint64_t bytes, of;
      if (owner == options_.rank) {
        waited = owner_.least_advanced(work.number, &bytes, &of);
      } else if (answers_.contains(owner)) {
        waited = answers_[owner];
      } else {
        silent.insert(owner);
        continue;
      }
      if (options_.ring && waited.empty()) waited = {previous_rank()};
      (waited.size() + 1 >= options_.world && options_.world > 2 ? all : behind).insert(waited.begin(), waited.end());
    }
    std::set<uint32_t>& named = !silent.empty() ? silent : !behind.empty() ? behind : all;
    if (named.size() > 1) named.erase(options_.rank);
    std::vector<uint32_t> ranks;
    std::string reducers;
    for (const uint32_t member : named) {
      if (member < options_.world) ranks.push_back(member);
      if (member >= options_.world) reducers += (reducers.empty() ? "" : ", ") + name_of(member);
    }
    std::string text = "operation " + std::to_string(work.number) + " (" + work.shape.text() + ") was not over in time";
    if (!ranks.empty()) text += ", waiting for rank(s) " + ranks_text(ranks);
    if (!reducers.empty()) text += (ranks.empty() ? ", waiting for " : " and ") + reducers;
    text += " [seen by rank " + std::to_string(options_.rank) + "]";
    return {FaultKind::timed_out, text, {named.begin(), named.end()}};
  }

  static void count(const Peer& peer, GroupCounts* out, bool live) {
    const bool tcp = std::strcmp(peer.transport(), "tcp") == 0;
    (tcp ? out->sent_tcp : out->sent_shm) += peer.bytes_sent();
    (tcp ? out->received_tcp : out->received_shm) += peer.bytes_received();
    (tcp ? out->links_tcp : out->links_shm) += live;
  }

  const GroupOptions options_;
  const uint32_t members_;
  std::string address_;

  mutable std::mutex mutex_;  // of the fault, which only the loop changes, and of who has been met
  std::condition_variable met_changed_;
  std::set<uint32_t> met_;
  Fault fault_;
  std::mutex order_mutex_;

  // The loop's.
  std::vector<std::byte> nowhere_ = std::vector<std::byte>(kChunkBytes);  // for what comes when all is over
  BlockPool blocks_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by member
  std::vector<uint64_t> left_at_;             // by member: the first operation that it does not take part in
  Owner owner_;
  Shares shares_;
  Ring ring_;
  bool ring_asked_ = false;                   // the next rank wants to know what this one waits for
  std::vector<std::shared_ptr<Work>> works_;  // under way
  uint64_t next_number_ = 0;
  uint64_t operations_done_ = 0, elements_ = 0, array_bytes_ = 0;
  std::atomic<uint32_t> settled_{0};  // for all threads
  GroupCounts gone_counts_;
  Join expected_{};
  bool ready_ = false, closing_ = false;
  uint64_t look_at_ns_ = kNever;  // when the next deadline may want something
  uint64_t asked_ = 0;            // number of the operation that the owners were asked about, and one
  std::map<uint32_t, std::vector<uint32_t>> answers_;

  Loop loop_;
  std::unique_ptr<Door> door_;
};

namespace {

GroupOptions checked(GroupOptions options) {
  check_options(&options);
  return options;
}

}  // namespace

Group::Group(const GroupOptions& options) : body_(std::make_unique<Body>(checked(options))) {}

Group::~Group() = default;

const std::string& Group::address() const {
  return body_->address();
}

void Group::connect(const std::vector<std::string>& addresses, Deadline deadline) {
  body_->connect(addresses, deadline);
}

std::shared_ptr<Work> Group::all_reduce(const Shape& shape, const void* in, void* out, double timeout_s) {
  return body_->all_reduce(shape, in, out, timeout_s);
}

GroupCounts Group::counts() {
  return body_->counts();
}

Fault Group::fault() const {
  return body_->fault();
}

std::string Group::name_of(uint32_t member) const {
  return body_->name_of(member);
}

uint32_t Group::settled() const {
  return body_->settled();
}

void Group::abort(const std::string& reason) {
  body_->abort(reason);
}

void Group::close(Deadline deadline) {
  body_->close(deadline);
}

}  // namespace geartrain
