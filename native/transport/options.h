// Options of either side of a connection, and of a listener.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "transport/message.h"

namespace geartrain {

class TlsContext;

constexpr uint32_t kLanesByCores = UINT32_MAX;

struct Options {
  std::string secret;  // the same on both sides, or empty on both
  std::shared_ptr<const TlsContext>
      tls;                // tcp: this side's certificate and the trusted authority (tls.h); null on both sides: no TLS
  std::string transport;  // a provider's name; empty: the fastest that works
  MessageLimits limits;
  double spin_us = 50.0;  // how long a receive polls before it sleeps (patience.h)
  bool views = true;      // shm: return big messages in place, not as copies
  // tcp: connections in addition to the first one, for big buffers; kLanesByCores: 2, or what TLS has threads for.
  uint32_t lanes = kLanesByCores;
  // A peer without a heartbeat for so long is lost, whether any call waits for it or not: 0 (never), or at least 2.
  double peer_timeout_s = 30.0;
  bool cross_memory = true;  // shm: read exposed memory of the peer straight out of its process, where that works
};

struct ListenerOptions {
  Options options;
  std::string tcp_host = "127.0.0.1";  // to bind to; empty: no TCP. Anything but loopback needs a secret
  uint16_t tcp_port = 0;               // 0: any free one
  std::vector<std::string> advertise;  // hosts to put into the address; empty: the bound one, or every interface's
  bool shm = true;
  // Accepts connections that carry no messages of ours, as non-blocking sockets (handshake.h: Intent::raw).
  // Called on the listener's thread; without it they are refused.
  std::function<void(Descriptor socket, bool local)> raw;
};

}  // namespace geartrain
