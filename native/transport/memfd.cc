#include "transport/memfd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Memory::Memory(int fd, uint64_t bytes, bool populate) : bytes_(bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, 0);
  if (at == MAP_FAILED) fail(ErrorKind::no_space, "cannot map ", bytes, " bytes: ", std::strerror(errno));
  data_ = static_cast<std::byte*>(at);
}

Memory::~Memory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Descriptor make_memory(const char* name, uint64_t bytes) {
  Descriptor fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail(ErrorKind::os, "cannot make a memfd: ", std::strerror(errno));
  int error = ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  // In pieces, so that a signal costs one piece: memory file systems undo an interrupted allocation.
  for (uint64_t at = 0; error == 0 && at < bytes;) {
    const uint64_t piece = std::min<uint64_t>(bytes - at, uint64_t{16} << 20);
    error = ::posix_fallocate(fd.get(), static_cast<off_t>(at), static_cast<off_t>(piece));
    if (error == 0) at += piece;
    if (error == EINTR) error = 0;
  }
  if (error != 0) {
    fail(error == ENOSPC || error == ENOMEM || error == EFBIG ? ErrorKind::no_space : ErrorKind::os, "cannot reserve ",
         bytes, " bytes of shared memory for a message: ", std::strerror(error));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    fail(ErrorKind::os, "cannot seal a memfd: ", std::strerror(errno));
  }
  return fd;
}

Memory open_memory(const Descriptor& fd, uint64_t bytes) {
  struct stat st{};
  if (::fstat(fd.get(), &st) != 0 || bytes == 0 || static_cast<uint64_t>(st.st_size) != bytes) {
    fail(ErrorKind::frame, "the peer's segment does not have the size it announced");
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) fail(ErrorKind::frame, "the peer's segment could shrink");
  return Memory(fd.get(), bytes, false);
}

ssize_t receive_with_fds(int socket, std::span<std::byte> to, std::vector<Descriptor>* fds) {
  struct iovec part = {to.data(), to.size()};
  alignas(struct cmsghdr) char space[CMSG_SPACE(8 * sizeof(int))];
  struct msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = space;
  header.msg_controllen = sizeof space;
  const ssize_t got = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got <= 0) return got;
  for (struct cmsghdr* part_of = CMSG_FIRSTHDR(&header); part_of != nullptr; part_of = CMSG_NXTHDR(&header, part_of)) {
    if (part_of->cmsg_level != SOL_SOCKET || part_of->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= part_of->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part_of) + at, sizeof fd);
      fds->emplace_back(fd);
    }
  }
  return got;
}

void send_with_fds(int socket, Bytes bytes, std::span<const int> fds, Deadline deadline) {
  struct iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(struct cmsghdr) char space[CMSG_SPACE(8 * sizeof(int))] = {};
  struct msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = space;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    struct cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  for (;;) {
    const ssize_t sent = ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      write_exactly(socket, bytes.subspan(static_cast<size_t>(sent)), deadline);
      return;
    }
    if (errno == EAGAIN) {
      if (!wait_for(socket, POLLOUT, deadline))
        fail(ErrorKind::timed_out, "the peer did not read a descriptor in time");
    } else if (errno != EINTR) {
      fail(ErrorKind::peer_lost, "the peer hung up: ", std::strerror(errno));
    }
  }
}

}  // namespace geartrain
