"""`Group`: all-reduce, reduce-scatter, all-gather, all-to-all and broadcast of host arrays among ranks."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import geartrain.core.trace as trace
from geartrain.collectives.bootstrap import Bootstrap
from geartrain.collectives.buffers import buffer_of, check_reduction
from geartrain.collectives.exchange import Exchange, exchange_of
from geartrain.collectives.group_arguments import GroupOptions, checked_config
from geartrain.collectives.host_map import RingOrder
from geartrain.collectives.session import Session
from geartrain.collectives.shares import Owners, pick_shares
from geartrain.collectives.work import Work
from geartrain.core.arguments import check_text, check_texts, timeout
from geartrain.core.lifetime import Lifetime, living
from geartrain.core.process_report import register
from geartrain.core.threads import refuse_within
from geartrain.errors import ArgumentError, CollectiveClosedError, ConnectionClosedError, GeartrainError

_log = logging.getLogger(__name__)


class Group(Lifetime, error=CollectiveClosedError, elsewhere="each rank makes its own, in its process"):
    """A group of ranks for collectives. Every rank makes one, with the same arguments except `rank`.

    All ranks must make their calls in the same order. All ranks get the same bits: elements are summed in rank order,
    whichever member owns which share. `GroupOptions(algorithm="ring")` sums around the ring instead.

    A failure ends the group on every rank. The error names the members that caused it. To continue, make another group
    with the next `epoch`.

    Any thread may call. `close` may be called at any time, more than once. Calls in progress then end with a result or
    `CollectiveClosedError`, and later calls raise `CollectiveClosedError`. The arrays of an operation stay alive until
    the operation ends. A group closes itself when it is garbage-collected, and at the interpreter's exit. A forked
    child cannot use its parent's group.

    Examples:
        >>> import numpy as np
        >>> group = Group(rank=0, world_size=1)  # with more ranks: store=..., or init_method="tcp://..."
        >>> group.all_reduce(np.array([1.0, 2.0]), op="avg").tolist()
        [1.0, 2.0]
        >>> work = group.all_reduce_async(np.ones(3))  # a Work
        >>> work.wait().tolist()
        [1.0, 1.0, 1.0]
        >>> group.close()
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
        hierarchical: bool = False,
        timeout_s: float = 60.0,
        secret: bytes | str | None = None,
        epoch: int = 0,
        options: GroupOptions | None = None,
    ) -> None:
        """Connects to the other members; returns when all ranks and reducers are connected.

        Args:
            rank: number of this process, from 0.
            world_size: number of ranks.
            store: key-value store for the bootstrap: a `torch.distributed` store, or an object with its set, get, check
                and wait. Not needed for a group of one.
            init_method: "tcp://host:port", "env://" or "file:///path" instead of a store; needs torch.
            name: name of the group, unique on its store. Use the same name again only with another `epoch`.
            reducers: "host:port" of each dedicated reducer.
            shares: "auto" (best for `rates`), "equal" (equal on the ranks, none on reducers), or a number for each rank
                and then each reducer, of sum 1.
            hierarchical: all-reduce within each host first, through shared memory, and then across hosts. A host sends
                what one rank would. Elements are summed in rank order within a host, then in the order of the hosts'
                lowest ranks. Other collectives are refused.
            timeout_s: deadline of the bootstrap and default deadline of operations, in seconds.
            secret: ranks and reducers must prove that they know it. Without one, ranks prove that they know the key in
                the store, and reducers must have no secret either.
            epoch: number of this incarnation of the group. Connections of earlier ones are refused.
            options: lost reducers, rates of links, transports and the like.

        Raises:
            ArgumentError: an argument is out of range, or two exclude each other.
            WaitTimeoutError: a rank or reducer did not join in time. The message names it.
            RanksDisagreeError: the ranks have different arguments.
            UntrustedPeerError: a member has another secret.
        """
        reducers = check_texts("reducers", reducers)
        options = GroupOptions() if options is None else options
        config = checked_config(
            rank,
            world_size,
            store=store,
            init_method=init_method,
            name=name,
            timeout_s=timeout_s,
            secret=secret,
            epoch=epoch,
            hierarchical=hierarchical,
            options=options,
        )
        rank, world_size = config.rank, config.world_size
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.algorithm = config.algorithm
        self.timeout_s = timeout_s
        rates = options.rates
        picked = pick_shares(shares, world_size, reducers, rates, config.algorithm)
        owners = Owners(tuple(reducers), picked, None if rates is None else tuple(rates))
        self._lock = threading.RLock()  # of the order of calls
        super().__init__(f"group {name!r}")
        until_s = time.monotonic() + timeout_s
        bootstrap = Bootstrap(config.store, name, epoch, rank, world_size, until_s)
        session: Session | None = None
        try:
            session = Session(
                config, epoch, owners, bootstrap, hierarchical=hierarchical, hosts=options.hosts, shares=shares
            )
            self._session = session
            order = self._ring_order()
            advice = None if order is None or rank != 0 else order.advice()
            if advice is not None:
                _log.warning("group %r: %s", name, advice)
            _alive.add(self)
            register(self, "group", _figures)
        except BaseException as error:  # ranks that still join are told, and those that have joined
            bootstrap.fail(error)
            if session is not None:
                session.native.abort(f"it gave up: {error}")
                session.close(0.0)
            raise

    @property
    def epoch(self) -> int:
        """Number of this incarnation of the group."""
        return self._session.epoch

    @property
    def reducers(self) -> tuple[str, ...]:
        """Addresses ("host:port") of the reducers in use."""
        return self._session.owners.reducers

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of an array that each rank, and then each reducer, owns."""
        return self._session.owners.shares

    # --- operations ---------------------------------------------------------------------------------------------------

    def all_reduce(
        self, array: Any, op: str = "sum", wire_dtype: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Reduces an array over all ranks, in place, and returns it.

        Args:
            array, op, wire_dtype, timeout_s: as for `all_reduce_async`.

        Raises:
            ArgumentError: the array or the op cannot be reduced. Other errors are those of `Work.wait`.
        """
        memory = buffer_of(array)
        return self.all_reduce_memory(
            *memory, op=op, wire_dtype=wire_dtype, timeout_s=timeout_s, keep=array, soon=True
        ).wait()

    def all_reduce_async(
        self, array: Any, op: str = "sum", wire_dtype: str | None = None, timeout_s: float | None = None
    ) -> Work:
        """Begins to reduce an array over all ranks, in place. Do not read or write it until the work is done.

        Several operations may be in progress. All ranks begin them in the same order.

        Args:
            array: a C-contiguous array with the same number of elements on all ranks: a NumPy array, a torch tensor on
                the CPU, or an object with the buffer protocol or DLPack. float32, float64, bfloat16, float16, int8 to
                int64, uint8 to uint64, bool, complex64 or complex128.
            op: "sum", "avg" (floats and complex), "min", "max", "product" (not complex), "band", "bor" or "bxor"
                (integers and bool). 16-bit floats are reduced in float32 and rounded once. The sum of bools is "or".
            wire_dtype: "bfloat16" or "float16" to halve the bytes of a float32 array. Each rank's elements and the
                result are rounded once.
            timeout_s: deadline from now, in seconds; the group's by default.

        Returns:
            The operation in progress.

        Raises:
            ArgumentError: the array or the op cannot be reduced. Other ranks are not affected.
            CollectiveClosedError: the group was closed.
        """
        return self.all_reduce_memory(*buffer_of(array), op=op, wire_dtype=wire_dtype, timeout_s=timeout_s, keep=array)

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
        soon: bool = False,
    ) -> Work:
        """Internal: `all_reduce_async` of `count` elements at a memory address, for callers without an array.

        `keep`: the owner of the memory, which is kept alive and returned by `Work.wait`. `soon`: this thread waits
        next.
        """
        for name in (dtype, dtype if wire_dtype is None else wire_dtype):
            check_reduction(op, name)
        self._check_owner()
        timeout_s = self.timeout_s if timeout_s is None else timeout(timeout_s)
        return self._issue(Work(self.name, address, count, dtype, wire_dtype or dtype, op, timeout_s, keep), soon)

    def _issue(self, work: Work, soon: bool) -> Work:
        began_s = time.perf_counter() if trace.on else 0.0
        refuse_within(self._lock, f"a call of group {self.name!r}")
        try:
            with self._lock:
                session = self._session
                session.issue(work, soon)
        except ConnectionClosedError as error:
            raise self._why_closed(error) from None
        if trace.on:
            work.trace_begin(f"{self.name}/{session.epoch}", self.rank, self.world_size, began_s)
        return work

    # Every other collective: among ranks that all own a share, without reducers, and not by ring. Elements are summed
    # in rank order. Arrays are as those of `all_reduce_async`, of one dtype; sizes may differ from rank to rank. A
    # result may be in the place of this rank's own input, and nowhere else over an input.

    def reduce_scatter(
        self, inputs: Sequence[Any], output: Any, op: str = "sum", timeout_s: float | None = None
    ) -> Any:
        """Reduces `inputs[r]` of all ranks into the `output` of rank r, and returns the output.

        Args:
            inputs, output, op, timeout_s: as for `reduce_scatter_async`.
        """
        return self._exchange(
            exchange_of("reduce_scatter", inputs, [output], op, 0), timeout_s, output, inputs, True
        ).wait()

    def reduce_scatter_async(
        self, inputs: Sequence[Any], output: Any, op: str = "sum", timeout_s: float | None = None
    ) -> Work:
        """Begins to reduce `inputs[r]` of all ranks into the `output` of rank r.

        Do not change the inputs until it is done.

        Args:
            inputs: one array for each rank. `inputs[r]` has the same size on all ranks.
            output: array of the size of this rank's own input.
            op: as for `all_reduce_async`.
            timeout_s: deadline from now, in seconds; the group's by default.

        Returns:
            The operation in progress. It is done when all owners have the inputs.

        Raises:
            ArgumentError: the arrays do not fit each other; or the group has reducers, ranks without a share, or
                algorithm="ring".
            CollectiveClosedError: the group was closed.
        """
        return self._exchange(exchange_of("reduce_scatter", inputs, [output], op, 0), timeout_s, output, inputs)

    def all_gather(self, array: Any, outputs: Sequence[Any], timeout_s: float | None = None) -> Sequence[Any]:
        """Copies the `array` of rank r into `outputs[r]` on all ranks, and returns the outputs.

        Args:
            array, outputs, timeout_s: as for `all_gather_async`.
        """
        asked = exchange_of("all_gather", [array], outputs, "sum", 0)
        result: Sequence[Any] = self._exchange(asked, timeout_s, outputs, array, soon=True).wait()
        return result

    def all_gather_async(self, array: Any, outputs: Sequence[Any], timeout_s: float | None = None) -> Work:
        """Begins to copy the `array` of rank r into `outputs[r]` on all ranks.

        Args:
            array: this rank's array. Do not change it until the work is done.
            outputs: one array for each rank, of the size of that rank's array.
            timeout_s: deadline from now, in seconds; the group's by default.

        Returns:
            The operation in progress.

        Raises:
            ArgumentError, CollectiveClosedError: as for `reduce_scatter_async`.
        """
        return self._exchange(exchange_of("all_gather", [array], outputs, "sum", 0), timeout_s, outputs, array)

    def all_to_all(
        self, inputs: Sequence[Any], outputs: Sequence[Any], timeout_s: float | None = None
    ) -> Sequence[Any]:
        """Copies `inputs[r]` into `outputs[this rank]` on rank r, and returns the outputs.

        Args:
            inputs, outputs, timeout_s: as for `all_to_all_async`.
        """
        asked = exchange_of("all_to_all", inputs, outputs, "sum", 0)
        result: Sequence[Any] = self._exchange(asked, timeout_s, outputs, inputs, soon=True).wait()
        return result

    def all_to_all_async(self, inputs: Sequence[Any], outputs: Sequence[Any], timeout_s: float | None = None) -> Work:
        """Begins to copy `inputs[r]` of every rank into its place among the `outputs` of rank r.

        Args:
            inputs: one array for each rank, of any sizes.
            outputs: one array for each rank, of the size that that rank sends.
            timeout_s: deadline from now, in seconds; the group's by default.

        Returns:
            The operation in progress.

        Raises:
            ArgumentError, CollectiveClosedError: as for `reduce_scatter_async`.
        """
        return self._exchange(exchange_of("all_to_all", inputs, outputs, "sum", 0), timeout_s, outputs, inputs)

    def broadcast(self, array: Any, root: int, timeout_s: float | None = None) -> Any:
        """Copies the array of rank `root` into that of all others, and returns it.

        Args:
            array, root, timeout_s: as for `broadcast_async`.
        """
        return self._exchange(
            exchange_of("broadcast", [array], [array], "sum", root), timeout_s, array, None, True
        ).wait()

    def broadcast_async(self, array: Any, root: int, timeout_s: float | None = None) -> Work:
        """Begins to copy the array of rank `root` into that of all others. A rank that only receives may be done first.

        Args:
            array: array of the same size on all ranks.
            root: rank whose array is copied.
            timeout_s: deadline from now, in seconds; the group's by default.

        Returns:
            The operation in progress.

        Raises:
            ArgumentError, CollectiveClosedError: as for `reduce_scatter_async`.
        """
        return self._exchange(exchange_of("broadcast", [array], [array], "sum", root), timeout_s, array, None)

    def exchange_memory(
        self, exchange: Exchange, timeout_s: float | None = None, keep: Any = None, soon: bool = False
    ) -> Work:
        """Internal: begins an exchange of numbers at memory addresses. `keep`, `soon`: as for `all_reduce_memory`."""
        return self._exchange(exchange, timeout_s, keep, None, soon)

    def _exchange(
        self, exchange: Exchange, timeout_s: float | None, result: Any, inputs: Any, soon: bool = False
    ) -> Work:
        self._check_owner()
        timeout_s = self.timeout_s if timeout_s is None else timeout(timeout_s)
        session = self._session
        if session.map is not None:
            raise ArgumentError(f"a hierarchical group can only all-reduce: {exchange.collective} is refused")
        if self.algorithm == "ring" or session.owners.reducers or min(self.shares) <= 0:
            raise ArgumentError(
                f"{exchange.collective} needs a group whose ranks all own a share, without reducers and "
                f'algorithm="ring"; this one has shares {self.shares}, {len(self.reducers)} reducers and '
                f"algorithm {self.algorithm!r}"
            )
        work = Work(
            self.name,
            *(0, 0),
            exchange.dtype,
            exchange.dtype,
            exchange.op,
            timeout_s,
            (result, inputs),
            exchange.checked(self.world_size),
        )
        return self._issue(work, soon)

    def _why_closed(self, error: ConnectionClosedError) -> GeartrainError:
        """The error to raise if the native group refuses a call because it was closed."""
        if isinstance(error, CollectiveClosedError):
            return error
        return CollectiveClosedError(f"group {self.name!r} was closed")

    # --- the group ----------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """Counters of this group since its epoch began.

        | key | meaning |
        |---|---|
        | operations, elements, array_bytes | operations that ended, and their size |
        | by_callers | operations that ended on a thread that waited for them |
        | bytes_sent, bytes_received | by path ("tcp", "shm"), with headers |
        | reduced_bytes | bytes summed as an owner |
        | read_bytes, read_operations | read out of other ranks' memory instead of sent |
        | read_denied | links whose peer's memory was readable until the kernel denied it |
        | links | number of links by path |
        | window_bytes, least_delay_us | state of the flow control |
        | refused | connections refused |
        | lost_reducers, reducer_losses, reducer_returns | reducers lost now, and losses and returns so far |
        | taken_over_bytes | bytes reduced in place of lost reducers |
        | ring | of a ring: hops between hosts (`crossings`) and the fewest of any order (`least_crossings`) |
        """
        self._check_owner()
        try:
            found: dict[str, Any] = self._session.counts()
        except ConnectionClosedError as error:
            raise self._why_closed(error) from None
        if (order := self._ring_order()) is not None:
            found["ring"] = {"crossings": order.crossings, "least_crossings": order.least}
        return found

    def _ring_order(self) -> RingOrder | None:
        """Of a ring in rank order; a hierarchical one has a rank of every host."""
        if self.algorithm != "ring" or self._session.map is not None:
            return None
        return RingOrder.of(self._session.bootstrap.hosts)

    def error(self) -> GeartrainError | None:
        """Error that ended the group; None while it is usable."""
        try:
            self._check_owner()
        except CollectiveClosedError as error:
            return error
        fault = (session := self._session).native.fault()
        return None if fault is None else session.error_of(fault)

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks. Their operations raise `CollectiveClosedError` with this reason.

        Args:
            reason: text of the error.
        """
        self._check_owner()
        self._session.native.abort(check_text("the reason", reason))

    def close(self, timeout_s: float = 10.0) -> None:
        """Leaves the group, after sending the data that other members still need.

        Operations in progress here get a moment to complete and then fail. `close` then takes less than a second.

        Args:
            timeout_s: longest wait until the other members have what they need, in seconds.
        """
        timeout(timeout_s)
        if self._forked:
            return
        self._session.close(timeout_s)

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.close(0.0 if kind else 10.0)


def _figures(group: Group) -> dict[str, Any]:
    """For the process's report. The rank with the fewest operations `issued` is the one that the others wait for."""
    error = group.error()
    return {
        "name": group.name,
        "rank": group.rank,
        "world_size": group.world_size,
        "epoch": group.epoch,
        "reducers": list(group.reducers),
        "issued": group._session.issued,
        "failed": "" if error is None else str(error),
        **group.counters(),
    }


# Before the interpreter drops the arrays of their operations.
_alive: weakref.WeakSet[Group] = living(at_exit=lambda group: group.close(1.0))
