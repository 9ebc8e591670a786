"""Ranks of one host with a store each read each other's rows where they are, and no message carries them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_batches import B, N, as_record, join, over_ranks, same
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import GeartrainError, StoreIOError
from geartrain.replay.distributed.messages import rank_status
from geartrain.replay.distributed.rank_reader import RankReader
from geartrain.replay.distributed.sharded_sampler import ShardedSampler
from geartrain.selection import Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

Stores = Callable[..., list[gt.Store]]


@pytest.mark.parametrize("assignment", ["local_first", "ordered"])
@pytest.mark.parametrize(
    "selection",
    [Prioritized(seed=6, beta=0.4), Uniform(seed=2, stratified=True)],
    ids=["importance weights", "stratified"],
)
def test_rows_of_the_same_host_are_read_in_place_and_the_batches_are_those_of_messages(
    sharded_stores: Stores, selection: Any, assignment: str
) -> None:
    stores = sharded_stores(3)
    apart, sent = over_ranks(stores, selection, assignment=assignment)
    beside, read = over_ranks(stores, selection, assignment=assignment, one_host=True)
    (whole,) = sharded_stores(1)
    with gt.Replay(whole, selection, B, window=4, output="numpy", num_batches=3) as replay:
        alone = [as_record(batch) for batch in replay]
    assert same(apart, alone) and same(beside, alone)
    assert sum(each["sent_bytes"] for each in sent) == sum(each["received_bytes"] for each in sent) > 0
    for each in read:
        assert each["sent_bytes"] == each["received_bytes"] == 0 and each["local_share"] == 1
        assert each["local_bytes"] == each["bytes"] > 0


@pytest.mark.parametrize(("beta", "told"), [(0.0, 1), (0.4, 16)], ids=["", "importance weights"])
def test_a_batch_on_one_host_is_a_status_and_whether_rows_were_lost(
    sharded_stores: Stores, beta: float, told: int
) -> None:
    stores, status = sharded_stores(3), rank_status(1).itemsize
    selection = Prioritized(seed=6, beta=beta) if beta else Prioritized(seed=6)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], selection, B, group=rank, output="numpy", prefetch=0) as replay:
            for _ in range(3):
                before = rank.sent_messages, rank.sent_bytes
                replay.sample()
                sent = rank.sent_messages - before[0], rank.sent_bytes - before[1]
                assert sent == (2 * 2, 2 * (status + told))

    run_ranks(ThreadRankGroup.make(3, one_host=True), body)


def test_samples_of_rows_are_counted_whoever_reads_them(sharded_stores: Stores) -> None:
    for one_host in (False, True):
        stores = sharded_stores(3)
        over_ranks(stores, Uniform(seed=2), batches=4, assignment="ordered", one_host=one_host)
        assert sum(int(store.status()["times_sampled"].sum()) for store in stores) == 4 * B


def test_whoever_reads_a_store_of_another_rank_is_none_of_its_processes(sharded_stores: Stores) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Uniform(seed=2), B, group=rank, prefetch=0) as replay:
            replay.sample()
            rank.all_gather(np.zeros(1, np.uint8))
            assert [store.native.live_clients() for store in stores] == [1, 1]
            rank.all_gather(np.zeros(1, np.uint8))
            if rank.rank == 1:  # its rows stay readable until the others have noticed
                stores[1].close()
                assert not stores[1].path.exists()

    run_ranks(ThreadRankGroup.make(2, one_host=True), body)


def test_a_store_that_cannot_be_opened_sends_its_rows(sharded_stores: Stores) -> None:
    stores, others = sharded_stores(2), sharded_stores(2)
    stores[0].unlink()
    found, (first, second) = over_ranks(stores, Uniform(seed=2), one_host=True)
    assert same(found, over_ranks(others, Uniform(seed=2))[0])
    moved = first["sent_bytes"], second["sent_bytes"]
    assert (first["received_bytes"], second["received_bytes"]) == moved[::-1]
    assert second["sent_bytes"] == 0, "rank 0 reads those of rank 1 itself"


def test_a_store_whose_opening_fails_whatever_the_cause_sends_its_rows(
    sharded_stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, others = sharded_stores(3), sharded_stores(3)
    (tmp_path / "file").touch()
    opens, causes = gt.Store.open.__func__, []  # type: ignore[attr-defined]

    def elsewhere(cls: type[gt.Store], name: Any, **options: Any) -> gt.Store:
        if str(name) != str(stores[2].path):
            return opens(cls, name, **options)
        try:
            return opens(cls, tmp_path / "file" / "store", **options)
        except GeartrainError as error:
            causes.append(error)
            raise

    monkeypatch.setattr(gt.Store, "open", classmethod(elsewhere))
    found, moved = over_ranks(stores, Uniform(seed=2), assignment="ordered", one_host=True)
    assert [type(cause) for cause in causes] == [StoreIOError, StoreIOError], "it is not a directory"
    assert same(found, over_ranks(others, Uniform(seed=2))[0])
    assert [each["sent_bytes"] > 0 for each in moved] == [False, False, True], "of that store alone"


def test_what_is_open_of_other_ranks_is_closed_where_a_reader_cannot_be_made(
    sharded_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, opened = sharded_stores(2), []
    opens = gt.Store.open.__func__  # type: ignore[attr-defined]

    def noted(cls: type[gt.Store], name: Any, **options: Any) -> gt.Store:
        opened.append(opens(cls, name, **options))
        return opened[-1]

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for a reader")

    monkeypatch.setattr(gt.Store, "open", classmethod(noted))
    monkeypatch.setattr(RankReader, "__init__", fails)
    with pytest.raises(MemoryError):
        over_ranks(stores, Uniform(seed=2), one_host=True)
    assert len(opened) == 2
    assert all(store.closed for store in opened)


def test_rows_that_go_while_another_rank_reads_them_are_drawn_again(
    sharded_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = sharded_stores(2)
    send_parts = ShardedSampler.send_parts
    left = stores[1].keys()[:3]
    share = len(stores[1]) / sum(len(store) for store in stores)

    def loses_rows(self: ShardedSampler, parts: Any) -> Any:
        received = send_parts(self, parts)
        (status,) = parts[0].view(rank_status(1))
        if status["step"] == 1 and self.samplers[0].plan.store is stores[0]:
            stores[1].delete(stores[1].keys()[3:])  # after its total was told
        return received

    monkeypatch.setattr(ShardedSampler, "send_parts", loses_rows)

    def body(rank: ThreadRankGroup) -> gt.Batch:
        settings: dict[str, Any] = {"assignment": "ordered", "output": "numpy", "prefetch": 0}
        with replay_of(stores[rank.rank], Uniform(seed=2), B, group=rank, **settings) as replay:
            replay.sample()
            return replay.sample()

    parts = run_ranks(ThreadRankGroup.make(2, one_host=True), body)
    joined = join(parts)
    (mine,) = (part for part in parts if 0 in part.draw)
    theirs = mine.keys[mine.keys.shard == 1]
    assert len(theirs) and np.isin(theirs.row, left.row).all(), "of what the other shard has left"
    assert np.array_equal(joined["version"], joined["number"])
    again = mine.probability[(mine.keys.shard == 1) & (mine.probability > 1 / N)]
    assert len(again) and np.allclose(again, share / 3, rtol=1e-12), (
        "one of the three, in its shard's part of the whole"
    )
