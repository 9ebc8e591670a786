"""Rows that are selected while they are being written."""

import multiprocessing

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.errors import SchemaError, StaleKeyError, StoreFullError
from geartrain.selection import Prioritized, Uniform

FIELDS = {"t": gt.Field((1,), "int32"), "id": gt.Field((), "int64", per_row=True)}


@pytest.fixture
def store(store_name):
    with gt.Store.create(store_name(), FIELDS, max_length=50, capacity=8) as made:
        yield made


def begin(store, episode, steps):
    row = store.row()
    row["id"] = episode
    row["t"][:steps, 0] = np.arange(steps)
    row.publish(length=steps)
    return row


def test_windows_of_a_growing_row_hold_only_what_it_was_told_to_have(store):
    row = begin(store, 1, 3)
    row["t"][3:, 0] = 10_000  # written, not told of
    assert len(store) == 1
    with gt.Replay(store, Uniform(seed=0), batch_size=64, window=4, prefetch=0, output="numpy") as replay:
        assert replay.sample()["t"].max() == 2
        row["t"][3:7, 0] = np.arange(3, 7)
        row.extend(7)
        seen = {int(replay.sample()["t"].max()) for _ in range(4)}
        assert seen == {6}
    key = row.commit()
    assert row.key == key
    assert store.status()["length"].tolist() == [7]
    assert store.audit() == []


def test_priorities_of_a_growing_row_are_updated_by_its_key(store):
    key = begin(store, 1, 3).key  # the row object is gone: its growth has ended
    row = begin(store, 2, 3)
    assert store.update_priorities(key, [0.0]) == 0
    assert store.update_priorities(row.key, [5.0]) == 0
    with gt.Replay(store, Prioritized(seed=0), batch_size=16, prefetch=0, output="numpy") as replay:
        assert set(replay.sample()["id"].tolist()) == {2}
    row.commit()
    assert store.audit() == []


def test_a_growing_row_is_not_evicted_and_the_first_sealed_goes_first(store):
    growing = begin(store, 0, 1)
    for episode in range(1, 20):
        begin(store, episode, 2).commit()
    assert 0 in {int(store.column("id")[row]) for row in store.keys().row}
    growing.commit()  # now the newest
    for episode in range(20, 26):
        begin(store, episode, 2).commit()
    assert 0 in {int(store.column("id")[row]) for row in store.keys().row}
    begin(store, 26, 2).commit()
    begin(store, 27, 2).commit()
    assert 0 not in {int(store.column("id")[row]) for row in store.keys().row}
    assert store.audit() == []


def test_what_is_wrong_is_refused(store):
    row = begin(store, 1, 3)
    with pytest.raises(SchemaError, match="cannot be extended to 2"):
        row.extend(2)
    with pytest.raises(SchemaError, match="cannot be extended to 51"):
        row.extend(51)
    with pytest.raises(SchemaError, match="already published"):
        row.publish(length=5)
    assert store.delete(row.key) == 1  # counted as not to be had
    row.commit()
    with pytest.raises(SchemaError, match="already committed"):
        row.extend(6)
    with pytest.raises(SchemaError, match="not published"):
        store.row().extend(3)
    with pytest.raises(StaleKeyError):
        store.native.extend(int(row.index), 9)
    assert store.delete(row.key) == 0


def test_all_rows_growing_is_a_named_error(store):
    rows = [begin(store, episode, 1) for episode in range(8)]
    with pytest.raises(StoreFullError, match="8 extended"):
        store.row()
    rows[3].commit()
    with store.row(zeros=["t"]) as row:
        row["id"], row.length = 99, 1
    assert store.audit() == []


def test_a_store_that_spends_rows_takes_only_whole_ones(store_name):
    with gt.Store.create(store_name(), FIELDS, max_length=50, capacity=4, max_times_sampled=1) as store:
        row = store.row(zeros=FIELDS)
        with pytest.raises(SchemaError, match="max_times_sampled"):
            row.publish(length=1)


def test_an_exception_ends_the_growth_and_keeps_the_steps(store):
    with pytest.raises(ZeroDivisionError), store.row(zeros=["id"]) as row:
        row["t"][:2, 0] = 7
        row.publish(length=2)
        1 / 0  # noqa: B018
    assert len(store) == 1
    assert store.stats()["open"] == 0
    assert store.status()["length"].tolist() == [2]


def test_a_checkpoint_has_growing_rows_as_far_as_they_are_and_notices_growth(store, tmp_path):
    row = begin(store, 1, 3)
    done = begin(store, 2, 5)
    done.commit()
    store.save(tmp_path / "a")
    row["t"][3:9, 0] = np.arange(3, 9)
    row.extend(9)
    again = store.save(tmp_path / "b", base=tmp_path / "a")
    assert again.bytes_linked > 0 or again.not_linked is None
    for name, lengths in (("a", [5, 3]), ("b", [5, 9])):
        with gt.Store.load(tmp_path / name, f"{store.name}-{name}") as loaded:
            status = loaded.status()
            assert sorted(status["length"].tolist()) == sorted(lengths)
            assert loaded.audit() == []
            grown = loaded.keys()[np.flatnonzero(status["length"] == max(lengths[1], 3))] if name == "b" else None
            if grown is not None:
                assert loaded.column("t")[grown.row[0], :9, 0].tolist() == list(range(9))


def _grow_and_die(name):
    store = gt.Store.open(name)
    row = begin(store, 7, 4)
    row["t"][4:6, 0] = [4, 5]
    row.extend(6)
    import os

    os.kill(os.getpid(), 9)


def test_the_steps_of_a_killed_writer_stay(store):
    process = multiprocessing.get_context("spawn").Process(target=_grow_and_die, args=(store.name,))
    process.start()
    process.join(patience(60))
    assert process.exitcode == -9
    store.reap()
    assert store.stats()["open"] == 0
    assert store.status()["length"].tolist() == [6]
    assert store.column("t")[store.keys().row[0], :6, 0].tolist() == list(range(6))
    assert store.audit() == []
