"""Rows in flight, the clock, versions of rows, and the end of stale ones, as users meet them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of
from segments import Pipe, kill

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError, StoreFullError, WaitTimeoutError

Fork = Callable[[Callable[[], object]], int]
FIELDS = {"x": gt.Field((), "int64")}
TASKS = {"work": gt.Task({"y": gt.Field(("m",), "float32")}, keep_partial=True), "train": gt.Task(after="work")}


def new_store(name: str | None = None, **options: Any) -> gt.Store:
    given: dict[str, Any] = {"tasks": TASKS, "capacity": 64, "span_bytes": 1 << 16, "reserve": False, **options}
    if name is None:
        return gt.Store.create(FIELDS, **given)
    return gt.Store.open(name, FIELDS, create="missing", **given)


@pytest.fixture
def store() -> Iterator[gt.Store]:
    with new_store() as made:
        yield made
        assert made.closed or made.audit() == []


def insert(store: gt.Store, n: int, timeout_s: float = 0.0) -> gt.Keys:
    return store.insert({"x": np.arange(n)}, timeout_s=timeout_s)


def work(store: gt.Store, n: int, **options: Any) -> gt.Keys:
    claim = store.claim("work", n, output="numpy", **options)
    assert len(claim) == n
    claim.put(y=[np.ones(2, np.float32)] * n)
    return claim.keys


def in_flight(store: gt.Store) -> int:
    assert store.limiter.state().in_flight == store.stats()["in_flight"]
    return store.stats()["in_flight"]


# --- rows in flight -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_are_in_flight_until_the_loop_asks_for_the_next_batch(store: gt.Store, prefetch: int) -> None:
    insert(store, 8)
    work(store, 8)
    store.limiter.set(in_flight=8)
    with gt.Replay(store, gt.selection.Fifo(), batch_size=2, prefetch=prefetch, num_batches=3) as replay:
        for done, _ in enumerate(replay):
            assert in_flight(store) == 8 - 2 * done  # prefetched or not
            if done == 0:
                with pytest.raises(WaitTimeoutError, match=r"8 rows are in flight.* lets 8 be"):
                    insert(store, 1)
        assert in_flight(store) == 2  # the loop has asked for what came after the last batch
    assert in_flight(store) == 2


@pytest.mark.parametrize("dropped", [False, True])
def test_a_replay_that_is_closed_or_dropped_gives_all_of_its_rows_back(store: gt.Store, dropped: bool) -> None:
    insert(store, 12)
    work(store, 12)
    replay = gt.Replay(store, gt.selection.Fifo(), batch_size=2, prefetch=2)
    for _ in range(3):
        replay.sample()
    drawn = 12 - len(store)
    assert in_flight(store) == 12 - 4
    if dropped:
        del replay
        gc.collect()
    else:
        replay.close()
    until_s = time.monotonic() + patience(5)
    while in_flight(store) != 12 - drawn and time.monotonic() < until_s:
        time.sleep(0.01)
    assert in_flight(store) == len(store)


def test_a_batch_that_nobody_gets_gives_its_rows_back(store: gt.Store) -> None:
    insert(store, 4)
    work(store, 4)

    def refuse(batch: gt.Batch) -> None:
        raise RuntimeError("refused")

    with replay_of(store, gt.selection.Fifo(), batch_size=2, prefetch=0, transform=refuse) as replay:
        with pytest.raises(RuntimeError, match="refused"):
            replay.sample()
        assert in_flight(store) == len(store) == 2


def test_a_forked_child_gives_back_only_what_it_has_drawn_itself(store: gt.Store, fork: Fork) -> None:
    insert(store, 6)
    work(store, 6)
    with gt.Replay(store, gt.selection.Fifo(), batch_size=2, prefetch=0) as replay:
        replay.sample()

        def child() -> None:
            replay.sample()
            assert in_flight(store) == 6
            replay.close()
            assert in_flight(store) == 4
            os._exit(0)

        assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
        assert in_flight(store) == 4


GIVES: dict[str, Callable[[gt.Store], object]] = {
    "a row is dropped": lambda store: store.claim("work").drop(),
    "rows are deleted": lambda store: store.delete(store.keys()),
    "the limit is raised": lambda store: store.limiter.set(in_flight=5),
    "the limit is taken off": lambda store: store.limiter.set(in_flight=None),
    "the limiter is turned off": lambda store: store.limiter.off(),
    "rows become stale": lambda store: (store.limiter.set(max_stale=0), store.advance(1)),
}


@pytest.mark.parametrize("give", GIVES.values(), ids=list(GIVES))
def test_a_loader_that_waits_is_woken(store: gt.Store, give: Callable[[gt.Store], object]) -> None:
    store.limiter.set(in_flight=4)
    insert(store, 4)
    work(store, 2)
    found: list[Any] = []

    def load() -> None:
        found.append(insert(store, 1, timeout_s=patience(30)))

    loader = threading.Thread(target=load)
    loader.start()
    time.sleep(0.05)
    assert not found
    give(store)
    loader.join(patience(20))
    assert len(found) == 1


def test_rows_of_one_insert_go_in_as_far_as_they_may(store: gt.Store) -> None:
    """A batch needs the first of them before it can make places for the others."""
    store.limiter.set(in_flight=4)
    insert(store, 4)
    store.claim("work").drop()
    with gt.Replay(store, gt.selection.Fifo(), batch_size=4, prefetch=0, output="numpy") as replay:
        keys: list[Any] = []
        loader = threading.Thread(target=lambda: keys.append(insert(store, 3, timeout_s=patience(30))))
        loader.start()
        until_s = time.monotonic() + patience(20)
        while in_flight(store) < 4 and time.monotonic() < until_s:
            time.sleep(0.001)
        work(store, 4)
        assert len(replay.sample()) == 4 and loader.is_alive()
    loader.join(patience(20))
    assert len(keys[0]) == 3 and in_flight(store) == 2


def test_what_can_never_be_is_refused_at_once(store: gt.Store) -> None:
    store.limiter.set(in_flight=40)
    with pytest.raises(StoreFullError, match=r"41 rows are inserted together.*lets 40 rows be in flight"):
        insert(store, 41, timeout_s=60)  # more than go in together anyway, which are 32
    assert len(insert(store, 40)) == 40
    with pytest.raises(ArgumentError, match=r"lets 40 rows be in flight, and a batch that needs 41 would never"):
        gt.Replay(store, gt.selection.Fifo(), batch_size=41)
    with pytest.raises(ArgumentError, match="a batch that needs 50"):
        replay_of(store, gt.selection.Fifo(), batch_size=4, min_rows=50)
    store.limiter.set(in_flight=None)
    with pytest.raises(
        ArgumentError, match=f"batch_size={store.capacity + 1} .* at most {store.capacity} rows.*larger capacity="
    ):
        gt.Replay(store, gt.selection.Fifo(), batch_size=store.capacity + 1)


def test_a_limit_that_is_lowered_below_a_batch_ends_the_wait_for_it(store: gt.Store) -> None:
    with replay_of(store, gt.selection.Fifo(), 4, prefetch=0, timeout_s=patience(5)) as replay, store.expect_writers():
        store.limiter.set(in_flight=2)
        insert(store, 2)
        with pytest.raises(NotEnoughRowsError, match=r"needs 4 .*lets 2 rows be in flight: raise limiter"):
            replay.sample()
        with pytest.raises(WaitTimeoutError, match=r"2 rows are in flight, and the limiter lets 2 be"):
            insert(store, 1, timeout_s=0.01)


def test_a_batch_without_rows_tells_which_task_lags(store: gt.Store) -> None:
    with gt.Replay(store, gt.selection.Fifo(), 4, prefetch=0) as replay:
        with pytest.raises(NotEnoughRowsError, match=r"no row is under way; insert some.*expect_writers") as raised:
            replay.sample()
        assert "recorder" not in str(raised.value)


@pytest.mark.parametrize("limits", [{"in_flight": 0}, {"in_flight": 1.5}, {"max_stale": -1}, {"max_stale": "no"}])
def test_limits_out_of_range_change_nothing(store: gt.Store, limits: Any) -> None:
    with pytest.raises(ArgumentError, match=next(iter(limits))):
        store.limiter.set(samples_per_insert=2, **limits)
    assert str(store.limiter.state()) == "no limits"


def test_the_limits_are_set_apart_from_each_other_and_from_the_ratio(store: gt.Store) -> None:
    limiter = store.limiter
    limiter.set(in_flight=9)
    limiter.set(max_stale=3)
    assert not limiter.state().enabled
    assert str(limiter.state()) == "0 rows in flight of at most 9; rows at most 3 versions old"
    limiter.set(samples_per_insert=2)
    limiter.set(max_stale=None)
    state = limiter.state()
    assert (state.enabled, state.most_in_flight, state.max_stale, state.samples_per_insert) == (True, 9, None, 2)
    limiter.off()
    assert (limiter.state().enabled, limiter.state().most_in_flight) == (False, None)


@pytest.mark.parametrize("axes", [False, True])
def test_stores_without_tasks_take_neither_limits_nor_a_clock(axes: bool) -> None:
    more = {"span_bytes": 1 << 16} if axes else {"max_length": 1}
    field = gt.Field(("m",), "int64") if axes else gt.Field((), "int64")
    with gt.Store.create({"x": field}, capacity=8, **more) as store:  # type: ignore[arg-type]
        for limits in ({"in_flight": 4}, {"max_stale": 4}):
            with pytest.raises(ArgumentError, match="this store has none"):
                store.limiter.set(**limits)  # type: ignore[arg-type]
        for use in (lambda: store.clock, lambda: store.advance(1)):
            with pytest.raises(ArgumentError, match="has no tasks"):
                use()
        assert "in_flight" not in store.stats() and store.limiter.state().in_flight is None


@pytest.mark.parametrize("dies", ["loader", "worker", "learner", "learner that prefetched"])
def test_the_figure_comes_back_to_the_truth_after_a_death(name: str, fork: Fork, dies: str) -> None:
    told = Pipe()
    with new_store(name) as store:
        store.limiter.set(in_flight=8)
        insert(store, 6)
        work(store, 4)

        def child() -> None:
            with new_store(name) as mine:
                if dies == "loader":  # two rows go in, and it waits for the others
                    threading.Timer(0.1, told.say).start()
                    insert(mine, 4, timeout_s=60)
                elif dies == "worker":
                    claim = mine.claim("work", 2)
                    next(iter(claim)).append(y=[1.0])
                else:
                    ahead = 2 * ("prefetched" in dies)
                    replay = gt.Replay(mine, gt.selection.Fifo(), batch_size=2, prefetch=ahead)
                    replay.sample()
                    while len(mine) > (0 if ahead else 2):
                        replay.sample()
                told.say()
                time.sleep(60)

        pid = fork(child)
        told.hear()
        there = 8 if dies == "loader" else 6
        assert in_flight(store) == there - 2 * (dies == "learner that prefetched" and in_flight(store) == 4)
        kill(pid)
        store.reap()
        left = there - 4 + len(store)
        assert in_flight(store) == left and (len(store) == 4 or "learner" in dies)
        assert len(insert(store, 8 - left)) == 8 - left
        with pytest.raises(WaitTimeoutError):
            insert(store, 1)
        assert store.audit() == []


# --- the clock and versions -----------------------------------------------------------------------------------------


def test_the_clock_only_grows_but_for_a_loaded_state(store: gt.Store) -> None:
    assert (store.clock, store.advance(3), store.advance(2), store.clock) == (0, 3, 3, 3)
    assert store.stats()["clock"] == 3
    with gt.Replay(store, gt.selection.Fifo(), batch_size=2) as replay:
        state = replay.state_dict()
        store.advance(8)
        replay.load_state_dict(state)
        assert store.clock == 3
        with pytest.raises(ArgumentError, match="clock"):
            replay.load_state_dict({**state, "clock": -1})
    for bad in (-1, 2**63, 1.5, True):
        with pytest.raises(ArgumentError, match="version"):
            store.advance(bad)  # type: ignore[arg-type]


def test_a_publisher_advances_the_clock(store: gt.Store, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with gt.weights.Publisher(name, clock=store) as publisher:
        publisher.publish(4, {"w": np.ones(2, np.float32)})
        assert store.clock == 4
        with gt.weights.Reader(name) as reader:
            insert(store, 1)
            assert work(store, 1, version=reader) is not None
    with gt.Replay(store, gt.selection.Fifo(), batch_size=1, output="numpy") as replay:
        assert replay.sample().version.tolist() == [4]
    store.advance(9)
    with gt.weights.Publisher(name, clock=store) as restarted:
        restarted.publish(5, {"w": np.ones(2, np.float32)})
        assert store.clock == 9
        assert "version 5 " in caplog.text and "from version 10 on" in caplog.text
        caplog.clear()
        restarted.publish(store.clock + 1, {"w": np.ones(2, np.float32)})
        assert store.clock == 10 and not caplog.records
    for clock in (3, object()):
        with pytest.raises(ArgumentError, match="clock= is a store"):
            gt.weights.Publisher(name, clock=clock)  # type: ignore[arg-type]
    with (
        gt.Store.create(FIELDS, max_length=1, capacity=4) as plain,
        pytest.raises(ArgumentError, match="has no tasks"),
    ):
        gt.weights.Publisher(name, clock=plain)


SAYS: dict[str, tuple[Any, int]] = {
    "a number": (7, 7),
    "an object": (SimpleNamespace(version=8), 8),
    "a function": (lambda: 9, 9),
    "nobody": (None, 5),
    "an object that has none yet": (SimpleNamespace(version=None), 5),
}


@pytest.mark.parametrize("how", ["claim", "claims", "claim_async"])
@pytest.mark.parametrize(("version", "said"), SAYS.values(), ids=list(SAYS))
def test_a_row_has_the_version_that_the_worker_says_or_else_the_clock(
    store: gt.Store, how: str, version: Any, said: int
) -> None:
    store.advance(5)
    if how == "claim_async":

        async def later() -> gt.Claim:
            asked = asyncio.create_task(store.claim_async("work", version=version))
            await asyncio.sleep(0.02)
            insert(store, 1)
            return await asked

        claim = asyncio.run(later())
    else:
        insert(store, 1)
        loop = store.claims("work", version=version)
        claim = next(loop) if how == "claims" else store.claim("work", version=version)
    claim.put(y=[np.ones(1, np.float32)])
    with gt.Replay(store, gt.selection.Fifo(), batch_size=1, output="numpy") as replay:
        assert replay.sample().version.tolist() == [said]


def test_a_version_is_asked_at_each_claim_and_one_that_is_none_releases_the_rows(store: gt.Store) -> None:
    insert(store, 2)
    said = iter([3, "four"])
    with pytest.raises(ArgumentError, match="version"):
        for claim in store.claims("work", version=lambda: next(said)):  # type: ignore[return-value, arg-type]
            claim.put(y=[np.ones(1, np.float32)])
    assert store.task_stats()["work"]["claimed"] == 0 and len(store) == 1
    for bad in ("x", -1, True, 2.0):
        with pytest.raises(ArgumentError, match="version"):
            store.claim("work", version=bad)  # type: ignore[arg-type]


def test_a_resumed_answer_keeps_the_oldest_version_and_min_version_limits_draws_by_it(store: gt.Store) -> None:
    keys = insert(store, 2)
    resumed = store.claim("work", version=2)
    next(iter(resumed)).append(y=[1.0])
    resumed.release()
    with store.claim("work", version=6) as claim:
        for row in claim:
            row.append(y=[2.0])
            row.put()
    work(store, 1, version=4)
    assert store.status(keys)["version"].tolist() == [2, 4]
    fifo = gt.selection.Fifo(limits=gt.selection.Limits(min_version=3))
    with gt.Replay(store, fifo, batch_size=1, output="numpy") as replay:
        assert replay.sample().version.tolist() == [4]


# --- stale rows -----------------------------------------------------------------------------------------------------


def test_rows_that_nobody_holds_are_ended_when_they_are_too_old_and_claims_are_told(store: gt.Store) -> None:
    store.limiter.set(max_stale=2)
    insert(store, 4)
    work(store, 1)
    claim = store.claim("work", 2)
    assert claim.stale.tolist() == [False, False]
    store.advance(2)
    assert len(store) == 1 and not claim.stale.any()
    store.advance(3)
    assert len(store) == 0 and store.stats()["stale"] == 1
    assert claim.stale.tolist() == [True, True]
    first, second = claim
    assert first.stale
    first.put(y=[1.0])
    assert (store.stats()["stale"], len(store), claim.stale.tolist()) == (2, 0, [False, True])
    second.append(y=[1.0])
    claim.release()
    assert store.stats()["stale"] == 3
    assert store.task_stats()["work"] == {
        "due": 1, "claimed": 0, "remaining": 1, "done": 2, "released": 1, "deaths": 0, "set_back": 0,
    }  # fmt: skip
    assert store.stats()["in_flight"] == 1
    store.finish()
    work(store, 1)
    with gt.Replay(store, gt.selection.Fifo(), batch_size=1) as replay:
        assert sum(1 for _ in replay) == 1  # the loop ends: no ended row is waited for


def test_a_batch_that_was_drawn_is_not_ended(store: gt.Store) -> None:
    store.limiter.set(max_stale=0)
    insert(store, 2)
    work(store, 2)
    with gt.Replay(store, gt.selection.Fifo(), batch_size=1, prefetch=0) as replay:
        batch = replay.sample()
        store.advance(1)
        assert batch["y"].tolist() == [1.0, 1.0]
        assert (len(store), in_flight(store), store.stats()["stale"]) == (0, 1, 1)
        with pytest.raises(NotEnoughRowsError):
            replay.sample()


def test_kept_rows_are_never_too_old_and_in_flight_only_until_their_batch_is_finished(store: gt.Store) -> None:
    store.limiter.set(in_flight=4, max_stale=0)
    insert(store, 4)
    work(store, 4)
    with replay_of(store, gt.selection.Fifo(), batch_size=2, prefetch=0, keep="saved", output="numpy") as replay:
        first = replay.sample()
        assert in_flight(store) == 4
        replay.sample()
        store.advance(1)
        assert (in_flight(store), store.stats()["kept"], store.stats()["stale"]) == (2, 4, 0)
    assert in_flight(store) == 0
    insert(store, 3)
    with replay_of(store, gt.selection.Fifo(), batch_size=2, prefetch=0, keep="saved", output="numpy") as replay:
        assert replay.sample()["x"].tolist() == first["x"].tolist()  # drawn again, as after a crash
        assert in_flight(store) == 3
