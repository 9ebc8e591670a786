// What both tables of the plugin share: the settings, from the environment; the one device, this host's address; lines
// in NCCL's log; exceptions as NCCL's results.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "collectives/nccl/nccl_abi.h"

namespace geartrain {

// GEARTRAIN_NCCL_HOST and the others (docs/collectives-torch.md).
struct NcclSettings {
  std::string host;  // an address of this host that the others reach
  std::string secret;
  std::vector<std::string> reducers;
};

namespace nccl {

// By either table's init, any number of times. Throws argument for settings that are missing or wrong.
void begin(NcclLogger log);
// Those of the last begin().
NcclSettings settings();

void describe_device(int device, NcclProperties* properties);  // throws argument, unless it is device 0
void say(int level, const std::string& line);

// Memory that NCCL has registered; `what` is sent from or received into it. Only host memory is taken.
void* register_memory(const void* data, size_t bytes, int memory);  // throws argument
void forget_memory(void* region);
void check_region(const void* region, const void* data, size_t bytes, const char* what);  // throws argument

NcclResult result_of(ErrorKind kind);

// No exception leaves the plugin.
template <typename Body>
NcclResult guarded(const char* call, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& error) {
    say(kNcclLogWarn, std::string("geartrain: ") + call + ": " + error.what());
    return result_of(error.kind);
  } catch (const std::bad_alloc&) {
    return kNcclSystemError;
  } catch (const std::exception& error) {
    say(kNcclLogWarn, std::string("geartrain: ") + call + ": " + error.what());
    return kNcclInternalError;
  }
}

// Entries that both tables have. The owner of a region is a connection or a group.
NcclResult init(NcclLogger log);
NcclResult devices(int* count);
NcclResult get_properties(int device, NcclProperties* properties);
NcclResult reg_mr(void* owner, void* data, int bytes, int memory, void** region);
NcclResult reg_mr_dma_buf(void*, void*, size_t, int, uint64_t, int, void**);
NcclResult dereg_mr(void* owner, void* region);

}  // namespace nccl
}  // namespace geartrain
