"""Rows that are functions of their numbers, all that a shard knows of them, and placements on ranks as threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replay_calls import replay_of

import geartrain as gt
from geartrain.core.keys import Keys
from geartrain.placement.placement import Placement
from geartrain.placement.report import PlacementReport
from geartrain.ranks.topology import MeshPosition
from geartrain.tools.testing import ThreadRankGroup, run_ranks

STEPS = 6

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "half": gt.Field((2,), "bfloat16"),
    "done": gt.Field((), "bool"),
    "image": gt.Field((2, 2), "uint8", per_row=True),
    "number": gt.Field((), "int64", per_row=True),
}

Stores = Callable[..., list[gt.Store]]


def insert(store: gt.Store, numbers: np.ndarray, priorities: np.ndarray) -> Keys:
    """Rows that are functions of their numbers."""
    import torch

    if not len(numbers):
        return Keys.empty()
    steps = numbers[:, None] * 10.0 + np.arange(STEPS)
    return store.insert(
        {
            "obs": (steps[:, :, None] + np.zeros(3)).astype(np.float32),
            "half": torch.from_numpy(steps[:, :, None] % 251 + np.zeros(2)).to(torch.bfloat16),
            "done": (steps % 3 == 0),
            "image": (numbers[:, None, None] % 199 + np.arange(4).reshape(2, 2)).astype(np.uint8),
            "number": numbers,
        },
        lengths=numbers % STEPS + 1,
        priorities=priorities,
        versions=numbers * 7 - 3,
    )


def contents(store: gt.Store) -> dict[int, tuple[Any, ...]]:
    """By number, all that a row is, its priority and counts included; raw, so that any dtype compares."""
    keys = store.keys()
    status = store.status(keys)
    found: dict[int, tuple[Any, ...]] = {}
    columns = {name: store.column(name) for name in store.fields}
    for i, row in enumerate(keys.row.tolist()):
        length = int(status["length"][i])
        blocks = tuple(
            columns[name][row, :length].tobytes() if not spec.per_row else columns[name][row].tobytes()
            for name, spec in store.fields.items()
        )
        about = tuple(status[name][i] for name in ("length", "priority", "version", "times_sampled"))
        number = int(columns["number"][row])
        assert number not in found, "a row is twice in one shard"
        found[number] = (*about, blocks)
    return found


def population(stores: list[gt.Store]) -> Counter[tuple[Any, ...]]:
    """All rows of all shards; a row that is in two counts twice."""
    return Counter(row for store in stores for row in contents(store).items())


def at(rank: int, dp: int, pp: int = 1, tp: int = 1) -> MeshPosition:
    return MeshPosition(rank // tp % dp, rank // tp // dp, rank % tp, dp, pp, tp)


def with_placement(
    stores: list[gt.Store], body: Callable[[Placement], Any], ranks: int = 0, **options: Any
) -> list[Any]:
    """What `body` returned on each rank; rank r has store r % len(stores)."""
    mesh = options.pop("mesh", None)

    def run(rank: ThreadRankGroup) -> Any:
        own = {} if mesh is None else {"mesh": at(rank.rank, *mesh)}
        with Placement(stores[rank.rank % len(stores)], group=rank, **own, **options) as made:
            return body(made)

    return run_ranks(ranks or len(stores), run)


def replayed(
    stores: list[gt.Store], selection: Any, batches: int, batch_size: int = 64, **options: Any
) -> tuple[float, int, PlacementReport]:
    """The measured local share and bytes received of some batches, and what was expected of them."""
    mesh = options.pop("mesh", None)
    by = options.pop("by", "priority")
    size = int(np.prod(mesh)) if mesh else len(stores)
    others = ThreadRankGroup.make(size)

    def body(rank: ThreadRankGroup) -> tuple[dict[str, float], PlacementReport]:
        store = stores[rank.rank % len(stores)]
        settings = {**options, "mesh": at(rank.rank, *mesh)} if mesh else options
        with replay_of(
            store, selection, batch_size, group=rank, output="numpy", num_batches=batches, **settings
        ) as replay:
            for _ in replay:
                pass
            with Placement(store, group=others[rank.rank], by=by, **settings) as made:
                return replay.stats(), made.report(replay)

    results = run_ranks(size, body)
    local, received = (sum(stats[name] for stats, _ in results) for name in ("local_bytes", "received_bytes"))
    report = results[0][1]
    assert report.measured_local_share == pytest.approx(local / (local + received))
    assert all(other == report for _, other in results)
    return local / (local + received), int(received), report


def fill(stores: list[gt.Store], n: int, split: list[float], seed: int = 0) -> np.ndarray:
    """n rows of uneven priorities, in contiguous runs over the shards; returns the priorities."""
    priorities = np.random.default_rng(seed).integers(0, 60, n) / 8.0
    cuts = np.rint(np.cumsum(split) * n).astype(int)
    for store, rows in zip(stores, np.split(np.arange(n), cuts[:-1]), strict=True):
        insert(store, rows, priorities[rows])
    return priorities
