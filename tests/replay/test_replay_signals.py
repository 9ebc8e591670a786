"""A replay under signals: a wait that is interrupted leaves nothing behind, and a handler may close what is in use."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of
from segments import Segment

import geartrain as gt
from geartrain.errors import NotEnoughRowsError, StoreClosedError, WaitTimeoutError
from geartrain.replay.prefetch import Prefetcher
from geartrain.selection import Prioritized, Uniform

FIELDS = {"x": gt.Field((), "int64", per_row=True)}
SIGNAL = signal.SIGVTALRM


@pytest.fixture
def handled() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGVTALRM does."""
    before = signal.getsignal(SIGNAL)
    yield lambda handler: signal.signal(SIGNAL, lambda *_: handler()) and None
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(SIGNAL, before)


def insert(store: gt.Store, n: int) -> None:
    store.insert({"x": np.arange(n)})


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("geartrain-prefetch")]


def when_it_waits(replay: gt.Replay, then: Callable[[], object]) -> threading.Thread:
    """Runs `then` on a thread, once the replay's `sample` waits for rows."""
    waits = threading.Event()
    sampler = replay._builder.samplers[0]
    looks = sampler.stopping

    def look() -> bool:
        waits.set()
        return looks()

    sampler.stopping = look

    def run() -> None:
        assert waits.wait(patience(20))
        then()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def waiting(store: gt.Store, prefetch: int, **options: object) -> gt.Replay:
    return replay_of(store, Uniform(seed=0), 4, prefetch=prefetch, min_rows=4, output="numpy", **options)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_a_wait_that_timed_out_the_next_call_has_the_batch(name, prefetch):
    with gt.Store.create(name, FIELDS, capacity=8) as store, gt.Store.open(name):
        with waiting(store, prefetch, timeout_s=0.05) as replay:
            for _ in range(3):
                with pytest.raises(WaitTimeoutError, match="0 selectable rows of 4 wanted"):
                    replay.sample()
            assert replay.step == 0
            insert(store, 4)
            assert len(replay.sample()) == 4
            assert replay.step == 1
    assert not prefetching()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ctrl_c_in_a_wait_leaves_no_thread_and_the_replay_goes_on(name, prefetch):
    with gt.Store.create(name, FIELDS, capacity=8) as store, gt.Store.open(name):
        with waiting(store, prefetch) as replay:
            thread = when_it_waits(replay, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                replay.sample()
            thread.join()
            until_s = time.monotonic() + patience(5)
            while prefetching() and time.monotonic() < until_s:
                time.sleep(0.01)
            assert not prefetching()
            insert(store, 4)
            assert len(replay.sample()) == 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_handler_raises_ends_a_wait_and_the_replay_goes_on(name, prefetch, handled):
    def refuse() -> None:
        raise LookupError("by the handler")

    handled(refuse)
    with gt.Store.create(name, FIELDS, capacity=8) as store, gt.Store.open(name):
        with waiting(store, prefetch) as replay:
            thread = when_it_waits(replay, lambda: os.kill(os.getpid(), SIGNAL))
            with pytest.raises(LookupError):
                replay.sample()
            thread.join()
            insert(store, 4)
            assert len(replay.sample()) == 4
    assert not prefetching()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_handler_may_close_the_replay_that_its_own_thread_waits_for(name, prefetch, handled):
    with gt.Store.create(name, FIELDS, capacity=8) as store, gt.Store.open(name):
        replay = waiting(store, prefetch)
        handled(replay.close)
        thread = when_it_waits(replay, lambda: os.kill(os.getpid(), SIGNAL))
        began_s = time.monotonic()
        with pytest.raises(StoreClosedError):
            replay.sample()
        assert time.monotonic() - began_s < patience(10)
        thread.join()
    assert not prefetching()


@pytest.mark.timeout(60)
def test_a_handler_may_close_the_replay_that_another_thread_is_closing(name):
    """That thread waits for the call within which the handler is, which so cannot wait for that thread."""

    def handle(_: gt.Batch) -> None:  # runs within `sample`, as a handler does
        closer.start()
        while replay._unended:
            time.sleep(0.001)
        began_s = time.monotonic()
        replay.close()
        took_s.append(time.monotonic() - began_s)

    took_s: list[float] = []
    with gt.Store.create(name, FIELDS, capacity=8) as store:
        insert(store, 4)
        replay = replay_of(store, Uniform(seed=0), 4, transform=handle, output="numpy", prefetch=0)
        closer = threading.Thread(target=replay.close, daemon=True)
        with contextlib.suppress(StoreClosedError):
            replay.sample()
        closer.join(patience(10))
        assert not closer.is_alive() and took_s[0] < patience(1)
        with pytest.raises(StoreClosedError):
            replay.sample()


@pytest.mark.parametrize("wait", ["insert", "sample"])
def test_a_handler_may_close_the_store_whose_limiter_its_own_thread_waits_for(name, wait, handled):
    store = gt.Store.create(name, FIELDS, capacity=8)
    store.limiter.set(samples_per_insert=1, min_size_to_sample=2, error_buffer=1)
    if wait == "insert":
        insert(store, 3)
    handled(store.close)
    segment = Segment(store)

    def interrupt() -> None:
        while segment.limiter_waiters() == 0:
            time.sleep(1e-3)
        os.kill(os.getpid(), SIGNAL)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StoreClosedError):
        insert(store, 1) if wait == "insert" else gt.Replay(store, Uniform(), 1, prefetch=0).sample()
    thread.join()


def _close_at_any_instant(name: str, rounds: int, handled: Callable[[Callable[[], object]], None]) -> None:
    choose = random.Random(1)
    with gt.Store.create(name, FIELDS, capacity=64) as store:
        insert(store, 64)
        for number in range(rounds):
            replay = gt.Replay(store, Prioritized(seed=0), 4, prefetch=number % 3, output="numpy")
            handled(replay.close)
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4 + choose.random() * 3e-3)  # of processor time
            try:
                while True:
                    for _ in range(3):
                        batch = replay.sample()
                        replay.update_priorities(batch.keys, 2.0)
                    replay.settle()
            except StoreClosedError:
                pass
            replay.close()
            assert not prefetching()
        assert store.audit() == []


def test_a_handler_may_close_a_replay_at_any_instant_of_its_thread(name, handled):
    _close_at_any_instant(name, 40, handled)


def test_a_handler_that_comes_just_as_the_thread_is_joined_does_not_wait_for_itself():
    ahead = Prefetcher(lambda number: number, "test")
    ahead.ask(3)
    assert ahead.get(patience(10)) == 3
    thread = ahead._thread
    lock = getattr(thread, "_tstate_lock", None)
    if lock is None:
        pytest.skip("threads of this Python are joined without a lock of their own")
    ahead._asked.put(None)
    assert lock.acquire(timeout=patience(10)), "the thread has not ended"  # as a join has that is interrupted here
    began_s = time.monotonic()
    ahead.stop(100)
    assert time.monotonic() - began_s < patience(10)
    lock.release()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_handler_closes_a_replay_at_a_thousand_instants_of_its_thread(name, handled):
    _close_at_any_instant(name, 1000, handled)


# --- batches as objects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda b: dataclasses.replace(b, step=0),
    ],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_a_batch_can_be_copied_pickled_and_replaced(name, again, output):
    with gt.Store.create(name, FIELDS, capacity=8) as store:
        insert(store, 8)
        with gt.Replay(store, Prioritized(seed=0, beta=0.5), 4, prefetch=0, output=output) as replay:
            batch = replay.sample()
            made = again(batch)
            assert type(made) is gt.Batch
            assert made.keys == batch.keys
            assert made.step == 0
            for one, other in ((made["x"], batch["x"]), (made.importance_weights, batch.importance_weights)):
                assert np.array_equal(np.asarray(one), np.asarray(other))
            assert sum(replay.update_priorities(each.keys, 3.0) for each in (batch, made)) == 0


def test_a_replay_of_too_few_rows_says_so_and_works_once_they_are_there(name):
    with gt.Store.create(name, FIELDS, capacity=8) as store, waiting(store, 2) as replay:
        for _ in range(2):
            with pytest.raises(NotEnoughRowsError):
                replay.sample()
        insert(store, 4)
        assert len(replay.sample()) == 4
