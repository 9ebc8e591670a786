"""JAX arrays of batches on host or GPU, sharing the batch's memory through DLPack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from geartrain.core.extras import require
from geartrain.core.schema import nested as as_tree

if TYPE_CHECKING:
    from geartrain.replay.batch import Batch
    from geartrain.replay.replay import Replay


def as_jax(batch: Batch, *, nested: bool = False) -> dict[str, Any]:
    """A batch's fields and metadata (`Batch.as_dict`) as JAX arrays over the same memory.

    The memory belongs to the batch while an array over it lives. On a GPU, JAX waits for the stream that the batch was
    taken on; the host does not wait. Without jax_enable_x64, 64-bit fields are copied into 32 bits, and 64-bit metadata
    (`version`, `probability`, `importance`) are left out. Types that NumPy lacks (bfloat16) are copied from batches of
    NumPy arrays, not from tensors.

    Args:
        batch: batch of `Replay` or `fetch`, with output="torch" or "numpy".
        nested: return a pytree by the dots of the names: "obs.x" is `arrays["obs"]["x"]`.

    Raises:
        MissingDependencyError: JAX is not installed.
        ArgumentError: with `nested`, one name is the parent of another: "obs" and "obs.x".

    Cost: about 25 us a field, which JAX takes for any array.

    Examples:
        >>> import numpy as np, geartrain as gt
        >>> store = gt.Store.create({"obs": gt.Field((3,), "float32")}, max_length=10, capacity=4)
        >>> keys = store.insert({"obs": np.zeros((2, 10, 3), "f")})
        >>> as_jax(gt.fetch(store, keys))["obs"].shape
        (2, 10, 3)
        >>> store.close()
    """
    jax = require("jax", "geartrain[jax]", "A JAX array")
    from geartrain.integrations.jax.leaves import as_array

    arrays = {}
    value: Any
    for name, value in batch.as_dict().items():
        is_array = isinstance(value, np.ndarray)
        wide = value.dtype.itemsize == 8 and not (value.dtype.kind == "c" if is_array else value.dtype.is_complex)
        if wide and not jax.config.jax_enable_x64:
            if name in batch.fields:
                arrays[name] = jax.numpy.asarray(value if is_array else value.cpu().numpy())  # JAX converts to 32 bits
        else:
            arrays[name] = as_array(value) if is_array else jax.dlpack.from_dlpack(value.contiguous())
    return as_tree(arrays) if nested else arrays


def jax_batches(replay: Replay, *, nested: bool = False) -> Iterator[dict[str, Any]]:
    """Each batch of an iteration over the replay, as JAX arrays; the keys are under "rows"."""
    for batch in replay:
        yield {**as_jax(batch, nested=nested), "rows": batch.keys}


__all__ = ["as_jax", "jax_batches"]
