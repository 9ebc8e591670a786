"""The JAX example learns: its buffer is called inside a compiled program."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'geartrain[jax]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.mark.slow
def test_an_agent_in_one_compiled_program_learns_to_balance_the_pole() -> None:
    example = importlib.import_module("jax_dqn_cartpole")
    assert example.train(2_500, seed=0, quiet=True) > 80  # at random: 22
