"""Stores of a job that are saved and loaded by ranks as threads, and what their rows are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

import geartrain as gt
from geartrain.checkpoints.job import load_checkpoint, save_checkpoint
from geartrain.tools.testing import run_ranks

FIELDS = {
    "x": gt.Field((3,), "float32"),
    "id": gt.Field((), "int64", per_row=True),
    "prompt": gt.Field((), "int32", per_row=True),
}


def put(store: gt.Store, first: int, n: int) -> gt.Keys:
    ids = np.arange(first, first + n)
    return store.insert(
        {
            "x": np.repeat(ids, 12).reshape(n, 4, 3).astype(np.float32),
            "id": ids,
            "prompt": (ids // 5).astype(np.int32),
        },
        lengths=1 + ids % 4,
        priorities=(ids * 7) % 11 / 4,
        versions=ids * 3,
    )


@contextmanager
def stores_of(store_name: Any, sizes: list[int], **options: Any) -> Iterator[list[gt.Store]]:
    """A store for each shard, with rows 1000, 1001, ... in the first, 2000, ... in the second; some were removed."""
    with ExitStack() as stack:
        made = []
        for number, size in enumerate(sizes):
            store = stack.enter_context(gt.Store.create(store_name(), FIELDS, max_length=4, capacity=60, **options))
            keys = put(store, 1000 * (number + 1), size) if size else None
            if keys is not None:
                store.delete(keys[::7])
                put(store, 1000 * (number + 1) + 500, 2)
            made.append(store)
        yield made


def save_all(stores: list[gt.Store], directory: Any, **options: Any) -> list[gt.saving.Saved]:
    """Saves with one rank a store; `directory` is one for all or one for each."""
    places = directory if isinstance(directory, list) else [directory] * len(stores)
    return run_ranks(len(stores), lambda r: save_checkpoint(stores[r.rank], places[r.rank], r, **options))


def load_all(store_name: Any, directory: Any, n: int, **options: Any) -> list[tuple[gt.Store, Any, Any]]:
    names = [store_name() for _ in range(n)]
    places = directory if isinstance(directory, list) else [directory] * n
    return run_ranks(n, lambda r: load_checkpoint(places[r.rank], names[r.rank], r, shard=(r.rank, n), **options))


def records(store: gt.Store) -> list[tuple[Any, ...]]:
    """What is known of a store's rows, in the order of their numbers, but for keys and sequence numbers."""
    keys = store.keys()
    keys = keys[np.argsort(keys.row)]
    if not len(keys):
        return []
    batch, status = gt.fetch(store, keys, output="numpy"), store.status(keys)
    known = ("priority", "length", "version", "times_sampled", "inserted_at_ns")
    return list(zip(batch["id"].tolist(), batch["x"].tolist(), *(status[name].tolist() for name in known), strict=True))


def population(stores: list[gt.Store]) -> list[tuple[Any, ...]]:
    return [row for store in stores for row in records(store)]


def commits(stores: list[gt.Store], after: list[int] | None = None) -> list[int]:
    """The ids in the order of their commits over all shards, those that a FIFO passed left out."""
    found = []
    for number, store in enumerate(stores):
        sequences = store.status()["sequence"]
        ids = gt.fetch(store, store.keys(), output="numpy")["id"] if len(store) else []
        least = 0 if after is None else after[number]
        found += [(int(s), number, int(i)) for s, i in zip(sequences, ids, strict=True) if s > least]
    return [i for _, _, i in sorted(found)]


def close(loaded: list[tuple[gt.Store, Any, Any]]) -> None:
    for store, _, _ in loaded:
        store.close()


def steps(replay: gt.Replay, n: int) -> list[list[int]]:
    drawn = []
    for _ in range(n):
        batch = replay.sample()
        drawn.append(batch["id"].tolist())
        replay.update_priorities(batch.keys, (batch["id"] + replay.step) % 13 / 3)
    return drawn
