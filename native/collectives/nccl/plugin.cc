#include "collectives/nccl/plugin.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>

#include "base/lifetime.h"

namespace geartrain::nccl {
namespace {

struct Device {
  std::string interface = "unknown", pci_path;
  uint64_t guid = 0;
  int speed_mbps = 10'000;  // where the interface does not say
};

// NCCL's processes fork.
struct Plugin : ForkSafe {};

// Under its mutex.
NcclLogger logger = nullptr;
NcclSettings begun;
// NCCL keeps the names that it was given: no device is ever freed.
const Device* device_of_host = nullptr;

// A registered piece of host memory.
struct Region {
  const std::byte* at;
  size_t bytes;
};

std::string variable(const char* name) {
  const char* const given = std::getenv(name);
  return given == nullptr ? "" : given;
}

std::string stripped(const std::string& text) {
  const char* const white = " \t\r\n";
  const size_t from = text.find_first_not_of(white);
  return from == std::string::npos ? "" : text.substr(from, text.find_last_not_of(white) + 1 - from);
}

std::string secret_from_environment() {
  const std::string path = variable("GEARTRAIN_SECRET_FILE");
  if (path.empty()) return variable("GEARTRAIN_SECRET");
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file || stripped(text).empty()) {
    fail(ErrorKind::argument, "GEARTRAIN_SECRET_FILE: cannot read a secret from '", path, "'");
  }
  return stripped(text);
}

NcclSettings settings_from_environment() {
  NcclSettings out;
  out.host = variable("GEARTRAIN_NCCL_HOST");
  if (out.host.empty()) {
    fail(ErrorKind::argument, "GEARTRAIN_NCCL_HOST is not set: an address of this host that all others reach");
  }
  const std::string reducers = variable("GEARTRAIN_REDUCERS");
  for (size_t at = 0; at <= reducers.size();) {
    const size_t end = std::min(reducers.find(',', at), reducers.size());
    if (const std::string one = stripped(reducers.substr(at, end - at)); !one.empty()) out.reducers.push_back(one);
    at = end + 1;
  }
  out.secret = secret_from_environment();
  if (!out.reducers.empty() && out.secret.empty()) {
    fail(ErrorKind::argument, "GEARTRAIN_REDUCERS needs GEARTRAIN_SECRET_FILE, or GEARTRAIN_SECRET");
  }
  return out;
}

uint64_t digest(const std::string& text) {
  uint64_t out = 0xcbf29ce484222325;  // FNV-1a
  for (const char letter : text) out = (out ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return out;
}

// The interface that has this address.
Device device_with(const std::string& host) {
  Device out;
  in_addr wanted{};
  if (::inet_pton(AF_INET, host.c_str(), &wanted) != 1 || wanted.s_addr == INADDR_ANY) {
    fail(ErrorKind::argument, "GEARTRAIN_NCCL_HOST is one IPv4 address of this host, found '", host, "'");
  }
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) fail(ErrorKind::os, "cannot list this host's addresses");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(all, ::freeifaddrs);
  bool found = false;
  for (const ifaddrs* one = all; one != nullptr && !found; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    found = reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr.s_addr == wanted.s_addr;
    if (found) out.interface = one->ifa_name;
  }
  if (!found && (ntohl(wanted.s_addr) >> 24) != 127) {
    fail(ErrorKind::argument, "GEARTRAIN_NCCL_HOST: no interface of this host has the address ", host);
  }
  const std::string place = "/sys/class/net/" + out.interface;
  int speed = 0;
  if (std::ifstream(place + "/speed") >> speed && speed > 0) out.speed_mbps = speed;
  const std::unique_ptr<char, void (*)(void*)> path(::realpath((place + "/device").c_str(), nullptr), std::free);
  if (path != nullptr) out.pci_path = path.get();
  out.guid = digest(host);
  return out;
}

}  // namespace

void begin(NcclLogger log) {
  std::lock_guard lock(of_process<Plugin>().mutex);
  logger = log;
  begun = settings_from_environment();
  // NOLINTNEXTLINE: see device_of_host
  if (device_of_host == nullptr) device_of_host = new Device(device_with(begun.host));
}

NcclSettings settings() {
  std::lock_guard lock(of_process<Plugin>().mutex);
  return begun;
}

void describe_device(int device, NcclProperties* properties) {
  std::lock_guard lock(of_process<Plugin>().mutex);
  if (device != 0 || device_of_host == nullptr || properties == nullptr) {
    fail(ErrorKind::argument, "there is device 0, once init has succeeded, found ", device);
  }
  *properties = {};
  properties->name = const_cast<char*>(device_of_host->interface.c_str());
  if (!device_of_host->pci_path.empty()) properties->pci_path = const_cast<char*>(device_of_host->pci_path.c_str());
  properties->guid = device_of_host->guid;
  properties->memory = kNcclHostMemory;
  properties->speed_mbps = device_of_host->speed_mbps;
  properties->most_connections = 65'536;
  properties->most_receives = 1;
}

void say(int level, const std::string& line) {
  NcclLogger log = nullptr;
  {
    // begin() fails under the mutex's guard, but says so after it.
    std::lock_guard lock(of_process<Plugin>().mutex);
    log = logger;
  }
  if (log != nullptr) log(level, kNcclInit | kNcclNet, "geartrain", 0, "%s", line.c_str());
}

void* register_memory(const void* data, size_t bytes, int memory) {
  if (memory != kNcclHostMemory) fail(ErrorKind::argument, "only host memory can be registered, found kind ", memory);
  return new Region{static_cast<const std::byte*>(data), bytes};
}

void forget_memory(void* region) {
  delete static_cast<Region*>(region);
}

void check_region(const void* region, const void* data, size_t bytes, const char* what) {
  const auto* const known = static_cast<const Region*>(region);
  const auto* const at = static_cast<const std::byte*>(data);
  if (known == nullptr || at < known->at || bytes > known->bytes ||
      static_cast<size_t>(at - known->at) > known->bytes - bytes) {
    fail(ErrorKind::argument, what, " of ", bytes, " bytes is not within the memory that was registered for it");
  }
}

NcclResult result_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::schema:
    case ErrorKind::argument:
      return kNcclInvalidArgument;
    case ErrorKind::peer_lost:
    case ErrorKind::timed_out:
    case ErrorKind::not_viable:
    case ErrorKind::frame:
      return kNcclRemoteError;
    case ErrorKind::untrusted:
      return kNcclInvalidUsage;
    case ErrorKind::io:
    case ErrorKind::os:
    case ErrorKind::no_space:
      return kNcclSystemError;
    default:
      return kNcclInternalError;
  }
}

// --- entries of both tables -----------------------------------------------------------------------------------------

NcclResult init(NcclLogger log) {
  return guarded("init", [&] {
    begin(log);
    return kNcclSuccess;
  });
}

NcclResult devices(int* count) {
  *count = 1;
  return kNcclSuccess;
}

NcclResult get_properties(int device, NcclProperties* properties) {
  return guarded("getProperties", [&] {
    describe_device(device, properties);
    return kNcclSuccess;
  });
}

NcclResult reg_mr(void* /*owner*/, void* data, int bytes, int memory, void** region) {
  return guarded("regMr", [&] {
    if (bytes < 0) fail(ErrorKind::argument, "memory of ", bytes, " bytes");
    *region = register_memory(data, static_cast<size_t>(bytes), memory);
    return kNcclSuccess;
  });
}

NcclResult reg_mr_dma_buf(void*, void*, size_t, int, uint64_t, int, void**) {
  return kNcclInvalidUsage;  // of GPU memory, which no device here takes
}

NcclResult dereg_mr(void* /*owner*/, void* region) {
  forget_memory(region);
  return kNcclSuccess;
}

}  // namespace geartrain::nccl
