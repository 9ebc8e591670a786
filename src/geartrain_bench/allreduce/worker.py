"""One process of `geartrain bench allreduce`: a rank or a reducer, on a host of its own or not.

Reads one JSON object a line from stdin and answers each with one on stdout (client: testbed.py):

    {"do": "listen", "host": "10.77.0.1"}      -> {"port": 40123}: rank 0 hosts the jobs' key-value store
    {"do": "reduce", "host": ..., "secret": .} -> {"address": "10.77.0.5:40999"}: this process is a reducer now
    {"do": "join", "group": "gloo", "library": "gloo" | "geartrain" | "geartrain in C", "job": "unique",
     "host": ..., "port": ..., "rank": 0, "size": 4, "options": {...}}   -> {}: a group, named `group`
    {"do": "rounds", "group": ..., "file": ..., "nbytes": ..., "calls": ..., "rounds": ..., "warm": ...}
                                               -> {"seconds": [...]} of a call, a number a round
    {"do": "profile", ...}                       -> {"profile": {...}}: of as many calls, in C (profile.py)
    {"do": "steps", "group": ..., "file": ..., "layers": ..., "nbytes": ..., "compute_s": ..., "overlap": true, ...}
                                               -> {"seconds": [...]} of a training step with so many gradients
    {"do": "counters", "group": ...}             -> {"counters": {...}}: the group's own counters
    {"do": "connect", "place": ..., "port": ..., "sends": true}
                                               -> {}: one end of a one-way transfer, the other connects at the same time
    {"do": "transfer", "nbytes": ...}            -> {"seconds": ...} of that transfer
    {"do": "leave", "group": ...}                -> {}

Output of libraries goes to stderr. An answer {"error": "..."} ends the process; so does the end of stdin.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from geartrain_bench.allreduce.one_way import OneWayTransfer
from geartrain_bench.allreduce.profile import of_calls
from geartrain_bench.allreduce.rounds import Array, RoundBarrier, raise_priority, timed_rounds
from geartrain_bench.distributed_replay.worker import answer_requests

TIMEOUT_S = 120.0


@dataclass
class Member:
    """A group of which this process is a member."""

    rank: int
    size: int
    reduce: Callable[[Array], Any]
    start: Callable[[Array], Any]  # returns an object with wait()
    leave: Callable[[], Any]
    group: Any


class Process:
    """State of a process."""

    def __init__(self) -> None:
        self._tcp_store: Any = None
        self._members: dict[str, Member] = {}
        self._reducer: Any = None
        self._wire: OneWayTransfer | None = None
        raise_priority()

    def listen(self, host: str) -> dict[str, Any]:
        """Hosts the key-value store of later jobs."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._tcp_store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return {"port": self._tcp_store.port}

    def reduce(self, host: str, secret: str) -> dict[str, Any]:
        """Starts a reducer."""
        from geartrain.collectives import Reducer

        if self._reducer is None:
            self._reducer = Reducer(bind=f"{host}:0", secret=secret)
        return {"address": self._reducer.address}

    def join(
        self, group: str, job: str, library: str, host: str, port: int, rank: int, size: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Joins the group."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=TIMEOUT_S)
        kept = TCPStore(host, port, is_master=False, timeout=timeout) if self._tcp_store is None else self._tcp_store
        store = PrefixStore(job, kept)
        make = {"gloo": _gloo, "geartrain": _geartrain, "geartrain in C": _geartrain_in_c}[library]
        self._members[group] = make(store, rank, size, options)
        return {}

    def rounds(self, group: str, file: str, **what: Any) -> dict[str, Any]:
        """So many calls, timed and checked."""
        member = self._members[group]
        barrier = RoundBarrier(file, member.size, member.rank)
        seconds = timed_rounds(member.reduce, barrier=barrier, rank=member.rank, size=member.size, **what)
        return {"seconds": seconds}

    def profile(self, group: str, file: str, **what: Any) -> dict[str, Any]:
        """Where the time of so many calls goes."""
        member = self._members[group]
        before = member.group.profiled()
        member.group.profile(True)
        seconds = self.rounds(group, file, **what)["seconds"]
        after = member.group.profiled()
        member.group.profile(False)
        return {"profile": of_calls(before, after, seconds)}

    def steps(
        self,
        group: str,
        file: str,
        layers: int,
        nbytes: int,
        compute_s: float,
        overlap: bool,
        rounds: int,
        warm: int,
    ) -> dict[str, Any]:
        """Training steps of a model of so many layers, whose `nbytes` of gradients are summed while or after backward.

        Computation is a sleep, as on a CPU while a GPU computes: a third of it forward, the rest backward, by layers.
        """
        member = self._members[group]
        barrier = RoundBarrier(file, member.size, member.rank)
        gradients = [np.ones(nbytes // 4 // layers, np.float32) for _ in range(layers)]
        seconds = []
        for number in range(warm + rounds):
            start_ns = barrier.start()
            time.sleep(compute_s / 3)
            pending = []
            for gradient in gradients:
                time.sleep(2 * compute_s / 3 / layers)
                gradient[:] = member.rank + 1
                if overlap:
                    pending.append(member.start(gradient))
            if not overlap:
                pending = [member.start(gradient) for gradient in gradients]
            for one in pending:
                one.wait()
            took_s = (time.monotonic_ns() - start_ns) / 1e9
            wanted = member.size * (member.size + 1) / 2
            if any((gradient != wanted).any() for gradient in gradients):
                raise ArithmeticError(f"a gradient is wrong on rank {member.rank}")
            if number >= warm:
                seconds.append(took_s)
        return {"seconds": seconds}

    def counters(self, group: str) -> dict[str, Any]:
        """The group's own counters."""
        return {"counters": getattr(self._members[group].group, "counters", dict)()}

    def connect(self, place: str, port: int, sends: bool) -> dict[str, Any]:
        """Connects one end of a one-way transfer."""
        self._wire = OneWayTransfer(place, port, sends)
        return {}

    def transfer(self, nbytes: int) -> dict[str, Any]:
        """A one-way transfer, timed."""
        assert self._wire is not None
        return {"seconds": self._wire.seconds(nbytes)}

    def leave(self, group: str) -> dict[str, Any]:
        """Leaves the group."""
        self._members.pop(group).leave()
        return {}

    def end(self) -> None:
        """Releases all resources."""
        for group in list(self._members):
            self.leave(group)
        if self._reducer is not None:
            self._reducer.close()
        if self._wire is not None:
            self._wire.close()


def _gloo(store: Any, rank: int, size: int, options: dict[str, Any]) -> Member:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S), **options
    )

    def start(array: Array) -> Any:
        return dist.all_reduce(torch.from_numpy(array), async_op=True)

    return Member(
        rank,
        size,
        lambda array: dist.all_reduce(torch.from_numpy(array)),
        start,
        dist.destroy_process_group,
        None,
    )


def _geartrain(store: Any, rank: int, size: int, options: dict[str, Any]) -> Member:
    from geartrain.collectives import Group, GroupOptions

    rare = {each.name: options[each.name] for each in dataclasses.fields(GroupOptions) if each.name in options}
    own = {name: value for name, value in options.items() if name not in rare}
    group = Group(rank, size, store=store, timeout_s=TIMEOUT_S, options=GroupOptions(**rare), **own)
    return Member(rank, size, group.all_reduce, group.all_reduce_async, group.close, group)


def _geartrain_in_c(store: Any, rank: int, size: int, options: dict[str, Any]) -> Member:
    from geartrain_bench.allreduce.c_interface import GroupInC

    group = GroupInC(store, rank, size, TIMEOUT_S, **options)
    return Member(rank, size, group.all_reduce, group.all_reduce, group.close, group)


def main() -> None:
    """Command line of `python -m geartrain_bench.allreduce.worker`."""
    answer_requests(Process)


if __name__ == "__main__":
    main()
