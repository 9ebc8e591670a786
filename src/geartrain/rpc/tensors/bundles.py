"""Tensor bundles: groups of tensors that one message describes and a channel transfers out of band."""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.core.dtypes import DTYPES
from geartrain.device.cuda_ipc import layout
from geartrain.device.device import DeviceRuntime
from geartrain.errors import DeviceError, MessageError
from geartrain.rpc.tensors.channels import ARRAY, TENSOR, LeafSpec, TensorChannels
from geartrain.rpc.tensors.device_map import CPU
from geartrain.rpc.tensors.pytree import KeyPath, put_back

#: Smallest arrays and CPU tensors, in bytes, that a one-sided channel transfers: a transfer costs some round trips.
BIG_BYTES = _native.OUT_OF_BAND_BYTES
NONCE_BYTES = 64

#: Channel, device of the receiver's (or, of a result, where the leaves are), number of a lease, token, and the key path
#: and spec of each leaf.
TensorBundle = tuple[str, int, int, bytes, list[tuple[KeyPath, LeafSpec]]]


def leaves_at(tree: Any, key_paths: list[KeyPath]) -> list[Any]:
    """The leaves at these key paths. Raises `MessageError` where there is no such place."""
    leaves = []
    for key_path in key_paths:
        node = tree
        for i in key_path:
            node = list(node.values()) if type(node) is dict else node
            if type(node) not in (list, tuple) or not 0 <= i < len(node):
                raise MessageError("a leaf for a place that is not there")
            node = node[i]
        leaves.append(node)
    return leaves


def through_host(driver: DeviceRuntime, tree: Any, device: int, entries: list[Any]) -> tuple[Any, TensorBundle]:
    """The value with copies on the CPU in the places of its leaves, and their bundle."""
    copies = driver.to_host([leaf for _, leaf in entries])
    tree = put_back(tree, [(key_path, copy) for (key_path, _), copy in zip(entries, copies, strict=True)])
    return tree, ("host", device, 0, b"", [(key_path, (0, (), 0, TENSOR)) for key_path, _ in entries])


def moved(driver: DeviceRuntime, device: int, entries: list[Any], leaves: list[Any]) -> list[Any]:
    """Host leaves on their device."""
    if device == CPU:
        return []  # they stay where they are
    if device >= driver.count() or device < CPU:
        raise DeviceError(f"there is no cuda:{device} here, of {driver.count()}")
    if not all(is_on_host(leaf) and not isinstance(leaf, np.ndarray) for leaf in leaves):
        raise MessageError("only tensors go to a GPU")
    return [(key_path, leaf) for (key_path, _), leaf in zip(entries, driver.from_host(device, leaves), strict=True)]


def specs_of(driver: DeviceRuntime, leaves: list[Any]) -> tuple[list[LeafSpec], int]:
    """Of each leaf, and the bytes of a buffer for all of them."""
    heads = []
    for leaf in leaves:
        if not is_on_host(leaf):
            code, shape, nbytes = driver.form(leaf)
            heads.append((code, shape, nbytes, TENSOR))
        else:
            name = str(leaf.dtype).removeprefix("torch.")
            kind = ARRAY if isinstance(leaf, np.ndarray) else TENSOR
            heads.append((DTYPES[name].code, tuple(leaf.shape), leaf.nbytes, kind))
    offsets, end = layout([head[2] for head in heads])
    return [(code, shape, at, kind) for (code, shape, _, kind), at in zip(heads, offsets, strict=True)], end


def extents(specs: list[LeafSpec]) -> list[tuple[int, int]]:
    """Offset and bytes of each leaf. Raises `MessageError`."""
    sizes = {dtype.code: dtype.itemsize for dtype in DTYPES.values()}
    try:
        return [(at, sizes[code] * int(np.prod(shape, dtype=object))) for code, shape, at, _ in specs]
    except KeyError as error:
        raise MessageError(f"a leaf has the unknown dtype {error}") from None


def checked(value: Any) -> tuple[Any, list[TensorBundle]]:
    """A received value and its bundles. Raises `MessageError` unless they are well formed."""
    try:
        tree, bundles = value
        for channel, device, number, token, entries in bundles:
            if [type(part) for part in (channel, device, number, token)] != [str, int, int, bytes]:
                raise TypeError
            for key_path, (code, shape, offset, kind) in entries:
                if any(type(i) is not int or i < 0 for i in (*key_path, *shape)) or type(key_path) is not tuple:
                    raise TypeError
                if type(shape) is not tuple or type(code) is not int or type(offset) is not int:
                    raise TypeError
                if kind not in (TENSOR, ARRAY):
                    raise TypeError
        return tree, bundles
    except (TypeError, ValueError):
        raise MessageError("the message describes its tensors in a malformed way") from None


def is_on_host(leaf: Any) -> bool:
    """Whether it is an array or a tensor on the CPU."""
    return isinstance(leaf, np.ndarray) or bool(getattr(leaf, "is_cpu", False))


def is_big(leaf: Any) -> bool:
    """Whether it goes over a one-sided channel, where one was asked for."""
    if isinstance(leaf, np.ndarray):
        return (
            type(leaf) is np.ndarray and leaf.nbytes >= BIG_BYTES and leaf.dtype.name in DTYPES and leaf.dtype.isnative
        )
    if not type(leaf).__module__.startswith("torch") or not is_on_host(leaf):
        return False
    import torch

    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided or leaf.is_quantized:
        return False
    return leaf.nbytes >= BIG_BYTES and str(leaf.dtype).removeprefix("torch.") in DTYPES


def as_tensor(array: Any) -> Any:
    """A tensor with the same elements."""
    import torch

    return torch.from_numpy(array.copy())


def take_nonce(driver: DeviceRuntime, channels: TensorChannels, number: int, token: bytes) -> bytes:
    """The nonce that a peer wrote into a leased buffer."""
    spec: LeafSpec = (DTYPES["uint8"].code, (NONCE_BYTES,), 0, TENSOR)
    (host,) = driver.to_host(channels.take(number, token, [spec]))
    return bytes(host.numpy().tobytes())
