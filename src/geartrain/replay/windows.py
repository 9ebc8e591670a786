"""`Windows`: which steps of a row a batch contains.

    gt.Replay(store, selection, 256, window=20)                          # ends at any step, padded before it
    gt.Replay(store, selection, 256, window=gt.Windows(20, whole=True))  # no padding
    gt.Replay(store, selection, 256, window=gt.Windows(20, at="start"))  # the row's first 20 steps
    gt.Replay(store, selection, 256, window=gt.Windows(20, anchor="first", stride=5))  # 0-19, 5-24, 10-29, ...
    gt.Replay(store, Uniform(over="steps"), 256, window=gt.Windows(200, at="episode"))  # the step's whole episode
    gt.Replay(store, selection, 256, window=gt.Windows(offsets={"image": [-10, 0], "action": range(10)}))

The replay draws rows first, and then one window of each row. A window is identified by one of its steps, the anchor:
its first or its last step, or the step that offsets count from. native/fetch/windows.h defines the windows of a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import (
    FLAG,
    Options,
    check_array,
    check_choice,
    check_type,
    check_whole,
    checked,
    leave_out,
    shown,
)
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.selection.declared import DeclaredStrategy
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Mixture, Selection, with_strategies
from geartrain.selection.strategy import Limits, Strategy, traits_of
from geartrain.store.store import Store

#: Given keys of rows, their lengths (n,) int32 and random numbers (n,) float64 from 0 up to and without 1, the step
#: that each row's window is told by, (n,) whole numbers.
WindowFunction = Callable[[Keys, NDArray[np.int32], NDArray[np.float64]], ArrayLike]
#: native/fetch/windows.h, WindowPlan::At.
_PLACES = {"any": 0, "start": 1, "end": 2, "episode": 3}
#: Places in the window of the steps that a field takes, and whether the batch has an axis for them. Without places the
#: first step that the row has of the window. None: all steps.
FieldSteps = tuple[tuple[int, ...], bool] | None
FIRST_STEP: FieldSteps = ((), False)
_MOST_OFFSETS = 1 << 20
#: native/python/window_plan.h, WindowTuple.
NativeWindows = tuple[int, bool, bool, int, int, bool, list[FieldSteps]]


def _check_place(what: str, at: Any) -> Any:
    return at if callable(at) else check_choice(what, at, _PLACES)


@dataclass(frozen=True)
class Windows(Options):
    """Windows of `length` steps of each drawn row, for `Replay(window=...)` and `geartrain.fetch`.

    Each window has an anchor, which is one of its steps. With anchor="last" the window is the anchor and up to `length
    - 1` steps before it. With anchor="first" it is the anchor and up to `length - 1` steps after it. Missing steps are
    zero, and False in `batch.mask`. `Windows(20)` is the same as `window=20`.

    With `offsets` each field has steps of its own around the anchor, such as LeRobot's `delta_timestamps`:

        gt.Windows(offsets={"image": [-10, 0], "action": range(10)})

    gives images (B, 2, ...) of the steps t - 10 and t, and actions (B, 10, ...) of the steps t to t + 9. A field
    without offsets has the step t alone, (B, ...). A field never holds anything later than its largest offset, and
    nothing of another episode. Steps that the row does not have are zero, and `mask_of` tells where.

    If steps are drawn and not rows (`Uniform(over="steps")`, `Epochs(over="steps")`, `Prioritized` with
    priority_per="step"), the drawn step is the anchor, and keys name it. `whole` and `stride` then restrict which steps
    are drawn. If rows repeat steps (`recorder(overlap=k)`), each step is then drawn from only one row: the one that has
    the rest of its window. k must be at least length - 1.

    Args:
        length: steps of a window. With `offsets` it follows from them: from the least one to the largest, and 0.
        at: which window of a row: "any" one drawn uniformly, "start" its first `length` steps, "end" its last,
            "episode" the first `length` steps of the drawn step's episode in that row (an `Epochs` pass has an episode
            once for each row that it spans), or a function `at(keys, lengths, random)`.
            The function gets the keys of many rows, how many steps each has (n,), and a random number below 1 for each
            (n,), and returns the anchors (n,). It runs where batches are built: on the prefetch thread, and on every
            rank for the rows that it reads.
        anchor: "last" or "first". at="start" and at="episode" always use the first step, at="end" the last. With
            `offsets` the anchor is the step that they count from.
        stride: only every stride-th step of a row is an anchor, counted from its first step for anchor="first", and
            else from the last one that may be an anchor. Steps within a window stay adjacent.
        whole: only windows without missing steps. Shorter rows are not drawn.
        offsets: by the field's name, which steps it takes, counted from the anchor: whole numbers in any order, none of
            them twice. The field has them in this order.

    Raises:
        ArgumentError: an option is out of range, or two of them exclude each other.

    Cost: that of `window=length`; with `offsets` only the steps that fields take are copied. A function is called once
    a batch, and once more if rows were overwritten. In device memory, windows other than `Windows(length)`, and those
    of rows with several episodes, are gathered by the CPU and copied.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"t": gt.Field((), "int64")}, max_length=9, capacity=1)
        >>> _ = store.insert({"t": np.arange(9)[None]})
        >>> def shown(windows):
        ...     with gt.Replay(store, gt.selection.Uniform(seed=0), 50, window=windows, output="numpy") as replay:
        ...         return np.unique(replay.sample()["t"], axis=0).tolist()
        >>> shown(gt.Windows(4, at="end"))
        [[5, 6, 7, 8]]
        >>> shown(gt.Windows(4, anchor="first", stride=3, whole=True))
        [[0, 1, 2, 3], [3, 4, 5, 6]]
        >>> shown(gt.Windows(4, stride=3))
        [[0, 0, 1, 2], [2, 3, 4, 5], [5, 6, 7, 8]]
        >>> shown(gt.Windows(4, at=lambda keys, lengths, random: lengths // 2))
        [[1, 2, 3, 4]]
        >>> shown(gt.Windows(offsets={"t": [-1, 0, 3]}, whole=True))
        [[0, 1, 4], [1, 2, 5], [2, 3, 6], [3, 4, 7], [4, 5, 8]]
        >>> store.close()
    """

    length: int = dataclasses.field(default=0, metadata=checked(check_whole, 1, 2**31 - 1))
    at: Literal["any", "start", "end", "episode"] | WindowFunction = dataclasses.field(
        default="any", metadata=checked(_check_place)
    )
    anchor: Literal["last", "first"] = dataclasses.field(
        default="last", metadata=checked(check_choice, ("last", "first"))
    )
    stride: int = dataclasses.field(default=1, metadata=checked(check_whole, 1, 2**31 - 1))
    whole: bool = dataclasses.field(default=False, metadata=FLAG)
    offsets: Mapping[str, Sequence[int]] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.offsets is not None:
            self._take_offsets(self.offsets)
        super().__post_init__()
        if self.stride != 1:
            leave_out("a stride is between windows that are drawn", at=self.at != "any" and self.at)
        if self.at == "episode":
            leave_out("an episode is padded where it is shorter than its window", whole=self.whole)
        if self.at == "end":
            leave_out("the anchor of windows at the end is their last step", anchor=self.anchor == "first" and "first")

    def _take_offsets(self, offsets: object) -> None:
        """Checks offsets, which are tuples from then on, and sets the length that follows from them."""
        by_field = check_type("offsets is a dict of whole numbers by field", offsets, Mapping)
        taken = {name: _checked_offsets(name, steps) for name, steps in by_field.items()}
        at, anchor = self.at == "episode" and self.at, self.anchor != "last" and self.anchor
        leave_out("offsets count from the drawn step", at=at, anchor=anchor)
        if not taken:
            raise ArgumentError("offsets names at least one field, found {}: leave it out")
        every = [0, *(step for steps in taken.values() for step in steps)]
        length = max(every) - min(every) + 1
        given = self.length not in (0, length) and self.length
        leave_out(f"the length of windows follows from offsets, here {length}", length=given)
        object.__setattr__(self, "length", length)
        object.__setattr__(self, "offsets", dict(sorted(taken.items())))

    @property
    def after(self) -> int:
        """Internal: steps of a window behind its anchor."""
        if self.offsets is not None:
            return max(0, *(max(steps) for steps in self.offsets.values()))
        return self.length - 1 if self.from_first else 0

    @property
    def before(self) -> int:
        """Internal: steps of a window before its anchor."""
        return self.length - 1 - self.after

    def steps_of(self, name: str) -> FieldSteps:
        """Internal: which steps of the window a field with time takes."""
        if self.offsets is None:
            return None
        steps = self.offsets.get(name)
        return ((self.before,), False) if steps is None else (tuple(step + self.before for step in steps), True)

    def mask_of(self, name: str, mask: Any) -> Any:
        """Which steps of a field are real, out of a batch's mask.

        Args:
            name: of the field.
            mask: (B, length) bool, the mask of a batch with these windows; `batch.mask`, or an item's "mask".

        Returns:
            (B, len(offsets)) bool for a field with offsets, False for padding; (B,) for a field without. Without
            `offsets` the mask itself. LeRobot's `<name>_is_pad` is the opposite.

        Raises:
            ArgumentError: the mask is of other windows.
        """
        shape = tuple(getattr(mask, "shape", ()))
        if len(shape) != 2 or shape[1] != self.length:
            raise ArgumentError(f"the mask of windows of {self.length} steps is (B, {self.length}), found {shape}")
        taken = self.steps_of(name)
        if taken is None:
            return mask
        places, axis = taken
        return mask[:, list(places)] if axis else mask[:, places[0]]

    @property
    def from_first(self) -> bool:
        """Whether the anchor is the window's first step, without offsets."""
        return self.offsets is None and (self.anchor == "first" or self.at in ("start", "episode"))

    @property
    def need(self) -> int:
        """Internal: steps that a row must have beyond one."""
        return self.length - 1 if self.whole else 0

    @property
    def first_anchor(self) -> int:
        """Internal: the first step of a row that may be an anchor."""
        return self.before if self.whole else 0

    @property
    def needs(self) -> tuple[int, int, int]:
        """Steps that an anchor needs before and after it, where rows repeat steps, and the first step that may be one.

        native/fetch/windows.h, WindowPlan::needs. Zeros where each row has windows of its own.
        """
        if self.stride != 1 or self.at != "any":
            return 0, 0, 0
        return self.before, self.after + 1, self.first_anchor

    @property
    def function(self) -> WindowFunction | None:
        """The function that places the windows; None if there is none."""
        return self.at if callable(self.at) else None

    @property
    def plain(self) -> bool:
        """Internal: whether these are the windows of a number of steps alone."""
        return self == Windows(self.length)

    def anchors_of(self, lengths: NDArray[np.int32], numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Internal: the anchors (n,) of windows by their numbers, counted from each row's first."""
        steps = numbers.astype(np.int64) * self.stride
        if not self.from_first:
            most = np.maximum(lengths.astype(np.int64) - 1, 0)
            steps += most - (most - self.need) // self.stride * self.stride - (self.need - self.first_anchor)
        return steps.astype(np.uint32)

    def ask(self, keys: Keys, lengths: NDArray[np.int32], random: NDArray[np.float64]) -> NDArray[np.int32]:
        """Internal: the anchors that the function returns; 0 for rows without steps, which it is not given.

        Raises:
            ArgumentError: an anchor is not a step of its row, or not of a whole window if `whole` is set.
        """
        assert self.function is not None
        anchors = np.zeros(len(lengths), np.int32)
        here = np.flatnonzero(lengths > self.need)
        if not len(here):
            return anchors
        lengths = lengths[here]
        found = np.asarray(self.function(keys[here], lengths.copy(), random[here]))
        check_array(f"a function of windows returns a step for each of {len(here)} rows", found, here.shape, "iu")
        least = self.first_anchor
        bad = np.flatnonzero((found < least) | (found > lengths - 1 - (self.need - least)))
        if bad.size:
            whole = f" of whole windows of {self.length} steps" if self.whole else ""
            raise ArgumentError(
                f"a function of windows returned step {found[bad[0]]} of a row that has {lengths[bad[0]]}{whole}"
            )
        anchors[here] = found
        return anchors


def _checked_offsets(name: object, steps: object) -> tuple[int, ...]:
    check_type("offsets has names of fields", name, str)
    given: tuple[object, ...] = ()
    if not isinstance(steps, (str, bytes, bytearray, Mapping)):
        with contextlib.suppress(TypeError):  # no iterable, or an array of no axis
            given = tuple(itertools.islice(steps, _MOST_OFFSETS + 1))  # type: ignore[call-overload]
    if not 1 <= len(given) <= _MOST_OFFSETS:
        raise ArgumentError(f"offsets[{name!r}] is a list of 1 to {_MOST_OFFSETS} whole numbers, found {shown(steps)}")
    found = tuple(check_whole(f"an offset of {name!r}", step, 1 - 2**30, 2**30 - 1) for step in given)
    if len(set(found)) < len(found):
        raise ArgumentError(f"offsets[{name!r}] has a step more than once: a field takes each step once")
    return found


def native_windows(windows: Windows | None, taken: Sequence[FieldSteps] = ()) -> NativeWindows | None:
    """Windows as the native layer takes them; None where their length says it all.

    Args:
        windows: None for whole rows.
        taken: which steps each field takes; empty if all take all steps.
    """
    some = any(steps is not None for steps in taken)
    if windows is None:
        return (1, False, False, 0, 0, False, list(taken)) if some else None
    place = _PLACES[windows.at] if isinstance(windows.at, str) else 0
    offsets = windows.offsets is not None
    after = windows.after if offsets else 0
    return windows.stride, windows.whole, windows.from_first, place, after, offsets, list(taken) if some else []


def steps_taken(
    store: Store, names: Sequence[str], windows: Windows | None, first_only: Sequence[str]
) -> dict[str, FieldSteps]:
    """Which steps of the windows each field of a batch takes, without the fields that take all.

    Args:
        store: store of the rows.
        names: fields of the batch.
        windows: None for whole rows.
        first_only: names of fields of which batches have the first step alone.

    Raises:
        FieldError: the store has no such field.
        ArgumentError: steps of a field that is not in the batch or has no steps, or beyond the longest row.
    """
    fields, max_length = store.fields, store.max_length
    offsets = None if windows is None else windows.offsets
    if offsets is not None and first_only:
        leave_out("offsets tell the steps of each field", first_only=first_only)
    for what, asked in (("offsets", offsets or {}), ("first_only", first_only)):
        for name in asked:
            store.field_number(name)
            if name not in names:
                raise ArgumentError(f"{what} names {name!r}, but the batch has {', '.join(names)}: add it to fields=")
            if fields[name].per_row:
                raise ArgumentError(
                    f"{what} names {name!r}, which is per_row and has no steps to choose from: leave it out"
                )
    for name, steps in (offsets or {}).items():
        beyond = [step for step in steps if abs(step) >= max_length]
        if beyond:
            raise ArgumentError(
                f"the offset {beyond[0]} of {name!r} is beyond every row: rows have at most {max_length} steps"
            )
    timed = [name for name in names if not fields[name].per_row]
    if offsets is not None and windows is not None:
        return {name: windows.steps_of(name) for name in timed}
    return dict.fromkeys((name for name in timed if name in first_only), FIRST_STEP)


def as_windows(window: object) -> Windows | None:
    """Windows given as such, or by their length; None for whole rows. Raises `ArgumentError` for anything else."""
    if window is None or isinstance(window, Windows):
        return window
    return Windows(check_whole("window", window, 1, 2**31 - 1))


def check_windows(windows: Windows, store: Store, strategy: Strategy) -> None:
    """Raises `ArgumentError` where a strategy's draws from a store cannot have such windows."""
    traits, name = traits_of(strategy), type(strategy).__name__
    if windows.whole and windows.length > store.max_length:
        raise ArgumentError(
            f"whole windows need {windows.length} steps, but rows of {store.name!r} have at most {store.max_length}"
        )
    by_step = store.per_step and traits.by_priority
    if by_step or traits.over_steps or (isinstance(strategy, Epochs) and strategy.over == "steps"):
        if by_step and windows.at == "episode":
            raise ArgumentError(
                f"{name} draws steps by their priorities, and episodes have none: use Uniform(over='steps') "
                "or Epochs(over='steps')"
            )
        at = windows.at not in ("any", "episode") and windows.at
        leave_out(f"{name} draws the anchors of the windows, and no rows", at=at)
        if by_step:
            stride = windows.stride != 1 and windows.stride
            leave_out("steps are drawn by their priorities (set those of the steps between to 0)", stride=stride)


def with_room_for(windows: Windows | None, selection: Selection) -> Selection:
    """The selection, of rows that are long enough for whole windows where these are asked for.

    Raises:
        ArgumentError: a strategy that cannot be told so.
    """
    if windows is None or not windows.whole:
        return selection
    if isinstance(selection, Mixture):
        return with_strategies(selection, [_with_room(each, windows) for each in selection.strategies])
    return _with_room(selection, windows)


def _with_room(strategy: Strategy, windows: Windows) -> Strategy:
    traits = traits_of(strategy)
    if traits.over_steps or isinstance(strategy, Epochs):
        return strategy  # they are told how many steps a window takes
    own = getattr(type(strategy), "select", None) is not DeclaredStrategy.select
    custom = own or traits.form in ("groups", "custom")
    if custom or not hasattr(strategy, "limits") or not dataclasses.is_dataclass(strategy):
        raise ArgumentError(
            f"{type(strategy).__name__} has no limit on the length of rows, so it may draw rows that are "
            "shorter than a window: leave out whole=True, or use a strategy with limits="
        )
    limits = traits.limits or Limits()
    least = max(limits.min_length, windows.length)
    return dataclasses.replace(strategy, limits=dataclasses.replace(limits, min_length=least))  # type: ignore[return-value]


__all__ = [
    "FIRST_STEP",
    "FieldSteps",
    "WindowFunction",
    "Windows",
    "as_windows",
    "check_windows",
    "native_windows",
    "steps_taken",
    "with_room_for",
]
