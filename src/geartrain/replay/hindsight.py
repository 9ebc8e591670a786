"""Hindsight experience replay (Andrychowicz et al., 2017): relabels goals of transitions with goals achieved later.

    view = gt.Transitions(hindsight=gt.Hindsight(strategy="future", k=4, reward=env_reward))

A transition of step t leads to step t + 1. On average k of k + 1 transitions get a new desired goal. The new goal is
the achieved goal of a step s of the same row:

    future    s uniform over t + 1 .. length - 1
    final     s = length - 1
    episode   s uniform over 1 .. length - 1

`length` is the number of steps that are published when the row is read. One native call draws s with the transition and
gathers both (native/fetch/transitions.h). If the row is replaced meanwhile, the whole transition is drawn again. So no
transition has a goal of another episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.arguments import (
    Options,
    check_array,
    check_choice,
    check_function,
    check_text,
    check_whole,
    checked,
)
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, FieldError

GoalStrategy = Literal["future", "final", "episode"]
#: Given the achieved goals and the desired ones (N, ...), a value for each, (N,).
GoalFunction = Callable[[NDArray[Any], NDArray[Any]], ArrayLike]
#: native/fetch/transitions.h, GoalStrategy.
_STRATEGIES: dict[str, int] = {"future": 1, "final": 2, "episode": 3}
_ACHIEVED, _DESIRED = "achieved_goal", "desired_goal"
#: What a batch says of each transition: whether its goal was replaced.
RELABELLED = "relabelled"
_OF_GOALS = checked(check_function, "a function of achieved and desired goals")


@dataclass(frozen=True)
class Hindsight(Options):
    """Hindsight experience replay: replaces goals of transitions by goals that the same row achieved.

    Pass it to `Transitions(hindsight=...)`. Each transition is relabelled with probability k / (k + 1). Its desired
    goal, in `obs` and `next_obs`, becomes an achieved one, and its reward becomes `reward(achieved, desired)` of the
    next observation's achieved goal and the new desired one. `batch["relabelled"]`, (B,) bool, says which transitions
    changed. The choice follows from seed, step and draw.

    Args:
        strategy: step whose achieved goal is taken: "future" any later one of the row, "final" the row's last,
            "episode" any but the first.
        k: relabelled transitions for each unchanged one; 0 relabels none.
        reward: function of the achieved and the desired goals of the relabelled transitions, NumPy arrays (N, ...),
            that returns (N,). It runs where batches are built, usually on the prefetch thread. For Gymnasium pass
            `lambda achieved, desired: env.unwrapped.compute_reward(achieved, desired, {})`.
        terminated: a function like `reward`, for whether the transition ended its episode; `discount` follows. By
            default both stay as recorded, which is right if reaching the goal ends nothing.
        achieved_goal, desired_goal: the two observation fields, of one shape and dtype; by default those of these
            names, alone or after a dot, as in "observation.achieved_goal".

    Raises:
        ArgumentError: an argument is out of range.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> goals = {f"obs.{name}": gt.Field((1,), "float32") for name in ("achieved_goal", "desired_goal")}
        >>> fields = gt.recorded_fields({**goals, "reward": gt.Field((), "float32")})
        >>> store = gt.Store.create(fields, max_length=10, capacity=8)
        >>> with store.recorder(autoreset="disabled") as recorder:
        ...     recorder.reset({"achieved_goal": np.zeros((1, 1)), "desired_goal": np.full((1, 1), 99)})
        ...     for t in range(1, 6):
        ...         there = {"achieved_goal": np.full((1, 1), t), "desired_goal": np.full((1, 1), 99)}
        ...         _ = recorder.step(there, reward=-1.0, terminated=False, truncated=t == 5)
        >>> hindsight = gt.Hindsight("final", reward=lambda achieved, desired: (achieved == desired)[:, 0] - 1.0)
        >>> view = gt.Transitions(hindsight=hindsight)
        >>> with gt.Replay(store, gt.selection.Uniform(seed=0, over="steps"), 64, view=view, output="numpy") as replay:
        ...     batch = replay.sample()
        >>> np.array_equal(batch["obs.desired_goal"][:, 0], np.where(batch["relabelled"], 5, 99))
        True
        >>> np.array_equal(batch["reward"] == 0, batch["relabelled"] & (batch.start == 4))
        True
        >>> store.close()
    """

    strategy: GoalStrategy = field(default="future", metadata=checked(check_choice, _STRATEGIES))
    k: int = field(default=4, metadata=checked(check_whole, 0, 2**31 - 1))
    _: KW_ONLY
    reward: GoalFunction = field(metadata=_OF_GOALS)
    terminated: GoalFunction | None = field(default=None, metadata=_OF_GOALS)
    achieved_goal: str | None = field(default=None, metadata=checked(check_text))
    desired_goal: str | None = field(default=None, metadata=checked(check_text))

    def goals_in(self, fields: Mapping[str, Field], observations: list[str]) -> tuple[str, str]:
        """Names of the fields of achieved and of desired goals.

        Args:
            fields: the store's fields.
            observations: names of the observation fields.

        Raises:
            FieldError: there are no such fields, or their shapes or dtypes differ.
        """
        names = []
        for given, ending in ((self.achieved_goal, _ACHIEVED), (self.desired_goal, _DESIRED)):
            found = [name for name in observations if name.rpartition(".")[2] == ending] if given is None else [given]
            if len(found) != 1 or found[0] not in observations:
                raise FieldError(
                    f"hindsight needs exactly one observation field of {ending.replace('_', ' ')}s, found "
                    f"{found or 'none'} among the observations {observations}; name it with "
                    f"Hindsight({ending}=...)"
                )
            names += found
        achieved, desired = names
        if achieved == desired or fields[achieved] != fields[desired]:
            raise FieldError(
                f"achieved and desired goals are two fields of one shape and dtype, found {achieved!r} "
                f"{fields[achieved]} and {desired!r} {fields[desired]}"
            )
        return achieved, desired


class Relabeller:
    """Rewards and ends of the transitions of a batch that have other goals.

    Args:
        hindsight: what is replaced.
        gamma: discount of a step.
        stacked: whether observations are stacks, of which the last frame counts.
        arrays: places of `next_` achieved goals, desired goals, reward, discount, terminated and relabelled in a batch.
        show: makes of a goal field's stored array one of its dtype.
    """

    def __init__(
        self,
        hindsight: Hindsight,
        gamma: float,
        stacked: bool,
        arrays: Mapping[str, int],
        show: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> None:
        self._hindsight = hindsight
        self._gamma = np.float32(gamma)
        self._stacked = stacked
        self._arrays = arrays
        self._show = show

    def relabel(self, batch: _native.SampledBatch) -> None:
        """Sets what follows from the goals.

        Raises:
            ArgumentError: `reward` or `terminated` returned something else than a number for each transition.
        """
        which = np.flatnonzero(batch.field(self._arrays[RELABELLED]))
        if not len(which):
            return
        achieved, desired = (self._goals(batch, name, which) for name in ("achieved", "desired"))
        hindsight = self._hindsight
        batch.field(self._arrays["reward"])[which] = _values("reward", hindsight.reward(achieved, desired), len(which))
        if hindsight.terminated is not None:
            ended = _values("terminated", hindsight.terminated(achieved, desired), len(which)).astype(bool)
            batch.field(self._arrays["terminated"])[which] = ended
            batch.field(self._arrays["discount"])[which] = np.where(ended, np.float32(0), self._gamma)

    def _goals(self, batch: _native.SampledBatch, name: str, which: NDArray[np.intp]) -> NDArray[Any]:
        array = self._show(batch.field(self._arrays[name]))
        return array[which, -1] if self._stacked else array[which]


def _values(what: str, given: ArrayLike, n: int) -> NDArray[Any]:
    try:
        values = np.asarray(given)
        numbers = values.astype(np.float64) if values.dtype.kind == "O" else values
    except (TypeError, ValueError, RuntimeError):  # torch's for a tensor that requires a gradient
        raise ArgumentError(f"Hindsight's {what} returns (N,) numbers, found {type(given).__name__}") from None
    rule = f"Hindsight's {what} returns (N,) numbers, one for each of {n} transitions"
    return check_array(rule, numbers, (n,))  # type: ignore[no-any-return]


def native_goals(
    hindsight: Hindsight | None, names: list[str], goals: tuple[str, str] | None
) -> tuple[int, int, int, int]:
    """Strategy, k, and the places of the goals among a batch's fields, as the native view takes them."""
    if hindsight is None or goals is None:
        return (0, 0, 0, 0)
    return (_STRATEGIES[hindsight.strategy], hindsight.k, names.index(goals[0]), names.index(goals[1]))


__all__ = ["RELABELLED", "GoalFunction", "GoalStrategy", "Hindsight", "Relabeller", "native_goals"]
