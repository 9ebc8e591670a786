"""Configurations of `geartrain bench allreduce`, and their testbed: processes of ranks and reducers on hosts."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.core.lifetime import on_error
from geartrain.tools.plan.allreduce import Network, moved_bytes, shares_seconds
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.allreduce.profile import Profile, mean
from geartrain_bench.allreduce.rounds import RoundBarrier
from geartrain_bench.harness.fleet import Fleet

WORKER = ["-m", "geartrain_bench.allreduce.worker"]
SECRET = "bench"
ROUNDS_S = 300.0
#: Longer than any operation that is measured.
SPIN_US = 1e6
LEAST_READ_BYTES = 64 << 10
ONE_WAY_PORT = 29513
_jobs = itertools.count()


@dataclass(frozen=True)
class Configuration:
    """An all-reduce configuration: library, number of reducers, and owners of shares.

    `shares` are of workers and reducers: empty for equal ones of the workers, None for a ring's bytes.
    """

    name: str
    library: str
    reducers: int = 0
    shares: tuple[float, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def hops(self, n: int) -> int:
        """Sequential one-way delays; a Gloo step takes two of them."""
        return 2 * (n - 1) * (2 if self.library == "gloo" else 1) if self.shares is None else 2

    def planned_s(self, network: Network) -> float:
        """The model's time: bytes over rates, and hops."""
        n = len(network.workers)
        if self.shares is None:
            through_s = self.expected_bytes(network) / min(network.workers)
        else:
            through_s = shares_seconds(network, self._shares(n))
        return through_s + self.hops(n) * network.rtt_s / 2

    def expected_bytes(self, network: Network) -> float:
        """Bytes that worker 0 sends, and receives."""
        n = len(network.workers)
        if self.shares is None:
            return 2 * (n - 1) / n * network.nbytes
        return moved_bytes(network, self._shares(n))[0]

    def _shares(self, n: int) -> tuple[float, ...]:
        return self.shares or (1 / n,) * n


def gloo() -> Configuration:
    """Gloo of torch.distributed."""
    return Configuration("gloo", "gloo")


def ring() -> Configuration:
    """geartrain's ring."""
    return Configuration("geartrain ring", "geartrain", options={"algorithm": "ring", "transport": "tcp"})


def workers(transport: str = "auto") -> Configuration:
    """Equal shares on the workers: the ring's bytes in two hops."""
    name = "geartrain workers" if transport == "auto" else f"geartrain workers, {transport}"
    return Configuration(name, "geartrain", shares=(), options={"shares": "equal", "transport": transport})


def spinning() -> Configuration:
    """Equal shares on workers that own their cores: waits poll and do not sleep."""
    options = {"shares": "equal", "spin_us": SPIN_US}
    return Configuration("geartrain workers, spinning", "geartrain", shares=(), options=options)


def reading() -> Configuration:
    """Equal shares on the workers, which read each other's arrays from 64 KB on instead of sending them."""
    options = {"shares": "equal", "least_read_bytes": LEAST_READ_BYTES}
    return Configuration("geartrain workers, reading", "geartrain", shares=(), options=options)


def in_c(spin_us: float | None = None) -> Configuration:
    """Equal shares on the workers, through the C interface."""
    name = "geartrain workers, C" if spin_us is None else "geartrain workers, C, spinning"
    return Configuration(name, "geartrain in C", shares=(), options={} if spin_us is None else {"spin_us": spin_us})


def dedicated(n: int, reducers: int) -> Configuration:
    """All shares on as many reducers, equally."""
    return Configuration("geartrain dedicated", "geartrain", reducers, (0.0,) * n + (1 / reducers,) * reducers)


def hybrid(n: int, reducers: int, rates: tuple[float, ...] | None = None) -> Configuration:
    """The planner's shares for links of these rates (equal by default); reducers have the slowest rate."""
    known = rates or (1.0,) * n
    shares = _native.plan_shares(len(known), (*known, *(min(known),) * reducers))
    name = f"geartrain hybrid {reducers}" if reducers else "geartrain weighted"
    return Configuration(name, "geartrain", reducers, tuple(shares))


@dataclass(frozen=True)
class Timed:
    """Seconds of a call in each round, the slowest rank's; bytes of a call through worker 0's interface."""

    laps_s: list[float]
    sent_bytes: float = 0.0
    received_bytes: float = 0.0


class AllReduceTestbed:
    """Processes of workers and of reducers (as many by default). A context manager.

    Args:
        hosts: one for each process, workers first; None for processes of this host.
    """

    def __init__(self, hosts: Hosts | None, workers: int, reducers: int | None = None) -> None:
        self._hosts = hosts
        self._workers = workers
        self._count = workers + (workers if reducers is None else reducers)
        self._folder = Path(tempfile.mkdtemp(prefix="geartrain-bench-"))
        with on_error(shutil.rmtree, self._folder, ignore_errors=True):
            self._start()

    def _start(self) -> None:
        self._reducers: dict[int, str] = {}
        self._has_wire = False
        argv = [sys.executable, *WORKER]
        count = self._count
        self.fleet = Fleet.here(count, argv) if self._hosts is None else Fleet.on(self._hosts, range(count), argv)
        with on_error(self.fleet.close):
            (kept,) = self.fleet.ask([0], do="listen", host=self._address(0))
        self._port = int(kept["port"])

    def restart(self) -> None:
        """Restarts all processes, after some have failed."""
        self.fleet.close()
        self._start()

    def __enter__(self) -> AllReduceTestbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fleet.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def group(self, configuration: Configuration, n: int) -> Iterator[Grouped]:
        """The configuration's group over the first n workers."""
        options = dict(configuration.options)
        if configuration.library == "geartrain":
            options["secret"] = SECRET
            if self._hosts is not None:
                options["transport"] = "tcp"  # real hosts share no memory; emulated ones could
            if configuration.reducers:
                options["reducers"] = [self.reducer(i) for i in range(configuration.reducers)]
            if configuration.shares:
                options["shares"] = list(configuration.shares)
        ask = {
            "do": "join",
            "group": configuration.name,
            "job": f"job {next(_jobs)}",
            "library": configuration.library,
            "host": self._address(0),
            "port": self._port,
            "size": n,
            "options": options,
        }
        self.fleet.ask_each({i: {**ask, "rank": i} for i in range(n)}, 180.0)
        yield Grouped(self, configuration, n)
        self.fleet.ask(range(n), do="leave", group=configuration.name)

    def reducer(self, i: int) -> str:
        """The address of reducer i, which is started on first use."""
        if i not in self._reducers:
            member = self._workers + i
            (found,) = self.fleet.ask([member], do="reduce", host=self._address(member), secret=SECRET)
            self._reducers[i] = found["address"]
        return self._reducers[i]

    def _address(self, member: int) -> str:
        return "127.0.0.1" if self._hosts is None else self._hosts.address(member)

    def one_way_s(self, nbytes: int) -> float:
        """Seconds of a one-way TCP transfer of so many bytes, from worker 0 to worker 1."""
        if not self._has_wire:
            ask = {"do": "connect", "place": self._address(0), "port": ONE_WAY_PORT}
            self.fleet.ask_each({i: {**ask, "sends": i == 0} for i in range(2)}, 120.0)
            self._has_wire = True
        sender, _ = self.fleet.ask(range(2), ROUNDS_S, do="transfer", nbytes=nbytes)
        return float(sender["seconds"])

    def barrier_file(self, parties: int) -> Path:
        """A new file for a `RoundBarrier`."""
        path = self._folder / f"rounds-{next(_jobs)}"
        path.write_bytes(bytes(RoundBarrier.bytes(parties)))
        return path

    def moved(self) -> tuple[int, int]:
        """Bytes that worker 0's interface has sent and received."""
        return (0, 0) if self._hosts is None else self._hosts.bytes(0)


@dataclass(frozen=True)
class Grouped:
    """An open group, and its timed operations."""

    testbed: AllReduceTestbed
    configuration: Configuration
    n: int

    def rounds(self, nbytes: int, *, calls: int, rounds: int, warm: int) -> Timed:
        """So many rounds of so many calls."""
        before = self.testbed.moved()
        laps_s = self._ask("rounds", nbytes=nbytes, calls=calls, rounds=rounds, warm=warm)
        after = self.testbed.moved()
        made = (warm + rounds) * calls
        return Timed(laps_s, (after[0] - before[0]) / made, (after[1] - before[1]) / made)

    def steps(self, layers: int, nbytes: int, compute_s: float, overlap: bool, *, rounds: int, warm: int) -> Timed:
        """So many training steps."""
        return Timed(
            self._ask(
                "steps", layers=layers, nbytes=nbytes, compute_s=compute_s, overlap=overlap, rounds=rounds, warm=warm
            )
        )

    def profile(self, nbytes: int, *, calls: int, rounds: int) -> Profile:
        """Where the time of a call goes, of as many; of a group in C."""
        return mean(
            [
                answer["profile"]
                for answer in self._answers("profile", nbytes=nbytes, calls=calls, rounds=rounds, warm=0)
            ]
        )

    def _ask(self, what: str, **arguments: Any) -> list[float]:
        answers = self._answers(what, **arguments)
        return [float(lap) for lap in np.array([answer["seconds"] for answer in answers]).max(axis=0)]

    def _answers(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        path = self.testbed.barrier_file(self.n)
        try:
            return self.testbed.fleet.ask(
                range(self.n), ROUNDS_S, do=what, group=self.configuration.name, file=str(path), **arguments
            )
        finally:
            path.unlink()
