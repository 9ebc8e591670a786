"""All-to-all of device memory between ranks, by NCCL on the consumer's current stream.

All replays of a job share one torch process group. NCCL forbids three uses of two communicators on one GPU: at the same
time, from several threads, or in different orders on different ranks. Otherwise the job can deadlock. A collective that
waits for another rank occupies multiprocessors, and other work may occupy those of the other rank.

So the prefetch thread does not run the exchange. The consumer's thread queues it when it takes a batch. It goes to the
stream of the model's work, after the collectives that this stream has waited for
(docs/decisions/device-batches.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geartrain.device.device import Device
from geartrain.errors import ArgumentError, PeerLostError

if TYPE_CHECKING:
    import torch

# Until the connections of a rank that has died end, once a collective has failed for it.
NOTICE_S = 1.0


class DeviceGroup:
    """The ranks of a replay, for exchanges of device memory. All of them make it at the same point.

    Args:
        backend: of torch.distributed; "nccl" for CUDA devices.
        members: their global ranks, in the replay's order.
        timeout_s: after which torch's watchdog ends the process of a hanging collective. That of the first replay
            holds for all.

    Raises:
        ArgumentError: this torch lacks the backend, or the job's group allows no group of some of its ranks.
    """

    def __init__(self, backend: str, members: Sequence[int], timeout_s: float) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ArgumentError("exchange='nccl' needs torch.distributed.init_process_group")
        if not dist.is_backend_available(backend):
            raise ArgumentError(f"exchange='nccl' needs the backend {backend!r}, which this torch was built without")
        bound = getattr(dist.distributed_c10d._get_default_group(), "bound_device_id", None)
        if bound is not None and len(members) < dist.get_world_size():
            raise ArgumentError(
                "exchange='nccl' among some of a job's ranks makes a group of them, in which, after "
                "init_process_group(device_id=...), all ranks would have to take part: leave device_id out"
            )
        self.backend = backend
        self._group = _group(backend, tuple(members), timeout_s)
        #: The rank in the group of each rank of the replay; buffers are laid out in that order.
        self.order = [dist.get_group_rank(self._group, member) for member in members]

    def all_to_all(
        self,
        device: Device,
        to: torch.Tensor,
        receives: Mapping[int, int],
        source: torch.Tensor,
        sends: Mapping[int, int],
        check_peers: Callable[[], None],
    ) -> None:
        """Queues the exchange on the current stream. All ranks call it, in one order with the job's other collectives.

        A rank that dies is noticed by torch's watchdog, which ends the process after `timeout_s`, or raises
        PeerLostError where the backend reports it at once.

        Args:
            device: whose current stream.
            to: (bytes,) uint8, the received bytes by sender, in the order of `order`.
            receives: bytes from each rank of the replay that sends any.
            source: (bytes,) uint8, the bytes to send by receiver, in the same order.
            sends: bytes for each rank of the replay that receives any.
            check_peers: raises PeerLostError, with its name, where a rank is known to be gone: backends name none.
        """
        import torch.distributed as dist

        group, received, sent = self._group, self._by_number(receives), self._by_number(sends)

        def work() -> None:
            try:
                dist.all_to_all_single(to, source, received, sent, group=group)
            except RuntimeError as error:
                until_s = time.monotonic() + NOTICE_S
                while time.monotonic() < until_s:
                    check_peers()
                    time.sleep(NOTICE_S / 100)
                raise PeerLostError(f"the all-to-all of device memory failed: {error}") from error

        device.run(work)

    def _by_number(self, sizes: Mapping[int, int]) -> list[int]:
        listed = [0] * len(self.order)
        for rank, size in sizes.items():
            listed[self.order[rank]] = size
        return listed


# Groups live as long as the job: a communicator takes memory and seconds, and all replays of the job may use the same
# one, since batches are taken in one order on all ranks. By the job's default group, backend and members.
_made: dict[tuple[int, str, tuple[int, ...]], Any] = {}


def _group(backend: str, members: tuple[int, ...], timeout_s: float) -> Any:
    import torch.distributed as dist

    key = (id(dist.distributed_c10d._get_default_group()), backend, members)
    if key not in _made:
        timeout = timedelta(seconds=max(timeout_s, 1.0))
        _made[key] = dist.new_group(list(members), timeout=timeout, backend=backend, use_local_synchronization=True)
    return _made[key]


__all__ = ["DeviceGroup"]
