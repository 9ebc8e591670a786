"""The benchmark of strategies over two processes prints a line for each, and ends its other process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deadlines import patience

pytest.importorskip("torch")


@pytest.mark.slow
def test_one_block_measures_every_strategy() -> None:
    command = [sys.executable, "-m", "geartrain_bench.distributed_replay.strategies", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=True)
    first, floor, _, *rows = done.stdout.splitlines()
    assert "1 blocks of 40" in first
    assert floor.startswith("floor")
    figures = {row[:24].strip(): row[24:].split(maxsplit=5) for row in rows}
    assert len(figures) == 8
    assert all(float(each[0]) > 0 for each in figures.values())
    assert [figures[name][5] for name in ("Uniform", "Mixture of two stores")] == ["native", "native"]
    assert figures["Lifo"][5] == "native, calls select_shards"
