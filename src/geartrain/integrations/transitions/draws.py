"""Uniform draws of transitions: windows of a store's steps, in one native call a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.core.global_generators import drawing
from geartrain.core.keys import Keys
from geartrain.integrations.transitions.layout import FLAGS, TRANSITION
from geartrain.replay.fetch import fetch
from geartrain.replay.replay import Replay
from geartrain.selection.random import Uniform
from geartrain.selection.strategy import Strategy
from geartrain.store.store import Store

_LAST = "last"
# Draw a sixteenth more windows, because some begin an episode or reach beyond their row.
_SPARE = 16
# So many further batches are drawn for one; then there are too few whole windows.
_TRIES = 8
_FEW = 6
assert TRANSITION == 1


class DrawnWindows(NamedTuple):
    """Steps of transitions: their observations at step 0, and what their actions brought at step 1; steps after that
    are of the same environment, and a step without TRANSITION ends what belongs to the transition."""

    fields: dict[str, NDArray[Any]]  # (B, reach + 1, ...)

    @staticmethod
    def at(store: Store, keys: Keys, step: NDArray[np.int64], fields: Sequence[str], reach: int) -> DrawnWindows:
        """Some fields of the windows whose first transitions are at these steps of rows."""
        last = ends = step + reach - 1
        if reach > 1:
            ends = np.minimum(last, store.status(keys)["length"].astype(np.int64) - 1)
        batch: Any = fetch(store, keys, fields=fields, window=reach + 1, ends=ends, output="numpy")
        return DrawnWindows.aligned({name: batch[name] for name in fields}, last - ends)

    @staticmethod
    def aligned(fields: dict[str, NDArray[Any]], missing: NDArray[np.int64]) -> DrawnWindows:
        """Windows that end `missing` steps before theirs, moved to their first step; what follows is no transition."""
        if not missing.any():
            return DrawnWindows(fields)
        steps = fields[FLAGS].shape[1]
        source = np.arange(steps) + missing[:, None]
        beyond = source >= steps
        every = np.arange(len(missing))[:, None]
        moved = {name: array[every, np.minimum(source, steps - 1)] for name, array in fields.items()}
        moved[FLAGS][beyond] = 0
        return DrawnWindows(moved)

    @staticmethod
    def zeros(store: Store, fields: Sequence[str], n: int, reach: int) -> DrawnWindows:
        """Windows of nothing."""
        schema = store.fields
        return DrawnWindows(
            {name: np.zeros((n, reach + 1, *schema[name].shape), schema[name].numpy_dtype) for name in fields}
        )


def seed_of_numpy() -> int:
    """A seed from NumPy's global generator."""
    with drawing:
        return int(np.random.randint(0, 2**31))


class TransitionDraws:
    """Draws batches from a store.

    Args:
        store: with the fields of `layout.fields_of`.
        fields: that are gathered, FLAGS among them.
        reach: steps behind the first of a window; with 0 each step is drawn alone.
        seed: gives a seed, and is called before the first batch of each size.
    """

    def __init__(
        self, store: Store, fields: Sequence[str], reach: int, seed: Callable[[], int] = seed_of_numpy
    ) -> None:
        self._store = store
        self._seed = seed
        self._fields = list(fields)
        self._reach = reach
        self._replays: dict[int, Replay] = {}

    def sample(self, n: int) -> DrawnWindows | None:
        """n windows whose first transition is drawn uniformly; None where there are hardly any whole ones."""
        if not len(self._store):
            return None
        replay = self._replays.get(n)
        if replay is None:
            replay = self._replays[n] = self._made(n)
        arrays, real = self._batch(replay)
        flaws = (~real[:n]).nonzero()[0]
        if len(flaws):
            spare, source, tries = real[n:].nonzero()[0] + n, arrays, 0
            while True:
                there = min(len(flaws), len(spare))
                _take_spare(arrays, flaws[:there], source, spare[:there])
                flaws = flaws[there:]
                if not len(flaws):
                    break
                if tries == _TRIES:
                    return None
                tries += 1
                source, real = self._batch(replay)
                spare = real.nonzero()[0]
        return DrawnWindows({name: array[:n] for name, array in arrays.items()})

    def _batch(self, replay: Replay) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """Windows as drawn, and which begin with a transition."""
        return self.gathered(replay)[:2]

    def gathered(self, replay: Replay) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_], Any]:
        """The same, and the batch."""
        batch: Any = replay.sample()
        arrays: dict[str, NDArray[Any]] = {name: batch[name] for name in self._fields}
        # Whole: begins within its row, with a transition, and does not end with the zeros of a full row, whose last
        # steps the next row repeats.
        flags = arrays[FLAGS][:, min(1, self._reach)]
        real = (flags & batch.mask[:, 0]).view(np.bool_)  # the mask is 1, as TRANSITION is
        if self._reach > 1:
            real &= ~batch[_LAST][:, -1]
        return arrays, real, batch

    def _made(self, n: int) -> Replay:
        return Replay(
            self._store,
            self._strategy(self._seed()),
            n + max(4, n // _SPARE),
            fields=[*self._fields, _LAST] if self._reach > 1 else self._fields,
            window=self._reach + 1,
            prefetch=0,
            output="numpy",
        )

    def _strategy(self, seed: int) -> Strategy:
        return Uniform(seed=seed, over="steps")


def _take_spare(
    arrays: Mapping[str, NDArray[Any]], at: NDArray[Any], source: Mapping[str, NDArray[Any]], by: NDArray[Any]
) -> None:
    """Rows of some arrays by rows of others. Few one by one, which takes a tenth of an indexed assignment each."""
    if len(at) > _FEW:
        for name, array in arrays.items():
            array[at] = source[name][by]
        return
    pairs = list(zip(at.tolist(), by.tolist(), strict=True))
    for name, array in arrays.items():
        given = source[name]
        for to, place in pairs:
            array[to] = given[place]


__all__ = ["DrawnWindows", "TransitionDraws", "seed_of_numpy"]
