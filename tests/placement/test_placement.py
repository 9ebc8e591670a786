"""Placement: rows where they are read, moved there on request, and never lost on the way."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from placed_rows import Stores, fill, insert, replayed, with_placement

import geartrain as gt
import geartrain.placement.balance as balance
from geartrain.errors import ArgumentError, FieldError, RanksDisagreeError
from geartrain.placement.placement import Placement
from geartrain.placement.report import RebalanceResult
from geartrain.ranks.topology import MeshPosition
from geartrain.selection import Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

# --- balance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", ["equal", "uniform", "pareto", "zipf"])
def test_each_reader_gets_its_share_of_the_priority_and_all_ranks_agree(empty_stores: Stores, skew: str) -> None:
    n, rng = 20_000, np.random.default_rng(0)
    priorities = {
        "equal": np.ones(n),
        "uniform": rng.random(n),
        "pareto": rng.pareto(1.5, n),
        "zipf": 1 / (1 + rng.permutation(n)),
    }[skew]
    # Two replicas read from the first shard, one from each of the others.
    stores = empty_stores(*[n] * 3)
    deals = with_placement([*stores, stores[0]], lambda made: made.deal(priorities))
    assert all(np.array_equal(deal, deals[0]) for deal in deals)
    shares = np.bincount(deals[0], priorities) / priorities.sum()
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.001)
    if skew != "zipf":  # and of each span of priorities, so that any power of them is shared out alike
        squares = np.bincount(deals[0], np.sqrt(priorities)) / np.sqrt(priorities).sum()
        assert squares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)


def test_every_row_of_a_dataset_is_one_ranks_to_insert(empty_stores: Stores) -> None:
    stores = empty_stores(500, 500)
    priorities = np.random.default_rng(1).random(700)
    mine = with_placement(stores, lambda made: (made.shard, made.mine(priorities)), ranks=5)
    assert np.array_equal(np.sort(np.concatenate([rows for _, rows in mine])), np.arange(700))
    for shard in range(2):
        parts = [rows for number, rows in mine if number == shard]
        assert (np.diff(np.concatenate(parts)) > 0).all()  # in the order of the dataset, contiguous parts of it
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_likely_rows_go_to_heads_and_what_does_not_fit_coldest_first_to_those_that_read_less(
    empty_stores: Stores,
) -> None:
    # Stages of a pipeline of three, two replicas: heads, which read most, on shards 0 and 1, tails on 4 and 5.
    stores = empty_stores(100, 60, 80, 80, 50, 50)
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


def test_a_tail_that_reads_more_than_its_head_comes_first(empty_stores: Stores) -> None:
    deals = with_placement(
        empty_stores(50, 50), lambda made: made.deal(np.ones(40)), mesh=(1, 2), inputs=["done"], targets=["obs", "half"]
    )
    assert (deals[0] == 1).all()


def test_what_shards_hold_already_is_counted_in(empty_stores: Stores) -> None:
    stores = empty_stores(1000, 1000, 1000)
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


def test_balance_holds_its_promises_whatever_the_shards(empty_stores: Stores) -> None:
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
        dealt = balance.deal(priorities, amount, share, reads, free)
        counts = np.bincount(dealt, minlength=shards)
        assert (counts <= free).all() and counts.sum() == n
        assert np.array_equal(dealt, balance.deal(priorities, amount, share, reads, free))
        near, far = priorities[share[dealt] > 0], priorities[share[dealt] == 0]
        assert not len(far) or ((counts == free)[share > 0].all() and (not len(near) or near.min() >= far.max()))
        ample = balance.deal(priorities, np.zeros(shards), share, reads, free + n)
        off = np.bincount(ample, priorities, minlength=shards) - share * priorities.sum()
        assert np.abs(off).max(initial=0) <= priorities.max(initial=0) * 1.5 + 1e-9


def test_more_rows_than_all_shards_take_are_refused_with_the_numbers(empty_stores: Stores) -> None:
    stores = empty_stores(10, 20, 30)
    insert(stores[2], np.arange(4), np.ones(4))

    def body(made: Placement) -> None:
        with pytest.raises(
            ArgumentError, match=r"57 rows do not fit: .* 56 free rows .*10 in shard 0, 20 in .*26 in shard 2"
        ):
            made.deal(np.ones(57))
        assert np.bincount(made.deal(np.ones(56))).tolist() == [10, 20, 26]

    with_placement(stores, body)


def test_headroom_is_no_room(empty_stores: Stores) -> None:
    (store,) = empty_stores(20, max_rows=12)
    insert(store, np.arange(5), np.ones(5))
    row = store.row()
    with Placement(store) as made:
        assert made.shards[0].free == 6
    row.abandon()


def test_priorities_that_are_none_are_refused(empty_stores: Stores) -> None:
    (store,) = empty_stores(10)
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
        with pytest.raises(ArgumentError, match="by='rows' all rows have the same priority"):
            made.deal([1.0, 2.0])


# --- reporting --------------------------------------------------------------------------------------------------


def test_the_expected_local_share_is_what_batches_come_to(empty_stores: Stores) -> None:
    stores = empty_stores(600, 600, 600)
    fill(stores, 600, [0.6, 0.3, 0.1])
    measured, _, report = replayed(stores, Prioritized(seed=1), 150, batch_size=48)
    assert report.method == "exact"
    assert report.expected_local_share == pytest.approx(measured, abs=0.01)
    measured, _, report = replayed(stores, Uniform(seed=1), 150, batch_size=48, by="rows")
    assert report.expected_local_share == pytest.approx(measured, abs=0.01)


@pytest.mark.parametrize(("mesh", "shards"), [((2, 2, 1), 4), ((2, 1, 2), 2), ((1, 3, 2), 3)])
def test_so_it_is_where_a_pipeline_reads_in_two_places_or_ranks_get_copies(
    empty_stores: Stores, mesh: tuple[int, int, int], shards: int
) -> None:
    stores = empty_stores(*[400] * shards)
    fill(stores, 400, [0.5, *[0.5 / (shards - 1)] * (shards - 1)])
    fields = {"inputs": ["obs", "number"], "targets": ["done"]}
    measured, _, report = replayed(stores, Prioritized(seed=2), 60, batch_size=32, mesh=mesh, **fields)
    assert report.expected_local_share == pytest.approx(measured, abs=0.02)


def test_the_expectation_is_the_binomial_one() -> None:
    rng = np.random.default_rng(0)
    for n, p, most in ((64, 0.25, 16), (100, 0.9, 50), (10, 0.01, 3), (7, 1.0, 3), (7, 0.0, 3), (50, 0.4, 50)):
        sampled = np.minimum(rng.binomial(n, p, 200_000), most).mean()
        assert balance.expected_up_to(n, p, most) == pytest.approx(sampled, abs=0.03)
    balanced = sum(balance.expected_up_to(4096, 1 / 8, 512) for _ in range(8))
    assert 4096 - balanced == pytest.approx(0.4 * np.sqrt(4096 * 7), rel=0.01)  # as assignment.py says


def test_a_report_reads_as_a_table(empty_stores: Stores) -> None:
    stores = empty_stores(300, 300)
    insert(stores[0], np.arange(30), np.full(30, 3.0))
    insert(stores[1], np.arange(30, 40), np.ones(10))
    report = with_placement(stores, lambda made: made.report(batch_size=40))[0]
    lines = str(report).splitlines()
    assert lines[0].split() == ["shard", "ranks", "rows", "free", "MB", "priority", "share", "reader", "share"]
    assert lines[1].split()[:4] == ["0", "0", "30", "270"] and lines[1].split()[-2:] == ["90.0%", "50.0%"]
    assert re.fullmatch(r"expected local share of a batch of 40: 60\.\d% \(exact\)", lines[3])
    assert report.measured_local_share is None
    empty = with_placement(empty_stores(5, 5), lambda made: made.report(batch_size=40))[0]
    assert empty.expected_local_share is None and [shard.share for shard in empty.shards] == [0, 0]


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
    empty_stores: Stores, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    stores = empty_stores(5, 5)

    def body(rank: ThreadRankGroup) -> None:
        with pytest.raises(error, match=message):
            Placement(stores[rank.rank], **({"group": rank} | (changed if rank.rank else {})))

    run_ranks(2, body)


def test_so_they_are_when_they_ask_for_different_things(empty_stores: Stores) -> None:
    (one,), (other,) = empty_stores(5), empty_stores(5, priority_fraction_bits=8)

    def differ(rank: ThreadRankGroup) -> None:
        with pytest.raises(RanksDisagreeError, match="priority_fraction_bits is 16 on rank 0 and 8 on rank 1"):
            Placement((one, other)[rank.rank], group=rank)

    run_ranks(2, differ)
    stores = empty_stores(5, 5)

    def ask(made: Placement) -> None:
        with pytest.raises(RanksDisagreeError, match=r"tolerance is 0.\d on rank [01] and 0.\d on rank [01]"):
            made.rebalance(tolerance=0.1 * (1 + made.shard))
        with pytest.raises(RanksDisagreeError, match="batch_size is 4 on rank 0 and 8 on rank 1"):
            made.report(batch_size=4 * (1 + made.shard))

    with_placement(stores, ask)


def test_what_makes_no_sense_is_refused_at_the_door(empty_stores: Stores) -> None:
    (store,) = empty_stores(5)
    for error, message, options in (
        (ArgumentError, "by is one of 'priority', 'rows', found 'luck'", {"by": "luck"}),
        (ArgumentError, "inputs is a list of names, found", {"inputs": "obs"}),
        (ArgumentError, "window must be at least 1, found 0", {"window": 0}),
        (FieldError, "nothing", {"inputs": ["nothing"]}),
        (ArgumentError, "no rank of replica 0 reads a field", {"inputs": []}),
        (ArgumentError, "a DeepSpeed grid, or an object with", {"mesh": object()}),
        (ArgumentError, "timeout_s must be", {"timeout_s": -1}),
    ):
        with pytest.raises(error, match=message):
            Placement(store, **options)
    with Placement(store) as made:
        for tolerance in (-0.1, 1.1, float("nan")):
            with pytest.raises(ArgumentError, match="tolerance must be a finite number from 0 to 1"):
                made.rebalance(tolerance=tolerance)
        with pytest.raises(ArgumentError, match="max_bytes must be at least 0, found -1"):
            made.rebalance(max_bytes=-1)
        with pytest.raises(ArgumentError, match="a global batch of 0 rows"):
            made.report(batch_size=0)
        assert made.rebalance() == RebalanceResult(0, 0, (0.0,), (0.0,))


def test_a_process_alone_has_all_its_rows_at_home(empty_stores: Stores) -> None:
    (store,) = empty_stores(20)
    with Placement(store) as made, gt.Replay(store, Prioritized(), 4, output="numpy", num_batches=1) as replay:
        insert(store, made.mine([3.0, 1.0, 2.0]), np.array([3.0, 1.0, 2.0]))
        list(replay)
        report = made.report(replay)
        assert (report.expected_local_share, report.measured_local_share) == (1.0, 1.0)
        assert made.rebalance(progress=True).rows == 0
