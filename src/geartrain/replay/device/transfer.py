"""Asynchronous transfer of one batch to a device, and its handoff to the consumer's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.device.device import Device
from geartrain.replay.batch import Batch
from geartrain.replay.device.arena_batch import ArenaViews, arena_batch
from geartrain.replay.device.target import DeviceTarget

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherPlan
    from geartrain.device.kernels.gather_layout import Arena

# Batches that the consumer's stream may be behind before the replay's thread waits for it.
MOST_UNCONSUMED = 4


class BatchTransfer:
    """One batch in flight: its arena, and what is read back to the host.

    Args:
        target: of one store.
        n: rows.
        plan: its layout in the arena; the target's by default.
        arena: device memory for it; by default its own, which belongs to the target's stream.
    """

    def __init__(
        self, target: DeviceTarget, n: int, plan: GatherPlan | None = None, arena: torch.Tensor | None = None
    ) -> None:
        self.target = target
        self.plan = plan or target.gather
        self.layout = self.plan.arena(n)
        if arena is None:
            with target.device.on(target.stream):
                arena = target.device.empty((self.layout.nbytes,), _dtype("uint8"))
        self.arena = arena
        self.cu_seqlens: torch.Tensor | None = None
        self.steps_packed: int | None = None
        self.weighted = False  # whether probabilities and importance weights went into the arena with everything else
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._event: Any = None

    def launch_gather(
        self,
        rows: Any,
        generations: Any,
        draw: tuple[int, int, int] | None,
        *,
        ends: NDArray[np.int32] | None = None,
        numbers: NDArray[np.uint32] | None = None,
        places: NDArray[np.uint32] | None = None,
        target: DeviceTarget | None = None,
        clear: bool = True,
    ) -> None:
        """Launches the gather of some rows, or of all of them. Host arrays are uploaded, tensors are there already.

        Args:
            rows, generations: the keys.
            draw: (seed, step, attempt) of the windows.
            ends: the last step of each window, instead.
            numbers: of the draws; 0, 1, 2, ... by default.
            places: of the rows in the batch; 0, 1, 2, ... by default.
            target: of another store of a mixture.
            clear: forget which rows were torn before.
        """
        at = target or self.target
        device, gather, segment, arena, layout = at.device, at.gather, at.segment, self.arena, self.layout
        assert segment is not None
        given = {"rows": rows, "generations": generations, "ends": ends, "numbers": numbers, "places": places}
        on_host = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        given |= dict(zip(on_host, at.upload(list(on_host.values())), strict=True))
        k, rows, generations = len(rows), given["rows"], given["generations"]
        named: dict[str, Any] = {"draw": draw if gather.window else None, "ends": given["ends"]}
        named["numbers"] = given["numbers"]
        with device.on(at.stream):
            if gather.packed:
                self.cu_seqlens = device.empty((k + 1,), _dtype("int32"))
                device.count_steps(gather, self.cu_seqlens, segment, rows, **named)
                named["cu_seqlens"] = self.cu_seqlens
            else:
                named["places"] = given["places"]
            device.gather(gather, segment, arena, layout, rows, generations, clear=clear, **named)

    def read_back(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Sends the torn rows and these tensors to the host, behind everything that was launched so far."""
        target, layout = self.target, self.layout
        wanted = [self.arena[layout.torn : layout.torn + layout.n], *tensors]
        if self.cu_seqlens is not None:
            wanted.append(self.cu_seqlens)
        uint8 = _dtype("uint8")
        with target.device.on(target.stream):
            for tensor in wanted:
                flat = tensor if tensor.dtype == uint8 and tensor.ndim == 1 else tensor.reshape(-1).view(uint8)
                buffer = target.pool.take(flat.shape[0])
                part = buffer[: flat.shape[0]]
                target.device.copy(part, flat)
                self._copies.append((buffer, part if tensor.dtype == uint8 else part.view(tensor.dtype)))
            self._event = target.device.record()

    def wait_read_back(self) -> list[NDArray[Any]]:
        """What was read back, the torn rows first. Here, and only here, a host thread waits for the device."""
        self.target.device.sync(self._event)
        found = [np.array(view.numpy()) for _, view in self._copies]
        for buffer, _ in self._copies:
            self.target.pool.give_now(buffer, self._event)
        self._copies = []
        if self.cu_seqlens is not None:
            self.steps_packed = int(found.pop()[-1])
        return found

    def finish(
        self,
        keys: Keys,
        probability: Any,
        importance_weights: Any,
        step: int | None,
        draw: NDArray[np.int64] | None = None,
    ) -> ReadyBatch:
        """The batch as users get it, and its end as an event."""
        target = self.target
        with target.device.on(target.stream):
            if not self.weighted:
                self._send_weights(probability, importance_weights)
            its = None if draw is None else target.upload([draw])[0]
            told = {"probability": probability, "importance_weights": importance_weights}
            absent = tuple(name for name, values in told.items() if values is None)
            batch = arena_batch(
                self.arena, self._views(), keys, step, absent=absent, draw=its, cu_seqlens=self.cu_seqlens
            )
            uploaded = [one for one in (its, self.cu_seqlens) if one is not None]
            return ReadyBatch(batch, target.device.record(), [self.arena, *uploaded])

    def _send_weights(self, probability: Any, importance_weights: Any) -> None:
        """Probabilities and importance weights to their places in the arena, on the current stream."""
        target, n = self.target, self.layout.n
        begin = self.layout.probability
        end = write_weights(None, begin, self.layout, probability, importance_weights)
        if n == 0 or end == begin:
            return
        buffer = target.pool.take(end - begin)
        write_weights(buffer.numpy(), begin, self.layout, probability, importance_weights)
        target.device.copy(self.arena[begin:end], buffer[: end - begin])
        target.pool.give(buffer)

    def _views(self) -> ArenaViews:
        target, n = self.target, self.layout.n
        if self.steps_packed is not None:
            return ArenaViews(target.plan, self.plan, self.layout, self.steps_packed)
        known = target.views.get((self.plan, n))
        if known is None:
            known = ArenaViews(target.plan, self.plan, self.layout)
            target.keep_views((self.plan, n), known)
        return known


def write_weights(
    memory: NDArray[np.uint8] | None, begin: int, layout: Arena, probability: Any, importance_weights: Any
) -> int:
    """Writes both, where there are any, into memory that begins at `begin` of an arena; returns the end of them.

    Without memory it only tells the end.
    """
    end = begin
    for at, array in ((layout.probability, probability), (layout.importance_weights, importance_weights)):
        if array is None:
            continue
        end = at + 8 * layout.n
        if memory is not None:
            memory[at - begin : end - begin].view(np.float64)[:] = array
    return end


@dataclass(frozen=True)
class ReadyBatch:
    """A batch whose memory is being filled until an event."""

    batch: Batch
    event: Any
    memory: list[torch.Tensor]

    def hand_off(self, device: Device) -> None:
        """Makes the calling thread's stream wait for the batch, and keeps its memory for that stream."""
        device.wait(self.event)
        for tensor in self.memory:
            device.record_stream(tensor)


class StreamHandoff:
    """Handoff of batches to the consumer's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._consumed: deque[Any] = deque()

    def hold_back(self) -> None:
        """Waits, on the replay's thread, until the consumer's stream is not too many batches behind."""
        while len(self._consumed) > MOST_UNCONSUMED:
            self._device.sync(self._consumed.popleft())

    def of(self, ready: ReadyBatch) -> Callable[[], None]:
        """What the consumer's thread calls when it takes the batch."""

        def deliver() -> None:
            # What the consumer gave its stream before it asked: the work on earlier batches.
            self._consumed.append(self._device.record())
            ready.hand_off(self._device)

        return deliver

    def clear(self) -> None:
        """Forgets the consumer."""
        self._consumed.clear()


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


__all__ = ["MOST_UNCONSUMED", "BatchTransfer", "ReadyBatch", "StreamHandoff", "write_weights"]
