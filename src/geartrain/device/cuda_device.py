"""`CudaDevice`: implements `geartrain.device.device.Device` with torch.cuda."""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

import geartrain.device.kernels as kernels
from geartrain.device.copy_batches import CopyBatches
from geartrain.errors import PinError, WaitTimeoutError

if TYPE_CHECKING:
    import torch

MOST_STREAMS = 64  # that are kept by their handles; torch has 32 of each priority
_NOTHING: AbstractContextManager[Any] = nullcontext()

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # cudaHostRegister's flags
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
POLLED_S = 100e-6  # that an event is looked at without a pause; a copy of 4 MB takes about that
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 200e-6  # between looks at an event


_log = logging.getLogger("geartrain.device.cuda_device")


class CudaDevice:
    """One CUDA device, by torch."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch = torch
        self._cuda: Any = torch.cuda  # partly untyped
        self.index = index
        self.name = f"cuda:{index}"
        self.collectives = "nccl"
        self.device = torch.device("cuda", index)
        self._known: Any = torch._C
        self.hip = torch.version.hip is not None  # torch for ROCm
        self.set_stream: Any = torch.cuda.set_stream
        self._streams: dict[int, Any] = {}
        self._batches: CopyBatches | None = None

    def register(self, memory: NDArray[np.uint8]) -> None:
        """cudaHostRegister, portable and mapped; read-only memory as such."""
        address, nbytes = memory.ctypes.data, memory.nbytes
        flags = PORTABLE | MAPPED | (0 if memory.flags.writeable else READ_ONLY)
        with self._torch.cuda.device(self.device):
            failed = self._cuda.cudart().cudaHostRegister(address, nbytes, flags)  # torch's cudaError, no int
            if int(failed):
                self._forget_error()
                reason = self._cuda.cudart().cudaGetErrorString(failed)
                raise PinError(f"cudaHostRegister: error {int(failed)}, {reason}")
            try:
                self.device_pointer(address)
            except PinError:
                self.unregister(memory)
                raise

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """cudaHostUnregister."""
        with self._torch.cuda.device(self.device):
            code = int(self._cuda.cudart().cudaHostUnregister(memory.ctypes.data))
            if code:
                self._forget_error()
                raise PinError(f"cudaHostUnregister: error {code}")

    def device_pointer(self, address: int) -> int:
        """The device's address of registered memory; the host's wherever there is unified addressing."""
        pointer = ctypes.c_uint64()
        code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        if code:
            raise PinError(f"the device does not see registered memory: cuMemHostGetDevicePointer returned {code}")
        return pointer.value

    def _forget_error(self) -> None:
        # The runtime keeps the error of a failed call, and reports it at the next launch.
        with suppress(RuntimeError):
            self._torch.empty(1, device=self.device).fill_(1)  # a kernel, which a copy or a memset is not

    def enter(self, stream: Any = None) -> None:
        """Makes device and stream the thread's, and allows its calls while another thread captures a graph."""
        self._torch.cuda.set_device(self.device)
        if stream is not None:
            self._torch.cuda.set_stream(stream)
        # While any thread captures a graph, the default mode refuses calls such as cudaMalloc and cudaEventQuery to
        # every thread, and breaks the capture. Work of this thread is never part of one.
        if not self.hip:  # which has no libcuda
            _bind_context(_driver(), self.index)
            _exchange_capture_mode(RELAXED)

    def new_stream(self) -> Any:
        """A stream other than the default one."""
        return self._cuda.Stream(self.device)

    def current_stream(self) -> Any:
        """Current stream of the calling thread. Keeps one object per stream; torch creates one per call, slowly."""
        raw = self._known._cuda_getCurrentRawStream(self.index)
        found = self._streams.get(raw)
        if found is None:
            if len(self._streams) >= MOST_STREAMS:
                self._streams.clear()
            found = self._streams[raw] = self._cuda.current_stream(self.device)
        return found

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Nothing where it is the thread's already, else two calls: `torch.cuda.stream` takes 13 us, these 3."""
        known = self._known
        if known._cuda_getDevice() != self.index:
            return cast(AbstractContextManager[Any], self._torch.cuda.stream(stream))
        if known._cuda_getCurrentRawStream(self.index) == stream.cuda_stream:
            return _NOTHING
        return _On(self, stream)

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """As `on`; where that changes anything, with the mode of graph capture that `enter` sets."""
        found = self.on(stream)
        return _Entered(self, stream) if isinstance(found, _On) and not self.hip else found

    def new_event(self) -> Any:
        """Without timing; cudaEventSynchronize spins where CUDA finds that worth it."""
        return self._cuda.Event()

    def record(self, event: Any = None) -> Any:
        """cudaEventRecord. A new event lets the host sleep while it waits."""
        event = self._cuda.Event(blocking=True) if event is None else event
        event.record(self.current_stream())
        return event

    def wait(self, event: Any) -> None:
        """cudaStreamWaitEvent."""
        self.current_stream().wait_event(event)

    def done(self, event: Any) -> bool:
        """cudaEventQuery."""
        return bool(event.query())

    def sync(self, event: Any, timeout_s: float | None = None) -> None:
        """cudaEventSynchronize, for which torch releases the GIL; with a deadline cudaEventQuery now and then."""
        if timeout_s is None:
            event.synchronize()
            return
        began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        while not event.query():
            waited_s = time.monotonic() - began_s
            if waited_s > timeout_s:
                raise WaitTimeoutError(f"{self.name} did not reach an event within {timeout_s:.3g} s")
            if waited_s < POLLED_S:  # a pause of any length takes a thread 60 us or more
                time.sleep(0)
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """From torch's caching allocator."""
        return self._torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """From torch's allocator of pinned memory."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def host_view(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """A tensor over the memory. Triton asks the driver for the device's address of it."""
        from geartrain.core.dtypes import writable_tensor

        return writable_tensor(memory)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """cudaMemcpyAsync."""
        to.copy_(source, non_blocking=True)

    def copy_many(
        self,
        to: torch.Tensor,
        source: torch.Tensor,
        at: NDArray[np.uint64],
        begins: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        """cuMemcpyBatchAsync, or what there is instead (copy_batches.py)."""
        if self.hip:  # which has no libcuda
            for place, begin, size in zip(at.tolist(), begins.tolist(), sizes.tolist(), strict=True):
                to[place : place + size].copy_(source[begin : begin + size], non_blocking=True)
            return
        if self._batches is None:
            self._batches = CopyBatches(_driver())
        _bind_context(_driver(), self.index)
        targets, sources = at + np.uint64(to.data_ptr()), begins + np.uint64(source.data_ptr())
        self._batches.submit(targets, sources, sizes, self.current_stream().cuda_stream)

    def run(self, work: Callable[[], object]) -> None:
        """Runs it at once: torch queues its work on the current stream."""
        work()

    def gather(self, plan: Any, *args: Any, **named: Any) -> None:
        """The Triton kernel."""
        plan.launch(*args, **named)

    def count_steps(self, plan: Any, to: torch.Tensor, *args: Any, **named: Any) -> None:
        """The Triton kernel, and torch's running sum."""
        to.copy_(plan.count_steps(*args, **named))

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Known to torch's caching allocator."""
        tensor.record_stream(self.current_stream())

    def why_no_selection(self) -> str | None:
        """The reason that Triton's kernels cannot run."""
        return kernels.why_not_viable()


class _On:
    """Makes a stream of the current device current, as `CudaDevice.on` does."""

    __slots__ = ("_device", "_stream")

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        before = self._device.current_stream()
        self._device.set_stream(self._stream)
        self._stream = before

    def __exit__(self, *exc: object) -> None:
        self._device.set_stream(self._stream)


class _Entered(_On):
    """Makes a device current, for `CudaDevice.entered`."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = _exchange_capture_mode(RELAXED)
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._mode is not None:
            _exchange_capture_mode(self._mode)


def _exchange_capture_mode(mode: int) -> int | None:
    """Sets the calling thread's mode of graph capture; returns the one before, None where the driver refuses."""
    exchanged = ctypes.c_int(mode)
    code = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
    if code:
        _log.warning("a graph cannot be captured while batches are made: the driver's error %d", code)
        return None
    return exchanged.value


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _bind_context(driver: Any, index: int) -> None:
    """Makes the device's context current in a thread that has none: torch leaves that to the runtime's first call."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is None:
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # never released: torch's, for good
        driver.cuCtxSetCurrent(context)


__all__ = ["CudaDevice"]
