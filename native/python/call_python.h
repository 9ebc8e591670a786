// Calls of Python out of native code that runs without the GIL.
#pragma once

#include <exception>
#include <utility>

#include "python/bind.h"

namespace geartrain {

// act() with the GIL, for a thread that works without it. What Python raised becomes PythonRaised: the error stays this
// thread's, and `raising` throws it once the GIL is held for good.
struct PythonRaised {};

template <typename Act>
void call_python(const Unlocked& unlocked, Act&& act) {
  std::exception_ptr thrown;
  bool raised = false;
  unlocked.locked([&] {
    try {
      act();
    } catch (nb::python_error& error) {
      error.restore();
      raised = true;
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  if (raised) throw PythonRaised();
  if (thrown) std::rethrow_exception(thrown);
}

template <typename Work>
decltype(auto) raising(Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const PythonRaised&) {
    throw nb::python_error();
  }
}

}  // namespace geartrain
