"""The benchmark of one round between two ranks runs every carrier, and ends its other process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deadlines import patience

pytest.importorskip("torch")
MODULE = "geartrain_bench.distributed_replay.agreement"


@pytest.mark.slow
def test_one_block_measures_every_carrier() -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "1"], capture_output=True, text=True, timeout=patience(60), check=True
    )
    first, *rows = done.stdout.splitlines()
    assert "1 blocks of 100" in first
    assert [row[:32].strip() for row in rows] == ["bare connection, shared memory", "Gloo", "shared memory", "TCP"]
    assert all(float(row[32:].split()[0]) > 0 for row in rows)
    wrong = subprocess.run(
        [sys.executable, "-m", MODULE, "none"], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert wrong.returncode != 0 and "usage" in wrong.stderr
