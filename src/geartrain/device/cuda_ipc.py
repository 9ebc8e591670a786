"""CUDA IPC transfers between GPUs of one host: the receiver leases buffers, and the sender writes into them.

    slot = receiver.lease(nbytes, device=0)        # the receiver's memory; slot.descriptor goes to the sender
    token = sender.push(1, descriptor, tensors)    # queues copies from cuda:1; the token goes back
    tensors = receiver.take(slot, token, forms)    # queues copies into tensors of the receiver's own

The host never waits. Each slot has two events, and each event is recorded by the process that owns it:

    sender's stream:     wait(free)  copy, copy, ...  record(written)
    receiver's stream:   wait(written)  copy out  record(free)        then the slot may be leased again

Only slots are exported, never tensors. An IPC handle covers a whole allocation, in which torch's allocator also keeps
unrelated tensors. With expandable segments there is no handle at all. Slots cost one extra copy within the receiver's
GPU, and have three benefits:

- The sender may change its tensor as soon as `push` returns, because its later work is queued after the copies.
- The receiver gets an ordinary torch tensor.
- Neither tensor depends on the lifetime of the other.

CUDA requires the process that opened an allocation to close it before its owner frees it. So a slot that will not be
leased again is `retired`. The next descriptor lists the retired slots, and the sender closes them before it pushes. The
receiver frees them when it takes these tensors. At the end of the connection each side closes or frees what it has. A
process that died has nothing open.

Whether two GPUs support this is tested at runtime: `geartrain.rpc` sends a few random bytes and compares them on
arrival. It never compares pids, host names or boot ids. Two ends in one process cannot open each other's handles; the
driver reports that.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import Any

from geartrain.core.lifetime import on_error
from geartrain.core.schema import round_up
from geartrain.device.cuda_runtime import CudaRuntime
from geartrain.device.device import DeviceRuntime, IpcDevice
from geartrain.errors import BusyError, GeartrainError, MessageError, TransportError

#: Slots are whole blocks of cudaMalloc's, so that a handle covers nothing else.
BLOCK = 2 << 20
ALIGN = 256
_KEY = 16

#: Key and size of a slot; the handles of its memory and of the event after which it may be written; keys of slots that
#: the sender has to close.
Descriptor = tuple[bytes, int, bytes, bytes, list[bytes]]
#: Dtype's code, shape, and offset in the slot, of each tensor.
Form = tuple[int, tuple[int, ...], int]


def why_not(runtime: DeviceRuntime | None = None) -> str | None:
    """Why GPU memory cannot be shared with other processes; None where it can, if the peer agrees."""
    return (runtime or CudaRuntime()).why_no_ipc()


def layout(sizes: list[int]) -> tuple[list[int], int]:
    """Offsets of tensors of these sizes in a slot, and the size of the slot.

    Example:
        >>> layout([1, 300, 4])
        ([0, 256, 768], 772)
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(round_up(end, ALIGN))
        end = offsets[-1] + size
    return offsets, end


class IpcSlot:
    """Device memory of the receiver that one sender may write, while it is leased."""

    def __init__(self, runtime: DeviceRuntime, device: int, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._device = owner = runtime.device(device)
        self.address = owner.allocate(nbytes)
        with on_error(owner.free, self.address):
            self.free = owner.new_ipc_event()
            self.key = secrets.token_bytes(_KEY)
            self._handles = owner.export(self.address), owner.export_event(self.free)

        self.retires: list[IpcSlot] = []  # freed with the next take

    @property
    def descriptor(self) -> Descriptor:
        """For the sender."""
        return self.key, self.nbytes, *self._handles, [slot.key for slot in self.retires]

    def release(self) -> None:
        """Frees the memory."""
        self._device.free(self.address)


class IpcReceiver:
    """The slots of one sender.

    Args:
        runtime: of this process.
        max_leased_bytes: of slots that the sender may write to at a time.
        max_idle_bytes: of slots that are kept to be leased again.
    """

    def __init__(self, runtime: DeviceRuntime, max_leased_bytes: int = 8 << 30, max_idle_bytes: int = 1 << 30) -> None:
        self._runtime, self._max_leased, self._max_idle = runtime, max_leased_bytes, max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[IpcSlot] = []
        self._leased: set[IpcSlot] = set()
        self._retired: list[IpcSlot] = []  # to be freed, once the sender has closed them
        self._events: dict[bytes, Any] = {}
        self._closed = False

    def lease(self, nbytes: int, device: int) -> IpcSlot:
        """Leases a slot of at least this many bytes. Raises `BusyError`, or `TransportError` if there is no memory."""
        size = max(1, -(-nbytes // BLOCK)) * BLOCK
        with self._lock:
            self._check_open()
            leased = sum(slot.nbytes for slot in self._leased)
            if leased + size > self._max_leased:
                raise BusyError(
                    f"{leased} of {self._max_leased} bytes of GPU memory are leased to this peer already: wait "
                    "until it releases some"
                )
            # The smallest that fits and is not much larger.
            fit = [slot for slot in self._idle if slot.device == device and size <= slot.nbytes <= 2 * size]
            if fit:
                slot = min(fit, key=lambda one: one.nbytes)
                self._idle.remove(slot)
                return self._begin_lease(slot)
        slot = IpcSlot(self._runtime, device, size)
        with self._lock:
            if not self._closed:
                return self._begin_lease(slot)
        slot.release()
        raise TransportError("the connection has ended")

    def _begin_lease(self, slot: IpcSlot) -> IpcSlot:
        slot.retires, self._retired = self._retired, []
        self._leased.add(slot)
        return slot

    def take(self, slot: IpcSlot, token: bytes, forms: list[Form]) -> list[Any]:
        """The tensors that were pushed into a slot, whose lease ends."""
        runtime, index = self._runtime, slot.device
        device = runtime.device(index)
        with on_error(self.abandon, slot):
            device.wait(self._written(index, token))
            tensors = []
            for code, shape, offset in forms:
                tensor = runtime.empty(index, code, shape)
                nbytes = runtime.form(tensor)[2]
                if offset < 0 or offset + nbytes > slot.nbytes:
                    raise MessageError(f"{nbytes} bytes at offset {offset} are not in a slot of {slot.nbytes} bytes")
                if nbytes:
                    device.copy_bytes(runtime.address(tensor), slot.address + offset, nbytes)
                tensors.append(tensor)
        device.record(slot.free)
        self._end_lease(slot)
        return tensors

    def _written(self, device: int, token: bytes) -> Any:
        event = self._events.get(token)
        if event is None:
            event = self._events[token] = self._runtime.device(device).open_event(token)
        return event

    def _end_lease(self, slot: IpcSlot) -> None:
        with self._lock:
            if slot not in self._leased:
                return  # closed meanwhile, and freed
            self._leased.discard(slot)
            closed, slot.retires = slot.retires, []
            self._idle.append(slot)
            while sum(one.nbytes for one in self._idle) > self._max_idle:
                self._retired.append(self._idle.pop(0))
        for one in closed:
            one.release()

    def abandon(self, slot: IpcSlot) -> None:
        """Retires a slot that its sender may still be writing to, and that may list slots it has not closed."""
        with self._lock:
            if slot in self._leased:
                self._leased.discard(slot)
                self._retired += [slot, *slot.retires]

    def close(self) -> None:
        """The sender is gone: frees all of its slots."""
        with self._lock:
            self._closed = True
            slots = [*self._idle, *self._retired, *self._leased]
            slots += [retired for slot in self._leased for retired in slot.retires]
            self._idle, self._retired, self._leased, self._events = [], [], set(), {}
        for slot in slots:
            slot.release()

    @property
    def leased_bytes(self) -> int:
        """Bytes of slots that the sender may write to now."""
        with self._lock:
            return sum(slot.nbytes for slot in self._leased)

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots that are kept to be leased again."""
        with self._lock:
            return sum(slot.nbytes for slot in self._idle)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the connection has ended")


class IpcSender:
    """The receiver's slots that this process has opened."""

    def __init__(self, runtime: DeviceRuntime, max_open: int = 64) -> None:
        self._runtime, self._max_open = runtime, max_open
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, int], _Opened] = {}

    def push(self, device: int, descriptor: Descriptor, tensors: list[Any]) -> bytes:
        """Queues the writing of a device's tensors, at the offsets of `layout`; the token for the receiver's `take`.

        Raises:
            TransportError: the slot cannot be opened from this device.
            MessageError: the tensors do not fit.
        """
        runtime, source = self._runtime, self._runtime.device(device)
        tensors = [runtime.plain(tensor) for tensor in tensors]
        sizes = [runtime.form(tensor)[2] for tensor in tensors]
        offsets, end = layout(sizes)
        if end > descriptor[1]:
            raise MessageError(f"{end} bytes do not fit a slot of {descriptor[1]} bytes")
        with self._lock:  # one at a time: the wait, the copies and the record belong together
            self._close_retired(descriptor[4])
            slot = self._opened(device, descriptor)
            source.wait(slot.free)
            for tensor, offset, size in zip(tensors, offsets, sizes, strict=True):
                if size:
                    source.copy_bytes(slot.address + offset, runtime.address(tensor), size)
            source.record(slot.written)
            return slot.token

    def _close_retired(self, keys: list[bytes]) -> None:
        for key, device in list(self._open) if keys else ():
            if key in keys:
                self._open.pop((key, device)).close()

    def _opened(self, device: int, descriptor: Descriptor) -> _Opened:
        key, _, handle, free, _ = descriptor
        found = self._open.get((key, device))
        if found is None:
            while len(self._open) >= self._max_open:  # the oldest: the receiver has dropped it, or opens it again
                self._open.pop(next(iter(self._open))).close()
            found = self._open[key, device] = _Opened(self._runtime, device, handle, free)
        return found

    def close(self) -> None:
        """The receiver or the connection is gone: closes all slots."""
        with self._lock:
            opened, self._open = list(self._open.values()), {}
        for one in opened:
            one.close()


class _Opened:
    """One opened slot, and this side's event, which outlives it: the receiver may not have waited for it yet."""

    def __init__(self, runtime: DeviceRuntime, index: int, handle: bytes, free: bytes) -> None:
        self._key = runtime, index
        self._device = device = runtime.device(index)
        self.address = device.open(handle)
        with on_error(device.close, self.address):
            self.free = device.open_event(free)
            self.written = _spare_event(self._key, device)
            self.token = device.export_event(self.written)

    def close(self) -> None:
        try:
            self._device.sync(self.written)  # queued copies end before their target is unmapped
            self._device.close(self.address)
        except GeartrainError:
            pass  # the device has failed altogether
        with _spare_lock:
            _spare.setdefault(self._key, []).append(self.written)


# Exported events are reused and never destroyed: waiting for a destroyed event is undefined, while waiting for one that
# was recorded again only takes longer. By runtime, which lives as long as its events, and device.
_spare: dict[tuple[DeviceRuntime, int], list[Any]] = {}
_spare_lock = threading.Lock()
os.register_at_fork(before=_spare_lock.acquire, after_in_parent=_spare_lock.release, after_in_child=_spare_lock.release)


def _spare_event(key: tuple[DeviceRuntime, int], device: IpcDevice) -> Any:
    with _spare_lock:
        waiting = _spare.get(key)
        if waiting:
            return waiting.pop()
    return device.new_ipc_event()
