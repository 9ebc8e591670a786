"""JAX: batches as `jax.Array`s over the same memory, and replay buffers with flashbax's interface over a store.

`as_jax` and `jax_batches` convert a replay's batches. `make_flat_buffer`, `make_prioritised_flat_buffer` and
`make_trajectory_buffer` make buffers. Their `add` and `sample` can be called inside `jax.jit` or outside.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from geartrain.core.extras import require
from geartrain.integrations.jax.arrays import as_jax, jax_batches

if TYPE_CHECKING:
    from geartrain.integrations.jax.buffers import (
        BufferState,
        ExperiencePair,
        Sample,
        TrajectoryBuffer,
        make_flat_buffer,
        make_prioritised_flat_buffer,
        make_trajectory_buffer,
    )

__all__ = [
    "BufferState",
    "ExperiencePair",
    "Sample",
    "TrajectoryBuffer",
    "as_jax",
    "jax_batches",
    "make_flat_buffer",
    "make_prioritised_flat_buffer",
    "make_trajectory_buffer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("jax", "geartrain[jax]", "A replay buffer for JAX")
    return getattr(importlib.import_module("geartrain.integrations.jax.buffers"), name)
