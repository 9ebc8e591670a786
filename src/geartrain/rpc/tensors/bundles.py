"""Groups of tensors that travel beside a message, and what is said of them in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from geartrain.core.dtypes import DTYPES
from geartrain.device.cuda_ipc import layout
from geartrain.device.cuda_runtime import Driver
from geartrain.errors import DeviceError, MessageError
from geartrain.rpc.tensors.device_map import CPU
from geartrain.rpc.tensors.paths import ARRAY, TENSOR, Form, Ways
from geartrain.rpc.tensors.pytree import put_back

#: Arrays and CPU tensors of so many bytes go over NIXL where it was asked for: a transfer costs some round trips.
NIXL_BYTES = 256 << 10
REHEARSAL_BYTES = 64

#: Way, device of the receiver's (or, of a result, where the leaves are), number of a room, token, entries.
Group = tuple[str, int, int, bytes, list[tuple[tuple[int, ...], Form]]]


def leaves_at(tree: Any, paths: list[tuple[int, ...]]) -> list[Any]:
    """The leaves at these places. Raises `MessageError` where there is no such place."""
    leaves = []
    for path in paths:
        node = tree
        for i in path:
            node = list(node.values()) if type(node) is dict else node
            if type(node) not in (list, tuple) or not 0 <= i < len(node):
                raise MessageError("a leaf for a place that is not there")
            node = node[i]
        leaves.append(node)
    return leaves


def by_host(driver: Driver, tree: Any, device: int, entries: list[Any]) -> tuple[Any, Group]:
    """The value with copies on the CPU in the places of its leaves, and what is said of them."""
    copies = driver.to_host([leaf for _, leaf in entries])
    tree = put_back(tree, [(path, copy) for (path, _), copy in zip(entries, copies, strict=True)])
    return tree, ("host", device, 0, b"", [(path, (0, (), 0, TENSOR)) for path, _ in entries])


def moved(driver: Driver, device: int, entries: list[Any], leaves: list[Any]) -> list[Any]:
    """Host leaves on their device."""
    if device == CPU:
        return []  # they stay where they are
    if device >= driver.count() or device < CPU:
        raise DeviceError(f"there is no cuda:{device} here, of {driver.count()}")
    if not all(is_on_host(leaf) and not isinstance(leaf, np.ndarray) for leaf in leaves):
        raise MessageError("only tensors go to a GPU")
    return [(path, leaf) for (path, _), leaf in zip(entries, driver.from_host(device, leaves), strict=True)]


def forms_of(driver: Driver, leaves: list[Any]) -> tuple[list[Form], int]:
    """Of each leaf, and how large the room is."""
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
    forms = [(code, shape, at, kind) for (code, shape, _, kind), at in zip(heads, offsets, strict=True)]
    return forms, end


def extents(forms: list[Form]) -> list[tuple[int, int]]:
    """Offset and bytes of each leaf. Raises `MessageError`."""
    sizes = {dtype.code: dtype.itemsize for dtype in DTYPES.values()}
    try:
        return [(at, sizes[code] * int(np.prod(shape, dtype=object))) for code, shape, at, _ in forms]
    except KeyError as error:
        raise MessageError(f"a leaf has the unknown dtype {error}") from None


def checked(value: Any) -> tuple[Any, list[Group]]:
    """What came, if it has the form that it should."""
    try:
        tree, groups = value
        for way, device, number, token, entries in groups:
            if [type(part) for part in (way, device, number, token)] != [str, int, int, bytes]:
                raise TypeError
            for path, (code, shape, offset, kind) in entries:
                if any(type(i) is not int or i < 0 for i in (*path, *shape)) or type(path) is not tuple:
                    raise TypeError
                if type(shape) is not tuple or type(code) is not int or type(offset) is not int:
                    raise TypeError
                if kind not in (TENSOR, ARRAY):
                    raise TypeError
        return tree, groups
    except (TypeError, ValueError):
        raise MessageError("the message says of its tensors what cannot be") from None


def is_on_host(leaf: Any) -> bool:
    """Whether it is an array or a tensor on the CPU."""
    return isinstance(leaf, np.ndarray) or bool(getattr(leaf, "is_cpu", False))


def is_big(leaf: Any) -> bool:
    """Whether it goes over NIXL, where that was asked for."""
    if isinstance(leaf, np.ndarray):
        return (
            type(leaf) is np.ndarray and leaf.nbytes >= NIXL_BYTES and leaf.dtype.name in DTYPES and leaf.dtype.isnative
        )
    if not type(leaf).__module__.startswith("torch") or not is_on_host(leaf):
        return False
    import torch

    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided or leaf.is_quantized:
        return False
    return leaf.nbytes >= NIXL_BYTES and str(leaf.dtype).removeprefix("torch.") in DTYPES


def as_tensor(array: Any) -> Any:
    """A tensor with the same elements."""
    import torch

    return torch.from_numpy(array.copy())


def found_in(driver: Driver, ways: Ways, number: int, token: bytes) -> bytes:
    """The bytes of a rehearsal."""
    form: Form = (DTYPES["uint8"].code, (REHEARSAL_BYTES,), 0, TENSOR)
    (host,) = driver.to_host(ways.take(number, token, [form]))
    return bytes(host.numpy().tobytes())
