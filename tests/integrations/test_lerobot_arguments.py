"""LeRobot's replay buffer and its arguments: what is taken, and what is refused at the door."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lerobot_transitions import STATE, make, state

from geartrain.errors import ArgumentError, SchemaError
from geartrain.integrations.lerobot import ReplayBuffer

GIVEN = {
    "state": state(0),
    "action": torch.zeros(1, 2),
    "reward": 0.0,
    "next_state": state(1),
    "done": False,
    "truncated": False,
}


@pytest.mark.parametrize(
    "change",
    [
        {"complementary_info": 3},
        {"complementary_info": 0},
        {"complementary_info": [1.0]},
        {"complementary_info": {1: 2.0}},
        {"complementary_info": {None: 2.0, "x": 1.0}},
        {"complementary_info": {"x": 10**400}},
        {"state": {3: torch.zeros(2)}},
        {"reward": "3"},
        {"reward": b"3"},
        {"reward": None},
        {"reward": np.zeros(2)},
        {"reward": np.array(["3"])},
        {"reward": 10**400},
        {"done": "0"},
        {"done": float("nan")},
        {"done": torch.tensor(float("nan"))},
        {"done": 0.5},
        {"truncated": np.array([])},
    ],
)
def test_a_first_transition_that_means_nothing_makes_no_store(change):
    with make() as buffer:
        with pytest.raises(ArgumentError):
            buffer.add(**{**GIVEN, **change})
        assert buffer.store is None


def test_a_later_info_whose_key_is_no_text_is_refused():
    with make() as buffer:
        buffer.add(**GIVEN, complementary_info={"x": 1.0})
        with pytest.raises(ArgumentError, match="key"):
            buffer.add(**GIVEN, complementary_info={"x": 1.0, 3: 2.0})
        assert len(buffer) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state_keys", STATE),
        ("state_keys", 3),
        ("state_keys", [3]),
        ("image_augmentation_function", 3),
    ],
)
def test_options_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ArgumentError, match=name):
        ReplayBuffer(10, "cpu", **{name: value})


def test_arrays_and_tensors_of_one_element_are_numbers():
    with make() as buffer:
        for one in (
            np.array([True]),
            np.array([[1.0]]),
            torch.ones(1, 1),
            torch.tensor(True),
            np.float32(1),
            np.True_,
            1,
        ):
            buffer.add(**{**GIVEN, "reward": one, "done": one, "truncated": one})
        assert torch.equal(buffer.rewards[:8], torch.tensor([1.0] * 7 + [0.0]))
        assert buffer.dones[:7].all()
        assert buffer.truncateds[:7].all()


def test_numbers_are_kept_in_the_dtype_of_the_first_transition_where_it_holds_them():
    first = {
        "flag": torch.tensor(True),
        "byte": torch.tensor([7], dtype=torch.uint8),
        "half": torch.tensor(0.5, dtype=torch.float16),
        "number": 0.1,
    }
    with make() as buffer:
        buffer.add(**GIVEN, complementary_info=first)
        buffer.add(**GIVEN, complementary_info={"flag": False, "byte": 200.0, "half": 2, "number": 3})
        buffer.add(**GIVEN, complementary_info={"flag": 1, "byte": True, "half": float("nan"), "number": 0.1})
        found = {key: column[:3] for key, column in buffer.complementary_info.items()}
        assert found["flag"].tolist() == [1, 0, 1]
        assert found["byte"].tolist() == [7, 200, 1]
        assert found["half"][:2].tolist() == [0.5, 2]
        assert found["half"][2].isnan()
        assert torch.equal(found["number"], torch.tensor([0.1, 3, 0.1]))
        for key, value in (("flag", 2), ("byte", 256), ("byte", -1), ("byte", 0.5), ("byte", float("nan"))):
            with pytest.raises(SchemaError, match="does not hold"):
                buffer.add(**GIVEN, complementary_info={**first, key: value})
        for key, value in (("half", 0.1), ("half", 1e6)):
            with pytest.raises(SchemaError, match="does not hold"):
                buffer.add(**GIVEN, complementary_info={**first, key: value})
        assert len(buffer) == 3
