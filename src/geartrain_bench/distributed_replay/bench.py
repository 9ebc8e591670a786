"""One replay over many ranks: throughput, bytes on the network, and a central server as the baseline.

Two claims, one run each:

**scaling**: 1, 2 and 4 processes that share one host's shard, and 2 and 4 hosts with a shard each, over unshaped
links; global batches of 32 to 1024 rows; prioritized, uniform, FIFO and top-k. The consumer drops every batch at
once, so only the replay is timed. The floor copies the same rows in C, in as many independent processes which share the
cores, with ordinary or with streaming stores, whichever is faster; its laps are interleaved with those of the replay.

**links**: 4 hosts behind links of 200 Mbit/s, rows of 100 KB, and a consumer that trains for so many milliseconds a
batch (it sleeps: a GPU's step leaves the CPU alone). One host by itself, then all four with `local_first`, with
`ordered`, with all rows on host 0 (central), and readers of a Reverb server on host 0. The bytes are those that the
hosts' interfaces counted. The floor is the consumer alone: every batch is ready when requested.

Hosts are namespaces of this machine (`geartrain.tools.testing.cluster`): they share its cores, so several hosts are
slower here than as many machines. Threats to validity: see docs/benchmarks/ranks.md.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import geartrain.tools.plan as planning
import geartrain_bench.distributed_replay.report as ranks_report
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain._native import available_cores
from geartrain.tools.testing.cluster import Hosts
from geartrain.tools.testing.namespaces import HostsError
from geartrain_bench.harness.baselines import BaselineError
from geartrain_bench.harness.fleet import REVERB, Fleet, Measured
from geartrain_bench.harness.timing import BenchResult, Row

MB = 1_000_000
ROW_BYTES = 102_400
STRATEGIES = ("prioritized", "uniform", "fifo", "top-k")
PER_HOST = "samples per host"
ARMS = ("one host", "local_first", "ordered", "central", "reverb")
#: An unshaped link is modelled as this many times the measured rate of one connection.
CONNECTIONS = 2
#: Bytes that each process copies for a lap of a floor.
FLOOR_BYTES = 100 * MB
#: Batches of a round that are not measured: the replay has made some of them while the floor was timed.
WARM = 3


@dataclass(frozen=True)
class Scaling:
    """Cases of the first claim. Every strategy at `every_at`, the first one at all batch sizes."""

    processes: tuple[int, ...]
    hosts: tuple[int, ...]
    batches: tuple[int, ...]
    strategies: tuple[str, ...]
    every_at: tuple[int, ...]
    rows: int = 6000
    case_bytes: int = 800 * MB
    least: int = 48
    most: int = 96
    #: Of measured batches, with a lap of the floor before and after each.
    rounds: int = 4

    def cases(self) -> list[tuple[str, int]]:
        """Strategies and batch sizes, in the order they are measured."""
        found = [(self.strategies[0], batch) for batch in self.batches]
        found += [(strategy, batch) for strategy in self.strategies[1:] for batch in self.every_at]
        return found


@dataclass(frozen=True)
class Links:
    """Cases of the second claim."""

    hosts: int = 4
    rate_mbit: float = 200.0
    batch_per_host: int = 64
    train_ms: tuple[float, ...] = (100.0, 50.0, 0.0)
    batches: int = 40
    rows_per_host: int = 1000


@dataclass(frozen=True)
class Plan:
    """Cases to measure, and time limits."""

    scaling: Scaling | None
    links: Links | None
    row_bytes: int = ROW_BYTES


DEFAULT = Plan(Scaling((1, 2, 4), (2, 4), (32, 256, 1024), STRATEGIES, (256,)), Links())
QUICK = Plan(
    Scaling(
        (1, 2), (2,), (32, 256), ("prioritized", "uniform"), (256,), rows=2000, case_bytes=200 * MB, least=36, rounds=3
    ),
    Links(train_ms=(50.0,), batches=12, rows_per_host=400),
)
EVERY_BATCH = (32, 64, 128, 256, 512, 1024)
FULL = Plan(Scaling((1, 2, 4), (2, 4), EVERY_BATCH, STRATEGIES, EVERY_BATCH), Links(batches=60))


@dataclass
class RanksResult(BenchResult):
    """With a dict for each case, and the machine's constants, as `geartrain plan ranks --check` reads them."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)


def main(
    *,
    quick: bool = False,
    full: bool = False,
    train_ms: Sequence[float] | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> RanksResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    `train_ms` are the consumer's milliseconds a batch, for the links. `plot_path` FILE.png makes three plots:
    FILE.png of the links, FILE-batch.png over batch sizes, FILE-scale.png over processes and hosts.
    """
    plan = FULL if full else QUICK if quick else DEFAULT
    if train_ms and plan.links is not None:
        plan = replace(plan, links=replace(plan.links, train_ms=tuple(train_ms)))
    result = run(plan, {**report.parse_baselines([]), **(baselines or {})}, quick=quick)
    result.command += " --full" * full + "".join(f" --train-ms {ms:g}" for ms in train_ms or ())
    report.report(
        result,
        json_path,
        plot_path,
        overview=lambda measured: ranks_report.print_cases(measured.cases),
        draw=ranks_report.plot_result,
    )
    return result


def run(plan: Plan, baselines: Mapping[str, str], *, quick: bool = False, constants: bool = True) -> RanksResult:
    """All the plan's cases."""
    began_s = time.monotonic()
    base = harness.new_result("ranks", quick=quick, baselines=baselines, packages=("numpy", "torch"))
    result = RanksResult(**vars(base))
    if constants:
        harness.say("the machine's constants")
        result.constants = planning.measure().as_json()
    reason = Hosts.viable()
    if reason is not None:
        result.baselines_missing["hosts"] = reason
    if plan.scaling is not None:
        _processes(plan.scaling, plan.row_bytes, result)
        if reason is None:
            _hosts(plan.scaling, plan.row_bytes, result)
    if plan.links is not None and reason is None:
        _links(plan.links, plan.row_bytes, baselines.get("reverb"), result)
    for name in set(baselines) - {"reverb"}:
        result.baselines_missing[name] = "unknown to this benchmark, which has reverb"
    result.notes.append("all hosts and processes share this machine's cores")
    harness.finish(result, began_s)
    return result


# --- scaling ----------------------------------------------------------------------------------------------------


def _processes(scaling: Scaling, row_bytes: int, result: RanksResult) -> None:
    """Processes of one host, which share a shard."""
    most = max(scaling.processes)
    with Fleet.here(most) as fleet:
        store = f"bench-ranks-{os.getpid()}"
        for i in range(most):  # one after the other: the first creates it
            fleet.ask([i], do="fill", store=store, rows=scaling.rows, row_bytes=row_bytes, capacity=scaling.rows)
        for size in scaling.processes:
            harness.say(f"one host, {size} of its processes")
            for strategy, batch in scaling.cases():
                case = _Case(f"{size} on 1 host", strategy, batch, "local_first", scaling.rows, row_bytes)
                _scaling_case(fleet, range(size), store, case, scaling, 1, None, result)


def _hosts(scaling: Scaling, row_bytes: int, result: RanksResult) -> None:
    """Hosts with a shard each, and one process on each."""
    most = max(scaling.hosts, default=0)
    if not most:
        return
    with Hosts(most) as hosts, Fleet.on(hosts, range(most)) as fleet:
        store = f"bench-ranks-{os.getpid()}"
        rows = scaling.rows // 2
        fleet.ask(range(most), do="fill", store=store, rows=rows, row_bytes=row_bytes, capacity=rows)
        link = link_gbit(hosts, 200 * MB)
        result.notes.append(f"one connection between two hosts without a limit carries {link:.1f} Gbit/s")
        for size in scaling.hosts:
            harness.say(f"{size} hosts")
            for strategy, batch in scaling.cases():
                case = _Case(f"{size} hosts", strategy, batch, "local_first", size * rows, row_bytes)
                _scaling_case(fleet, range(size), store, case, scaling, size, (hosts, CONNECTIONS * link), result)


@dataclass(frozen=True)
class _Case:
    """The case to be measured."""

    where: str
    strategy: str
    batch: int
    assignment: str
    rows: int
    row_bytes: int

    @property
    def name(self) -> str:
        return f"{self.where}, {self.strategy} x {self.batch}"


def _scaling_case(
    fleet: Fleet,
    members: range,
    store: str,
    case: _Case,
    scaling: Scaling,
    hosts: int,
    network: tuple[Hosts, float] | None,
    result: RanksResult,
) -> None:
    if not result.deadline.allows(case.name):
        return
    rounds, warm = scaling.rounds, WARM
    batches = int(np.clip(scaling.case_bytes // (case.batch * case.row_bytes), scaling.least, scaling.most)) // rounds
    if case.strategy == "fifo":  # which samples every row once
        warm, most = 1, case.rows // case.batch
        if most // rounds <= warm:
            rounds = 1
        batches = min(batches, most // rounds - warm)
        if batches < 1:
            result.notes.append(f"{case.name} was left out: {case.rows} rows are too few")
            return
    floor = _Floor(fleet, members, store, case.batch // len(members), case.row_bytes)
    found = fleet.measure(
        members,
        store=store,
        strategy=case.strategy,
        batch=case.batch,
        assignment=case.assignment,
        warm=warm,
        batches=batches,
        rounds=rounds,
        between=floor.lap,
        train_ms=0.0,
        hosts=None if network is None else network[0],
    )
    floor_s = harness.quantiles(floor.laps_s)[0]
    for system, laps_s in (("floor", floor.laps_s), ("geartrain", found.laps_s)):
        amount = case.batch * case.row_bytes / 1e9
        result.rows.append(harness.rate_row(case.name, system, "all ranks together", "GB/s", laps_s, amount, floor_s))
    result.cases.append(
        {
            "part": "scaling",
            "case": case.name,
            "where": case.where,
            "arm": case.assignment,
            "strategy": case.strategy,
            "hosts": hosts,
            "ranks": len(members),
            "batch": case.batch,
            "rows": case.rows,
            "row_bytes": case.row_bytes,
            "link_gbit": 1e3 if network is None else network[1],
            "train_ms": 0.0,
            "floor_gb_per_s": case.batch * case.row_bytes / floor_s / 1e9,
            **found.figures(case.batch, case.row_bytes),
        }
    )


class _Floor:
    """Laps in which processes copy so many rows each: with ordinary and with streaming stores, in turns."""

    def __init__(self, fleet: Fleet, members: Sequence[int], store: str, rows: int, row_bytes: int) -> None:
        self._fleet, self._members = fleet, members
        self._request: dict[str, Any] = {
            "do": "floor",
            "store": store,
            "rows": rows,
            "calls": int(np.clip(FLOOR_BYTES // (rows * row_bytes), 4, 1000)),
            "threads": max(1, available_cores() // len(members)),
        }
        self._laps_s: dict[bool, list[float]] = {False: [], True: []}

    def lap(self) -> None:
        """One lap of each kind."""
        for stream, laps_s in self._laps_s.items():
            answers = self._fleet.ask(self._members, stream=stream, **self._request)
            laps_s.append(max(float(answer["seconds"]) for answer in answers))

    @property
    def laps_s(self) -> list[float]:
        """Seconds of each lap, of the kind that is faster in the median."""
        return min(self._laps_s.values(), key=np.median)


# --- links ------------------------------------------------------------------------------------------------------


def _links(links: Links, row_bytes: int, reverb: str | None, result: RanksResult) -> None:
    count, rows, per_host = links.hosts, links.rows_per_host, links.batch_per_host
    with Hosts(count, rate_mbit=links.rate_mbit) as hosts:
        link = link_gbit(hosts, int(links.rate_mbit / 8 * 1e6))
        result.notes.append(
            f"one connection over a link of {links.rate_mbit:g} Mbit/s carries {1e3 * link:.0f} Mbit/s of payload"
        )
        with Fleet.on(hosts, range(count)) as fleet:
            every = range(count)
            fleet.ask(every, do="fill", store="spread", rows=rows, row_bytes=row_bytes, capacity=rows)
            fleet.ask([0], do="fill", store="central", rows=count * rows, row_bytes=row_bytes, capacity=count * rows)
            fleet.ask(every[1:], do="fill", store="central", rows=0, row_bytes=row_bytes, capacity=64)
            floor = _Floor(fleet, [0], "spread", per_host, row_bytes)
            measured = []
            for configuration in ("one host", "local_first", "ordered", "central"):
                members = every[:1] if configuration == "one host" else every
                for train_ms in links.train_ms:
                    if not result.deadline.allows(f"links: {configuration}, training {train_ms:g} ms"):
                        continue
                    harness.say(f"links: {configuration}, training {train_ms:g} ms a batch")
                    # A slow configuration needs fewer batches for figures as good: its laps are long.
                    slow = configuration in ("ordered", "central")
                    found = fleet.measure(
                        members,
                        store="central" if configuration == "central" else "spread",
                        strategy="prioritized",
                        batch=per_host * len(members),
                        assignment="ordered" if configuration == "ordered" else "local_first",
                        warm=4,
                        batches=max(8, links.batches // 3) if slow else links.batches,
                        between=floor.lap,
                        train_ms=train_ms,
                        hosts=hosts,
                    )
                    measured.append((configuration, train_ms, found))
            if not measured:
                return
            copy_s = harness.quantiles(floor.laps_s)[0]
            for train_ms in dict.fromkeys(train_ms for _, train_ms, _ in measured):
                # A consumer whose batches are always ready; without training time only the copy is left.
                laps_s = [train_ms / 1e3] if train_ms else floor.laps_s
                result.rows.append(_link_row(links, "floor", train_ms, laps_s, copy_s))
            for configuration, train_ms, found in measured:
                _add_link_case(configuration, train_ms, found, links, row_bytes, link, copy_s, result)
        if reverb is None:
            result.baselines_missing["reverb"] = "no interpreter given (--baseline-python reverb=/path/to/python)"
        else:
            try:
                _reverb(reverb, hosts, links, row_bytes, link, copy_s, result)
            except (BaselineError, HostsError) as error:
                result.baselines_missing["reverb"] = str(error)
    result.rows.sort(key=lambda row: row.case if row.metric == PER_HOST else "")  # stable: one consumer after the other


def _reverb(
    python: str, hosts: Hosts, links: Links, row_bytes: int, link: float, copy_s: float, result: RanksResult
) -> None:
    """A server on host 0 and a reader on each host."""
    count = links.hosts
    with Fleet.on(hosts, [0, *range(count)], [python, str(REVERB)]) as fleet:
        harness.say("links: starting a Reverb server")
        (server,) = fleet.ask([0], timeout_s=300, do="serve", rows=count * links.rows_per_host, row_bytes=row_bytes)
        result.versions.update(server["versions"])
        readers = range(1, count + 1)
        prepare = {
            "do": "prepare",
            "address": f"{hosts.address(0)}:{server['port']}",
            "row_bytes": row_bytes,
            "batch": links.batch_per_host,
            "warm": 3,
        }
        for train_ms in links.train_ms:
            if not result.deadline.allows(f"links: reverb, training {train_ms:g} ms"):
                continue
            harness.say(f"links: reverb, training {train_ms:g} ms a batch")
            fleet.ask(readers, timeout_s=300, **prepare)
            found = fleet.go(readers, max(8, links.batches // 3), train_ms, hosts)
            fleet.ask(readers, do="finish")
            _add_link_case("reverb", train_ms, found, links, row_bytes, link, copy_s, result)


def _link_row(links: Links, configuration: str, train_ms: float, laps_s: list[float], copy_s: float) -> Row:
    return harness.rate_row(
        f"{links.rate_mbit:g} Mbit/s, training {train_ms:g} ms",
        configuration,
        PER_HOST,
        "1/s",
        laps_s,
        links.batch_per_host,
        train_ms / 1e3 or copy_s,
    )


def _add_link_case(
    configuration: str,
    train_ms: float,
    found: Measured,
    links: Links,
    row_bytes: int,
    link: float,
    copy_s: float,
    result: RanksResult,
) -> None:
    hosts = found.ranks
    batch = hosts * links.batch_per_host
    rated = _link_row(links, configuration, train_ms, found.laps_s, copy_s)
    result.rows.append(rated)
    model_assignment = (
        "local_first" if configuration == "one host" else "central" if configuration == "reverb" else configuration
    )
    cluster = planning.Cluster(hosts, 1, hosts * links.rows_per_host, batch, row_bytes, link)
    expected = planning.moved_rows(cluster, model_assignment)[0] * row_bytes  # type: ignore[arg-type]
    result.cases.append(
        {
            "part": "links",
            "case": f"{rated.case}, {configuration}",
            "arm": model_assignment if configuration == "one host" else configuration,
            "system": configuration,
            "strategy": "prioritized",
            "hosts": hosts,
            "ranks": hosts,
            "batch": batch,
            "rows": hosts * links.rows_per_host,
            "row_bytes": row_bytes,
            "link_gbit": link,
            "train_ms": train_ms,
            "samples_per_s_host": batch * found.batches / found.seconds / hosts,
            "expected_bytes": expected,
            **found.figures(batch, row_bytes),
        }
    )


def link_gbit(hosts: Hosts, nbytes: int) -> float:
    """Rate of one TCP connection from host 0 to the last one, in Gbit/s of payload: a link's floor."""
    with hosts.socket(hosts.n - 1) as listening, hosts.socket(0) as source:
        listening.bind((hosts.address(hosts.n - 1), 0))
        listening.listen(1)
        source.settimeout(60)
        source.connect(listening.getsockname())
        sink, _ = listening.accept()
        with sink:
            sink.settimeout(60)
            _send(source, sink, nbytes // 5)  # the buckets start full, and TCP starts slowly
            return nbytes * 8 / _send(source, sink, nbytes) / 1e9


def _send(source: socket.socket, sink: socket.socket, nbytes: int) -> float:
    data = memoryview(bytes(1 << 20))

    def send() -> None:
        left = nbytes
        while left:
            left -= source.send(data[: min(left, len(data))])

    sender = threading.Thread(target=send, daemon=True)
    into = bytearray(1 << 20)
    began_s = time.perf_counter()
    sender.start()
    left = nbytes
    while left:
        got = sink.recv_into(into, min(left, len(into)))
        if not got:
            raise HostsError("a connection between two hosts broke")
        left -= got
    seconds = time.perf_counter() - began_s
    sender.join(60)
    return seconds
