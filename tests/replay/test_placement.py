"""Placement: rows where they are read, moved there on request, and never lost on the way."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
import geartrain.replay.distributed.balance as dealing
import geartrain.replay.distributed.placement_moves as placement_moves
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, FieldError, PeerLostError, RanksDisagreeError
from geartrain.replay.distributed.placement import Placement, PlacementReport, RebalanceResult
from geartrain.replay.distributed.topology import MeshPosition
from geartrain.selection import Fifo, Prioritized, Uniform
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


@pytest.fixture
def make_stores(store_name: Callable[[], str]) -> Iterator[Stores]:
    """Empty stores, one for each capacity."""
    made: list[gt.Store] = []

    def make(*capacities: int, fields: dict[str, gt.Field] = FIELDS, **options: Any) -> list[gt.Store]:
        stores = [
            gt.Store.create(store_name(), fields, max_length=STEPS, capacity=each, **options) for each in capacities
        ]
        made.extend(stores)
        return stores

    yield make
    for store in made:
        store.close()


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
    books = store.status(keys)
    found: dict[int, tuple[Any, ...]] = {}
    columns = {name: store.column(name) for name in store.fields}
    for i, row in enumerate(keys.row.tolist()):
        length = int(books["length"][i])
        blocks = tuple(
            columns[name][row, :length].tobytes() if not spec.per_row else columns[name][row].tobytes()
            for name, spec in store.fields.items()
        )
        about = tuple(books[name][i] for name in ("length", "priority", "version", "times_sampled"))
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


# --- dealing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", ["equal", "uniform", "pareto", "zipf"])
def test_each_reader_gets_its_share_of_the_priority_and_all_ranks_agree(make_stores: Stores, skew: str) -> None:
    n, rng = 20_000, np.random.default_rng(0)
    priorities = {
        "equal": np.ones(n),
        "uniform": rng.random(n),
        "pareto": rng.pareto(1.5, n),
        "zipf": 1 / (1 + rng.permutation(n)),
    }[skew]
    # Two replicas read from the first shard, one from each of the others.
    stores = make_stores(*[n] * 3)
    deals = with_placement([*stores, stores[0]], lambda made: made.deal(priorities))
    assert all(np.array_equal(deal, deals[0]) for deal in deals)
    shares = np.bincount(deals[0], priorities) / priorities.sum()
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.001)
    if skew != "zipf":  # and of each span of priorities, so that any power of them is shared out alike
        squares = np.bincount(deals[0], np.sqrt(priorities)) / np.sqrt(priorities).sum()
        assert squares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)


def test_every_row_of_a_dataset_is_one_ranks_to_insert(make_stores: Stores) -> None:
    stores = make_stores(500, 500)
    priorities = np.random.default_rng(1).random(700)
    mine = with_placement(stores, lambda made: (made.shard, made.mine(priorities)), ranks=5)
    assert np.array_equal(np.sort(np.concatenate([rows for _, rows in mine])), np.arange(700))
    for shard in range(2):
        parts = [rows for number, rows in mine if number == shard]
        assert (np.diff(np.concatenate(parts)) > 0).all()  # in the order of the dataset, contiguous parts of it
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_likely_rows_go_to_heads_and_what_does_not_fit_coldest_first_to_those_that_read_less(
    make_stores: Stores,
) -> None:
    # Stages of a pipeline of three, two replicas: heads, which read most, on shards 0 and 1, tails on 4 and 5.
    stores = make_stores(100, 60, 80, 80, 50, 50)
    priorities = np.random.default_rng(2).pareto(1.0, 300)
    deals = with_placement(
        stores,
        lambda made: (made.deal(priorities), made.shards),
        mesh=(2, 3),
        inputs=["obs"],
        targets=["done"],
    )
    shard, shards = deals[0]
    assert all(np.array_equal(other, shard) for other, _ in deals)
    assert [each.reader_share for each in shards] == [0.5, 0.5, 0, 0, 0, 0]
    assert [each.reads > 0 for each in shards] == [True, True, False, False, True, True]
    assert np.bincount(shard).tolist() == [100, 60, 20, 20, 50, 50]
    heads, tails, middle = (priorities[np.isin(shard, pair)] for pair in ([0, 1], [4, 5], [2, 3]))
    assert heads.min() >= tails.max() and tails.min() >= middle.max()
    hot = np.isin(shard, [0, 1]) & (priorities >= np.sort(priorities)[-100])  # before shard 1 was full
    assert abs(priorities[hot & (shard == 0)].sum() / priorities[hot].sum() - 0.5) < 0.02


def test_a_tail_that_reads_more_than_its_head_comes_first(make_stores: Stores) -> None:
    deals = with_placement(
        make_stores(50, 50), lambda made: made.deal(np.ones(40)), mesh=(1, 2), inputs=["done"], targets=["obs", "half"]
    )
    assert (deals[0] == 1).all()


def test_what_shards_hold_already_is_counted_in(make_stores: Stores) -> None:
    stores = make_stores(1000, 1000, 1000)
    insert(stores[0], np.arange(300), np.full(300, 2.0))
    insert(stores[1], np.arange(300, 400), np.full(100, 1.0))

    def body(made: Placement) -> Any:
        first = made.deal(np.ones(500))
        insert(made.store, 400 + np.flatnonzero(first == made.shard), np.ones((first == made.shard).sum()))
        made.refresh()
        return first, made.deal(np.ones(900)), made.shards

    first, second, shards = with_placement(stores, body)[0]
    assert np.bincount(first).tolist() == [0, 200, 300]  # 600, 300 and 300 then: the first has too much as it is
    assert [shard.amount for shard in shards] == [600, 300, 300]
    assert np.bincount(second).tolist() == [100, 400, 400]


def test_dealing_holds_its_promises_whatever_the_shards(make_stores: Stores) -> None:
    rng = np.random.default_rng(3)
    for _ in range(120):
        shards = int(rng.integers(1, 7))
        n = int(rng.integers(0, 400))
        replicas = rng.integers(0, 4, shards) * (rng.random(shards) < 0.7)
        replicas[rng.integers(shards)] += 1
        share = replicas / replicas.sum()
        reads = share + rng.integers(0, 2, shards) * 0.1
        amount = rng.random(shards) * rng.integers(0, 2) * n / shards
        free = rng.multinomial(n, rng.dirichlet(np.ones(shards))) + rng.integers(0, 30, shards)
        priorities = rng.choice([np.ones(n), rng.pareto(1, n), rng.integers(0, 3, n) * 1.0, np.zeros(n) + 1e-9])
        dealt = dealing.deal(priorities, amount, share, reads, free)
        counts = np.bincount(dealt, minlength=shards)
        assert (counts <= free).all() and counts.sum() == n
        assert np.array_equal(dealt, dealing.deal(priorities, amount, share, reads, free))
        near, far = priorities[share[dealt] > 0], priorities[share[dealt] == 0]
        assert not len(far) or ((counts == free)[share > 0].all() and (not len(near) or near.min() >= far.max()))
        ample = dealing.deal(priorities, np.zeros(shards), share, reads, free + n)
        off = np.bincount(ample, priorities, minlength=shards) - share * priorities.sum()
        assert np.abs(off).max(initial=0) <= priorities.max(initial=0) * 1.5 + 1e-9


def test_more_rows_than_all_shards_take_are_refused_with_the_numbers(make_stores: Stores) -> None:
    stores = make_stores(10, 20, 30)
    insert(stores[2], np.arange(4), np.ones(4))

    def body(made: Placement) -> None:
        with pytest.raises(
            ArgumentError, match=r"57 rows do not fit: 56 are free .*10 in shard 0, 20 in .*26 in shard 2"
        ):
            made.deal(np.ones(57))
        assert np.bincount(made.deal(np.ones(56))).tolist() == [10, 20, 26]

    with_placement(stores, body)


def test_headroom_is_no_room(make_stores: Stores) -> None:
    (store,) = make_stores(20, max_rows=12)
    insert(store, np.arange(5), np.ones(5))
    row = store.row()
    with Placement(store) as made:
        assert made.shards[0].free == 6
    row.abandon()


def test_priorities_that_are_none_are_refused(make_stores: Stores) -> None:
    (store,) = make_stores(10)
    with Placement(store) as made:
        for priorities, message in (
            (np.ones((2, 2)), r"\(n,\), found \(2, 2\)"),
            ([1.0, float("nan")], "finite and >= 0, found nan for row 1"),
            ([1.0, 2.0, -1.0], "found -1.0 for row 2"),
        ):
            with pytest.raises(ArgumentError, match=message):
                made.deal(priorities)
        assert made.deal([]).tolist() == [] and made.deal(np.zeros(10)).tolist() == [0] * 10
    with Placement(store, by="rows") as made:
        assert len(made.deal(np.full(3, 0.5))) == 3
        with pytest.raises(ArgumentError, match="by='rows', which all have the same priority"):
            made.deal([1.0, 2.0])


# --- reporting --------------------------------------------------------------------------------------------------


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
        with gt.Replay(
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


def test_the_expected_local_share_is_what_batches_come_to(make_stores: Stores) -> None:
    stores = make_stores(600, 600, 600)
    fill(stores, 600, [0.6, 0.3, 0.1])
    measured, _, report = replayed(stores, Prioritized(seed=1), 150, batch_size=48)
    assert report.method == "exact"
    assert report.expected_local_share == pytest.approx(measured, abs=0.01)
    measured, _, report = replayed(stores, Uniform(seed=1), 150, batch_size=48, by="rows")
    assert report.expected_local_share == pytest.approx(measured, abs=0.01)


@pytest.mark.parametrize(("mesh", "shards"), [((2, 2, 1), 4), ((2, 1, 2), 2), ((1, 3, 2), 3)])
def test_so_it_is_where_a_pipeline_reads_in_two_places_or_ranks_get_copies(
    make_stores: Stores, mesh: tuple[int, int, int], shards: int
) -> None:
    stores = make_stores(*[400] * shards)
    fill(stores, 400, [0.5, *[0.5 / (shards - 1)] * (shards - 1)])
    fields = {"inputs": ["obs", "number"], "targets": ["done"]}
    measured, _, report = replayed(stores, Prioritized(seed=2), 60, batch_size=32, mesh=mesh, **fields)
    assert report.expected_local_share == pytest.approx(measured, abs=0.02)


def test_the_expectation_is_the_binomial_one() -> None:
    rng = np.random.default_rng(0)
    for n, p, most in ((64, 0.25, 16), (100, 0.9, 50), (10, 0.01, 3), (7, 1.0, 3), (7, 0.0, 3), (50, 0.4, 50)):
        sampled = np.minimum(rng.binomial(n, p, 200_000), most).mean()
        assert dealing.expected_up_to(n, p, most) == pytest.approx(sampled, abs=0.03)
    balanced = sum(dealing.expected_up_to(4096, 1 / 8, 512) for _ in range(8))
    assert 4096 - balanced == pytest.approx(0.4 * np.sqrt(4096 * 7), rel=0.01)  # as assignment.py says


def test_a_report_reads_as_a_table(make_stores: Stores) -> None:
    stores = make_stores(300, 300)
    insert(stores[0], np.arange(30), np.full(30, 3.0))
    insert(stores[1], np.arange(30, 40), np.ones(10))
    report = with_placement(stores, lambda made: made.report(batch_size=40))[0]
    lines = str(report).splitlines()
    assert lines[0].split() == ["shard", "ranks", "rows", "free", "MB", "priority", "share", "reader", "share"]
    assert lines[1].split()[:4] == ["0", "0", "30", "270"] and lines[1].split()[-2:] == ["90.0%", "50.0%"]
    assert re.fullmatch(r"expected local share of a batch of 40: 60\.\d% \(exact\)", lines[3])
    assert report.measured_local_share is None
    empty = with_placement(make_stores(5, 5), lambda made: made.report(batch_size=40))[0]
    assert empty.expected_local_share is None and [shard.share for shard in empty.shards] == [0, 0]


# --- rebalancing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 1000, placement_moves.PIECE_BYTES])
def test_rebalancing_keeps_every_row_as_it_was_and_sets_the_shares_right(
    make_stores: Stores, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(placement_moves, "PIECE_BYTES", piece)
    stores = make_stores(400, 400, 400, 400, max_times_sampled=1000)
    fill(stores, 300, [0.7, 0.1, 0.0, 0.2])
    for store in stores:  # samples that were counted
        keys = store.keys()
        store.native.set_times_sampled(keys.row, keys.generation, keys.row % 5)
    before, sizes = population(stores), [len(store) for store in stores]
    moved = with_placement(stores, lambda made: made.rebalance())
    assert population(stores) == before
    assert all(store.audit() == [] for store in stores)
    assert all(store.stats()["evicted"] == 0 for store in stores)
    assert all(each == moved[0] for each in moved)
    assert moved[0].shares_before[0] > 0.6 and moved[0].shares_after == pytest.approx([0.25] * 4, abs=0.01)
    inserted = [store.stats()["inserted"] - size for store, size in zip(stores, sizes, strict=True)]
    assert moved[0].rows == sum(inserted) > 0
    assert moved[0].bytes == moved[0].rows * (STEPS * (12 + 4 + 1) + 4 + 8)


def test_local_share_rises_and_moved_bytes_fall_after_rebalancing(make_stores: Stores) -> None:
    stores = make_stores(600, 600, 600, 600)
    fill(stores, 500, [0.85, 0.05, 0.05, 0.05])
    share_before, received_before, _ = replayed(stores, Prioritized(seed=3), 20)
    moved: list[RebalanceResult] = with_placement(stores, lambda made: made.rebalance())
    share_after, received_after, report = replayed(stores, Prioritized(seed=3), 20)
    assert share_before < 0.45 and share_after > 0.85
    assert received_after < received_before / 3
    assert report.expected_local_share == pytest.approx(share_after, abs=0.03)
    assert moved[0].shares_after == tuple(shard.share for shard in report.shards)


def test_rows_leave_shards_without_readers_heaviest_first(make_stores: Stores) -> None:
    # Heads, on shards 0 and 1, have room for few; the rows are where the tails are.
    stores = make_stores(20, 20, 400, 400)
    priorities = fill(stores, 300, [0.0, 0.0, 0.5, 0.5])
    before = population(stores)
    moved = with_placement(stores, lambda made: made.rebalance(), mesh=(2, 2), inputs=["obs"], targets=["done"])[0]
    assert population(stores) == before and all(store.audit() == [] for store in stores)
    assert [len(store) for store in stores[:2]] == [20, 20] and moved.rows == 40
    at_heads = np.array([number for store in stores[:2] for number in contents(store)])
    for rows in (np.arange(150), np.arange(150, 300)):
        gone = np.intersect1d(rows, at_heads)
        assert not len(gone) or priorities[gone].min() >= priorities[np.setdiff1d(rows, gone)].max()
    # With room enough nothing that can be drawn is left with the tails.
    stores = make_stores(400, 400, 400, 400)
    fill(stores, 300, [0.0, 0.0, 0.5, 0.5])
    moved = with_placement(stores, lambda made: made.rebalance(), mesh=(2, 2), inputs=["obs"], targets=["done"])[0]
    assert moved.shares_after == pytest.approx([0.5, 0.5, 0, 0], abs=0.01)


def test_by_rows_numbers_of_rows_become_even(make_stores: Stores) -> None:
    stores = make_stores(400, 400)
    insert(stores[0], np.arange(100), np.zeros(100))  # which Uniform draws as well
    with_placement(stores, lambda made: made.rebalance(), by="rows")
    assert [sorted(contents(store)) for store in stores] == [list(range(50)), list(range(50, 100))]
    assert (np.diff(np.array(list(contents(stores[1])))) > 0).all()  # in the order they were in


def test_what_is_within_tolerance_stays(make_stores: Stores) -> None:
    stores = make_stores(100, 100)
    insert(stores[0], np.arange(53), np.ones(53))
    insert(stores[1], np.arange(53, 100), np.ones(47))
    moved = with_placement(stores, lambda made: made.rebalance())[0]
    assert moved == RebalanceResult(0, 0, (0.53, 0.47), (0.53, 0.47))
    moved = with_placement(stores, lambda made: made.rebalance(tolerance=0.01))[0]
    assert (moved.rows, moved.shares_after) == (3, (0.5, 0.5))
    empty = with_placement(make_stores(5, 5), lambda made: made.rebalance(tolerance=0))[0]
    assert empty == RebalanceResult(0, 0, (0.0, 0.0), (0.0, 0.0))


def test_no_more_bytes_than_allowed_are_moved(make_stores: Stores) -> None:
    stores = make_stores(400, 400, 400)
    fill(stores, 300, [1.0, 0.0, 0.0])
    row_bytes = STEPS * 17 + 12
    moved = with_placement(stores, lambda made: made.rebalance(max_bytes=10 * row_bytes + 50))[0]
    assert (moved.rows, moved.bytes) == (10, 10 * row_bytes)
    assert [len(store) for store in stores] in ([290, 4, 6], [290, 5, 5], [290, 6, 4])  # as much of each flow


def test_rows_that_change_on_the_way_are_neither_torn_nor_there_twice(
    make_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = make_stores(200, 200)
    insert(stores[0], np.arange(200), np.ones(200))
    before = population(stores)
    real = placement_moves.RowMover._pack

    def pack(self: placement_moves.RowMover, keys: np.ndarray) -> Any:
        gone = Keys(keys[:7, 0], keys[:7, 1])
        assert self.store.delete(gone) == 0  # somebody removes rows that were chosen
        return real(self, keys)

    monkeypatch.setattr(placement_moves.RowMover, "_pack", pack)
    moved = with_placement(stores, lambda made: made.rebalance())[0]
    after = population(stores)
    assert not after - before and (before - after).total() == 200 - sum(len(store) for store in stores)
    assert moved.rows == len(stores[1]) and all(store.audit() == [] for store in stores)


def test_a_writer_that_takes_the_room_meanwhile_evicts_nothing(
    make_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = make_stores(200, 100)
    insert(stores[0], np.arange(200), np.ones(200))
    real = placement_moves.RowMover._pack

    def pack(self: placement_moves.RowMover, keys: np.ndarray) -> Any:
        if len(stores[1]) == 0:
            insert(stores[1], np.arange(900, 970), np.ones(70))
        return real(self, keys)

    monkeypatch.setattr(placement_moves.RowMover, "_pack", pack)
    with_placement(stores, lambda made: made.rebalance())
    assert all(store.stats()["evicted"] == 0 for store in stores)
    assert sorted(n for store in stores for n in contents(store)) == [*range(200), *range(900, 970)]
    assert len(stores[1]) == 100


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_in_the_middle_loses_no_row(
    make_stores: Stores, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setattr(placement_moves, "PIECE_BYTES", 3000)  # some twenty rows
    duplicates = 0
    for die_at in range(5, 90, 3):
        stores = make_stores(200, 200, 200)
        fill(stores, 150, [1.0, 0.0, 0.0])
        before = population(stores)
        group = ThreadRankGroup.make(3, timeout_s=patience(10))
        group[victim].die_at = die_at
        whole = []

        def body(rank: ThreadRankGroup, stores: list[gt.Store] = stores, whole: list[RebalanceResult] = whole) -> None:
            try:
                with Placement(stores[rank.rank], group=rank) as made:
                    whole.append(made.rebalance())
            except PeerLostError as error:
                assert f"rank {victim} aborted: die_at was reached" in str(error)

        run_ranks(group, body)
        after = population(stores)
        assert set(after) == set(before), f"rows were lost or changed when rank {victim} died at exchange {die_at}"
        assert all(store.audit() == [] for store in stores)
        duplicates += (after - before).total()
        if len(whole) == 3:
            break
    assert len(whole) == 3, "the last runs should have been over before the victim died"
    assert duplicates > 0, "no run was cut between a commit and its deletion; the test tests nothing"


def test_an_error_where_rows_arrive_ends_the_others_with_its_reason(
    make_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = make_stores(200, 200)
    fill(stores, 150, [1.0, 0.0])
    before = population(stores)

    def insert_nothing(*_: Any) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(placement_moves.RowMover, "_insert", insert_nothing)

    def body(made: Placement) -> None:
        with pytest.raises(MemoryError if made.shard else PeerLostError, match="no memory left"):
            made.rebalance()

    with_placement(stores, body)
    assert population(stores) == before


def test_a_fifo_and_a_replay_go_on_after_rows_have_moved(make_stores: Stores) -> None:
    stores = make_stores(400, 400)
    insert(stores[0], np.arange(200), np.ones(200))
    others = ThreadRankGroup.make(2)

    def body(rank: ThreadRankGroup) -> list[int]:
        options = {"output": "numpy", "group": rank}
        with (
            gt.Replay(stores[rank.rank], Fifo(), 40, **options) as replay,
            Placement(stores[rank.rank], group=others[rank.rank]) as made,
        ):
            replay.sample()
            replay.settle()
            made.rebalance()
            replay.update_priorities(replay.sample().keys, 1.0)
            return replay.sample()["number"].tolist()

    numbers = [number for part in run_ranks(2, body) for number in part]
    assert len(set(numbers)) == 40


# --- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"by": "rows"}, RanksDisagreeError, "by is priority on rank 0 and rows on rank 1"),
        ({"inputs": ["obs"], "targets": []}, RanksDisagreeError, "inputs is .* on rank 0 and .* on rank 1"),
        ({"window": 3}, RanksDisagreeError, "window is None on rank 0 and 3 on rank 1"),
        ({"mesh": MeshPosition(0, 1, 0, 1, 2, 1)}, RanksDisagreeError, "size is"),
        ({"mesh": MeshPosition(0, 0, 0, 2, 1, 1)}, RanksDisagreeError, "2 ranks have 1 different positions"),
    ],
)
def test_ranks_that_disagree_are_told_so(
    make_stores: Stores, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    stores = make_stores(5, 5)

    def body(rank: ThreadRankGroup) -> None:
        with pytest.raises(error, match=message):
            Placement(stores[rank.rank], **({"group": rank} | (changed if rank.rank else {})))

    run_ranks(2, body)


def test_so_they_are_when_they_ask_for_different_things(make_stores: Stores) -> None:
    (one,), (other,) = make_stores(5), make_stores(5, priority_fraction_bits=8)

    def differ(rank: ThreadRankGroup) -> None:
        with pytest.raises(RanksDisagreeError, match="priority_fraction_bits is 16 on rank 0 and 8 on rank 1"):
            Placement((one, other)[rank.rank], group=rank)

    run_ranks(2, differ)
    stores = make_stores(5, 5)

    def ask(made: Placement) -> None:
        with pytest.raises(RanksDisagreeError, match=r"tolerance is 0.\d on rank [01] and 0.\d on rank [01]"):
            made.rebalance(tolerance=0.1 * (1 + made.shard))
        with pytest.raises(RanksDisagreeError, match="batch_size is 4 on rank 0 and 8 on rank 1"):
            made.report(batch_size=4 * (1 + made.shard))

    with_placement(stores, ask)


def test_what_makes_no_sense_is_refused_at_the_door(make_stores: Stores) -> None:
    (store,) = make_stores(5)
    for error, message, options in (
        (ArgumentError, "by is 'priority' or 'rows', found 'luck'", {"by": "luck"}),
        (ArgumentError, "lists of names", {"inputs": "obs"}),
        (ArgumentError, "at least one step, found window=0", {"window": 0}),
        (FieldError, "nothing", {"inputs": ["nothing"]}),
        (ArgumentError, "no rank of replica 0 reads a field", {"inputs": []}),
        (ArgumentError, "a DeepSpeed grid, or an object with", {"mesh": object()}),
        (ArgumentError, "timeout_s must be", {"timeout_s": -1}),
    ):
        with pytest.raises(error, match=message):
            Placement(store, **options)
    with Placement(store) as made:
        for tolerance in (-0.1, 1.1, float("nan")):
            with pytest.raises(ArgumentError, match="tolerance is a share, from 0 to 1"):
                made.rebalance(tolerance=tolerance)
        with pytest.raises(ArgumentError, match="max_bytes must be at least 0, found -1"):
            made.rebalance(max_bytes=-1)
        with pytest.raises(ArgumentError, match="a global batch of 0 rows"):
            made.report(batch_size=0)
        assert made.rebalance() == RebalanceResult(0, 0, (0.0,), (0.0,))


def test_processes_of_a_group_rebalance_over_gloo(
    make_stores: Stores, fork: Callable[[Callable[[], object]], int], tmp_path: Path
) -> None:
    import torch.distributed as dist

    stores = make_stores(400, 400)
    fill(stores, 300, [0.9, 0.1])
    before = population(stores)

    def rank(number: int) -> Callable[[], object]:
        def body() -> None:
            meet = f"file://{tmp_path}/meet"
            dist.init_process_group("gloo", meet, timedelta(seconds=30), world_size=2, rank=number)
            with Placement(stores[number], group=dist.group.WORLD, timeout_s=patience(30)) as made:
                report = made.report(batch_size=64)
                moved = made.rebalance()
                assert moved.shares_before == tuple(shard.share for shard in report.shards)
                assert moved.shares_after == pytest.approx((0.5, 0.5), abs=0.01)
            dist.destroy_process_group()

        return body

    children = [fork(rank(number)) for number in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert population(stores) == before and all(store.audit() == [] for store in stores)
    assert len(stores[1]) > 60


def test_a_process_alone_has_all_its_rows_at_home(make_stores: Stores) -> None:
    (store,) = make_stores(20)
    with Placement(store) as made, gt.Replay(store, Prioritized(), 4, output="numpy", num_batches=1) as replay:
        insert(store, made.mine([3.0, 1.0, 2.0]), np.array([3.0, 1.0, 2.0]))
        list(replay)
        report = made.report(replay)
        assert (report.expected_local_share, report.measured_local_share) == (1.0, 1.0)
        assert made.rebalance(progress=True).rows == 0
