"""Recorders that share rows, under SIGKILL, forks, closes, threads and a journal: every row is proven afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deadlines
import numpy as np
import pytest
import shared_episodes
from segments import Segment
from shared_episodes import ENVIRONMENTS, FIELDS, ROW, Environments, Episode, prove

import geartrain as gt
from geartrain.errors import ArgumentError, SchemaError, StoreClosedError, StoreError

_NOTE = struct.Struct("<3I")
OPTIONS = {"autoreset": "same_step", "share_rows": True}


def make(name: str, **options: Any) -> gt.Store:
    return gt.Store.create(name, FIELDS, max_length=ROW, capacity=20_000, **options)


def record(name: str, number: int, told: int, *, publish_every: int | None, forks: bool) -> None:
    """Records until it is killed, and tells of every episode that has ended once its call has returned."""
    choose = random.Random(number)
    with gt.Store.open(name) as store:
        recorder = store.recorder(ENVIRONMENTS, publish_every=publish_every, **OPTIONS)
        environments = Environments(number)
        recorder.reset(environments.seen())
        while True:
            ended = environments.step(recorder.step)
            os.write(told, b"".join(_NOTE.pack(*each) for each in ended))
            if forks and choose.random() < 0.05 and os.fork() == 0:
                refused_in_a_child(recorder, environments, choose)


def refused_in_a_child(recorder: Any, environments: Environments, choose: random.Random) -> None:
    for call in (lambda: environments.step(recorder.step), recorder.cut, lambda: recorder.reset(environments.seen())):
        try:
            call()
        except StoreClosedError:
            continue
        os.abort()  # seen by the mark of its parent: its rows are not the child's
    if choose.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def killed(name: str, number: int, after_s: float, **options: Any) -> list[Episode]:
    """A process that records and is killed so long after its first episode; returns those that it told of."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(hear)
            record(name, number, tell, **options)
        finally:
            os._exit(7)
    os.close(tell)
    chunks = []
    try:
        chunks.append(os.read(hear, 1 << 16))  # blocks until the first episode has ended; b"" when it died
        time.sleep(after_s)
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"the recorder ended by itself: {status}"
    while chunk := os.read(hear, 1 << 16):  # a forked child may hold it: it ends by itself
        chunks.append(chunk)
    os.close(hear)
    return [tuple(each) for each in _NOTE.iter_unpack(b"".join(chunks))]  # type: ignore[misc]


def survive_kills(store: gt.Store, kills: int, seed: int, **options: Any) -> None:
    choose, ended = random.Random(seed), []
    for number in range(kills):
        told = killed(store.name, number, choose.random() ** 2 * 0.05, **options)
        assert told, "it was killed before it had recorded anything"
        ended += told
        store.reap()
        assert store.audit() == []
        stats = store.stats()
        assert stats["writing"] == stats["open"] == 0
        assert prove(store, ended) == []


@pytest.mark.parametrize("publish_every", [None, 2])
def test_a_killed_recorder_leaves_whole_episodes_and_no_others(name, publish_every):
    with make(name) as store:
        survive_kills(store, 3, 1, publish_every=publish_every, forks=False)


@pytest.mark.slow
@pytest.mark.parametrize("publish_every", [None, 2])
@pytest.mark.parametrize("forks", [False, True])
def test_recorders_killed_at_many_instants(name, publish_every, forks):
    with make(name) as store:
        survive_kills(store, 40, 2, publish_every=publish_every, forks=forks)


@pytest.mark.slow
def test_recorders_beside_a_journal_are_restored_whole(name, tmp_path):
    """Killed with a journal in the keeper; what the journal restores is proven as well."""
    store = make(name, journal=tmp_path / "journal", journal_sync_s=0.0)
    choose, ended = random.Random(5), []
    try:
        for number in range(8):
            ended += killed(name, number, choose.random() * 0.05, publish_every=None, forks=False)
            store.reap()
            assert prove(store, ended) == []
        store.sync_journal(deadlines.patience(10))
    finally:
        store.unlink()
        store.close()
    with make(name, journal=tmp_path / "journal") as restored:
        assert restored.audit() == []
        assert prove(restored, ended) == []


def test_a_row_tells_how_many_episodes_it_has(name):
    with make(name) as store:
        for published in (None, 1):
            recorder = store.recorder(ENVIRONMENTS, publish_every=published, **OPTIONS)
            environments = Environments(published or 0)
            recorder.reset(environments.seen())
            ended = []
            for _ in range(60):
                ended += environments.step(recorder.step)
            recorder.close()
            assert prove(store, ended) == []


@pytest.mark.parametrize("within_the_lock", [False, True])
def test_the_count_of_a_recorder_that_was_killed_between_it_and_the_steps_is_mended(name, within_the_lock):
    """At the instant between the two stores of a call that extends a row: the count is one ahead of the steps."""
    with make(name) as store:
        child = os.fork()
        if child == 0:
            with gt.Store.open(name) as mine:
                recorder = mine.recorder(1, autoreset="disabled", share_rows=True)
                see = np.array([shared_episodes.observation((0, 0, 0), 0)], np.uint64)
                for _ in range(2):
                    recorder.reset(see)
                    recorder.step(see, action=np.ones(1, np.uint64), terminated=[True], truncated=[False])
                counts = mine.column("geartrain.episodes")
                at = counts.ctypes.data + int(mine.keys().row[0]) * counts.strides[0]
                segment = Segment(mine)  # its mapping has to be there when the kernel looks at the lock
                if within_the_lock:
                    segment.lock()
                ctypes.c_int32.from_address(at).value += 1
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        row = store.keys().row  # where it died in the lock, this repairs what it left
        store.reap()
        assert store.column("geartrain.episodes")[row].tolist() == [2]
        assert store.audit() == []


def test_an_episode_that_has_begun_and_has_no_action_is_not_counted(name):
    with make(name) as store:
        recorder = store.recorder(1, autoreset="disabled", share_rows=True)
        see = np.array([shared_episodes.observation((0, 0, 0), 0)], np.uint64)
        recorder.reset(see)
        recorder.step(see, action=np.ones(1, np.uint64), terminated=[True], truncated=[False])
        recorder.reset(see)
        assert store.column("geartrain.episodes")[store.keys().row].tolist() == [1]
        recorder.close()
        assert store.column("geartrain.episodes")[store.keys().row].tolist() == [1]


def test_two_threads_at_one_recorder_are_refused_or_one_after_the_other(name):
    with make(name) as store:
        recorder = store.recorder(ENVIRONMENTS, publish_every=2, **OPTIONS)
        environments = Environments(0)
        recorder.reset(environments.seen())
        turn, ended, wrong = threading.Lock(), [], []

        def one(work: Callable[[], None]) -> None:
            for _ in range(150):
                try:
                    work()
                except SchemaError as error:
                    if "two threads" not in str(error):
                        wrong.append(error)

        def step() -> None:
            with turn:
                ended.extend(environments.step(recorder.step))

        def beside() -> None:  # would end episodes, were it to get in: it names an environment that there is not
            with contextlib.suppress(ArgumentError):
                recorder.cut(np.zeros(ENVIRONMENTS, bool))
            assert recorder.in_episode(0)

        threads = [threading.Thread(target=one, args=(work,)) for work in (step, step, beside)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadlines.patience(30))
        assert not wrong
        recorder.close()
        assert store.audit() == []
        assert prove(store, ended) == []


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_store_that_is_closed_beside_a_recorder_keeps_what_was_recorded(name, rounds):
    choose, ended = random.Random(3), []
    with make(name) as keeper:
        for number in range(rounds):
            store = gt.Store.open(name)
            recorder = store.recorder(ENVIRONMENTS, publish_every=choose.choice([None, 3]), **OPTIONS)
            environments = Environments(number)
            recorder.reset(environments.seen())
            began, wrong = threading.Event(), []

            def act(environments=environments, recorder=recorder, began=began, wrong=wrong):
                try:
                    while True:
                        ended.extend(environments.step(recorder.step))
                        began.set()
                except StoreClosedError:
                    return
                except BaseException as error:
                    wrong.append(error)

            thread = threading.Thread(target=act)
            thread.start()
            assert began.wait(deadlines.patience(10))
            time.sleep(choose.random() * 0.003)
            store.close()
            thread.join(deadlines.patience(10))
            assert not thread.is_alive()
            assert not wrong
            with contextlib.suppress(StoreError):
                recorder.close()
            keeper.reap()
            assert keeper.audit() == []
            assert keeper.stats()["writing"] == keeper.stats()["open"] == 0
        assert prove(keeper, ended) == []


def test_a_recorder_alive_at_the_end_of_its_process_leaves_its_episodes(name, tmp_path: Path):
    with make(name) as store:
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            own = gt.Store.open(name)
            recorder = own.recorder(ENVIRONMENTS, **OPTIONS)
            environments = Environments(1)
            recorder.reset(environments.seen())
            for _ in range(50):
                os.write(tell, b"".join(_NOTE.pack(*each) for each in environments.step(recorder.step)))
            os._exit(0)
        os.close(tell)
        assert os.waitpid(child, 0)[1] == 0
        ended = [tuple(each) for each in _NOTE.iter_unpack(os.read(hear, 1 << 16))]
        os.close(hear)
        store.reap()
        assert store.audit() == []
        assert prove(store, ended) == []
