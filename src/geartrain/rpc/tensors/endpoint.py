"""Out-of-band tensors of one node: tensors on GPUs and, over one-sided channels, large tensors on the CPU.

Messages. If a message's kind has the bit `OUT_OF_BAND`, its value is a pair (value, bundles). In the value, None stands
where a tensor (a leaf) was taken out. A bundle is (channel, device, number, token, entries), and each entry is
(key path, spec). A bundle of the channel `host` leaves its tensors in the value, as CPU tensors, and names their GPU.

Arguments. The client knows the device map. It leases a buffer of the server (`geartrain.rpc.lease`), writes the tensors
into it, and then sends the call.

Results. The server keeps copies of the tensors and replies with their specs. The client leases a buffer of its own and
requests the server to write into it (`geartrain.rpc.push`). If no channel is known to work, the message contains the
tensors.

Verification. A channel between two GPUs is used only after a nonce has come through it (`TensorSender.channel`). Until
then, tensors are copied through pinned host memory. If no channel works they always are, and a log line says so once.
"""

from __future__ import annotations

from typing import Any

from geartrain.core.arguments import shown
from geartrain.device.cuda_runtime import CudaRuntime
from geartrain.device.device import DeviceRuntime
from geartrain.errors import ArgumentError, TransportError
from geartrain.rpc.tensors.bundles import is_big
from geartrain.rpc.tensors.channels import TensorChannels
from geartrain.rpc.tensors.device_map import Maps, maps_of
from geartrain.rpc.tensors.pytree import KeyPath, take_out
from geartrain.transport import one_sided
from geartrain.transport.one_sided.registered_memory import RegisteredMemoryPool

#: Channels that can be forced. Messages still use the connection's own transport then.
CHANNELS = ("cuda_ipc", *one_sided.names())

#: A value without its leaves, and the leaves.
TakenOut = tuple[Any, list[tuple[KeyPath, Any]]]


class DeviceTensors:
    """A node's state for tensor transfers: the CUDA driver, the device maps, and the channel that was asked for."""

    def __init__(
        self, device_map: Any, transport: str | None, driver: DeviceRuntime | None, max_leased_bytes: int
    ) -> None:
        if driver is not None and not all(callable(getattr(driver, call, None)) for call in ("count", "why_no_ipc")):
            raise ArgumentError(f"a driver is a geartrain.device.device.DeviceRuntime, found {shown(driver)}")
        self.driver = CudaRuntime() if driver is None else driver
        self.maps: Maps = maps_of(device_map, _count_for(self.driver, device_map))
        self.forced = transport if isinstance(transport, str) and transport in CHANNELS else None
        self._pools: dict[str, RegisteredMemoryPool] = {}
        #: Registered memory of the channel that was asked for, if it is a one-sided one.
        self.memory = None if self.forced in (None, "cuda_ipc") else self.memory_of(self.forced)
        why = None
        if self.memory is not None:
            why = self.memory.backend.why_not()
        elif self.forced is not None:
            why = self.driver.why_no_ipc()
        if why is not None:
            raise TransportError(f"transport {self.forced!r} is not viable here: {why}")
        self._max_leased_bytes = max_leased_bytes

    def close(self) -> None:
        """Frees registered memory that is not leased."""
        for pool in list(self._pools.values()):
            pool.close()

    def memory_of(self, name: str) -> RegisteredMemoryPool:
        """The node's registered memory for a one-sided channel. Raises `TransportError` if there is no such channel."""
        return self._pools.get(name) or self._pools.setdefault(name, RegisteredMemoryPool(name))

    def channels(self) -> TensorChannels:
        """For one end of a connection."""
        return TensorChannels(self.driver, self._max_leased_bytes)

    def take_out(self, value: Any, encodable: bool, with_big: bool) -> TakenOut | None:
        """A value without the leaves that do not go in the message, and these. None where all of it goes there.

        Args:
            value: arguments or a result.
            encodable: whether the codec knows all of it, so that it has no leaves on GPUs.
            with_big: whether big arrays and CPU tensors are taken out as well.

        Raises:
            MessageError: it is nested too deep, or contains itself.
        """
        if encodable and not with_big:
            return None
        on_device = self.driver.device_of
        taken = take_out(value, lambda leaf: on_device(leaf) is not None or (with_big and is_big(leaf)))
        return taken if taken[1] else None


def _count_for(driver: DeviceRuntime, device_map: Any) -> int:
    if device_map is not None:
        driver.why_no_ipc()  # imports torch, without which there are no devices to count
    return driver.count()
