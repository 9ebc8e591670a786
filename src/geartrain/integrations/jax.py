"""JAX arrays of batches, without a copy: through DLPack, in the memory of the batch, host or GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from geartrain.errors import MissingDependencyError

if TYPE_CHECKING:
    from geartrain.replay.batch import Batch
    from geartrain.replay.replay import Replay


def as_jax(batch: Batch) -> dict[str, Any]:
    """A batch's fields and metadata (`Batch.as_dict`) as JAX arrays over the same memory.

    The memory stays the batch's for as long as an array over it lives. JAX waits on the GPU for the stream that the
    batch was taken on; the host does not wait. 64-bit metadata (`version`, `probability`, `importance`) need
    jax_enable_x64 and are left out without it: they would be cut to 32 bits by a copy.

    Raises:
        MissingDependencyError: JAX is not installed.

    Cost: a few microseconds a field.
    """
    try:
        import jax
    except ImportError:
        raise MissingDependencyError("JAX arrays need jax: pip install 'geartrain[jax]'") from None
    config: Any = jax.config  # whose options mypy does not know
    arrays = {}
    value: Any
    for name, value in batch.as_dict().items():
        if value.dtype.itemsize == 8 and not value.dtype.is_complex and not config.jax_enable_x64:
            if name in batch.fields:
                arrays[name] = jax.numpy.asarray(value.cpu().numpy())  # JAX converts to 32 bits
            continue
        arrays[name] = jax.dlpack.from_dlpack(value.contiguous())
    return arrays


def jax_batches(replay: Replay) -> Iterator[dict[str, Any]]:
    """Each batch of an iteration over the replay, as JAX arrays; the keys are under "rows"."""
    for batch in replay:
        yield {**as_jax(batch), "rows": batch.keys}


__all__ = ["as_jax", "jax_batches"]
