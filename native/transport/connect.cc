// connect(): the providers in their order, until one works.

#include <string_view>

#include "base/errors.h"
#include "transport/providers/provider.h"
#include "transport/sideband/sideband.h"
#include "transport/transport.h"

namespace geartrain {
namespace {

constexpr uint32_t kMostBuffers = 16384;

}  // namespace

void check_options(const Options& options) {
  const MessageLimits& limits = options.limits;
  if (limits.max_buffers > kMostBuffers) {
    fail(ErrorKind::argument, "a message has ", kMostBuffers,
         " buffers at most, found max_buffers=", limits.max_buffers);
  }
  if (options.lanes > kMaxLanes && options.lanes != kLanesByCores)
    fail(ErrorKind::argument, "there are ", kMaxLanes, " lanes at most, found ", options.lanes);
  if (options.peer_timeout_s != 0 && options.peer_timeout_s < kLeastPeerTimeoutS) {
    fail(ErrorKind::argument, "peers send heartbeats every ", kHeartbeatS, " s: peer_timeout_s is 0, for none, or ",
         kLeastPeerTimeoutS, " and more, found ", options.peer_timeout_s);
  }
  if (options.transport.empty()) return;
  for (const Provider& provider : kProviders) {
    if (options.transport == provider.name) return;
  }
  fail(ErrorKind::argument, "there is no transport '", options.transport, "'; there are inproc, shm and tcp");
}

const std::array<Provider, 3> kProviders = {{
    {"inproc", inproc_not_viable},
    {"shm", shm_not_viable},
    {"tcp", tcp_not_viable},
}};

std::shared_ptr<Connection> connect(const std::string& text, const Options& options, Deadline deadline) {
  check_options(options);
  const Address address = Address::parse(text);
  using Dial = std::shared_ptr<Connection> (*)(const Address&, const Options&, Deadline);
  constexpr Dial kDials[] = {dial_inproc, dial_shm, dial_tcp};
  std::vector<std::pair<std::string, std::string>> considered;
  // Only TCP proves that nobody listens: names of Unix sockets are those of one network namespace. A listener that has
  // no other address is taken to be of this one.
  const char* const proves = address.tcp.empty() ? "shm" : "tcp";
  bool nobody = false;
  for (size_t i = 0; i < kProviders.size(); ++i) {
    if (!options.transport.empty() && options.transport != kProviders[i].name) continue;
    try {
      auto connection = kDials[i](address, options, deadline);
      connection->considered_ = std::move(considered);
      return connection;
    } catch (const Error& error) {
      if (error.kind == ErrorKind::untrusted || error.kind == ErrorKind::timed_out) throw;
      considered.emplace_back(kProviders[i].name, error.what());
      nobody |= std::string_view(kProviders[i].name) == proves && dynamic_cast<const NobodyListens*>(&error) != nullptr;
    }
  }
  std::string reasons;
  for (const auto& [name, reason] : considered) reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
  const std::string what = options.transport.empty() ? "no transport reaches the peer. "
                                                     : "the transport asked for does not reach the peer. ";
  if (nobody) throw NobodyListens(what + reasons);
  fail(ErrorKind::not_viable, what, reasons);
}

}  // namespace geartrain
