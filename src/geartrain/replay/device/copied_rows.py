"""Copied rows: a batch in transfer whose rows a device's copy engines take from the pinned segment, window by window.

    launch     the host reads words and status of the rows, and gives the copies of their windows to the stream, and an
               event behind them
    resolve    when it has come, the host reads the words again: rows that were overwritten meanwhile are torn
    complete   mask, starts, lengths and versions by one small copy; converts and packs as the staged path does

No CPU touches the bytes of a row, and no multiprocessor does.

Torn rows. The order is that of native/fetch/row_pieces.h, the same as of a copy by the CPU:

    1  word, content number     native, acquire: the generation must be the key's, the row at rest
    2  length, version          native; the length with acquire order
    3  the copies               begun by a call after 1, complete when their event has come
    4  fence, word, content     native: both must be as in 1

A writer changes the word (or the content number), fences, and only then writes the block; it commits the next word
after the block. If a copy of 3 has read a byte of the next row, that store had reached the memory that host and
device share coherently, and so had the change of the word before it. The host reads the word of 4 after the event: a
device signals an event by a write to host memory that it makes once the data of the copies before it has arrived, so
the byte was read before the signal, and the host's read after the signal sees the changed word. The fence of 4 keeps
the compiler and the processor from reading earlier. The other end: if 1 returns the key's word, its acquire makes the
block that was committed with it visible to this thread; what a thread sees before it gives work to a stream is there
for that work. That is what CUDA promises for every buffer that a host fills and copies. Copies may run in any order
and in pieces: each byte of a row is read between 1 and 4, and it is the whole interval that is checked. Rows that
grow: a row's length is read once, and all of its windows go by that; steps are written before they are counted. Rows
that are written in place keep their generation and change their content number, which is odd meanwhile; all of 3 lies
between two readings of it. (The generation has 32 bits and moves by two a life; to be fooled, a row has to be
rewritten 2^31 times during one copy.)

Nothing is asked of the link but that it carries reads of registered host memory that snoop the CPU's caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.replay.device.layout import arrangement
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import Transfer, steps_of, write_weights

# Paddings that are set to zero one by one; where there are more, the fields' lines are, whole, before the copies.
FEW_GAPS = 16


@dataclass
class _Rows:
    """Rows whose copies are in flight."""

    store: _native.Store
    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    contents: NDArray[np.uint64]
    torn: NDArray[np.uint8]
    ends: NDArray[np.int32] | None
    places: NDArray[np.uint32]
    event: Any


class CopyTransfer(Transfer):
    """A batch whose rows are copied one by one; see `Transfer`."""

    def begin(self, n: int) -> None:
        import torch

        super().begin(n)
        target = self.target
        self._plain = target.plain
        self._raw = self._plain.arena(n)
        self._as_it_is = target.plain is target.gather
        with target.device.on(target.stream):
            self.arena = target.device.empty((self.layout.nbytes,), torch.uint8)
            self._bytes = self.arena if self._as_it_is else target.device.empty((self._raw.nbytes,), torch.uint8)
        self._mask = np.zeros((n, self._plain.steps), np.bool_)
        self._starts, self._lengths = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self._versions = np.zeros(n, np.int64)

    def launch(
        self,
        store: int,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32] | None,
    ) -> _Rows:
        """Gives the copies to the stream."""
        if places is None and len(rows) != self.layout.n:
            self.begin(len(rows))
        at = self.targets[store]
        device, plan, segment = at.device, at.plan, at.segment
        assert segment is not None
        offsets = np.array(self._raw.fields, np.uint64)
        native = plan.store.native
        pieces, gaps, contents, torn, mask, starts, lengths, versions = _native.row_pieces(
            native, rows, generations, plan.numbers, offsets, plan.window, plan.pad_left, ends, places
        )
        if places is None:  # all of them
            places = np.arange(len(rows), dtype=np.uint32)
            self._mask, self._starts, self._lengths, self._versions = mask, starts, lengths, versions
        else:
            self._mask[places], self._starts[places], self._lengths[places] = mask, starts, lengths
            self._versions[places] = versions
        with device.on(at.stream):
            self._zero(at, gaps, places)
            device.copy_many(self._bytes, segment, *pieces)
            return _Rows(native, rows, generations, contents, torn, ends, places, device.record())

    def _zero(
        self, at: DeviceTarget, gaps: tuple[NDArray[np.uint64], NDArray[np.uint64]], places: NDArray[np.uint32]
    ) -> None:
        """Sets padding to zero, on the current stream."""
        begins, sizes = (one.tolist() for one in gaps)
        first, k = int(places[0]) if len(places) else 0, len(places)
        if len(begins) > FEW_GAPS and np.array_equal(places, np.arange(first, first + k)):
            lines = [
                (offset, self._plain.steps * field.result_bytes)
                for offset, field in zip(self._raw.fields, self._plain.fields, strict=True)
                if field.timed
            ]
            begins, sizes = [offset + first * line for offset, line in lines], [k * line for _, line in lines]
        if begins:
            parts = [self._bytes[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            at.device.run(lambda: [part.zero_() for part in parts])

    def resolve(self, launched: _Rows) -> tuple[NDArray[Any], ...]:
        """Here, and only here, a host thread waits for the device."""
        self.target.device.sync(launched.event)
        torn, at = launched.torn, launched.places
        _native.changed_rows(launched.store, launched.rows, launched.generations, launched.contents, torn)
        lengths, starts = self._lengths[at], self._starts[at]
        return torn, lengths, starts, steps_of(lengths, starts, launched.ends), self._versions[at]

    def known_mask(self) -> NDArray[np.bool_]:
        return self._mask

    def complete(self, probability: Any, importance_weights: Any) -> bool:
        """Sends mask and metadata, converts and packs: the arena is then what the kernel would have made.

        Only now: redraws change them. Where nothing is converted or packed, probabilities and importance weights go
        with them.
        """
        target, raw, device = self.target, self._raw, self.target.device
        begin, end = raw.mask, raw.torn + raw.n
        if self._as_it_is:
            end = max(end, write_weights(None, end, raw, probability, importance_weights))
        size = end - begin
        buffer = target.pool.take(size)
        memory = buffer.numpy()
        if self._as_it_is:
            write_weights(memory, begin, raw, probability, importance_weights)
        for at, array in (
            (raw.mask, self._mask),
            (raw.starts, self._starts),
            (raw.lengths, self._lengths),
            (raw.versions, self._versions),
        ):
            memory[at - begin : at - begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        memory[raw.torn - begin : raw.torn - begin + raw.n] = 0  # none of them is
        with device.on(target.stream):
            device.copy(self._bytes[begin : begin + size], buffer[:size])
            target.pool.give(buffer)
        if not self._as_it_is:
            work = arrangement(self, self._bytes, self._plain, raw, self._mask)
            with device.on(target.stream):
                device.run(work)
        return self._as_it_is


__all__ = ["FEW_GAPS", "CopyTransfer"]
