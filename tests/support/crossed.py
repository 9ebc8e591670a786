"""Parameters of a test whose options are tried together: each value by default, all combinations in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def crossed(*options: Sequence[Any], times: int = 1) -> list[Any]:
    """All combinations, of which those that are marked slow add no value of an option.

    A value that is a tuple stands for several arguments. `times` as many combinations as the longest option has values
    are not slow; with two, most pairs of values are among them.
    """
    lengths = [len(values) for values in options]
    quick = {tuple((i + k * (i // n)) % n for k, n in enumerate(lengths)) for i in range(times * max(lengths))}
    made = []
    for places in itertools.product(*map(range, lengths)):
        values: list[Any] = []
        for option, at in zip(options, places, strict=True):
            values.extend(option[at] if isinstance(option[at], tuple) else [option[at]])
        made.append(pytest.param(*values, marks=() if places in quick else pytest.mark.slow))
    return made
