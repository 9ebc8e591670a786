"""Transitions: what DQN, SAC and their like train on, made of windows of recorded episodes.

    replay = gt.Replay(store, gt.selection.Uniform(over="steps"), 256, view=gt.Transitions(n_step=3, gamma=0.99))
    for batch in replay:
        target = batch["reward"] + batch["discount"] * value(batch["next_obs"])

Rows are laid out as a recorder writes them (geartrain/store/recorder.py): step t has the observation that was acted on,
the action, the reward that it brought, and `terminated`; the last step of a row has the observation that the last
action led to. A transition is a step that has a later one in its row, so nothing crosses an episode. With
m = min(n_step, steps that follow in the row):

    reward        sum of gamma ** k * reward[t + k] over k < m
    next_obs      obs[t + m]
    discount      gamma ** m, or 0 where the episode terminated on the way
    terminated    the last of the m actions ended the episode by its rules
    truncated     it was cut off there; in a store without the field `truncated`: its row ends there and the episode
                  did not terminate, also where it goes on in the next row

An observation is stored once: stacks of frames and the next observation are views of one gathered window, unless a row
ended within n_step steps somewhere in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_whole
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, FieldError
from geartrain.replay.batch import Batch
from geartrain.replay.fetch import FetchPlan
from geartrain.replay.native_batch import NativeBatch
from geartrain.selection.arguments import check_number
from geartrain.store.recorder import OBSERVATIONS
from geartrain.store.store import Store

#: Fields that a transition is made of, apart from observations; and those that are not handed out.
_REWARD, _TERMINATED, _TRUNCATED, _LAST = "reward", "terminated", "truncated", "last"


@dataclass(frozen=True)
class Transitions:
    """A view of recorded episodes as transitions, for `Replay(view=...)`.

    A batch has, for every observation field `obs`, `obs` and `next_obs`, both (B, ...), or (B, frame_stack, ...) with
    frame_stack above 1, oldest first; `reward` and `discount`, float32; `terminated` and `truncated`, bool; and every
    other field as it was at the transition's step. `batch.start` is that step, `batch.mask` (B, frame_stack) says which
    frames of `obs` are real: those before a row's first are zero.

    Args:
        n_step: rewards that are summed up, and steps to the next observation. Fewer at the end of a row.
        gamma: discount of a step, from 0 to 1.
        frame_stack: observations in a stack.
        observations: fields that are observations; by default those called "observation" or "obs", alone or before a
            dot.

    Raises:
        ArgumentError: numbers that mean nothing.

    Example:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> from geartrain.store.recorder import recorded_fields
        >>> fields = recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
        >>> store = gt.Store.create(fields, max_length=10, capacity=8)
        >>> with store.recorder(autoreset="disabled") as recorder:
        ...     recorder.reset(np.zeros(1))
        ...     for t in range(1, 6):
        ...         _ = recorder.step(np.full(1, t), reward=1.0, terminated=t == 5, truncated=False)
        >>> view = gt.Transitions(n_step=3, gamma=0.5)
        >>> with gt.Replay(store, gt.selection.Uniform(seed=0, over="steps"), 4, view=view, output="numpy") as replay:
        ...     batch = replay.sample()
        >>> steps = batch.start
        >>> np.array_equal(batch["next_obs"][:, 0], np.minimum(steps + 3, 5))
        True
        >>> np.array_equal(batch["discount"], np.where(steps + 3 < 5, 0.125, 0))
        True
        >>> store.close()
    """

    n_step: int = 1
    gamma: float = 0.99
    frame_stack: int = 1
    observations: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for what, value in (("n_step", self.n_step), ("frame_stack", self.frame_stack)):
            if check_whole(what, value) < 1:
                raise ArgumentError(f"{what} must be at least 1, found {value}")
        check_number("gamma", self.gamma, "from 0 to 1", least=0)
        if not self.gamma <= 1:
            raise ArgumentError(f"gamma must be from 0 to 1, found {self.gamma}")
        if isinstance(self.observations, str):
            object.__setattr__(self, "observations", (self.observations,))
        elif self.observations is not None:
            names = self.observations
            if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
                raise ArgumentError(f"observations is a list of names of fields, found {names!r}")

    @property
    def window(self) -> int:
        """Steps that are gathered for a transition."""
        return self.n_step + self.frame_stack

    def observations_in(self, fields: Mapping[str, Field]) -> list[str]:
        """The observation fields of a store."""
        if self.observations is None:
            return [name for name in fields if name.partition(".")[0] in OBSERVATIONS]
        return list(self.observations)

    def fields_of(self, store: Store, asked: Sequence[str] | None) -> list[str]:
        """The fields that are gathered for a batch.

        Args:
            asked: the caller's own choice of observations and other fields; None for all.

        Raises:
            FieldError: the store lacks what a transition is made of.
            ArgumentError: rows are too short for n_step.
        """
        fields = store.fields
        observations = self.observations_in(fields)
        wanted = [_REWARD, _TERMINATED, *(observations or OBSERVATIONS[:1]), *(asked or ())]
        missing = [name for name in dict.fromkeys(wanted) if name not in fields]
        if missing:
            raise FieldError(
                f"transitions need {', '.join(map(repr, missing))}, and the store {store.name!r} has "
                f"{', '.join(fields)}; geartrain.store.recorder.recorded_fields makes what is needed"
            )
        for name in (_REWARD, _TERMINATED, *observations):
            if fields[name].per_row:
                raise FieldError(f"{name!r} of the store {store.name!r} is per_row; transitions need it at every step")
        if fields[_TERMINATED] != Field((), "bool"):
            raise FieldError(f"'terminated' must be a bool a step, the store {store.name!r} has {fields[_TERMINATED]}")
        for name in (_TRUNCATED, _LAST):
            if name in fields and fields[name] != Field((), "bool"):
                raise FieldError(f"{name!r} must be a bool a step, the store {store.name!r} has {fields[name]}")
        if fields[_REWARD].dtype not in ("float16", "float32", "float64") and "int" not in fields[_REWARD].dtype:
            raise FieldError(f"rewards are real numbers that NumPy has, found {fields[_REWARD].dtype}")
        if self.n_step >= store.max_length:
            raise ArgumentError(
                f"n_step={self.n_step} needs rows of at least {self.n_step + 1} steps, those of {store.name!r} have "
                f"{store.max_length} at most"
            )
        clash = [name for name in (*self._made(observations), "discount") if name in fields]
        if clash:
            raise FieldError(f"the store's fields {clash} have the names of what transitions make")
        names = list(asked) if asked is not None else [name for name in fields if name != _LAST]
        ends = [name for name in (_TRUNCATED, _LAST) if name in fields][:1]
        return list(dict.fromkeys([*names, _REWARD, _TERMINATED, *ends]))

    def batch(self, native: NativeBatch, plan: FetchPlan) -> Batch:
        """The transitions of a batch of windows, which end `n_step` steps after theirs or with the row."""
        rows = native.native
        fields = plan.store.fields
        observations = [name for name in self.observations_in(fields) if name in plan.places]
        step, length = rows.start(), rows.length()
        count = np.minimum(self.n_step, length - 1 - step)  # rewards summed up
        whole = bool((count == self.n_step).all())
        at = self.window - 1 - count  # of the transition's step in the window
        every = np.arange(len(step))
        frames = None if whole else at[:, None] + np.arange(1 - self.frame_stack, 1)

        def of_step(array: NDArray[Any]) -> NDArray[Any]:
            return array[:, self.frame_stack - 1] if whole else array[every, at]

        made: dict[str, Any] = {}
        for name in plan.names:
            array = rows.field(plan.places[name])
            if name in observations and self.frame_stack == 1:
                made[name] = plan.as_field(name, of_step(array))
                made["next_" + name] = plan.as_field(name, array[:, -1])
            elif name in observations:
                stack = array[:, : self.frame_stack] if whole else array[every[:, None], frames]
                made[name] = plan.as_field(name, stack)
                made["next_" + name] = plan.as_field(name, array[:, -self.frame_stack :])
            elif name in (_REWARD, _TERMINATED, _TRUNCATED, _LAST):
                continue
            else:
                made[name] = plan.as_field(name, array if fields[name].per_row else of_step(array))
        terminated = rows.field(plan.places[_TERMINATED])[:, -2].copy()
        if _TRUNCATED in plan.places:
            truncated = rows.field(plan.places[_TRUNCATED])[:, -2].copy()
        else:
            ends = rows.field(plan.places[_LAST])[:, -1] if _LAST in plan.places else step + count == length - 1
            truncated = ends & ~terminated
        powers = self._powers()
        made[_REWARD] = self._sums(rows.field(plan.places[_REWARD]), count)
        made["discount"] = np.where(terminated, np.float32(0), powers[count])
        made[_TERMINATED], made[_TRUNCATED] = terminated, truncated
        mask = rows.mask()
        mask = mask[:, : self.frame_stack] if whole else mask[every[:, None], frames]
        for name in (_REWARD, "discount", _TERMINATED, _TRUNCATED):
            made[name] = plan.as_output(made[name])
        return Batch(
            made,
            native.keys,
            plan.as_output(mask),
            native.start,
            native.length,
            native.version,
            native.probability,
            native.importance_weights,
            native.step,
        )

    def _sums(self, rewards: NDArray[Any], count: NDArray[np.int32]) -> NDArray[np.float32]:
        """Discounted sums of the `count` rewards before each window's last step."""
        n, powers = self.n_step, self._powers()
        factors = np.zeros((n + 1, n), np.float32)
        for m in range(n + 1):
            factors[m, n - m :] = powers[:m]
        given = rewards[:, -n - 1 : -1].astype(np.float32, copy=False)
        shape = (*given.shape[:2], *(1 for _ in given.shape[2:]))
        if (count < n).any():  # rewards of steps before the transition may be anything: inf * 0 is NaN
            given = np.where((np.arange(n) >= n - count[:, None]).reshape(shape), given, np.float32(0))
        sums: NDArray[np.float32] = (given * factors[count].reshape(shape)).sum(1, dtype=np.float32)
        return sums

    def _powers(self) -> NDArray[np.float32]:
        return (float(self.gamma) ** np.arange(self.n_step + 1)).astype(np.float32)

    @staticmethod
    def _made(observations: Sequence[str]) -> list[str]:
        return ["next_" + name for name in observations]


__all__ = ["Transitions"]
