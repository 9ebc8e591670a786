"""File locks on single bytes of a file, which the kernel releases when their owner dies.

A lock belongs to an open file. It ends with the file's last descriptor, whichever process has it: a forked child's
copy keeps the lock. Unlike a pid, a lock is never mistaken for another process's. native/base/file_lock.h has the
details.
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
