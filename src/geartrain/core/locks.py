"""File locks that the kernel drops when their owner dies: on single bytes, owned by an open file.

native/base/file_lock.h is the manual. An open file's locks go with its last descriptor, whichever process has that: a
forked child's copy keeps them. They cannot be mistaken for another process's, as pids can.
"""

from __future__ import annotations

import geartrain._native as _native

SHARED, EXCLUSIVE = False, True
_AT = 1 << 40  # far beyond a file's end


def take(fd: int, kind: bool, number: int, timeout_s: float = 0.0) -> bool:
    """Takes a lock of this open file, or changes its kind; False when another one is in the way for that long.

    Raises:
        GeartrainError: the descriptor or its file system cannot do it.
    """
    return _native.take_file_lock(fd, _AT + number, kind, timeout_s)


def drop(fd: int, number: int) -> None:
    """Drops a lock of this open file, if it has it."""
    _native.drop_file_lock(fd, _AT + number)


def is_taken(fd: int, number: int) -> bool:
    """Whether another open file has the lock."""
    return _native.file_lock_held(fd, _AT + number)
