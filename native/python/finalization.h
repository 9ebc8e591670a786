// Finalization of the interpreter beside threads in native code: a thread that would be unwound sleeps instead.
//
// CPython before 3.14 ends a thread that wants the GIL of an interpreter that has ended by pthread_exit, which unwinds
// its stack (forced unwinding). That ends the process wherever C++ is in the way: a function or destructor that is
// noexcept (all of nanobind's, pybind11's release of the GIL and so every operator of torch), or a handler that catches
// everything. CPython 3.14 lets such threads sleep, and so does this, with all frames that they have.
//
// glibc calls a thread's oldest form of cleanup handler before it unwinds the first frame that has left the handler's
// place on the stack; a place that is on no stack has been left from the start. Where the C library has no forced
// unwinding (musl), nothing is needed.
#pragma once

#include <Python.h>

#include <pthread.h>
#include <unistd.h>

#if defined(__GLIBC__)
// Exported by every glibc; its header declares the type alone.
extern "C" void _pthread_cleanup_push(_pthread_cleanup_buffer* place, void (*handler)(void*), void* argument);
extern "C" void _pthread_cleanup_pop(_pthread_cleanup_buffer* place, int execute);
#endif

namespace geartrain {

[[noreturn]] inline void sleep_for_ever() {
  for (;;) ::pause();
}

// From here on the calling thread sleeps until the process is gone where it would be unwound: for its life, in whatever
// library it is then. Called wherever Python may be about to run below native code, ours or torch's; a few instructions
// after the first time.
inline void sleep_at_finalization() {
#if defined(__GLIBC__)
  class Handler {
   public:
    Handler() : place_(new _pthread_cleanup_buffer) { _pthread_cleanup_push(place_, &at_unwinding, nullptr); }
    ~Handler() {
      _pthread_cleanup_pop(place_, 0);
      delete place_;
    }
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;

   private:
    static void at_unwinding(void*) {
      // A thread may end itself by pthread_exit as well, once it is not Python's.
      if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() != nullptr) sleep_for_ever();
    }
    _pthread_cleanup_buffer* const place_;  // of the heap: on no stack
  };
  thread_local bool set = false;
  if (set) return;
  set = true;
  thread_local const Handler handler;
#endif
}

}  // namespace geartrain
