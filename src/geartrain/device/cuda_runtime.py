"""Memory that other processes can open: torch's tensors, and the calls of the CUDA runtime that torch does not show.

`Driver` is all of it; `geartrain.device.cuda_ipc` and `geartrain.rpc` know nothing else, so that their protocols run on any
memory that can do these things. Work on a GPU is ordered by the current stream of the calling thread, and nothing here
waits for it but where a name says so.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from pathlib import Path
from typing import Any, Protocol

from geartrain.core.dtypes import DTYPES, dtype_of_code, torch_dtype
from geartrain.errors import DeviceError, TransportError

_COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say where they are
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_HANDLE_BYTES = 64


class Driver(Protocol):
    """Devices, their memory, and tensors in it. Devices are indices; addresses and events are the driver's own."""

    def why_no_ipc(self) -> str | None:
        """None where memory may be shared with other processes, as far as can be told without one."""

    def count(self) -> int:
        """How many devices there are."""

    # Memory that other processes can open.

    def allocate(self, device: int, nbytes: int) -> int:
        """An address. Raises `TransportError` when there is no memory."""

    def free(self, device: int, address: int) -> None:
        """Gives it back, once the device is done with it."""

    def export(self, device: int, address: int) -> bytes:
        """A handle by which another process opens an allocation."""

    def open(self, device: int, handle: bytes) -> int:
        """Another process's allocation, at an address of this one's. Raises `TransportError`."""

    def close(self, device: int, address: int) -> None:
        """Gives up what was opened."""

    def copy(self, device: int, target: int, source: int, nbytes: int) -> None:
        """Copies on the device's current stream, from and to any device."""

    # Points in a stream's work.

    def event(self, device: int) -> Any:
        """A new one, which has happened."""

    def export_event(self, event: Any) -> bytes:
        """A handle by which another process opens it."""

    def open_event(self, device: int, handle: bytes) -> Any:
        """Another process's event. Raises `TransportError`."""

    def record(self, device: int, event: Any) -> None:
        """Sets it to this point of the current stream."""

    def wait(self, device: int, event: Any) -> None:
        """Lets what comes later in the current stream wait for it."""

    def finish(self, event: Any) -> None:
        """Waits for it on the host."""

    # Tensors.

    def device_of(self, value: object) -> int | None:
        """The device of a plain tensor on one; None for everything else."""

    def plain(self, tensor: Any) -> Any:
        """The tensor contiguous, without history, on the same device."""

    def snapshot(self, tensor: Any) -> Any:
        """A copy on the same device."""

    def form(self, tensor: Any) -> tuple[int, tuple[int, ...], int]:
        """Dtype's code, shape, bytes."""

    def address(self, tensor: Any) -> int:
        """Where its memory is."""

    def empty(self, device: int, code: int, shape: tuple[int, ...]) -> Any:
        """A tensor with arbitrary contents."""

    def to_host(self, tensors: list[Any]) -> list[Any]:
        """Copies on the CPU, in pinned memory. Waits for them."""

    def from_host(self, device: int, tensors: list[Any]) -> list[Any]:
        """Copies of CPU tensors on the device, through pinned memory."""


class CudaDriver:
    """torch's CUDA devices. Importing torch is left to the first call that needs it."""

    def __init__(self) -> None:
        self._runtime: Any = None

    def why_no_ipc(self) -> str | None:
        torch = _torch()
        if torch is None:
            return "torch is not installed"
        if torch.cuda._is_in_bad_fork():
            return "CUDA was used before this process was forked; start it with the spawn method"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no CUDA device"
        if torch.version.hip:
            return "this torch was built for ROCm, whose handles are not tested"
        try:
            self._cudart()
        except TransportError as error:
            return str(error)
        return None

    def count(self) -> int:
        # A process that has not imported torch has no GPU tensors; where torch is there, this starts no context.
        torch = sys.modules.get("torch")
        return 0 if torch is None or torch.cuda._is_in_bad_fork() else int(torch.cuda.device_count())

    def allocate(self, device: int, nbytes: int) -> int:
        address = ctypes.c_void_p()
        self._call(device, "cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value or 0

    def free(self, device: int, address: int) -> None:
        self._call(device, "cudaFree", ctypes.c_void_p(address))

    def export(self, device: int, address: int) -> bytes:
        handle = _Handle()
        self._call(device, "cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open(self, device: int, handle: bytes) -> int:
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call(device, "cudaIpcOpenMemHandle", ctypes.byref(address), _handle(handle), flags)
        return address.value or 0

    def close(self, device: int, address: int) -> None:
        self._call(device, "cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def copy(self, device: int, target: int, source: int, nbytes: int) -> None:
        self._call(
            device,
            "cudaMemcpyAsync",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_COPY_DEFAULT),
            ctypes.c_void_p(_need_torch().cuda.current_stream(device).cuda_stream),
        )

    def event(self, device: int) -> Any:
        torch = _need_torch()
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            event.record()  # made on this device; an event that was never recorded has no handle
        return event

    def export_event(self, event: Any) -> bytes:
        return bytes(event.ipc_handle())

    def open_event(self, device: int, handle: bytes) -> Any:
        torch = _need_torch()
        try:
            with torch.cuda.device(device):
                return torch.cuda.Event.from_ipc_handle(device, handle)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"the peer's event cannot be opened: {error}") from error

    def record(self, device: int, event: Any) -> None:
        event.record(_need_torch().cuda.current_stream(device))

    def wait(self, device: int, event: Any) -> None:
        _need_torch().cuda.current_stream(device).wait_event(event)

    def finish(self, event: Any) -> None:
        event.synchronize()

    def device_of(self, value: object) -> int | None:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        tensor: Any = value
        if not tensor.is_cuda:
            return None
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise DeviceError(
                f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent: make it dense (`.to_dense()`), "
                "or send its parts"
            )
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise DeviceError(f"a tensor of {tensor.dtype} on {tensor.device} cannot be sent")
        return int(tensor.get_device())

    def plain(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor.contiguous()

    def snapshot(self, tensor: Any) -> Any:
        return self.plain(tensor).clone()

    def form(self, tensor: Any) -> tuple[int, tuple[int, ...], int]:
        code = DTYPES[str(tensor.dtype).removeprefix("torch.")].code
        return code, tuple(tensor.shape), tensor.numel() * tensor.element_size()

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def empty(self, device: int, code: int, shape: tuple[int, ...]) -> Any:
        torch = _need_torch()
        try:
            return torch.empty(shape, dtype=torch_dtype(dtype_of_code(code)), device=f"cuda:{device}")
        except torch.cuda.OutOfMemoryError as error:
            raise TransportError(f"no room on cuda:{device}: {error}") from error

    def to_host(self, tensors: list[Any]) -> list[Any]:
        torch = _need_torch()
        copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        for device in {tensor.get_device() for tensor in tensors}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def from_host(self, device: int, tensors: list[Any]) -> list[Any]:
        torch = _need_torch()
        copies = []
        for tensor in tensors:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            copies.append(pinned.to(f"cuda:{device}", non_blocking=True))  # torch keeps the pinned memory until then
        return copies

    # --- the runtime ------------------------------------------------------------------------------------------------

    def _call(self, device: int, name: str, *args: Any) -> None:
        runtime = self._cudart()
        with _need_torch().cuda.device(device):
            code = getattr(runtime, name)(*args)
            if code != 0:
                runtime.cudaGetLastError()  # else torch's next call would report it
                raise TransportError(f"{name} on cuda:{device}: {runtime.cudaGetErrorString(code).decode()}")

    def _cudart(self) -> Any:
        """The CUDA runtime that torch has loaded: another copy would have other contexts' state."""
        if self._runtime is None:
            torch = _need_torch()
            torch.cuda.init()
            paths = set(re.findall(r"\S*/libcudart[^\s/]*", Path("/proc/self/maps").read_text()))
            if len(paths) != 1:
                raise TransportError(f"torch has loaded {len(paths)} CUDA runtimes as libraries, and one is needed")
            runtime = ctypes.CDLL(paths.pop())
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            self._runtime = runtime
        return self._runtime


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


def _handle(raw: bytes) -> _Handle:
    if len(raw) != _HANDLE_BYTES:
        raise TransportError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes, found {len(raw)}")
    return _Handle.from_buffer_copy(raw)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _need_torch() -> Any:
    torch = _torch()
    if torch is None:
        raise TransportError("torch is not installed")
    return torch
