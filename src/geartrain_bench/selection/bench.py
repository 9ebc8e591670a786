"""Prioritized sampling and priority updates on one core, compared with the sum trees of other replay buffers.

Priorities are exponential values to the power of 0.6. Every call samples or updates other rows, so that its data are
in the cache only where all of them fit. The floor is a lower bound on every draw or update: reading (writing) B random
floats of N, by NumPy or torch, whichever is faster.

| system | sample | update |
|---|---|---|
| geartrain | `Prioritized.select` over an array's candidates | `Store.update_priorities` |
| geartrain with importance, with alpha | the same and importance weights, as torchrl's sampler | the same and \
priority ** 0.6 |
| geartrain stratified, Uniform, store | the strategy's option; the other strategy; a store's candidates | |
| geartrain steps (with importance, alpha) | the steps of a store opened by name, beside writers that are killed | \
`Store.update_priorities` of steps |
| geartrain steps, Replay | the same as a batch of one field | |
| torchrl fp32, fp64 | `PrioritizedSampler.sample` | `.update_priority` (a sum tree, a min tree, the alpha) |
| torchrl ... tree alone | its C++ sum tree's descent | its C++ sum tree's update |
| cpprb | `PrioritizedReplayBuffer.sample` of one byte a row | `.update_priorities` |
| tianshou | its numba segment tree, importance weights | the same, with the alpha |
| NumPy, torch | cumsum and searchsorted; `torch.multinomial` (2^24 rows at most) | |

A second check is the correctness of draws: with equal priorities, rows of the upper half must be equally likely. Sums
in single precision cannot resolve single rows there from 2^24 rows on.

Threats to validity: see docs/benchmarks/selection.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.core.keys import Keys
from geartrain.core.schema import Field
from geartrain.selection import Candidates, Draw, Prioritized, Strategy, Uniform
from geartrain.store.store import Store
from geartrain_bench.harness.baselines import BaselineError, BaselineProcess
from geartrain_bench.harness.timing import BenchResult, Lap, Row, System
from geartrain_bench.selection.names import P_METRIC, case_name, short
from geartrain_bench.selection.plot import plot
from geartrain_bench.selection.speedups import speedups
from geartrain_bench.selection.steps import NamedSteps
from geartrain_bench.selection.uniformity import MOD, uniformity, upper_half_counts

SEED = 20230723
ALPHA, BETA = 0.6, 0.4
FRACTION_BITS = 16
ALL_BASELINES = ("torchrl", "cpprb", "tianshou")
#: The samplers that are measured of each baseline; baseline_worker.py knows them by these names.
SAMPLERS = {"torchrl": ("torchrl fp32", "torchrl fp64"), "cpprb": ("cpprb",), "tianshou": ("tianshou",)}
MULTINOMIAL_MOST = 2**24


@dataclass(frozen=True)
class Plan:
    """Cases to measure, and time limits."""

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    check_rows: int
    check_draws: int
    repeats: int
    case_s: float
    peer_case_s: float
    peer_sizes: tuple[int, ...]
    #: No baseline is started later than this after the start.
    peers_until_s: float = math.inf
    #: From here on geartrain's store and baselines are measured one after the other, for want of memory.
    rows_beside_peers: int = 20_000_000
    #: Baselines that are left out above so many rows, to keep the run short.
    peer_most_rows: tuple[tuple[str, int], ...] = (("tianshou", 10_000_000),)
    lap_s: float = 4e-3


FULL = Plan(
    sizes=(100_000, 1_000_000, 10_000_000, 100_000_000),
    batches=(256, 10_000, 1_000_000),
    check_rows=100_000_000,
    check_draws=4_000_000,
    repeats=15,
    case_s=4.0,
    peer_case_s=3.0,
    peer_sizes=(100_000, 1_000_000, 10_000_000, 100_000_000),
)
QUICK = Plan(
    sizes=(100_000, 1_000_000),
    batches=(256, 10_000, 1_000_000),
    check_rows=1_000_000,
    check_draws=400_000,
    repeats=7,
    case_s=0.8,
    peer_case_s=0.5,
    peer_sizes=(1_000_000,),
    peers_until_s=35.0,
)


@dataclass
class SelectionResult(BenchResult):
    """`counts`: draws with equal priorities; system -> draws with row number mod 8 = 0, 1, ..., 7."""

    counts: dict[str, list[int]] = field(default_factory=dict)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    `baselines` maps "torchrl", "cpprb" and "tianshou" to the interpreter of an environment that has it.
    """
    plan = QUICK if quick else FULL
    result = run(plan, {**report.parse_baselines([]), **(baselines or {})}, quick=quick)
    show(plan, result, json_path, plot_path)
    return result


def show(plan: Plan, result: SelectionResult, json_path: Path | None, plot_path: Path | None) -> None:
    """Prints the tables and writes the requested files."""
    report.report(result, json_path, plot_path, overview=lambda result: _print_counts(plan, result), draw=plot)


def _print_counts(plan: Plan, result: SelectionResult) -> None:
    chances = {row.system: row.p50 for row in result.rows if row.metric == P_METRIC}
    if result.counts:
        report.print_counts(
            f"{short(plan.check_draws)} draws of {short(plan.check_rows)} equal rows: the upper half's, by index mod "
            f"{MOD}",
            ["system", *(str(i) for i in range(MOD)), "p"],
            {name: [*map(str, counts), f"{chances[name]:.2g}"] for name, counts in result.counts.items()},
        )
    if times := speedups(result, [name for names in SAMPLERS.values() for name in names]):
        report.print_counts(
            "sample and update together, times as fast as the best baseline (CPU time)",
            ["case", "rows", "steps"],
            {
                case: [f"{found[name]:.1f}" if name in found else "" for name in ("rows", "steps")]
                for case, found in times.items()
            },
        )


def run(plan: Plan, baselines: dict[str, str], *, quick: bool = False) -> SelectionResult:
    """All the plan's cases."""
    began_s = time.monotonic()
    result = SelectionResult(
        **vars(harness.new_result("selection", quick=quick, baselines=baselines, packages=("numpy", "torch")))
    )
    harness.note_missing(result, baselines, ALL_BASELINES)
    if "torch" not in result.versions:
        result.baselines_missing["torch.multinomial"] = "torch is not installed here"
    samplers = {
        name: baselines[baseline] for baseline in ALL_BASELINES if baseline in baselines for name in SAMPLERS[baseline]
    }
    with harness.one_torch_thread():
        for rows in plan.sizes:
            if not result.deadline.allows(f"N {short(rows)}"):
                continue
            _SizeBench(plan, rows, samplers, began_s + plan.peers_until_s, result).measure()
    harness.finish(result, began_s)
    return result


class _SizeBench:
    """The cases of one N: an array's candidates, a store, and one baseline at a time."""

    def __init__(
        self, plan: Plan, rows: int, samplers: dict[str, str], peers_until_s: float, result: SelectionResult
    ) -> None:
        self.plan = plan
        self.rows = rows
        self.samplers = samplers if rows in plan.peer_sizes else {}
        self.peers_until_s = peers_until_s
        self.result = result
        self.random = np.random.default_rng(SEED)
        self.step = 0
        self.torch: Any = None
        if "torch" in result.versions:
            import torch

            self.torch = torch
        self.values = self._priorities(rows)
        self.laps: dict[tuple[str, int], dict[str, list[Lap]]] = {}
        self.candidates: Candidates | None = None
        self.store: Store | None = None
        self.keys: Keys | None = None
        self.steps = NamedSteps(rows, self._priorities, alpha=ALPHA, beta=BETA, seed=SEED)

    def measure(self) -> None:
        """All cases of this N."""
        harness.say(f"N {short(self.rows)}")
        # uint32, like the priorities of a store.
        self.candidates = Candidates(np.maximum(np.rint(self.values**ALPHA * 2**FRACTION_BITS), 1).astype(np.uint32))
        harness.say(f"N {short(self.rows)}: filling a store of steps")
        with self.steps:
            self._take_all()
        self.result.notes.append(
            f"N {short(self.rows)}: {self.steps.kills} writers of the store of steps were killed meanwhile"
        )
        self.candidates = None
        for what in ("sample", "update"):
            for batch in self.plan.batches:
                self._record(what, batch)
        if self.rows == self.plan.check_rows:
            self._check_ours()

    def _take_all(self) -> None:
        if self.rows <= self.plan.rows_beside_peers:
            with self._filled_store():
                self._take(self._floors, self._ours, self._steps, self._plain)
                self._baselines()
        else:
            self._take(self._floors, self._ours, self._steps, self._plain)
            self._baselines()
            self.candidates = None
            with self._filled_store():
                self._take(self._floors, self._ours)
            self.result.notes.append(
                f"N {short(self.rows)}: for want of memory, updates of geartrain and of baselines were not "
                "interleaved: the floor was interleaved with each"
            )

    @contextlib.contextmanager
    def _filled_store(self) -> Iterator[None]:
        """A store of N rows of one byte, with the same priorities."""
        harness.say(f"N {short(self.rows)}: filling a store")
        chunk = min(self.rows, 1_000_000)
        byte = np.zeros(chunk, np.uint8)
        with Store.create(f"bench-{os.getpid()}", {"x": Field((), "uint8", per_row=True)}, capacity=self.rows) as store:
            for first in range(0, self.rows, chunk):
                priorities = self.values[first : first + chunk].astype(np.float64) ** ALPHA
                store.insert({"x": byte[: len(priorities)]}, priorities=priorities)
            self.store, self.keys = store, store.keys()
            try:
                yield
            finally:
                self.store = self.keys = None

    # --- baselines ----------------------------------------------------------------------------------------------

    def _baselines(self) -> None:
        """Each baseline interleaved with the floor and geartrain, one baseline at a time."""
        for name, python in list(self.samplers.items()):
            most = dict(self.plan.peer_most_rows).get(name)
            if most is not None and self.rows > most:
                self._missing(name, f"left out above {short(most)} rows, to keep the run short")
                continue
            if time.monotonic() > self.peers_until_s:
                self._missing(name, "no time was left to start it; run without --quick")
                continue
            harness.say(f"N {short(self.rows)}: starting {name}")
            try:
                with BaselineProcess(name, python, self.rows, {}, kind="priorities") as baseline:
                    for package, version in baseline.versions.items():
                        if self.result.versions.setdefault(package, version) != version:
                            self.result.versions[f"{package} of {name}"] = version
                    able = baseline.laps()
                    self._take(
                        self._floors,
                        self._ours_beside_peers,
                        self._steps,
                        lambda what, batch, baseline=baseline, able=able: _peer_systems(  # type: ignore[misc]
                            baseline, able, what, batch, self.plan
                        ),
                        case_s=self.plan.peer_case_s,
                    )
                    if self.rows == self.plan.check_rows:
                        self._check(name, baseline.counts(self.plan.check_draws))
            except BaselineError as error:
                self._missing(name, str(error))
                self.samplers = {other: path for other, path in self.samplers.items() if other != name}

    def _missing(self, name: str, reason: str) -> None:
        known = self.result.baselines_missing.get(name)
        reason = f"N {short(self.rows)}: {reason}"
        self.result.baselines_missing[name] = reason if known is None else f"{known}; {reason}"

    # --- timed calls ----------------------------------------------------------------------------------------

    def _floors(self, what: str, batch: int) -> list[System]:
        """B random floats of N, read or written."""
        values = self.values
        fresh = self._priorities(batch)
        out = np.empty(batch, np.float32)
        forms: dict[str, Callable[[Any], object]] = {}
        if what == "sample":
            forms["floor numpy"] = lambda some: np.take(values, some, out=out, mode="clip")
        else:
            forms["floor numpy"] = lambda some: values.__setitem__(some, fresh)
        if self.torch is not None:
            tensor, fresh_tensor, out_tensor = map(self.torch.from_numpy, (values, fresh, out))
            if what == "sample":
                forms["floor torch"] = lambda some: self.torch.index_select(
                    tensor, 0, self.torch.from_numpy(some), out=out_tensor
                )
            else:
                forms["floor torch"] = lambda some: tensor.index_copy_(0, self.torch.from_numpy(some), fresh_tensor)
        return [self._system(name, self._some_rows(batch), form, floor=True) for name, form in forms.items()]

    def _ours(self, what: str, batch: int) -> list[System]:
        """geartrain's strategies and options."""
        systems = self._ours_beside_peers(what, batch)
        if what == "sample":
            if self.candidates is not None:
                systems.append(
                    self._draws("geartrain stratified", Prioritized(SEED, stratified=True), self.candidates, batch)
                )
                systems.append(self._draws("geartrain Uniform", Uniform(SEED), self.candidates, batch))
            if self.store is not None:
                of_store = Candidates.of_store(self.store.native, self.store.column)
                systems.append(self._draws("geartrain store", Prioritized(SEED), of_store, batch))
        return systems

    def _ours_beside_peers(self, what: str, batch: int) -> list[System]:
        """The two forms that baselines are compared with."""
        if what == "sample":
            return [] if self.candidates is None else self._plain_draws(self.candidates, batch)
        return [] if self.store is None else self._updates(self.store, batch)

    def _steps(self, what: str, batch: int) -> list[System]:
        """The steps of a store that was opened by its name, beside writers that are killed."""
        return self.steps.systems(what, batch, self._system)

    def _plain_draws(self, candidates: Candidates, batch: int) -> list[System]:
        weighing = Prioritized(SEED, beta=BETA)

        def weigh(drawn: Draw) -> None:
            weighing.importance_weights(drawn, len(candidates), 0)

        return [
            self._draws("geartrain", Prioritized(SEED), candidates, batch),
            self._draws("geartrain with importance", weighing, candidates, batch, weigh),
        ]

    def _draws(
        self,
        name: str,
        strategy: Strategy,
        candidates: Candidates,
        batch: int,
        then: Callable[[Draw], object] | None = None,
    ) -> System:
        def one(step: int) -> None:
            drawn = strategy.select(candidates, batch, step)
            if then is not None:
                then(drawn)

        def next_step() -> int:
            self.step += 1
            return self.step

        return self._system(name, next_step, one)

    def _updates(self, store: Store, batch: int) -> list[System]:
        keys = self.keys
        assert keys is not None

        def raised() -> tuple[Keys, NDArray[np.float64]]:
            return keys[self._some_rows(batch)()], self._priorities(batch).astype(np.float64) ** ALPHA

        def priorities() -> tuple[Keys, NDArray[np.float32]]:
            return keys[self._some_rows(batch)()], self._priorities(batch)

        return [
            self._system("geartrain", raised, lambda given: store.update_priorities(*given)),
            self._system(
                "geartrain with alpha",
                priorities,
                # As Replay.update_priorities does.
                lambda given: store.update_priorities(given[0], np.abs(np.asarray(given[1], np.float64)) ** ALPHA),
            ),
        ]

    def _plain(self, what: str, batch: int) -> list[System]:
        """Sampling without a tree: a pass over all priorities for every call, because they change in between."""
        if what != "sample":
            return []
        values = self.values

        def by_numpy(_: int) -> None:
            sums = np.cumsum(values, dtype=np.float64)
            np.searchsorted(sums, self.random.random(batch) * sums[-1], side="right")

        systems = [self._system("NumPy cumsum+searchsorted", lambda: 0, by_numpy)]
        if self.torch is None:
            return systems
        if self.rows > MULTINOMIAL_MOST:
            self._missing("torch.multinomial", "refuses more than 2^24 rows") if batch == self.plan.batches[0] else None
            return systems
        tensor = self.torch.from_numpy(values)
        systems.append(
            self._system("torch.multinomial", lambda: 0, lambda _: self.torch.multinomial(tensor, batch, True))
        )
        return systems

    def _system(
        self, name: str, prepare: Callable[[], Any], call: Callable[[Any], object], *, floor: bool = False
    ) -> System:
        """`call` on the arguments that `prepare` made before the clock started, as often as a lap needs."""
        call(prepare())
        given, began_s = prepare(), time.perf_counter()
        call(given)
        calls, rounds = _lap_size(time.perf_counter() - began_s, self.plan)

        def one_lap() -> Lap:
            first, *others = [prepare() for _ in range(calls + 1)]

            def body() -> None:
                for given in others:
                    call(given)

            return harness.lap(calls, body, lambda: call(first))

        return System(name, one_lap, floor=floor, rounds=rounds)

    def _some_rows(self, batch: int) -> Callable[[], NDArray[np.int64]]:
        return lambda: self.random.integers(0, self.rows, batch)

    def _priorities(self, n: int) -> NDArray[np.float32]:
        made = self.random.standard_exponential(n, np.float32)
        made += np.float32(1e-4)
        return made

    # --- results -------------------------------------------------------------------------------------------

    def _take(self, *groups: Callable[[str, int], list[System]], case_s: float | None = None) -> None:
        """Laps of the groups' systems, for all cases, added to the existing ones."""
        for what in ("sample", "update"):
            for batch in self.plan.batches:
                systems = [system for group in groups for system in group(what, batch)]
                if all(system.floor for system in systems):
                    continue
                harness.say(f"{what} {case_name(self.rows, batch)}: {', '.join(s.name for s in systems)}")
                budget_s = self.plan.case_s if case_s is None else case_s
                found = self.laps.setdefault((what, batch), {})
                for name, laps in harness.take_turns(systems, repeats=self.plan.repeats, budget_s=budget_s).items():
                    found.setdefault(name, []).extend(laps)

    def _record(self, what: str, batch: int) -> None:
        case = case_name(self.rows, batch)
        all_laps = self.laps.get((what, batch), {})
        if not all_laps:
            return
        alone = [name for name in all_laps if not name.startswith(("floor", "geartrain"))]
        laps, disturbed = harness.quiet(all_laps, alone)
        if disturbed:
            self.result.notes.append(f"{what} {case}: laps with context switches count, of {', '.join(disturbed)}")
        floors = [name for name in laps if name.startswith("floor")]
        for clock, attribute in (("CPU", "cpu_seconds"), ("wall", "seconds")):
            seconds = {name: [getattr(one, attribute) for one in of_one] for name, of_one in laps.items()}
            best = min(floors, key=lambda name: float(np.median(seconds[name])))
            floor_s = float(np.median(seconds[best]))
            for name, of_one in seconds.items():
                if name in floors and name != best:
                    continue
                system = "floor" if name == best else name
                quantiles = np.array(harness.quantiles(of_one))
                units = [("row", "ns", 1e9 / batch)] + [("call", "us", 1e6)] * (batch == self.plan.batches[0])
                for per, unit, scale in units:
                    p50, p75, p90, p95 = (scale * quantiles).tolist()
                    metric = f"{what}, {clock} time per {per}"
                    self._add(Row(case, system, metric, unit, p50, p75, p90, p95, floor_s / float(quantiles[0])))

    def _check_ours(self) -> None:
        draws, chunk = self.plan.check_draws, min(self.plan.check_draws, 1_000_000)
        candidates = Candidates(np.full(self.rows, 1 << FRACTION_BITS, np.uint32))
        found = np.zeros(MOD, np.int64)
        for step in range(-(-draws // chunk)):
            found += upper_half_counts(Prioritized(SEED).select(candidates, chunk, step).rows, self.rows)
        self._check("geartrain", found.tolist())

    def _check(self, name: str, counts: list[int]) -> None:
        self.result.counts[name] = counts
        p = uniformity(counts)
        case = f"N {short(self.rows)}, {short(self.plan.check_draws)} draws"
        self._add(Row(case, name, P_METRIC, "p", p, p, p, p, 1.0))

    def _add(self, row: Row) -> None:
        self.result.rows.append(row)


def _peer_systems(baseline: BaselineProcess, able: list[str], what: str, batch: int, plan: Plan) -> list[System]:
    """A baseline's sampler, and its tree alone where it is exposed."""
    systems = []
    for lap, name in ((what, baseline.name), (f"{what} tree", f"{baseline.name} tree alone")):
        if lap in able:
            calls, rounds = _lap_size(baseline.lap(lap, batch, 1).seconds, plan)

            def one_lap(lap: str = lap, calls: int = calls) -> Lap:
                return baseline.lap(lap, batch, calls)

            systems.append(System(name, one_lap, rounds=rounds))
    return systems


def _lap_size(call_s: float, plan: Plan) -> tuple[int, int | None]:
    """Calls of a lap, and a bound on the rounds of slow systems."""
    return max(1, min(256, int(plan.lap_s / max(call_s, 1e-9)))), 3 if call_s > 0.2 else None


if __name__ == "__main__":
    report.main_of("selection", main)
