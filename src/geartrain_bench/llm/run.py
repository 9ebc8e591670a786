"""A run of the benchmark: its plan, its result, its peer, and how laps become rows of the result."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import geartrain_bench.harness.timing as harness
from geartrain.core.lifetime import on_error
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError
from geartrain_bench.harness.timing import BenchResult, Lap, Row, System
from geartrain_bench.llm.samples import TOKEN_FIELDS, USUAL, Answers, make_answers

WORKER = Path(__file__).with_name("peer_worker.py")
PEER = "TransferQueue"
CPU, WALL = "CPU time per call", "time per call"
#: Of a peer's environment.
INSTALL = "python3 -m venv envs/tq && envs/tq/bin/pip install TransferQueue==0.1.11 ray==2.60.0"


@dataclass(frozen=True)
class Plan:
    """Sizes, and time limits."""

    answers: int = 256
    #: Rows of so many answers.
    per_row: tuple[int, ...] = (16, 1)
    repeats: int = 15
    case_s: float = 4.0
    #: Of a lap.
    calls: int = 8
    peer_calls: int = 2
    ready_rows: int = 8192
    claimers: int = 16
    claims: int = 50
    wakes: int = 500
    wake_laps: int = 6
    pipeline_rows: int = 4096
    pipeline_laps: int = 5
    #: Region of a memory case, in rows of mean length; and its bytes at most.
    region_rows: int = 2048
    region_bytes: int = 2 << 30
    growing_bytes: int = 256 << 20
    #: Moments without room that are not counted, and those that are.
    settling: int = 100
    full_moments: int = 100
    gather_bytes: int = 512 << 20
    #: Of a cold batch.
    read_bytes: int = 8 << 20
    #: Learners, each on a host of its own, and their milliseconds of training for 1,000 tokens.
    link_hosts: int = 4
    train_ms: float = 5.0
    link_batches: int = 12
    link_rounds: int = 3
    #: Rows that a worker of another host puts, a lap; and laps.
    remote_rows: int = 200
    remote_laps: int = 4


FULL = Plan()
QUICK = Plan(
    repeats=5, case_s=1.0, calls=4, peer_calls=1, claims=20, wakes=200, wake_laps=2, pipeline_rows=1024,
    pipeline_laps=2, region_rows=512, region_bytes=64 << 20, growing_bytes=24 << 20, settling=15, full_moments=20,
    gather_bytes=192 << 20, link_hosts=2, train_ms=1.0, link_batches=4, link_rounds=1, remote_rows=60,
    remote_laps=2,
)  # fmt: skip


class Peer(AnsweringProcess):
    """TransferQueue, set up with the answers. A context manager; leaving it ends its processes."""

    def __init__(self, python: str, answers: Answers, setup_s: float = 150.0) -> None:
        super().__init__(PEER, python, WORKER, {"OMP_NUM_THREADS": "1"})
        with on_error(super().close):
            with tempfile.TemporaryDirectory() as directory:
                values = Path(directory) / "answers.npz"
                flat: dict[str, Any] = {name: np.concatenate(each) for name, each in answers.items()}
                np.savez(values, lengths=np.array([len(one) for one in answers["ids"]]), **flat)
                about = self.ask({"do": "setup", "values": str(values)}, setup_s)
        self.versions: dict[str, str] = about["versions"]
        self.actors: int = about["actors"]

    def lap(self, what: str, calls: int, timeout_s: float = 60.0) -> Lap:
        """Seconds of a call by its own clocks, of so many calls. Raises `BaselineError`."""
        got = self.ask({"do": "lap", "what": what, "calls": calls}, timeout_s)
        return Lap(got["seconds"], got["cpu_seconds"])

    def unit_cpu_s(self, what: str, calls: int, timeout_s: float = 60.0) -> float:
        """CPU seconds of its storage units for a call. Raises `BaselineError`."""
        return float(self.ask({"do": "lap", "what": what, "calls": calls}, timeout_s)["unit_cpu_seconds"])

    def digest(self) -> str:
        """Of what it returns of the fields of tokens."""
        return str(self.ask({"do": "digest"}, 60.0)["digest"])

    def close(self) -> None:
        """Asks it to end its own processes, then kills the rest."""
        with contextlib.suppress(BaselineError):
            self.ask({"do": "finish"}, 40.0)
        super().close()


@dataclass
class Run:
    """What the parts of the benchmark share."""

    plan: Plan
    result: BenchResult
    peer: Peer | None = None
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    answers: Answers = field(default_factory=dict)
    stores: int = 0

    def __post_init__(self) -> None:
        self.answers = make_answers(USUAL.draw(self.plan.answers, self.random), self.random)
        assert self.answers.keys() == TOKEN_FIELDS.keys()

    def store_name(self) -> str:
        """A new one."""
        self.stores += 1
        return f"bench-llm-{os.getpid()}-{self.stores}"

    def begins(self, case: str) -> bool:
        """Whether there is time for a case; says which one it is."""
        allowed = self.result.deadline.allows(case)
        if allowed:
            harness.say(case)
        return allowed

    def take_turns(self, case: str, systems: list[System], what: str = "", *, unit: str = "ms") -> None:
        """Interleaved laps of the systems, and of the peer if it has a request for this; each as rows of the result.

        One of the systems is the floor.
        """
        systems = [*systems, *self._peer(what)]
        try:
            laps = harness.take_turns(systems, repeats=self.plan.repeats, budget_s=self.plan.case_s)
        except BaselineError as error:
            self.lose_peer(f"{case}: {error}")
            laps = harness.take_turns(systems[:-1], repeats=self.plan.repeats, budget_s=self.plan.case_s)
        self.record(case, laps, next(one.name for one in systems if one.floor), unit)

    def _peer(self, what: str) -> list[System]:
        peer = self.peer
        if peer is None or not what:
            return []
        return [System(PEER, lambda: peer.lap(what, self.plan.peer_calls), rounds=max(3, self.plan.repeats // 3))]

    def lose_peer(self, reason: str) -> None:
        """The peer failed: it is measured no more."""
        self.result.baselines_missing["transferqueue"] = reason
        if self.peer is not None:
            self.peer.close()
        self.peer = None

    def record(self, case: str, laps: dict[str, list[Lap]], floor: str, unit: str) -> None:
        """CPU time of all laps, and the time of those that were not preempted."""
        quiet, noisy = harness.quiet(laps, (PEER,))
        if noisy:
            self.result.notes.append(f"{case}: laps that were preempted count as well for {', '.join(noisy)}")
        self._record(case, CPU, {name: [one.cpu_seconds for one in each] for name, each in laps.items()}, floor, unit)
        self._record(case, WALL, {name: [one.seconds for one in each] for name, each in quiet.items()}, floor, unit)

    def _record(self, case: str, metric: str, seconds: dict[str, list[float]], floor: str, unit: str) -> None:
        floor_s = harness.quantiles(seconds[floor])[0]
        for name, each in seconds.items():
            self.result.rows.append(harness.time_row(case, name, metric, unit, each, floor_s))

    def add(self, case: str, system: str, metric: str, unit: str, values: Sequence[float], best: float = 0.0) -> None:
        """A row of numbers that are no times; smaller is better. The ratio is to `best`, or to their median."""
        p50, p75, p90, p95 = harness.quantiles(values)
        self.result.rows.append(Row(case, system, metric, unit, p50, p75, p90, p95, (best or p50) / p50))


def prepared(prepare: Callable[[int], Sequence[Any]], one: Callable[[Any], object], calls: int) -> Lap:
    """A lap of `one`, each call with an argument of its own that was made before; the first call is not timed."""
    arguments = iter(prepare(calls + 1))

    def body() -> None:
        for _ in range(calls):
            one(next(arguments))

    return harness.lap(calls, body, lambda: one(next(arguments)))


__all__ = ["CPU", "FULL", "INSTALL", "PEER", "QUICK", "WALL", "Peer", "Plan", "Run", "prepared"]
