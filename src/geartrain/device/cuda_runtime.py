"""`CudaRuntime`: the devices of this process, CUDA IPC memory and events, and transfers of torch tensors.

torch.cuda provides streams, events and tensors. It does not expose cudaMalloc, cudaIpc* and cudaMemcpyAsync. This file
calls them through ctypes, in the runtime library that torch has loaded. Work is queued on the calling thread's current
stream. The host waits for it only if a docstring says so.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from pathlib import Path
from typing import Any

from geartrain.core.dtypes import DTYPES, dtype_of_code, torch_dtype
from geartrain.device.cuda_device import CudaDevice
from geartrain.errors import DeviceError, TransportError

_COPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses tell where they are
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_HANDLE_BYTES = 64


class CudaRuntime:
    """`geartrain.device.device.DeviceRuntime` of torch's CUDA devices; torch is imported when a call first needs it."""

    def __init__(self) -> None:
        self._library: Any = None
        self._devices: dict[int, CudaIpcDevice] = {}

    def why_no_ipc(self) -> str | None:
        """What torch, this process or the runtime library lacks."""
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
        """torch.cuda.device_count; 0 in a process that has not imported torch, and so has no GPU tensors."""
        torch = sys.modules.get("torch")  # where torch is imported, counting creates no CUDA context
        return 0 if torch is None or torch.cuda._is_in_bad_fork() else int(torch.cuda.device_count())

    def device(self, index: int) -> CudaIpcDevice:
        """One `CudaIpcDevice` for each index."""
        _need_torch()
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = CudaIpcDevice(index, self)
        return found

    def device_of(self, value: object) -> int | None:
        """Device of a dense tensor or parameter on a GPU."""
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
        """Without history, conjugation and negation bits."""
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor.contiguous()

    def snapshot(self, tensor: Any) -> Any:
        """A clone."""
        return self.plain(tensor).clone()

    def form(self, tensor: Any) -> tuple[int, tuple[int, ...], int]:
        """Codes of `geartrain.core.schema`."""
        code = DTYPES[str(tensor.dtype).removeprefix("torch.")].code
        return code, tuple(tensor.shape), tensor.numel() * tensor.element_size()

    def address(self, tensor: Any) -> int:
        """data_ptr."""
        return int(tensor.data_ptr())

    def empty(self, device: int, code: int, shape: tuple[int, ...]) -> Any:
        """From torch's caching allocator."""
        torch = _need_torch()
        try:
            return torch.empty(shape, dtype=torch_dtype(dtype_of_code(code)), device=f"cuda:{device}")
        except torch.cuda.OutOfMemoryError as error:
            raise TransportError(f"no room on cuda:{device}: {error}") from error

    def to_host(self, tensors: list[Any]) -> list[Any]:
        """Waits for the current stream of each device."""
        torch = _need_torch()
        copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        for device in {tensor.get_device() for tensor in tensors}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def from_host(self, device: int, tensors: list[Any]) -> list[Any]:
        """Queued on the current stream."""
        torch = _need_torch()
        copies = []
        for tensor in tensors:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            copies.append(pinned.to(f"cuda:{device}", non_blocking=True))  # torch keeps the pinned memory until then
        return copies

    def call(self, device: int, name: str, *args: Any) -> None:
        """One call of the runtime library, with the device current. Raises `TransportError`."""
        library = self._cudart()
        with _need_torch().cuda.device(device):
            code = getattr(library, name)(*args)
            if code != 0:
                library.cudaGetLastError()  # else torch's next call would report it
                raise TransportError(f"{name} on cuda:{device}: {library.cudaGetErrorString(code).decode()}")

    def _cudart(self) -> Any:
        """The CUDA runtime library that torch has loaded: another copy would have its own contexts."""
        if self._library is None:
            torch = _need_torch()
            torch.cuda.init()
            paths = set(re.findall(r"\S*/libcudart[^\s/]*", Path("/proc/self/maps").read_text()))
            if not paths:
                raise TransportError("torch has loaded no CUDA runtime as a library, and one is needed")
            if len(paths) > 1:  # CuPy or JAX have brought theirs: names are looked up as torch's library does
                paths = {str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so")}
            try:
                library = ctypes.CDLL(paths.pop())
                library.cudaIpcOpenMemHandle  # noqa: B018
            except (OSError, AttributeError) as error:
                raise TransportError(f"torch's CUDA runtime cannot be called: {error}") from error
            library.cudaGetErrorString.restype = ctypes.c_char_p
            self._library = library
        return self._library


class CudaIpcDevice(CudaDevice):
    """`geartrain.device.device.IpcDevice`: a CUDA device with CUDA IPC."""

    def __init__(self, index: int, runtime: CudaRuntime) -> None:
        super().__init__(index)
        self._runtime = runtime

    def allocate(self, nbytes: int) -> int:
        """cudaMalloc."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value or 0

    def free(self, address: int) -> None:
        """cudaFree."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        """cudaIpcGetMemHandle."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """cudaIpcOpenMemHandle."""
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), _handle(handle), flags)
        return address.value or 0

    def close(self, address: int) -> None:
        """cudaIpcCloseMemHandle."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """cudaMemcpyAsync."""
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_COPY_DEFAULT),
            ctypes.c_void_p(self.current_stream().cuda_stream),
        )

    def new_ipc_event(self) -> Any:
        """cudaEventInterprocess."""
        torch = _need_torch()
        with torch.cuda.device(self.index):
            event = torch.cuda.Event(interprocess=True)
            event.record()  # made on this device; an event that was never recorded has no handle
        return event

    def export_event(self, event: Any) -> bytes:
        """cudaIpcGetEventHandle."""
        return bytes(event.ipc_handle())

    def open_event(self, handle: bytes) -> Any:
        """cudaIpcOpenEventHandle."""
        torch = _need_torch()
        try:
            with torch.cuda.device(self.index):
                return torch.cuda.Event.from_ipc_handle(self.index, handle)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"the peer's event cannot be opened: {error}") from error

    def _call(self, name: str, *args: Any) -> None:
        self._runtime.call(self.index, name, *args)


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
