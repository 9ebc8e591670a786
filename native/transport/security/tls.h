// TLS 1.3 over a socket, where both sides show a certificate: used by tcp.cc and sideband.cc when
// it is configured (stream.h).
//
// Authentication. Each side checks that one authority, `ca`, signed the other's certificate, and that it is valid now.
// The dialer also checks that it is the listener's: for `name`, or for the host that it dialled. With a `name` the
// listener checks the dialer's for it as well. Names are those of the certificate's subjectAltName, without wildcards.
// Nothing of this replaces the secret, which is proved inside (handshake.h).
//
// The end. A stream that ends is a lost peer to its reader, whatever ended it, and messages count only when they
// are whole (frame.h). So neither side sends close_notify, and a cut stream is no less safe than a whole one.
//
// Threads: any; one at a time is in the cipher. Reading and writing never block. A fork waits until none is within
// OpenSSL (some of them for milliseconds), so that a child may end what it has of its parent's and begin its own.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/errors.h"

namespace geartrain {

struct Ssl;
struct SslContext;

struct TlsFiles {
  std::string certificate;                    // PEM, with the authorities between it and `ca` after it
  std::string key;                            // PEM, not encrypted
  std::string ca;                             // PEM: the authority that signs peers' certificates
  std::string name;                           // that peers' certificates are for; empty: the host that is dialled
  uint64_t rekey_bytes = uint64_t{64} << 30;  // sent under one key: AES-GCM is good for 360 GB (RFC 8446, 5.5)
  unsigned threads = 0;  // that encrypt or decrypt a connection's lanes at once; 0: by the message (lane_threads.h)
};

// Certificate and trusted authority of a process: read once. Any thread.
class TlsContext {
 public:
  // Throws not_viable (no OpenSSL), argument (a file that cannot be used).
  static std::shared_ptr<const TlsContext> load(const TlsFiles& files);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;
  unsigned threads() const { return threads_; }

 private:
  friend class Tls;
  explicit TlsContext(const TlsFiles& files);
  SslContext* context_ = nullptr;
  const std::string name_;
  const uint64_t rekey_bytes_;
  const unsigned threads_;
};

class Tls {
 public:
  // On a connected non-blocking socket, which stays the caller's. `host` was dialled; null: the listener's side.
  Tls(std::shared_ptr<const TlsContext> context, int socket, const std::string* host);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  enum class Step { done, wants_read, wants_write };
  // Throws untrusted (which certificate, and why not), peer_lost, frame.
  Step shake_hands();

  // As sendmsg and recvmsg: the number of bytes, 0 at the end, -1 and errno. Each throws untrusted when the peer
  // refuses this side, which a dialer learns only now, frame for what the peer did not write, and peer_lost when it
  // closed. receive() goes on until there is no room or nothing more has arrived. send() accepts bytes that the socket
  // may not have yet: see flush().
  ssize_t receive(std::span<const struct iovec> parts);
  ssize_t send(std::span<const struct iovec> parts);
  // Whether the socket has all that was sent; else retry when it is writable. True as well when it never will.
  bool flush();
  // Whether the last receive() ended for want of room: there may be more, which no poll() shows.
  bool unread() const { return unread_.load(std::memory_order_relaxed); }

  // "TLSv1.3 TLS_AES_128_GCM_SHA256", after the handshake.
  const std::string& describe() const { return described_; }

 private:
  struct Sockets;  // the BIO's functions
  bool put(const std::byte* from, size_t bytes);
  bool drain();
  [[noreturn]] void fail_handshake();
  void note_failure();
  void check_failure() const;

  const std::shared_ptr<const TlsContext> context_;
  const int socket_;
  const std::string peer_;  // for messages
  Ssl* ssl_ = nullptr;
  std::string described_ = "TLSv1.3";
  mutable std::mutex mutex_;  // of all below
  std::atomic<bool> unread_{true};

  // Incoming, as read from the socket.
  const std::unique_ptr<std::byte[]> in_;
  size_t in_taken_ = 0, in_filled_ = 0;
  char first_[8] = {};  // the peer's first bytes
  size_t first_filled_ = 0;
  bool at_end_ = false, drained_ = false;
  int read_error_ = 0;

  // Outgoing: encrypted, and not yet written to the socket.
  std::vector<std::byte> out_, gathered_;
  size_t out_sent_ = 0;
  int write_error_ = 0;
  uint64_t sent_under_key_ = 0;

  std::optional<std::pair<ErrorKind, std::string>> failure_;
};

}  // namespace geartrain
