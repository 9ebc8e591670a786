"""Batch assembly on a device, rows of other ranks received in host memory: staged, or gathered by the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.core.schema import round_up
from geartrain.replay.batch import Batch
from geartrain.replay.device.layout import arrangement, convert_rows, scatter_lines
from geartrain.replay.device.mirrors import Mirrors
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.device.priority_mirror import DevicePriorities
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.staging import StagingBuffer
from geartrain.replay.device.target import DeviceTarget, gather_plan_of
from geartrain.replay.device.transfer import BatchTransfer, ReadyBatch
from geartrain.replay.distributed.assembly_host import HostAssembler, raw_of
from geartrain.replay.distributed.messages import RowLayout, RowMessage
from geartrain.replay.distributed.rank_group import Bytes
from geartrain.replay.distributed.read import ReadResult, RowBuffer
from geartrain.replay.distributed.transition_rows import ReadDraws
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherPlan
    from geartrain.device.kernels.gather_layout import Arena


class DeviceAssembler(HostAssembler):
    """What assemblers on a device have in common.

    Args:
        session: on which device.
        targets: of this rank's fields, one for each store; none where it gets no fields.
        options: as `Replay` was given them.
        why: this path was taken.
    """

    path = ""

    def __init__(self, session: DeviceSession, targets: list[DeviceTarget], options: DeviceOptions, why: str) -> None:
        self.session = session
        self.device = session.device
        self.stream = session.stream
        self.targets = targets
        self.options = options
        self.why = why
        self.mirrors: Mirrors | None = None

    def open_mirrors(self, samplers: Sequence[StoreSampler]) -> Sequence[DevicePriorities | None]:
        """See `BatchAssembler`."""
        targets = self.targets if self.path == "gather" else []
        self.mirrors = Mirrors(samplers, targets, self.options, over_ranks=True)
        return self.mirrors.copies

    def enter(self) -> None:
        """See `BatchAssembler`."""
        self.session.enter()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """See `BatchAssembler`."""
        with self.session.at_work():
            self.session.hold_back()
            yield

    def hand_off(self, ready: ReadyBatch) -> tuple[Batch, Callable[[], None]]:
        """A batch in transfer, and what the consumer's thread calls when it takes the batch."""
        return ready.batch, self.session.deliver(ready)

    def empty_batch(self, plan: FetchPlan, step: int) -> tuple[Batch, Callable[[], None]]:
        """See `BatchAssembler`."""
        (batch, deliver), empty = super().empty_batch(plan, step), self.device.empty
        metadata: dict[str, Any] = {
            name: empty(tuple(array.shape), array.dtype)
            for name in ("mask", "start", "length", "version", "probability", "draw")
            for array in [getattr(batch, name)]
        }
        return dataclasses.replace(batch, **metadata), deliver

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchAssembler`."""
        chosen = {"path": self.path, "why": self.why, "exchange": "host"}
        selects = ["host"] * len(self.targets) if self.mirrors is None else self.mirrors.describe()
        return [
            {"store": one.plan.store.name, **one.describe(), **chosen, "select": select}
            for one, select in zip(self.targets, selects, strict=False)
        ]

    def close(self) -> None:
        """See `BatchAssembler`. Waits for the stream, and unpins."""
        self.session.close()


# --- staged ----------------------------------------------------------------------------------------------------


class _StagedBuffer(RowBuffer):
    """A batch in pinned memory."""

    def __init__(self, plan: FetchPlan, stage: StagingBuffer, n: int) -> None:
        super().__init__(plan, n, stage.arrays)
        self.stage = stage


class StagedAssembler(DeviceAssembler):
    """Batches that are assembled in pinned memory and copied to the device."""

    path = "staged"

    def batch_buffer(self, plan: FetchPlan, n: int) -> RowBuffer:
        """See `BatchAssembler`."""
        return _StagedBuffer(plan, StagingBuffer(self.targets[0], n), n)

    def batch(
        self,
        buffer: RowBuffer,
        keys: Keys,
        importance_weights: NDArray[np.float64] | None,
        step: int,
        its: NDArray[np.int64],
    ) -> tuple[Batch, Callable[[], None]]:
        """See `BatchAssembler`."""
        assert isinstance(buffer, _StagedBuffer)
        transfer = buffer.stage.send(raw_of(buffer))
        return self.hand_off(transfer.finish(keys, buffer.headers["probability"], importance_weights, step, its))


# --- gathered --------------------------------------------------------------------------------------------------


class DeviceRowBuffer(RowBuffer):
    """Rows in device memory, padded, gathered by the device."""

    def __init__(self, plan: FetchPlan, n: int, transfer: BatchTransfer, targets: list[DeviceTarget]) -> None:
        super().__init__(plan, n, [])
        self.transfer = transfer
        self._targets = targets

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        plan = self.transfer.plan
        return sum(self.n * (plan.steps if field.timed else 1) * field.result_bytes for field in plan.fields)

    def read(
        self,
        store: int,
        plan: FetchPlan,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32],
        draws: ReadDraws,
    ) -> Callable[[], ReadResult]:
        """See `RowBuffer`. Launches the gather; the call of what is returned waits for it."""
        transfer, layout = self.transfer, self.transfer.layout
        transfer.launch_gather(rows, generations, None, ends=ends, places=places, target=self._targets[store])
        transfer.read_back([transfer.arena[at : at + size * self.n] for at, size in _metadata_at(layout)])
        return functools.partial(self._result, ends, places)

    def _result(self, ends: NDArray[np.int32] | None, places: NDArray[np.uint32]) -> ReadResult:
        torn, starts, lengths, versions = self.transfer.wait_read_back()
        starts, lengths = starts.view(np.int32)[places], lengths.view(np.int32)[places]
        steps = lengths if ends is None else np.minimum(lengths, np.maximum(ends, 0) + 1) - starts
        return ReadResult(torn[places], lengths, starts, steps.astype(np.int32), versions.view(np.int64)[places])


def _metadata_at(layout: Arena) -> list[tuple[int, int]]:
    """Offsets of starts, lengths and versions, and their bytes a row."""
    return [(layout.starts, 4), (layout.lengths, 4), (layout.versions, 8)]


class GatherAssembler(DeviceAssembler):
    """Batches whose local rows the device gathers; rows of other ranks come through pinned memory."""

    path = "gather"

    def __init__(self, session: DeviceSession, targets: list[DeviceTarget], options: DeviceOptions, why: str) -> None:
        super().__init__(session, targets, options, why)
        # Of rows as they are received: raw and padded.
        self._raw = gather_plan_of(targets[0].plan, {}, False) if targets else None
        self._packed: GatherPlan | None = None
        if options.packed and targets:
            self._packed = gather_plan_of(targets[0].plan, targets[0].options.convert, True)

    def batch_buffer(self, plan: FetchPlan, n: int) -> RowBuffer:
        """See `BatchAssembler`."""
        return DeviceRowBuffer(plan, n, BatchTransfer(self.targets[0], n), self.targets)

    def _message_memory(self, plan: FetchPlan, counts: Sequence[int]) -> Sequence[Bytes | None]:
        """All messages in one pinned buffer, which `_scatter` copies to the device."""
        sizes = [RowLayout.of(plan, n).nbytes for n in counts]
        begins = np.cumsum([0, *(round_up(size) for size in sizes)]).tolist()
        self._buffer, self._begins = self.targets[0].pool.take(begins[-1]), begins
        memory: Bytes = self._buffer.numpy()
        return [memory[at : at + size] for at, size in zip(begins, sizes, strict=False)]

    def _scatter(self, mine: RowBuffer, received: Sequence[tuple[RowMessage, NDArray[np.int64]]]) -> None:
        import torch

        assert isinstance(mine, DeviceRowBuffer)
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

    def _metadata(self, mine: RowBuffer, places: Sequence[NDArray[np.int64]]) -> dict[str, torch.Tensor]:
        """The metadata of the received rows, on the device."""
        every = np.concatenate(places)
        headers = mine.headers[every]
        arrays: dict[str, NDArray[Any]] = {
            "places": every,
            "mask": mine.plan.mask(headers["start"], headers["steps"]).view(np.uint8),
            "starts": headers["start"],
            "lengths": headers["length"],
            "versions": headers["version"],
        }
        return dict(zip(arrays, self.targets[0].upload(list(arrays.values())), strict=True))

    def batch(
        self,
        buffer: RowBuffer,
        keys: Keys,
        importance_weights: NDArray[np.float64] | None,
        step: int,
        its: NDArray[np.int64],
    ) -> tuple[Batch, Callable[[], None]]:
        """See `BatchAssembler`."""
        assert isinstance(buffer, DeviceRowBuffer)
        transfer, work = self.packed_transfer(buffer)
        if work is not None:
            with self.device.on(self.stream):
                self.device.run(work)
        return self.hand_off(transfer.finish(keys, buffer.headers["probability"], importance_weights, step, its))

    def packed_transfer(self, buffer: DeviceRowBuffer) -> tuple[BatchTransfer, Callable[[], None] | None]:
        """The transfer of the finished batch, and the work that packs it; None where it is the buffer's own."""
        unpacked = buffer.transfer
        if self._packed is None:
            return unpacked, None
        transfer = BatchTransfer(self.targets[0], buffer.n, self._packed)
        mask = buffer.plan.mask(buffer.headers["start"], buffer.headers["steps"])
        return transfer, arrangement(transfer, unpacked.arena, unpacked.plan, unpacked.layout, mask)


__all__ = ["DeviceAssembler", "DeviceRowBuffer", "GatherAssembler", "StagedAssembler"]
