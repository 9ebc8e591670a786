"""Session of a hierarchical all-reduce: first within each host, then across hosts, then within each host again.

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

hierarchical_stages.py moves the pieces.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from geartrain.collectives.bootstrap import Bootstrap
from geartrain.collectives.faults import ABORTED, Fault, as_reason, error_of, from_reason
from geartrain.collectives.hierarchical_stages import GroupPart, HostStages
from geartrain.collectives.host_map import HostMap
from geartrain.collectives.session import GroupConfig, Session
from geartrain.collectives.shares import Owners, pick_shares
from geartrain.collectives.work import Work
from geartrain.errors import ArgumentError, CollectiveClosedError, GeartrainError

_log = logging.getLogger(__name__)

#: (array dtype, wire dtype): pairs that are supported between hosts.
_WIRES = {("float32", "bfloat16"), ("float32", "float16")}


class HierarchicalSession:
    """One epoch of a hierarchical group. It takes the place of `Session`. Its `native` stands for all parts as one.

    Args:
        config: of the group.
        epoch: its number.
        owners: the reducers, and rates of the links.
        bootstrap: of this epoch.
        shares: as `Group` was given them; each lane has those of its ranks, of sum 1 again.
        hosts: the name of each rank's host; None: as found.

    Attributes:
        map: which ranks are on which host.

    Raises:
        WaitTimeoutError, RanksDisagreeError, UntrustedPeerError: as `Group`; the same on all ranks.
    """

    def __init__(
        self,
        config: GroupConfig,
        epoch: int,
        owners: Owners,
        bootstrap: Bootstrap,
        *,
        shares: str | Sequence[float],
        hosts: Sequence[Hashable] | None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.bootstrap = bootstrap
        self._next = 0
        settings = {
            "world_size": config.world_size,
            "algorithm": config.algorithm,
            "reducers": owners.reducers,
            "shares": owners.shares,
            "hierarchical": True,
            "hosts": None if hosts is None else [str(name) for name in hosts],
        }
        try:
            bootstrap.exchange_addresses("", settings)
        except GeartrainError as error:
            bootstrap.fail(error)
            raise
        self.map = HostMap.of(bootstrap.hosts if hosts is None else hosts)
        host, place = self.map.place_of(config.rank)
        lane_owners = [self._lane_owners(owners, shares, lane) for lane in range(self.map.lanes)]
        self.owners = replace(owners, shares=self._all_shares(lane_owners))
        made: list[GroupPart] = []

        def part(name: str, ranks: Sequence[int], of: Owners | None) -> GroupPart | None:
            if len(ranks) == 1:
                return None
            made.append(self._part(name, ranks, of))
            return made[-1]

        try:
            within = part(f"host{host}", self.map.hosts[host], None)
            across = part(f"lane{place}", self.map.lane(place), lane_owners[place]) if place < self.map.lanes else None
            back = part(f"host{host}/back", self.map.hosts[host], None)
            if within is not None and hosts is None and config.native["shm"] and within.native.counts()["links"]["tcp"]:
                _log.warning(
                    "group %r: rank %d and other ranks that seem to be on its host share no memory: give "
                    "GroupOptions(hosts=) to say which host each rank is on",
                    config.name,
                    config.rank,
                )
            self.native = HostStages(config.world_size, place, self.map.lanes, within, across, back, config.rank)
        except BaseException as error:
            bootstrap.fail(error)  # for ranks that still join, unless a part has told them
            if bootstrap.is_to_blame():
                fault = as_reason((ABORTED, f"rank {config.rank} failed: {error}", [config.rank]))
                for one in made:
                    one.native.abort(fault)
            for one in made:
                one.native.close(0.0)
            raise
        weakref.finalize(self, self.native.close, 0.0).atexit = False

    def _lane_owners(self, owners: Owners, shares: str | Sequence[float], lane: int) -> Owners:
        ranks, reducers, world_size = self.map.lane(lane), owners.reducers, self.config.world_size

        def pick(numbers: Sequence[float]) -> list[float]:
            return [*(numbers[rank] for rank in ranks), *numbers[world_size:]]

        rates = None if owners.rates is None else tuple(pick(owners.rates))
        if not isinstance(shares, str):
            picked = pick([float(share) for share in shares])
            total = sum(picked)
            shares = [share / total for share in picked] if total > 0 else "equal"
        return Owners(reducers, pick_shares(shares, len(ranks), reducers, rates, self.config.algorithm), rates)

    def _all_shares(self, lanes: Sequence[Owners]) -> tuple[float, ...]:
        found = [0.0] * (self.config.world_size + len(lanes[0].reducers))
        for number, owners in enumerate(lanes):
            members = [*self.map.lane(number), *range(self.config.world_size, len(found))]
            for member, share in zip(members, owners.shares, strict=True):
                found[member] += share / len(lanes)
        return tuple(found)

    def _part(self, name: str, ranks: Sequence[int], owners: Owners | None) -> GroupPart:
        """A group of some ranks: with these owners across hosts, of equal ranks without reducers within one."""
        rank, n = list(ranks).index(self.config.rank), len(ranks)
        algorithm = "shares" if owners is None else self.config.algorithm
        native = {**self.config.native, "rank": rank, "world_size": n, "ring": algorithm == "ring"}
        config = GroupConfig(f"{self.config.name}/{name}", rank, n, self.config.store, algorithm, native)
        found = owners or Owners((), (1.0 / n,) * n)
        bootstrap = self.bootstrap.part(name, ranks)
        return GroupPart(Session(config, self.epoch, found, bootstrap, elsewhere=self._elsewhere), ranks)

    def _elsewhere(self, fault: Fault) -> GeartrainError | None:
        """The error of another part, which failed while this part was still being made."""
        found = from_reason(fault)
        return None if found is None else self.error_of(found)

    def issue(self, work: Work, soon: bool = False) -> None:
        """Begins an all-reduce, in place. Raises `ArgumentError` for a dtype that is not sent as asked.

        `soon` changes nothing: its stages are begun by threads of its own.
        """
        if work.wire_dtype != work.dtype and (work.dtype, work.wire_dtype) not in _WIRES:
            raise ArgumentError(f"{work.dtype} cannot be sent as {work.wire_dtype}")
        if self.native.ended:
            raise CollectiveClosedError(f"group {self.config.name!r} was closed")
        work.begin(self, self._next, self.native.begin(work))
        self._next += 1

    @property
    def issued(self) -> int:
        """Operations begun in this session."""
        return self._next

    def error_of(self, fault: Fault) -> GeartrainError:
        """A fault as the error to raise."""
        return error_of(fault, self.config.name, self.config.world_size, self.owners.reducers)

    def counts(self) -> dict[str, Any]:
        """Counters of all parts together."""
        return self.native.counts()

    def close(self, timeout_s: float) -> None:
        """Leaves, after sending the data that other members still need, for up to `timeout_s`."""
        self.native.close(timeout_s)
