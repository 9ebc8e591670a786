"""`Work`: the handle of an operation in progress."""

from __future__ import annotations

import time
from typing import Any, Protocol

import geartrain.core.trace as trace
from geartrain._native import forks
from geartrain.collectives.buffers import ITEM_SIZES
from geartrain.collectives.exchange import Exchange
from geartrain.collectives.faults import Fault
from geartrain.core.arguments import timeout
from geartrain.core.lifetime import Uncopied
from geartrain.errors import CollectiveClosedError, CollectiveTimeoutError, GeartrainError


class FaultNaming(Protocol):
    """The part of a session that `Work` uses to turn a fault into an error."""

    def error_of(self, fault: Fault) -> GeartrainError:
        """A native fault as the error to raise."""
        ...


class Pending(Protocol):
    """An operation in progress, as a session stores it: a native operation, or an operation in stages."""

    def wait(self, timeout_s: float, /) -> bool:
        """Waits for at most this long. Returns whether the operation is done."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def fault(self) -> Fault | None:
        """Why it failed, once done."""
        ...


class Work(Uncopied, elsewhere="wait for it, and send its result"):
    """An operation in progress. Its arrays belong to the group until it is done. Its group ends it, not a `Lifetime`.

    `Group.all_reduce_async` and its siblings return it.

    Args:
        name, address, count, dtype, wire_dtype, op, timeout_s, array, exchange: set by the group, which makes
            the object.
    """

    __slots__ = (
        "_complete",
        "_forks",
        "_native",
        "_number",
        "_session",
        "address",
        "array",
        "count",
        "dtype",
        "exchange",
        "name",
        "op",
        "timeout_s",
        "trace_arrow",
        "wire_dtype",
    )

    def __init__(
        self,
        name: str,
        address: int,
        count: int,
        dtype: str,
        wire_dtype: str,
        op: str,
        timeout_s: float,
        array: Any,
        exchange: Exchange | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.count = count
        self.dtype = dtype
        self.wire_dtype = wire_dtype
        self.op = op
        self.timeout_s = timeout_s
        self.array = array
        self.exchange = exchange  # None: an all-reduce
        self._session: FaultNaming | None = None  # set by `begin`, with the operation's number there and its handle
        self._number = 0
        self._native: Pending | None = None
        self.trace_arrow: str | None = None  # of a trace, which ends where the result is waited for
        self._forks = forks()
        self._complete = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def what(self) -> str:
        """Name of the collective and of its group, for messages."""
        collective = "all-reduce" if self.exchange is None else self.exchange.collective.replace("_", "-")
        return f"{collective} of {self.name}"

    def begin(self, session: FaultNaming, number: int, native: Pending) -> None:
        """Internal: called by the session that began it, as the operation of that number."""
        self._session, self._number, self._native = session, number, native

    def done(self) -> bool:
        """Whether it has ended, with a result or an error. Returns at once."""
        native = self._native
        if self._complete or native is None or forks() != self._forks:
            return self._complete
        if not native.done():
            return False
        self._complete = native.fault() is None
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the result, and returns the array or the outputs.

        Args:
            timeout_s: longest wait, in seconds. The operation has a deadline of its own, counted from its call; a
                shorter `timeout_s` ends only this wait.

        Raises:
            CollectiveTimeoutError: not complete in time; `ranks` and `reducers` name the members that are behind.
            RankLostError: a rank died, disconnected or left.
            ReducerLostError: a reducer died or disconnected.
            RanksDisagreeError: another rank began a different operation.
            CollectiveClosedError: the group was closed or aborted.
        """
        # The operation's own deadline ends it; what is added covers the event loop's time to report that.
        limit_s = self.timeout_s + 5.0 if timeout_s is None else timeout(timeout_s)
        began_s = 0.0 if self.trace_arrow is None else time.perf_counter()
        if not self._complete:
            if forks() != self._forks:
                raise CollectiveClosedError("this operation belongs to the process that this one was forked from")
            session, native = self._session, self._native
            assert session is not None
            assert native is not None
            if not native.wait(limit_s):
                raise CollectiveTimeoutError(f"group {self.name!r}: the operation is not complete after {limit_s} s")
            fault = native.fault()
            if fault is not None:
                raise session.error_of(fault)
            self._complete = True
        if self.trace_arrow is not None:
            arrow, self.trace_arrow = self.trace_arrow, None
            trace.slice_of(f"wait for {self.what}", "collective", began_s, time.perf_counter(), flow_in=arrow)
        return self.array if self.exchange is None else self.array[0]

    def trace_begin(self, session: str, rank: int, world_size: int, began_s: float) -> None:
        """Internal: traces that this rank began it, in a session of that name."""
        number, ended_s = self._number, time.perf_counter()
        self.trace_arrow, ahead = (f"{session}/{number}/{(rank + n) % world_size}" for n in (0, 1))
        more: dict[str, Any] = {"rank": rank, "number": number, "bytes": self.nbytes, "op": self.op}
        trace.slice_of(f"begin {self.what}", "collective", began_s, ended_s, flow_out=ahead, **more)

    def error(self) -> GeartrainError | None:
        """Error that it ended with; None if it succeeded, or has not ended."""
        session, native = self._session, self._native
        if self._complete or session is None or native is None or forks() != self._forks or not native.done():
            return None
        fault = native.fault()
        return None if fault is None else session.error_of(fault)
