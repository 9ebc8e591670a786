"""Interleaved timing of several systems and a floor (lower bound) in one run, compared by medians.

A *lap* is one repetition of one system: enough calls to last a millisecond or more. A *round* is one lap of
every system, in an order that is drawn anew each time, so that slow drifts of the machine, and what a lap leaves in the
caches, affect all alike. Numbers are quantiles of the time per call over the laps; ratios are ratios of medians.

What p50, p75, p90 and p95 mean: quantiles of the time per call over laps. For a rate
they are the rates at those times, so p95 is always the slow tail, never the fast one. `ratio_to_floor` is
always speed: 1 is as fast as the floor, 0.5 takes twice the floor's time, for rates and times alike.

On a shared machine a process is preempted now and then. A lap with an involuntary context switch says little about
the code, for the floor as for geartrain. Such laps are left out of all the systems that are timed in this
process if each of them keeps `MIN_QUIET` others; otherwise all their laps count, with a note. A baseline's laps
are judged alone, by the same rule.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from geartrain.core.arguments import shown
from geartrain.core.json_values import entry, object_entries
from geartrain.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Seconds of a run with --quick, from where its result is made: the start and the report take a few more.
QUICK_S = 50.0
#: Undisturbed laps that a system needs before the disturbed ones are left out.
MIN_QUIET = 7
QUANTILES = (0.50, 0.75, 0.90, 0.95)


@dataclass(frozen=True)
class Lap:
    """One repetition: seconds of wall and CPU time per call, and whether it was preempted."""

    seconds: float
    cpu_seconds: float
    disturbed: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a result; see the module's text for what the quantiles and the ratio mean."""

    case: str
    system: str
    metric: str
    unit: str
    p50: float
    p75: float
    p90: float
    p95: float
    ratio_to_floor: float


class Deadline:
    """When a run has to be over, and what was left out of it.

        for case in cases:
            if result.deadline.allows(case.name):
                measure(case)

    Args:
        seconds: from now; None for none.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.left_out: list[str] = []
        self._seconds = seconds
        self._began_s = time.monotonic()
        self._first_s = 0.0
        self._allowed = 0

    def allows(self, what: str) -> bool:
        """Whether there is time for one more case, if it takes as long as those before did; else it is left out."""
        now_s = time.monotonic()
        case_s = (now_s - self._first_s) / self._allowed if self._allowed else 0.0
        if case_s >= self.left_s():
            self.left_out.append(what)
            return False
        self._first_s = self._first_s or now_s
        self._allowed += 1
        return True

    def left_s(self) -> float:
        """Seconds that are left, 0 at least; infinity without a deadline."""
        if self._seconds is None:
            return float("inf")
        return max(0.0, self._began_s + self._seconds - time.monotonic())


@dataclass
class BenchResult:
    """A benchmark's rows, with the machine, versions and command that every figure needs.

    Attributes:
        left_out: cases that did not fit into the time of a quick run.
        deadline: of the run; not saved.
    """

    bench: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    baselines_missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    deadline: Deadline = field(default_factory=Deadline, repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {key: value for key, value in asdict(self).items() if key != "deadline"}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        """The result that `as_json` was made of.

        Raises:
            ArgumentError: entries that such a result does not have, or lacks.
        """
        try:
            if "deadline" in found:
                raise ValueError("it has a deadline")
            made = cls(**{**found, "rows": [Row(**row) for row in object_entries(found, "rows")]})
            for key, kind in _KINDS.items():
                entry(vars(made), key, kind)
            for row in made.rows:
                for key, value in vars(row).items():
                    if not isinstance(value, str if key in _TEXTS else int | float):
                        raise ValueError(f"{key} of a row is {shown(value)}")
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"this is no saved result of a benchmark: {error}") from None
        return made


_TEXTS = ("case", "system", "metric", "unit")
_KINDS = {
    **{"bench": str, "command": str, "machine": dict, "versions": dict},
    **{"baselines_missing": dict, "notes": list, "left_out": list},
}


@dataclass
class System:
    """Something to be timed. `lap` runs one repetition; `rounds` bounds how many of them (None: all)."""

    name: str
    lap: Callable[[], Lap]
    floor: bool = False
    rounds: int | None = None


class Clock:
    """A budget of seconds shared out evenly over the cases that are left."""

    def __init__(self, budget_s: float, cases: int) -> None:
        self._end_s = time.monotonic() + budget_s
        self._left = cases

    def next_case_s(self, most_s: float) -> float:
        """Time limit of the next case in seconds, `most_s` at most."""
        share_s = (self._end_s - time.monotonic()) / max(1, self._left)
        self._left -= 1
        return max(0.0, min(most_s, share_s))


def lap(calls: int, body: Callable[[], object], warm: Callable[[], object] | None = None) -> Lap:
    """Times `body`, which makes `calls` calls, in this process and all its threads.

    `warm` makes one call before the clock starts, so that the previous system's cache contents do not affect a lap:
    small batches fit in the caches.
    """
    if warm is not None:
        warm()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu_s, began_s = time.process_time(), time.perf_counter()
    body()
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
    disturbed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != switches
    return Lap(seconds / calls, cpu_seconds / calls, disturbed)


def take_turns(systems: Sequence[System], *, repeats: int, budget_s: float, warmups: int = 1) -> dict[str, list[Lap]]:
    """Interleaved laps of every system: until each has `repeats` undisturbed ones, or the budget is spent.

    Every system gets at least three laps, whatever the budget. Warm-up laps are not among them. Each turn has an order
    of its own: a lap finds in the caches what the one before has left there, in one order always the same.
    """
    order = Random(0)
    gc.collect()
    for system in systems:
        for _ in range(warmups):
            system.lap()
    laps: dict[str, list[Lap]] = {system.name: [] for system in systems}
    ends_s = time.monotonic() + budget_s

    def wants_more(system: System) -> bool:
        got = laps[system.name]
        most = repeats if system.rounds is None else min(repeats, system.rounds)
        return sum(not one.disturbed for one in got) < most and len(got) < 4 * most

    turn = 0
    while turn < 3 or (time.monotonic() < ends_s and any(map(wants_more, systems))):
        for system in order.sample(list(systems), len(systems)):
            # A system with enough laps continues with the others, unless its laps are bounded: they are long.
            if system.rounds is None or turn < 3 or wants_more(system):
                laps[system.name].append(system.lap())
        turn += 1
    return laps


def quiet(laps: dict[str, list[Lap]], alone: Collection[str] = ()) -> tuple[dict[str, list[Lap]], list[str]]:
    """The laps that count, and the systems whose disturbed laps had to be counted as well.

    `alone` are the systems judged by themselves; the others are judged together.
    """
    kept = {name: [one for one in of_one if not one.disturbed] for name, of_one in laps.items()}
    enough = {name: len(kept[name]) >= min(MIN_QUIET, len(laps[name])) for name in laps}
    together = all(enough[name] for name in laps if name not in alone)
    good = {name: enough[name] if name in alone else together for name in laps}
    return {name: kept[name] if good[name] else laps[name] for name in laps}, [n for n in laps if not good[n]]


def quantiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """p50, p75, p90 and p95 of the values."""
    p50, p75, p90, p95 = np.quantile(np.asarray(values, np.float64), QUANTILES).tolist()
    return p50, p75, p90, p95


def rate_row(
    case: str, system: str, metric: str, unit: str, seconds: Sequence[float], per_call: float, floor_s: float
) -> Row:
    """A rate: `per_call` units are done in each call of so many seconds; `floor_s` is the floor's median."""
    p50, p75, p90, p95 = quantiles([max(s, 1e-9) for s in seconds])
    return Row(
        case, system, metric, unit, per_call / p50, per_call / p75, per_call / p90, per_call / p95, floor_s / p50
    )


def time_row(case: str, system: str, metric: str, unit: str, seconds: Sequence[float], floor_s: float) -> Row:
    """A duration, in "s", "ms", "us" or "ns"."""
    p50, p75, p90, p95 = quantiles([max(s, 1e-9) for s in seconds])
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
    return Row(case, system, metric, unit, scale * p50, scale * p75, scale * p90, scale * p95, floor_s / p50)


def machine() -> dict[str, Any]:
    """The machine of the measurement."""
    info = _first_values("/proc/cpuinfo")
    memory_kib = int(_first_values("/proc/meminfo").get("MemTotal", "0 kB").split()[0])
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = {_text(index / "level"): _text(index / "size") for index in sorted(caches.glob("index*"))}
    return {
        "cpu": info.get("model name", platform.processor() or "unknown"),
        "cpu_family": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache": sizes[max(sizes)] if sizes else "unknown",
        "memory_gb": round(memory_kib * 1024 / 1e9, 1),
        "kernel": platform.release(),
        "shmem_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of geartrain and of the packages that are installed."""
    import geartrain

    found = {"python": platform.python_version(), "geartrain": geartrain.__version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command(bench: str, *, quick: bool, baselines: Iterable[str]) -> str:
    """The command that repeats this run; paths of baselines' interpreters are placeholders."""
    words = ["geartrain bench", bench] + ["--quick"] * quick
    words += [f"--baseline-python {baseline}=/path/to/python" for baseline in baselines]
    return " ".join(words)


def new_result(bench: str, *, quick: bool, baselines: Iterable[str], packages: Sequence[str]) -> BenchResult:
    """A result with machine, versions and command, without rows. With `quick` its deadline begins."""
    about = command(bench, quick=quick, baselines=baselines), machine(), versions(*packages)
    return BenchResult(bench, *about, deadline=Deadline(QUICK_S if quick else None))


def note_missing(result: BenchResult, baselines: Iterable[str], known: Sequence[str]) -> None:
    """Adds why baselines that a benchmark has are not measured, and those that it does not have.

    Args:
        baselines: names that an interpreter was given for.
        known: names that the benchmark has.
    """
    given = set(baselines)
    for name in known:
        if name not in given:
            result.baselines_missing[name] = f"no interpreter given (--baseline-python {name}=/path/to/python)"
    for name in given.difference(known):
        result.baselines_missing[name] = f"unknown to this benchmark, which has {', '.join(known)}"


def finish(result: BenchResult, began_s: float) -> BenchResult:
    """Adds the load average after the run, the time it took, and what was left out."""
    result.left_out += result.deadline.left_out
    result.machine["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
    result.machine["run_s"] = round(time.monotonic() - began_s, 1)
    return result


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Context in which torch uses one thread, for all systems."""
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def say(text: str) -> None:
    """Progress, on stderr, so that stdout holds results only."""
    print(text, file=sys.stderr, flush=True)


def _first_values(path: str) -> dict[str, str]:
    """The first value of each "key : value" line of a file in /proc; empty where there is no such file."""
    found: dict[str, str] = {}
    try:
        for line in Path(path).read_text().splitlines():
            key, colon, value = line.partition(":")
            if colon:
                found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _chosen(path: str) -> str:
    """The bracketed word of a sysfs choice such as "always [madvise] never"."""
    text = _text(Path(path))
    return text.partition("[")[2].partition("]")[0] or text
