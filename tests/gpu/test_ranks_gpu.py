"""Batches over several ranks on real GPUs: two ranks, a GPU each; with one GPU both paths of one rank.

pytest tests/gpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import patience

import geartrain.device.kernels as kernels

TESTS = Path(__file__).parent.parent
WORKER = TESTS / "support" / "ranks_device_worker.py"
reason = kernels.why_not_viable()
pytestmark = pytest.mark.skipif(
    reason is not None or kernels.interpreting(), reason=f"no GPU to run on: {reason or 'TRITON_INTERPRET is set'}"
)


def ranks_of(exchange: str) -> int:
    """NCCL wants a GPU for each rank; through the host ranks may share one."""
    import torch

    return min(2, torch.cuda.device_count()) if exchange == "nccl" else 2


@pytest.mark.parametrize("exchange", ["host", "nccl"])
def test_batches_are_those_of_the_host_however_rows_come(
    store_name: Callable[[], str], tmp_path: Path, exchange: str
) -> None:
    ranks, name = ranks_of(exchange), store_name()
    paths = [str(TESTS / "replay"), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "MEET": f"file://{tmp_path}/meet"}
    settings |= {"EXCHANGE": exchange, "DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(  # no forks of a process that may have looked for GPUs, as elsewhere
            [sys.executable, str(WORKER), "batches", name], env={**os.environ, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=patience(90))
            assert process.returncode == 0, err[-3000:]
            said.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for one in said:
        assert one["path"] == "gather"
        assert one["exchange"] == exchange
    received = [sum(of_case) for of_case in zip(*(one["received"] for one in said), strict=True)]
    assert ranks == 1 or received[0]


def test_the_gpu_draws_the_rows_of_each_rank() -> None:
    """Three ranks of one process on one GPU, two of which share a shard."""
    import rank_selection_cases

    assert rank_selection_cases.main(["cuda"] * 3) == 86
