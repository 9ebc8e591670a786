"""Batch assembly in host memory: local rows copied into the batch, rows of other ranks copied out of row messages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.replay.batch import Batch
from geartrain.replay.builder import nothing
from geartrain.replay.distributed.messages import RowMessage
from geartrain.replay.distributed.rank_group import Bytes, Message
from geartrain.replay.distributed.read import RowBuffer
from geartrain.replay.distributed.read_agreement import ReadAgreement
from geartrain.replay.fetch_plan import FetchedRows, FetchPlan
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    from geartrain.replay.device.priority_mirror import DevicePriorities

# A rank that reads rows for this one, and their places in this rank's batch.
Incoming = tuple[int, NDArray[np.int64]]


class HostAssembler:
    """Batches in host memory; see `geartrain.replay.distributed.assembly.BatchAssembler`."""

    skips_idle = False

    def enter(self) -> None:
        """See `BatchAssembler`."""

    def open_mirrors(self, samplers: Sequence[StoreSampler]) -> Sequence[DevicePriorities | None]:
        """See `BatchAssembler`. Rows are drawn on the host."""
        return [None for _ in samplers]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """See `BatchAssembler`."""
        yield

    def batch_buffer(self, plan: FetchPlan, n: int) -> RowBuffer:
        """See `BatchAssembler`."""
        return RowBuffer(plan, n, plan.empty(n))

    def message_buffers(self, wanted: Sequence[tuple[int, FetchPlan, int]]) -> dict[int, RowBuffer]:
        """See `BatchAssembler`."""
        return {rank: RowBuffer(plan, n) for rank, plan, n in wanted}

    def exchange(
        self,
        agreement: ReadAgreement,
        outgoing: Mapping[int, RowBuffer],
        mine: RowBuffer | None,
        incoming: Sequence[Incoming],
        idle: bool,
    ) -> int:
        """See `BatchAssembler`."""
        sends: list[Message] = []
        for peer, buffer in sorted(outgoing.items()):
            assert buffer.message is not None
            sends.append((peer, buffer.message.data))
        if mine is None or not incoming:
            agreement.exchange(sends, [])
            return 0
        counts = [len(places) for _, places in incoming]
        memory = self._message_memory(mine.plan, counts)
        messages = [RowMessage(mine.plan, n, data) for n, data in zip(counts, memory, strict=True)]
        agreement.exchange(sends, [(peer, each.data) for (peer, _), each in zip(incoming, messages, strict=True)])
        received = [(each, places) for each, (_, places) in zip(messages, incoming, strict=True)]
        for message, places in received:
            mine.headers[places] = message.headers
        self._scatter(mine, received)
        return sum(message.field_bytes for message in messages)

    def _message_memory(self, plan: FetchPlan, counts: Sequence[int]) -> Sequence[Bytes | None]:
        """Memory for messages of so many rows; None for recycled memory."""
        return [None for _ in counts]

    def _scatter(self, mine: RowBuffer, received: Sequence[tuple[RowMessage, NDArray[np.int64]]]) -> None:
        """Copies the fields of received rows to their places."""
        for message, places in received:
            for into, array in zip(mine.arrays, message.arrays, strict=True):
                into[places] = array

    def batch(
        self,
        buffer: RowBuffer,
        keys: Keys,
        importance_weights: NDArray[np.float64] | None,
        step: int,
        its: NDArray[np.int64],
    ) -> tuple[Batch, Callable[[], None]]:
        """See `BatchAssembler`."""
        plan = buffer.plan
        probability = np.ascontiguousarray(buffer.headers["probability"])
        batch = plan.batch(raw_of(buffer), keys, probability, importance_weights, step)
        return dataclasses.replace(batch, draw=plan.as_output(its)), nothing

    def empty_batch(self, plan: FetchPlan, step: int) -> tuple[Batch, Callable[[], None]]:
        """See `BatchAssembler`."""
        empty = plan.of_fields(())
        none = np.empty(0, np.int32)
        raw = FetchedRows([], np.empty(0, np.uint8), empty.mask(none, none), none, none, np.empty(0, np.int64), 0)
        batch = empty.batch(raw, Keys.empty(), np.empty(0), None, step)
        return dataclasses.replace(batch, draw=empty.as_output(np.empty(0, np.int64))), nothing

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchAssembler`."""
        return []

    def close(self) -> None:
        """See `BatchAssembler`."""


def raw_of(buffer: RowBuffer) -> FetchedRows:
    """The rows of a buffer as a fetch from one store returns them."""
    headers = buffer.headers
    return FetchedRows(
        buffer.arrays,
        np.zeros(buffer.n, np.uint8),
        buffer.plan.mask(headers["start"], headers["steps"]),
        np.ascontiguousarray(headers["start"]),
        np.ascontiguousarray(headers["length"]),
        np.ascontiguousarray(headers["version"]),
        0,
    )


__all__ = ["HostAssembler", "Incoming", "raw_of"]
