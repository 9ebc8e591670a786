"""Rebalancing: rows move to where they are read, as they were, and none is lost or there twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from placed_rows import STEPS, Stores, contents, fill, insert, population, replayed, with_placement
from replay_calls import replay_of

import geartrain as gt
import geartrain.placement.moves as placement_moves
from geartrain.core.keys import Keys
from geartrain.errors import PeerLostError
from geartrain.placement.placement import Placement
from geartrain.placement.report import RebalanceResult
from geartrain.selection import Fifo, Prioritized
from geartrain.tools.testing import ThreadRankGroup, run_ranks

# --- rebalancing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 1000, placement_moves.PIECE_BYTES])
def test_rebalancing_keeps_every_row_as_it_was_and_sets_the_shares_right(
    empty_stores: Stores, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(placement_moves, "PIECE_BYTES", piece)
    stores = empty_stores(400, 400, 400, 400, max_times_sampled=1000)
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


def test_local_share_rises_and_moved_bytes_fall_after_rebalancing(empty_stores: Stores) -> None:
    stores = empty_stores(600, 600, 600, 600)
    fill(stores, 500, [0.85, 0.05, 0.05, 0.05])
    share_before, received_before, _ = replayed(stores, Prioritized(seed=3), 20)
    moved: list[RebalanceResult] = with_placement(stores, lambda made: made.rebalance())
    share_after, received_after, report = replayed(stores, Prioritized(seed=3), 20)
    assert share_before < 0.45 and share_after > 0.85
    assert received_after < received_before / 3
    assert report.expected_local_share == pytest.approx(share_after, abs=0.03)
    assert moved[0].shares_after == tuple(shard.share for shard in report.shards)


def test_rows_leave_shards_without_readers_heaviest_first(empty_stores: Stores) -> None:
    # Heads, on shards 0 and 1, have room for few; the rows are where the tails are.
    stores = empty_stores(20, 20, 400, 400)
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
    stores = empty_stores(400, 400, 400, 400)
    fill(stores, 300, [0.0, 0.0, 0.5, 0.5])
    moved = with_placement(stores, lambda made: made.rebalance(), mesh=(2, 2), inputs=["obs"], targets=["done"])[0]
    assert moved.shares_after == pytest.approx([0.5, 0.5, 0, 0], abs=0.01)


def test_by_rows_numbers_of_rows_become_even(empty_stores: Stores) -> None:
    stores = empty_stores(400, 400)
    insert(stores[0], np.arange(100), np.zeros(100))  # which Uniform draws as well
    with_placement(stores, lambda made: made.rebalance(), by="rows")
    assert [sorted(contents(store)) for store in stores] == [list(range(50)), list(range(50, 100))]
    assert (np.diff(np.array(list(contents(stores[1])))) > 0).all()  # in the order they were in


def test_what_is_within_tolerance_stays(empty_stores: Stores) -> None:
    stores = empty_stores(100, 100)
    insert(stores[0], np.arange(53), np.ones(53))
    insert(stores[1], np.arange(53, 100), np.ones(47))
    moved = with_placement(stores, lambda made: made.rebalance())[0]
    assert moved == RebalanceResult(0, 0, (0.53, 0.47), (0.53, 0.47))
    moved = with_placement(stores, lambda made: made.rebalance(tolerance=0.01))[0]
    assert (moved.rows, moved.shares_after) == (3, (0.5, 0.5))
    empty = with_placement(empty_stores(5, 5), lambda made: made.rebalance(tolerance=0))[0]
    assert empty == RebalanceResult(0, 0, (0.0, 0.0), (0.0, 0.0))


def test_no_more_bytes_than_allowed_are_moved(empty_stores: Stores) -> None:
    stores = empty_stores(400, 400, 400)
    fill(stores, 300, [1.0, 0.0, 0.0])
    row_bytes = STEPS * 17 + 12
    moved = with_placement(stores, lambda made: made.rebalance(max_bytes=10 * row_bytes + 50))[0]
    assert (moved.rows, moved.bytes) == (10, 10 * row_bytes)
    assert [len(store) for store in stores] in ([290, 4, 6], [290, 5, 5], [290, 6, 4])  # as much of each flow


def test_rows_that_change_on_the_way_are_neither_torn_nor_there_twice(
    empty_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = empty_stores(200, 200)
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
    empty_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = empty_stores(200, 100)
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
    empty_stores: Stores, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setattr(placement_moves, "PIECE_BYTES", 3000)  # some twenty rows
    duplicates = 0
    for die_at in range(5, 90, 3):
        stores = empty_stores(200, 200, 200)
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
    empty_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = empty_stores(200, 200)
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


def test_a_fifo_and_a_replay_go_on_after_rows_have_moved(empty_stores: Stores) -> None:
    stores = empty_stores(400, 400)
    insert(stores[0], np.arange(200), np.ones(200))
    others = ThreadRankGroup.make(2)

    def body(rank: ThreadRankGroup) -> list[int]:
        options = {"output": "numpy", "group": rank}
        with (
            replay_of(stores[rank.rank], Fifo(), 40, **options) as replay,
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


def test_processes_of_a_group_rebalance_over_gloo(
    empty_stores: Stores, fork: Callable[[Callable[[], object]], int], tmp_path: Path
) -> None:
    import torch.distributed as dist

    stores = empty_stores(400, 400)
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
