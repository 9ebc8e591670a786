"""What geartrain asks of a GPU, in one small interface: register memory, streams, events, copies, launches.

`geartrain.device.cuda_device.CudaDevice` is torch.cuda behind it; `geartrain.tools.testing.SimulatedDevice` runs on a CPU with streams that
fall behind, so that what waits for what can be tested where there is no GPU.

A *stream* runs its work in order; an *event* is a point in it. Everything but `sync` returns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from geartrain.device.cuda_device import CudaDevice
from geartrain.errors import ArgumentError

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """A device that batches can land on."""

    name: str
    model: str  # as the vendor calls it: what was measured holds for all devices of one model
    collectives: str  # torch.distributed's backend for its memory

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Pins host memory in place and maps it for the device. Raises `PinError`."""
        ...

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undoes `register`. Nothing on the device may use the memory any more."""
        ...

    def enter(self) -> None:
        """Called first by every thread that uses the device."""
        ...

    def new_stream(self) -> Any:
        """A stream of its own."""
        ...

    def current_stream(self) -> Any:
        """The stream that the calling thread works on."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work that is given meanwhile goes to that stream."""
        ...

    def record(self) -> Any:
        """An event: all work that was given to the current stream so far."""
        ...

    def wait(self, event: Any) -> None:
        """Work that is given to the current stream from now on waits for the event; the host does not."""
        ...

    def done(self, event: Any) -> bool:
        """Whether the event has come."""
        ...

    def sync(self, event: Any) -> None:
        """The host waits for the event, without the GIL."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """Device memory that belongs to the current stream."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8."""
        ...

    def host_view(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Registered memory, as a tensor that `run`'s functions may read on the device."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between host and device memory, or on the device, on the current stream."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Work on the current stream: torch operations and launches that write into tensors made before."""
        ...

    def gather(self, plan: Any, *args: Any, **named: Any) -> None:
        """`GatherPlan.launch` on the current stream."""
        ...

    def count_steps(self, plan: Any, to: torch.Tensor, *args: Any, **named: Any) -> None:
        """`GatherPlan.count_steps` on the current stream, into `to`."""
        ...

    def lend(self, tensor: torch.Tensor) -> None:
        """The current stream uses the tensor as well: its memory is not given to anybody before that use is over."""
        ...

    def why_no_selection(self) -> str | None:
        """What keeps rows from being chosen on this device; None when they can be."""
        ...


def open_device(device: Any) -> Device:
    """The device of "cuda", "cuda:1", a torch.device, or one that is already a `Device`.

    Raises:
        ArgumentError: there is no such device, or none that batches can land on.
    """
    if hasattr(device, "register") and hasattr(device, "gather"):
        return cast(Device, device)
    import torch

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"there is no device {device!r}; batches land on 'cuda' or 'cuda:N'") from None
    if wanted.type != "cuda":
        raise ArgumentError(f"batches land on 'cuda' or 'cuda:N', found {device!r}; leave device out for host memory")
    if not torch.cuda.is_available():
        raise ArgumentError(f"device={device!r} was asked for, torch {torch.__version__} finds no CUDA device")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise ArgumentError(f"device={device!r} was asked for, there are {torch.cuda.device_count()} CUDA devices")
    return CudaDevice(torch.cuda.current_device() if wanted.index is None else wanted.index)


__all__ = ["Device", "open_device"]
