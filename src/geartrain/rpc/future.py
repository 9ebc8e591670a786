"""Futures: results of asynchronous calls. A program can wait for a future, await it, or add a callback."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from _thread import RLock
from collections.abc import Callable, Generator
from typing import Any, Protocol

from geartrain._native import forks
from geartrain.core.arguments import check_function, timeout
from geartrain.core.lifetime import Uncopied
from geartrain.core.threads import ReentrantEvent, held, owns, refuse_within
from geartrain.errors import CallCancelledError, ConnectionClosedError, GeartrainError, WaitTimeoutError
from geartrain.rpc.scheduler import about_to_wait

#: A reply: its kind, value and tag, and the `time.perf_counter()` before it was decoded.
Reply = tuple[int, Any, int, float]
#: Stands for a reply's kind if decoding the reply raised an error, which is the value.
UNDECODABLE = -1


class ReplySource(Protocol):
    """The client that a future waits for: `client.Client`."""

    name: str
    forks: int  # of the process that it belongs to (`_native.forks`)

    def wait(self, tag: int, until_s: float) -> Reply:
        """The reply to a call that was started, waited for until `until_s` in `time.monotonic()`."""

    def value_of(self, reply: Reply, elsewhere: bool = False) -> Any:
        """The result in a reply, or its error, raised."""

    def named(self, error: GeartrainError) -> GeartrainError:
        """The error with the peer's name."""

    def cancel(self, tag: int) -> None:
        """Drops the reply, and has the peer cancel the call."""

    def drop(self, tag: int) -> None:
        """Drops the reply when it comes; the call goes on."""

    def complete_in_background(self, future: Future, tag: int) -> None:
        """Has a thread of the client's wait for the reply, and call `future.finish`."""


class Future(Uncopied, elsewhere="wait for it, and send its result"):
    """Result of a call that was sent. Wait for it with `result`, or `await` it.

    Any thread and any signal handler may use a future, even while another thread waits for it. If the node is closed
    first, the future ends with `ConnectionClosedError`. In a forked child, an unfinished future ends in the same way.
    Dropping a future does not cancel its call.

    Args:
        source, tag, until_s: set by `Node.call_async`, which makes the object.
    """

    _finished = True  # of one whose `__init__` a signal's handler has ended

    def __init__(self, source: ReplySource, tag: int, until_s: float) -> None:
        self._source = source
        self._tag = tag
        self.until_s = until_s  # the call's deadline, in `time.monotonic()`
        self._forks = source.forks
        self._make_locks()
        self._done: ReentrantEvent | None = None  # made when a thread of the client's is to complete it
        self._value: Any = None
        self._error: BaseException | None = None
        self._finished = False
        self._callbacks: list[Callable[[Future], object]] = []

    def _make_locks(self) -> None:
        # Of the state, for moments only; a signal's handler may come in between, in the same thread.
        self._lock = RLock()
        # Held by the thread that waits for the reply; a signal's handler may wait in between.
        self._reading = RLock()

    def result(self, *, timeout_s: float | None = None) -> Any:
        """Waits for the function's result.

        Args:
            timeout_s: longest wait, 0 (does not wait) to 1e9 seconds; by default the call's own deadline, which also
                cancels the call.

        Raises:
            WaitTimeoutError: no result in time.
            RemoteError: the function raised.
            PeerLostError: the peer is lost.
            CallCancelledError: the call was cancelled.
        """
        error = self.exception(timeout_s=timeout_s)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error, self  # the traceback holds this frame, and would hold the connection

    def exception(self, *, timeout_s: float | None = None) -> BaseException | None:
        """Waits as `result` does, and returns the exception that `result` would raise, or None.

        Args:
            timeout_s: as for `result`.

        Raises:
            WaitTimeoutError: no result in time.
        """
        if timeout_s is not None:
            timeout(timeout_s)
        if self._forks != forks():
            self._forked()
        if self._finished:
            return self._error
        now = time.monotonic()
        until_s = self.until_s if timeout_s is None else min(now + timeout_s, self.until_s)
        about_to_wait()
        event = self._done
        if event is None:
            # As `held` does, in a tenth of the time. A handler would wait in vain for a reply that what it
            # interrupts has in hand.
            reading = self._reading
            owned: Callable[[], bool] = reading._is_owned  # type: ignore[attr-defined]
            if owned():
                refuse_within(reading, "a wait for this call")
            try:
                if not reading.acquire(timeout=max(until_s - now, 0.0)):
                    raise WaitTimeoutError(f"no answer from {self._source.name!r} before the deadline")
                event = self._done
                if event is None and not self._finished:
                    self._wait(until_s)
            finally:
                if owned():
                    reading.release()
                if not self._finished and self._callbacks:
                    self._serve_callbacks()
        if event is not None and not event.wait(max(until_s - time.monotonic(), 0.0)):
            raise WaitTimeoutError(f"no answer from {self._source.name!r} before the deadline")
        return self._error

    def _check_process(self) -> None:
        if self._forks != forks():
            self._forked()

    def _forked(self) -> None:
        self._forks = forks()
        self._make_locks()  # another thread of the parent's may hold them, while it waits
        if not self._finished:
            self._error = ConnectionClosedError("the call belongs to the process that this one was forked from")
            self._finished = True
            self._done = None
            self._callbacks = []

    def _wait(self, until_s: float) -> None:
        """Waits for the reply in this thread, which holds `_reading`."""
        try:
            reply = self._source.wait(self._tag, until_s)
        except WaitTimeoutError:
            if until_s < self.until_s:
                raise
            self._source.cancel(self._tag)
            self._settle(
                WaitTimeoutError(f"no answer from {self._source.name!r} before the call's deadline"), elsewhere=False
            )
        except GeartrainError as error:
            self._settle(self._source.named(error), elsewhere=False)
        else:
            self._settle(reply, elsewhere=False)

    def _serve_callbacks(self) -> None:
        """Makes a thread of the client wait for the reply, if callbacks need it and no other thread waits.

        It is also called after a wait that ended without the reply, when `_reading` is free: a thread that adds a
        callback before that leaves the callback to the waiting thread.
        """
        with self._lock:
            if self._callbacks and not self._finished and self._done is None and self._forks == forks():
                with held(self._reading, 0.0) as mine:
                    if mine:  # else the thread that waits calls back
                        self._done = ReentrantEvent()
                        self._source.complete_in_background(self, self._tag)

    def _settle(self, outcome: Reply | BaseException, elsewhere: bool) -> bool:
        """The first outcome counts. Calls back. False when there was one before."""
        value, error = None, None
        if isinstance(outcome, BaseException):
            error = outcome
        elif not self._finished:
            try:
                value = self._source.value_of(outcome, elsewhere)
            except Exception as failure:  # of unpickling, any
                error = failure.with_traceback(None)
        with self._lock:
            if self._finished:
                return False
            self._value, self._error, self._finished = value, error, True
            callbacks, self._callbacks = self._callbacks, []
            if self._done is not None:
                self._done.set()
        for callback in callbacks:
            _call_back(callback, self)
        return True

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        self._check_process()
        if not self._finished and self._done is None and not owns(self._reading):
            with held(self._reading, 0.0) as mine:
                if mine and not self._finished and self._done is None:
                    with contextlib.suppress(WaitTimeoutError):
                        self._wait(time.monotonic())
            if not self._finished and self._callbacks:
                self._serve_callbacks()
        return self._finished

    def cancel(self) -> bool:
        """Cancels the call, here and at the peer. Returns False if the reply is already there."""
        if self.done() or not self._settle(CallCancelledError("the call was cancelled"), elsewhere=True):
            return False
        self._source.cancel(self._tag)
        return True

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Calls a function with this future when it is done, or at once if it is done already.

        The function runs on a thread of the node, or on a thread that waits for the future. Its exceptions are printed.

        Args:
            callback: function of this future.
        """
        check_function("what is called back", callback)
        self._check_process()
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                if not owns(self._reading):
                    self._serve_callbacks()
                return
        _call_back(callback, self)

    def finish(self, outcome: Reply | BaseException) -> None:
        """Internal: completes it with a reply or an error, from another thread than the one that waits."""
        self._settle(outcome, elsewhere=True)

    def __del__(self) -> None:
        if not self._finished and self._forks == forks():
            self._source.drop(self._tag)

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


def _call_back(callback: Callable[[Future], object], future: Future) -> None:
    """Runs a callback. Its exception must not end the thread, because other futures wait for the thread."""
    try:
        callback(future)
    except BaseException:
        traceback.print_exc()


def _settle_once(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
