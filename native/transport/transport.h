// Ordered messages between two processes: a small header, and big buffers beside it that are copied as little as the
// way between the two allows.
//
//   Listener listener({.tcp_host = "127.0.0.1"});                    // address(): what to give to peers
//   auto mine = connect(listener.address(), {}, Deadline::after(5)); // the fastest way that really works
//   auto theirs = listener.accept(Deadline::after(5));
//   mine->send({.tag = 1, .header = bytes, .buffers = buffers}, Deadline::after(5));
//   Message message;
//   theirs->receive(&message, Deadline::after(5));
//
// Providers, fastest first (kProviders): `inproc` (two ends in one process), `shm` (one host: a ring in shared memory
// for small messages, memfd segments for big ones) and `tcp`. Which one a connection uses is found by doing it: the
// peer's memory is opened and a nonce read through it. Host names, pids and boot ids are never compared, because
// containers make them lie. `considered()` tells why the faster ones were not taken.
//
// Threads. Any number may send on one connection: messages leave whole, in the order of the calls. One thread at a
// time receives; a second waits for its turn. The thread that sends does the work itself, and so does the one that
// receives: there is no thread in between. While a send waits for room it also reads what the peer sends, up to
// MessageLimits::max_queued_bytes, so that two peers that both send do not wait for each other.
//
// Memory. A received message lives in memory of its own, or is a view of the sender's segment, which then lends it to
// nobody else. Either way it goes back to where it came from with the last copy of Message::owner. All buffers begin
// at a multiple of 64 bytes. The sender's buffers may be changed again when send() returns.
//
// One-sided. expose() lets the peer read, or write, memory of this process without a message: region.handle() travels
// in any message, and the peer's end of the connection takes it. Neither program has to receive, or to wait, for that.
//
// Death. When the peer dies or hangs up, whatever it had sent completely is still received; then every call throws
// peer_lost. A peer that is stopped, or that a broken network took away, is lost after Options::peer_timeout_s without
// a sign of life (sideband.h says what that notices and what not), and every wait has a deadline of its own and throws
// timed_out. A send that meets its deadline in the middle of a message ends the connection.
//
// Trust. With a secret, both sides prove that they know it before anything else is said (handshake.h). Without one a
// listener only takes connections from this host: loopback, and Unix sockets of the same user. Bytes that are not a
// message end the connection that they came on, and no other. With Options::tls all that goes over TCP, messages,
// lanes and the line beside the connection, is encrypted, between two sides that showed a certificate (tls.h). Without,
// messages are neither encrypted nor signed.
//
// Fork. A connection or listener belongs to the process that made it. A forked child's copy is closed at the fork
// (descriptor.h) and every call on it throws hung_up; the parent's is untouched.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor.h"
#include "base/errors.h"

namespace geartrain {

// What one side takes from the other. A message beyond a limit is refused before memory is taken for it.
struct MessageLimits {
  uint64_t max_header_bytes = uint64_t{64} << 20;
  uint64_t max_message_bytes = uint64_t{16} << 30;  // all buffers of one message
  uint32_t max_buffers = 4096;
  uint64_t max_queued_bytes = uint64_t{256} << 20;  // received by a waiting send, and not yet asked for
  uint64_t max_segment_bytes = uint64_t{8} << 30;   // shm: lent to the peer and kept warm, for one connection
  uint32_t max_pending = 64;                        // connections to a listener that have not yet proved themselves
  double handshake_timeout_s = 5.0;
};

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

// How a message travelled. What was sent through a `segment` is received as a `view` when it was not copied out.
// Exposed memory is read and written across processes (`cma`), or `served` by the peer's transport.
enum class Path : uint32_t { memory, ring, segment, view, stream, lanes, cma, served };
constexpr size_t kPathCount = 8;
constexpr const char* kPathNames[kPathCount] = {"memory", "ring",  "segment", "view",
                                                "stream", "lanes", "cma",     "served"};

struct ConnectionCounts {
  uint64_t messages_sent = 0, messages_received = 0;
  std::array<uint64_t, kPathCount> bytes_sent{}, bytes_received{};  // of headers and buffers
};

using Bytes = std::span<const std::byte>;

struct Outgoing {
  uint64_t tag = 0;  // the caller's own: both are passed on as they are
  uint32_t kind = 0;
  Bytes header;
  std::span<const Bytes> buffers;

  uint64_t payload_bytes() const {
    uint64_t bytes = 0;
    for (const Bytes& buffer : buffers) bytes += buffer.size();
    return bytes;
  }
};

struct Message {
  uint64_t tag = 0;
  uint32_t kind = 0;
  std::span<std::byte> header;
  std::vector<std::span<std::byte>> buffers;
  std::shared_ptr<void> owner;  // of the header's and all buffers' memory

  uint64_t bytes() const {
    uint64_t sum = header.size();
    for (const auto& buffer : buffers) sum += buffer.size();
    return sum;
  }
};

// Memory for a message of that form: `header` and `buffers` are set, their contents arbitrary. Throws no_space.
void make_room(Message* message, uint64_t header_bytes, std::span<const uint64_t> buffer_bytes);

// A mutex whose waits have a deadline.
class Turn {
 public:
  class Hold {
   public:
    Hold(Turn& turn, Deadline deadline, const char* what);  // throws timed_out
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Turn& turn_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
  uint32_t waiting_ = 0;
};

// How long to look again and again before a sleep. Looking in vain takes the core from somebody, perhaps from the one
// who is waited for, so it gets shorter while it is in vain, and is tried again now and then. One thread at a time.
class Patience {
 public:
  explicit Patience(double spin_us);
  double spin_us() const { return most_us_ * share_; }
  void rewarded() { share_ = share_ * 2 + 0.1 < 1 ? share_ * 2 + 0.1 : 1; }
  void in_vain() {
    share_ = share_ < 0.05 ? 0 : share_ / 2;
    if (++vain_ % 64 == 0) share_ = 0.5;
  }

 private:
  double most_us_;
  double share_ = 1.0;
  uint32_t vain_ = 0;
};

class Aside;
class Stream;
class ExposedRegion;
class ExposedRegions;
struct RegionHandle;

class Connection {
 public:
  enum class Poll { nothing, message, more };

  virtual ~Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Throws frame (beyond a limit; nothing was sent), timed_out, peer_lost, hung_up.
  void send(const Outgoing& message, Deadline deadline);
  // The next message. Throws timed_out (none came), frame (what came is no message), peer_lost, hung_up.
  void receive(Message* message, Deadline deadline);
  // The next message, if there is one: never waits. `more`: there is work, but no whole message yet; call again.
  Poll poll(Message* message);

  // The peer may read this memory, or write it, from now until the region is closed; for one connection's peer.
  std::shared_ptr<ExposedRegion> expose(std::span<std::byte> memory, bool writable);
  // The peer's memory that the handle speaks of, from `offset` on. The peer's program need not do anything. Throws
  // region (closed, too small, read-only), schema (no handle), timed_out, peer_lost, hung_up. When it throws, what is
  // in the destination is arbitrary.
  void read(Bytes handle, std::span<std::byte> into, uint64_t offset, Deadline deadline);
  void write(Bytes handle, Bytes from, uint64_t offset, Deadline deadline);

  // For who waits for many connections (inbox.h), and then does not call receive(): when arm() returns true there is
  // nothing to poll, and one of the wake descriptors becomes ready once there is. `edge` ones tell of it only once.
  struct Wake {
    int fd;
    bool edge;
  };
  bool arm();
  virtual std::vector<Wake> wakes() const = 0;
  // A socket that tells (EPOLLRDHUP) of the peer's end, for who does not read.
  virtual int end_descriptor() const = 0;
  // A look without a system call, where can_look(): may something be there?
  bool might_have_data() const { return has_ahead_.load(std::memory_order_acquire) || look(); }
  virtual bool can_look() const { return false; }

  // The peer is gone, as far as is known without asking it.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  // Hangs up; other threads' waits end with hung_up. Idempotent, any thread.
  void close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  virtual const char* transport() const = 0;
  // One line for people: the way, and its ends.
  virtual std::string describe() const = 0;
  // How read() and write() reach exposed memory: "memory", "cma", or "served" and why not the former; "" at first.
  virtual std::string one_sided() const;
  ConnectionCounts counts() const;
  bool authenticated() const { return authenticated_; }
  // "TLSv1.3" and the cipher; "" without TLS.
  virtual std::string tls() const { return ""; }
  // The faster providers, and why each was not taken.
  const std::vector<std::pair<std::string, std::string>>& considered() const { return considered_; }
  // Something of the same connection that both sides know: for logs.
  const std::string& name() const { return name_; }

 protected:
  explicit Connection(const Options& options, std::string name, bool authenticated);

  // Under the send turn, checked against the limits.
  virtual void write_message(const Outgoing& message, Deadline deadline) = 0;
  // Under the read mutex. Throws peer_lost at the end, frame for what is no message.
  virtual Poll read_message(Message* message) = 0;
  // What read() and write() do; over the line beside the connection unless there is something better.
  virtual Path read_region(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset, Deadline deadline);
  virtual Path write_region(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline deadline);
  // The line beside it: from when the connection is made until its end; the last in a constructor, the first in a
  // destructor. `peer` is its process, if there is a hope to reach into it, else `why` there is none.
  void start_aside(Stream socket, int peer, const std::string& why);
  void stop_aside();
  // What arm() and might_have_data() ask of the provider.
  virtual bool prepare_to_sleep() = 0;
  virtual bool look() const { return false; }
  // Makes both sides notice. Any thread, any number of times.
  virtual void hang_up() = 0;

  // Remembers why, and hangs up.
  void lose(const std::string& reason);
  [[noreturn]] void fail_lost() const;
  void check_usable() const;
  bool forked() const { return forks_ != forks(); }
  // For a write that waits: reads one message ahead, if nobody else reads and there is room for it.
  // True when that may have made progress.
  bool read_ahead();
  void count_sent(Path path, uint64_t bytes) { add(bytes_sent_[static_cast<size_t>(path)], bytes); }
  void count_received(Path path, uint64_t bytes) { add(bytes_received_[static_cast<size_t>(path)], bytes); }
  void wake_self() const;

  const Options options_;
  Descriptor wake_;  // an eventfd: this side's sleepers
  const std::shared_ptr<ExposedRegions> regions_;
  std::shared_ptr<Aside> aside_;  // null: there is none

 private:
  static void add(std::atomic<uint64_t>& counter, uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }
  Poll poll_now(Message* message);
  template <typename Do>
  void access(Do&& act);
  bool spin(Message* message, Deadline deadline);
  void sleep(Deadline deadline);

  const uint64_t forks_;
  std::string name_;
  bool authenticated_;
  std::vector<std::pair<std::string, std::string>> considered_;
  friend std::shared_ptr<Connection> connect(const std::string&, const Options&, Deadline);

  Turn send_turn_, receive_turn_;
  std::mutex read_mutex_;
  std::deque<Message> ahead_;  // read by waiting sends; under read_mutex_
  uint64_t ahead_bytes_ = 0;
  bool ended_ = false;  // read() threw; under read_mutex_
  std::atomic<bool> has_ahead_{false};
  Descriptor sleeper_;  // an epoll over wakes(); made by the first receive() that sleeps
  Patience patience_;   // under receive_turn_

  std::atomic<bool> lost_{false}, closed_{false};
  mutable std::mutex reason_mutex_;
  std::string reason_;

  std::atomic<uint64_t> messages_sent_{0}, messages_received_{0};
  std::array<std::atomic<uint64_t>, kPathCount> bytes_sent_{}, bytes_received_{};
};

// Where a listener can be reached: "id=<32 hex>;shm=<name>;tcp=<host>:<port>". Parsed from what anyone may have sent.
// With "id=any" it is whoever answers there: for a place that is known before its listener is, such as a fixed port.
struct Address {
  static constexpr const char* kAnyId = "any";
  std::string id;
  std::string shm;               // name of a Unix socket in the abstract namespace; empty: none
  std::vector<std::string> tcp;  // host:port, in the order to try them

  std::string text() const;
  static Address parse(const std::string& text);  // throws schema
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

// Takes connections. One thread of its own answers all handshakes, none of which can hold up another.
class Listener {
 public:
  explicit Listener(const ListenerOptions& options);  // throws os, schema
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // The next connection that proved itself. Throws timed_out, hung_up.
  std::shared_ptr<Connection> accept(Deadline deadline);
  const std::string& address() const;
  // Connections refused so far: no hello in time, no proof, garbage, too many at once. And why the last one was.
  uint64_t refused() const;
  std::string refusal() const;
  void close();

 private:
  friend std::shared_ptr<Connection> dial_inproc(const Address&, const Options&, Deadline);
  class Body;
  std::shared_ptr<Body> body_;
};

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
