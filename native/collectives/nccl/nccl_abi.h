// What NCCL and its network plugins exchange, in version 7 of their interface: two tables of functions that NCCL finds
// by the names of the symbols. Our own declarations of that binary interface, as far as this plugin and its tests need
// it.
//
// NCCL 2.19 to 2.30 accept version 7. It is the last one whose collective table has the all-reduce only: NCCL then
// knows that it has to make all-gathers and reduce-scatters itself (docs/decisions/nccl-plugin.md).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

using NcclResult = int;
using NcclDtype = int;
using NcclOp = int;

constexpr NcclResult kNcclSuccess = 0, kNcclSystemError = 2, kNcclInternalError = 3, kNcclInvalidArgument = 4,
                     kNcclInvalidUsage = 5, kNcclRemoteError = 6;

enum : NcclDtype {
  kNcclInt8 = 0,
  kNcclUint8,
  kNcclInt32,
  kNcclUint32,
  kNcclInt64,
  kNcclUint64,
  kNcclFloat16,
  kNcclFloat32,
  kNcclFloat64,
  kNcclBfloat16,
  kNcclFloat8e4m3,
  kNcclFloat8e5m2,
  kNcclDtypes
};

enum : NcclOp { kNcclSum = 0, kNcclProd, kNcclMax, kNcclMin, kNcclOps };

// Of a line in NCCL's log: its level, and the part of NCCL that it is about.
enum : int { kNcclLogWarn = 2, kNcclLogInfo = 3 };
enum : unsigned long { kNcclInit = 0x1, kNcclNet = 0x10 };
using NcclLogger = void (*)(int level, unsigned long part, const char* file, int line, const char* format, ...);

// Kinds of memory: bits of what a device can send from and receive into.
enum : int { kNcclHostMemory = 0x1, kNcclCudaMemory = 0x2 };

constexpr size_t kNcclHandleBytes = 128;  // of what a listener gives to those that connect to it
constexpr int kNcclMostRequests = 32;     // in progress on one connection or group

struct NcclProperties {
  char* name;
  char* pci_path;  // in /sys, of the card; null: not known
  uint64_t guid;   // of the card
  int memory;      // kinds of it
  int speed_mbps;
  int port;
  float latency_us;  // 0: NCCL's default
  int most_connections;
  int most_receives;  // that one irecv may ask for
  int offload;        // 0: the processor of this host moves the bytes
  int offload_version;
};
static_assert(sizeof(NcclProperties) == 56);

// Point-to-point messages. connect and accept never block: without a connection yet they leave null, and are called
// again with the same handle, whose bytes keep what has been begun. isend and irecv leave a null request where they
// cannot begin.
struct NcclNet {
  const char* name;
  NcclResult (*init)(NcclLogger log);
  NcclResult (*devices)(int* count);
  NcclResult (*get_properties)(int device, NcclProperties* properties);
  NcclResult (*listen)(int device, void* handle, void** listener);
  NcclResult (*connect)(int device, void* handle, void** connection, void** offload);
  NcclResult (*accept)(void* listener, void** connection, void** offload);
  NcclResult (*reg_mr)(void* connection, void* data, int bytes, int memory, void** region);
  NcclResult (*reg_mr_dma_buf)(void* connection, void* data, size_t bytes, int memory, uint64_t offset, int fd,
                               void** region);
  NcclResult (*dereg_mr)(void* connection, void* region);
  NcclResult (*isend)(void* connection, void* data, int bytes, int tag, void* region, void** request);
  NcclResult (*irecv)(void* connection, int count, void** data, int* bytes, int* tags, void** regions, void** request);
  NcclResult (*iflush)(void* connection, int count, void** data, int* bytes, void** regions, void** request);
  NcclResult (*test)(void* request, int* done, int* bytes);
  NcclResult (*close_send)(void* connection);
  NcclResult (*close_recv)(void* connection);
  NcclResult (*close_listen)(void* listener);
  NcclResult (*get_device_mr)(void* connection, void* region, void** device_region);
  NcclResult (*irecv_consumed)(void* connection, int count, void* request);
};
static_assert(sizeof(NcclNet) == 19 * sizeof(void*));

// All-reduces among one rank of each host. connect may block, and may fail: NCCL then does without. iallreduce leaves a
// null request where it cannot begin.
struct NcclCollNet {
  const char* name;
  NcclResult (*init)(NcclLogger log);
  NcclResult (*devices)(int* count);
  NcclResult (*get_properties)(int device, NcclProperties* properties);
  NcclResult (*listen)(int device, void* handle, void** listener);
  NcclResult (*connect)(void* handles[], int ranks, int rank, void* listener, void** group);
  NcclResult (*reduce_support)(NcclDtype dtype, NcclOp op, int* supported);
  NcclResult (*reg_mr)(void* group, void* data, int bytes, int memory, void** region);
  NcclResult (*reg_mr_dma_buf)(void* group, void* data, size_t bytes, int memory, uint64_t offset, int fd,
                               void** region);
  NcclResult (*dereg_mr)(void* group, void* region);
  NcclResult (*iallreduce)(void* group, void* in, void* out, int count, NcclDtype dtype, NcclOp op, void* in_region,
                           void* out_region, void** request);
  NcclResult (*iflush)(void* group, void* data, int bytes, void* region, void** request);
  NcclResult (*test)(void* request, int* done, int* bytes);
  NcclResult (*close_coll)(void* group);
  NcclResult (*close_listen)(void* listener);
};
static_assert(sizeof(NcclCollNet) == 15 * sizeof(void*));

}  // extern "C"
