// Sideband of a connection: a stream of its own between the two transports, which neither side's program reads. It
// carries heartbeats, and serves exposed memory (memory_region.h), whatever the programs are busy with.
//
// One thread of the process (sideband_thread.h) serves the sidebands of all its connections. A sideband carries
// notes (Note), some of them followed by bytes. Nothing on it waits for the other direction: requests are answered in
// any order, payloads travel in chunks, and a peer that reads nothing blocks only itself.
//
//   beat       heartbeat, twice a second
//   greeting   a nonce, and its address in the sender's memory, for cross-memory access; `reach` returns the result
//   get        bytes of a region     -> chunk (with bytes) ..., done
//   put        bytes for a region, then load (with bytes) ...  -> done
//   take       bytes for a region, to be read out of the sender's memory -> done
//   cancel     cancels the request with that number
//
// Heartbeats detect, within peer_timeout_s and a second: a process that is stopped, a host or a network that failed
// silently, whether any call waits for that peer or not. They do not detect a program that hangs or computes for ever
// while its process runs. Deadlines are for that. A process that was itself stopped counts only the time it ran.
//
// Threads: any, for all public members.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>

#include "base/condition_variable.h"
#include "base/deadline.h"
#include "transport/message.h"
#include "transport/security/stream.h"
#include "transport/sideband/memory_region.h"
#include "transport/sideband/sideband_thread.h"

namespace geartrain {

constexpr double kLeastPeerTimeoutS = 4 * kHeartbeatS;
constexpr size_t kMostOpen = 64;  // requests of one side without an answer

class Sideband final : public SidebandLine, public std::enable_shared_from_this<Sideband> {
 public:
  struct Setup {
    Stream socket;   // non-blocking
    pid_t peer = 0;  // its process, if its memory may be reachable
    double peer_timeout_s = 0;
    std::string out_of_reach;  // why it is not
    std::shared_ptr<ExposedRegions> regions;
    std::function<void(const std::string&)> lost;  // heartbeats stopped, or malformed input; never after stop()
    std::function<void()> ended;                   // at every heartbeat after the peer's end of it; never after stop()
  };
  explicit Sideband(Setup setup);
  // Registers it with the process's thread, until stop().
  void start();
  void stop();
  void hang_up() const;
  // Whether the peer has ended it, or what is between. The connection may have something to be read still.
  bool ended_by_peer() const { return ended_by_peer_.load(std::memory_order_relaxed); }

  // Copies from the peer's region, or to it, and returns the path. Throws region, timed_out, peer_lost, no_space.
  Path read(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset, Deadline deadline);
  Path write(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline deadline);
  // "cma", or "served" and why not the former; "" before that is known.
  std::string access_path() const;

  // --- called by the thread ----------------------------------------------------------------------------------------
  int socket() const override { return socket_.get(); }
  void on_ready() override;
  void tick() override;
  bool has_work() const override {
    return has_work_.load(std::memory_order_relaxed) || unread_.load(std::memory_order_relaxed);
  }
  void work() override;  // one piece of a take, and what the socket does not signal
  void fail_line(const std::string& why) noexcept override;

 private:
  enum class NoteKind : uint32_t { greeting = 1, reach, beat, get, chunk, done, put, load, take, cancel };
  struct Note {
    uint32_t kind;
    uint32_t access;  // done, reach
    uint64_t number;  // of the request, assigned by its sender
    uint64_t offset;  // in the region; chunk, load: from there
    uint64_t bytes;
    uint64_t stamp, data;    // take: of the writer's memory; greeting: of the nonce
    ExposedId region, from;  // greeting: the nonce is the region's
  };
  static_assert(sizeof(Note) == 80);
  struct Request {  // of this side
    std::shared_ptr<ExposedRegion> local;
    bool incoming;
    bool done = false;
    Access access = Access::ok;
    ConditionVariable changed;
  };
  struct Transfer {  // outgoing bytes, chunk by chunk
    NoteKind kind;
    uint64_t number;
    std::shared_ptr<ExposedRegion> region;
    uint64_t offset, bytes, sent;
  };
  struct Put {  // incoming bytes for a region of this side
    std::shared_ptr<ExposedRegion> region;
    uint64_t offset, bytes, got;
  };
  struct Take {
    uint64_t number;
    std::shared_ptr<ExposedRegion> region;
    uint64_t offset, done;
    RegionHandle from;
  };

  struct CloseAtEnd;
  class Registration;
  Access send_request(Note note, Bytes memory, Deadline deadline);
  void cancel_request(const Note& note);
  void wait_for_greeting(std::unique_lock<std::mutex>& lock, Deadline deadline);
  void handle(const Note& note);
  void greeted(const Note& note);
  void requested(const Note& note);
  void arriving(const Note& note);
  void send_note(NoteKind kind, uint64_t number = 0, Access access = Access::ok);
  bool read_payload(uint64_t* budget);
  void flush() noexcept;
  void write_all();
  void begin_chunk();
  bool send_payload();
  void end_chunk();
  bool again();
  void want_write(bool wanted);
  void end() noexcept;
  void end_by_peer() noexcept;
  [[noreturn]] static void malformed(const char* what);
  void report_lost(const std::string& reason) noexcept;

  const Stream socket_;
  const pid_t peer_;
  const double peer_timeout_s_;
  const std::shared_ptr<ExposedRegions> regions_;
  const Owned owned_;
  ExposedId nonce_;
  std::mutex lost_mutex_;
  std::function<void(const std::string&)> lost_;
  std::function<void()> on_ended_;
  std::atomic<bool> ended_by_peer_{false};
  std::atomic<bool> has_work_{false}, unread_{false};

  mutable std::mutex mutex_;  // of all below; before a region's and lost_mutex_
  ConditionVariable greeting_;
  bool greeted_ = false, reach_known_ = false, peer_reaches_ = false, ended_ = false;
  std::string out_of_reach_;  // why this side cannot read the peer's memory; empty: it can
  bool received_ = false;
  double idle_s_ = 0;

  uint64_t next_number_ = 1;
  std::unordered_map<uint64_t, Request*> requests_;
  std::unordered_map<uint64_t, Put> puts_;
  std::deque<Take> takes_;

  // Incoming.
  Note in_{};
  size_t in_filled_ = 0;
  uint64_t payload_left_ = 0, payload_at_ = 0;
  std::shared_ptr<ExposedRegion> payload_for_;  // null: to be discarded

  // Outgoing: first out_, then the rest of a chunk, then whatever is next.
  std::vector<std::byte> out_;
  size_t out_sent_ = 0;
  Transfer chunk_{};  // the transfer of the current chunk; no region between chunks
  uint64_t chunk_left_ = 0;
  bool chunk_spoilt_ = false;  // its region was closed meanwhile
  std::deque<Note> notes_;
  std::deque<Transfer> transfers_;
  bool wants_write_ = false;
};

}  // namespace geartrain
