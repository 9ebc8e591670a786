"""Conversions between JAX and NumPy: leaves of pytrees, random keys and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError, SchemaError


def is_traced(*values: Any) -> bool:
    """Whether jit, vmap or scan traces one of them."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def dtype_of(name: str, leaf: Any) -> np.dtype[Any]:
    """The dtype that JAX gives an array: of 32 bits where 64 are not enabled."""
    found = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if jax.dtypes.issubdtype(found, jax.dtypes.prng_key):
        raise SchemaError(f"{name!r} is a random key; store jax.random.key_data of it")
    if np.dtype(found).kind in "OSUVMm" and np.dtype(found).isbuiltin == 1:
        raise SchemaError(f"{name!r} is {found}, no numbers")
    canonical: Callable[[Any], np.dtype[Any]] = jax.dtypes.canonicalize_dtype
    return np.dtype(canonical(found))


def name_of(path: Any) -> str:
    """A leaf's place in its pytree, with dots: "obs.camera", "action.0"."""
    parts = []
    for key in path:
        part = next((getattr(key, what) for what in ("key", "name", "idx") if hasattr(key, what)), "")
        parts.append(str(part))
    return ".".join(parts) or "timestep"


def key_data(key: Any) -> Any:
    """The words of a random key, of the old kind or the new."""
    found = getattr(key, "dtype", None)
    if found is not None and jax.dtypes.issubdtype(found, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if getattr(key, "dtype", None) != np.uint32 or np.ndim(key) != 1 or np.shape(key)[0] < 2:
        raise ArgumentError(f"a sample is drawn by one random key, jax.random.key(seed), found {key!r}")
    return key


def key_number(words: NDArray[np.uint32]) -> int:
    """A key's words as one number of 64 bits; of longer keys their exclusive or, two by two."""
    padded = words if len(words) % 2 == 0 else np.append(words, np.uint32(0))
    return int(np.bitwise_xor.reduce(np.ascontiguousarray(padded).view(np.uint64)))


def as_array(values: Any) -> Any:
    """An array over the same memory; a copy of types that NumPy does not exchange."""
    if isinstance(values, jax.core.Tracer):
        return values
    if values.dtype.isbuiltin != 1:
        return jnp.asarray(values)
    return jax.dlpack.from_dlpack(np.ascontiguousarray(values))


__all__ = ["as_array", "dtype_of", "is_traced", "key_data", "key_number", "name_of"]
