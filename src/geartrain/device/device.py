"""Protocols of an accelerator: streams, events, asynchronous copies, pinned memory and CUDA IPC handles.

    Device          one device: used by batches (geartrain.replay), and staging of all-reduces (geartrain.collectives)
    IpcDevice       a device whose memory and events other processes can open
    DeviceRuntime   the devices of this process, and the tensors on them (geartrain.rpc)

`geartrain.device.cuda_device.CudaDevice` and `geartrain.device.cuda_runtime.CudaRuntime` implement them by torch.cuda
and the CUDA runtime. `geartrain.tools.testing.SimulatedDevice` and `SimulatedRuntime` implement them on a CPU. The
simulated streams lag behind the host, so tests can check the order of work without a GPU.

A *stream* runs its work in order. An *event* is a point in a stream. Every thread has a current stream. All calls
except `sync` return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import shown
from geartrain.device.cuda_device import CudaDevice
from geartrain.errors import ArgumentError

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """One accelerator."""

    name: str
    collectives: str  # torch.distributed's backend for its memory

    # Streams and events.

    def enter(self, stream: Any = None) -> None:
        """Called first by a thread that works for the device alone; `stream` is its current one from here on."""
        ...

    def new_stream(self) -> Any:
        """A new stream."""
        ...

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which `stream` is the calling thread's current stream."""
        ...

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which the calling thread, which has work of its own, works as after `enter(stream)`."""
        ...

    def new_event(self) -> Any:
        """An event for `record`, for short waits: a host thread that synchronizes with it may spin."""
        ...

    def record(self, event: Any = None) -> Any:
        """Records all work given to the current stream so far, in `event` or a new one; returns the event."""
        ...

    def wait(self, event: Any) -> None:
        """Makes later work of the current stream wait for what the event has recorded; the host does not wait."""
        ...

    def done(self, event: Any) -> bool:
        """Whether all work before the event has completed."""
        ...

    def sync(self, event: Any, timeout_s: float | None = None) -> None:
        """Waits on the host for what the event has recorded, without the GIL.

        Raises `WaitTimeoutError` after `timeout_s`, and `RuntimeError` once work of the device has failed.
        """
        ...

    # Memory.

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Pins host memory in place and maps it for the device. Raises `PinError`."""
        ...

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undoes `register`. No work on the device may use the memory any more."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """Device memory, allocated on the current stream."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory: (nbytes,) uint8."""
        ...

    def host_view(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Registered memory as a tensor that `run`'s functions may read on the device."""
        ...

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Marks a tensor as used by the current stream: its memory is not reused before that use is over."""
        ...

    # Work on the current stream.

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between host and device memory, or on the device."""
        ...

    def copy_many(
        self,
        to: torch.Tensor,
        source: torch.Tensor,
        at: NDArray[np.uint64],
        begins: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        """Copies pieces of registered host memory to device memory, in no order among themselves.

        `at` (k,) and `begins` (k,) are offsets in bytes of `to` and of `source`, `host_view`'s; no size is 0.
        """
        ...

    def run(self, work: Callable[[], object]) -> None:
        """torch operations and launches that write into tensors made before."""
        ...

    def gather(self, plan: Any, *args: Any, **named: Any) -> None:
        """`GatherPlan.launch`."""
        ...

    def count_steps(self, plan: Any, to: torch.Tensor, *args: Any, **named: Any) -> None:
        """`GatherPlan.count_steps`, into `to`."""
        ...

    def why_no_selection(self) -> str | None:
        """Why rows cannot be selected on this device; None where they can."""
        ...


class IpcDevice(Device, Protocol):
    """A device whose memory and events other processes of the host can open. Addresses are the runtime's own."""

    def allocate(self, nbytes: int) -> int:
        """The address of new memory with a handle of its own. Raises `TransportError` when there is none."""
        ...

    def free(self, address: int) -> None:
        """Frees it, after the device's work on it."""
        ...

    def export(self, address: int) -> bytes:
        """The handle by which another process opens an allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation; its address here. Raises `TransportError`."""
        ...

    def close(self, address: int) -> None:
        """Unmaps what was opened."""
        ...

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Copies on the current stream, from and to addresses of any device."""
        ...

    def new_ipc_event(self) -> Any:
        """An event, already complete, that can be exported."""
        ...

    def export_event(self, event: Any) -> bytes:
        """The handle by which another process opens an event."""
        ...

    def open_event(self, handle: bytes) -> Any:
        """Another process's event. Raises `TransportError`."""
        ...


class DeviceRuntime(Protocol):
    """The devices of this process, by index, and operations on tensors that are on them."""

    def why_no_ipc(self) -> str | None:
        """Why memory cannot be shared with other processes, as far as one process can tell; None where it can."""
        ...

    def count(self) -> int:
        """The number of devices."""
        ...

    def device(self, index: int) -> IpcDevice:
        """The device of an index below `count`."""
        ...

    def device_of(self, value: object) -> int | None:
        """The index of the device of a plain tensor; None for everything else.

        Raises `DeviceError` for a tensor on a device that cannot be sent.
        """
        ...

    def plain(self, tensor: Any) -> Any:
        """The tensor contiguous and detached, on the same device."""
        ...

    def snapshot(self, tensor: Any) -> Any:
        """A copy on the same device."""
        ...

    def form(self, tensor: Any) -> tuple[int, tuple[int, ...], int]:
        """Code of the dtype, shape, bytes."""
        ...

    def address(self, tensor: Any) -> int:
        """The address of its memory."""
        ...

    def empty(self, device: int, code: int, shape: tuple[int, ...]) -> Any:
        """An uninitialized tensor. Raises `TransportError` when there is no memory."""
        ...

    def to_host(self, tensors: list[Any]) -> list[Any]:
        """CPU copies in pinned memory. Waits for them."""
        ...

    def from_host(self, device: int, tensors: list[Any]) -> list[Any]:
        """Copies of CPU tensors on the device, through pinned memory."""
        ...


def open_device(device: Any) -> Device:
    """The device of "cuda", "cuda:1", a torch.device, or one that is already a `Device`.

    Raises:
        ArgumentError: there is no such device, or none of a supported kind.
    """
    if hasattr(device, "register") and hasattr(device, "gather"):
        return cast(Device, device)
    import torch

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # ValueError: numbers of too many bits, bytes that are no text
        raise ArgumentError(f"there is no device {shown(device)}; batches go to 'cuda' or 'cuda:N'") from None
    if wanted.type != "cuda":
        raise ArgumentError(
            f"batches go to 'cuda' or 'cuda:N', found {shown(device)}; leave device out for host memory"
        )
    if not torch.cuda.is_available():
        raise ArgumentError(f"device={device!r}: torch {torch.__version__} finds no CUDA device")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise ArgumentError(f"device={device!r}: there are only {torch.cuda.device_count()} CUDA devices")
    return CudaDevice(torch.cuda.current_device() if wanted.index is None else wanted.index)


__all__ = ["Device", "DeviceRuntime", "IpcDevice", "open_device"]
