// One end of a connection: sending, receiving, exposed memory, and its end. transport.h is the manual.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/condition_variable.h"
#include "base/deadline.h"
#include "base/descriptor.h"
#include "base/errors.h"
#include "base/lifetime.h"
#include "base/patience.h"
#include "transport/message.h"
#include "transport/options.h"

namespace geartrain {

struct ConnectionCounts {
  uint64_t messages_sent = 0, messages_received = 0;
  std::array<uint64_t, kPathCount> bytes_sent{}, bytes_received{};  // of headers and buffers
};

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
  ConditionVariable free_;
  bool taken_ = false;
  uint32_t waiting_ = 0;
};

class Sideband;
class Stream;
class ExposedRegion;
class ExposedRegions;
struct RegionHandle;

class Connection {
 public:
  enum class Poll { nothing, message, more };

  virtual ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Throws frame (beyond a limit; nothing was sent), timed_out, peer_lost, hung_up.
  void send(const Outgoing& message, Deadline deadline);
  // The next message. Throws timed_out (none arrived), frame (malformed input), peer_lost, hung_up.
  void receive(Message* message, Deadline deadline);
  // The next message, if there is one: never blocks. `more`: there is work, but no whole message yet; call again.
  Poll poll(Message* message);

  // The peer may read this memory, or write it, from now until the region is closed, or this end is; for one
  // connection's peer.
  std::shared_ptr<ExposedRegion> expose(std::span<std::byte> memory, bool writable);
  // Reads the peer's memory that the handle names, from `offset` on. The peer's program need not take part. Throws
  // region (closed, too small, read-only), argument (no handle), timed_out, peer_lost, hung_up. When it throws, what is
  // in the destination is arbitrary.
  void read(Bytes handle, std::span<std::byte> into, uint64_t offset, Deadline deadline);
  void write(Bytes handle, Bytes from, uint64_t offset, Deadline deadline);

  // For threads that wait for many connections (inbox.h), and do not call receive(): when arm() returns true there is
  // nothing to poll, and one of the wake descriptors becomes ready once there is. `edge` ones report it only once.
  struct Wake {
    int fd;
    bool edge;
  };
  bool arm();
  virtual std::vector<Wake> wakes() const = 0;
  // A socket that reports (EPOLLRDHUP) the peer's end, for threads that do not read.
  virtual int end_descriptor() const = 0;
  // A poll without a system call, where can_look(): may there be data?
  bool might_have_data() const { return has_ahead_.load(std::memory_order_acquire) || look(); }
  virtual bool can_look() const { return false; }
  // A poll would find nothing: all of what had come has been taken, and a wake descriptor that is no edge reports more.
  bool drained() const { return !has_ahead_.load(std::memory_order_acquire) && took_all(); }

  // The peer is lost, as far as is known without a query.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  // Whether it is lost after a look at the connection, for those that wait for another one: what has come is read
  // ahead, within the limit of what may queue, so that the end behind it is found. Never blocks.
  struct Look {
    bool lost = false, unread = false;  // unread: there are messages to be received
    uint32_t kind = 0;                  // of the last one of them, and what 64 KB hold of its header
    std::string header;
  };
  Look look_for_end();
  // Hangs up; other threads' waits end with hung_up. Idempotent, any thread.
  void close();
  bool closed() const { return life_.closed(); }

  virtual const char* transport() const = 0;
  // One line for logs: the path, and its ends.
  virtual std::string describe() const = 0;
  // How read() and write() reach exposed memory: "memory", "cma", or "served" and why not the former; "" at first.
  virtual std::string one_sided() const;
  ConnectionCounts counts() const;
  bool authenticated() const { return authenticated_; }
  // "TLSv1.3" and the cipher; "" without TLS.
  virtual std::string tls() const { return ""; }
  // The faster providers, and why each was not taken.
  const std::vector<std::pair<std::string, std::string>>& considered() const { return considered_; }
  // An identifier of the connection that both sides know: for logs.
  const std::string& name() const { return name_; }

 protected:
  explicit Connection(const Options& options, std::string name, bool authenticated);

  // Under the send turn, checked against the limits.
  virtual void write_message(const Outgoing& message, Deadline deadline) = 0;
  // Under the read mutex. Throws peer_lost at the end, frame for a malformed message.
  virtual Poll read_message(Message* message) = 0;
  // Implement read() and write(); over the sideband unless the provider has a faster path.
  virtual Path read_region(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset, Deadline deadline);
  virtual Path write_region(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline deadline);
  // The sideband: from when the connection is made until its end; the last in a constructor, the first in a
  // destructor. `peer` is its process, if its memory may be reachable, else `why` it is not.
  void start_sideband(Stream socket, int peer, const std::string& why);
  void stop_sideband();
  // The provider's part of arm() and might_have_data().
  virtual bool prepare_to_sleep() = 0;
  virtual bool look() const { return false; }
  // The provider's part of drained(): of the last read.
  virtual bool took_all() const { return false; }
  // Makes both sides notice. Any thread, any number of times.
  virtual void hang_up() = 0;

  // Records the reason, and closes the connection.
  void lose(const std::string& reason);
  [[noreturn]] void fail_lost() const;
  void check_usable() const { life_.check(); }
  bool forked() const { return life_.forked(); }
  // For a write that waits: reads one message ahead, if no other thread reads and there is room for it.
  // True when that may have made progress.
  bool read_ahead();
  void count_sent(Path path, uint64_t bytes) { add(bytes_sent_[static_cast<size_t>(path)], bytes); }
  void count_received(Path path, uint64_t bytes) { add(bytes_received_[static_cast<size_t>(path)], bytes); }
  void wake_self() const { ring_bell(wake_); }

  const Options options_;
  Descriptor wake_;  // an eventfd: this side's sleepers
  const std::shared_ptr<ExposedRegions> regions_;
  std::shared_ptr<Sideband> sideband_;  // null: there is none

 private:
  static void add(std::atomic<uint64_t>& counter, uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }
  Poll poll_now(Message* message);
  template <typename Do>
  void access(Do&& act);
  Poll spin(Message* message, Deadline deadline);
  void sleep(Deadline deadline);

  Lifetime life_{"connection", "connect again here"};
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

  std::atomic<bool> lost_{false};
  mutable std::mutex reason_mutex_;
  std::string reason_;

  std::atomic<uint64_t> messages_sent_{0}, messages_received_{0};
  std::array<std::atomic<uint64_t>, kPathCount> bytes_sent_{}, bytes_received_{};
};

}  // namespace geartrain
