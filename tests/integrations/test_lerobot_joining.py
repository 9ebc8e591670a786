"""LeRobot's replay buffer by name: which stores it joins, and what it tells of them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot_transitions import make

from geartrain import Store
from geartrain.errors import ArgumentError, IncompatibleStoreError
from geartrain.integrations.lerobot import ReplayBuffer
from geartrain.integrations.transitions.layout import fields_of, row_steps, rows_needed

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"lerobot-joining-{os.getpid()}-{next(_numbers)}"


def add(buffer: Any, t: float = 0.0, **infos: Any) -> None:
    buffer.add({"a": torch.tensor([t])}, torch.zeros(2), t, {"a": torch.tensor([t + 1])}, False, False, infos or None)


@pytest.mark.parametrize(
    ("made", "joined"),
    [
        ((10_000, 1), (100_000, 1)),  # rows of 512 steps, both
        ((100_000, 1), (10_000, 1)),
        ((20_000, 1), (10_000, 1)),
        ((200, 1), (100, 1)),  # of 16
        ((100, 1), (200, 1)),
        ((10_000, 1), (10_000, 3)),  # without room for what the others write
    ],
)
def test_a_store_of_another_capacity_is_not_joined(name, made, joined):
    with ReplayBuffer(made[0], "cpu", store=name, writers=made[1], reserve=False) as first:
        add(first)
        with ReplayBuffer(joined[0], "cpu", store=name, writers=joined[1], reserve=False) as second:
            for call in (lambda: len(second), lambda: add(second), lambda: second.sample(1)):
                with pytest.raises(IncompatibleStoreError, match="another capacity"):
                    call()
        with pytest.raises(IncompatibleStoreError, match="another capacity"):
            ReplayBuffer(joined[0], "cpu", store=first.store, writers=joined[1])
        assert len(first) == 1


def test_who_only_reads_need_not_know_how_many_write(name):
    with (
        ReplayBuffer(10_000, "cpu", store=name, writers=9, reserve=False) as first,
        ReplayBuffer(10_000, "cpu", store=name) as second,
    ):
        add(first)
        assert len(second) == 1


def test_what_is_known_of_transitions_is_known_before_the_first_is_read(name):
    for ask in (
        lambda buffer: buffer.has_complementary_info,
        lambda buffer: buffer.complementary_info_keys == ["p"],
        lambda buffer: list(buffer.complementary_info) == ["p"],
        lambda buffer: list(buffer.states) == list(buffer.next_states) == ["a"],
    ):
        with make(store=name) as first, make(store=name) as second:
            assert not ask(second)
            add(first, p=1.0)
            assert ask(second)


def test_a_path_names_a_store_and_what_names_none_is_refused(name):
    with make(store=Path(name)) as first, make(store=name) as second, make(store=Path(name)) as third:
        add(first)
        assert (first.store.name, len(second), len(third)) == (name, 1, 1)
    for wrong in (3, b"x", "", "a\0b", [name]):
        with pytest.raises(ArgumentError, match="store"):
            make(store=wrong)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_a_store_with_dtypes_of_another_kind_of_buffer_is_not_joined(dtype):
    fields = fields_of({"obs.a": ((3,), np.float32)}, ((1,), np.dtype(dtype)), 0)
    steps = row_steps(300, 1)
    with Store.create(fields, max_length=steps, capacity=rows_needed(300, 1, steps, 1, 1)) as store:
        with pytest.raises(IncompatibleStoreError, match="LeRobot"):
            make(store=store)
