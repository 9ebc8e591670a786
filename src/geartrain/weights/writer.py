"""Writes versions into the buffers of a segment of weights, for a publisher or a relay."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import check_whole
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.shared_files import Trust
from geartrain.core.threads import held
from geartrain.errors import BuffersHeldError, GeartrainError, WaitTimeoutError
from geartrain.weights.format import MAX_BUFFERS
from geartrain.weights.layout import Schema
from geartrain.weights.segment import WeightsSegment

_MADV_POPULATE_WRITE = 23  # Linux 5.14
#: Period of a waiting publisher's check for buffers of killed readers, which do not wake it.
_CHECK_EVERY_S = 0.1


class Writer(Lifetime, at_exit=True, elsewhere="weights have one publisher a host"):
    """The only writer of a name's weights on this host, while it is open."""

    def __init__(self, name: str, buffers: int, directory: Path, trust: Trust = "user") -> None:
        """Raises `GeartrainError` when another one is alive."""
        check_whole("buffers", buffers, 2, MAX_BUFFERS)
        super().__init__(f"the publisher of {name!r}")
        self.name, self._buffers = name, buffers
        self._segment = WeightsSegment.open(name, directory, trust=trust)
        while not self._segment.become_publisher():
            if self._segment.signals["replaced"]:  # the file that replaced it may be free
                self._segment.close()
                self._segment = WeightsSegment.open(name, directory, trust=trust)
                continue
            self._segment.close()
            raise GeartrainError(f"the weights {name!r} have a publisher on this host already, and it is alive")
        self._old: WeightsSegment | None = None  # its name goes to the new file with the first version there
        self._schema: Schema | None = None
        self._views: dict[int, list[Any]] = {}
        self._used: set[int] = set()
        self.readable = self._segment  # the file that has the name
        self.on_commit: Callable[[], object] = lambda: None
        self.on_wait: Callable[[], object] = lambda: None
        self._lock = threading.RLock()  # of whoever writes; a signal's handler may come in between and close
        self._in_turn = False
        self._begin()

    @property
    def schema(self) -> Schema | None:
        """Schema of the versions; None before the first."""
        return self._schema

    @contextlib.contextmanager
    def turn(self, timeout_s: float) -> Iterator[None]:
        """One thread's turn to lay out and write; closes at its end if somebody wanted to meanwhile.

        Raises `WaitTimeoutError` where another thread has it for so long, and `StoreClosedError`.
        """
        if self._forked:
            self._check_open()
        with held(self._lock, timeout_s) as mine:
            if not mine:
                raise WaitTimeoutError(
                    f"another thread has published to {self.name!r} for {timeout_s:g} s, and is not done"
                )
            if self._in_turn:
                self._check_open()
                raise GeartrainError(
                    f"this thread is publishing to {self.name!r} already: a signal handler must not publish until "
                    "it returns"
                )
            self._in_turn = True  # from here on a handler's `close` leaves the file to this turn
            try:
                self._check_open()
                yield
            finally:
                self._in_turn = False
                if not self._unended:
                    self._detach()

    def lay_out(self, schema: Schema) -> None:
        """Prepares for versions of this schema: in the present file if its schema is the same, else in a new file.

        Call it within `turn`.
        """
        text = schema.to_json()
        layout = self._segment.layout()
        if layout is not None:
            if self._segment.schema() == text and layout["buffers"] == self._buffers:
                self._schema = schema
                return
            fresh = WeightsSegment.make(self._segment.path, self._segment.trust)
            fresh.become_publisher()
            if self._old is None:
                self._old = self._segment
            else:
                self._segment.close()  # it never had the name
            self._segment = fresh
        self._views.clear()
        self._used.clear()
        self._segment.lay_out(text, schema.nbytes, self._buffers)
        self._schema = schema

    @contextlib.contextmanager
    def writing(self, version: int, timeout_s: float) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]] | list[Any]]:
        """A buffer's tensors, to be filled; they become the newest version when the block ends without an error.

        Within `turn`. Raises `BuffersHeldError`, `NoSpaceError`.
        """
        buffer = self._claim(time.monotonic() + timeout_s, timeout_s)
        with on_error(self._segment.unclaim, buffer):
            yield self._views[buffer]
        self._segment.commit(buffer, version)
        if self._old is not None:
            self._segment.replace(self._old)
            self.readable = self._segment
            self._old.close()
            self._old = None
        self.on_commit()

    def memory(self) -> Any:
        """All of the buffer that is being written, as bytes: within `writing`."""
        return self._memory

    def _claim(self, until_s: float, timeout_s: float) -> int:
        while True:
            released = self._segment.released()
            self._check_open()
            newest = self._segment.head()
            order = sorted(range(self._buffers), key=lambda i: i not in self._used)  # warm ones first
            for buffer in order:
                if (newest is None or buffer != newest.buffer) and self._segment.claim(buffer):
                    self._prepare(buffer)
                    return buffer
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise BuffersHeldError(
                    f"readers have held {self._buffers - 1} of the {self._buffers} buffers of {self.name!r} for "
                    f"{timeout_s:g} s, and the other is the newest version: release snapshots, or use more buffers"
                )
            self.on_wait()
            self._segment.wait_released(released, min(left_s, _CHECK_EVERY_S))

    def _prepare(self, buffer: int) -> None:
        assert self._schema is not None
        with on_error(self._segment.unclaim, buffer):
            if buffer not in self._used:
                self._segment.allocate(buffer)
                self._used.add(buffer)
            if buffer not in self._views:
                memory = self._segment.memory(buffer)
                self._populate(memory)
                self._views[buffer] = list(self._schema.views(memory))
            self._memory = self._segment.memory(buffer)

    def _populate(self, memory: Any) -> None:
        """Faults all pages in with one call."""
        mapped = self._segment.mapped
        if mapped is not None and memory.nbytes:
            start = memory.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
            size = -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            with contextlib.suppress(OSError):  # an older kernel: slower
                mapped.madvise(_MADV_POPULATE_WRITE, start, size)

    def end_waits(self) -> None:
        """Ends the wait of a thread for a buffer with `StoreClosedError`, and all later waits too."""
        self._end()
        for segment in (self._segment, self._old):
            if segment is not None:
                segment.wake_publisher()

    def close(self) -> None:
        """Detaches, once a version that is being written is. Versions stay readable for attached readers."""
        self.end_waits()
        with self._lock:
            if not self._in_turn:  # else this is a signal's handler, in the thread that has the turn
                self._detach()

    def _detach(self) -> None:
        if self._old is not None:
            self._old.close()
        self._segment.close()

    def _after_fork(self) -> None:
        # Closes what the child inherited, so that it does not hold the publisher's lock.
        self._lock, self._in_turn = threading.RLock(), False
        for segment in (self._segment, self._old):
            if segment is not None:
                segment.abandon()
