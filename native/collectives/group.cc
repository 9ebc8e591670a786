#include "collectives/group.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace geartrain {
namespace {

constexpr uint64_t kSmallBytes = 64 << 10;  // begun on the caller's thread, even where it does not wait
constexpr double kLeastSilenceS = 0.05, kMostSilenceS = 1e6;
constexpr double kMomentS = 0.3;  // of close(), for operations in progress; and for the last frames

void check_options(GroupOptions* options) {
  const size_t members = options->world + options->reducers.size();
  if (options->world == 0 || options->rank >= options->world) {
    fail(ErrorKind::argument, "rank ", options->rank, " is not one of ", options->world);
  }
  if (members > kMostMembers) fail(ErrorKind::argument, "a group has ", kMostMembers, " members at most");
  if (options->reducers.empty()) options->outlives_reducers = false;
  if (!(options->reducer_silence_s >= kLeastSilenceS && options->reducer_silence_s <= kMostSilenceS)) {
    fail(ErrorKind::argument, "a reducer is given up after ", kLeastSilenceS, " to ", kMostSilenceS,
         " s of silence, found ", options->reducer_silence_s);
  }
  if (options->ring && !options->reducers.empty()) fail(ErrorKind::argument, "a ring has no reducers");
  if (options->shares.empty()) {
    options->shares.assign(members, 0.0);
    std::fill_n(options->shares.begin(), options->world, 1.0 / options->world);
  }
  double sum = 0;
  for (const double share : options->shares) {
    if (!(share >= 0) || share > 1) fail(ErrorKind::argument, "a share is a number from 0 to 1, found ", share);
    sum += share;
  }
  if (options->shares.size() != members) {
    fail(ErrorKind::argument, "there are ", options->world, " ranks and ", options->reducers.size(), " reducers, but ",
         options->shares.size(), " shares");
  }
  if (std::abs(sum - 1) > 1e-6) fail(ErrorKind::argument, "shares add up to 1, found ", sum);
}

GroupOptions checked(GroupOptions options) {
  check_options(&options);
  return options;
}

}  // namespace

uint64_t elements_of(const std::vector<Segment>& segments) {
  uint64_t count = 0;
  for (const Segment& segment : segments) {
    if (segment.count > (uint64_t{1} << 44)) fail(ErrorKind::argument, "an array of ", segment.count, " elements");
    count += segment.count;
  }
  return count;
}

// The shape of the collective that these arrays are for.
Shape checked(const GroupOptions& options, Shape shape, const std::vector<Segment>& sends,
              const std::vector<Segment>& receives) {
  const uint32_t world = options.world, rank = options.rank;
  const auto no_share = [](double share) { return share <= 0; };
  if (options.ring || !options.reducers.empty() ||
      std::any_of(options.shares.begin(), options.shares.end(), no_share)) {
    fail(ErrorKind::argument, "only all-reduce is for rings, reducers and ranks without a share");
  }
  const Collective kind = shape.collective;
  const bool many_out = kind == Collective::reduce_scatter || kind == Collective::all_to_all;
  const bool many_in = shape.direct();
  if (kind == Collective::all_reduce || kind == Collective::one_host_broadcast || shape.wire != shape.dtype ||
      shape.root >= world || sends.size() != (many_out ? world : 1) || receives.size() != (many_in ? world : 1)) {
    fail(ErrorKind::argument, "these are not the arrays of a collective of ", world, " ranks");
  }
  if (sends[many_out ? rank : 0].count != receives[many_in ? rank : 0].count) {
    fail(ErrorKind::argument, "rank ", rank, " sends ", sends[many_out ? rank : 0].count,
         " elements to itself and gets ", receives[many_in ? rank : 0].count);
  }
  const uint64_t out = elements_of(sends), in = elements_of(receives);
  shape.count = kind == Collective::all_to_all ? 0 : std::max(out, in);
  if (kind == Collective::broadcast) {
    if (sends[0].at != receives[0].at) fail(ErrorKind::argument, "an array is broadcast in place");
    return shape;
  }
  const uint64_t size = bytes_of(shape.dtype);
  const auto apart = [size](const Segment& one, const Segment& other) {
    return one.count == 0 || other.count == 0 || one.at + one.count * size <= other.at ||
           other.at + other.count * size <= one.at;
  };
  for (size_t i = 0; i < sends.size(); ++i) {
    for (size_t j = 0; j < receives.size(); ++j) {
      const bool own = (!many_out || i == rank) && (!many_in || j == rank) && sends[i].at == receives[j].at;
      if (!own && !apart(sends[i], receives[j])) {
        fail(ErrorKind::argument, "a result would be written over numbers that are still to be sent");
      }
    }
  }
  return shape;
}

Group::Group(const GroupOptions& options)
    : options_(checked(options)),
      side_(options_, loop_, [this] { redial_.start(); }),
      redial_(options_, loop_,
              {.wanted = [this] { return side_.wanted(); },
               .reached = [this](uint32_t member, Dialled dialled) { side_.reached(member, std::move(dialled)); }}),
      loop_("geartrain group", [this](const std::exception& error) { members_.failed(error); }) {
  members_.open();
  loop_.post([this] {
    loop_.on_time([this] { return side_.on_time(); });
    loop_.poll_while([this] { return !operations_.works().empty() && members_.one_host(); });
    loop_.spin(options_.spin_us);
  });
}

Group::~Group() {
  members_.close();
  if (life_.forked()) return;  // any lock may have been held by one of the parent's threads
  redial_.stop();
  loop_.stop();
  members_.drop_peers();
  members_.end({FaultKind::closed, "the group was closed", {}}, false);
  operations_.finish_all();
  members_.drop_acceptor();
}

std::shared_ptr<Work> Group::all_reduce(const Shape& shape, const void* in, void* out, double timeout_s, bool soon) {
  if (!reduces(shape.op, shape.dtype)) {
    fail(ErrorKind::argument, "there is no ", geartrain::name_of(shape.op), " of ", geartrain::name_of(shape.dtype));
  }
  if (shape.wire != shape.dtype && (shape.dtype != Dtype::float32 || !convertible(shape.dtype, shape.wire))) {
    fail(ErrorKind::argument, geartrain::name_of(shape.dtype), " cannot be sent as ", geartrain::name_of(shape.wire));
  }
  Shape asked = shape;
  asked.algorithm = options_.ring;
  return post(std::make_shared<Work>(asked, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), timeout_s),
              asked.wire_bytes(), soon);
}

std::shared_ptr<Work> Group::exchange(const Shape& shape, std::vector<Segment> sends, std::vector<Segment> receives,
                                      double timeout_s, bool soon) {
  if (!reduces(shape.op, shape.dtype)) {
    fail(ErrorKind::argument, "there is no ", geartrain::name_of(shape.op), " of ", geartrain::name_of(shape.dtype));
  }
  Shape asked = checked(options_, shape, sends, receives);
  if (asked.collective == Collective::broadcast && members_.one_host()) {
    asked.collective = Collective::one_host_broadcast;
  }
  const uint64_t bytes = std::max(elements_of(sends), elements_of(receives)) * bytes_of(asked.dtype);
  auto work = std::make_shared<Work>(asked, std::move(sends), std::move(receives), timeout_s);
  if (options_.world > 1 || shape.collective != Collective::broadcast) return post(work, bytes, soon);
  work->finish();  // it has no recipients
  return work;
}

// The order of the posts is that of the numbers.
std::shared_ptr<Work> Group::post(const std::shared_ptr<Work>& work, uint64_t bytes, bool soon) {
  life_.check();
  const bool shared = members_.one_host() && options_.reducers.empty();
  if (shared) work->turn = loop_.turn();
  const bool here = shared && (soon || bytes <= kSmallBytes);
  const auto task = [this, work] { side_.begin(work); };
  if (!(here ? loop_.post_here(task, soon) : loop_.post(task))) life_.refuse();
  return work;
}

// Throws hung_up where the loop has stopped.
void Group::on_loop(const std::function<void()>& act) {
  if (!loop_.call(act)) life_.refuse();
}

void Group::spin(double spin_us) {
  on_loop([&] { loop_.spin(spin_us); });
}

void Group::profile(bool on) {
  on_loop([&] { on ? loop_.stages().start() : loop_.stages().stop(); });
}

GroupCounts Group::counts() {
  GroupCounts out;
  on_loop([&] {
    members_.count(&out);
    operations_.count(&out);
    out.stages = loop_.stages().times();
  });
  out.refused = members_.refused();
  return out;
}

void Group::abort(const std::string& reason) {
  loop_.call([&] {
    members_.end(
        {FaultKind::aborted, "rank " + std::to_string(options_.rank) + " aborted: " + reason, {options_.rank}});
  });
}

void Group::close(Deadline deadline) {
  if (life_.forked()) return;
  if (!life_.close(deadline)) {
    life_.wait_until_left();
    return;
  }
  redial_.stop();
  try {
    leave();
  } catch (const std::exception&) {
    // Memory runs out: then without a word.
  }
  members_.close();
  loop_.stop();
  members_.drop_peers();  // the others see the end now, and not when this is destroyed
  life_.left();
}

// While `waiting` is true, which is called on the loop; until the deadline of close().
void Group::wait_while(const std::function<bool()>& waiting) {
  for (bool again = true; again && !life_.deadline().passed();) {
    if (!loop_.call([&] { again = waiting(); })) return;
    if (again) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Group::leave() {
  const Deadline moment = Deadline::after(kMomentS);
  // What other ranks still wait for is sent first. An operation in progress may wait for ever.
  wait_while([&] {
    if (members_.over()) return false;
    const auto& works = operations_.works();
    if (!works.empty() && moment.passed()) return false;
    bool waiting = !works.empty() || operations_.serves();
    members_.for_each_open([&](const Peer& peer) { waiting |= !peer.drained(); });
    return waiting;
  });
  loop_.call([&] {
    if (operations_.works().empty()) operations_.tell_complete();
  });
  wait_while([&] { return !members_.over() && operations_.works().empty() && !operations_.all_complete(); });
  loop_.call([&] { side_.leave(); });
  const Deadline last = Deadline::after(kMomentS);
  wait_while([&] {
    bool waiting = false;
    members_.for_each_open([&](const Peer& peer) { waiting |= !peer.drained(); });
    return waiting && !last.passed();
  });
}

}  // namespace geartrain
