"""Columns of a store: NumPy and torch views of its blocks, and checks of values given for several rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import check_texts, check_unmasked, check_whole, did_you_mean, real_number, shown
from geartrain.core.dtypes import DTYPES, as_tensor, numpy_dtype, plain_tensor
from geartrain.core.schema import Field
from geartrain.errors import FieldError, SchemaError
from geartrain.store.rate_limiter import RateLimiter

if TYPE_CHECKING:
    import torch

_INFINITY = float("inf")


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
        #: What `numpy` has returned, by field: a row looks there first.
        self.arrays: dict[str, NDArray[Any]] = {}
        self._torch: dict[str, torch.Tensor] = {}

    def number(self, name: str) -> int:
        """A field's place among the fields. Raises `FieldError` for an unknown one."""
        try:
            return self._numbers[name]
        except (KeyError, TypeError):  # TypeError: what is no text may not even be hashed
            raise self._unknown(name) from None

    def names(self, what: str, names: Any) -> tuple[str, ...]:
        """Names of fields. Raises `ArgumentError` if they are not a list of names, `FieldError` for an unknown name."""
        found = tuple(check_texts(what, names))
        for name in found:
            self.number(name)
        return found

    def _unknown(self, name: object) -> FieldError:
        return FieldError(
            f"the store has no field {shown(name)}; it has {', '.join(self._numbers)}"
            f"{did_you_mean(name, self._numbers)}"
        )

    def raw(self, name: str) -> NDArray[Any]:
        """The column, in unsigned integers for the types that NumPy lacks."""
        number = self.number(name)
        if name not in self._raw:
            self._raw[name] = self.native.column(number)
        return self._raw[name]

    def numpy(self, name: str) -> NDArray[Any]:
        """The column in its own dtype; raises `FieldError` where NumPy has none."""
        try:
            return self.arrays[name]
        except KeyError:
            pass
        except TypeError:
            raise self._unknown(name) from None
        raw = self.raw(name)
        self.arrays[name] = raw.view(numpy_dtype(DTYPES[self.fields[name].dtype]))
        return self.arrays[name]

    def torch(self, name: str) -> torch.Tensor:
        """The column as a tensor over the same memory."""
        raw = self.raw(name)
        if name not in self._torch:
            self._torch[name] = as_tensor(raw, DTYPES[self.fields[name].dtype])
        return self._torch[name]

    def take(self, name: str, index: int, taken: set[str]) -> None:
        """Zeroes a field's block of a row that is being written, the first time, which `taken` notes.

        Raises:
            StaleKeyError: another process writes the row.
        """
        self.native.take_block(taken, name, self._numbers[name], index)


def check_priority(priority: Any) -> float | None:
    """The priority, or None for the store's own; raises `SchemaError` unless it is a finite number >= 0."""
    if priority is None:
        return None
    number: float = priority if priority.__class__ is float else real_number(priority)
    if not 0 <= number < float("inf"):
        raise SchemaError(f"a priority must be a finite number >= 0, found {shown(priority)}")
    return number


def check_version(version: Any) -> int:
    """The version; raises `ArgumentError`, or `SchemaError`, unless it is a whole number of 64 bits."""
    if version.__class__ is int and -(2**63) <= version < 2**63:
        return version  # type: ignore[no-any-return]
    number = check_whole("version", version)
    if not -(2**63) <= number < 2**63:
        raise SchemaError(f"a version must be a whole number of 64 bits, found {shown(version)}")
    return number


def check_entry(priority: Any, version: Any) -> tuple[float | None, int]:
    """Checks a row's initial priority and version: `check_priority` and `check_version` in one call."""
    if (
        (priority is None or (priority.__class__ is float and 0 <= priority < _INFINITY))
        and version.__class__ is int
        and -(2**63) <= version < 2**63
    ):
        return priority, version
    return check_priority(priority), check_version(version)


def as_column(values: Any, n: int, dtype: Any, what: str) -> NDArray[Any] | None:
    """Per-row values as a contiguous array (n,), or None. A single number stands for all rows."""
    if values is None:
        return None
    check_unmasked(f"`{what}`", values)
    try:
        array = np.asarray(plain_tensor(values).cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor without values, as on meta
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
