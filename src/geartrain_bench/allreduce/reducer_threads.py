"""All-reduces over one reducer process of one thread and of several, in turns, on one host over TCP.

    python -m geartrain_bench.allreduce.reducer_threads --threads 1,2 --ranks 2 --mb 64
    python -m geartrain_bench.allreduce.reducer_threads --threads 1,2,4 --core-share 0.15    # 0.15 of a core each

The reducer owns all shares, so that a rank sends its K bytes and receives K, and the reducer N K each way. A round is
some calls by every configuration, in an order that rotates; what is printed is the median and the fastest round, the
processor time of the reducer for a GB of a rank's array, and how evenly its threads had it.

It would mislead where ranks and reducer share their cores, as they do here: with c seconds of the reducer and k of the
ranks for a GB on two cores, one thread takes max(c, (c + k) / 2) and two take (c + k) / 2, so more threads gain little.
With --core-share every reducer thread is in a control group of its own that gives it that part of a core (cgroup v1, by
root): cores that are that much slower than the ranks', which is what more threads are for.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

THREAD = "geartr. reducer"  # the name of a reducer's threads
CONTROL = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000


def rank_process(
    rank: int, world_size: int, reducers: dict[int, list[str]], folder: str, window: int | None, wire: Connection
) -> None:
    """A rank: a group for each number of threads, and laps of them as they are asked for."""
    from geartrain.collectives import Group, GroupOptions

    with contextlib.ExitStack() as stack:
        groups = {}
        for threads, addresses in reducers.items():
            shares = [0.0] * world_size + [1 / len(addresses)] * len(addresses)
            rare = GroupOptions(transport="tcp", window_bytes=window)
            place = f"file://{folder}/{threads}"
            groups[threads] = stack.enter_context(
                Group(rank, world_size, init_method=place, reducers=addresses, shares=shares, options=rare)
            )
        wire.send(None)
        while (asked := wire.recv()) is not None:
            threads, elements, calls = asked
            array = np.full(elements, rank + 1, np.float32)
            groups[threads].all_reduce(np.zeros(1))  # all begin at once
            began = time.perf_counter()
            for _ in range(calls):
                groups[threads].all_reduce(array, op="max")
            seconds = time.perf_counter() - began
            assert (array == world_size).all()
            wire.send(seconds / calls)


class ReducerProcess:
    """`geartrain reducer` with so many threads, each with a part of a core where one is given."""

    def __init__(self, threads: int, core_share: float) -> None:
        command = [sys.executable, "-m", "geartrain", "reducer", "--threads", str(threads), "--every-s", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.addresses = self._process.stdout.readline().split(" on ")[1].split(", with")[0].split(",")
        self._groups: list[Path] = []
        if core_share:
            for task in self._tasks():
                group = CONTROL / f"geartrain-{self._process.pid}-{task.name}"
                group.mkdir()
                self._groups.append(group)
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(int(core_share * PERIOD_US)))
                (group / "tasks").write_text(task.name)

    def _tasks(self) -> Iterator[Path]:
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == THREAD:
                yield task

    def busy_s(self) -> list[float]:
        """Processor seconds of its threads."""
        words = [(task / "stat").read_text().rpartition(")")[2].split() for task in self._tasks()]
        return [(int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for each in words]

    def close(self) -> None:
        """Ends the process, and removes the control groups."""
        self._process.terminate()
        self._process.communicate(timeout=30)
        for group in self._groups:
            group.rmdir()


def measure(
    threads: list[int], ranks: int, mb: float, rounds: int, calls: int, core_share: float, window: int | None
) -> None:
    """Prints a line for each number of threads."""
    elements = int(mb * 2**20 / 4)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        reducers = {}
        for count in threads:
            reducers[count] = ReducerProcess(count, core_share)
            stack.callback(reducers[count].close)
        addresses = {count: reducer.addresses for count, reducer in reducers.items()}
        wires, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=rank_process, args=(rank, ranks, addresses, folder, window, there))
            process.start()
            wires.append(here)
            processes.append(process)

        def ask(question: Any) -> list[Any]:
            for wire in wires:
                wire.send(question)
            return [wire.recv() for wire in wires]

        for wire in wires:
            wire.recv()
        laps: dict[int, list[float]] = {count: [] for count in threads}
        for count in threads:
            ask((count, elements, 1))
        before = {count: reducers[count].busy_s() for count in threads}
        for number in range(rounds):
            place = number % len(threads)
            for count in threads[place:] + threads[:place]:
                laps[count].append(max(ask((count, elements, calls))))
        for wire in wires:
            wire.send(None)
        for process in processes:
            process.join(30)
        one = statistics.median(laps[threads[0]])
        about = f", {core_share:g} of a core a thread" if core_share else ""
        print(f"{ranks} ranks, {mb:g} MB, {rounds} rounds of {calls} calls{about}; load {os.getloadavg()[0]:.1f}")
        for count in threads:
            busy = sorted(b - a for a, b in zip(before[count], reducers[count].busy_s(), strict=True))[-count:]
            middle, fastest = statistics.median(laps[count]), min(laps[count])
            gain = statistics.median(a / b for a, b in zip(laps[threads[0]], laps[count], strict=True))
            print(
                f"  {count} threads  {mb * 2**20 / middle / 1e9:6.3f} GB/s of a rank's array "
                f"(fastest {mb * 2**20 / fastest / 1e9:6.3f}), {one / middle:.2f} of the first "
                f"(median of rounds {gain:.2f}); {sum(busy) / (rounds * calls * mb * 2**20 / 1e9):.2f} CPU s a GB, "
                f"the least busy thread {busy[0] / max(busy[-1], 1e-9):.2f} of the busiest",
                flush=True,
            )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--core-share", type=float, default=0.0)
    parser.add_argument(
        "--window-mb", type=float, default=0.0, help="of the ranks' flow control, where it is not adaptive"
    )
    given = parser.parse_args()
    window = int(given.window_mb * 2**20) or None
    threads = [int(word) for word in given.threads.split(",")]
    measure(threads, given.ranks, given.mb, given.rounds, given.calls, given.core_share, window)


if __name__ == "__main__":
    main()
