"""Batches over several ranks on real GPUs: two ranks, a GPU each; with one GPU both paths of one rank.

pytest tests/gpu
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

import geartrain.device.kernels as kernels

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
    from test_ranks_device_processes import start
    from test_ranks_processes import lines

    ranks = ranks_of(exchange)
    said = [lines(p)[0] for p in start("batches", store_name(), ranks, tmp_path, EXCHANGE=exchange, DEVICE="cuda")]
    for one in said:
        assert one["path"] == "gather"
        assert one["exchange"] == exchange
    received = [sum(of_case) for of_case in zip(*(one["received"] for one in said), strict=True)]
    assert ranks == 1 or received[0]


def test_the_gpu_draws_the_rows_of_each_rank() -> None:
    """Three ranks of one process on one GPU, two of which share a shard."""
    import rank_selection_cases

    assert rank_selection_cases.main(["cuda"] * 3, 0.0005) == 110
