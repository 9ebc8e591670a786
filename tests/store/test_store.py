"""One store, one process: rows in and out, limits, names, and everything that is refused at the door."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.core.dtypes import DTYPES
from geartrain.errors import (
    ArgumentError,
    FieldError,
    IncompatibleStoreError,
    SchemaError,
    StaleKeyError,
    StaleStoreError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreMissingError,
)

X = {"x": gt.Field((), "int64", per_row=True)}
TIMED = {"obs": gt.Field((2,), "float32"), "act": gt.Field((), "int8"), "task": gt.Field((), "int64", per_row=True)}


def xs(store: gt.Store) -> list[int]:
    """The values of all rows, oldest first."""
    return gt.fetch(store, store.keys(), output="numpy")["x"].tolist()


def put(store: gt.Store, *values: int, **options) -> gt.Keys:
    return store.insert({"x": np.array(values, np.int64)}, **options)


# --- rows in and out ------------------------------------------------------------------------------------------------


def test_a_row_written_in_place_comes_out_as_it_went_in(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=4) as store:
        with store.row(priority=2.5, version=7) as row:
            row["obs"][:3] = np.arange(6).reshape(3, 2)
            row["act"] = 5
            row["task"][...] = 9
            row.length = 3
        assert len(store) == 1
        batch = gt.fetch(store, row.key, output="numpy")
        assert batch["obs"][0, :3].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert not batch["obs"][0, 3:].any()
        assert batch["act"][0].tolist() == [5, 5, 5, 0, 0, 0]  # beyond the length there is nothing
        assert batch["task"].tolist() == [9]
        assert batch.mask.tolist() == [[True] * 3 + [False] * 3]
        assert (batch.length.tolist(), batch.version.tolist(), batch.start.tolist()) == ([3], [7], [0])
        status = store.status(row.key)
        assert (status["priority"].tolist(), status["sequence"].tolist()) == ([2.5], [1])


def test_a_row_that_fails_or_is_forgotten_gives_its_block_back(name):
    with gt.Store.create(name, X, capacity=2) as store:
        with pytest.raises(ZeroDivisionError), store.row() as row:
            row["x"] = 1 / 0
        with pytest.raises(SchemaError, match="length is 2"), store.row() as row:
            row.length = 2
        with pytest.raises(SchemaError, match="priority 0 of 1 is -1"), store.row() as row:
            row.priority = -1
        forgotten = store.row(), store.rows(1)
        with pytest.raises(StoreFullError, match="2 are being written"):
            store.row()
        del forgotten, row
        gc.collect()
        assert store.stats()["free"] == 2
        assert store.stats()["abandoned"] == 5
        assert len(store) == 0
        assert store.audit() == []


def test_a_row_is_committed_once(name):
    with gt.Store.create(name, X, capacity=2) as store:
        row = store.row()
        row.commit()
        for again in (row.commit, lambda: row["x"], lambda: row.torch("x")):
            with pytest.raises(SchemaError, match="already committed"):
                again()
        row.abandon()
        assert len(store) == 1
        with store.rows(2) as rows:
            rows[0]["x"], rows[1]["x"] = 5, 6
            rows.priorities = [1, 2]
            rows.versions = 3
        assert store.status(rows.keys)["version"].tolist() == [3, 3]
        assert xs(store) == [5, 6]
        with pytest.raises(SchemaError, match="already committed"):
            rows[0]


def test_rows_committed_together_are_all_or_nothing(name):
    with gt.Store.create(name, X, capacity=4) as store:
        rows = store.rows(3)
        rows.priorities = [1, float("nan"), 1]
        with pytest.raises(SchemaError, match="priority 1 of 3 is nan"):
            rows.commit()
        assert len(store) == 0
        assert store.stats()["free"] == 4


def test_a_short_insert_in_a_used_block_shows_nothing_of_the_row_before(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=1) as store:
        full = {"obs": np.ones((1, 6, 2), np.float32), "act": np.ones((1, 6), np.int8), "task": np.array([1])}
        store.insert(full)
        store.insert({field: value[:, :2] if value.ndim > 1 else value for field, value in full.items()})
        batch = gt.fetch(store, store.keys(), output="numpy")
        assert batch["obs"].sum() == 4
        assert batch["act"].sum() == 2
        assert batch.length.tolist() == [2]


def test_an_insert_of_more_rows_than_there_is_room_for_keeps_the_last_ones(name):
    with gt.Store.create(name, X, capacity=10) as store:
        keys = put(store, *range(5000))
        assert len(keys) == 5000
        assert xs(store) == list(range(4990, 5000))
        assert store.stats()["evicted"] == 4990
        assert store.update_priorities(keys, 1) == 4990
        assert store.audit() == []


DTYPE_NAMES = sorted(DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 5)])
def test_every_dtype_goes_in_as_a_tensor_and_comes_out_with_the_same_bits(name, dtype, shape):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    fields = {"x": gt.Field(shape, getattr(torch, dtype), per_row=True)}
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 4096, np.uint8))
    count = 6 * int(np.prod(shape, dtype=int))
    tensor = bits[: count * DTYPES[dtype].itemsize].clone().view(getattr(torch, dtype)).reshape(6, *shape)
    with gt.Store.create(name, fields, capacity=6) as store:
        assert store.fields["x"].dtype == dtype
        keys = store.insert({"x": tensor})
        found = gt.fetch(store, keys)["x"]
        assert same_bits(found, tensor)
        with store.row() as row:
            row.torch("x")[...] = tensor[1]
        assert same_bits(gt.fetch(store, row.key)["x"], tensor[1:2])
        if DTYPES[dtype].numpy_name is not None:
            array = tensor.numpy()
            keys = store.insert({"x": array})
            out = gt.fetch(store, keys, output="numpy")["x"]
            assert out.dtype == array.dtype
            assert out.tobytes() == array.tobytes()


def same_bits(one, other) -> bool:
    """Whether two tensors are the same to the bit."""

    def bits(tensor):
        return tensor.contiguous().reshape(-1).view(pytest.importorskip("torch").uint8)

    return one.dtype == other.dtype and one.shape == other.shape and bits(one).equal(bits(other))


@pytest.mark.parametrize("kind", ["strided", "read-only", "gradient", "list"])
def test_strided_read_only_and_gradient_carrying_sources_are_copied_as_they_look(name, kind):
    with gt.Store.create(name, {"x": gt.Field((3,), "float32")}, max_length=4, capacity=8) as store:
        array = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
        source = array
        if kind == "read-only":
            source = array.copy()
            source.setflags(write=False)
        elif kind == "gradient":
            source = pytest.importorskip("torch").from_numpy(array.copy()).requires_grad_()
        elif kind == "list":
            with pytest.raises(SchemaError, match="holds float32, found float64"):
                store.insert({"x": array.tolist()})
            return
        assert np.array_equal(gt.fetch(store, store.insert({"x": source}), output="numpy")["x"], array)


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remover", "kept"), [("fifo", [4, 5, 6, 7]), ("lifo", [0, 1, 2, 7]), ("lowest_priority", [0, 2, 4, 7])]
)
def test_a_full_store_makes_room_as_its_remover_says(name, remover, kept):
    with gt.Store.create(name, X, capacity=4, remover=remover) as store:
        for value, priority in enumerate([5, 1, 6, 2, 7, 3, 0, 4]):
            put(store, value, priorities=priority)
            assert store.audit() == []
        assert xs(store) == kept


def test_of_equal_priorities_the_oldest_goes_and_updates_count(name):
    with gt.Store.create(name, X, capacity=3, remover="lowest_priority") as store:
        keys = put(store, 0, 1, 2)
        put(store, 3)
        assert xs(store) == [1, 2, 3]
        store.update_priorities(keys[2], 0.5)
        put(store, 4)
        assert xs(store) == [1, 3, 4]


def test_at_most_max_rows_are_kept_and_the_rest_is_headroom(name):
    with gt.Store.create(name, X, capacity=6, max_rows=4) as store:
        put(store, *range(10))
        assert xs(store) == [6, 7, 8, 9]
        held = store.rows(2)
        assert len(store) == 4  # written rows evict nobody while there is headroom
        held.commit()
        assert len(store) == 4
        assert store.audit() == []


def test_rows_expire_by_age_when_rows_are_inserted_or_drawn(name):
    with gt.Store.create(name, X, capacity=8, max_age_s=0.05) as store:
        old = put(store, 1, 2)
        _until(lambda: store.expire() == 2)
        assert len(store) == 0
        put(store, 3)
        assert store.update_priorities(old, 1) == 2
        _until(lambda: store.row().abandon() or store.stats()["expired"] == 3)
        put(store, 4)
        replay = gt.Replay(store, gt.selection.Uniform(), 2, prefetch=0, output="numpy")

        def nothing_to_draw() -> bool:
            try:
                replay.sample()
            except gt.errors.EmptyStoreError:
                return True
            return False

        _until(nothing_to_draw)
        assert store.audit() == []


def _until(happens, timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + patience(timeout_s)
    while not happens():
        assert time.monotonic() < deadline_s, "it never happened"


def test_a_row_is_sampled_as_often_as_allowed_and_then_gone(name):
    with gt.Store.create(name, X, capacity=20, max_times_sampled=3) as store:
        put(store, *range(20), priorities=np.arange(20) % 3 + 1)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=1), 1, prefetch=0, output="numpy")
        seen = [int(replay.sample()["x"][0]) for _ in range(60)]
        assert sorted(seen) == sorted([*range(20)] * 3)
        assert len(store) == 0
        assert store.stats()["exhausted"] == 20
        assert store.audit() == []
        with pytest.raises(gt.errors.EmptyStoreError):
            replay.sample()


def test_half_a_batch_never_uses_up_the_rows_of_a_store_with_limited_samples(name):
    with gt.Store.create(name, X, capacity=20, max_times_sampled=1) as store:
        put(store, *range(10))
        with pytest.raises(gt.errors.NotEnoughRowsError, match="16 selectable rows"):
            gt.Replay(store, gt.selection.Uniform(), 16, prefetch=0, output="numpy").sample()
        assert len(store) == 10
        batch = gt.Replay(store, gt.selection.Uniform(), 10, prefetch=0, output="numpy").sample()
        assert sorted(batch["x"].tolist()) == list(range(10))
        assert store.stats()["free"] == 20


def test_priorities_are_kept_to_the_stated_resolution_and_what_does_not_fit_is_counted(name):
    with gt.Store.create(name, X, capacity=8) as store:
        keys = put(store, *range(8), priorities=[0, 1.5e-5, 1e-9, 65535.99, 65536, 1e300, 2.5, 1 / 3])
        found = store.status(keys)["priority"]
        assert found[0] == 0
        assert found[2] == 2.0**-16
        assert (found[4], found[5]) == (2.0**16 - 2.0**-16,) * 2
        assert found[6] == 2.5
        assert abs(found - np.clip([0, 1.5e-5, 1e-9, 65535.99, 65536, 65536, 2.5, 1 / 3], 0, None)).max() <= 2.0**-16
        stats = store.stats()
        assert (stats["priorities_saturated"], stats["priorities_rounded_up"]) == (2, 1)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_a_stale_key_changes_nothing_and_is_counted(name):
    with gt.Store.create(name, X, capacity=2) as store:
        old = put(store, 1, 2)
        new = put(store, 3)  # in the place of 1
        assert new.row[0] == old.row[0]
        assert store.update_priorities(old, [9, 9]) == 1
        assert store.delete(old[0]) == 1
        assert store.status(new)["priority"].tolist() == [1]
        assert xs(store) == [2, 3]
        assert store.stats()["stale_keys"] == 2
        with pytest.raises(StaleKeyError, match=f"1 of 2 keys are stale.*row {old.row[0]}"):
            gt.fetch(store, old, output="numpy")
        assert store.delete(old + old) == 3
        odd = gt.Keys(old.row, old.generation + 1)  # the generation of a free row
        assert store.update_priorities(odd, 1) == 2
        assert store.delete(odd) == 2
        assert store.audit() == []


def test_a_key_given_twice_gets_the_last_of_its_priorities(name):
    for remover in ("fifo", "lowest_priority"):
        with gt.Store.create(name, X, capacity=2, remover=remover) as store:
            key = put(store, 1)
            store.update_priorities(key + key + key, [1, 2, 3])
            assert store.status(key)["priority"].tolist() == [3]
            assert store.native.total_priority() == 3 << 16


def test_keys_come_oldest_first(name):
    with gt.Store.create(name, X, capacity=50) as store:
        random = np.random.default_rng(1)
        for value in range(200):
            put(store, value)
            if random.random() < 0.4:
                store.delete(store.keys()[int(random.integers(len(store)))])
        values = xs(store)
        assert values == sorted(values)
        sequence = store.status()["sequence"]
        assert (np.diff(sequence.astype(np.int64)) > 0).all()


# --- refused at the door --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": -3}, "capacity is -3"),
        ({"capacity": 1.5}, "capacity must be a whole number, found 1.5"),
        ({"capacity": 2**33}, "at most 4294967280 rows, capacity is 8589934592"),
        ({}, "capacity .* or capacity_bytes"),
        ({"capacity": 1, "capacity_bytes": 1}, "capacity .* or capacity_bytes"),
        ({"capacity_bytes": 63}, "one row alone takes 57344"),
        ({"capacity": 4, "max_rows": 5}, "max_rows is 5, more than the capacity of 4"),
        ({"capacity": 4, "max_rows": 0}, "max_rows must be above zero, found 0"),
        ({"capacity": 4, "max_times_sampled": 0}, "max_times_sampled must be above zero"),
        ({"capacity": 4, "max_times_sampled": 2.5}, "max_times_sampled must be a whole number, found 2.5"),
        ({"capacity": 4, "max_age_s": -1}, "max_age_s must be above zero, found -1"),
        ({"capacity": 4, "max_age_s": float("nan")}, "max_age_s must be above zero, found nan"),
        ({"capacity": 4, "max_age_s": float("inf")}, "max_age_s must be at most .* found inf"),
        ({"capacity": 4, "priority_fraction_bits": 33}, "priority_fraction_bits must be from 0 to 32, found 33"),
        ({"capacity": 4, "priority_fraction_bits": -1}, "priority_fraction_bits must be from 0 to 32, found -1"),
        ({"capacity": 4, "remover": "oldest"}, "fifo, lifo, lowest_priority, .*, found 'oldest'"),
        ({"capacity": 4, "timeout_s": -1}, "timeout_s must be from 0 .* found -1"),
        ({"capacity": 4, "timeout_s": float("inf")}, "timeout_s must be .* found inf"),
    ],
)
def test_limits_that_make_no_store_are_refused_with_what_was_found(names, what, message):
    name = names()
    with pytest.raises(ArgumentError, match=message):
        gt.Store.create(name, X, **what)
    assert not names.path(name).exists()


def test_a_tiny_age_limit_is_not_taken_for_none(name):
    with gt.Store.create(name, X, capacity=2, max_age_s=1e-12) as store:
        assert store.options["max_age_s"] is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at least one field"),
        ({f"f{i}": gt.Field((), "bool", per_row=True) for i in range(65)}, "at most 64 fields, 65"),
        ({"": gt.Field((), "bool", per_row=True)}, "1 to 63 bytes"),
        ({"é" * 32: gt.Field((), "bool", per_row=True)}, "1 to 63 bytes"),
        ({"a\0b": gt.Field((), "bool", per_row=True)}, "1 to 63 bytes"),
        ({"x": "float32"}, "must be a geartrain.Field, found str"),
    ],
)
def test_fields_that_make_no_schema_are_refused(name, fields, message):
    with pytest.raises(ArgumentError, match=message):
        gt.Store.create(name, fields, capacity=1)


@pytest.mark.parametrize(
    ("shape", "dtype", "per_row", "message"),
    [
        ((0,), "float32", False, "at least one element"),
        ((2, -1), "float32", False, "at least one element"),
        ((2.7,), "float32", False, "whole number"),
        ("ab", "float32", False, "whole number"),
        ((2**40,), "uint8", False, "at most 2147483647"),
        ((1,) * 8, "float32", False, "at most 8 axes, one of them time, shape .* has 8"),
        ((1,) * 9, "float32", True, "at most 8 axes, shape .* has 9"),
        ((2,), "float128", False, "float128"),
        ((2,), "U5", False, "U5"),
        ((2,), object, False, "object"),
        ((2,), np.dtype(">f4"), False, "byte order"),
    ],
)
def test_a_field_that_cannot_be_stored_is_refused(shape, dtype, per_row, message):
    with pytest.raises(ArgumentError, match=message):
        gt.Field(shape, dtype, per_row=per_row)


@pytest.mark.parametrize(
    ("fields", "max_length", "message"),
    [
        (TIMED, None, r"give max_length=.*Store.create\(..., {'obs': Field\(\(2,\), 'float32'\)}, max_length=1000"),
        (TIMED, 0, "max_length must be from 1 to 2147483647 steps, found 0"),
        (TIMED, 2**31, "max_length must be from 1 to 2147483647 steps"),
        (TIMED, 2.5, "max_length must be a whole number of steps, found 2.5"),
        (X, 6, "max_length=6, but every field is per_row"),
    ],
)
def test_a_store_is_told_its_longest_row_where_a_field_has_time(name, fields, max_length, message):
    with pytest.raises(ArgumentError, match=message):
        gt.Store.create(name, fields, max_length=max_length, capacity=1)


@pytest.mark.parametrize(("steps", "rows"), [(6, 1), (11, 1), (12, 2), (6000, 1000)])
def test_a_capacity_in_steps_is_so_many_whole_rows(name, steps, rows):
    with gt.Store.create(name, TIMED, max_length=6, capacity_steps=steps) as store:
        assert store.capacity == rows
        assert store.column("obs").shape == (rows, 6, 2) and store.column("task").shape == (rows,)


def test_a_joined_store_must_have_rows_as_long_as_asked(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=1):
        gt.Store.open(name, TIMED).close()
        gt.Store.open(name, TIMED, max_length=6).close()
        with pytest.raises(IncompatibleStoreError, match="at most 6 steps, asked for max_length=7"):
            gt.Store.open(name, TIMED, max_length=7, create="missing", capacity=1)


def good() -> dict[str, np.ndarray]:
    return {"obs": np.ones((2, 4, 2), np.float32), "act": np.ones((2, 4), np.int8), "task": np.ones(2, np.int64)}


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({"obs": np.ones((2, 4, 2))}, {}, SchemaError, "'obs' holds float32, found float64"),
        ({"obs": np.ones((2, 4, 3), np.float32)}, {}, SchemaError, r"takes \(n, t <= 6, 2\), found shape \(2, 4, 3\)"),
        ({"obs": np.ones((2, 7, 2), np.float32)}, {}, SchemaError, r"found shape \(2, 7, 2\)"),
        ({"obs": np.ones((2, 0, 2), np.float32)}, {}, SchemaError, r"found shape \(2, 0, 2\)"),
        ({"obs": np.ones((3, 4, 2), np.float32)}, {}, SchemaError, "rows"),
        ({"act": np.ones((2, 5), np.int8)}, {}, SchemaError, "'act' has 5 steps, the fields before it have 4"),
        ({"task": np.ones((2, 1), np.int64)}, {}, SchemaError, r"'task' takes \(n\), found shape \(2, 1\)"),
        ({"more": np.ones(2)}, {}, FieldError, r"unknown \['more'\]"),
        ({"task": None}, {}, FieldError, r"missing \['task'\]"),
        ({}, {"lengths": [4, 0]}, SchemaError, "row 1 has length 0, a block holds 1 to 6"),
        ({}, {"lengths": [4, 5]}, SchemaError, "longest of `lengths` is 5, the arrays have 4"),
        ({}, {"lengths": [4, -1]}, SchemaError, "`lengths` must be whole numbers"),
        ({}, {"lengths": [4.0, 1.0]}, SchemaError, "`lengths` must be whole numbers"),
        ({}, {"lengths": [4]}, SchemaError, r"shape \(2,\), found \(1,\)"),
        ({}, {"priorities": [1, -2]}, SchemaError, "priority 1 of 2 is -2"),
        ({}, {"priorities": [float("nan"), 1]}, SchemaError, "priority 0 of 2 is nan"),
        ({}, {"priorities": [float("inf"), 1]}, SchemaError, "priority 0 of 2 is inf"),
        ({}, {"priorities": [1, 2, 3]}, SchemaError, r"shape \(2,\), found \(3,\)"),
        ({}, {"versions": [1.5, 2]}, SchemaError, "`versions` must be whole numbers"),
        ({}, {"threads": 0}, ArgumentError, "threads=0"),
    ],
)
def test_an_insert_that_does_not_fit_is_refused_and_evicts_nobody(name, change, options, error, message):
    with gt.Store.create(name, TIMED, max_length=6, capacity=2) as store:
        store.insert(good())
        before = store.keys()
        data = {field: value for field, value in {**good(), **change}.items() if value is not None}
        with pytest.raises(error, match=message):
            store.insert(data, **options)
        assert store.keys() == before
        assert store.stats()["evicted"] == 0
        assert store.audit() == []


def test_a_bad_value_far_back_in_a_large_insert_changes_nothing_at_all(name):
    with gt.Store.create(name, X, capacity=4000) as store:
        put(store, 1, 2, 3)
        priorities = np.ones(3500)
        priorities[-1] = -1
        with pytest.raises(SchemaError, match="priority 3499 of 3500 is -1"):
            put(store, *range(3500), priorities=priorities)
        assert xs(store) == [1, 2, 3]


def test_priorities_are_refused_all_together(name):
    for remover in ("fifo", "lowest_priority"):
        with gt.Store.create(name, X, capacity=3, remover=remover) as store:
            keys = put(store, 1, 2, 3)
            for bad in ([2, -1, 2], [2, 2, float("nan")], [float("inf"), 2, 2], [1, 2], [[1, 2, 3]], None):
                with pytest.raises(SchemaError):
                    store.update_priorities(keys, bad)
            assert store.status(keys)["priority"].tolist() == [1, 1, 1]
            with pytest.raises(SchemaError, match="row 3 is beyond the store's capacity of 3"):
                store.update_priorities(gt.Keys([0, 3], [1, 1]), [5, 5])
            assert store.native.total_priority() == 3 << 16


def test_unknown_fields_are_named_with_the_known_ones(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=1) as store:
        for wrong in (
            lambda: store.column("reward"),
            lambda: gt.fetch(store, store.keys(), fields=["reward"], output="numpy"),
        ):
            with pytest.raises(FieldError, match="no field 'reward'; it has obs, act, task"):
                wrong()
        with store.row() as row, pytest.raises(FieldError):
            row["reward"] = 1


# --- names, closing, joining ----------------------------------------------------------------------------------------


def test_a_name_is_taken_once_and_the_error_says_by_whom(name):
    with gt.Store.create(name, X, capacity=3) as store:
        put(store, 1, 2)
        with pytest.raises(StoreExistsError, match=r"exists already .*2 rows.*create='replace'"):
            gt.Store.create(name, X, capacity=3)
        with pytest.raises(StoreExistsError, match="in use by 1 process;"):
            gt.Store.open(name, X, create="replace", capacity=3)
        assert xs(store) == [1, 2]


def test_the_last_to_close_removes_the_segment_and_nobody_before(name, names):
    first = gt.Store.create(name, X, capacity=3)
    second = gt.Store.open(name)
    assert second.native.live_clients() == 2
    put(first, 1)
    held = second.row()
    first.close()
    first.close()  # harmless
    assert names.path(name).exists()
    assert xs(second) == [1]
    second.close()
    assert not names.path(name).exists()
    held.abandon()  # harmless
    with pytest.raises(StoreMissingError, match=name):
        gt.Store.open(name)


def test_two_handles_of_one_process_see_each_other_and_hold_rows_of_their_own(name):
    with gt.Store.create(name, X, capacity=3) as one, gt.Store.open(name) as two:
        key = put(one, 1)
        assert xs(two) == [1]
        two.update_priorities(key, 5)
        assert one.status(key)["priority"].tolist() == [5]
        row = one.native.allocate_one()
        with pytest.raises(StaleKeyError, match="not being written by this process"):
            two.native.commit_one(row, 1, 1.0, 0)
        one.native.abandon_one(row)


def test_a_persistent_store_waits_for_the_next_run_in_good_order(tmp_path):
    path = tmp_path / "store"
    with gt.Store.create(path, X, capacity=3) as store:
        put(store, 4, 5)
        store.row()  # and forgotten: the close gives it back
    with gt.Store.open(path) as store:
        assert xs(store) == [4, 5]
        assert store.audit() == []
        assert store.stats()["free"] == 1
    with pytest.raises(IncompatibleStoreError, match="no field 'y'"):
        gt.Store.open(path, {"y": gt.Field((), "int64", per_row=True)})
    with gt.Store.open(path, X) as store:
        assert store.unlink()
        assert not store.unlink()
    assert not path.exists()


def test_a_closed_store_refuses_everything_and_views_of_it_stay_readable(name):
    store = gt.Store.create(name, X, capacity=3)
    keys = put(store, 7)
    column = store.column("x")
    batch = gt.fetch(store, keys, output="numpy")
    replay = gt.Replay(store, gt.selection.Uniform(), 1, prefetch=0, output="numpy")
    store.close()
    for refused in (
        store.row,
        store.keys,
        store.reap,
        store.audit,
        lambda: put(store, 1),
        lambda: store.rows(1),
        lambda: store.update_priorities(keys, 1),
        lambda: store.delete(keys),
        lambda: gt.fetch(store, keys, output="numpy"),
        replay.sample,
    ):
        with pytest.raises(StoreClosedError):
            refused()
    assert column[keys.row[0]] == 7
    assert batch["x"].tolist() == [7]
    assert "closed" in repr(store)


def test_a_peek_reads_everything_and_changes_nothing(name):
    with gt.Store.create(name, X, capacity=3) as store:
        put(store, 1, 2)
        before = store.path.read_bytes()
        look = gt.Store.peek(name)
        assert (len(look), xs(look), look.native.live_clients()) == (2, [1, 2], 1)
        assert look.status()["sequence"].tolist() == [1, 2]
        for refused in (
            look.row,
            look.audit,
            look.reap,
            lambda: put(look, 1),
            lambda: look.update_priorities(look.keys(), 1),
            lambda: look.delete(look.keys()),
        ):
            with pytest.raises(StoreClosedError, match="read-only"):
                refused()
        with pytest.raises(ValueError, match="read-only"):
            look.column("x")[0] = 5
        look.close()
        assert store.path.read_bytes() == before


def test_a_peek_shows_no_row_that_cannot_be_selected(name):
    with gt.Store.create(name, X, capacity=4, max_times_sampled=1) as store:
        keys = put(store, 1, 2, 3)
        store.native.count_samples(keys[:1].row, keys[:1].generation)  # exhausted, and still being read
        store.row()
        assert xs(gt.Store.peek(name)) == [2, 3]
        assert xs(store) == [2, 3]


def _killed_run(name: str, fork, fields=X, **options) -> None:
    """Leaves the segment of a process that was killed with two rows committed and one half-written."""
    read, write = os.pipe()

    def run() -> None:
        store = gt.Store.create(name, fields, capacity=4, **options)
        put(store, 10, 20)
        store.native.allocate_one()
        os.write(write, b"x")
        signal.pause()

    child = fork(run)
    assert os.read(read, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_runs_segment_is_never_joined_unasked(names, fork):
    name = names(may_stay=True)
    _killed_run(name, fork)
    for joining in (lambda: gt.Store.open(name), lambda: gt.Store.open(name, X, create="missing", capacity=4)):
        with pytest.raises(StaleStoreError, match=r"2 rows of a run.*adopt=True.*create='replace'"):
            joining()
    with pytest.raises(StoreExistsError, match="2 rows"):
        gt.Store.create(name, X, capacity=4)
    look = gt.Store.peek(name)
    assert (xs(look), look.native.live_clients()) == ([10, 20], 0)
    assert names.path(name).exists()


def test_an_adopted_store_has_the_committed_rows_and_all_its_blocks(names, fork):
    name = names()
    _killed_run(name, fork)
    with gt.Store.open(name, X, adopt=True) as store:
        assert xs(store) == [10, 20]
        assert store.stats()["free"] == 2
        assert store.audit() == []
        with gt.Store.open(name) as second:  # alive again: no adoption needed
            put(second, 30)
        assert xs(store) == [10, 20, 30]
    assert not names.path(name).exists()


def test_adopting_with_the_wrong_fields_is_refused_and_destroys_nothing(names, fork):
    name = names()
    _killed_run(name, fork)
    with pytest.raises(IncompatibleStoreError, match=r"field 'x' is .*int64.* asked for .*float32"):
        gt.Store.open(name, {"x": gt.Field((), "float32", per_row=True)}, adopt=True)
    with gt.Store.open(name, X, adopt=True) as store:
        assert xs(store) == [10, 20]


def test_replacing_a_killed_runs_segment_starts_afresh(names, fork):
    name = names()
    _killed_run(name, fork)
    with gt.Store.open(name, X, create="replace", capacity=2) as store:
        assert len(store) == 0
        assert store.capacity == 2


def test_a_closed_store_that_is_kept_can_be_adopted(name):
    store = gt.Store.create(name, X, capacity=4)
    put(store, 1)
    store.close(keep=True)
    with pytest.raises(StaleStoreError):
        gt.Store.open(name)
    with gt.Store.open(name, adopt=True) as store:
        assert xs(store) == [1]


def test_a_schema_that_differs_is_named_and_the_store_left_as_it_was(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=1) as store:
        reordered = dict(reversed(TIMED.items()))
        for fields, message in (
            ({**TIMED, "more": gt.Field((), "bool", per_row=True)}, "no field 'more'"),
            ({"obs": TIMED["obs"], "act": TIMED["act"]}, "'task' that was not asked for"),
            ({**TIMED, "task": gt.Field((), "int32", per_row=True)}, "'task' is .*int64"),
        ):
            with pytest.raises(IncompatibleStoreError, match=message):
                gt.Store.open(name, fields)
        assert store.native.live_clients() == 1
        gt.Store.open(name, TIMED).close()
        gt.Store.open(name, reordered).close()  # fields are found by name


def test_options_of_open_only_count_when_it_may_create(name):
    with pytest.raises(ArgumentError, match="capacity only mean"):
        gt.Store.open(name, X, capacity=3)
    with pytest.raises(ArgumentError, match="needs the fields"):
        gt.Store.open(name, create="missing", capacity=3)
    with pytest.raises(ArgumentError, match="found 'always'"):
        gt.Store.open(name, X, create="always")


def test_a_pickled_handle_opens_the_same_store(name):
    with gt.Store.create(name, X, capacity=3) as store:
        put(store, 1)
        with pickle.loads(pickle.dumps(store)) as other:
            put(other, 2)
        assert xs(store) == [1, 2]


def test_threads_may_share_a_handle(name):
    with gt.Store.create(name, X, capacity=64) as store:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for value in range(300):
                with store.row(priority=random.random()) as row:
                    row["x"] = seed * 1000 + value
                store.update_priorities(row.key, random.random())
                if value % 5 == 0:
                    store.delete(row.key)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.stats()["inserted"] == 1200
        assert len(set(xs(store))) == len(store) == 64 or store.stats()["deleted"] > 0
        assert store.audit() == []
