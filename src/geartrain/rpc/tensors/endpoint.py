"""Out-of-band tensors of one node: tensors on GPUs and, over NIXL, big ones on the CPU.

A message whose kind has the bit `OUT_OF_BAND` holds (value, bundles): the value with None where leaves were taken out,
and for each bundle of leaves (channel, device, number, token, entries), an entry being (key path, spec). Bundles of the
channel `host` have their leaves in the value, as CPU tensors, and say which GPU they are for.

Arguments. The client knows the device map; it leases a buffer of the server (`geartrain.rpc.lease`), writes into it,
and sends the call.
Results. The server holds copies of the leaves and replies with their specs; the client leases a buffer of its own and
has the server write into it (`geartrain.rpc.push`). Where no channel is known to work, the leaves go in the message.

A channel between two GPUs is used once a nonce has come through it (`TensorSender.channel`); before, and where none
does, tensors are copied through pinned host memory, and a log line says so once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import geartrain.transport.nixl as nixl
from geartrain.core.arguments import shown
from geartrain.device.cuda_runtime import CudaRuntime
from geartrain.device.device import DeviceRuntime
from geartrain.errors import ArgumentError, MessageError, TransportError
from geartrain.rpc.tensors.bundles import NIXL_BYTES, is_big
from geartrain.rpc.tensors.channels import TensorChannels
from geartrain.rpc.tensors.device_map import Maps, maps_of
from geartrain.rpc.tensors.pytree import KeyPath, take_out
from geartrain.transport.codec import Payload, native_codec
from geartrain.transport.nixl_memory import RegisteredMemoryPool

#: Channels that can be forced; messages then still use the transport that was chosen for them.
CHANNELS = ("cuda_ipc", "nixl")

#: A value without its leaves, and these.
TakenOut = tuple[Any, list[tuple[KeyPath, Any]]]


class DeviceTensors:
    """A node's side of transferring tensors: the driver, the device maps, and which channel was asked for."""

    def __init__(
        self, device_map: Any, transport: str | None, driver: DeviceRuntime | None, max_leased_bytes: int
    ) -> None:
        if driver is not None and not all(callable(getattr(driver, call, None)) for call in ("count", "why_no_ipc")):
            raise ArgumentError(f"a driver is a geartrain.device.device.DeviceRuntime, found {shown(driver)}")
        self.driver = CudaRuntime() if driver is None else driver
        self.maps: Maps = maps_of(device_map, _count_for(self.driver, device_map))
        self.forced = transport if isinstance(transport, str) and transport in CHANNELS else None
        why = None
        if self.forced == "nixl":
            why = nixl.why_not()
        elif self.forced == "cuda_ipc":
            why = self.driver.why_no_ipc()
        if why is not None:
            raise TransportError(f"transport {self.forced!r} was asked for, and is not viable here: {why}")
        self._codec = native_codec()
        self._memory = RegisteredMemoryPool()
        self._max_leased_bytes = max_leased_bytes

    def close(self) -> None:
        """Frees registered memory that is not leased."""
        self._memory.close()

    def channels(self) -> TensorChannels:
        """For one end of a connection."""
        return TensorChannels(self.driver, self._memory, self._max_leased_bytes)

    def encode(self, value: Any, pickle: bool, over_nixl: bool) -> tuple[Payload | None, TakenOut | None]:
        """The encoded value where all of it stands in the message; else the value without its leaves, and these.

        Args:
            value: arguments or a result.
            pickle: whether what the codec does not know goes by pickle.
            over_nixl: whether big arrays and CPU tensors are taken out as well.

        Raises:
            MessageError: the codec does not know something in it.
        """
        try:
            payload = self._codec.encode(value, pickle)
        except MessageError:
            taken = take_out(value, self._wanted(over_nixl))
            if not taken[1]:
                raise
            return None, taken
        if over_nixl and payload.nbytes >= NIXL_BYTES:
            taken = take_out(value, self._wanted(over_nixl))
            if taken[1]:
                return None, taken
        return payload, None

    def _wanted(self, over_nixl: bool) -> Callable[[Any], bool]:
        """Which leaves are taken out of a message."""
        on_device = self.driver.device_of
        return lambda leaf: on_device(leaf) is not None or (over_nixl and is_big(leaf))


def _count_for(driver: DeviceRuntime, device_map: Any) -> int:
    if device_map is not None:
        driver.why_no_ipc()  # imports torch, without which there are no devices to count
    return driver.count()
