"""Ends a child process with its parent (Linux's PR_SET_PDEATHSIG), and reads other processes' state from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


def at_end_of_forked_child(close: Callable[[], None]) -> None:
    """Registers a function for the end of a forked child of multiprocessing, which ends without atexit's functions.

    Call it in the child, once its target runs, because multiprocessing forgets earlier registrations.
    """
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, close, exitpriority=10)


class ProcessState(NamedTuple):
    """The state of a process, as /proc shows it.

    Attributes:
        state: R running, S waiting, D waiting in the kernel, T stopped by a signal, t by a debugger, Z ended and not
            waited for.
        started: kernel ticks after boot; with the pid it names one process.
    """

    pid: int
    state: str
    command: str
    started: int
    cpu_s: float
    rss_bytes: int
    threads: int

    @property
    def is_stopped(self) -> bool:
        """Whether it does not run although it could: until SIGCONT, or as long as a debugger likes."""
        return self.state in ("T", "t")


def process_state(pid: int) -> ProcessState | None:
    """State of a process of this PID namespace. None if it does not exist, or this user may not see it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, rest = text.rpartition(")")
    words = rest.split()
    ticks = os.sysconf("SC_CLK_TCK")
    return ProcessState(
        pid,
        words[0],
        head.partition("(")[2],
        int(words[19]),
        (int(words[11]) + int(words[12])) / ticks,
        int(words[21]) * os.sysconf("SC_PAGE_SIZE"),
        int(words[17]),
    )


def process_of_thread(tid: int) -> int | None:
    """The process that a thread belongs to; None where there is no such thread."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{tid}/status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return None


__all__ = ["ProcessState", "die_with_parent", "process_of_thread", "process_state"]
