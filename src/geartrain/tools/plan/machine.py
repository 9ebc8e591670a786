"""Constants of the performance models, and their measurement on one machine."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.core.arguments import check_real, check_type, shown
from geartrain.core.extras import require_torch
from geartrain.core.json_values import read_object
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError
from geartrain.replay.fetch import fetch
from geartrain.selection import Candidates
from geartrain.store.store import Store


@dataclass(frozen=True)
class Constants:
    """Performance constants of a machine, with one rank on it unless stated otherwise.

    Attributes:
        source: the machine, and the command that measured them.
        cores: of the machine.
        copy_gb_per_s: rows copied from a shard into a batch by one thread.
        host_copy_gb_per_s: the same by all ranks of a host, at most.
        threads: that one rank copies with, where there are cores.
        row_ns: a row's metadata in a fetch.
        target_ns: one draw's random number and the shard it falls into.
        descent_ns: time of one tree descent by the rows of a shard; interpolated by the logarithm.
        batch_us: a batch's fixed costs in Python and in the fetch.
        round_us: one round of messages between ranks.
        tcp_gb_per_s: of one rank, each way, over loopback TCP.
        link_share: part of a link's rate that carries rows, without headers.
    """

    source: str
    cores: int
    copy_gb_per_s: float
    host_copy_gb_per_s: float
    threads: int
    row_ns: float
    target_ns: float
    descent_ns: Mapping[int, float]
    batch_us: float
    round_us: float
    tcp_gb_per_s: float
    link_share: float = 0.95

    def descent_at_ns(self, rows: float) -> float:
        """The time of one descent in a shard of so many rows."""
        known = sorted(self.descent_ns.items())
        if len(known) == 1:
            return known[0][1]
        at = math.log(max(2.0, rows))
        ends = [math.log(n) for n, _ in known]
        i = min(max(sum(at > end for end in ends) - 1, 0), len(known) - 2)
        slope = (known[i + 1][1] - known[i][1]) / (ends[i + 1] - ends[i])
        return max(known[0][1] / 2, known[i][1] + slope * (at - ends[i]))

    def of_host(self, cores: int, copy_gb_per_s: float | None = None) -> Constants:
        """The same with other hosts around it: so many cores, and so much memory bandwidth for copies."""
        copy = self.host_copy_gb_per_s * max(1.0, cores / self.cores) if copy_gb_per_s is None else copy_gb_per_s
        return replace(self, cores=cores, host_copy_gb_per_s=copy)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "descent_ns": {str(n): ns for n, ns in self.descent_ns.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Constants:
        """What `as_json` gave."""
        known = {field.name for field in fields(cls)}
        if set(found) != known:
            raise ArgumentError(f"constants are {', '.join(sorted(known))}; found {', '.join(sorted(found))}")
        descents = found["descent_ns"]
        check_type("source is text", found["source"], str)
        if not isinstance(descents, Mapping) or not descents or not all(_ROWS.fullmatch(str(n)) for n in descents):
            raise ArgumentError(f"descent_ns maps rows to nanoseconds, found {shown(descents)}")
        numbers = {name: found[name] for name in known - {"source", "descent_ns"}}
        numbers |= {f"descent_ns of {n} rows": ns for n, ns in descents.items()}
        for name, value in numbers.items():
            check_real(f"the constant {name}", value, _LEAST_RATE if name in _RATES else 0, _LARGEST)
        return cls(**{**found, "descent_ns": {int(n): float(ns) for n, ns in descents.items()}})


_ROWS = re.compile(r"[1-9][0-9]{0,17}")
#: What times are divided by.
_RATES = ("cores", "copy_gb_per_s", "host_copy_gb_per_s", "threads", "tcp_gb_per_s", "link_share")
_LEAST_RATE, _LARGEST = 1e-6, 1e12

#: Rounded, of three runs of `geartrain plan ranks --measure` on an idle machine.
DEFAULTS = Constants(
    source="geartrain plan ranks --measure on a virtual machine with 2 cores of an AMD EPYC (family 26 model 2)",
    cores=2,
    copy_gb_per_s=20.0,
    host_copy_gb_per_s=36.0,
    threads=4,
    row_ns=13.0,
    target_ns=4.2,
    descent_ns={10_000: 14.0, 1_000_000: 18.0, 4_000_000: 24.0},
    batch_us=14.0,
    round_us=22.0,
    tcp_gb_per_s=2.0,
)


# --- the constants of this machine -----------------------------------------------------------------------------


def measure() -> Constants:
    """This machine's constants, in some ten seconds. Needs torch; half a gigabyte of memory.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    cores = len(os.sched_getaffinity(0))
    copy, row_ns = _measure_copy()
    round_us, rate = _measure_rounds()
    return Constants(
        source=f"geartrain plan ranks --measure, {_cpu()}, {cores} cores",
        cores=cores,
        copy_gb_per_s=copy,
        # By all cores at once, which on a busy machine wait for each other: one of them is no faster than all.
        host_copy_gb_per_s=max(copy, _measure_host_copy(cores)),
        threads=4,
        row_ns=row_ns,
        target_ns=_measure_targets_ns(),
        descent_ns={n: _measure_descent_ns(n) for n in (10_000, 1_000_000, 4_000_000)},
        batch_us=_measure_batch_us(),
        round_us=round_us,
        tcp_gb_per_s=rate,
    )


def _measure_copy() -> tuple[float, float]:
    """GB/s of copied rows on one thread, and nanoseconds a row costs beside its bytes."""
    with _some_rows(102_400, 3000) as store:
        keys = store.keys()
        chosen = np.random.default_rng(0).integers(0, len(keys), (12, 256))
        turn = iter(chosen)
        large_s = median_s(lambda: fetch(store, keys[next(turn)], threads=1, output="numpy"), 11)
    with _some_rows(64, 4096) as store:
        keys = store.keys()
        one_s = median_s(lambda: fetch(store, keys[:1], threads=1, output="numpy"), 50)
        many_s = median_s(lambda: fetch(store, keys, threads=1, output="numpy"), 20)
    return 256 * 102_400 / large_s / 1e9, max(0.0, (many_s - one_s) / 4095 * 1e9)


def _measure_host_copy(cores: int) -> float:
    with _some_rows(102_400, 3000) as store:
        keys = store.keys()
        turn = iter(np.random.default_rng(0).integers(0, len(keys), (12, 256)))
        return 256 * 102_400 / median_s(lambda: fetch(store, keys[next(turn)], threads=cores, output="numpy"), 11) / 1e9


def _some_rows(row_bytes: int, rows: int) -> Any:
    field = Field((row_bytes // 4,), "float32", per_row=True)
    store = Store.create(f"plan-{os.getpid()}-{row_bytes}", {"x": field}, capacity=rows)
    noise = np.random.default_rng(0).standard_normal((64, row_bytes // 4), np.float32)
    while len(store) < rows:
        store.insert({"x": noise[: rows - len(store)]})
    return store


def _measure_targets_ns() -> float:
    ends = np.arange(1, 9, dtype=np.uint64) << np.uint64(37)
    numbers = np.arange(4096, dtype=np.uint32)

    def once() -> None:
        np.searchsorted(ends, _native.draw_targets(0, 0, False, 0, numbers, 0, 8 << 37), side="right")

    return median_s(once, 20) / 4096 * 1e9


def _measure_descent_ns(rows: int) -> float:
    random = np.random.default_rng(rows)
    candidates = Candidates((65536 * (random.standard_exponential(rows) + 0.05)).astype(np.uint32))
    total = candidates.native.total_priority()
    targets = [np.sort(random.integers(0, total, 1024, dtype=np.uint64)) for _ in range(21)]
    for one in targets:
        random.shuffle(one)
    turn = iter(targets)
    return median_s(lambda: candidates.native.find(True, next(turn)), 20) / 1024 * 1e9


def _measure_batch_us() -> float:
    """A batch of one small row by a group of one rank: the fixed costs of a batch."""
    from geartrain.ranks.rank_group import SingleRank
    from geartrain.replay.replay import Replay
    from geartrain.selection import Prioritized

    with _some_rows(64, 1024) as store, Replay(store, Prioritized(), 1, group=SingleRank(), output="numpy") as replay:
        return median_s(replay.sample, 200) * 1e6


# Two processes that exchange messages by TCP over loopback; the second argument is the rank.
_RANK_PAIR = """
import json, sys
import numpy as np
import torch, torch.distributed as dist
from geartrain.ranks.torch_rank_group import TorchRankGroup
from geartrain.tools.plan.machine import median_s
torch.set_num_threads(1)
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
ranks = TorchRankGroup([0, 1], timeout_s=30.0)
word = np.zeros(8, np.uint8)
rounds_s = [median_s(lambda: ranks.all_gather(word), 200) for _ in range(2)]
out, into = np.ones(16 << 20, np.uint8), np.ones(16 << 20, np.uint8)
both_s = [median_s(lambda: ranks.exchange([(1 - rank, out)], [(1 - rank, into)]), 8) for _ in range(2)]
ranks.close()
dist.destroy_process_group()
print(json.dumps([min(rounds_s), out.size / min(both_s)]))
"""


def _measure_rounds() -> tuple[float, float]:
    """Microseconds of a round between two ranks, and GB/s each way at the same time."""
    require_torch("measuring messages between ranks")
    with tempfile.TemporaryDirectory() as directory:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK_PAIR, str(Path(directory) / "meet"), str(rank)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "GEARTRAIN_RANK_CARRIER": "tcp", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            words = [process.communicate(timeout=90) for process in started]
        except subprocess.TimeoutExpired:
            raise ArgumentError("two ranks on this machine did not connect within 90 s") from None
        finally:
            for process in started:
                process.kill()
                process.wait()
    for process, (_, said) in zip(started, words, strict=True):
        if process.returncode:
            raise ArgumentError(f"a rank failed: {(said.strip().splitlines() or ['no output'])[-1]}")
    round_s, rate = json.loads(words[0][0])
    return round_s * 1e6, rate / 1e9


def read_constants(path: Path) -> Constants:
    """Constants from a file of `geartrain bench ranks --json` or `geartrain plan ranks --json`.

    Raises:
        ArgumentError: there are none in it, or one is no number.
    """
    found = read_result(path)
    if not isinstance(found.get("constants"), dict) or not found["constants"]:
        raise ArgumentError(f"{path} holds no constants; `geartrain plan ranks --measure --json FILE` writes them")
    return Constants.from_json(found["constants"])


def read_result(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ArgumentError` where there is none."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from None


def median_s(once: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median time of so many calls."""
    seconds = []
    for _ in range(calls):
        began_s = clock()
        once()
        seconds.append(clock() - began_s)
    return statistics.median(seconds)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unnamed processor"
