"""Rows written in place: keys stay, readers see one write or another, and the dead cost a row each."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError
from geartrain.replay.fetch import fetch

STEPS = 64
FIELDS = {
    "obs": gt.Field((32,), "float32"),
    "advantage": gt.Field((), "float32"),
    "state": gt.Field((256,), "float32", per_row=True),
}


def filled(name, n, capacity=8, **options):
    store = gt.Store.create(name, FIELDS, max_length=STEPS, capacity=capacity, **options)
    keys = store.insert(
        {
            "obs": np.ones((n, STEPS, 32), np.float32),
            "advantage": np.ones((n, STEPS), np.float32),
            "state": np.ones((n, 256), np.float32),
        },
        lengths=np.full(n, 40),
    )
    return store, keys


def test_some_fields_of_some_steps_are_written_and_keys_stay(store_name):
    store, keys = filled(store_name(), 3)
    with store:
        fresh = np.arange(3 * 20, dtype=np.float32).reshape(3, 20)
        assert store.write(keys, {"advantage": fresh}, starts=[0, 10, 30], lengths=[20, 5, 20]) == 0
        found = fetch(store, keys, output="numpy")
        expected = np.ones((3, STEPS), np.float32)
        expected[:, 40:] = 0  # padding of the batch
        expected[0, :20], expected[1, 10:15], expected[2, 30:40] = fresh[0], fresh[1, :5], fresh[2, :10]
        np.testing.assert_array_equal(found["advantage"], expected)
        assert (found["obs"][:, :40] == 1).all()
        assert store.write(keys, {"state": np.full((3, 256), 2.0)}, casting="same_kind") == 0
        assert (fetch(store, keys, output="numpy")["state"] == 2).all()
        store.delete(keys[:1])
        assert store.write(keys, {"state": np.zeros((3, 256), np.float32)}) == 1
        assert store.write(keys[:0], {"state": np.zeros((0, 256), np.float32)}) == 0
        assert store.audit() == []


@pytest.mark.parametrize(
    "fields, options, error",
    [
        ({}, {}, FieldError),
        ({"unknown": np.zeros(2)}, {}, FieldError),
        ({"advantage": np.zeros((2, 4))}, {}, SchemaError),
        ({"advantage": np.zeros((3, 4), np.float32)}, {}, SchemaError),
        ({"advantage": np.zeros((2, STEPS + 1), np.float32)}, {}, SchemaError),
        ({"advantage": np.zeros((2, 4), np.float32), "obs": np.zeros((2, 5, 32), np.float32)}, {}, SchemaError),
        ({"advantage": np.zeros((2, 4), np.float32)}, {"starts": [0, STEPS]}, SchemaError),
        ({"advantage": np.zeros((2, 4), np.float32)}, {"lengths": [4, 5]}, SchemaError),
        ({"advantage": np.zeros((2, 4), np.float32)}, {"lengths": [4, -1]}, SchemaError),
        ({"state": np.zeros((2, 256), np.float32)}, {"starts": [0, 0]}, ArgumentError),
        ({"advantage": np.zeros((2, 4), np.float32)}, {"casting": "unsafe"}, ArgumentError),
    ],
    ids=lambda value: None,
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(store_name, fields, options, error):
    store, keys = filled(store_name(), 2)
    with store:
        with pytest.raises(error):
            store.write(keys, fields, **options)
        assert (fetch(store, keys, output="numpy")["advantage"][:, :40] == 1).all()
        with pytest.raises(ArgumentError):
            store.write(keys.of_store(1), {"state": np.zeros((2, 256), np.float32)})


def test_keys_of_rows_are_those_that_the_rows_have_now(store_name):
    store, keys = filled(store_name(), 4)
    with store:
        assert store.keys_of(keys.row[::-1]) == keys[::-1]
        assert store.keys_of(store.column("advantage")[:, 0] == 1) == keys
        store.delete(keys[:1])
        for wrong in ([int(keys.row[0])], [8], [-1], [0.5], [[1]]):
            with pytest.raises(ArgumentError):
                store.keys_of(wrong)
        assert len(store.keys_of([])) == 0
        assert store.write(store.keys_of(keys.row[1:]), {"state": np.zeros((3, 256), np.float32)}) == 0


def test_a_checkpoint_that_links_to_another_holds_what_was_written_in_between(store_name, tmp_path):
    store, keys = filled(store_name(), 4)
    with store:
        store.save(tmp_path / "one")
        store.write(keys[1:2], {"state": np.full((1, 256), 5, np.float32)})
        saved = store.save(tmp_path / "two", base=tmp_path / "one")
        assert saved.rows == 4
        with gt.Store.load(tmp_path / "two", store_name()) as loaded:
            states = fetch(loaded, keys.of_store(loaded.id), output="numpy")["state"][:, 0]
            assert states.tolist() == [1, 5, 1, 1]
            assert loaded.write(keys.of_store(loaded.id), {"state": np.zeros((4, 256), np.float32)}) == 0


def _write_for_ever(name, keys, value, ready):
    with gt.Store.open(name) as store:
        while True:
            constant = np.full((len(keys), 40, 32), value, np.float32)
            store.write(keys, {"obs": constant, "state": constant[:, :8].reshape(-1, 256)})
            ready.set()
            value += 2


def test_writers_are_killed_beside_readers_and_nobody_sees_half_a_write(store_name):
    context = multiprocessing.get_context("spawn")
    store, keys = filled(store_name(), 8)
    with store, gt.Replay(store, gt.selection.Uniform(seed=0), 8, prefetch=0, output="numpy") as replay:
        for round_ in range(2):
            ready = [context.Event() for _ in range(2)]
            writers = [
                context.Process(target=_write_for_ever, args=(store.name, keys, 2.0 + i, ready[i])) for i in range(2)
            ]
            for writer in writers:
                writer.start()
            assert all(event.wait(patience(30)) for event in ready)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                for batch in (fetch(store, keys, output="numpy"), replay.sample()):
                    obs = batch["obs"][:, :40].reshape(len(batch["obs"]), -1)
                    assert (obs == obs[:, :1]).all()
                    assert (batch["state"] == obs[:, :1]).all()
            for writer in writers:
                os.kill(writer.pid, signal.SIGKILL)
                writer.join(patience(10))
            store.reap()
            missing = 8 - len(store)
            assert missing <= 2 and store.stats()["reclaimed"] <= 2 * (round_ + 1)  # a row for each that was killed
            assert store.audit() == []
            if missing:
                break
