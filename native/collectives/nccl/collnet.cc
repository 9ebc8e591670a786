// The table of collectives: an all-reduce of NCCL's is one of a Group (collectives/group.h), whose thread moves the
// bytes.
//
// NCCL does not know the number of ranks when it listens, and a group's address is longer than a handle. So a handle
// is the address of a listener and a key for it; connect() makes the group, and the ranks exchange the groups'
// addresses through the listener of rank 0.

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include "base/lifetime.h"
#include "base/sha256.h"
#include "collectives/group.h"
#include "collectives/nccl/plugin.h"
#include "collectives/share_planner.h"
#include "transport/security/handshake.h"
#include "transport/transport.h"

namespace geartrain::nccl {
namespace {

constexpr double kConnectS = 60, kCloseS = 10, kAllReduceS = 600;
constexpr uint32_t kMagic = 0x314e5447;  // "GTN1"

struct GroupHandle {
  uint32_t magic;
  std::array<uint8_t, 16> key;
  char address[108];  // of a listener, ends with a zero
};
static_assert(sizeof(GroupHandle) == kNcclHandleBytes);

// What a rank says to rank 0 in front of its group's address.
struct Arrival {
  uint32_t rank, ranks;
};

struct CollectiveListener {
  GroupHandle handle{};
  std::unique_ptr<Listener> listener;
};

// The ranks that NCCL reduces among, and its requests in progress.
struct RankGroup {
  explicit RankGroup(const GroupOptions& options) : group(options) {}

  struct Request {
    RankGroup* of = nullptr;
    std::shared_ptr<Work> work;  // null: free
    int bytes = 0;
  };
  // Of the requests. A forked child has no connections, and perhaps a lock that is held for ever: it is refused.
  std::unique_lock<std::mutex> lock() {
    life.check_process();
    return std::unique_lock(mutex);
  }

  Group group;
  const Lifetime life{"communicator"};
  std::mutex mutex;
  std::array<Request, kNcclMostRequests> requests;
};

Options options_with(const GroupHandle& handle) {
  Options options;
  options.secret = hex(handle.key);
  options.limits.max_header_bytes = 4096;
  options.limits.max_message_bytes = uint64_t{kMostMembers} * 4096;
  return options;
}

Bytes bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// Rank 0: takes every rank's address, and gives all of them to each. Strangers do not know the key.
std::vector<std::string> gather(Listener& listener, uint32_t ranks, const std::string& own, Deadline deadline) {
  std::vector<std::string> addresses(ranks);
  std::vector<std::shared_ptr<Connection>> from(ranks);
  addresses[0] = own;
  for (uint32_t arrived = 1; arrived < ranks; ++arrived) {
    const std::shared_ptr<Connection> connection = listener.accept(deadline);
    Message message;
    connection->receive(&message, deadline);
    Arrival arrival{};
    if (message.header.size() < sizeof arrival) fail(ErrorKind::frame, "a rank sent no address");
    std::memcpy(&arrival, message.header.data(), sizeof arrival);
    if (arrival.ranks != ranks || arrival.rank == 0 || arrival.rank >= ranks || from[arrival.rank] != nullptr) {
      fail(ErrorKind::frame, "rank ", arrival.rank, " of ", arrival.ranks, " came to a group of ", ranks);
    }
    const auto* const text = reinterpret_cast<const char*>(message.header.data()) + sizeof arrival;
    addresses[arrival.rank].assign(text, message.header.size() - sizeof arrival);
    from[arrival.rank] = connection;
  }
  std::vector<Bytes> all;
  for (const std::string& address : addresses) all.push_back(bytes_of(address));
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    from[rank]->send({.tag = 1, .header = {}, .buffers = all}, deadline);
  }
  // The table is theirs before this end hangs up: each says so by hanging up first.
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    try {
      Message none;
      from[rank]->receive(&none, deadline);
    } catch (const Error&) {
    }
  }
  return addresses;
}

std::vector<std::string> exchange(const GroupHandle& first, Listener& listener, uint32_t ranks, uint32_t rank,
                                  const std::string& own, Deadline deadline) {
  if (rank == 0) return gather(listener, ranks, own, deadline);
  const auto connection = geartrain::connect(first.address, options_with(first), deadline);
  const Arrival arrival{rank, ranks};
  std::string said(reinterpret_cast<const char*>(&arrival), sizeof arrival);
  said += own;
  connection->send({.tag = 1, .header = bytes_of(said), .buffers = {}}, deadline);
  Message message;
  connection->receive(&message, deadline);
  if (message.buffers.size() != ranks) fail(ErrorKind::frame, "rank 0 sent ", message.buffers.size(), " addresses");
  std::vector<std::string> addresses;
  for (const auto& address : message.buffers) {
    addresses.emplace_back(reinterpret_cast<const char*>(address.data()), address.size());
  }
  return addresses;
}

GroupHandle handle_at(const void* bytes) {
  GroupHandle handle;
  std::memcpy(&handle, bytes, sizeof handle);
  if (handle.magic != kMagic || handle.address[sizeof handle.address - 1] != 0) {
    fail(ErrorKind::argument, "not a handle of this plugin: every rank needs the same one");
  }
  return handle;
}

std::optional<Dtype> dtype_of(NcclDtype dtype) {
  switch (dtype) {
    case kNcclInt8:
      return Dtype::int8;
    case kNcclUint8:
      return Dtype::uint8;
    case kNcclInt32:
      return Dtype::int32;
    case kNcclUint32:
      return Dtype::uint32;
    case kNcclInt64:
      return Dtype::int64;
    case kNcclUint64:
      return Dtype::uint64;
    case kNcclFloat16:
      return Dtype::float16;
    case kNcclFloat32:
      return Dtype::float32;
    case kNcclFloat64:
      return Dtype::float64;
    case kNcclBfloat16:
      return Dtype::bfloat16;
    default:
      return std::nullopt;
  }
}

// NCCL makes an average of a sum, on the GPU.
std::optional<Op> op_of(NcclOp op) {
  switch (op) {
    case kNcclSum:
      return Op::sum;
    case kNcclProd:
      return Op::product;
    case kNcclMax:
      return Op::max;
    case kNcclMin:
      return Op::min;
    default:
      return std::nullopt;
  }
}

NcclResult result_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::none:
      return kNcclSuccess;
    case FaultKind::disagree:
      return kNcclInvalidUsage;
    case FaultKind::closed:
      return kNcclInternalError;
    default:
      return kNcclRemoteError;
  }
}

// --- the table -------------------------------------------------------------------------------------------------------

NcclResult listen(int device, void* handle, void** listener) {
  return guarded("listen", [&] {
    if (device != 0) fail(ErrorKind::argument, "there is device 0, found ", device);
    auto made = std::make_unique<CollectiveListener>();
    made->handle.magic = kMagic;
    random_bytes(made->handle.key);
    ListenerOptions options;
    options.options = options_with(made->handle);
    options.tcp_host = settings().host;
    options.shm = false;  // its name would not fit, and nothing is won by it
    made->listener = std::make_unique<Listener>(options);
    const std::string& address = made->listener->address();
    if (address.size() >= sizeof made->handle.address) fail(ErrorKind::argument, "too long for a handle: ", address);
    std::memcpy(made->handle.address, address.data(), address.size());
    std::memcpy(handle, &made->handle, sizeof made->handle);
    *listener = made.release();
    return kNcclSuccess;
  });
}

NcclResult connect(void* handles[], int ranks, int rank, void* listener, void** group) {
  *group = nullptr;
  return guarded("connect", [&] {
    if (ranks < 1 || rank < 0 || rank >= ranks || listener == nullptr) {
      fail(ErrorKind::argument, "rank ", rank, " of ", ranks, " cannot connect");
    }
    const Deadline deadline = Deadline::after(kConnectS);
    const NcclSettings settings = nccl::settings();
    const GroupHandle first = handle_at(handles[0]);
    GroupOptions options;
    options.rank = static_cast<uint32_t>(rank);
    options.world = static_cast<uint32_t>(ranks);
    options.name = "nccl-" + hex(first.key).substr(0, 8);
    options.host = settings.host;
    options.reducers = settings.reducers;
    options.secret = settings.secret;
    options.shares = shares_of_equal_links(options.world, options.reducers);
    auto made = std::make_unique<RankGroup>(options);
    const auto addresses = exchange(first, *static_cast<CollectiveListener*>(listener)->listener, options.world,
                                    options.rank, made->group.address(), deadline);
    made->group.connect(addresses, deadline);
    say(kNcclLogInfo, "geartrain: rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                          " all-reduces over " + std::to_string(options.reducers.size()) + " reducers");
    *group = made.release();
    return kNcclSuccess;
  });
}

NcclResult reduce_support(NcclDtype dtype, NcclOp op, int* supported) {
  const auto ours = dtype_of(dtype);
  const auto how = op_of(op);
  *supported = ours && how && reduces(*how, *ours) ? 1 : 0;
  return kNcclSuccess;
}

NcclResult iallreduce(void* group, void* in, void* out, int count, NcclDtype dtype, NcclOp op, void* in_region,
                      void* out_region, void** request) {
  *request = nullptr;
  return guarded("iallreduce", [&] {
    const auto type = dtype_of(dtype);
    const auto how = op_of(op);
    if (!type || !how || count < 0) {
      fail(ErrorKind::argument, "cannot reduce ", count, " numbers of type ", dtype, " by operation ", op);
    }
    const size_t bytes = static_cast<size_t>(count) * geartrain::bytes_of(*type);
    if (bytes > INT32_MAX) fail(ErrorKind::argument, "an all-reduce of ", bytes, " bytes");
    check_region(in_region, in, bytes, "an input");
    check_region(out_region, out, bytes, "a result");
    auto& own = *static_cast<RankGroup*>(group);
    const auto lock = own.lock();
    const auto free = std::ranges::find_if(own.requests, [](const auto& one) { return one.work == nullptr; });
    if (free == own.requests.end()) return kNcclSuccess;  // it is asked for again
    const Shape shape{static_cast<uint64_t>(count), *type, *type, *how, 0};
    free->work = own.group.all_reduce(shape, in, out, kAllReduceS);
    free->of = &own;
    free->bytes = static_cast<int>(bytes);
    *request = &*free;
    return kNcclSuccess;
  });
}

NcclResult iflush(void*, void*, int, void*, void** request) {
  *request = nullptr;  // host memory: what has been received is there
  return kNcclSuccess;
}

NcclResult test(void* request, int* done, int* bytes) {
  *done = 0;
  return guarded("test", [&] {
    auto& asked = *static_cast<RankGroup::Request*>(request);
    const auto lock = asked.of->lock();
    if (asked.work == nullptr) fail(ErrorKind::argument, "a request that is over already");
    if (!asked.work->done()) return kNcclSuccess;
    const std::shared_ptr<Work> work = std::move(asked.work);
    asked.work = nullptr;
    if (const Fault& fault = work->fault(); fault.kind != FaultKind::none) {
      say(kNcclLogWarn, "geartrain: all-reduce: " + fault.text);
      return result_of(fault.kind);
    }
    *done = 1;
    if (bytes != nullptr) *bytes = asked.bytes;
    return kNcclSuccess;
  });
}

NcclResult close_coll(void* group) {
  return guarded("closeColl", [&] {
    const std::unique_ptr<RankGroup> owned(static_cast<RankGroup*>(group));
    owned->group.close(Deadline::after(kCloseS));
    return kNcclSuccess;
  });
}

NcclResult close_listen(void* listener) {
  return guarded("closeListen", [&] {
    delete static_cast<CollectiveListener*>(listener);
    return kNcclSuccess;
  });
}

}  // namespace
}  // namespace geartrain::nccl

extern "C" __attribute__((visibility("default"))) NcclCollNet ncclCollNetPlugin_v7;
NcclCollNet ncclCollNetPlugin_v7 = {
    "geartrain",
    geartrain::nccl::init,
    geartrain::nccl::devices,
    geartrain::nccl::get_properties,
    geartrain::nccl::listen,
    geartrain::nccl::connect,
    geartrain::nccl::reduce_support,
    geartrain::nccl::reg_mr,
    geartrain::nccl::reg_mr_dma_buf,
    geartrain::nccl::dereg_mr,
    geartrain::nccl::iallreduce,
    geartrain::nccl::iflush,
    geartrain::nccl::test,
    geartrain::nccl::close_coll,
    geartrain::nccl::close_listen,
};
