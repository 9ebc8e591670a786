"""Settings of the RPC benchmark: the original's arguments, and those beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from geartrain.core.arguments import check_whole, optional
from geartrain.errors import ArgumentError

BACKENDS = {"geartrain": ("geartrain",), "torch": ("torch",), "both": ("geartrain", "torch")}
#: Arguments that may be a list, in the order of the report.
LISTS = ("world_size", "batch", "state_size", "nlayers", "out_features")


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
    check_whole("--threads", threads, 1)
    optional(check_whole, "--agent-threads", agent_threads, 1)
    return Settings(given, x_axis_name, backend, threads, agent_threads)


def _value(name: str, text: str) -> Any:
    if name == "batch":
        if text.lower() in ("yes", "true", "t", "y", "1"):
            return True
        if text.lower() in ("no", "false", "f", "n", "0"):
            return False
        raise ArgumentError(f"--batch is true or false, found {text!r}")
    if name == "state_size":
        lengths(text)
        return text
    least = {"world_size": 3, "nlayers": 0, "out_features": 1}[name]
    if not text.strip().isdigit() or int(text) < least:
        raise ArgumentError(f"--{name.replace('_', '-')} is a whole number, {least} or more, found {text!r}")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """The shape of a state. Raises `ArgumentError`."""
    parts = text.strip().split("-")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentError(f"--state-size is lengths with dashes between them, such as 10-20-10, found {text!r}")
    return tuple(map(int, parts))
