// What calls of tasks cost: CPU time of claims by 16 processes at once, of puts, and of inserts.
//
//   cmake --build build/tests --target measure_tasks && build/tests/measure_tasks

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>

#include "base/clock.h"
#include "tests/support/task_rows.h"

namespace geartrain {
namespace {

constexpr size_t kMeasuredRows = 8192, kProcesses = 16, kTogether = 16, kRounds = 8;

double cpu_us() {
  return static_cast<double>(clock_ns(CLOCK_PROCESS_CPUTIME_ID)) * 1e-3;
}

// Claims rows until none is due, and puts its mean cost into a pipe.
void measure_claims(Store& store) {
  int pipes[2];
  if (::pipe(pipes) != 0) return;
  for (size_t i = 0; i < kProcesses; ++i) {
    if (::fork() != 0) continue;
    double spent_us = 0, calls = 0;
    std::vector<ClaimedRow> mine;
    store.reap();
    for (;;) {
      const double began = cpu_us();
      const auto claimed = store.tasks()->claim(kAnswer, {.most = kTogether});
      spent_us += cpu_us() - began;
      if (claimed.empty()) break;
      ++calls;
      mine.insert(mine.end(), claimed.begin(), claimed.end());
    }
    store.tasks()->release(kAnswer, mine);
    const double result[2] = {spent_us, calls};
    ::_exit(::write(pipes[1], result, sizeof result) == sizeof result ? 0 : 1);
  }
  double spent_us = 0, calls = 0;
  for (size_t i = 0; i < kProcesses; ++i) {
    double result[2] = {};
    if (::read(pipes[0], result, sizeof result) != sizeof result) return;
    spent_us += result[0], calls += result[1];
  }
  while (::wait(nullptr) > 0) {
  }
  ::close(pipes[0]), ::close(pipes[1]);
  std::printf("claim %zu of %zu rows, %zu processes: %.2f us of CPU a call, %.0f calls\n", kTogether, kMeasuredRows,
              kProcesses, spent_us / calls, calls);
}

void measure_puts(Store& store) {
  Tasks& tasks = *store.tasks();
  double began_us = 0, claim_us = 0, begin_us = 0, finish_us = 0;
  size_t puts = 0;
  for (const uint32_t task : {kAnswer, kReward, kRef}) {
    claim_us = begin_us = finish_us = 0, puts = 0;
    for (size_t round = 0; round < 256; ++round, ++puts) {
      began_us = cpu_us();
      const auto claimed = tasks.claim(task, {.most = kTogether});
      claim_us += cpu_us() - began_us;
      std::vector<TaskRow> rows;
      for (const ClaimedRow& each : claimed) rows.push_back(row_of(store, task, each, kLengths));
      began_us = cpu_us();
      if (tasks.begin(Write::put, task, rows) != rows.size()) return;
      begin_us += cpu_us() - began_us;
      began_us = cpu_us();
      tasks.finish(Write::put, task, rows);
      finish_us += cpu_us() - began_us;
    }
    std::printf("task %u, %zu rows: claim %.2f, begin %.2f, finish %.2f us of CPU\n", task, kTogether, claim_us / puts,
                begin_us / puts, finish_us / puts);
  }
}

int measure() {
  auto store = made(options_of_tests(kMeasuredRows, 16 << 20));
  double began = cpu_us();
  for (size_t i = 0; i < kMeasuredRows / kTogether; ++i) insert(*store, kTogether);
  std::printf("insert %zu rows of a prompt of 5 tokens: %.2f us of CPU a call\n", kTogether,
              (cpu_us() - began) / (kMeasuredRows / kTogether));
  for (size_t i = 0; i < kRounds; ++i) measure_claims(*store);
  measure_puts(*store);
  return 0;
}

}  // namespace
}  // namespace geartrain

int main() {
  return geartrain::measure();
}
