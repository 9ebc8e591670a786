"""Steps of an episode, written straight into a store's rows as they happen.

A row holds a piece of one episode. Step t of it has the observation that was acted on, the action, the reward that the
action brought, and whether it ended the episode (`terminated`). The step behind the last action has the observation
that it led to and nothing else; it is marked `last`. So a row of n actions has n + 1 steps, an observation stands once
however many windows, frame stacks and n-step targets use it, and no window ever reaches into another episode.

An episode that is longer than a row goes on in the next one, which repeats `overlap` steps, so that stacks and targets
across the seam are not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.core.schema import Field
from geartrain.errors import FieldError, SchemaError
from geartrain.store.row import Row
from geartrain.store.store import Store

#: Fields that a recorder fills by itself where the store has them.
OWN_FIELDS = ("terminated", "last", "step_version", "episode_return")


def recorded_fields(fields: Mapping[str, Field], **extras: Field) -> dict[str, Field]:
    """The fields of a store that a `Recorder` writes to.

    Args:
        fields: an environment's: observation, action, reward (`Environments.fields`).
        extras: what the policy tells of each step beside its action, such as log_prob=Field((), "float32").
    """
    return {
        **fields,
        "terminated": Field((), "bool"),
        "last": Field((), "bool"),
        **extras,
    }


class Recorder:
    """One stream of episodes. Not for several threads.

    Args:
        store: with the fields of `recorded_fields`; `step_version` (int64: the model's version at each step)
            and `episode_return` (float32, per_row: of the steps in this row) are filled where the store has them.
        publish_every: let the row be selected while the episode goes on: every so many steps. Only whole rows by
            default.
        overlap: steps that the next row of a long episode repeats.
        priority: of new rows.
    """

    def __init__(
        self, store: Store, *, publish_every: int | None = None, overlap: int = 0, priority: float = 1.0
    ) -> None:
        missing = [name for name in ("terminated", "last", "reward") if name not in store.fields]
        if missing:
            raise FieldError(f"the store {store.name!r} lacks {', '.join(missing)}: make its fields by recorded_fields")
        if not 0 <= overlap < store.max_length - 1:
            raise SchemaError(f"overlap must be below the {store.max_length - 1} actions of a row, found {overlap}")
        if publish_every is not None and publish_every < 1:
            raise SchemaError(f"publish_every must be at least 1, found {publish_every}")
        self.store = store
        self.rows = 0
        self._publish_every = publish_every
        self._overlap = overlap
        self._priority = priority
        self._timed = [name for name, field in store.fields.items() if not field.per_row]
        self._row: Row | None = None
        self._blocks: dict[str, NDArray[Any]] = {}
        self._steps = 0  # actions in the row
        self._published = 0
        self._return = 0.0

    def begin(self, observation: Mapping[str, NDArray[Any]], version: int = 0) -> None:
        """The first observation of an episode, by field. An episode that was not ended is kept as it is."""
        self.cut()
        self._open(version)
        self._observe(0, observation)

    def step(
        self,
        values: Mapping[str, Any],
        observation: Mapping[str, NDArray[Any]],
        *,
        terminated: bool,
        truncated: bool,
        version: int = 0,
    ) -> Keys | None:
        """One step: what was done and got, and what it led to. Returns the row's key when that completes a row.

        Args:
            values: action, reward and the policy's extras, by field.
            observation: after the step, by field; in full, also at the end of an episode.
            terminated, truncated: the episode is over by its rules, or was cut off.
            version: of the model that chose the action.
        """
        if self._row is None:
            raise SchemaError("begin(observation) starts an episode")
        at = self._steps
        for name, value in values.items():
            self._blocks[name][at] = value
        self._blocks["terminated"][at] = terminated
        self._blocks["last"][at] = False
        if "step_version" in self._blocks:
            self._blocks["step_version"][at] = version
        self._return += float(np.mean(values["reward"]))
        self._steps = at + 1
        self._observe(at + 1, observation)
        if terminated or truncated:
            return self._close()
        if self._steps + 1 == self.store.max_length:
            return self._turn(version)
        self._tell()
        return None

    def cut(self) -> Keys | None:
        """Ends the episode here, as when the actor stops; steps that were taken stay."""
        if self._row is not None and self._steps == 0:
            self._row.abandon()
            self._row = None
        return None if self._row is None else self._close()

    # --- rows -------------------------------------------------------------------------------------------------

    def _open(self, version: int) -> None:
        row = self.store.row(priority=self._priority, version=version)
        self._row = row
        self._blocks = {name: row[name] for name in self._timed}
        self._steps = self._published = 0
        self._return = 0.0

    def _observe(self, at: int, observation: Mapping[str, NDArray[Any]]) -> None:
        """Writes an observation, with nothing beside it yet."""
        for name in self._timed:
            if name in observation:
                self._blocks[name][at] = observation[name]
            else:
                self._blocks[name][at] = 0
        self._blocks["last"][at] = True

    def _tell(self) -> None:
        """Lets the row be selected as far as it goes: up to the last step that has an action."""
        if self._publish_every is None or self._steps - self._published < self._publish_every:
            return
        assert self._row is not None
        if self._published:
            self._row.extend(self._steps)
        else:
            self._row.publish(length=self._steps)
        self._published = self._steps

    def _close(self) -> Keys:
        row = self._row
        assert row is not None
        self._row = None
        if self._published:
            row.extend(self._steps + 1)
        else:
            if "episode_return" in self.store.fields:
                row["episode_return"] = self._return
            row.length = self._steps + 1
        self.rows += 1
        return row.commit()

    def _turn(self, version: int) -> Keys:
        """The row is full: the episode goes on in the next one."""
        first, end = self._steps - self._overlap, self._steps + 1
        kept = {name: self._blocks[name][first:end].copy() for name in self._timed}  # once committed it may be evicted
        key = self._close()
        self._open(version)
        for name, steps in kept.items():
            self._blocks[name][: len(steps)] = steps
        self._steps = self._overlap
        return key


__all__ = ["OWN_FIELDS", "Recorder", "recorded_fields"]
