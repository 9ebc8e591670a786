// Shared by the bindings: array types, and native memory as arrays that keep it alive.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <unistd.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/errors.h"
#include "base/interruption.h"
#include "python/limited_api.h"
#include "python/pooled_memory.h"
#include "store/store.h"

namespace geartrain {

namespace nb = nanobind;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Any dtype, C order, in host memory: a NumPy array, a torch tensor, anything with DLPack.
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using AnyConstArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const In<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
std::span<const T> view(const std::optional<In<T>>& array) {
  return array ? std::span<const T>{array->data(), array->size()} : std::span<const T>{};
}

// A NumPy array that owns a copy-free vector.
template <typename T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* moved = new std::vector<T>(std::move(values));
  nb::capsule owner(moved, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const size_t shape[1] = {moved->size()};
  return nb::cast(nb::ndarray<nb::numpy, T>(moved->data(), 1, shape, owner));
}

// Stops a thread that the interpreter's end unwinds. CPython before 3.14 ends a daemon thread that wants the GIL of an
// interpreter that has ended by pthread_exit, which unwinds its stack (forced unwinding), and no C++ may be in the way:
// a destructor may not let it pass, a handler may not catch it while it handles another exception, and nanobind's
// functions catch everything. Each of that ends the process. So wherever a native thread may come to the GIL, that is
// in Unlocked and in calls of Python (into_python), one of these is the innermost frame with a destructor, and in that
// the thread sleeps until the process is gone.
class ForcedUnwindGuard {
 public:
  ForcedUnwindGuard() : exceptions_(std::uncaught_exceptions()) {}
  ~ForcedUnwindGuard() {
    // An exception of C++ that passes here is one more; forced unwinding is none.
    if (!returned_ && std::uncaught_exceptions() == exceptions_) sleep_for_ever();
  }
  ForcedUnwindGuard(const ForcedUnwindGuard&) = delete;
  ForcedUnwindGuard& operator=(const ForcedUnwindGuard&) = delete;
  // What it guards has returned.
  void returned() { returned_ = true; }

  [[noreturn]] static void sleep_for_ever() {
    for (;;) ::pause();
  }

 private:
  const int exceptions_;
  bool returned_ = false;
};

// call(), which may run any Python.
template <typename Call>
auto into_python(Call&& call) {
  ForcedUnwindGuard guard;
  auto result = std::forward<Call>(call)();
  guard.returned();
  return result;
}

// Without the GIL for its lifetime. A daemon thread that comes back from a call while the interpreter ends must not run
// Python again: here it sleeps until the process is gone. It may be made and destroyed anywhere, in handlers and in
// destructors too.
class Unlocked {
 public:
  Unlocked() : interpreter_lived_(Py_IsInitialized() != 0), state_(PyEval_SaveThread()) {}
  ~Unlocked() { lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  // act() with the GIL, which must not throw.
  template <typename Act>
  decltype(auto) locked(Act&& act) const {
    struct Locked {
      const Unlocked& unlocked;
      explicit Locked(const Unlocked& of) : unlocked(of) { unlocked.lock(); }
      ~Locked() { PyEval_SaveThread(); }
    };
    const Locked lock(*this);
    return std::forward<Act>(act)();
  }

 private:
  // A function of its own: within a destructor the compiler might end the process at once for what unwinds it.
  [[gnu::noinline]] void lock() const {
    // Where the interpreter was ending already, this is the thread that ends it.
    if (interpreter_lived_ && Py_IsInitialized() == 0) ForcedUnwindGuard::sleep_for_ever();
    ForcedUnwindGuard guard;
    PyEval_RestoreThread(state_);
    guard.returned();
  }
  const bool interpreter_lived_;
  PyThreadState* const state_;
};

// work() on a store that any thread may close, as a call that close() waits for (Store::Call). Every binding that takes
// a store goes through one of these two, or checks that it is open where it only reads what never changes.
//
// released: without the GIL, for what waits, copies or takes the segment's lock. The call ends before the GIL is
// taken again, which a thread may wait for in vain.
template <typename Work>
decltype(auto) released(const Store& store, Work&& work) {
  const Unlocked unlocked;
  const Store::Call call(store);
  return std::forward<Work>(work)();
}
// entered: with the GIL, for a few instructions that make no Python object: collecting garbage may run anything.
template <typename Work>
decltype(auto) entered(const Store& store, Work&& work) {
  const Store::Call call(store);
  return std::forward<Work>(work)();
}

// How long a wait without the GIL lasts until Python's signals are checked.
constexpr double kSignalsEveryS = 0.25;

// wait(deadline) until it returns true or the deadline passes, checking signals in between.
template <typename Wait>
bool patiently(double timeout_s, Wait&& wait) {
  const Deadline deadline = Deadline::after(timeout_s);
  for (;;) {
    const Deadline slice = deadline.sooner(kSignalsEveryS);
    {
      const Unlocked unlocked;
      if (wait(slice, deadline)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (deadline.passed()) return false;
  }
}

// work() without the GIL, whose waits are Interruption's: Python's signals are checked meanwhile.
template <typename Work>
decltype(auto) interruptibly(Work&& work) {
  struct Interrupted {};  // the error is Python's, of this thread
  try {
    const Unlocked unlocked;
    const Interruption interruption([&unlocked] {
      if (unlocked.locked([] { return PyErr_CheckSignals(); }) != 0) throw Interrupted();
    });
    return std::forward<Work>(work)();
  } catch (const Interrupted&) {
    throw nb::python_error();
  }
}

// An entry of a dict of options, or the default. Throws schema for a value that is not one.
template <typename T>
T item(const nb::dict& options, const char* name, T otherwise) {
  if (!options.contains(name)) return otherwise;
  const nb::object given = options[name];
  try {
    return nb::cast<T>(given);
  } catch (const nb::cast_error&) {
    const std::string found = nb::repr(given).c_str();
    fail(ErrorKind::schema, name, " cannot be ", found.substr(0, 100));
  }
}

// The element type of a stored dtype code: NumPy's where it has one, an unsigned integer of that size where not.
nb::dlpack::dtype array_dtype(uint8_t code, uint8_t itemsize);

// Keeps a mapping alive for as long as an array over it lives.
nb::capsule keep_alive(std::shared_ptr<Mapping> mapping);

// Registers the translation of this module's Errors to the classes of geartrain.errors.
void register_errors();

void bind_base(nb::module_& module);
void bind_store(nb::module_& module);
void bind_store_rows(nb::class_<Store>& store);
void bind_fetch(nb::module_& module);
void bind_batch(nb::module_& module);
void bind_rank_exchange(nb::module_& module);
void bind_rank_reader(nb::module_& module);
void bind_inserter(nb::module_& module);
void bind_step_writer(nb::module_& module);
void bind_selection(nb::module_& module);
void bind_planner(nb::module_& module);
void bind_testing(nb::module_& module);

}  // namespace geartrain
