"""Columns of LeRobot's replay buffer: indexed and compared as the tensors that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.errors import ArgumentError
from geartrain.integrations.lerobot import PositionColumn, ReplayBuffer

CAPACITY = 20


@pytest.fixture(scope="module")
def column() -> Iterator[PositionColumn]:
    """(20, 3, 4, 5), of which ten are there."""
    image = torch.arange(3 * 4 * 5.0).reshape(3, 4, 5)
    with ReplayBuffer(CAPACITY, "cpu", use_drq=False) as buffer:
        for t in range(10):
            buffer.add({"i": image + 100 * t}, torch.zeros(2), t, {"i": image + 1}, False, False)
        yield buffer.states["i"]


@pytest.fixture(scope="module")
def whole(column: PositionColumn) -> torch.Tensor:
    return torch.stack([column[t] for t in range(CAPACITY)])


INDICES: dict[str, Any] = {
    "int": 3,
    "negative": -11,
    "numpy": np.int64(4),
    "slice": slice(2, 12, 3),
    "list": [1, 1, 7],
    "tuple": ([1, 7],),
    "range": range(2, 5),
    "nothing": [],
    "none": (),
    "positions": torch.tensor([[1, 2], [7, 7]]),
    "scalar": torch.tensor(2),
    "mask": torch.arange(CAPACITY) % 3 == 1,
    "array_mask": np.arange(CAPACITY) % 3 == 1,
    "byte_mask": (torch.arange(CAPACITY) % 3 == 1).to(torch.int64).bool(),
    "ellipsis": ...,
    "last": (..., 0),
    "first_and_last": (3, ..., 0),
    "new": None,
    "new_and_int": (None, 3),
    "int_and_new": (3, None, 1),
    "true": True,
    "pairs": ([0, 1], [0, 2]),
    "int_and_list": (3, [0, 2]),
    "slice_and_list": (slice(2, 6), [0, 2]),
    "list_and_int": ([0, 5, 5], 1),
    "apart": ([0, 5], slice(None), [1, 2]),
    "apart_later": (slice(2, 6), [0, 1], slice(None), [1, 2]),
    "tensors": (torch.tensor([5, 0, 5]), torch.tensor([1, 2, 0])),
    "scalar_and_tensor": (torch.tensor(5), torch.tensor([1, 2, 0])),
    "broadcast": (torch.tensor([[5], [1]]), torch.tensor([0, 2])),
    "arrays": (np.array([5, 0]), np.array([1, 2]), 3),
    "mask_and_list": (torch.arange(CAPACITY) < 2, [0, 2]),
    "wide_mask": (torch.arange(CAPACITY * 3) % 7 == 0).reshape(CAPACITY, 3),
    "ellipsis_and_list": (..., [0, 2], 1),
}


@pytest.mark.parametrize("index", INDICES)
def test_an_index_gives_what_a_tensor_gives(column, whole, index):
    found, expected = column[INDICES[index]], whole[INDICES[index]]
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("index", ["x", 1.5, [1.5], [[1], [2, 3]], (0, "x"), (slice(None), 1.5)], ids=repr)
def test_what_is_no_index_is_refused(column, index):
    with pytest.raises((ArgumentError, IndexError)):
        column[index]


def test_positions_that_there_are_not_are_index_errors(column):
    for index in (20, -21, [20], (0, 3), (0, 0, 0, 0, 0), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(IndexError):
            column[index]


def test_a_comparison_is_that_of_tensors(column, whole):
    for other in (whole, 101.0, whole[:, :1], whole[3].numpy(), np.float32(101)):
        assert torch.equal(column == other, whole == torch.as_tensor(other))
        assert torch.equal(column != other, whole != torch.as_tensor(other))
    assert torch.equal(column == 101, whole == 101)
    assert (column == column).all()
    for wrong in (None, "x", [1.0], object()):
        with pytest.raises(ArgumentError, match="compared"):
            column == wrong  # noqa: B015
        with pytest.raises(ArgumentError, match="compared"):
            column != wrong  # noqa: B015
