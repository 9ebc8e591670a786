"""What a writer leaves out of a row: zeros, or an error, and never the row that had the block before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from segments import wait_for

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError, StaleKeyError

STEPS = 6
FIELDS = {
    "a": gt.Field((2,), "float32"),
    "b": gt.Field((), "int64"),
    "c": gt.Field((3,), "bfloat16"),
    "d": gt.Field((), "float64", per_row=True),
}


@pytest.fixture
def store(name):
    """Two blocks, both full of the rows before."""
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=2) as made:
        full = {"a": np.full((2, STEPS, 2), 99, np.float32), "b": np.full((2, STEPS), 99), "d": np.full(2, 99.0)}
        torch = pytest.importorskip("torch")
        made.insert({**full, "c": torch.full((2, STEPS, 3), 99, dtype=torch.bfloat16)})
        yield made


def only(store: gt.Store, key: gt.Keys) -> dict[str, list[Any]]:
    """The fields of one row."""
    found = gt.fetch(store, key, output="torch")
    return {name: found[name][0].float().reshape(STEPS, -1)[:, 0].tolist() for name in "abc"} | {"d": found["d"].item()}


def by_row(store: gt.Store, **options: Any) -> tuple[Any, Callable[[], gt.Keys]]:
    row = store.row(**options)
    row.length = STEPS
    return row, row.commit


def by_rows(store: gt.Store, **options: Any) -> tuple[Any, Callable[[], gt.Keys]]:
    rows = store.rows(1, **options)
    rows.lengths = STEPS
    return rows[0], rows.commit


def by_growing(store: gt.Store, **options: Any) -> tuple[Any, Callable[[], gt.Keys]]:
    row = store.row(**options)

    def end() -> gt.Keys:
        row.publish(length=2)
        row.extend(STEPS)
        return row.commit()

    return row, end


WAYS = pytest.mark.parametrize("way", [by_row, by_rows, by_growing])


@WAYS
def test_steps_that_were_not_written_are_zeros(store, way):
    block, end = way(store, zeros=["d"])
    block["a"][:2] = 3
    assert block["a"][:, 0].tolist() == [3, 3, 0, 0, 0, 0]  # asked for again
    block["b"] = np.arange(STEPS)
    block["b"][0] = 7  # a view of what was assigned
    block.torch("c")[1] = 5
    assert only(store, end()) == {
        "a": [3, 3, 0, 0, 0, 0],
        "b": [7, 1, 2, 3, 4, 5],
        "c": [0, 5, 0, 0, 0, 0],
        "d": 0,
    }


@WAYS
def test_a_field_that_was_not_asked_for_is_refused_unless_zeros_names_it(store, way):
    block, end = way(store, zeros=("c",))
    block["a"][0] = 1
    with pytest.raises(SchemaError, match=r"without 'b', 'd': write every field, or .* zeros=\('b', 'd'\)"):
        end()
    block, end = way(store, zeros=list(FIELDS))
    assert only(store, end()) == {"a": [0] * STEPS, "b": [0] * STEPS, "c": [0] * STEPS, "d": 0}
    assert store.stats()["writing"] == 0
    assert store.audit() == []


def test_a_row_without_a_length_is_refused_and_gives_its_block_back(store):
    row, rows = store.row(zeros=list(FIELDS)), store.rows(1, zeros=list(FIELDS))
    assert row.length is None and rows.lengths is None
    with pytest.raises(SchemaError, match=r"set row\.length to the number of its steps, at most 6"):
        row.commit()
    with pytest.raises(SchemaError, match=r"set rows\.lengths to the steps of each"):
        rows.commit()
    assert store.stats()["writing"] == 0


def test_a_value_that_fails_half_way_leaves_nothing_of_the_row_before(store):
    row = store.row(zeros=["a", "c", "d"])
    with pytest.raises(SchemaError, match="field 'b' takes"):
        row["b"] = np.array([1, 2, 3, float("nan"), 5, 6], object)
    assert row["b"].tolist() == [0] * STEPS


@pytest.mark.parametrize("open_", [gt.Store.row, lambda store, **options: store.rows(1, **options)])
def test_names_of_zeros_are_checked(store, open_):
    with pytest.raises(ArgumentError, match="zeros is a list of texts, found 'ab'"):
        open_(store, zeros="ab")
    with pytest.raises(FieldError, match="no field 'e'"):
        open_(store, zeros=["e"])
    assert store.stats()["writing"] == 0


def test_a_forked_child_does_not_zero_what_its_parent_has_written(store, fork):
    row = store.row(zeros=list(FIELDS))

    def child() -> None:
        with pytest.raises(StaleKeyError, match="not being written by this process"):
            row["b"]

    assert wait_for(fork(child)) == 0


RECORDED = gt.recorded_fields({"obs": gt.Field((1,), "float32")}, agent=gt.Field((), "int64", per_row=True))


@pytest.mark.parametrize("make", [gt.Store.recorder, lambda store, **options: store.agent_recorder(2, **options)])
def test_a_recorder_refuses_a_field_that_it_does_not_fill_unless_zeros_names_it(name, make):
    with gt.Store.create(name, RECORDED, max_length=STEPS, capacity=8) as store:
        store.insert({each: np.ones((8, *field.block_shape(STEPS)), field.dtype) for each, field in RECORDED.items()})
        with pytest.raises(FieldError, match=r"does not fill the per_row field 'agent'.*zeros=\('agent',\)"):
            make(store)
        with pytest.raises(FieldError, match="does not fill; it writes 'obs'"):
            make(store, zeros=["obs"])
        with make(store, zeros=["agent"]) as recorder:
            many = {"obs": {"ann": np.ones(1)}} if hasattr(recorder, "agents") else None
            recorder.reset(many["obs"] if many else np.ones((1, 1)))
            flag = {"ann": True} if many else np.array([True])
            key = recorder.step(many["obs"] if many else np.ones((1, 1)), terminated=flag, truncated=flag)
        assert gt.fetch(store, key, output="numpy")["agent"].tolist() == [0]


@pytest.mark.parametrize("value", [np.array([0.7] * STEPS), np.float32(1.5), 1.5, [0.7] * STEPS, float("nan")])
def test_fractions_are_not_cut_by_a_field_of_integers(store: gt.Store, value: Any) -> None:
    with store.row(zeros=("a", "c", "d")) as row:
        with pytest.raises(SchemaError, match=r"field 'b' takes int64.*fractions would be lost: convert it first"):
            row["b"] = value
        row["b"] = np.arange(STEPS, dtype=np.int32)
        row.length = STEPS
    assert only(store, row.key)["b"] == list(range(STEPS))
