// What either side of a connection, and a listener, may ask for.
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

struct Options {
  std::string secret;                     // the same on both sides, or empty on both
  std::shared_ptr<const TlsContext> tls;  // tcp: what this side shows and trusts (tls.h); null on both sides: no TLS
  std::string transport;                  // a provider's name; empty: the fastest that works
  MessageLimits limits;
  double spin_us = 30.0;  // how long a receive looks again and again before it sleeps; less when that was in vain
  bool views = true;      // shm: hand out big messages where they are, not as copies
  uint32_t lanes = 2;     // tcp: connections beside the first one, for big buffers
  // A peer that gives no sign of life for so long is lost, whether anybody waits for it or not: 0, or 2 and more.
  double peer_timeout_s = 30.0;
  bool cross_memory = true;  // shm: read exposed memory of the peer straight out of its process, where that works
};

struct ListenerOptions {
  Options options;
  std::string tcp_host = "127.0.0.1";  // to bind to; empty: no TCP. Anything but loopback needs a secret
  uint16_t tcp_port = 0;               // 0: any free one
  std::vector<std::string> advertise;  // hosts to tell peers; empty: the bound one, or every interface's
  bool shm = true;
  // Takes connections that ask for no messages of ours, as sockets that do not block (handshake.h: Intent::raw).
  // Called on the listener's thread; without it they are refused.
  std::function<void(Descriptor socket, bool local)> raw;
};

}  // namespace geartrain
