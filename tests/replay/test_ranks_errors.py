"""What goes wrong over many ranks is the same named error on all of them: lost ranks, disagreement, bad arguments."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience
from rank_batches import FIELDS, STEPS, B, insert, rows
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    CallCancelledError,
    FieldError,
    NotEnoughRowsError,
    PeerLostError,
    RanksDisagreeError,
    SplitGroupError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.selection import Epochs, Fifo, GroupSampling, Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks


def test_a_rank_that_vanishes_is_a_named_error_on_all_others(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(4)
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


def test_an_error_of_one_rank_ends_the_others_with_its_reason(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)

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


@pytest.mark.parametrize("selection", [Uniform(seed=1), Fifo()], ids=["one call", "drawn first"])
def test_a_rank_whose_store_was_closed_tells_the_others(
    sharded_stores: Callable[..., list[gt.Store]], selection: Any
) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], selection, B, group=rank, prefetch=0) as replay:
            replay.sample()
            if rank.rank == 1:
                stores[1].close()
            expected = StoreClosedError if rank.rank == 1 else PeerLostError
            with pytest.raises(expected, match="was closed"):
                replay.sample()

    run_ranks(ThreadRankGroup.make(2, timeout_s=patience(10)), body)


def test_too_few_rows_are_the_same_error_on_all_ranks_and_not_the_end(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = sharded_stores(2)
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
    ("selection", "lag"),
    [(Uniform(seed=1), 0), (Uniform(seed=1), 2), (Fifo(), 0), (Epochs(seed=1), 0)],
    ids=["native", "lagged", "in order", "passes"],
)
@pytest.mark.parametrize("least", [{"min_rows": 8}, {"min_steps": 20}], ids=["rows", "steps"])
def test_ranks_wait_together_for_the_writers_that_one_of_them_expects(
    store_name: Callable[[], str], selection: Any, lag: int, least: dict[str, int]
) -> None:
    stores = [gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=40) for _ in range(2)]
    both = threading.Barrier(2, timeout=patience(20))

    def body(rank: ThreadRankGroup) -> None:
        store = stores[rank.rank]
        options: dict[str, Any] = {"timeout_s": patience(30), "prefetch": 0, "update_lag": lag or None, **least}
        with replay_of(store, selection, 4, group=rank, **options) as replay:
            with pytest.raises(NotEnoughRowsError, match="no rank expects writers"):
                replay.sample()
            both.wait()
            if rank.rank == 1:
                writers = store.expect_writers()
                started = threading.Timer(0.3, lambda: insert(store, 0, 20))
                started.start()
            both.wait()
            assert replay.sample().batch_size == 2
            both.wait()
            if rank.rank == 1:
                store.delete(store.keys())
                given_up = threading.Timer(0.3, lambda: writers.give_up(OSError("no simulator"), "no simulator"))
                given_up.start()
            both.wait()
            with pytest.raises(
                NotEnoughRowsError, match=["writers of rank 1 have given up", "no simulator"][rank.rank]
            ):
                replay.sample()

    run_ranks(2, body)
    for store in stores:
        store.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_a_wait_for_rows_together(store_name: Callable[[], str], ranks: int) -> None:
    stores = [gt.Store.create(store_name(), FIELDS, max_length=STEPS, capacity=40) for _ in range(ranks)]
    for store in stores:
        store.expect_writers()

    def body(rank: ThreadRankGroup) -> None:
        limit_s = 0.3 if rank.rank == 0 else patience(30)  # whose clock runs out first
        with replay_of(stores[rank.rank], Uniform(), 4, group=rank, timeout_s=limit_s) as replay:
            with pytest.raises(WaitTimeoutError, match="too few rows within"):
                replay.sample()
        with replay_of(stores[rank.rank], Uniform(), 4, group=rank, timeout_s=patience(30)) as replay:
            began_s = time.monotonic()
            if rank.rank == 0:
                closing = threading.Timer(0.3, replay.close)
                closing.start()
            with pytest.raises((CallCancelledError, StoreClosedError)):
                replay.sample()
            assert time.monotonic() - began_s < patience(10)

    run_ranks(ranks, body)
    for store in stores:
        store.close()
        assert not store.path.exists(), "no rank has left the others in the middle of a batch"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selection": Prioritized(seed=1)}, r"seed is 0 on rank 0 and 1 on rank 1"),
        ({"selection": Uniform()}, r"strategy is Prioritized\(.*\) on rank 0 and Uniform\(.*\) on rank 1"),
        ({"selection": Prioritized(beta=0.5)}, r"strategy is .*beta=None.* on rank 0 and .*beta=0.5.* on rank 1"),
        ({"batch_size": 32}, r"batch_size is 48 on rank 0 and 32 on rank 1"),
        ({"window": 5}, r"window is 4 on rank 0 and 5 on rank 1"),
        ({"window": gt.Windows(4, at="end")}, r"windows"),
        ({"assignment": "ordered"}, r"assignment is local_first on rank 0 and ordered on rank 1"),
        ({"prefetch": 0}, r"prefetch is 2 on rank 0 and 0 on rank 1"),
        ({"num_batches": 3}, r"num_batches is None on rank 0 and 3 on rank 1"),
        ({"min_rows": 7}, r"min_rows is 1 on rank 0 and 7 on rank 1"),
        ({"min_steps": 7}, r"min_steps is 0 on rank 0 and 7 on rank 1"),
    ],
)
def test_ranks_that_disagree_are_told_so(
    sharded_stores: Callable[..., list[gt.Store]], changed: dict[str, Any], message: str
) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        settings: dict[str, Any] = {"selection": Prioritized(), "batch_size": 48, "window": 4, "group": rank}
        with pytest.raises(RanksDisagreeError, match=message):
            replay_of(stores[rank.rank], **(settings | (changed if rank.rank else {})))

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
    sharded_stores: Callable[..., list[gt.Store]], store_name: Any
) -> None:
    (store,) = sharded_stores(1)
    with gt.Store.create(store_name(), {"obs": FIELDS["obs"]}, max_length=STEPS, capacity=4) as other:

        def body(rank: ThreadRankGroup) -> None:
            with pytest.raises((FieldError, RanksDisagreeError), match="has no field 'action'"):
                gt.Replay([store, other][rank.rank], Uniform(), 4, fields=["obs", "action"], group=rank)

        run_ranks(2, body)


def test_keys_of_nowhere_and_priorities_that_are_none_are_refused(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Prioritized(), B, output="numpy", group=rank, prefetch=0) as replay:
            batch = replay.sample()
            by_hand = gt.Keys(batch.keys.row, batch.keys.generation)
            with pytest.raises(ArgumentError, match="there are 2 shards of this replay"):
                replay.update_priorities(by_hand.of_shard(9), 1.0)
            with pytest.raises(ArgumentError, match="there are 2 shards of this replay"):
                replay.update_priorities(by_hand, 1.0)
            with pytest.raises(ArgumentError, match="24 of 24 keys belong to none of the 2 shards of this replay"):
                replay.update_priorities(batch.keys.of_store(9), 1.0)
            with pytest.raises(ArgumentError, match="priority 0 is not finite"):
                replay.update_priorities(batch.keys, np.full(batch.batch_size, np.nan))
            replay.update_priorities(batch.keys, 1e300)  # saturates, as ever
            replay.sample()

    run_ranks(2, body)


def test_a_group_on_two_shards_stops_no_job(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)
    stray = {name: array[:1] for name, array in rows(0, 1).items()} | {"group": np.array([1000])}

    def body(rank: ThreadRankGroup) -> None:
        store = stores[rank.rank]
        keys = [store.insert(stray) for _ in range(2)]
        selection = GroupSampling("group", 4, seed=1)
        rank.all_gather_object(None)
        with gt.Replay(store, selection, B, output="numpy", group=rank, prefetch=0) as replay:
            with pytest.raises(SplitGroupError, match=r"group group=1000 has rows in 2 shards \(2 in shard 0, 2 in"):
                replay.sample()
            if rank.rank == 0:
                store.delete(keys[0] + keys[1])
            rank.all_gather_object(None)
            assert 1000 not in replay.sample()["group"]

    run_ranks(2, body)


def test_ranks_at_different_steps_are_told_so(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Uniform(), B, group=rank, prefetch=0) as replay:
            state = replay.state_dict()
            replay.load_state_dict({**state, "step": 7 + rank.rank})
            with pytest.raises((RanksDisagreeError, PeerLostError), match=r"at step [78], rank [01] at step [87]"):
                replay.sample()

    run_ranks(2, body)


def test_what_cannot_be_shared_out_is_refused_at_the_door(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    stores = sharded_stores(2)

    def refused(message: str, **settings: Any) -> None:
        def body(rank: ThreadRankGroup) -> None:
            with pytest.raises(ArgumentError, match=message):
                replay_of(stores[rank.rank], **({"selection": Uniform(), "batch_size": 48, "group": rank} | settings))

        run_ranks(2, body)

    refused("a global batch of 49 rows cannot be divided evenly over 2 data-parallel replicas", batch_size=49)
    refused("assignment is one of 'local_first', 'ordered', found 'random'", assignment="random")
    refused("the fields of pipeline stages: leave out fields", fields=["obs"], inputs=["action"])
    with pytest.raises(ArgumentError, match="a DeepSpeed grid, or an object with"):
        replay_of(stores[0], Uniform(), 4, mesh=object())


class _HandlerError(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("lag", [None, 3], ids=["at once", "lagged"])
@pytest.mark.parametrize("by", ["another thread", "a signal's handler", "an error of a signal's handler"])
def test_a_rank_leaves_a_wait_for_others_within_a_second_and_they_are_told_why(
    sharded_stores: Callable[..., list[gt.Store]], lag: int | None, by: str
) -> None:
    stores, left = sharded_stores(2), threading.Event()
    replays: dict[int, gt.Replay] = {}
    took_s: list[float] = []
    told: list[str] = []

    def other() -> None:
        with replay_of(stores[1], Uniform(seed=1), B, group=group[1], prefetch=2, update_lag=lag) as replay:
            replay.sample()  # and asks for three, no more
            assert left.wait(patience(60))
            try:
                for _ in range(8):
                    replay.sample()
            except PeerLostError as error:
                told.append(str(error))

    def leave(*_: object) -> None:
        took_s.append(-time.monotonic())
        if by == "an error of a signal's handler":
            raise _HandlerError
        replays[0].close()

    def watch() -> None:
        while not replays or replays[0].step < 3:
            time.sleep(0.001)
        time.sleep(0.05)  # it waits for the fourth, which the other one has not asked for
        leave() if by == "another thread" else signal.pthread_kill(main, signal.SIGUSR1)

    group, main = ThreadRankGroup.make(2, timeout_s=patience(60)), threading.get_ident()
    threads = [threading.Thread(target=target, daemon=True) for target in (other, watch)]
    before = signal.signal(signal.SIGUSR1, leave)
    try:
        for thread in threads:
            thread.start()
        with replay_of(stores[0], Uniform(seed=1), B, group=group[0], prefetch=2, update_lag=lag) as replays[0]:
            with pytest.raises((StoreClosedError, _HandlerError)):
                while True:
                    replays[0].sample()
            replays[0].close()
            took_s[0] += time.monotonic()
    finally:
        signal.signal(signal.SIGUSR1, before)
    left.set()
    for thread in threads:
        thread.join(patience(60))
        assert not thread.is_alive()
    assert took_s[0] < patience(1.5)
    assert len(told) == 1 and "rank 0 aborted" in told[0] and "while a batch was waited for" in told[0]


WAITING_AT_EXIT = """
import threading, time
import numpy as np
import geartrain as gt
from geartrain.selection import Uniform
from geartrain.tools.testing import ThreadRankGroup

ranks = ThreadRankGroup.make(2, timeout_s=600)
stores = [gt.Store.create({"x": gt.Field((), "float32")}, max_length=1, capacity=16) for _ in ranks]
replays = {}

def join(rank):
    stores[rank].insert({"x": np.zeros((16, 1), np.float32)})
    replays[rank] = gt.Replay(stores[rank], Uniform(), 8, group=ranks[rank], options=gt.ReplayOptions(timeout_s=600))

joining = threading.Thread(target=join, args=(1,))
joining.start()
join(0)
joining.join()
threading.Thread(target=replays[0].sample, daemon=True).start()  # the other rank never asks
while replays[0]._loader._ahead is None or not replays[0]._loader._ahead.is_awaited():
    time.sleep(0.01)
print("waits", flush=True)
"""


def test_a_process_ends_while_a_daemon_thread_waits_for_other_ranks() -> None:
    process = preloaded.Popen([sys.executable, "-c", WAITING_AT_EXIT], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        process.communicate(timeout=patience(20))
        assert process.returncode == 0
    finally:
        process.kill()
