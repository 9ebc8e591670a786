"""Rows of a store with axes and every kind of field, and the rows of packed batches one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from placed_rows import at
from replay_calls import replay_of

import geartrain as gt
from geartrain.tools.testing import ThreadRankGroup, run_ranks

FIELDS = {
    "id": gt.Field((), "int64"),
    "prompt": gt.Field(("prompt", 2), "int16"),
    "ids": gt.Field(("tokens",), "int32"),
    "mask": gt.Field(("tokens",), "bool"),
    "length": gt.Field(("answers",), "int32", divides="tokens"),
    "title": gt.Text(),
    "raw": gt.Bytes("answers"),
}


def values_of(number: int) -> dict[str, Any]:
    """All of a row, which follows from its number; some have no item of an axis."""
    lengths = [(number * 7 + 3 * answer) % 11 for answer in range(number % 4)]
    tokens = sum(lengths)
    ids = 1000 * number + np.arange(tokens, dtype=np.int32)
    return {
        "id": number,
        "prompt": np.full((number % 3, 2), number, np.int16),
        "ids": ids,
        "mask": ids % 3 == 0,
        "length": np.array(lengths, np.int32),
        "title": f"row {number} – ü" * (number % 3),
        "raw": [bytes([number % 256]) * each for each in lengths],
    }


def new_store(name: str, numbers: range, capacity: int = 128) -> gt.Store:
    """A store of axes alone with these rows, whose sequence numbers are theirs."""
    store = gt.Store.create(name, FIELDS, capacity=capacity, span_bytes=1 << 20, reserve=False)
    store.native.advance_sequence(numbers.start + 1)
    if len(numbers):
        every = [values_of(number) for number in numbers]
        store.insert(
            {name: [each[name] for each in every] for name in FIELDS},
            priorities=np.array(numbers, np.float64) % 5 + 0.5,
            versions=np.array(numbers) + 7,
        )
    return store


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The rows of a packed batch one by one: fields, as lists, and metadata."""
    found: list[dict[str, Any]] = [{} for _ in range(len(batch))]
    for name in batch:
        axis = batch._plan.fields[name].axis
        bounds = range(len(batch) + 1) if axis is None else batch.bounds_of(axis).bounds.tolist()
        values = batch[name] if isinstance(batch[name], list) else np.asarray(batch[name]).tolist()
        assert len(values) == bounds[-1]
        for row, first, last in zip(found, bounds[:-1], bounds[1:], strict=True):
            row[name] = values[first:last]
    for name in ("version", "probability", "importance_weights"):
        if getattr(batch, name) is not None:
            for row, value in zip(found, np.asarray(getattr(batch, name)).tolist(), strict=True):
                row[name] = value
    return found


def over_ranks(
    stores: Sequence[gt.Store],
    ranks: int,
    selection: Any,
    batch_size: int,
    seen: Callable[[Any], object] = list,
    mesh: tuple[int, int, int] | None = None,
    **options: Any,
) -> tuple[list[list[dict[str, Any]]], list[list[Any]], list[dict[str, Any]]]:
    """Global batches in the order of draws, the parts of each rank, and each rank's figures.

    Rank r has store r % len(stores). `seen` is called with each batch, before the next one. `mesh` has data, pipeline
    and tensor parallel sizes.
    """
    settings = {"output": "numpy", "timeout_s": 20.0, **options}

    def body(rank: ThreadRankGroup) -> tuple[list[gt.Batch], dict[str, Any]]:
        store = stores[rank.rank % len(stores)]
        place = {} if mesh is None else {"mesh": at(rank.rank, *mesh)}
        with replay_of(store, selection, batch_size, group=rank, **place, **settings) as replay:
            made = []
            for batch in replay:
                seen(batch)
                made.append(batch)
            return made, replay.stats()

    results = run_ranks(ranks, body)
    parts = [list(step) for step in zip(*(made for made, _ in results), strict=True)]
    heads = [rank for rank in range(ranks) if mesh is None or (at(rank, *mesh).pp, at(rank, *mesh).tp) == (0, 0)]
    return [joined([step[rank] for rank in heads]) for step in parts], parts, [stats for _, stats in results]


def joined(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of a global batch in the order of draws."""
    places = np.concatenate([np.asarray(part.draw) for part in parts])
    assert sorted(places.tolist()) == list(range(len(places)))
    rows = [row for part in parts for row in rows_of(part)]
    return [rows[at] for at in np.argsort(places)]


def claimed_rows(store: gt.Store, tasks: Sequence[str], work: Callable[..., None]) -> None:
    """Does all tasks of all rows."""
    for task in tasks:
        while claim := store.claim(task, 64):
            work(store, task, claim)
