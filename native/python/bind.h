// Shared by the bindings: array types, and native memory as arrays that keep it alive.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/errors.h"
#include "base/interruption.h"
#include "python/finalization.h"
#include "python/pooled_memory.h"
#include "store/store.h"

// CPython's macros that the stable ABI lacks, by the functions that do the same with a check.
#if defined(Py_LIMITED_API)

#define PyBytes_AS_STRING PyBytes_AsString
#define PyBytes_GET_SIZE PyBytes_Size
#define PyByteArray_AS_STRING PyByteArray_AsString
#define PyByteArray_GET_SIZE PyByteArray_Size
#define PyDict_GET_SIZE PyDict_Size
#define PyFloat_AS_DOUBLE PyFloat_AsDouble
#define PyList_GET_ITEM PyList_GetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_SET_ITEM PyList_SetItem
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_SET_ITEM PyTuple_SetItem

// Declared outside the stable ABI, exported by every CPython.
extern "C" int PyGILState_Check(void);

#endif

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

// The same of numbers that are bounded and then used as places: a copy, as another thread may write to the caller's
// array in between.
template <typename T>
std::vector<T> copied(const In<T>& array) {
  return {array.data(), array.data() + array.size()};
}
template <typename T>
std::vector<T> copied(const std::optional<In<T>>& array) {
  return array ? copied(*array) : std::vector<T>();
}

// A NumPy array that owns a vector, without a copy: of its items, or of the bytes in them.
template <typename Item, typename T>
nb::object to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* moved = new std::vector<T>(std::move(values));
  nb::capsule owner(moved, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  auto* const items = reinterpret_cast<Item*>(moved->data());
  return nb::cast(nb::ndarray<nb::numpy, Item>(items, shape.size(), std::data(shape), owner));
}
template <typename T>
nb::object to_numpy(std::vector<T>&& values) {
  const size_t size = values.size();
  return to_numpy<T>(std::move(values), {size});
}
// A tuple of them.
template <typename... T>
nb::tuple to_numpy_tuple(std::vector<T>&&... values) {
  return nb::make_tuple(to_numpy(std::move(values))...);
}
// One that owns a copy.
template <typename T>
nb::object copied_array(std::span<const T> values) {
  return to_numpy(std::vector<T>(values.begin(), values.end()));
}
inline nb::object copied_bytes(std::span<const std::byte> bytes) {
  return copied_array<uint8_t>({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

// A string that dicts find by its address.
inline nb::object interned(nb::handle name) {
  PyObject* pointer = name.inc_ref().ptr();
  PyUnicode_InternInPlace(&pointer);
  return nb::steal(pointer);
}
inline std::vector<nb::object> all_interned(const nb::list& names) {
  std::vector<nb::object> made;
  for (const nb::handle name : names) made.push_back(interned(name));
  return made;
}

// Without the GIL for its lifetime. A daemon thread that comes back from a call while the interpreter ends must not run
// Python again: it sleeps until the process is gone (finalization.h).
class Unlocked {
 public:
  Unlocked() : interpreter_lived_(Py_IsInitialized() != 0) {
    sleep_at_finalization();
    state_ = PyEval_SaveThread();
  }
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
  void lock() const {
    // Where the interpreter was ending already, this is the thread that ends it.
    if (interpreter_lived_ && Py_IsInitialized() == 0) sleep_for_ever();
    PyEval_RestoreThread(state_);
  }
  const bool interpreter_lived_;
  PyThreadState* state_;
};

template <typename Work>
decltype(auto) without_gil(Work&& work) {
  const Unlocked unlocked;
  return std::forward<Work>(work)();
}

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
bool patiently(Deadline deadline, Wait&& wait) {
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

inline std::string secret_of(const nb::dict& options) {
  const auto secret = item<nb::bytes>(options, "secret", nb::bytes("", 0));
  return {secret.c_str(), secret.size()};
}

// The element type of a stored dtype code: NumPy's where it has one, an unsigned integer of that size where not.
nb::dlpack::dtype array_dtype(uint8_t code, uint8_t itemsize);

// Keeps a mapping alive for as long as an array over it lives.
nb::capsule keep_alive(std::shared_ptr<Mapping> mapping);

// Registers the translation of this module's Errors to the classes of geartrain.errors.
void register_errors();
// The exception that is being handled, one of these or any other, as Python's. In a catch block, with the GIL.
nb::object caught();

void bind_base(nb::module_& module);
void bind_store(nb::module_& module);
void bind_store_rows(nb::class_<Store>& store);
void bind_tasks(nb::class_<Store>& store);
void bind_one_row_writer(nb::module_& module);
void bind_fetch(nb::module_& module);
void bind_packed(nb::module_& module);
void bind_batch(nb::module_& module);
void bind_row_fetcher(nb::module_& module);
void bind_rank_exchange(nb::module_& module);
void bind_rank_reader(nb::module_& module);
void bind_inserter(nb::module_& module);
void bind_step_writer(nb::module_& module);
void bind_selection(nb::module_& module);
void bind_testing(nb::module_& module);

}  // namespace geartrain
