"""Parameters of the large constructors: at most twelve, the rare ones in an object of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from geartrain import Replay
from geartrain.collectives import Group
from geartrain.rpc import Node

MOST = 12


@pytest.mark.parametrize("made", [Replay, Group, Node], ids=lambda made: made.__name__)
def test_a_constructor_takes_at_most_twelve_parameters(made: Callable[..., Any]) -> None:
    parameters = inspect.signature(made).parameters
    assert len(parameters) <= MOST, f"put the rare ones into an object of options: {list(parameters)}"
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
