"""What a store refuses: limits, fields, values, priorities and names, with what was found and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest
from value_rows import TIMED, X, put, xs

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, IncompatibleStoreError, SchemaError


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"capacity": 0}, "capacity must be at least 1, found 0"),
        ({"capacity": -3}, "capacity must be at least 1, found -3"),
        ({"capacity": 1.5}, "capacity must be a whole number, found 1.5"),
        ({"capacity": 2**33}, "capacity must be from 1 to 4294967280, found 8589934592"),
        ({}, "capacity .* or capacity_bytes"),
        ({"capacity": 1, "capacity_bytes": 1}, "capacity .* or capacity_bytes"),
        ({"capacity_bytes": 63}, "one row alone takes 57344"),
        ({"capacity": 4, "max_rows": 5}, "max_rows is 5, more than the capacity of 4"),
        ({"capacity": 4, "max_rows": 0}, "max_rows must be at least 1, found 0"),
        ({"capacity": 4, "max_times_sampled": 0}, "max_times_sampled must be at least 1"),
        ({"capacity": 4, "max_times_sampled": 2.5}, "max_times_sampled must be a whole number, found 2.5"),
        ({"capacity": 4, "max_age_s": -1}, "max_age_s must be a finite number above 0 .*, found -1"),
        ({"capacity": 4, "max_age_s": float("nan")}, "max_age_s must be a finite number above 0 .*, found nan"),
        ({"capacity": 4, "max_age_s": float("inf")}, "max_age_s must be .* at most .* found inf"),
        ({"capacity": 4, "priority_fraction_bits": 33}, "priority_fraction_bits must be from 0 to 32, found 33"),
        ({"capacity": 4, "priority_fraction_bits": -1}, "priority_fraction_bits must be from 0 to 32, found -1"),
        ({"capacity": 4, "remover": "oldest"}, "fifo, lifo, lowest_priority, .*, found 'oldest'"),
        ({"capacity": 4, "timeout_s": -1}, "timeout_s must be from 0 .* found -1"),
        ({"capacity": 4, "timeout_s": float("inf")}, "timeout_s must be .* found inf"),
        ({"capacity": 2**70}, "capacity must be from 1 to 4294967280, found 1180591620717411303424"),
        ({"capacity": np.uint64(2**64 - 1)}, "capacity must be from 1 to 4294967280, found 18446744073709551615"),
        ({"capacity_bytes": -1}, "capacity_bytes must be at least 0, found -1"),
        ({"capacity_steps": 2**70}, "capacity_steps must be from 1 to 9223372036854775807, found 118"),
        ({"capacity": 4, "max_rows": 2**32}, "max_rows must be from 1 to 4294967295, found 4294967296"),
        ({"capacity": 4, "max_times_sampled": 2**70}, "max_times_sampled must be from 1 to 4294967295, found 118"),
        ({"capacity": 4, "max_times_sampled": True}, "max_times_sampled must be a whole number, found True"),
        ({"capacity": 4, "max_rows": "3"}, "max_rows must be a whole number, found '3'"),
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
        ((2,), ">f4", False, "byte order"),
        ((2,), "f3", False, "'f3' cannot be stored"),
        ((2,), "f16", False, "'f16' cannot be stored"),
        ((2,), "float", False, "'float' is float64 in NumPy and float32 in torch: write 'float32' or 'float64'"),
        ((2,), "int", False, "'int' is int64 in NumPy and int32 in torch: write 'int32' or 'int64'"),
    ],
)
def test_a_field_that_cannot_be_stored_is_refused(shape, dtype, per_row, message):
    with pytest.raises(ArgumentError, match=message):
        gt.Field(shape, dtype, per_row=per_row)


@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", "complex64"])
def test_a_field_takes_numpys_codes_of_dtypes(name):
    code = np.dtype(name).str  # "<f4", "|u1"
    assert gt.Field((2,), code) == gt.Field((2,), code[1:]) == gt.Field((2,), name)


@pytest.mark.parametrize(
    ("fields", "max_length", "message"),
    [
        (
            TIMED,
            None,
            r"max_length= is missing.*Store.create\(..., {'obs': Field\(\(2,\), 'float32'\)}, max_length=1000",
        ),
        (TIMED, 0, "max_length, in steps, must be at least 1, found 0"),
        (TIMED, 2**31, "max_length, in steps, must be from 1 to 2147483647"),
        (TIMED, 2.5, "max_length, in steps, must be a whole number, found 2.5"),
        (X, 6, "one step: leave out max_length=6"),
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
        ({}, {"threads": 0}, ArgumentError, "threads must be from 1 to 4096, found 0"),
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
        row = store.row()
        with pytest.raises(FieldError):
            row["reward"] = 1
