"""Online RL on one host: concurrent actors, learner, and agent-served actions.

Three loops, each a job of `geartrain.launch` with CartPole and a policy of 4-64-64-2 in torch:

    collect   actors with a policy of their own write episodes into the store
    train     the same, while a learner draws batches of 256 transitions, trains for some milliseconds (it sleeps, as a
              host does while its GPU works) and publishes weights every 20 updates, which the actors take
    ask       observers that step one environment each request every action from one agent, which serves them in batches

    geartrain bench online --baseline-python torchrl=/path/to/python --baseline-python reverb=/path/to/python

torchrl runs the same loops: `MultiAsyncCollector` into a shared `ReplayBuffer` of memory-mapped steps, and, for `ask`,
clients of its `InferenceServer` over shared memory, with `--full` also over queues. Reverb runs the first two:
processes with a policy in NumPy append transitions to its server, and no weights are published.

Floors: of steps, processes that act and step in the same way, and store nothing; of updates, no wait; of an action,
the policy called in place, one observation at a time, on an idle machine.

Threats to validity. CartPole takes microseconds, so the systems' own cost dominates: with a simulator that takes
milliseconds a step they differ by little. Learner, actors and agent share the cores, and with more observers than cores
a wait for an action is mostly a wait for a core. torchrl stores every observation twice, as its collectors make
transitions (observation and next observation); rows of episodes store each observation once. torchrl's figures are of
its defaults with one thread a process, and without `torch.compile`. Each loop runs once; quantiles are over slices of a
second, and for actions over all requests. geartrain runs first, and the baselines after it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import geartrain.launch as launch
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
import geartrain_bench.online_rl.worker as online_worker
from geartrain.core.arguments import check_choice
from geartrain.core.shared_files import writing
from geartrain.errors import GeartrainError, MissingDependencyError
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult, Row, rate_row, time_row

#: The baselines, and the scripts for their interpreters.
BASELINES = {
    "torchrl": Path(__file__).with_name("torchrl_baseline.py"),
    "reverb": Path(__file__).with_name("reverb_baseline.py"),
}
OBSERVERS = (8, 16)
#: Time limit of the whole run; a baseline's loop is left out where less than the least is left.
BUDGET_S, LEAST_S = 235.0, 15.0
STEPS, ROWS, UPDATES = "environment steps", "rows into the store", "updates"
WAITS, ACTION = "share of time the learner waits", "observation to action"


class OnlineError(GeartrainError):
    """A loop that did not start, failed, or did not end in time; carries the reason."""


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    full: bool = False,
) -> BenchResult:
    """Measures, prints, writes the files asked for, and returns the result."""
    began_s = time.monotonic()
    for package in ("torch", "gymnasium"):
        if find_spec(package) is None:
            raise MissingDependencyError(f"this benchmark needs {package}: pip install 'geartrain[demo]'")
    pythons = {**report.parse_baselines(()), **(baselines or {})}
    for name in baselines or ():
        check_choice("a baseline of this benchmark", name, BASELINES)
    pythons = {name: python for name, python in pythons.items() if name in BASELINES}
    for name in BASELINES:
        if name not in pythons and find_spec(name) is not None:
            pythons[name] = sys.executable
    result = harness.new_result("online", quick=quick, baselines=pythons, packages=("torch", "gymnasium", "numpy"))
    asked: dict[str, Any] = {
        "environment": "CartPole-v1",
        "actors": 2,
        "environments": 4,
        "seconds": 2.5 if quick else 5.3,  # the last slice that is whole counts
        "warm_s": 0.5 if quick else 1.0,
        "capacity": 100_000,
        "batch": 256,
        "frames": 200,
        "least": 1_000,
        "train_ms": 10.0,
        "publish_every": 20,
        "max_wait_us": 500.0,
    }
    result.notes.append("asked: " + ", ".join(f"{name} {value}" for name, value in asked.items()))
    until_s = began_s + min(BUDGET_S, result.deadline.left_s())
    for name, loop in _loops(result, pythons, asked, until_s, quick, full):
        if not result.deadline.allows(name):
            continue
        loop()
        if json_path is not None:  # figures measured so far are kept, however the run ends
            report.write_json(result, json_path)
    harness.finish(result, began_s)
    report.report(result, json_path, plot_path, draw=plot)
    return result


def _loops(
    result: BenchResult, pythons: Mapping[str, str], asked: dict[str, Any], until_s: float, quick: bool, full: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    """All loops by name, one after the other; geartrain's first, so that a baseline that hangs affects no other."""
    where = f"{asked['actors']} actors x {asked['environments']} environments"
    cases = {"collect": f"{where}, collecting", "train": f"{where}, training"}
    floors: dict[str, float] = {}

    def floor() -> None:
        slices = _ours({**asked, "loop": "bare"})
        floors["steps"] = 1.0 / _median(slices, "steps")
        _add_rates(result, cases["collect"], "floor", slices, floors["steps"], asked)
        alone_s = online_worker.policy_alone_s()
        floors["action"] = harness.quantiles(alone_s)[0]
        result.rows.append(time_row("policy in place", "floor", ACTION, "us", alone_s, floors["action"]))

    def ours(loop: str) -> None:
        _add_rates(result, cases[loop], "geartrain", _ours({**asked, "loop": loop}), floors["steps"], asked)

    def theirs(baseline: str, loop: str) -> None:
        measured = _baseline(result, baseline, pythons, {**asked, "loop": loop}, until_s)
        if measured is not None:
            _add_rates(result, cases[loop], baseline, measured["slices"], floors["steps"], asked)

    def add_asking(observers: int, system: str, took_s: list[float]) -> None:
        result.rows.append(time_row(f"{observers} observers", system, ACTION, "us", took_s, floors["action"]))

    def our_asking(observers: int) -> None:
        add_asking(observers, "geartrain", _asking({**asked, "observers": observers}))

    def their_asking(observers: int, transport: str) -> None:
        asking = {**asked, "loop": "ask", "observers": observers, "transport": transport}
        measured = _baseline(result, "torchrl", pythons, asking, until_s)
        if measured is not None:
            add_asking(observers, f"torchrl, {transport.replace('_', ' ')}", measured["took_s"])

    most = OBSERVERS[: 1 if quick else None]
    yield "floor", floor
    for loop in cases:
        yield f"geartrain, {loop}", partial(ours, loop)
    for observers in most:
        yield f"geartrain, {observers} observers", partial(our_asking, observers)
    for loop, baseline in itertools.product(cases, BASELINES):
        yield f"{baseline}, {loop}", partial(theirs, baseline, loop)
    transports = ("shared_memory", "queues") if full else ("shared_memory",)
    for observers, transport in itertools.product(most, transports):
        yield f"torchrl, {observers} observers, {transport}", partial(their_asking, observers, transport)


# --- geartrain ------------------------------------------------------------------------------------------------------


def _ours(asked: dict[str, Any]) -> list[dict[str, float]]:
    """Slices of a loop's steps, rows, updates and waits a second."""
    harness.say(f"geartrain, {asked['loop']} ...")
    env = {
        online_worker.ENVIRONMENT: asked["environment"],
        online_worker.ENVIRONMENTS: str(asked["environments"]),
    }
    if asked["loop"] == "bare":
        acting = launch.Role("bare", online_worker.bare, asked["actors"], env=env)
    else:
        acting = launch.actors(
            online_worker.environments, online_worker.local_policy, asked["actors"], env=env, max_restarts=0
        )
    slices: list[dict[str, float]] = _run_job(
        [launch.learners(online_worker.learn, args={"asked": asked}, env=env), acting], "result.json"
    )[0]["slices"]
    return slices


def _asking(asked: dict[str, Any]) -> list[float]:
    """Latency of each action, in seconds."""
    harness.say(f"geartrain, {asked['observers']} observers ...")
    env = {online_worker.ENVIRONMENT: asked["environment"]}
    roles = [
        launch.agents(online_worker.serve, args={"asked": asked}, env=env, max_restarts=0),
        launch.Role("observer", online_worker.observe, asked["observers"], args={"asked": asked}, env=env),
    ]
    return [value for each in _run_job(roles, "took-*.json") for value in each]


def _run_job(roles: list[launch.Role], files: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "lines.txt").open("w") as lines:
        job = launch.Job(f"bench-online-{os.getpid()}", roles, timeout_s=240, stop_s=5, keep_store="never")
        with contextlib.redirect_stdout(lines):
            launch.run(job, folder=folder, live=False)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob(files))]


def _median(slices: list[dict[str, float]], name: str) -> float:
    return harness.quantiles([one[name] for one in slices])[0]


def _add_rates(
    result: BenchResult,
    case: str,
    system: str,
    slices: list[dict[str, float]],
    floor_s: float,
    asked: Mapping[str, Any],
) -> None:
    def rates(name: str) -> list[float]:
        return [1.0 / max(one[name], 1e-9) for one in slices]

    result.rows.append(rate_row(case, system, STEPS, "1/s", rates("steps"), 1.0, floor_s))
    if any(one.get("rows") for one in slices):
        result.rows.append(rate_row(case, system, ROWS, "1/s", rates("rows"), 1.0, harness.quantiles(rates("rows"))[0]))
    if any(one.get("updates") for one in slices):
        result.rows.append(rate_row(case, system, UPDATES, "1/s", rates("updates"), 1.0, asked["train_ms"] / 1e3))
        p50, p75, p90, p95 = (100 * share for share in harness.quantiles([one["wait"] for one in slices]))
        result.rows.append(Row(case, system, WAITS, "%", p50, p75, p90, p95, 1 - p50 / 100))


# --- a baseline's
# ---------------------------------------------------------------------------------------------------------


def _baseline(
    result: BenchResult, baseline: str, pythons: Mapping[str, str], asked: dict[str, Any], until_s: float
) -> dict[str, Any] | None:
    """Results of a baseline's loop; None, with a reason in the result, where it cannot run."""
    if baseline not in pythons:
        result.baselines_missing[baseline] = (
            f"not installed here; --baseline-python {baseline}=/path/to/python names its interpreter"
        )
        return None
    loop = " ".join(str(asked[key]) for key in ("loop", "observers", "transport") if key in asked)
    left_s = until_s - time.monotonic()
    if left_s < LEAST_S:
        result.baselines_missing[f"{baseline}, {loop}"] = f"the run's {BUDGET_S:g} s were used up"
        return None
    harness.say(f"{baseline}, {loop} ...")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            measured = _ask_baseline(pythons[baseline], BASELINES[baseline], {**asked, "scratch": scratch}, left_s)
    except OnlineError as error:
        result.baselines_missing[f"{baseline}, {loop}"] = str(error)
        return None
    result.versions |= measured["versions"]
    return measured


def _ask_baseline(python: str, worker: Path, asked: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                [python, str(worker), json.dumps(asked)],
                stdout=out,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise OnlineError(f"{python} does not start: {error}") from None
        try:
            process.wait(timeout_s)
            _await_session(process.pid)
        except subprocess.TimeoutExpired:
            raise OnlineError(f"it was not done within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines() or ["no output"]
        answer = out.read().splitlines()
    try:
        measured: dict[str, Any] = json.loads(answer[-1])
    except (IndexError, ValueError):
        raise OnlineError(f"it ended: {lines[-1]}") from None
    if "error" in measured:
        raise OnlineError(measured["error"])
    return measured


def _await_session(pid: int, timeout_s: float = 5.0) -> None:
    """Gives the baseline's children time to remove their semaphores."""
    until_s = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.killpg(pid, 0)
            time.sleep(0.05)


# --- the plot ---------------------------------------------------------------------------------------------------------


def plot(result: BenchResult, path: Path) -> None:
    """Steps a second, the learner's waits, and the time to an action, each as bars of the systems."""
    pyplot = import_pyplot()
    panels = {STEPS: "steps/s", WAITS: "%", ACTION: "µs, p50 and p95"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4.8), layout="constrained")
    for axis, (metric, unit) in zip(axes, panels.items(), strict=True):
        rows = [row for row in result.rows if row.metric == metric]
        labels = [f"{row.system}\n{row.case.rpartition(', ')[2]}" for row in rows]
        axis.bar(labels, [row.p50 for row in rows], color="tab:blue")
        if metric == ACTION:
            axis.errorbar(
                labels, [row.p50 for row in rows], [[0] * len(rows), [row.p95 - row.p50 for row in rows]], fmt="none"
            )
            axis.set_yscale("log")
        axis.set_title(f"{metric} ({unit})", fontsize=10)
        axis.tick_params(axis="x", labelsize=7, rotation=30)
    figure.suptitle(f"{result.command}\n{result.machine['cpu']}, {result.machine['cores']} cores", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    report.main_of("online_rl", main)
