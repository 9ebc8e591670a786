"""Uniform draws of samples from a store of trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from geartrain.integrations.rlinf.layout import SampleLayout
from geartrain.integrations.transitions.draws import TransitionDraws
from geartrain.replay.replay import Replay
from geartrain.selection.random import Uniform
from geartrain.store.store import Store


class SampleDraws:
    """Draws batches from a store, one native call each.

    Args:
        store: store with the fields of `layout`.
        layout: layout of its rows.
        seed: function that returns a seed, called before the first batch of each size.
    """

    def __init__(self, store: Store, layout: SampleLayout, seed: Callable[[], int]) -> None:
        self._store, self._layout, self._seed = store, layout, seed
        self._pairs = TransitionDraws(store, layout.drawn(), 1, seed) if layout.shared else None
        self._replays: dict[int, Replay] = {}

    def sample(self, n: int) -> dict[str, NDArray[Any]] | None:
        """Windows (n, window, ...) of all fields, of samples that are each as likely; None where there are none."""
        if self._pairs is not None:
            drawn = self._pairs.sample(n)
            return None if drawn is None else drawn.fields
        if not len(self._store):
            return None
        replay = self._replays.get(n)
        if replay is None:
            strategy = Uniform(seed=self._seed(), over="steps")
            fields = self._layout.drawn()
            replay = Replay(self._store, strategy, n, fields=fields, window=1, prefetch=0, output="numpy")
            self._replays[n] = replay
        batch: Any = replay.sample()
        return {name: batch[name] for name in self._layout.drawn()}


__all__ = ["SampleDraws"]
