"""Serializes tensors, arrays and plain containers into messages, without executing code when it decodes them.

`encode` returns a small header and the buffers of the large arrays. It does not copy these buffers. `decode` returns
arrays that are views of the message. native/python/codec.cc documents the format. Decoding is safe for untrusted bytes.

The codec supports:

- None, bool, int, float, complex, str, bytes and bytearray
- list, tuple, dict, set and frozenset, nested at most `MAX_DEPTH` deep
- NumPy arrays and scalars of plain dtypes
- torch tensors on the CPU, including nested tensors
- `torch.Size`, `torch.dtype` and `torch.device` (sent as its name)

Subclasses of these types are not supported: a named tuple would be decoded as a plain tuple. A `torch.nn.Parameter` is
decoded as a plain tensor. A nested tensor is decoded with memory of its own.

All other objects need pickle (protocol 5, buffers out of band), and both sides must allow it. Unpickling executes code.
`rpc` therefore allows pickle only between peers that have proved that they know the cluster's secret.
"""

from __future__ import annotations

import importlib
import io
import pickle as _pickle
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain._native as _native
from geartrain.core.dtypes import DTYPES, dtype_of_code, numpy_dtype, torch_dtype
from geartrain.core.extras import require_torch
from geartrain.errors import MessageError

if TYPE_CHECKING:
    import torch

#: How deep containers may be nested.
MAX_DEPTH = 64

Payload = _native.Payload
Message = _native.Message


def encode(value: object, *, pickle: bool = False) -> Payload:
    """Encodes a value: its header, and its big buffers, which are not copied.

    They must not change until the payload is sent.

    Raises:
        MessageError: the value, or something in it, is of an unsupported type and `pickle` is not allowed; or it is
            nested too deep, or contains itself.

    Example:
        >>> decode(pack(encode({"step": 3, "done": (True, None)})))
        {'step': 3, 'done': (True, None)}
    """
    return native_codec().encode(value, pickle)


def decode(message: Message, *, pickle: bool = False) -> Any:
    """Decodes a message. Arrays are writable views that keep the message's memory alive.

    Raises:
        MessageError: malformed.
        UntrustedPeerError: the message holds a pickle, and `pickle` is not allowed.
    """
    return native_codec().decode(message, pickle)


def pack(payload: Payload) -> Message:
    """A message as the other side would receive it: a copy of the payload."""
    return Message.make(payload.header, payload.buffers)


_made: _native.Codec | None = None


def native_codec() -> _native.Codec:
    """The native codec, for callers on a hot path: `encode(value, pickle)` and `decode(message, pickle)`."""
    global _made
    if _made is None:
        with_numpy = {numpy_dtype(d): d.code for d in DTYPES.values() if d.numpy_name is not None}
        itemsizes = {d.code: d.itemsize for d in DTYPES.values()}
        _made = _native.Codec(with_numpy, itemsizes, _torch_part, _dumps, _loads, MAX_DEPTH)
    return _made


def by_pickle_only(value: Any) -> str:
    """Why a value needs pickle, and which value can be sent instead."""
    what, instead = f"a {type(value)}", ""
    if isinstance(value, np.ndarray | np.generic):
        dtype = value.dtype
        what = f"a NumPy {'array' if isinstance(value, np.ndarray) else 'scalar'} of dtype {dtype.str}"
        if type(value) is not np.ndarray and isinstance(value, np.ndarray):
            what, instead = f"{what} and type {type(value).__name__}", "np.asarray(value)"
        elif dtype.newbyteorder("=") != dtype and dtype.kind in "biufc":
            instead = f"value.astype({dtype.newbyteorder('=').name!r})"
            what += ", whose byte order is not this machine's,"
        elif dtype.kind in "UO" or dtype.char == "S":
            instead = "value.tolist()"
        elif dtype.kind in "mM":
            instead = "value.view('int64')"
        elif dtype.names is not None:
            instead = "{name: value[name] for name in value.dtype.names}"
        elif dtype.kind in "fc":
            instead = f"value.astype({'float64' if dtype.kind == 'f' else 'complex128'!r})"
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        what = f"a {type(value).__name__} of dtype {value.dtype} and layout {value.layout}"
        if value.is_quantized:
            instead = "value.dequantize()"
        elif value.layout is not torch.strided:
            instead = "value.to_dense()"
        elif type(value) is not torch.Tensor:
            instead = "value.as_subclass(torch.Tensor)"
    advice = f"; send {instead}" if instead else ""
    return (
        f"{what} is sent by pickle only, and that is for peers that proved they know the cluster's secret, where "
        f"pickle is allowed{advice}"
    )


# --- torch ----------------------------------------------------------------------------------------------------------


def _torch_part() -> tuple[Any, ...]:
    """What the native codec needs for tensors; imported with the first of them."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise MessageError("the message has a torch tensor, but torch is not installed here") from None
    codes = {}
    for dtype in DTYPES.values():
        if hasattr(torch, dtype.name):
            codes[torch_dtype(dtype)] = dtype.code
    plain_types, strided = (torch.Tensor, torch.nn.Parameter), torch.strided

    def plain(tensor: Any) -> Any:
        """A contiguous strided CPU tensor with the same elements; None where the codec does not know its type."""
        if type(tensor) not in plain_types:
            return None
        if not tensor.is_cpu:
            raise MessageError(
                f"the tensor is on {tensor.device}: messages carry CPU tensors, and calls carry CUDA tensors "
                "in plain containers only. Move it (`tensor.cpu()`)"
            )
        if tensor.layout is not strided or tensor.is_quantized or tensor.is_nested:
            return None
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    by_code = {code: dtype for dtype, code in codes.items()}
    return torch.Tensor, codes, by_code, plain, torch.from_numpy, _torch_parts, _of_torch_parts


_SIZE, _DTYPE, _DEVICE, _NESTED = range(4)


def _torch_parts(value: Any) -> tuple[int, Any] | None:
    """Kind and plain value of what `_of_torch_parts` makes again; None for anything else."""
    torch = sys.modules["torch"]
    if type(value) is torch.Size:
        return _SIZE, tuple(value)
    if type(value) is torch.dtype:
        return _DTYPE, str(value).removeprefix("torch.")
    if type(value) is torch.device:
        return _DEVICE, str(value)
    if isinstance(value, torch.Tensor) and value.is_nested:
        layout = "jagged" if value.layout is torch.jagged else "strided"
        return _NESTED, (layout, [part.detach() for part in value.unbind()])
    return None


def _of_torch_parts(kind: int, value: Any) -> Any:
    torch = importlib.import_module("torch")
    if kind == _SIZE and type(value) is tuple and all(type(n) is int and -(2**63) <= n < 2**63 for n in value):
        return torch.Size(value)
    if kind == _DTYPE and type(value) is str and type(dtype := getattr(torch, value, None)) is torch.dtype:
        return dtype
    if kind == _DEVICE and type(value) is str:
        return torch.device(value)
    if (
        kind == _NESTED
        and type(value) is tuple
        and len(value) == 2
        and value[0] in ("jagged", "strided")
        and type(value[1]) is list
        and all(type(part) is torch.Tensor and not part.is_nested for part in value[1])
    ):
        with warnings.catch_warnings():  # that nested tensors of the layout "strided" are a prototype
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor(value[1], layout=getattr(torch, value[0]))
    raise MessageError("the message holds what is no value of torch's")


# --- pickle ---------------------------------------------------------------------------------------------------------


def _dumps(value: object, add_buffer: Callable[[_pickle.PickleBuffer], object]) -> bytes:
    """Pickles out of band; functions and classes that pickle cannot name go by cloudpickle where that is installed."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=add_buffer).dump(value)
        return file.getvalue()
    except (_pickle.PicklingError, AttributeError, TypeError) as error:
        try:
            cloudpickle = importlib.import_module("cloudpickle")
            file = io.BytesIO()
            _with_tensors(cloudpickle.Pickler)(file, protocol=5).dump(value)
            return file.getvalue()
        except ImportError:
            raise MessageError(f"a {type(value).__name__} cannot be pickled: {error}") from error


def _loads(data: bytes, buffers: list[Any]) -> Any:
    return _pickle.loads(data, buffers=buffers)


class _Pickler(_pickle.Pickler):
    """Tensors inside objects go out of band as well; torch's own reduction copies them into the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor):
            return NotImplemented
        if obj.device.type not in ("cpu", "meta"):
            # torch would copy it into the pickle, and to the device of the same index there.
            raise MessageError(
                f"a pickled object has a tensor on {obj.device}: move it to the CPU (`tensor.cpu()`), or send "
                "it in plain containers"
            )
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.requires_grad or obj.numel() == 0:
            return NotImplemented
        if obj.layout is not torch.strided or obj.is_conj() or obj.is_neg() or obj.is_quantized:
            return NotImplemented
        dtype = DTYPES.get(str(obj.dtype).removeprefix("torch."))
        if dtype is None:
            return NotImplemented
        raw = obj.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor_of, (_pickle.PickleBuffer(raw), dtype.code, tuple(obj.shape))


def _with_tensors(pickler: Any) -> Any:
    """cloudpickle's pickler, with tensors as in ours; it has no buffer callback, so they are copied into the pickle."""

    class Pickler(pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            made = _Pickler.reducer_override(self, obj)  # type: ignore[arg-type]
            return super().reducer_override(obj) if made is NotImplemented else made

    return Pickler


def _tensor_of(raw: Any, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    require_torch("a message that holds a tensor")
    import torch

    memory = np.frombuffer(raw, np.uint8)
    if not memory.flags.writeable:
        memory = memory.copy()
    return torch.from_numpy(memory).view(torch_dtype(dtype_of_code(code))).view(shape)
