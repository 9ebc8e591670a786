"""Selection on a GPU: the rows of the CPU to the bit, and how long they take. Run both on a machine that has one:

pytest tests/gpu tests/selection/test_selection_conformance.py
pytest tests/gpu -m slow -s          # N = 1e9: 8 GB of GPU memory, 17 GB of the host's
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import geartrain.device.kernels as kernels
from geartrain import _native

reason = kernels.why_not_viable()
pytestmark = pytest.mark.skipif(
    reason is not None or kernels.interpreting(), reason=f"no GPU to run on: {reason or 'TRITON_INTERPRET is set'}"
)
NONE = np.empty(0, np.uint32)


def on_gpu(priorities: np.ndarray) -> Any:
    from geartrain.device.kernels.candidates import DeviceCandidates

    return DeviceCandidates(priorities, device="cuda")


def median_ms(work: Callable[[], Any], times: int = 20) -> float:
    import torch

    work()
    taken = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return float(np.median(taken))


@pytest.mark.parametrize("n", [1, 257, 1_000_003, 2**24 + 3])
def test_a_gpu_chooses_the_rows_of_the_cpu(n: int) -> None:
    rng = np.random.default_rng(n)
    priorities = rng.integers(0, 2**32, n, dtype=np.uint32)
    priorities[0] = 5
    cpu, gpu = _native.Candidates(priorities), on_gpu(priorities)
    assert cpu.total_priority() == gpu.total_priority()
    numbers = np.arange(100_000, dtype=np.uint32)
    for by_priority in (True, False):
        for strata in (0, 100_000):
            for seed, step in ((0, 0), (1, 1), (2**64 - 1, 2**64 - 1)):
                a, b = (c.draw(by_priority, seed, step, 0, numbers, strata) for c in (cpu, gpu))
                np.testing.assert_array_equal(a[0], b[0].cpu().numpy())
                np.testing.assert_array_equal(a[2], b[2].cpu().numpy())
        k = min(n, 10_000)
        a, b = (c.draw_distinct(by_priority, 1, 1, 0, k, NONE) for c in (cpu, gpu))
        np.testing.assert_array_equal(a[0], b[0].cpu().numpy())
    for order in range(3):
        a, b = (c.first(order, min(n, 5000), n // 3, NONE) for c in (cpu, gpu))
        assert a[3] == b[3]
        np.testing.assert_array_equal(a[0], b[0].cpu().numpy())


def test_the_last_rows_of_many_are_the_same_too() -> None:
    priorities = np.exp2(np.random.default_rng(1).uniform(0, 32, 20_000)).astype(np.uint32)
    a, b = (c.draw_distinct(True, 1, 1, 0, 20_000, NONE) for c in (_native.Candidates(priorities), on_gpu(priorities)))
    np.testing.assert_array_equal(a[0], b[0].cpu().numpy())


def test_updates_with_many_duplicates() -> None:
    rng = np.random.default_rng(2)
    priorities = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    gpu = on_gpu(priorities)
    for high in (100, 100_000):
        rows, values = rng.integers(0, high, 1_000_000), rng.integers(0, 2**32, 1_000_000, dtype=np.uint32)
        gpu.update(rows, values)
        priorities[rows] = values  # NumPy: the last wins
    np.testing.assert_array_equal(gpu.values.cpu().numpy(), priorities)
    assert gpu.total_priority() == int(priorities.sum(dtype=np.uint64))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_how_long_a_billion_rows_take() -> None:
    """Prints medians. A rebuild and 1e6 draws are meant to take less than 5 ms on an H200."""
    import torch

    n, b = 1_000_000_000, 1_000_000
    priorities = torch.randint(1, 2**31 - 1, (n,), dtype=torch.int32, device="cuda").view(torch.uint32)
    from geartrain.device.kernels.candidates import DeviceCandidates

    gpu = DeviceCandidates(priorities)
    rows = gpu.draw(True, 0, 0, 0, b)[0]
    values = torch.randint(1, 2**31 - 1, (b,), dtype=torch.int32, device="cuda").view(torch.uint32)
    floor = median_ms(lambda: priorities.view(torch.int32).sum(dtype=torch.int64))
    print(f"\n{torch.cuda.get_device_name(0)}, torch {torch.__version__}, N={n:.0e}, B={b:.0e}, medians of 20, ms")
    print(f"floor: torch sums the priorities {floor:.3f}")
    rebuild = median_ms(gpu.rebuild)
    draw = median_ms(lambda: gpu.draw(True, 0, 1, 0, b))
    print(f"rebuild {rebuild:.3f}, {n * 4 / rebuild / 1e6:.0f} GB/s")
    print(f"plain {draw:.3f}, stratified {median_ms(lambda: gpu.draw(True, 0, 1, 0, b, b)):.3f}")
    print(f"distinct {median_ms(lambda: gpu.draw_distinct(True, 0, 1, 0, b)):.3f}")
    print(f"update {median_ms(lambda: gpu.update(rows, values)):.3f}")
    for k in (256, 10_000, b):
        print(f"heaviest {k}: {median_ms(lambda k=k: gpu.first(2, k, 0)):.3f}")
    assert rebuild + draw < 5 or "H200" not in torch.cuda.get_device_name(0)
