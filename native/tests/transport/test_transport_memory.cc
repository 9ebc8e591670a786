// Every allocation of a call fails in turn: the caller gets an error, the peer the whole message or an error, nobody
// waits, and nothing of the call's stack is used after it. TLS encrypts by a C library, through which nothing may be
// thrown.

#include <cstdlib>
#include <new>
#include <optional>

#include "tests/support/check.h"
#include "tests/transport/peers.h"
#include "transport/sideband/memory_region.h"

namespace {

// Of this thread: the allocation that fails, counted down; 0: none.
thread_local uint64_t fails_at = 0;
thread_local uint64_t made = 0;

void* allocate(size_t bytes, size_t alignment) {
  ++made;
  if (fails_at != 0 && --fails_at == 0) throw std::bad_alloc();
  void* memory = nullptr;
  if (::posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) {
  return allocate(bytes, alignof(std::max_align_t));
}
void* operator new[](size_t bytes) {
  return allocate(bytes, alignof(std::max_align_t));
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace geartrain {
namespace {

// A bound on the allocations of one call.
constexpr uint64_t kMostAllocations = 500;

// call() with its `at`-th allocation failing. Whether that was the end of them; what it threw is told by `failed`.
template <typename Call>
bool with_failure(uint64_t at, bool* failed, Call&& call) {
  fails_at = at;
  *failed = true;
  try {
    call();
    *failed = false;
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
  const bool all = fails_at != 0;
  fails_at = 0;
  return all;
}

TEST(every_allocation_of_a_send_fails_in_turn) {
  const std::vector<std::byte> header(100, std::byte{1}), large(300'000, std::byte{2});
  const std::vector<Bytes> buffers{large};
  for (const char* transport : transports()) {
    bool all = false;
    uint64_t failures = 0;
    for (uint64_t at = 1; !all && at < kMostAllocations; ++at) {
      Pair pair = connected(transport);
      std::thread receiver([&] {
        try {
          for (uint64_t tag = 1; tag < 3; ++tag) {
            Message message;
            pair.other->receive(&message, soon());
            CHECK_EQ(message.tag, tag);
            CHECK_EQ(message.header.size(), header.size());
            CHECK(std::equal(message.header.begin(), message.header.end(), header.begin()));
            CHECK_EQ(message.buffers.size(), size_t{1});
            CHECK(std::equal(large.begin(), large.end(), message.buffers[0].begin()));
          }
        } catch (const Error& error) {
          CHECK(error.kind != ErrorKind::timed_out);
        }
      });
      bool failed = false;
      all = with_failure(at, &failed, [&] { pair.one->send({1, 7, header, buffers}, soon()); });
      failures += failed;
      // Nothing of a message that was not begun has come; one that was is the connection's end.
      try {
        if (failed) pair.one->send({1, 7, header, buffers}, soon());
        pair.one->send({2, 7, header, buffers}, soon());
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::peer_lost);
        pair.one->close();
      }
      receiver.join();
    }
    CHECK(all);
    std::cerr << transport << ": " << failures << " allocations of a send failed" << std::endl;
  }
}

TEST(every_allocation_of_a_read_and_of_a_write_fails_in_turn) {
  for (const char* transport : transports()) {
    for (const bool reading : {true, false}) {
      bool all = false;
      uint64_t failures = 0;
      for (uint64_t at = 1; !all && at < kMostAllocations; ++at) {
        Pair pair = connected(transport);
        std::vector<std::byte> memory(100'000, std::byte{7});
        const auto region = pair.other->expose(memory, !reading);
        const RegionHandle handle = region->handle();
        const Bytes said = std::as_bytes(std::span(&handle, 1));
        bool failed = false;
        all = with_failure(at, &failed, [&] {
          std::vector<std::byte> mine(memory.size(), std::byte{9});
          if (reading) {
            pair.one->read(said, mine, 0, soon());
            CHECK(mine == memory);
          } else {
            pair.one->write(said, mine, 0, soon());
            CHECK(mine == memory);
          }
        });
        failures += failed;
        std::vector<std::byte> again(memory.size());
        try {
          if (reading) pair.one->read(said, again, 0, soon());
          CHECK(!reading || again == memory);
        } catch (const Error& error) {
          CHECK(error.kind == ErrorKind::peer_lost);
        }
      }
      CHECK(all);
      std::cerr << transport << ": " << failures << " allocations of a " << (reading ? "read" : "write") << " failed"
                << std::endl;
    }
  }
}

TEST(every_allocation_of_a_receive_fails_in_turn) {
  const std::vector<std::byte> header(100, std::byte{1}), large(300'000, std::byte{2});
  const std::vector<Bytes> buffers{large};
  for (const char* transport : transports()) {
    bool all = false;
    uint64_t failures = 0;
    for (uint64_t at = 1; !all && at < kMostAllocations; ++at) {
      Pair pair = connected(transport);
      std::thread sender([&] {
        try {
          for (uint64_t tag = 1; tag < 3; ++tag) pair.other->send({tag, 7, header, buffers}, soon());
        } catch (const Error& error) {
          CHECK(error.kind == ErrorKind::peer_lost);
        }
      });
      bool failed = false;
      Message message;
      all = with_failure(at, &failed, [&] { pair.one->receive(&message, soon()); });
      failures += failed;
      try {
        if (failed) pair.one->receive(&message, soon());
        CHECK_EQ(message.buffers.size(), size_t{1});
        CHECK(std::equal(large.begin(), large.end(), message.buffers[0].begin()));
        if (message.tag == 1) pair.one->receive(&message, soon());
        CHECK_EQ(message.tag, uint64_t{2});
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::peer_lost);
      }
      pair.one->close();
      sender.join();
    }
    CHECK(all);
    std::cerr << transport << ": " << failures << " allocations of a receive failed" << std::endl;
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
