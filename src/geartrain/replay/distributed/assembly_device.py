"""Builds batches on a device if rows of other ranks arrive in host memory.

`StagedAssembler` copies rows into pinned memory by the CPU, and `GatherAssembler` gathers them by the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.core.schema import round_up
from geartrain.ranks.rank_group import Bytes
from geartrain.replay.batch import Batch
from geartrain.replay.device.layout import arrangement, convert_rows, scatter_lines
from geartrain.replay.device.mirrors import Mirrors
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.device.priority_mirror import DevicePriorities
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.staging import StagedTransfer
from geartrain.replay.device.target import DeviceTarget, gather_plan_of
from geartrain.replay.device.transfer import GatherTransfer, ReadyBatch
from geartrain.replay.distributed.assembly_host import HostAssembler, importance_weights
from geartrain.replay.distributed.messages import ROW_HEADER, RowLayout, RowMessage, flat_bytes
from geartrain.replay.distributed.rank_reader import RankReader, Target
from geartrain.replay.distributed.read_agreement import ReadAgreement
from geartrain.replay.fetch_plan import FetchedRows, FetchPlan
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherPlan


class RowBuffer:
    """Memory for the rows of one rank, raw and padded, and a header of each: its batch, or rows that it is sent.

    Args:
        plan: of the rows.
        n: rows.
        arrays: the fields, in host memory; none where a device copies them.

    Attributes:
        headers: (n,) `ROW_HEADER`.
    """

    def __init__(self, plan: FetchPlan, n: int, arrays: list[Any]) -> None:
        self.plan = plan
        self.n = n
        self.arrays = arrays
        self.headers: NDArray[Any] = np.zeros(n, ROW_HEADER)

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        return sum(int(array.nbytes) for array in self.arrays)

    def target(self, rank: int) -> Target:
        """The buffer as native code reads the rows of a rank into it."""
        return rank, self.arrays, flat_bytes(self.headers), None

    def raw(self) -> FetchedRows:
        """The rows as a fetch from one store returns them."""
        headers = self.headers
        return FetchedRows(
            self.arrays,
            np.zeros(self.n, np.uint8),
            self.plan.mask(headers["anchor"], headers["start"], headers["steps"]),
            np.ascontiguousarray(headers["start"]),
            np.ascontiguousarray(headers["length"]),
            np.ascontiguousarray(headers["version"]),
            0,
        )


class DeviceAssembler(HostAssembler):
    """Base of assemblers on a device.

    Args:
        session: the device session.
        targets: targets of this rank's fields, one for each store; empty if it gets no fields.
        options: as `Replay` was given them.
        why: the reason for this path.
        rank: this rank.
    """

    path = ""

    def __init__(
        self, session: DeviceSession, targets: list[DeviceTarget], options: DeviceOptions, why: str, rank: int
    ) -> None:
        self.session = session
        self.device = session.device
        self.stream = session.stream
        self.targets = targets
        self.options = options
        self.why = why
        self.rank = rank
        self.mirrors: Mirrors | None = None

    def open_mirrors(self, samplers: Sequence[StoreSampler]) -> Sequence[DevicePriorities | None]:
        targets = self.targets if self.path == "gather" else []
        self.mirrors = Mirrors(samplers, targets, self.options, over_ranks=True)
        return self.mirrors.copies

    def enter(self) -> None:
        self.session.enter()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with self.session.at_work():
            self.session.hold_back()
            yield

    def own(self, mine: RowBuffer) -> Target:
        return mine.target(self.rank)

    def exchange(self, agreement: ReadAgreement, reader: RankReader, read: _native.RankRead, mine: Any) -> int:
        if mine is None or not read.expected:
            agreement.exchange(read.sends, [], idle=not read.moves)
            return 0
        peers, places = [peer for peer, _ in read.expected], [at for _, at in read.expected]
        memory = self._message_memory(mine.plan, [len(at) for at in places])
        messages = [RowMessage(mine.plan, len(at), data) for at, data in zip(places, memory, strict=True)]
        receives = [(peer, each.data) for peer, each in zip(peers, messages, strict=True)]
        agreement.exchange(read.sends, receives, idle=False)
        received = list(zip(messages, places, strict=True))
        for message, at in received:
            mine.headers[at] = message.headers
        self._scatter(mine, received)
        return sum(message.field_bytes for message in messages)

    def _message_memory(self, plan: FetchPlan, counts: Sequence[int]) -> Sequence[Bytes | None]:
        """Memory for messages of this many rows; None for recycled memory."""
        return [None for _ in counts]

    def _scatter(self, mine: Any, received: Sequence[tuple[RowMessage, NDArray[np.uint32]]]) -> None:
        """Copies the fields of received rows to their places."""
        for message, places in received:
            for into, array in zip(mine.arrays, message.arrays, strict=True):
                into[places] = array

    def weigh(
        self,
        agreement: ReadAgreement | None,
        reader: RankReader,
        read: _native.RankRead,
        mine: Any,
        counts: Sequence[int],
        step: int,
    ) -> NDArray[np.float64] | None:
        if agreement is None or agreement.lowest is None:
            return None
        rows, generations, probability = (mine.headers[name] for name in ("row", "generation", "probability"))
        return importance_weights(reader.samplers, read, rows, generations, probability, counts, agreement.lowest, step)

    def pieces(self, mine: Any) -> list[Bytes]:
        return [*(flat_bytes(array) for array in mine.arrays), flat_bytes(mine.headers)]

    @staticmethod
    def keys_of(reader: RankReader, mine: RowBuffer, its: NDArray[np.int64]) -> Keys:
        """Keys of the rows in a buffer, which have these numbers in the global batch."""
        headers, plan = mine.headers, mine.plan
        shard = headers["shard"].astype(np.uint16)
        steps = headers["anchor"].astype(np.uint32) if plan.per_step else None
        rows, generations = (np.ascontiguousarray(headers[name]) for name in ("row", "generation"))
        return Keys.of_rows(rows, generations, reader.members.shard_ids[shard], shard=shard, draw=its, step=steps)

    def hand_off(self, ready: ReadyBatch) -> tuple[Batch, Callable[[], None]]:
        """A batch in transfer, and what the consumer's thread calls when it takes the batch."""
        return ready.batch, self.session.deliver(ready)

    def empty_batch(self, sampler: StoreSampler, plan: FetchPlan | None, step: int) -> tuple[Batch, Callable[[], None]]:
        (batch, deliver), empty = super().empty_batch(sampler, None, step), self.device.empty
        metadata: dict[str, Any] = {
            name: empty(tuple(array.shape), array.dtype)
            for name in ("mask", "start", "length", "version", "probability", "draw")
            for array in [getattr(batch, name)]
        }
        return dataclasses.replace(batch, **metadata), deliver

    def describe(self) -> list[dict[str, Any]]:
        chosen = {"path": self.path, "why": self.why, "exchange": "host"}
        selects = ["host"] * len(self.targets) if self.mirrors is None else self.mirrors.describe()
        return [
            {"store": one.plan.store.name, **one.describe(), **chosen, "select": select}
            for one, select in zip(self.targets, selects, strict=False)
        ]

    def close(self) -> None:
        """Waits for the stream, and unpins."""
        self.session.close()


# --- staged ----------------------------------------------------------------------------------------------------


class _StagedBuffer(RowBuffer):
    """A batch in pinned memory."""

    def __init__(self, plan: FetchPlan, transfer: StagedTransfer, n: int) -> None:
        super().__init__(plan, n, transfer.arrays)
        self.transfer = transfer


class StagedAssembler(DeviceAssembler):
    """Batches that are assembled in pinned memory and copied to the device."""

    path = "staged"

    def buffer(self, reader: RankReader, plan: FetchPlan, n: int) -> _StagedBuffer:
        return _StagedBuffer(plan, StagedTransfer(self.targets, n), n)

    def batch(
        self, reader: RankReader, read: _native.RankRead, mine: Any, weights: NDArray[np.float64] | None, step: int
    ) -> tuple[Batch, Callable[[], None]]:
        its = read.draws()
        keys = self.keys_of(reader, mine, its)
        mine.transfer.put(mine.raw())
        return self.hand_off(mine.transfer.finish(keys, mine.headers["probability"], weights, step, its))


# --- gathered --------------------------------------------------------------------------------------------------


class DeviceRowBuffer(RowBuffer):
    """Rows in device memory, padded, gathered by the device."""

    def __init__(self, plan: FetchPlan, n: int, transfer: GatherTransfer) -> None:
        super().__init__(plan, n, [])
        self.transfer = transfer

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        plan = self.transfer.plan
        return sum(self.n * (plan.steps if field.timed else 1) * field.result_bytes for field in plan.fields)

    def target(self, rank: int) -> Target:
        return rank, [], flat_bytes(self.headers), self.transfer


class GatherAssembler(DeviceAssembler):
    """Batches whose local rows the device gathers; rows of other ranks come through pinned memory."""

    path = "gather"

    def __init__(
        self, session: DeviceSession, targets: list[DeviceTarget], options: DeviceOptions, why: str, rank: int
    ) -> None:
        super().__init__(session, targets, options, why, rank)
        # Of rows as they are received: raw and padded.
        self._raw = gather_plan_of(targets[0].plan, {}, False) if targets else None
        self._packed: GatherPlan | None = None
        if options.packed and targets:
            self._packed = gather_plan_of(targets[0].plan, targets[0].options.convert, True)

    def buffer(self, reader: RankReader, plan: FetchPlan, n: int) -> DeviceRowBuffer:
        return DeviceRowBuffer(plan, n, GatherTransfer(self.targets, n))

    def _message_memory(self, plan: FetchPlan, counts: Sequence[int]) -> Sequence[Bytes | None]:
        """All messages in one pinned buffer, which `_scatter` copies to the device."""
        sizes = [RowLayout.of(plan, n).nbytes for n in counts]
        begins = np.cumsum([0, *(round_up(size) for size in sizes)]).tolist()
        self._buffer, self._begins = self.targets[0].pool.take(begins[-1]), begins
        memory: Bytes = self._buffer.numpy()
        return [memory[at : at + size] for at, size in zip(begins, sizes, strict=False)]

    def _scatter(self, mine: DeviceRowBuffer, received: Sequence[tuple[RowMessage, NDArray[np.uint32]]]) -> None:
        import torch

        target, device, raw = self.targets[0], self.device, self._raw
        buffer, begins = self._buffer, self._begins
        del self._buffer
        assert raw is not None
        with device.on(self.stream):
            messages = device.empty((begins[-1],), torch.uint8)
            device.copy(messages, buffer[: begins[-1]])
            target.pool.give(buffer)
        metadata = self._metadata(mine, [places for _, places in received])

        def work() -> None:
            first = 0
            for begin, (_, at) in zip(begins, received, strict=False):
                k = len(at)
                these = slice(first, first + k)
                for number, offset in enumerate(RowLayout.of(mine.plan, k).fields):
                    field = raw.fields[number]
                    line = field.result_bytes * (raw.steps if field.timed else 1)
                    values = messages[begin + offset :][: k * line].view(k, line)
                    converted = convert_rows(
                        mine.transfer.plan,
                        number,
                        values,
                        metadata["mask"][these].view(torch.bool),
                        target.options.convert,
                    )
                    to = mine.transfer.layout.fields[number]
                    scatter_lines(mine.transfer.arena, to, mine.n, metadata["places"][these], converted)
                first += k
            for name in ("mask", "starts", "lengths", "versions"):
                lines = metadata[name].view(torch.uint8).view(len(metadata["places"]), -1)
                to = getattr(mine.transfer.layout, name)
                scatter_lines(mine.transfer.arena, to, mine.n, metadata["places"], lines)

        with device.on(self.stream):
            device.run(work)

    def _metadata(self, mine: RowBuffer, places: Sequence[NDArray[np.uint32]]) -> dict[str, torch.Tensor]:
        """The metadata of the received rows, on the device."""
        every = np.concatenate(places).astype(np.int64)
        headers = mine.headers[every]
        arrays: dict[str, NDArray[Any]] = {
            "places": every,
            "mask": mine.plan.mask(headers["anchor"], headers["start"], headers["steps"]).view(np.uint8),
            "starts": headers["start"],
            "lengths": headers["length"],
            "versions": headers["version"],
        }
        return dict(zip(arrays, self.targets[0].upload(list(arrays.values())), strict=True))

    def batch(
        self, reader: RankReader, read: _native.RankRead, mine: Any, weights: NDArray[np.float64] | None, step: int
    ) -> tuple[Batch, Callable[[], None]]:
        its = read.draws()
        keys = self.keys_of(reader, mine, its)
        transfer, work = self.packed_transfer(mine)
        if work is not None:
            with self.device.on(self.stream):
                self.device.run(work)
        return self.hand_off(transfer.finish(keys, mine.headers["probability"], weights, step, its))

    def packed_transfer(self, buffer: DeviceRowBuffer) -> tuple[GatherTransfer, Callable[[], None] | None]:
        """The transfer of the finished batch, and the work that packs it; None where it is the buffer's own."""
        unpacked = buffer.transfer
        if self._packed is None:
            return unpacked, None
        transfer = GatherTransfer(self.targets, buffer.n, self._packed)
        headers = buffer.headers
        mask = buffer.plan.mask(headers["anchor"], headers["start"], headers["steps"])
        return transfer, arrangement(transfer, unpacked.arena, unpacked.plan, unpacked.layout, mask)


__all__ = ["DeviceAssembler", "DeviceRowBuffer", "GatherAssembler", "RowBuffer", "StagedAssembler"]
