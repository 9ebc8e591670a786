// Interface of the providers, internal to connect() and the listener.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/connection.h"
#include "transport/security/handshake.h"

namespace geartrain {

// Each tries again, until the deadline, while the listener has no place for it. Each throws when the peer cannot be
// reached by this provider: not_viable, frame, untrusted, timed_out.
std::shared_ptr<Connection> dial_inproc(const Address& address, const Options& options, Deadline deadline);
std::shared_ptr<Connection> dial_shm(const Address& address, const Options& options, Deadline deadline);
std::shared_ptr<Connection> dial_tcp(const Address& address, const Options& options, Deadline deadline);

std::string inproc_not_viable();
std::string shm_not_viable();
std::string tcp_not_viable();

// Validates the options; throws argument.
void check_options(const Options& options);

// --- the listener's side ------------------------------------------------------------------------------------------

// Two ends of one connection within this process.
std::pair<std::shared_ptr<Connection>, std::shared_ptr<Connection>> make_inproc(const Options& dialer,
                                                                                const Options& listener,
                                                                                bool authenticated);

// After the handshake the dialer of a shm connection sends this, with four descriptors: the control segment
// (shm_control.h), its own eventfd, the listener's, and the listener's end of the sideband
// (sideband.h).
struct ShmOffer {
  char magic[8];
  uint64_t segment_bytes;
  uint8_t nonce[32];  // also in the segment
};
static_assert(sizeof(ShmOffer) == 48);
constexpr size_t kShmOfferFds = 4;

struct ShmReply {
  uint32_t viable;
  char reason[124];
};
static_assert(sizeof(ShmReply) == 128);

// Opens the dialer's segment, reads its nonce and answers it there. Throws not_viable; the socket is closed then.
std::shared_ptr<Connection> take_shm(Descriptor socket, const ShmOffer& offer, std::vector<Descriptor> fds,
                                     const Session& session, const Options& options);

// An end over a control segment that both sides have.
struct ShmControl;
std::shared_ptr<Connection> make_shm(Descriptor socket, std::shared_ptr<ShmControl> control, Descriptor wake,
                                     Descriptor sideband, const Session& session, const Options& options);

// The last of the lanes is the sideband.
std::shared_ptr<Connection> take_tcp(Stream socket, std::vector<Stream> lanes, const Session& session,
                                     const Options& options);

// --- shared by the providers, and by users of raw sockets -----------------------------------------------------------

// A connected non-blocking socket. Throws not_viable, timed_out.
Descriptor connect_tcp(const std::string& host_and_port, Deadline deadline);

// Options of a socket that carries a connection: no delays, and probes that find a host that disappeared. With
// heartbeats elsewhere that find it, data may wait for as long as the peer does not receive: to TCP's own limit of what
// is not acknowledged, a peer that is busy looks like one that is gone.
void prepare_tcp(int socket, bool heartbeats = false);
// The same, by a name in the abstract namespace.
Descriptor connect_unix(const std::string& name, Deadline deadline);

}  // namespace geartrain
