"""Rows after their commit or their store's close: what may be set, read and written, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import SchemaError, StoreClosedError, StoreFullError

X = {"x": gt.Field((2,), "float32")}


@pytest.fixture
def store(name):
    with gt.Store.create(name, X, max_length=3, capacity=8) as made:
        yield made


@pytest.mark.parametrize("end", ["commit", "abandon"])
@pytest.mark.parametrize(("what", "value"), [("length", 1), ("priority", 2.0), ("version", 7)])
def test_a_row_that_is_done_takes_no_length_priority_or_version(store, end, what, value):
    row = store.row(zeros=["x"])
    row.length = 3
    setattr(row, what, value)
    getattr(row, end)()
    with pytest.raises(SchemaError, match=r"already committed or abandoned.*update_priorities"):
        setattr(row, what, value)
    assert getattr(row, what) == value


@pytest.mark.parametrize("end", ["commit", "abandon"])
@pytest.mark.parametrize("what", ["lengths", "priorities", "versions"])
def test_rows_that_are_done_take_no_lengths_priorities_or_versions(store, end, what):
    rows = store.rows(2, zeros=["x"])
    rows.lengths = 3
    setattr(rows, what, 1)
    getattr(rows, end)()
    with pytest.raises(SchemaError, match="these rows were already committed or abandoned"):
        setattr(rows, what, 1)


def test_an_open_row_takes_its_steps_by_extend_alone(store):
    row = store.row(version=3, zeros=["x"])
    row.publish(length=1)
    with pytest.raises(SchemaError, match=r"the length of a row cannot be set .* extend\(length\)"):
        row.length = 3
    with pytest.raises(SchemaError, match="the version of a row cannot be set"):
        row.version = 4
    row.priority = 2.0  # of steps still to come
    row.extend(2)
    key = row.commit()
    assert row.length == 2 and store.status(key)["length"].tolist() == [2]


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_view_of_one_of_several_rows_writes_nothing_once_they_are_done(store, end):
    rows = store.rows(2, zeros=["x"])
    view, rows.lengths = rows[0], 3
    view["x"] = 1
    getattr(rows, end)()
    for write in (lambda: view["x"], lambda: view.torch("x"), lambda: view.__setitem__("x", 5)):
        with pytest.raises(SchemaError, match="these rows were already committed or abandoned"):
            write()
    if end == "commit":
        assert (gt.fetch(store, rows.keys[0:1], output="numpy")["x"] == 1).all()


def test_a_view_of_one_of_several_rows_keeps_their_blocks(store):
    view = store.rows(8)[0]  # dropped, they would be free again, and somebody else's
    view["x"] = 1
    with pytest.raises(StoreFullError):
        store.row()


def test_misspelt_attributes_of_rows_are_refused(store):
    rows, row = store.rows(2), store.row()
    for one, wrong in ((rows, "length"), (rows, "priority"), (row, "lengths"), (rows[0], "length")):
        with pytest.raises(AttributeError):
            setattr(one, wrong, 1)


def test_the_key_of_a_row_cannot_be_set(store):
    row = store.row(zeros=["x"])
    row.length = 3
    with pytest.raises(AttributeError):
        row.key = None
    assert row.key is None
    assert row.commit() == row.key


def test_rows_of_a_closed_store_are_not_written(name):
    store = gt.Store.create(name, X, max_length=3, capacity=8)
    row, rows = store.row(), store.rows(1)
    view = rows[0]
    row["x"] = view["x"] = 1
    store.close()
    for one in (row, view):
        for use in (lambda one: one["x"], lambda one: one.torch("x"), lambda one: one.__setitem__("x", np.ones(2))):
            with pytest.raises(StoreClosedError, match="was closed"):
                use(one)
    with pytest.raises(StoreClosedError, match="was closed"):
        rows[0]
    for one in (row, rows):
        with pytest.raises(StoreClosedError, match="was closed"):
            one.commit()


def test_an_interrupt_behind_a_commit_is_not_hidden_by_the_rows_end(name: str) -> None:
    fields = {"x": gt.Field((), "float32")}
    with gt.Store.create(name, fields, max_length=1, capacity=2) as store:
        with pytest.raises(KeyboardInterrupt), store.row() as row:
            row["x"] = np.zeros(1, np.float32)
            row.length = 1
            row.commit()
            row._done = False  # as the signal found it, which came before the call had returned
            raise KeyboardInterrupt
        assert len(store) == 1
