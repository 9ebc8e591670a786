"""`CopyTransfer`: a device's copy engines read the drawn rows from the pinned segment, window by window.

    launch     the host reads the word and the status of each row, queues the copies of the windows on the stream, and
               records an event after them
    resolve    once the event has completed, the host reads the words again: rows overwritten meanwhile are torn
    complete   sends mask, starts, lengths and versions in one small copy; converts and packs as the staged path does

Neither the CPU nor a multiprocessor touches the bytes of a row.

Torn rows. The order is the same as for a copy by the CPU (native/fetch/row_pieces.h):

    1  word, content number     native, acquire: the generation must be the key's, the row at rest
    2  length, version          native; the length with acquire order
    3  the copies               queued by a call after 1, complete when their event has completed
    4  fence, word, content     native: both must be as in 1

Why step 4 sees every overwrite:

- A writer changes the word (or the content number), fences, and only then writes the block. It commits the next word
  after the block.
- Suppose a copy of 3 read a byte of the next row. Then this byte had reached the memory that host and device share
  coherently, and so had the earlier change of the word.
- The device signals an event by a write to host memory, once the data of all earlier copies has arrived. So it read the
  byte before the signal. The host reads the word in 4 after the signal, and sees the changed word.
- The fence of 4 keeps the compiler and the processor from reading earlier.

Why step 3 sees the block that belongs to the key:

- If step 1 returns the key's word, its acquire makes the committed block visible to this thread.
- CUDA guarantees that work on a stream sees what the thread saw before it queued the work. Every buffer that a host
  fills and copies depends on that.

Copies may run in any order and in pieces. Each byte of a row is read between 1 and 4, and the check covers that whole
interval.

Rows that grow: the length of a row is read once, and all of its windows use it. Writers write steps before they count
them.

Rows that are rewritten in place keep their generation. Their content number changes, and is odd during the rewrite. All
of 3 lies between two readings of it.

The generation has 32 bits and moves by two when a slot is reused. A torn row stays unnoticed only if the slot is
rewritten 2^31 times during one copy.

The link only needs to carry reads of registered host memory that snoop the CPU's caches.
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
