#include "base/lifetime.h"

#include <signal.h>

#include <system_error>
#include <utility>

#include "base/errors.h"

namespace geartrain {
namespace {

[[maybe_unused]] const bool forks_are_counted =
    ::pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); }) == 0;

// For threads that are started while it lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (const int of_faults : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      ::sigdelset(&blocked, of_faults);
    }
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::atomic<uint64_t> fork_count{0};

void Lifetime::refuse() const {
  if (forked()) {
    fail(ErrorKind::hung_up, "this ", name_, " belongs to the process that this one was forked from; ", in_child_);
  }
  fail(ErrorKind::hung_up, "the ", name_, " was closed");
}

bool Lifetime::close(Deadline deadline) {
  for (Deadline known = deadline_.load(); !deadline_.compare_exchange_weak(known, known.sooner(deadline));) continue;
  return close();
}

void OwnThread::start(const char* what, std::function<void()> body) {
  const BlockedSignals blocked;
  try {
    thread_ = std::make_unique<std::thread>(std::move(body));
  } catch (const std::system_error& error) {
    fail(ErrorKind::os, "cannot start ", what, ": ", error.what());
  }
}

void OwnThread::join() {
  if (thread_ == nullptr) return;
  if (owned_.forked()) {
    static_cast<void>(thread_.release());
  } else {
    thread_->join();
    thread_.reset();
  }
}

}  // namespace geartrain
