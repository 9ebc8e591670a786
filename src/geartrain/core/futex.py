"""Sleeping until another process changes a word of shared memory. Linux's futex, which the C library does not wrap."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import Any

import numpy as np

from geartrain.errors import GeartrainError

_WAIT, _WAKE = 0, 1
_NUMBERS = {"x86_64": 202, "aarch64": 98}
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(word: np.ndarray[Any, Any], seen: int, timeout_s: float) -> None:
    """Sleeps while the first of these 32-bit words is `seen`, until woken, interrupted, or for that long."""
    if timeout_s <= 0:
        return
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _call(word, _WAIT, seen, ctypes.byref(limit), (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT))


def wake(word: np.ndarray[Any, Any]) -> None:
    """Wakes everybody who sleeps on it, in whichever process."""
    _call(word, _WAKE, 0x7FFFFFFF, None, ())


def _call(word: np.ndarray[Any, Any], operation: int, value: int, limit: Any, expected: tuple[int, ...]) -> None:
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise GeartrainError(f"weights are shared on {', '.join(_NUMBERS)}, and this is {platform.machine()}")
    address = ctypes.c_void_p(word.ctypes.data)
    done = _libc.syscall(
        ctypes.c_long(number), address, ctypes.c_int(operation), ctypes.c_uint32(value), limit, None, ctypes.c_int(0)
    )
    if done < 0 and ctypes.get_errno() not in expected:
        raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")
