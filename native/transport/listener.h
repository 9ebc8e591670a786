// Listener of connections. transport.h is the manual.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/address.h"
#include "transport/connection.h"
#include "transport/options.h"

namespace geartrain {

// Accepts connections. One thread of its own answers all handshakes, none of which can block another.
class Listener {
 public:
  explicit Listener(const ListenerOptions& options);  // throws os, argument
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // The next authenticated connection. Throws timed_out, hung_up.
  std::shared_ptr<Connection> accept(Deadline deadline);
  const std::string& address() const;
  // Connections refused so far: no hello in time, no proof, malformed input, too many at once. And the last one's
  // reason.
  uint64_t refused() const;
  std::string refusal() const;
  void close();

 private:
  friend std::shared_ptr<Connection> dial_inproc(const Address&, const Options&, Deadline);
  class Body;
  std::shared_ptr<Body> body_;
};

}  // namespace geartrain
