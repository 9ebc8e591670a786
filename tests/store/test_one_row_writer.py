"""A put or append of one row: one native call for NumPy arrays, else conversion in Python, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import geartrain as gt


@pytest.fixture
def store() -> Iterator[gt.Store]:
    tokens = {"ids": gt.Field(("tokens",), "int32"), "seen": gt.Field(("tokens", 2), "uint8")}
    tasks = {
        "answer": gt.Task(
            {**tokens, "length": gt.Field(("answers",), "int32", divides="tokens"), "score": gt.Field((), "float32")}
        ),
        "ref": gt.Task({"ref": gt.Field(("tokens",), "float32")}, after="answer"),
        "train": gt.Task(after="ref"),
    }
    with gt.Store.create({"x": gt.Field((), "int64")}, tasks=tasks, capacity=16, span_bytes=1 << 20) as made:
        made.insert({"x": list(range(8))})
        yield made


def values_of(tokens: int) -> dict[str, Any]:
    return {
        "ids": np.arange(tokens, dtype=np.int32),
        "seen": np.arange(2 * tokens, dtype=np.uint8).reshape(tokens, 2),
        "length": np.array([1, tokens - 1], np.int32),
        "score": np.array(0.5, np.float32),
    }


def other_forms() -> dict[str, Callable[[Any], Any]]:
    return {
        "arrays": lambda array: array,
        "lists": lambda array: array.tolist(),
        "strided": lambda array: np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
    }


@pytest.mark.parametrize("form", other_forms())
def test_a_put_has_the_same_values_in_every_form(store: gt.Store, form: str) -> None:
    make, wanted = other_forms()[form], values_of(5)
    (row,) = store.claim("answer")
    row.put({name: make(array) for name, array in wanted.items()})
    with store.claim("ref") as claim:
        for name, array in wanted.items():
            assert np.array_equal(np.asarray(claim[name]).reshape(array.shape), array), name
        (row,) = claim
        row.put(ref=make(np.ones(5, np.float32)))
    assert len(store) == 1


@pytest.mark.parametrize("form", other_forms())
def test_appends_have_the_same_values_in_every_form(store: gt.Store, form: str) -> None:
    make = other_forms()[form]
    (row,) = store.claim("answer")
    for item in (1, 0, 1):
        row.append(item=item, ids=make(np.full(item + 2, item, np.int32)), seen=make(np.zeros((item + 2, 2), np.uint8)))
    row.put(score=np.float32(2.0))
    with store.claim("ref", output="numpy") as claim:
        assert claim["ids"].tolist() == [0] * 2 + [1] * 6 and claim["length"].tolist() == [2, 6]


@pytest.mark.parametrize("quick", [True, False], ids=["arrays", "one list"])
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"ids": np.zeros(5, np.int64)}, gt.errors.SchemaError, "holds int32"),
        ({"ids": np.zeros(4, np.int32)}, gt.errors.SchemaError, "tokens in row 0"),
        ({"seen": np.zeros((5, 3), np.uint8)}, gt.errors.SchemaError, r"takes \(m, 2\)"),
        ({"length": np.array([1, 3], np.int32)}, gt.errors.SchemaError, "tokens"),
        ({"ids": np.ma.masked_array(np.zeros(5, np.int32), True)}, gt.errors.SchemaError, "mask"),
        ({"other": np.zeros(5, np.int32)}, gt.errors.FieldError, "unknown .*other"),
    ],
    ids=["dtype", "length", "shape", "sum", "masked", "name"],
)
def test_values_that_do_not_fit_are_refused_alike(
    store: gt.Store, quick: bool, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    (row,) = store.claim("answer")
    values = {**values_of(5), **wrong}
    if not quick:
        values["score"] = 0.5
    with pytest.raises(error, match=said):
        row.put(values)
    row.put(values_of(5))  # nothing was written, and the row is still claimed


def test_the_length_of_another_task_s_axis_holds(store: gt.Store) -> None:
    (row,) = store.claim("answer")
    row.put(values_of(5))
    (row,) = store.claim("ref")
    with pytest.raises(gt.errors.SchemaError, match="tokens"):
        row.put(ref=np.ones(4, np.float32))
    row.put(ref=np.ones(5, np.float32))


def test_a_stale_claim_writes_nothing_and_a_full_region_is_waited_for(store: gt.Store) -> None:
    (row,) = store.claim("answer")
    row.release()
    for write in (
        lambda: row.put(values_of(5)),
        lambda: row.append(ids=values_of(5)["ids"], seen=values_of(5)["seen"]),
    ):
        with pytest.raises(gt.errors.StaleClaimError, match="not claimed"):
            write()
    (row,), (other,) = store.claim("answer"), store.claim("answer")
    row.put(values_of(60_000))
    with pytest.raises(gt.errors.WaitTimeoutError, match=r"no room within 0 s"):
        other.put(values_of(120_000), timeout_s=0.0)
