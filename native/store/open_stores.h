// The open stores of this process, for what concerns all of them at once: a fork, and the end of the process.
//
// A forked child opens every segment anew before any other code runs in it (after_fork): it shares none
// of its parent's leases, which the kernel would otherwise keep for as long as the child lives. Every mutex that a
// store keeps in private memory is taken before the fork or made anew after it, so that no thread's half-done call is
// the child's.
//
// exit() closes the stores that are still open, behind the interpreter's back: daemon threads do not come back from
// their calls then, and what refers to a store is not always destroyed. _exit() and signals close nothing.
#pragma once

namespace geartrain {

// What a store does then. Called under the registry's mutex, but for close_at_exit.
class OpenStore {
 public:
  virtual void before_fork() = 0;
  virtual void after_fork(bool in_child) = 0;
  virtual void close_at_exit() noexcept = 0;

 protected:
  ~OpenStore() = default;
};

void register_store(OpenStore* store);
// Waits, for a second or two, where exit() is closing it in another thread.
void unregister_store(OpenStore* store);

}  // namespace geartrain
