"""Triton kernels that draw rows and gather them on a GPU, with the same results to the bit as the native CPU code.

The CPU counterparts are native/selection/draw.cc and native/fetch/fetch.cc. Each kernel has one file, and its tests
a slow and obvious torch reference. `candidates.DeviceCandidates` combines the kernels for draws. Nothing is imported
before its first use. `why_not_viable()` says what is missing, for `geartrain doctor`.

| file | what it does | bytes |
|---|---|---|
| `philox` | random bits and numbers below a bound, from counters | none |
| `weighted_draw` | sums over tiles of 256 priorities; draws, plain and stratified | 4 N a rebuild, 1.5 KB a draw |
| `distinct_draw` | draws without replacement | the same, and a sort of the draws |
| `top_rows` | heaviest, oldest, newest rows | 4 N, and 2 KB a row asked for |
| `scatter_update` | new priorities for many rows, the last of duplicates wins | 240 a row |
| `gather`, `gather_*` | chosen rows out of pinned host memory, in one launch | the windows, 128 a slot |
"""

from __future__ import annotations

import importlib.util
import os


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU (TRITON_INTERPRET=1 before the first import)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def why_not_viable() -> str | None:
    """What keeps the kernels from running here, or None when they run. Imports torch when it is installed."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if interpreting():
        return None
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


__all__ = ["interpreting", "why_not_viable"]
