"""Streams of timesteps in a store: rows overlap, so that any sequence of a given length lies within one row.

    row 0   s0  s1  s2  s3  s4  s5  s6  s7
    row 1                              s7  s8  s9  ...       sequences of 2 steps: one step is repeated

Each stream (an environment, say) writes one row at a time. The row can be sampled from while it grows.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.core.lifetime import on_error
from geartrain.core.schema import Field
from geartrain.core.threads import owns, refuse_within
from geartrain.replay.fetch import fetch
from geartrain.replay.replay import Replay
from geartrain.replay.windows import Windows
from geartrain.selection.random import Prioritized, Uniform
from geartrain.store.row import Row
from geartrain.store.store import Store

#: A step's number has so many bits in a replay.
_STEP_BITS = 62


def steps_of_row(timesteps: int, sequence: int) -> int:
    """Steps of a row for that many timesteps of a stream: a sixteenth of them, from 16 to 512, and what is repeated."""
    return max(16, min(512, timesteps // 16)) + sequence - 1


def rows_for(timesteps: int, streams: int, sequence: int, writers: int) -> int:
    """Rows that hold that many timesteps of each stream, beside those that are being written."""
    fresh = steps_of_row(timesteps, sequence) - (sequence - 1)
    return (-(-timesteps // fresh) + 2 * writers) * streams


class Streams:
    """Appends timesteps of n streams to a store, and draws sequences from it. A lock makes calls exclude each other.

    Args:
        store: store with `fields`, and with priorities of steps if `exponent` is given.
        fields: by name, in the order in which values are given and returned.
        n: number of streams.
        timesteps: number of timesteps to keep of each stream, at least.
        sequence: steps of a drawn sequence.
        batch_size: sequences in a draw.
        exponent: exponent of priorities; None for uniform draws.

    Attributes:
        store, n, timesteps: as given.
    """

    def __init__(
        self,
        store: Store,
        fields: Mapping[str, Field],
        n: int,
        timesteps: int,
        sequence: int,
        batch_size: int,
        exponent: float | None,
    ) -> None:
        self.store, self.n, self.timesteps = store, n, timesteps
        self._names = list(fields)
        self._sequence = sequence
        self._count = 0  # timesteps of each stream
        # Rows that are whole, of all streams, by the number of their first timestep; as many as hold `timesteps`.
        rows = -(-timesteps // (store.max_length - sequence + 1)) + 1
        self._whole: deque[tuple[int, list[Keys]]] = deque(maxlen=rows)
        self._rows: list[Row] = []
        self._place = 0
        self._published = False
        self._exponent = exponent
        self._lock = threading.RLock()
        self._ending = False  # closed by a signal's handler within a call, which does it at its end
        self._replay = Replay(
            store,
            Uniform(seed=0, over="steps") if exponent is None else Prioritized(seed=0, alpha=exponent, beta=0.0),
            batch_size,
            fields=self._names,
            window=Windows(sequence, whole=True),
            prefetch=0,
            output="numpy",
        )
        self._state = self._replay.state_dict()

    def add(self, values: list[NDArray[Any]]) -> None:
        """Appends steps: an array (n, steps, *shape) for each field.

        Raises:
            StoreFullError, WaitTimeoutError, StoreClosedError: as of writing rows.
        """
        steps, done = values[0].shape[1], 0
        with self._in_turn():
            while done < steps:
                if not self._rows or self._place == self.store.max_length:
                    self._next_rows()
                take = min(steps - done, self.store.max_length - self._place)
                index = [row.index for row in self._rows]
                where: Any = index[0] if self.n == 1 else index
                for name, value in zip(self._names, values, strict=True):
                    part = value[:, done : done + take]
                    self.store.columns.numpy(name)[where, self._place : self._place + take] = (
                        part[0] if self.n == 1 else part
                    )
                self._place += take
                self._publish()
                done += take
                self._count += take

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One call at a time; one of a signal's handler within another is refused, and its `close` comes afterwards."""
        refuse_within(self._lock, "a call of this buffer")
        try:
            with self._lock:
                yield
        finally:
            if self._ending:
                self.close()

    def draw(self, number: int) -> tuple[list[NDArray[Any]], Keys, NDArray[Any]]:
        """Sequences (batch, sequence, *shape) by field, in memory of their own; their keys and probabilities.

        Args:
            number: what the draw follows from, 0 to 2**62 - 1: the same for the same contents.

        Raises:
            EmptyStoreError: no sequence is whole yet.
        """
        with self._in_turn():
            self._state["step"] = number % 2**_STEP_BITS
            self._replay.load_state_dict(self._state)
            batch: Any = self._replay.sample()
        return [batch[name] for name in self._names], batch.keys, np.asarray(batch.probability)

    def update(self, keys: Keys, priorities: NDArray[Any]) -> int:
        """Sets priorities of steps to priority ** exponent; returns how many steps were gone.

        Raises `ArgumentError` for one that is not finite.
        """
        with self._in_turn():
            return self._replay.update_priorities(keys, priorities)

    def written(self, count: int) -> list[NDArray[Any]]:
        """The last of the first `count` timesteps that were added here, (n, timesteps, *shape) by field.

        Timestep t of a stream is at t % timesteps; those that are gone, or were never there, are zeros.
        """
        found = {
            name: np.zeros((self.n, self.timesteps, *field.shape), field.numpy_dtype)
            for name, field in self.store.fields.items()
        }

        def take(stream: int, first: int, values: Mapping[str, NDArray[Any]], length: int) -> None:
            number = first + np.arange(length)
            mine = np.flatnonzero((number >= count - self.timesteps) & (number < count))
            for name in self._names:
                found[name][stream, number[mine] % self.timesteps] = values[name][mine]

        with self._in_turn():
            for first, keys in self._whole:
                for stream, key in enumerate(keys):
                    batch: Any = fetch(self.store, key, fields=self._names, output="numpy", on_stale="drop")
                    if len(batch):
                        take(stream, first, {name: batch[name][0] for name in self._names}, int(batch.length[0]))
            for stream, row in enumerate(self._rows):
                values = {name: self.store.columns.numpy(name)[row.index] for name in self._names}
                take(stream, self._count - self._place, values, self._place)
        return [found[name] for name in self._names]

    def sequences(self) -> int:
        """Whole sequences in the store, of all its writers."""
        lengths = self.store.status()["length"].astype(np.int64)
        return int(np.maximum(lengths - (self._sequence - 1), 0).sum())

    def close(self) -> None:
        """Ends the rows that are being written, which stay, and what draws."""
        self._ending = True
        if owns(self._lock):
            return
        with self._lock:
            self._replay.close()
            for row in self._rows:
                if self._published and not self.store.closed:
                    row.commit()
                else:
                    row.abandon()
            self._rows = []

    def _next_rows(self) -> None:
        """Rows that begin with the last steps of those that are full."""
        fresh: list[Row] = []
        with on_error(lambda: list(map(Row.abandon, fresh))):
            for _ in range(self.n):
                index = self.store.native.allocate_one()
                # No step is published before all of its fields are written, so no block needs to be zeroed.
                fresh.append(Row(self.store.columns, index, None, 0, taken=self._names))
        repeated = self._sequence - 1 if self._rows else 0
        if repeated:
            for name in self._names:
                column = self.store.columns.numpy(name)
                old = column[[row.index for row in self._rows], self._place - repeated :]
                column[[row.index for row in fresh], :repeated] = old
        if self._rows:
            self._whole.append((self._count - self._place, [row.commit() for row in self._rows]))
        self._rows, self._place, self._published = fresh, repeated, False

    def _publish(self) -> None:
        # No sequence ends with the first steps of a row. Without a priority they are no part of probabilities either.
        head = min(self._sequence - 1, self._place) if self._exponent is not None else 0
        for row in self._rows:
            if not self._published and head:
                row.priority = 0.0
                row.publish(length=head)
            row.priority = None if self._place >= self._sequence or not head else 0.0
            if not self._published and not head:
                row.publish(length=self._place)
            elif self._published or self._place > head:
                row.extend(self._place)
        self._published = True


__all__ = ["Streams", "rows_for", "steps_of_row"]
