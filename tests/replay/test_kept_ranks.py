"""Ranks that keep the rows of their batches until these are saved and draw them again alike; and strict orders."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpo
import numpy as np
import packed_rows
import pytest
from deadlines import patience
from packed_rows import over_ranks
from placed_rows import at
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import NotEnoughRowsError
from geartrain.replay.distributed.packed_rank_rows import PackedRankRows
from geartrain.replay.sampler import StoreSampler
from geartrain.selection import Fifo, Lifo, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

N, B = 48, 8
TASKS = ("answer", "reward", "ref", "advantage")
Make = Callable[..., list[gt.Store]]


@pytest.fixture
def shards(store_name: Callable[[], str]) -> Iterator[Make]:
    """Rows in turn on each of some shards, with the sequence numbers that they would have in one."""
    made: list[gt.Store] = []

    def make(count: int, tasks: Sequence[str] = TASKS, finish: bool = True, **options: Any) -> list[gt.Store]:
        stores = [grpo.new_store(store_name(), **options) for _ in range(count)]
        for first in range(0, N, 4):
            store = stores[first // 4 % count]
            store.native.advance_sequence(first + 1)
            grpo.insert(store, range(first, first + 4))
        for store in stores:
            packed_rows.claimed_rows(store, tasks, grpo.work)
            if finish:
                store.finish()
        made.extend(stores)
        return stores

    yield make
    for store in made:
        assert store.closed or store.audit() == []
        store.close()


def kept(
    stores: list[gt.Store],
    ranks: int,
    selection: Any,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    save: Callable[[int, int], int | None] = lambda rank, step: None,
    mesh: tuple[int, int, int] | None = None,
    **options: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Global batches from a state on, and the state after them; `save` says what a rank tells to be saved at a step."""

    def body(rank: ThreadRankGroup) -> tuple[list[Any], dict[str, Any]]:
        given: dict[str, Any] = {
            "group": rank,
            "keep": "saved",
            "timeout_s": patience(20),
            "balance": "tokens",
            **options,
        }
        if mesh is not None:
            given["mesh"] = at(rank.rank, *mesh)
        with replay_of(stores[rank.rank % len(stores)], selection, B, **given) as replay:
            if state is not None:
                replay.load_state_dict(json.loads(json.dumps(state)))
            found: list[Any] = []
            while steps is None or len(found) < steps:
                try:
                    batch = replay.sample()
                except NotEnoughRowsError as error:
                    assert "finish() was called" in str(error)
                    break
                grpo.check(batch)
                found.append(batch)
                told = save(rank.rank, batch.step)
                if told is not None:
                    replay.saved(told)
            after = replay.state_dict()
            replay.settle()
            return found, after

    results = run_ranks(ranks, body)
    parts = [found for found, _ in results][:: 1 if mesh is None else mesh[2]]  # of tensor-parallel peers the first
    made = [packed_rows.joined(list(step)) for step in zip(*parts, strict=True)]
    return [[row["id"][0] for row in batch] for batch in made], results[0][1]


STRATEGIES = [Uniform(seed=1, replacement=False), Fifo(), Lifo(), Fifo(strict=True)]


@pytest.mark.parametrize("selection", STRATEGIES, ids=["uniform", "fifo", "lifo", "strict"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_behind_the_loaded_one_are_drawn_again_on_another_number_of_ranks(
    shards: Make, selection: Any, prefetch: int
) -> None:
    whole, _ = kept(shards(2), 2, selection, prefetch=0)
    if not isinstance(selection, Uniform):  # whose rows are those of one shard after the other
        with gt.Replay(shards(1)[0], selection, B, output="numpy") as replay:
            assert whole == [grpo.check(batch) for batch in replay]
    stores = shards(2)
    first, state = kept(stores, 2, selection, 2, prefetch=prefetch)
    more, _ = kept(
        stores, 4, selection, 3, state, prefetch=prefetch, mesh=(2, 1, 2)
    )  # which ends without having saved anything
    again, _ = kept(stores, 6, selection, None, state, lambda rank, step: step, prefetch=prefetch)
    assert (first, more, again) == (whole[:2], whole[2:5], whole[2:])
    assert [store.stats()["kept"] for store in stores] == [0, 0] and sum(map(len, stores)) == 0


def test_rows_are_freed_once_every_rank_has_told_so(shards: Make) -> None:
    stores = shards(2)
    kept(stores, 2, Fifo(), 4, save=lambda rank, step: [step, min(step, 1)][rank], prefetch=0)
    steps = {step for store in stores for step, *_ in store.native.taken_steps()}
    assert steps == {2, 3}
    assert sum(store.stats()["kept"] for store in stores) == 2 * B


@pytest.mark.parametrize("how", ["not stamped by all", "deleted", "deleted at the read"])
def test_a_step_that_lacks_rows_is_drawn_anew_on_all_shards(
    shards: Make, monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    stores = shards(2)
    _, state = kept(stores, 2, Fifo(), 1, prefetch=0)
    dropped, gone = kept(stores, 2, Fifo(), 1, state, prefetch=0)[0][0], []
    rows, generations, _ = stores[1].native.taken(1)
    if how == "not stamped by all":
        assert stores[1].native.untake(1) == len(rows) > 0
    elif how == "deleted":
        gone = [int(gt.fetch(stores[1], gt.Keys(rows[:1], generations[:1]), fields=["id"])["id"][0])]
        stores[1].delete(gt.Keys(rows[:1], generations[:1]))
    else:
        exchange, one = PackedRankRows._exchange, threading.Lock()

        def deletes(self: PackedRankRows, *rest: Any) -> Any:
            with one:
                if not gone:
                    gone.extend([int(gt.fetch(stores[1], gt.Keys(rows[:1], generations[:1]), fields=["id"])["id"][0])])
                    stores[1].delete(gt.Keys(rows[:1], generations[:1]))
            return exchange(self, *rest)

        monkeypatch.setattr(PackedRankRows, "_exchange", deletes)
    again, _ = kept(stores, 4, Fifo(), None, state, prefetch=0)
    assert (again[0] == dropped) == (not gone)  # a Fifo finds the same rows, if they are all there
    seen = [number for batch in again for number in batch]
    assert len(seen) == len(set(seen)) and not set(gone) & set(seen)
    if how == "not stamped by all":
        assert f"draws step 1 anew: {len(rows)} of its 8 rows are missing" in caplog.text


def test_kept_rows_alone_that_stop_ranks_are_named_on_all_of_them(shards: Make) -> None:
    stores = shards(2, finish=False, capacity=N // 2)
    raised = []

    def body(rank: ThreadRankGroup) -> None:
        options: dict[str, Any] = {"group": rank, "keep": "saved", "timeout_s": patience(20), "prefetch": 0}
        with stores[rank.rank].expect_writers(), replay_of(stores[rank.rank], Fifo(), B, **options) as replay:
            for _ in range(N // B):
                replay.sample()
            with pytest.raises(NotEnoughRowsError, match=r"no other row can come: saved was not called yet; .*; saved"):
                replay.sample()
            raised.append(rank.rank)

    run_ranks(2, body)
    assert sorted(raised) == [0, 1]


def test_kept_rows_of_finished_batches_are_not_in_flight(shards: Make) -> None:
    stores = shards(2)
    for store in stores:
        store.limiter.set(in_flight=N)
    over_ranks(stores, 2, Fifo(), B, prefetch=0, keep="saved")
    assert [store.stats()["in_flight"] for store in stores] == [0, 0]
    assert sum(store.stats()["kept"] for store in stores) == N


def test_a_strict_order_over_shards_waits_for_the_oldest_row_of_any_shard(shards: Make) -> None:
    for count, ranks in ((2, 2), (3, 6)):
        stores = shards(count, tasks=("answer",), finish=False)
        held, released = stores[-1].claim("reward", 2), threading.Event()  # the first two rows of the last shard
        assert held is not None
        for store in stores:
            packed_rows.claimed_rows(store, TASKS, grpo.work)

        def finish(held: Any = held, stores: Any = stores, released: Any = released) -> None:
            released.set()
            grpo.work(stores[-1], "reward", held)
            for store in stores:
                packed_rows.claimed_rows(store, TASKS, grpo.work)
                store.finish()

        def look(batch: gt.Batch, first: int = 4 * (count - 1), released: Any = released) -> None:
            assert released.is_set() or max(np.asarray(batch["id"]), default=0) < first

        with stores[0].expect_writers():
            late = threading.Timer(0.3, finish)
            late.start()
            batches, _, _ = over_ranks(stores, ranks, Fifo(strict=True), 6, look, prefetch=0, timeout_s=patience(20))
            late.join()
        assert [row["id"][0] for batch in batches for row in batch] == list(range(N))


def test_a_row_that_is_finished_during_a_draw_in_strict_order_is_not_passed_over(
    shards: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = shards(2, tasks=("answer",), finish=False)
    held = stores[1].claim("reward", 2)  # the first two rows of the second shard
    for store in stores:
        packed_rows.claimed_rows(store, TASKS, grpo.work)
    first_open, finished = StoreSampler.first_open, threading.Event()

    def finishes(self: StoreSampler, n: int) -> int:
        if self.plan.store is stores[1] and not finished.is_set():
            finished.set()
            grpo.work(stores[1], "reward", held)
            for store in stores:
                packed_rows.claimed_rows(store, TASKS, grpo.work)
                store.finish()
        return first_open(self, n)

    monkeypatch.setattr(StoreSampler, "first_open", finishes)
    batches, _, _ = over_ranks(stores, 2, Fifo(strict=True), 6, prefetch=0, timeout_s=patience(20))
    assert finished.is_set() and [row["id"][0] for batch in batches for row in batch] == list(range(N))
