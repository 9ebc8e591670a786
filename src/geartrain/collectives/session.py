"""One life of a group: its native half, the operations under way in it, and how another one takes them over.

When a reducer is lost, a session is over, but no step of training is: every array that waits still has its input,
since results go into it only when they are complete, and every result that some rank has and others lack is kept there
until all have said that they have it (native/collectives/protocol.h: settled). The ranks meet again under the next
epoch, tell each other what is complete where, hand over what some lack, and repeat the rest in the old order.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain._native as _native
from geartrain.collectives.bootstrap import meet, tell_all
from geartrain.collectives.buffers import DTYPES, OPS, SIZES
from geartrain.collectives.faults import Fault, error_of
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from geartrain.collectives.group import Group, Work

_REDUCER_LOST, _TIMED_OUT = 2, 3
_POOLED = 64  # free buffers for results that are kept warm


class Asked:
    """What a caller wants reduced."""

    def __init__(self, address: int, count: int, dtype: str, wire: str, op: str, timeout_s: float, keep: Any) -> None:
        self.address = address
        self.count = count
        self.dtype = dtype
        self.wire = wire
        self.op = op
        self.timeout_s = timeout_s
        self.keep = keep
        self.nbytes = count * SIZES[dtype]
        self.lock = threading.Lock()


class Issue:
    """An operation of one session: where its result is, when it did not go into the array at once."""

    def __init__(
        self, session: Session, number: int, native: _native.CollectiveWork, result: NDArray[np.uint8] | None
    ) -> None:
        self.session = session
        self.number = number
        self.native = native
        self.result = result

    def complete(self) -> bool:
        """Whether its result is here."""
        return self.native.done() and self.native.fault() is None


class Session:
    """A group between two of its epochs."""

    def __init__(
        self, group: Group, epoch: int, reducers: tuple[str, ...], shares: tuple[float, ...], until_s: float
    ) -> None:
        """Meets the other ranks."""
        self.group = group
        self.epoch = epoch
        self.reducers = reducers
        self.shares = shares
        self._next = 0
        self._kept: deque[tuple[Issue, Work]] = deque()  # what is under way, or may be needed by another rank
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        options = dict(group._options, name=f"{group.name}/{epoch}", reducers=list(reducers), shares=list(shares))
        self.native = _native.CollectiveGroup.make(options)
        settings = {
            "world_size": group.world_size,
            "algorithm": group.algorithm,
            "reducers": reducers,
            "shares": shares,
        }
        try:
            addresses = meet(
                group._store, group.name, epoch, group.rank, group.world_size, self.native.address, settings, until_s
            )
            self.native.connect(addresses, max(until_s - time.monotonic(), 0.1))
        except BaseException as error:
            fault = self.native.fault()  # somebody ended it before this rank had met all
            self.native.close(0.0)
            if fault is not None and isinstance(error, PeerLostError):
                raise self.error_of(fault) from None
            raise

    def issue(self, work: Work, keeps_input: bool) -> None:
        """Begins an operation: into the array, or beside it so that its input stays."""
        self._forget()
        asked = work._asked
        result = self._buffer(asked.nbytes) if keeps_input else None
        native = self.native.all_reduce(
            asked.address,
            asked.address if result is None else result.ctypes.data,
            asked.count,
            DTYPES[asked.dtype],
            DTYPES[asked.wire],
            OPS[asked.op],
            asked.timeout_s,
        )
        work._issue = Issue(self, self._next, native, result)
        self._next += 1
        # Whoever drops the work must not take the array away from under it.
        self._kept.append((work._issue, work))

    def error_of(self, fault: Fault) -> GeartrainError:
        """A native fault of this session, as the error that it is raised as."""
        return error_of(fault, self.group.name, self.group.world_size, self.reducers)

    def lost_reducers(self, fault: Fault) -> tuple[str, ...]:
        """The reducers that a fault is about, if it is about nobody else."""
        kind, _, members = fault
        if kind not in (_REDUCER_LOST, _TIMED_OUT) or not members:
            return ()
        if any(member < self.group.world_size for member in members):
            return ()
        return tuple(self.reducers[member - self.group.world_size] for member in members)

    def close(self, timeout_s: float) -> None:
        """Leaves."""
        self.native.close(timeout_s)
        self._kept.clear()
        self._free.clear()

    # --- results that are kept ----------------------------------------------------------------------------------------

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        free = self._free.get(nbytes)
        return free.pop() if free else np.empty(max(nbytes, 1), np.uint8)

    def _forget(self) -> None:
        """Lets go of operations that are over: of their results once all ranks have them."""
        settled = self.native.settled
        while self._kept and self._kept[0][1].done():
            issue, _ = self._kept[0]
            if issue.result is not None and issue.number >= settled and issue.complete():
                return
            self._kept.popleft()
            if issue.result is not None and sum(map(len, self._free.values())) < _POOLED:
                self._free.setdefault(self._kept_bytes(issue), []).append(issue.result)

    @staticmethod
    def _kept_bytes(issue: Issue) -> int:
        assert issue.result is not None
        return issue.result.nbytes


def reformed(old: Session, lost: tuple[str, ...], rates: Sequence[float] | None, until_s: float) -> Session:
    """The session that takes over from one that is over, or is to be: on all ranks, without the reducers that any of
    them has lost."""
    group = old.group
    old.native.close(0.0)
    complete = [issue.number for issue, _ in old._kept if issue.complete()]
    # Whatever is not kept any more is complete on all ranks.
    first = old._kept[0][0].number if old._kept else old._next
    mine = {"lost": sorted(lost), "first": first, "complete": complete, "next": old._next}
    states = [
        json.loads(state)
        for state in tell_all(
            group._store, group.name, f"{old.epoch + 1}/state", group.rank, group.world_size, json.dumps(mine), until_s
        )
    ]
    gone = {reducer for state in states for reducer in state["lost"]}
    kept = [i for i, reducer in enumerate(old.reducers) if reducer not in gone]
    reducers = tuple(old.reducers[i] for i in kept)
    new = Session(group, old.epoch + 1, reducers, _shares_without(old, kept, rates), until_s)
    if not group._reforms:
        return new  # arrays of what was under way are neither input nor result any more: that has failed
    by_number = {issue.number: (issue, work) for issue, work in old._kept}
    for number in range(min(state["first"] for state in states), max(state["next"] for state in states)):
        holders = [rank for rank, state in enumerate(states) if number < state["first"] or number in state["complete"]]
        if len(holders) == len(states):
            continue
        if holders:
            _hand_over(new, by_number.get(number), min(r for r in holders if number in states[r]["complete"]))
        elif number in by_number:
            new.issue(by_number[number][1], keeps_input=bool(reducers))
    return new


def _hand_over(new: Session, kept: tuple[Issue, Work] | None, holder: int) -> None:
    """One rank's result to those who lack it: the sum of its bytes and everybody else's zeros."""
    assert kept is not None  # whatever is complete somewhere was begun everywhere, and is kept until it is everywhere
    issue, work = kept
    nbytes = work._asked.nbytes
    has = issue.complete()
    # Without a buffer of its own the result is in the array.
    assert issue.result is not None
    if has:
        work._land(issue)
    buffer = issue.result.copy() if has and new.group.rank == holder else np.zeros(max(nbytes, 1), np.uint8)
    address = buffer.ctypes.data
    passed = new.native.all_reduce(address, address, nbytes, DTYPES["uint8"], DTYPES["uint8"], OPS["sum"], 60.0)
    new._next += 1
    if not passed.wait(65.0):
        raise ArgumentError("a result was not handed over")
    fault = passed.fault()
    if fault is not None:
        raise new.error_of(fault)
    if not has:
        issue.result[:] = buffer
        work._land(issue)


def _shares_without(old: Session, kept: list[int], rates: Sequence[float] | None) -> tuple[float, ...]:
    """The shares of those who are left: planned anew from their rates, or the old ones made larger."""
    size = old.group.world_size
    if rates is not None:
        left = [*rates[:size], *(rates[size + i] for i in kept)]
        return pick_shares("auto", size, len(kept), left, old.group.algorithm)
    shares = [*old.shares[:size], *(old.shares[size + i] for i in kept)]
    total = sum(shares)
    if total <= 0:
        return pick_shares("equal", size, len(kept), None, old.group.algorithm)
    return tuple(share / total for share in shares)


def pick_shares(
    shares: str | Sequence[float], world_size: int, reducers: int, rates: Sequence[float] | None, algorithm: str
) -> tuple[float, ...]:
    """The shares of ranks and reducers: as given, equal on the ranks, or the best for the rates of their links."""
    if algorithm == "ring" and (reducers or not isinstance(shares, str)):
        raise ArgumentError("a ring has neither reducers nor shares")
    if isinstance(shares, str):
        if shares not in ("auto", "equal"):
            raise ArgumentError(f'shares is "auto", "equal" or a sequence of numbers, found {shares!r}')
        if shares == "equal" or algorithm == "ring":
            return (*(1.0 / world_size,) * world_size, *(0.0,) * reducers)
        given_rates = [1e9] * (world_size + reducers) if rates is None else [float(rate) for rate in rates]
        if len(given_rates) != world_size + reducers:
            raise ArgumentError(
                f"{world_size} ranks and {reducers} reducers have so many rates, found {len(given_rates)}"
            )
        # How large the array is changes the time, not the shares.
        return tuple(_native.plan_shares(given_rates[:world_size], given_rates[world_size:], 1e9)[0])
    given = tuple(float(share) for share in shares)
    if len(given) != world_size + reducers:
        raise ArgumentError(f"shares are of {world_size} ranks and {reducers} reducers, found {len(given)}")
    return given
