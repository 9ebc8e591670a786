"""How tensors travel beside the messages of one connection: what one end has lent, and what it has opened.

`cuda_ipc`  between GPUs of one host; `nixl`  from and to any memory, registered with NIXL; and `host`, in the message,
which needs nothing of this. For the other two the receiver lends a room, the sender pushes tensors into it, and the
receiver takes them out.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

import geartrain.device.cuda_ipc as cuda_ipc
import geartrain.transport.nixl as nixl
from geartrain.core.dtypes import dtype_of_code, numpy_dtype, torch_dtype
from geartrain.device.cuda_runtime import Driver
from geartrain.errors import BusyError, DeviceError, MessageError, TransportError
from geartrain.rpc.tensors.device_map import CPU
from geartrain.rpc.tensors.registered_memory import Landing, Landings

#: Dtype's code, shape, offset, and what it is: a tensor or an array.
Form = tuple[int, tuple[int, ...], int, str]
TENSOR, ARRAY = "tensor", "array"


class Ways:
    """One end of one connection. Rooms have numbers; those lent to the peer are known by them."""

    def __init__(self, driver: Driver, landings: Landings, max_lent_bytes: int) -> None:
        self.driver = driver
        self.link: nixl.Link | None = None  # to the peer's memory
        self._landings, self._max_lent = landings, max_lent_bytes
        self._receiver = cuda_ipc.Receiver(driver, max_lent_bytes)
        self._sender = cuda_ipc.Sender(driver)
        self._rooms: dict[int, tuple[str, int, Any]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False

    def room(self, way: str, device: int, nbytes: int) -> tuple[int, Any]:
        """A room's number, and what the peer needs to push into it.

        Raises:
            DeviceError: there is no such device. BusyError: too much is lent already.
            TransportError: there is no memory, or no such way.
        """
        if device >= self.driver.count() or device < CPU or nbytes < 0:
            raise DeviceError(f"there is no cuda:{device} here, of {self.driver.count()}")
        if way == "cuda_ipc" and device != CPU:
            slot = self._receiver.room(nbytes, device)
            return self._lend(way, device, slot), slot.descriptor
        if way != "nixl":
            raise TransportError(f"there is no way {way!r} to device {device}")
        with self._lock:
            lent = sum(room.nbytes for kind, _, room in self._rooms.values() if kind == "nixl")
        if lent + nbytes > self._max_lent:
            raise BusyError(f"{lent} bytes are lent to this peer already, of {self._max_lent}")
        landing = self._landings.room(nbytes) if device == CPU else _GpuLanding(self.driver, device, nbytes)
        return self._lend(way, device, landing), landing.descriptor

    def _lend(self, way: str, device: int, room: Any) -> int:
        number = next(self._numbers)
        with self._lock:
            if not self._closed:
                self._rooms[number] = way, device, room
                return number
        self._abandon(way, room)
        raise TransportError("the connection has ended")

    def push(self, way: str, device: int, descriptor: Any, leaves: list[Any], timeout_s: float) -> bytes:
        """Writes leaves that are on one device into the peer's room; what the peer needs to take them."""
        if way == "cuda_ipc":
            return self._sender.push(device, descriptor, leaves)
        link = self.link
        if link is None:
            raise TransportError("there is no link of NIXL's to this peer")
        if isinstance(leaves, Held):
            link.write(leaves.landing.region, descriptor, nbytes=leaves.nbytes, timeout_s=timeout_s)
            return b""
        if device != CPU:
            leaves = [self.driver.plain(leaf) for leaf in leaves]
            event = self.driver.event(device)
            self.driver.record(device, event)
            self.driver.finish(event)  # what writes does not know the streams
        flat = [bytes_of(leaf) if device == CPU else leaf for leaf in leaves]
        offsets, _ = cuda_ipc.layout([leaf.nbytes for leaf in flat])
        for leaf, offset in zip(flat, offsets, strict=True):
            link.write(leaf, descriptor, offset=offset, timeout_s=timeout_s)
        return b""

    def take(self, number: int, token: bytes, forms: list[Form]) -> list[Any]:
        """The leaves that were pushed into a room, which goes back."""
        with self._lock:
            if number not in self._rooms:
                raise MessageError(f"nothing was lent under number {number}")
            way, device, room = self._rooms.pop(number)
        if way == "cuda_ipc":
            return self._receiver.take(room, token, [form[:3] for form in forms])
        if device != CPU:
            return room.tensors(forms)  # type: ignore[no-any-return]
        memory = room.array()  # goes back with the last view
        return [_view(memory, form) for form in forms]

    def hold(self, leaves: list[Any]) -> Held:
        """A copy of arrays and CPU tensors in registered memory, for a later push."""
        flat = [bytes_of(leaf) for leaf in leaves]
        offsets, end = cuda_ipc.layout([leaf.nbytes for leaf in flat])
        held = Held(self._landings.room(end), end)
        memory = np.frombuffer(held.landing.memory, np.uint8)
        for leaf, offset in zip(flat, offsets, strict=True):
            memory[offset : offset + leaf.nbytes] = leaf
        return held

    def forget(self, number: int) -> None:
        """The peer will not push into this room; it may have begun to."""
        with self._lock:
            way, _, room = self._rooms.pop(number, ("", 0, None))
        if room is not None:
            self._abandon(way, room)

    def _abandon(self, way: str, room: Any) -> None:
        if way == "cuda_ipc":
            self._receiver.abandon(room)
        else:
            room.abandon()

    def close(self) -> None:
        """The peer is gone, or this end hangs up: nothing lent or opened stays."""
        with self._lock:
            self._closed, rooms, self._rooms = True, self._rooms, {}
        for way, _, room in rooms.values():
            self._abandon(way, room)
        self._receiver.close()
        self._sender.close()
        if self.link is not None:
            self.link.close()

    @property
    def lent(self) -> int:
        """How many rooms the peer may write to now."""
        return len(self._rooms)


class Held(list[Any]):
    """Leaves that wait in registered memory until the peer has room for them."""

    def __init__(self, landing: Landing, nbytes: int) -> None:
        self.landing, self.nbytes = landing, nbytes

    def drop(self) -> None:
        """They are not needed any more."""
        self.landing.drop()


class _GpuLanding:
    """Memory of a GPU that NIXL writes to: registered for one push, and copied out in the stream's order."""

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver, self._device, self.nbytes = driver, device, nbytes
        self._memory = driver.empty(device, _UINT8, (max(1, nbytes),))
        event = driver.event(device)
        driver.record(device, event)
        driver.finish(event)  # whoever had this memory before is done with it
        self._region = nixl.expose(self._memory)
        self.descriptor = self._region.descriptor

    def tensors(self, forms: list[Form]) -> list[Any]:
        """What was written."""
        driver, taken = self._driver, []
        for code, shape, offset, _ in forms:
            tensor = driver.empty(self._device, code, shape)
            size = driver.form(tensor)[2]
            _check(offset, size, self.nbytes)
            if size:
                driver.copy(self._device, driver.address(tensor), driver.address(self._memory) + offset, size)
            taken.append(tensor)
        self._region.close()
        return taken

    def abandon(self) -> None:
        """With its registration the peer's way to it is gone."""
        self._region.close()


_UINT8 = 2  # of schema.py


def bytes_of(leaf: Any) -> Any:
    """An array or a CPU tensor as flat uint8, a view where it is contiguous."""
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    import torch

    return leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def _view(memory: Any, form: Form) -> Any:
    code, shape, offset, kind = form
    dtype = dtype_of_code(code)
    size = dtype.itemsize * int(np.prod(shape, dtype=object))
    _check(offset, size, memory.nbytes)
    piece = memory[offset : offset + size]
    if kind == ARRAY:
        return piece.view(numpy_dtype(dtype)).reshape(shape)
    import torch

    return torch.from_numpy(piece).view(torch_dtype(dtype)).view(shape)


def _check(offset: int, size: int, room: int) -> None:
    if offset < 0 or size < 0 or offset + size > room:
        raise MessageError(f"{size} bytes at offset {offset} are not in a room of {room} bytes")
