"""Step recorder: records the steps of n environments into growing rows, with one native call a step.

    recorder = store.recorder(envs.num_envs, autoreset=envs.metadata["autoreset_mode"])
    obs, _ = envs.reset(seed=0)
    recorder.reset(obs)
    while True:
        action = policy(obs)
        obs, reward, terminated, truncated, info = envs.step(action)
        recorder.step(
            obs, action=action, reward=reward, terminated=terminated, truncated=truncated,
            final_obs=info.get("final_obs"),
        )

A row holds one episode, or a piece of it. Step t has the observation, the action chosen there, its reward, and whether
it ended the episode (`terminated`). After the last action comes one more step, marked `last`, which has only the final
observation. So a row of n actions has n + 1 steps. An observation is stored once, however many windows, frame stacks
and n-step targets use it. No window crosses episodes.

An episode that is longer than a row continues in the next row, which repeats the last `overlap` steps. So frame stacks
and n-step sums across the boundary are complete. Each row notes how many steps it shares with its neighbours. Each step
is drawn from only one of its copies: the one with the context that the view needs. `geartrain.Transitions` needs an
`overlap` of frame_stack - 1 + n_step - 1, `geartrain.Windows` one of length - 1.

With `share_rows=True`, a row can hold several short episodes of one environment, so they take no more memory than long
ones. The steps marked `last` separate them. Such a store samples steps, not rows. The steps can give
`geartrain.Transitions`, windows within one episode, or whole episodes. Draws of rows are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import (
    check_flag,
    check_names_of,
    check_whole,
    did_you_mean,
    leave_out,
    optional,
    shown,
)
from geartrain.core.keys import Keys
from geartrain.core.lifetime import Closing
from geartrain.core.schema import Field, check_fields
from geartrain.errors import (
    ArgumentError,
    CallCancelledError,
    FieldError,
    GeartrainError,
    SchemaError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.store.columns import Columns, check_priority, check_version
from geartrain.store.step_arguments import StepArguments

#: What happens where an episode ends. As Gymnasium's vector environments have it, by value or in lower case.
Autoreset = Literal["next_step", "same_step", "disabled"]
AUTORESETS = ("next_step", "same_step", "disabled")

#: Fields that a recorder fills and requires, and fields that it fills if the store has them.
REQUIRED_FIELDS = {"terminated": "bool", "last": "bool"}
OPTIONAL_FIELDS = {"truncated": "bool", "step_version": "int64", "episode_return": "float32"}
#: Arguments of `StepRecorder.step`; a field of such a name could not be given.
_TAKEN = ("final_obs", "mask", "version")
#: Names of observations, alone or before a dot.
OBSERVATIONS = ("obs", "observation")

#: Episodes that a row holds; where a store has it, rows may hold several. Field names that begin with "geartrain." are
#: reserved, so that no field of a user is taken for it. native/fetch/episodes.h
EPISODES = "geartrain.episodes"
_EPISODES = Field((), "int32", per_row=True)

#: How many of a row's first steps repeat the row before, how many of its last ones the next row repeats, and the sum of
#: GOES_ON_HERE, if its first episode began in the row before, and GOES_ON_THERE, if its last one goes on in the next.
#: Where a store has it, rows may repeat steps. With ".n" behind it for step priorities of n-step sums.
#: native/selection/row_repeats.h
REPEATS = "geartrain.repeats"
_REPEATS = Field((3,), "int32", per_row=True)
GOES_ON_HERE, GOES_ON_THERE = 1, 2

# native/store/step_writer.h, FieldRole
_ROLES = {"terminated": 2, "truncated": 3, "last": 4, "step_version": 5, "episode_return": 6}
_EPISODES_ROLE, _REPEATS_ROLE = 8, 9
_OBSERVATION, _VALUE, _NONE = 0, 1, 7


def unfilled_fields(fields: Mapping[str, Field], *, share_rows: bool = False) -> list[str]:
    """The `per_row` fields that a recorder of a store with these fields writes zeros to."""
    repeats = repeats_field(fields)
    filled = {*OPTIONAL_FIELDS, *([EPISODES] if share_rows else []), *([repeats[0]] if repeats else [])}
    return [name for name, field in fields.items() if field.per_row and name not in filled]


def shares_rows(fields: Mapping[str, Field]) -> bool:
    """Whether the rows of a store with these fields may hold several episodes."""
    return fields.get(EPISODES) == _EPISODES and fields.get("last") == Field((), "bool")


def repeats_field(fields: Mapping[str, Field]) -> tuple[str, int] | None:
    """The field of a store with these fields that notes repeated steps, and the `n_step` of the views that its steps
    have priorities for; None where rows repeat no steps."""
    for name, field in fields.items():
        kind, _, n_step = name.removeprefix(REPEATS).partition(".")
        if name.startswith(REPEATS) and not kind and field == _REPEATS and (n_step or "2").isdecimal():
            return name, int(n_step or 1)
    return None


def recorded_fields(
    fields: Mapping[str, Field],
    *,
    share_rows: bool = False,
    overlap: bool = False,
    n_step: int = 1,
    **extras: Field,
) -> dict[str, Field]:
    """Adds the fields that a recorder fills, and returns the fields of the store to create.

    Args:
        fields: what the environments give: observation, action, reward.
        extras: more fields. Those that the policy returns with each action, such as `log_prob=Field((), "float32")`,
            and those that the recorder fills if they exist: `truncated=Field((), "bool")`, `step_version=Field((),
            "int64")` and `episode_return=Field((), "float32", per_row=True)`. The return is written when the row ends.
            It stays 0 in rows that were published before (`publish_every`).
        share_rows: for a recorder with `share_rows=True`. Adds `geartrain.episodes`, int32: the number of episodes in
            the row.
        overlap: for a recorder with `overlap=`. Adds `geartrain.repeats`, three int32: how many steps the row shares
            with the row before and with the row after.
        n_step: with `overlap=True`, for a store with `priority_per="step"`: the `n_step` of the `Transitions` that are
            drawn from it. It decides which copy of a repeated step has a priority.

    Returns:
        All fields by name.

    Raises:
        FieldError: another field is called `geartrain.episodes` or `geartrain.repeats`.
        ArgumentError: `n_step` is below 1, or given without `overlap=True`.

    Examples:
        >>> import geartrain as gt
        >>> sorted(gt.recorded_fields({"obs": gt.Field((3,), "float32"), "reward": gt.Field((), "float32")}))
        ['last', 'obs', 'reward', 'terminated']
    """
    check_flag("share_rows", share_rows)
    check_flag("overlap", overlap)
    if check_whole("n_step", n_step, 1) != 1 and not overlap:
        leave_out("only rows that overlap know how long their sums are (overlap=True)", n_step=n_step)
    repeats = REPEATS if n_step == 1 else f"{REPEATS}.{n_step}"
    own: dict[str, Field] = {EPISODES: _EPISODES, repeats: _REPEATS}
    check_fields({**own, **fields, **extras} if isinstance(fields, Mapping) else fields)
    for name, option, wanted in ((EPISODES, "share_rows", share_rows), (repeats, "overlap", overlap)):
        for given in (fields, extras):
            if given.get(name, own.get(name)) != own[name] or (name in given and not wanted):
                raise FieldError(f"{name!r} is the field of recorded_fields({option}=True): give yours another name")
        if not wanted:
            del own[name]
    return {**fields, **{name: Field((), dtype) for name, dtype in REQUIRED_FIELDS.items()}, **own, **extras}


class StepRecorder(Closing, elsewhere="make another one there, with store.recorder(...)"):
    """Records the steps of n environments into rows. `Store.recorder` makes one. Use it from one thread at a time.

    As a context manager, leaving it closes the recorder: that ends all episodes and keeps their steps. A recorder that
    is garbage-collected instead abandons rows that were not published. A forked child cannot use its parent's recorder.

    Args:
        columns, n_envs, publish_every, overlap, autoreset, share_rows, zeros: as in `Store.recorder`, which makes the
            object.
        obs: names of the fields that are observations.
        priority: priority of what is published from now on; may be set later.

    Attributes:
        n_envs: number of environments.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> fields = gt.recorded_fields({"obs": gt.Field((3,), "float32"), "reward": gt.Field((), "float32")})
        >>> store = gt.Store.create(fields, max_length=10, capacity=8)
        >>> with store.recorder(2, autoreset="disabled") as recorder:  # a StepRecorder
        ...     recorder.reset(np.zeros((2, 3), np.float32))
        ...     for step in range(1, 5):
        ...         ends = np.array([step == 4, False])
        ...         obs = np.full((2, 3), step, np.float32)
        ...         keys = recorder.step(obs, reward=np.ones(2), terminated=ends, truncated=np.zeros(2, bool))
        >>> store.status()["length"].tolist()
        [5, 5]
        >>> store.close()
    """

    def __init__(
        self,
        columns: Columns,
        n_envs: int,
        *,
        obs: Sequence[str] | None,
        publish_every: int | None,
        overlap: int,
        priority: float | None,
        autoreset: Any,
        share_rows: bool,
        zeros: Sequence[str],
    ) -> None:
        self.n_envs = check_whole("n_envs", n_envs, 1, 2**32 - 1)
        first_priority = check_priority(priority)
        check_steps(publish_every, overlap, columns.max_length)
        fields = columns.fields
        self.obs = _observations_of(fields, obs)
        _check_automatic(fields, self.obs)
        if check_flag("share_rows", share_rows) and (not shares_rows(fields) or "episode_return" in fields):
            raise FieldError(
                "share_rows needs a store with the fields of recorded_fields(..., share_rows=True), which has "
                f"{EPISODES!r} and no 'episode_return', as a row has several; the store has {', '.join(fields)}"
            )
        self._repeats = repeats_field(fields)
        if overlap and self._repeats is None:
            raise FieldError(
                f"overlap={overlap} needs a store with the fields of recorded_fields(..., overlap=True), which has "
                f"{REPEATS!r}: rows note there which steps they repeat, so that each is drawn once; the store has "
                f"{', '.join(fields)}"
            )
        self._shares_rows, self._closed = bool(share_rows), False
        _check_zeros(unfilled_fields(fields, share_rows=self._shares_rows), columns.names("zeros", zeros))
        mode = autoreset_mode(autoreset)
        self._same_step = mode == "same_step"
        self._columns = columns
        names = list(fields)
        self._values = [name for name in names if self._role(name) == _VALUE]
        self._arguments = StepArguments(fields, self.n_envs, self.obs, self._values)
        self._native = _native.StepWriter(
            columns.native,
            self.n_envs,
            publish_every or 0,
            overlap,
            first_priority,
            AUTORESETS.index(mode),
            [self._role(name) for name in names],
            names,
            [name.partition(".")[2] or name for name in names],
            self._shares_rows,
        )

    def _role(self, name: str) -> int:
        if name in _ROLES:
            return _ROLES[name]
        if name == EPISODES and self._shares_rows:
            return _EPISODES_ROLE
        if self._repeats is not None and name == self._repeats[0]:
            return _REPEATS_ROLE
        if self._columns.fields[name].per_row:
            return _NONE
        return _OBSERVATION if name in self.obs else _VALUE

    # --- recording --------------------------------------------------------------------------------------------

    def reset(self, obs: Any, *, mask: Any = None, version: int = 0) -> Keys | None:
        """Begins an episode in every environment. An episode in progress is ended and kept.

        Args:
            obs: first observations, (n_envs, ...), or a dict of arrays by field. A single environment may leave
                out the leading axis.
            mask: (n_envs,) bool: environments to reset. Observations of the others are ignored.
            version: version of the model that acts.

        Returns:
            Keys of the rows that this completes, with their environments (`Keys.env`); None if there are none.

        Raises:
            ArgumentError: an observation is missing.
            SchemaError: a shape or dtype does not fit.
            StoreFullError: there is no room for a new row.
            WaitTimeoutError: the store's rate limiter did not admit a row in time.
            CallCancelledError: the process is stopping.
        """
        self._check_open()
        version = check_version(version)
        if obs is None:
            raise ArgumentError("an episode begins with an observation, found None")
        arguments = {"observation": obs, "mask": mask}
        return self._finish(
            lambda given, admitted: self._native.begin(given["observation"], given["mask"], version, admitted),
            arguments,
        )

    def step(
        self,
        obs: Any,
        *,
        terminated: Any,
        truncated: Any,
        final_obs: Any = None,
        mask: Any = None,
        version: int = 0,
        **values: Any,
    ) -> Keys | None:
        """Records one step of all environments.

        If it raises, nothing was recorded and you can pass the same step again.

        Args:
            obs: what `envs.step` returned, (n_envs, ...), or a dict of arrays by field. With
                autoreset="next_step", an environment whose episode ended in the last call begins the next episode with
                it; its action, reward and flags are ignored.
            terminated, truncated: (n_envs,) bool.
            final_obs: last observations of the episodes that ended: `info["final_obs"]`, or arrays (n_envs,
                ...). Needed with autoreset="same_step" only.
            mask: (n_envs,) bool: environments that were stepped; all by default.
            version: version of the model that chose the actions.
            values: action, reward and the other fields by name, (n_envs, ...). A single environment may leave out the
                leading axis and pass Python numbers. Dtypes of the same kind are converted.

        Returns:
            Keys of the rows that this completes, with their environments (`Keys.env`); None if there are none.

        Raises:
            FieldError: a field has no values, or there is no such field.
            SchemaError: a shape or dtype does not fit, or an environment is in no episode: call `reset` first.
            StoreFullError: there is no room for the row that begins.
            WaitTimeoutError: the store's rate limiter did not admit a row in time.
            CallCancelledError: the process is stopping.
        """
        return self.record(obs, values, terminated, truncated, final_obs, mask, version)

    def record(
        self,
        obs: Any,
        values: dict[str, Any],
        terminated: Any,
        truncated: Any,
        final_obs: Any = None,
        mask: Any = None,
        version: int = 0,
    ) -> Keys | None:
        """The same as `step`, with the values in one dict. It saves about a microsecond of keyword arguments.

        Args:
            obs, values, terminated, truncated, final_obs, mask, version: as in `step`.

        Raises:
            ArgumentError: an argument has the wrong type, or `final_obs` was given with another `autoreset`
                than "same_step".
        """
        if self._closed:
            self._check_open()
        version = check_version(version)
        if final_obs is not None and not self._same_step:
            raise ArgumentError("final_obs is for autoreset='same_step'; elsewhere it is the observation")
        try:
            result = self._native.step(obs, values, terminated, truncated, final_obs, mask, version, False)
        except TypeError:
            found = f"{type(obs).__name__}, {type(values).__name__}, {terminated!r} and {truncated!r}"
            raise ArgumentError(
                f"a step has an observation, values in a dict by field, terminated and truncated; found {found}"
            ) from None
        if result is None:
            return None
        arguments = {
            "observation": obs,
            "values": values,
            "terminated": terminated,
            "truncated": truncated,
            "final_obs": final_obs,
            "mask": mask,
        }

        def record(now: dict[str, Any], admitted: bool) -> _native.StepResult | None:
            flags = (now["terminated"], now["truncated"])
            final, mask = now["final_obs"], now["mask"]
            return self._native.step(now["observation"], now["values"], *flags, final, mask, version, admitted)

        return self._finish(record, arguments, result)

    def differing(self, values: dict[str, Any]) -> NDArray[np.bool_] | None:
        """Finds the environments whose newest step has other values than these, or that have no step.

        The bytes are compared with the rows, so you need not keep a copy of the last recorded step.

        Args:
            values: fields that are not observations, (n_envs, ...), as in `step`.

        Returns:
            A mask (n_envs,); None if there are no such environments.

        Raises:
            SchemaError: a field is unknown or an observation, or has another shape.
        """
        self._check_open()
        if type(values) is not dict:
            raise SchemaError(f"values are given in a dict by field, found {type(values).__name__}")
        try:
            found = self._native.differing(values)
        except SchemaError:  # other dtypes, or no contiguous arrays
            found = self._native.differing(self._arguments.contiguous(values))
        return None if found is None else np.frombuffer(found, np.bool_)

    def cut(self, mask: Any = None) -> Keys | None:
        """Ends episodes and keeps their steps. Use it when an actor stops.

        Args:
            mask: (n_envs,) bool: environments whose episodes end; all by default.

        Returns:
            Keys of the rows that this completes, with their environments (`Keys.env`); None if there are none.

        Raises:
            WaitTimeoutError, CallCancelledError: as for `step`. The rows are abandoned.
        """
        self._check_open()
        try:
            return self._finish(lambda given, admitted: self._native.cut(given["mask"], admitted), {"mask": mask})
        except (WaitTimeoutError, CallCancelledError):
            if not self._columns.native.closed:
                self._native.abandon()
            raise

    def discard(self, env: int) -> Keys | None:
        """Takes back an episode of one environment, for example a failed demonstration.

        This is the episode of the newest step: the one in progress or, until the next begins, the one that ended last.
        Steps that were not published are dropped. Rows that can be sampled already are deleted, and the store's rate
        limiter gets their inserts back. A batch that was drawn before stays as it is.

        After an episode in progress was taken back, the environment is in no episode. Call `reset` with its mask to
        begin the next one, or leave it out of `mask` until then. After an episode that had ended, `autoreset` begins
        the next one as usual. With "same_step" that one is in progress already, and stays: an episode without a step
        has nothing to take back.

        If the process is killed meanwhile, some rows of the episode may stay.

        Args:
            env: index of the environment, as in `Keys.env`.

        Returns:
            Keys of rows that hold other episodes as well (`share_rows=True`) and therefore stay, with the episode's
            published steps; None if there are none. `Store.delete` deletes them with all of their episodes.

        Raises:
            ArgumentError: there is no such environment.
            LockTimeoutError: another process holds the store's lock. Call `discard` again.
        """
        self._check_open()
        return self._keys(self._native.discard(self._checked_env(env)))

    def close(self) -> None:
        """Ends all episodes and keeps their steps. Later calls raise `StoreClosedError`.

        Raises:
            WaitTimeoutError, CallCancelledError: as for `step`. The rows are abandoned, and the recorder is closed.
        """
        if self._closed:
            return
        try:
            self.cut()
        except (WaitTimeoutError, CallCancelledError):
            self._closed = True
            raise
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this recorder was closed: make another one with store.recorder(...)")

    @property
    def rows(self) -> int:
        """Number of rows completed so far; rows that `discard` deletes while they grow are none of them."""
        return self._native.rows

    @property
    def priority(self) -> float | None:
        """Priority of rows, or of steps with `priority_per="step"`, that are published from now on. May be set.

        None: the store's `new_priority`.

        Raises:
            ArgumentError: it is set to something else than a finite number >= 0.
        """
        return self._native.priority

    @priority.setter
    def priority(self, priority: float | None) -> None:
        self._check_open()
        self._native.priority = check_priority(priority)

    def in_episode(self, env: int) -> bool:
        """Whether an environment is in an episode.

        Args:
            env: its index.

        Raises:
            ArgumentError: there is no such environment.
        """
        return self._native.in_episode(self._checked_env(env))

    def _checked_env(self, env: int) -> int:
        check_whole("env", env, 0, self.n_envs - 1)
        return int(env)

    def __exit__(self, *exc: object) -> None:
        if not self._columns.native.closed:
            self.close()

    def __del__(self) -> None:
        # Blocks of a dropped recorder must not stay locked for as long as the process lives.
        if hasattr(self, "_native"):
            with suppress(GeartrainError):
                self._native.abandon()

    def _finish(
        self,
        call: Callable[[dict[str, Any], bool], _native.StepResult | None],
        given: dict[str, Any],
        result: _native.StepResult | None = None,
    ) -> Keys | None:
        """Converts what the native call asks for, waits for the rate limiter, and returns completed rows' keys.

        Args:
            call: the native call, with arguments by name, and whether the rate limiter has admitted its rows.
            given: its arguments.
            result: of a call with these arguments that was made before.
        """
        if result is None:
            result = call(given, False)
        converted: set[tuple[str, str | None]] = set()
        while result is not None and result.argument is not None:
            what = (result.argument, result.field)
            if what in converted:
                raise SchemaError(f"{result.field or result.argument!r} does not fit the store's fields")
            converted.add(what)
            self._arguments.convert(*what, given)
            result = call(given, False)
        if result is not None and result.to_admit:
            limiter, inserts = self._columns.limiter, result.to_admit
            limiter.admit_inserts(inserts)
            try:
                result = call(given, True)
            except BaseException:
                limiter.give_back(inserts=inserts)
                raise
        return self._keys(result)

    def _keys(self, result: _native.StepResult | None) -> Keys | None:
        """The keys of completed rows, with their environments."""
        if result is None:
            return None
        row, generation, env = np.frombuffer(result.keys, np.uint32).reshape(3, -1).copy()
        return Keys.of_rows(row, generation, self._columns.store_id, env=env)


class RecorderPriority:
    """Base of what writes by a `StepRecorder` of its own, whose priority is this one's too."""

    _recorder: StepRecorder

    @property
    def priority(self) -> float | None:
        """Priority of rows, or of steps with `priority_per="step"`, that are published from now on. May be set.

        None: the store's `new_priority`.

        Raises:
            ArgumentError: it is set to something else than a finite number >= 0.
        """
        return self._recorder.priority

    @priority.setter
    def priority(self, priority: float | None) -> None:
        self._recorder.priority = priority


def check_steps(publish_every: int | None, overlap: int, max_length: int) -> None:
    """Raises `ArgumentError` unless a recorder of rows of `max_length` steps can have these."""
    optional(check_whole, "publish_every", publish_every, 1, 2**32 - 1)
    check_whole("overlap", overlap, 0, max(1, max_length - 1) - 1)


def autoreset_mode(mode: Any) -> Autoreset:
    """The autoreset mode by its name here, from Gymnasium's `AutoresetMode`, its value, or None for its default."""
    text = "next_step" if mode is None else str(getattr(mode, "value", mode))
    names: dict[str, Autoreset] = {"NextStep": "next_step", "SameStep": "same_step", "Disabled": "disabled"}
    found = names.get(text, text)
    if found not in AUTORESETS:
        raise ArgumentError(
            f"autoreset is one of {', '.join(AUTORESETS)}, or Gymnasium's AutoresetMode; found {shown(mode)}"
            f"{did_you_mean(found, AUTORESETS)}"
        )
    return found  # type: ignore[return-value]


def _observations_of(fields: Mapping[str, Field], given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        found = tuple(name for name in fields if name.partition(".")[0] in OBSERVATIONS)
        if not found:
            raise FieldError(
                f"no field is called {' or '.join(OBSERVATIONS)}, alone or before a dot: say which are observations "
                f"(obs=[...]); the store has {', '.join(fields)}"
            )
    else:
        found = check_names_of("obs", [given] if isinstance(given, str) else given)
    for name in found:
        if name not in fields:
            raise FieldError(
                f"the store has no field {shown(name)}; it has {', '.join(fields)}{did_you_mean(name, fields)}"
            )
        if fields[name].per_row or name in _ROLES:
            raise FieldError(f"{name!r} is no observation of a step")
    return found


def _check_automatic(fields: Mapping[str, Field], obs: Sequence[str]) -> None:
    """Raises `FieldError` unless the fields that a recorder fills are there and are what they have to be."""
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if missing:
        raise FieldError(f"the store lacks {', '.join(missing)}: use recorded_fields to make its fields")
    given = [name for name, field in fields.items() if not field.per_row and name not in obs]  # a step has them by name
    taken = [name for name in _TAKEN if name in given]
    if taken:
        raise FieldError(
            f"a step's values are given by name, and {', '.join(map(repr, taken))} means something else there: call "
            f"the field something else, such as action_mask or policy_version"
        )
    for name, dtype in {**REQUIRED_FIELDS, **OPTIONAL_FIELDS}.items():
        wanted = Field((), dtype, per_row=name == "episode_return")
        if name in fields and fields[name] != wanted:
            raise FieldError(f"a recorder fills {name!r}, which must be {wanted}; the store has {fields[name]}")


def _check_zeros(unfilled: list[str], zeros: Sequence[str]) -> None:
    """Raises `FieldError` unless `zeros` names the fields that a recorder does not fill, and no others."""
    filled = [name for name in zeros if name not in unfilled]
    if filled:
        raise FieldError(f"zeros names per_row fields that a recorder does not fill; it writes {filled[0]!r}")
    left = tuple(name for name in unfilled if name not in zeros)
    if left:
        raise FieldError(
            f"a recorder does not fill the per_row field {', '.join(map(repr, left))}: make it a field of steps, which "
            f"you give at each step, or leave it zero with zeros={left!r}; Store.write(keys, ...) can set it later"
        )


__all__ = [
    "AUTORESETS",
    "EPISODES",
    "GOES_ON_HERE",
    "GOES_ON_THERE",
    "OBSERVATIONS",
    "OPTIONAL_FIELDS",
    "REPEATS",
    "REQUIRED_FIELDS",
    "Autoreset",
    "StepRecorder",
    "autoreset_mode",
    "recorded_fields",
    "repeats_field",
    "shares_rows",
    "unfilled_fields",
]
