"""Table of element dtypes: their names, stored codes and sizes, and their conversion to NumPy and torch.

All other tables of dtypes (for reductions, messages and GPU copies) derive from this one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import did_you_mean, shown
from geartrain.core.extras import require_torch
from geartrain.errors import FieldError, SchemaError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """One element type: its torch name, its code in the segment's header, and its size.

    `numpy_name` is None for types that NumPy does not have. Fields of these types are handled through torch, or through
    `ml_dtypes` if it is installed.
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
# NumPy builds a dtype's name each time it is asked for, which takes longer than copying a row.
_BY_NUMPY: dict[np.dtype[Any], Dtype] = {np.dtype(d.numpy_name): d for d in DTYPES.values() if d.numpy_name is not None}
# Names that mean the same in NumPy and torch, and those that do not.
_ALIASES = {"half": "float16", "double": "float64", "long": "int64", "torch.float": "float32", "torch.int": "int32"}
_AMBIGUOUS = {"float": ("float64", "float32"), "int": ("int64", "int32")}


def as_dtype(dtype: object) -> Dtype:
    """The `Dtype` for a name, a NumPy dtype, its code or its scalar type, or a torch dtype.

    Raises:
        SchemaError: the type cannot be stored; lists those that can.

    Example:
        >>> as_dtype("bfloat16").itemsize
        2
    """
    if isinstance(dtype, Dtype):
        return dtype
    if isinstance(dtype, np.dtype) and dtype in _BY_NUMPY:
        return _BY_NUMPY[dtype]
    name: str
    if dtype is None:  # which NumPy takes for float64
        raise SchemaError(_unknown_dtype(dtype))
    if isinstance(dtype, str) and not _is_numpy_code(dtype):
        name = dtype
    elif type(dtype).__module__ == "torch":
        name = str(dtype)
    else:
        try:
            as_numpy = np.dtype(dtype)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise SchemaError(_unknown_dtype(dtype)) from None
        if not as_numpy.isnative:
            raise SchemaError(
                f"dtype {as_numpy.str!r} is not in this machine's byte order: store {as_numpy.name!r} and convert "
                f"arrays with .astype({as_numpy.name!r})"
            )
        name = as_numpy.name
    if name in _AMBIGUOUS:
        in_numpy, in_torch = _AMBIGUOUS[name]
        raise SchemaError(
            f"dtype {name!r} is {in_numpy} in NumPy and {in_torch} in torch: write {in_torch!r} or {in_numpy!r}"
        )
    name = _ALIASES.get(name, name).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise SchemaError(_unknown_dtype(dtype))
    return DTYPES[name]


def _is_numpy_code(text: str) -> bool:
    """Whether it is a code of NumPy's for a number of some bytes, such as "f4" or "<i8" (`dtype.str` is one)."""
    return re.fullmatch(r"[<>=|]?[biufc][0-9]{1,2}", text) is not None


def _unknown_dtype(dtype: object) -> str:
    refused = f"dtype {shown(dtype)} cannot be stored; the store knows {', '.join(DTYPES)}"
    try:
        found = None if dtype is None else np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):
        found = None
    if (isinstance(dtype, str) and dtype in ("bytes", "str", "object")) or (found is not None and found.kind in "SUO"):
        return (
            f"{refused}. Text, bytes and objects have no fixed size: geartrain.Text() and geartrain.Bytes() are their "
            f"fields, in a store whose rows have no steps. In rows of steps keep up to n bytes as "
            f"Field((n,), 'uint8', per_row=True), and their number as Field((), 'uint32', per_row=True)"
        )
    if found is not None and found.names:
        return f"{refused}. A field holds numbers of one type: make a field of each of {', '.join(found.names)}"
    return refused + did_you_mean(dtype, DTYPES)


def dtype_of_code(code: int) -> Dtype:
    """The `Dtype` that a header's number stands for."""
    if code not in _BY_CODE:
        raise SchemaError(f"dtype code {code} is unknown to this build of geartrain")
    return _BY_CODE[code]


_NUMPY_DTYPES = {dtype.name: np.dtype(dtype.numpy_name) for dtype in DTYPES.values() if dtype.numpy_name is not None}


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """The NumPy dtype, from `ml_dtypes` for the types NumPy lacks.

    Raises:
        FieldError: NumPy has no such type and `ml_dtypes` is not installed or lacks it too.
    """
    known = _NUMPY_DTYPES.get(dtype.name)
    if known is not None:
        return known
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
    """The torch dtype; raises `MissingDependencyError` without torch."""
    require_torch("a tensor", "; output='numpy' and NumPy views do without")
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise SchemaError(f"torch {torch.__version__} has no dtype {dtype.name}")
    return found


def as_tensor(array: NDArray[Any], dtype: Dtype) -> torch.Tensor:
    """A tensor of the dtype over the array's memory; the array may hold the bytes as unsigned integers."""
    require_torch("a tensor", "; NumPy views do without")
    import torch

    if dtype.numpy_name is None:
        array = array.view(f"int{8 * dtype.itemsize}")  # torch.from_numpy knows signed integers of every size
        return torch.from_numpy(array).view(torch_dtype(dtype))
    known = _NUMPY_DTYPES[dtype.name]  # NumPy has two types of 64-bit integers, torch knows one
    return torch.from_numpy(array if array.dtype is known else array.view(known))


#: Types that DLPack, NumPy and torch all have.
_EXCHANGED = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
)


def is_exchanged(dtype: Dtype) -> bool:
    """Whether DLPack exchanges arrays of this dtype as what they are; of others `as_tensor` makes tensors."""
    return dtype.name in _EXCHANGED


def from_dlpack() -> Callable[[Any], torch.Tensor]:
    """What makes a tensor of a DLPack capsule, three times as fast as an array and then a tensor of that."""
    require_torch("a tensor", "; NumPy views do without")
    import torch.utils.dlpack

    # What that one calls in the end, without the frame of Python in between: 0.5 us a tensor instead of 0.7.
    made: Callable[[Any], torch.Tensor] = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
    return made


def plain_tensor(tensor: Any) -> Any:
    """A tensor's values without its gradient, and without the bits by which torch conjugates and negates when asked.

    Raises:
        SchemaError: its storage holds them no more.
    """
    tensor = tensor.detach()
    if not has_memory(tensor):
        raise SchemaError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed or shrunk")
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def has_memory(tensor: Any) -> bool:
    """Whether the storage still holds all elements of a tensor in host memory: it may be cut or freed beneath it."""
    import torch

    elements: int = tensor.numel()
    if not tensor.is_cpu or tensor.layout is not torch.strided or elements == 0:
        return True
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + elements) * tensor.element_size()
    return bool(end <= tensor.untyped_storage().nbytes() and tensor.data_ptr() != 0)


def count_write(arrays: Iterable[Any]) -> None:
    """Tells torch's autograd that the tensors among the arrays are written in place."""
    for array in arrays:
        if hasattr(array, "requires_grad"):
            import torch

            torch.autograd.graph.increment_version(array)


def writable_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array that may be read-only. Its user must not write then. torch would warn of such an array."""
    require_torch("a tensor", "; NumPy views do without")
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
