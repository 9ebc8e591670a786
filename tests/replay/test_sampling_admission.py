"""What rate limiters have admitted for a batch that nobody gets is given back: others may draw as much."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from rank_batches import B as GLOBAL
from rank_batches import insert
from recorded_shards import Episodes
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import EmptyStoreError, NotEnoughRowsError, StoreClosedError, WaitTimeoutError
from geartrain.selection import Epochs, Mixture, Prioritized, Uniform
from geartrain.tools.testing import SimulatedDevice, ThreadRankGroup, run_ranks

ROWS, B = 16, 8
FIELDS = {"x": gt.Field((), "int64")}


def limit(store: gt.Store, batches: int) -> None:
    """Lets so many batches be drawn, and no more."""
    store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=batches * B + 1, afresh=True)


def admitted(store: gt.Store) -> int:
    return store.limiter.state().samples


@pytest.fixture
def stores(store_name: Callable[[], str]) -> Iterator[list[gt.Store]]:
    """Two stores, of each of which four batches may be drawn."""
    with ExitStack() as opened:
        made = []
        for _ in range(2):
            store = opened.enter_context(gt.Store.create(store_name(), FIELDS, max_length=1, capacity=4 * ROWS))
            store.insert({"x": np.zeros((ROWS, 1), np.int64)})
            limit(store, 4)
            made.append(store)
        yield made


def draws(store: gt.Store, batches: int) -> None:
    """Another sampler of the store, that gets so many batches."""
    with replay_of(store, Uniform(seed=7), B, output="numpy", prefetch=0, timeout_s=0.05) as other:
        for _ in range(batches):
            other.sample()
        with pytest.raises(WaitTimeoutError):
            other.sample()


def mixed(stores: Sequence[gt.Store], **options: Any) -> gt.Replay:
    selection = Mixture([0.5, 0.5], [Uniform(seed=1), Uniform(seed=2)])
    return replay_of(stores, selection, 2 * B, **{"output": "numpy", "threads": 1, "prefetch": 0, **options})


@pytest.mark.parametrize("path", ["host", "gather", "staged"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_mixture_gives_back_what_its_other_stores_have_admitted(
    stores: list[gt.Store], path: Any, prefetch: int
) -> None:
    first, last = stores
    device = None if path == "host" else gt.DeviceOptions(SimulatedDevice(), path=path)
    last.delete(last.keys())
    last.limiter.off()  # which would wait for rows
    with mixed(stores, prefetch=prefetch, device=device, output="torch" if device else "numpy") as replay:
        for _ in range(6):  # more often than the limiter would admit
            with pytest.raises((EmptyStoreError, NotEnoughRowsError)):
                replay.sample()
            assert (admitted(first), admitted(last)) == (0, 0)
        draws(first, 4)


def test_a_wait_for_another_stores_limiter_that_ends_in_vain_gives_back(stores: list[gt.Store]) -> None:
    first, last = stores
    last.limiter.set(min_size_to_sample=4 * ROWS)
    with mixed(stores, timeout_s=0.02) as replay:
        for _ in range(6):
            with pytest.raises(WaitTimeoutError):
                replay.sample()
            assert admitted(first) == 0
    draws(first, 4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_close_beside_a_wait_for_another_stores_limiter_gives_back(stores: list[gt.Store], prefetch: int) -> None:
    first, last = stores
    last.limiter.set(min_size_to_sample=4 * ROWS)
    replay = mixed(stores, prefetch=prefetch)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            replay.sample()
        except StoreClosedError as error:
            ended.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    until_s = time.monotonic() + patience(20)
    while admitted(first) == 0:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    replay.close()
    waits.join()
    assert len(ended) == 1 and admitted(first) == 0
    draws(first, 4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_transform_that_raises_gives_back(stores: list[gt.Store], prefetch: int) -> None:
    store = stores[0]

    def refuses(batch: gt.Batch) -> None:
        raise KeyError(batch.step)

    with replay_of(store, Uniform(seed=1), B, transform=refuses, prefetch=prefetch, timeout_s=5) as replay:
        for _ in range(6):
            with pytest.raises(KeyError):
                replay.sample()
    assert admitted(store) == 0
    draws(store, 4)


def refused_rewards(achieved: Any, desired: Any) -> Any:
    raise KeyError(len(achieved))


GOALS = gt.Transitions(hindsight=gt.Hindsight(k=3, reward=refused_rewards))


@pytest.mark.parametrize("selection", [Uniform(seed=1), Prioritized(seed=1, beta=0.5)], ids=["draws", "weighed"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_reward_that_raises_gives_back(selection: Any, prefetch: int) -> None:
    with Episodes(60, least=4).stores(1) as (store,):
        limit(store, 4)
        with replay_of(store, selection, B, view=GOALS, prefetch=prefetch, output="numpy", timeout_s=5) as replay:
            for _ in range(6):  # more often than the limiter would admit
                with pytest.raises(KeyError):
                    replay.sample()
        assert admitted(store) == 0
        draws(store, 4)


def test_a_reward_that_raises_gives_back_what_all_stores_of_a_mixture_have_admitted() -> None:
    with Episodes(60, least=4).stores(1) as (first,), Episodes(60, least=4).stores(1) as (last,):
        for store in (first, last):
            limit(store, 4)
        with mixed([first, last], view=GOALS, timeout_s=5) as replay:
            for _ in range(6):
                with pytest.raises(KeyError):
                    replay.sample()
        assert (admitted(first), admitted(last)) == (0, 0)
        draws(first, 4)


class Weighed(Prioritized):
    """With importance weights of its own, which fail."""

    def importance_weights(self, *_: Any, **__: Any) -> Any:
        raise ArithmeticError("no weights")


def test_importance_weights_that_fail_give_back(stores: list[gt.Store]) -> None:
    store = stores[0]
    with replay_of(store, Weighed(seed=1, beta=0.5), B, prefetch=0, timeout_s=5) as replay:
        for _ in range(6):
            with pytest.raises(ArithmeticError):
                replay.sample()
    assert admitted(store) == 0


@pytest.mark.parametrize("selection", [Uniform(seed=1), Epochs(seed=1)], ids=["draws", "passes"])
@pytest.mark.parametrize("leave", ["close", "settle", "iterate"])
def test_batches_that_were_prepared_and_are_dropped_give_back(
    stores: list[gt.Store], selection: Any, leave: str
) -> None:
    store = stores[0]
    with gt.Replay(store, selection, B, output="numpy", prefetch=2) as replay:
        replay.sample()
        until_s = time.monotonic() + patience(20)
        while admitted(store) < 3 * B:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        if leave == "settle":
            replay.settle()
        elif leave == "iterate":
            iter(replay)
        else:
            replay.close()
        assert admitted(store) == B
    draws(store, 3)


@pytest.mark.parametrize("path", ["gather", "staged"])
def test_batches_on_a_device_that_are_dropped_give_back(stores: list[gt.Store], path: Any) -> None:
    store = stores[0]
    options = gt.DeviceOptions(SimulatedDevice(), path=path)
    with replay_of(store, Uniform(seed=1), B, prefetch=2, device=options, threads=1) as replay:
        replay.sample()
        replay.settle()
        assert admitted(store) == B
        replay.sample()
    assert admitted(store) == 2 * B


def test_a_batch_of_the_next_pass_that_is_put_back_gives_back(stores: list[gt.Store]) -> None:
    store = stores[0]
    with gt.Replay(store, Epochs(seed=1), B, output="numpy", prefetch=0) as replay:
        batches = iter(replay)
        next(batches)
        store.delete(store.keys())
        store.insert({"x": np.zeros((ROWS, 1), np.int64)})
        before = admitted(store)
        assert list(batches) == []  # nothing was left of it
        assert admitted(store) == before == B


def test_a_store_that_is_closed_does_not_hide_why_a_batch_failed(stores: list[gt.Store]) -> None:
    first, last = stores
    asked = threading.Event()

    def refuses(batch: gt.Batch) -> None:
        asked.set()
        first.close()
        raise KeyError(batch.step)

    with replay_of(first, Uniform(seed=1), B, transform=refuses, output="numpy", prefetch=0) as replay:
        with pytest.raises(KeyError):
            replay.sample()
    assert asked.is_set() and admitted(last) == 0


# --- over ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "lag"),
    [(Uniform(seed=1), 0), (Uniform(seed=1), 2), (Epochs(seed=1), 0)],
    ids=["draws", "draws, lagged", "passes"],
)
def test_ranks_give_back_where_one_has_too_few_rows_and_go_on_later(
    sharded_stores: Callable[..., list[gt.Store]], selection: Any, lag: int
) -> None:
    stores = sharded_stores(2)
    both = threading.Barrier(2)
    for store in stores:
        store.limiter.set(min_size_to_sample=1)  # which counts

    def body(rank: ThreadRankGroup) -> None:
        store = stores[rank.rank]
        options: dict[str, Any] = {"output": "numpy", "prefetch": 0, "update_lag": lag or None}
        with replay_of(store, selection, GLOBAL, group=rank, min_rows=30, **options) as replay:
            replay.sample()
            replay.sample()
            assert admitted(store) == GLOBAL
            store.delete(store.keys()[1:])  # the limiter goes on to admit
            for _ in range(3):
                with pytest.raises(NotEnoughRowsError):
                    replay.sample()
                assert admitted(store) == GLOBAL
            both.wait()
            insert(store, 0, 40)
            replay.sample()
            left = 1 if isinstance(selection, Epochs) else GLOBAL // 2  # of the pass there are a row or two
            assert admitted(store) == GLOBAL + left

    run_ranks(2, body)


@pytest.mark.parametrize("replacement", [True, False], ids=["one native call", "in steps"])
def test_a_reward_that_raises_on_one_rank_gives_back_on_all(replacement: bool) -> None:
    def body(rank: ThreadRankGroup) -> None:
        store, got = stores[rank.rank], 0

        def reward(achieved: Any, desired: Any) -> Any:
            if rank.rank == 1 and got == 3:
                raise KeyError(got)
            return np.zeros(len(achieved))

        selection = Uniform(seed=1, replacement=replacement)
        view = gt.Transitions(hindsight=gt.Hindsight(k=3, reward=reward))
        with gt.Replay(store, selection, 24, group=rank, view=view, prefetch=0, output="numpy") as replay:
            with pytest.raises(KeyError if rank.rank == 1 else gt.errors.PeerLostError):
                while got < 20:
                    replay.sample()
                    got += 1
        # Rank 0 has its part of the batch whose other part failed, or not, as its messages come.
        assert got == 3 if rank.rank == 1 else got in (3, 4)
        assert admitted(store) == got * 12

    with Episodes(60, least=4).stores(2) as stores:
        for store in stores:
            store.limiter.set(min_size_to_sample=1)  # which counts
        run_ranks(2, body)


def test_ranks_whose_wait_for_a_limiter_ends_in_vain_give_back_what_the_others_have_admitted(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    shards = [sharded_stores(2), sharded_stores(2)]
    for store in [*shards[0], *shards[1]]:
        store.limiter.set(min_size_to_sample=1)
    shards[1][0].limiter.set(min_size_to_sample=shards[1][0].capacity)
    selection = Mixture([0.5, 0.5], [Uniform(seed=1), Uniform(seed=2)])

    def body(rank: ThreadRankGroup) -> None:
        mine = [each[rank.rank] for each in shards]
        with replay_of(mine, selection, GLOBAL, group=rank, output="numpy", prefetch=0, timeout_s=0.1) as replay:
            with pytest.raises(gt.errors.GeartrainError):
                replay.sample()
        assert [admitted(each) for each in mine] == [0, 0]

    run_ranks(2, body)


@pytest.mark.parametrize("lag", [0, 3], ids=["at once", "lagged"])
def test_batches_of_ranks_that_are_dropped_give_back(sharded_stores: Callable[..., list[gt.Store]], lag: int) -> None:
    stores = sharded_stores(2)
    for store in stores:
        store.limiter.set(min_size_to_sample=1)

    def body(rank: ThreadRankGroup) -> int:
        store = stores[rank.rank]
        options: dict[str, Any] = {"output": "numpy", "prefetch": 2, "update_lag": lag or None}
        with replay_of(store, Uniform(seed=1), GLOBAL, group=rank, **options) as replay:
            replay.sample()
            replay.settle()
            first = admitted(store)
            replay.sample()
        assert admitted(store) == 2 * first
        return first

    assert run_ranks(2, body) == [GLOBAL // 2] * 2


def test_a_lagged_batch_whose_ranks_are_lost_gives_back(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)
    for store in stores:
        store.limiter.set(min_size_to_sample=1)

    def body(rank: ThreadRankGroup) -> None:
        store, got = stores[rank.rank], 0
        with replay_of(store, Uniform(seed=1), GLOBAL, group=rank, prefetch=0, update_lag=1) as replay:
            if rank.rank == 1:
                rank.die_at = rank.exchanges + 2 + 4  # within the third batch
            with pytest.raises(gt.errors.PeerLostError):
                while got < 20:
                    replay.sample()
                    got += 1
        assert admitted(store) == got * GLOBAL // 2

    run_ranks(2, body)
