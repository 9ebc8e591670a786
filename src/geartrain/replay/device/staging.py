"""Staged transfer: the CPU copies rows into pinned memory, and one copy moves them to the device.

Torn rows are known before anything is sent. If fields are converted or windows packed, the device does it, from one
arena to another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.device.arena_batch import ArenaViews
from geartrain.replay.device.layout import arrangement
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import Transfer, steps_of
from geartrain.replay.fetch_plan import FetchedRows

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather_layout import Arena


class PinnedRows(ABC):
    """A batch in pinned memory, raw and padded.

    Attributes:
        memory: bytes of the batch; the first `nbytes` are sent.
        layout: offsets in this memory.
        views: views of an arena with this layout; None if they are the target's.
        weighed: whether the sent bytes are complete, with probabilities and importance weights.
    """

    memory: torch.Tensor
    nbytes: int
    layout: Arena
    views: ArenaViews | None
    weighed: bool

    @abstractmethod
    def mask(self) -> NDArray[np.bool_]:
        """(n, steps) of the batch, for what is converted or packed."""

    @abstractmethod
    def sent(self) -> Any:
        """Called once its copy was given to the current stream; an event behind that, where one was recorded."""


class _Fetched(NamedTuple):
    """Rows that were copied, and where they are in the batch."""

    rows: FetchedRows
    ends: NDArray[np.int32] | None
    at: Any


class StagedTransfer(Transfer):
    """A batch that the CPU copies into pinned memory; see `Transfer`.

    Args:
        pinned: pinned batch that has the rows, or will get them. By default a batch of n rows is allocated. `launch`
            fills it, or the caller writes to `arrays` and then calls `put`.

    Attributes:
        arrays: the fields in pinned memory, in the plan's order; empty if `pinned` is given.
    """

    def __init__(self, targets: Sequence[DeviceTarget], n: int, pinned: PinnedRows | None = None) -> None:
        self._given = pinned
        self._pinned: PinnedRows
        self._event: Any = None
        super().__init__(targets, n)

    def begin(self, n: int) -> None:
        super().begin(n)
        self.arrays: list[NDArray[Any]] = []
        if self._given is not None:
            self._pinned = self._given
            return
        own = _OwnRows(self.target, n)
        self._pinned, self.arrays = own, own.arrays

    def launch(
        self,
        store: int,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32] | None,
    ) -> _Fetched:
        """The CPU has copied the rows when this returns."""
        if places is None and len(rows) != self.layout.n:
            self.begin(len(rows))
        copied = self.targets[store].plan.fetch(rows, generations, ends, self.arrays, places)
        at = slice(None) if places is None else places
        self.put(copied, at)
        return _Fetched(copied, ends, at)

    def resolve(self, launched: _Fetched) -> tuple[NDArray[Any], ...]:
        rows = launched.rows
        return rows.torn, rows.lengths, rows.starts, steps_of(rows.lengths, rows.starts, launched.ends), rows.versions

    def known_mask(self) -> NDArray[np.bool_]:
        return self._pinned.mask()

    def put(self, rows: FetchedRows, at: Any = slice(None)) -> None:
        """Takes the metadata of rows that were copied to these places of `arrays`."""
        assert isinstance(self._pinned, _OwnRows)
        self._pinned.put(rows, at)

    def complete(self, probability: Any, importance_weights: Any) -> bool:
        """Sends the batch by one copy, converts and packs."""
        import torch

        target, pinned, plain = self.target, self._pinned, self.target.plain
        device, layout, memory, end = target.device, pinned.layout, pinned.memory, pinned.nbytes
        padded = device.empty((layout.nbytes,), torch.uint8)
        if pinned.weighed:  # all of it; a slice takes longer than the rest of this
            device.copy(padded, memory)
        else:
            device.copy(padded[:end], memory[:end])
        event = pinned.sent()
        if plain is target.gather:
            self.arena, self.layout, self._event = padded, layout, event
            return pinned.weighed
        self.arena = device.empty((self.layout.nbytes,), torch.uint8)
        device.run(arrangement(self, padded, plain, layout, pinned.mask()))
        return False

    def forget(self) -> None:
        """Lets the next batch begin: the last one's memory is its own."""
        del self.arena
        self._event = None

    def record(self) -> Any:
        """Event of the copy, if nothing was sent after it."""
        return super().record() if self._event is None else self._event

    def views(self) -> ArenaViews:
        as_it_is = self.target.plain is self.target.gather
        return (self._pinned.views if as_it_is else None) or super().views()


class _OwnRows(PinnedRows):
    """Memory of the target's pool for n rows, laid out as the kernel would."""

    views = None
    weighed = False

    def __init__(self, target: DeviceTarget, n: int) -> None:
        plan = target.plan
        self._target = target
        self._steps = target.plain.steps
        self.layout = target.plain.arena(n)
        self.nbytes = self.layout.torn + n
        self.memory = target.pool.take(self.layout.nbytes)
        self._bytes = self.memory.numpy()
        self.arrays = [
            self._array(at, plan.raw_dtype(name), plan.shape(name, n))
            for name, at in zip(plan.names, self.layout.fields, strict=True)
        ]
        layout = self.layout
        self._mask = self._array(layout.mask, np.bool_, (n, self._steps))
        self._starts, self._lengths = (self._array(at, np.int32, (n,)) for at in (layout.starts, layout.lengths))
        self._versions = self._array(layout.versions, np.int64, (n,))
        self._array(layout.torn, np.uint8, (n,))[:] = 0

    def _array(self, at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        made: NDArray[Any] = self._bytes[at : at + nbytes].view(dtype).reshape(shape)
        return made

    def put(self, rows: FetchedRows, at: Any) -> None:
        """Takes the metadata of rows at these places."""
        self._mask[at], self._starts[at], self._lengths[at] = rows.mask, rows.starts, rows.lengths
        self._versions[at] = rows.versions

    def mask(self) -> NDArray[np.bool_]:
        return self._mask

    def sent(self) -> Any:
        """Its copies follow, so that its event is not the batch's."""
        self._target.pool.give(self.memory)


__all__ = ["PinnedRows", "StagedTransfer"]
