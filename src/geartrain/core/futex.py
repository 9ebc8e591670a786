"""Futex: sleeps until another process changes a word of shared memory.

native/base/futex.h is the native side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain._native as _native


def wait(word: np.ndarray[Any, Any], seen: int, timeout_s: float) -> bool:
    """Sleeps while the first of these 32-bit words is `seen`, for so long at most; False when it still is.

    Other threads of Python run meanwhile, and handlers of signals do. Whoever changes the word calls `wake` then.
    """
    return _native.futex_wait(word, seen, timeout_s)


def wake(word: np.ndarray[Any, Any]) -> None:
    """Wakes everybody who sleeps on it, in whichever process."""
    _native.futex_wake(word)
