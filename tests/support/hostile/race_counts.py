"""Counts of the rounds that each race has had without a finding, by sanitizer: tests/race_counts.json.

`make races` runs the cases with the fewest rounds first, in slices: processes of `SLICE` rounds, whose seed of delays
no earlier slice of the case had. The count is written after each slice, so an interrupted run loses one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = Path(__file__).parents[2] / "race_counts.json"
SLICE = 100
#: Set by `make races`: the sanitizer of the native module, or "none". Without it nothing is counted.
VARIABLE = "GEARTRAIN_TEST_RACES_UNDER"


def under() -> str | None:
    """The sanitizer that rounds are counted under; None where they are not."""
    return os.environ.get(VARIABLE)


def read() -> dict[str, dict[str, int]]:
    """Rounds by case and sanitizer."""
    found: dict[str, dict[str, int]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def rounds(case: str, sanitizer: str) -> int:
    """Rounds that a case has had."""
    return read().get(case, {}).get(sanitizer, 0)


def add(case: str, sanitizer: str, more: int) -> None:
    """Counts further rounds; the file is complete at any time."""
    counts = read()
    of_case = counts.setdefault(case, {})
    of_case[sanitizer] = of_case.get(sanitizer, 0) + more
    new = FILE.with_suffix(".new")
    new.write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")
    new.replace(FILE)


def slices(wanted: int) -> list[int]:
    """Rounds of each process that together make so many."""
    return [min(SLICE, wanted - begun) for begun in range(0, wanted, SLICE)]
