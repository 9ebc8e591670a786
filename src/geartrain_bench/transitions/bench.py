"""Transitions and windows of steps, compared with the buffers of other libraries: CPU microseconds a call.

| case | geartrain | baselines |
|---|---|---|
| SAC, sample 256 | `Replay` with `Uniform(over="steps")` and `Transitions()`, five fields read as tensors | `sample` |
| SAC, n-step 3, sample 256 | `Transitions(n_step=3)` | SB3's `NStepReplayBuffer`, cpprb's `Nstep` |
| Atari, sample 32 | frames stored once, `frame_stack=4` | stacks of 4 stored |
| 100 KB, sample 256 | observations of 12,500 float32, so that a transition has 100 KB | `sample` |
| SAC, add a step of 1, of 16 environments | `recorder.step` | `add`, `extend` |
| windows of 10 and 20 steps, sample 256 | `Windows(10, whole=True)`, four fields | `SliceSampler`, flashbax, NumPy |
| bytes a step | rows of 1 to 1,000 steps, all lengths alike, until the store is full | their arrays |

SAC: observations of 17 and actions of 6 float32, episodes of 1,000 steps; Atari: frames of 84 x 84 bytes. The floor of
a case copies the same bytes in C: out of the store's own memory, at random steps drawn before the clock starts, into
warm memory; for `add`, one step of every environment. It draws nothing, and makes no tensors; it is a call of Python
for each field, so that one call that adds a step may be faster. "floor, private memory" copies as many bytes out of one
array for each field, which lie in huge pages where the system gives them, as those of baselines do.

geartrain's store is opened by its name, and another process records into it and is killed, again and again
(`geartrain_bench.harness.killed_writers`), while all systems are timed.

NumPy and `torch.index_select(out=)` index one array for each field in plain memory, in this process: a transition's
five arrays, next observations apart, or a window's steps. index_select writes into tensors that are used again for
every batch; NumPy and the baselines allocate each batch. `torchrl-thp` is torchrl with torch's allocator in huge pages.

Threats to validity: arrays of baselines lie in private memory, with huge pages where the system gives them, geartrain's
in shared memory. Batches are dropped unread. On a busy machine only the ratios mean something. Batches of a megabyte
and more may be copied by two threads, of which the second polls between batches and counts as well. Batches that take
longer than about 50 us are built on a prefetch thread: a lap of large batches begins with up to two that were built
before its clock started. Compare baselines with the line prefetch=0, which has neither.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.core.schema import Field
from geartrain.core.shared_files import writing
from geartrain.errors import ArgumentError, ReplayError
from geartrain.replay.replay import Replay
from geartrain.replay.transitions import Transitions
from geartrain.replay.windows import Windows
from geartrain.selection import Uniform
from geartrain.store.recorder import EPISODES, recorded_fields
from geartrain.store.store import Store
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.baselines import VARIANTS
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError
from geartrain_bench.harness.killed_writers import ROWS, KilledWriters
from geartrain_bench.harness.timing import BenchResult, Lap, Row, System

WORKER = Path(__file__).with_name("worker.py")
ALL_BASELINES = ("sb3", "torchrl", "torchrl-thp", "cpprb", "tianshou", "flashbax")
GAMMA = 0.99
ACTION = 6
METRIC = "CPU time per call"
#: A lap makes as many calls as move so many bytes, and as the plan has at most.
LAP_BYTES = 256_000_000


@dataclass(frozen=True)
class Plan:
    """Sizes, and time limits."""

    sac_steps: int = 500_000
    atari_steps: int = 20_000
    large_steps: int = 5_000
    bytes_steps: int = 200_000
    repeats: int = 15
    case_s: float = 6.0
    calls: int = 100
    #: No baseline is started later than this after the start.
    baselines_until_s: float = float("inf")


FULL = Plan()
QUICK = Plan(60_000, 1_500, 2_000, 50_000, repeats=7, case_s=0.5, calls=30, baselines_until_s=40.0)


@dataclass(frozen=True)
class Case:
    """What is timed: samples of `batch` transitions or windows of steps, or with a batch of 0 a step added."""

    name: str
    observation: tuple[int, ...]
    dtype: str
    batch: int = 0
    n_envs: int = 1
    n_step: int = 1
    frame_stack: int = 1
    #: Steps of a window; 0 for transitions.
    window: int = 0
    #: Steps of an episode, and the plan's entry that says how many there are.
    episode: int = 1000
    sized_by: str = "sac_steps"

    @property
    def stacked(self) -> tuple[int, ...]:
        """An observation as buffers of whole transitions store it."""
        return self.observation if self.frame_stack == 1 else (self.frame_stack, *self.observation)

    @property
    def fields(self) -> dict[str, Field]:
        """Of a store."""
        made = recorded_fields(
            {
                "obs": Field(self.observation, self.dtype),
                "action": Field((ACTION,), "float32"),
                "reward": Field((), "float32"),
            }
        )
        return {**made, "truncated": Field((), "bool")}

    @property
    def read(self) -> tuple[str, ...]:
        """Names of what is read of a batch."""
        if self.window:
            return ("obs", "action", "reward", "terminated")
        return ("obs", "next_obs", "action", "reward", "discount")

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch, or of a step of all environments."""
        steps = {name: self.fields[name].block_nbytes(1) * count for name, count in self.copied.items()}
        return (self.batch or self.n_envs) * sum(steps.values())

    @property
    def plain(self) -> bool:
        """Whether its batches are transitions that a buffer has stored as they are sampled."""
        return bool(self.batch) and not self.window and self.n_step == self.frame_stack == 1

    @property
    def copied(self) -> dict[str, int]:
        """By field how many steps of it a transition or window takes."""
        if self.window:
            return dict.fromkeys(self.read, self.window)
        steps = {"obs": self.frame_stack + self.n_step, "reward": self.n_step}
        return {name: steps.get(name, 1) for name in self.fields if name != "last"}


SAC: dict[str, Any] = {"observation": (17,), "dtype": "float32"}
CASES = (
    Case("SAC, sample 256", **SAC, batch=256),
    Case("SAC, n-step 3, sample 256", **SAC, batch=256, n_step=3),
    Case("Atari 4 x 84 x 84, sample 32", (84, 84), "uint8", batch=32, frame_stack=4, sized_by="atari_steps"),
    Case("100 KB, sample 256", (12_500,), "float32", batch=256, episode=100, sized_by="large_steps"),
    Case("SAC, add a step of 1", **SAC),
    Case("SAC, add a step of 16", **SAC, n_envs=16),
    Case("windows of 10 steps, sample 256", **SAC, batch=256, window=10),
    Case("windows of 20 steps, sample 256", **SAC, batch=256, window=20),
)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    case: Sequence[str] = (),
) -> BenchResult:
    """Measures, prints the table, writes the requested files, and returns the result.

    `baselines` maps "sb3", "torchrl", "torchrl-thp", "cpprb", "tianshou" and "flashbax" to the interpreter of an
    environment that has it. `case` are texts: only cases
    with one of them in their name are measured.

    Raises:
        ArgumentError: no case has one of the texts in its name.
    """
    wanted = {**report.parse_baselines([]), **(baselines or {})}
    result = run(QUICK if quick else FULL, wanted, quick=quick, only=case)
    report.report(result, json_path, plot_path, draw=plot)
    return result


def plot(result: BenchResult, path: Path) -> None:
    """CPU time per call of each case, as bars of the systems. Needs matplotlib."""
    pyplot = import_pyplot()
    cases = list(dict.fromkeys(row.case for row in result.rows))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(3.2 * len(cases), 4.8), layout="constrained", squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        rows = [row for row in result.rows if row.case == case]
        colors = ["tab:gray" if row.system == "floor" else f"C{place}" for place, row in enumerate(rows)]
        bars = axis.bar([row.system for row in rows], [row.p50 for row in rows], color=colors)
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_title(case, fontsize=9)
        axis.set_ylabel(f"{rows[0].metric}, {rows[0].unit} (median)")
        axis.tick_params(axis="x", rotation=60)
    figure.suptitle(f"{result.command}\n{result.machine['cpu']}, {result.machine['cores']} cores", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(plan: Plan, baselines: dict[str, str], *, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
    """All cases, or those with one of the texts `only` in their name."""
    began_s = time.monotonic()
    cases = [case for case in CASES if not only or any(text in case.name for text in only)]
    if not cases:
        raise ArgumentError(
            f"no case has {' or '.join(map(repr, only))} in its name; "
            f"cases are {', '.join(case.name for case in CASES)}"
        )
    result = harness.new_result("transitions", quick=quick, baselines=baselines, packages=("numpy", "torch"))
    result.command += "".join(f' --case "{text}"' for text in only)
    harness.note_missing(result, baselines, ALL_BASELINES)
    stored: dict[str, float] = {}
    wanted = {name: python for name, python in baselines.items() if name in ALL_BASELINES}
    with harness.one_torch_thread():
        with contextlib.ExitStack() as stack:
            peers = _started(wanted, stack, result)
            for case in cases:
                if not result.deadline.allows(case.name):
                    continue
                harness.say(case.name)
                one = _CaseBench(plan, case, peers, began_s + plan.baselines_until_s, result)
                one.measure()
                if case == CASES[0]:
                    stored = one.bytes
    if not only and result.deadline.allows("SAC, bytes a step"):
        _bytes_per_step(plan, stored, result)
    return harness.finish(result, began_s)


def _started(
    baselines: dict[str, str], stack: contextlib.ExitStack, result: BenchResult
) -> dict[str, AnsweringProcess]:
    found = {}
    for name, python in baselines.items():
        try:
            found[name] = stack.enter_context(
                AnsweringProcess(name, python, WORKER, {"OMP_NUM_THREADS": "1", **VARIANTS.get(name, {})})
            )
        except BaselineError as error:
            result.baselines_missing[name] = str(error)
    return found


class _CaseBench:
    """One case: a floor, a store, and one baseline at a time, interleaved."""

    def __init__(
        self, plan: Plan, case: Case, baselines: dict[str, AnsweringProcess], until_s: float, result: BenchResult
    ) -> None:
        self.plan = plan
        self.case = case
        self.baselines = baselines
        self.until_s = until_s
        self.result = result
        self.random = np.random.default_rng(0)
        self.laps: dict[str, list[Lap]] = {}
        self.bytes: dict[str, float] = {}
        self.filled = 0  # rows of whole episodes, the store's first
        self.steps: int = getattr(plan, case.sized_by)
        self.calls = max(1, min(plan.calls, LAP_BYTES // case.batch_bytes))

    def measure(self) -> None:
        """Times all systems, and records them."""
        ours = self._sample if self.case.batch else self._add
        episode = self.case.episode
        capacity = -(-self.steps // episode) + 2 * self.case.n_envs + ROWS
        with Store.create(f"bench-{os.getpid()}", self.case.fields, max_length=episode + 1, capacity=capacity) as made:
            if self.case.batch:
                self._fill(made)
            with Store.open(made.name) as store, KilledWriters(made.name) as writers:
                ours(store)
        self.result.notes.append(f"{self.case.name}: {writers.kills} writers were killed meanwhile")
        floor = harness.quantiles([one.cpu_seconds for one in self.laps["floor"]])[0]
        for name, laps in self.laps.items():
            seconds = [one.cpu_seconds for one in laps]
            self.result.rows.append(harness.time_row(self.case.name, name, METRIC, "us", seconds, floor))
        if self.case.plain:
            rates = (
                f"{row.system} {self.case.batch / row.p50:.3g}"
                for row in self.result.rows
                if row.case == self.case.name
            )
            self.result.notes.append(f"{self.case.name}: million transitions a CPU second: {', '.join(rates)}")

    def _sample(self, store: Store) -> None:
        case = self.case
        selection = Uniform(seed=0, over="steps")
        more: dict[str, Any] = {"view": Transitions(n_step=case.n_step, gamma=GAMMA, frame_stack=case.frame_stack)}
        if case.window:
            more = {"window": Windows(case.window, whole=True), "fields": case.read}

        def reads(replay: Replay) -> Callable[[], None]:
            def one() -> None:
                batch = replay.sample()
                for name in case.read:
                    _ = batch[name]

            for _ in range(32):  # it finds out on which thread to build batches
                one()
            return one

        with (
            Replay(store, selection, case.batch, **more) as replay,
            Replay(store, selection, case.batch, **more, prefetch=0) as other,
        ):
            ours = [self._system("geartrain", reads(replay)), self._system("geartrain prefetch=0", reads(other))]
            if case.window:
                ours.append(self._system("NumPy", self._numpy_windows()))
            elif case.plain:
                ours += self._indexed_arrays()
            ours.append(self._system("floor, private memory", self._private_floor()))
            self._take(ours, self._store_floor(store))
            if replay.stats()["path"] != "native":
                raise ReplayError(f"batches came by another path: {replay.stats()['path']}")

    def _fill(self, store: Store) -> None:
        """Whole episodes of noise."""
        episode = self.case.episode
        rows = min(8, -(-self.steps // episode))
        episodes: dict[str, NDArray[Any]] = {}
        for name, field in store.fields.items():
            noise = self.random.integers(0, 256, (rows, episode + 1, *field.shape), np.uint8)
            episodes[name] = np.zeros(noise.shape, bool) if field.dtype == "bool" else noise.astype(field.dtype)
        episodes["terminated"][:, -2] = True
        for _ in range(-(-self.steps // (rows * episode))):
            store.insert(episodes, lengths=np.full(rows, episode + 1))
        self.filled = len(store)

    def _store_floor(self, store: Store) -> Callable[[], None]:
        """A copy of the bytes of a batch's transitions or windows, out of the store's own rows."""
        case = self.case
        rows, longest = self.filled, max(case.copied.values())
        drawn = self.random.integers(0, [rows, case.episode + 1 - longest], (1024, case.batch, 2))
        parts = []
        for name, count in case.copied.items():
            column = store.column(name)
            step, unit = column.strides[1], column.itemsize  # rows are no whole number of steps apart
            places = (drawn[..., 0] * (column.strides[0] // unit) + drawn[..., 1] * (step // unit)).astype(np.uint32)
            parts.append((column, np.empty(case.batch * count * step, np.uint8), places, count * step, unit))
        at = 0

        def one() -> None:
            nonlocal at
            for source, out, places, size, unit in parts:
                _native.gather_floor(source, out, places[at], size, unit, False)
            at = (at + 1) % len(drawn)

        return one

    def _private_floor(self) -> Callable[[], None]:
        """The same, out of arrays of as many steps in plain memory."""
        case, longest = self.case, max(self.case.copied.values())
        parts = []
        for name, count in case.copied.items():
            field = case.fields[name]
            step = int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
            source = np.ones((self.steps + longest) * step, np.uint8)
            parts.append((source, np.empty(case.batch * count * step, np.uint8), count * step, step))
        drawn = self.random.integers(0, self.steps, (4096, case.batch)).astype(np.uint32)
        at = 0

        def one() -> None:
            nonlocal at
            rows, at = drawn[at], (at + 1) % len(drawn)
            for source, out, size, step in parts:
                _native.gather_floor(source, out, rows, size, step, False)

        return one

    def _numpy_windows(self) -> Callable[[], None]:
        """Windows by indices of their steps, out of arrays of as many steps."""
        case = self.case
        arrays = [np.ones((self.steps, *case.fields[name].shape), case.fields[name].dtype) for name in case.read]
        within = np.arange(case.window)

        def one() -> None:
            steps = self.random.integers(0, self.steps - case.window, (case.batch, 1)) + within
            for array in arrays:
                _ = array[steps]

        return one

    def _indexed_arrays(self) -> list[System]:
        """A batch by random indices, out of one array for each field: by NumPy, and by torch into the same tensors."""
        import torch

        case = self.case
        shapes = {"obs": case.observation, "next_obs": case.observation, "action": (ACTION,)}
        arrays = [
            np.ones((self.steps, *shapes.get(name, ())), case.dtype if "obs" in name else np.float32)
            for name in case.read
        ]
        tensors = [torch.from_numpy(array) for array in arrays]
        outputs = [torch.empty((case.batch, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in tensors]

        def by_numpy() -> None:
            steps = self.random.integers(0, self.steps, case.batch)
            for array in arrays:
                _ = array[steps]

        def by_torch() -> None:
            steps = torch.from_numpy(self.random.integers(0, self.steps, case.batch))
            for tensor, output in zip(tensors, outputs, strict=True):
                torch.index_select(tensor, 0, steps, out=output)

        return [self._system("NumPy", by_numpy), self._system("torch.index_select(out=)", by_torch)]

    def _add(self, store: Store) -> None:
        case = self.case
        n = case.n_envs
        steps = []
        for _ in range(64):
            steps.append(
                (
                    self.random.standard_normal((n, *case.observation)).astype(case.dtype),
                    self.random.standard_normal((n, ACTION)).astype(np.float32),
                    self.random.standard_normal(n).astype(np.float32),
                    self.random.random(n) < 1 / 200,
                )
            )
        never, at = np.zeros(n, bool), 0
        with store.recorder(n, autoreset="next_step") as recorder:
            recorder.reset(steps[0][0])

            def one() -> None:
                nonlocal at
                observation, action, reward, ended = steps[at]
                recorder.step(observation, action=action, reward=reward, terminated=ended, truncated=never)
                at = (at + 1) % len(steps)

            self._take([self._system("geartrain", one)], self._add_floor())

    def _add_floor(self) -> Callable[[], None]:
        """A copy of one step of every environment, a field after the other."""
        n = self.case.n_envs
        sizes = [int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize for field in self.case.fields.values()]
        parts = [(np.ones(n * size, np.uint8), np.empty(n * size, np.uint8), size) for size in sizes]
        rows = np.arange(n, dtype=np.uint32)

        def one() -> None:
            for source, out, size in parts:
                _native.gather_floor(source, out, rows, size, size, False)

        return one

    # --- turns ----------------------------------------------------------------------------------------------

    def _system(self, name: str, one: Callable[[], None], floor: bool = False) -> System:
        calls = self.calls

        def body() -> None:
            for _ in range(calls):
                one()

        # A whole lap before each: what the one of another system has left in the caches shows for dozens of calls.
        return System(name, lambda: harness.lap(calls, body, body), floor)

    def _take(self, ours: list[System], floor: Callable[[], None]) -> None:
        """geartrain and the floor, alone or with each baseline."""
        systems = [self._system("floor", floor, True), *ours]
        self._turns(systems)
        for name, baseline in self.baselines.items():
            if time.monotonic() > self.until_s:
                self._missing(name, "no time was left; run without --quick")
                continue
            harness.say(f"{self.case.name}: {name}")
            try:
                about = baseline.ask(setup_of(self.case, name, self.steps, fill=self.case.batch > 0), 240)
                self._note_versions(name, about["versions"])
                self.bytes[name] = about["bytes"] / self.steps
                self._turns([*systems, self._peer(name, baseline)])
            except BaselineError as error:
                self._missing(name, str(error))

    def _turns(self, systems: list[System]) -> None:
        plan = self.plan
        for name, laps in harness.take_turns(systems, repeats=plan.repeats, budget_s=plan.case_s).items():
            self.laps.setdefault(name, []).extend(laps)

    def _peer(self, name: str, baseline: AnsweringProcess) -> System:
        request = {"do": "sample" if self.case.batch else "add", "batch": self.case.batch, "calls": self.calls}

        def lap() -> Lap:
            got = baseline.ask(request, 120)
            return Lap(got["seconds"], got["cpu_seconds"], got["disturbed"])

        return System(name, lap)

    def _note_versions(self, name: str, versions: dict[str, str]) -> None:
        for package, version in versions.items():
            if self.result.versions.setdefault(package, version) != version:
                self.result.versions[f"{package} of {name}"] = version

    def _missing(self, name: str, reason: str) -> None:
        known = self.result.baselines_missing.get(name)
        reason = f"{self.case.name}: {reason}"
        self.result.baselines_missing[name] = reason if known is None else f"{known}; {reason}"


def setup_of(case: Case, name: str, steps: int, fill: bool) -> dict[str, Any]:
    """The request that sets a baseline up."""
    return {
        "do": "setup",
        "baseline": name,
        "observation": list(case.stacked),
        "dtype": case.dtype,
        "action": ACTION,
        "steps": steps,
        "n_envs": case.n_envs,
        "n_step": case.n_step,
        "window": case.window,
        "fill": fill,
    }


def _bytes_per_step(plan: Plan, baselines: dict[str, float], result: BenchResult) -> None:
    """Memory of a full store, pages that were ever written, over its steps."""
    case, metric = CASES[0], "memory"
    data = sum(int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize for field in case.fields.values())
    random = np.random.default_rng(0)
    name = f"bench-{os.getpid()}"
    with Store.create(name, case.fields, max_length=1001, capacity_steps=plan.bytes_steps) as store:
        episode = {name: np.zeros((1, 1001, *field.shape), field.dtype) for name, field in store.fields.items()}
        before = -1
        while len(store) > before:  # from then on each row takes the place of another
            before, length = len(store), int(random.integers(1, 1001)) + 1
            store.insert({name: array[:, :length] for name, array in episode.items()}, lengths=[length])
        held = int((store.status(store.keys())["length"] - 1).sum())
        used = store.path.stat().st_blocks * 512 / held
    shared = _bytes_of_shared_rows(case, plan.bytes_steps, random)
    found_by = {"floor": float(data), "geartrain": used, "geartrain, shared rows": shared, **baselines}
    for system, found in found_by.items():
        result.rows.append(Row("SAC, bytes a step", system, metric, "bytes", found, found, found, found, data / found))


def _bytes_of_shared_rows(case: Case, steps: int, random: np.random.Generator) -> float:
    """The same of a recorder whose episodes share rows, with as many rows as it fills."""
    fields = {**case.fields, EPISODES: Field((), "int32", per_row=True)}
    values = {
        name: np.zeros((1, *field.shape), field.dtype)
        for name, field in fields.items()
        if name not in ("obs", "terminated", "truncated", "last", EPISODES)
    }
    observation, yes, no = np.zeros((1, *fields["obs"].shape), fields["obs"].dtype), np.ones(1, bool), np.zeros(1, bool)
    with Store.create(f"bench-{os.getpid()}", fields, max_length=1001, capacity_steps=steps) as store:
        recorder = store.recorder(1, autoreset="same_step", share_rows=True)
        recorder.reset(observation)
        while recorder.rows < store.capacity - 1:  # the last one is being written
            for left in range(int(random.integers(1, 1001)), 0, -1):
                ends = yes if left == 1 else no
                final = observation if left == 1 else None
                recorder.record(observation, values, ends, no, final)
        recorder.close()
        keys = store.keys()
        last = store.column("last")[keys.row]
        within = np.arange(store.max_length) < store.status(keys)["length"][:, None]
        return store.path.stat().st_blocks * 512 / int((within & (last == 0)).sum())


__all__ = ["CASES", "FULL", "QUICK", "Case", "Plan", "main", "plot", "run", "setup_of"]

if __name__ == "__main__":
    report.main_of("transitions", main)
