"""The benchmark of two builds prints a line for each case, and ends its processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deadlines import patience

pytest.importorskip("torch")
CASES = ["no group: 4 KB x 32", "2 ranks of one host: 4 KB x 64, uniform", "RPC, no trace: calls of 1 KB"]


@pytest.mark.slow
def test_a_build_beside_itself_is_measured_in_every_place() -> None:
    module = "geartrain_bench.builds.bench"
    builds = ["--before", sys.executable, "--after", sys.executable]
    command = [sys.executable, "-m", module, *builds, "--starts", "1", "--pairs", "2", "--only", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=True)
    first, *table = done.stdout.splitlines()
    assert first.startswith("1 starts of 2 pairs")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [row[0] for row in rows] == CASES
    assert all(float(row[at]) > 0 for row in rows for at in (1, 2, 4, 5))
    assert all(0.05 < float(row[at].split()[0]) < 20 for row in rows for at in (3, 6))
