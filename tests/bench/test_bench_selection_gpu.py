"""The bench of selection on a GPU: refused without one, and complete where the interpreter stands in for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import preloaded
import pytest
from deadlines import patience

import geartrain.device.kernels as kernels

pytest.importorskip("triton")

SCRIPT = """
import json
import geartrain_bench.selection.gpu as selection_gpu
result = selection_gpu.run((600,), (8, 128), "cpu", quick=True, laps=2)
print(json.dumps(result.as_json()))
"""


@pytest.mark.slow
def test_every_case_of_the_gpu_bench_has_its_floor_and_finite_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(110),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    cases = {(row["case"], row["metric"].split(",")[0]) for row in rows}
    assert {metric for _, metric in cases} == {"rebuild", "sample", "update"} and len(cases) == 5
    for case in cases:
        systems = {row["system"]: row for row in rows if (row["case"], row["metric"].split(",")[0]) == case}
        assert {"floor", "geartrain"} <= set(systems)
        assert all(0 < row["p50"] <= row["p95"] for row in systems.values())


@pytest.mark.skipif(kernels.why_not_viable() is None, reason="there is a GPU")
def test_without_a_gpu_the_bench_says_so_in_one_line() -> None:
    done = preloaded.run(
        [sys.executable, "-m", "geartrain", "bench", "selection", "--device", "cuda"], timeout=patience(60)
    )
    assert done.returncode == 1 and done.stderr.startswith("error: selection cannot be timed on a GPU here")
