"""Builds batches by an all-to-all of device memory: each GPU gathers rows for other ranks and sends them GPU to GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.replay.batch import Batch
from geartrain.replay.builder import nothing
from geartrain.replay.device.layout import scatter_lines
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import GatherTransfer
from geartrain.replay.distributed.assembly_device import DeviceRowBuffer, GatherAssembler
from geartrain.replay.distributed.messages import ROW_HEADER, flat_bytes
from geartrain.replay.distributed.rank_reader import RankReader, Target
from geartrain.replay.distributed.read_agreement import ReadAgreement
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather_layout import Arena
    from geartrain.device.nccl import DeviceGroup
    from geartrain.ranks.rank_group import RankGroup


class NcclAssembler(GatherAssembler):
    """Builds batches whose remote rows come from the GPUs of other ranks.

    All rows are gathered ahead. The all-to-all runs when the consumer takes the batch, on its thread and its stream. So
    all ranks run it in order with the collectives of the model, as NCCL requires (nccl.py).

    Args:
        group: the ranks whose devices exchange memory.
        others: targets, one for each store, by each set of fields that some rank gets.
    """

    def __init__(
        self,
        session: DeviceSession,
        targets: list[DeviceTarget],
        options: DeviceOptions,
        group: DeviceGroup,
        others: dict[tuple[str, ...], list[DeviceTarget]],
        rank: int,
    ) -> None:
        super().__init__(session, targets, options, "exchange='nccl' sends what the GPU has gathered", rank)
        self._group = group
        self._others = others
        self._outbox: torch.Tensor | None = None
        self._outgoing: dict[int, DeviceRowBuffer] = {}
        self._pending: Callable[[], None] = nothing  # the all-to-all of the batch that is being built

    def targets_of(self, wanted: Callable[[], Sequence[tuple[int, FetchPlan, int]]]) -> list[Target] | None:
        """All of them in one device buffer, in the order in which the group sends."""
        import torch

        ordered = sorted(wanted(), key=lambda each: self._group.order[each[0]])
        targets = [self._others[tuple(plan.names)] for _, plan, _ in ordered]
        layouts = [of[0].gather.arena(n) for of, (_, _, n) in zip(targets, ordered, strict=True)]
        with self.device.on(self.stream):
            self._outbox = self.device.empty((sum(layout.nbytes for layout in layouts),), torch.uint8)
        self._outgoing = {}
        at = 0
        for (rank, plan, n), of, layout in zip(ordered, targets, layouts, strict=True):
            arena = self._outbox[at : at + layout.nbytes]
            self._outgoing[rank] = DeviceRowBuffer(plan, n, GatherTransfer(of, n, arena=arena))
            at += layout.nbytes
        return [buffer.target(rank) for rank, buffer in self._outgoing.items()]

    def exchange(self, agreement: ReadAgreement, reader: RankReader, read: _native.RankRead, mine: Any) -> int:
        """Headers are exchanged now, from host to host; fields when the batch is taken."""
        outbox, self._outbox = self._outbox, None
        outgoing, self._outgoing = self._outgoing, {}
        assert outbox is not None
        incoming = [] if mine is None else read.expected
        received = {peer: np.empty(len(places), ROW_HEADER) for peer, places in incoming}
        agreement.exchange(
            [(peer, flat_bytes(buffer.headers)) for peer, buffer in sorted(outgoing.items())],
            [(peer, flat_bytes(headers)) for peer, headers in received.items()],
            idle=not read.moves,
        )
        self._pending = nothing
        if not read.moves:
            return 0
        sends = {peer: each.transfer.layout.nbytes for peer, each in outgoing.items()}
        places = None
        if incoming:
            for peer, at in incoming:
                mine.headers[at] = received[peer]
            incoming = sorted(incoming, key=lambda each: self._group.order[each[0]])
            (places,) = self.targets[0].upload([np.concatenate([at for _, at in incoming]).astype(np.int64)])
        with self.device.on(self.stream):
            gathered = self.device.record()
        counts = [(peer, len(at)) for peer, at in incoming]
        group = agreement.members.group
        self._pending = functools.partial(self._all_to_all, group, gathered, outbox, sends, mine, counts, places)
        return sum(mine.nbytes * len(at) // mine.n for _, at in incoming) if mine is not None else 0

    def _all_to_all(
        self,
        ranks: RankGroup,
        gathered: Any,
        outbox: torch.Tensor,
        sends: Mapping[int, int],
        mine: DeviceRowBuffer | None,
        incoming: Sequence[tuple[int, int]],
        places: torch.Tensor | None,
    ) -> None:
        """On the consumer's thread and stream."""
        import torch

        device = self.device
        layouts = {} if mine is None else {peer: mine.transfer.plan.arena(k) for peer, k in incoming}
        receives = {peer: layout.nbytes for peer, layout in layouts.items()}
        device.wait(gathered)
        device.record_stream(outbox)
        inbox = device.empty((sum(receives.values()),), torch.uint8)
        self._group.all_to_all(device, inbox, receives, outbox, sends, ranks.check_peers)
        if mine is not None and places is not None:
            device.record_stream(mine.transfer.arena)
            device.record_stream(places)
            device.run(functools.partial(_scatter_arenas, mine, inbox, [*layouts.values()], places))

    def batch(
        self, reader: RankReader, read: _native.RankRead, mine: Any, weights: NDArray[np.float64] | None, step: int
    ) -> tuple[Batch, Callable[[], None]]:
        its = read.draws()
        keys = self.keys_of(reader, mine, its)
        transfer, work = self.packed_transfer(mine)
        ready = transfer.finish(keys, mine.headers["probability"], weights, step, its)
        batch, deliver_batch = self.hand_off(ready)
        all_to_all, self._pending = self._pending, nothing

        def deliver() -> None:
            deliver_batch()
            all_to_all()
            if work is not None:
                self.device.record_stream(mine.transfer.arena)
                self.device.run(work)

        return batch, deliver

    def empty_batch(self, sampler: StoreSampler, plan: FetchPlan | None, step: int) -> tuple[Batch, Callable[[], None]]:
        """This rank still takes part in the all-to-all."""
        all_to_all, self._pending = self._pending, nothing
        return super().empty_batch(sampler, plan, step)[0], all_to_all

    def describe(self) -> list[dict[str, Any]]:
        return [{**each, "exchange": self._group.backend} for each in super().describe()]


def _scatter_arenas(mine: DeviceRowBuffer, inbox: torch.Tensor, layouts: Sequence[Arena], places: torch.Tensor) -> None:
    """Copies received rows, which lie in one arena for each peer, to their places in this rank's arena."""
    to, plan = mine.transfer.layout, mine.transfer.plan
    sizes = [field.result_bytes * (plan.steps if field.timed else 1) for field in plan.fields]
    first = at = 0
    for layout in layouts:
        k = layout.n
        pieces = [*zip(layout.fields, to.fields, sizes, strict=True)]
        for name, size in (("mask", plan.steps), ("starts", 4), ("lengths", 4), ("versions", 8)):
            pieces.append((getattr(layout, name), getattr(to, name), size))
        for source, to_at, size in pieces:
            lines = inbox[at + source :][: k * size].view(k, size)
            scatter_lines(mine.transfer.arena, to_at, mine.n, places[first : first + k], lines)
        first += k
        at += layout.nbytes


__all__ = ["NcclAssembler"]
