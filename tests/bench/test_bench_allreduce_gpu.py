"""The bench of all-reduces on GPUs: refused without one; its ranks and sums checked with tensors in host memory."""

from __future__ import annotations

import sys

import preloaded
import pytest
from deadlines import patience

import geartrain_bench.allreduce.gpu as gpu
from geartrain.errors import ArgumentError, GeartrainError

torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_every_size_has_its_floor_and_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "QUICK_SIZES", (4096, 100_000))
    monkeypatch.setattr(gpu, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(gpu, "TIMEOUT_S", patience(60))
    result = gpu.run(quick=True, device="cpu")
    assert {row.system for row in result.rows} == {"floor", "geartrain", "gloo"} and len(result.rows) == 6
    assert all(0 < row.p50 <= row.p95 for row in result.rows)
    assert list(result.baselines_missing) == ["nccl, 2 ranks"]


def test_a_rank_that_fails_is_named_and_a_wrong_sum_found() -> None:
    with pytest.raises(GeartrainError, match="rank 0 of 1 of no-such-backend"):
        gpu.measure("no-such-backend", 1, (4096,), 1, "cpu")
    tensor = torch.zeros(8)
    with pytest.raises(GeartrainError, match=r"element 0 of the sum is 1\.0, not 3\.0"):
        gpu._check(tensor, 2, 0, lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_bench_says_so_in_one_line() -> None:
    done = preloaded.run(
        [sys.executable, "-m", "geartrain", "bench", "allreduce", "--device", "cuda"], timeout=patience(60)
    )
    assert done.returncode == 1 and done.stderr.startswith("error: all-reduce cannot be timed on a GPU here")
    with pytest.raises(ArgumentError, match="takes no '--part'"):
        gpu.main(arguments=["--part", "loopback"])
