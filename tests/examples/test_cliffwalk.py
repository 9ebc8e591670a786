"""The example of prioritized replay over steps needs fewer updates than uniform replay, and says how many."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def test_draws_by_the_last_error_find_the_few_steps_that_say_something():
    example = importlib.import_module("cliffwalk_prioritized_steps")
    needed = [example.compare(6, seed) for seed in range(2)]
    assert all(2 * each["prioritized"] < each["uniform"] < 100_000 for each in needed), needed
