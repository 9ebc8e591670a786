"""Replays of stores with axes or tasks: packed batches of every strategy, and the end of the rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpo
import numpy as np
import pytest
import torch
from deadlines import patience
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError
from geartrain.selection import Epochs, Fifo, GroupSampling, Lifo, Mixture, Prioritized, TopK, Uniform

TASKS = ("answer", "reward", "ref", "advantage")


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with grpo.new_store(store_name()) as made:
        yield made
        assert made.closed or made.audit() == []


def finish(store: gt.Store, numbers: range | list[int], tasks: tuple[str, ...] = TASKS) -> gt.Keys:
    """Rows that are due for the last task."""
    keys = grpo.insert(store, numbers)
    work(store, tasks)
    return keys


def work(store: gt.Store, tasks: tuple[str, ...] = TASKS, n: int = 64) -> None:
    for task in tasks:
        while claim := store.claim(task, n):
            grpo.work(store, task, claim)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "strategy",
    [Fifo(), Lifo(), TopK(), Uniform(seed=0), Uniform(seed=0, replacement=False), Prioritized(beta=0.5, seed=0)],
    ids=["fifo", "lifo", "topk", "uniform", "distinct", "prioritized"],
)
def test_every_row_is_drawn_once_whole_and_freed_with_its_spans(store: gt.Store, strategy: Any, prefetch: int) -> None:
    finish(store, range(12))
    free = store.stats()["span_bytes"]
    store.finish()
    seen: list[int] = []
    with replay_of(store, strategy, 4, prefetch=prefetch, timeout_s=patience(20)) as replay:
        for batch in replay:
            seen += grpo.check(batch)
            assert len(batch) == 4 and len(batch.keys) == 4 and batch.mask is None
        assert replay.stats()["batches"] == 3 and replay.stats()["bytes"] > 0
    assert sorted(seen) == list(range(12))
    if isinstance(strategy, (Fifo, Lifo)):
        assert seen == sorted(seen, reverse=isinstance(strategy, Lifo))
    assert len(store) == 0 and store.stats()["free_span_bytes"] >= free - 64


def test_fifo_passes_over_no_row_that_was_finished_late(store: gt.Store) -> None:
    grpo.insert(store, range(8))
    work(store, ("answer",))
    with store.claim("reward", 4) as first:  # rows 0 to 3 stay behind
        work(store)
        with gt.Replay(store, Fifo(), 2, prefetch=0) as replay:
            assert grpo.check(replay.sample()) == [4, 5]
            grpo.work(store, "reward", first)
            work(store)
            assert grpo.check(replay.sample()) == [0, 1]
            assert "after" not in replay.state_dict()["state"][0]


def test_iteration_ends_after_the_full_batches_once_no_row_can_come(store: gt.Store) -> None:
    grpo.insert(store, range(5))
    store.finish()
    with store.expect_writers(), replay_of(store, Fifo(), 2, timeout_s=patience(20)) as replay:
        worker = threading.Timer(0.1, work, [store])
        worker.start()
        assert [grpo.check(batch) for batch in replay] == [[0, 1], [2, 3]]
        worker.join()
        assert list(replay) == []
        with pytest.raises(NotEnoughRowsError, match=r"finish\(\) was called.*1 can be drawn"):
            replay.sample()


def test_rows_that_are_dropped_end_a_wait_for_them(store: gt.Store) -> None:
    finish(store, range(3))
    grpo.insert(store, [3])
    store.finish()

    def drop() -> None:
        with store.claim("answer", 1) as claim:
            claim.drop()

    with store.expect_writers(), replay_of(store, Fifo(), 2, timeout_s=patience(20), prefetch=0) as replay:
        batches = iter(replay)
        assert grpo.check(next(batches)) == [0, 1]
        late = threading.Timer(0.1, drop)
        late.start()
        assert next(batches, None) is None
        late.join()


def test_without_finish_too_few_rows_are_an_error_at_once(store: gt.Store) -> None:
    finish(store, range(3))
    with (
        replay_of(store, Fifo(), 4, timeout_s=patience(20)) as replay,
        pytest.raises(NotEnoughRowsError, match="has 3"),
    ):
        next(iter(replay))


def test_metadata_fields_transform_and_devices_of_a_batch(store: gt.Store) -> None:
    keys = finish(store, range(4))
    with replay_of(
        store,
        Prioritized(beta=1.0, seed=0),
        4,
        fields=["ids", "reward", "id"],
        transform=lambda batch: [batch],
        prefetch=0,
    ) as replay:
        [batch] = replay.sample()
        assert replay.stats()["path"] == "native, calls transform"
    assert list(batch) == ["ids", "reward", "id"] and "prompt" not in batch and set(dict(batch.fields)) == set(batch)
    assert isinstance(batch, gt.Batch) and batch.step == 0 and batch.importance_weights is not None
    order = [int(np.flatnonzero(keys.row == row)[0]) for row in batch.keys.row]
    assert batch["id"].tolist() == order and batch.keys == keys[order]
    assert batch.version.tolist() == [0] * 4 and batch.probability.shape == (4,)
    copies = [batch.to("cpu"), batch.clone(), pickle.loads(pickle.dumps(batch))]
    for other in copies:
        assert torch.equal(other["ids"], batch["ids"]) and torch.equal(other.cu_seqlens, batch.cu_seqlens)
        assert other.keys == batch.keys and other.nbytes == batch.nbytes
        assert other.joined("ids").part("ids", other["ids"]).equal(batch["ids"])
    with pytest.raises(gt.errors.FieldError, match="no field 'prompt'"):
        batch["prompt"]
    with pytest.raises(ArgumentError, match="differ in shape"):
        batch.copy_(batch)


def test_stores_with_axes_alone_are_drawn_from_again_and_again() -> None:
    fields = {"ids": gt.Field(("tokens",), "int32"), "text": gt.Text()}
    with gt.Store.create(fields, capacity=8, span_bytes=1 << 16, reserve=False) as store:
        store.insert({"ids": [np.full(n, n, np.int32) for n in range(6)], "text": [f"row {n}" for n in range(6)]})
        with gt.Replay(store, Uniform(seed=1), 8, num_batches=3, output="numpy") as replay:
            for batch in replay:
                lengths = batch.lengths("tokens")
                assert batch["text"] == [f"row {n}" for n in lengths]
                assert batch["ids"].tolist() == np.repeat(lengths, lengths).tolist()
        with gt.Replay(store, Epochs(seed=0), 4, prefetch=0) as replay:  # the last batch of a pass is a short one
            passes = [[len(batch) for batch in replay] for _ in range(2)]
            assert passes == [[4, 2], [4, 2]]
        assert len(store) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"window": 4},
        {"view": gt.Transitions()},
        {"update_lag": 2},
        {"device": "cuda"},
        {"inputs": ["ids"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_such_stores_do_not_have_are_refused(store: gt.Store, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"axes, strings or tasks.*takes no"):
        replay_of(store, Fifo(), 2, **options)


def test_strategies_over_steps_groups_by_values_with_axes_and_mixtures_are_refused(store: gt.Store) -> None:
    for strategy in (Uniform(over="steps"), Epochs(over="steps")):
        with pytest.raises(ArgumentError, match=r"no steps|max_times_sampled"):
            gt.Replay(store, strategy, 2)
    with pytest.raises(ArgumentError, match=r"groups are told by .*'prompt' of the store .* the axis 'prompt'"):
        gt.Replay(store, GroupSampling("prompt", 2), 2)
    mixture = Mixture([0.5, 0.5], [Fifo(), Fifo()])
    with pytest.raises(ArgumentError, match="several stores"):
        gt.Replay([store, store], mixture, 2)


_LEARNER = """
import sys, grpo, geartrain as gt
with grpo.new_store(sys.argv[1]) as store, gt.Replay(store, gt.selection.Fifo(), 4) as replay:
    print("open", flush=True)
    print(*(number for batch in replay for number in grpo.check(batch)))
"""


def test_another_process_trains_on_rows_as_they_are_finished(store: gt.Store) -> None:
    import os

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _LEARNER, store.name], stdout=subprocess.PIPE, text=True, env=environment
    ) as learner:
        assert learner.stdout is not None and learner.stdout.readline() == "open\n"
        for first in range(0, 40, 10):
            finish(store, range(first, first + 10))
        store.finish()
        seen = [int(each) for each in learner.stdout.readline().split()]
        assert learner.wait(patience(30)) == 0
    assert sorted(seen) == list(range(40)) and len(store) == 0
