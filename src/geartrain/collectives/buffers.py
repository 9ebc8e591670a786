"""Host buffers: the address, element count and dtype of an array of any library."""

from __future__ import annotations

from typing import Any, NamedTuple

import geartrain._native as _native
from geartrain.core.arguments import check_choice, did_you_mean, is_masked, shown
from geartrain.core.dtypes import DTYPES
from geartrain.errors import ArgumentError

#: Dtypes that are reduced, in the order of their numbers in the native layer (native/collectives/reduce_kernels.h).
REDUCED_DTYPES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
)
DTYPE_CODES = {name: code for code, name in enumerate(REDUCED_DTYPES)}
ITEM_SIZES = {name: DTYPES[name].itemsize for name in REDUCED_DTYPES}
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7}

# By DLPack's type code (signed, unsigned, floating point, bfloat16, complex, bool) and bits.
_BY_DLPACK = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
}


def reduces(op: str, dtype: str) -> bool:
    """Whether there is such a reduction: a name of `OPS`, and one of `REDUCED_DTYPES`."""
    return bool(_native.reduces(OPS[op], DTYPE_CODES[dtype]))


def check_reduction(op: str, dtype: str) -> None:
    """Raises `ArgumentError` for an operation or a dtype that there is not, or not together."""
    check_choice("op", op, tuple(OPS))
    _reduced_dtype(dtype)
    if not reduces(op, dtype):
        raise ArgumentError(f"there is no {op} of {dtype}")


class HostBuffer(NamedTuple):
    """A contiguous array in host memory."""

    address: int
    elements: int
    dtype: str


def buffer_of(array: Any) -> HostBuffer:
    """The buffer of a C-contiguous, writable array in host memory.

    Accepts torch tensors (also with gradients), NumPy arrays (bfloat16 by `ml_dtypes` too), and every other object with
    the buffer protocol or DLPack. Nothing is copied.

    Raises:
        ArgumentError: not contiguous, not writable, not in host memory, or of a dtype or byte order that is
            not reduced.
    """
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        return _buffer_of_tensor(array)
    if is_masked(array):
        raise ArgumentError(
            "a masked array cannot be reduced, because the values under its mask would be too: pass its .data"
        )
    dtype = getattr(array, "dtype", None)
    name = getattr(dtype, "name", None)
    flags = getattr(array, "flags", None)
    if dtype is not None and name is not None and flags is not None and hasattr(array, "ctypes"):
        if not flags.c_contiguous or not flags.writeable:
            raise ArgumentError(
                "an array to reduce must be C-contiguous and writable, found "
                f"flags.c_contiguous={flags.c_contiguous!r} flags.writeable={flags.writeable!r}"
            )
        if not dtype.isnative:  # its name does not say so
            raise ArgumentError(f"an array to reduce must have this machine's byte order, found {dtype.str}")
        return HostBuffer(array.ctypes.data, array.size, _reduced_dtype(name))
    _native.sleep_at_finalization()
    try:
        address, count, code, bits = _native.array_memory(array)
    except TypeError:
        raise ArgumentError(
            f"cannot reduce a {type(array).__name__}: pass a C-contiguous writable array in host memory, "
            "with the buffer protocol or DLPack"
        ) from None
    found = _BY_DLPACK.get((code, bits))
    if found is None:
        raise ArgumentError(
            f"arrays of DLPack code {code} with {bits} bits cannot be reduced; possible are {', '.join(REDUCED_DTYPES)}"
        )
    return HostBuffer(address, count, found)


def _buffer_of_tensor(tensor: Any) -> HostBuffer:
    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor to reduce must be on the CPU, found one on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            "a lazy conjugate or negative tensor cannot be reduced: pass its resolve_conj().resolve_neg()"
        )
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a tensor to reduce must be contiguous, found strides {tensor.stride()} of shape {tuple(tensor.shape)}"
        )
    return HostBuffer(tensor.data_ptr(), tensor.numel(), _reduced_dtype(str(tensor.dtype).removeprefix("torch.")))


def _reduced_dtype(name: str) -> str:
    if not isinstance(name, str) or name not in DTYPE_CODES:
        raise ArgumentError(
            f"arrays of {shown(name)} cannot be reduced; possible are "
            f"{', '.join(REDUCED_DTYPES)}{did_you_mean(name, REDUCED_DTYPES)}"
        )
    return name
