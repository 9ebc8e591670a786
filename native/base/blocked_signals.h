// Blocked signals: threads that are started while this lives get none of the process's signals.
//
// These are for the program's threads: one that blocks a signal, and waits for it by sigwait, is not to lose it to a
// thread that it knows nothing of, where the default is to end the process. Those of a thread's own faults are left.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace geartrain {

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

}  // namespace geartrain
