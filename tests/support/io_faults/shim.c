/* Calls of the C library on files of which one fails, for LD_PRELOAD: run.py has the other half.
 *
 * IO_FAULTS names a file that holds `struct state`, so that child processes count together with their parent. Only calls
 * on paths below `root` count. Each belongs to a door; call number `failing` of door `door` fails with `error`, once. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum door { OPEN, WRITE, SYNC, SIZE, RENAME, UNLINK, MKDIR, MMAP, READ, LIST, CLOSE, DOORS };

struct state {
  atomic_int armed, door, failing, error;
  atomic_int counts[16];
  char root[512];
  char failed[1024]; /* path of the call that failed */
};

static struct state *state;

__attribute__((constructor)) static void map_state(void) {
  const char *path = getenv("IO_FAULTS");
  int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
  if (file < 0) return;
  void *memory = (void *)syscall(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) state = memory;
  syscall(SYS_close, file);
}

/* The path of a descriptor; empty where there is none. */
static void path_of_descriptor(int fd, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, out, PATH_MAX - 1);
  out[n > 0 ? n : 0] = 0;
}

/* An absolute path for one that is relative to a directory, or that names a descriptor in /proc. */
static void absolute(int directory, const char *path, char *out) {
  out[0] = 0;
  if (path == 0) return;
  if (strncmp(path, "/proc/self/fd/", 14) == 0) {
    path_of_descriptor(atoi(path + 14), out);
  } else if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
  } else {
    char before[PATH_MAX];
    if (directory != AT_FDCWD) {
      path_of_descriptor(directory, before);
    } else if (getcwd(before, sizeof before) == 0) {
      before[0] = 0;
    }
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", before, path);
  }
}

/* Whether this call of a door is the one that fails; sets errno. */
static int fails(enum door door, const char *path) {
  size_t n = strlen(state->root);
  if (n == 0 || strncmp(path, state->root, n) != 0) return 0;
  int number = atomic_fetch_add(&state->counts[door], 1);
  if (atomic_load(&state->door) != (int)door || atomic_load(&state->failing) != number) return 0;
  snprintf(state->failed, sizeof state->failed, "%s", path);
  errno = atomic_load(&state->error);
  return 1;
}

static int armed(void) {
  return state != 0 && atomic_load_explicit(&state->armed, memory_order_relaxed);
}

static int fails_at(enum door door, int directory, const char *path) {
  if (!armed()) return 0;
  char whole[PATH_MAX];
  absolute(directory, path, whole);
  return fails(door, whole);
}

static int fails_of(enum door door, int fd) {
  if (!armed() || fd < 0) return 0;
  int before = errno;
  char path[PATH_MAX];
  path_of_descriptor(fd, path);
  if (fails(door, path)) return 1;
  errno = before;
  return 0;
}

#define NEXT(result, name, ...)                                        \
  static result (*next)(__VA_ARGS__);                                  \
  if (next == 0) next = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define MODE_OF(flags)                                                 \
  mode_t mode = 0;                                                     \
  if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {         \
    va_list rest;                                                      \
    va_start(rest, flags);                                             \
    mode = va_arg(rest, mode_t);                                       \
    va_end(rest);                                                      \
  }

#define OPENS(name)                                                    \
  int name(const char *path, int flags, ...) {                         \
    MODE_OF(flags)                                                     \
    if (fails_at(OPEN, AT_FDCWD, path)) return -1;                     \
    NEXT(int, #name, const char *, int, ...);                          \
    return next(path, flags, mode);                                    \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                 \
  int name(int directory, const char *path, int flags, ...) {          \
    MODE_OF(flags)                                                     \
    if (fails_at(OPEN, directory, path)) return -1;                    \
    NEXT(int, #name, int, const char *, int, ...);                     \
    return next(directory, path, flags, mode);                         \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

/* A call with a path in a directory, or with a descriptor: `of` says which arguments name it. */
#define CALL(result, failed, door, test, name, parameters, types, arguments) \
  result name parameters {                                             \
    if (test) return failed;                                           \
    static result (*next) types;                                       \
    if (next == 0) next = (result(*) types)dlsym(RTLD_NEXT, #name);    \
    return next arguments;                                             \
  }
#define AT(door, directory, path) fails_at(door, directory, path)
#define OF(door, fd) fails_of(door, fd)

CALL(int, -1, OPEN, AT(OPEN, AT_FDCWD, path), creat, (const char *path, mode_t mode), (const char *, mode_t), (path, mode))
CALL(int, -1, OPEN, AT(OPEN, AT_FDCWD, path), creat64, (const char *path, mode_t mode), (const char *, mode_t), (path, mode))
CALL(int, -1, OPEN, AT(OPEN, AT_FDCWD, path), __open_2, (const char *path, int flags), (const char *, int), (path, flags))
CALL(int, -1, OPEN, AT(OPEN, AT_FDCWD, path), __open64_2, (const char *path, int flags), (const char *, int), (path, flags))
CALL(FILE *, 0, OPEN, AT(OPEN, AT_FDCWD, path), fopen, (const char *path, const char *mode), (const char *, const char *), (path, mode))
CALL(FILE *, 0, OPEN, AT(OPEN, AT_FDCWD, path), fopen64, (const char *path, const char *mode), (const char *, const char *), (path, mode))

CALL(ssize_t, -1, WRITE, OF(WRITE, fd), write, (int fd, const void *from, size_t n), (int, const void *, size_t), (fd, from, n))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), pwrite, (int fd, const void *from, size_t n, off_t at), (int, const void *, size_t, off_t), (fd, from, n, at))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), pwrite64, (int fd, const void *from, size_t n, off64_t at), (int, const void *, size_t, off64_t), (fd, from, n, at))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), writev, (int fd, const struct iovec *from, int n), (int, const struct iovec *, int), (fd, from, n))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), pwritev, (int fd, const struct iovec *from, int n, off_t at), (int, const struct iovec *, int, off_t), (fd, from, n, at))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), pwritev64, (int fd, const struct iovec *from, int n, off64_t at), (int, const struct iovec *, int, off64_t), (fd, from, n, at))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), pwritev2, (int fd, const struct iovec *from, int n, off_t at, int flags), (int, const struct iovec *, int, off_t, int), (fd, from, n, at, flags))
CALL(ssize_t, -1, WRITE, OF(WRITE, fd), pwritev64v2, (int fd, const struct iovec *from, int n, off64_t at, int flags), (int, const struct iovec *, int, off64_t, int), (fd, from, n, at, flags))
CALL(ssize_t, -1, WRITE, OF(WRITE, to), sendfile, (int to, int from, off_t *at, size_t n), (int, int, off_t *, size_t), (to, from, at, n))
CALL(ssize_t, -1, WRITE, OF(WRITE, to), sendfile64, (int to, int from, off64_t *at, size_t n), (int, int, off64_t *, size_t), (to, from, at, n))

CALL(ssize_t, -1, READ, OF(READ, fd), read, (int fd, void *to, size_t n), (int, void *, size_t), (fd, to, n))
CALL(ssize_t, -1, READ, OF(READ, fd), pread, (int fd, void *to, size_t n, off_t at), (int, void *, size_t, off_t), (fd, to, n, at))
CALL(ssize_t, -1, READ, OF(READ, fd), pread64, (int fd, void *to, size_t n, off64_t at), (int, void *, size_t, off64_t), (fd, to, n, at))
CALL(ssize_t, -1, READ, OF(READ, fd), readv, (int fd, const struct iovec *to, int n), (int, const struct iovec *, int), (fd, to, n))
CALL(ssize_t, -1, READ, OF(READ, fd), preadv, (int fd, const struct iovec *to, int n, off_t at), (int, const struct iovec *, int, off_t), (fd, to, n, at))
CALL(ssize_t, -1, READ, OF(READ, fd), preadv64, (int fd, const struct iovec *to, int n, off64_t at), (int, const struct iovec *, int, off64_t), (fd, to, n, at))
CALL(ssize_t, -1, READ, OF(READ, fd), __read_chk, (int fd, void *to, size_t n, size_t most), (int, void *, size_t, size_t), (fd, to, n, most))

CALL(int, -1, SYNC, OF(SYNC, fd), fsync, (int fd), (int), (fd))
CALL(int, -1, SYNC, OF(SYNC, fd), fdatasync, (int fd), (int), (fd))
CALL(int, -1, SIZE, OF(SIZE, fd), ftruncate, (int fd, off_t n), (int, off_t), (fd, n))
CALL(int, -1, SIZE, OF(SIZE, fd), ftruncate64, (int fd, off64_t n), (int, off64_t), (fd, n))
CALL(int, -1, SIZE, OF(SIZE, fd), fallocate, (int fd, int mode, off_t at, off_t n), (int, int, off_t, off_t), (fd, mode, at, n))
CALL(int, -1, SIZE, OF(SIZE, fd), fallocate64, (int fd, int mode, off64_t at, off64_t n), (int, int, off64_t, off64_t), (fd, mode, at, n))
CALL(int, errno, SIZE, OF(SIZE, fd), posix_fallocate, (int fd, off_t at, off_t n), (int, off_t, off_t), (fd, at, n))
CALL(int, errno, SIZE, OF(SIZE, fd), posix_fallocate64, (int fd, off64_t at, off64_t n), (int, off64_t, off64_t), (fd, at, n))

CALL(int, -1, RENAME, AT(RENAME, AT_FDCWD, to), rename, (const char *from, const char *to), (const char *, const char *), (from, to))
CALL(int, -1, RENAME, AT(RENAME, b, to), renameat, (int a, const char *from, int b, const char *to), (int, const char *, int, const char *), (a, from, b, to))
CALL(int, -1, RENAME, AT(RENAME, b, to), renameat2, (int a, const char *from, int b, const char *to, unsigned flags), (int, const char *, int, const char *, unsigned), (a, from, b, to, flags))
CALL(int, -1, RENAME, AT(RENAME, AT_FDCWD, to), link, (const char *from, const char *to), (const char *, const char *), (from, to))
CALL(int, -1, RENAME, AT(RENAME, b, to), linkat, (int a, const char *from, int b, const char *to, int flags), (int, const char *, int, const char *, int), (a, from, b, to, flags))
CALL(int, -1, RENAME, AT(RENAME, AT_FDCWD, to), symlink, (const char *from, const char *to), (const char *, const char *), (from, to))
CALL(int, -1, RENAME, AT(RENAME, b, to), symlinkat, (const char *from, int b, const char *to), (const char *, int, const char *), (from, b, to))

CALL(int, -1, UNLINK, AT(UNLINK, AT_FDCWD, path), unlink, (const char *path), (const char *), (path))
CALL(int, -1, UNLINK, AT(UNLINK, directory, path), unlinkat, (int directory, const char *path, int flags), (int, const char *, int), (directory, path, flags))
CALL(int, -1, UNLINK, AT(UNLINK, AT_FDCWD, path), rmdir, (const char *path), (const char *), (path))
CALL(int, -1, UNLINK, AT(UNLINK, AT_FDCWD, path), remove, (const char *path), (const char *), (path))
CALL(int, -1, MKDIR, AT(MKDIR, AT_FDCWD, path), mkdir, (const char *path, mode_t mode), (const char *, mode_t), (path, mode))
CALL(int, -1, MKDIR, AT(MKDIR, directory, path), mkdirat, (int directory, const char *path, mode_t mode), (int, const char *, mode_t), (directory, path, mode))

CALL(void *, MAP_FAILED, MMAP, OF(MMAP, fd), mmap, (void *at, size_t n, int protection, int flags, int fd, off_t from), (void *, size_t, int, int, int, off_t), (at, n, protection, flags, fd, from))
CALL(void *, MAP_FAILED, MMAP, OF(MMAP, fd), mmap64, (void *at, size_t n, int protection, int flags, int fd, off64_t from), (void *, size_t, int, int, int, off64_t), (at, n, protection, flags, fd, from))

CALL(DIR *, 0, LIST, AT(LIST, AT_FDCWD, path), opendir, (const char *path), (const char *), (path))
CALL(DIR *, 0, LIST, OF(LIST, fd), fdopendir, (int fd), (int), (fd))

int close(int fd) {
  NEXT(int, "close", int);
  /* Only of what was written: there it can tell that writing failed. A segment is mapped, and a lock is empty. */
  struct stat file;
  if (!armed() || fstat(fd, &file) != 0 || file.st_size == 0 || (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
    return next(fd);
  }
  char path[PATH_MAX];
  path_of_descriptor(fd, path);
  if (strstr(path, "/segments/") != 0 || !fails(CLOSE, path)) return next(fd);
  int error = errno;
  next(fd); /* a close that fails has closed it */
  errno = error;
  return -1;
}
