"""Staleness of trained rows where `in_flight` paces the loader: a store, and a discrete-event simulation of it.

    python -m geartrain_bench.llm.staleness

Rollout slots answer prompts, oldest first, in lognormal times. One learner trains on batches of the oldest answered
rows, and advances the clock after each. A row's staleness is the clock at its draw minus its version. `run` lets a
store and the simulation go through the same events in simulated time, where they must agree to the row. `measure` lets
threads sleep for these times, which is a run as a user has it.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import geartrain as gt
from geartrain.errors import NotEnoughRowsError, StoreError, WaitTimeoutError

TASKS = {"answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}), "train": gt.Task(after="answer")}


@dataclass(frozen=True)
class Pace:
    """How much runs at once, and how long it takes, in units of a mean answer.

    Attributes:
        eta: batches that rollouts may be ahead; 0 is synchronous.
        batch: rows of a batch.
        slots: answers that are written at a time.
        steps: batches that are trained.
        sigma: of the lognormal times of answers.
        train: time that a batch takes.
    """

    eta: int
    batch: int = 8
    slots: int = 24
    steps: int = 40
    sigma: float = 1.0
    train: float = 0.4

    @property
    def in_flight(self) -> int:
        """Rows that may be in flight."""
        return (self.eta + 1) * self.batch

    def answer(self, row: int) -> float:
        """Time that the answer of a row takes; the mean is 1."""
        return random.Random(row).lognormvariate(-(self.sigma**2) / 2, self.sigma)


class Flow(Protocol):
    """What rows pass through."""

    def insert(self, row: int) -> bool:
        """Inserts the row; False where the limiter makes it wait."""
        ...

    def claim(self) -> int | None:
        """Claims the oldest due row."""
        ...

    def put(self, row: int) -> None:
        """Answers a claimed row."""
        ...

    def draw(self) -> list[int] | None:
        """Finishes the batch before and draws the next one: the staleness of each row. None where rows are missing."""
        ...

    def advance(self, version: int) -> None:
        """Moves the clock."""
        ...


def run(flow: Flow, pace: Pace) -> list[list[int]]:
    """Goes through the events in simulated time, and returns the staleness of the rows of each batch."""
    trained: list[list[int]] = []
    events: list[tuple[float, int]] = []  # end of each answer, and its row; of training, -1
    row, free, now, trains, asks = 0, pace.slots, 0.0, False, True
    while True:
        while asks and not trains:
            drawn = flow.draw()
            if drawn is None:
                break
            trained.append(drawn)
            trains = True
            heapq.heappush(events, (now + pace.train, -1))
        while flow.insert(row):
            row += 1
        while free and (claimed := flow.claim()) is not None:
            free -= 1
            heapq.heappush(events, (now + pace.answer(claimed), claimed))
        now, ended = heapq.heappop(events)
        if ended >= 0:
            free += 1
            flow.put(ended)
            continue
        flow.advance(len(trained))
        trains, asks = False, len(trained) < pace.steps
        if not asks:
            return trained


class Simulated:
    """The model: lists of rows."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._clock = self._in_flight = self._batch = 0
        self._due: list[int] = []
        self._answered: list[int] = []
        self._version: dict[int, int] = {}

    def insert(self, row: int) -> bool:
        """As `Flow.insert`."""
        if self._in_flight == self._pace.in_flight:
            return False
        self._in_flight += 1
        self._due.append(row)
        return True

    def claim(self) -> int | None:
        """As `Flow.claim`."""
        if not self._due:
            return None
        row = self._due.pop(0)
        self._version[row] = self._clock
        return row

    def put(self, row: int) -> None:
        """As `Flow.put`."""
        heapq.heappush(self._answered, row)

    def draw(self) -> list[int] | None:
        """As `Flow.draw`."""
        self._in_flight -= self._batch
        self._batch = 0
        if len(self._answered) < self._pace.batch:
            return None
        self._batch = self._pace.batch
        return [self._clock - self._version[heapq.heappop(self._answered)] for _ in range(self._batch)]

    def advance(self, version: int) -> None:
        """As `Flow.advance`."""
        self._clock = version


class OfStore:
    """A store, a replay and claims."""

    def __init__(self, pace: Pace, prefetch: int = 0) -> None:
        self.store = new_store(pace)
        self.replay = gt.Replay(self.store, gt.selection.Fifo(), pace.batch, prefetch=prefetch, output="numpy")
        self._claims: dict[int, gt.Claim] = {}

    def insert(self, row: int) -> bool:
        """As `Flow.insert`."""
        try:
            self.store.insert({"row": [row]}, timeout_s=0)
        except WaitTimeoutError:
            return False
        return True

    def claim(self) -> int | None:
        """As `Flow.claim`."""
        claim = self.store.claim("answer", output="numpy")
        if not claim:
            return None
        row = int(claim["row"][0])
        self._claims[row] = claim
        return row

    def put(self, row: int) -> None:
        """As `Flow.put`."""
        self._claims.pop(row).put(ids=[[row]])

    def draw(self) -> list[int] | None:
        """As `Flow.draw`."""
        try:
            batch = self.replay.sample()
        except NotEnoughRowsError:
            return None
        return [self.store.clock - version for version in np.asarray(batch.version).tolist()]

    def advance(self, version: int) -> None:
        """As `Flow.advance`."""
        self.store.advance(version)

    def close(self) -> None:
        """Closes the replay and the store."""
        self.replay.close()
        self.store.close()


def new_store(pace: Pace) -> gt.Store:
    """A store of prompts and answers with the limit."""
    store = gt.Store.create(
        {"row": gt.Field((), "int64")}, tasks=TASKS, capacity=4 * pace.in_flight, span_bytes=1 << 20, reserve=False
    )
    store.limiter.set(in_flight=pace.in_flight)
    return store


def measure(pace: Pace, unit_s: float) -> list[list[int]]:
    """The same by threads that sleep: a loader, a thread for each slot, and this one, which trains."""
    store, trained = new_store(pace), list[list[int]]()

    def load() -> None:
        with contextlib.suppress(StoreError):  # it was closed
            for row in range(1 << 30):
                store.insert({"row": [row]})

    def answer() -> None:
        with contextlib.suppress(StoreError):
            for claim in store.claims("answer", output="numpy", version=lambda: store.clock):
                row = int(claim["row"][0])
                time.sleep(pace.answer(row) * unit_s)
                claim.put(ids=[[row]])

    threads = [threading.Thread(target=work, daemon=True) for work in (load, *[answer] * pace.slots)]
    for thread in threads:
        thread.start()
    with (
        store.expect_writers(),
        gt.Replay(store, gt.selection.Fifo(), pace.batch, output="numpy", num_batches=pace.steps, prefetch=0) as replay,
    ):
        for batch in replay:
            trained.append([store.clock - version for version in np.asarray(batch.version).tolist()])
            time.sleep(pace.train * unit_s)
            store.advance(len(trained))
    store.close()
    for thread in threads:
        thread.join(60)
    return trained


def shares(trained: list[list[int]]) -> np.ndarray[Any, Any]:
    """The share of the rows of each staleness."""
    counts = np.bincount(np.concatenate([np.asarray(each, np.int64) for each in trained]))
    found: np.ndarray[Any, Any] = counts / counts.sum()
    return found


def distance(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The share of rows that would have to move for both histograms to be the same."""
    both = np.zeros((2, max(len(one), len(other))))
    both[0, : len(one)], both[1, : len(other)] = one, other
    return float(np.abs(both[0] - both[1]).sum() / 2)


def main() -> None:
    """Prints both histograms for several etas."""
    print(f"{'eta':>3} {'simulated: mean, p95, max':>28} {'measured: mean, p95, max':>28} {'moved':>7}")
    for eta in (0, 2, 4):
        pace = Pace(eta)
        found = [run(Simulated(pace), pace), measure(pace, 0.02)]
        rows = [np.concatenate([np.asarray(each) for each in one]) for one in found]
        told = [f"{each.mean():.2f}, {math.floor(np.quantile(each, 0.95))}, {each.max()}" for each in rows]
        print(f"{eta:>3} {told[0]:>28} {told[1]:>28} {distance(*map(shares, found)):>7.1%}")


if __name__ == "__main__":
    main()
