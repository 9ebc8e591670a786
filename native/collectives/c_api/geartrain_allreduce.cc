// C interface (geartrain_allreduce.h): no exception leaves it.

#include "collectives/c_api/geartrain_allreduce.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "collectives/group.h"
#include "collectives/share_planner.h"

using geartrain::Deadline;
using geartrain::Dtype;
using geartrain::Error;
using geartrain::ErrorKind;
using geartrain::FaultKind;

struct gt_group {
  explicit gt_group(const geartrain::GroupOptions& options) : group(options), world(options.world) {}
  geartrain::Group group;
  uint32_t world;
};

struct gt_work {
  std::shared_ptr<geartrain::Work> work;
};

namespace {

static_assert(geartrain::kStages == GT_STAGES && static_cast<int>(geartrain::Stage::sleep) == GT_STAGE_SLEEP);
static_assert(static_cast<int>(Dtype::complex128) == GT_COMPLEX128 && static_cast<int>(geartrain::Op::bxor) == GT_BXOR);

thread_local std::string last_error;

gt_status status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::schema:
    case ErrorKind::argument:
      return GT_INVALID;
    case ErrorKind::timed_out:
      return GT_TIMED_OUT;
    case ErrorKind::untrusted:
      return GT_UNTRUSTED;
    case ErrorKind::not_viable:
    case ErrorKind::missing:
      return GT_UNREACHABLE;
    case ErrorKind::peer_lost:
      return GT_RANK_LOST;
    case ErrorKind::frame:
      return GT_PROTOCOL;
    case ErrorKind::hung_up:
      return GT_CLOSED;
    default:
      return GT_SYSTEM;
  }
}

gt_status status_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::none:
      return GT_OK;
    case FaultKind::rank_lost:
      return GT_RANK_LOST;
    case FaultKind::reducer_lost:
      return GT_REDUCER_LOST;
    case FaultKind::timed_out:
      return GT_TIMED_OUT;
    case FaultKind::disagree:
      return GT_DISAGREE;
    case FaultKind::protocol:
      return GT_PROTOCOL;
    case FaultKind::aborted:
    case FaultKind::closed:
      return GT_CLOSED;
  }
  return GT_SYSTEM;
}

gt_status failed(gt_status status, const std::string& words) {
  last_error = words;
  return status;
}

template <typename Body>
gt_status guarded(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    return failed(status_of(error.kind), error.what());
  } catch (const std::exception& error) {
    return failed(GT_SYSTEM, error.what());
  }
}

// The structure of the caller's version, which may have fewer fields.
constexpr size_t kFirstOptions = offsetof(gt_options, outlives_reducers);
static_assert(kFirstOptions == 76 && sizeof(gt_options) == 88);

gt_options whole(const gt_options& given) {
  // The first version had four bytes of padding behind its last field.
  const size_t bytes = given.bytes == 0 || given.bytes == kFirstOptions + 4 ? kFirstOptions : given.bytes;
  if (bytes != kFirstOptions && bytes != sizeof(gt_options)) {
    geartrain::fail(ErrorKind::argument, "gt_options has ", sizeof(gt_options), " bytes here, and ", given.bytes,
                    " for the caller");
  }
  gt_options out{};
  std::memcpy(&out, &given, bytes);
  return out;
}

geartrain::GroupOptions options_from(const gt_options& callers) {
  const gt_options given = whole(callers);
  geartrain::GroupOptions options;
  options.outlives_reducers = given.outlives_reducers != 0;
  if (given.reducer_silence_s != 0) options.reducer_silence_s = given.reducer_silence_s;
  options.rank = given.rank;
  options.world = given.world;
  if (given.name != nullptr) options.name = given.name;
  if (given.host != nullptr) options.host = given.host;
  if (given.secret != nullptr) options.secret = given.secret;
  for (uint32_t i = 0; i < given.reducer_count; ++i) options.reducers.emplace_back(given.reducers[i]);
  options.ring = given.ring != 0;
  options.shm = given.tcp_only == 0;
  const size_t members = size_t{given.world} + given.reducer_count;
  if (given.shares != nullptr) {
    options.shares.assign(given.shares, given.shares + members);
  } else if (!options.ring && given.world != 0) {
    options.shares = given.rates == nullptr ? geartrain::shares_of_equal_links(given.world, options.reducers)
                                            : geartrain::plan_shares(given.world, {given.rates, members});
  }
  return options;
}

gt_status start(gt_group* group, void* data, size_t count, gt_dtype dtype, gt_op op, double timeout_s, bool soon,
                std::shared_ptr<geartrain::Work>* work) {
  if (group == nullptr || (data == nullptr && count != 0)) return failed(GT_INVALID, "no group, or no array");
  if (static_cast<unsigned>(dtype) >= geartrain::kDtypes || static_cast<unsigned>(op) >= geartrain::kOps) {
    return failed(GT_INVALID, "no such dtype, or no such operation");
  }
  const auto type = static_cast<Dtype>(dtype);
  const geartrain::Shape shape{count, type, type, static_cast<geartrain::Op>(op), 0};
  *work = group->group.all_reduce(shape, data, data, timeout_s, soon);
  return GT_OK;
}

gt_status outcome(const geartrain::Work& work) {
  const geartrain::Fault& fault = work.fault();
  return fault.kind == FaultKind::none ? GT_OK : failed(status_of(fault.kind), fault.text);
}

}  // namespace

gt_status gt_group_listen(const gt_options* options, gt_group** group, char address[GT_ADDRESS_BYTES]) {
  return guarded([&] {
    if (options == nullptr || group == nullptr || address == nullptr) return failed(GT_INVALID, "a null argument");
    auto made = std::make_unique<gt_group>(options_from(*options));
    const std::string& text = made->group.address();
    if (text.size() >= GT_ADDRESS_BYTES) return failed(GT_SYSTEM, "this host has too many addresses: give one");
    std::memset(address, 0, GT_ADDRESS_BYTES);
    std::memcpy(address, text.data(), text.size());
    *group = made.release();
    return GT_OK;
  });
}

gt_status gt_group_connect(gt_group* group, const char* addresses, double timeout_s) {
  return guarded([&] {
    if (group == nullptr || addresses == nullptr) return failed(GT_INVALID, "a null argument");
    std::vector<std::string> all;
    for (uint32_t rank = 0; rank < group->world; ++rank) {
      const char* const one = addresses + size_t{rank} * GT_ADDRESS_BYTES;
      all.emplace_back(one, ::strnlen(one, GT_ADDRESS_BYTES));
    }
    group->group.connect(all, Deadline::after(timeout_s));
    return GT_OK;
  });
}

gt_status gt_group_spin(gt_group* group, double spin_us) {
  return guarded([&] {
    if (group == nullptr || !(spin_us < 1e12)) return failed(GT_INVALID, "no group, or no time");
    group->group.spin(spin_us);
    return GT_OK;
  });
}

gt_status gt_group_profile(gt_group* group, int on) {
  return guarded([&] {
    if (group == nullptr) return failed(GT_INVALID, "no group");
    group->group.profile(on != 0);
    return GT_OK;
  });
}

gt_status gt_group_profiled(gt_group* group, gt_profile* profile) {
  return guarded([&] {
    if (group == nullptr || profile == nullptr || profile->bytes != sizeof *profile) {
      return failed(GT_INVALID, "no group, or no gt_profile of this version");
    }
    const geartrain::GroupCounts found = group->group.counts();
    *profile = {};
    profile->bytes = sizeof *profile;
    profile->operations = found.operations;
    profile->by_callers = found.by_callers;
    profile->sent = found.sent_shm + found.sent_tcp;
    profile->received = found.received_shm + found.received_tcp;
    profile->read = found.read_bytes;
    std::copy(found.stages.ns.begin(), found.stages.ns.end(), profile->ns);
    std::copy(found.stages.entered.begin(), found.stages.entered.end(), profile->entered);
    return GT_OK;
  });
}

gt_status gt_allreduce(gt_group* group, void* data, size_t count, gt_dtype dtype, gt_op op, double timeout_s) {
  return guarded([&] {
    std::shared_ptr<geartrain::Work> work;
    const gt_status started = start(group, data, count, dtype, op, timeout_s, true, &work);
    if (started != GT_OK) return started;
    // The operation's own deadline ends it, and its memory must not be used after this.
    while (!work->wait(Deadline::after(3600))) continue;
    return outcome(*work);
  });
}

gt_status gt_allreduce_start(gt_group* group, void* data, size_t count, gt_dtype dtype, gt_op op, double timeout_s,
                             gt_work** work) {
  return guarded([&] {
    if (work == nullptr) return failed(GT_INVALID, "a null argument");
    auto made = std::make_unique<gt_work>();
    const gt_status started = start(group, data, count, dtype, op, timeout_s, false, &made->work);
    if (started == GT_OK) *work = made.release();
    return started;
  });
}

gt_status gt_wait(gt_work* work, double timeout_s) {
  return guarded([&] {
    if (work == nullptr) return failed(GT_INVALID, "a null argument");
    if (!work->work->wait(Deadline::after(timeout_s))) return failed(GT_TIMED_OUT, "the operation is not over yet");
    const std::unique_ptr<gt_work> owned(work);
    return outcome(*owned->work);
  });
}

gt_status gt_group_counts(gt_group* group, gt_counts* counts) {
  return guarded([&] {
    if (group == nullptr || counts == nullptr || counts->bytes != sizeof(gt_counts)) {
      return failed(GT_INVALID, "no group, or no gt_counts of this size");
    }
    const geartrain::GroupCounts found = group->group.counts();
    counts->lost_reducers = static_cast<uint32_t>(found.lost_reducers);
    counts->operations = found.operations;
    counts->reducer_losses = found.reducer_losses;
    counts->reducer_returns = found.reducer_returns;
    counts->taken_over_bytes = found.taken_over_bytes;
    return GT_OK;
  });
}

gt_status gt_group_event(gt_group* group, char* text, size_t size) {
  return guarded([&] {
    if (group == nullptr || text == nullptr || size == 0) return failed(GT_INVALID, "no group, or no room");
    std::memset(text, 0, size);
    const std::vector<std::string> found = group->group.reducer_events(1);
    if (!found.empty()) std::memcpy(text, found[0].data(), std::min(found[0].size(), size - 1));
    return GT_OK;
  });
}

void gt_group_close(gt_group* group, double timeout_s) {
  if (group == nullptr) return;
  guarded([&] {
    const std::unique_ptr<gt_group> owned(group);
    owned->group.close(Deadline::after(timeout_s));
    return GT_OK;
  });
}

const char* gt_last_error(void) {
  return last_error.c_str();
}
