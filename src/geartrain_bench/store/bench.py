"""Store throughput compared with memcpy: fetch and insert in GB/s, and the overhead of one row.

Floors, in the same run, over the same memory: for fetch a C loop that copies the chosen rows out of the segment
into warm memory and does nothing else; for insert a C loop that copies the same bytes from the same array to the
place in the segment where they would go. Both with ordinary and with streaming stores, on one thread and, where
two are allowed, on two that each do half and never wait for each other; the floor of a case is the one whose
median is best. So a floor's method is chosen with hindsight, unlike any system's.

"geartrain" is `fetch` by known keys and `insert`; "geartrain Replay" samples the rows as well, as the `sample` of
every baseline does: compare baselines with it. NumPy and torch index the segment's own columns. Small batches of
1 to 64 fields: small_batches.py.

Threats to validity: see docs/benchmarks/store.md.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.core.schema import Field
from geartrain.replay.fetch import fetch
from geartrain.replay.options import ReplayOptions
from geartrain.replay.replay import Replay
from geartrain.selection import Uniform
from geartrain.store.store import Store
from geartrain_bench.harness.baselines import BaselineError, BaselineProcess
from geartrain_bench.harness.timing import BenchResult, Clock, Lap, Row, System
from geartrain_bench.store import small_batches
from geartrain_bench.store.floors import aligned, floor_systems, gather, in_parts, scatter

MB = 1_000_000
SEED = 20230723
ALL_BASELINES = ("torchrl", "torchrl-thp", "cpprb", "reverb")


#: One field of 1 KB steps: nothing but bytes, so that the floor is exact.
FLAT = {"x": Field((256,), "float32")}


@dataclass(frozen=True)
class Table:
    """A store to be measured: its rows, and their total bytes."""

    name: str
    fields: dict[str, Field]
    max_length: int
    data_bytes: int
    peer_bytes: int
    batches: tuple[int, ...]
    threads: tuple[int, ...] = (1, 2)
    with_peers: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(field.block_nbytes(self.max_length) for field in self.fields.values())

    @property
    def rows(self) -> int:
        """Rows of the store: as many as fit, at least the largest batch."""
        return max(self.data_bytes // self.row_bytes, *self.batches)


#: A step of robot learning, of which MULTI_STEPS make a row of 103 KB.
MULTI_STEPS = 103
MULTI = {
    "obs": Field((240,), "float32"),
    "action": Field((8,), "float32"),
    "reward": Field((), "float32"),
    "done": Field((), "uint8"),
}


@dataclass(frozen=True)
class Plan:
    """Cases to measure, and time limits."""

    tables: tuple[Table, ...]
    repeats: int
    case_s: float
    budget_s: float
    peer_batch_bytes: int = 300 * MB
    lap_bytes: int = 16 * MB
    single_rows: int = 200
    peer_rounds: int = 9
    peer_start_s: float = 1000.0
    #: Small batches of rows of 4 KB (small_batches.py): numbers of fields, and rows of a batch.
    small_fields: tuple[int, ...] = ()
    small_batches: tuple[int, ...] = (32,)
    small_bytes: int = 60 * MB
    small_s: float = 1.0


FULL = Plan(
    tables=(
        Table("4 KB", FLAT, 4, 1500 * MB, 600 * MB, (32, 256, 1024)),
        Table("100 KB", FLAT, 100, 1500 * MB, 600 * MB, (32, 256, 1024)),
        Table("1 MB", FLAT, 1024, 1100 * MB, 600 * MB, (32, 256, 1024)),
        Table("100 KB in 4 fields", MULTI, MULTI_STEPS, 1500 * MB, 600 * MB, (32, 1024)),
    ),
    repeats=21,
    case_s=20.0,
    budget_s=900.0,
    small_fields=(1, 4, 16, 64),
    small_batches=(32, 256),
    small_bytes=400 * MB,
    small_s=5.0,
)
QUICK = Plan(
    tables=(
        Table("4 KB", FLAT, 4, 400 * MB, 200 * MB, (32, 1024), (1,), False),
        Table("100 KB", FLAT, 100, 400 * MB, 200 * MB, (32, 1024)),
        Table("1 MB", FLAT, 1024, 400 * MB, 200 * MB, (32,), (1,), False),
    ),
    repeats=11,
    case_s=2.0,
    budget_s=24.0,
    peer_rounds=3,
    peer_start_s=12.0,
    small_fields=(1, 8, 64),
    small_s=0.7,
)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints the table, writes the requested files, and returns the result.

    `baselines` maps "torchrl", "torchrl-thp" (torch's allocator with huge pages), "cpprb" and "reverb" to the
    interpreter of an environment that has it. `--quick`
    includes baselines as far as its minute allows.
    """
    result = run(QUICK if quick else FULL, {**report.parse_baselines([]), **(baselines or {})}, quick=quick)
    report.report(result, json_path, plot_path)
    return result


def run(plan: Plan, baselines: dict[str, str], *, quick: bool = False) -> BenchResult:
    """All the plan's cases."""
    began_s = time.monotonic()
    result = harness.new_result("store", quick=quick, baselines=baselines, packages=("numpy", "torch"))
    result.machine["copy_kernel"] = _native.copy_kernel()
    harness.note_missing(result, baselines, ALL_BASELINES)
    cases = sum(2 * len(table.batches) * len(table.threads) for table in plan.tables)
    clock = Clock(plan.budget_s, cases)
    baselines = {name: python for name, python in baselines.items() if name in ALL_BASELINES}
    with harness.one_torch_thread():
        for place, table in enumerate(plan.tables):
            if not result.deadline.allows(table.name):
                continue
            _TableBench(plan, table, baselines, clock, result).measure(single_rows=place == 0)
        small_batches.measure(
            result,
            plan.small_fields,
            plan.small_batches,
            plan.small_bytes,
            repeats=plan.repeats,
            case_s=lambda: plan.small_s,
            as_torch="torch" in result.versions,
        )
    if "torch" not in result.versions:
        result.baselines_missing["torch.index_select"] = "torch is not installed here"
    return harness.finish(result, began_s)


class _TableBench:
    """The cases of one table: one store, filled; its floors and its baselines."""

    def __init__(self, plan: Plan, table: Table, baselines: dict[str, str], clock: Clock, result: BenchResult) -> None:
        self.plan = plan
        self.table = table
        self.wanted_peers = baselines
        self.clock = clock
        self.result = result
        self.baselines: list[BaselineProcess] = []
        self.random = np.random.default_rng(SEED)
        self.as_torch = "torch" in result.versions

    def measure(self, *, single_rows: bool) -> None:
        """All cases of this table, in an order that limits memory: baselines are closed before the largest batches."""
        table = self.table
        with contextlib.ExitStack() as stack:
            harness.say(f"{table.name}: filling {table.rows} rows")
            store = stack.enter_context(
                Store.create(f"bench-{os.getpid()}", table.fields, max_length=table.max_length, capacity=table.rows)
            )
            self.store = store
            self.columns = [store.column(name) for name in table.fields]
            noise = _noise(table, min(64, table.rows), self.random)
            while len(store) < table.rows:
                n = min(64, table.rows - len(store))
                store.insert({name: array[:n] for name, array in noise.items()})
            self.keys = store.keys()
            self._start_peers(stack)
            small = [batch for batch in table.batches if batch * table.row_bytes <= self.plan.peer_batch_bytes]
            large = [batch for batch in table.batches if batch not in small]
            for batches in (small, large):
                for what, measure in (("fetch", self._fetch_case), ("insert", self._insert_case)):
                    for batch in batches:
                        for threads in table.threads:
                            if self.result.deadline.allows(f"{what} {table.name} x {batch}, {threads} threads"):
                                measure(batch, threads)
                if self.baselines and large:
                    self._end_peers(
                        f"{batch_list(large)} rows of {table.name} would not fit into memory together with geartrain's"
                    )
            if single_rows:
                self._single_rows()
                self._bytes_per_row()

    # --- baselines ----------------------------------------------------------------------------------------------

    def _start_peers(self, stack: contextlib.ExitStack) -> None:
        began_s = time.monotonic()
        rows = max(1, self.table.peer_bytes // self.table.row_bytes)
        for name, python in list(self.wanted_peers.items()) if self.table.with_peers else ():
            if time.monotonic() - began_s > self.plan.peer_start_s:
                self._missing(name, "no time was left to start it; run without --quick")
                continue
            harness.say(f"{self.table.name}: starting {name}")
            try:
                baseline = stack.enter_context(
                    BaselineProcess(name, python, rows, self.table.fields, self.table.max_length)
                )
            except BaselineError as error:
                self._missing(name, str(error))
                del self.wanted_peers[name]
                continue
            for package, version in baseline.versions.items():
                if self.result.versions.setdefault(package, version) != version:
                    self.result.versions[f"{package} of {name}"] = version
            self.baselines.append(baseline)

    def _end_peers(self, reason: str) -> None:
        for baseline in self.baselines:
            self._missing(baseline.name, reason)
            baseline.close()
        self.baselines = []

    def _missing(self, name: str, reason: str) -> None:
        known = self.result.baselines_missing.get(name)
        reason = f"{self.table.name}: {reason}"
        self.result.baselines_missing[name] = reason if known is None else f"{known}; {reason}"

    def _peer_systems(self, what: str, batch: int, threads: int, calls: int) -> list[System]:
        systems = []
        for baseline in list(self.baselines):
            try:
                if baseline.threads(threads) != threads:
                    continue  # it has no threads; its figure is in the case with one

                # Bound now: the loop's names change. Three calls at least, for baselines that prefetch.
                def one_lap(
                    baseline: BaselineProcess = baseline, calls: int = max(calls, 3 if baseline.name == "reverb" else 1)
                ) -> Lap:
                    return baseline.lap(what, batch, calls)

                one_lap()
            except BaselineError as error:
                self._missing(baseline.name, f"{what} of {batch}: {error}")
                baseline.close()
                self.baselines.remove(baseline)
                continue
            systems.append(System(baseline.name, one_lap, rounds=self.plan.peer_rounds))
        return systems

    # --- fetch ----------------------------------------------------------------------------------------------

    def _fetch_case(self, batch: int, threads: int) -> None:
        calls = max(1, self.plan.lap_bytes // (batch * self.table.row_bytes))
        outputs = [
            aligned((batch, *field.block_shape(self.table.max_length)), field) for field in self.table.fields.values()
        ]
        every = range(len(self.columns))

        def draw() -> NDArray[np.uint32]:
            return self.random.integers(0, self.table.rows, batch, dtype=np.uint32)

        def floor(stream: bool, parts: int) -> Lap:
            jobs = []
            for rows in [draw() for _ in range(calls + 1)]:
                jobs.append(np.array_split(rows, parts))
            starts = np.cumsum([0] + [len(part) for part in jobs[0]])

            def work(part: int, first: int, last: int) -> None:
                for job in jobs[first:last]:
                    for i in every:
                        column, out = self.columns[i], outputs[i]
                        gather(column, out[starts[part] : starts[part + 1]], job[part], stream)

            return in_parts(calls, parts, work)

        def ours() -> Lap:
            keys = [self.keys[draw()] for _ in range(calls)]
            output: Any = "torch" if self.as_torch else "numpy"

            def body() -> None:
                for some in keys:
                    fetch(self.store, some, threads=threads, output=output)

            return harness.lap(
                calls, body, lambda: fetch(self.store, self.keys[draw()], threads=threads, output=output)
            )

        def numpy_index() -> Lap:
            rows = [draw() for _ in range(calls)]

            def one_call(some: NDArray[np.uint32]) -> None:
                for column in self.columns:
                    column[some]

            def body() -> None:
                for some in rows:
                    one_call(some)

            return harness.lap(calls, body, lambda: one_call(draw()))

        systems = floor_systems(floor, threads)
        systems.append(System("geartrain", ours))
        with Replay(
            self.store,
            Uniform(SEED),
            batch,
            prefetch=0,
            options=ReplayOptions(threads=threads),
            output="torch" if self.as_torch else "numpy",
        ) as replay:

            def sample() -> None:
                for _ in range(calls):
                    replay.sample()

            systems.append(System("geartrain Replay", lambda: harness.lap(calls, sample, replay.sample)))
            if threads == 1:
                systems.append(System("NumPy column[rows]", numpy_index))
            if self.as_torch:
                systems.append(System("torch.index_select(out=)", self._torch_lap(draw, outputs, calls, threads)))
            systems += self._peer_systems("sample", batch, threads, calls)
            self._record("fetch", batch, threads, systems)

    def _torch_lap(
        self, draw: Callable[[], NDArray[np.uint32]], outputs: list[NDArray[Any]], calls: int, threads: int
    ) -> Callable[[], Lap]:
        import torch

        columns = [torch.from_numpy(column) for column in self.columns]
        outs = [torch.from_numpy(output) for output in outputs]

        def one_lap() -> Lap:
            rows = [torch.from_numpy(draw().astype(np.int64)) for _ in range(calls + 1)]

            def body(first: int, last: int) -> None:
                for some in rows[first:last]:
                    for column, out in zip(columns, outs, strict=True):
                        torch.index_select(column, 0, some, out=out)

            torch.set_num_threads(threads)
            done = harness.lap(calls, lambda: body(1, calls + 1), lambda: body(0, 1))
            torch.set_num_threads(1)
            return done

        return one_lap

    # --- insert ---------------------------------------------------------------------------------------------

    def _insert_case(self, batch: int, threads: int) -> None:
        calls = max(1, self.plan.lap_bytes // (batch * self.table.row_bytes))
        source = _noise(self.table, batch, self.random)
        arrays = list(source.values())
        places = self.table.rows // batch
        turn = 0

        def floor(stream: bool, parts: int) -> Lap:
            nonlocal turn
            firsts = [(turn + call) % places * batch for call in range(calls + 1)]
            turn += calls + 1
            bounds = [batch * part // parts for part in range(parts + 1)]
            rows = np.arange(batch, dtype=np.uint32)

            def work(part: int, start: int, stop: int) -> None:
                lo, hi = bounds[part], bounds[part + 1]
                for first in firsts[start:stop]:
                    for array, column in zip(arrays, self.columns, strict=True):
                        scatter(array[lo:hi], column[first + lo : first + hi], rows[: hi - lo], stream)

            return in_parts(calls, parts, work)

        def ours() -> Lap:
            def body() -> None:
                for _ in range(calls):
                    self.store.insert(source, threads=threads)

            return harness.lap(calls, body, lambda: self.store.insert(source, threads=threads))

        systems = floor_systems(floor, threads)
        systems.append(System("geartrain", ours))
        systems += self._peer_systems("insert", batch, threads, calls)
        self._record("insert", batch, threads, systems)
        self.keys = self.store.keys()

    # --- one row --------------------------------------------------------------------------------------------

    def _single_rows(self) -> None:
        """Overhead of a row, without the copy of its bytes, from Python and from C++."""
        store, n = self.store, self.plan.single_rows
        name = next(iter(self.table.fields))
        source = _noise(self.table, 1, self.random)
        one, column = source[name][0], self.columns[0]

        def times(body: Callable[[int], None]) -> list[float]:
            found = []
            for i in range(n + 20):
                began_ns = time.perf_counter_ns()
                body(i)
                found.append((time.perf_counter_ns() - began_ns) / 1e9)
            return found[20:]

        def in_place(_: int) -> None:
            with store.row() as row:
                row[name], row.length = one, store.max_length

        def copied(_: int) -> None:
            store.insert(source)

        def copy_only(i: int) -> None:
            column[i % self.table.rows][...] = one

        found: dict[str, list[float]] = {"copy": [], "in place": [], "insert": []}
        for _ in range(5):
            for what, body in (("copy", copy_only), ("in place", in_place), ("insert", copied)):
                found[what] += times(body)
        copy_s = float(np.median(found["copy"]))
        case = f"one row of {self.table.name}, from Python"
        self._add(harness.time_row(case, "floor", "latency", "us", found["copy"], copy_s))
        for system, what in (("geartrain row()", "in place"), ("geartrain insert", "insert")):
            self._add(harness.time_row(case, system, "latency", "us", found[what], copy_s))
            overhead = [max(0.0, s - copy_s) for s in found[what]]
            self._add(harness.time_row(case, system, "overhead", "us", overhead, copy_s))
        native = [_native.time_single_inserts(store.name, n) / 1e9 for _ in range(25)]
        self._add(harness.time_row("one row, from C++, nothing copied", "geartrain", "overhead", "ns", native, copy_s))
        self.keys = store.keys()

    def _bytes_per_row(self) -> None:
        about = self.store.native.describe()
        fixed = 32768  # header, control, field records and clients, whatever the number of rows
        per_row = (about["nbytes"] - about["column_bytes"] - fixed) / about["capacity"]
        case = f"{about['capacity']} rows"
        self._add(
            Row(case, "geartrain", "metadata per row, trees included", "B", per_row, per_row, per_row, per_row, 1.0)
        )

    # --- results -------------------------------------------------------------------------------------------

    def _record(self, what: str, batch: int, threads: int, systems: list[System]) -> None:
        nbytes = batch * self.table.row_bytes
        case = f"{self.table.name} x {batch}, {threads} thread{'s' * (threads > 1)}"
        harness.say(f"{what} {case}")
        try:
            laps = harness.take_turns(
                systems, repeats=self.plan.repeats, budget_s=self.clock.next_case_s(self.plan.case_s)
            )
        except BaselineError as error:
            names = [baseline.name for baseline in self.baselines]
            self._end_peers(f"{what} of {batch}: {error}")
            ours = [system for system in systems if system.name not in names]
            laps = harness.take_turns(ours, repeats=self.plan.repeats, budget_s=2.0)
        laps, disturbed = harness.quiet(laps, [baseline.name for baseline in self.baselines])
        if disturbed:
            whose = ", ".join(dict.fromkeys("floor" if name.startswith("floor") else name for name in disturbed))
            self.result.notes.append(f"{what} {case}: laps with context switches were counted too, of {whose}")
        floors = {name: of_one for name, of_one in laps.items() if name.startswith("floor")}
        best = min(floors, key=lambda name: float(np.median([one.seconds for one in floors[name]])))
        frugal = min(floors, key=lambda name: float(np.median([one.cpu_seconds for one in floors[name]])))
        metrics = [(what, "seconds", best)]
        if threads == 1:
            metrics.append((f"{what} per CPU second", "cpu_seconds", frugal))
        for metric, attribute, floor in metrics:
            shown = {"floor": laps[floor]} | {name: of for name, of in laps.items() if name not in floors}
            floor_s = float(np.median([getattr(one, attribute) for one in laps[floor]]))
            for name, of_one in shown.items():
                seconds = [getattr(one, attribute) for one in of_one]
                self._add(harness.rate_row(case, name, metric, "GB/s", seconds, nbytes / 1e9, floor_s))

    def _add(self, row: Row) -> None:
        self.result.rows.append(row)


def _noise(table: Table, n: int, random: np.random.Generator) -> dict[str, NDArray[Any]]:
    """n rows, a warm array per field."""
    made: dict[str, NDArray[Any]] = {}
    for name, field in table.fields.items():
        shape = field.block_shape(table.max_length)
        array = aligned((n, *shape), field)
        rows = min(n, 64)
        if field.dtype == "float32":
            array[:rows] = random.standard_normal((rows, *shape), dtype=np.float32)
        else:
            array[:rows] = random.integers(0, 2, (rows, *shape))
        for first in range(rows, n, rows):
            array[first : first + rows] = array[: min(rows, n - first)]
        made[name] = array
    return made


def batch_list(batches: list[int]) -> str:
    """Batch sizes as text."""
    return " and ".join(map(str, batches))


if __name__ == "__main__":
    report.main_of("store", main)
