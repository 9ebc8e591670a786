"""Writer lock of a store: only one thread of one process writes at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import geartrain.core.locks as locks
from geartrain.core.lifetime import living
from geartrain.errors import StoreClosedError, WaitTimeoutError
from geartrain.store.store import Store

# The byte of the store's file that is locked.
_BYTE = 1 << 20


class _Use:
    """One use of the lock. `left`: it is over, and has been left."""

    left = False


class _Uses(threading.local):
    def __init__(self) -> None:
        self.uses: set[_Use] = set()


def _owns(lock: threading.RLock) -> bool:
    return bool(lock._is_owned())  # type: ignore[attr-defined]


def _release(lock: threading.RLock, uses: set[_Use], use: _Use) -> None:
    uses.discard(use)
    while not uses and _owns(lock):
        with suppress(RuntimeError):  # a handler has used and released it in between
            lock.release()


class WriterLock:
    """A lock of threads, and with a store of processes as well; may be nested, also by a signal's handler at any line.

    A handler may raise at any line, too: the lock is free once its exception's traceback is dropped. What ends a use is
    done again, from its beginning, where an exception has cut it short, and changes nothing when it was done before.

    A forked child has a lock of its own, which is free.

    Args:
        timeout_s: longest wait for another thread, and for another process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread = threading.RLock()
        self._here = _Uses()  # of the lock of threads, by each thread
        self._uses: set[_Use] = set()  # of the lock of processes, by the thread that has the other one
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
        with self._held(self._timeout_s) as taken:
            if not taken:
                raise WaitTimeoutError(f"another thread writes to the store for longer than {self._timeout_s:g} s")
            yield

    @contextmanager
    def _held(self, timeout_s: float) -> Iterator[bool]:
        """Waits for the lock of threads; whether this thread has it. Without uses of the thread's it is released."""
        lock, uses, use = self._thread, self._here.uses, _Use()
        try:
            try:
                uses.add(use)
                yield _owns(lock) or lock.acquire(timeout=timeout_s)
            finally:
                _release(lock, uses, use)
        finally:
            _release(lock, uses, use)  # where a handler has raised

    @contextmanager
    def locked(self, store: Store) -> Iterator[None]:
        """Keeps other threads and processes.

        Raises:
            WaitTimeoutError: another thread or process writes for too long.
            StoreClosedError: the store was closed meanwhile, as its last handle.
        """
        use = _Use()
        try:
            with self.thread():
                try:
                    try:
                        # From here on a signal's handler that closes leaves the file to the end of this.
                        self._uses.add(use)
                        self._take(store)
                        yield
                    finally:
                        self._leave(use)
                finally:
                    self._leave(use)  # where a handler has raised
        finally:
            if self._leaves and not self._uses:  # closed by a thread that found the lock taken
                self.close()

    def _take(self, store: Store) -> None:
        """Takes the lock of processes. Of one that this process has it is free, and leaves no doubt: a handler may have
        interrupted what drops it."""
        mine = os.getpid()
        file = self._files.get(mine)
        if file is None:
            try:
                self._open(store, mine)
            except FileNotFoundError as error:
                raise StoreClosedError(f"the store {store.name!r} was closed meanwhile, and is gone") from error
            file = self._files[mine]
        if not locks.take(file, locks.EXCLUSIVE, _BYTE, self._timeout_s):
            raise WaitTimeoutError(f"another process writes to {store.name!r} for longer than {self._timeout_s:g} s")
        self._taken = True

    def _open(self, store: Store, mine: int) -> None:
        opened: list[int] = []
        try:
            try:
                opened.append(os.open(store.path, os.O_RDWR | os.O_CLOEXEC))
                self._files.setdefault(mine, opened[0])
            finally:
                self._close_unless_kept(opened, mine)
        finally:
            self._close_unless_kept(opened, mine)

    def _close_unless_kept(self, opened: list[int], mine: int) -> None:
        """A handler has opened the file meanwhile, and may have the lock by that; or has raised."""
        while opened and self._files.get(mine) != opened[0]:
            os.close(opened.pop())

    def _leave(self, use: _Use) -> None:
        """Drops the lock of processes at the end of the outermost use."""
        while not use.left:
            if self._uses - {use}:  # the one around it drops it
                self._uses.discard(use)
                use.left = True
                return
            self._uses.add(use)  # uses of handlers are within this one
            self._taken = False
            file = self._files.get(os.getpid())
            if file is not None:
                locks.drop(file, _BYTE)
            self._uses.discard(use)
            use.left = not self._taken  # else a handler has taken it in between, within this use, and leaves it to this
        if self._leaves and not self._uses:
            self._close_file()

    def close(self) -> None:
        """Closes the file, once no other thread has the lock; it can be taken again, which opens the file anew."""
        self._leaves = True
        with self._held(0.0) as taken:
            if taken and not self._uses:
                self._close_file()

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
        if not _owns(self._thread):
            self._thread, self._uses = threading.RLock(), set()


_locks = living(after_fork=WriterLock.after_fork)
