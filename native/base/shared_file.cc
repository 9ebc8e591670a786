#include "base/shared_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
#include "base/sha256.h"

namespace geartrain {
namespace {

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

std::string mebibytes(uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string temporary_suffix() {
  char suffix[32];
  std::snprintf(suffix, sizeof suffix, ".%016llx.new", static_cast<unsigned long long>(random_number()));
  return suffix;
}

// Docker gives a container this much memory unless it is told otherwise.
constexpr uint64_t kSmallDirectory = uint64_t{64} << 20;

[[noreturn]] void fail_no_space(const std::string& path, uint64_t bytes) {
  struct statvfs fs{};
  const std::string directory = directory_of(path);
  const bool known = ::statvfs(directory.c_str(), &fs) == 0;
  const uint64_t block = known ? fs.f_frsize : 0;
  const bool small = known && fs.f_blocks * block <= kSmallDirectory;
  if (known && fs.f_files != 0 && fs.f_favail == 0) {
    fail(ErrorKind::no_space, "cannot create ", path, ": ", directory, " has no inodes free, of ", fs.f_files,
         ". Remove files there (geartrain inspect lists the segments that dead runs left), allow more (mount -o "
         "remount,nr_inodes=...), or set GEARTRAIN_DIR to a directory of another file system for all processes");
  }
  if (known && bytes <= fs.f_bavail * block) {
    fail(ErrorKind::no_space, "the segment needs ", mebibytes(bytes), ", which ", directory,
         " has free, but this process may not have: its limit of a file's size (ulimit -f) or a quota is less");
  }
  fail(ErrorKind::no_space, "the segment needs ", mebibytes(bytes), ", but ", directory, " has ",
       mebibytes(fs.f_bavail * block), " free of ", mebibytes(fs.f_blocks * block),
       small
           ? ", no more than the 64 MiB that containers get by default. Enlarge it (docker run --shm-size=16g, or "
             "--ipc=host; "
             "mount -o remount,size=...), set GEARTRAIN_DIR to a directory of a larger file system for all "
             "processes, give the store a path, or ask for less capacity"
           : ". Ask for less capacity, remove segments that dead runs left (geartrain inspect lists them), enlarge it "
             "(mount -o remount,size=...; docker run --shm-size=...), set GEARTRAIN_DIR to a directory of a larger "
             "file system for all processes, or give a path on one");
}

// The system's words for an error, and what helps where a limit was met.
std::string reason_of(int error) {
  std::string reason = std::strerror(error);
  if (error == EMFILE) reason += ". Raise this process's limit of open files (ulimit -n), or close some";
  return reason;
}

bool is_full(int error) {
  return error == ENOSPC || error == EFBIG || error == EDQUOT;
}

[[noreturn]] void fail_to_create(const std::string& path, uint64_t bytes, int error) {
  if (is_full(error)) fail_no_space(path, bytes);
  const bool refused = error == EROFS || error == EACCES || error == EPERM;
  fail(error == ENOENT ? ErrorKind::missing : ErrorKind::io, "cannot create ", path, ": ", reason_of(error),
       refused ? ". Set GEARTRAIN_DIR, for all processes, to a directory that this process may write to, or give a "
                 "path in one"
               : "");
}

mode_t mode_of(Trust trust) {
  return trust == Trust::user ? 0600 : trust == Trust::group ? 0660 : 0666;
}

bool is_my_group(gid_t group) {
  if (group == ::getegid()) return true;
  std::vector<gid_t> groups(static_cast<size_t>(std::max(0, ::getgroups(0, nullptr))));
  const int found = groups.empty() ? 0 : ::getgroups(static_cast<int>(groups.size()), groups.data());
  return found > 0 && std::find(groups.begin(), groups.begin() + found, group) != groups.begin() + found;
}

std::string octal(mode_t mode) {
  char text[8];
  std::snprintf(text, sizeof text, "%04o", static_cast<unsigned>(mode & 07777));
  return text;
}

// Throws untrusted_store when others than those who are trusted may write to the file.
void check_writers(const struct stat& file, Trust trust, const std::string& path) {
  if (trust == Trust::any) return;
  const auto refuse = [&](const auto&... parts) {
    fail(ErrorKind::untrusted_store, path, " is not opened: ", parts...,
         "; trust='group' or 'any' opens files that other users may write to, and those can make whoever opens one "
         "read and crash as they like");
  };
  const bool mine = file.st_uid == ::geteuid() || file.st_uid == 0;
  const bool of_my_group = trust == Trust::group && is_my_group(file.st_gid);
  if (!mine && !of_my_group) {
    refuse("it belongs to user ", file.st_uid, " and group ", file.st_gid, ", this process is user ", ::geteuid());
  }
  if ((file.st_mode & S_IWOTH) != 0) refuse("every user may write to it (mode ", octal(file.st_mode), ")");
  if ((file.st_mode & S_IWGRP) != 0 && !of_my_group) {
    refuse("group ", file.st_gid, " may write to it (mode ", octal(file.st_mode), ")");
  }
}

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// The whole file, at an address whose huge pages are the file's; nullptr with errno.
std::byte* map_aligned(int fd, uint64_t bytes, int protection) {
  const uint64_t spare = bytes < kHugePage ? 0 : kHugePage;
  void* const room = ::mmap(nullptr, bytes + spare, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(room);
  const uintptr_t at = spare == 0 ? begin : (begin + kHugePage - 1) & ~(kHugePage - 1);
  void* const mapped = ::mmap(reinterpret_cast<void*>(at), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(room, bytes + spare);
    errno = error;
    return nullptr;
  }
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t end = (at + bytes + page - 1) & ~(page - 1),
                  room_end = (begin + bytes + spare + page - 1) & ~(page - 1);
  if (at != begin) ::munmap(room, at - begin);
  if (end != room_end) ::munmap(reinterpret_cast<void*>(end), room_end - end);
  return static_cast<std::byte*>(mapped);
}

}  // namespace

Trust trust_of(std::string_view name) {
  if (name == "user") return Trust::user;
  if (name == "group") return Trust::group;
  if (name == "any") return Trust::any;
  fail(ErrorKind::schema, "trust is 'user', 'group' or 'any', found '", name, "'");
}

std::string segments_directory() {
  const char* chosen = std::getenv("GEARTRAIN_DIR");
  if (chosen == nullptr || *chosen == '\0') return "/dev/shm";
  std::string directory = chosen;
  if (directory[0] != '/') fail(ErrorKind::schema, "GEARTRAIN_DIR must be an absolute path, found '", directory, "'");
  while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
  return directory;
}

std::string segment_path(const std::string& name) {
  if (name.empty() || name.size() > 200 || name.find('\0') != std::string::npos) {
    fail(ErrorKind::schema, "a store's name has 1 to 200 characters, found ", name.size());
  }
  return name.find('/') == std::string::npos ? segments_directory() + "/geartrain." + name : name;
}

int open_shared_file(const std::string& path, bool writable, Trust trust) {
  // O_NONBLOCK: a FIFO of that name has nobody at its other end.
  const int fd = ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  const int error = errno;
  if (fd < 0) {
    struct stat named{};
    const bool there = ::lstat(path.c_str(), &named) == 0;
    if (error == ENOENT) fail(ErrorKind::missing, "cannot open the segment ", path, ": ", std::strerror(error));
    if (there && S_ISLNK(named.st_mode)) {
      fail(ErrorKind::untrusted_store, path, " is not opened: it is a symbolic link; give the path that it leads to");
    }
    if (there && !S_ISREG(named.st_mode)) fail(ErrorKind::incompatible, path, " is not a segment: not a regular file");
    if (there && error == EACCES) check_writers(named, trust, path);
    fail(error == EACCES ? ErrorKind::untrusted_store : ErrorKind::io, "cannot open the segment ", path, ": ",
         reason_of(error), error == EROFS ? "; Store.open(..., mode='r') reads it" : "");
  }
  try {
    struct stat file{};
    if (::fstat(fd, &file) != 0) fail(ErrorKind::io, "cannot stat ", path, ": ", std::strerror(errno));
    if (!S_ISREG(file.st_mode)) fail(ErrorKind::incompatible, path, " is not a segment: not a regular file");
    check_writers(file, trust, path);
  } catch (...) {
    ::close(fd);
    throw;
  }
  return fd;
}

void share_with(int fd, Trust trust) {
  // Not the open's mode: that is cut by the umask.
  if (trust != Trust::user && ::fchmod(fd, mode_of(trust)) != 0) {
    fail(ErrorKind::io, "cannot set the mode of a new segment: ", std::strerror(errno));
  }
}

void exchange_paths(const std::string& one, const std::string& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) != 0) {
    fail(ErrorKind::io, "cannot exchange ", one, " and ", other, ": ", std::strerror(errno));
  }
}

Mapping Mapping::create(const std::string& path, uint64_t bytes, bool reserve, Trust trust, uint64_t searched) {
  Mapping mapping;
  mapping.path_ = path;
  // A file without a name: if this process is killed half-way, nothing is left behind.
  const std::string directory = directory_of(path);
  mapping.fd_ = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (mapping.fd_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    mapping.temporary_ = path + temporary_suffix();  // a file system without nameless files
    mapping.fd_ = ::open(mapping.temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  }
  if (mapping.fd_ < 0) fail_to_create(path, bytes, errno);
  share_with(mapping.fd_, trust);
  mapping.bytes_ = bytes;
  struct statvfs fs{};
  const bool limited = ::fstatvfs(mapping.fd_, &fs) == 0 && fs.f_blocks != 0;  // a tmpfs of size=0 has no limit
  if (limited && reserve && fs.f_bavail * fs.f_frsize < bytes) {
    fail_no_space(path, bytes);  // before fallocate, which would fill the file system to find out
  }
  int error = ::ftruncate(mapping.fd_, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == 0) mapping.map(true);
  if (error == 0 && reserve) mapping.allocate_huge_pages(searched);
  // In pieces, so that a signal costs one piece: memory file systems undo an interrupted allocation.
  for (uint64_t at = 0; error == 0 && reserve && at < bytes;) {
    const uint64_t piece = std::min<uint64_t>(bytes - at, uint64_t{16} << 20);
    error = ::posix_fallocate(mapping.fd_, static_cast<off_t>(at), static_cast<off_t>(piece));
    if (error == 0) at += piece;
    if (error == EINTR) error = 0;
  }
  if (is_full(error)) fail_no_space(path, bytes);
  if (error != 0) fail(ErrorKind::io, "cannot size ", path, ": ", std::strerror(error));
  return mapping;
}

Mapping Mapping::attach(const std::string& path, bool writable, Trust trust) {
  Mapping mapping;
  mapping.path_ = path;
  mapping.fd_ = open_shared_file(path, writable, trust);
  struct stat st{};
  if (::fstat(mapping.fd_, &st) != 0) fail(ErrorKind::io, "cannot stat ", path, ": ", std::strerror(errno));
  mapping.bytes_ = static_cast<uint64_t>(st.st_size);
  if (mapping.bytes_ == 0) fail(ErrorKind::incompatible, path, " is not a segment: it is empty");
  mapping.map(writable);
  return mapping;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      huge_bytes_(other.huge_bytes_),
      fd_(other.fd_.exchange(-1)),
      device_(other.device_),
      inode_(other.inode_),
      writable_(other.writable_),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})) {}

bool has_huge_pages(const std::string& directory) {
  return Mapping::create(directory + "/geartrain", kHugePage, true).huge_bytes() != 0;
}

bool map_for_writing(std::byte* begin, uint64_t bytes) noexcept {
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;
#endif
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes + page - 1) & ~(page - 1);
  return ::madvise(reinterpret_cast<void*>(first), end - first, MADV_POPULATE_WRITE) == 0;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  const int fd = fd_;
  if (fd >= 0 && (data_ == nullptr || is_this_file(fd))) ::close(fd);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void Mapping::map(bool writable) {
  writable_ = writable;
  struct stat mine{};
  if (::fstat(fd_, &mine) != 0) fail(ErrorKind::io, "cannot stat ", path_, ": ", std::strerror(errno));
  device_ = mine.st_dev;
  inode_ = mine.st_ino;
  data_ = map_aligned(fd_, bytes_, writable ? PROT_READ | PROT_WRITE : PROT_READ);
  if (data_ == nullptr) {
    fail(ErrorKind::io, "cannot map ", mebibytes(bytes_), " of ", path_, ": ", std::strerror(errno));
  }
  // Huge pages where the administrator allows them for shared memory; refused elsewhere, and that is fine.
  ::madvise(data_, bytes_, MADV_HUGEPAGE);
}

// A page of the file has to be there, or the kernel finds nothing to make a huge page of; others would be copied. In
// pieces, so that a signal waits for one only, and that the first that was dear is the last.
void Mapping::allocate_huge_pages(uint64_t searched) noexcept {
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;
#endif
  // Of processor time for a piece: 5 ms are usual, small pages take 15 to 50.
  constexpr uint64_t kPiece = 32 * kHugePage, kMostNs = 50'000'000, kMostOfSearchedNs = 500'000'000;
  struct statfs fs{};
  if (::fstatfs(fd_, &fs) != 0 || fs.f_type != TMPFS_MAGIC) return;
  const uint64_t whole = bytes_ / kHugePage * kHugePage;
  for (uint64_t at = 0; at < whole; at += kPiece) {
    const uint64_t end = std::min(whole, at + kPiece), began_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (uint64_t page = at; page < end; page += kHugePage) {
      int error = EINTR;
      while (error == EINTR) error = ::posix_fallocate(fd_, static_cast<off_t>(page), 1);
      if (error != 0) return;
    }
    if (::madvise(data_ + at, end - at, MADV_COLLAPSE) == 0) {
      huge_bytes_ += end - at;
    } else if (errno != EAGAIN) {  // EAGAIN: one page was in use
      return;
    }
    const uint64_t most_ns = end < searched ? kMostOfSearchedNs : kMostNs;
    if (clock_ns(CLOCK_THREAD_CPUTIME_ID) - began_ns > most_ns) return;
  }
}

void Mapping::publish() {
  // A hard link fails when the name is taken, which rename would silently replace.
  char nameless[40];
  std::snprintf(nameless, sizeof nameless, "/proc/self/fd/%d", fd_.load());
  const char* from = temporary_.empty() ? nameless : temporary_.c_str();
  if (::linkat(AT_FDCWD, from, AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    if (errno == EEXIST) fail(ErrorKind::exists, path_);
    fail_to_create(path_, bytes_, errno);
  }
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

bool Mapping::is_named() const {
  struct stat named{};
  return ::lstat(path_.c_str(), &named) == 0 && named.st_ino == inode_ && named.st_dev == device_;
}

bool Mapping::is_whole() const noexcept {
  struct stat found{};
  if (::fstat(fd_, &found) != 0 || found.st_ino != inode_ || found.st_dev != device_) return true;  // not known
  return static_cast<uint64_t>(found.st_size) >= bytes_;
}

bool Mapping::unlink() {
  return is_named() && ::unlink(path_.c_str()) == 0;
}

void Mapping::flush(uint64_t offset, uint64_t bytes) const {
  if (::msync(data_ + offset, bytes, MS_SYNC) != 0) {
    fail(ErrorKind::io, "cannot write ", path_, " to its disk: ", std::strerror(errno));
  }
}

bool Mapping::is_this_file(int fd) const noexcept {
  struct stat found{};
  return ::fstat(fd, &found) == 0 && found.st_ino == inode_ && found.st_dev == device_;
}

int Mapping::fd() const {
  int known = fd_;
  if (is_this_file(known)) return known;
  const int opened = ::open(path_.c_str(), (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
  if (opened >= 0 && is_this_file(opened)) {
    if (fd_.compare_exchange_strong(known, opened)) return opened;
    ::close(opened);  // another thread was first
    return known;
  }
  if (opened >= 0) ::close(opened);
  fail(ErrorKind::io, "the program closed the descriptor (", known, ") of ", path_,
       ", and the file cannot be opened again by that name; a program that closes descriptors it did not open must do "
       "so before it opens a store");
}

bool Mapping::reopen() noexcept {
  const int flags = (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  const int known = fd_;
  const bool ours = is_this_file(known);
  char path[40];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", known);
  const int opened = ::open(ours ? path : path_.c_str(), flags | (ours ? 0 : O_NONBLOCK));
  if (opened < 0) return false;
  bool done = is_this_file(opened);
  if (done) {
    // Over the old pages, in one step: a thread that reads them, and a view of them, notice nothing.
    const int protection = writable_ ? PROT_READ | PROT_WRITE : PROT_READ;
    done = ::mmap(data_, bytes_, protection, MAP_SHARED | MAP_FIXED, opened, 0) == data_;
    if (done) ::madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  struct stat found{};
  done = done && ::fstat(opened, &found) == 0 && static_cast<uint64_t>(found.st_size) >= bytes_;
  if (done && !ours) {
    fd_ = opened;
    return true;
  }
  done = done && ::dup3(opened, known, O_CLOEXEC) >= 0;
  ::close(opened);
  return done;
}

}  // namespace geartrain
