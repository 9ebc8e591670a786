"""Values that a store's calls take or refuse one by one: scalars of NumPy and torch, 0-d arrays, what is no number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import SchemaError

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


def test_a_block_takes_tensors_and_refuses_those_with_a_gradient(store):
    torch = pytest.importorskip("torch")
    row = store.row()
    row["x"] = torch.tensor([1.0, 2.0])
    row["n"] = [torch.tensor(1), torch.tensor(2)]
    assert row["x"].tolist() == row["n"].tolist() == [1, 2]
    with pytest.raises(SchemaError, match="requires grad"):
        row["x"] = torch.ones(2, requires_grad=True)
    row.abandon()
