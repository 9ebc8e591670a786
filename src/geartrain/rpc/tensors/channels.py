"""Channels that transfer tensors between two peers, outside of messages.

| channel | from and to |
|---|---|
| `cuda_ipc` | GPUs of one host |
| a one-sided backend, by its name (`transport/one_sided`) | any memory |
| `host` | tensors in the message itself; needs nothing of this module |

With the first two, the receiver leases a buffer to its peer. The sender writes tensors into the buffer, and the
receiver takes them out.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

import geartrain.device.cuda_ipc as cuda_ipc
from geartrain.core.dtypes import DTYPES, dtype_of_code, numpy_dtype, torch_dtype
from geartrain.device.device import DeviceRuntime
from geartrain.errors import BusyError, DeviceError, MessageError, TransportError
from geartrain.rpc.tensors.device_map import CPU
from geartrain.transport.one_sided import Backend, Link
from geartrain.transport.one_sided.registered_memory import RegisteredBuffer, RegisteredMemoryPool

#: Dtype code, shape, offset in the buffer, and kind (tensor or array) of a leaf.
LeafSpec = tuple[int, tuple[int, ...], int, str]
TENSOR, ARRAY = "tensor", "array"


class TensorChannels:
    """The channels at one end of a connection. Each leased buffer has a number, by which the peer names it."""

    def __init__(self, driver: DeviceRuntime, max_leased_bytes: int) -> None:
        self.driver = driver
        self.memory: RegisteredMemoryPool | None = None  # of the one-sided channel that was asked for
        self.link: Link | None = None  # the same, to the peer's memory
        self._max_leased_bytes = max_leased_bytes
        self._receiver = cuda_ipc.IpcReceiver(driver, max_leased_bytes)
        self._sender = cuda_ipc.IpcSender(driver)
        self._leases: dict[int, tuple[str, int, Any]] = {}  # number -> channel, device, buffer
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # a signal's handler may call in between
        self._closed = False

    def lease(self, channel: str, device: int, nbytes: int) -> tuple[int, Any]:
        """A buffer's number, and the descriptor with which the peer writes into it.

        Raises:
            DeviceError: there is no such device. BusyError: the peer's leases would exceed the limit.
            TransportError: there is no memory, or no such channel.
        """
        if device >= self.driver.count() or device < CPU or nbytes < 0:
            raise DeviceError(f"there is no cuda:{device} here, of {self.driver.count()}")
        if channel == "cuda_ipc" and device != CPU:
            slot = self._receiver.lease(nbytes, device)
            return self._add(channel, device, slot), slot.descriptor
        memory = self.memory
        if memory is None or channel != memory.name:
            raise TransportError(f"there is no channel {channel!r} to device {device}")
        with self._lock:
            leased = sum(buffer.nbytes for name, _, buffer in self._leases.values() if name == channel)
        if leased + nbytes > self._max_leased_bytes:
            raise BusyError(
                f"{leased} of {self._max_leased_bytes} bytes are leased to this peer already: wait until it "
                "releases some"
            )
        buffer = memory.lease(nbytes) if device == CPU else _GpuBuffer(self.driver, device, nbytes, memory.backend)
        return self._add(channel, device, buffer), buffer.descriptor

    def _add(self, channel: str, device: int, buffer: Any) -> int:
        number = next(self._numbers)
        with self._lock:
            if not self._closed:
                self._leases[number] = channel, device, buffer
                return number
        self._abandon(channel, buffer)
        raise TransportError("the connection has ended")

    def push(self, channel: str, device: int, descriptor: Any, leaves: list[Any], timeout_s: float) -> bytes:
        """Writes leaves of one device into a buffer that the peer leased; the token with which the peer takes them."""
        if channel == "cuda_ipc":
            return self._sender.push(device, descriptor, leaves)
        link = self.link
        if link is None:
            raise TransportError(f"there is no {channel} link to this peer")
        if isinstance(leaves, HeldLeaves):
            link.write(leaves.buffer.region, descriptor, nbytes=leaves.nbytes, timeout_s=timeout_s)
            return b""
        if device != CPU:
            leaves = [self.driver.plain(leaf) for leaf in leaves]
            source = self.driver.device(device)
            source.sync(source.record())  # the backend does not know the streams
        flat = [bytes_of(leaf) if device == CPU else leaf for leaf in leaves]
        offsets, _ = cuda_ipc.layout([leaf.nbytes for leaf in flat])
        for leaf, offset in zip(flat, offsets, strict=True):
            link.write(leaf, descriptor, offset=offset, timeout_s=timeout_s)
        return b""

    def take(self, number: int, token: bytes, specs: list[LeafSpec]) -> list[Any]:
        """The leaves that the peer wrote into a buffer. Ends the lease."""
        with self._lock:
            if number not in self._leases:
                raise MessageError(f"no buffer is leased under number {number}")
            channel, device, buffer = self._leases.pop(number)
        if channel == "cuda_ipc":
            return self._receiver.take(buffer, token, [spec[:3] for spec in specs])
        if device != CPU:
            return buffer.tensors(specs)  # type: ignore[no-any-return]
        memory = buffer.array()  # released with the last view
        return [_view(memory, spec) for spec in specs]

    def hold(self, leaves: list[Any]) -> HeldLeaves:
        """A copy of arrays and CPU tensors in registered memory, for a later push."""
        assert self.memory is not None  # or they would go in the message
        flat = [bytes_of(leaf) for leaf in leaves]
        offsets, end = cuda_ipc.layout([leaf.nbytes for leaf in flat])
        held = HeldLeaves(self.memory.lease(end), end)
        memory = np.frombuffer(held.buffer.memory, np.uint8)
        for leaf, offset in zip(flat, offsets, strict=True):
            memory[offset : offset + leaf.nbytes] = leaf
        return held

    def revoke(self, number: int) -> None:
        """Ends a lease without taking anything; the peer may have begun to write."""
        with self._lock:
            channel, _, buffer = self._leases.pop(number, ("", 0, None))
        if buffer is not None:
            self._abandon(channel, buffer)

    def _abandon(self, channel: str, buffer: Any) -> None:
        if channel == "cuda_ipc":
            self._receiver.abandon(buffer)
        else:
            buffer.abandon()

    def close(self) -> None:
        """The connection ends: revokes all leases, and closes the peer's memory that was opened here."""
        with self._lock:
            self._closed, leases, self._leases = True, self._leases, {}
        for channel, _, buffer in leases.values():
            self._abandon(channel, buffer)
        self._receiver.close()
        self._sender.close()
        if self.link is not None:
            self.link.close()

    @property
    def leased(self) -> int:
        """How many buffers the peer may write to now."""
        return len(self._leases)


class HeldLeaves(list[Any]):
    """Tensors that wait in registered memory until the peer has leased a buffer for them."""

    def __init__(self, buffer: RegisteredBuffer, nbytes: int) -> None:
        self.buffer, self.nbytes = buffer, nbytes

    def release(self) -> None:
        """They are not needed any more."""
        self.buffer.release()


class _GpuBuffer:
    """GPU memory that a one-sided channel writes to: registered for one push, copied out in the order of the stream."""

    def __init__(self, driver: DeviceRuntime, device: int, nbytes: int, backend: Backend) -> None:
        self._driver, self._device, self.nbytes = driver, device, nbytes
        self._memory = driver.empty(device, _UINT8, (max(1, nbytes),))
        target = driver.device(device)
        target.sync(target.record())  # work queued on this memory before has ended
        self._region = backend.expose(self._memory)
        self.descriptor = self._region.descriptor

    def tensors(self, specs: list[LeafSpec]) -> list[Any]:
        """The tensors that were written."""
        driver, taken = self._driver, []
        for code, shape, offset, _ in specs:
            tensor = driver.empty(self._device, code, shape)
            size = driver.form(tensor)[2]
            _check(offset, size, self.nbytes)
            if size:
                source = driver.address(self._memory) + offset
                driver.device(self._device).copy_bytes(driver.address(tensor), source, size)
            taken.append(tensor)
        self._region.close()
        return taken

    def abandon(self) -> None:
        """The peer cannot reach it without its registration."""
        self._region.close()


_UINT8 = DTYPES["uint8"].code


def bytes_of(leaf: Any) -> Any:
    """An array or a CPU tensor as flat uint8, a view where it is contiguous."""
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    import torch

    return leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def _view(memory: Any, spec: LeafSpec) -> Any:
    code, shape, offset, kind = spec
    dtype = dtype_of_code(code)
    size = dtype.itemsize * int(np.prod(shape, dtype=object))
    _check(offset, size, memory.nbytes)
    piece = memory[offset : offset + size]
    if kind == ARRAY:
        return piece.view(numpy_dtype(dtype)).reshape(shape)
    import torch

    return torch.from_numpy(piece).view(torch_dtype(dtype)).view(shape)


def _check(offset: int, size: int, nbytes: int) -> None:
    if offset < 0 or size < 0 or offset + size > nbytes:
        raise MessageError(f"{size} bytes at offset {offset} are not in a buffer of {nbytes} bytes")
