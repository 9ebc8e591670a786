"""Episode recorder: writes the steps of an episode into rows of a store, in place, as they happen.

A row holds one episode, or a piece of it. Step t of it has the observation that was acted on, the action, the reward
that the action brought, and whether it ended the episode (`terminated`). The step after the last action has the
observation that it led to and nothing else; it is marked `last`. So a row of n actions has n + 1 steps, an observation
is stored once however many windows, frame stacks and n-step targets use it, and no window crosses episodes.

An episode that is longer than a row continues in the next one, which repeats `overlap` steps, so that stacks and
targets across the boundary are not lost.
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

#: Fields that a recorder fills by itself and needs; and those that it fills where the store has them.
REQUIRED_FIELDS = {"terminated": "bool", "last": "bool"}
OPTIONAL_FIELDS = ("step_version", "episode_return")


def recorded_fields(fields: Mapping[str, Field], **extras: Field) -> dict[str, Field]:
    """The fields of a store that an `EpisodeRecorder` writes to.

    Args:
        fields: of the environments: observation, action, reward (`VectorEnv.fields`).
        extras: what the policy returns with each action, such as log_prob=Field((), "float32").
    """
    return {
        **fields,
        **{name: Field((), dtype) for name, dtype in REQUIRED_FIELDS.items()},
        **extras,
    }


def check_fields(store: Store, values: Mapping[str, NDArray[Any]] | None = None, n: int = 1) -> None:
    """Checks that a store can record: it has the fields of `recorded_fields`, and those of a policy's values.

    Args:
        values: actions and extras of the policy for one step of n environments, (n, ...), by field.
        n: number of environments.

    Raises:
        FieldError: a field is missing, or its steps have another shape.
    """
    fields = store.fields
    missing = [name for name in (*REQUIRED_FIELDS, "reward") if name not in fields]
    if missing:
        raise FieldError(f"the store {store.name!r} lacks {', '.join(missing)}: use recorded_fields to make its fields")
    for name, array in (values or {}).items():
        if name not in fields:
            raise FieldError(
                f"the policy returns {name!r}, and the store {store.name!r} has no such field; it has "
                f"{', '.join(fields)}"
            )
        if array.shape != (n, *fields[name].shape):
            raise FieldError(
                f"the policy returns {name!r} with shape {array.shape} for {n} environments; the store has "
                f"{fields[name].shape} a step"
            )


class EpisodeRecorder:
    """Records the episodes of one environment, one after the other. Not thread-safe.

    Args:
        store: with the fields of `recorded_fields`; `step_version` (int64: the model's version at each step)
            and `episode_return` (float32, per_row: of the steps in this row) are filled where the store has them.
        publish_every: publish an unfinished row every so many steps, so that it can be sampled while its episode goes
            on. By default only finished rows can be.
        overlap: steps that the next row of a long episode repeats.
        priority: of new rows.
    """

    def __init__(
        self, store: Store, *, publish_every: int | None = None, overlap: int = 0, priority: float = 1.0
    ) -> None:
        check_fields(store)
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

    def begin(self, observation: Mapping[str, Any], version: int = 0, *, index: int | None = None) -> None:
        """Begins an episode. One that was not ended is kept as it is.

        Args:
            observation: the first one, by field.
            version: of the model that acts.
            index: the arrays are of n environments, and this is one of them.
        """
        self.cut()
        self._open(version)
        self._write_observation(0, observation, index)

    def step(
        self,
        values: Mapping[str, Any],
        observation: Mapping[str, Any],
        *,
        terminated: bool,
        truncated: bool,
        version: int = 0,
        index: int | None = None,
    ) -> Keys | None:
        """Records one step. Returns the row's key when that completes a row.

        Args:
            values: action, reward and the policy's extras, by field.
            observation: after the step, by field; in full, also at the end of an episode.
            terminated, truncated: the episode has ended by its rules, or was cut off.
            version: of the model that chose the action.
            index: the arrays of `values` and `observation` are of n environments, and this is one of them.
        """
        if self._row is None:
            raise SchemaError("no episode was begun: call begin(observation) first")
        at = self._steps
        for name, value in values.items():
            self._blocks[name][at] = value if index is None else value[index]
        self._blocks["terminated"][at] = terminated
        self._blocks["last"][at] = False
        if "step_version" in self._blocks:
            self._blocks["step_version"][at] = version
        self._return += float(np.mean(self._blocks["reward"][at]))
        self._steps = at + 1
        self._write_observation(at + 1, observation, index)
        if terminated or truncated:
            return self._close()
        if self._steps + 1 == self.store.max_length:
            return self._continue(version)
        self._publish()
        return None

    def cut(self) -> Keys | None:
        """Ends the episode here, as when the actor stops; its steps are kept."""
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

    def _write_observation(self, at: int, observation: Mapping[str, Any], index: int | None) -> None:
        """Writes step `at`: the observation, and zeros for what its action will bring."""
        for name in self._timed:
            if name in observation:
                self._blocks[name][at] = observation[name] if index is None else observation[name][index]
            else:
                self._blocks[name][at] = 0
        self._blocks["last"][at] = True

    def _publish(self) -> None:
        """Publishes the row up to the last step that has an action, if it is time to."""
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

    def _continue(self, version: int) -> Keys:
        """Commits a full row and continues the episode in the next one."""
        first, end = self._steps - self._overlap, self._steps + 1
        kept = {name: self._blocks[name][first:end].copy() for name in self._timed}  # once committed it may be evicted
        key = self._close()
        self._open(version)
        for name, steps in kept.items():
            self._blocks[name][: len(steps)] = steps
        self._steps = self._overlap
        return key


__all__ = ["OPTIONAL_FIELDS", "REQUIRED_FIELDS", "EpisodeRecorder", "check_fields", "recorded_fields"]
