"""Benchmarks, one file per claim. Each prints its floor, its peers and the command that made its numbers.

A bench is a module with `main(*, quick, json_path, plot_path, peers) -> BenchResult`, started by
`geartrain bench NAME` or `python -m geartrain.bench.NAME`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from geartrain.bench.harness import BenchResult
from geartrain.errors import SchemaError

#: What `geartrain bench` knows: name -> module.
BENCHES = {"store": "geartrain.bench.store", "selection": "geartrain.bench.selection"}


class Main(Protocol):
    """How a bench is started.

    `quick` ends within a minute on two cores. `peers` maps a peer's name to the Python interpreter of the
    environment that it is installed in.
    """

    def __call__(
        self,
        *,
        quick: bool = False,
        json_path: Path | None = None,
        plot_path: Path | None = None,
        peers: dict[str, str] | None = None,
    ) -> BenchResult:
        """Measures, prints, writes the files asked for, and returns the result."""
        ...


def load(name: str) -> Main:
    """The `main` of a bench. Raises `SchemaError` for a name that is none."""
    if name not in BENCHES:
        raise SchemaError(f"there is no bench {name!r}; there are {', '.join(BENCHES)}")
    return cast(Main, import_module(BENCHES[name]).main)


__all__ = ["BENCHES", "BenchResult", "Main", "load"]
