// Shared mappings of files: the memory of a segment.
//
// A segment is a file, in /dev/shm (memory) or anywhere else that can be mapped (an NVMe disk). A new file
// is built without a name and appears under its own in one step (publish), so that no process ever sees half a
// segment. The mapping outlives the file's name: unlink removes the name, the memory goes when the
// last process unmaps it.
//
// Huge pages. Whoever reads a large segment at random looks up an address before each read, and on pages of 4 KB that
// is a cache miss more. So a file that is reserved in memory is allocated in huge pages, as far as the kernel has them,
// and every mapping begins at an address that they can be mapped at. Usually it costs less than small pages do, one
// page to clear and to map in place of 512; where memory has to be moved together first, or a hypervisor has to find
// it, much more, and the file goes on in small pages. The kernel is asked page by page (MADV_COLLAPSE, Linux 6.1), so
// it does so under shmem_enabled=never as well, and refuses under deny. What is not on huge pages works as well, only
// slower.
//
// Descriptors. A mapping keeps its open file, and with it the locks of that open file (file_lock.h), whatever becomes
// of the descriptor: a program that closes descriptors which are not its own loses no lock. The number may mean another
// file then, so fd() looks at what it is, and opens the file again by its name where it is another.
//
// Whose files are opened (Trust). Whoever may write to a segment can make its users read and copy what it likes, so a
// file is opened by its name only when it is a regular one, not a symbolic link, and nobody may write to it but
// those the caller trusts. Nothing is waited for at the open: a FIFO is refused, not read. What a file holds is checked
// by its reader (segment/validate.h); a file that is truncated while it is mapped is SIGBUS for all who read it, which
// only those who may write to it can do.
//
// Threads: a Mapping is made and destroyed by one thread; its memory and fd() may be used by any.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace geartrain {

// Who may write to a shared file. `user`: its owner alone, and that is this process's user, or root; files are created
// with mode 0600. `group`: a group of this process's user as well, 0660. `any`: everybody of the host, 0666.
enum class Trust { user, group, any };

// The value of that name. Throws schema.
Trust trust_of(std::string_view name);

// Where segments live that are asked for by a plain name: GEARTRAIN_DIR, read at every call, or /dev/shm. Throws schema
// when that is not an absolute path.
std::string segments_directory();

// Where a segment called `name` lives: geartrain.NAME in segments_directory(), or the path itself if it has a slash.
std::string segment_path(const std::string& name);

// The regular file at `path`, opened; the caller owns the descriptor. Throws missing, untrusted_store (a symbolic link,
// another owner, a mode that lets others write, no permission), incompatible (no regular file), os.
int open_shared_file(const std::string& path, bool writable, Trust trust);

// Lets those who are trusted open a new file. Throws os.
void share_with(int fd, Trust trust);

// Swaps the names of two files or directories in one step. Throws os.
void exchange_paths(const std::string& one, const std::string& other);

// Whether a file in that directory would be allocated in huge pages now. Throws as Mapping::create.
bool has_huge_pages(const std::string& directory);

// Maps the pages of a part of a writable mapping in one call, where writing to them would map one after the other. It
// changes nothing else, and false says that it was not done: the kernel is older than Linux 5.14, or memory is short.
bool map_for_writing(std::byte* begin, uint64_t bytes) noexcept;

class Mapping {
 public:
  // A new file of `bytes` zeros in the directory of `path`, not yet visible under that name. With `reserve`, every
  // block is allocated now, so that a full file system is an error here and not a SIGBUS later. The first `searched`
  // bytes are read at random all the time: they are put on huge pages even where those are dear. Throws no_space (how
  // much there is, what to do), missing (the directory), os.
  static Mapping create(const std::string& path, uint64_t bytes, bool reserve, Trust trust = Trust::user,
                        uint64_t searched = 0);

  // The file at `path`, whole. Throws as open_shared_file; incompatible when it is empty.
  static Mapping attach(const std::string& path, bool writable, Trust trust = Trust::user);

  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) = delete;
  Mapping(const Mapping&) = delete;
  ~Mapping();

  // Gives the file its name. Throws exists when the name is taken.
  void publish();

  // Removes the name if it still refers to this file; false when it does not (any more), or is not ours to remove.
  bool unlink();

  // Whether the name refers to this file.
  bool is_named() const;

  // False where somebody has truncated the file: the pages behind its end are SIGBUS. A system call; it may be so an
  // instant later.
  bool is_whole() const noexcept;

  // Writes what changed in a part of the file to its disk; nothing to do in memory. Throws os.
  void flush(uint64_t offset, uint64_t bytes) const;

  // In a forked child, at once: opens the file anew and maps it in the place of the parent's open file, whose locks
  // would otherwise be held for as long as the child lives. Views stay valid. False when it cannot be opened, or was
  // truncated meanwhile.
  bool reopen() noexcept;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // How many of them create() has put on huge pages; 0 in a mapping of a file that was there.
  uint64_t huge_bytes() const { return huge_bytes_; }
  // A descriptor of the file. Throws os: the program closed it, and the file's name is gone. A system call.
  int fd() const;
  bool writable() const { return writable_; }
  const std::string& path() const { return path_; }

 private:
  Mapping() = default;
  void map(bool writable);
  void allocate_huge_pages(uint64_t searched) noexcept;
  bool is_this_file(int fd) const noexcept;

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t huge_bytes_ = 0;
  mutable std::atomic<int> fd_{-1};
  dev_t device_ = 0;
  ino_t inode_ = 0;
  bool writable_ = true;
  std::string path_;
  std::string temporary_;  // the name until publish(), where the file system has no nameless files
};

}  // namespace geartrain
