"""Episode recorder: records one environment's episodes, one step a call, through a store's `StepRecorder`.

geartrain/store/recorder.py describes the layout of rows. For many environments that are stepped together use
`Store.recorder`, as `Actor` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.remote_store import RemoteStore
from geartrain.core.arguments import check_type, check_unmasked, shown
from geartrain.core.dtypes import DTYPES
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, FieldError, SchemaError
from geartrain.store.recorder import OPTIONAL_FIELDS, REQUIRED_FIELDS, StepRecorder, recorded_fields, unfilled_fields
from geartrain.store.store import Store


def check_fields(store: Store | RemoteStore, values: Mapping[str, NDArray[Any]] | None = None, n: int = 1) -> None:
    """Checks that a store can record: it has the fields of `recorded_fields`, and those of a policy's values.

    Args:
        values: actions and extras of the policy for one step of n environments, (n, ...), by field.
        n: number of environments.

    Raises:
        FieldError: a field is missing, or its steps have another shape or kind of numbers.
    """
    check_type("episodes are recorded in a Store, or in the RemoteStore of a peer", store, Store | RemoteStore)
    fields = store.fields
    missing = [name for name in (*REQUIRED_FIELDS, "reward") if name not in fields]
    if missing:
        raise FieldError(f"the store {store.name!r} lacks {', '.join(missing)}: use recorded_fields to make its fields")
    for name, array in (values or {}).items():
        if name not in fields:
            raise FieldError(
                f"the policy returns {name!r}, but the store {store.name!r} has no such field; it has "
                f"{', '.join(fields)}"
            )
        field = fields[name]
        known = DTYPES[field.dtype].numpy_name is not None  # else the recorder converts it
        if array.shape != (n, *field.shape) or (known and not np.can_cast(array.dtype, field.numpy_dtype, "same_kind")):
            raise FieldError(
                f"the policy returns {name!r} as {array.dtype} of shape {array.shape} for {n} environments; the store "
                f"{store.name!r} takes {field.dtype} of shape {(n, *field.shape)}"
            )


def absent_values(store: Store | RemoteStore, given: Collection[str], n: int) -> dict[str, NDArray[Any]]:
    """Zeros for the fields of n environments' steps that neither `given` has nor a recorder fills by itself."""
    automatic = {*REQUIRED_FIELDS, *OPTIONAL_FIELDS, *given}
    raw = {name: DTYPES[field.dtype] for name, field in store.fields.items()}
    return {
        name: np.zeros((n, *field.shape), raw[name].numpy_name or f"uint{8 * raw[name].itemsize}")
        for name, field in store.fields.items()
        if not field.per_row and name not in automatic
    }


class EpisodeRecorder:
    """Records the episodes of one environment, one after the other. Not thread-safe.

    Args:
        store: store with the fields of `recorded_fields`. If it has `step_version` (int64) and `episode_return`
            (float32, per_row), they are filled with the model's version at each step and the sum of the row's rewards.
        publish_every: make an unfinished row available for sampling every this many steps. By default only finished
            rows are.
        overlap: steps that the next row of a long episode repeats.
        priority: priority of new rows.

    Examples:
        >>> import geartrain as gt
        >>> fields = gt.recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
        >>> store = gt.Store.create(fields, max_length=10, capacity=4)
        >>> recorder = EpisodeRecorder(store)
        >>> recorder.begin({"obs": [0.0]})
        >>> key = recorder.step({"reward": 1.0}, {"obs": [1.0]}, terminated=True, truncated=False)
        >>> store.status(key)["length"].tolist()
        [2]
        >>> store.close()
    """

    def __init__(
        self, store: Store, *, publish_every: int | None = None, overlap: int = 0, priority: float | None = None
    ) -> None:
        check_fields(store)
        self.store = store
        self._options: dict[str, Any] = {"publish_every": publish_every, "overlap": overlap, "priority": priority}
        self._steps: StepRecorder | None = None
        self._absent: dict[str, NDArray[Any]] = {}  # zeros, for fields that nobody gives
        self._recorder(list(absent_values(store, [], 1)))  # refuses numbers that do not fit the store right now

    @property
    def rows(self) -> int:
        """Number of rows completed so far."""
        return 0 if self._steps is None else self._steps.rows

    def begin(self, obs: Mapping[str, Any], version: int = 0, *, index: int | None = None) -> None:
        """Begins an episode. An unfinished one is ended and kept.

        Args:
            obs: the first observation, by field.
            version: version of the model that acts.
            index: if given, the arrays are of n environments and this is the index of the recorded one.

        Raises:
            ArgumentError: an observation is missing.
        """
        check_type("an observation is a dict of arrays by field", obs, Mapping)
        if self._steps is None or set(self._steps.obs) != set(obs):
            if self._steps is not None:
                self._steps.cut()
            self._steps = self._recorder(list(obs))
        self._steps.reset(self._taken(obs, index), version=version)

    def step(
        self,
        values: Mapping[str, Any],
        obs: Mapping[str, Any],
        *,
        terminated: bool,
        truncated: bool,
        version: int = 0,
        index: int | None = None,
    ) -> Keys | None:
        """Records one step; returns the row's key if that completes a row.

        Args:
            values: action, reward and the policy's extras, by field; missing ones are zero.
            obs: all observation fields after the step, also at the end of an episode.
            terminated: the episode ended by its own rules.
            truncated: the episode was cut off.
            version: version of the model that chose the action.
            index: if given, the arrays are of n environments and this is the index of the recorded one.

        Raises:
            SchemaError: no episode was begun, or a value does not fit its field.
        """
        if self._steps is None or not self._steps.in_episode(0):
            raise SchemaError("no episode was begun: call begin(obs) first")
        return self._steps.record(
            self._taken(obs, index),
            {**self._absent, **self._taken(values, index)},
            terminated if terminated.__class__ is bool else _flag("terminated", terminated),
            truncated if truncated.__class__ is bool else _flag("truncated", truncated),
            version=version,
        )

    def cut(self) -> Keys | None:
        """Ends the episode and keeps its steps, for example when the actor stops."""
        return None if self._steps is None else self._steps.cut()

    def discard(self) -> Keys | None:
        """Takes back the episode in progress or, until the next `begin`, the last one.

        `StepRecorder.discard` says what that means.

        Raises:
            LockTimeoutError: another process holds the store's lock. Call `discard` again.
        """
        return None if self._steps is None else self._steps.discard(0)

    def _taken(self, arrays: Mapping[str, Any], index: int | None) -> dict[str, Any]:
        """One environment's values in the shapes and dtypes of the store: as an assignment to a NumPy array has it."""
        if arrays.__class__ is not dict and not isinstance(arrays, Mapping):
            raise ArgumentError(f"a step's values and its observation are dicts by field, found {shown(arrays)}")
        made: dict[str, Any] = {}
        for name, array in arrays.items():
            try:
                value = array if index is None else array[index]
            except (TypeError, IndexError, KeyError, ValueError, OverflowError, RuntimeError):
                raise SchemaError(
                    f"{name!r} is to be an array of several environments, and has no {shown(index)}"
                ) from None
            if value.__class__ is not np.ndarray:
                check_unmasked(f"{name!r}", value)
            field, found = self.store.fields.get(name), getattr(value, "dtype", None)
            if field is not None and DTYPES[field.dtype].numpy_name is not None and not hasattr(value, "detach"):
                try:
                    if found is None or found != field.numpy_dtype:
                        value = _converted(np.asarray(value), field.numpy_dtype)
                    if value.shape != field.shape:
                        value = np.broadcast_to(value, field.shape)
                except (TypeError, ValueError, OverflowError) as error:
                    raise SchemaError(
                        f"{name!r} takes {field.dtype} {field.shape} a step, found {shown(value)}: {error}"
                    ) from None
            made[name] = value
        return made

    def _recorder(self, obs: list[str]) -> StepRecorder:
        zeros = unfilled_fields(self.store.fields)  # as the steps' fields that nobody gives
        made = self.store.recorder(1, obs=obs, autoreset="disabled", zeros=zeros, **self._options)
        self._absent = absent_values(self.store, obs, 1)
        return made


def _flag(what: str, value: Any) -> bool:
    """An end-of-episode flag as a bool. Accepts any single number that equals 0 or 1."""
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.kind in "biuf" and array.size == 1 and array.item() in (0, 1):
            return bool(array.item())
    except (TypeError, ValueError, RuntimeError):
        pass
    raise SchemaError(f"`{what}` is True or False, found {shown(value)}")


def _converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers as another dtype of their kind; of another kind where nothing is lost. Raises `ValueError`."""
    kind = array.dtype.kind
    if kind == dtype.kind and kind in "iuf" and (kind == "f" or array.dtype.itemsize <= dtype.itemsize):
        return array.astype(dtype, copy=False)
    if kind not in "biufc":
        raise ValueError("no number")
    if kind in "iu" and dtype.kind in "iu":
        most = np.iinfo(dtype)
        if array.size and not (most.min <= int(array.min()) and int(array.max()) <= most.max):
            raise ValueError(f"{dtype} does not hold it")
        return array.astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):  # what has no place among whole numbers is told below
        made = array.real.astype(dtype) if kind == "c" and dtype.kind != "c" else array.astype(dtype)
        rule: Literal["safe", "same_kind"] = "safe" if dtype.kind in "biu" else "same_kind"
        if not np.can_cast(array.dtype, dtype, rule) and not (made.astype(array.dtype) == array).all():
            raise ValueError(f"{dtype} does not hold it")
    return made


__all__ = ["OPTIONAL_FIELDS", "REQUIRED_FIELDS", "EpisodeRecorder", "check_fields", "recorded_fields"]
