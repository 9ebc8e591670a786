"""Recorded episodes in shards, batches of them over ranks as threads, and a slow reference of their draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from replay_calls import replay_of
from selection_reference import ROW_STREAM, WINDOW_STREAM, below, random_bits

import geartrain as gt
from geartrain.store.recorder import recorded_fields
from geartrain.tools.testing import ThreadRankGroup, run_ranks

STEPS = 12
STEP_STREAM = 3
_GIVEN = {
    "obs.state": gt.Field((3,), "float32"),
    "action": gt.Field((), "int64"),
    "reward": gt.Field((), "float32"),
    "obs.achieved_goal": gt.Field((2,), "float32"),
    "obs.desired_goal": gt.Field((2,), "float32"),
}
FIELDS = recorded_fields(_GIVEN)
SHARED = recorded_fields(_GIVEN, share_rows=True)
METADATA = ("mask", "start", "length", "version", "probability", "importance_weights")


class Episodes:
    """n episodes of random lengths and numbers, whose steps' priorities are over three orders of magnitude.

    With `marks`, the chance of a step to be an episode's last one, rows hold several episodes.
    """

    def __init__(self, n: int, seed: int = 0, least: int = 1, marks: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        self.n = n
        self.lengths = rng.integers(least, STEPS + 1, n)
        self.arrays: dict[str, NDArray[Any]] = {}
        self.fields = SHARED if marks else FIELDS
        for name, field in self.fields.items():
            shape = (n, *field.shape) if field.per_row else (n, STEPS, *field.shape)
            self.arrays[name] = (rng.random(shape) < 0.1) if field.dtype == "bool" else rng.normal(size=shape) * 100
            self.arrays[name] = self.arrays[name].astype(field.dtype)
        self.arrays["action"] = np.arange(n)[:, None] * STEPS + np.arange(STEPS)
        self.priorities = np.exp(rng.uniform(-3, 4, (n, STEPS)))
        if marks:
            self.arrays["last"] = rng.random((n, STEPS)) < marks
            self.priorities *= ~self.arrays["last"]

    def insert(self, store: gt.Store, first: int, last: int) -> None:
        """Puts some of them into a store; the version of a row is the episode's number."""
        store.native.advance_sequence(first + 1)
        if last == first:
            return
        some = {name: array[first:last] for name, array in self.arrays.items()}
        keys = store.insert(some, lengths=self.lengths[first:last], versions=np.arange(first, last))
        if store.per_step:
            which, steps = self.steps(first, last)
            store.update_priorities(keys[which - first].of_steps(steps), self.priorities[which, steps])

    def steps(self, first: int = 0, last: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Episode and number of every step."""
        lengths = self.lengths[first:last]
        which = np.repeat(np.arange(first, first + len(lengths)), lengths)
        return which, np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    @contextmanager
    def stores(self, shards: int, *, part: int = 0, full: bool = False, **options: Any) -> Iterator[list[gt.Store]]:
        """Stores of different sizes with all of them, the second of several empty; or with no place left in any."""
        inner = np.sort(np.random.default_rng(shards + part).integers(0, self.n, shards - 1)).tolist()
        if full:  # passes go over places
            inner = np.sort(np.random.default_rng(shards).permutation(self.n - 1)[: shards - 1] + 1).tolist()
        elif shards > 2:
            inner[1] = inner[0]
        with ExitStack() as stack:
            made = []
            for first, last in itertools.pairwise([0, *inner, self.n]):
                capacity = last - first if full else self.n + 1
                store = gt.Store.create(self.fields, max_length=STEPS, capacity=capacity, **options)
                made.append(stack.enter_context(store))
                self.insert(made[-1], first, last)
            yield made


def as_record(batch: gt.Batch) -> dict[str, NDArray[Any]]:
    """What a batch says, apart from where its rows are."""
    record = {name: np.array(batch[name]) for name in batch}
    record |= {name: np.array(getattr(batch, name)) for name in METADATA if getattr(batch, name) is not None}
    if batch.keys.step is not None:
        record["step"] = batch.keys.step
    return record


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    """Whether two batches are equal to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes() for name in one
    )


def joined(parts: list[gt.Batch]) -> dict[str, NDArray[Any]]:
    """The global batch, in the order of draws."""
    draw = np.concatenate([part.draw for part in parts])
    assert np.array_equal(np.sort(draw), np.arange(len(draw)))
    records = [as_record(part) for part in parts]
    assert all(record.keys() == records[0].keys() for record in records)
    return {name: np.concatenate([record[name] for record in records])[np.argsort(draw)] for name in records[0]}


def over_ranks(
    stores: list[Any],
    selection: Any,
    n: int,
    batches: int = 3,
    ranks: int | None = None,
    one_host: bool = False,
    **options: Any,
) -> tuple[list[dict[str, NDArray[Any]]], list[dict[str, float]]]:
    """Global batches and every rank's figures; rank r has store (or list of stores) r % len(stores)."""

    def body(rank: ThreadRankGroup) -> tuple[list[gt.Batch], dict[str, float]]:
        settings = {"output": "numpy", "prefetch": 0, "group": rank, **options}  # figures of these batches alone
        with replay_of(stores[rank.rank % len(stores)], selection, n, **settings) as replay:
            return [replay.sample() for _ in range(batches)], replay.stats()

    results = run_ranks(ThreadRankGroup.make(ranks or len(stores), one_host=one_host), body)
    return [joined([made[step] for made, _ in results]) for step in range(batches)], [each[1] for each in results]


def alone(store: Any, selection: Any, n: int, batches: int = 3, **options: Any) -> list[dict[str, NDArray[Any]]]:
    """The batches of one process."""
    with replay_of(store, selection, n, output="numpy", prefetch=0, **options) as replay:
        return [as_record(replay.sample()) for _ in range(batches)]


class SlowDraws:
    """native/selection/selection.h over episodes, slow and in whole numbers: (episode, step) of each draw of a batch.

    `need`: steps at an episode's end that tell nothing, 1 for transitions.
    """

    def __init__(self, episodes: Episodes, seed: int, need: int, *, by_priority: bool) -> None:
        self.seed, self.need, self.lengths, self.by_priority = seed, need, episodes.lengths, by_priority
        self.which, self.steps = episodes.steps()
        fixed = np.rint(episodes.priorities * 2**16).astype(np.int64)
        shares = fixed[self.which, self.steps] if by_priority else np.ones(episodes.n, np.int64)
        self.sums = np.cumsum(shares)
        self.counts = self.steps < self.lengths[self.which] - need
        self.left = np.cumsum(np.where(self.counts, shares, 0)) if by_priority else np.cumsum(self.lengths - need)

    def draw(self, step: int, n: int) -> list[tuple[int, int]]:
        """The batch of a step."""
        found: dict[int, int] = {}
        pending = list(range(n))
        for attempt in range(64):
            sums = self.left if attempt == 63 else self.sums
            draws = np.array(pending, np.uint32)
            bits = random_bits(self.seed, step, ROW_STREAM, draws, attempt)
            steps = random_bits(self.seed, step, STEP_STREAM, draws, attempt)
            refused = []
            for number, target, length in zip(pending, bits, steps, strict=True):
                at = int(np.searchsorted(sums, below(target, int(sums[-1])), "right"))
                taken = (
                    bool(self.counts[at])
                    if self.by_priority
                    else below(length, STEPS - self.need) < self.lengths[at] - self.need
                )
                if taken or attempt == 63:
                    found[number] = at
                else:
                    refused.append(number)
            pending = refused
        rows = [found[number] for number in range(n)]
        if self.by_priority:
            return [(int(self.which[at]), int(self.steps[at])) for at in rows]
        ends = random_bits(self.seed, step, WINDOW_STREAM, np.arange(n, dtype=np.uint32), 0)
        return [(at, below(bits, int(self.lengths[at]) - self.need)) for at, bits in zip(rows, ends, strict=True)]
