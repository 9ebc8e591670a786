"""Several processes at one store: torn rows, kills at any instant, stopped lock holders."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import signal
import struct
import time

import numpy as np
import pytest
import tagged
from deadlines import patience
from replay_calls import replay_of
from segments import Pipe, Segment, holding_blocks, holding_the_lock, kill, wait_for, words_offset

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import (
    EmptyStoreError,
    LockTimeoutError,
    StoreFullError,
)

GATE_LEASE = (1 << 61) + (1 << 20)  # native/store/client_lock.h


# --- torn rows --------------------------------------------------------------------------------------------------


class _Stress:
    """Lasts until it has shown something, and `seconds` at least: a busy machine may take longer for it."""

    def __init__(self, seconds: float) -> None:
        self._least_s = time.monotonic() + seconds
        self._until_s = self._least_s + patience(20 * seconds)

    def over(self, store: gt.Store, enough: bool = True) -> bool:
        now_s = time.monotonic()
        return now_s > self._least_s and (now_s > self._until_s or (enough and self.shown(store.stats())))

    @staticmethod
    def shown(stats: dict[str, int]) -> bool:
        return stats["torn"] > 10 and stats["inserted"] > 1000


def _write(store: gt.Store, seed: int, stress: _Stress) -> None:
    choose = random.Random(seed)
    for number in itertools.count():
        tags = seed * 2**40 + number * 4 + np.arange(choose.choice([1, 1, 1, 2]), dtype=np.uint64)
        if choose.random() < 0.5:
            tagged.insert(store, tags)
        else:
            values = tagged.rows_of(tags[:1])
            with store.row(version=int(tags[0])) as row:
                for field, value in values.items():
                    row[field] = value[0]
                row.length = int(tagged.length_of(tags[:1])[0])
        if stress.over(store):
            return


def _read(store: gt.Store, seed: int, stress: _Stress) -> int:
    choose = random.Random(seed)
    plans = [
        {"selection": gt.selection.Uniform(seed=seed)},
        {"selection": gt.selection.Prioritized(seed=seed), "window": 7},
        {"selection": gt.selection.Uniform(seed=seed), "window": tagged.STEPS + 9, "pad": "right"},
    ]
    replays = [replay_of(store, batch_size=6, prefetch=0, output="numpy", threads=1, **plan) for plan in plans]
    rows = 0
    while not stress.over(store, rows > 100):
        if choose.random() < 0.3:
            batch = gt.fetch(store, store.keys(), output="numpy", threads=choose.choice([1, 2]), on_stale="drop")
        else:
            batch = choose.choice(replays).sample()
        wrong = tagged.mixed(batch)
        if wrong:
            print(f"rows {wrong} were returned mixed")
            return 2
        rows += len(batch.keys)
    return 0 if rows > 100 else 3


def _torn_row_stress(name, fork, seconds: float, writers: int, readers: int) -> None:
    with tagged.create(name, capacity=2 * writers + 3) as store:
        tagged.insert(store, np.arange(3))
        stress = _Stress(seconds)
        children = [fork(lambda seed=seed: _write(store, seed, stress)) for seed in range(1, writers + 1)]
        children += [fork(lambda seed=seed: _read(store, seed, stress)) for seed in range(100, 100 + readers)]
        assert [wait_for(child) for child in children] == [0] * len(children)
        stats = store.stats()
        assert stress.shown(stats), f"rows did not turn over fast enough for this test to mean anything: {stats}"
        tagged.assert_sound(store)


def test_a_row_overwritten_while_it_is_read_is_drawn_again_and_never_returned(name, fork):
    _torn_row_stress(name, fork, 1, writers=2, readers=2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_torn_row_is_returned_in_a_minute_of_many_processes(name, fork):
    _torn_row_stress(name, fork, 60, writers=4, readers=4)


# --- kills ------------------------------------------------------------------------------------------------------

KINDS = {
    "plain": {},
    "lowest priority, sampled three times": {"remover": "lowest_priority", "max_times_sampled": 3},
    "newest first, capped, aging": {"remover": "lifo", "max_rows": 20, "max_age_s": 0.01},
    "sampled once": {"max_times_sampled": 1},
}


def _work(store: gt.Store, seed: int, pipe: Pipe) -> None:
    """Everything a process may do to a store, at random, for ever."""
    choose = random.Random(seed)
    native = store.native
    keys = store.keys()
    held = None
    pipe.say()
    for number in itertools.count():
        tags = seed * 2**32 + number * 8 + np.arange(choose.randint(1, 4), dtype=np.uint64)
        priorities = np.array([choose.choice([0.0, 0.5, 1.0, 7.0]) for _ in tags])
        try:
            match choose.randrange(8):
                case 0 | 1 | 2:
                    keys = keys + tagged.insert(store, tags, priorities=priorities)
                    keys = keys[-12:]
                case 3:
                    held = store.rows(len(tags))  # given back when the next ones are taken, or by a survivor
                    for row in held:
                        row["steps"] = 1
                case 4 | 5 if len(keys):
                    many = keys[np.arange(3000) % len(keys)]  # long in the middle of it, some of them with the lock
                    store.update_priorities(many, np.linspace(0, 3, 3000))
                case 6:
                    native.count_samples(keys.row, keys.generation)
                    gt.fetch(store, keys, output="numpy", threads=1, on_stale="drop")
                    native.release_exhausted(keys.row, keys.generation)
                case _:
                    store.delete(keys[:1])
                    keys = store.keys()
        except StoreFullError:
            if held is not None:
                held.abandon()


def _kill_at_random(name: str, fork, rounds: int, seed: int, **options) -> None:
    choose = random.Random(seed)
    with tagged.create(name, capacity=24, **options) as store:
        for number in range(rounds):
            pipe = Pipe()
            children = [
                fork(lambda who=2 * number + i, pipe=pipe: _work(store, seed + who + 1, pipe)) for i in range(2)
            ]
            for _ in children:
                pipe.hear()
            for child in children:
                time.sleep(choose.random() * 0.008)  # the random instant itself
                kill(child)
            tagged.assert_sound(store)
            tagged.insert(store, np.arange(3) + number * 10)
            store.update_priorities(store.keys(), 1.0)
            if not {"max_age_s", "max_times_sampled"} & set(options):
                sample = gt.Replay(store, gt.selection.Prioritized(), 4, prefetch=0, output="numpy").sample()
                assert tagged.mixed(sample) == []
        assert store.native.live_clients() == 1
        assert store.stats()["reclaimed"] > rounds // 2, "hardly a kill hit anything: this test would notice nothing"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("plain", "sampled once"))) for kind in KINDS]
)
def test_processes_killed_at_random_instants_lose_no_block_and_no_committed_row(kind, name, fork):
    _kill_at_random(name, fork, 14, seed=list(KINDS).index(kind) * 1000, **KINDS[kind])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_kills_lose_no_block_and_no_committed_row(kind, name, fork):
    _kill_at_random(name, fork, 200, seed=77_000 + list(KINDS).index(kind), **KINDS[kind])


def test_what_a_killed_writer_held_comes_back_when_rows_run_out(name, fork):
    with tagged.create(name, capacity=4) as store:
        pipe = Pipe()

        child = holding_blocks(store, fork, pipe, 4)
        pipe.hear()
        with pytest.raises(StoreFullError, match="4 are being written"):
            store.row()
        kill(child)
        tagged.insert(store, [1, 2])  # nobody called reap
        assert store.stats()["reclaimed"] == 4
        tagged.assert_sound(store)


def test_an_update_that_died_half_way_is_repaired_by_the_next_reap(name, fork):
    with tagged.create(name, capacity=40) as store:
        keys = tagged.insert(store, np.arange(40))
        pipe = Pipe()

        def half_update() -> None:
            store.update_priorities(keys[:1], 1.0)
            segment = Segment(store)
            segment.set_priority_writers(os.getpid(), 1)
            words = np.frombuffer(segment.bytes, np.uint64, 40, words_offset(40))
            words[0] += np.uint64(5 << 16)  # the word of row 0, and none of its sums
            pipe.say()
            signal.pause()

        child = fork(half_update)
        pipe.hear()
        kill(child)
        assert store.audit() != []
        assert store.reap() == 1
        tagged.assert_sound(store)
        assert store.native.total_priority() == (40 + 5) << 16


# --- the lock ---------------------------------------------------------------------------------------------------


def test_a_stopped_lock_holder_is_an_error_in_bounded_time_and_everything_goes_on_after_it_continues(name, fork):
    with tagged.create(name, capacity=8, timeout_s=0.2) as store:
        keys = tagged.insert(store, [1, 2, 3])
        open_row = store.row()
        pipe = Pipe()
        child = holding_the_lock(store, fork, pipe, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        pipe.hear()
        os.waitpid(child, os.WUNTRACED)
        for refused in (
            store.keys,
            store.audit,
            lambda: store.delete(keys),
            lambda: tagged.insert(store, [9]),
            lambda: gt.Store.open(name, timeout_s=0.2),
        ):
            began = time.monotonic()
            with pytest.raises(LockTimeoutError, match=r"0\.2 s"):
                refused()
            assert time.monotonic() - began < patience(2)
        with pytest.raises(LockTimeoutError):
            open_row.commit()
        # What needs no lock goes on: reading, drawing and priorities.
        assert tagged.mixed(gt.fetch(store, keys, output="numpy")) == []
        assert store.update_priorities(keys, 2.0) == 0
        assert len(gt.Replay(store, gt.selection.Prioritized(), 4, prefetch=0, output="numpy").sample().keys) == 4
        os.kill(child, signal.SIGCONT)
        assert wait_for(child) == 0
        tagged.insert(store, [4, 5])
        assert store.stats()["repairs"] == 0
        tagged.assert_sound(store)  # the block of the row whose commit timed out is back as well


def test_a_lock_whose_holder_was_killed_is_repaired_by_the_next_to_take_it(name, fork):
    with tagged.create(name, capacity=8) as store:
        tagged.insert(store, [1, 2, 3])
        pipe = Pipe()
        child = holding_the_lock(store, fork, pipe, signal.pause)
        pipe.hear()
        kill(child)
        tagged.insert(store, [4])
        assert store.stats()["repairs"] == 1
        assert len(store) == 4
        tagged.assert_sound(store)


def test_a_process_stopped_in_the_middle_of_an_update_delays_a_repair_and_never_blocks_it_for_good(name, fork):
    with tagged.create(name, capacity=8, timeout_s=0.2) as store:
        tagged.insert(store, [1, 2, 3])
        pipe, told = Pipe(), Pipe()

        def stand_still() -> None:
            store.reap()
            Segment(store).set_priority_writers(os.getpid(), 1)
            pipe.say()
            told.hear()
            Segment(store).set_priority_writers(os.getpid(), 0)
            pipe.say()
            signal.pause()

        child = fork(stand_still)
        pipe.hear()
        for _ in range(3):  # also the second time, when the repair is already owed
            with pytest.raises(LockTimeoutError, match=f"process {child} has been updating priorities"):
                store.native.rebuild()
        with pytest.raises(LockTimeoutError):
            store.keys()
        told.say()
        pipe.hear()
        assert len(store.keys()) == 3
        tagged.insert(store, [4])
        kill(child)
        tagged.assert_sound(store)


def test_a_process_stopped_while_it_joins_or_leaves_is_an_error_in_bounded_time(name):
    gate = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, GATE_LEASE, 1, 0)
    store = tagged.create(name, capacity=8, timeout_s=0.2)
    other = gt.Store.open(name)
    store.native.allocate(3)
    with store.path.open("r+b") as stopped:
        fcntl.fcntl(stopped, fcntl.F_OFD_SETLK, gate)
        tagged.insert(store, [1])  # those who are inside already do not care
        for refused in (lambda: gt.Store.open(name, timeout_s=0.2), store.close):
            with pytest.raises(LockTimeoutError, match=r"joining or leaving the store for 0\.2 s"):
                refused()
    assert store.closed
    assert other.native.live_clients() == 1  # who could not leave in good order counts as dead
    tagged.assert_sound(other)
    other.close()


def test_draws_that_meet_sums_at_odds_with_the_priorities_set_them_right_and_go_on(name):
    with tagged.create(name, capacity=40) as store:
        tagged.insert(store, np.arange(40))
        words = np.frombuffer(Segment(store).bytes, np.uint64, 40, words_offset(40))
        words[1:] &= ~np.uint64(0xFFFFFFFF)  # all priorities but one, as if their updates had stopped half-way
        with gt.Replay(store, gt.selection.Prioritized(), 32, prefetch=0, output="numpy") as replay:
            assert set(replay.sample()["tag"].tolist()) == {0}
        tagged.assert_sound(store)


def test_a_timeout_of_zero_only_fails_when_somebody_holds_the_lock(name, fork):
    with tagged.create(name, capacity=8, timeout_s=0) as store:
        tagged.insert(store, [1])
        pipe = Pipe()
        child = holding_the_lock(store, fork, pipe, signal.pause)
        pipe.hear()
        with pytest.raises(LockTimeoutError):
            tagged.insert(store, [2])
        kill(child)
        tagged.insert(store, [2])


# --- coming and going -------------------------------------------------------------------------------------------


def test_of_many_processes_that_open_or_create_one_makes_the_store_and_all_join_it(name, fork):
    go, done = Pipe(), Pipe()

    def one(tag: int) -> None:
        go.hear()
        store = gt.Store.open(name, tagged.FIELDS, max_length=tagged.STEPS, create="missing", capacity=16)
        tagged.insert(store, [tag])
        done.say()
        signal.pause()

    children = [fork(lambda tag=tag: one(tag)) for tag in range(8)]
    for _ in children:
        go.say()
    for _ in children:
        done.hear()
    with gt.Store.open(name) as store:
        assert len(store) == 8
        assert store.native.live_clients() == 9
        for child in children:
            kill(child)
        tagged.assert_sound(store)


def test_processes_that_come_and_go_for_seconds_never_meet_a_half_made_or_half_removed_store(names, fork):
    name = names()

    def visitor(seed: int) -> None:
        choose = random.Random(seed)
        until_s = time.monotonic() + 1.0
        visits = 0
        while time.monotonic() < until_s:
            with gt.Store.open(name, tagged.FIELDS, max_length=tagged.STEPS, create="missing", capacity=16) as store:
                tagged.insert(store, [choose.randrange(2**40)])
                batch = gt.fetch(store, store.keys(), output="numpy", threads=1, on_stale="drop")
                assert tagged.mixed(batch) == []
                assert store.audit() == []
            visits += 1
        assert visits > 4

    children = [fork(lambda seed=seed: visitor(seed)) for seed in range(4)]
    assert [wait_for(child) for child in children] == [0] * 4
    assert not names.path(name).exists()


def test_as_many_processes_as_the_limit_may_attach_and_one_more_is_refused_by_name(name):
    limit = _native.MAX_CLIENTS
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=2) as store:
        others = [gt.Store.open(name) for _ in range(limit - 1)]
        with pytest.raises(StoreFullError, match=f"already has {limit} processes attached"):
            gt.Store.open(name)
        assert store.audit() == []
        others.pop().close()
        gt.Store.open(name).close()
        for other in others:
            other.close()
        assert store.native.live_clients() == 1


def test_an_empty_store_is_an_error_of_its_own_for_every_strategy(name):
    with tagged.create(name, capacity=2) as store:
        for strategy in (gt.selection.Uniform(), gt.selection.Prioritized()):
            with pytest.raises(EmptyStoreError):
                gt.Replay(store, strategy, 2, prefetch=0, output="numpy").sample()
