"""Values that a store's calls take or refuse one by one: scalars of NumPy and torch, 0-d arrays, what is no number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import geartrain as gt
from geartrain.actors import EpisodeRecorder, recorded_fields
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, SchemaError

TEXT_AND_TIMES = [
    "7", np.str_("7"), b"7", ["7"], np.array(["7"]), np.array([b"7"]), None, [1, None], np.array(["7"], object),
    np.datetime64(7, "s"), np.timedelta64(7, "s"), 1j, np.complex64(1j), np.array([1j]), {},
]  # fmt: skip


@pytest.fixture
def store(name):
    with gt.Store.create(
        name, {"x": gt.Field((), "float32"), "n": gt.Field((), "int64")}, max_length=2, capacity=4
    ) as made:
        yield made


@pytest.mark.parametrize("value", TEXT_AND_TIMES, ids=repr)
@pytest.mark.parametrize("field", ["x", "n"])
def test_a_block_takes_no_text_no_time_and_no_imaginary_part(store, field, value):
    row, several = store.row(), store.rows(1)
    for one in (row, several[0]):
        one[field] = 3
        with pytest.raises(SchemaError, match=f"field '{field}' takes"):
            one[field] = value
        assert (one[field] == 3).all()
    row.abandon()
    several.abandon()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (True, 1),
        (np.True_, 1),
        (np.int64(2), 2),
        (np.array(2.0), 2),
        ([Fraction(1), Decimal(2)], [1, 2]),
        (range(2), [0, 1]),
        (np.array([1, 2], "uint8"), [1, 2]),
    ],
)
def test_a_block_takes_all_that_is_a_number(store, value, found):
    row = store.row()
    row["x"], row["n"] = value, value
    assert (row["x"] == found).all() and (row["n"] == found).all()
    row.abandon()


def test_a_block_takes_tensors_as_an_insert_does(store):
    torch = pytest.importorskip("torch")
    row = store.row()
    row["x"] = torch.tensor([1.0, 2.0])
    row["n"] = [torch.tensor(1), torch.tensor(2)]
    assert row["x"].tolist() == row["n"].tolist() == [1, 2]
    row["x"] = torch.tensor([3.0, 4.0], requires_grad=True)
    row["n"] = torch._neg_view(torch.tensor([5, 6]))
    assert row["x"].tolist() == [3, 4] and row["n"].tolist() == [-5, -6]
    row["x"] = torch.tensor([7.0, 8.0], dtype=torch.bfloat16, requires_grad=True)
    assert row["x"].tolist() == [7, 8]
    for made, why in (
        (lambda *shape: torch.ones(*shape, device="meta"), "on meta"),
        (lambda *shape: torch.ones(*shape).to_sparse(), "layout"),
        (lambda *shape: freed(torch.ones(*shape)), "has no memory"),
    ):
        with pytest.raises(SchemaError, match=why):
            row["x"] = made(2)
        with pytest.raises(SchemaError, match=why):
            store.insert({"x": made(1, 2), "n": np.zeros((1, 2), np.int64)})
    row.abandon()


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def scalars(value):
    """One number as NumPy's scalars and 0-d arrays of several types, and as torch's."""
    made = [np.float32(value), np.int64(value), np.array(value), np.array(float(value)), Fraction(value)]
    try:
        import torch
    except ImportError:
        return made
    return [*made, torch.tensor(value), torch.tensor(float(value))]


def test_priorities_of_rows_are_scalars_of_any_library(store):
    for priority in scalars(2):
        with store.row(priority=priority, zeros=store.fields) as row:
            row.publish(length=1)
            row.priority = priority
            row.extend(2)
        with store.rows(1, priority=priority, zeros=store.fields) as rows:
            rows.lengths = 1
    assert (store.status()["priority"] == 2).all()


@pytest.mark.parametrize(
    "priority", [True, np.True_, np.array(True), np.array([1.0]), "1", 1j, np.complex64(1), -1.0, np.nan]
)
def test_what_is_no_priority_is_refused_by_each_call_that_takes_one(store, priority):
    with pytest.raises(SchemaError, match="priority"):
        store.row(priority=priority)
    row = store.row(zeros=store.fields)
    row.publish(length=1)
    row.priority = priority
    with pytest.raises(SchemaError, match="priority"):
        row.extend(2)
    row.abandon()


def test_limits_of_a_store_are_scalars_of_any_library(names):
    for limit in scalars(3):
        gt.Store.create(names(), {"x": gt.Field((), "int8")}, max_length=1, capacity=4, max_age_s=limit).close()
    for limit in (np.int64(3), np.array(3), *[each for each in scalars(3) if str(each) == "tensor(3)"]):
        limits = {"max_rows": limit, "max_times_sampled": limit}
        with gt.Store.create(names(), {"x": gt.Field((), "int8")}, max_length=1, capacity=4, **limits) as made:
            assert made.options["max_rows"] == made.options["max_times_sampled"] == 3


def test_keys_are_joined_from_whatever_gives_them_once(store):
    keys = store.insert({"x": np.zeros((2, 2), "f4"), "n": np.zeros((2, 2), "i8")})
    parts = {"a": keys[:1], "b": keys[1:]}
    for given in (
        iter(parts.values()),
        parts.values(),
        (part for part in parts.values()),
        map(keys.__getitem__, [[0], [1]]),
    ):
        assert Keys.join(given) == keys
    for given in ("", b"", {}, 3, None):
        with pytest.raises(ArgumentError, match="takes a list of Keys"):
            Keys.join(given)


def test_a_shape_is_whatever_gives_its_axes_in_an_order():
    shapes = [iter([3, 4]), {3: 0, 4: 0}.keys(), range(3, 5), np.array([3, 4]), (n for n in (3, np.array(4)))]
    assert all(gt.Field(shape, "int8").shape == (3, 4) for shape in shapes)
    assert gt.Field(np.array(3), "int8").shape == gt.Field(np.int64(3), "int8").shape == (3,)
    for shape in ({3, 4}, {3: 0}, b"ab", [[3]], None):
        with pytest.raises(SchemaError, match="a shape is"):
            gt.Field(shape, "int8")


def test_a_shape_is_a_tensor_or_the_size_of_one():
    torch = pytest.importorskip("torch")
    shapes = [torch.tensor([3, 4]), torch.Size([3, 4]), torch.zeros(3, 4).shape]
    assert all(gt.Field(shape, "int8").shape == (3, 4) for shape in shapes)
    assert gt.Field(torch.tensor(3), "int8").shape == (3,)


@pytest.mark.parametrize("limited", [False, True])
def test_a_rate_limiter_checks_what_it_is_asked_also_while_it_is_off(store, limited):
    if limited:
        store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=1000)
    for timeout_s in ("1", -1.0, True, None, np.array([1.0]), float("nan")):
        with pytest.raises(ArgumentError, match="timeout_s must be"):
            store.limiter.admit_inserts(1, timeout_s)
        with pytest.raises(ArgumentError, match="timeout_s must be"):
            store.limiter.admit_samples(0, timeout_s)
    for timeout_s in scalars(1):
        store.limiter.admit_inserts(1, timeout_s)
    with pytest.raises(ArgumentError, match="number of rows"):
        store.limiter.admit_inserts(-1)


@pytest.fixture
def recorder(name):
    fields = recorded_fields(
        {"obs": gt.Field((2,), "uint8"), "action": gt.Field((), "int64"), "reward": gt.Field((), "float32")}
    )
    with gt.Store.create(name, fields, max_length=4, capacity=8) as made:
        yield EpisodeRecorder(made)


def ended(recorder, terminated, obs=0):
    recorder.begin({"obs": np.zeros(2, "uint8")})
    step = {"action": 1, "reward": 0.5}, {"obs": obs}
    return recorder.step(*step, terminated=terminated, truncated=False) is not None


def test_an_episodes_end_is_what_equals_zero_or_one(recorder):
    for yes in (True, 1, 1.0, np.True_, np.array([True]), *scalars(1)[:4]):
        assert ended(recorder, yes)
    for no in (False, 0, 0.0, np.False_, np.array([False]), *scalars(0)[:4]):
        assert not ended(recorder, no)
    for other in (2, -1, 0.5, float("nan"), "1", "", None, [True, False], [], {}):
        with pytest.raises(SchemaError, match="`terminated` is True or False, found "):
            ended(recorder, other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "obs", [np.nan, np.inf, 256, -1, 0.5, np.array([0, 256]), np.array([-1, 0]), np.array([0.0, np.nan]), 1j]
)
def test_an_observation_that_its_field_does_not_hold_is_one_error_without_a_warning(recorder, obs):
    with pytest.raises(SchemaError, match="does not hold it"):
        ended(recorder, False, obs)
    for fits in (255, 255.0, np.array([0, 255]), np.array([0.0, 255.0], "f4"), np.array([True, False])):
        ended(recorder, False, fits)
