"""Futures: results of asynchronous calls, to be waited for, awaited or called back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import geartrain._native as _native
from geartrain.core.arguments import timeout
from geartrain.errors import CallCancelledError, ConnectionClosedError, GeartrainError, WaitTimeoutError
from geartrain.rpc.running import about_to_wait


class ReplySource(Protocol):
    """The client that a future waits for: `client.Client`."""

    name: str
    calls: _native.Calls

    def value_of(self, message: _native.Message, elsewhere: bool = False) -> Any:
        """The result in a reply, or its error, raised."""

    def named(self, error: GeartrainError) -> GeartrainError:
        """The error with the peer's name."""

    def cancel(self, tag: int) -> None:
        """Drops the reply, and has the peer cancel the call."""

    def complete_in_background(self, future: Future, tag: int) -> None:
        """Has a thread of the client's wait for the reply, and call `future.finish`."""


class Future:
    """The result of a call that was sent. Wait for it with `result`, or `await` it.

    Any threads may use it. When its node is closed it ends with `ConnectionClosedError`, if it was not done before. In
    a forked child one that was not done has that error.
    """

    def __init__(self, source: ReplySource, tag: int, until_s: float) -> None:
        self._source = source
        self._tag = tag
        self.until_s = until_s  # the call's deadline, in `time.monotonic()`
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # made when another thread is to complete it
        self._value: Any = None
        self._error: BaseException | None = None
        self._finished = False
        self._pid = os.getpid()
        self._callbacks: list[Callable[[Future], object]] = []

    def result(self, *, timeout_s: float | None = None) -> Any:
        """The function's result.

        Args:
            timeout_s: from 0, which does not wait, to 1e9; by default the call's own deadline, which cancels it.

        Raises:
            WaitTimeoutError: not there in time.
            RemoteError: the function raised. PeerLostError, CallCancelledError: there will be none.
        """
        error = self.exception(timeout_s=timeout_s)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error, self  # the traceback holds this frame, and would hold the connection

    def exception(self, *, timeout_s: float | None = None) -> BaseException | None:
        """What `result` would raise, or None; waits as it does."""
        if timeout_s is not None:
            timeout(timeout_s)
        self._check_process()
        left_s = self.until_s - time.monotonic()
        wait_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if not self._finished:
            about_to_wait()
        with self._lock:
            event = self._done
            if not self._finished and event is None:
                self._wait(max(wait_s, 0.0), cancels=timeout_s is None or timeout_s >= left_s)
        if event is not None and not event.wait(max(wait_s, 0.0)):
            raise WaitTimeoutError(f"no answer from {self._source.name!r} before the deadline")
        return self._error

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.Lock()  # another thread of the parent's may hold it, while it waits
            if not self._finished:
                self._error = ConnectionClosedError("the call belongs to the process that this one was forked from")
                self._finished = True
                self._done = None
                self._callbacks = []

    def _wait(self, wait_s: float, cancels: bool) -> None:
        try:
            self._settle(self._source.calls.wait(self._tag, wait_s))
        except WaitTimeoutError:
            if not cancels:
                raise
            self._source.cancel(self._tag)
            self._error = WaitTimeoutError(f"no answer from {self._source.name!r} before the call's deadline")
            self._finished = True
        except GeartrainError as error:
            self._error = self._source.named(error)
            self._finished = True

    def _settle(self, message: _native.Message, elsewhere: bool = False) -> None:
        try:
            self._value = self._source.value_of(message, elsewhere)
        except GeartrainError as error:
            self._error = error.with_traceback(None)
        self._finished = True

    def done(self) -> bool:
        """Whether `result` would not wait."""
        self._check_process()
        if not self._finished and self._done is None:
            with contextlib.suppress(WaitTimeoutError):
                self.exception(timeout_s=0.0)
        return self._finished

    def cancel(self) -> bool:
        """Cancels the call, here and at the peer. False when the reply is already there."""
        if self.done():
            return False
        self._source.cancel(self._tag)
        self.finish(CallCancelledError("the call was cancelled"))
        return True

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Calls back with this future when it is done: from a thread of geartrain's, or at once."""
        self._check_process()
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                if self._done is None:
                    self._done = threading.Event()
                    self._source.complete_in_background(self, self._tag)
                return
        callback(self)

    def finish(self, outcome: _native.Message | BaseException) -> None:
        """For the client: completes it with a reply or an error, from another thread than the one that waits."""
        with self._lock:
            if self._finished:
                return
            if isinstance(outcome, BaseException):
                self._error = outcome
                self._finished = True
            else:
                self._settle(outcome, elsewhere=True)
            callbacks, self._callbacks = self._callbacks, []
            if self._done is not None:
                self._done.set()
        for callback in callbacks:
            callback(self)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()

        def wake(_: Future) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_settle_once, waiting)

        self.add_done_callback(wake)
        try:
            yield from waiting
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()


def _settle_once(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
