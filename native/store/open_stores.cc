#include "store/open_stores.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace geartrain {
namespace {

struct OpenStores {
  std::mutex mutex;
  std::vector<OpenStore*> stores;
  OpenStore* closing = nullptr;  // by close_all: it is not destroyed meanwhile
};

OpenStores& open_stores() {
  static auto* made = new OpenStores();  // never deleted: stores may be closed while the process exits
  return *made;
}

void before_fork() {
  open_stores().mutex.lock();
  for (OpenStore* store : open_stores().stores) store->before_fork();
}
void after_fork_in_parent() {
  for (OpenStore* store : open_stores().stores) store->after_fork_in_parent();
  open_stores().mutex.unlock();
}
void after_fork_in_child() {
  for (OpenStore* store : open_stores().stores) store->after_fork_in_child();
  open_stores().closing = nullptr;
  open_stores().mutex.unlock();
}

void remove(OpenStore* store) {
  auto& stores = open_stores().stores;
  stores.erase(std::remove(stores.begin(), stores.end(), store), stores.end());
}

void close_all() {
  for (;;) {
    OpenStore* store = nullptr;
    {
      std::lock_guard lock(open_stores().mutex);
      if (open_stores().stores.empty()) return;
      open_stores().closing = store = open_stores().stores.back();
    }
    store->close_at_exit();
    std::lock_guard lock(open_stores().mutex);
    open_stores().closing = nullptr;
    remove(store);
  }
}

}  // namespace

void register_store(OpenStore* store) {
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    std::atexit(close_all);
  });
  std::lock_guard lock(open_stores().mutex);
  open_stores().stores.push_back(store);
}

void unregister_store(OpenStore* store) {
  std::unique_lock lock(open_stores().mutex);
  // Where another thread called exit(): it has closed the handle before long, or given up.
  while (open_stores().closing == store) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  remove(store);
}

}  // namespace geartrain
