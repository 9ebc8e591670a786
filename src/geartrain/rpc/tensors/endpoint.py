"""Tensors of calls and results that do not stand in the message: those on GPUs and, over NIXL, big ones on the CPU.

A message whose kind has the bit `BESIDE` holds (value, groups): the value with None where leaves were taken out, and
for each group of leaves (way, device, number, token, entries), an entry being (path, form). `host` groups have their
leaves in the value, as CPU tensors, and say which GPU they are for.

Arguments. The caller knows the device map; it asks for room (`geartrain.rpc.room`), pushes, and sends the call.
Results. The server holds copies of the leaves and answers with their forms; the caller makes room and asks for them
(`geartrain.rpc.push`). What the server has not been told a way for goes in the message.

A way between two GPUs is believed when random bytes have come through it (`Outbound.way`); before, and where they do
not, tensors are copied through pinned host memory, and a log line says so once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import geartrain.transport.nixl as nixl
from geartrain.device.cuda_runtime import CudaRuntime
from geartrain.device.device import DeviceRuntime
from geartrain.errors import TransportError
from geartrain.rpc.tensors.bundles import is_big
from geartrain.rpc.tensors.device_map import Maps, maps_of
from geartrain.rpc.tensors.paths import Ways
from geartrain.rpc.tensors.receiver import Inbound
from geartrain.rpc.tensors.registered_memory import Landings

#: Transports of tensors that can be forced; messages then go as they go.
WAYS = ("cuda_ipc", "nixl")


class Devices:
    """What a node knows of GPUs: the driver, the maps, and whether a way was asked for."""

    def __init__(
        self, device_map: Any, transport: str | None, driver: DeviceRuntime | None, max_lent_bytes: int
    ) -> None:
        self.driver = driver or CudaRuntime()
        self.maps: Maps = maps_of(device_map, _count_for(self.driver, device_map))
        self.forced = transport if transport in WAYS else None
        why = None
        if self.forced == "nixl":
            why = nixl.why_not()
        elif self.forced == "cuda_ipc":
            why = self.driver.why_no_ipc()
        if why is not None:
            raise TransportError(f"transport {self.forced!r} was asked for, and is not viable here: {why}")
        self.landings = Landings()
        self.max_lent_bytes = max_lent_bytes

    def close(self) -> None:
        """Frees memory that is registered for nothing."""
        self.landings.close()

    def ways(self) -> Ways:
        """For one end of a connection."""
        return Ways(self.driver, self.landings, self.max_lent_bytes)

    def inbound(self, connection: Any) -> Inbound:
        """For a peer that calls this node."""
        return Inbound(self, connection)

    def wanted(self, over_nixl: bool) -> Callable[[Any], bool]:
        """Which leaves are taken out of a message."""
        on_device = self.driver.device_of
        return lambda leaf: on_device(leaf) is not None or (over_nixl and is_big(leaf))


def _count_for(driver: DeviceRuntime, device_map: Any) -> int:
    if device_map:
        driver.why_no_ipc()  # imports torch, without which there are no devices to count
    return driver.count()
