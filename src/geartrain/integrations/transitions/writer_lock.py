"""Lock of those who write to a store: one thread of one process at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import geartrain.core.locks as locks
from geartrain.errors import StoreClosedError, WaitTimeoutError
from geartrain.store.store import Store

# The byte of the store's file that is locked.
_BYTE = 1 << 20


class WriterLock:
    """A lock of threads, and with a store of processes as well; may be nested, also by a signal's handler at any line.

    A forked child has a lock of its own, which is free.

    Args:
        timeout_s: longest wait for another thread, and for another process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread = threading.RLock()
        self._depth = 0
        self._taken = False  # since it was dropped last
        self._files: dict[int, int] = {}  # process, and its descriptor of the store's file
        self._leaves = False  # whoever has the lock closes the file
        _locks.add(self)

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
        try:
            with self.thread():
                # From here on a signal's handler that closes leaves the file to the end of this.
                self._depth += 1
                try:
                    self._take(store)
                    yield
                finally:
                    self._leave()
        finally:
            if self._leaves and self._depth == 0:  # closed by a thread that found the lock taken
                self.close()

    def _take(self, store: Store) -> None:
        """Takes the lock of processes. Of one that this process has it is free, and leaves no doubt: a handler may have
        interrupted what drops it."""
        mine = os.getpid()
        file = self._files.get(mine)
        if file is None:
            try:
                opened = os.open(store.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise StoreClosedError(f"the store {store.name!r} was closed meanwhile, and is gone") from error
            file = self._files.setdefault(mine, opened)
            if file != opened:  # a handler has opened it meanwhile, and may have the lock by that
                os.close(opened)
        if not locks.take(file, locks.EXCLUSIVE, _BYTE, self._timeout_s):
            raise WaitTimeoutError(f"another process writes to {store.name!r} for longer than {self._timeout_s:g} s")
        self._taken = True

    def _leave(self) -> None:
        """Drops the lock of processes at the end of the outermost use."""
        while True:
            if self._depth == 1:
                self._taken = False
                file = self._files.get(os.getpid())
                if file is not None:
                    locks.drop(file, _BYTE)
            self._depth -= 1
            if self._depth or not self._taken:
                break
            self._depth += 1  # a handler has taken it in between, within this use, and leaves it to this
        if self._depth == 0 and self._leaves:
            self._close_file()

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
        self._leaves = self._taken = False
        file = self._files.pop(os.getpid(), None)
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent's may have the lock, and copies of its file would keep it."""
        files, self._files = self._files, {}
        for file in files.values():
            with suppress(OSError):
                os.close(file)
        self._taken = False
        if not self._thread._is_owned():  # type: ignore[attr-defined]
            self._thread, self._depth = threading.RLock(), 0


_locks: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_locks):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
