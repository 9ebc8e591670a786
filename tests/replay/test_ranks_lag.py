"""`update_lag` of more than `prefetch`: updates take effect so many batches later, on one rank and on many alike."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from rank_batches import B, as_record, check, insert, join, same
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, EmptyStoreError, PeerLostError, WaitTimeoutError
from geartrain.ranks.carrier import INLINE_BYTES
from geartrain.ranks.rounds_in_flight import LateRounds, TransportRounds
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.distributed.lagged_rows import LaggedRows
from geartrain.replay.distributed.rank_reader import RankReader
from geartrain.replay.prefetch import Prefetcher, StillBuildingError
from geartrain.selection import Epochs, Fifo, Limits, Linear, Prioritized, TopK, Uniform
from geartrain.store.recorder import recorded_fields
from geartrain.tools.testing import ThreadRankGroup, run_ranks

BATCHES = 10


def given(batch: gt.Batch) -> Any:
    return batch["number"] % 13 + batch.step


def run(
    stores: list[gt.Store], ranks: int, selection: Any, prefetch: int, lag: int, *more: list[gt.Store], **options: Any
) -> list[Any]:
    """Global batches of a job whose consumers update the priorities of each; of a mixture with the shards of `more`."""

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        settings = {"window": 4, "output": "numpy", "num_batches": BATCHES, "prefetch": prefetch, "update_lag": lag}
        mine: Any = [shards[rank.rank % len(shards)] for shards in (stores, *more)]
        with replay_of(mine if more else mine[0], selection, B, group=rank, **settings, **options) as replay:
            made = []
            for batch in replay:
                check(batch)
                replay.update_priorities(batch.keys, given(batch))
                made.append(batch)
            return made

    results = run_ranks(ranks, body)
    return [join([result[step] for result in results]) for step in range(BATCHES)]


def by_hand(store: Any, selection: Any, lag: int, again: int = -1, lost: int = 0) -> list[Any]:
    """The same by one process that sets priorities at once, and holds them back itself.

    Before batch `again` the last rows of the store are `lost`; it is drawn again, with the updates of one batch more.
    """
    made, waiting = [], []
    with gt.Replay(store, selection, B, window=4, output="numpy", prefetch=0) as replay:
        for step in range(BATCHES):
            # Before batch s + 1 was asked for are those of batch s.
            while waiting and waiting[0].step + 1 + lag <= step + (step == again):
                batch = waiting.pop(0)
                replay.update_priorities(batch.keys, given(batch))
            if step == again:
                store.delete(store.keys()[-lost:])
            batch = replay.sample()
            waiting.append(batch)
            made.append(as_record(batch))
    return made


@pytest.mark.parametrize(("prefetch", "lag"), [(0, 1), (1, 2), (2, 3), (0, 4), (3, 5)])
def test_batches_are_those_of_one_process_that_holds_updates_back_on_any_number_of_ranks(
    sharded_stores: Callable[..., list[gt.Store]], prefetch: int, lag: int
) -> None:
    selection = Prioritized(seed=2, alpha=Linear(0.4, 1.0, 8), beta=0.4)
    (store,) = sharded_stores(1)
    expected = by_hand(store, selection, lag)
    assert len(np.unique(np.round(expected[-1]["probability"], 12))) > 5
    for shards, ranks in ((1, 1), (2, 2), (3, 3), (1, 2), (2, 4)):
        assert same(run(sharded_stores(shards), ranks, selection, prefetch, lag), expected), (shards, ranks)


def test_mixtures_hold_updates_back_too(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    strategies = [Prioritized(seed=2, alpha=Linear(0.4, 1.0, 8), beta=0.4), Prioritized(seed=5)]
    selection = gt.selection.Mixture([0.7, 0.3], strategies, seed=3)
    expected = by_hand([sharded_stores(1)[0], sharded_stores(1)[0]], selection, 2)
    for shards, ranks in ((1, 1), (2, 2), (2, 4)):
        made = run(sharded_stores(shards), ranks, selection, 1, 2, sharded_stores(shards))
        assert same(made, expected), (shards, ranks)


def test_a_replay_without_a_group_holds_updates_back_as_well(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    selection = Prioritized(seed=2, beta=0.4)
    for prefetch, lag in ((0, 0), (0, 2), (2, 2), (2, 4)):
        (store,) = sharded_stores(1)
        made = []
        options: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": BATCHES}
        with replay_of(store, selection, B, prefetch=prefetch, update_lag=lag, **options) as replay:
            for batch in replay:
                replay.update_priorities(batch.keys, given(batch))
                made.append(as_record(batch))
        (other,) = sharded_stores(1)
        assert same(made, by_hand(other, selection, lag)), (prefetch, lag)


def test_a_group_without_rounds_in_flight_makes_the_same_batches(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = Prioritized(seed=2, beta=0.4)
    expected = run(sharded_stores(3), 3, selection, 2, 3)
    monkeypatch.setattr(
        "geartrain.replay.distributed.lagged_rows.rounds_of", LateRounds
    )  # as of a group of the user's own, and of Gloo
    assert same(run(sharded_stores(3), 3, selection, 2, 3), expected)


@pytest.mark.parametrize("assignment", ["local_first", "ordered"])
def test_ranks_of_one_host_send_each_other_rows_that_only_a_shards_leader_reads(
    sharded_stores: Callable[..., list[gt.Store]], assignment: str
) -> None:
    stores, selection = sharded_stores(2), Prioritized(seed=2)
    group = ThreadRankGroup.make(4, one_host=True)

    def body(rank: ThreadRankGroup) -> tuple[list[gt.Batch], dict[str, Any]]:
        options: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": 4, "assignment": assignment}
        store = stores[rank.rank % 2]
        with replay_of(store, selection, B, group=rank, prefetch=1, update_lag=2, **options) as replay:
            return list(replay), replay.stats()

    results = run_ranks(group, body)
    for step in range(4):
        check_draws = join([batches[step] for batches, _ in results])
        assert len(check_draws["number"]) == B
    assert all(stats["local_bytes"] == stats["sent_bytes"] == 0 for _, stats in results[2:])  # who lead no shard
    assert sum(stats["received_bytes"] for _, stats in results) == sum(stats["sent_bytes"] for _, stats in results) > 0


def test_settle_applies_what_waits(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    for ranks in (1, 2):
        stores = sharded_stores(ranks)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> None:
            store = stores[rank.rank]
            with replay_of(store, Prioritized(seed=1), B, group=rank, prefetch=0, update_lag=5) as replay:
                batch = replay.sample()
                replay.update_priorities(batch.keys, np.full(len(batch.keys), 7.0))
                own = batch.keys[np.flatnonzero(np.broadcast_to(batch.keys.store == store.id, len(batch.keys)))]
                replay.sample()
                assert not (store.status(own)["priority"] == 7).all()
                replay.settle()
                assert (store.status(own)["priority"] == 7).all()

        run_ranks(ranks, body)


def test_rows_that_are_lost_are_drawn_again_by_ranks_of_which_some_are_a_batch_ahead(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = stores = sharded_stores(2)
    first.limiter.set(min_size_to_sample=1)  # which counts
    read = RankReader.read_heard

    def loses_and_reads(self: RankReader, step: int, heard: Any, *rest: Any) -> Any:
        if step == 3 and self.samplers[0].plan.store is last and len(last):
            last.delete(last.keys())
        return read(self, step, heard, *rest)

    monkeypatch.setattr(RankReader, "read_heard", loses_and_reads)

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        options: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": 8, "prefetch": 2, "update_lag": 3}
        with replay_of(stores[rank.rank], Uniform(seed=1), B, group=rank, **options) as replay:
            made = []
            for batch in replay:
                if rank.rank:
                    time.sleep(0.01)  # its thread has no leave to go on while the other's has
                replay.update_priorities(batch.keys, given(batch))
                made.append(batch)
            return made

    parts = run_ranks(2, body)
    admitted = first.limiter.state().samples
    made = [join([part[step] for part in parts]) for step in range(8)]
    with gt.Replay(first, Uniform(seed=1), B, window=4, output="numpy", num_batches=8, prefetch=0) as replay:
        expected = [as_record(batch) for batch in replay]  # of one process that never had the other rows
    assert same(made[3:], expected[3:])
    assert not same(made[:3], expected[:3])
    assert admitted == 8 * B // 2  # the batch that was drawn again counts once


def test_a_batch_that_is_drawn_again_has_the_same_updates_from_ranks_that_are_ahead_and_from_others(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection, again, prefetch, lag = Prioritized(seed=2, beta=0.4), 6, 2, 3
    stores = sharded_stores(4)  # of which the second is empty
    last, ahead = stores[3], threading.Event()
    lost = len(last)
    begin, read, finish = LaggedRows._begin, RankReader.read_heard, LaggedRows._finish
    is_ready = LaggedRows.ready

    def ready(self: LaggedRows, begun: Any) -> bool:  # the first rank finishes it when it is ahead, and no earlier
        if self.group.rank == 0 and begun.step == again and not ahead.is_set():
            time.sleep(0.002)
            return False
        return is_ready(self, begun)

    def begins(self: LaggedRows, step: int, *rest: Any) -> Any:
        begun = begin(self, step, *rest)
        if step == again + 1:
            ahead.set()
        return begun

    def loses_and_reads(self: RankReader, step: int, heard: Any, *rest: Any) -> Any:
        if step == again and self.samplers[0].plan.store is last:
            last.delete(last.keys())
        return read(self, step, heard, *rest)

    def finishes(self: LaggedRows, begun: Any) -> Any:
        assert begun.step != again or ahead.wait(patience(30))
        return finish(self, begun)

    monkeypatch.setattr(LaggedRows, "_begin", begins)
    monkeypatch.setattr(RankReader, "read_heard", loses_and_reads)
    monkeypatch.setattr(LaggedRows, "_finish", finishes)
    monkeypatch.setattr(LaggedRows, "ready", ready)

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        options: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": BATCHES}
        with replay_of(
            stores[rank.rank], selection, B, group=rank, prefetch=prefetch, update_lag=lag, **options
        ) as replay:
            made = []
            for batch in replay:
                replay.update_priorities(batch.keys, given(batch))
                made.append(batch)
                # Their threads have no leave for the batch after it, and the first rank's has.
                assert rank.rank == 0 or batch.step != again - prefetch or ahead.wait(patience(30))
            return made

    parts = run_ranks(4, body)
    made = [join([part[step] for part in parts]) for step in range(BATCHES)]
    (store,) = sharded_stores(1)
    expected = by_hand(store, selection, lag, again, lost)
    assert same(made, expected)
    (store,) = sharded_stores(1)
    assert not same(made, by_hand(store, selection, lag + 1, again, lost))


class WrongSizes(ThreadRankGroup):
    """Whose rank 1 sends messages of another size, of one kind, from its fourth batch on."""

    kind, posts = "", 0
    resized: Callable[[int], int] = staticmethod(lambda n: n)

    def post(self, parts: Any) -> int:
        kind = ("status", "outcome", "rows")[self.posts % 3]
        if self.rank == 1 and self.posts >= 6 and kind == self.kind:
            parts = {peer: np.resize(part, self.resized(part.size)) for peer, part in parts.items()}
        self.posts += 1
        return super().post(parts)


@pytest.mark.parametrize("kind", ["outcome", "rows"])
@pytest.mark.parametrize(
    "size", [lambda n: 1, lambda n: n - 1, lambda n: n + 1, lambda n: 0], ids=["one", "fewer", "more", "none"]
)
def test_a_message_of_another_size_is_an_error_that_names_its_rank(
    sharded_stores: Callable[..., list[gt.Store]], kind: str, size: Any
) -> None:
    stores, group = sharded_stores(2), WrongSizes.make(2)
    group[1].kind, group[1].resized = kind, size

    def body(rank: WrongSizes) -> str:
        options: dict[str, Any] = {"assignment": "ordered", "prefetch": 0, "update_lag": 1, "output": "numpy"}
        made = 0
        with replay_of(stores[rank.rank], Prioritized(seed=1, beta=0.4), B, group=rank, **options) as replay:
            with pytest.raises(PeerLostError) as raised:
                while made < 8:
                    replay.sample()
                    made += 1
        assert made == 3 or rank.rank == 1  # which has got its own part
        return str(raised.value)

    first, other = run_ranks(group, body)
    assert "rank 1 sent" in first and "were expected" in first
    assert first in other


def test_too_few_rows_are_the_same_error_on_all_ranks_which_go_on_later(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = sharded_stores(2)
    group = ThreadRankGroup.make(2)

    def body(rank: ThreadRankGroup) -> None:
        store = stores[rank.rank]
        options: dict[str, Any] = {"window": 4, "output": "numpy", "prefetch": 2, "update_lag": 3}
        with replay_of(store, Prioritized(seed=1), B, group=rank, **options) as replay:
            for _ in range(3):
                replay.update_priorities(replay.sample().keys, np.ones(B // 2))
            store.delete(store.keys())
            with pytest.raises(EmptyStoreError):
                for _ in range(4):
                    replay.sample()
            step = replay.step
            with pytest.raises(EmptyStoreError):
                replay.sample()
            assert replay.step == step
            insert(store, 0, 20)
            assert len(replay.sample()["number"]) == B // 2

    run_ranks(group, body)


class CountedGroup(ThreadRankGroup):
    """Counts messages and bytes of each round that its rank begins and does not wait for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.posts: list[tuple[int, int]] = []

    def post(self, parts: Any) -> int:
        self.posts.append((len(parts), sum(part.size for part in parts.values())))
        return super().post(parts)


@pytest.mark.parametrize(("beta", "outcome"), [(None, 1), (0.4, 16)])
def test_a_batch_takes_a_status_with_updates_an_outcome_and_the_rows(
    sharded_stores: Callable[..., list[gt.Store]], beta: float | None, outcome: int
) -> None:
    stores, size, batches = sharded_stores(3), 3, 4

    def body(rank: CountedGroup) -> int:
        options: dict[str, Any] = {"prefetch": 0, "update_lag": 1, "num_batches": batches, "output": "numpy"}
        given_to_others = 0
        with replay_of(stores[rank.rank], Prioritized(seed=1, beta=beta), B, group=rank, **options) as replay:
            for batch in replay:
                replay.update_priorities(batch.keys, np.ones(len(batch.keys)))
                if batch.step < batches - 1:
                    given_to_others += int((batch.keys.store != stores[rank.rank].id).sum())
            sent_bytes = replay.stats()["sent_bytes"]
        statuses, outcomes, rows = (rank.posts[at::3] for at in range(3))
        assert len(rank.posts) == 3 * (batches - 1)  # the first batch waits for its updates
        assert all(messages == size - 1 for messages, _ in [*statuses, *outcomes])
        assert sum(nbytes for _, nbytes in statuses) == 64 * (size - 1) * len(statuses) + 32 * given_to_others
        assert all(nbytes == outcome * (size - 1) for _, nbytes in outcomes)
        assert (sum(nbytes for _, nbytes in rows) > 0) <= (sent_bytes > 0)
        return given_to_others

    assert sum(run_ranks(CountedGroup.make(size), body)) > 0


def test_a_rank_that_is_lost_with_rounds_in_flight_is_an_error_on_all_others(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = sharded_stores(3)
    for at in range(3, 6):  # the status, the outcome, and the rows of the third batch

        def body(rank: ThreadRankGroup, at: int = at) -> str:
            options: dict[str, Any] = {"window": 4, "prefetch": 2, "update_lag": 3}
            with replay_of(stores[rank.rank], Uniform(seed=1), B, group=rank, **options) as replay:
                if rank.rank == 1:
                    rank.die_at = rank.exchanges + 2 + at  # the first batch takes two
                began_s = time.monotonic()
                with pytest.raises(PeerLostError, match="rank 1 aborted"):
                    for _ in range(20):
                        replay.sample()
                assert time.monotonic() - began_s < patience(2)
            return "told"

        assert run_ranks(3, body) == ["told"] * 3


def test_a_replay_with_rounds_in_flight_closes_within_a_second(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> float:
        replay = replay_of(stores[rank.rank], Uniform(seed=1), B, group=rank, prefetch=8, update_lag=9)
        replay.sample()
        began_s = time.monotonic()
        replay.close()
        return time.monotonic() - began_s

    assert max(run_ranks(2, body)) < patience(1)


@pytest.mark.parametrize(
    "selection",
    [
        Fifo(),
        TopK(),
        Uniform(seed=1, replacement=False),
        Uniform(seed=1, over="steps"),
        Epochs(seed=1),
        Uniform(seed=1, limits=Limits(min_length=2)),
    ],
    ids=["fifo", "top-k", "without replacement", "steps", "epochs", "limits"],
)
def test_draws_that_are_not_independent_refuse_the_lag_on_all_ranks(
    sharded_stores: Callable[..., list[gt.Store]], selection: Any
) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with pytest.raises(ArgumentError, match=r"update_lag of prefetch \+ 2 is for .* independent"):
            replay_of(stores[rank.rank], selection, B, group=rank, prefetch=1, update_lag=3)

    run_ranks(2, body)


def test_views_of_ranks_refuse_the_lag() -> None:
    fields = recorded_fields({"obs": gt.Field((4,), "float32"), "reward": gt.Field((), "float32")})
    stores = [gt.Store.create(fields, max_length=5, capacity=4) for _ in range(2)]

    def body(rank: ThreadRankGroup) -> None:
        with pytest.raises(ArgumentError, match="for batches in host memory"):
            replay_of(stores[rank.rank], Uniform(seed=1), B, group=rank, view=gt.Transitions(), update_lag=3)

    run_ranks(2, body)
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    "selection",
    [
        TopK(),
        Prioritized(seed=1, replacement=False),
        Prioritized(seed=1, beta=0.4, limits=Limits(min_length=2)),
        gt.selection.Mixture([0.7, 0.3], [TopK(), Prioritized(seed=5, beta=0.4)], seed=3),
    ],
    ids=["top-k", "without replacement", "limits", "mixture"],
)
@pytest.mark.parametrize("in_group", [False, True], ids=["no group", "group of one"])
@pytest.mark.parametrize(("prefetch", "lag"), [(0, 2), (1, 3)])
def test_one_rank_holds_updates_back_whatever_draws_the_rows(
    sharded_stores: Callable[..., list[gt.Store]], selection: Any, in_group: bool, prefetch: int, lag: int
) -> None:
    def stores() -> Any:
        made = [sharded_stores(1)[0] for _ in getattr(selection, "strategies", [None])]
        return made if len(made) > 1 else made[0]

    options: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": BATCHES, "prefetch": prefetch}
    group = ThreadRankGroup.make(1)[0] if in_group else None
    made = []
    with replay_of(stores(), selection, B, update_lag=lag, group=group, **options) as replay:
        for batch in replay:
            replay.update_priorities(batch.keys, given(batch))
            made.append(as_record(batch))
    assert same(made, by_hand(stores(), selection, lag))


def test_updates_between_an_iterations_begin_and_its_first_batch_take_effect_alike_on_any_number_of_ranks(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    runs = []
    for ranks in (1, 2):
        (store,) = sharded_stores(1)

        def body(rank: ThreadRankGroup, store: Any = store) -> list[gt.Batch]:
            options: dict[str, Any] = {"output": "numpy", "num_batches": 5, "prefetch": 1}
            with replay_of(store, Prioritized(seed=2), B, group=rank, window=4, **options) as replay:
                batches = iter(replay)
                keys = store.keys() if rank.rank == 0 else store.keys()[:0]
                replay.update_priorities(keys, np.arange(len(keys)) % 7 + 1.0)
                return list(batches)

        results = run_ranks(ranks, body)
        runs.append([join([result[step] for result in results]) for step in range(5)])
    assert same(runs[0], runs[1])


@pytest.mark.parametrize(("prefetch", "lag"), [(0, 3), (2, 3)])
def test_after_an_error_any_number_of_ranks_sees_all_updates(
    sharded_stores: Callable[..., list[gt.Store]], prefetch: int, lag: int
) -> None:
    runs = []
    for ranks in (1, 2):
        (store,) = sharded_stores(1)
        keys = store.keys()
        met = threading.Barrier(ranks)

        def body(
            rank: ThreadRankGroup, store: Any = store, keys: Any = keys, met: threading.Barrier = met
        ) -> list[gt.Batch]:
            settings: dict[str, Any] = {"window": 4, "output": "numpy", "prefetch": prefetch, "update_lag": lag}
            with replay_of(store, Prioritized(seed=2), B, group=rank, **settings) as replay:
                replay.sample()
                mine = keys if rank.rank == 0 else keys[:0]
                replay.update_priorities(mine, np.zeros(len(mine)))
                with pytest.raises(EmptyStoreError):
                    for _ in range(lag + 2):
                        replay.sample()
                replay.update_priorities(mine, np.arange(len(mine)) % 7 + 1.0)
                met.wait(patience(10))
                return [replay.sample(), replay.sample()]

        results = run_ranks(ranks, body)
        runs.append([join([result[step] for result in results]) for step in range(2)])
    assert same(runs[0], runs[1])


def test_stages_of_a_pipeline_refuse_the_lag(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        options: dict[str, Any] = {"inputs": ["obs"], "targets": ["action"], "prefetch": 0, "update_lag": 1}
        with pytest.raises(ArgumentError, match="stages of a pipeline"):
            place = MeshPosition(pp=rank.rank, pp_size=2)
            replay_of(stores[rank.rank], Uniform(seed=1), B, group=rank, mesh=place, **options)

    run_ranks(2, body)


def test_an_item_that_is_asked_for_while_another_waits_is_begun_first() -> None:
    begun: list[int] = []

    def start(number: int) -> int:
        begun.append(number)
        return number

    def ready(number: int) -> bool:
        time.sleep(0.001)
        return len(begun) > number  # only with the next one

    dropped: list[int] = []
    ahead = Prefetcher(start, "test", lambda number: number, overlaps=True, ready=ready, drop=dropped.append)
    ahead.ask(1)
    with pytest.raises(StillBuildingError):
        ahead.get(0.05)
    ahead.ask(2)
    assert ahead.get(patience(10)) == 1 and begun == [1, 2]
    assert ahead.stop(patience(10), finish=True) == []
    assert dropped == [2]  # which was finished whatever it waits for: others wait for this rank's part of it


def test_a_lag_below_prefetch_is_refused(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    (store,) = sharded_stores(1)
    with pytest.raises(ArgumentError, match="update_lag must be at least prefetch"):
        replay_of(store, Uniform(seed=0), B, prefetch=2, update_lag=1)
    for wrong in (-1, 1.5, "2", 2**40):
        with pytest.raises(ArgumentError, match="update_lag"):
            replay_of(store, Uniform(seed=0), B, prefetch=0, update_lag=wrong)


def test_ranks_that_name_the_lag_that_others_have_by_default_agree(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    (store,) = sharded_stores(1)

    def body(rank: ThreadRankGroup) -> int:
        lag = 2 if rank.rank else None
        with replay_of(store, Uniform(seed=1), B, group=rank, prefetch=2, update_lag=lag, output="numpy") as replay:
            return len(replay.sample())

    assert sum(run_ranks(2, body)) == B


def test_messages_that_ranks_do_not_take_in_time_are_an_error_and_not_passed_by() -> None:
    class NobodyTakes:
        timeout_s, rank, size = 0.05, 0, 2

        def __init__(self) -> None:
            self.native_rounds, self.taken, self.numbers = self, threading.Event(), itertools.count()

        def check_usable(self) -> None:
            """It always is."""

        def begin(self) -> int:
            return next(self.numbers)

        def send(self, number: int, messages: Any, timeout_s: float, *, beside: bool = False) -> None:
            assert beside
            self.taken.wait(patience(30))

    group: Any = NobodyTakes()
    rounds = TransportRounds(group)
    rounds.post({1: np.zeros(INLINE_BYTES + 1, np.uint8)})
    with pytest.raises(WaitTimeoutError, match=r"did not take this rank's messages within 0\.05 s"):
        rounds.flush()
    group.taken.set()
    group.timeout_s = patience(30)
    rounds.flush()
