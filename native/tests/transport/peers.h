// Pairs of connected ends over every provider, and payloads that identify themselves.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/check.h"
#include "tests/transport/certificates.h"
#include "transport/transport.h"

namespace geartrain {

// Transports of the conformance suite: the providers, and TCP under TLS where certificates can be made.
inline const std::vector<const char*>& transports() {
  static const std::vector<const char*> all = Authority::not_viable().empty()
                                                  ? std::vector{"inproc", "shm", "tcp", "tcp+tls"}
                                                  : std::vector{"inproc", "shm", "tcp"};
  return all;
}
inline const std::vector<const char*>& transports_between_processes() {
  static const std::vector<const char*> all(transports().begin() + 1, transports().end());
  return all;
}

// The provider of one of transports().
inline std::string provider_of(const std::string& transport) {
  return transport == "tcp+tls" ? "tcp" : transport;
}

// Options for either side of a connection over one of transports().
inline Options over(const std::string& transport, Options options = {}) {
  if (transport == "tcp+tls") options.tls = Authority::of_tests().context();
  options.transport = provider_of(transport);
  if (options.limits.handshake_timeout_s == MessageLimits{}.handshake_timeout_s) {
    options.limits.handshake_timeout_s *= testing::patience();
  }
  return options;
}

// A listener for it.
inline ListenerOptions listening(const std::string& transport, Options options = {}) {
  ListenerOptions made;
  made.options = over(transport, std::move(options));
  made.options.transport.clear();
  return made;
}

// A listener, a connection to it, and its other end.
struct Pair {
  std::unique_ptr<Listener> listener;
  std::shared_ptr<Connection> one, other;
};

inline Pair connected(const std::string& transport, Options options = {}) {
  Pair pair;
  pair.listener = std::make_unique<Listener>(listening(transport, options));
  pair.one = connect(pair.listener->address(), over(transport, options), soon());
  pair.other = pair.listener->accept(soon());
  return pair;
}

// Bytes that identify their message, their place and their buffer.
inline std::vector<std::byte> pattern(uint64_t seed, uint64_t bytes) {
  std::vector<std::byte> out(bytes);
  for (uint64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = (seed * 0x9e3779b97f4a7c15u) ^ (i * 0xc2b2ae3d27d4eb4fu);
    std::memcpy(out.data() + i, &word, std::min<uint64_t>(8, bytes - i));
  }
  return out;
}

struct Payload {
  std::vector<std::byte> header;
  std::vector<std::vector<std::byte>> buffers;

  Payload(uint64_t seed, uint64_t header_bytes, const std::vector<uint64_t>& sizes)
      : header(pattern(seed, header_bytes)) {
    for (const uint64_t size : sizes) buffers.push_back(pattern(seed + buffers.size() + 1, size));
  }

  void send(Connection& connection, uint64_t tag, Deadline deadline, uint32_t kind = 7) const {
    std::vector<Bytes> spans(buffers.begin(), buffers.end());
    connection.send({tag, kind, header, spans}, deadline);
  }

  bool is(const Message& message) const {
    if (message.buffers.size() != buffers.size()) return false;
    const auto same = [](std::span<const std::byte> found, const std::vector<std::byte>& expected) {
      return found.size() == expected.size() &&
             (expected.empty() || std::memcmp(found.data(), expected.data(), expected.size()) == 0);
    };
    bool all = same(message.header, header);
    for (size_t i = 0; i < buffers.size(); ++i) {
      all &= same(message.buffers[i], buffers[i]) && reinterpret_cast<uintptr_t>(message.buffers[i].data()) % 64 == 0;
    }
    return all;
  }
};

}  // namespace geartrain
