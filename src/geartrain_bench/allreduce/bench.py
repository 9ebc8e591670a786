"""All-reduce over networks, in units of K / B and of round trips, compared with Gloo and MPI.

K is the array's bytes, B a worker's rate, N the workers. Parts, each by itself or all (`--part`):

    shaped      links of 200 Mbit/s, 4 KB to 16 MB, N = 2, 4, 8: Gloo, geartrain's ring, shares on the workers, N
                dedicated reducers; N = 4 with 1, 2 and 3 reducers and the planner; the bytes that worker 0's interface
                counted
    slow-link   one worker at 100 Mbit/s, three at 400
    delay       round trips of 10 and 40 ms, 4 KB and 1 MB
    loopback    one host, no limit, 2 and 4 ranks (--ranks 2,8: others), 4 KB to 64 MB, and a memcpy of the array; with
                MPI. --profile: Gloo, the workers, these where they read each other's arrays, and MPI only, and where
                the time of the workers' calls in C goes
    ddp         DistributedDataParallel and a model of 25 M parameters, N = 4 at 200 Mbit/s
    throughput  samples/s of 1, 2, 4, 8 workers, gradients all-reduced during backward and after it

Hosts are namespaces of this machine (`geartrain.tools.testing.cluster`). A round begins at the same instant on all
ranks and its time is the slowest rank's; every element of every sum is checked. Threats to validity: see
docs/benchmarks/allreduce.md.

MPI runs by mpi4py in environments of its own: --baseline-python mpich=PYTHON --baseline-python openmpi=PYTHON.
    baidu-allreduce
is a further baseline where it was built as a shared library against one of them: --baidu mpich=LIBRARY.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import geartrain._native as _native
import geartrain_bench.allreduce.ddp as allreduce_ddp
import geartrain_bench.allreduce.mpi_jobs as allreduce_mpi_jobs
import geartrain_bench.allreduce.plot as allreduce_plot
import geartrain_bench.allreduce.report as allreduce_report
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.core.progress import Progress
from geartrain.tools.plan.allreduce import Network
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.allreduce.arguments import ON_LOOPBACK, PARTS, QUICK_PARTS, read
from geartrain_bench.allreduce.testbed import (
    SPIN_US,
    AllReduceTestbed,
    Configuration,
    Timed,
    dedicated,
    gloo,
    hybrid,
    in_c,
    reading,
    ring,
    spinning,
    workers,
)
from geartrain_bench.harness.baselines import BaselineError
from geartrain_bench.harness.timing import BenchResult, Row

KB, MB = 1 << 10, 1 << 20
QUEUE_MS = 50.0


@dataclass(frozen=True)
class Plan:
    """Cases to measure, and time limits."""

    rate_mbit: float = 200.0
    workers: tuple[int, ...] = (2, 4, 8)
    sizes: tuple[int, ...] = (4 * KB, 256 * KB, MB, 16 * MB)
    hybrids: tuple[int, ...] = (1, 2, 3)
    hybrid_workers: int = 4
    hybrid_size: int = 16 * MB
    slow_mbit: tuple[float, ...] = (100.0, 400.0, 400.0, 400.0)
    slow_sizes: tuple[int, ...] = (MB, 16 * MB)
    rtts_ms: tuple[float, ...] = (10.0, 40.0)
    delay_workers: tuple[int, ...] = (2, 4, 8)
    delay_sizes: tuple[int, ...] = (4 * KB, MB)
    ranks: tuple[int, ...] = (2, 4)
    profile: bool = False
    loopback_sizes: tuple[int, ...] = (4 * KB, 64 * KB, MB, 16 * MB, 64 * MB)
    throughput_workers: tuple[int, ...] = (1, 2, 4, 8)
    layers: int = 8
    #: K / B is 0.21 s: less than the backward pass, while a ring of many ranks needs more.
    gradient_bytes: int = 5 * MB
    compute_s: float = 0.4
    samples: int = 32
    ddp_steps: int = 5
    least_rounds: int = 4
    most_rounds: int = 15
    #: Time of each case of a part: the longer a call takes, the fewer rounds.
    case_s: float = 3.5


DEFAULT = Plan()
QUICK = Plan(
    workers=(2, 4), sizes=(64 * KB, 4 * MB), hybrids=(1,), hybrid_size=4 * MB, slow_sizes=(4 * MB,), rtts_ms=(10.0,),
    delay_workers=(2, 4), loopback_sizes=(4 * KB, MB, 16 * MB), ranks=(2,), throughput_workers=(1, 4), ddp_steps=2,
    least_rounds=3, most_rounds=5, case_s=1.0,
)  # fmt: skip
FULL = Plan(
    sizes=(4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB), least_rounds=5,
    loopback_sizes=(4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB),
)  # fmt: skip


@dataclass
class AllReduceResult(BenchResult):
    """With a dict for each case, and targets with their results."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)


def main(
    *,
    quick: bool = False,
    full: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> AllReduceResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    `plot_path` FILE.png makes a plot for each part: FILE.png of the first, FILE-PART.png of the others. `arguments` are
    `--part` and `--baidu` as in the module's docstring.
    """
    asked = read(arguments, quick=quick)
    parts, baidu = asked.parts, asked.baidu
    plan = FULL if full else QUICK if quick else DEFAULT
    plan = replace(plan, ranks=asked.ranks or plan.ranks, profile=asked.profile)
    result = run(plan, parts, {**report.parse_baselines([]), **(baselines or {})}, baidu, quick=quick)
    said = "".join(f" --part {part}" for part in parts) * (parts != (QUICK_PARTS if quick else PARTS))
    result.command += " --full" * full + said
    result.command += f" --ranks {','.join(map(str, asked.ranks))}" * bool(asked.ranks) + " --profile" * asked.profile
    result.command += "".join(f" --baidu {mpi}=/path/to/library" for mpi in baidu)
    report.report(result, json_path, plot_path, overview=allreduce_report.print_cases, draw=allreduce_plot.plot)
    return result


def run(
    plan: Plan, parts: Sequence[str], baselines: Mapping[str, str], baidu: Mapping[str, str], *, quick: bool = False
) -> AllReduceResult:
    """The plan's cases of those parts."""
    began_s = time.monotonic()
    base = harness.new_result("allreduce", quick=quick, baselines=baselines, packages=("numpy", "torch"))
    result = AllReduceResult(**vars(base))
    reason = Hosts.viable()
    for part in parts:
        if reason is not None and part not in ON_LOOPBACK:
            result.notes.append(f"{part} was left out: {reason}")
    parts = [part for part in parts if reason is None or part in ON_LOOPBACK]
    with Progress("bench allreduce", None, unit="cases") as progress:
        bench = _Bench(plan, result, progress)
        shaped = [part for part in parts if part in ("shaped", "slow-link", "ddp", "throughput")]
        if shaped:
            bench.on_shaped_links(shaped)
        if "delay" in parts:
            bench.with_delay()
        if "loopback" in parts:
            bench.on_loopback(baselines, baidu)
    for name in set(baselines) - {"mpich", "openmpi"}:
        result.baselines_missing[name] = "unknown to this benchmark, which has mpich and openmpi"
    left_out = [part for part in PARTS if part not in parts and reason is None]
    if quick and left_out:
        result.notes.append(f"{', '.join(left_out)}: not measured; --part all takes minutes, --quick or not")
    result.targets = allreduce_report.targets(result.cases)
    result.notes.append("all hosts and processes share this machine's cores")
    harness.finish(result, began_s)
    return result


class _Bench:
    """The parts, one method each."""

    def __init__(self, plan: Plan, result: AllReduceResult, progress: Progress) -> None:
        self.plan = plan
        self.result = result
        self.progress = progress

    def on_shaped_links(self, parts: Sequence[str]) -> None:
        """All parts that need a bridge and token buckets, with the same processes."""
        plan = self.plan
        most = max(plan.workers) if "shaped" in parts else plan.hybrid_workers
        if "throughput" in parts:
            most = max(most, *plan.throughput_workers)
        with (
            Hosts(2 * most, rate_mbit=plan.rate_mbit, queue_ms=QUEUE_MS) as hosts,
            AllReduceTestbed(hosts, most) as testbed,
        ):
            for part in parts:
                getattr(self, f"_{part.replace('-', '_')}")(testbed, hosts)

    def _shaped(self, testbed: AllReduceTestbed, hosts: Hosts) -> None:
        plan = self.plan
        for n in plan.workers:
            configurations = [gloo(), ring(), workers(), dedicated(n, n)]
            for nbytes in plan.sizes:
                self._cases(testbed, "shaped", configurations, n, nbytes, _rates(hosts, n))
        n = plan.hybrid_workers
        for count in plan.hybrids:
            self._cases(testbed, "shaped", [hybrid(n, count)], n, plan.hybrid_size, _rates(hosts, n))

    def _slow_link(self, testbed: AllReduceTestbed, hosts: Hosts) -> None:
        plan = self.plan
        n = len(plan.slow_mbit)
        for i, rate in enumerate(plan.slow_mbit):
            hosts.change_rate(i, rate)
        rates = _rates(hosts, n)
        try:
            for nbytes in plan.slow_sizes:
                self._cases(testbed, "slow-link", [gloo(), ring(), workers(), hybrid(n, 0, rates)], n, nbytes, rates)
        finally:
            for i in range(n):
                hosts.change_rate(i, plan.rate_mbit)

    def with_delay(self) -> None:
        """Round trips through the switch."""
        plan = self.plan
        most = max(plan.delay_workers)
        with (
            Hosts(2 * most, rate_mbit=plan.rate_mbit, rtt_ms=plan.rtts_ms[0], queue_ms=2 * QUEUE_MS) as hosts,
            AllReduceTestbed(hosts, most) as testbed,
        ):
            for rtt_ms in plan.rtts_ms:
                hosts.change_rtt(rtt_ms)
                for n in plan.delay_workers:
                    configurations = [gloo(), ring(), workers(), dedicated(n, n)]
                    for nbytes in plan.delay_sizes:
                        self._cases(testbed, "delay", configurations, n, nbytes, _rates(hosts, n), rtt_ms)

    def on_loopback(self, baselines: Mapping[str, str], baidu: Mapping[str, str]) -> None:
        """Ranks of one host, MPI included."""
        plan = self.plan
        floors_s = {nbytes: _memcpy_s(nbytes) for nbytes in plan.loopback_sizes}
        with AllReduceTestbed(None, max(plan.ranks), reducers=2) as testbed:
            for n in plan.ranks:
                configurations = [gloo(), workers(), in_c()]
                others = [workers(transport="tcp"), ring(), dedicated(n, 2)]
                configurations += [reading()] if plan.profile else others
                if n <= _native.available_cores():  # as MPI does; with more ranks than cores it is no option
                    configurations[3:3] = [spinning(), in_c(SPIN_US)]
                for nbytes in plan.loopback_sizes:
                    self._cases(
                        testbed, "loopback", configurations, n, nbytes, (math.inf,) * n, floor_s=floors_s[nbytes]
                    )
        for name in ("mpich", "openmpi"):
            if name not in baselines:
                self.result.baselines_missing[name] = f"no interpreter given (--baseline-python {name}=/path/to/python)"
                continue
            for n in plan.ranks:
                for library in (None, baidu[name]) if name in baidu else (None,):
                    if not self.result.deadline.allows(f"loopback: {name}, N = {n}"):
                        continue
                    self._mpi(name, baselines[name], n, library, floors_s)
        places = {row.case: place for place, row in reversed(list(enumerate(self.result.rows)))}
        self.result.rows.sort(key=lambda row: places[row.case])  # MPI's rows next to the others'

    def _mpi(self, name: str, python: str, n: int, baidu: str | None, floors_s: Mapping[int, float]) -> None:
        system = name if baidu is None else f"baidu on {name}"
        asked = {nbytes: self._amount(nbytes / 1e9 + 2e-5) for nbytes in floors_s}
        try:
            found, versions = allreduce_mpi_jobs.run(name, python, n, asked, baidu)
        except BaselineError as error:
            self.result.baselines_missing[f"{system}, {n} ranks"] = str(error)
            return
        self.result.versions |= {f"{name} {what}": version for what, version in versions.items()}
        for nbytes, timed in found.items():
            self._add("loopback", Configuration(system, name), n, nbytes, (math.inf,) * n, 0.0, timed, floors_s[nbytes])
            self.progress.advance(n * nbytes)

    def _ddp(self, testbed: AllReduceTestbed, hosts: Hosts) -> None:
        plan = self.plan
        n = plan.hybrid_workers
        try:
            wanted = allreduce_ddp.reference(n, plan.ddp_steps)
        except BaselineError as error:
            self.result.baselines_missing["ddp"] = str(error)
            return
        for configuration in (gloo(), workers(), dedicated(n, n)):
            if not self._allows("ddp", configuration, n):
                continue
            try:
                found = allreduce_ddp.run(hosts, testbed, configuration, n, plan.ddp_steps)
            except BaselineError as error:
                self._missing(testbed, configuration, error)
                continue
            laps_s = found.laps_s
            p50, _, _, p95 = harness.quantiles(laps_s)
            nbytes = 4 * found.parameters
            about = self._about("ddp", configuration, n, nbytes, _rates(hosts, n), 0.0)
            self.result.rows.append(
                harness.rate_row(
                    f"25 M parameters, N = {n}",
                    configuration.name,
                    "DDP",
                    "steps/s",
                    laps_s,
                    1.0,
                    nbytes / _rates(hosts, 1)[0],
                )
            )
            self.result.cases.append(
                {
                    **about,
                    "p50_s": p50,
                    "p95_s": p95,
                    "laps_s": laps_s,
                    "parameters": found.parameters,
                    "step_sent": found.sent_bytes / nbytes,
                    "equal_ranks": found.checksums.count(found.checksums[0]),
                    "equals_reference": found.checksums[0] == wanted,
                }
            )
            self.progress.advance(n * nbytes * plan.ddp_steps)

    def _throughput(self, testbed: AllReduceTestbed, hosts: Hosts) -> None:
        plan = self.plan
        for n in plan.throughput_workers:
            # A single worker has nothing to all-reduce.
            configurations = [gloo(), workers(), *([dedicated(n, n)] if n > 1 else [])]
            for overlap, configuration in itertools.product((True, False), configurations):
                if not self._allows("throughput", configuration, n):
                    continue
                try:
                    with testbed.group(configuration, n) as group:
                        timed = group.steps(plan.layers, plan.gradient_bytes, plan.compute_s, overlap, rounds=4, warm=1)
                except BaselineError as error:
                    self._missing(testbed, configuration, error)
                    continue
                name = f"N = {n}, all-reduced {'during' if overlap else 'after'} backward"
                samples = n * plan.samples
                self.result.rows.append(
                    harness.rate_row(
                        name, configuration.name, "training", "samples/s", timed.laps_s, samples, plan.compute_s
                    )
                )
                self.result.cases.append(
                    {
                        **self._about("throughput", configuration, n, plan.gradient_bytes, _rates(hosts, n), 0.0),
                        "overlap": overlap,
                        "samples_per_s": samples / float(np.median(timed.laps_s)),
                        "one_worker_bound": plan.samples / plan.compute_s,
                        "laps_s": timed.laps_s,
                    }
                )
                self.progress.advance(n * plan.gradient_bytes)

    # --- a case -----------------------------------------------------------------------------------------------------

    def _cases(
        self,
        testbed: AllReduceTestbed,
        part: str,
        configurations: Sequence[Configuration],
        n: int,
        nbytes: int,
        rates: tuple[float, ...],
        rtt_ms: float = 0.0,
        floor_s: float | None = None,
    ) -> None:
        """One size, all configurations, one after the other."""
        for configuration in configurations:
            if not self._allows(part, configuration, n, f", {allreduce_report.size_text(nbytes)}"):
                continue
            guess_s = 2 * nbytes / min(*rates, 5e8) + configuration.hops(n) * (rtt_ms / 2e3) + 5e-5
            calls, rounds = self._amount(guess_s)
            if math.isfinite(rates[0]):
                calls = 1
            try:
                with testbed.group(configuration, n) as group:
                    timed = group.rounds(nbytes, calls=calls, rounds=rounds, warm=1 if nbytes >= 16 * MB else 2)
                    profiles = self.plan.profile and configuration.library == "geartrain in C"
                    profile = group.profile(nbytes, calls=calls, rounds=rounds) if profiles else None
            except BaselineError as error:
                self._missing(testbed, configuration, error)
                continue
            self._add(part, configuration, n, nbytes, rates, rtt_ms, timed, floor_s)
            if profile is not None:
                self.result.cases[-1]["profile"] = profile
            self.progress.advance(n * nbytes * calls * rounds)

    def _allows(self, part: str, configuration: Configuration, n: int, more: str = "") -> bool:
        """Whether there is time for a case."""
        return self.result.deadline.allows(f"{part}: {configuration.name}, N = {n}{more}")

    def _missing(self, testbed: AllReduceTestbed, configuration: Configuration, error: BaselineError) -> None:
        self.result.baselines_missing[configuration.name] = str(error)
        self.progress.say(f"{configuration.name}: {error}")
        testbed.restart()

    def _amount(self, guess_s: float) -> tuple[int, int]:
        """Calls of a round, and rounds, for a call of about `guess_s`."""
        calls = int(np.clip(0.01 / guess_s, 1, 64))
        return calls, int(np.clip(self.plan.case_s / (calls * guess_s), self.plan.least_rounds, self.plan.most_rounds))

    def _about(
        self, part: str, configuration: Configuration, n: int, nbytes: int, rates: tuple[float, ...], rtt_ms: float
    ) -> dict[str, Any]:
        return {
            "part": part,
            "arm": configuration.name,
            "workers": n,
            "reducers": configuration.reducers,
            "nbytes": nbytes,
            "rates_mbit": [rate * 8e-6 for rate in rates] if math.isfinite(rates[0]) else None,
            "rtt_ms": rtt_ms,
        }

    def _add(
        self,
        part: str,
        configuration: Configuration,
        n: int,
        nbytes: int,
        rates: tuple[float, ...],
        rtt_ms: float,
        timed: Timed,
        floor_s: float | None,
    ) -> None:
        p50, _, _, p95 = harness.quantiles(timed.laps_s)
        case = {
            **self._about(part, configuration, n, nbytes, rates, rtt_ms),
            "p50_s": p50,
            "p95_s": p95,
            "laps_s": timed.laps_s,
        }
        size = allreduce_report.size_text(nbytes)
        if floor_s is not None:
            name = f"{n} ranks, {size}"
            case["floor_s"] = floor_s
            self.result.rows.append(harness.time_row(name, configuration.name, LOOPBACK, "us", timed.laps_s, floor_s))
        else:
            network = Network(rates, (min(rates),) * configuration.reducers, float(nbytes), rtt_ms / 1e3)
            unit_s = network.unit_s
            case |= {
                "unit_s": unit_s,
                "units": p50 / unit_s,
                "planned_units": configuration.planned_s(network) / unit_s,
                "sent": timed.sent_bytes / nbytes,
                "received": timed.received_bytes / nbytes,
                "expected": configuration.expected_bytes(network) / nbytes,
            }
            if part == "delay":
                name = f"{rtt_ms:g} ms, {size}, N = {n}"
                self.result.rows.append(
                    harness.time_row(name, configuration.name, DELAY, "ms", timed.laps_s, rtt_ms / 1e3)
                )
            else:
                name = f"N = {n}, {size}" if part == "shaped" else f"N = {n}, one slow, {size}"
                quantiles = harness.quantiles([one / unit_s for one in timed.laps_s])
                metric = SHAPED if part == "shaped" else SLOW
                self.result.rows.append(Row(name, configuration.name, metric, "K/B", *quantiles, unit_s / p50))
        self.result.cases.append(case)


SHAPED = "shaped links: time in units of K/B (floor: 1)"
SLOW = "one slow link: time in units of K / its rate (floor: 1)"
DELAY = "with a delay (floor: one round trip)"
LOOPBACK = "loopback (floor: one memcpy of the array)"


def _rates(hosts: Hosts, n: int) -> tuple[float, ...]:
    """Bytes a second of the first n hosts."""
    return tuple(float(rate or math.inf) * 1e6 / 8 for rate in hosts.rates_mbit[:n])


def _memcpy_s(nbytes: int) -> float:
    """Median time of a memcpy of so many bytes, on one thread, from warm memory to warm memory."""
    source, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    calls = max(1, 20 * MB // nbytes)

    def copies() -> None:
        for _ in range(calls):
            np.copyto(into, source)

    return float(np.median([harness.lap(calls, copies).seconds for _ in range(9)]))


if __name__ == "__main__":
    import sys

    main(arguments=sys.argv[1:])
