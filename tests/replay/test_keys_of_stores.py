"""Keys of several stores: every row is reached in its own store, and refused by every other one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, RanksDisagreeError, StaleKeyError
from geartrain.selection import Mixture, Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

STEPS = 6
FIELDS = {"t": gt.Field((), "int64"), "label": gt.Field((), "int64", per_row=True)}


def fill(store: gt.Store, first: int, n: int) -> gt.Keys:
    numbers = np.arange(first, first + n)
    return store.insert({"t": numbers[:, None] * 10 + np.arange(STEPS), "label": numbers}, lengths=numbers % STEPS + 1)


@pytest.fixture
def make_store(store_name: Callable[[], str]) -> Iterator[Callable[..., gt.Store]]:
    made: list[gt.Store] = []

    def make(first: int, n: int = 8, **options: Any) -> gt.Store:
        options = {"capacity": 8, "max_length": STEPS, **options}
        made.append(gt.Store.create(store_name(), FIELDS, **options))
        fill(made[-1], first, n)
        return made[-1]

    yield make
    for store in made:
        store.close()


def priorities(store: gt.Store) -> dict[int, float]:
    labels = store.column("label")
    keys = store.keys()
    return dict(zip(labels[keys.row].tolist(), store.status(keys)["priority"].tolist(), strict=True))


def test_a_store_refuses_the_keys_of_another_and_changes_nothing(make_store: Callable[..., gt.Store]) -> None:
    one, other = make_store(0), make_store(100)
    foreign = other.keys()
    mixed = one.keys()[:3] + foreign[2:]
    before = priorities(one), priorities(other), one.stats(), other.stats()
    calls: list[Callable[[gt.Keys], object]] = [
        lambda keys: one.update_priorities(keys, np.full(len(keys), 9.0)),
        one.delete,
        one.status,
        lambda keys: gt.fetch(one, keys),
        lambda keys: gt.fetch(one, keys, on_stale="drop"),
        lambda keys: gt.fetch(one, keys, window=2, ends=np.zeros(len(keys), int)),
        lambda keys: gt.fetch([one], keys),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="8 of 8 keys belong to another store: "):
            call(foreign)
        with pytest.raises(ArgumentError, match="6 of 9 keys belong to another store: "):
            call(mixed)
        for no_keys in (foreign.row, [(0, 1)], "keys"):
            with pytest.raises(ArgumentError, match=r"keys must be geartrain\.Keys"):
                call(no_keys)  # type: ignore[arg-type]
    assert before == (priorities(one), priorities(other), one.stats(), other.stats())
    assert one.delete(mixed[mixed.is_of(one.id)]) == 0 and len(one) == 5 and len(other) == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_of_a_mixture_are_fetched_and_changed_in_their_own_stores(
    make_store: Callable[..., gt.Store], prefetch: int
) -> None:
    stores = [make_store(0), make_store(100)]
    mixture = Mixture([1, 1], [Prioritized(), Uniform()])
    with replay_of(stores, mixture, 6, window=3, seed=1, prefetch=prefetch, output="numpy") as replay:
        batch = replay.sample()
        labels = batch["label"]
        with pytest.raises(ArgumentError, match="3 of 6 keys belong to another store"):
            gt.fetch(stores[0], batch.keys)
        # Hindsight: a later step of the same trajectories, in any order, over both stores.
        turned = np.random.default_rng(0).permutation(6)
        last = batch.length[turned] - 1
        again = gt.fetch(stores, batch.keys[turned], window=1, ends=last, output="numpy")
        assert again["label"].tolist() == labels[turned].tolist()
        assert again["t"][:, 0].tolist() == (labels[turned] * 10 + last).tolist()
        whole = gt.fetch(stores[::-1], batch.keys, output="numpy")
        assert whole["label"].tolist() == labels.tolist()
        assert whole.mask.sum(1).tolist() == whole.length.tolist() == batch.length.tolist()
        out = {"t": np.zeros((6, STEPS), np.int64), "label": np.zeros(6, np.int64)}
        gt.fetch(replay.stores, batch.keys, out=out)
        assert np.array_equal(out["t"], whole["t"]) and np.array_equal(out["label"], labels)

        assert replay.update_priorities(batch.keys, labels + 2.0) == 0
        for store in stores:
            assert {label: value for label, value in priorities(store).items() if value != 1.0} == {
                label: label + 2.0 for label in labels.tolist() if label in priorities(store)
            }
        # Keys that never were in a batch know their stores as well: only theirs changes.
        assert replay.update_priorities(stores[1].keys()[:1], 3.5) == 0
        assert list(priorities(stores[0]).values()).count(3.5) == 0
        assert list(priorities(stores[1]).values()).count(3.5) == 1
        by_hand = gt.Keys(batch.keys.row, batch.keys.generation)
        with pytest.raises(ArgumentError, match="there are 2 stores"):
            replay.update_priorities(by_hand, 1.0)
        with pytest.raises(ArgumentError, match="there are 2 stores"):
            gt.fetch(stores, by_hand)
    # In a replay over the same stores in another order the keys' numbers are others; their stores are not.
    with replay_of(stores[::-1], mixture, 6, window=3, seed=1, output="numpy") as reversed_replay:
        assert reversed_replay.update_priorities(batch.keys, 7.0) == 0
        for store in stores:
            assert {label for label, value in priorities(store).items() if value == 7.0} == {
                label for label in labels.tolist() if label in priorities(store)
            }
    third = make_store(200)
    with gt.Replay([stores[0], third], mixture, 6, output="numpy") as replay:
        before = priorities(stores[0]), priorities(third)
        with pytest.raises(ArgumentError, match="3 of 6 keys belong to none of the 2 stores of this replay"):
            replay.update_priorities(batch.keys, 11.0)
        assert before == (priorities(stores[0]), priorities(third))


def test_a_bad_priority_changes_no_store_of_a_mixture(make_store: Callable[..., gt.Store]) -> None:
    stores = [make_store(0), make_store(100)]
    with gt.Replay(stores, Mixture([1, 1], [Uniform(), Uniform()]), 6) as replay:
        batch = replay.sample()
        with pytest.raises(ArgumentError, match="priority 5 is not finite"):
            replay.update_priorities(batch.keys, [2, 2, 2, 2, 2, np.nan])
        assert set(priorities(stores[0]).values()) | set(priorities(stores[1]).values()) == {1.0}


def test_a_store_that_is_in_a_mixture_twice_is_told_apart_by_the_shard(make_store: Callable[..., gt.Store]) -> None:
    store = make_store(0)
    mixture = Mixture([1, 1], [Prioritized(alpha=1.0), Prioritized(alpha=2.0)])
    with gt.Replay([store, store], mixture, 4, output="numpy", prefetch=0) as replay:
        batch = replay.sample()
        keys = store.keys()
        assert batch.keys.shard is not None and batch.keys.shard.tolist() == [0, 0, 1, 1]
        first, second = keys[:2].of_shard(0), keys[2:4].of_shard(1)
        replay.update_priorities(first + second, [3.0, 3.0, 3.0, 3.0])
        assert store.status(first + second)["priority"].tolist() == [3, 3, 9, 9]


def test_stores_whose_rows_cannot_stand_in_one_batch_are_refused(
    make_store: Callable[..., gt.Store], store_name: Callable[[], str]
) -> None:
    one = make_store(0)
    with gt.Store.create(store_name(), FIELDS, max_length=STEPS + 1, capacity=4) as longer:
        longer.insert({"t": np.zeros((4, STEPS + 1), np.int64), "label": np.arange(4)})
        keys = one.keys()[:2] + longer.keys()[:2]
        with pytest.raises(ArgumentError, match="must be the same in all stores"):
            gt.fetch([one, longer], keys)
        for call in (
            lambda: gt.fetch([one, longer], keys, fields=["label"]),
            lambda: gt.Replay([one, longer], Mixture([1, 1], [Uniform(), Uniform()]), 4, fields=["label"]),
        ):
            with pytest.raises(ArgumentError, match="whole rows of one batch have one max_length"):
                call()
        ends = [0, 0, STEPS, STEPS]
        assert gt.fetch([one, longer], keys, window=1, ends=ends, output="numpy").start.tolist() == ends
        with pytest.raises(ArgumentError, match=f"window 1 ends at step {STEPS}, rows have steps 0 to {STEPS - 1}"):
            gt.fetch([one, longer], keys, window=1, ends=[0, STEPS, 0, 0])
        for stores in ([], None, [one, "x"], one.keys()):
            with pytest.raises(ArgumentError, match="fetched from a Store"):
                gt.fetch(stores, keys)  # type: ignore[arg-type]
        longer.delete(longer.keys()[:1])
        with pytest.raises(StaleKeyError, match="1 of 4 keys are stale"):
            gt.fetch([one, longer], keys, window=2)
        kept = gt.fetch([one, longer], keys, window=2, on_stale="drop", output="numpy")
        assert kept["label"].tolist() == [0, 1, 1] and kept.keys.is_of(longer.id).tolist() == [False, False, True]


def test_a_store_made_anew_under_the_old_name_refuses_the_keys_of_the_old_one(store_name: Callable[[], str]) -> None:
    name = store_name()
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=8) as old:
        fill(old, 0, 8)
        keys = pickle.loads(pickle.dumps(old.keys()))
        again = pickle.loads(pickle.dumps(old))
        assert again.id == old.id and len(gt.fetch(again, keys)) == 8
        again.close()
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=8) as new:
        fill(new, 100, 8)
        assert new.keys() == keys and new.id != old.id  # the same rows and generations, and other trajectories
        for call in (lambda: new.delete(keys), lambda: gt.fetch(new, keys), lambda: new.update_priorities(keys, 3.0)):
            with pytest.raises(ArgumentError, match="another store"):
                call()
        assert len(new) == 8


def test_adopted_rows_keep_their_keys_and_loaded_ones_get_them_by_of_store(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    name = store_name()
    old = gt.Store.create(name, FIELDS, max_length=STEPS, capacity=8)
    fill(old, 0, 8)
    keys = old.keys()
    old.save(tmp_path / "saved")
    old.close(keep=True)
    with gt.Store.open(name, adopt=True) as adopted:
        assert gt.fetch(adopted, keys, output="numpy")["label"].tolist() == list(range(8))
    with gt.Store.load(tmp_path / "saved", name) as loaded:
        with pytest.raises(ArgumentError, match="another store"):
            loaded.delete(keys)
        its = keys.of_store(loaded.id)
        assert gt.fetch(loaded, its, output="numpy")["label"].tolist() == list(range(8))
        assert loaded.update_priorities(its, 2.0) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_keys_of_a_global_batch_name_their_stores_on_every_rank(
    make_store: Callable[..., gt.Store], ranks: int
) -> None:
    stores = [make_store(100 * number) for number in range(2)]  # with three ranks, two share the second
    ids = {store.id: store for store in stores}

    def body(rank: ThreadRankGroup) -> None:
        mine = stores[min(rank.rank, 1)]
        with gt.Replay(mine, Prioritized(seed=3), 12, window=2, output="numpy", group=rank, prefetch=0) as replay:
            batch = replay.sample()
            labels = batch["label"]
            named = np.broadcast_to(np.asarray(batch.keys.store, np.uint64), len(batch.keys))
            for label, store in zip(labels.tolist(), named.tolist(), strict=True):
                assert label in priorities(ids[store])
            here = batch.keys.is_of(mine.id)
            if not here.all():
                with pytest.raises(ArgumentError, match="keys belong to another store"):
                    gt.fetch(mine, batch.keys)
            again = gt.fetch(mine, batch.keys[here], window=1, output="numpy")
            assert again["label"].tolist() == labels[here].tolist()
            rank.all_gather_object(None)
            # Keys of the shard itself, that no batch has told of, go to its leader too.
            everything = mine.keys()
            if rank.rank < 2:
                replay.update_priorities(everything, mine.column("label")[everything.row] + 1.0)
            absent = gt.Keys([7], [99], store=mine.id)
            beyond = gt.Keys([4_000_000], [1], store=mine.id)
            stale = sum(store.stats()["stale_keys"] for store in stores)
            rank.all_gather_object(None)
            replay.update_priorities(absent + beyond, 50.0)
            replay.settle()
            rank.all_gather_object(None)
            assert sum(store.stats()["stale_keys"] for store in stores) == stale + 2 * ranks
            assert priorities(mine) == {label: label + 1.0 for label in priorities(mine)}
            with pytest.raises(ArgumentError, match="1 of 1 keys belong to none of the"):
                replay.update_priorities(gt.Keys([0], [1], store=12345), 1.0)
            replay.sample()

    run_ranks(ranks, body)


def test_ranks_that_have_the_same_stores_in_another_order_are_told_so(make_store: Callable[..., gt.Store]) -> None:
    # Or rows, cursors and priorities of one store would be taken for those of the other.
    stores = [make_store(0), make_store(100)]
    mixture = Mixture([1, 1], [Uniform(seed=0), Uniform(seed=1)])

    def body(rank: ThreadRankGroup) -> None:
        mine = stores if rank.rank == 0 else stores[::-1]
        with pytest.raises(RanksDisagreeError, match=r"is store \[1\] of the replay on rank 0 and \[0\] on rank 1"):
            gt.Replay(mine, mixture, 4, group=rank)

    run_ranks(2, body)

    def twice(rank: ThreadRankGroup) -> None:
        with gt.Replay([stores[0], stores[0]], mixture, 4, group=rank, output="numpy") as replay:
            assert replay.sample().batch_size == 2

    run_ranks(2, twice)


def test_keys_of_rows_that_were_moved_are_stale_and_reach_no_other_row(make_store: Callable[..., gt.Store]) -> None:
    stores = [make_store(0, capacity=16, n=8), make_store(100, capacity=16, n=2)]
    before = [store.keys() for store in stores]

    def body(rank: ThreadRankGroup) -> None:
        mine = stores[rank.rank]
        with gt.Placement(mine, group=rank) as placement:
            moved = placement.rebalance(tolerance=0.0)
            assert moved is not None and len(stores[0]) == len(stores[1]) == 5
        with gt.Replay(mine, Uniform(seed=0), 4, group=rank, output="numpy", prefetch=0) as replay:
            if rank.rank == 1:
                replay.update_priorities(before[0], 9.0)
            replay.settle()

    run_ranks(2, body)
    stayed = {label for store in stores for label, value in priorities(store).items() if value == 9.0}
    assert len(stayed) == 5 and stayed <= set(priorities(stores[0])), (
        "of the rows that are where they were, and no other"
    )
    assert stores[0].stats()["stale_keys"] == 3
