"""`Supervisor`: waits for child processes, reaps those that end, and kills those that must end.

One thread of the owner runs the loop. The same thread starts the processes:

    while ...:
        supervisor.wait(timeout_s)              # a process ended, `wake` was called, or the time is over
        for process in supervisor.reap(): ...   # start it again, or give up

If the thread that started the processes ends, however it does, the kernel kills them (`core.processes`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from geartrain.core.threads import SIGNAL_S
from geartrain.launch.process import ChildProcess

P = TypeVar("P", bound=ChildProcess)
#: Time for a killed process to end. One that does not end hangs in the kernel.
KILL_S = 10.0


class Supervisor(Generic[P]):
    """The processes of one owner. Only the owner's thread may call its methods, except `wake`."""

    def __init__(self, processes: Sequence[P]) -> None:
        self.processes = list(processes)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """Ends the current or the next `wait`; from any thread or signal handler."""
        with contextlib.suppress(OSError):  # full: a wake-up is there already; closed: no thread waits any more
            self._writer.send(b"!")

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until a process ends, `wake` is called, or the time is over; for `SIGNAL_S` at most."""
        poll = select.poll()
        for fd in [self._reader.fileno(), *(each.pidfd for each in self.processes if each.running)]:
            poll.register(fd, select.POLLIN)
        poll.poll(1000 * max(0.0, SIGNAL_S if timeout_s is None else min(SIGNAL_S, timeout_s)))
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def reap(self) -> list[P]:
        """The processes that have ended since the last call."""
        return [each for each in self.processes if each.running and each.ended()]

    def kill(self, processes: Iterable[P], because: str = "") -> None:
        """Kills processes and waits until they have ended."""
        killed = list(processes)
        for each in killed:
            each.kill(because)
        until_s = time.monotonic() + KILL_S
        for each in killed:
            while not each.ended() and time.monotonic() < until_s:
                poll = select.poll()
                poll.register(each.pidfd, select.POLLIN)
                poll.poll(max(0.0, (until_s - time.monotonic()) * 1000))

    def close(self) -> None:
        """Frees the descriptors of `wake`."""
        self._reader.close()
        self._writer.close()


__all__ = ["KILL_S", "Supervisor"]
