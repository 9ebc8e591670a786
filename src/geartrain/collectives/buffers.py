"""Where an array's numbers are, whatever library it comes from."""

from __future__ import annotations

from typing import Any, NamedTuple

import geartrain._native as _native
from geartrain.errors import ArgumentError

#: Numbers of the native layer (native/collectives/reduce_kernels.h).
DTYPES = {
    "float32": 0,
    "float64": 1,
    "bfloat16": 2,
    "float16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
}
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3}
SIZES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}

# DLPack's type codes: signed, unsigned and floating point numbers, and bfloat16.
_BY_DLPACK = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
}


class Memory(NamedTuple):
    """Numbers in memory: where, how many, of what type."""

    address: int
    elements: int
    dtype: str


def memory_of(array: Any) -> Memory:
    """The memory of a C-contiguous array in host memory that may be written.

    Torch tensors (also those that require gradients), NumPy arrays (bfloat16 by `ml_dtypes` too), and whatever else
    has the buffer protocol or DLPack. Nothing is copied.

    Raises:
        ArgumentError: not contiguous, not writable, not in host memory, or of a dtype that is not reduced.
    """
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        return _memory_of_tensor(array)
    dtype = getattr(array, "dtype", None)
    name = getattr(dtype, "name", None)
    flags = getattr(array, "flags", None)
    if name is not None and flags is not None and hasattr(array, "ctypes"):
        if not flags.c_contiguous or not flags.writeable:
            raise ArgumentError(
                f"an array to reduce is C-contiguous and writable, found {flags.c_contiguous=} {flags.writeable=}"
            )
        return Memory(array.ctypes.data, array.size, _checked(name))
    try:
        address, count, code, bits = _native.array_memory(array)
    except TypeError:
        raise ArgumentError(
            f"cannot reduce a {type(array).__name__}: it takes C-contiguous writable arrays in host memory, with the "
            "buffer protocol or DLPack"
        ) from None
    found = _BY_DLPACK.get((code, bits))
    if found is None:
        raise ArgumentError(
            f"no dtype of DLPack code {code} with {bits} bits is reduced; there are {', '.join(DTYPES)}"
        )
    return Memory(address, count, found)


def _memory_of_tensor(tensor: Any) -> Memory:
    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor to reduce is on the CPU, found one on {tensor.device}")
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a tensor to reduce is contiguous, found strides {tensor.stride()} of shape {tuple(tensor.shape)}"
        )
    return Memory(tensor.data_ptr(), tensor.numel(), _checked(str(tensor.dtype).removeprefix("torch.")))


def _checked(name: str) -> str:
    if name not in DTYPES:
        raise ArgumentError(f"arrays of {name} are not reduced; there are {', '.join(DTYPES)}")
    return name
