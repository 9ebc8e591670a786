"""Memory that behaves like GPUs', for the protocols that move it: files that other processes may map, streams whose
work is done later by a thread of its own, and events between processes. What is read too early is found to be wrong.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.dtypes import DTYPES, dtype_of_code, numpy_dtype
from geartrain.errors import TransportError

_SPAN = 1 << 44  # between the addresses of two allocations


class FakeTensor:
    """A tensor on a fake GPU; its elements are seen by `numpy` only, which waits for the stream."""

    def __init__(self, driver: FakeDriver, device: int, array: np.ndarray) -> None:
        self.driver, self.device, self._array = driver, device, array
        self.base = driver.know(array.reshape(-1).view(np.uint8))
        weakref.finalize(self, driver.forget, self.base)
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype.name, array.nbytes

    def numpy(self) -> np.ndarray:
        self.driver.drain(self.device)
        return self._array.copy()

    def fill_(self, value: float) -> FakeTensor:
        """In the stream's order."""
        self.driver.queue(self.device, lambda: self._array.fill(value))
        return self

    def times(self, factor: float) -> FakeTensor:
        made = FakeTensor(self.driver, self.device, np.zeros_like(self._array))
        self.driver.queue(self.device, lambda: np.multiply(self._array, factor, out=made._array))
        return made


class FakeEvent:
    """Two numbers in a file: how often it was recorded, and how many of these the stream has come to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self.counts = np.frombuffer(mmap.mmap(file.fileno(), 16), np.uint64)


class FakeDriver:
    """`count` devices, whose memory stands in files under `folder`: processes that share it can open each other's."""

    def __init__(self, folder: str | Path, count: int = 2, *, delay_s: float = 0.0, why: str | None = None) -> None:
        self.folder, self._count, self.delay_s, self._why = Path(folder), count, delay_s, why
        self._arrays: dict[int, np.ndarray] = {}
        self._paths: dict[int, Path] = {}
        self._next = 1
        self._lock = threading.Lock()
        self._streams: dict[int, queue.Queue[Callable[[], object]]] = {}
        self.opened = 0  # now
        self.max_bytes = 1 << 40
        self.failures: list[BaseException] = []

    # --- tensors for tests ------------------------------------------------------------------------------------------

    def tensor(self, device: int, array: Any) -> FakeTensor:
        return FakeTensor(self, device, np.array(array))

    def queue(self, device: int, work: Callable[[], object]) -> None:
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = queue.Queue()
                threading.Thread(target=self._run, args=(stream,), daemon=True).start()
        stream.put(work)

    def _run(self, stream: queue.Queue[Callable[[], object]]) -> None:
        while True:
            work = stream.get()
            try:
                if self.delay_s:
                    time.sleep(self.delay_s)
                work()
            except BaseException as error:
                self.failures.append(error)
            stream.task_done()

    def drain(self, device: int) -> None:
        if device in self._streams:
            self._streams[device].join()
        assert not self.failures, self.failures

    def know(self, array: np.ndarray) -> int:
        with self._lock:
            base, self._next = self._next * _SPAN, self._next + 1
            self._arrays[base] = array
            return base

    def forget(self, base: int) -> None:
        # What is queued still holds the array.
        self._arrays.pop(base, None)

    def _at(self, address: int, nbytes: int) -> np.ndarray:
        base = address // _SPAN * _SPAN
        piece = self._arrays[base][address - base : address - base + nbytes]
        assert len(piece) == nbytes, "beyond the end of an allocation"
        return piece

    @property
    def allocated(self) -> int:
        """Allocations that other processes may open."""
        return len(self._paths)

    # --- what the driver's protocol asks for ------------------------------------------------------------------------

    def why_no_ipc(self) -> str | None:
        return self._why

    def count(self) -> int:
        return self._count

    def _map(self, path: Path) -> np.ndarray:
        with path.open("r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)

    def allocate(self, device: int, nbytes: int) -> int:
        if nbytes > self.max_bytes:
            raise TransportError(f"cudaMalloc on cuda:{device}: out of memory")
        path = self.folder / f"memory-{uuid.uuid4().hex}"
        path.touch()
        os.truncate(path, nbytes)
        address = self.know(self._map(path))
        self._paths[address] = path
        return address

    def free(self, device: int, address: int) -> None:
        self.drain(device)  # as cudaFree does
        self._paths.pop(address).unlink()
        self.forget(address)

    def export(self, device: int, address: int) -> bytes:
        return self._paths[address].name.encode().ljust(64, b"\0")

    def open(self, device: int, handle: bytes) -> int:
        try:
            address = self.know(self._map(self.folder / handle.rstrip(b"\0").decode()))
        except OSError as error:
            raise TransportError(f"cudaIpcOpenMemHandle on cuda:{device}: {error.strerror}") from error
        self.opened += 1
        return address

    def close(self, device: int, address: int) -> None:
        self.opened -= 1
        self.forget(address)

    def copy(self, device: int, target: int, source: int, nbytes: int) -> None:
        into, out_of = self._at(target, nbytes), self._at(source, nbytes)
        self.queue(device, lambda: np.copyto(into, out_of))

    def event(self, device: int) -> FakeEvent:
        path = self.folder / f"event-{uuid.uuid4().hex}"
        path.write_bytes(bytes(16))
        return FakeEvent(path)

    def export_event(self, event: FakeEvent) -> bytes:
        return event.path.name.encode()

    def open_event(self, device: int, handle: bytes) -> FakeEvent:
        try:
            return FakeEvent(self.folder / handle.decode())
        except OSError as error:
            raise TransportError(f"the event cannot be opened: {error.strerror}") from error

    def record(self, device: int, event: FakeEvent) -> None:
        event.counts[0] += 1
        number = event.counts[0].copy()

        def reached() -> None:
            event.counts[1] = number

        self.queue(device, reached)

    def wait(self, device: int, event: FakeEvent) -> None:
        number = event.counts[0].copy()
        self.queue(device, lambda: self._until(event, number))

    def finish(self, event: FakeEvent) -> None:
        self._until(event, event.counts[0].copy())

    def _until(self, event: FakeEvent, number: np.uint64) -> None:
        until_s = time.monotonic() + 5.0
        while event.counts[1] < number and time.monotonic() < until_s:
            time.sleep(1e-4)  # then whoever should have recorded it is dead, and the driver lets go

    def device_of(self, value: object) -> int | None:
        return value.device if type(value) is FakeTensor else None

    def plain(self, tensor: FakeTensor) -> FakeTensor:
        return tensor

    def snapshot(self, tensor: FakeTensor) -> FakeTensor:
        return tensor.times(1)

    def form(self, tensor: FakeTensor) -> tuple[int, tuple[int, ...], int]:
        return DTYPES[tensor.dtype].code, tuple(tensor.shape), tensor.nbytes

    def address(self, tensor: FakeTensor) -> int:
        return tensor.base

    def empty(self, device: int, code: int, shape: tuple[int, ...]) -> FakeTensor:
        return FakeTensor(self, device, np.full(shape, 77, numpy_dtype(dtype_of_code(code))))

    def to_host(self, tensors: list[FakeTensor]) -> list[Any]:
        import torch

        return [torch.from_numpy(tensor.numpy()) for tensor in tensors]

    def from_host(self, device: int, tensors: list[Any]) -> list[FakeTensor]:
        return [self.tensor(device, tensor.numpy()) for tensor in tensors]
