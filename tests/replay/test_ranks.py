"""One replay over many ranks: the same global batch however many there are, and only the surplus moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from rank_batches import FIELDS, STEPS, B, N, as_record, check, insert, join, over_ranks, rows, same
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError
from geartrain.ranks.topology import MeshPosition
from geartrain.selection import Fifo, GroupSampling, Lifo, Limits, Mixture, Prioritized, TopK, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks


def test_groups_stay_together_on_any_number_of_ranks(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    (store,) = sharded_stores(1)
    selection = GroupSampling(by="group", size=4, seed=2, prioritized=True)
    with gt.Replay(store, selection, B, window=4, output="numpy", num_batches=3) as replay:
        expected = [as_record(batch) for batch in replay]
    for ranks in [1, 2, 3, 4]:
        batches, _ = over_ranks(sharded_stores(ranks), selection)
        assert same(batches, expected)
    with pytest.raises(ArgumentError, match="6 rows a replica do not hold whole groups of 4"):
        over_ranks(sharded_stores(8), selection)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_of_the_least_version_is_asked_once_a_batch(
    sharded_stores: Callable[..., list[gt.Store]], ranks: int
) -> None:
    stores = sharded_stores(ranks)

    def body(rank: ThreadRankGroup) -> list[int]:
        asked: list[int] = []
        selection = Uniform(seed=1, limits=Limits(min_version=lambda: len(asked.append(1) or asked) * 0))
        counts = []
        with gt.Replay(stores[rank.rank], selection, B, group=rank, prefetch=0, output="numpy") as replay:
            for _ in range(3):
                before = len(asked)
                replay.sample()
                counts.append(len(asked) - before)
        return counts

    assert run_ranks(ranks, body) == [[1, 1, 1]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ordered_gives_rank_i_the_ith_slice(sharded_stores: Callable[..., list[gt.Store]], ranks: int) -> None:
    def body(rank: ThreadRankGroup) -> None:
        options = {"assignment": "ordered", "window": 4, "output": "numpy", "num_batches": 2, "group": rank}
        with replay_of(stores[rank.rank], Prioritized(seed=8), B, **options) as replay:
            for batch in replay:
                check(batch)
                assert batch.draw.tolist() == list(range(rank.rank * B // ranks, (rank.rank + 1) * B // ranks))

    stores = sharded_stores(ranks)
    run_ranks(ranks, body)


def test_ranks_of_one_host_read_its_shard_without_moving_a_byte(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    expected, _ = over_ranks(sharded_stores(1), Prioritized(seed=1))
    for shards, ranks in ((1, 3), (2, 4), (3, 6)):
        batches, stats = over_ranks(sharded_stores(shards), Prioritized(seed=1), ranks=ranks)
        assert same(batches, expected)
        if shards == 1:
            assert all(s["received_bytes"] == s["sent_bytes"] == 0 and s["local_share"] == 1 for s in stats)


def test_local_first_moves_the_surplus_and_ordered_nearly_all(store_name: Callable[[], str]) -> None:
    stores = []
    for shard in range(4):
        stores.append(gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=60))
        insert(stores[-1], shard * 60, shard * 60 + 60)
    try:
        _, first = over_ranks(stores, Uniform(seed=1), batches=40)
        _, ordered = over_ranks(stores, Uniform(seed=1), batches=40, assignment="ordered")
        _, even = over_ranks(stores, Uniform(seed=1, stratified=True), batches=40)
        moved = [
            sum(s["received_bytes"] for s in stats) / sum(s["bytes"] for s in stats) for stats in (first, ordered, even)
        ]
        # The part of a multinomial draw above its mean, 0.4 sqrt(n (W - 1)) of n; (W - 1) / W; nothing.
        assert moved[0] == pytest.approx(0.4 * np.sqrt(3 / B), rel=0.15)
        assert moved[1] == pytest.approx(3 / 4, rel=0.05)
        assert moved[2] == 0
        for stats in (first, ordered):
            assert sum(s["received_bytes"] for s in stats) == sum(s["sent_bytes"] for s in stats)
            # One gather of 64 bytes from each rank, relayed to three others, and nothing that grows with the batch.
            assert all(s["selection_bytes"] == 40 * 3 * 64 for s in stats)
    finally:
        for store in stores:
            store.close()


def test_rows_with_a_limit_on_samples_are_all_used_and_never_more_often(store_name: Callable[[], str]) -> None:
    for shards, ranks in ((1, 1), (1, 2), (2, 2), (4, 4)):
        stores = []
        for shard in range(shards):
            stores.append(gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=N, max_times_sampled=1))
            insert(stores[-1], N * shard // shards, N * (shard + 1) // shards)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> tuple[list[int], list[gt.Batch]]:
            seen: list[int] = []
            options = {"window": 4, "output": "numpy", "group": rank, "prefetch": 0}
            with replay_of(stores[rank.rank % len(stores)], Uniform(seed=1), 40, **options) as replay:
                for _ in range(N // 40):
                    batch = replay.sample()
                    check(batch)
                    seen += batch["number"].tolist()
                with pytest.raises(NotEnoughRowsError):
                    replay.sample()
                return seen

        seen = [number for part in run_ranks(ranks, body) for number in part]
        assert sorted(seen) == list(range(N)), (shards, ranks)
        for store in stores:
            assert store.audit() == []
            store.close()


def test_a_mixture_with_groups_fills_replicas_with_whole_groups(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    selection = Mixture([0.5, 0.5], [Uniform(seed=1), GroupSampling(by="group", size=4, seed=2)], seed=3)
    for ranks in (1, 2, 3):
        stores = [list(pair) for pair in zip(sharded_stores(ranks), sharded_stores(ranks), strict=True)]

        def body(rank: ThreadRankGroup, stores: Any = stores) -> None:
            with gt.Replay(
                stores[rank.rank], selection, 24, window=4, output="numpy", num_batches=4, group=rank
            ) as replay:
                for batch in replay:
                    check(batch)
                    grouped = batch["group"][batch.draw >= 12]
                    assert (np.unique(grouped, return_counts=True)[1] == 4).all()

        run_ranks(ranks, body)
    stores = [list(pair) for pair in zip(sharded_stores(2), sharded_stores(2), strict=True)]

    def refused(rank: ThreadRankGroup) -> None:
        with pytest.raises(ArgumentError, match="would cut groups"):
            replay_of(stores[rank.rank], selection, 24, group=rank, assignment="ordered")

    run_ranks(2, refused)


# --- pipelines and tensor parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "pp", "tp"), [(1, 2, 1), (2, 2, 1), (2, 3, 1), (2, 1, 2), (2, 2, 2), (1, 4, 2)])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_heads_get_inputs_tails_targets_and_the_middle_nothing(
    sharded_stores: Callable[..., list[gt.Store]], dp: int, pp: int, tp: int, shards: int
) -> None:
    shards = min(shards, dp * pp * tp)
    stores = sharded_stores(shards)
    expected, _ = over_ranks(sharded_stores(1), Prioritized(seed=4, beta=0.5), batches=3)

    def body(rank: ThreadRankGroup) -> tuple[MeshPosition, list[gt.Batch], dict[str, float]]:
        at = rank.rank
        place = MeshPosition(at // tp % dp, at // tp // dp, at % tp, dp, pp, tp)
        with replay_of(
            stores[at % shards],
            Prioritized(seed=4, beta=0.5),
            B,
            window=4,
            output="numpy",
            num_batches=3,
            group=rank,
            mesh=place,
            inputs=["obs", "number"],
            targets=["action", "number"],
        ) as replay:
            return place, list(replay), replay.stats()

    results = run_ranks(dp * pp * tp, body)
    for step in range(3):
        replicas = []
        for replica in range(dp):
            stages = {(place.pp, place.tp): batches[step] for place, batches, _ in results if place.dp == replica}
            head, tail = stages[0, 0], stages[pp - 1, 0]
            assert set(head) == ({"obs", "number"} if pp > 1 else {"obs", "number", "action"})
            assert set(tail) == ({"action", "number"} if pp > 1 else set(head))
            for (stage, part), batch in stages.items():
                if stage in (0, pp - 1):
                    twin = head if stage == 0 else tail
                    assert batch.keys == twin.keys and all(np.array_equal(batch[f], twin[f]) for f in twin)
                    assert np.array_equal(batch.importance_weights, twin.importance_weights)
                else:
                    assert len(batch) == 0 and batch.batch_size == 0 and batch.mask.shape == (0, 4), part
            assert head.keys == tail.keys and np.array_equal(head.mask, tail.mask)
            whole = gt.Batch(
                {"obs": head["obs"], "action": tail["action"], "number": head["number"]},
                head.keys,
                head.mask,
                head.start,
                head.length,
                head.version,
                head.probability,
                head.importance_weights,
                step,
                head.draw,
            )
            check(whole)
            replicas.append(whole)
        assert same([join(replicas)], [expected[step]])


@pytest.mark.parametrize("replacement", [True, False])  # drawn by totals, or by what ranks tell each other
def test_a_mixture_over_ranks_makes_the_batches_of_one_process(
    sharded_stores: Callable[..., list[gt.Store]], replacement: bool
) -> None:
    def selection() -> Mixture:
        uniform = Uniform(seed=1, replacement=replacement)
        return Mixture([0.7, 0.3], [uniform, Prioritized(seed=2, beta=0.5)], seed=3)

    def pairs(shards: int) -> list[list[gt.Store]]:
        return [list(pair) for pair in zip(sharded_stores(shards), sharded_stores(shards), strict=True)]

    with gt.Replay(pairs(1)[0], selection(), B, window=4, output="numpy", num_batches=3) as replay:
        first, *_ = made = list(replay)
        expected = [as_record(batch) for batch in made]
    for ranks in (1, 2, 3):
        stores = pairs(ranks)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> list[gt.Batch]:
            options = {"window": 4, "output": "numpy", "num_batches": 3, "group": rank}
            with replay_of(stores[rank.rank], selection(), B, **options) as replay:
                made = []
                for batch in replay:
                    check(batch)
                    replay.update_priorities(batch.keys, 1.0)  # to either store
                    made.append(batch)
                return made

        results = run_ranks(ranks, body)
        assert same([join([r[step] for r in results]) for step in range(1)], expected[:1])
        for batch in (r[0] for r in results):
            store = np.asarray(first.keys.shard)[batch.draw]
            shard = np.asarray(batch.keys.shard)
            assert np.array_equal(shard // ranks, store), "shards are numbered store by store"
            ids = [[each.id for each in pair] for pair in stores]
            assert batch.keys.store.tolist() == [ids[s % ranks][s // ranks] for s in shard.tolist()]


# --- rows that change, shards that grow -------------------------------------------------------------------------


@pytest.mark.parametrize("selection", [Prioritized(seed=1), Uniform(seed=1, replacement=False), Lifo(), Fifo(), TopK()])
def test_no_torn_row_arrives_while_every_shard_is_overwritten(store_name: Callable[[], str], selection: Any) -> None:
    shards = 2
    stores = [gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=40) for _ in range(shards)]
    for store in stores:
        # Priorities that have nothing to do with age, lest top-k ask for just the rows that are overwritten next.
        store.insert(
            rows(0, 40), lengths=np.arange(40) % STEPS + 1, versions=np.arange(40), priorities=np.arange(40) % 17
        )
    stop = threading.Event()

    def write(store: gt.Store) -> None:
        at = 40
        while not stop.is_set():
            numbers = np.arange(at, at + 4)
            values = rows(at, at + 4)
            store.insert(values, lengths=numbers % STEPS + 1, versions=numbers, priorities=numbers % 17, threads=1)
            at += 4

    writers = [threading.Thread(target=write, args=(store,), daemon=True) for store in stores]
    for writer in writers:
        writer.start()
    until_s = time.monotonic() + patience(40)
    try:

        def body(rank: ThreadRankGroup) -> float:
            options = {"window": 4, "output": "numpy", "group": rank, "min_rows": 1}
            with replay_of(stores[rank.rank % shards], selection, 16, **options) as replay:
                checked = 0
                while checked < 30:
                    try:
                        check(replay.sample())
                    except NotEnoughRowsError:  # on all ranks: FIFO has drawn all that the writers have made so far
                        if not isinstance(selection, Fifo) or time.monotonic() > until_s:
                            raise
                        continue
                    checked += 1
                return replay.stats()["redrawn"]

        run_ranks(4, body)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
        for store in stores:
            store.close()


def test_rows_that_join_a_shard_are_drawn_from_the_next_batch_on(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(3)

    def body(rank: ThreadRankGroup) -> set[int]:
        options = {"window": 4, "output": "numpy", "group": rank, "prefetch": 0}
        with replay_of(stores[rank.rank], Lifo(), 12, **options) as replay:
            replay.sample()
            if rank.rank == 1:
                stores[1].native.advance_sequence(1000)
                numbers = np.arange(500, 512)
                stores[1].insert(rows(500, 512), lengths=numbers % STEPS + 1, versions=numbers)
            rank.all_gather(np.zeros(1, np.uint8))
            return set(replay.sample()["number"].tolist())

    assert set.union(*run_ranks(3, body)) == set(range(500, 512))
