"""Futex: sleeps until another process changes a word of shared memory.

native/base/futex.h is the native side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain._native as _native


def wait(word: np.ndarray[Any, Any], seen: int, timeout_s: float) -> bool:
    """Sleeps while the first of these 32-bit words equals `seen`, for at most `timeout_s`. False if it still does.

    Other Python threads and signal handlers run during the wait. A process that changes the word must call `wake`.
    """
    return _native.futex_wait(word, seen, timeout_s)


def wake(word: np.ndarray[Any, Any]) -> None:
    """Wakes all threads that sleep on the word, in all processes."""
    _native.futex_wake(word)
