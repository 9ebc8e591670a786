"""Locks that the kernel drops when their owner dies: on bytes far beyond a file's end, owned by an open file.

An open file's locks go with its last descriptor, whichever process has that: a forked child's copy keeps them. They
cannot be mistaken for another process's, as pids can. native/base/file_lock.h is the store's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

SHARED, EXCLUSIVE, NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
_AT = 1 << 40


def take(fd: int, kind: int, number: int) -> bool:
    """Takes or drops (NONE) a lock of this open file; False when another one is in the way. Never waits."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, _AT + number, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_taken(fd: int, number: int) -> bool:
    """Whether another open file has the lock."""
    asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _AT + number, 1, 0)
    found: int = struct.unpack_from("@h", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK
