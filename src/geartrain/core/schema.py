"""What a row is made of: fields, their dtypes, and how both are told apart from anything else.

A store is a table of rows. Each field is one column: a contiguous array of equal blocks, one block a
row. A block has time as its first axis, and holds up to the store's `max_length` steps; a field that is `per_row`
(a task id, an embedding of the prompt) has no time and holds one value a row.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError, FieldError, SchemaError

if TYPE_CHECKING:
    import torch

MAX_FIELDS = 64
MAX_DIMS = 8
MAX_AXIS = 2**31 - 1
MAX_NAME_BYTES = 63


@dataclass(frozen=True)
class Dtype:
    """One element type: its torch name, its number in the segment's header and its size.

    `numpy_name` is None for the types that NumPy does not have. Such fields are handled through torch,
    or through `ml_dtypes` where that is installed.
    """

    name: str
    code: int
    itemsize: int
    numpy_name: str | None


# The codes stand in segment headers and checkpoints: never renumber them, only append.
DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("bool", 1, 1, "bool"),
        Dtype("uint8", 2, 1, "uint8"),
        Dtype("int8", 3, 1, "int8"),
        Dtype("uint16", 4, 2, "uint16"),
        Dtype("int16", 5, 2, "int16"),
        Dtype("uint32", 6, 4, "uint32"),
        Dtype("int32", 7, 4, "int32"),
        Dtype("uint64", 8, 8, "uint64"),
        Dtype("int64", 9, 8, "int64"),
        Dtype("float16", 10, 2, "float16"),
        Dtype("bfloat16", 11, 2, None),
        Dtype("float32", 12, 4, "float32"),
        Dtype("float64", 13, 8, "float64"),
        Dtype("complex32", 14, 4, None),
        Dtype("complex64", 15, 8, "complex64"),
        Dtype("complex128", 16, 16, "complex128"),
        Dtype("float8_e4m3fn", 17, 1, None),
        Dtype("float8_e5m2", 18, 1, None),
        Dtype("float8_e4m3fnuz", 19, 1, None),
        Dtype("float8_e5m2fnuz", 20, 1, None),
        Dtype("float8_e8m0fnu", 21, 1, None),
    )
}
_BY_CODE = {d.code: d for d in DTYPES.values()}
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "int": "int32", "long": "int64"}


def as_dtype(dtype: object) -> Dtype:
    """The `Dtype` for a name, a NumPy dtype or scalar type, or a torch dtype.

    Raises:
        SchemaError: the type cannot be stored; lists those that can.

    Example:
        >>> as_dtype("bfloat16").itemsize
        2
    """
    if isinstance(dtype, Dtype):
        return dtype
    name: str
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__ == "torch":
        name = str(dtype)
    else:
        try:
            as_numpy = np.dtype(dtype)  # type: ignore[call-overload]
        except TypeError:
            raise SchemaError(_unknown_dtype(dtype)) from None
        if not as_numpy.isnative:
            raise SchemaError(f"dtype {as_numpy!r} is not in this machine's byte order")
        name = as_numpy.name
    name = name.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise SchemaError(_unknown_dtype(dtype))
    return DTYPES[name]


def _unknown_dtype(dtype: object) -> str:
    return f"dtype {dtype!r} cannot be stored; the store knows {', '.join(DTYPES)}"


def dtype_of_code(code: int) -> Dtype:
    """The `Dtype` that a header's number stands for."""
    if code not in _BY_CODE:
        raise SchemaError(f"dtype code {code} is unknown to this build of geartrain")
    return _BY_CODE[code]


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """The NumPy dtype, from `ml_dtypes` for the types NumPy lacks.

    Raises:
        FieldError: NumPy has no such type and `ml_dtypes` is not installed or lacks it too.
    """
    if dtype.numpy_name is not None:
        return np.dtype(dtype.numpy_name)
    try:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return found
    except (ImportError, AttributeError):
        raise FieldError(
            f"NumPy has no {dtype.name}. Use torch views (row.torch(name), output='torch'), "
            f"or `pip install ml_dtypes` for types it defines."
        ) from None


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype; torch must be installed."""
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise SchemaError(f"torch {torch.__version__} has no dtype {dtype.name}")
    return found


def as_tensor(array: NDArray[Any], dtype: Dtype) -> torch.Tensor:
    """A tensor of the dtype over the array's memory; the array may hold the bytes as unsigned integers."""
    import torch

    if dtype.numpy_name is None:
        array = array.view(f"int{8 * dtype.itemsize}")  # torch.from_numpy knows signed integers of every size
        return torch.from_numpy(array).view(torch_dtype(dtype))
    return torch.from_numpy(array.view(dtype.numpy_name))  # NumPy has two types of 64-bit integers, torch knows one


def writable_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array that may be read-only; whoever gets it must not write then. torch would warn of it."""
    import torch

    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def as_raw(array: Any, dtype: Dtype) -> Any:
    """The same memory as integers, for the types that arrays cannot exchange. Takes arrays and tensors."""
    if hasattr(array, "is_contiguous"):
        import torch

        return array.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    return array.view(f"uint{8 * dtype.itemsize}")


@dataclass(frozen=True, init=False)
class Field:
    """One column of a store: the shape and dtype of one step, or of a value that a row has once.

    Args:
        shape: shape of one step; `()` for a scalar. How many steps a row holds at most is the store's
            `max_length`. At most 7 axes, or 8 with `per_row=True`.
        dtype: a name ("float32", "bfloat16", ...), a NumPy dtype or a torch dtype.
        per_row: the field has no time: a row has one value of this shape, however many steps it has.

    Raises:
        SchemaError: an empty axis, too many axes, an unknown dtype.

    Example:
        >>> Field((11,), "float32").nbytes
        44
    """

    shape: tuple[int, ...]
    dtype: str
    per_row: bool

    def __init__(self, shape: tuple[int, ...] | list[int] | int, dtype: object, *, per_row: bool = False) -> None:
        try:
            dims = (shape,) if isinstance(shape, int) else tuple(operator.index(n) for n in shape)
        except TypeError:
            raise SchemaError(f"a shape is a whole number or several, found {shape!r}") from None
        most = MAX_DIMS if per_row else MAX_DIMS - 1
        if len(dims) > most:
            raise SchemaError(
                f"a field has at most {MAX_DIMS} axes{'' if per_row else ', one of them time'}, "
                f"shape {dims} has {len(dims)}"
            )
        if any(n <= 0 for n in dims):
            raise SchemaError(f"every axis must hold at least one element, shape is {dims}")
        if any(n > MAX_AXIS for n in dims):
            raise SchemaError(f"an axis holds at most {MAX_AXIS} elements, shape is {dims}")
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", as_dtype(dtype).name)
        object.__setattr__(self, "per_row", bool(per_row))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one step, or of the value that a row has once."""
        return math.prod(self.shape) * self.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements; raises `FieldError` where NumPy has none."""
        return numpy_dtype(DTYPES[self.dtype])

    def block_shape(self, max_length: int) -> tuple[int, ...]:
        """Shape of a row's block in a store of `max_length` steps a row: time in front."""
        return self.shape if self.per_row else (max_length, *self.shape)

    def block_nbytes(self, max_length: int) -> int:
        """Bytes of a row's block in a store of `max_length` steps a row, without the padding up to 64."""
        return self.nbytes if self.per_row else max_length * self.nbytes


def check_fields(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields as a plain dict, once they make a schema a store can hold.

    Raises:
        SchemaError: no field, too many, or a bad name.
    """
    if not fields:
        raise SchemaError("a store needs at least one field")
    if len(fields) > MAX_FIELDS:
        raise SchemaError(f"a store has at most {MAX_FIELDS} fields, {len(fields)} were given")
    for name, field in fields.items():
        if not isinstance(field, Field):
            raise SchemaError(f"field {name!r} must be a geartrain.Field, found {type(field).__name__}")
        if not name or "\0" in name or len(name.encode()) > MAX_NAME_BYTES:
            raise SchemaError(f"a field's name has 1 to {MAX_NAME_BYTES} bytes of UTF-8, found {name!r}")
    return dict(fields)


def check_max_length(fields: Mapping[str, Field], max_length: int | None) -> int:
    """The longest row in steps: what was given, or 1 where no field has time.

    Raises:
        ArgumentError: absent though a field has time; shows the call to write. Or given though none has.
    """
    timed = [name for name, field in fields.items() if not field.per_row]
    if not timed:
        if max_length not in (None, 1):
            raise ArgumentError(f"max_length={max_length}, but every field is per_row: such a row has one step")
        return 1
    if max_length is None:
        first = fields[timed[0]]
        raise ArgumentError(
            f"give max_length=, the steps of the longest row: a field's shape is that of one step. "
            f"For example Store.create(..., {{{timed[0]!r}: Field({first.shape}, {first.dtype!r})}}, max_length=1000, "
            f"...); a value that a row has once is Field(shape, dtype, per_row=True)"
        )
    try:
        length = int(operator.index(max_length))
    except TypeError:
        raise ArgumentError(f"max_length must be a whole number of steps, found {max_length!r}") from None
    if not 1 <= length <= MAX_AXIS:
        raise ArgumentError(f"max_length must be from 1 to {MAX_AXIS} steps, found {length}")
    return length


def stored_schema(fields: Mapping[str, Field], max_length: int) -> list[tuple[str, Dtype, bool, list[int]]]:
    """Fields as segments and manifests keep them: name, dtype, whether it has time, shape of a row's block."""
    return [
        (name, DTYPES[field.dtype], not field.per_row, list(field.block_shape(max_length)))
        for name, field in fields.items()
    ]


def fields_of_stored(stored: Iterable[tuple[str, object, bool, Sequence[int]]]) -> tuple[dict[str, Field], int]:
    """What `stored_schema` was made of: the fields, and the longest row in steps."""
    fields: dict[str, Field] = {}
    max_length = 1
    for name, dtype, timed, shape in stored:
        fields[name] = Field(tuple(shape)[1:] if timed else tuple(shape), dtype, per_row=not timed)
        if timed:
            max_length = shape[0]
    return fields, max_length
