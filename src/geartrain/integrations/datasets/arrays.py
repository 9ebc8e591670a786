"""Importer of NumPy arrays: a dict, an `.npz` file or a folder of `.npy` files.

There are two layouts:

- *Padded*: arrays are (n, t, ...) with one entry for each episode. `lengths` gives the number of real steps of each. An
  array of shape (n,) has one value for each episode.
- *Flat*: arrays are (N, ...) with one entry for each step. `ends` marks where episodes end: positions one past each
  last step, or N booleans that are True on each last step.

Names are kept. Nested dicts are flattened with dots.

A folder of `.npy` files is memory-mapped. The arrays of an `.npz` archive, compressed or not, are read one episode at a
time. `lengths` or `ends` may be one of the files. So may `untimed`: the names of the arrays with one value for each
episode, which are (n, ...) in either layout.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import did_you_mean
from geartrain.errors import ArgumentError, SourceError
from geartrain.integrations.datasets.array_files import ArchivedArray, load_arrays
from geartrain.integrations.datasets.episode import (
    Array,
    Episode,
    FieldChoice,
    FormatSource,
    Metadata,
    choose,
    flatten,
    plain,
)

LOOKS_FOR = "a .npz file, or a folder of .npy files"


def recognise(path: Path) -> bool:
    """Whether the path is an `.npz` file or a folder with `.npy` files in it."""
    if path.is_dir():
        return next(path.glob("*.npy"), None) is not None
    return path.is_file() and path.suffix == ".npz"


class ArraySource(FormatSource):
    """Episodes of a dict of arrays; views, no copies.

    Args:
        arrays: name -> array, possibly nested, or the path of an `.npz` file or a folder of `.npy`.
        lengths: steps of each episode, for padded arrays, or the name of the array with them. By default every episode
            fills the whole second axis.
        ends: ends of the episodes, for flat arrays, or the name of the array with them, such as "terminals".
        untimed: fields without a time axis. Padded layout: name those with more than one axis. Flat layout: name all
            fields with one value for each episode.

    Raises:
        SourceError: arrays that disagree about the number of episodes or steps.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any] | str | Path,
        *,
        fields: FieldChoice = None,
        skip_unsupported: bool = False,
        lengths: Array | str | None = None,
        ends: Array | str | None = None,
        untimed: Collection[str] = (),
    ) -> None:
        if isinstance(untimed, str):
            untimed = (untimed,)
        if not isinstance(untimed, Collection) or not all(isinstance(name, str) for name in untimed):
            raise ArgumentError(f"untimed is names of fields, found {untimed!r}")
        if isinstance(arrays, Mapping):
            self.name = "dict of arrays"
            found = {key: np.asarray(value) for key, value in flatten(arrays).items()}
        else:
            self.name = str(arrays)
            found = load_arrays(Path(arrays))
        # The keys that describe the others come from the files only where they are not given.
        if lengths is None and ends is None:
            lengths, ends = found.pop("lengths", None), found.pop("ends", None)
        self._found = found
        if lengths is not None and ends is not None:
            raise SourceError(f"{self.name}: lengths are for padded arrays, ends for flat ones")
        lengths, ends = self._named("lengths", lengths, found), self._named("ends", ends, found)
        named = found.pop("untimed").tolist() if "untimed" in found and found["untimed"].dtype.kind == "U" else []
        if not found:
            raise SourceError(f"{self.name}: holds no array")
        available = {name: _why_not(array) for name, array in found.items()}
        chosen = choose(self.name, fields, available, list(available), skip_unsupported)
        self._names, self._arrays = chosen, {stored: found[name] for stored, name in chosen.items()}
        unknown = sorted(set(untimed) - self._arrays.keys())
        if unknown:
            raise SourceError(
                f"{self.name}: untimed names no field: {', '.join(unknown)}; there are {', '.join(self._arrays)}"
                f"{did_you_mean(unknown, self._arrays)}"
            )
        self._untimed = frozenset([*untimed, *(stored for stored, name in chosen.items() if name in named)])
        self._starts: Array | None = None
        timed = {name: len(array) for name, array in self._arrays.items() if name not in self._untimed}
        if ends is not None and timed:
            size = self._one_size(timed)
            self._starts, self._lengths = self._flat(np.asarray(ends), size)
            once = {name: len(self._arrays[name]) for name in self._untimed}
            if set(once.values()) - {len(self._lengths)}:
                raise SourceError(f"{self.name}: there are {len(self._lengths)} episodes, and values for {once}")
        else:
            size = self._one_size({name: len(array) for name, array in self._arrays.items()})
            self._untimed |= {name for name, array in self._arrays.items() if array.ndim == 1}
            self._lengths = self._padded(lengths, size)
        self.episodes = len(self._lengths)

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The episodes of these numbers, as views of the arrays or read from the archive."""
        for index in range(len(self._lengths)) if numbers is None else numbers:
            length = int(self._lengths[index])
            if self._starts is not None:
                start = int(self._starts[index])
                name = f"episode {index} (steps {start} to {start + length - 1})"
            else:
                name = f"episode {index}"
            timed, once = {}, {}
            for key, array in self._arrays.items():
                if key in self._untimed:
                    once[key] = np.asarray(array[index])
                elif self._starts is not None:
                    timed[key] = array[start : start + length]
                else:
                    timed[key] = array[index][:length]
            yield Episode(name, timed, once)

    def release(self) -> None:
        """Closes the archive."""
        for array in self._found.values():
            if isinstance(array, ArchivedArray):
                array.close()

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """`length`, and the values of all arrays with one number or text an episode; `return` where asked for."""
        count = len(self._lengths)
        told = {
            name: np.asarray(array)
            for name, array in self._found.items()
            if array.shape == (count,) and array.dtype.kind in "biufUS" and not self._is_timed(name)
        }
        rewards = next((self._found[name] for name in ("reward", "rewards") if self._is_timed(name)), None)
        later = rewards is not None and rewards.ndim == (1 if self._starts is not None else 2)
        for index in range(count):
            known = {name: plain(array[index]) for name, array in told.items()}
            made = {"return": functools.partial(self._return, rewards, index)} if later else {}
            yield Metadata(index, {**known, "length": int(self._lengths[index])}, made)

    def _is_timed(self, name: str) -> bool:
        """Whether an array has values of steps: by its first axes, and for a field by what it is stored as."""
        if name not in self._found or any(name == self._names[stored] for stored in self._untimed):
            return False
        array = self._found[name]
        if self._starts is not None:
            return name in self._names.values() or len(array) != len(self._lengths)
        return array.ndim > 1

    def _return(self, rewards: Any, index: int) -> float:
        length = int(self._lengths[index])
        if self._starts is None:
            return float(rewards[index][:length].sum())
        start = int(self._starts[index])
        return float(rewards[start : start + length].sum())

    def _named(self, what: str, given: Array | str | None, found: Mapping[str, Array]) -> Array | None:
        """The array of a name; it stays a field as well."""
        if isinstance(given, str):
            if given not in found:
                raise SourceError(
                    f"{self.name}: {what} names no array: {given}; there are {', '.join(found)}"
                    f"{did_you_mean(given, found)}"
                )
            return found[given]
        return given

    def _one_size(self, sizes: Mapping[str, int]) -> int:
        if len(set(sizes.values())) != 1:
            raise SourceError(f"{self.name}: the arrays disagree on their first axis: {sizes}")
        return next(iter(sizes.values()))

    def _flat(self, ends: Array, steps: int) -> tuple[Array, Array]:
        ends = ends if ends.dtype == bool else self._whole("ends", ends)
        if ends.dtype == bool:
            if ends.shape != (steps,):
                raise SourceError(f"{self.name}: {steps} steps need as many ends, not {ends.shape}")
            ends = np.flatnonzero(ends) + 1
        if ends.ndim != 1:
            raise SourceError(f"{self.name}: ends are one number an episode, or one flag a step; found {ends.shape}")
        edges = np.concatenate([[0], ends])
        if np.any(np.diff(edges) <= 0) or edges[-1] > steps:
            raise SourceError(f"{self.name}: ends must rise from above 0 to at most {steps}, one past each last step")
        if edges[-1] < steps:  # the last episode was not finished when the data was taken
            edges = np.append(edges, steps)
        return edges[:-1], np.diff(edges)

    def _whole(self, what: str, values: Array) -> Array:
        """Whole numbers of any dtype, as int64."""
        if values.dtype.kind not in "iuf":
            raise SourceError(f"{self.name}: {what} are whole numbers, found {values.dtype}")
        wrong = values[~(np.abs(values.astype(np.float64)) < 2**53) | (values != np.floor(values))].ravel()
        if len(wrong):
            raise SourceError(f"{self.name}: {what} are whole numbers, found {wrong[0]}")
        return values.astype(np.int64)

    def _padded(self, lengths: Array | None, episodes: int) -> Array:
        sizes = {name: array.shape[1] for name, array in self._arrays.items() if name not in self._untimed}
        if len(set(sizes.values())) > 1:
            raise SourceError(
                f"{self.name}: the arrays disagree on their second axis, time: {sizes}. Name those "
                f"without a time axis in untimed=, or give ends= if the first axis is time"
            )
        longest = next(iter(sizes.values()), 1)
        if lengths is None:
            return np.full(episodes, longest, np.int64)
        lengths = self._whole("lengths", np.asarray(lengths))
        if lengths.shape != (episodes,):
            raise SourceError(f"{self.name}: {episodes} episodes need as many lengths, found shape {lengths.shape}")
        wrong = np.flatnonzero((lengths < 0) | (lengths > longest))
        if len(wrong):
            raise SourceError(
                f"{self.name}: episode {wrong[0]}: length {lengths[wrong[0]]}, but the arrays hold 0 to {longest} steps"
            )
        return lengths


def _why_not(array: Array) -> str | None:
    if array.ndim == 0:
        return "a single value, not one per episode"
    return f"dtype {array.dtype}" if array.dtype.kind in "OSUVMm" else None
