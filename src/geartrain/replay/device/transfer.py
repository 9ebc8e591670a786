"""Transfers: move batches to a device, and make the consumer's stream wait for them.

    launch     starts copies of some rows of a store to their places, and does not wait for them
    resolve    waits for the copies; returns which rows are torn, and the rows' metadata
    finish     returns the batch, once none of its rows is torn

| transfer | file | who copies the rows |
|---|---|---|
| `GatherTransfer` | this file | a kernel, from the pinned segment |
| `CopyTransfer` | copied_rows.py | copy engines, from the pinned segment |
| `StagedTransfer` | staging.py | the CPU into pinned memory, then one copy to the device |

A replay's native code draws the rows, calls `launch` and `resolve`, and redraws torn rows
(native/python/python_copier.h). `geartrain.fetch` calls both for the rows of the given keys, and raises if some are
torn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class Transfer(ABC):
    """One batch of n rows on its way to a device.

    Args:
        targets: of each store.
        n: rows; another number where a launch without places has another one.
        plan: its layout in the arena; that of the first target by default.

    Attributes:
        arena: the batch's memory on the device.
        layout: where everything stands in it.
        cu_seqlens, steps_packed: of a packed batch, once its rows are known.
        copies_all: whether a launch of some rows again has to be one of all rows of the batch.
    """

    copies_all = False
    arena: torch.Tensor

    def __init__(self, targets: Sequence[DeviceTarget], n: int, plan: GatherPlan | None = None) -> None:
        self.targets = targets
        self.target = targets[0]
        self.plan = plan or self.target.gather
        self.cu_seqlens: torch.Tensor | None = None
        self.steps_packed: int | None = None
        self.begin(n)

    def begin(self, n: int) -> None:
        """Makes it a transfer of n rows, none of which has been copied."""
        self.layout = self.plan.arena(n)

    def known_mask(self) -> NDArray[np.bool_]:
        """(n, steps) as far as the host knows it; of no steps where only the device does."""
        return np.zeros((self.layout.n, 0), np.bool_)

    @abstractmethod
    def launch(
        self,
        store: int,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32] | None,
    ) -> Any:
        """Starts to copy k rows. Pass the result to `resolve`.

        Args:
            store: the number of their store's target.
            rows, generations: (k,) the keys.
            ends: (k,) the anchors of their windows; None for whole rows.
            places: (k,) in the batch; None for all rows of the batch, in order.
        """

    @abstractmethod
    def resolve(self, launched: Any) -> tuple[NDArray[Any], ...]:
        """Waits for a launch.

        Returns:
            Of its rows: torn (k,) uint8; lengths, starts and steps in the window (k,) int32; versions (k,) int64.
        """

    def complete(self, probability: Any, importance_weights: Any) -> bool:
        """Sends what the rows in the arena still lack. Returns whether probabilities and weights were sent with it."""
        return False

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
            if not self.complete(probability, importance_weights):
                self._send_weights(probability, importance_weights)
            its = None if draw is None else target.upload([draw])[0]
            absent: tuple[str, ...] = () if importance_weights is not None else ("importance_weights",)
            absent += () if probability is not None else ("probability",)
            batch = arena_batch(
                self.arena, self.views(), keys, step, absent=absent, draw=its, cu_seqlens=self.cu_seqlens
            )
            memory = [self.arena]
            if its is not None or self.cu_seqlens is not None:
                memory += [one for one in (its, self.cu_seqlens) if one is not None]
            return ReadyBatch(batch, self.record(), memory)

    def hand_over(self, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies the fields to the caller's tensors, and returns the metadata in memory of its own: mask, starts,
        lengths and versions."""
        import torch

        target = self.target
        device = target.device
        with device.on(target.stream):
            self.complete(None, None)
            layout = self.layout
            for tensor, at in zip(out, layout.fields, strict=True):
                flat = tensor.detach().view(-1).view(torch.uint8)
                device.copy(flat, self.arena[at : at + len(flat)])
            kept = device.empty((layout.torn - layout.mask,), torch.uint8)
            device.copy(kept, self.arena[layout.mask : layout.torn])
        n, steps = layout.n, self.plan.steps

        def view(at: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return kept[at - layout.mask :][:nbytes].view(dtype).view(shape)

        return [
            view(layout.mask, torch.bool, n, steps),
            view(layout.starts, torch.int32, n),
            view(layout.lengths, torch.int32, n),
            view(layout.versions, torch.int64, n),
        ]

    def record(self) -> Any:
        """An event behind everything that was sent."""
        return self.target.device.record()

    def views(self) -> ArenaViews:
        """Views that cut the batch from its arena."""
        target, n = self.target, self.layout.n
        if self.steps_packed is not None:
            return ArenaViews(target.plan, self.plan, self.layout, self.steps_packed)
        known = target.views.get((self.plan, n))
        if known is None:
            known = ArenaViews(target.plan, self.plan, self.layout)
            target.keep_views((self.plan, n), known)
        return known

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


def steps_of(
    lengths: NDArray[np.int32], starts: NDArray[np.int32], ends: NDArray[np.int32] | None
) -> NDArray[np.int32]:
    """Real steps (k,) in windows that end at `ends`; of whole rows where there are none."""
    if ends is None:
        return lengths
    steps: NDArray[np.int32] = (np.minimum(lengths, np.maximum(ends, 0) + 1) - starts).astype(np.int32)
    return steps


@dataclass
class Gathering:
    """Rows that a kernel gathers, and the copies of their metadata to the host."""

    places: NDArray[np.uint32] | None
    ends: NDArray[np.int32] | None
    event: Any
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # pinned buffers, and the parts of them that are filled
    packed: bool


class GatherTransfer(Transfer):
    """A batch that a kernel gathers; see `Transfer`. It places the windows of rows that a device draws.

    Args:
        arena: device memory for it; by default its own, which belongs to the targets' stream.
    """

    def __init__(
        self,
        targets: Sequence[DeviceTarget],
        n: int,
        plan: GatherPlan | None = None,
        arena: torch.Tensor | None = None,
    ) -> None:
        self._given = arena
        super().__init__(targets, n, plan)
        self.copies_all = self.plan.packed

    def begin(self, n: int) -> None:
        super().begin(n)
        target = self.target
        if self._given is not None:
            self.arena = self._given
            return
        with target.device.on(target.stream):
            self.arena = target.device.empty((self.layout.nbytes,), _dtype("uint8"))

    def launch(
        self,
        store: int,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32] | None,
    ) -> Gathering:
        return self.gather(store, rows, generations, ends=ends, places=places)

    def gather(
        self,
        store: int,
        rows: Any,
        generations: Any,
        *,
        ends: NDArray[np.int32] | None = None,
        draw: tuple[int, int, int] | None = None,
        places: NDArray[np.uint32] | None = None,
        told: Sequence[torch.Tensor] = (),
    ) -> Gathering:
        """Like `launch`, for rows that may be on the device already.

        Args:
            store, ends, places: see `launch`.
            rows, generations: host arrays, which are uploaded, or tensors.
            draw: (seed, step, attempt) that places windows, instead of `ends`.
            told: tensors that `resolve` also returns as arrays, after its usual results.
        """
        if places is None and len(rows) != self.layout.n:
            self.begin(len(rows))
        at = self.targets[store]
        device, gather, segment, layout = at.device, at.gather, at.segment, self.layout
        assert segment is not None
        given = {"rows": rows, "generations": generations, "ends": ends, "places": places}
        on_host = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        given |= dict(zip(on_host, at.upload(list(on_host.values())), strict=True))
        rows, generations = given["rows"], given["generations"]
        named: dict[str, Any] = {"draw": draw if gather.window else None, "ends": given["ends"], "numbers": None}
        with device.on(at.stream):
            if gather.packed:
                self.cu_seqlens = device.empty((len(rows) + 1,), _dtype("int32"))
                device.count_steps(gather, self.cu_seqlens, segment, rows, **named)
                named["cu_seqlens"] = self.cu_seqlens
            else:
                named["places"] = given["places"]
            device.gather(gather, segment, self.arena, layout, rows, generations, **named)
            wanted = [self.arena[layout.starts : layout.torn + layout.n], *told]
            if gather.packed:
                assert self.cu_seqlens is not None
                wanted.append(self.cu_seqlens)
            copies = [self._read_back(tensor) for tensor in wanted]
            return Gathering(places, ends, device.record(), copies, gather.packed)

    def _read_back(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor on its way to the host, on the current stream, behind everything that was launched so far."""
        target, uint8 = self.target, _dtype("uint8")
        flat = tensor if tensor.dtype == uint8 and tensor.ndim == 1 else tensor.reshape(-1).view(uint8)
        buffer = target.pool.take(flat.shape[0])
        part = buffer[: flat.shape[0]]
        target.device.copy(part, flat)
        return buffer, part if tensor.dtype == uint8 else part.view(tensor.dtype)

    def resolve(self, launched: Gathering) -> tuple[NDArray[Any], ...]:
        """Here, and only here, a host thread waits for the device."""
        target, layout = self.target, self.layout
        target.device.sync(launched.event)
        metadata, *told = [np.array(view.numpy()) for _, view in launched.copies]
        for buffer, _ in launched.copies:
            target.pool.give_now(buffer, launched.event)
        if launched.packed:
            self.steps_packed = int(told.pop()[-1])

        def found(at: int, dtype: Any) -> NDArray[Any]:
            begin = at - layout.starts
            values: NDArray[Any] = metadata[begin : begin + layout.n * np.dtype(dtype).itemsize].view(dtype)
            return values if launched.places is None else values[launched.places]

        starts, lengths = found(layout.starts, np.int32), found(layout.lengths, np.int32)
        steps = steps_of(lengths, starts, launched.ends)
        return found(layout.torn, np.uint8), lengths, starts, steps, found(layout.versions, np.int64), *told


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


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


__all__ = ["GatherTransfer", "ReadyBatch", "Transfer", "steps_of", "write_weights"]
