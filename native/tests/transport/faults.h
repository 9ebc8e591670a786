// Fault injection: processes to kill and stop, bare sockets, a malicious peer; and the process's open resources.
#pragma once

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <functional>

#include "tests/support/check.h"
#include "tests/transport/peers.h"
#include "transport/security/handshake.h"

namespace geartrain {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

inline size_t open_files() {
  size_t count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

// Memory that is mapped and in use, in MiB.
inline uint64_t resident_mib() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  unsigned long total = 0, resident = 0;
  if (std::fscanf(file, "%lu %lu", &total, &resident) != 2) resident = 0;
  std::fclose(file);
  return resident * 4096 / kMiB;
}

// Returns when all other threads of this process sleep.
//
// The C library's allocator can be forked at any moment, AddressSanitizer's (of GCC 12) cannot: a child that was forked
// while another thread had the lock of a size class waits for ever in its next allocation of that size. A thread that
// sleeps has none of those locks, and nothing here wakes up more often than twice a second.
inline void wait_until_others_sleep() {
  const auto self = std::to_string(::gettid());
  for (bool busy = true; busy;) {
    busy = false;
    DIR* directory = ::opendir("/proc/self/task");
    while (const struct dirent* entry = ::readdir(directory)) {
      if (entry->d_name[0] == '.' || self == entry->d_name) continue;
      std::FILE* file = std::fopen(("/proc/self/task/" + std::string(entry->d_name) + "/stat").c_str(), "r");
      if (file == nullptr) continue;  // it has ended
      char state = 'S';
      if (std::fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && state != 'S') busy = true;
      std::fclose(file);
    }
    ::closedir(directory);
    if (busy) ::usleep(200);
  }
}

inline pid_t fork_safely() {
  if (kAddressSanitizer) wait_until_others_sleep();
  return ::fork();
}

// A child process that runs `body` and ends; killed when the test is done with it.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : pid_(fork_safely()) {
    if (pid_ != 0) return;
    int code = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      code = 1;
    }
    ::_exit(code);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    if (!waited_) ::waitpid(pid_, nullptr, 0);
  }
  void signal(int number) const { ::kill(pid_, number); }
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    waited_ = true;
    return status;
  }

 private:
  pid_t pid_;
  bool waited_ = false;
};

inline Descriptor raw_tcp(const std::string& address) {
  const std::string place = Address::parse(address).tcp.at(0);
  struct sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(place.substr(place.find(':') + 1))));
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_EQ(::connect(socket.get(), reinterpret_cast<const struct sockaddr*>(&to), sizeof to), 0);
  return socket;
}

inline Descriptor raw_unix(const std::string& address) {
  const std::string name = Address::parse(address).shm;
  struct sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), name.size());
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto size = static_cast<socklen_t>(offsetof(struct sockaddr_un, sun_path) + 1 + name.size());
  CHECK_EQ(::connect(socket.get(), reinterpret_cast<const struct sockaddr*>(&to), size), 0);
  return socket;
}

// A connection whose dialer's end is two bare sockets that have completed the handshake, and send what the test says.
struct Liar {
  Listener listener;
  Descriptor socket, sideband;
  std::shared_ptr<Connection> victim;

  explicit Liar(const ListenerOptions& options = {}) : listener(options) {
    socket = raw_tcp(listener.address());
    const Session session = greet(socket.get(), Intent::stream, Address::parse(listener.address()), {}, soon());
    sideband = raw_tcp(listener.address());
    greet(sideband.get(), Intent::lane, Address::parse(listener.address()), {}, soon(), 0, &session.id);
    victim = listener.accept(soon());
  }
  void send(Bytes bytes) const { write_exactly(socket.get(), bytes, soon()); }
};

}  // namespace geartrain
