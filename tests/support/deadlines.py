"""How long tests wait for what must happen: longer on a busy machine.

`patience(10)` is 10 seconds where nothing else runs, and as many times more as there are processes for each core now,
or as GEARTRAIN_TEST_PATIENCE says, whichever is more. It is for deadlines that are there to end a test that hangs: a
process that must end, a call that must return, a file that must appear. A timeout that is itself tested is a number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

VARIABLE = "GEARTRAIN_TEST_PATIENCE"
P = TypeVar("P", str, bytes)
MOST = 50.0  # beyond this a test that hangs would hang for hours


def load() -> float:
    """Processes that run or wait for a core, for each core: now or in the last minute, what is more, and at least 1."""
    cores = len(os.sched_getaffinity(0))
    last_minute, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    running = int(now.split("/")[0]) - 1  # without who asks
    return max(1.0, float(last_minute) / cores, running / cores)


def factor() -> float:
    """How many times as long as on an idle machine."""
    return min(MOST, max(float(os.environ.get(VARIABLE, "1")), load()))


def patience(seconds: float) -> float:
    """Seconds to wait for what takes less than `seconds` on an idle machine."""
    return seconds * factor()


def until(condition: Callable[[], object], what: str = "it did not come to that", seconds: float = 10.0) -> None:
    """Waits until the condition holds; an AssertionError, which says `what`, when it does not in time."""
    ends_s = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < ends_s, what
        time.sleep(0.005)


def taken(lock: Any) -> bool:
    """Whether another thread has a lock, also an `RLock`, which cannot be asked before Python 3.14."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


@contextlib.contextmanager
def killed(process: subprocess.Popen[P]) -> Iterator[subprocess.Popen[P]]:
    """`with process`, which waits for its end, but that what fails within leaves nothing to wait for."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def stop(pid: int) -> None:
    """Stops a process by SIGSTOP; returns when all its threads stand still, which on a busy machine takes a while."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + patience(10)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            while (thread / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "TZ":
                assert time.monotonic() < until_s, f"process {pid} does not stop"
                time.sleep(0.001)
