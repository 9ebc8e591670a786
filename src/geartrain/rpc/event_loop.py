"""The asyncio loop of a server, which runs its `async def` functions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from concurrent.futures import Future
from types import CoroutineType
from typing import Any, TypeVar

from geartrain.core.lifetime import on_error
from geartrain.errors import ConnectionClosedError
from geartrain.rpc.threads import ThreadGroup

T = TypeVar("T")


class EventLoop:
    """An asyncio loop on a thread of its own, which starts with the first function. Any thread may use it.

    Args:
        name: the node's, for errors.
        threads: where its thread is started.
    """

    def __init__(self, name: str, threads: ThreadGroup) -> None:
        self._name, self._threads = name, threads
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def begin(self, coroutine: CoroutineType[Any, Any, T]) -> Future[T]:
        """Runs a coroutine: a future of its result. Raises `ConnectionClosedError` once closed."""
        guarded = _without_exits(coroutine)
        with on_error(coroutine.close), on_error(guarded.close):
            return asyncio.run_coroutine_threadsafe(guarded, self._running_loop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise ConnectionClosedError(f"the node {self._name!r} was closed")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                with on_error(loop.close):
                    self._threads.start(lambda: self._run(loop), "loops for")
                self._loop = loop
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the loop until it is closed, then cancels running functions. A function cannot end the loop."""
        asyncio.set_event_loop(loop)
        try:
            while not self._closed:
                try:
                    loop.run_forever()
                except BaseException:  # of a callback of theirs
                    traceback.print_exc()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
        finally:
            loop.close()

    def close(self) -> None:
        """Cancels running functions, and ends the thread."""
        with self._lock:
            loop, self._closed = self._loop, True
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # another thread that closes was first
                loop.call_soon_threadsafe(loop.stop)

    def after_fork(self) -> None:
        """In a forked child, which does not have the thread: the lock anew."""
        self._lock, self._loop = threading.Lock(), None


async def _without_exits(coroutine: CoroutineType[Any, Any, T]) -> T:
    """What it returns or raises. SystemExit and KeyboardInterrupt, which would end the loop, become `ExitError`."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise ExitError(error) from None


class ExitError(Exception):
    """Carries a function's SystemExit or KeyboardInterrupt through asyncio."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
