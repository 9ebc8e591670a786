"""The three stages of a hierarchical all-reduce: within the host, across hosts, and within the host again.

A piece of an array, on two hosts of three ranks:

    host 0     rank 0: a0 b0 c0     reduce-scatter    A0         lanes across hosts    A0+A1       all-gather
               rank 1: a1 b1 c1     within the host      B0      lane 0: ranks 0, 3       B0+B1    within the host
               rank 2: a2 b2 c2                             C0   lane 1: ranks 1, 4          C0+C1
    host 1     rank 3: ...                            A1         lane 2: ranks 2, 5    A0+A1       ...

Lanes. After the reduce-scatter, every rank has one part of its host's sum. It all-reduces this part with the ranks at
the same place on the other hosts. These ranks form a *lane*. The traffic between hosts therefore does not grow with the
number of ranks per host: it is the traffic of one rank per host. Each lane is a native group of its own, with the
group's shares, reducers or ring. If hosts differ in size, there are as many lanes as the smallest host has ranks. The
other ranks take part within their host only.

Order of sums. Values are summed in rank order within each host, and then host by host. Hosts are ordered by their
lowest rank. The order depends only on the map of ranks to hosts, not on lanes, shares or arrival. A ring of hosts sums
in its own order, which gives the same bits on all ranks for the same map.

Rounding. Each of the two levels rounds 16-bit floats once. If an average is rounded in this way, the values are divided
by the number of all ranks first, within each host.

Arrays are cut into pieces of `PIECE_BYTES`, and the stages of different pieces overlap. Everything happens in place.
The caller issues the first stage. Two threads issue the second and the third stage. Each follows the order of the
calls, which is the same on all ranks.

If one stage's native group fails, all stages of the rank end with the same text and the same members. The
fault reaches every rank in this way.

Within the host, an operation has its own deadline. Across hosts the deadline is one second later, and in the third
stage two seconds later. A rank that hangs is therefore named by its own host.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import geartrain._native as _native
from geartrain.collectives.buffers import DTYPE_CODES, ITEM_SIZES, OPS
from geartrain.collectives.exchange import COLLECTIVES
from geartrain.collectives.faults import ABORTED, CLOSED, Fault, as_reason, from_reason, renumbered_text
from geartrain.collectives.host_map import cut
from geartrain.collectives.work import Work
from geartrain.core.lifetime import on_error
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ArgumentError, ConnectionClosedError, GeartrainError

PIECE_BYTES = 4 << 20
#: (array dtype, wire dtype): pairs that are supported between hosts.
_WIRES = {("float32", "bfloat16"), ("float32", "float16")}
#: Each stage's deadline is this much later than the previous one's, so that the first stage to wait names the rank.
STAGE_S = 1.0
_END_S = 2.0  # of `close`, for stages that end by the same deadline
_MOMENT_S = 0.3  # of `close`, for all operations in progress together


@dataclass
class Stage:
    """A native group of some of the ranks, with their rank numbers in the whole group."""

    native: Any
    ranks: Sequence[int]

    def as_whole(self, fault: Fault, reducers_from: int) -> Fault:
        """The fault as all ranks number it; one that another stage has had, as that stage's rank has told it."""
        told = from_reason(fault)
        if told is not None:
            return told
        kind, text, members = fault
        n = len(self.ranks)
        found = [self.ranks[m] if m < n else reducers_from + m - n for m in members]
        return kind, renumbered_text(text, self.ranks), found


class StagedOperation:
    """One all-reduce in stages, with the interface that `Work` needs."""

    def __init__(self, stages: HostStages, work: Work, pieces: int) -> None:
        self.stages = stages
        self.until_s = time.monotonic() + work.timeout_s
        self.dtype, self.wire, self.op, self.keep = work.dtype, work.wire_dtype, work.op, work.array
        #: Whether some stage averages 16-bit floats: their sum may overflow although the average does not.
        self.divides_first = work.op == "avg" and (ITEM_SIZES[work.dtype] == 2 or work.wire_dtype != work.dtype)
        self.elements = work.count
        #: Values that each stage compares among its ranks, in addition to the stage itself.
        self.whole = (work.count, OPS[work.op], DTYPE_CODES[work.wire_dtype], stages.world_size)
        self.left = pieces  # whose last stage is not issued
        self.works: list[tuple[Stage, Any]] = []
        self.issued = ReentrantEvent()
        self.failed: Fault | None = None

    def remaining_s(self, which: int) -> float:
        """Until the deadline of its stage 0, 1 or 2."""
        return max(self.until_s + which * STAGE_S - time.monotonic(), 0.001)

    def done(self) -> bool:
        """Whether it has ended, and no stage uses the array any more."""
        return self.issued.is_set() and all(work.done() for _, work in self.works)

    def wait(self, timeout_s: float) -> bool:
        """False at the deadline of this wait."""
        until_s = time.monotonic() + timeout_s
        if not self.issued.wait(timeout_s):
            return False
        return all(work.wait(max(until_s - time.monotonic(), 0.0)) for _, work in self.works)

    def fault(self) -> Fault | None:
        """Why it failed, once done."""
        if self.failed is None:
            for stage, work in self.works:
                fault = work.fault()
                if fault is not None:
                    self.failed = self.stages.failed(stage, fault)
                    break
        return self.failed


@dataclass
class _Piece:
    operation: StagedOperation
    address: int
    parts: list[tuple[int, int]]  # start and elements of each lane
    number: int
    first: Any = None  # native works of the stages
    second: Any = None


@dataclass
class HostStages:
    """This rank's stages, the operations in progress, and the threads that issue the second and third stages."""

    world_size: int
    place: int  # of this rank on its host
    lanes: int
    within: Stage | None  # None where the host has one rank
    across: Stage | None  # None on a rank without a lane, and where there is one host
    back: Stage | None
    rank: int
    first_fault: Fault | None = None
    open: deque[StagedOperation] = field(default_factory=deque)
    pieces: int = 0
    counted: dict[str, int] = field(default_factory=lambda: {"operations": 0, "elements": 0, "array_bytes": 0})

    def __post_init__(self) -> None:
        self.lock = threading.RLock()  # a collection of garbage within it may end in a caller's finalizer
        self.pid = os.getpid()
        self.ended = False
        self.summed: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self.crossed: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        with on_error(self.summed.put, None):  # ends the one that was started
            for name, run in (("across", self._run_across), ("back", self._run_back)):
                DaemonThread(run, f"geartrain-{name}").start()

    def each(self) -> list[Stage]:
        """The stages that exist."""
        return [stage for stage in (self.within, self.across, self.back) if stage is not None]

    # --- stages -------------------------------------------------------------------------------------------------------

    def begin(self, work: Work) -> StagedOperation:
        """Issues the first stage of each piece. By one thread at a time.

        Raises `ConnectionClosedError` where `close` comes first, or in the middle: after its end no piece is moved; and
        `ArgumentError` for a dtype that is not sent as asked.
        """
        if work.wire_dtype != work.dtype and (work.dtype, work.wire_dtype) not in _WIRES:
            raise ArgumentError(f"{work.dtype} cannot be sent as {work.wire_dtype}")
        size = ITEM_SIZES[work.dtype]
        per_piece = PIECE_BYTES // size
        starts = range(0, work.count, per_piece) if work.count else range(1)
        operation = StagedOperation(self, work, len(starts))
        for i, start in enumerate(starts):
            count = min(per_piece, work.count - start)
            number = self.pieces + i
            piece = _Piece(operation, work.address + start * size, cut(count, size, self.lanes, number), number)
            try:
                if self.within is not None:
                    piece.first = self._run(piece, self.within, "reduce_scatter", 0)
                with self.lock:  # or it would stand behind the end, where no thread takes it
                    if self.ended:
                        raise ConnectionClosedError("the group was closed")
                    self.summed.put(piece)
            except BaseException:
                if i > 0:  # closed in the middle: what was issued ends by itself
                    operation.failed = CLOSED, "the group was closed", []
                raise
        self.pieces += len(starts)
        with self.lock:
            self.open.append(operation)
        self._count_done()
        return operation

    def _segments(self, piece: _Piece, stage: Stage) -> list[tuple[int, int]]:
        size = ITEM_SIZES[piece.operation.dtype]
        found = [(piece.address + start * size, count) for start, count in piece.parts]
        return found + [(piece.address, 0)] * (len(stage.ranks) - self.lanes)

    def _run(self, piece: _Piece, stage: Stage, collective: str, which: int) -> Any:
        """A reduce-scatter or all-gather of the piece, in place."""
        operation = piece.operation
        every = self._segments(piece, stage)
        own = [every[self.place]]
        native = stage.native.exchange(
            COLLECTIVES[collective],
            every if which == 0 else own,
            own if which == 0 else every,
            DTYPE_CODES[operation.dtype],
            self._op(operation, stage) if which == 0 else OPS["sum"],
            0,
            operation.remaining_s(which),
            keep=operation.keep,
            whole=operation.whole,
        )
        operation.works.append((stage, native))
        return native

    def _op(self, operation: StagedOperation, stage: Stage) -> int:
        """What a stage does. One that averages divides by the number of all ranks before it rounds."""
        if operation.op != "avg":
            return OPS[operation.op]
        divides = stage is self.within or len(stage.ranks) == self.world_size
        return OPS["avg" if operation.divides_first and divides else "sum"]

    def _divide(self, address: int, count: int, operation: StagedOperation) -> None:
        _native.divide_memory(address, count, DTYPE_CODES[operation.dtype], self.world_size)

    def _cross(self, piece: _Piece) -> None:
        """The second stage: an all-reduce of this rank's part with its lane."""
        operation = piece.operation
        count = sum(elements for _, elements in piece.parts)
        mine = piece.parts[self.place][1] if self.place < self.lanes else 0
        turn = self.place == piece.number % self.lanes
        if self.across is None or (not mine and (count or not turn)):
            return
        address, _ = self._segments(piece, self.across)[self.place]
        if operation.divides_first and self.within is None and len(self.across.ranks) < self.world_size:
            self._divide(address, mine, operation)
        piece.second = self.across.native.all_reduce(
            address,
            mine,
            DTYPE_CODES[operation.dtype],
            DTYPE_CODES[operation.wire],
            self._op(operation, self.across),
            operation.remaining_s(1),
            keep=operation.keep,
            whole=operation.whole,
        )
        operation.works.append((self.across, piece.second))

    def _run_across(self) -> None:
        self._move(self.summed, self.crossed, lambda piece: (self.within, piece.first), self._cross)

    def _run_back(self) -> None:
        self._move(self.crossed, None, lambda piece: (self.across, piece.second), self._return)

    def _return(self, piece: _Piece) -> None:
        """The third stage: sends the lanes' results to all ranks of the host."""
        operation = piece.operation
        if operation.op == "avg" and not operation.divides_first and self.place < self.lanes:
            start, count = piece.parts[self.place]
            self._divide(piece.address + start * ITEM_SIZES[operation.dtype], count, operation)
        if self.back is not None:
            self._run(piece, self.back, "all_gather", 2)

    def _move(
        self,
        source: queue.SimpleQueue[_Piece | None],
        target: queue.SimpleQueue[_Piece | None] | None,
        before: Callable[[_Piece], tuple[Stage | None, Any]],
        issue: Callable[[_Piece], None],
    ) -> None:
        """Issues a stage of piece after piece, once the stage before is done; of a failed operation none."""
        while self._step(source.get(), target, before, issue):
            pass  # nothing is held between pieces, or their arrays would live until the next

    def _step(
        self,
        piece: _Piece | None,
        target: queue.SimpleQueue[_Piece | None] | None,
        before: Callable[[_Piece], tuple[Stage | None, Any]],
        issue: Callable[[_Piece], None],
    ) -> bool:
        """False after the last piece."""
        if piece is None:
            if target is not None:
                target.put(None)
            return False
        operation = piece.operation
        stage, work = before(piece)
        try:
            if stage is not None and work is not None:
                while not work.wait(3600.0):  # it has a deadline of its own
                    pass
                fault = work.fault()
                if fault is not None and operation.failed is None:
                    operation.failed = self.failed(stage, fault)
            if operation.failed is None:
                issue(piece)
        except Exception as error:
            operation.failed = operation.failed or self._fault_of(error)
        if target is not None:
            target.put(piece)
            return True
        operation.left -= 1
        if operation.left == 0:
            operation.issued.set()
        return True

    # --- faults -------------------------------------------------------------------------------------------------------

    def failed(self, stage: Stage, fault: Fault) -> Fault:
        """Ends all stages, after a fault of one; returns the first fault, as all ranks are numbered."""
        return self._end(stage.as_whole(fault, self.world_size))

    def _fault_of(self, error: Exception) -> Fault:
        if isinstance(error, GeartrainError) and self.ended:
            return CLOSED, "the group was closed", []
        return self._end((ABORTED, f"rank {self.rank} failed: {error}", [self.rank]))

    def _end(self, fault: Fault) -> Fault:
        with self.lock:
            first = self.first_fault is None
            if self.first_fault is None:
                self.first_fault = fault
            known = self.first_fault
        if first and fault[0] != CLOSED:
            told = as_reason(fault)
            for stage in self.each():
                stage.native.abort(told)
        return known

    def fault(self) -> Fault | None:
        """The first fault of any stage."""
        if self.first_fault is None:
            for stage in self.each():
                fault = stage.native.fault()
                if fault is not None:
                    return self.failed(stage, fault)
        return self.first_fault

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks."""
        self._end((ABORTED, f"rank {self.rank} aborted: {reason}", [self.rank]))

    # --- the end, counters --------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Ends the stages, after a moment for operations in progress, and the threads."""
        if os.getpid() != self.pid:
            return
        until_s = time.monotonic() + timeout_s
        moment_s = min(until_s, time.monotonic() + _MOMENT_S)
        with self.lock:
            operations = list(self.open)
        for operation in operations:
            if self.first_fault is None and not operation.done():
                operation.wait(max(moment_s - time.monotonic(), 0.0))
        with self.lock:
            if not self.ended:
                self.summed.put(None)
            self.ended = True
        ends = []
        for stage in self.each():
            left = (max(until_s - time.monotonic(), 0.0),)
            end = DaemonThread(stage.native.close, "geartrain-close", left)
            try:
                end.start()
                ends.append(end)
            except GeartrainError:  # no more threads: one after the other, by the same deadline
                stage.native.close(*left)
        for end in ends:
            # A signal's handler that interrupts the start of a thread has a lock that these need: they end after it.
            end.join(max(until_s - time.monotonic(), 0.0) + _END_S)

    def _count_done(self) -> None:
        with self.lock:
            while self.open and self.open[0].done():
                operation = self.open.popleft()
                if operation.failed is None and all(work.fault() is None for _, work in operation.works):
                    self.counted["operations"] += 1
                    self.counted["elements"] += operation.elements
                    self.counted["array_bytes"] += operation.elements * ITEM_SIZES[operation.dtype]

    def counts(self) -> dict[str, Any]:
        """As of a native group, of all stages together; the window is that between hosts."""
        self._count_done()
        each = [(stage, stage.native.counts()) for stage in self.each()]
        found: dict[str, Any] = dict(self.counted)
        found["reduced_bytes"] = sum(counts["reduced_bytes"] for _, counts in each)
        for key in ("bytes_sent", "bytes_received", "links"):
            found[key] = {path: sum(counts[key][path] for _, counts in each) for path in ("tcp", "shm")}
        across = next((counts for stage, counts in each if stage is self.across), None)
        for key in ("window_bytes", "least_delay_us"):
            found[key] = 0 if across is None else across[key]
        for key in (
            "refused",
            "read_bytes",
            "read_operations",
            "read_denied",
            "lost_reducers",
            "taken_over_bytes",
            "reducer_losses",
            "reducer_returns",
        ):
            found[key] = sum(counts[key] for _, counts in each)
        return found
