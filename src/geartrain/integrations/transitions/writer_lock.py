"""Writer lock of a store: only one thread of one process writes at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import geartrain.core.locks as locks
from geartrain.core.lifetime import living
from geartrain.core.threads import held, owns
from geartrain.errors import StoreClosedError, WaitTimeoutError
from geartrain.store.store import Store

# The byte of the store's file that is locked.
_BYTE = 1 << 20


class WriterLock:
    """A lock of threads, and with a store of processes as well. Uses may be nested, also by a signal handler.

    A forked child has a lock of its own, which is free.

    Args:
        timeout_s: longest wait for another thread, and for another process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread = threading.RLock()
        self._uses: set[object] = set()  # of the lock of processes, by the thread that has the other one
        self._files: list[int] = []  # the store's; one more where a handler has interrupted the opening
        self._leaves = False  # whoever has the lock closes the file at the end of the use
        _locks.add(self)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Keeps other threads of this process.

        Raises:
            WaitTimeoutError: another thread writes for too long.
        """
        try:
            with held(self._thread, self._timeout_s) as taken:
                if not taken:
                    raise WaitTimeoutError(f"another thread writes to the store for longer than {self._timeout_s:g} s")
                yield
        finally:
            if self._leaves:
                self.close()

    @contextmanager
    def locked(self, store: Store) -> Iterator[None]:
        """Keeps other threads and processes.

        Raises:
            WaitTimeoutError: another thread or process writes for too long.
            StoreClosedError: the store was closed meanwhile, as its last handle.
        """
        use = object()
        with self.thread():
            try:
                self._uses.add(use)
                self._take(store)
                yield
            finally:
                self._uses.discard(use)
                if not self._uses and self._files:
                    locks.drop(self._files[0], _BYTE)

    def _take(self, store: Store) -> None:
        """Takes the lock of processes. That has no effect if this process has it."""
        if not self._files:
            try:
                self._files.append(os.open(store.path, os.O_RDWR | os.O_CLOEXEC))
            except FileNotFoundError as error:
                raise StoreClosedError(f"the store {store.name!r} was closed meanwhile, and is gone") from error
        if not locks.take(self._files[0], locks.EXCLUSIVE, _BYTE, self._timeout_s):
            raise WaitTimeoutError(f"another process writes to {store.name!r} for longer than {self._timeout_s:g} s")

    def close(self) -> None:
        """Closes the file, once no other thread has the lock; it can be taken again, which opens the file anew."""
        self._leaves = True
        if owns(self._thread):
            return  # at the end of the use
        with held(self._thread, 0.0) as taken:
            if taken:
                self._leaves = False
                self._close_files()

    def _close_files(self) -> None:
        with suppress(IndexError):  # there are no more
            while True:
                os.close(self._files.pop())

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent's may have the lock, and copies of its file would keep it."""
        self._close_files()
        if not owns(self._thread):
            self._thread, self._uses = threading.RLock(), set()


_locks = living(after_fork=WriterLock.after_fork)
