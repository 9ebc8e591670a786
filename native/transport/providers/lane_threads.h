// Threads for the lanes of one connection under TLS (tcp.cc): several lanes are encrypted, or decrypted, at once.
//
// Each lane is a TLS connection of its own, with its own keys, so its records need no order with those of another. A
// round works on some lanes, each on one thread at a time: the caller and threads of the process's pool
// (base/threads.h). A round waits for the network for a moment only, and where other lanes go on meanwhile
// (wait_briefly); waits, deadlines and the end of the peer are the caller's, between rounds. So a round needs no free
// thread, and leaves none behind.
//
// How many threads: one for each kBytesAThread of a message, up to half of the cores, since the other side works at the
// same time and may be on this host. A number that was asked for (TlsFiles::threads) is used for every message.
//
// Threads: run() and messages one at a time; counts are any thread's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace geartrain {

class LaneThreads {
 public:
  // On 16 cores 10.5 MB are fastest on 4 threads (2.96 GB/s; 2.28 on 8), 41.9 MB on 8 (5.61; 4.59 on 4).
  static constexpr uint64_t kBytesAThread = 2'500'000;

  // Without TLS one thread serves all lanes: copies need no second one. `asked` of 0: by the message and the cores.
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
  // Before the rounds of a message of so many bytes.
  void begin_message(uint64_t bytes);

  unsigned now() const { return now_.load(std::memory_order_relaxed); }
  unsigned most() const { return most_; }
  // That were seen at work at the same time.
  unsigned seen() const { return seen_.load(std::memory_order_relaxed); }

 private:
  const unsigned most_;
  const bool asked_;
  std::atomic<unsigned> now_;
  std::atomic<unsigned> working_{0}, seen_{0};
};

// Lanes of a connection whose dialer names no number: under TLS as many as there may be threads for.
uint32_t lanes_by_cores(bool tls, unsigned asked_threads);

}  // namespace geartrain
