"""Columns of a store: NumPy and torch views of its blocks, and values given for several rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.dtypes import DTYPES, as_tensor, numpy_dtype
from geartrain.core.schema import Field
from geartrain.errors import FieldError, SchemaError
from geartrain.store.rate_limiter import RateLimiter

if TYPE_CHECKING:
    import torch


class Columns:
    """Views of a store's columns, made once each: every block of a field as one array of all its blocks."""

    def __init__(self, native: _native.Store, fields: Mapping[str, Field], max_length: int) -> None:
        self.native = native
        #: The store's, which its keys carry.
        self.store_id = int(native.describe()["store_id"])
        self.fields = fields
        self.limiter = RateLimiter(native)
        self.inserter = _native.Inserter(native, list(fields))
        self.max_length = max_length
        self._numbers = {name: number for number, name in enumerate(fields)}
        self._raw: dict[str, NDArray[Any]] = {}
        self._numpy: dict[str, NDArray[Any]] = {}
        self._torch: dict[str, torch.Tensor] = {}

    def number(self, name: str) -> int:
        """A field's place among the fields. Raises `FieldError` for an unknown one."""
        if name not in self._numbers:
            raise FieldError(f"the store has no field {name!r}; it has {', '.join(self._numbers)}")
        return self._numbers[name]

    def raw(self, name: str) -> NDArray[Any]:
        """The column, in unsigned integers for the types that NumPy lacks."""
        if name not in self._raw:
            self._raw[name] = self.native.column(self.number(name))
        return self._raw[name]

    def numpy(self, name: str) -> NDArray[Any]:
        """The column in its own dtype; raises `FieldError` where NumPy has none."""
        if name not in self._numpy:
            raw = self.raw(name)
            self._numpy[name] = raw.view(numpy_dtype(DTYPES[self.fields[name].dtype]))
        return self._numpy[name]

    def torch(self, name: str) -> torch.Tensor:
        """The column as a tensor over the same memory."""
        if name not in self._torch:
            self._torch[name] = as_tensor(self.raw(name), DTYPES[self.fields[name].dtype])
        return self._torch[name]


def as_column(values: Any, n: int, dtype: Any, what: str) -> NDArray[Any] | None:
    """Per-row values as a contiguous array (n,), or None. A single number stands for all rows."""
    if values is None:
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        raise SchemaError(f"`{what}` must be one number or an array ({n},), found {type(values).__name__}") from None
    if array.ndim == 0:
        array = np.broadcast_to(array, (n,))
    if array.shape != (n,):
        raise SchemaError(f"`{what}` must be one number or have shape ({n},), found {array.shape}")
    if np.issubdtype(dtype, np.integer):
        if array.dtype.kind not in "iu":
            raise SchemaError(f"`{what}` must be whole numbers, found {array.dtype}")
        most = np.iinfo(dtype)
        if array.size and not most.min <= int(array.min()) <= int(array.max()) <= most.max:
            raise SchemaError(
                f"`{what}` must be whole numbers from {most.min} to {most.max}, found {array.min()} to {array.max()}"
            )
    elif array.dtype.kind not in "iuf":
        raise SchemaError(f"`{what}` must be numbers, found {array.dtype}")
    return np.ascontiguousarray(array, dtype=dtype)
