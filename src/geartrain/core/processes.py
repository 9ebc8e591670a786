"""Process lifetime: the kernel kills a child when its parent ends (Linux's PR_SET_PDEATHSIG)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process (SIGKILL) when its parent ends, or the parent's thread that started it.

    The setting outlives `exec`, and children of this process do not inherit it. A process whose parent ended before the
    call exits at once.

    Args:
        parent: process id of the process that started this one.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


__all__ = ["die_with_parent"]
