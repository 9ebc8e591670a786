"""Session of a group: one epoch, with the operations in progress.

If a reducer is lost, the next session continues them.

A lost reducer ends the session, but no training step is lost. Two rules make this possible:

- Every unfinished operation still has its input, because a result is copied into the array only when it is complete.
- A result that some ranks have and others lack is kept until all ranks have acknowledged it ("settled" in
  native/collectives/protocol.h).

The ranks recover in four steps:

1. They bootstrap again under the next epoch. A reducer that does not answer is left out by all ranks.
2. They all-gather which operations are complete on which rank.
3. They broadcast the results that some ranks lack.
4. They issue the other operations again, in the old order.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain._native as _native
from geartrain.collectives.bootstrap import Bootstrap
from geartrain.collectives.buffers import DTYPE_CODES, OPS
from geartrain.collectives.exchange import COLLECTIVES
from geartrain.collectives.faults import REDUCER_LOST, TIMED_OUT, Fault, error_of
from geartrain.collectives.probe import unreachable
from geartrain.collectives.shares import Owners
from geartrain.collectives.work import Issue, Work
from geartrain.core.threads import ReentrantEvent
from geartrain.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    ConnectionClosedError,
    GeartrainError,
    PeerLostError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)
_MOST_FREE = 64  # result buffers that are kept for reuse
_BROADCAST_TIMEOUT_S = 60.0
_REDUCER_PATIENCE_S = 5.0  # for a reducer that was there in the epoch before
_CAUSE_TIMEOUT_S = 1.0  # for the cause, from a rank whose connection was lost during the bootstrap


@dataclass(frozen=True)
class GroupConfig:
    """Settings that stay the same over all epochs of a group.

    Attributes:
        store: where ranks exchange addresses; None for a group of one.
        algorithm: "shares" or "ring".
        reissues: whether operations continue in the next session after a reducer was lost, so that their inputs and
            results have to be kept.
        native: options of the native group, but for its name, reducers and shares.
    """

    name: str
    rank: int
    world_size: int
    store: Any
    algorithm: str
    reissues: bool
    native: Mapping[str, Any]


class Session:
    """One epoch of a group. The constructor returns when all members are connected.

    Args:
        config: of the group.
        epoch: its number.
        owners: the reducers and the shares.
        bootstrap: of this epoch.
        reducer_patience_s: how long a reducer that does not answer is tried again; None: to the bootstrap's deadline.
        elsewhere: of a part of a hierarchical group: the error, as all ranks are numbered, of a fault that another part
            has had and this one was aborted for; None for a fault of this part.

    Attributes:
        failure: why there is no next session after this one was lost; raised to all that wait.

    Raises:
        WaitTimeoutError, RanksDisagreeError, UntrustedPeerError: as `Group`; the same on all ranks. `reducers` and
            `ranks` of the error name the members that could not be reached, if that is the cause.
    """

    def __init__(
        self,
        config: GroupConfig,
        epoch: int,
        owners: Owners,
        bootstrap: Bootstrap,
        reducer_patience_s: float | None = None,
        elsewhere: Callable[[Fault], GeartrainError | None] | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.owners = owners
        self.bootstrap = bootstrap
        self.keeps_input = config.reissues and bool(owners.reducers)
        self.failure: GeartrainError | None = None
        self._outlives = bool(config.native["outlives_reducers"] and owners.reducers)
        self._next = 0
        self._kept: deque[tuple[Issue, Work]] = deque()  # in progress, or still needed by another rank
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        reducers, shares = owners.reducers, owners.shares
        options = dict(config.native, name=f"{config.name}/{epoch}", reducers=list(reducers), shares=list(shares))
        if reducer_patience_s is not None:
            options["reducer_patience_s"] = reducer_patience_s
        self.native = _native.CollectiveGroup.make(options)
        settings = {
            "world_size": config.world_size,
            "algorithm": config.algorithm,
            "reducers": reducers,
            "shares": shares,
            "hierarchical": False,
        }
        try:
            addresses = bootstrap.exchange_addresses(self.native.address, settings)
            with bootstrap.watching(self.native.abort):
                self.native.connect(addresses, max(bootstrap.until_s - time.monotonic(), 0.1))
        except BaseException as error:
            try:
                cause = self._cause(error, bootstrap, elsewhere)
            finally:
                self.native.close(0.0)
            if cause is error:
                raise
            raise cause from None

    def _cause(
        self,
        error: BaseException,
        bootstrap: Bootstrap,
        elsewhere: Callable[[Fault], GeartrainError | None] | None,
    ) -> BaseException:
        """Why this rank cannot join: the cause that another rank published, or its own error, which it publishes."""
        bootstrap.raise_if_stopped()
        fault = self.native.fault()
        other = None if fault is None or elsewhere is None else elsewhere(fault)
        if other is not None:
            return bootstrap.whole.fail(other)
        if isinstance(error, PeerLostError | ArgumentError | ConnectionClosedError):
            # Another member went away, ended the group or refused this one: it knows why, and may say so in a moment.
            until_s = time.monotonic() + _CAUSE_TIMEOUT_S
            while (told := bootstrap.failure()) is None and time.monotonic() < until_s:
                time.sleep(0.02)
            if told is not None:
                return told
            if fault is not None:
                error = self.error_of(fault)
        members = getattr(error, "members", None)  # of an error that names whom this rank could not reach
        about = fault if members is None else (REDUCER_LOST, str(error), list(members))
        if not hasattr(error, "reducers") and about is not None:
            named = self.error_of(about)
            vars(error).update(ranks=named.ranks, reducers=named.reducers)  # type: ignore[attr-defined]
        return bootstrap.fail(error)

    def issue(self, work: Work, soon: bool = False) -> None:
        """Begins an operation: in place, or into a buffer where its input has to stay. `soon`: its wait follows."""
        self._release_settled()
        self.log_reducers()
        result = self._buffer(work.nbytes) if self.keeps_input else None
        if work.exchange is None:
            native = self.native.all_reduce(
                work.address,
                work.address if result is None else result.ctypes.data,
                work.count,
                DTYPE_CODES[work.dtype],
                DTYPE_CODES[work.wire_dtype],
                OPS[work.op],
                work.timeout_s,
                keep=(work.array, result),
                soon=soon,
            )
        else:
            asked = work.exchange
            native = self.native.run(
                COLLECTIVES[asked.collective],
                asked.sends,
                asked.receives,
                DTYPE_CODES[asked.dtype],
                OPS[asked.op],
                asked.root,
                work.timeout_s,
                keep=work.array,
                soon=soon,
            )
        work.issue = issue = Issue(self, self._next, native, result)
        self._next += 1
        self._kept.append((issue, work))

    @property
    def issued(self) -> int:
        """Operations begun in this session."""
        return self._next

    def error_of(self, fault: Fault) -> GeartrainError:
        """A native fault of this session as the error to raise."""
        return error_of(fault, self.config.name, self.config.world_size, self.owners.reducers)

    def lost_reducers(self, fault: Fault) -> tuple[str, ...]:
        """The reducers that a fault is about; empty if it names a rank, or no member."""
        kind, _, members = fault
        world_size = self.config.world_size
        if kind not in (REDUCER_LOST, TIMED_OUT) or not members:
            return ()
        if any(member < world_size for member in members):
            return ()
        return tuple(self.owners.reducers[member - world_size] for member in members)

    def log_reducers(self) -> None:
        """Logs each loss, takeover and return of a reducer that was not logged yet."""
        if not self._outlives:
            return
        for event in self.native.reducer_events():
            _log.warning("group %r: %s", self.config.name, event)

    def counts(self) -> dict[str, Any]:
        """Counters of the native group."""
        self.log_reducers()
        found: dict[str, Any] = self.native.counts()
        return found

    def close(self, timeout_s: float) -> None:
        """Leaves, after sending the data that other members still need, for up to `timeout_s`."""
        self.native.close(timeout_s)
        self.log_reducers()

    def release(self) -> None:
        """Releases what was kept for other ranks, after `close`; by who may issue."""
        self._kept.clear()
        self._free.clear()

    # --- kept results -------------------------------------------------------------------------------------------------

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        free = self._free.get(nbytes)
        return free.pop() if free else np.empty(max(nbytes, 1), np.uint8)

    def _release_settled(self) -> None:
        """Releases operations that have ended. A kept result is released once all ranks have acknowledged theirs."""
        settled = self.native.settled
        while self._kept and self._kept[0][1].done():
            issue, _ = self._kept[0]
            result = issue.result
            if result is not None and issue.number >= settled and issue.succeeded():
                return
            self._kept.popleft()
            if result is not None and sum(map(len, self._free.values())) < _MOST_FREE:
                self._free.setdefault(result.nbytes, []).append(result)


def next_session(old: Session, lost: tuple[str, ...], until_s: float, stopped: ReentrantEvent) -> Session:
    """The session of the next epoch, on all ranks, without the reducers that any rank has lost.

    Ends the old session; its operations in progress are completed or issued again, if the group reissues. Where a
    reducer turns out to be gone too, the epoch after that is tried, without it.
    """
    config = old.config
    old.native.close(0.0)
    complete = [issue.number for issue, _ in old._kept if issue.succeeded()]
    # Operations that are no longer kept are complete on all ranks.
    first = old._kept[0][0].number if old._kept else old._next
    gone = set(lost)
    epoch = old.epoch

    def check() -> None:  # failures that are about reducers end this epoch on all ranks, others the group
        for failure in (bootstrap.failure(), old.bootstrap.failure()):  # of the old one: a rank has closed the group
            if failure is not None and not getattr(failure, "reducers", ()):
                raise failure

    while True:
        epoch += 1
        bootstrap = Bootstrap(config.store, config.name, epoch, config.rank, config.world_size, until_s, stopped)
        try:
            gone |= unreachable(set(old.owners.reducers) - gone)
            mine = {"lost": sorted(gone), "first": first, "complete": complete, "next": old._next}
            states = [json.loads(state) for state in bootstrap.all_gather("state", json.dumps(mine), check)]
            owners = old.owners.without({reducer for state in states for reducer in state["lost"]}, config.algorithm)
            new, lost_now = _connect_unless_lost(config, epoch, owners, bootstrap, check)
        except BaseException as error:
            bootstrap.leave() if stopped.is_set() else bootstrap.fail(error)
            raise
        gone = set(old.owners.reducers) - set(owners.reducers) | lost_now
        if not lost_now:
            assert new is not None
            break
        if new is not None:
            new.native.close(0.0)
    try:
        if config.reissues:  # without kept inputs, operations in progress have failed
            _continue(old, new, states)
    except BaseException:
        new.native.close(0.0)
        raise
    return new


def _continue(old: Session, new: Session, states: list[dict[str, Any]]) -> None:
    """Completes the operations in progress in the next session, from where each rank is in the old one (`states`)."""
    by_number = {issue.number: (issue, work) for issue, work in old._kept}
    for number in range(min(state["first"] for state in states), max(state["next"] for state in states)):
        holders = [rank for rank, state in enumerate(states) if number < state["first"] or number in state["complete"]]
        if len(holders) == len(states):
            continue
        if holders:
            _broadcast(new, by_number.get(number), min(r for r in holders if number in states[r]["complete"]))
        elif number in by_number:
            new.issue(by_number[number][1])


def _connect_unless_lost(
    config: GroupConfig, epoch: int, owners: Owners, bootstrap: Bootstrap, check: Callable[[], None]
) -> tuple[Session | None, set[str]]:
    """A session of these owners, or the reducers that some rank did not reach. All ranks get the same answer."""
    lost: set[str] = set()
    new = None
    try:
        new = Session(config, epoch, owners, bootstrap, _REDUCER_PATIENCE_S)
    except GeartrainError as error:
        lost = set(owners.reducers).intersection(getattr(error, "reducers", ()))
        if not lost:
            raise
    try:
        outcomes = bootstrap.all_gather("lost", json.dumps(sorted(lost)), check)
    except BaseException:
        if new is not None:
            new.native.close(0.0)
        raise
    return new, {reducer for outcome in outcomes for reducer in json.loads(outcome)}


def _broadcast(new: Session, kept: tuple[Issue, Work] | None, source: int) -> None:
    """One rank's result to the ranks that lack it: an all-reduce of its bytes and zeros from all other ranks."""
    assert kept is not None  # complete on one rank means begun on all, and kept until complete on all
    issue, work = kept
    nbytes = work.nbytes
    complete = issue.succeeded()
    assert issue.result is not None  # sessions that reissue keep results in buffers
    if complete:
        work.complete(issue)
    has_bytes = complete and new.config.rank == source
    buffer = issue.result.copy() if has_bytes else np.zeros(max(nbytes, 1), np.uint8)
    address, code = buffer.ctypes.data, DTYPE_CODES["uint8"]
    sent = new.native.all_reduce(address, address, nbytes, code, code, OPS["sum"], _BROADCAST_TIMEOUT_S, buffer)
    new._next += 1
    if not sent.wait(_BROADCAST_TIMEOUT_S + 5.0):
        raise CollectiveTimeoutError(f"group {new.config.name!r}: the broadcast of a kept result did not end")
    fault = sent.fault()
    if fault is not None:
        raise new.error_of(fault)
    if not complete:
        issue.result[:] = buffer
        work.complete(issue)
