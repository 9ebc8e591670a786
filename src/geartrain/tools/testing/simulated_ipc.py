"""Simulated IPC runtime: devices whose memory and events other processes can open, as files of a shared folder.

Each device runs its work after a delay, on a thread of its own. So a process that reads too early gets wrong bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.dtypes import DTYPES, dtype_of_code, numpy_dtype
from geartrain.errors import TransportError
from geartrain.tools.testing.simulated_device import Event, Mark, SimulatedDevice, Stream

_SPAN = 1 << 44  # between the addresses of two allocations
_LOST_S = 5.0  # after which a wait for an event of another process ends, as it does when that process dies


class SimulatedTensor:
    """A tensor on a simulated device. Only `numpy` shows its elements, after waiting for the device."""

    def __init__(self, runtime: SimulatedRuntime, device: int, array: NDArray[Any]) -> None:
        self.device = device
        self._runtime, self._array = runtime, array
        self.base = runtime.map_array(array.reshape(-1).view(np.uint8))
        weakref.finalize(self, runtime.unmap, self.base)
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype.name, array.nbytes

    def numpy(self) -> NDArray[Any]:
        """A copy of its elements, after all work of its device."""
        self._runtime.device(self.device).finish()
        copy: NDArray[Any] = self._array.copy()
        return copy

    def fill_(self, value: float) -> SimulatedTensor:
        """Queued on the current stream."""
        self._runtime.device(self.device).run(lambda: self._array.fill(value))
        return self

    def times(self, factor: float) -> SimulatedTensor:
        """A new tensor; queued on the current stream."""
        made = SimulatedTensor(self._runtime, self.device, np.zeros_like(self._array))
        self._runtime.device(self.device).run(lambda: np.multiply(self._array, factor, out=made._array))
        return made


class _IpcMark(Mark):
    """The number of a record, reached when the file says so."""

    def __init__(self, counts: NDArray[np.uint64], stream: Stream | None) -> None:
        super().__init__(stream)
        self._counts, self._number = counts, counts[0].copy()
        self._lost_s: float | None = None

    @property
    def reached(self) -> bool:
        if self._counts[1] >= self._number:
            return True
        now_s = time.monotonic()
        self._lost_s = self._lost_s or now_s + _LOST_S
        return now_s > self._lost_s

    def reach(self) -> None:
        self._counts[1] = self._number


class IpcEvent(Event):
    """Two counters in a file: records, and records that their stream has reached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._counts = np.frombuffer(mmap.mmap(file.fileno(), 16), np.uint64)

    @property
    def mark(self) -> Mark:  # type: ignore[override]
        """Of the latest record, whichever process made it."""
        return _IpcMark(self._counts, None)

    def record(self, stream: Stream) -> Mark:
        """Seen by all processes."""
        self._counts[0] += 1
        return _IpcMark(self._counts, stream)


class SimulatedIpcDevice(SimulatedDevice):
    """A `geartrain.device.device.IpcDevice`, one of a `SimulatedRuntime`."""

    def __init__(self, runtime: SimulatedRuntime, index: int, delay_s: float) -> None:
        super().__init__(index, delay_s=delay_s)
        self._runtime, self._index = runtime, index

    def allocate(self, nbytes: int) -> int:
        """A file."""
        return self._runtime.allocate(self._index, nbytes)

    def free(self, address: int) -> None:
        """Waits for the device, as cudaFree does."""
        self.finish()
        self._runtime.free(address)

    def export(self, address: int) -> bytes:
        """The file's name."""
        return self._runtime.paths[address].name.encode().ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        """Maps the file."""
        try:
            address = self._runtime.map_file(handle.rstrip(b"\0").decode())
        except OSError as error:
            raise TransportError(f"cudaIpcOpenMemHandle on cuda:{self._index}: {error.strerror}") from error
        self._runtime.opened += 1
        return address

    def close(self, address: int) -> None:
        """Unmaps it."""
        self._runtime.opened -= 1
        self._runtime.unmap(address)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Later."""
        into, out_of = self._runtime.memory(target, nbytes), self._runtime.memory(source, nbytes)
        self.run(lambda: np.copyto(into, out_of))

    def new_ipc_event(self) -> IpcEvent:
        """A new file."""
        path = self._runtime.folder / f"event-{uuid.uuid4().hex}"
        path.write_bytes(bytes(16))
        return IpcEvent(path)

    def export_event(self, event: IpcEvent) -> bytes:
        """The file's name."""
        return event.path.name.encode()

    def open_event(self, handle: bytes) -> IpcEvent:
        """Maps the file."""
        try:
            return IpcEvent(self._runtime.folder / handle.decode())
        except OSError as error:
            raise TransportError(f"the event cannot be opened: {error.strerror}") from error


class SimulatedRuntime:
    """A `geartrain.device.device.DeviceRuntime` of simulated devices.

    Args:
        folder: folder of the files. Processes that share it can open each other's memory.
        count: number of devices.
        delay_s: delay of each piece of work.
        why: the answer of `why_no_ipc`.

    Attributes:
        opened: other processes' allocations that are open here now.
        paths: files of the allocations of this process, by address.
        max_bytes: larger allocations fail.
    """

    def __init__(self, folder: str | Path, count: int = 2, *, delay_s: float = 0.0, why: str | None = None) -> None:
        self.folder = Path(folder)
        self.opened = 0
        self.paths: dict[int, Path] = {}
        self.max_bytes = 1 << 40
        self._count, self._delay_s, self._why = count, delay_s, why
        self._devices: dict[int, SimulatedIpcDevice] = {}
        self._arrays: dict[int, NDArray[np.uint8]] = {}
        self._next = 1
        self._lock = threading.Lock()

    def become(self, folder: str | Path, count: int, delay_s: float, why: str | None) -> None:
        """Turns into that of another machine: the arguments of the constructor."""
        self.folder, self._count, self._delay_s, self._why = Path(folder), count, delay_s, why
        for device in self._devices.values():
            device.delay_s = delay_s

    def tensor(self, device: int, array: Any) -> SimulatedTensor:
        """A tensor with these elements."""
        return SimulatedTensor(self, device, np.array(array))

    @property
    def allocated(self) -> int:
        """Allocations that other processes may open."""
        return len(self.paths)

    # --- addresses --------------------------------------------------------------------------------------------------

    def map_array(self, array: NDArray[np.uint8]) -> int:
        """A new address for an array of bytes."""
        with self._lock:
            base, self._next = self._next * _SPAN, self._next + 1
            self._arrays[base] = array
            return base

    def map_file(self, name: str) -> int:
        """A new address for a file's memory."""
        with (self.folder / name).open("r+b") as file:
            return self.map_array(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))

    def unmap(self, base: int) -> None:
        """Ends an address; queued work still holds the memory."""
        self._arrays.pop(base, None)

    def memory(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes at an address."""
        base = address // _SPAN * _SPAN
        piece = self._arrays[base][address - base : address - base + nbytes]
        assert len(piece) == nbytes, "beyond the end of an allocation"
        return piece

    def allocate(self, device: int, nbytes: int) -> int:
        """Memory in a new file."""
        if nbytes > self.max_bytes:
            raise TransportError(f"cudaMalloc on cuda:{device}: out of memory")
        path = self.folder / f"memory-{uuid.uuid4().hex}"
        path.touch()
        os.truncate(path, nbytes)
        address = self.map_file(path.name)
        self.paths[address] = path
        return address

    def free(self, address: int) -> None:
        """Removes the file."""
        self.paths.pop(address).unlink()
        self.unmap(address)

    # --- the protocol -----------------------------------------------------------------------------------------------

    def why_no_ipc(self) -> str | None:
        """As it was made."""
        return self._why

    def count(self) -> int:
        """As it was made."""
        return self._count

    def device(self, index: int) -> SimulatedIpcDevice:
        """Made with its first use."""
        with self._lock:
            if index not in self._devices:
                self._devices[index] = SimulatedIpcDevice(self, index, self._delay_s)
            return self._devices[index]

    def device_of(self, value: object) -> int | None:
        """Of a `SimulatedTensor`."""
        return value.device if type(value) is SimulatedTensor else None

    def plain(self, tensor: SimulatedTensor) -> SimulatedTensor:
        """All are."""
        return tensor

    def snapshot(self, tensor: SimulatedTensor) -> SimulatedTensor:
        """Queued on the current stream."""
        return tensor.times(1)

    def form(self, tensor: SimulatedTensor) -> tuple[int, tuple[int, ...], int]:
        """Codes of `geartrain.core.schema`."""
        return DTYPES[tensor.dtype].code, tuple(tensor.shape), tensor.nbytes

    def address(self, tensor: SimulatedTensor) -> int:
        """Of its own mapping."""
        return tensor.base

    def empty(self, device: int, code: int, shape: tuple[int, ...]) -> SimulatedTensor:
        """Filled with 77."""
        return SimulatedTensor(self, device, np.full(shape, 77, numpy_dtype(dtype_of_code(code))))

    def to_host(self, tensors: list[SimulatedTensor]) -> list[Any]:
        """CPU tensors of torch."""
        import torch

        return [torch.from_numpy(tensor.numpy()) for tensor in tensors]

    def from_host(self, device: int, tensors: list[Any]) -> list[SimulatedTensor]:
        """Of CPU tensors of torch."""
        return [self.tensor(device, tensor.numpy()) for tensor in tensors]


__all__ = ["IpcEvent", "SimulatedIpcDevice", "SimulatedRuntime", "SimulatedTensor"]
