// Transport of ordered messages between two processes: a small header, and big out-of-band buffers that are copied as
// little as the path between the two allows.
//
//   Listener listener({.tcp_host = "127.0.0.1"});                    // address(): to pass to peers
//   auto mine = connect(listener.address(), {}, Deadline::after(5)); // the fastest provider that works
//   auto theirs = listener.accept(Deadline::after(5));
//   mine->send({.tag = 1, .header = bytes, .buffers = buffers}, Deadline::after(5));
//   Message message;
//   theirs->receive(&message, Deadline::after(5));
//
// Providers, fastest first (kProviders): `inproc` (two ends in one process), `shm` (one host: a ring in shared memory
// for small messages, memfd segments for big ones) and `tcp`. A provider is chosen by trying it: the
// peer's memory is opened and a nonce read through it. Host names, pids and boot ids are never compared, because
// containers make them misleading. `considered()` tells why the faster ones were not chosen.
//
// Threads. Any number may send on one connection: messages leave whole, in the order of the calls. One thread at a
// time receives; a second waits for its turn. The thread that sends does the work itself, and so does the one that
// receives: there is no thread in between; under TLS some help with big messages (lane_threads.h). While a send waits
// for room it also reads what the peer sends, up to MessageLimits::max_queued_bytes, so that two peers that both send
// do not wait for each other.
//
// Memory. A received message has memory of its own, or is a view of the sender's segment, which stays leased
// meanwhile. Either way it is returned with the last copy of Message::owner. All buffers begin
// at a multiple of 64 bytes. The sender's buffers may be changed again when send() returns.
//
// One-sided. expose() lets the peer read, or write, memory of this process without a message: region.handle() travels
// in any message, and the peer's end of the connection uses it. Neither program has to receive, or to wait, for that.
//
// Death. When the peer dies or hangs up, whatever it had sent completely is still received; then every call throws
// peer_lost. A peer that is stopped, or that a broken network cut off, is lost after Options::peer_timeout_s without
// heartbeats (sideband.h defines what they detect), and every wait has a deadline of its own and throws
// timed_out. A send that reaches its deadline in the middle of a message ends the connection.
//
// The end. close() may be called by any thread, any number of times, beside any other call: calls that wait end with
// hung_up, later ones throw it at once, and what only reports (counts, describe) still does. Dropping the last
// reference closes; whoever calls holds one. Regions are closed with their connection. A listener that is closed hangs
// up on what it has not accepted, and no copy of its sockets accepts any more (ListeningSocket); connections that it
// has accepted stay open.
//
// Threads of its own. A listener has one, and all connections of a process share one for their sidebands. No exception
// ends them, or the process: it ends the connection that caused it, with its text as the reason.
//
// Trust. With a secret, both sides prove that they know it before any other exchange (handshake.h). Without one a
// listener only accepts connections from this host: loopback, and Unix sockets of the same user, whose user the dialer
// checks as well. A malformed
// message ends the connection that it came on, and no other. With Options::tls all that goes over TCP, messages,
// lanes and the sideband, is encrypted, between two sides that showed a certificate (tls.h). Without,
// messages are neither encrypted nor signed.
//
// Fork. A connection or listener belongs to the process that made it. A forked child's copy is closed at the fork
// (descriptor.h) and every call on it throws hung_up; the parent's is untouched.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/address.h"
#include "transport/connection.h"
#include "transport/listener.h"
#include "transport/message.h"
#include "transport/options.h"

namespace geartrain {

// A connection over the first provider that works, or over options.transport. Throws not_viable with every provider's
// reason, untrusted, timed_out.
std::shared_ptr<Connection> connect(const std::string& address, const Options& options, Deadline deadline);

// Why a provider cannot work in this process, or empty.
struct Provider {
  const char* name;
  std::string (*not_viable)();
};
extern const std::array<Provider, 3> kProviders;

}  // namespace geartrain
