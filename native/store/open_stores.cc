#include "store/open_stores.h"

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "base/lifetime.h"

namespace geartrain {
namespace {

void close_all();

struct OpenStores : ForkSafe {
  std::vector<OpenStore*> stores;
  OpenStore* closing = nullptr;  // by close_all: it is not destroyed meanwhile

  OpenStores() { std::atexit(close_all); }
  void before_fork() {
    mutex.lock();
    for (OpenStore* store : stores) store->before_fork();
  }
  void after_fork(bool in_child) {
    for (OpenStore* store : stores) store->after_fork(in_child);
    if (in_child) closing = nullptr;
    mutex.unlock();
  }
};

void close_all() {
  auto& open = of_process<OpenStores>();
  for (;;) {
    OpenStore* store = nullptr;
    {
      std::lock_guard lock(open.mutex);
      if (open.stores.empty()) return;
      open.closing = store = open.stores.back();
    }
    store->close_at_exit();
    std::lock_guard lock(open.mutex);
    open.closing = nullptr;
    std::erase(open.stores, store);
  }
}

}  // namespace

void register_store(OpenStore* store) {
  auto& open = of_process<OpenStores>();
  std::lock_guard lock(open.mutex);
  open.stores.push_back(store);
}

void unregister_store(OpenStore* store) {
  auto& open = of_process<OpenStores>();
  std::unique_lock lock(open.mutex);
  // Where another thread called exit(): it has closed the handle before long, or given up.
  while (open.closing == store) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  std::erase(open.stores, store);
}

}  // namespace geartrain
