"""Priorities of steps in a store that is opened by its name, while writers of it are killed.

A store with `priority_per="step"` and rows of 1,000 steps, N in all, as small as a recorder's fields can be: four bytes
a step, eight of its priority. Draws and updates go through a handle that was opened by name; another process records
into the store and is killed, again and again (`geartrain_bench.harness.killed_writers`), so steps appear, are lost and
are reclaimed while everything is timed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.core.schema import Field
from geartrain.replay.replay import Replay
from geartrain.selection import Candidates, Draw, Prioritized
from geartrain.selection.declared import select_declared
from geartrain.selection.shard import StepPlan
from geartrain.store.recorder import recorded_fields
from geartrain.store.store import Store
from geartrain_bench.harness.killed_writers import ROWS, KilledWriters
from geartrain_bench.harness.timing import System

if TYPE_CHECKING:
    from typing_extensions import Self

#: Of every row.
ROW_STEPS = 1000
#: Every step of a row counts, by its priority.
EVERY_STEP = StepPlan(max_steps=0, need=0, skip=0, stride=1)
_CHUNK_ROWS = 1000
_BYTE = Field((), "uint8")

#: Makes a system of a name, of what prepares a call's argument before the clock starts, and of the call.
MakeSystem = Callable[[str, Callable[[], Any], Callable[[Any], object]], System]


class NamedSteps:
    """The store of one N, from `enter` to `leave`, with writers that are killed.

    Args:
        steps: N, a multiple of `ROW_STEPS`.
        priorities: makes so many (float32).
        alpha, beta: of prioritized replay.
        seed: of the draws.

    Attributes:
        kills: how many writers were killed; known after it was left.
    """

    def __init__(
        self, steps: int, priorities: Callable[[int], NDArray[np.float32]], *, alpha: float, beta: float, seed: int
    ) -> None:
        self.kills = 0
        self._steps = steps
        self._priorities = priorities
        self._alpha = alpha
        self._plain, self._weighing = Prioritized(seed), Prioritized(seed, alpha=alpha, beta=beta)
        self._random = np.random.default_rng(seed)
        self._stack = contextlib.ExitStack()
        self._number = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(
                Store.create(
                    f"bench-steps-{os.getpid()}",
                    recorded_fields({"obs": _BYTE}),
                    max_length=ROW_STEPS,
                    capacity=self._steps // ROW_STEPS + ROWS,
                    priority_per="step",
                )
            )
            self._fill(made)
            self.store = stack.enter_context(Store.open(made.name))
            self._keys = self.store.keys()
            self._candidates = Candidates.of_store(self.store.native, self.store.column)
            self._writers = stack.enter_context(KilledWriters(made.name))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        self.kills = self._writers.kills

    def _fill(self, store: Store) -> None:
        """Whole rows, then a priority of its own for every step."""
        left = self._steps // ROW_STEPS
        while left:
            n = min(left, _CHUNK_ROWS)
            fields = {name: np.zeros((n, ROW_STEPS), field.dtype) for name, field in store.fields.items()}
            keys = store.insert(fields)
            each = np.repeat(np.arange(n), ROW_STEPS)
            steps = np.tile(np.arange(ROW_STEPS, dtype=np.uint32), n)
            store.update_priorities(keys[each].of_steps(steps), self._raised(len(steps)))
            left -= n

    def _raised(self, n: int) -> NDArray[np.float64]:
        return self._priorities(n).astype(np.float64) ** self._alpha

    def systems(self, what: str, batch: int, make: MakeSystem) -> list[System]:
        """What is timed of "sample" or "update"."""
        return self._draws(batch, make) if what == "sample" else self._updates(batch, make)

    def _draws(self, batch: int, make: MakeSystem) -> list[System]:
        def draw(strategy: Prioritized) -> Draw:
            self._number += 1
            return select_declared(
                strategy,
                strategy.traits,
                self._candidates,
                batch,
                self._number,
                state=None,
                redraw=None,
                steps=EVERY_STEP,
            )

        def weigh(_: None) -> None:
            self._weighing.importance_weights(draw(self._weighing), self._steps, 0)

        # A step of one field, and its metadata, as a batch of a training step.
        replay = Replay(
            self.store, replace(self._weighing), batch, window=1, fields=["obs"], prefetch=0, output="numpy"
        )

        def read(_: None) -> object:
            batch = replay.sample()
            return batch["obs"], batch.keys, batch.importance_weights

        self._stack.callback(replay.close)
        return [
            make("geartrain steps", _nothing, lambda _: draw(self._plain)),
            make("geartrain steps with importance", _nothing, weigh),
            make("geartrain steps, Replay", _nothing, read),
        ]

    def _updates(self, batch: int, make: MakeSystem) -> list[System]:
        def some_steps() -> Keys:
            places = self._random.integers(0, self._steps, batch)
            rows, steps = np.divmod(places, ROW_STEPS)
            return self._keys[rows].of_steps(steps)

        def with_alpha(given: tuple[Keys, NDArray[np.float32]]) -> None:
            # As Replay.update_priorities does.
            self.store.update_priorities(given[0], np.abs(np.asarray(given[1], np.float64)) ** self._alpha)

        return [
            make(
                "geartrain steps",
                lambda: (some_steps(), self._raised(batch)),
                lambda given: self.store.update_priorities(*given),
            ),
            make("geartrain steps with alpha", lambda: (some_steps(), self._priorities(batch)), with_alpha),
        ]


def _nothing() -> None:
    return None


__all__ = ["ROW_STEPS", "NamedSteps"]
