"""A group of ranks that reduce arrays together."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from geartrain.collectives.bootstrap import store_from
from geartrain.collectives.buffers import DTYPES, OPS, memory_of
from geartrain.collectives.faults import Fault
from geartrain.collectives.session import Asked, Issue, Session, pick_shares, reformed
from geartrain.errors import ArgumentError, CollectiveTimeoutError, GeartrainError

ALGORITHMS = ("shares", "ring")
TRANSPORTS = ("auto", "tcp")


class Work:
    """An operation under way. Its array belongs to the group until it is done."""

    def __init__(self, group: Group, asked: Asked) -> None:
        self._group = group
        self._asked = asked
        self._issue: Issue | None = None
        self._landed = False

    def done(self) -> bool:
        """Whether it is over, well or not. Never waits."""
        issue = self._issue
        if self._landed or issue is None:
            return self._landed
        if not issue.native.done():
            return False
        if issue.native.fault() is None:
            self._land(issue)
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits until it is over, and returns the array.

        The operation has a deadline of its own, from its call; a shorter wait here ends only the wait. When a reducer
        was lost and the group goes on without it (`on_reducer_loss`), so does the operation.

        Raises:
            CollectiveTimeoutError: it was not over in time; `ranks` and `reducers` say who is behind.
            RankLostError, ReducerLostError: somebody died, hung up or left.
            RanksDisagreeError: another rank asked for something else.
            CollectiveClosedError: the group was closed here, or aborted.
        """
        # The operation's own deadline ends it; what is added covers the loop's way to say so.
        patience_s = self._asked.timeout_s + 5.0 if timeout_s is None else timeout_s
        while not self._landed:
            issue = self._issue
            assert issue is not None
            if not issue.native.wait(patience_s):
                raise CollectiveTimeoutError(
                    f"group {self._group.name!r}: the operation is not over after {patience_s} s"
                )
            fault = issue.native.fault()
            if fault is None:
                self._land(issue)
            elif not self._group.go_on(issue.session, fault):
                raise issue.session.error_of(fault)
        return self._asked.keep

    def error(self) -> GeartrainError | None:
        """Why it failed; None when it did not, or is not over."""
        issue = self._issue
        if self._landed or issue is None or not issue.native.done():
            return None
        fault = issue.native.fault()
        return None if fault is None else issue.session.error_of(fault)

    def _land(self, issue: Issue) -> None:
        """The result into the array, where it did not go at once."""
        with self._asked.lock:
            if not self._landed and issue.result is not None:
                ctypes.memmove(self._asked.address, issue.result.ctypes.data, self._asked.nbytes)
            self._landed = True


class Group:
    """Ranks that reduce arrays together; one of these on every rank, made with the same arguments but `rank`.

        group = Group(rank, world_size, store=store)
        group.all_reduce(gradient, op="avg")

    Calls are made in the same order on all ranks. They return the same bits on all ranks: numbers are added up in the
    order of the ranks, whoever owns which share (but for `algorithm="ring"`, which adds up around the ring).

    A failure ends the group on every rank, with an error that names who: make another one with the next `epoch`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Any = None,
        init_method: str | None = None,
        name: str = "default",
        reducers: Sequence[str] = (),
        shares: str | Sequence[float] = "auto",
        algorithm: str = "shares",
        rates: Sequence[float] | None = None,
        timeout_s: float = 60.0,
        secret: bytes | str | None = None,
        epoch: int = 0,
        transport: str = "auto",
        host: str | None = None,
        window_bytes: int | None = None,
        on_reducer_loss: str = "raise",
    ) -> None:
        """Meets the other ranks; returns when all are connected.

        Args:
            rank, world_size: this process's number, and of how many.
            store: where ranks find each other: a `torch.distributed` store, or anything with its set, get, check and
                wait. Not needed for a group of one.
            init_method: "tcp://host:port", "env://" or "file:///path" instead of a store; needs torch.
            name: tells groups on one store apart. The same name is used again with another `epoch` only.
            reducers: host:port of each.
            shares: "auto" (the best for `rates`), "equal" (on the ranks), or a number for each rank and each reducer,
                1 in all.
            algorithm: "shares"; or "ring", for networks where ranks reach their neighbours only.
            rates: bytes/s of every rank's and every reducer's link, for shares="auto"; equal when not given.
            timeout_s: of meeting, and of operations that do not say otherwise.
            secret: ranks and reducers must prove that they know it. Without one, ranks are let in who have the key
                that is in the store, and reducers must have none.
            epoch: counts how often the group was made anew.
            transport: "auto" shares memory between members of one host and uses TCP between hosts; "tcp" always.
            host: to listen on; every interface when not given, or loopback for a group of one.
            window_bytes: how far a rank may run ahead of its results; adapts to the network when not given.
            on_reducer_loss: "raise", or "reform": go on without a reducer that died or does not answer. All ranks meet
                again, those who have a result give it to those who do not, and the rest is repeated from the arrays,
                which are not written before all of their result is there. Costs memory for the results under way, and
                a copy of each, when there are reducers.

        Raises:
            WaitTimeoutError: ranks or reducers were not there in time; the message says which.
            RanksDisagreeError: they were told different arguments.
            UntrustedPeerError: somebody has another secret.
        """
        if algorithm not in ALGORITHMS:
            raise ArgumentError(f"algorithm is one of {ALGORITHMS}, found {algorithm!r}")
        if transport not in TRANSPORTS:
            raise ArgumentError(f"transport is one of {TRANSPORTS}, found {transport!r}")
        if store is None and init_method is not None:
            store, rank, world_size = store_from(init_method, rank, world_size, timeout_s)
        if store is None and world_size > 1:
            raise ArgumentError("more than one rank need a store, or an init_method, to find each other")
        if on_reducer_loss not in ("reform", "raise"):
            raise ArgumentError(f'on_reducer_loss is "reform" or "raise", found {on_reducer_loss!r}')
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.algorithm = algorithm
        self.timeout_s = timeout_s
        self._store = store
        self._rates = rates
        self._options: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "ring": algorithm == "ring",
            "secret": secret.encode() if isinstance(secret, str) else secret or b"",
            "shm": transport != "tcp",
            "host": host if host is not None else "127.0.0.1" if world_size == 1 else "0.0.0.0",
            "max_window_bytes": 16 << 20,
        }
        if window_bytes is not None:
            self._options["fixed_window_bytes"] = window_bytes
        self._reforms = on_reducer_loss == "reform" and world_size > 1
        self._lock = threading.Lock()
        picked = pick_shares(shares, world_size, len(reducers), rates, algorithm)
        self._session = Session(self, epoch, tuple(reducers), picked, time.monotonic() + timeout_s)

    @property
    def epoch(self) -> int:
        """How often the group was made anew."""
        return self._session.epoch

    @property
    def reducers(self) -> tuple[str, ...]:
        """host:port of the reducers in use."""
        return self._session.reducers

    @property
    def shares(self) -> tuple[float, ...]:
        """What each rank, and then each reducer, owns of an array."""
        return self._session.shares

    # --- operations ---------------------------------------------------------------------------------------------------

    def all_reduce(
        self, array: Any, op: str = "sum", wire_dtype: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Reduces the array over all ranks, in place, and returns it. See `all_reduce_async`, `Work.wait`."""
        return self.all_reduce_async(array, op, wire_dtype, timeout_s).wait()

    def all_reduce_async(
        self, array: Any, op: str = "sum", wire_dtype: str | None = None, timeout_s: float | None = None
    ) -> Work:
        """Begins to reduce the array over all ranks, in place. Leave it alone until the work is done.

        Several may be under way; all ranks begin them in the same order.

        Args:
            array: a C-contiguous NumPy array, torch tensor on the CPU, or anything with the buffer protocol or DLPack,
                of float32, float64, bfloat16, float16, int8 to int64 or uint8, of any shape. The same number of
                elements on all ranks.
            op: "sum", "avg" (floats only), "min" or "max". 16-bit floats are added up in float32 and rounded once.
            wire_dtype: "bfloat16" or "float16" to halve the bytes of a float32 array: every rank's numbers and the
                result are rounded once each.
            timeout_s: how long it may take, from now; the group's by default.

        Raises:
            ArgumentError: an array or op that cannot be reduced. Other ranks are not disturbed.
        """
        return self.all_reduce_memory(*memory_of(array), op=op, wire_dtype=wire_dtype, timeout_s=timeout_s, keep=array)

    def all_reduce_memory(
        self,
        address: int,
        count: int,
        dtype: str,
        *,
        op: str = "sum",
        wire_dtype: str | None = None,
        timeout_s: float | None = None,
        keep: Any = None,
    ) -> Work:
        """`all_reduce_async` of `count` elements at a memory address, for callers that have no array.

        `keep` is held, and returned by `Work.wait`: whatever owns the memory.
        """
        if op not in OPS:
            raise ArgumentError(f"op is one of {', '.join(OPS)}, found {op!r}")
        for name in (dtype, wire_dtype or dtype):
            if name not in DTYPES:
                raise ArgumentError(f"arrays of {name} are not reduced; there are {', '.join(DTYPES)}")
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        work = Work(self, Asked(address, count, dtype, wire_dtype or dtype, op, timeout_s, keep))
        with self._lock:
            self._session.issue(work, keeps_input=self._reforms and bool(self.reducers))
        return work

    # --- the group ----------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What it has done so far.

        operations, elements, array_bytes; bytes_sent and bytes_received by path ("tcp", "shm"), headers and all;
        reduced_bytes as an owner; links by path; window_bytes and least_delay_us of the flow control; refused
        connections.
        """
        return self._session.native.counts()

    def error(self) -> GeartrainError | None:
        """What ended the group; None while it lives."""
        session = self._session
        fault = session.native.fault()
        return None if fault is None else session.error_of(fault)

    def go_on(self, session: Session, fault: Fault) -> bool:
        """After a fault of a session: whether there is, or can be made, another one without the reducers that are to
        blame. All ranks come here, each when it next waits. Raises what meeting raises.
        """
        with self._lock:
            if self._session is not session:
                return True
            lost = session.lost_reducers(fault)
            if not self._reforms or not lost:
                return False
            self._session = reformed(session, lost, self._rates, time.monotonic() + self.timeout_s)
            return True

    def reform(self, without: Sequence[str] = ()) -> None:
        """Makes the group anew, with the next epoch, without some reducers: called by all ranks, at the same point of
        their order of calls. What is under way is finished by the new one. `Work.wait` does it by itself when a
        reducer is lost; this is for taking one out, or for on_reducer_loss="raise".

        Raises:
            WaitTimeoutError: ranks did not come in time.
            ArgumentError: no reducer of that name.
        """
        unknown = set(without) - set(self.reducers)
        if unknown:
            raise ArgumentError(f"no such reducers: {sorted(unknown)}; there are {list(self.reducers)}")
        with self._lock:
            self._session = reformed(self._session, tuple(without), self._rates, time.monotonic() + self.timeout_s)

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks: their operations raise `CollectiveClosedError` with this reason."""
        self._session.native.abort(reason)

    def close(self, timeout_s: float = 10.0) -> None:
        """Leaves the group: what others still need of this rank is sent first. Works under way here fail."""
        self._session.close(timeout_s)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(0.0 if kind else 10.0)
