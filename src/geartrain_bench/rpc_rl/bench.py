"""RPC benchmark for reinforcement learning: many observers request actions from one agent, over geartrain or torch.

A drop-in for PyTorch's `benchmarks/distributed/rpc/rl/launcher.py`: the same arguments in both spellings, the same
workload (10 episodes of 100 steps; a state of 8 KB, a policy of 7 layers, one action back), the same four metrics,
table and JSON. One argument of `LISTS` may be a list with commas and becomes the x axis. Additional arguments:

    --backend geartrain|torch|both   the backend; torch is torch.distributed.rpc, TensorPipe
    --threads 1                      of torch, in every process. The default would spin and compete with the processes
    --agent-threads N                that decide concurrently; by default geartrain's `max_running`, 1, and torch's 16
                                     threads
    --master-port 0                  rendezvous by a file instead of a port

With both, half of geartrain's episodes run before torch's and half after them, so that a machine that gets slower
affects both alike. They never run at the same time: TensorPipe's processes poll, and take CPU time, while idle. Each
backend has a report of its own: FILE.json is the first's, FILE.torch.json torch's.

In the report, as in the original, p95 of a throughput is that of the best 5 %. In `--json`, as in all benchmarks here,
it is the slow tail. The floor is the agent's work without requests: actions for states in memory.

Threats to validity: see docs/bench-rpc-rl.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.errors import ArgumentError, GeartrainError, MissingDependencyError, PeerLostError, WaitTimeoutError
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult, Row

if TYPE_CHECKING:
    from geartrain_bench.rpc_rl.worker import Work

EPISODES, STEPS = 10, 100
QUICK_EPISODES, QUICK_STEPS = 2, 25
FLOOR_REPEATS = 200
BACKENDS = {"geartrain": ("geartrain",), "torch": ("torch",), "both": ("geartrain", "torch")}
#: Arguments that may be a list, in the order of the report.
LISTS = ("world_size", "batch", "state_size", "nlayers", "out_features")
METRICS = ("agent latency (seconds)", "agent throughput", "observer latency (seconds)", "observer throughput")
PERCENTILES = (50, 75, 90, 95)
START_S, EPISODE_S, END_S = 300.0, 600.0, 30.0


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> BenchResult:
    """Measures, prints the tables, writes the reports, and returns the result with unrounded values.

    `quick` runs 2 episodes of 25 steps. `arguments` are those of the module's docstring. Raises `ArgumentError` for a
    second list and for values that make no sense.
    """
    if baselines:
        raise ArgumentError(
            "the benchmark 'rpc-rl' runs its baseline in this environment: --backend both, no --baseline-python"
        )
    settings = read(arguments)
    episodes, steps = (QUICK_EPISODES, QUICK_STEPS) if quick else (EPISODES, STEPS)
    result, runs = run(settings, episodes, steps)
    words = ["geartrain bench rpc-rl", *["--quick"] * quick, *arguments]
    result.command = " ".join(words)
    for backend in BACKENDS[settings.backend]:
        written = as_report(settings, backend, runs, result)
        show(written)
        with report_path(settings, backend).open("w") as file:
            json.dump(written, file)
    report.report(result, json_path, plot_path, draw=plot)
    return result


# --- arguments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Parsed arguments. `values` has the original's arguments in its order, a list of values for the x axis."""

    values: dict[str, Any]
    x_axis_name: str | None
    backend: str
    threads: int
    agent_threads: int | None

    def points(self) -> list[dict[str, Any]]:
        """The values of every measurement."""
        if self.x_axis_name is None:
            return [self.values]
        return [{**self.values, self.x_axis_name: one} for one in self.values[self.x_axis_name]]

    def case(self, point: dict[str, Any]) -> str:
        """Name of a measurement."""
        said = f"world size {point['world_size']}, {'batch' if point['batch'] else 'no batch'}"
        if self.x_axis_name in (None, "world_size", "batch"):
            return said
        return f"{said}, {self.x_axis_name} {point[self.x_axis_name]}"


def read(arguments: Sequence[str]) -> Settings:
    """The settings of a command line. Raises `ArgumentError`."""
    parser = argparse.ArgumentParser(
        prog="geartrain bench rpc-rl",
        description="Observers request actions from an agent, by RPC. Further options: --quick, --json FILE, "
        "--plot FILE. One of world-size, batch, state-size, nlayers, out-features may be a list: the x axis.",
    )
    for name, default, what in (
        ("world_size", "10", "processes: a coordinator, an agent, and observers"),
        ("master_addr", "127.0.0.1", "rendezvous address"),
        ("master_port", "29501", "rendezvous port; 0: by a file instead"),
        ("batch", "True", "whether the agent gathers the requests of all observers"),
        ("state_size", "10-20-10", "the shape of a state, with dashes"),
        ("nlayers", "5", "of the policy, without the first"),
        ("out_features", "10", "of each layer; actions to choose from"),
        ("output_file_path", "benchmark_report.json", "the report"),
    ):
        spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        parser.add_argument(*spellings, default=default, help=f"{what} ({default})")
    parser.add_argument("--backend", choices=BACKENDS, default="geartrain", help="backend (geartrain)")
    parser.add_argument("--threads", type=int, default=1, help="of torch in every process (1)")
    parser.add_argument(
        "--agent-threads", type=int, help="that decide concurrently (the backend's own default: 1, torch 16)"
    )
    given = vars(parser.parse_args(list(arguments)))
    backend, threads, agent_threads = (given.pop(name) for name in ("backend", "threads", "agent_threads"))
    x_axis_name = None
    for name in LISTS:
        if "," in given[name]:
            if x_axis_name is not None:
                raise ArgumentError("Only 1 x axis graph variable allowed")
            x_axis_name = name
            given[name] = [_value(name, one) for one in given[name].split(",")]
        else:
            given[name] = _value(name, given[name])
    if threads < 1:
        raise ArgumentError(f"--threads is 1 or more, found {threads}")
    if agent_threads is not None and agent_threads < 1:
        raise ArgumentError(f"--agent-threads is 1 or more, found {agent_threads}")
    return Settings(given, x_axis_name, backend, threads, agent_threads)


def _value(name: str, text: str) -> Any:
    if name == "batch":
        if text.lower() in ("yes", "true", "t", "y", "1"):
            return True
        if text.lower() in ("no", "false", "f", "n", "0"):
            return False
        raise ArgumentError(f"--batch is true or false, found {text!r}")
    if name == "state_size":
        _lengths(text)
        return text
    least = {"world_size": 3, "nlayers": 0, "out_features": 1}[name]
    if not text.strip().isdigit() or int(text) < least:
        raise ArgumentError(f"--{name.replace('_', '-')} is a whole number, {least} or more, found {text!r}")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.strip().split("-")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentError(f"--state-size is lengths with dashes between them, such as 10-20-10, found {text!r}")
    return tuple(map(int, parts))


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Seconds: of each decision (of a batch, or of one state) and of each observer's call."""

    batch_size: int
    agent: list[float] = field(default_factory=list)
    observer: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, dict[str, float]]:
        """The four metrics of the report, and unrounded latencies in microseconds."""
        agent, observer = np.asarray(self.agent), np.asarray(self.observer)
        rates = (self.batch_size / agent, 1 / observer)
        found: dict[str, dict[str, float]] = {}
        for name, values, places in zip(
            METRICS, (agent, rates[0], observer, rates[1]), (3, None, 3, None), strict=True
        ):
            at = _percentiles(values)
            found[name] = {key: int(v) if places is None else round(v, places) for key, v in at.items()}
        return {
            **found,
            "agent_latency_us": _percentiles(agent * 1e6),
            "observer_latency_us": _percentiles(observer * 1e6),
        }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(("p50", "p75", "p90", "p95"), np.percentile(values, PERCENTILES).tolist(), strict=True))


#: Samples of each measurement, by backend.
Runs = list[dict[str, Samples]]


def run(settings: Settings, episodes: int, steps: int) -> tuple[BenchResult, Runs]:
    """All measurements."""
    began_s = time.monotonic()
    _need_torch()
    result = harness.new_result("rpc-rl", quick=False, baselines=(), packages=("numpy", "torch"))
    result.machine["torch_threads"] = settings.threads
    runs: Runs = []
    for point in settings.points():
        case = settings.case(point)
        harness.say(f"{case}: {', '.join(BACKENDS[settings.backend])}, {point['world_size']} processes each")
        samples, floor = _measure(settings, point, episodes, steps)
        runs.append(samples)
        result.rows += _rows(case, samples, floor)
        load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
        result.notes.append(f"{case}: load average {load} after it, {episodes} episodes of {steps} steps")
        result.notes += _compared(case, samples)
    return harness.finish(result, began_s), runs


def _measure(
    settings: Settings, point: dict[str, Any], episodes: int, steps: int
) -> tuple[dict[str, Samples], list[float]]:
    """One measurement: its backends interleaved, and the floor's seconds, from the agents of the first backend."""
    batch_size = point["world_size"] - 2 if point["batch"] else 1
    samples = {name: Samples(batch_size) for name in BACKENDS[settings.backend]}
    floor: list[float] = []
    for name, turn in _turns(list(samples), episodes):
        with _team(name, settings, point) as team:
            if name == next(iter(samples)):
                floor += team.floor(FLOOR_REPEATS)
            for _ in range(turn):
                agent, observer = team.episode(steps)
                samples[name].agent += agent
                samples[name].observer += observer
    return samples, floor


def _turns(backends: list[str], episodes: int) -> list[tuple[str, int]]:
    """Order of backends and their episodes; the last backend runs between the others' halves."""
    *others, last = backends
    before = [(name, episodes // 2) for name in others]
    after = [(name, episodes - episodes // 2) for name in reversed(others)]
    return [*before, (last, episodes), *after]


@contextlib.contextmanager
def _team(backend: str, settings: Settings, point: dict[str, Any]) -> Iterator[Team]:
    from geartrain_bench.rpc_rl.worker import Work

    with tempfile.TemporaryDirectory() as directory:
        port = point["master_port"]
        work = Work(
            world_size=point["world_size"],
            batch=point["batch"],
            state_size=_lengths(point["state_size"]),
            nlayers=point["nlayers"],
            out_features=point["out_features"],
            threads=settings.threads,
            agent_threads=settings.agent_threads,
            init_method=f"file://{directory}/met" if port == "0" else f"tcp://{point['master_addr']}:{port}",
        )
        with Team(backend, work) as team:
            yield team


class Team:
    """The processes of one backend, joined and idle. A context manager; leaving it ends or kills them.

    Every wait has a deadline, and raises `WaitTimeoutError` at it, or `PeerLostError` with its output when a process
    ends.
    """

    def __init__(self, backend: str, work: Work) -> None:
        from geartrain_bench.rpc_rl.worker import name_of
        from geartrain_bench.rpc_rl.worker import run as worker

        self.backend = backend
        context = _context()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.names = [name_of(rank) for rank in range(work.world_size)]
        try:
            for rank in range(work.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=worker, args=(backend, rank, work, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            for rank in range(work.world_size):
                self._answer(rank, START_S, "join")
        except BaseException:
            self.kill()
            raise

    def episode(self, steps: int) -> tuple[list[float], list[float]]:
        """Seconds of the agent's decisions and of the observers' calls in one episode."""
        self.pipes[0].send(("episode", steps))
        agent, observer = self._answer(0, EPISODE_S, "end an episode")
        return agent, observer

    def floor(self, repeats: int) -> list[float]:
        """Seconds of the agent's work without requests."""
        self.pipes[0].send(("floor", repeats))
        (found,) = self._answer(0, EPISODE_S, "measure the floor")
        return list(found)

    def close(self) -> None:
        """Asks all processes to leave, and kills the rest."""
        with contextlib.suppress(OSError, GeartrainError):
            for pipe in self.pipes:
                pipe.send(("end",))
            for rank in range(len(self.pipes)):
                self._answer(rank, END_S, "leave")
            for pipe in self.pipes:
                pipe.send(("end",))
            until_s = time.monotonic() + END_S
            for process in self.processes:
                process.join(max(0.0, until_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills all."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(END_S)
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.kill()

    def _answer(self, rank: int, limit_s: float, what: str) -> list[Any]:
        """The next message of a process, unless one of them ends before."""
        sentinels = {process.sentinel: other for other, process in enumerate(self.processes)}
        happened = wait([self.pipes[rank], *sentinels], limit_s)
        if not happened:
            raise WaitTimeoutError(f"{self.names[rank]} over {self.backend} did not {what} within {limit_s:g} s")
        for one in happened:
            other = sentinels.get(one, rank)  # type: ignore[call-overload]
            word, *said = self._heard(other)
            if word == "error":
                raise PeerLostError(f"{self.names[other]} over {self.backend} failed:\n{said[0]}")
            if one in sentinels:
                self.processes[other].join()
                code = self.processes[other].exitcode
                raise PeerLostError(f"{self.names[other]} over {self.backend} ended, with exit code {code}")
        return list(said)

    def _heard(self, rank: int) -> list[Any]:
        try:
            return list(self.pipes[rank].recv()) if self.pipes[rank].poll() else [""]
        except (EOFError, OSError):
            return [""]


def _context() -> Any:
    """Processes forked from one that has only loaded torch: twenty start as fast as one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["geartrain_bench.rpc_rl.worker"])
    return context


def _need_torch() -> None:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("the benchmark 'rpc-rl' needs torch: pip install 'geartrain[torch]'") from None
    if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
        raise MissingDependencyError("the benchmark 'rpc-rl' needs a torch with torch.distributed.rpc")


# --- results -------------------------------------------------------------------------------------------------------


def _rows(case: str, samples: dict[str, Samples], floor: list[float]) -> list[Row]:
    """Latencies and rates, of which p95 is the slow tail."""
    floor_s = float(np.median(floor))
    whole = Samples(next(iter(samples.values())).batch_size, floor, floor)
    rows = []
    for name, of_one in {"floor": whole, **samples}.items():
        rows += [
            harness.time_row(case, name, "agent latency", "us", of_one.agent, floor_s),
            harness.rate_row(case, name, "agent throughput", "1/s", of_one.agent, of_one.batch_size, floor_s),
            harness.time_row(case, name, "observer latency", "us", of_one.observer, floor_s),
        ]
        if name != "floor":
            rows.append(harness.rate_row(case, name, "observer throughput", "1/s", of_one.observer, 1.0, floor_s))
    return rows


def _compared(case: str, samples: dict[str, Samples]) -> list[str]:
    if set(samples) != {"geartrain", "torch"}:
        return []
    ours, torchs = samples["geartrain"], samples["torch"]
    latency = np.median(ours.observer) / np.median(torchs.observer)
    throughput = np.median(torchs.agent) / np.median(ours.agent)
    return [
        f"{case}: geartrain's observer latency p50 is {latency:.2f}x of torch's, "
        f"its agent throughput p50 {throughput:.2f}x"
    ]


def report_path(settings: Settings, backend: str) -> Path:
    """Path of a backend's report."""
    path = Path(settings.values["output_file_path"])
    return path if backend == BACKENDS[settings.backend][0] else path.with_suffix(f".{backend}{path.suffix}")


def as_report(settings: Settings, backend: str, runs: Runs, result: BenchResult) -> dict[str, Any]:
    """The original's JSON, and under "about" the machine, versions and command."""
    found = {name: value for name, value in settings.values.items() if name != settings.x_axis_name}
    if settings.x_axis_name is not None:
        found["x_axis_name"] = settings.x_axis_name
    results = []
    for point, samples in zip(settings.points(), runs, strict=True):
        at = {} if settings.x_axis_name is None else {settings.x_axis_name: point[settings.x_axis_name]}
        results.append({**samples[backend].metrics(), **at})
    found["benchmark_results"] = results
    found["about"] = {
        "backend": backend,
        "threads": settings.threads,
        "agent_threads": settings.agent_threads,
        "command": result.command,
        "machine": result.machine,
        "versions": result.versions,
    }
    return found


def show(written: dict[str, Any]) -> None:
    """Prints a report as the original does: its arguments, and a line for every point of the x axis."""
    about = written["about"]
    title = (
        f"Distributed rpc benchmark reinforcement learning suite, {about['backend']}, torch threads {about['threads']}"
    )
    lines = ["-" * len(title), title, "-" * len(title)]
    lines += [f"{key} : {value}" for key, value in written.items() if key not in ("benchmark_results", "about")]
    x_axis_name = written.get("x_axis_name")
    first = "" if x_axis_name is None else f"{x_axis_name} |"
    column, group = 7, 4 * 7 + 2
    lines.append(f"{first} " + "".join(f"{metric:<{group}}" for metric in METRICS))
    heads = "".join(f"{f'p{p}':<{column}}" for p in PERCENTILES)
    lines.append(" " * len(first) + " " + f"{heads:<{group}}" * len(METRICS))
    for one in written["benchmark_results"]:
        x = "" if x_axis_name is None else str(one[x_axis_name])
        cells = ["".join(f"{value:<{column}}" for value in one[metric].values()) for metric in METRICS]
        lines.append(f"{x:<{len(first)}} " + "".join(f"{cell:<{group}}" for cell in cells))
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n\n")
    sys.stdout.flush()


def plot(result: BenchResult, path: Path) -> None:
    """The four metrics over the x axis: p50 as lines, p95 dashed. Needs matplotlib."""
    pyplot = import_pyplot()
    cases = list(dict.fromkeys(row.case for row in result.rows))
    backends = [name for name in dict.fromkeys(row.system for row in result.rows) if name != "floor"]
    found = {(row.metric, row.system, row.case): row for row in result.rows}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    metrics = ("agent latency", "agent throughput", "observer latency", "observer throughput")
    labels = [case.replace(", ", "\n") for case in cases]
    for axis, metric in zip(axes.flat, metrics, strict=True):
        for color, backend in zip(("tab:blue", "tab:orange"), backends, strict=False):
            rows = [found[metric, backend, case] for case in cases]
            axis.plot(labels, [row.p50 for row in rows], "o-", color=color, label=f"{backend} p50")
            axis.plot(labels, [row.p95 for row in rows], ".--", color=color, label=f"{backend} p95")
        axis.set_title(f"{metric} ({rows[0].unit})", loc="left", fontsize=10)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25, linewidth=0.4)
    axes[0, 0].legend(fontsize=8)
    where = f"{result.machine['cpu']}, {result.machine['cores']} cores"
    figure.suptitle("\n".join([*textwrap.wrap(result.command, 110, break_on_hyphens=False), where]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _command_line() -> None:
    """Command line of `python -m geartrain_bench.rpc_rl.bench`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given, arguments = parser.parse_known_args()
    try:
        main(quick=given.quick, json_path=given.json, plot_path=given.plot, arguments=arguments)
    except GeartrainError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _command_line()
