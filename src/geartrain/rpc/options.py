"""`NodeOptions`: the rare options of a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from geartrain.core.arguments import whole_number
from geartrain.device.device import DeviceRuntime
from geartrain.errors import ArgumentError
from geartrain.transport.connection import MessageLimits


@dataclass(frozen=True)
class NodeOptions:
    """Rare options of a `Node`: `rpc.Node("learner", options=rpc.NodeOptions(max_running=2))`.

    Args:
        max_threads: most functions that run at once. One that waits for a call of its own, or that was cancelled, does
            not count; an `async def` needs no thread.
        max_running: functions that begin at once: the next begins when one of them returns, has run for 5 ms, or waits
            for a call of its own. Raise it for functions that wait for less than that, on disks for example, or that
            compute without the GIL on free cores.
        max_open: calls to one peer without a reply; the next one waits.
        peer_timeout_s: a peer without heartbeats for this many seconds is lost: its process is stopped, or its host or
            network is down. Its calls then fail with `PeerLostError`, and `on_peer_lost` is called. A killed process is
            lost at once. 0 never, otherwise at least 2.
        limits, spin_us, views, advertise: as for `transport.listen`.
        driver: runtime of other devices than CUDA's.

    Raises:
        ArgumentError: a number of threads or calls is below 1. The node checks the others.

    Examples:
        >>> NodeOptions(max_running=2).max_threads
        64
    """

    max_threads: int = 64
    max_running: int = 1
    max_open: int = 1024
    peer_timeout_s: float = 10.0
    limits: MessageLimits | None = None
    spin_us: float = 50.0
    views: bool = True
    advertise: Iterable[str] = ()
    driver: DeviceRuntime | None = None

    def __post_init__(self) -> None:
        for what in ("max_threads", "max_running", "max_open"):
            if whole_number(what, getattr(self, what), 2**31 - 1) < 1:
                raise ArgumentError(f"{what} must be at least 1, found {getattr(self, what)}")


__all__ = ["NodeOptions"]
