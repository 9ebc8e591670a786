"""Benchmarks, one file per claim. Each prints its floor, its peers and the command that made its numbers.

A bench is a module with `main(*, quick, json_path, plot_path, peers) -> BenchResult`, started by
`geartrain bench NAME` or `python -m geartrain_bench.NAME`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from geartrain.errors import ArgumentError
from geartrain_bench.harness.timing import BenchResult

#: What `geartrain bench` knows: name -> module.
BENCHES = {
    "store": "geartrain_bench.store.bench",
    "selection": "geartrain_bench.selection.bench",
    "ranks": "geartrain_bench.distributed_replay.bench",
    "p2p": "geartrain_bench.messages.bench",
    "fetch": "geartrain_bench.fetch.bench",
    "rpc-rl": "geartrain_bench.rpc_rl.bench",
    "di-engine": "geartrain_bench.di_engine.bench",
    "online": "geartrain_bench.online_rl.bench",
    "allreduce": "geartrain_bench.allreduce.bench",
}
#: Benches whose `main` takes further arguments, as a list of words.
WITH_ARGUMENTS = ("rpc-rl", "allreduce")
#: The same on a GPU, where there is such a bench.
GPU_BENCHES = {
    "selection": "geartrain_bench.selection.gpu",
    "fetch": "geartrain_bench.fetch.bench",
    "p2p": "geartrain_bench.messages.gpu",
}


class Main(Protocol):
    """How a bench is started.

    `quick` ends within a minute on two cores. `peers` maps a peer's name to the Python interpreter of the
    environment that it is installed in. Those in `WITH_ARGUMENTS` take `arguments` as well.
    """

    def __call__(
        self,
        *,
        quick: bool = False,
        json_path: Path | None = None,
        plot_path: Path | None = None,
        peers: dict[str, str] | None = None,
        **options: Any,
    ) -> BenchResult:
        """Measures, prints, writes the files asked for, and returns the result."""
        ...


def load(name: str, device: str = "cpu") -> Main:
    """The `main` of a bench on "cpu" or "cuda". Raises `ArgumentError` when there is none."""
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"a bench runs on cpu or cuda, found {device!r}")
    benches = BENCHES if device == "cpu" else GPU_BENCHES
    if name not in benches:
        raise ArgumentError(f"there is no bench {name!r} on {device}; there are {', '.join(benches)}")
    module = import_module(benches[name])
    return cast(Main, module.main_cpu if name == "fetch" and device == "cpu" else module.main)


__all__ = ["BENCHES", "GPU_BENCHES", "WITH_ARGUMENTS", "BenchResult", "Main", "load"]
