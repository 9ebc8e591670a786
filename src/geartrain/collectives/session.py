"""Session of a group: one epoch, with the native groups that run its operations.

Operations have one stage, a native group of all ranks; or three, of a hierarchical group (hierarchical_stages.py), each
a native group of some ranks.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import geartrain._native as _native
from geartrain.collectives.bootstrap import Bootstrap
from geartrain.collectives.buffers import DTYPE_CODES, OPS
from geartrain.collectives.exchange import COLLECTIVES
from geartrain.collectives.faults import ABORTED, REDUCER_LOST, Fault, as_reason, error_of, from_reason
from geartrain.collectives.hierarchical_stages import HostStages, Stage
from geartrain.collectives.host_map import HostMap
from geartrain.collectives.shares import Owners, pick_shares
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
        hierarchical: reduce within each host first.
        hosts: of a hierarchical session, the name of each rank's host; None: as found.
        shares: as `Group` was given them. Each lane of a hierarchical session has those of its ranks, of sum 1 again.

    Attributes:
        map: of a hierarchical session, which ranks are on which host; else None.

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
        *,
        hierarchical: bool = False,
        hosts: Sequence[Hashable] | None = None,
        shares: str | Sequence[float] = "auto",
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.owners = owners
        self.bootstrap = bootstrap
        self.map: HostMap | None = None
        self._outlives = bool(config.native["outlives_reducers"] and owners.reducers)
        self._next = 0
        if not hierarchical or config.world_size == 1:
            self.native = self._connected(config, owners, bootstrap)
            return
        names = None if hosts is None else [str(name) for name in hosts]
        try:
            bootstrap.exchange_addresses("", {**_settings(config, owners), "hierarchical": True, "hosts": names})
        except GeartrainError as error:
            bootstrap.fail(error)
            raise
        self.map = HostMap.of(bootstrap.hosts if hosts is None else hosts)
        self.native = self._in_stages(self.map, shares, found=hosts is None)
        weakref.finalize(self, self.native.close, 0.0).atexit = False

    def _in_stages(self, hosts: HostMap, shares: str | Sequence[float], found: bool) -> HostStages:
        """Connects this rank's stages. `found`: nobody said which rank is on which host."""
        config = self.config
        host, place = hosts.place_of(config.rank)
        lanes = [self._lane_owners(hosts.lane(lane), shares) for lane in range(hosts.lanes)]
        made: list[Stage] = []

        def stage(name: str, ranks: Sequence[int], of: Owners | None = None) -> Stage | None:
            """Of some ranks: with these owners across hosts, of equal ranks without reducers within one."""
            n = len(ranks)
            if n == 1:
                return None
            rank, algorithm = list(ranks).index(config.rank), "shares" if of is None else config.algorithm
            options = {**config.native, "rank": rank, "world_size": n, "ring": algorithm == "ring"}
            part = GroupConfig(f"{config.name}/{name}", rank, n, config.store, algorithm, options)
            native = self._connected(part, of or Owners((), (1.0 / n,) * n), self.bootstrap.part(name, ranks))
            made.append(Stage(native, ranks))
            return made[-1]

        try:
            within = stage(f"host{host}", hosts.hosts[host])
            across = stage(f"lane{place}", hosts.lane(place), lanes[place]) if place < hosts.lanes else None
            back = stage(f"host{host}/back", hosts.hosts[host])
            if within is not None and found and config.native["shm"] and within.native.counts()["links"]["tcp"]:
                _log.warning(
                    "group %r: rank %d and other ranks that seem to be on its host share no memory: give "
                    "GroupOptions(hosts=) to say which host each rank is on",
                    config.name,
                    config.rank,
                )
            self.owners = self._all_owners(hosts, lanes)
            return HostStages(config.world_size, place, hosts.lanes, within, across, back, config.rank)
        except BaseException as error:
            self.bootstrap.fail(error)  # for ranks that still join, unless a stage has told them
            if self.bootstrap.is_to_blame():
                fault = as_reason((ABORTED, f"rank {config.rank} failed: {error}", [config.rank]))
                for one in made:
                    one.native.abort(fault)
            for one in made:
                one.native.close(0.0)
            raise

    def _lane_owners(self, ranks: Sequence[int], shares: str | Sequence[float]) -> Owners:
        owners, world_size = self.owners, self.config.world_size

        def pick(numbers: Sequence[float]) -> list[float]:
            return [*(numbers[rank] for rank in ranks), *numbers[world_size:]]

        rates = None if owners.rates is None else tuple(pick(owners.rates))
        if not isinstance(shares, str):
            picked = pick([float(share) for share in shares])
            total = sum(picked)
            shares = [share / total for share in picked] if total > 0 else "equal"
        picked_shares = pick_shares(shares, len(ranks), owners.reducers, rates, self.config.algorithm)
        return Owners(owners.reducers, picked_shares, rates)

    def _all_owners(self, hosts: HostMap, lanes: Sequence[Owners]) -> Owners:
        """The owners, with the shares that all lanes together give each."""
        found = [0.0] * (self.config.world_size + len(self.owners.reducers))
        for number, owners in enumerate(lanes):
            members = [*hosts.lane(number), *range(self.config.world_size, len(found))]
            for member, share in zip(members, owners.shares, strict=True):
                found[member] += share / len(lanes)
        return replace(self.owners, shares=tuple(found))

    def _connected(self, config: GroupConfig, owners: Owners, bootstrap: Bootstrap) -> Any:
        """A native group of all or some ranks, once they are connected."""
        reducers, shares = list(owners.reducers), list(owners.shares)
        options = dict(config.native, name=f"{config.name}/{self.epoch}", reducers=reducers, shares=shares)
        native = _native.CollectiveGroup.make(options)
        try:
            addresses = bootstrap.exchange_addresses(native.address, _settings(config, owners))
            with bootstrap.watching(native.abort):
                native.connect(addresses, max(bootstrap.until_s - time.monotonic(), 0.1))
        except BaseException as error:
            try:
                cause = self._cause(error, native.fault(), config, owners, bootstrap)
            finally:
                native.close(0.0)
            if cause is error:
                raise
            raise cause from None
        return native

    def _cause(
        self, error: BaseException, fault: Fault | None, config: GroupConfig, owners: Owners, bootstrap: Bootstrap
    ) -> BaseException:
        """Why this rank cannot join: the cause that another rank published, or its own error, which it publishes."""
        other = None if fault is None or bootstrap.whole is bootstrap else from_reason(fault)
        if other is not None:  # another stage failed while this one was still being made
            return bootstrap.whole.fail(self.error_of(other))

        def named(fault: Fault) -> GeartrainError:
            return error_of(fault, config.name, config.world_size, owners.reducers)

        if isinstance(error, PeerLostError | ArgumentError | ConnectionClosedError):
            # Another member went away, ended the group or refused this one: it knows why, and may say so in a moment.
            until_s = time.monotonic() + _CAUSE_TIMEOUT_S
            while (told := bootstrap.failure()) is None and time.monotonic() < until_s:
                time.sleep(0.02)
            if told is not None:
                return told
            if fault is not None:
                error = named(fault)
        members = getattr(error, "members", None)  # of an error that names whom this rank could not reach
        about = fault if members is None else (REDUCER_LOST, str(error), list(members))
        if not hasattr(error, "reducers") and about is not None:
            whom = named(about)
            vars(error).update(ranks=whom.ranks, reducers=whom.reducers)  # type: ignore[attr-defined]
        return bootstrap.fail(error)

    def issue(self, work: Work, soon: bool = False) -> None:
        """Begins an operation, in place. `soon`: its wait follows, which changes nothing in stages."""
        self.log_reducers()
        native: Any
        if self.map is not None:
            native = self.native.begin(work)
        elif work.exchange is None:
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
            native = self.native.exchange(
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
        """A fault of this session as the error to raise."""
        return error_of(fault, self.config.name, self.config.world_size, self.owners.reducers)

    def log_reducers(self) -> None:
        """Logs each loss, takeover and return of a reducer that was not logged yet."""
        if not self._outlives:
            return
        for event in self.native.reducer_events():
            _log.warning("group %r: %s", self.config.name, event)

    def counts(self) -> dict[str, Any]:
        """Counters of the native group, or of all stages together."""
        self.log_reducers()
        found: dict[str, Any] = self.native.counts()
        return found

    def close(self, timeout_s: float) -> None:
        """Leaves, after sending the data that other members still need, for up to `timeout_s`."""
        self.native.close(timeout_s)
        self.log_reducers()


def _settings(config: GroupConfig, owners: Owners) -> dict[str, Any]:
    """What all ranks must have been given alike."""
    return {
        "world_size": config.world_size,
        "algorithm": config.algorithm,
        "reducers": owners.reducers,
        "shares": owners.shares,
        "hierarchical": False,
    }
