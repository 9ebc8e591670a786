"""Samplers of trajectory slices over a `SharedStorage`: uniform, and by priorities that processes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.arguments import at_most_one, check_type, check_whole, optional
from geartrain.core.global_generators import drawing
from geartrain.errors import ArgumentError, EmptyStoreError
from geartrain.integrations.torchrl.samplers import PrioritizedSampler, StatelessSampler
from geartrain.integrations.torchrl.storage import SharedStorage
from geartrain.integrations.torchrl.trajectories import Held, Trajectories

# Uniform draws of a trajectory that may be in vain before the lengths of all are looked at.
_ROUNDS = 16
# Draws by priority, at least, and batches of them, before it is an error that too few were of items to begin at.
_DRAWS, _BATCHES = 1024, 64

Key = str | tuple[str, ...]
Span = bool | int | tuple[bool | int, bool | int]


class SliceSampler(StatelessSampler):
    """Draws slices of trajectories: every trajectory equally likely, and in it every place where a slice fits.

    No slice crosses the end of a trajectory, or continues from the newest item to the oldest. The cost of a batch grows
    with its items only: `Trajectories` remembers where trajectories begin, and reads only new items.

    If other processes write to a full storage, they may overwrite its oldest items between the draw and the read.
    `margin` keeps slices away from these items.

    Args:
        num_slices: slices in a batch, whose size must be a multiple of it; or
        slice_len: items in a slice; the batch size must be a multiple of it. Give one of the two.
        end_key: an entry that is true at the end of a trajectory; `("next", "done")` if nothing else is given or found.
        end_keys: several such entries; any of them ends a trajectory.
        traj_key: an entry whose value differs between neighbouring trajectories. Without any of the three:
            `("collector", "traj_ids")` or "episode" if items have it.
        truncated_key: entry that marks the end of a slice, in addition to the items' own "done" and "terminated"; None
            for no mark.
        init_key: entry that marks the beginning of a slice, if items have such an entry; None for no mark.
        strict_length: leave out trajectories shorter than a slice. With False they are drawn whole, as shorter slices.
        span: number of steps by which a slice may begin before its trajectory and end after it. The slice is then
            shorter by as many items. True: all but one.
        margin: number of oldest items that no slice contains once the storage is full.

    Raises:
        ArgumentError: arguments that do not fit. TypeError: not exactly one of `num_slices` and `slice_len`.
    """

    with_alpha = "PrioritizedSliceSampler"

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        span: Span = False,
        margin: int = 0,
    ) -> None:
        self._slices = Slices(
            num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, strict_length, span, margin
        )

    def sample(self, storage: Any, batch_size: int) -> tuple[tuple[torch.Tensor], dict[Any, torch.Tensor]]:
        """Indices (n,), slice by slice, and marks: the ends of slices as truncated, done and terminated.

        n is `batch_size`, and less where slices may be shorter.

        Raises:
            RuntimeError: the storage is empty, or no trajectory is long enough; sizes that are not divisible.
            SchemaError: no entry tells trajectories apart. WaitTimeoutError: another process writes for too long.
        """
        slices = self._slices
        window, length, n = slices.begin(storage, batch_size)
        begin, lengths = slices.spans(window, slices.trajectories_of(window, length, n, self._rng))
        outside = np.minimum(lengths, length)
        # One item of the slice at least is inside.
        left, right = (np.minimum(length - 1 if out is True else out, outside - 1) for out in slices.span)
        places = lengths - outside + 1 + left + right
        with drawing:
            part = torch.rand(n, generator=self._rng, dtype=torch.float64)
        offset = (part.numpy() * places).astype(np.int64) - left
        end = np.minimum(offset + outside, lengths)
        offset = np.maximum(offset, 0)
        index, info = slices.marked(storage, window, begin + offset, end - offset)
        return (index,), info

    def __getstate__(self) -> dict[str, Any]:
        return dict(super().__getstate__()) | {"_slices": self._slices.afresh()}

    def __repr__(self) -> str:
        return f"SliceSampler({self._slices})"


class PrioritizedSliceSampler(PrioritizedSampler):
    """Draws slices of trajectories by the priorities of their first items, exactly as `PrioritizedSampler` draws items.

    Items too close to the end of their trajectory for a slice are never drawn as first ones.

    Args:
        max_capacity: accepted for compatibility with torchrl; the storage's size counts.
        alpha, beta, eps, reduction: as `PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, margin: as `SliceSampler`.
        strict_length: as `SliceSampler`. With False, a slice may also begin at the beginning of its trajectory.
        span: as `SliceSampler`, after the trajectory only.

    Raises:
        ArgumentError: arguments that do not fit. TypeError: not exactly one of `num_slices` and `slice_len`.
    """

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key | None = None,
        end_keys: Sequence[Key] | None = None,
        traj_key: Key | None = None,
        truncated_key: Key | None = ("next", "truncated"),
        init_key: Key | None = "is_init",
        strict_length: bool = True,
        span: Span = False,
        margin: int = 0,
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps, reduction)
        self._slices = Slices(
            num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, strict_length, span, margin
        )
        if self._slices.span[0]:
            raise ArgumentError(
                "slices begin at the item that is drawn, so none begins before its trajectory: leave out span[0]"
            )

    def sample(self, storage: Any, batch_size: int) -> tuple[tuple[torch.Tensor], dict[Any, torch.Tensor]]:  # type: ignore[override]
        """Indices (n,), slice by slice, marks as `SliceSampler.sample`, and "priority_weight" (n,) of its first item.

        The largest weight of a batch is 1.

        Raises:
            RuntimeError: the storage is empty, or all priorities are 0; less than about a sixtieth of the priority is
                that of items at which a slice can begin; sizes that are not divisible.
            SchemaError: no entry tells trajectories apart. WaitTimeoutError: another process writes for too long.
        """
        slices = self._slices
        found: list[NDArray[np.int64]] = []
        lengths: list[NDArray[np.int64]] = []
        weights: list[NDArray[np.float64]] = []
        missing = n = slices.count(batch_size)
        for _ in range(max(_BATCHES, _DRAWS // n)):
            slices.check(storage)
            try:
                places, probability = self.draw(storage, n)
            except EmptyStoreError:
                raise RuntimeError("all priorities are 0") from None
            window, length, _ = slices.begin(storage, batch_size)  # the items drawn are among these
            numbers = window.numbers(places)
            fits = slices.ahead(window, numbers, length)
            chosen = np.flatnonzero(fits > 0)[:missing]
            found.append(numbers[chosen])
            lengths.append(fits[chosen])
            weights.append(probability[chosen])
            missing -= len(chosen)
            if missing == 0:
                break
        else:
            raise RuntimeError(
                f"Did not find a single trajectory with sufficient length, or nearly all of the priority is at items "
                f"with less than {length} steps of their trajectory ahead: use strict_length=False"
            )
        size, p = np.concatenate(lengths), np.concatenate(weights)
        index, info = slices.marked(storage, window, np.concatenate(found), size)
        weight = np.repeat((p.min() / p) ** self.beta, size)
        info["priority_weight"] = torch.from_numpy(weight.astype(np.float32))
        return (index,), info

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_slices": self._slices.afresh()}

    def __repr__(self) -> str:
        return f"PrioritizedSliceSampler(alpha={self.alpha}, beta={self.beta}, {self._slices})"


class Slices:
    """Shared by both samplers: arguments, trajectories, and marks of slices. Arguments as `SliceSampler`."""

    def __init__(
        self,
        num_slices: int | None,
        slice_len: int | None,
        end_key: Key | None,
        end_keys: Sequence[Key] | None,
        traj_key: Key | None,
        truncated_key: Key | None,
        init_key: Key | None,
        strict_length: bool,
        span: Span,
        margin: int,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                "Either num_slices or slice_len must be not None, and not both. "
                f"Got num_slices={num_slices} and slice_len={slice_len}."
            )
        for what, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            optional(check_whole, what, value, 1)
        at_most_one(end_key=end_key, end_keys=end_keys)
        check_whole("margin", margin, 0)
        both = tuple(span) if isinstance(span, tuple | list) and len(span) == 2 else (span, span)
        for out in both:
            if not isinstance(out, (bool, np.bool_)):
                check_whole("span, unless it is a bool,", out, 0)
        self.num_slices, self.slice_len = num_slices, slice_len
        self.strict_length, self.margin = bool(strict_length), margin
        self.span = (_plain(both[0]), _plain(both[1]))
        self._truncated = None if truncated_key is None else _path(truncated_key)
        self._init = None if init_key is None else _path(init_key)
        ends = [end_key] if end_key is not None else end_keys
        self._keys = (
            None if traj_key is None else ".".join(_path(traj_key)),
            None if ends is None else [".".join(_path(key)) for key in ends],
        )
        self._trajectories = Trajectories(*self._keys)

    def afresh(self) -> Slices:
        """The same arguments without what was found in a storage."""
        twin = object.__new__(Slices)
        twin.__dict__ = self.__dict__ | {"_trajectories": Trajectories(*self._keys)}
        return twin

    def count(self, batch_size: int) -> int:
        """Slices of a batch."""
        of, what = (self.num_slices, "number of slices") if self.slice_len is None else (self.slice_len, "slice length")
        assert of is not None
        if batch_size % of:
            raise RuntimeError(f"The batch-size must be divisible by the {what}, got batch_size={batch_size} and {of}.")
        return of if self.slice_len is None else batch_size // of

    def check(self, storage: Any) -> None:
        """Raises where a storage is none, or empty."""
        check_type("this sampler draws from a SharedStorage", storage, SharedStorage)
        if storage.ndim > 1:
            raise ArgumentError(
                f"this sampler draws slices of a storage of one axis, found ndim={storage.ndim}: take torchrl's own"
            )
        if len(storage) == 0:
            raise RuntimeError("Cannot sample from an empty storage.")

    def begin(self, storage: Any, batch_size: int) -> tuple[Held, int, int]:
        """The items there are, the length of a slice, and how many slices there are to be."""
        self.check(storage)
        n = self.count(batch_size)
        length = batch_size // n
        if any(out is not True and out >= length for out in self.span):
            raise ArgumentError(f"span is shorter than a slice, found {self.span} for slices of {length} items")
        window = self._trajectories.look(storage)
        if self.margin and len(storage) == storage.max_size:
            if self.margin >= storage.max_size:
                raise ArgumentError(f"a margin of {self.margin} leaves none of {storage.max_size} items")
            window = self._trajectories.without(window, self.margin)
        return window, length, n

    def spans(self, window: Held, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First items and lengths of trajectories."""
        return self._trajectories.spans(window, which)

    def trajectories_of(self, window: Held, length: int, n: int, rng: Any) -> NDArray[np.int64]:
        """n trajectories, each drawn with the same probability among those that are long enough."""
        count = self._trajectories.count
        which = _drawn(count, n, rng)
        if not self.strict_length:
            return which
        short = np.flatnonzero(self.spans(window, which)[1] < length)
        for _ in range(_ROUNDS):
            if not len(short):
                return which
            which[short] = _drawn(count, len(short), rng)
            short = short[self.spans(window, which[short])[1] < length]
        lengths = self.spans(window, np.arange(count))[1]
        long = np.flatnonzero(lengths >= length)
        if not len(long):
            raise RuntimeError(
                f"Did not find a single trajectory with sufficient length (length range: {lengths.min()} - "
                f"{lengths.max()} / required={length})."
            )
        which[short] = long[_drawn(len(long), len(short), rng)]
        return which

    def ahead(self, window: Held, numbers: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """How long a slice is that begins with an item, 0 where none does."""
        begin, lengths = self.spans(window, self._trajectories.of(numbers))
        rest = begin + lengths - numbers
        out = self.span[1] if self.span[1] is not True else length - 1
        fits = (rest >= length - out) & (numbers >= window.first)
        if not self.strict_length:
            fits |= numbers == begin
        return np.where(fits, np.minimum(rest, length), 0)

    def marked(
        self, storage: SharedStorage, window: Held, begin: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Indices (n,) of the slices' items, and the entries that mark ends and beginnings."""
        ends = np.cumsum(lengths)
        starts = ends - lengths
        index = window.places(np.arange(ends[-1]) + np.repeat(begin - starts, lengths))
        info: dict[Any, torch.Tensor] = {}
        wanted = {}
        if self._truncated is not None:
            wanted = {name: (*self._truncated[:-1], name) for name in ("done", "terminated")}
        if self._init is not None:
            wanted["init"] = self._init
        there = {what: path for what, path in wanted.items() if ".".join(path) in storage.names}
        stored = storage.read(index, [".".join(path) for path in there.values()]) if there else {}
        if self._truncated is not None:
            truncated = torch.zeros(len(index), 1, dtype=torch.bool)
            truncated[torch.from_numpy(ends - 1)] = True
            info[_key(self._truncated)] = truncated
            for what in ("done", "terminated"):
                own = stored.get(".".join(wanted[what]))
                own = torch.zeros_like(truncated) if own is None else own.bool().clone()
                info[_key(wanted[what])] = own | truncated.reshape(-1, *[1] * (own.ndim - 1)) if what == "done" else own
        if "init" in there:
            init = stored[".".join(there["init"])].clone()
            init[torch.from_numpy(starts)] = True
            info[_key(there["init"])] = init
        return torch.from_numpy(index), info

    def __repr__(self) -> str:
        of = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        return f"{of}, strict_length={self.strict_length}"


def _drawn(below: int, n: int, rng: Any) -> NDArray[np.int64]:
    """n numbers from 0 to `below` - 1; of torch's global generator without one."""
    with drawing:
        drawn = torch.randint(below, (n,), generator=rng)
    found: NDArray[np.int64] = drawn.numpy()
    return found


def _path(key: Key) -> tuple[str, ...]:
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key and all(isinstance(part, str) for part in key):
        return key
    raise ArgumentError(f"the key of an entry is a name or a tuple of names, found {key!r}")


def _key(path: tuple[str, ...]) -> Key:
    return path[0] if len(path) == 1 else path


def _plain(out: bool | int) -> bool | int:
    """The bool or int that stands for a number of NumPy's."""
    return bool(out) if isinstance(out, (bool, np.bool_)) else int(out)


__all__ = ["PrioritizedSliceSampler", "SliceSampler"]
