// Ranks on one host that read each other's memory, as threads: which of them may, and how small an array.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <vector>

#include "tests/collectives/ranks.h"

namespace geartrain {

inline Shape sum_of(uint64_t count) {
  return {count, Dtype::float32, Dtype::float32, Op::sum, 0};
}

struct Readers {
  uint64_t least_bytes = 1;
  std::vector<uint32_t> not_reading = {};
  bool unequal_least = false;
};

// As run_ranks, of groups on one host.
inline void run_readers(uint32_t world, const Readers& readers,
                        const std::function<void(uint32_t rank, Group& group)>& body, std::vector<double> shares = {}) {
  Crew crew{.world = world, .shares = std::move(shares), .shm = true};
  crew.options = [&](uint32_t rank, GroupOptions* options) {
    options->least_exposed_bytes = readers.unequal_least && rank % 2 == 1 ? ~uint64_t{0} : readers.least_bytes;
    const auto& none = readers.not_reading;
    options->cross_memory = std::find(none.begin(), none.end(), rank) == none.end();
  };
  run_ranks(crew, body);
}

// No rank of this whole process reads another's memory from here on.
inline void forbid_reading_across_processes() {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const struct sock_fprog program{4, filter};
  CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

}  // namespace geartrain
