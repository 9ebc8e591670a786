// NCCL as a network plugin sees it, without a GPU: it loads the library by its file, looks its tables up, and calls
// them from one thread for each rank in the order and with the limits of NCCL's own proxy.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdarg>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/nccl/nccl_abi.h"
#include "tests/collectives/ranks.h"

namespace geartrain {

// The lines that the plugin has put into NCCL's log, of all threads.
struct NcclLog {
  std::mutex mutex;
  std::string text;

  static NcclLog& of_process() {
    static NcclLog log;
    return log;
  }
  static void line(int, unsigned long, const char*, int, const char* format, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    std::lock_guard lock(of_process().mutex);
    of_process().text += std::string(buffer) + "\n";
  }
  static bool has(const std::string& words) {
    std::lock_guard lock(of_process().mutex);
    return of_process().text.find(words) != std::string::npos;
  }
};

// A library is no plugin without a table of point-to-point messages; the newest version of each table that NCCL knows
// counts.
struct LoadedPlugin {
  void* library = nullptr;
  const NcclNet* net = nullptr;
  const NcclCollNet* collnet = nullptr;

  explicit LoadedPlugin(const char* file) : library(::dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) fail(ErrorKind::missing, ::dlerror());
    for (const char* version : {"v12", "v11", "v10", "v9", "v8"}) {
      CHECK(::dlsym(library, (std::string("ncclNetPlugin_") + version).c_str()) == nullptr);
      CHECK(::dlsym(library, (std::string("ncclCollNetPlugin_") + version).c_str()) == nullptr);
    }
    net = static_cast<const NcclNet*>(::dlsym(library, "ncclNetPlugin_v7"));
    if (net != nullptr) collnet = static_cast<const NcclCollNet*>(::dlsym(library, "ncclCollNetPlugin_v7"));
    if (net == nullptr || collnet == nullptr) fail(ErrorKind::missing, "the library has not both tables");
  }
  ~LoadedPlugin() { ::dlclose(library); }
  LoadedPlugin(const LoadedPlugin&) = delete;
  LoadedPlugin& operator=(const LoadedPlugin&) = delete;
};

using NcclHandle = std::array<char, kNcclHandleBytes>;

inline size_t bytes_of_nccl(NcclDtype dtype) {
  constexpr size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return bytes[dtype];
}

// One rank's part of a communicator over CollNet: the buffer of slots that NCCL registers, half of it sent, half
// received.
class SimulatedRank {
 public:
  static constexpr int kSlots = 8;  // steps that a channel has in progress

  SimulatedRank(const NcclCollNet& table, int rank, int ranks, size_t slot_bytes)
      : table_(table), rank_(rank), ranks_(ranks), slot_bytes_(slot_bytes), buffer_(2 * kSlots * slot_bytes) {}

  NcclHandle listen() {
    NcclHandle handle{};
    CHECK_EQ(table_.listen(0, handle.data(), &listener_), kNcclSuccess);
    return handle;
  }

  NcclResult connect(std::vector<NcclHandle> handles) {
    std::vector<void*> pointers;
    for (NcclHandle& handle : handles) pointers.push_back(handle.data());
    const NcclResult result = table_.connect(pointers.data(), ranks_, rank_, listener_, &group_);
    CHECK_EQ(table_.close_listen(listener_), kNcclSuccess);
    if (result != kNcclSuccess) return result;
    const int bytes = static_cast<int>(buffer_.size());
    CHECK_EQ(table_.reg_mr(group_, buffer_.data(), bytes, kNcclHostMemory, &region_), kNcclSuccess);
    return result;
  }

  // All-reduces an array slice by slice through the slots, in order, as many in progress as there are slots.
  NcclResult all_reduce(const Array& in, Array* out, NcclDtype dtype, NcclOp op, double until_s = 60) {
    struct Slice {
      size_t at, bytes;
      int slot;
      void* request;
    };
    out->resize(in.size());
    std::deque<Slice> posted;
    const Deadline until = soon(until_s);
    for (size_t at = 0, step = 0; at < in.size() || !posted.empty();) {
      if (until.passed()) return kNcclInternalError;
      if (at < in.size() && posted.size() < kSlots) {
        const int slot = static_cast<int>(step % kSlots);
        const size_t bytes = std::min(slot_bytes_, in.size() - at);
        std::memcpy(sent(slot), in.data() + at, bytes);
        void* request = nullptr;
        const int count = static_cast<int>(bytes / bytes_of_nccl(dtype));
        const NcclResult result =
            table_.iallreduce(group_, sent(slot), received(slot), count, dtype, op, region_, region_, &request);
        if (result != kNcclSuccess) return result;
        if (request != nullptr) {
          posted.push_back({at, bytes, slot, request});
          at += bytes;
          ++step;
        }
      }
      if (posted.empty()) continue;
      const Slice& oldest = posted.front();
      int done = 0, bytes = 0;
      if (const NcclResult result = table_.test(oldest.request, &done, &bytes); result != kNcclSuccess) return result;
      if (done == 0) {
        std::this_thread::yield();
        continue;
      }
      CHECK_EQ(bytes, static_cast<int>(oldest.bytes));
      std::memcpy(out->data() + oldest.at, received(oldest.slot), oldest.bytes);
      posted.pop_front();
    }
    return kNcclSuccess;
  }

  void close() {
    CHECK_EQ(table_.dereg_mr(group_, region_), kNcclSuccess);
    CHECK_EQ(table_.close_coll(group_), kNcclSuccess);
  }

  void* group() const { return group_; }
  void* region() const { return region_; }
  std::byte* sent(int slot) { return buffer_.data() + static_cast<size_t>(slot) * slot_bytes_; }
  std::byte* received(int slot) { return sent(kSlots + slot); }

 private:
  const NcclCollNet& table_;
  const int rank_, ranks_;
  const size_t slot_bytes_;
  Array buffer_;
  void *listener_ = nullptr, *group_ = nullptr, *region_ = nullptr;
};

// A communicator whose ranks are threads of this process; NCCL's bootstrap has passed the handles around.
inline void run_nccl(const NcclCollNet& table, int ranks, size_t slot_bytes,
                     const std::function<void(int rank, SimulatedRank& own)>& body) {
  std::vector<std::unique_ptr<SimulatedRank>> all;
  std::vector<NcclHandle> handles;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<SimulatedRank>(table, rank, ranks, slot_bytes));
    handles.push_back(all.back()->listen());
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const NcclResult connected = all[static_cast<size_t>(rank)]->connect(handles);
      CHECK_EQ(connected, kNcclSuccess);
      if (connected == kNcclSuccess) body(rank, *all[static_cast<size_t>(rank)]);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace geartrain
