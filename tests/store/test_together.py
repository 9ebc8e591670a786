"""Rows that are committed together are all there or none, whatever interrupts the commit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from deadlines import patience
from segments import Pipe, Segment, holding_the_lock, kill, wait_for

import geartrain as gt
from geartrain.errors import FieldError, LockTimeoutError, SchemaError, StoreClosedError
from geartrain.store.recorder import StepRecorder, recorded_fields

FIELDS = {"batch": gt.Field((), "int64", per_row=True)}
TOGETHER = 64
STEPS = recorded_fields({"obs": gt.Field((), "float32")})
ENDS = {"terminated": np.array([False, True]), "truncated": np.zeros(2, bool)}
GOES_ON = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}


def test_of_an_insert_that_is_killed_all_rows_are_there_or_none(name, fork):
    choose = random.Random(5)
    with gt.Store.create(name, FIELDS, capacity=40 * TOGETHER) as store:
        for first in range(0, 12_000, 1000):
            pipe = Pipe()

            def insert(first: int = first, pipe: Pipe = pipe) -> None:
                for number in range(first, first + 1000):
                    store.insert({"batch": np.full(TOGETHER, number)})
                    if number == first:
                        pipe.say()

            child = fork(insert)
            pipe.hear()
            time.sleep(choose.random() * 0.01)  # the random instant itself
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert store.audit() == []
            batches, rows = np.unique(gt.fetch(store, store.keys(), output="numpy")["batch"], return_counts=True)
            evicted = TOGETHER - rows[0] if len(batches) > 30 else 0  # the oldest were making room
            assert rows.tolist() == [TOGETHER - evicted] + [TOGETHER] * (len(batches) - 1)
            store.delete(store.keys())


def test_a_step_that_is_refused_in_the_middle_can_be_given_again(name):
    with gt.Store.create(name, STEPS, max_length=10, capacity=8) as store:
        recorder = store.recorder(2, publish_every=2, autoreset="disabled")
        recorder.reset(np.zeros(2, np.float32))
        for _ in range(2):
            recorder.step(np.ones(2, np.float32), mask=np.array([True, False]), **GOES_ON)
        open_row = store.keys()
        store.native.extend(int(open_row.row[0]), 9)  # what is due next, four steps, is refused now
        recorder.step(np.ones(2, np.float32), mask=np.array([True, False]), **GOES_ON)
        with pytest.raises(SchemaError, match="cannot be extended to 4"):
            recorder.step(np.ones(2, np.float32), **ENDS)
        assert (len(store), recorder.rows, recorder.in_episode(1)) == (1, 0, True)
        assert store.stats()["writing"] == 1


def test_a_lock_that_is_not_to_be_had_leaves_a_recorder_as_it_was(name, fork):
    with gt.Store.create(name, STEPS, max_length=10, capacity=8, timeout_s=0.2) as store:
        recorder = store.recorder(2, autoreset="disabled")
        recorder.reset(np.zeros(2, np.float32))
        recorder.step(np.ones(2, np.float32), **GOES_ON)
        pipe, go = Pipe(), Pipe()
        child = holding_the_lock(store, fork, pipe, go.hear)
        pipe.hear()
        for call in (lambda: recorder.step(np.ones(2, np.float32), **ENDS), recorder.cut):
            with pytest.raises(LockTimeoutError):
                call()
            assert [recorder.in_episode(e) for e in range(2)] == [True, True]
        go.say()
        assert wait_for(child) == 0
        keys = recorder.step(np.full(2, 2, np.float32), **ENDS)
        assert gt.fetch(store, keys, output="numpy")["obs"][0, :3].tolist() == [0, 1, 2]
        recorder.close()
        assert sorted(store.status()["length"]) == [3, 3]
        assert store.audit() == []


def test_in_a_child_forked_beside_a_recorders_call_the_recorder_says_whose_it_is(name, fork):
    with gt.Store.create(name, STEPS, max_length=10, capacity=8) as store:
        recorder = store.recorder(autoreset="disabled")
        recorder.reset(0.0)
        pipe, go = Pipe(), Pipe()
        holder = holding_the_lock(store, fork, pipe, go.hear)
        pipe.hear()
        thread = threading.Thread(target=recorder.cut)  # waits for the lock
        thread.start()
        busy = recorder._native

        def call() -> None:
            with pytest.raises(StoreClosedError, match="made before a fork"):
                recorder.step(1.0, terminated=False, truncated=False)
            recorder.__del__()

        until_s = time.monotonic() + patience(20)
        while time.monotonic() < until_s:
            try:
                busy.cut(None, False)
            except SchemaError as error:
                assert "two threads" in str(error)
                break
        assert wait_for(fork(call)) == 0
        go.say()
        thread.join()
        assert wait_for(holder) == 0


def test_a_recorder_whose_finalizer_is_interrupted_gives_its_rows_back(name, monkeypatch):
    monkeypatch.delattr(StepRecorder, "__del__")  # as where a signal's handler raises in it
    with gt.Store.create(name, STEPS, max_length=10, capacity=8) as store:
        recorder = store.recorder(2, autoreset="disabled")
        recorder.reset(np.zeros(2, np.float32))
        assert store.stats()["writing"] == 2
        del recorder
        assert store.stats()["writing"] == 0


@pytest.mark.parametrize("taken", ["mask", "version", "final_obs"])
def test_a_field_that_a_step_could_not_be_given_is_refused_at_once(taken):
    fields = recorded_fields({"obs": gt.Field((), "float32"), taken: gt.Field((), "int64")})
    with gt.Store.create(fields, max_length=10, capacity=8) as store:
        with pytest.raises(FieldError, match=f"'{taken}' means something else"):
            store.recorder(obs="obs")


def test_a_mark_of_damage_that_is_left_beside_an_audit_stays(name):
    with gt.Store.create(name, FIELDS, capacity=8) as store:
        store.insert({"batch": np.arange(2)})
        segment = Segment(store)
        rebuilding = slice(4096 + 64, 4096 + 68)
        segment.set_priority_writers(os.getpid(), 1)  # the audit waits for it
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(store.audit()))
        thread.start()
        until_s = time.monotonic() + patience(20)
        while not any(segment.bytes[rebuilding]):
            assert time.monotonic() < until_s
        segment.bytes[rebuilding] = (1).to_bytes(4, "little")
        segment.set_priority_writers(os.getpid(), 0)
        thread.join()
        assert found == [[]]
        assert any(segment.bytes[rebuilding])
        assert len(store.keys()) == 2
        assert not any(segment.bytes[rebuilding])
        assert store.audit() == []
        assert not any(segment.bytes[rebuilding])


def test_a_child_forked_beside_a_close_keeps_no_lease_of_its_parent(names, fork):
    name = names(may_stay=True)
    with gt.Store.create(name, FIELDS, capacity=8) as living:
        holding, go, ready, grandchild = Pipe(), Pipe(), Pipe(), os.pipe()

        def close_and_fork() -> None:
            store = gt.Store.open(name, timeout_s=1000)
            store.native.allocate(3)
            holder = holding_the_lock(living, fork, holding, go.hear)
            holding.hear()
            threading.Thread(target=store.close, daemon=True).start()
            while not store.closed:
                time.sleep(1e-3)
            child = os.fork()
            if child == 0:
                ready.say()
                signal.pause()
                os._exit(0)
            os.write(grandchild[1], holder.to_bytes(4, "little") + child.to_bytes(4, "little"))
            signal.pause()

        closing = fork(close_and_fork)
        ready.hear()
        told = os.read(grandchild[0], 8)
        holder, child = (int.from_bytes(told[at : at + 4], "little") for at in (0, 4))
        try:
            kill(closing)
            os.kill(holder, signal.SIGKILL)
            assert living.reap() + living.stats()["repairs"] >= 1
            assert living.native.live_clients() == 1
            assert living.stats()["writing"] == 0
            assert living.audit() == []
        finally:
            os.kill(child, signal.SIGKILL)
