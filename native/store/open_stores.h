// The open stores of this process, for what concerns all of them at once: a fork, and the end of the process.
//
// A forked child opens every segment anew before any other code runs in it (Store::after_fork_in_child): it shares none
// of its parent's leases, which the kernel would otherwise keep for as long as the child lives. Every mutex that a
// store keeps in private memory is taken before the fork or made anew after it, so that no thread's half-done call is
// the child's.
//
// exit() closes the stores that are still open, behind the interpreter's back: daemon threads do not come back from
// their calls then, and what refers to a store is not always destroyed. _exit() and signals close nothing.
#pragma once

namespace geartrain {

class Store;

void register_store(Store* store);
void unregister_store(Store* store);

}  // namespace geartrain
