// A child that runs one call a single instruction at a time, and is killed.
//
// A first run steps through the call and records after which instructions the shared memory differed from before. Then
// a fresh child is killed after each of those, one after the other, so that every state the memory can be left in is
// seen once, whatever order the compiler gave the stores. Random kills hit the rare states too seldom; hooks in the
// code would see only the anticipated states.
#pragma once

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "store/store.h"
#include "tests/support/check.h"

namespace geartrain {

// What a child prepares in its own process before its steps are counted, and then the call.
using PreparedCall = std::function<std::function<void()>()>;

class Stepped {
 public:
  Stepped(Store& store, const char* name, const PreparedCall& prepare) {
    child_ = ::fork();
    if (child_ != 0) {
      int status = 0;
      ::waitpid(child_, &status, 0);
      ready_ = WIFSTOPPED(status);
      return;
    }
    try {
      store.reap();  // joins: after the fork this process must become a client
      const auto call = prepare();
      if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(2);
      ::raise(SIGSTOP);
      call();
      ::_exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", name, error.what());
    }
    ::_exit(1);
  }
  ~Stepped() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  Stepped(const Stepped&) = delete;
  Stepped& operator=(const Stepped&) = delete;

  bool ready() const { return ready_; }
  // One instruction; false once the child has ended.
  bool step() {
    int status = 0;
    if (::ptrace(PTRACE_SINGLESTEP, child_, nullptr, nullptr) != 0) return false;
    ::waitpid(child_, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0) testing::failed(__FILE__, __LINE__, "the call failed");
    return WIFSTOPPED(status);
  }

 private:
  pid_t child_ = 0;
  bool ready_ = false;
};

// Of so many bytes of a segment, from its start.
inline uint64_t hash_of(const Store& store, uint64_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(store.mapping()->data());
  uint64_t hash = 0;
  for (uint64_t i = 0; i < bytes / 8; ++i)
    hash = (hash ^ *const_cast<const volatile uint64_t*>(words + i)) * 0x100000001b3u;
  return hash;
}

// A step is a switch to another process and back. All states of all calls take minutes, so by default each call is
// killed in evenly spaced ones; with GEARTRAIN_TEST_EVERY_STATE=1 in all of them. GEARTRAIN_TEST_KILLED_CALLS=steps: only of
// calls with that in their names.
inline void thin_out(std::vector<size_t>& states) {
  const size_t keep = kAddressSanitizer ? 4 : 24;
  if (std::getenv("GEARTRAIN_TEST_EVERY_STATE") != nullptr || states.size() <= keep) return;
  for (size_t i = 0; i < keep; ++i) states[i] = states[i * states.size() / keep];
  states.resize(keep);
}

// Kills a child of a new store in every state; `check` looks at what it left. False where no child can be traced.
inline bool kill_in_every_state(const char* name, const std::function<std::unique_ptr<Store>()>& make,
                                const std::function<std::function<void()>(Store&)>& prepare,
                                const std::function<void(Store&, size_t)>& check, const auto& watched_bytes) {
  std::vector<size_t> states{0};
  size_t found = 0;
  for (size_t kill_at = 0, next = 0; next < states.size(); kill_at = next < states.size() ? states[next] : 0) {
    const std::unique_ptr<Store> store = make();
    {
      Stepped child(*store, name, [&] { return prepare(*store); });
      if (!child.ready()) return false;
      if (next == 0) {  // the first run only looks
        const uint64_t bytes = watched_bytes(*store);
        uint64_t before = hash_of(*store, bytes);
        for (size_t instruction = 1; child.step(); ++instruction) {
          const uint64_t after = hash_of(*store, bytes);
          if (after != before) states.push_back(instruction);
          before = after;
        }
        found = states.size();
        thin_out(states);
      } else {
        for (size_t instruction = 0; instruction < kill_at && child.step(); ++instruction) {
        }
      }
    }
    check(*store, kill_at);
    ++next;
  }
  CHECK(found > 3);
  std::printf("     %-50s %zu of %zu states\n", name, states.size(), found);
  std::fflush(stdout);
  return true;
}

}  // namespace geartrain
