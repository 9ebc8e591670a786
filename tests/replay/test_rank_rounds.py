"""Rounds, messages and bytes of a batch over ranks, for every strategy: the tables of docs/benchmarks/ranks.md."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from rank_batches import B, join, same
from recorded_shards import Episodes
from replay_calls import replay_of

import geartrain as gt
import geartrain.replay.distributed.members as members
import geartrain.replay.distributed.read_agreement as read_agreement
import geartrain.replay.distributed.sharded_sampler as sharded_sampler
from geartrain.ranks.carrier import Bytes, Message
from geartrain.ranks.rank_collectives import DIRECT_RANKS
from geartrain.replay.distributed.messages import rank_status
from geartrain.replay.distributed.read_agreement import ReadAgreement
from geartrain.selection import Fifo, GroupSampling, Lifo, Prioritized, TopK, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

RANKS, BATCHES = 3, 4


class Round(NamedTuple):
    messages: int
    nbytes: int


class CountedGroup(ThreadRankGroup):
    """Counts what its rank sends to agree, round by round; the exchange of rows is not counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rounds: list[Round] = []
        self.moves_rows = False

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        self.rounds.append(Round(len(parts) - 1, sum(part.size for part in parts) - parts[self.rank].size))
        return super().all_to_all(parts)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        sizes = [array.size for _, array in sends if array.size]
        if not self.moves_rows and (sizes or any(array.size for _, array in receives)):
            self.rounds.append(Round(len(sizes), sum(sizes)))
        super().exchange(sends, receives)


def rounds_of(
    stores: list[gt.Store],
    selection: Any,
    monkeypatch: pytest.MonkeyPatch,
    updates: bool,
    ranks: int = RANKS,
    **options: Any,
) -> list[list[list[Round]]]:
    """For every rank and batch, the rounds of its agreement."""
    original = ReadAgreement.exchange

    def exchange(self: ReadAgreement, *messages: Any, **options: Any) -> None:
        group: Any = self.members.group
        group.moves_rows = True
        try:
            original(self, *messages, **options)
        finally:
            group.moves_rows = False

    monkeypatch.setattr(ReadAgreement, "exchange", exchange)

    def body(rank: Any) -> list[list[Round]]:
        store, found = stores[rank.rank % len(stores)], []
        settings: dict[str, Any] = {"output": "numpy", "prefetch": 0, "num_batches": BATCHES, **options}
        with replay_of(store, selection, B, group=rank, **settings) as replay:
            rank.rounds.clear()
            for batch in replay:
                found.append(list(rank.rounds))
                rank.rounds.clear()
                if updates:
                    replay.update_priorities(batch.keys, np.ones(len(batch.keys)))
        return found

    return run_ranks(CountedGroup.make(ranks, 60.0), body)


STATUS = rank_status(1).itemsize
UPDATE = 32  # native/fetch/rank_steps.h, PriorityRecord
# Rounds of a batch: without updates and after updates; where ranks have a shard each, and where they share one.
STRATEGIES = {
    "uniform": (Uniform(seed=3), (1, 2), (1, 2)),
    "prioritized": (Prioritized(seed=6), (1, 2), (1, 2)),
    "importance weights": (Prioritized(seed=6, beta=0.4), (1, 2), (1, 2)),
    "without replacement": (Uniform(seed=5, replacement=False), (3, 3), (4, 4)),
    "top-k": (TopK(), (1, 2), (1, 2)),
    "fifo": (Fifo(), (1, 1), (1, 1)),
    "lifo": (Lifo(), (1, 1), (1, 1)),
    "groups": (GroupSampling(by="group", size=4, seed=2), (3, 3), (4, 4)),
}


@pytest.mark.parametrize(("selection", "own", "shared"), STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("updates", [False, True], ids=["", "updates"])
def test_a_batch_takes_as_many_rounds_as_the_table_says(
    sharded_stores: Callable[..., list[gt.Store]],
    monkeypatch: pytest.MonkeyPatch,
    selection: Any,
    own: tuple[int, int],
    shared: tuple[int, int],
    updates: bool,
) -> None:
    for shards, wanted in ((RANKS, own), (1, shared)):
        stores = sharded_stores(shards)
        for rounds in rounds_of(stores, selection, monkeypatch, updates):
            first, *others = [len(each) for each in rounds]
            assert first == wanted[0]  # there was nothing to update yet
            assert others == [wanted[updates]] * (BATCHES - 1)
            assert all(each.messages <= RANKS - 1 for batch in rounds for each in batch)


@pytest.mark.parametrize(
    ("per", "selection", "most"),
    [("step", Prioritized(seed=6), 3), ("row", Uniform(seed=3, over="steps"), 4)],
    ids=["by priority", "over steps"],
)
def test_draws_of_steps_take_a_round_for_every_few_attempts(
    monkeypatch: pytest.MonkeyPatch, per: str, selection: Any, most: int
) -> None:
    with Episodes(60).stores(RANKS, priority_per=per) as stores:
        of_ranks = rounds_of(stores, selection, monkeypatch, updates=True, view=gt.Transitions())
    assert len({tuple(map(len, rounds)) for rounds in of_ranks}) == 1, "all ranks take the same rounds"
    for rounds in of_ranks:
        assert rounds[0][:2] == [Round(RANKS - 1, (RANKS - 1) * STATUS), Round(RANKS - 1, (RANKS - 1) * B // 2)]
        for number, batch in enumerate(rounds):
            later = batch[2 + (number > 0) :]  # after updates the totals are told apart from the status
            assert len(batch) <= most + (number > 0)
            for each in later:  # twelve attempts, or 47, of the few draws that are left
                assert each.messages == RANKS - 1 and each.nbytes <= (RANKS - 1) * -(-12 * (B // 4) // 8)


def test_independent_draws_cost_a_status_and_their_updates(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rounds in rounds_of(sharded_stores(RANKS), Prioritized(seed=6), monkeypatch, updates=False):
        assert rounds == [[Round(RANKS - 1, (RANKS - 1) * STATUS)]] * BATCHES
    # Ranks that share a shard send what they update to its leader, which tells all the new total.
    by_rank = rounds_of(sharded_stores(1), Prioritized(seed=6), monkeypatch, updates=True)
    for rank, (_, *rounds) in enumerate(by_rank):
        updated = 0 if rank == 0 else B // RANKS * UPDATE
        for status, totals in rounds:
            assert status == Round(RANKS - 1, (RANKS - 1) * STATUS + updated)
            assert totals.messages == (RANKS - 1 if rank == 0 else 0)
            assert totals.nbytes <= 16 * totals.messages


@pytest.mark.slow
def test_many_ranks_agree_in_few_messages(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 48
    assert ranks > DIRECT_RANKS
    stores = sharded_stores(4)
    for rounds in rounds_of(stores, Prioritized(seed=6), monkeypatch, updates=False, ranks=ranks):
        assert rounds == [[Round(7, 7 * STATUS), Round(5, 40 * STATUS)]] * BATCHES
    for _, *rounds in rounds_of(stores, Prioritized(seed=6), monkeypatch, updates=True, ranks=ranks):
        assert all(len(batch) <= 9 and all(each.messages <= ranks - 1 for each in batch) for batch in rounds)


def test_groups_beyond_those_that_send_directly_make_the_same_batches(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = Prioritized(seed=6, beta=0.4)

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        store, found = stores[rank.rank % len(stores)], []
        with gt.Replay(store, selection, B, group=rank, output="numpy", num_batches=BATCHES) as replay:
            for batch in replay:
                found.append(batch)
                replay.update_priorities(batch.keys, batch["number"] % 7)
        return found

    made = []
    for direct in (DIRECT_RANKS, 1):
        for module in (sharded_sampler, members, read_agreement):
            monkeypatch.setattr(module, "DIRECT_RANKS", direct)
        stores = sharded_stores(2)
        parts = run_ranks(4, body)
        made.append([join([each[step] for each in parts]) for step in range(BATCHES)])
    assert same(*made)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_group_of_one_makes_the_batches_of_two_by_one_native_call_each(
    sharded_stores: Callable[..., list[gt.Store]], prefetch: int
) -> None:
    selection = Prioritized(seed=6, beta=0.4)

    def body(rank: ThreadRankGroup) -> tuple[list[gt.Batch], dict[str, Any]]:
        found = []
        options = {"window": 4, "output": "numpy", "num_batches": 6, "prefetch": prefetch}
        with replay_of(stores[rank.rank], selection, B, group=rank, **options) as replay:
            for batch in replay:
                found.append(batch)
                # Rows that were drawn twice: the later draw's priority holds, whatever the order they are given in.
                replay.update_priorities(batch.keys[::-1], 1.0 + batch.draw[::-1] % 7)
            return found, replay.stats()

    made = []
    for ranks in (1, 2):
        stores = sharded_stores(ranks)
        parts = run_ranks(ranks, body)
        made.append([join([each[0][step] for each in parts]) for step in range(6)])
        assert parts[0][1]["path"] == "native"
        if ranks == 1:
            ((batches, stats),) = parts
            assert batches[0].keys.draw.tolist() == batches[0].draw.tolist() == list(range(B))
            assert batches[0].keys.shard.tolist() == [0] * B
            assert pickle.loads(pickle.dumps(batches[0])).draw.tolist() == list(range(B))
            assert stats["path"] == "native" and stats["local_bytes"] == stats["bytes"] and stats["local_share"] == 1
    assert all(same([one], [other]) for one, other in zip(*made, strict=True))
