#include "collectives/operations.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace geartrain {
namespace {

constexpr uint64_t kLeastDirect = 256 << 10;
// Of what is reduced by ranks of which so many share a core: through rings they would take turns for every window.
constexpr double kCrowd = 4;
constexpr uint64_t kLeastExposed = 4 << 20;

// With more ranks than cores what a rank sends before it waits for results, since each wait is a change of ranks: as
// much as its rings hold, and the cache.
constexpr uint64_t kSharedCoreWindow = 1 << 20;

// Whether so many ranks share each core. The same on all ranks of a host, whatever cores each of them may use.
bool share_cores(uint32_t ranks, double on_each) {
  return ranks >= on_each * static_cast<double>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

// As the ranks' own operations are numbered.
WireHeader untagged(WireHeader header) {
  header.operation &= (uint64_t{1} << kReducerShift) - 1;
  return header;
}

}  // namespace

Operations::Operations(const GroupOptions& options, Membership& members, EventLoop& loop, ReducerEvents& events,
                       std::function<void()> lost, Clock now_ns)
    : options_(options),
      members_(members),
      loop_(loop),
      least_exposed_bytes_(
          options.least_exposed_bytes.value_or(share_cores(options.world, kCrowd) ? kLeastExposed : ~uint64_t{0})),
      shares_cores_(share_cores(options.world, 1.01)),
      direct_(std::max(kLeastDirect, uint64_t{2} * chunk_bytes(owners_of(options.shares)) * (options.world - 1)),
              options.max_window_bytes),
      owner_(blocks_, *this, options.world, options.rank, chunk_bytes(owners_of(options.shares)),
             options.max_window_bytes),
      shares_(blocks_, *this, options.shares, options.rank, options.max_window_bytes),
      ring_(blocks_, *this, options.rank, options.world) {
  if (options.fixed_window_bytes != 0) {
    shares_.window().fix(options.fixed_window_bytes);
    direct_.fix(options.fixed_window_bytes);
  }
  if (!options.outlives_reducers) return;
  complete_.resize(options.world);
  told_complete_.resize(options.world);
  for (uint32_t member = options.world; member < options.shares.size(); ++member) {
    const auto begun = [this] { return held_.empty() ? next_number_ : held_.front()->number; };
    const auto tell = [&events](std::string text) { events.add(std::move(text)); };
    takeovers_.push_back(std::make_unique<Takeover>(
        options, members, loop, blocks_, shares_, member,
        Takeover::Events{
            .lost = lost, .begun = begun, .resumed = [this] { resumed(); }, .tell = tell, .now_ns = now_ns}));
  }
}

void Operations::add(const std::shared_ptr<Work>& work) {
  work->number = next_number_++;
  works_.push_back(work);
}

void Operations::start(const std::shared_ptr<Work>& work) {
  if (!takeovers_.empty() && (holds() || !held_.empty())) {
    held_.push_back(work);
  } else {
    start_now(work);
  }
}

void Operations::start_now(const std::shared_ptr<Work>& work) {
  if (shares_cores_ && members_.one_host()) shares_.window().at_least(kSharedCoreWindow);
  if (options_.ring) return ring_.begin(work);
  const bool exposed = exposes(work->shape);
  read_operations_ += exposed;
  const ShardedAllreduce::Own own = shares_.begin(work, exposed);
  if (!own.used) {
    if (options_.shares[options_.rank] > 0) owner_.owns_none(work->number, work->shape);
  } else if (work->shape.direct()) {
    owner_.send_local(work->number, work->shape,
                      work->sends.size() == 1 ? std::vector(options_.world, work->sends[0]) : work->sends);
    if (work->shape.collective == Collective::one_host_broadcast) announce(*work);
  } else {
    owner_.open_local(work->number, work->shape, own.bytes, own.numbers, exposed ? own.result : nullptr);
  }
  if (!members_.over()) shares_.start();
  for (const auto& takeover : takeovers_) takeover->began();
}

// --- lost reducers --------------------------------------------------------------------------------------------------

bool Operations::lose(uint32_t member, const std::string& why) {
  if (member < options_.world || takeovers_.empty()) return false;
  takeovers_[member - options_.world]->lose(why);
  return true;
}

bool Operations::holds() const {
  return std::any_of(takeovers_.begin(), takeovers_.end(), [](const auto& one) { return one->holds(); });
}

void Operations::resumed() {
  while (!held_.empty() && !holds() && !members_.over()) {
    const std::shared_ptr<Work> work = held_.front();
    held_.pop_front();
    start_now(work);
  }
}

std::vector<uint32_t> Operations::wanted() const {
  std::vector<uint32_t> members;
  for (size_t i = 0; i < takeovers_.size(); ++i) {
    if (takeovers_[i]->wants()) members.push_back(options_.world + static_cast<uint32_t>(i));
  }
  return members;
}

void Operations::reached(uint32_t member, Dialled dialled) {
  takeovers_[member - options_.world]->reached(std::move(dialled));
}

void Operations::entered(uint32_t rank) const {
  if (rank >= options_.world) return;
  for (const auto& takeover : takeovers_) takeover->tell(rank);
}

void Operations::left() const {
  for (const auto& takeover : takeovers_) takeover->left();
}

uint64_t Operations::on_time() const {
  uint64_t sleep = ~uint64_t{0};
  for (const auto& takeover : takeovers_) {
    if (!members_.over()) sleep = std::min(sleep, takeover->on_time());
  }
  return sleep;
}

void Operations::tell_complete() {
  for (uint32_t rank = 0; rank < complete_.size(); ++rank) tell_complete(rank);
}

void Operations::tell_complete(uint32_t rank) {
  if (members_.peer(rank) == nullptr || told_complete_[rank] >= shares_.completed()) return;
  told_complete_[rank] = shares_.completed();
  members_.send_control(rank, FrameKind::complete, told_complete_[rank]);
}

void Operations::took_complete(uint32_t rank, uint64_t operations) {
  if (rank >= complete_.size() || operations < complete_[rank]) {
    fail(ErrorKind::frame, "it said that it has done ", operations, " operations");
  }
  complete_[rank] = operations;
  if (operations <= shares_.completed()) tell_complete(rank);
}

bool Operations::all_complete() const {
  for (uint32_t rank = 0; rank < complete_.size(); ++rank) {
    const bool there = members_.peer(rank) != nullptr && !members_.has_left(rank);
    if (there && complete_[rank] < next_number_) return false;
  }
  return true;
}

bool Operations::owes(uint32_t rank) const {
  uint64_t operation, bytes, of;
  return shares_.owes(rank, &operation, &bytes, &of) ||
         std::any_of(takeovers_.begin(), takeovers_.end(), [&](const auto& one) { return one->owes(rank); });
}

bool Operations::serves() const {
  return owner_.oldest() < next_number_ ||
         std::any_of(takeovers_.begin(), takeovers_.end(), [](const auto& one) { return one->serves(); });
}

std::vector<uint32_t> Operations::waited_for(uint64_t operation) const {
  std::vector<uint32_t> waited = shares_.incomplete(operation);
  for (size_t i = 0; i < takeovers_.size(); ++i) {
    const bool lost = takeovers_[i]->lost() && std::erase(waited, options_.world + i) != 0;
    if (!lost && !takeovers_[i]->holds()) continue;
    for (const uint32_t rank : takeovers_[i]->waited_for()) {
      if (std::find(waited.begin(), waited.end(), rank) == waited.end()) waited.push_back(rank);
    }
  }
  return waited;
}

Takeover& Operations::takeover_of(const Peer& peer, const WireHeader& header) const {
  const uint64_t index = (header.operation & ~kTakeover) >> kReducerShift;
  if (index >= takeovers_.size() || peer.member() >= options_.world) {
    fail(ErrorKind::frame, "it sent a frame in place of a reducer that there is not");
  }
  return *takeovers_[index];
}

// Where all links are rings, so that nobody has to wait for a result that is in the caller's memory and on a slow link.
bool Operations::exposes(const Shape& shape) const {
  return members_.one_host() && options_.world != 1 && options_.reducers.empty() && options_.cross_memory &&
         (shape.collective == Collective::all_reduce || shape.collective == Collective::reduce_scatter) &&
         shape.wire == shape.dtype && shape.wire_bytes() >= least_exposed_bytes_;
}

bool Operations::exposes_to(uint32_t owner) {
  const Peer* const peer = members_.peer(owner);
  return peer != nullptr && peer->reads_peer();
}

ReadExposed Operations::read(uint32_t rank, uint64_t address, std::span<std::byte> into) {
  const Peer* const peer = members_.peer(rank);
  if (peer == nullptr) return ReadExposed::withdrawn;
  if (!peer->reads_peer()) return ReadExposed::denied;
  const ReadExposed found = peer->read_exposed(address, into);
  if (found == ReadExposed::read) read_bytes_ += into.size();
  return found;
}

void Operations::go_on() {
  if (going_on_) return;
  going_on_ = loop_.post([this] {
    going_on_ = false;
    if (!members_.over()) owner_.go_on();
  });
}

void Operations::adopt_soon() {
  if (adopting_) return;
  adopting_ = loop_.post([this] {
    adopting_ = false;
    if (!members_.over()) shares_.adopt_all();
  });
}

bool Operations::sends_eagerly(uint32_t rank) {
  const Peer* const peer = members_.peer(rank);
  return peer != nullptr && peer->remote();
}

void Operations::finish_all() noexcept {
  shares_.clear();
  ring_.clear();
  for (const auto& takeover : takeovers_) takeover->clear();
  held_.clear();
  std::vector<std::shared_ptr<Work>> works;
  works.swap(works_);
  for (const auto& work : works) work->finish(members_.ending());
}

void Operations::completed(const std::shared_ptr<Work>& work) {
  std::erase(works_, work);
  ++done_;
  by_callers_ += loop_.driven();
  elements_ += work->shape.count;
  array_bytes_ += work->shape.count * bytes_of(work->shape.dtype);
  for (uint32_t rank = 0; rank < complete_.size(); ++rank) {
    // It leaves, and waits for this rank.
    if (complete_[rank] > told_complete_[rank] && complete_[rank] <= shares_.completed()) tell_complete(rank);
  }
  work->finish();
}

std::span<std::byte> Operations::room(const Peer& peer, const WireHeader& header) {
  if ((header.operation & kTakeover) != 0) return takeover_of(peer, header).room(peer.member(), untagged(header));
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::ring:
      check_ring(peer);
      return ring_.room(header);
    case FrameKind::part:
      if (peer.member() >= options_.world || options_.shares[options_.rank] <= 0) {
        fail(ErrorKind::frame, "it sent a part to a member that owns no share");
      }
      if (options_.ring) fail(ErrorKind::frame, "it sent a part into a ring");
      return owner_.room(peer.member(), header);
    case FrameKind::result:
      if (options_.ring) fail(ErrorKind::frame, "it sent a result into a ring");
      return shares_.room(peer.member(), header);
    default:
      fail(ErrorKind::frame, "it sent data of no known kind");
  }
}

void Operations::opened(uint32_t rank, uint64_t operation, const Open& open) {
  owner_.open(rank, operation, open);
}

bool Operations::used_in_place(const Peer& peer, const WireHeader& header, std::span<const std::byte> payload) {
  // What is not expected here room() refuses.
  if ((header.operation & kTakeover) != 0 || options_.ring || peer.member() >= options_.world ||
      options_.shares[options_.rank] <= 0) {
    return false;
  }
  return owner_.took_in_place(peer.member(), header, payload.data());
}

void Operations::took(const Peer& peer, const WireHeader& header, std::span<std::byte> payload) {
  if ((header.operation & kTakeover) != 0) {
    Takeover& takeover = takeover_of(peer, header);
    const auto kind = static_cast<FrameKind>(header.kind);
    if (kind == FrameKind::lost) return takeover.took_lost(peer.member(), header.offset);
    if (kind == FrameKind::back) return takeover.took_back(peer.member());
    if (kind == FrameKind::resume) return takeover.took_resume(peer.member(), header.offset);
    return takeover.took(peer.member(), untagged(header), payload);
  }
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::open: {
      if (peer.member() >= options_.world || header.bytes != sizeof(Open))
        fail(ErrorKind::frame, "it sent a malformed open");
      Open open;
      std::memcpy(&open, payload.data(), sizeof open);
      if (!options_.ring) return opened(peer.member(), header.operation, open);
      check_ring(peer);
      return ring_.open(header.operation, open);
    }
    case FrameKind::ring:
      return ring_.took(header, payload);
    case FrameKind::part:
      return owner_.took(peer.member(), header);
    case FrameKind::result:
      return shares_.took(peer.member(), header, payload);
    case FrameKind::credit:
      return shares_.took_credit(peer.member(), header);
    case FrameKind::expose:
      return took_exposed(peer, header, payload);
    case FrameKind::complete:
      return took_complete(peer.member(), header.operation);
    case FrameKind::taken:
      if (peer.member() >= options_.world) fail(ErrorKind::frame, "it took what no reducer gets");
      return owner_.took_taken(peer.member(), header);
    case FrameKind::unreadable_part:
      return shares_.took_unreadable_part(peer.member(), header);
    case FrameKind::unreadable:
      if (peer.member() >= options_.world) fail(ErrorKind::frame, "it took what no reducer gets");
      return owner_.took_unreadable(peer.member(), header);
    default:
      fail(ErrorKind::frame, "it sent a frame of the wrong kind");
  }
}

bool Operations::next(const Peer& peer, OutFrame* frame) {
  if (options_.ring) return peer.member() == members_.next_rank() && ring_.next(frame);
  shares_.announce(peer.member());
  turn_ = !turn_;
  const auto next_of_takeover = [&](const auto& one) { return one->next(peer.member(), frame); };
  const bool rank = peer.member() < options_.world;
  if (rank && turn_ && std::any_of(takeovers_.begin(), takeovers_.end(), next_of_takeover)) return true;
  // Results first: they are what the other side waits for before it may go on.
  if ((rank && owner_.next(peer.member(), frame)) || shares_.next(peer.member(), frame)) return true;
  return rank && !turn_ && std::any_of(takeovers_.begin(), takeovers_.end(), next_of_takeover);
}

// Who broadcasts opens at all others too, which else would not notice that they wait for another root.
void Operations::announce(const Work& work) {
  Open what = open_of(work.shape, work.shape.wire_bytes());
  what.reads = 1;
  for (uint32_t rank = 0; rank < options_.world; ++rank) {
    if (rank == options_.rank || members_.over() || members_.peer(rank) == nullptr) continue;
    open(rank, work.number, what);
    members_.kick(rank);
  }
}

void Operations::took_exposed(const Peer& peer, const WireHeader& header, std::span<const std::byte> payload) {
  ExposedShare exposed;
  if (payload.size() != sizeof exposed) fail(ErrorKind::frame, "it exposes memory in a malformed frame");
  std::memcpy(&exposed, payload.data(), sizeof exposed);
  if (exposed.bytes == 0 || shares_.declined(peer.member(), header.operation)) return;
  const ReadExposed before = peer.still_exposes();
  if (before == ReadExposed::withdrawn) return;  // the reason follows
  if (before == ReadExposed::denied) return shares_.decline(peer.member(), header);
  if (exposed.bytes > kExposedBytes)
    fail(ErrorKind::frame, "it exposes ", exposed.bytes, " bytes, the limit is ", kExposedBytes);
  const WireHeader result = frame_of(FrameKind::result, header.operation, header.offset, exposed.bytes);
  const std::span<std::byte> into = shares_.exposed_room(peer.member(), result);
  const ReadExposed found = peer.read_exposed(exposed.address, into);
  if (found == ReadExposed::read) {
    read_bytes_ += into.size();
    shares_.took(peer.member(), result, into, true);
  }
  if (found == ReadExposed::denied) shares_.decline(peer.member(), header);
}

void Operations::open(uint32_t owner, uint64_t operation, const Open& open) {
  Open asked = open;
  Peer& peer = *members_.peer(owner);
  asked.reads = open.reads != 0 && peer.reads_peer();
  peer.send_control(FrameKind::open, operation, 0, std::as_bytes(std::span(&asked, 1)));
}

void Operations::ring_room() {
  if (Peer* const previous = members_.peer(members_.previous_rank())) previous->resume();
}

void Operations::check_ring(const Peer& peer) const {
  if (!options_.ring || peer.member() != members_.previous_rank()) {
    fail(ErrorKind::frame, "it sent what only the previous rank of a ring may send");
  }
}

void Operations::count(GroupCounts* out) {
  out->operations = done_;
  out->by_callers = by_callers_;
  out->elements = elements_;
  out->array_bytes = array_bytes_;
  out->reduced_bytes = owner_.reduced_bytes();
  out->read_bytes = read_bytes_;
  out->read_operations = read_operations_;
  out->window_bytes = shares_.window().bytes();
  out->least_delay_ns = shares_.window().least_delay_ns();
  for (const auto& takeover : takeovers_) {
    out->lost_reducers += takeover->lost();
    out->taken_over_bytes += takeover->bytes();
    out->reducer_losses += takeover->losses();
    out->reducer_returns += takeover->returns();
  }
}

}  // namespace geartrain
