"""Session of a group: one epoch, with the native group that runs its operations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import geartrain._native as _native
from geartrain.collectives.bootstrap import Bootstrap
from geartrain.collectives.buffers import DTYPE_CODES, OPS
from geartrain.collectives.exchange import COLLECTIVES
from geartrain.collectives.faults import REDUCER_LOST, Fault, error_of
from geartrain.collectives.shares import Owners
from geartrain.collectives.work import Work
from geartrain.errors import ArgumentError, ConnectionClosedError, GeartrainError, PeerLostError

_log = logging.getLogger(__name__)
_CAUSE_TIMEOUT_S = 1.0  # for the cause, from a rank whose connection was lost during the bootstrap


@dataclass(frozen=True)
class GroupConfig:
    """Settings of a group.

    Attributes:
        store: where ranks exchange addresses; None for a group of one.
        algorithm: "shares" or "ring".
        native: options of the native group, but for its name, reducers and shares.
    """

    name: str
    rank: int
    world_size: int
    store: Any
    algorithm: str
    native: Mapping[str, Any]


class Session:
    """One epoch of a group. The constructor returns when all members are connected.

    Args:
        config: of the group.
        epoch: its number.
        owners: the reducers and the shares.
        bootstrap: of this epoch.
        elsewhere: of a part of a hierarchical group: the error, as all ranks are numbered, of a fault that another part
            has had and this one was aborted for; None for a fault of this part.

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
        elsewhere: Callable[[Fault], GeartrainError | None] | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.owners = owners
        self.bootstrap = bootstrap
        self._outlives = bool(config.native["outlives_reducers"] and owners.reducers)
        self._next = 0
        reducers, shares = owners.reducers, owners.shares
        options = dict(config.native, name=f"{config.name}/{epoch}", reducers=list(reducers), shares=list(shares))
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
        """Begins an operation, in place. `soon`: its wait follows."""
        self.log_reducers()
        if work.exchange is None:
            native = self.native.all_reduce(
                work.address,
                work.count,
                DTYPE_CODES[work.dtype],
                DTYPE_CODES[work.wire_dtype],
                OPS[work.op],
                work.timeout_s,
                keep=work.array,
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
        work.begin(self, self._next, native)
        self._next += 1

    @property
    def issued(self) -> int:
        """Operations begun in this session."""
        return self._next

    def error_of(self, fault: Fault) -> GeartrainError:
        """A native fault of this session as the error to raise."""
        return error_of(fault, self.config.name, self.config.world_size, self.owners.reducers)

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
