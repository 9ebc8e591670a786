"""One replay over many ranks: the same global batch however many there are, and only the surplus moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    FieldError,
    NotEnoughRowsError,
    PeerLostError,
    RanksDisagreeError,
    SplitGroupError,
)
from geartrain.replay.distributed.topology import MeshPosition
from geartrain.selection import Fifo, GroupSampling, Lifo, Limits, Linear, Mixture, Prioritized, TopK, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

N, STEPS, B = 240, 10, 48
RANKS = [1, 2, 3, 4, 8]
FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "action": gt.Field((), "int64"),
    "number": gt.Field((), "int64", per_row=True),
    "group": gt.Field((), "int64", per_row=True),
}
WEIGHTS = np.random.default_rng(0).integers(0, 30, N) / 4.0


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
        store.insert(rows(first, last), lengths=numbers % STEPS + 1, priorities=WEIGHTS[first:last], versions=numbers)


@pytest.fixture
def make_stores(store_name: Callable[[], str]) -> Iterator[Callable[..., list[gt.Store]]]:
    """The population, cut into shards of different sizes, the second of several empty."""
    made: list[gt.Store] = []

    def make(shards: int, **options: Any) -> list[gt.Store]:
        inner = np.sort(np.random.default_rng(shards).integers(0, N // 4, shards - 1)) * 4
        if shards > 2:
            inner[1] = inner[0]
        stores = []
        for first, last in zip([0, *inner.tolist()], [*inner.tolist(), N], strict=True):
            store = gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=N, **options)
            insert(store, first, last)
            stores.append(store)
        made.extend(stores)
        return stores

    yield make
    for store in made:
        store.close()


def check(batch: gt.Batch) -> None:
    """Every value is where its row, its window and its mask say."""
    number = batch["number"]
    steps = batch.start[:, None] + np.cumsum(batch.mask, 1) - 1
    expected = np.where(batch.mask, number[:, None] * 100 + steps, 0)
    assert np.array_equal(batch["action"], expected)
    assert np.array_equal(batch["obs"], np.repeat(expected[:, :, None], 3, 2).astype(np.float32))
    assert np.array_equal(batch.length, number % STEPS + 1)
    assert np.array_equal(batch.version, number)


BOOKS = ("obs", "action", "number", "mask", "start", "length", "version", "probability", "importance_weights")


def as_record(batch: gt.Batch) -> dict[str, np.ndarray]:
    record = {name: batch[name] if name in batch else getattr(batch, name) for name in BOOKS}
    return {name: np.array(array) for name, array in record.items() if array is not None}


def join(parts: list[gt.Batch]) -> dict[str, np.ndarray]:
    """The global batch, in the order of draws."""
    draw = np.concatenate([part.draw for part in parts])
    assert np.array_equal(np.sort(draw), np.arange(len(draw)))
    order = np.argsort(draw)
    records = [as_record(part) for part in parts]
    return {name: np.concatenate([record[name] for record in records])[order] for name in records[0]}


def over_ranks(
    stores: list[gt.Store], selection: Any, batches: int = 3, ranks: int | None = None, **options: Any
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, float]]]:
    """Global batches and every rank's figures; rank r has store r % len(stores)."""
    size = ranks or len(stores)
    settings = {"window": 4, "output": "numpy", "num_batches": batches, **options}

    def body(rank: ThreadRankGroup) -> tuple[list[gt.Batch], dict[str, float]]:
        store = stores[rank.rank % len(stores)]
        with gt.Replay(store, selection, B, group=rank, **settings) as replay:
            made = []
            for batch in replay:
                check(batch)
                made.append(batch)
            return made, replay.stats()

    results = run_ranks(size, body)
    return [join([result[0][step] for result in results]) for step in range(batches)], [r[1] for r in results]


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


STRATEGIES = {
    "uniform": Uniform(seed=3),
    "stratified": Uniform(seed=4, stratified=True),
    "distinct": Uniform(seed=5, replacement=False),
    "prioritized": Prioritized(seed=6, beta=Linear(0.4, 1.0, 10)),
    "prioritized distinct": Prioritized(seed=8, replacement=False),
    "top-k": TopK(),
    "lifo": Lifo(),
    "fifo": Fifo(),
}


@pytest.mark.parametrize("selection", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_any_number_of_ranks_makes_the_batches_of_one_process(
    make_stores: Callable[..., list[gt.Store]], selection: Any
) -> None:
    (store,) = make_stores(1)
    with gt.Replay(store, selection, B, window=4, output="numpy", num_batches=3) as replay:
        expected = [as_record(batch) for batch in replay]
    for ranks in RANKS:
        batches, _ = over_ranks(make_stores(ranks), selection)
        assert same(batches, expected), ranks


def test_groups_stay_together_on_any_number_of_ranks(make_stores: Callable[..., list[gt.Store]]) -> None:
    (store,) = make_stores(1)
    selection = GroupSampling(by="group", size=4, seed=2, prioritized=True)
    with gt.Replay(store, selection, B, window=4, output="numpy", num_batches=3) as replay:
        expected = [as_record(batch) for batch in replay]
    for ranks in [1, 2, 3, 4]:
        batches, _ = over_ranks(make_stores(ranks), selection)
        assert same(batches, expected)
    with pytest.raises(ArgumentError, match="6 rows a replica do not hold whole groups of 4"):
        over_ranks(make_stores(8), selection)


def test_limits_make_the_same_batches_on_any_number_of_ranks(make_stores: Callable[..., list[gt.Store]]) -> None:
    made = [over_ranks(make_stores(n), Prioritized(seed=1, limits=Limits(min_version=150)))[0] for n in RANKS]
    assert all(same(batches, made[0]) for batches in made)
    assert all((batch["version"] >= 150).all() for batch in made[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("selection", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_ordered_gives_rank_i_the_ith_slice(
    make_stores: Callable[..., list[gt.Store]], selection: Any, ranks: int
) -> None:
    def body(rank: ThreadRankGroup) -> None:
        options = {"assignment": "ordered", "window": 4, "output": "numpy", "num_batches": 2, "group": rank}
        with gt.Replay(stores[rank.rank], selection, B, **options) as replay:
            for batch in replay:
                check(batch)
                assert batch.draw.tolist() == list(range(rank.rank * B // ranks, (rank.rank + 1) * B // ranks))

    stores = make_stores(ranks)
    run_ranks(ranks, body)


def test_ranks_of_one_host_read_its_shard_without_moving_a_byte(make_stores: Callable[..., list[gt.Store]]) -> None:
    expected, _ = over_ranks(make_stores(1), Prioritized(seed=1))
    for shards, ranks in ((1, 3), (2, 4), (3, 6)):
        batches, stats = over_ranks(make_stores(shards), Prioritized(seed=1), ranks=ranks)
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


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_updated_priorities_change_the_next_batches_alike_on_any_number_of_ranks(
    make_stores: Callable[..., list[gt.Store]], prefetch: int
) -> None:
    selection = Prioritized(seed=2, alpha=0.6, beta=0.4)

    def run(shards: int, ranks: int) -> list[dict[str, np.ndarray]]:
        stores = make_stores(shards)

        def body(rank: ThreadRankGroup) -> list[gt.Batch]:
            options = {"window": 4, "output": "numpy", "num_batches": 8, "prefetch": prefetch, "group": rank}
            with gt.Replay(stores[rank.rank % shards], selection, B, **options) as replay:
                made = []
                for batch in replay:
                    replay.update_priorities(batch.keys, batch["number"] % 13 + batch.step)
                    made.append(batch)
                return made

        results = run_ranks(ranks, body)
        return [join([result[step] for result in results]) for step in range(8)]

    expected = run(1, 1)
    priorities = np.unique(np.round(expected[-1]["probability"], 12))
    assert len(priorities) > 5
    for shards, ranks in ((2, 2), (3, 3), (1, 2), (2, 4), (4, 8)):
        assert same(run(shards, ranks), expected), (shards, ranks)
    if prefetch == 0:  # and as a single process draws that sets priorities at once
        (store,) = make_stores(1)
        with gt.Replay(store, selection, B, window=4, output="numpy", num_batches=8, prefetch=0) as replay:
            alone = []
            for batch in replay:
                replay.update_priorities(batch.keys, batch["number"] % 13 + batch.step)
                alone.append(as_record(batch))
        assert same(alone, expected)


def test_an_exponent_that_follows_a_schedule_is_applied_once_a_shard(
    make_stores: Callable[..., list[gt.Store]],
) -> None:
    selection = Prioritized(seed=2, alpha=Linear(0.5, 1.0, 6))
    runs = []
    for shards, ranks in ((1, 1), (2, 4), (3, 3)):
        stores = make_stores(shards)
        runs.append(over_ranks(stores, selection, batches=8, ranks=ranks)[0])
    assert all(same(run, runs[0]) for run in runs)


def test_a_resumed_run_goes_on_with_the_batches_it_would_have_drawn(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(3)
    states: dict[int, Any] = {}

    def body(rank: ThreadRankGroup) -> None:
        options = {"window": 4, "output": "numpy", "group": rank}
        with gt.Replay(stores[rank.rank], Fifo(), 24, **options) as replay:
            for _ in range(3):
                replay.sample()
            states[rank.rank] = state = replay.state_dict()
            expected = [as_record(replay.sample()) for _ in range(3)]
            replay.load_state_dict(state)
            assert same([as_record(replay.sample()) for _ in range(3)], expected)

    run_ranks(3, body)
    assert states[0] == states[1] == states[2]


def test_a_settled_run_is_the_run_that_is_resumed_from_it(make_stores: Callable[..., list[gt.Store]]) -> None:
    selection = Prioritized(seed=5, alpha=Linear(0.5, 1.0, 12), beta=0.4)
    for prefetch in (0, 2):
        stores = make_stores(2)
        saved: dict[int, Any] = {}

        def run(
            rank: ThreadRankGroup, resume: bool, stores: Any = stores, prefetch: int = prefetch, saved: Any = saved
        ) -> Any:
            options = {"window": 4, "output": "numpy", "group": rank, "prefetch": prefetch}
            store = stores[rank.rank]
            with gt.Replay(store, selection, B, **options) as replay:
                if resume:
                    state, keys, priorities = saved[rank.rank]
                    store.update_priorities(keys, priorities)
                    replay.load_state_dict(state)
                made = []
                for step in range(replay.step, 9):
                    batch = replay.sample()
                    # Windows of a row that was drawn twice are different: the later draw's priority holds.
                    replay.update_priorities(batch.keys, batch["action"][:, -1] % 13 + batch.start)
                    made.append(as_record(batch))
                    if step == 4 and not resume:
                        replay.settle()
                        keys = store.keys()
                        saved[rank.rank] = (replay.state_dict(), keys, store.status(keys)["priority"])
                return made

        first = run_ranks(2, lambda rank: run(rank, False))
        again = run_ranks(2, lambda rank: run(rank, True))
        for one, other in zip(first, again, strict=True):
            assert same(one[5:], other)


def test_priorities_of_a_row_drawn_twice_are_set_in_the_order_of_draws(
    make_stores: Callable[..., list[gt.Store]],
) -> None:
    def run(shards: int, ranks: int) -> list[dict[str, np.ndarray]]:
        stores = make_stores(shards)

        def body(rank: ThreadRankGroup) -> list[gt.Batch]:
            options = {"window": 4, "output": "numpy", "num_batches": 6, "group": rank}
            with gt.Replay(stores[rank.rank % shards], Prioritized(seed=3), B, **options) as replay:
                made = []
                for batch in replay:
                    replay.update_priorities(batch.keys, 1.0 + batch.draw % 5)
                    made.append(batch)
                return made

        results = run_ranks(ranks, body)
        return [join([result[step] for result in results]) for step in range(6)]

    expected = run(1, 1)
    for shards, ranks in ((2, 2), (3, 3), (4, 8)):
        assert same(run(shards, ranks), expected)


def test_rows_with_a_limit_on_samples_are_all_used_and_never_more_often(store_name: Callable[[], str]) -> None:
    for shards, ranks in ((1, 1), (1, 2), (2, 2), (4, 4)):
        stores = []
        for shard in range(shards):
            stores.append(gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=N, max_times_sampled=1))
            insert(stores[-1], N * shard // shards, N * (shard + 1) // shards)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> tuple[list[int], list[gt.Batch]]:
            seen: list[int] = []
            options = {"window": 4, "output": "numpy", "group": rank, "prefetch": 0}
            with gt.Replay(stores[rank.rank % len(stores)], Uniform(seed=1), 40, **options) as replay:
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


def test_limits_hold_their_promise_with_updates_and_shared_shards(make_stores: Callable[..., list[gt.Store]]) -> None:
    for selection in (
        Prioritized(seed=1, limits=Limits(min_version=lambda: 100)),
        Prioritized(seed=2, replacement=False),
    ):
        runs = []
        for shards, ranks in ((1, 1), (1, 3), (2, 4)):
            stores = make_stores(shards)

            def body(rank: ThreadRankGroup, stores: Any = stores, selection: Any = selection) -> list[gt.Batch]:
                options = {"window": 4, "output": "numpy", "num_batches": 5, "group": rank}
                with gt.Replay(stores[rank.rank % len(stores)], selection, B, **options) as replay:
                    made = []
                    for batch in replay:
                        replay.update_priorities(batch.keys, batch["number"] % 11 + 1)
                        made.append(batch)
                    return made

            results = run_ranks(ranks, body)
            runs.append([join([result[step] for result in results]) for step in range(5)])
        assert all(same(run, runs[0]) for run in runs)


def test_a_mixture_with_groups_fills_replicas_with_whole_groups(make_stores: Callable[..., list[gt.Store]]) -> None:
    selection = Mixture([0.5, 0.5], [Uniform(seed=1), GroupSampling(by="group", size=4, seed=2)], seed=3)
    for ranks in (1, 2, 3):
        stores = [list(pair) for pair in zip(make_stores(ranks), make_stores(ranks), strict=True)]

        def body(rank: ThreadRankGroup, stores: Any = stores) -> None:
            with gt.Replay(
                stores[rank.rank], selection, 24, window=4, output="numpy", num_batches=4, group=rank
            ) as replay:
                for batch in replay:
                    check(batch)
                    grouped = batch["group"][batch.draw >= 12]
                    assert (np.unique(grouped, return_counts=True)[1] == 4).all()

        run_ranks(ranks, body)
    stores = [list(pair) for pair in zip(make_stores(2), make_stores(2), strict=True)]

    def refused(rank: ThreadRankGroup) -> None:
        with pytest.raises(ArgumentError, match="would cut groups"):
            gt.Replay(stores[rank.rank], selection, 24, group=rank, assignment="ordered")

    run_ranks(2, refused)


def test_one_process_and_a_group_take_up_each_others_state(make_stores: Callable[..., list[gt.Store]]) -> None:
    (store,) = make_stores(1)
    with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0) as replay:
        replay.sample()
        state, expected = replay.state_dict(), replay.sample().keys.row
    (rank,) = ThreadRankGroup.make(1)
    with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0, group=rank) as replay:
        replay.load_state_dict(state)
        assert np.array_equal(replay.sample().keys.row, expected)
        state, expected = replay.state_dict(), replay.sample().keys.row
    with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0) as replay:
        replay.load_state_dict(state)
        assert np.array_equal(replay.sample().keys.row, expected)


def test_priorities_given_before_an_error_all_agree_on_are_not_lost(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Fifo(), 120, output="numpy", group=rank) as replay:
            batches = [replay.sample(), replay.sample()]
            replay.update_priorities(batches[1].keys, 900.0)
            with pytest.raises(NotEnoughRowsError):
                replay.sample()
            replay.settle()

    run_ranks(2, body)
    priorities = np.concatenate([store.status()["priority"] for store in stores])
    assert (priorities == 900.0).sum() == 120


# --- pipelines and tensor parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "pp", "tp"), [(1, 2, 1), (2, 2, 1), (2, 3, 1), (2, 1, 2), (2, 2, 2), (1, 4, 2)])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_heads_get_inputs_tails_targets_and_the_middle_nothing(
    make_stores: Callable[..., list[gt.Store]], dp: int, pp: int, tp: int, shards: int
) -> None:
    shards = min(shards, dp * pp * tp)
    stores = make_stores(shards)
    expected, _ = over_ranks(make_stores(1), Prioritized(seed=4, beta=0.5), batches=3)

    def body(rank: ThreadRankGroup) -> tuple[MeshPosition, list[gt.Batch], dict[str, float]]:
        at = rank.rank
        place = MeshPosition(at // tp % dp, at // tp // dp, at % tp, dp, pp, tp)
        with gt.Replay(
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


def test_a_mixture_over_ranks_makes_the_batches_of_one_process(make_stores: Callable[..., list[gt.Store]]) -> None:
    def selection() -> Mixture:
        return Mixture([0.7, 0.3], [Uniform(seed=1), Prioritized(seed=2, beta=0.5)], seed=3)

    def pairs(shards: int) -> list[list[gt.Store]]:
        return [list(pair) for pair in zip(make_stores(shards), make_stores(shards), strict=True)]

    with gt.Replay(pairs(1)[0], selection(), B, window=4, output="numpy", num_batches=3) as replay:
        expected = [as_record(batch) for batch in replay]
    for ranks in (1, 2, 3):
        stores = pairs(ranks)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> list[gt.Batch]:
            options = {"window": 4, "output": "numpy", "num_batches": 3, "group": rank}
            with gt.Replay(stores[rank.rank], selection(), B, **options) as replay:
                made = []
                for batch in replay:
                    check(batch)
                    replay.update_priorities(batch.keys, 1.0)  # to either store
                    made.append(batch)
                return made

        results = run_ranks(ranks, body)
        assert same([join([r[step] for r in results]) for step in range(1)], expected[:1])


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
    try:

        def body(rank: ThreadRankGroup) -> float:
            options = {"window": 4, "output": "numpy", "group": rank, "min_rows": 1}
            with gt.Replay(stores[rank.rank % shards], selection, 16, **options) as replay:
                for _ in range(60):
                    check(replay.sample())
                return replay.stats()["redrawn"]

        run_ranks(4, body)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
        for store in stores:
            store.close()


def test_rows_that_join_a_shard_are_drawn_from_the_next_batch_on(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(3)

    def body(rank: ThreadRankGroup) -> set[int]:
        options = {"window": 4, "output": "numpy", "group": rank, "prefetch": 0}
        with gt.Replay(stores[rank.rank], Lifo(), 12, **options) as replay:
            replay.sample()
            if rank.rank == 1:
                stores[1].native.advance_sequence(1000)
                numbers = np.arange(500, 512)
                stores[1].insert(rows(500, 512), lengths=numbers % STEPS + 1, versions=numbers)
            rank.all_gather(np.zeros(1, np.uint8))
            return set(replay.sample()["number"].tolist())

    assert set.union(*run_ranks(3, body)) == set(range(500, 512))


# --- what goes wrong --------------------------------------------------------------------------------------------


def test_a_rank_that_vanishes_is_a_named_error_on_all_others(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(4)
    group = ThreadRankGroup.make(4, timeout_s=patience(5))
    group[2].die_at = 40
    seen = []

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Uniform(), B, group=rank) as replay, pytest.raises(PeerLostError) as caught:
            while True:
                replay.sample()
        seen.append(str(caught.value))

    run_ranks(group, body)
    assert len(seen) == 4 and all("rank 2 aborted: die_at was reached" in message for message in seen)


def test_an_error_of_one_rank_ends_the_others_with_its_reason(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(2)

    class Broken(Uniform):
        def select_shards(self, shard: Any, n: int, step: int, *, state: Any) -> Any:
            if shard.number == 1 and step == 2:
                raise ZeroDivisionError("a bug of the user's")
            from geartrain.selection.sharded import select_shards

            return select_shards(Uniform(seed=self.seed), shard, n, step, state)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Broken(), B, group=rank, prefetch=0) as replay:
            replay.sample()
            replay.sample()
            expected = ZeroDivisionError if rank.rank == 1 else PeerLostError
            with pytest.raises(expected, match="a bug of the user's"):
                replay.sample()

    run_ranks(2, body)


def test_too_few_rows_are_the_same_error_on_all_ranks_and_not_the_end(
    make_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = make_stores(2)
    both = threading.Barrier(2, timeout=patience(20))

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Fifo(), 160, group=rank) as replay:
            replay.sample()
            with pytest.raises(NotEnoughRowsError, match="160 rows were asked for, 80 can be chosen"):
                replay.sample()
            both.wait()
            if rank.rank == 0:
                numbers = np.arange(600, 600 + 80)
                for at in range(0, 80, 8):
                    stores[0].insert(rows(600 + at, 608 + at), lengths=numbers[at : at + 8] % STEPS + 1)
            both.wait()
            assert replay.sample().batch_size == 80

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selection": Prioritized(seed=1)}, r"seed is 0 on rank 0 and 1 on rank 1"),
        ({"selection": Uniform()}, r"strategy is Prioritized\(.*\) on rank 0 and Uniform\(.*\) on rank 1"),
        ({"selection": Prioritized(beta=0.5)}, r"strategy is .*beta=None.* on rank 0 and .*beta=0.5.* on rank 1"),
        ({"batch_size": 32}, r"batch_size is 48 on rank 0 and 32 on rank 1"),
        ({"window": 5}, r"window is 4 on rank 0 and 5 on rank 1"),
        ({"assignment": "ordered"}, r"assignment is local_first on rank 0 and ordered on rank 1"),
        ({"prefetch": 0}, r"prefetch is 2 on rank 0 and 0 on rank 1"),
        ({"num_batches": 3}, r"num_batches is None on rank 0 and 3 on rank 1"),
        ({"min_rows": 7}, r"min_rows is 1 on rank 0 and 7 on rank 1"),
    ],
)
def test_ranks_that_disagree_are_told_so(
    make_stores: Callable[..., list[gt.Store]], changed: dict[str, Any], message: str
) -> None:
    stores = make_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        settings: dict[str, Any] = {"selection": Prioritized(), "batch_size": 48, "window": 4, "group": rank}
        with pytest.raises(RanksDisagreeError, match=message):
            gt.Replay(stores[rank.rank], **(settings | (changed if rank.rank else {})))

    run_ranks(2, body)


def test_a_shard_of_another_schema_is_named_with_its_field_and_ranks(store_name: Callable[[], str]) -> None:
    stores = [
        gt.Store.create(
            store_name(),
            {"obs": gt.Field((2,), "float32"), "x": gt.Field((), kind, per_row=True)},
            max_length=4,
            capacity=4,
        )
        for kind in ("int64", "float32")
    ]

    def body(rank: ThreadRankGroup) -> None:
        with pytest.raises(RanksDisagreeError, match=r"field 'x' is int64 .* on rank 0 and float32 .* on rank 1"):
            gt.Replay(stores[rank.rank], Uniform(), 4, fields=["obs"], group=rank)

    run_ranks(2, body)
    for store in stores:
        store.close()


def test_a_field_that_one_shard_lacks_is_named_everywhere(
    make_stores: Callable[..., list[gt.Store]], store_name: Any
) -> None:
    (store,) = make_stores(1)
    with gt.Store.create(store_name(), {"obs": FIELDS["obs"]}, max_length=STEPS, capacity=4) as other:

        def body(rank: ThreadRankGroup) -> None:
            with pytest.raises((FieldError, RanksDisagreeError), match="has no field 'action'"):
                gt.Replay([store, other][rank.rank], Uniform(), 4, fields=["obs", "action"], group=rank)

        run_ranks(2, body)


def test_keys_of_nowhere_and_priorities_that_are_none_are_refused(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Prioritized(), B, output="numpy", group=rank, prefetch=0) as replay:
            batch = replay.sample()
            by_hand = gt.Keys(batch.keys.row, batch.keys.generation)
            with pytest.raises(ArgumentError, match="name none of the 2 shards of this replay"):
                replay.update_priorities(by_hand.of_shard(9), 1.0)
            with pytest.raises(ArgumentError, match="name none of the 2 shards of this replay"):
                replay.update_priorities(by_hand, 1.0)
            with pytest.raises(ArgumentError, match="24 of 24 keys are of none of the 2 shards of this replay"):
                replay.update_priorities(batch.keys.of_store(9), 1.0)
            with pytest.raises(ArgumentError, match="priority 0 is not finite"):
                replay.update_priorities(batch.keys, np.full(batch.batch_size, np.nan))
            replay.update_priorities(batch.keys, 1e300)  # saturates, as ever
            replay.sample()

    run_ranks(2, body)


def test_a_group_on_two_shards_stops_no_job(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(2)
    stray = {name: array[:1] for name, array in rows(0, 1).items()} | {"group": np.array([1000])}

    def body(rank: ThreadRankGroup) -> None:
        store = stores[rank.rank]
        keys = [store.insert(stray) for _ in range(2)]
        selection = GroupSampling("group", 4, seed=1)
        rank.all_gather_object(None)
        with gt.Replay(store, selection, B, output="numpy", group=rank, prefetch=0) as replay:
            with pytest.raises(
                SplitGroupError, match=r"group 1000 of 'group' has rows in 2 shards \(2 in shard 0, 2 in"
            ):
                replay.sample()
            if rank.rank == 0:
                store.delete(keys[0] + keys[1])
            rank.all_gather_object(None)
            assert 1000 not in replay.sample()["group"]

    run_ranks(2, body)


def test_ranks_at_different_steps_are_told_so(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Uniform(), B, group=rank, prefetch=0) as replay:
            state = replay.state_dict()
            replay.load_state_dict({**state, "step": 7 + rank.rank})
            with pytest.raises((RanksDisagreeError, PeerLostError), match=r"at step [78], rank [01] at step [87]"):
                replay.sample()

    run_ranks(2, body)


def test_what_cannot_be_shared_out_is_refused_at_the_door(make_stores: Callable[..., list[gt.Store]]) -> None:
    stores = make_stores(2)

    def refused(message: str, **settings: Any) -> None:
        def body(rank: ThreadRankGroup) -> None:
            with pytest.raises(ArgumentError, match=message):
                gt.Replay(stores[rank.rank], **({"selection": Uniform(), "batch_size": 48, "group": rank} | settings))

        run_ranks(2, body)

    refused("a global batch of 49 rows cannot be divided evenly over 2 data-parallel replicas", batch_size=49)
    refused("assignment is one of local_first, ordered, found 'random'", assignment="random")
    refused("give fields, or inputs and targets, not both", fields=["obs"], inputs=["action"])
    with pytest.raises(ArgumentError, match="a DeepSpeed grid, or an object with"):
        gt.Replay(stores[0], Uniform(), 4, mesh=object())
