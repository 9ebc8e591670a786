// Forked children of tests, waited for with a deadline: one that hangs fails its test, and not the whole run.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>

#include "base/clock.h"
#include "tests/support/check.h"

namespace testing {

// Whether a child ends with exit code 0 within so many seconds (times patience()); it is killed otherwise.
inline bool child_succeeds(pid_t child, double seconds) {
  const uint64_t began_ns = geartrain::monotonic_ns();
  int status = 0;
  pid_t ended = 0;
  while ((ended = ::waitpid(child, &status, WNOHANG)) == 0 && within(began_ns, seconds)) ::usleep(1000);
  if (ended == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return false;
}

}  // namespace testing
