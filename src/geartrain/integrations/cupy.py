"""CuPy arrays of batches on a GPU, shared without a copy through DLPack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from geartrain.core.extras import require
from geartrain.errors import ArgumentError

if TYPE_CHECKING:
    from geartrain.replay.batch import Batch
    from geartrain.replay.replay import Replay


def as_cupy(batch: Batch) -> dict[str, Any]:
    """A batch's fields and metadata (`Batch.as_dict`) as CuPy arrays over the same memory.

    The memory belongs to the batch while an array over it lives. CuPy's current stream waits for the one that the batch
    was taken on. CuPy has no bfloat16: convert to float16 or float32 (`DeviceOptions(convert=...)`).

    Args:
        batch: a batch in device memory.

    Raises:
        MissingDependencyError: CuPy is not installed.
        ArgumentError: the batch is in host memory.
    """
    cupy = require("cupy", "cupy-cuda12x", "A CuPy array (cupy-cuda12x or as fits your CUDA)")
    arrays = {}
    value: Any
    for name, value in batch.as_dict().items():
        if not value.is_cuda:
            raise ArgumentError(f"{name!r} is in host memory; CuPy takes batches of Replay(device='cuda')")
        arrays[name] = cupy.from_dlpack(value)
    return arrays


def cupy_batches(replay: Replay) -> Iterator[dict[str, Any]]:
    """Each batch of an iteration over the replay, as CuPy arrays; the keys are under "rows"."""
    for batch in replay:
        yield {**as_cupy(batch), "rows": batch.keys}


__all__ = ["as_cupy", "cupy_batches"]
