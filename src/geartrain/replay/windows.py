"""`Windows`: which steps of a row a batch contains.

    gt.Replay(store, selection, 256, window=20)                          # ends at any step, padded before it
    gt.Replay(store, selection, 256, window=gt.Windows(20, whole=True))  # no padding
    gt.Replay(store, selection, 256, window=gt.Windows(20, at="start"))  # the row's first 20 steps
    gt.Replay(store, selection, 256, window=gt.Windows(20, anchor="first", stride=5))  # 0-19, 5-24, 10-29, ...
    gt.Replay(store, Uniform(over="steps"), 256, window=gt.Windows(200, at="episode"))  # the step's whole episode

The replay draws rows first, and then one window of each row. A window is identified by its first or its last step
(`anchor`). native/fetch/windows.h defines the windows of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import check_whole
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.selection.arguments import check_flag
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


@dataclass(frozen=True)
class Windows:
    """Windows of `length` steps of each drawn row, for `Replay(window=...)` and `geartrain.fetch`.

    Each window has an anchor, which is one of its steps. With anchor="last" the window is the anchor and up to `length
    - 1` steps before it. With anchor="first" it is the anchor and up to `length - 1` steps after it. Missing steps are
    zero, and False in `batch.mask`. `Windows(20)` is the same as `window=20`.

    If steps are drawn and not rows (`Uniform(over="steps")`, `Epochs(over="steps")`, `Prioritized` with
    priority_per="step"), the drawn step is the anchor, and keys name it. `whole` and `stride` then restrict which steps
    are drawn. If rows repeat steps (`recorder(overlap=k)`), each step is then drawn from only one row: the one that has
    the rest of its window. k must be at least length - 1.

    Args:
        length: steps of a window.
        at: which window of a row: "any" one drawn uniformly, "start" its first `length` steps, "end" its last,
            "episode" the first `length` steps of the drawn step's episode in that row (an `Epochs` pass has an episode
            once for each row that it spans), or a function `at(keys, lengths, random)`.
            The function gets the keys of many rows, how many steps each has (n,), and a random number below 1 for each
            (n,), and returns the anchors (n,). It runs where batches are built: on the prefetch thread, and on every
            rank for the rows that it reads.
        anchor: "last" or "first". at="start" and at="episode" always use the first step, at="end" the last.
        stride: only every stride-th step of a row is an anchor, counted from its first step for anchor="first" and from
            its last for anchor="last". Steps within a window stay adjacent.
        whole: only windows without missing steps. Shorter rows are not drawn.

    Raises:
        ArgumentError: an option is out of range, or two of them exclude each other.

    Cost: that of `window=length`. A function is called once a batch, and once more if rows were overwritten. In device
    memory, windows other than `Windows(length)`, and those of rows with several episodes, are gathered by the CPU and
    copied.

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
        >>> store.close()
    """

    length: int
    at: Literal["any", "start", "end", "episode"] | WindowFunction = "any"
    anchor: Literal["last", "first"] = "last"
    stride: int = 1
    whole: bool = False

    def __post_init__(self) -> None:
        if not 1 <= check_whole("window", self.length) < 2**31:
            raise ArgumentError(f"a window has at least one step, and less than 2**31, found window={self.length}")
        if not 1 <= check_whole("stride", self.stride) < 2**31:
            raise ArgumentError(f"the stride of windows is at least 1, found {self.stride}")
        check_flag("whole", self.whole)
        if not callable(self.at) and (not isinstance(self.at, str) or self.at not in _PLACES):
            raise ArgumentError(
                f"windows are at 'any', 'start', 'end' or 'episode', or where a function says, found {self.at!r}"
            )
        if not isinstance(self.anchor, str) or self.anchor not in ("last", "first"):
            raise ArgumentError(
                f"anchor must be 'last' or 'first', the step that places a window; found anchor={self.anchor!r}"
            )
        if self.at != "any" and self.stride != 1:
            raise ArgumentError(f"a stride is between windows that are drawn: leave out at={self.at!r}")
        if self.at == "episode" and self.whole:
            raise ArgumentError("an episode is padded where it is shorter than its window: leave out whole=True")
        if self.at == "end" and self.anchor == "first":
            raise ArgumentError("the anchor of windows at the end is their last step: leave out anchor='first'")

    @property
    def from_first(self) -> bool:
        """Whether the anchor is the window's first step."""
        return self.anchor == "first" or self.at in ("start", "episode")

    @property
    def need(self) -> int:
        """Internal: steps that a row must have beyond one."""
        return self.length - 1 if self.whole else 0

    @property
    def needs(self) -> tuple[int, int, int]:
        """Steps that an anchor needs before and after it, where rows repeat steps, and the first step that may be one.

        native/fetch/windows.h, WindowPlan::needs. Zeros where each row has windows of its own.
        """
        if self.stride != 1 or self.at != "any":
            return 0, 0, 0
        return (0, self.length, 0) if self.from_first else (self.length - 1, 1, self.need)

    @property
    def function(self) -> WindowFunction | None:
        """The function that places the windows; None if there is none."""
        return self.at if callable(self.at) else None

    @property
    def plain(self) -> bool:
        """Internal: whether these are the windows of a number of steps alone."""
        return self == Windows(self.length)

    @property
    def native(self) -> tuple[int, bool, bool, int]:
        """Internal: stride, whole, anchored at the first step, and place, as the native layer takes them."""
        return self.stride, self.whole, self.from_first, _PLACES[self.at] if isinstance(self.at, str) else 0

    def anchors_of(self, lengths: NDArray[np.int32], numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Internal: the anchors (n,) of windows by their numbers, counted from each row's first."""
        steps = numbers.astype(np.int64) * self.stride
        if not self.from_first:
            most = np.maximum(lengths.astype(np.int64) - 1, 0)
            steps += most - (most - self.need) // self.stride * self.stride
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
        if found.shape != here.shape or found.dtype.kind not in "iu":
            raise ArgumentError(
                f"a function of windows returns a step for each of {len(here)} rows, found {found.dtype} {found.shape}"
            )
        least = 0 if self.from_first else self.need
        bad = np.flatnonzero((found < least) | (found > lengths - 1 - (self.need - least)))
        if bad.size:
            whole = f" of whole windows of {self.length} steps" if self.whole else ""
            raise ArgumentError(
                f"a function of windows returned step {found[bad[0]]} of a row that has {lengths[bad[0]]}{whole}"
            )
        anchors[here] = found
        return anchors


def as_windows(window: object) -> Windows | None:
    """Windows given as such, or by their length; None for whole rows. Raises `ArgumentError` for anything else."""
    if window is None or isinstance(window, Windows):
        return window
    return Windows(window)  # type: ignore[arg-type]  # it checks


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
        if windows.at not in ("any", "episode"):
            raise ArgumentError(f"{name} draws the anchors of the windows: leave out at={windows.at!r}, or draw rows")
        if by_step and windows.stride != 1:
            raise ArgumentError(
                f"steps are drawn by their priorities: leave out stride={windows.stride}, and set the "
                "priorities of the steps between to 0"
            )


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


__all__ = ["WindowFunction", "Windows", "as_windows", "check_windows", "with_room_for"]
