"""Rows of several episodes over ranks: the batches of one process to the bit, and no transition over a mark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from recorded_shards import alone, over_ranks, same
from test_shared_rows import GAMMA, by_observation, check_batch, make_store, record

import geartrain as gt
from geartrain.selection import Prioritized, Uniform

B = 48


def recorded(seed: int = 5, steps: int = 250) -> tuple[dict[str, Any], Any, Any]:
    """Rows of a recorder, their lengths, and the episodes that they were made of."""
    with make_store(priority_per="step") as store:
        episodes = record(store, "next_step", steps, seed=seed)
        keys = store.keys()
        rows = {name: store.column(name)[keys.row] for name in store.fields}
        return rows, store.status(keys)["length"], episodes


@contextmanager
def shards(n: int, rows: dict[str, Any], lengths: Any, per: str) -> Iterator[list[gt.Store]]:
    """The rows in n stores of different sizes, with random priorities of steps and 0 of marked ones."""
    total = len(lengths)
    bounds = [0, *np.sort(np.random.default_rng(n).permutation(total - 1)[: n - 1] + 1).tolist(), total]
    chances = np.random.default_rng(1).uniform(0.1, 5, rows["last"].shape) * ~rows["last"]
    with ExitStack() as stack:
        made = []
        for first, last in itertools.pairwise(bounds):
            store = stack.enter_context(make_store(priority_per=per, capacity=total + 1))
            store.native.advance_sequence(first + 1)
            some = {name: array[first:last] for name, array in rows.items()}
            keys = store.insert(some, lengths=lengths[first:last])
            if per == "step":
                which = np.repeat(np.arange(last - first), lengths[first:last])
                steps = np.concatenate([np.arange(length) for length in lengths[first:last]])
                store.update_priorities(keys[which].of_steps(steps), chances[first:last][which, steps])
            made.append(store)
        yield made


def test_ranks_draw_by_priority_what_one_process_draws():
    rows, lengths, episodes = recorded()
    known, view = by_observation(episodes), gt.Transitions(n_step=3, gamma=GAMMA, frame_stack=2)
    selection = Prioritized(seed=2, beta=0.5)
    with shards(1, rows, lengths, "step") as (store,):
        expected = alone(store, selection, B, 3, view=view)
        three, _ = over_ranks([store], selection, B, 3, ranks=3, view=view)
        assert all(map(same, three, expected))
        with gt.Replay(store, selection, B, view=view, output="numpy") as replay:
            check_batch(replay.sample(), known, 3, 2, store.max_length)
    for n in (1, 2, 3):
        with shards(n, rows, lengths, "step") as stores:
            batches, figures = over_ranks(stores, selection, B, 3, view=view)
            assert all(map(same, batches, expected)), f"{n} ranks"
            assert sum(each["redrawn"] for each in figures) == 0


@pytest.mark.parametrize("per", ["row", "step"])
def test_ranks_draw_steps_alike_often_as_one_process_does(per):
    rows, lengths, episodes = recorded(steps=120)
    known, view = by_observation(episodes), gt.Transitions(n_step=2, gamma=GAMMA)
    selection = Uniform(seed=1, over="steps")
    with shards(1, rows, lengths, per) as (store,):
        expected = alone(store, selection, B, 3, view=view)
        with gt.Replay(store, selection, B, view=view, output="numpy") as replay:
            check_batch(replay.sample(), known, 2, 1, store.max_length)
    for n in (1, 2, 3):
        with shards(n, rows, lengths, per) as stores:
            batches, figures = over_ranks(stores, selection, B, 3, view=view)
            assert all(map(same, batches, expected)), f"{n} ranks"
            assert sum(each["redrawn"] for each in figures) == 0  # marked steps are refused by the draws
