#include "collectives/takeover.h"

#include <algorithm>
#include <utility>

namespace geartrain {
namespace {

constexpr double kNoDeadlineS = 1e9;  // it is that of the operation that this is for
constexpr double kLatePeriods = 10;   // of dialling, after which ranks are named that have not reached a reducer

// Of the ranks alone, in the proportions that they have in the whole group.
std::vector<double> shares_of_ranks(const GroupOptions& options) {
  std::vector<double> shares(options.shares.begin(), options.shares.begin() + options.world);
  double sum = 0;
  for (const double share : shares) sum += share;
  for (double& share : shares) share = sum > 0 ? share / sum : 1.0 / options.world;
  return shares;
}

}  // namespace

Takeover::Takeover(const GroupOptions& options, Membership& members, EventLoop& loop, ChunkBufferPool& blocks,
                   ShardedAllreduce& shares, uint32_t reducer, Events events)
    : options_(options),
      members_(members),
      loop_(loop),
      shares_(shares),
      reducer_(reducer),
      events_(std::move(events)),
      ranks_shares_(shares_of_ranks(options)),
      silent_ns_(static_cast<uint64_t>(options.reducer_silence_s * 1e9)),
      ask_ns_(silent_ns_ / 3),
      owner_(blocks, *this, options.world, options.rank, chunk_bytes(owners_of(ranks_shares_)),
             options.most_window_bytes()),
      inner_(blocks, *this, ranks_shares_, options.rank, options.max_window_bytes),
      positions_(options.world),
      back_(options.world),
      again_(options.world),
      next_back_(options.world),
      next_again_(options.world),
      begun_(options.world),
      pause_(options.redial_s) {
  if (options.fixed_window_bytes != 0) inner_.window().fix(options.fixed_window_bytes);
  if (options.shares[reducer] > 0) shares_.keep_results(reducer, options.most_window_bytes());
}

uint64_t Takeover::tagged(uint64_t operation) const {
  return takeover_operation(reducer_ - options_.world, operation);
}

// --- who has what ---------------------------------------------------------------------------------------------------

void Takeover::lose(const std::string& why, uint64_t cost_ns) {
  if (lost_ && !back_[options_.rank]) return;
  members_.drop(reducer_);
  if (options_.shares[reducer_] <= 0) {  // nobody is connected with it
    lost_ = true;
    return;
  }
  if (!lost_) {
    lose(shares_.position(reducer_), why, cost_ns);
    tell_all(FrameKind::lost, *positions_[options_.rank]);
    return decide();
  }
  back_[options_.rank] = false;
  again_[options_.rank] = true;
  pause_.lost(events_.now_ns(), false);
  tell_all(FrameKind::lost, 0);
}

void Takeover::lose(uint64_t position, const std::string& why, uint64_t cost_ns) {
  uint64_t operation, bytes, of;
  const std::string when =
      shares_.owes(reducer_, &operation, &bytes, &of)
          ? message_of({"in operation ", operation, ", after ", bytes, " of ", of, " bytes of its share"})
          : message_of({"between operations, after ", shares_.completed()});
  ++losses_;
  told_late_ = false;
  pause_.lost(events_.now_ns(), true, position != 0, cost_ns);
  std::string text =
      message_of({members_.name_of(reducer_), " is lost (", why, ") ", when, " [seen by rank ", options_.rank, "]"});
  if (pause_.in_a_row() == RedialPause::kMany) {
    text += message_of({". It has not stayed for ", static_cast<double>(pause_.lasting_ns()) / 1e9, " s after any of ",
                        RedialPause::kMany, " returns"});
    if (pause_.pause_s() > 0) {
      text += message_of({": ranks dial it again after ", pause_.pause_s(), " s, and twice as long each time up to ",
                          RedialPause::kMost * options_.redial_s, " s"});
    }
    text += ". Its losses and returns are told again once it stays";
    events_.tell(std::move(text));
  } else {
    log(std::move(text));
  }
  lost_ = used_ = true;
  next_operation_ = std::min(next_operation_, until_);  // what was begun with the reducer since then has to be finished
  shares_.lose(reducer_);
  positions_[options_.rank] = position;
  events_.lost();
}

void Takeover::took_lost(uint32_t rank, uint64_t position) {
  if (begun_[rank] && next_back_[rank]) {
    next_back_[rank] = false;
    next_again_[rank] = true;
    return;
  }
  if (options_.shares[reducer_] <= 0 || (positions_[rank] && !back_[rank])) {
    fail(ErrorKind::frame, "it lost ", members_.name_of(reducer_), " again");
  }
  if (positions_[rank]) {
    back_[rank] = false;
    again_[rank] = true;
    return;
  }
  positions_[rank] = position;
  if (!lost_) lose(message_of({"told by rank ", rank}));
  decide();
}

void Takeover::tell_all(FrameKind kind, uint64_t offset) const {
  for (uint32_t rank = 0; rank < options_.world; ++rank) members_.send_control(rank, kind, tagged(0), offset);
}

// Gives the reducer up where it neither sends nor takes anything, nor answers a query, for some seconds in which its
// results are waited for.
uint64_t Takeover::watch(uint64_t now_ns) {
  const Peer* const peer = members_.peer(reducer_);
  uint64_t operation, bytes, of;
  if (lost_ || peer == nullptr || !shares_.owes(reducer_, &operation, &bytes, &of)) {
    moved_ns_ = 0;
    return ~uint64_t{0};
  }
  // It may be this process that did not run.
  const bool away = now_ns - std::exchange(looked_ns_, now_ns) > 2 * ask_ns_;
  const uint64_t moved = peer->bytes_received() + peer->bytes_sent();
  if (moved_ns_ == 0 || away || moved > moved_ + (asked_ ? sizeof(WireHeader) : 0)) {
    moved_ = moved;
    moved_ns_ = now_ns;
    asked_ = false;
  }
  const uint64_t silent_ns = now_ns - moved_ns_;
  if (silent_ns < ask_ns_) return ask_ns_ - silent_ns;
  if (silent_ns >= silent_ns_) {
    lose(message_of({"silent for ", options_.reducer_silence_s, " s"}), silent_ns);
    return ~uint64_t{0};
  }
  if (!std::exchange(asked_, true)) members_.send_control(reducer_, FrameKind::query, operation);
  return std::min(ask_ns_, silent_ns_ - silent_ns);
}

// Of what took several tries, unless it goes wrong again.
void Takeover::log(std::string text) const {
  if (pause_.in_a_row() < RedialPause::kMany) events_.tell(std::move(text));
}

uint64_t Takeover::tell_late(uint64_t now_ns) {
  const uint64_t for_ns = now_ns - pause_.reached_ns();
  if (!lost_ && pause_.in_a_row() >= RedialPause::kMany) {
    if (!pause_.lasts(now_ns)) return pause_.lasting_ns() - for_ns;
    pause_.settle();
    events_.tell(message_of({members_.name_of(reducer_), " is back, and has stayed for ",
                             static_cast<double>(for_ns) / 1e9, " s, with its share from operation ", until_, " on"}));
  }
  if (!lost_ || !back_[options_.rank] || holds() || told_late_) return ~uint64_t{0};
  const auto late_ns = static_cast<uint64_t>(kLatePeriods * options_.redial_s * 1e9);
  if (for_ns < late_ns) return late_ns - for_ns;
  told_late_ = true;
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < options_.world; ++rank) {
    if (!back_[rank]) missing.push_back(rank);
  }
  log(message_of({members_.name_of(reducer_), " was reached by rank ", options_.rank, ", and in ",
                  kLatePeriods * options_.redial_s, " s since then not by rank(s) ", ranks_text(missing),
                  ": it has its share again once all ranks have reached it"}));
  return ~uint64_t{0};
}

void Takeover::tell(uint32_t rank) const {
  const std::optional<uint64_t>& mine = positions_[options_.rank];
  if (mine) members_.send_control(rank, FrameKind::lost, tagged(0), *mine);
}

void Takeover::decide() {
  if (!lost_ || decided_ || members_.over()) return;
  std::optional<uint32_t> left;  // which is when all ranks had done what it had (Operations::all_complete)
  for (uint32_t rank = 0; rank < options_.world; ++rank) {
    if (positions_[rank]) continue;
    if (!members_.has_left(rank)) return;
    left = rank;
  }
  decided_ = true;
  if (left) {
    for (std::optional<uint64_t>& position : positions_) position = position.value_or(*positions_[options_.rank]);
  }
  const auto [least, most] = std::minmax_element(positions_.begin(), positions_.end());
  const uint64_t bytes = **most - **least;
  const auto rest = shares_.rest(reducer_, until_);
  if (left && (bytes != 0 || shares_.rest(reducer_, 0))) {
    return members_.end(members_.left_fault(*left, rest ? rest->operation : shares_.completed()));
  }
  log(message_of({"ranks do the work of ", members_.name_of(reducer_), " from operation ",
                  rest ? rest->operation : std::max(shares_.begun(), until_), " on; ", bytes,
                  " bytes of its results are passed on among them"}));
  if (bytes == 0) return began();
  if (bytes > KeptResults::reach(options_.most_window_bytes())) {
    return members_.end({FaultKind::protocol,
                         message_of({"ranks have results of ", members_.name_of(reducer_), " that are ", bytes,
                                     " bytes apart, more than any window"}),
                         {}});
  }
  passed_from_ = **least;
  passed_on_.resize(bytes);  // zeros, where this rank is not the one that others get them from
  const auto from = static_cast<uint32_t>(most - positions_.begin());
  const auto first =
      static_cast<uint32_t>(std::find(positions_.begin(), positions_.end(), **most) - positions_.begin());
  if (std::min(from, first) == options_.rank) shares_.copy_kept(reducer_, passed_from_, passed_on_.data());
  operations_[next_number_] = kPassedOn;
  Shape shape;
  shape.count = bytes;
  shape.dtype = shape.wire = Dtype::uint8;
  begin(shape, passed_on_.data(), passed_on_.data());
}

// --- the reducer is back ---------------------------------------------------------------------------------------------

void Takeover::reached(Dialled dialled) {
  if (!wants()) return;
  again_[options_.rank] = false;
  back_[options_.rank] = true;
  pause_.reached(events_.now_ns());
  members_.readmit(reducer_, std::move(dialled));
  tell_all(FrameKind::back, 0);
  resume_if_all();
}

void Takeover::took_back(uint32_t rank) {
  // It has heard all of them resume, has lost the reducer again, and reached it once more.
  if (begun_[rank] && again_[rank] && !next_back_[rank]) {
    next_back_[rank] = true;
    next_again_[rank] = false;
    return;
  }
  if (!lost_ || !positions_[rank] || back_[rank]) {
    fail(ErrorKind::frame, "it is connected again with ", members_.name_of(reducer_), ", which is not lost");
  }
  back_[rank] = true;
  again_[rank] = false;
  resume_if_all();
}

void Takeover::resume_if_all() {
  if (holds() || std::find(back_.begin(), back_.end(), false) != back_.end()) return;
  resume();
}

void Takeover::took_resume(uint32_t rank, uint64_t begun) {
  if (!lost_ || !decided_ || begun_[rank] || !(back_[options_.rank] || again_[options_.rank])) {
    fail(ErrorKind::frame, "it goes on with ", members_.name_of(reducer_), ", which is not lost");
  }
  begun_[rank] = begun;
  resume();
}

// Once a rank has said it all do, whatever has become of their connections.
void Takeover::resume() {
  if (!holds()) {
    begun_[options_.rank] = events_.begun();
    tell_all(FrameKind::resume, *begun_[options_.rank]);
  }
  const auto missing = [](const auto& begun) { return !begun.has_value(); };
  if (std::any_of(begun_.begin(), begun_.end(), missing)) return;
  until_ = **std::max_element(begun_.begin(), begun_.end());
  shares_.regain(reducer_, until_);
  ++returns_;
  pause_.reached(events_.now_ns());
  log(message_of({members_.name_of(reducer_), " is back, and has its share from operation ", until_, " on"}));
  const std::vector<bool> lost_again = again_;
  lost_ = decided_ = false;
  for (uint32_t rank = 0; rank < options_.world; ++rank) {
    positions_[rank].reset();
    begun_[rank].reset();
    if (lost_again[rank]) positions_[rank] = 0;
  }
  back_ = std::exchange(next_back_, std::vector<bool>(options_.world));
  again_ = std::exchange(next_again_, std::vector<bool>(options_.world));
  if (lost_again[options_.rank]) {
    lose(0, "connection closed", 0);  // as the others were told
  } else if (std::find(lost_again.begin(), lost_again.end(), true) != lost_again.end()) {
    const auto who = std::find(lost_again.begin(), lost_again.end(), true) - lost_again.begin();
    lose(message_of({"told by rank ", who}));
  }
  decide();
  events_.resumed();
}

// --- the ranks' own operations --------------------------------------------------------------------------------------

void Takeover::began() {
  while (used_ && !members_.over()) {
    const auto rest = shares_.rest(reducer_, next_operation_);
    if (!rest) {
      next_operation_ = std::max(next_operation_, shares_.begun());
      return;
    }
    const bool known = decided_ && passed_on_.empty();
    if (!known && rest->operation >= until_) return;
    next_operation_ = rest->operation + 1;
    operations_[next_number_] = rest->operation;
    begin(rest->shape, rest->in, rest->out);
  }
}

void Takeover::begin(const Shape& shape, const std::byte* in, std::byte* out) {
  const auto work = std::make_shared<Work>(shape, in, out, kNoDeadlineS);
  work->number = next_number_++;
  bytes_ += shape.wire_bytes();
  const ShardedAllreduce::Own own = inner_.begin(work);
  if (own.used) {
    owner_.open_local(work->number, shape, own.bytes, own.numbers);
  } else if (ranks_shares_[options_.rank] > 0) {
    owner_.owns_none(work->number, shape);
  }
  if (!members_.over()) inner_.start();
}

void Takeover::completed(const std::shared_ptr<Work>& work) {
  const auto place = operations_.find(work->number);
  const uint64_t operation = place->second;
  operations_.erase(place);
  if (operation != kPassedOn) return shares_.repaired(reducer_, operation);
  // Not within the calls that have led here: what follows begins operations.
  loop_.post([this] {
    if (members_.over()) return;
    const std::vector<std::byte> all = std::move(passed_on_);
    passed_on_.clear();
    const uint64_t here = *positions_[options_.rank] - passed_from_;
    if (!shares_.restore(reducer_, until_, std::span(all).subspan(here))) {
      return members_.end({FaultKind::protocol,
                           message_of({"a rank has more results of ", members_.name_of(reducer_),
                                       " than there are operations in progress on rank ", options_.rank}),
                           {}});
    }
    began();
  });
}

void Takeover::open(uint32_t owner, uint64_t operation, const Open& open) {
  if (Peer* const peer = members_.peer(owner)) {
    peer->send_control(FrameKind::open, tagged(operation), 0, std::as_bytes(std::span(&open, 1)));
  }
}

std::span<std::byte> Takeover::room(uint32_t rank, const WireHeader& header) {
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::part:
      if (ranks_shares_[options_.rank] <= 0) break;
      return owner_.room(rank, header);
    case FrameKind::result:
      return inner_.room(rank, header);
    default:
      break;
  }
  fail(ErrorKind::frame, "it sent data of the wrong kind in place of a reducer");
}

void Takeover::took(uint32_t rank, const WireHeader& header, std::span<std::byte> payload) {
  switch (static_cast<FrameKind>(header.kind)) {
    case FrameKind::open: {
      Open open;
      if (ranks_shares_[options_.rank] <= 0 || header.bytes != sizeof open) break;
      std::memcpy(&open, payload.data(), sizeof open);
      if (open.collective != static_cast<uint8_t>(Collective::all_reduce) || open.address != 0) break;
      return owner_.open(rank, header.operation, open);
    }
    case FrameKind::part:
      return owner_.took(rank, header);
    case FrameKind::result:
      return inner_.took(rank, header, payload);
    default:
      break;
  }
  fail(ErrorKind::frame, "it sent what no rank sends in place of a reducer");
}

bool Takeover::next(uint32_t rank, OutFrame* frame) {
  if (!used_) return false;
  inner_.announce(rank);
  if (!owner_.next(rank, frame) && !inner_.next(rank, frame)) return false;
  frame->header.operation = tagged(frame->header.operation);
  return true;
}

// --- diagnosis ------------------------------------------------------------------------------------------------------

std::vector<uint32_t> Takeover::waited_for() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < options_.world; ++rank) {
    if ((lost_ && !positions_[rank]) || (holds() && !begun_[rank])) ranks.push_back(rank);
  }
  if (!ranks.empty() || operations_.empty()) return ranks;
  const uint64_t oldest = operations_.begin()->first;
  ranks = inner_.incomplete(oldest);
  if (std::erase(ranks, options_.rank) != 0) {
    uint64_t bytes, of;
    const std::vector<uint32_t> others = owner_.least_advanced(oldest, &bytes, &of);
    ranks.insert(ranks.end(), others.begin(), others.end());
  }
  return ranks;
}

bool Takeover::owes(uint32_t rank) const {
  if (!used_) return false;
  if (lost_ && !positions_[rank]) return true;
  uint64_t operation, bytes, of;
  return inner_.owes(rank, &operation, &bytes, &of) || owner_.involves(rank, &operation, &bytes, &of);
}

}  // namespace geartrain
