// Bindings of file locks and futexes, geartrain/core/locks.py and futex.py, and of the count of forks.

#include "base/file_lock.h"
#include "base/futex.h"
#include "base/lifetime.h"
#include "python/bind.h"

namespace geartrain {
namespace {

// A 32-bit word of an array, which keeps its memory alive meanwhile.
using FutexWords = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const std::atomic<uint32_t>& first_word(const FutexWords& words) {
  if (words.size() == 0 || words.itemsize() != sizeof(uint32_t)) {
    throw nb::type_error("a futex is the first of an array of 32-bit words");
  }
  return *reinterpret_cast<const std::atomic<uint32_t>*>(words.data());
}

bool wait_for_word(const FutexWords& words, uint32_t seen, double timeout_s) {
  const std::atomic<uint32_t>& word = first_word(words);
  return patiently(Deadline::after(timeout_s), [&](Deadline slice, Deadline) {
    if (word.load() != seen) return true;
    futex_wait(word, seen, slice.left_ns());
    return word.load() != seen;
  });
}

bool take_lock(int fd, uint64_t byte, bool exclusive, double timeout_s) {
  const LockKind kind = exclusive ? LockKind::exclusive : LockKind::shared;
  return patiently(Deadline::after(timeout_s),
                   [&](Deadline slice, Deadline) { return wait_for_file_lock(fd, byte, kind, slice); });
}

}  // namespace

void bind_base(nb::module_& module) {
  module.def("forks", &forks);
  module.def("take_file_lock", &take_lock);
  module.def("drop_file_lock", &drop_file_lock, nb::call_guard<Unlocked>());
  module.def("file_lock_held", &file_lock_held, nb::call_guard<Unlocked>());
  module.def("futex_wait", &wait_for_word);
  module.def("futex_wake", [](const FutexWords& words) { futex_wake(first_word(words)); });
}

}  // namespace geartrain
