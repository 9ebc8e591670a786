"""From GPU to GPU of one host: the sender writes into memory of the receiver's, which it has opened by a handle.

    slot = receiver.room(nbytes, device=0)         # the receiver's memory; slot.descriptor goes to the sender
    token = sender.push(1, descriptor, tensors)    # queues copies from cuda:1; the token goes back
    tensors = receiver.take(slot, token, forms)    # queues copies into tensors of the receiver's own

Nobody waits on the host. Each slot has two events, each recorded by the process that owns it:

    sender's stream:     wait(free)  copy, copy, ...  record(written)
    receiver's stream:   wait(written)  copy out  record(free)        then the slot may be lent again

Tensors are never exported, only slots are: a handle shows a whole allocation, and torch's allocator keeps strangers in
one; with expandable segments there is no handle at all. So the sender may change its tensor as soon as `push` returns
(what it queues later comes later), the receiver gets an ordinary tensor of torch's, and neither depends on how long the
other lives. The price is one copy within the receiver's GPU.

CUDA wants an allocation to be closed by whoever opened it before it is freed. So slots that are not lent again are
`retired`: the next descriptor names them, the sender closes them before it pushes, and they are freed when what it
pushed is taken. At the end of the connection each side closes or frees what it has; a process that died has nothing
open.

Whether it works between two GPUs is found by doing it: `geartrain.rpc` sends a few random bytes this way and compares
what came. Pids, host names and boot ids are never compared. Two ends in one process have no handles for each other, and
are told so by the driver.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

from geartrain.core.schema import round_up
from geartrain.device.cuda_runtime import CudaDriver, Driver
from geartrain.errors import BusyError, GeartrainError, MessageError, TransportError

#: Slots are whole blocks of cudaMalloc's, so that a handle shows nothing else.
BLOCK = 2 << 20
ALIGN = 256
_KEY = 16

#: A slot's key and size; the handles of its memory and of the event after which it may be written; keys of slots that
#: the sender is to close.
Descriptor = tuple[bytes, int, bytes, bytes, list[bytes]]
#: Dtype's code, shape, and offset in the slot, of each tensor.
Form = tuple[int, tuple[int, ...], int]


def why_not(driver: Driver | None = None) -> str | None:
    """None where GPUs' memory may be shared with other processes, else the reason; a peer has to agree."""
    return (driver or CudaDriver()).why_no_ipc()


def layout(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of so many bytes stand in a slot, and how large it is.

    Example:
        >>> layout([1, 300, 4])
        ([0, 256, 768], 772)
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(round_up(end, ALIGN))
        end = offsets[-1] + size
    return offsets, end


class Slot:
    """Memory of the receiver's that one sender may write, and what it is told of it."""

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._driver = driver
        self.address = driver.allocate(device, nbytes)
        try:
            self.free = driver.event(device)
            self.key = secrets.token_bytes(_KEY)
            self._handles = driver.export(device, self.address), driver.export_event(self.free)
        except BaseException:
            driver.free(device, self.address)
            raise

        self.retires: list[Slot] = []  # with the next take

    @property
    def descriptor(self) -> Descriptor:
        """For the sender."""
        return self.key, self.nbytes, *self._handles, [slot.key for slot in self.retires]

    def release(self) -> None:
        """Gives the memory back to the driver."""
        self._driver.free(self.device, self.address)


class Receiver:
    """The slots that are lent to one sender."""

    def __init__(self, driver: Driver, max_lent_bytes: int = 8 << 30, max_warm_bytes: int = 1 << 30) -> None:
        self._driver, self._max_lent, self._max_warm = driver, max_lent_bytes, max_warm_bytes
        self._lock = threading.Lock()
        self._warm: list[Slot] = []
        self._lent: set[Slot] = set()
        self._retired: list[Slot] = []  # to be freed, once the sender has closed them
        self._events: dict[bytes, Any] = {}
        self._closed = False

    def room(self, nbytes: int, device: int) -> Slot:
        """A slot for so many bytes. Raises `BusyError`, `TransportError` when there is no memory."""
        size = max(1, -(-nbytes // BLOCK)) * BLOCK
        with self._lock:
            self._check_open()
            lent = sum(slot.nbytes for slot in self._lent)
            if lent + size > self._max_lent:
                raise BusyError(f"{lent} bytes of GPU memory are lent to this peer already, of {self._max_lent}")
            # The smallest that fits and is not absurdly large.
            fit = [slot for slot in self._warm if slot.device == device and size <= slot.nbytes <= 2 * size]
            if fit:
                slot = min(fit, key=lambda one: one.nbytes)
                self._warm.remove(slot)
                return self._lend(slot)
        slot = Slot(self._driver, device, size)
        with self._lock:
            if not self._closed:
                return self._lend(slot)
        slot.release()
        raise TransportError("the connection has ended")

    def _lend(self, slot: Slot) -> Slot:
        slot.retires, self._retired = self._retired, []
        self._lent.add(slot)
        return slot

    def take(self, slot: Slot, token: bytes, forms: list[Form]) -> list[Any]:
        """The tensors that were pushed; the slot may be lent again."""
        driver, device = self._driver, slot.device
        try:
            driver.wait(device, self._written(device, token))
            tensors = []
            for code, shape, offset in forms:
                tensor = driver.empty(device, code, shape)
                nbytes = driver.form(tensor)[2]
                if offset < 0 or offset + nbytes > slot.nbytes:
                    raise MessageError(f"{nbytes} bytes at offset {offset} are not in a slot of {slot.nbytes} bytes")
                if nbytes:
                    driver.copy(device, driver.address(tensor), slot.address + offset, nbytes)
                tensors.append(tensor)
        except BaseException:
            self.abandon(slot)
            raise
        driver.record(device, slot.free)
        self._give_back(slot)
        return tensors

    def _written(self, device: int, token: bytes) -> Any:
        event = self._events.get(token)
        if event is None:
            event = self._events[token] = self._driver.open_event(device, token)
        return event

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            if slot not in self._lent:
                return  # closed meanwhile, and freed
            self._lent.discard(slot)
            closed, slot.retires = slot.retires, []
            self._warm.append(slot)
            while sum(one.nbytes for one in self._warm) > self._max_warm:
                self._retired.append(self._warm.pop(0))
        for one in closed:
            one.release()

    def abandon(self, slot: Slot) -> None:
        """The sender may still be writing to it, and has not closed what it should: it is not lent again."""
        with self._lock:
            if slot in self._lent:
                self._lent.discard(slot)
                self._retired += [slot, *slot.retires]

    def close(self) -> None:
        """The sender is gone: all its memory goes back."""
        with self._lock:
            self._closed = True
            slots = [*self._warm, *self._retired, *self._lent]
            slots += [retired for slot in self._lent for retired in slot.retires]
            self._warm, self._retired, self._lent, self._events = [], [], set(), {}
        for slot in slots:
            slot.release()

    @property
    def lent_bytes(self) -> int:
        """Of slots that the sender may write to now."""
        with self._lock:
            return sum(slot.nbytes for slot in self._lent)

    @property
    def warm_bytes(self) -> int:
        """Of slots that wait to be lent again."""
        with self._lock:
            return sum(slot.nbytes for slot in self._warm)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the connection has ended")


class Sender:
    """The receiver's slots that this process has opened."""

    def __init__(self, driver: Driver, max_open: int = 64) -> None:
        self._driver, self._max_open = driver, max_open
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, int], _Opened] = {}

    def push(self, device: int, descriptor: Descriptor, tensors: list[Any]) -> bytes:
        """Queues the writing of a device's tensors, laid out by `layout`; the token for the receiver's `take`.

        Raises:
            TransportError: the slot cannot be opened from this device.
            MessageError: the tensors do not fit.
        """
        driver = self._driver
        tensors = [driver.plain(tensor) for tensor in tensors]
        sizes = [driver.form(tensor)[2] for tensor in tensors]
        offsets, end = layout(sizes)
        if end > descriptor[1]:
            raise MessageError(f"{end} bytes do not fit a slot of {descriptor[1]} bytes")
        with self._lock:  # one at a time: what is queued between wait and record belongs together
            self._close_retired(descriptor[4])
            slot = self._opened(device, descriptor)
            driver.wait(device, slot.free)
            for tensor, offset, size in zip(tensors, offsets, sizes, strict=True):
                if size:
                    driver.copy(device, slot.address + offset, driver.address(tensor), size)
            driver.record(device, slot.written)
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
            found = self._open[key, device] = _Opened(self._driver, device, handle, free)
        return found

    def close(self) -> None:
        """The receiver is gone, or the connection is: nothing of it stays open."""
        with self._lock:
            opened, self._open = list(self._open.values()), {}
        for one in opened:
            one.close()


class _Opened:
    """One slot, opened; and this side's event, which outlives it: the receiver may not have waited for it yet."""

    def __init__(self, driver: Driver, device: int, handle: bytes, free: bytes) -> None:
        self._driver, self._device = driver, device
        self.address = driver.open(device, handle)
        try:
            self.free = driver.open_event(device, free)
            self.written = _spare_event(driver, device)
            self.token = driver.export_event(self.written)
        except BaseException:
            driver.close(device, self.address)
            raise

    def close(self) -> None:
        try:
            self._driver.finish(self.written)  # the copies that are queued end before their target goes
            self._driver.close(self._device, self.address)
        except GeartrainError:
            pass  # the device has failed altogether
        with _spare_lock:
            _spare.setdefault((id(self._driver), self._device), []).append(self.written)


# Events that this process has exported are used again and never destroyed: a wait for a destroyed one is undefined,
# while one that was recorded again only ends later.
_spare: dict[tuple[int, int], list[Any]] = {}
_spare_lock = threading.Lock()


def _spare_event(driver: Driver, device: int) -> Any:
    with _spare_lock:
        waiting = _spare.get((id(driver), device))
        if waiting:
            return waiting.pop()
    return driver.event(device)
