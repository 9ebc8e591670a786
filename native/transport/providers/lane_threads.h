// Threads for the lanes of one connection under TLS (tcp.cc): several lanes are encrypted, or decrypted, at once.
//
// Each lane is a TLS connection of its own, with its own keys, so its records need no order with those of another. A
// round works on some lanes, each on one thread at a time: the caller and threads of the process's pool
// (base/threads.h). A round waits for the network for a moment only, and where other lanes go on meanwhile
// (wait_briefly); waits, deadlines and the end of the peer are the caller's, between rounds. So a round needs no free
// thread, and leaves none behind.
//
// How many threads. As few as are about as fast as more, found by trying on messages of like sizes (tried_threads.h):
// of each power of two of bytes by itself, beginning with what the messages before had. A thread at work on a lane
// never sleeps, so its processor time is as long as the time that passes unless it waits for a core. On one core, or on
// two that a sender and its receiver share, that is one thread. A number that was asked for (TlsFiles::threads) is
// kept.
//
// Threads: run() and messages one at a time; counts are any thread's.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "transport/providers/tried_threads.h"

namespace geartrain {

class LaneThreads {
 public:
  // Without TLS one thread serves all lanes: copies need no second one. `asked` of 0: as many as have a core.
  LaneThreads(size_t lanes, bool tls, unsigned asked);

  // Calls body(lane) for each of them, on `threads` threads at most. Returns when all calls have; throws what the first
  // that failed threw: an Error of the same kind and text, or bad_alloc.
  void run(std::span<const size_t> lanes, unsigned threads, void (*body)(void*, size_t), void* context);
  template <typename Body>
  void run(std::span<const size_t> lanes, unsigned threads, Body&& body) {
    run(
        lanes, threads,
        [](void* context, size_t lane) { (*static_cast<std::remove_reference_t<Body>*>(context))(lane); }, &body);
  }
  // Within a body: waits for its lane's socket while others of the round are at work, for a millisecond at most.
  // Whether it is worth to go on.
  bool wait_briefly(int socket, short events);
  // Around the rounds of a message of so many bytes, which is judged at its end.
  void begin_message(uint64_t bytes);
  void end_message(uint64_t bytes);

  unsigned now() const { return now_.load(std::memory_order_relaxed); }
  unsigned most() const { return most_; }
  // That were seen at work at the same time.
  unsigned seen() const { return seen_.load(std::memory_order_relaxed); }

 private:
  const unsigned most_;
  const bool adapts_;
  std::array<std::unique_ptr<TriedThreads>, 64> tried_;  // by powers of two of a message's bytes
  std::atomic<unsigned> now_;
  std::atomic<unsigned> working_{0}, seen_{0};
  std::atomic<uint64_t> wall_ns_{0}, cpu_ns_{0};  // of all threads in this message
  uint64_t began_ns_ = 0;
};

// Lanes of a connection whose dialer names no number: under TLS as many as there may be threads for.
uint32_t lanes_by_cores(bool tls, unsigned asked_threads);

}  // namespace geartrain
