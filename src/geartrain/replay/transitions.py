"""`Transitions`: n-step transitions out of recorded episodes, to train DQN, SAC and similar algorithms.

    replay = gt.Replay(store, gt.selection.Uniform(over="steps"), 256, view=gt.Transitions(n_step=3, gamma=0.99))
    for batch in replay:
        target = batch["reward"] + batch["discount"] * value(batch["next_obs"])

Rows have the layout of a recorder (geartrain/store/recorder.py). Step t has the observation before the action, the
action, its reward, and `terminated`. The last step of a row has the observation after the last action.

Every step but the last of a row is a transition, so no transition crosses an episode. With
m = min(n_step, steps that follow in the row):

    reward        sum of gamma ** k * reward[t + k] over k < m
    next_obs      obs[t + m]
    discount      gamma ** m, or 0 if the episode terminated within these m actions
    terminated    the last of the m actions terminated the episode
    truncated     the last of the m actions truncated the episode

If the store has no field `truncated`, a transition at the end of a row counts as truncated unless the episode
terminated. That includes an episode that continues in the next row.

Each observation is stored once. One native call gathers a batch and reads only the steps it needs
(native/fetch/transitions.h). With n_step=1 the stacked frames of `obs` and `next_obs` are views of one window.
Otherwise each array is contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.core.arguments import (
    Options,
    check_names_of,
    check_real,
    check_type,
    check_whole,
    checked,
    did_you_mean,
    leave_out,
)
from geartrain.core.dtypes import DTYPES, numpy_dtype
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, FieldError
from geartrain.replay.fetch_plan import BatchFields, FetchPlan
from geartrain.replay.hindsight import RELABELLED, Hindsight, Relabeller, native_goals
from geartrain.store.recorder import OBSERVATIONS, REPEATS
from geartrain.store.store import Store

#: Fields that a transition is made of, apart from observations; and those that are not handed out.
_REWARD, _TERMINATED, _TRUNCATED, _LAST = "reward", "terminated", "truncated", "last"
_DISCOUNT = "discount"
#: native/fetch/transitions.h, TransitionRole; an observation has 1, any other field 0.
_ROLES = {_REWARD: 2, _TERMINATED: 3, _TRUNCATED: 4, _LAST: 5}


@dataclass(frozen=True)
class Transitions(Options):
    """A view of recorded episodes as transitions, for `Replay(view=...)`: n-step returns and frame stacks.

    | in the batch | shape and dtype |
    |---|---|
    | `obs`, `next_obs`, for each observation field | (B, ...), or (B, frame_stack, ...), oldest first |
    | `reward`, `discount` | (B,) float32 |
    | `terminated`, `truncated` | (B,) bool |
    | every other field | as recorded at the transition's step |
    | `batch.start` | (B,) the transition's step |
    | `batch.mask` | (B, frame_stack) which frames of `obs` are real; frames before the row's first are zero |

    If rows repeat steps (`recorder(overlap=k)`), each step is drawn from only one row: the one that has its whole frame
    stack and n-step sum. k must be at least frame_stack - 1 + n_step - 1.

    Args:
        n_step: rewards that are summed, and steps to the next observation; fewer at the end of a row.
        gamma: discount of one step, 0 to 1.
        frame_stack: observations in a stack.
        obs: fields that are observations; by default those called "observation" or "obs", alone or before a
            dot.
        hindsight: goals that replace those of some transitions; see `Hindsight`. Needs n_step=1.

    Raises:
        ArgumentError: an argument is out of range.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> fields = gt.recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
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

    n_step: int = field(default=1, metadata=checked(check_whole, 1))
    gamma: float = field(default=0.99, metadata=checked(check_real, 0, 1))
    frame_stack: int = field(default=1, metadata=checked(check_whole, 1))
    obs: Sequence[str] | None = field(default=None, metadata=checked(check_names_of))
    hindsight: Hindsight | None = None

    def __post_init__(self) -> None:
        if isinstance(self.obs, str):
            object.__setattr__(self, "obs", (self.obs,))
        super().__post_init__()
        if check_type("hindsight is a geartrain.Hindsight", self.hindsight, Hindsight | None) is not None:
            several = self.n_step != 1 and self.n_step
            leave_out("hindsight gives single steps other rewards, and an n-step sum has several", n_step=several)

    @property
    def window(self) -> int:
        """Steps that are gathered for one transition."""
        return self.n_step + self.frame_stack

    @property
    def needs(self) -> tuple[int, int, int]:
        """Steps that a transition needs before its step, and from it on, where rows repeat steps; and 0."""
        return self.frame_stack - 1, self.n_step, 0

    def observations_in(self, fields: Mapping[str, Field]) -> list[str]:
        """Names of a store's observation fields.

        Args:
            fields: the store's fields.
        """
        if self.obs is None:
            return [name for name in fields if name.partition(".")[0] in OBSERVATIONS]
        return list(self.obs)

    def fields_of(self, store: Store, asked: Sequence[str] | None) -> list[str]:
        """Names of the fields that are gathered for a batch.

        Args:
            store: store of the rows.
            asked: the caller's choice of observations and other fields; None for all.

        Raises:
            FieldError: the store lacks a field that transitions need.
            ArgumentError: rows are too short for n_step.
        """
        fields = store.fields
        obs = self.observations_in(fields)
        wanted = [_REWARD, _TERMINATED, *(obs or OBSERVATIONS[:1]), *(asked or ())]
        made = [*self._made(obs), _DISCOUNT]
        missing = [name for name in dict.fromkeys(wanted) if name not in fields]
        if missing:
            raise FieldError(
                f"transitions need {', '.join(map(repr, missing))}, but the store {store.name!r} has "
                f"{', '.join(fields)}: create its fields with geartrain.recorded_fields{did_you_mean(missing, fields)}"
            )
        for name in (_REWARD, _TERMINATED, *obs):
            if fields[name].per_row:
                raise FieldError(f"{name!r} of the store {store.name!r} is per_row; transitions need it at every step")
        for name in (_TERMINATED, _TRUNCATED, _LAST):
            if name in fields and fields[name] != Field((), "bool"):
                raise FieldError(f"{name!r} must be a bool a step, the store {store.name!r} has {fields[name]}")
        if fields[_REWARD].dtype not in ("float16", "float32", "float64") and "int" not in fields[_REWARD].dtype:
            raise FieldError(f"rewards are real numbers that NumPy has, found {fields[_REWARD].dtype}")
        if self.n_step >= store.max_length:
            raise ArgumentError(
                f"n_step={self.n_step} needs rows of at least {self.n_step + 1} steps, but {store.name!r} has "
                f"max_length={store.max_length}"
            )
        goals: tuple[str, ...] = ()
        if self.hindsight is not None:
            if fields[_REWARD].shape != ():
                raise FieldError(
                    f"hindsight gives one reward a transition; {_REWARD!r} has the shape {fields[_REWARD].shape}"
                )
            goals = self.hindsight.goals_in(fields, obs)
            made.append(RELABELLED)
        clash = [name for name in made if name in fields]
        if clash:
            raise FieldError(f"the store's fields {clash} have names that transitions use themselves: rename them")
        shown = [name for name in fields if name != _LAST and not name.startswith(REPEATS)]
        names = shown if asked is None else list(asked)
        ends = [name for name in (_TRUNCATED, _LAST) if name in fields][:1]
        return list(dict.fromkeys([*names, *goals, _REWARD, _TERMINATED, *ends]))

    @staticmethod
    def _made(obs: Sequence[str]) -> list[str]:
        return ["next_" + name for name in obs]


class TransitionPlan(BatchFields):
    """What a batch of transitions is made of and what its arrays are called, for the native call and for its batches.

    Args:
        view: the transitions.
        plan: the fields that are gathered, and the kind of arrays.
    """

    def __init__(self, view: Transitions, plan: FetchPlan) -> None:
        fields = plan.store.fields
        obs = view.observations_in(fields)
        roles, shown = [], dict[str, str]()
        for name in plan.names:
            role = 1 if name in obs else _ROLES.get(name, 0)
            roles.append(role)
            if role <= 1:
                shown[name] = fields[name].dtype
            if role == 1:
                shown["next_" + name] = fields[name].dtype
        shown |= {_REWARD: "float32", _DISCOUNT: "float32", _TERMINATED: "bool", _TRUNCATED: "bool"}
        hindsight, goals = view.hindsight, None
        if hindsight is not None:
            goals = hindsight.goals_in(fields, obs)
            shown[RELABELLED] = "bool"
        powers = float(view.gamma) ** np.arange(view.n_step + 1)
        self.view = view
        self._roles = roles
        self._together = view.n_step == 1 and view.frame_stack > 1
        self.native = _native.TransitionView(
            view.n_step, view.frame_stack, powers.tolist(), roles, native_goals(hindsight, list(plan.names), goals)
        )
        super().__init__(list(shown), shown, plan.output)
        self.per_step = plan.per_step
        self._plan = plan
        self._relabeller: Relabeller | None = None
        if hindsight is not None and goals is not None and hindsight.k:
            places = {name: self.places[name] for name in (_REWARD, _DISCOUNT, _TERMINATED, RELABELLED)}
            places |= {"achieved": self.places["next_" + goals[0]], "desired": self.places["next_" + goals[1]]}
            dtype = numpy_dtype(DTYPES[shown[goals[0]]])
            self._relabeller = Relabeller(
                hindsight, view.gamma, view.frame_stack > 1, places, lambda array: array.view(dtype)
            )

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The arrays that a batch is gathered into, in their order: shape of a row and dtype as stored, by name.

        With n_step=1 a stack and the next one are parts of one array of frame_stack + 1 frames.
        """
        store, view = self._plan.store, self.view
        made: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for name, role in zip(self._plan.names, self._roles, strict=True):
            if role > 1:
                continue
            shape, dtype = store.fields[name].shape, store.column(name).dtype
            if role == 0:
                made[name] = shape, dtype
            elif self._together:
                made[name] = (view.frame_stack + 1, *shape), dtype
            else:
                stack = (view.frame_stack, *shape) if view.frame_stack > 1 else shape
                made[name] = made["next_" + name] = stack, dtype
        made[_REWARD] = store.fields[_REWARD].shape, np.dtype(np.float32)
        made[_DISCOUNT] = (), np.dtype(np.float32)
        flags = [_TERMINATED, _TRUNCATED, *([RELABELLED] if RELABELLED in self.places else [])]
        return made | dict.fromkeys(flags, ((), np.dtype(np.bool_)))

    def settle(self, batch: _native.SampledBatch) -> None:
        """What is left to do with a batch that was gathered: rewards of other goals."""
        if self._relabeller is not None:
            self._relabeller.relabel(batch)

    @property
    def callbacks(self) -> list[str]:
        """The user's functions that `settle` asks, by name."""
        if self._relabeller is None or self.view.hindsight is None:
            return []
        return ["Hindsight.reward", *(["Hindsight.terminated"] if self.view.hindsight.terminated is not None else [])]


__all__ = ["TransitionPlan", "Transitions"]
