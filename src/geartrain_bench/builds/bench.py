"""Two builds of geartrain in turn: how fast the second is in units of the first.

    nice -n -15 python -m geartrain_bench.builds.bench --before PATH/python --after PATH/python

Each build has processes of its own: one, two or three on this host, or one on each of four emulated hosts. Each has a
store of 150 MB. A pair is a block of the first build and a block of the second, both of as many calls. The order
changes from pair to pair. Processes are started anew for some of the pairs, because two processes of the same build
differ by where their memory lies.

A line has the medians over all pairs: processor time of a call (of all threads of all ranks), its time by the wall
clock, and before / after of each. Above 1 the second build is faster. The interval holds the median with 95 %:
bootstrap over the starts, and over the pairs of each.

| case | calls |
|---|---|
| no group | batches of rows of 4 KB and 100 KB; transitions; stacked frames |
| group of one, ranks of one host, 4 hosts | batches of rows: uniform, and prioritized with weights and updates |
| RPC | calls between two nodes of a process, with a trace and without |

Batches are read as NumPy arrays, `prefetch=0`. Each rank stays on one core, and so does the process of the nodes.

Threats to validity: a block that is preempted on a shared machine counts as slow. A build beside itself
(`--before X --after X`) shows what the machine adds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.fleet import Fleet

WORKER = str(Path(__file__).with_name("worker.py"))
RESAMPLES = 4000
SAC: dict[str, Any] = {"do": "transitions", "shape": [17], "dtype": "float32", "frame_stack": 1}
ATARI: dict[str, Any] = {"do": "transitions", "shape": [84, 84], "dtype": "uint8", "frame_stack": 4}


@dataclass(frozen=True)
class Place:
    """Where the processes of a build run."""

    name: str
    ranks: int = 1
    on_hosts: bool = False
    traced: bool = False

    @property
    def pinned(self) -> bool:
        """Whether each process stays on a core. Elsewhere chance decides which of them share one."""
        return self.ranks > 1 or self.name.startswith("RPC")


@dataclass(frozen=True)
class Case:
    """What is measured somewhere."""

    name: str
    place: Place
    request: dict[str, Any]

    @property
    def title(self) -> str:
        """What its line says."""
        return f"{self.place.name}: {self.name}"


def cases() -> list[Case]:
    """All of them, those of one place behind each other."""

    def rows(place: Place, row_bytes: int, batch: int, strategy: str, group: str | None) -> Case:
        name = f"{row_bytes // 1000} KB x {batch}" + (f", {strategy}" if group else "")
        return Case(
            name,
            place,
            {"do": "rows", "row_bytes": row_bytes, "batch": batch, "strategy": strategy, "group": group},
        )

    sizes, strategies = (4_000, 100_000), ("uniform", "prioritized")
    alone = Place("no group")
    made = [rows(alone, size, batch, "uniform", None) for size in sizes for batch in (32, 256, 1024)]
    made.append(Case("SAC transitions x 256", alone, {**SAC, "batch": 256}))
    made.append(Case("Atari transitions x 32", alone, {**ATARI, "batch": 32}))
    group = Place("group of one")
    made += [rows(group, size, 64, strategy, "single") for size in sizes for strategy in strategies]
    for ranks in (2, 3):
        place = Place(f"{ranks} ranks of one host", ranks)
        made += [rows(place, size, 32 * ranks, strategy, "world") for size in sizes for strategy in strategies]
    hosts = Place("4 hosts", 4, on_hosts=True)
    made += [rows(hosts, size, 128, "prioritized", "world") for size in sizes]
    for traced in (False, True):
        place = Place(f"RPC, {'with' if traced else 'no'} trace", traced=traced)
        made.append(Case("calls of 1 KB", place, {"do": "calls", "payload_bytes": 1_000}))
    return made


@contextlib.contextmanager
def fleet_of(python: str, place: Place, hosts: Hosts | None) -> Iterator[Fleet]:
    """The processes of a build, as ranks of a group where there are several."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        traced = [f"GEARTRAIN_TRACE={folder}/trace.json"] if place.traced else []
        argv = ["env", *traced, python, WORKER]
        members = range(place.ranks)
        fleet = stack.enter_context(Fleet.here(place.ranks, argv) if hosts is None else Fleet.on(hosts, members, argv))
        if place.pinned:
            fleet.ask_each({number: {"do": "pin", "number": number} for number in members}, 60.0)
        if place.ranks > 1:
            stack.enter_context(fleet.joined(members, "127.0.0.1" if hosts is None else hosts.address(0)))
        yield fleet


def block(fleet: Fleet, ranks: int, calls: int) -> tuple[float, float]:
    """Processor time of all ranks, and time of the slowest, in seconds."""
    laps = fleet.ask(range(ranks), do="lap", calls=calls)
    return sum(lap["cpu_s"] for lap in laps), max(lap["wall_s"] for lap in laps)


def measure(
    case: Case, builds: Sequence[Fleet], pairs: int, block_s: float, *, other_first: bool
) -> NDArray[np.float64]:
    """Seconds of the blocks, as (pair, build, processor or wall), and of a call.

    `other_first`: the second build makes its stores first. Who does is a tenth faster with small rows.
    """
    members = range(case.place.ranks)
    for fleet in builds[::-1] if other_first else builds:
        fleet.ask(members, **case.request)
        fleet.ask(members, do="lap", calls=3)
    took_s = max(block(fleet, case.place.ranks, 4)[1] for fleet in builds) / 4
    calls = max(2, min(20_000, int(block_s / took_s)))
    for fleet in builds:
        block(fleet, case.place.ranks, calls)
    found = np.zeros((pairs, 2, 2))
    for pair in range(pairs):
        for build in (0, 1) if pair % 2 == 0 else (1, 0):
            found[pair, build] = block(builds[build], case.place.ranks, calls)
    for fleet in builds:
        fleet.ask(members, do="clear")
    return found / calls


def interval(starts: Sequence[NDArray[np.float64]]) -> tuple[float, float, float]:
    """The median of all values, and where it lies with 95 %."""
    random = np.random.default_rng(0)
    medians = []
    for _ in range(RESAMPLES):
        chosen = [starts[i] for i in random.integers(0, len(starts), len(starts))]
        medians.append(np.median(np.concatenate([random.choice(one, len(one)) for one in chosen])))
    low, high = np.quantile(medians, (0.025, 0.975)).tolist()
    return float(np.median(np.concatenate(starts))), low, high


def run(pythons: Sequence[str], chosen: Sequence[Case], starts: int, pairs: int, block_s: float) -> None:
    """Measures all of the cases, start after start, and prints a line for each."""
    laps: dict[str, list[NDArray[np.float64]]] = {case.title: [] for case in chosen}
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(4)) if any(case.place.on_hosts for case in chosen) else None
        for start in range(starts):
            for place in dict.fromkeys(case.place for case in chosen):
                on = hosts if place.on_hosts else None
                order = pythons if start % 2 == 0 else pythons[::-1]
                with fleet_of(order[0], place, on) as one, fleet_of(order[1], place, on) as other:
                    builds = (one, other) if start % 2 == 0 else (other, one)
                    for case in chosen:
                        if case.place == place:
                            found = measure(case, builds, pairs, block_s, other_first=start % 2 == 1)
                            laps[case.title].append(found)
                print(f"start {start + 1}, {place.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    print(f"{starts} starts of {pairs} pairs, load {os.getloadavg()[0]:.1f}, {time.monotonic() - began_s:.0f} s")
    print("| case | CPU us before | after | before / after, CPU | wall us before | after | before / after, wall |")
    print("|---|---|---|---|---|---|---|")
    for title, measured in laps.items():
        words = [title]
        for clock in (0, 1):
            middle = 1e6 * np.median(np.concatenate(measured)[:, :, clock], axis=0)
            ratio, low, high = interval([one[:, 0, clock] / one[:, 1, clock] for one in measured])
            words += [f"{middle[0]:.4g}", f"{middle[1]:.4g}", f"{ratio:.3f} ({low:.3f} to {high:.3f})"]
        print("| " + " | ".join(words) + " |")


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog=__spec__.name, description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, help="interpreter of the first build")
    parser.add_argument("--after", required=True, help="interpreter of the second build")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose line has one of these texts")
    parser.add_argument("--pairs", type=int, default=8, help="of each start")
    parser.add_argument("--starts", type=int, default=6, help="an even number, as builds take turns at being first")
    parser.add_argument("--block-ms", type=float, default=25.0)
    asked = parser.parse_args(arguments)
    chosen = [case for case in cases() if any(text in case.title for text in asked.only)]
    run((asked.before, asked.after), chosen, asked.starts, asked.pairs, asked.block_ms / 1e3)


if __name__ == "__main__":
    main(sys.argv[1:])
