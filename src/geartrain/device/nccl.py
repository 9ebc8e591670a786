"""Device memory from rank to rank, over a process group of torch's: NCCL's all-to-all on the current stream.

The group is one of its own, the same for all replays of a job. NCCL leaves it to the program that two communicators of
one GPU are not at work at the same time, nor from several threads, nor in different orders on different ranks: a
collective that holds multiprocessors of one rank while it waits for another, where something else holds them, waits
forever. So the exchange is not the preparing thread's. The consumer's thread queues it as it takes a batch, on the
stream that the model's work is on, behind the collectives that this stream has waited for
(docs/decisions/013-nccl-on-the-consumers-stream.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geartrain.device.device import Device
from geartrain.errors import ArgumentError, PeerLostError

if TYPE_CHECKING:
    import torch


class DeviceGroup:
    """The ranks of a replay, for memory of their devices. All of them make it at the same point.

    Args:
        backend: of torch.distributed; "nccl" for CUDA devices.
        members: their global ranks, in the replay's order.
        timeout_s: after which a collective that hangs is given up; torch then ends the process. That of the first
            replay holds for all.

    Raises:
        ArgumentError: there is no such backend here, or the job's group leaves no room for a group of some ranks.
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
        #: By rank of the replay, its number in the group, in which buffers are laid out.
        self.order = [dist.get_group_rank(self._group, member) for member in members]

    def all_to_all(
        self,
        device: Device,
        to: torch.Tensor,
        receives: Mapping[int, int],
        source: torch.Tensor,
        sends: Mapping[int, int],
    ) -> None:
        """Queues it on the current stream. Every rank calls it, in the same order with the job's other collectives.

        A rank that dies is seen by torch's own watchdog, which ends the process after `timeout_s`, or, where the
        backend says so at once, by PeerLostError.

        Args:
            device: whose stream.
            to: (bytes,) uint8, in which what comes lies in the order of `order`.
            receives: bytes from each rank of the replay that sends any.
            source: (bytes,) uint8, in the same order.
            sends: bytes for each rank of the replay that gets any.
        """
        import torch.distributed as dist

        group, received, sent = self._group, self._by_number(receives), self._by_number(sends)

        def work() -> None:
            try:
                dist.all_to_all_single(to, source, received, sent, group=group)
            except RuntimeError as error:
                raise PeerLostError(f"rows did not come from device to device: {error}") from error

        device.run(work)

    def _by_number(self, sizes: Mapping[int, int]) -> list[int]:
        listed = [0] * len(self.order)
        for rank, size in sizes.items():
            listed[self.order[rank]] = size
        return listed


# Groups last as long as the job: a communicator takes memory and seconds, and all replays of the job may use the same
# one, since batches are taken in one order on all ranks. By the job's own group, backend and members.
_made: dict[tuple[int, str, tuple[int, ...]], Any] = {}


def _group(backend: str, members: tuple[int, ...], timeout_s: float) -> Any:
    import torch.distributed as dist

    key = (id(dist.distributed_c10d._get_default_group()), backend, members)
    if key not in _made:
        timeout = timedelta(seconds=max(timeout_s, 1.0))
        _made[key] = dist.new_group(list(members), timeout=timeout, backend=backend, use_local_synchronization=True)
    return _made[key]


__all__ = ["DeviceGroup"]
