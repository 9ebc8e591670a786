// The line beside a connection: a stream of its own between the two transports, which neither side's program reads. It
// tells that the peer lives, and serves memory that was exposed (memory_region.h), whatever the programs are busy with.
//
// One thread of the process (sideband_thread.h) serves the lines of all its connections. What goes over a line is a
// note (Note), after some of them bytes. Nothing on it waits for the other direction: requests are answered in any
// order, payloads travel in chunks, and a peer that takes nothing holds up nobody but itself.
//
//   beat       twice a second: I live
//   greeting   a nonce, and where it stands in my memory, for who can look there; `reach` says whether that worked
//   get        bytes of a region     -> chunk (with bytes) ..., done
//   put        bytes for a region, then load (with bytes) ...  -> done
//   take       bytes for a region, to be read out of my memory -> done
//   withdraw   of the request with that number: nobody waits for it any more
//
// What the beat notices, within peer_timeout_s and a second: a process that is stopped, a host or a way that is gone
// without a word, whether anybody waits for that peer or not. What it cannot: a program that hangs or computes for ever
// while its process runs. Deadlines are for that. A process that was itself stopped counts only the time it ran.
//
// Threads: any, for all that is public.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>

#include "base/deadline.h"
#include "transport/message.h"
#include "transport/security/stream.h"
#include "transport/sideband/memory_region.h"
#include "transport/sideband/sideband_thread.h"

namespace geartrain {

constexpr double kLeastPeerTimeoutS = 4 * kBeatS;

class Sideband final : public SidebandLine, public std::enable_shared_from_this<Sideband> {
 public:
  struct Setup {
    Stream socket;   // does not block
    pid_t peer = 0;  // its process, if there is a hope of reaching into it
    double peer_timeout_s = 0;
    std::string out_of_reach;  // why there is none
    std::shared_ptr<ExposedRegions> regions;
    std::function<void(const std::string&)> lost;  // the peer is silent, or talks nonsense; never after stop()
  };
  explicit Sideband(Setup setup);
  // Has the process's thread serve it, until stop().
  void start();
  void stop();
  void hang_up() const;

  // Copies from the peer's region, or to it, and returns how. Throws region, timed_out, peer_lost, no_space.
  Path read(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset, Deadline deadline);
  Path write(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline deadline);
  // "cma", or "served" and why not the former; "" before that is known.
  std::string way() const;

  // --- the thread's ------------------------------------------------------------------------------------------------
  int socket() const override { return socket_.get(); }
  void on_ready() override;
  void tick() override;
  bool has_work() const override {
    return has_work_.load(std::memory_order_relaxed) || unread_.load(std::memory_order_relaxed);
  }
  void work() override;  // one piece of a take, and what the socket does not tell of

 private:
  enum class Word : uint32_t { greeting = 1, reach, beat, get, chunk, done, put, load, take, withdraw };
  struct Note {
    uint32_t word;
    uint32_t access;  // done, reach
    uint64_t number;  // of the request, which is its maker's
    uint64_t offset;  // in the region; chunk, load: from there
    uint64_t bytes;
    uint64_t stamp, data;    // take: of the writer's memory; greeting: of the nonce
    ExposedId region, from;  // greeting: the nonce is the region's
  };
  static_assert(sizeof(Note) == 80);
  struct Request {  // of ours
    std::shared_ptr<ExposedRegion> local;
    bool incoming;
    bool done = false;
    Access access = Access::ok;
    std::condition_variable changed;
  };
  struct Transfer {  // bytes that leave, chunk by chunk
    Word word;
    uint64_t number;
    std::shared_ptr<ExposedRegion> region;
    uint64_t offset, bytes, sent;
  };
  struct Put {  // bytes that come for a region of ours
    std::shared_ptr<ExposedRegion> region;
    uint64_t offset, bytes, got;
  };
  struct Take {
    uint64_t number;
    std::shared_ptr<ExposedRegion> region;
    uint64_t offset, done;
    RegionHandle from;
  };

  Access ask(Note note, Bytes memory, Deadline deadline);
  void withdraw(const Note& note);
  void wait_until_greeted(std::unique_lock<std::mutex>& lock, Deadline deadline);
  void handle(const Note& note);
  void greeted(const Note& note);
  void requested(const Note& note);
  void arriving(const Note& note);
  void say(Word word, uint64_t number = 0, Access access = Access::ok);
  bool read_payload(uint64_t* budget);
  void flush();
  void begin_chunk();
  bool send_payload();
  void end_chunk();
  bool again();
  void want_write(bool wanted);
  void end();
  [[noreturn]] static void nonsense(const char* what);
  void tell_lost(const std::string& reason);

  const Stream socket_;
  const pid_t peer_;
  const double peer_timeout_s_;
  const std::shared_ptr<ExposedRegions> regions_;
  const uint64_t forks_ = forks();
  ExposedId nonce_;
  std::mutex lost_mutex_;
  std::function<void(const std::string&)> lost_;
  std::atomic<bool> has_work_{false}, unread_{false};

  mutable std::mutex mutex_;  // of all below; before a region's and lost_mutex_
  std::condition_variable greeting_;
  bool greeted_ = false, told_reach_ = false, peer_reaches_ = false, ended_ = false;
  std::string out_of_reach_;  // why this side cannot look into the peer's memory; empty: it can
  bool heard_ = false;
  double silent_s_ = 0;

  uint64_t next_number_ = 1;
  std::unordered_map<uint64_t, Request*> requests_;
  std::unordered_map<uint64_t, Put> puts_;
  std::deque<Take> takes_;

  // Coming in.
  Note in_{};
  size_t in_filled_ = 0;
  uint64_t payload_left_ = 0, payload_at_ = 0;
  std::shared_ptr<ExposedRegion> payload_for_;  // null: to be thrown away

  // Going out: first out_, then the rest of a chunk, then whatever is next.
  std::vector<std::byte> out_;
  size_t out_sent_ = 0;
  Transfer chunk_{};  // whose chunk it is; no region between chunks
  uint64_t chunk_left_ = 0;
  bool chunk_spoilt_ = false;  // its region was closed meanwhile
  std::deque<Note> notes_;
  std::deque<Transfer> transfers_;
  bool wants_write_ = false;
};

}  // namespace geartrain
