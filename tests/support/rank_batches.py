"""A population in shards, batches of it over ranks as threads, and the checks that each value is where it belongs."""

from __future__ import annotations

from typing import Any

import numpy as np
from replay_calls import replay_of

import geartrain as gt
from geartrain.tools.testing import ThreadRankGroup, run_ranks

N, STEPS, B = 240, 10, 48

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "action": gt.Field((), "int64"),
    "number": gt.Field((), "int64", per_row=True),
    "group": gt.Field((), "int64", per_row=True),
}

PRIORITIES = np.random.default_rng(0).integers(0, 30, N) / 4.0


def rows(first: int, last: int) -> dict[str, np.ndarray]:
    numbers = np.arange(first, last)
    obs = numbers[:, None, None] * 100.0 + np.arange(STEPS)[None, :, None] + np.zeros(3)
    return {
        "obs": obs.astype(np.float32),
        "action": numbers[:, None] * 100 + np.arange(STEPS),
        "number": numbers,
        "group": numbers // 4,
    }


def insert(store: gt.Store, first: int, last: int) -> None:
    store.native.advance_sequence(first + 1)
    if last > first:
        numbers = np.arange(first, last)
        store.insert(
            rows(first, last), lengths=numbers % STEPS + 1, priorities=PRIORITIES[first:last], versions=numbers
        )


def check(batch: gt.Batch) -> None:
    """Every value is where its row, its window and its mask say."""
    number = batch["number"]
    steps = batch.start[:, None] + np.cumsum(batch.mask, 1) - 1
    expected = np.where(batch.mask, number[:, None] * 100 + steps, 0)
    assert np.array_equal(batch["action"], expected)
    assert np.array_equal(batch["obs"], np.repeat(expected[:, :, None], 3, 2).astype(np.float32))
    assert np.array_equal(batch.length, number % STEPS + 1)
    assert np.array_equal(batch.version, number)


PARTS = ("obs", "action", "number", "mask", "start", "length", "version", "probability", "importance_weights")


def as_record(batch: gt.Batch) -> dict[str, np.ndarray]:
    record = {name: batch[name] if name in batch else getattr(batch, name) for name in PARTS}
    return {name: np.array(array) for name, array in record.items() if array is not None}


def join(parts: list[gt.Batch]) -> dict[str, np.ndarray]:
    """The global batch, in the order of draws."""
    draw = np.concatenate([part.draw for part in parts])
    assert np.array_equal(np.sort(draw), np.arange(len(draw)))
    order = np.argsort(draw)
    records = [as_record(part) for part in parts]
    return {name: np.concatenate([record[name] for record in records])[order] for name in records[0]}


def over_ranks(
    stores: list[gt.Store],
    selection: Any,
    batches: int = 3,
    ranks: int | None = None,
    one_host: bool = False,
    **options: Any,
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, float]]]:
    """Global batches and every rank's figures; rank r has store r % len(stores), on a host of its own or on the one."""
    group = ThreadRankGroup.make(ranks or len(stores), one_host=one_host)
    settings = {"window": 4, "output": "numpy", "num_batches": batches, **options}

    def body(rank: ThreadRankGroup) -> tuple[list[gt.Batch], dict[str, float]]:
        store = stores[rank.rank % len(stores)]
        with replay_of(store, selection, B, group=rank, **settings) as replay:
            made = []
            for batch in replay:
                check(batch)
                made.append(batch)
            return made, replay.stats()

    results = run_ranks(group, body)
    return [join([result[0][step] for result in results]) for step in range(batches)], [r[1] for r in results]


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )
