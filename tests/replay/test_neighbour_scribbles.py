"""Rows of a neighbour's store, over which a process writes anything, are an error or other rows, and never a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import patience

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_store_whose_contents_turn_hostile_after_open_ends_no_rank_that_reads_it(seconds: int) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "neighbour_scribbles.py"), "7", str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=patience(60 + seconds),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["groups"] > 0 and counts["reads"] > 50
    assert seconds == 1 or counts["batches over ranks"] > 0
