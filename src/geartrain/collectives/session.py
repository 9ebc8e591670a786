"""Session: one epoch of a group, its operations in progress, and their continuation in the next epoch.

Losing a reducer ends a session, but no training step: every waiting array still has its input, because results are
copied into it only when complete, and every result that some rank has and others lack is kept until all ranks have
acknowledged it (native/collectives/protocol.h: settled). The ranks bootstrap again under the next epoch, all-gather
which operations are complete where, broadcast the results that some ranks lack, and issue the rest again in the old
order.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain._native as _native
from geartrain.collectives.bootstrap import all_gather_text, exchange_addresses
from geartrain.collectives.buffers import DTYPE_CODES, OPS
from geartrain.collectives.faults import REDUCER_LOST, TIMED_OUT, Fault, error_of
from geartrain.collectives.shares import Owners
from geartrain.collectives.work import Issue, Work
from geartrain.errors import CollectiveTimeoutError, GeartrainError, PeerLostError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_FREE = 64  # result buffers that are kept for reuse
_BROADCAST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class GroupConfig:
    """What stays the same over all epochs of a group.

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
    """One epoch of a group. Returns from its constructor when all members are connected.

    Args:
        config: of the group.
        epoch: its number.
        owners: the reducers and the shares.
        until_s: deadline (`time.monotonic`) of the bootstrap.

    Raises:
        WaitTimeoutError, RanksDisagreeError, UntrustedPeerError: as `Group`.
    """

    def __init__(self, config: GroupConfig, epoch: int, owners: Owners, until_s: float) -> None:
        self.config = config
        self.epoch = epoch
        self.owners = owners
        self._keeps_input = config.reissues and bool(owners.reducers)
        self._next = 0
        self._kept: deque[tuple[Issue, Work]] = deque()  # in progress, or still needed by another rank
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        reducers, shares = owners.reducers, owners.shares
        options = dict(config.native, name=f"{config.name}/{epoch}", reducers=list(reducers), shares=list(shares))
        self.native = _native.CollectiveGroup.make(options)
        settings = {
            "world_size": config.world_size,
            "algorithm": config.algorithm,
            "reducers": reducers,
            "shares": shares,
        }
        try:
            addresses = exchange_addresses(
                config.store,
                config.name,
                epoch,
                config.rank,
                config.world_size,
                self.native.address,
                settings,
                until_s,
            )
            self.native.connect(addresses, max(until_s - time.monotonic(), 0.1))
        except BaseException as error:
            fault = self.native.fault()  # another member ended it before this rank had connected to all
            self.native.close(0.0)
            if fault is not None and isinstance(error, PeerLostError):
                raise self.error_of(fault) from None
            raise

    def issue(self, work: Work) -> None:
        """Begins an operation: in place, or into a buffer where its input has to stay."""
        self._release_settled()
        result = self._buffer(work.nbytes) if self._keeps_input else None
        native = self.native.all_reduce(
            work.address,
            work.address if result is None else result.ctypes.data,
            work.count,
            DTYPE_CODES[work.dtype],
            DTYPE_CODES[work.wire_dtype],
            OPS[work.op],
            work.timeout_s,
        )
        work.issue = issue = Issue(self, self._next, native, result)
        self._next += 1
        # The array stays alive even if the caller drops the work.
        self._kept.append((issue, work))

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

    def close(self, timeout_s: float) -> None:
        """Leaves, after sending what other members still need, for up to `timeout_s`."""
        self.native.close(timeout_s)
        self._kept.clear()
        self._free.clear()

    # --- kept results -------------------------------------------------------------------------------------------------

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        free = self._free.get(nbytes)
        return free.pop() if free else np.empty(max(nbytes, 1), np.uint8)

    def _release_settled(self) -> None:
        """Releases operations that have ended; those with a kept result once all ranks have acknowledged theirs."""
        settled = self.native.settled
        while self._kept and self._kept[0][1].done():
            issue, _ = self._kept[0]
            result = issue.result
            if result is not None and issue.number >= settled and issue.succeeded():
                return
            self._kept.popleft()
            if result is not None and sum(map(len, self._free.values())) < _MOST_FREE:
                self._free.setdefault(result.nbytes, []).append(result)


def next_session(old: Session, lost: tuple[str, ...], until_s: float) -> Session:
    """The session of the next epoch, on all ranks, without the reducers that any rank has lost.

    Ends the old session; its operations in progress are completed or issued again, if the group reissues.
    """
    config = old.config
    old.native.close(0.0)
    complete = [issue.number for issue, _ in old._kept if issue.succeeded()]
    # Operations that are no longer kept are complete on all ranks.
    first = old._kept[0][0].number if old._kept else old._next
    mine = {"lost": sorted(lost), "first": first, "complete": complete, "next": old._next}
    states = [
        json.loads(state)
        for state in all_gather_text(
            config.store,
            config.name,
            f"{old.epoch + 1}/state",
            config.rank,
            config.world_size,
            json.dumps(mine),
            until_s,
        )
    ]
    owners = old.owners.without({reducer for state in states for reducer in state["lost"]}, config.algorithm)
    new = Session(config, old.epoch + 1, owners, until_s)
    if not config.reissues:
        return new  # without kept inputs, operations in progress have failed
    by_number = {issue.number: (issue, work) for issue, work in old._kept}
    for number in range(min(state["first"] for state in states), max(state["next"] for state in states)):
        holders = [rank for rank, state in enumerate(states) if number < state["first"] or number in state["complete"]]
        if len(holders) == len(states):
            continue
        if holders:
            _broadcast(new, by_number.get(number), min(r for r in holders if number in states[r]["complete"]))
        elif number in by_number:
            new.issue(by_number[number][1])
    return new


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
    sent = new.native.all_reduce(address, address, nbytes, code, code, OPS["sum"], _BROADCAST_TIMEOUT_S)
    new._next += 1
    if not sent.wait(_BROADCAST_TIMEOUT_S + 5.0):
        raise CollectiveTimeoutError(f"group {new.config.name!r}: the broadcast of a kept result did not end")
    fault = sent.fault()
    if fault is not None:
        raise new.error_of(fault)
    if not complete:
        issue.result[:] = buffer
        work.complete(issue)
