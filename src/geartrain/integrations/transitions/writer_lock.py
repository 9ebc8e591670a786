"""Lock of those who write to a store: one thread of one process at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import geartrain.core.locks as locks
from geartrain.errors import StoreClosedError, WaitTimeoutError
from geartrain.store.store import Store

# The byte of the store's file that is locked.
_BYTE = 1 << 20


class WriterLock:
    """A lock of threads, and with a store of processes as well; may be nested.

    Args:
        timeout_s: longest wait for another thread, and for another process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread = threading.RLock()
        self._depth = 0
        self._taken = False
        self._descriptor: tuple[int, int] | None = None  # process, number
        self._leaves = False  # whoever has the lock closes the file

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Keeps other threads of this process.

        Raises:
            WaitTimeoutError: another thread writes for too long.
        """
        if not self._thread.acquire(timeout=self._timeout_s):
            raise WaitTimeoutError(f"another thread writes to the store for longer than {self._timeout_s:g} s")
        try:
            yield
        finally:
            self._thread.release()

    @contextmanager
    def locked(self, store: Store) -> Iterator[None]:
        """Keeps other threads and processes.

        Raises:
            WaitTimeoutError: another thread or process writes for too long.
            StoreClosedError: the store was closed meanwhile, as its last handle.
        """
        with self.thread():
            # From here on a signal's handler that closes leaves the file to the end of this.
            self._depth += 1
            try:
                if not self._taken:
                    self._take(store)
                yield
            finally:
                if self._depth == 1 and self._descriptor is not None:
                    self._taken = False
                    locks.drop(self._descriptor[1], _BYTE)
                self._depth -= 1
                if self._depth == 0 and self._leaves:
                    self._close_file()

    def _take(self, store: Store) -> None:
        # A forked child's descriptor has the parent's locks, so it opens the file anew.
        if self._descriptor is None or self._descriptor[0] != os.getpid():
            try:
                self._descriptor = (os.getpid(), os.open(store.path, os.O_RDWR | os.O_CLOEXEC))
            except FileNotFoundError as error:
                raise StoreClosedError(f"the store {store.name!r} was closed meanwhile, and is gone") from error
        if not locks.take(self._descriptor[1], locks.EXCLUSIVE, _BYTE, self._timeout_s):
            raise WaitTimeoutError(f"another process writes to {store.name!r} for longer than {self._timeout_s:g} s")
        self._taken = True

    def close(self) -> None:
        """Closes the file, once no other thread has the lock; it can be taken again, which opens the file anew."""
        self._leaves = True
        if self._thread.acquire(blocking=False):
            try:
                if self._depth == 0:
                    self._close_file()
            finally:
                self._thread.release()

    def _close_file(self) -> None:
        self._leaves = False
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor[0] == os.getpid():
            with suppress(OSError):
                os.close(descriptor[1])
