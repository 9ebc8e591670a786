"""Benchmarks, one folder a claim. Each prints its lower bound, its baselines and the command that reproduces it.

In each folder `bench.py` has `main(*, quick, json_path, plot_path, baselines) -> BenchResult`, started by
`geartrain bench NAME` or `python -m geartrain_bench.FOLDER.bench`; `worker.py` runs in another process, and
baselines are `*_baseline.py`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from geartrain.core.arguments import check_choice
from geartrain.core.json_values import read_json
from geartrain.errors import ArgumentError, GeartrainError
from geartrain_bench.harness.timing import BenchResult


class Bench(NamedTuple):
    """Location of a benchmark's functions, as "module:function"; `takes_arguments`: `main` takes a list of words.

    `result` is the class of what `main` returns, and `plot` draws one into a file.
    """

    cpu: str
    cuda: str | None = None
    takes_arguments: bool = False
    result: str = "harness.timing:BenchResult"
    plot: str = "harness.report:plot"


#: The benchmarks of `geartrain bench`.
BENCHES = {
    "store": Bench("store.bench:main"),
    "selection": Bench(
        "selection.bench:main",
        cuda="selection.gpu:main",
        result="selection.bench:SelectionResult",
        plot="selection.plot:plot",
    ),
    "ranks": Bench(
        "distributed_replay.bench:main",
        result="distributed_replay.bench:RanksResult",
        plot="distributed_replay.report:plot_result",
    ),
    "p2p": Bench("messages.bench:main", cuda="messages.gpu:main", plot="messages.report:plot"),
    "fetch": Bench("fetch.bench:main_cpu", cuda="fetch.bench:main"),
    "rpc-rl": Bench("rpc_rl.bench:main", takes_arguments=True, plot="rpc_rl.bench:plot"),
    "di-engine": Bench("di_engine.bench:main"),
    "online": Bench("online_rl.bench:main", plot="online_rl.bench:plot"),
    "transitions": Bench("transitions.bench:main", plot="transitions.bench:plot"),
    "llm": Bench("llm.bench:main", plot="llm.report:plot"),
    "feed": Bench("feeding.bench:main"),
    "overheads": Bench("overheads.bench:main"),
    "allreduce": Bench(
        "allreduce.bench:main",
        cuda="allreduce.gpu:main",
        takes_arguments=True,
        result="allreduce.bench:AllReduceResult",
        plot="allreduce.plot:plot",
    ),
}


class Main(Protocol):
    """Entry point of a benchmark.

    `quick` ends within a minute on two cores. `baselines` maps a baseline's name to the Python interpreter of its
    environment. Where the table sets `takes_arguments`, `main` takes `arguments` as well.
    """

    def __call__(
        self,
        *,
        quick: bool = False,
        json_path: Path | None = None,
        plot_path: Path | None = None,
        baselines: dict[str, str] | None = None,
        **options: Any,
    ) -> BenchResult:
        """Measures, prints, writes the files asked for, and returns the result."""
        ...


def load(name: str, device: str = "cpu") -> Main:
    """The `main` of a benchmark on "cpu" or "cuda". Raises `ArgumentError` when there is none."""
    check_choice("device", device, ("cpu", "cuda"))
    here = {known: bench.cpu if device == "cpu" else bench.cuda for known, bench in BENCHES.items()}
    able = {known: place for known, place in here.items() if place is not None}
    return cast(Main, _found(able[check_choice(f"a benchmark on {device}", name, able)]))


def plot_saved(saved: Path, path: Path) -> None:
    """Draws a result that was saved with `--json`, or a report of `bench rpc-rl`, into a file. Needs matplotlib.

    Raises:
        ArgumentError: the file is no such result; OSError: it cannot be read.
    """
    try:
        found = read_json(saved)
    except ValueError as error:
        raise ArgumentError(f"{saved} cannot be read: {error}") from None
    is_report = isinstance(found, dict) and "benchmark_results" in found
    name = "rpc-rl" if is_report else str(found.get("bench", "")).partition(" ")[0] if isinstance(found, dict) else ""
    if name not in BENCHES:
        raise ArgumentError(f"{saved} is no result of geartrain bench, saved with --json")
    bench = BENCHES[name]
    if name in ("selection", "allreduce") and "--device cuda" in str(found.get("command", "")):
        bench = Bench(bench.cpu)  # whose result and plot are those of any benchmark
    try:
        read = _found("rpc_rl.bench:result_of_report") if is_report else _found(bench.result).of_json
        result = read(found)
    except ArgumentError as error:
        raise ArgumentError(f"{saved}: {error}") from None
    if not result.rows:
        raise ArgumentError(f"{saved} has no rows to draw: nothing was measured")
    draw = _found(bench.plot)
    try:
        draw(result, path)
    except (GeartrainError, OSError):
        raise
    except Exception as error:  # cases, metrics and figures that this bench does not measure
        raise ArgumentError(
            f"{saved} has rows or cases that cannot be drawn: {type(error).__name__}: {error}"
        ) from error


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"geartrain_bench.{module}"), name)


__all__ = ["BENCHES", "Bench", "BenchResult", "Main", "load", "plot_saved"]
