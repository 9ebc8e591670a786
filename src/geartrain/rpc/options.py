"""`NodeOptions`: the rare options of a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from geartrain.core.arguments import FLAG, SECONDS, Options, check_texts, check_whole, checked
from geartrain.device.device import DeviceRuntime
from geartrain.transport.connection import LIMITS, SPIN_US, MessageLimits


@dataclass(frozen=True)
class NodeOptions(Options):
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
        ArgumentError: an option is out of range.

    Examples:
        >>> NodeOptions(max_running=2).max_threads
        64
    """

    max_threads: int = field(default=64, metadata=checked(check_whole, 1, 2**31 - 1))
    max_running: int = field(default=1, metadata=checked(check_whole, 1, 2**31 - 1))
    max_open: int = field(default=1024, metadata=checked(check_whole, 1, 2**31 - 1))
    peer_timeout_s: float = field(default=10.0, metadata=SECONDS)
    limits: MessageLimits | None = field(default=None, metadata=LIMITS)
    spin_us: float = field(default=50.0, metadata=SPIN_US)
    views: bool = field(default=True, metadata=FLAG)
    advertise: Iterable[str] = field(default=(), metadata=checked(check_texts))
    driver: DeviceRuntime | None = None


__all__ = ["NodeOptions"]
